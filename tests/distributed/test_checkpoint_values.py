"""What is saved can be read back, and a load that fails leaves everything as it was."""

import argparse
import collections
import copy
import datetime
import io
import pathlib
from unittest import mock

import numpy as np
import pytest
import torch
from checkpointing import Held, bits, make, train
from torch import nn
from torchao.optim.subclass_8bit import OptimState8bit

import hybridtensor as ht
from hybridtensor.distributed import checkpoint
from hybridtensor.untrusted import reader


class Unwilling(Held):
    """Takes over a state by halves, and then raises, until it is told not to."""

    def load_state_dict(self, state):
        self.held = dict(state)
        if state["n"] == 1:
            raise KeyError("something else")


class Registered:
    def __init__(self, value):
        self.value = value


UNREADABLE = {
    "argparse.Namespace": argparse.Namespace(lr=1),
    "collections.defaultdict": collections.defaultdict(int),
    "pathlib.PosixPath": pathlib.Path("a"),
    "datetime.datetime": datetime.datetime(2020, 1, 1),
    "numpy.ndarray of object": np.array([None]),
    "numpy.ndarray of <U1": np.array(["a"]),
    "numpy.datetime64 of datetime64": np.datetime64("2020"),
    "builtins.function": lambda: 3,
}
UNSTORABLE = {
    "sparse": (torch.eye(2).to_sparse(), "; call to_dense, or leave it out"),
    "jagged": (torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "; call to_padded_tensor, or leave"),
    "8 bits": (OptimState8bit.zeros((2, 256)), ", whose bytes lie in other tensors; save it by itself with torch.save"),
    "meta": (torch.empty(2, device="meta"), " is on the meta device and has no memory; call to_empty first"),
}


class TestSaving:
    @pytest.mark.parametrize("kind", UNREADABLE)
    def test_what_cannot_be_read_back_is_refused(self, kind, tmp_path):
        """With its place and type, and before anything is written."""
        value = UNREADABLE[kind]
        model, optimizer = make("fp8")
        optimizer.param_groups[0]["extra"] = [1, value]
        states = {
            r"optimizer\.values\['groups'\]\[0\]\['extra'\]": {"model": model, "optimizer": optimizer},
            r"scheduler\['a'\]": {"model": model, "scheduler": Held({"a": value, "b": 1})},
            r"entry\.a": {"model": model, "entry": {"a": value, "t": torch.ones(1)}},
        }
        if kind == "collections.defaultdict":  # of data beside tensors, items are stored one by one
            del states[r"entry\.a"]
        for where, state in states.items():
            for save in (checkpoint.save, checkpoint.async_save):
                with pytest.raises(ValueError, match=rf"are required, got {kind}.* in {where}.*; convert it, or leave"):
                    save(tmp_path / "run", 1, state)
        assert not list(tmp_path.iterdir())

    def test_keys_too(self, tmp_path):
        with pytest.raises(ValueError, match=r"got pathlib.PosixPath in entry \(the key PosixPath\('a'\)\)"):
            checkpoint.save(tmp_path, 1, {"entry": {pathlib.Path("a"): 1}})

    @pytest.mark.parametrize("kind", UNSTORABLE)
    def test_tensors_without_dense_memory_are_refused(self, kind, tmp_path):
        """With their place, and before anything is written."""
        value, text = UNSTORABLE[kind]
        state = {"model": make("fp8")[0], "entry": {"a": [1, value]}}
        for save in (checkpoint.save, checkpoint.async_save):
            with pytest.raises(ValueError, match=rf"checkpoint: .*entry\.a\.1{text}"):
                save(tmp_path / "run", 1, state)
        assert not list(tmp_path.iterdir())

    def test_numbers_and_arrays_of_numpy_come_back(self, tmp_path):
        model, optimizer = make("fp8")
        optimizer.param_groups[0]["lr"] = np.float64(0.25)
        random = np.random.get_state()
        arrays = [np.arange(6).reshape(2, 3).astype(code) for code in ("<i8", ">f4", "u1", "c16", "f2", "?")]
        held = {"rng": random, "new": np.random.default_rng(3).bit_generator.state, "none": np.zeros((0, 3))}
        state = {
            "model": model, "optimizer": optimizer, "a": arrays, "s": Held(held),
            "f": np.asfortranarray(arrays[0]), "same": [arrays[0], arrays[0]],
        }  # fmt: skip
        checkpoint.save(tmp_path, 1, state)
        other, other_optimizer = make("fp8", seed=1)
        fresh = {"model": other, "optimizer": other_optimizer, "a": 0, "s": Held({}), "f": 0, "same": 0}
        checkpoint.load(tmp_path, fresh)
        lr = other_optimizer.param_groups[0]["lr"]
        assert (type(lr), lr) == (np.float64, 0.25)
        for mine, theirs in zip((*fresh["a"], fresh["f"]), (*arrays, state["f"]), strict=True):
            assert (mine.dtype, mine.flags.f_contiguous) == (theirs.dtype, theirs.flags.f_contiguous)
            np.testing.assert_array_equal(mine, theirs)
        assert fresh["s"].held["new"] == held["new"]
        assert fresh["s"].held["none"].shape == (0, 3)
        before = np.random.rand(3)
        np.random.set_state(fresh["s"].held["rng"])
        np.testing.assert_array_equal(np.random.rand(3), before)

    def test_arrays_in_objects_are_refused(self, tmp_path):
        """Of a class that is registered as safe: nothing looks for arrays there."""
        with torch.serialization.safe_globals([Registered]):
            checkpoint.save(tmp_path, 1, {"entry": Registered(3)})
            with pytest.raises(ValueError, match=r"got .*Registered in entry.*in lists, tuples and dictionaries"):
                checkpoint.save(tmp_path, 2, {"entry": Registered(np.ones(3))})

    def test_what_is_checked_is_what_is_written(self, tmp_path):
        """Values are pickled once: one that changes in between cannot slip through."""
        with mock.patch.object(torch, "save", wraps=torch.save) as save:
            checkpoint.save(tmp_path, 1, {"n": {"a": 3}})
        assert [call.args[0] for call in save.call_args_list] == [{"a": 3}]

    @pytest.mark.parametrize("kind", [int, lambda count: {"count": count}], ids=["number", "dictionary"])
    def test_extra_state_of_modules_comes_back(self, kind, tmp_path):
        source, target = Counting(kind(5)), Counting(kind(7))
        checkpoint.save(tmp_path, 1, {"model": source})
        held, state = target.count, {"model": target, "last": Unwilling({"n": 1})}
        with pytest.raises(ValueError, match="has no entry 'last'"):
            checkpoint.load(tmp_path, state)
        fill = mock.patch.object(checkpoint.restoration.Restoration, "fill", raising)
        with fill, pytest.raises(RuntimeError, match="Input/output error"):
            checkpoint.load(tmp_path, {"model": target})
        assert target.count == held == kind(7)
        checkpoint.load(tmp_path, {"model": target})
        assert target.count == kind(5)


