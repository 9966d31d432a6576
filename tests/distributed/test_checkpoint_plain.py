"""Whatever saves a converted model, plain tensors are what it saves, and plain models load them."""

import contextlib
import copy
import functools
import io
import pickle

import pytest
import tiers
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from any_layer import ANY_LAYER
from checkpointing import bits, make, train
from processes import call_program
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import hybridtensor as ht
from hybridtensor.distributed import checkpoint
from hybridtensor.subclasses.structure import flatten

RECIPES = ANY_LAYER
PAIRS = [("fp8", None), (None, "mxfp8"), ("fp8_rowwise", "fp8")]


@pytest.fixture
def alone(tmp_path):
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def weights(model):
    return {name: p.dequantize() if isinstance(p, ht.MasterWeight) else p for name, p in model.named_parameters()}


def same_weights(a, b):
    return all(torch.equal(v, weights(b)[name]) for name, v in weights(a).items())


@pytest.mark.usefixtures("default_device")
class TestStateDict:
    def test_holds_plain_tensors_in_the_weights_memory(self):
        model, _ = make("fp8")
        state = model.state_dict()
        assert {type(value) for value in state.values()} == {torch.Tensor}
        x = torch.ones(2, 32)
        y = model(x)  # caches faces, which the write must not leave behind
        state["0.weight"].zero_()
        assert not model[0].weight.master.any()
        assert not torch.equal(model(x), y)

    def test_with_keep_vars_holds_the_parameters(self):
        model, _ = make("fp8")
        assert model.state_dict(keep_vars=True)["0.weight"] is model[0].weight

    def test_of_what_is_tied_to_a_layer_too(self):
        model = nn.ModuleDict({"embed": nn.Embedding(32, 32), "out": nn.Linear(32, 32)})
        model["out"].weight = model["embed"].weight
        ht.quantize_(model, "fp8")
        assert {type(value) for value in model.state_dict().values()} == {torch.Tensor}

    @pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
    def test_torch_save_stores_plain_tensors(self, source, target):
        model, _ = make(source)
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        assert b"hybridtensor" not in buffer.getvalue()
        buffer.seek(0)
        other, _ = make(target, seed=1)
        other.load_state_dict(torch.load(buffer, weights_only=True))
        assert same_weights(model, other)