class Counting(nn.Linear):
    """A module with a state that is no tensor."""

    def __init__(self, count):
        super().__init__(2, 2)
        self.count = count

    def get_extra_state(self):
        return self.count

    def set_extra_state(self, state):
        self.count = state


def everything(spec, persistent, seed):
    """Return a state with something of every kind in it."""
    model, optimizer = make(spec, persistent, seed=seed)
    train(model, optimizer, seed, seed + 2)
    data = {"t": torch.full((3,), float(seed)), "n": seed, "inner": {"m": seed}}
    held = {"n": seed, "t": torch.full((2,), float(seed))}
    return {
        "model": model,
        "optimizer": optimizer,
        "data": data,
        "held": Held(held),
        "last": Unwilling({"n": 1 - seed}),
    }


def seen(state):
    """Return all that a state holds, by value."""
    inner = getattr(state["optimizer"], "inner", state["optimizer"])
    found = [bits(state["model"], state["optimizer"]), inner.param_groups, state["optimizer"].param_groups]
    found += [state["data"], state["held"].held, state["last"].held]
    stream = io.BytesIO()
    torch.save([[{k: v for k, v in g.items() if k != "params"} for g in f] if f is found[1] or f is found[2] else f
                for f in found], stream)  # fmt: skip
    return stream.getvalue()


def raising(*args, **kwargs):
    raise OSError(5, "Input/output error")


KINDS = [("fp8_delayed", False, True), ("nvfp4", True, True), ("nvfp4", True, False), ("fp8", False, True)]