@pytest.mark.usefixtures("default_device")
class TestDistributedCheckpoint:
    @pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
    @pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
    def test_get_and_set_state_dict(self, source, target, full, alone):
        options = StateDictOptions(full_state_dict=full, cpu_offload=full)
        (model, optimizer), (other, other_optimizer) = make(source), make(target, seed=1)
        train(model, optimizer, 0, 2)
        state = get_model_state_dict(model, options=options)
        assert {type(value) for value in state.values()} == {torch.Tensor}
        set_model_state_dict(other, state, options=options)
        state = get_optimizer_state_dict(model, optimizer, options=options)
        assert {type(v) for of in state["state"].values() for v in of.values()} == {torch.Tensor}
        set_optimizer_state_dict(other, other_optimizer, state, options=options)
        assert same_weights(model, other)
        assert all(
            torch.equal(v.cpu(), other_optimizer.state[q][key].cpu())  # steps are counted on either
            for p, q in zip(model.parameters(), other.parameters(), strict=True)
            for key, v in optimizer.state[p].items()
        )

    @pytest.mark.parametrize("how", ["sharded", "full", "flat"])
    @pytest.mark.parametrize("spec", ["fp8", "nvfp4", "fp8_delayed"])
    def test_get_and_set_state_dict_of_persistent_weights(self, spec, how, alone):
        """As of any optimizer; its state has the masters, and asking for it changes no weight."""
        full = how == "full"
        options = StateDictOptions(full_state_dict=full, cpu_offload=full, flatten_optimizer_state_dict=how == "flat")
        runs = [make(spec, persistent=True, seed=seed) for seed in (0, 1)]
        train(*runs[0], 0, 2)
        state = copy.deepcopy(get_optimizer_state_dict(*runs[0], options=options))
        keys = {"master", "follows", "step", "exp_avg", "exp_avg_sq"}
        assert (
            {f"state.0.weight.{key}" for key in keys} < set(state)
            if how == "flat"
            else keys == set(state["state"]["0.weight"])
        )
        runs[1][0].load_state_dict(runs[0][0].state_dict())
        set_optimizer_state_dict(*runs[1], state, options=options)
        assert bits(*runs[1]) == bits(*runs[0])
        assert train(*runs[1], 2, 4) == train(*runs[0], 2, 4)
        assert bits(*runs[1]) == bits(*runs[0])

    def test_get_and_set_state_dict_without_state(self, alone):
        made = [make("fp8", persistent=True, seed=seed) for seed in (0, 1)]  # with optimizers, which have the values
        models = [model for model, _ in made]
        optimizers = [ht.optim.MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1) for model in models]
        state = copy.deepcopy(get_optimizer_state_dict(models[0], optimizers[0]))
        set_optimizer_state_dict(models[1], optimizers[1], state)
        masters = [optimizer.masters().values() for optimizer in optimizers]
        assert all(torch.equal(a, b) for a, b in zip(*masters, strict=True))

    @pytest.mark.parametrize("last", ["model", "optimizer"])
    def test_masters_that_are_loaded_in_place_stay_exact(self, last, alone, tmp_path):
        """What the faces hold, which come at the same time, is less than the masters are."""

        class Ordered(checkpoint.HybridLoadPlanner):
            def create_local_plan(self):
                plan = super().create_local_plan()
                plan.items.sort(key=lambda item: item.dest_index.fqn.startswith(last))
                return plan

        planners = checkpoint.HybridSavePlanner(), Ordered()
        runs = [make("fp8", persistent=True, seed=seed) for seed in (0, 1)]
        train(*runs[0], 0, 2)
        train(*runs[1], 5, 6)
        states = [{"optimizer": optimizer.state_dict(), "model": model.state_dict()} for model, optimizer in runs]
        dcp.save(states[0], checkpoint_id=tmp_path, planner=planners[0])
        dcp.load(states[1], checkpoint_id=tmp_path, planner=planners[1])
        assert not runs[1][0][0].weight.high_precision.follows  # as far as is known
        runs[1][1].load_state_dict(states[1]["optimizer"])
        assert bits(*runs[1]) == bits(*runs[0])
        dcp.load({"model": runs[1][0].state_dict()}, checkpoint_id=tmp_path, planner=checkpoint.HybridLoadPlanner())
        assert bits(*runs[1]) == bits(*runs[0])
        assert train(*runs[1], 2, 4) == train(*runs[0], 2, 4)

    def test_async_save_holds_what_was_when_it_was_called(self, alone, tmp_path):
        model, _ = make("fp8")
        before = {name: value.detach().clone() for name, value in weights(model).items()}
        saving = dcp.async_save({"model": get_model_state_dict(model)}, checkpoint_id=tmp_path)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        saving.result()
        plain, _ = make(None, seed=1)
        state = {"model": plain.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path)
        assert all(torch.equal(plain.get_parameter(name), value) for name, value in before.items())


def persistent(recipe, seed=0):
    torch.manual_seed(seed)
    return ht.quantize_(nn.Linear(128, 256), recipe, persistent=True)


@pytest.mark.usefixtures("default_device")
@pytest.mark.parametrize("recipe", RECIPES)
def test_planners_store_faces_as_plain_tensors_and_load_them_in_place(recipe, alone, tmp_path):
    model, other = persistent(recipe), persistent(recipe, seed=1)
    expected = bits(model)
    assert bits(other) != expected
    saved = {"model": model.state_dict()}
    dcp.save(saved, checkpoint_id=tmp_path / "sync", planner=checkpoint.HybridSavePlanner())
    saving = dcp.async_save(checkpoint.plain(saved), checkpoint_id=tmp_path / "async")
    for tensor in model.state_dict().values():
        tensor.zero_()
    saving.result()
    for name in ("sync", "async"):
        assert b"hybridtensor" not in b"".join(path.read_bytes() for path in (tmp_path / name).iterdir())
        state = {"model": persistent(recipe, seed=2).state_dict()}
        target = other.state_dict()
        state = {"model": target}
        address = [tensor.data_ptr() for tensor in flatten(target["weight"])[0]]
        dcp.load(state, checkpoint_id=tmp_path / name, planner=checkpoint.HybridLoadPlanner())
        assert [tensor.data_ptr() for tensor in flatten(state["model"]["weight"])[0]] == address
        assert bits(other) == expected
        with torch.no_grad():
            other.weight.fill_(1.0)


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_values_follow_the_faces_once_all_of_them_are_loaded(recipe, alone, tmp_path, monkeypatch):
    model, other, made = persistent(recipe), persistent(recipe, seed=1), []
    dcp.save({"w": model.weight.detach()}, checkpoint_id=tmp_path, planner=checkpoint.HybridSavePlanner())
    values = type(other.weight.high_precision)
    real = values.mark_copied
    monkeypatch.setattr(values, "mark_copied", lambda *args, **kwargs: (made.append(args), real(*args, **kwargs))[1])
    dcp.load({"w": other.weight.detach()}, checkpoint_id=tmp_path, planner=checkpoint.HybridLoadPlanner())
    assert len(made) == 1  # not after each of four to seven tensors
    assert torch.equal(other.weight.high_precision.current, model.weight.dequantize())