class TestFailedLoad:
    """Whatever fails, and when: nothing is changed, and training goes on as if nothing had been loaded."""

    def check(self, path, state, kind, **options):
        alike, inside = copy.deepcopy(state), state["data"]["t"]
        before = seen(state)
        with pytest.raises(kind):
            checkpoint.load(path, state, **options)
        assert seen(state) == before
        assert state["data"]["t"] is inside
        losses = [train(s["model"], s["optimizer"], 5, 7) for s in (state, alike)]
        assert losses[0] == losses[1]
        assert bits(state["model"], state["optimizer"]) == bits(alike["model"], alike["optimizer"])

    @pytest.mark.parametrize(("spec", "persistent", "faces"), KINDS)
    @pytest.mark.parametrize("what", ["stateful", "optimizer", "module", "reading", "writing", "last step"])
    def test_changes_nothing(self, what, spec, persistent, faces, tmp_path):
        checkpoint.save(tmp_path, 1, everything(spec, persistent, 0), faces=faces)
        state = everything(spec, persistent, 1)
        inner = getattr(state["optimizer"], "inner", state["optimizer"])
        if what != "stateful":
            state["last"].load_state_dict = lambda value: setattr(state["last"], "held", dict(value))
        targets = {
            "optimizer": (inner, "load_state_dict"),
            "module": (state["model"], "load_state_dict"),
            "reading": (reader.SafeReader, "_read"),
            "writing": (checkpoint.planners.HybridLoadPlanner, "commit_tensor"),
            "last step": (checkpoint.restoration.Restoration, "fill"),
        }
        if what == "stateful":
            self.check(tmp_path, state, RuntimeError)
            return
        holder, name = targets[what]
        real, calls = getattr(holder, name), []

        def some(*args, **kwargs):
            calls.append(args)
            return real(*args, **kwargs) if len(calls) < 4 and what in ("reading", "writing") else raising()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(holder, name, some)
            before = seen(state)
            with pytest.raises(RuntimeError, match="Input/output error"):
                checkpoint.load(tmp_path, state)
        assert calls
        assert seen(state) == before

    def test_keeps_the_amaxes_of_the_step(self, tmp_path):
        checkpoint.save(tmp_path, 1, everything("fp8_delayed", False, 0))
        state = everything("fp8_delayed", False, 1)
        record = state["model"][0].quantization_state.record
        record.commit(torch.full_like(record.total, 3.0))
        with pytest.raises(RuntimeError):
            checkpoint.load(tmp_path, state)
        assert record.amax.tolist() == [3.0] * len(record.total)

    def test_of_another_recipe_changes_nothing(self, tmp_path):
        checkpoint.save(tmp_path, 1, everything("fp8_delayed", False, 0))
        for spec, persistent in (("mxfp8", False), ("nvfp4", True), ("fp8_delayed", True)):
            self.check(tmp_path, everything(spec, persistent, 1), RuntimeError, any_recipe=True)

    def test_with_what_an_earlier_version_could_not_read(self, tmp_path):
        """Its files are what was written, and there is no other step to load."""
        with mock.patch.object(checkpoint.planners.HybridSavePlanner, "stage_values"):
            state = everything("fp8", False, 0)
            state["data"]["n"] = pathlib.Path("a")
            checkpoint.save(tmp_path, 1, state)
        assert "cannot be read" in checkpoint.verify(tmp_path)[1][0]
        self.check(tmp_path, everything("fp8", False, 1), RuntimeError)

    def test_a_load_after_it_is_that_of_a_fresh_run(self, tmp_path):
        source = everything("nvfp4", True, 0)
        checkpoint.save(tmp_path, 1, source)
        state = everything("nvfp4", True, 1)
        with pytest.raises(RuntimeError, match="something else"):
            checkpoint.load(tmp_path, state)
        state["last"] = Held({})
        checkpoint.load(tmp_path, state)
        assert bits(state["model"], state["optimizer"]) == bits(source["model"], source["optimizer"])
        assert train(state["model"], state["optimizer"], 3, 5) == train(source["model"], source["optimizer"], 3, 5)

    def test_into_a_tensor_that_cannot_be_written(self, tmp_path):
        """Not even to put back what was there."""
        source, target = nn.Linear(2, 2), nn.Linear(2, 2)
        checkpoint.save(tmp_path, 1, {"a": source, "d": {"t": torch.ones(3)}})
        before = bits(target)
        with pytest.raises(RuntimeError, match=r"checkpoint.load: d\.t cannot be written: "):
            checkpoint.load(tmp_path, {"a": target, "d": {"t": torch.zeros(1).expand(3)}})
        assert bits(target) == before

    def test_containers_of_data_are_filled_in_place(self, tmp_path):
        inner, tensors = {"n": 1}, [torch.ones(1)]
        checkpoint.save(
            tmp_path,
            1,
            {"d": {"inner": inner, "tensors": (tensors[0], torch.ones(2)), "more": [1, 2], "t": tensors[0]}},
        )
        inner["n"] = 2
        mine = {"inner": inner, "tensors": (torch.zeros(1), torch.zeros(2)), "more": [7], "t": torch.zeros(1)}
        state = {"d": mine}
        checkpoint.load(tmp_path, state)
        assert state["d"] is mine
        assert mine["inner"] is inner
        assert (inner["n"], mine["more"], type(mine["tensors"])) == (1, [1, 2], tuple)
        assert torch.equal(mine["tensors"][1], torch.ones(2))


@pytest.mark.parametrize("persistent", [False, True], ids=["masters", "persistent"])
def test_a_master_is_not_that_of_an_entry_with_the_name_of_a_child(persistent, tmp_path):
    """The child `model` of `ema`, of which only faces are stored, and the entry `model`, of which a master is."""
    model, ema = nn.Linear(32, 32, bias=False), nn.ModuleDict({"model": nn.Linear(32, 32, bias=False)})
    for module in (model, ema):
        ht.quantize_(module, "fp8", persistent=True)
    optimizer = ht.optim.MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1)
    checkpoint.save(tmp_path, 1, {"model": model, "ema": ema, "optimizer": optimizer}, faces=False)
    model, ema = nn.Linear(32, 32, bias=False), nn.ModuleDict({"model": nn.Linear(32, 32, bias=False)})
    for module in (model, ema):
        ht.quantize_(module, "fp8_rowwise", persistent=persistent)
    state = {"model": model, "ema": ema}
    with pytest.raises(ValueError, match=r"ema\.model\.weight is not in it"):
        checkpoint.load(tmp_path, state, any_recipe=True)
    checkpoint.load(tmp_path, {"model": model}, any_recipe=True)
    values = model.weight.dequantize()
    assert torch.allclose(values, optimizer.masters()[next(iter(optimizer.masters()))], atol=0.02)