@pytest.mark.parametrize("save", ["planner", "library"])
def test_saving_warns_of_values_that_no_optimizer_saves(save, alone, tmp_path):
    """A plain optimizer writes values in high precision, of which a checkpoint has only the faces."""

    def saves(model, optimizer, name):
        if save == "library":
            checkpoint.save(tmp_path / name, 0, {"model": model, "optimizer": optimizer})
            return
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.save(state, checkpoint_id=tmp_path / name, planner=checkpoint.HybridSavePlanner())

    for name, make_optimizer in {
        "plain": torch.optim.SGD,
        "master": functools.partial(ht.optim.MasterWeights, torch.optim.SGD),
    }.items():
        model = persistent("fp8")
        optimizer = make_optimizer(model.parameters(), lr=0.1)
        saves(model, optimizer, f"{name}_new")  # the values are still those of the original
        model(torch.ones(32, 128)).sum().backward()
        optimizer.step()
        expected = pytest.warns(UserWarning, match=r"of 1 persistent weights \(model.weight, ...\) only the faces")
        with expected if name == "plain" else contextlib.nullcontext():
            saves(model, optimizer, name)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_saving_warns_of_values_of_copies(way, alone, tmp_path):
    model = persistent("fp8")
    model(torch.ones(32, 128)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.warns(UserWarning, match=r"of 1 persistent weights \(model.weight, ...\) only the faces"):
        checkpoint.save(tmp_path, 0, {"model": way(model)})


@pytest.mark.parametrize("recipe", ["fp8_dequantized_backward", "bf16"])
def test_faces_that_share_bytes_are_stored_once(recipe, alone, tmp_path):
    model = persistent(recipe)
    stored = checkpoint.plain(model.state_dict())["weight"]
    assert list(stored) == ["rowwise"]
    dcp.save({"w": model.weight.detach()}, checkpoint_id=tmp_path, planner=checkpoint.HybridSavePlanner())
    copied = persistent(recipe, seed=1).weight.detach().clone()  # a copy's faces have memory of their own
    dcp.load({"w": copied}, checkpoint_id=tmp_path, planner=checkpoint.HybridLoadPlanner())
    assert torch.equal(copied.columnwise.dequantize(), model.weight.columnwise.dequantize())


def test_planners_refuse_what_has_no_memory(alone, tmp_path):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path)
    planner = checkpoint.HybridLoadPlanner()
    with pytest.raises(ValueError, match="w is on the meta device and has no memory; call to_empty first"):
        planner.set_up_planner({"w": torch.empty(2, device="meta")})
    planner.set_up_planner({"w": torch.empty(2)})
    with pytest.raises(RuntimeError, match="the planner has no metadata; call set_up_planner with it"):
        planner.create_local_plan()


RESUME = """
import sys, torch
from any_layer import ANY_LAYER
from checkpointing import bits, make, train
from processes import call_program
from hybridtensor.distributed import checkpoint
torch.set_num_threads(1)
folder, out, device = sys.argv[1:]
torch.set_default_device(device)
results = {}
for spec, persistent in %s:
    model, optimizer = make(spec, persistent, seed=1)
    name = f"{folder}/{spec.replace('/', '-')}-{persistent}"
    assert checkpoint.load(name, {"model": model, "optimizer": optimizer}) == 25
    losses = train(model, optimizer, 25, 50)
    results[spec, persistent] = losses, bits(model, optimizer)
torch.save(results, out)
"""


@pytest.mark.usefixtures("default_device")
def test_a_new_process_goes_on_bit_for_bit(tmp_path, device):
    """With delayed scales, random rounding and the optimizer's state."""
    cases = tiers.in_turn(("fp8_delayed", "nvfp4", "fp8/mxfp8/bf16", "fp8_delayed/mxfp8/bf16"), (False, True))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = {}
    for spec, persistent in cases:
        model, optimizer = make(spec, persistent)
        losses = train(model, optimizer, 0, 25)
        folder = tmp_path / f"{spec.replace('/', '-')}-{persistent}"
        checkpoint.save(folder, 25, {"model": model, "optimizer": optimizer}, faces=spec != "nvfp4")
        losses = train(model, optimizer, 25, 50)
        expected[spec, persistent] = losses, bits(model, optimizer)
    torch.set_num_threads(threads)
    call_program(RESUME % cases, tmp_path, tmp_path / "out", device)
    assert torch.load(tmp_path / "out", weights_only=True) == expected
