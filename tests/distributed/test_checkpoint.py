"""A folder of checkpoints: what is loaded is what was written, whatever happened to the run and the disk."""

import copy
import threading
import warnings
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from any_layer import ANY_LAYER
from checkpointing import Held, bits, flip, folder, load, make, saved, train, trained
from torch import nn

import hybridtensor as ht
from hybridtensor.distributed import checkpoint

CASES = [
    (recipe, persistent, faces)
    for recipe in ANY_LAYER
    for persistent, faces in ((False, True), (True, True), (True, False))
]
CASES += [("nvfp4+four_over_six", True, True), ("nvfp4+one_d+four_over_six", True, False)]
CASES += [("mxfp4", True, True), ("mxfp4+mx_two_d", True, True), ("mxfp4", False, True)]


def assert_equal_nested(a, b):
    assert type(a) is type(b)
    if isinstance(b, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(b, (dict, list)):
        assert (a.keys() if isinstance(b, dict) else len(a)) == (b.keys() if isinstance(b, dict) else len(b))
        for key in b if isinstance(b, dict) else range(len(b)):
            assert_equal_nested(a[key], b[key])
    else:
        assert a == b


class TestRoundTrip:
    @pytest.mark.parametrize(("recipe", "persistent", "faces"), CASES)
    def test_of_every_recipe_is_bitwise(self, recipe, persistent, faces, tmp_path):
        expected = saved(tmp_path, 1, spec=recipe, persistent=persistent, faces=faces)
        assert load(tmp_path, recipe, persistent) == (1, expected[1])

    def test_masters_only_stores_no_face_that_follows(self, tmp_path):
        for spec, stored in (("fp8", False), ("fp8_delayed", True)):
            saved(tmp_path / spec, 1, spec=spec, persistent=True, faces=False)
            metadata = checkpoint.SafeReader(folder(tmp_path / spec, 1)).read_metadata()
            assert any("rowwise" in name for name in metadata.state_dict_metadata) is stored

    def test_a_model_loaded_alone_is_what_training_goes_on_from(self, tmp_path):
        """Also right after a step with its optimizer was loaded."""
        model, optimizer = make("fp8", persistent=True)
        checkpoint.save(tmp_path, 0, {"model": model, "optimizer": optimizer})
        checkpoint.save(tmp_path, 1, {"model": make("fp8", persistent=True, seed=1)[0]})
        checkpoint.load(tmp_path, {"model": model, "optimizer": optimizer}, step=0)
        checkpoint.load(tmp_path, {"model": model}, step=1)
        for weight, master in optimizer.masters().items():
            assert torch.equal(master, weight.dequantize())

    @pytest.mark.parametrize("spec", ["fp8_rowwise", "nvfp4"])
    def test_masters_only_stores_faces_that_do_not_follow(self, spec, tmp_path):
        """Those of a frozen weight, whose master is what they hold; loading them changes no bit."""
        model = nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(2))
        model[0].requires_grad_(False)
        runs = []
        for _ in range(3):
            runs.append(ht.quantize_(copy.deepcopy(model), spec, persistent=True))
            runs[-1][1].weight.grad = torch.ones(128, 128)
            model.requires_grad_(True)  # one that follows when it is loaded into
        optimizers = [ht.optim.MasterWeights(torch.optim.SGD, run.parameters(), lr=0.1) for run in runs]
        optimizers[0].step()
        states = [{"model": run, "optimizer": optimizer} for run, optimizer in zip(runs, optimizers, strict=True)]
        for step in (1, 2):
            checkpoint.save(tmp_path, step, states[step - 1], faces=False)
            stored = checkpoint.SafeReader(folder(tmp_path, step)).read_metadata().state_dict_metadata
            assert {name.split(".")[1] for name in stored if "rowwise" in name} == {"0"}
            assert checkpoint.load(tmp_path, states[step]) == step
            for a, b in zip(runs[0].parameters(), runs[step].parameters(), strict=True):
                assert torch.equal(a, b)
                assert torch.equal(optimizers[0].masters()[a], optimizers[step].masters()[b])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_masters_only_load_into_a_model_without_its_optimizer(self, dtype, tmp_path):
        """As for an evaluation. The faces follow from the fp32 masters, whatever dtype the weights have."""
        models = [ht.quantize_(nn.Linear(64, 64, dtype=dtype), "mxfp8", persistent=True) for _ in range(2)]
        optimizer = ht.optim.MasterWeights(torch.optim.SGD, models[0].parameters(), lr=1e-3)
        models[0](torch.randn(32, 64, dtype=dtype)).sum().backward()
        optimizer.step()
        checkpoint.save(tmp_path, 1, {"model": models[0], "optimizer": optimizer}, faces=False)
        checkpoint.load(tmp_path, {"model": models[1]})
        assert torch.equal(models[1].weight, models[0].weight)
        resumed = ht.optim.MasterWeights(torch.optim.SGD, models[1].parameters(), lr=1e-3)
        assert torch.equal(resumed.masters()[models[1].weight], optimizer.masters()[models[0].weight])

    def test_of_everything_that_a_run_has(self, tmp_path):
        model, optimizer = trained()
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 80])
        train(model, optimizer, 2, 3)
        scheduler.step()
        state = {
            "model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": torch.get_rng_state(),
            "seen": 7, "names": ["a", "b"], "counts": {3: (1, 2)}, "nested": {"t": [torch.ones(2)], "n": 1.5},
        }  # fmt: skip
        checkpoint.save(tmp_path, 1, state)
        other, other_optimizer = make("fp8", seed=1)
        again = torch.optim.lr_scheduler.MultiStepLR(other_optimizer, [1, 80])
        fresh = {
            "model": other, "optimizer": other_optimizer, "scheduler": again, "rng": torch.zeros_like(state["rng"]),
            "seen": 0, "names": None, "counts": None, "nested": {"t": [torch.zeros(2)], "n": 0.0},
        }  # fmt: skip
        inside = fresh["nested"]["t"][0]
        checkpoint.load(tmp_path, fresh)
        assert bits(other, other_optimizer) == bits(model, optimizer)
        assert again.state_dict() == scheduler.state_dict()
        assert other_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == pytest.approx(0.001)
        assert fresh["names"] == ["a", "b"]
        assert (fresh["seen"], fresh["counts"], fresh["nested"]["n"]) == (7, {3: (1, 2)}, 1.5)
        assert torch.equal(inside, torch.ones(2))
        assert torch.equal(fresh["rng"], state["rng"])

    @pytest.mark.parametrize("stateful", [False, True], ids=["data", "stateful"])
    @pytest.mark.parametrize(
        ("later", "fresh"),
        [
            ({"total": torch.ones(1), "seen": {"file": 7}}, {"total": torch.zeros(1), "seen": {}}),
            ({"x": torch.ones(2), "new": 5, "more": [1, {"t": torch.ones(3)}]}, {"x": torch.zeros(2)}),
            ({"parts": [torch.ones(2), torch.full((3,), 2.0)]}, {"parts": [torch.zeros(2)]}),
            ({"x": torch.ones(1), "steps": [3, 5]}, {"x": torch.zeros(1), "steps": [1]}),
            ({"x": torch.ones(1), "best": {"loss": 1.5}}, {"x": torch.zeros(1), "best": None}),
            ({"average": {"w": torch.ones(2)}, "n": 1}, {"average": {}, "n": 0}),
            ({"only": 1, "numbers": {"a": 2}}, {"only": 0, "numbers": {}}),
        ],
        ids=["dict", "keys", "tensors", "list", "none", "first tensor", "no tensor"],
    )
    def test_of_what_came_later(self, later, fresh, stateful, tmp_path):
        """Entries grow: what was stored comes back whole, whatever there was before."""
        model, _ = make("fp8")
        wrap = Held if stateful else lambda held: held
        checkpoint.save(tmp_path, 1, {"model": model, "entry": wrap(copy.deepcopy(later))})
        state = {"model": model, "entry": wrap(copy.deepcopy(fresh))}
        checkpoint.load(tmp_path, state)
        assert_equal_nested(state["entry"].held if stateful else state["entry"], later)

    def test_what_is_not_stored_is_an_error(self, tmp_path):
        model, _ = make("fp8")
        checkpoint.save(tmp_path, 1, {"model": model, "entry": {"x": torch.ones(1)}})
        with pytest.raises(ValueError, match=r"entry\.y is not in it"):
            checkpoint.load(tmp_path, {"model": model, "entry": {"x": torch.ones(1), "y": 1}})

    def test_some_entries_can_be_left_out(self, tmp_path):
        expected, _ = trained()
        saved(tmp_path, 2)
        model, _ = make("fp8", seed=1)
        checkpoint.load(tmp_path, {"model": model})
        assert bits(model) == bits(expected)

    def test_it_is_a_checkpoint_of_torch(self, tmp_path):
        model, _ = trained()
        saved(tmp_path, 2)
        plain, _ = make(None, seed=1)
        state = {"model": plain.state_dict()}
        with warnings.catch_warnings(action="ignore"):
            dcp.load(state, checkpoint_id=folder(tmp_path, 2))
        assert torch.equal(plain[0].weight, model[0].weight.dequantize())

    def test_wrappers_of_the_model_do_not_matter(self, tmp_path):
        model, optimizer = trained()
        checkpoint.save(tmp_path, 1, {"model": torch.compile(model), "optimizer": optimizer})
        assert load(tmp_path) == (1, bits(model, optimizer))

    def test_in_the_background_holds_what_was_when_it_was_called(self, tmp_path, monkeypatch):
        write, changed = checkpoint.store.Writer.write_data, threading.Event()
        monkeypatch.setattr(checkpoint.store.Writer, "write_data", lambda *a: changed.wait(60) and write(*a))
        for persistent in (False, True):
            model, optimizer = trained(persistent=persistent)
            expected = bits(model, optimizer)
            path = tmp_path / str(persistent)
            saving = checkpoint.async_save(path, 2, {"model": model, "optimizer": optimizer})
            train(model, optimizer, 2, 4)
            changed.set()
            assert saving.result() == folder(path, 2)
            assert saving.done()
            assert load(path, persistent=persistent) == (2, expected)
            changed.clear()

    def test_a_failure_in_the_background_is_raised_by_the_next_save(self, tmp_path, monkeypatch):
        model, optimizer = trained()
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint.store.Writer, "finish", full_disk)
            checkpoint.async_save(tmp_path, 1, {"model": model})
            with pytest.raises(RuntimeError, match="No space left"):
                checkpoint.save(tmp_path, 2, {"model": model})
        assert checkpoint.verify(tmp_path) == {}
        checkpoint.save(tmp_path, 3, {"model": model, "optimizer": optimizer})
        assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"]


def full_disk(*args):
    raise OSError(28, "No space left on device")


@pytest.mark.usefixtures("default_device")
class TestRecipes:
    def test_another_one_is_an_error(self, tmp_path):
        saved(tmp_path, 1, spec="fp8")
        for spec, persistent, told in (
            ("mxfp8", False, "mxfp8 (master)"), ("fp8", True, "fp8 (persistent)"), (None, False, "not quantized"),
        ):  # fmt: skip
            model, optimizer = make(spec, persistent, seed=1)
            before = bits(model, optimizer)
            with pytest.raises(ValueError, match="other recipes than the model") as raised:
                checkpoint.load(tmp_path, {"model": model, "optimizer": optimizer})
            assert f"model.0.weight: fp8 (master) there, {told} here" in str(raised.value)
            assert "pass any_recipe=True" in str(raised.value)
            assert bits(model, optimizer) == before

    def test_a_layer_that_one_side_lacks_is_not_of_another_recipe(self, tmp_path):
        large, small = (ht.quantize_(nn.Sequential(*[nn.Linear(32, 32) for _ in range(n)]), "fp8") for n in (2, 1))
        for source, target, told in ((small, large, "is not in it"), (large, small, "is not here")):
            checkpoint.save(tmp_path, 1, {"model": source}, overwrite=True)
            with pytest.raises(ValueError, match=rf"does not fit the state: .*model\.1\.weight {told}"):
                checkpoint.load(tmp_path, {"model": target})

    @pytest.mark.parametrize("source", [None, "fp8", "fp8_delayed", ("fp8", True)], ids=str)
    @pytest.mark.parametrize("target", [None, "mxfp8", "fp8_delayed", ("mxfp8", True)], ids=str)
    def test_any_loads_the_values_if_asked_for(self, source, target, tmp_path):
        source, target = (x if isinstance(x, tuple) else (x, False) for x in (source, target))
        model, optimizer = trained(*source)
        checkpoint.save(tmp_path, 1, {"model": model, "optimizer": optimizer})
        values = [p.detach() if type(p) is nn.Parameter else p.dequantize() for p in model.parameters()]
        if source[1]:
            values = [optimizer.masters().get(p, p).detach() for p in model.parameters()]
        other, other_optimizer = trained(*target, steps=3)
        checkpoint.load(tmp_path, {"model": other, "optimizer": other_optimizer}, any_recipe=True)
        expected, _ = make(None, seed=5)
        with torch.no_grad():
            for parameter, value in zip(expected.parameters(), values, strict=True):
                parameter.copy_(value)
        if target[0] is not None:
            ht.quantize_(expected, target[0], persistent=target[1])
        if source != target:  # what quantizers remember starts afresh
            assert bits(other) == bits(expected)
        if target[1]:
            masters = other_optimizer.masters().values()
            assert all(torch.equal(m, v) for m, v in zip(masters, values[::2], strict=True))
        other(torch.ones(32, 32))

    @pytest.mark.parametrize("name", ["rowwise", "columnwise", "masters"])
    def test_a_module_may_be_called_as_a_part_of_a_checkpoint(self, name, tmp_path):
        def named(spec, persistent, seed):
            model, _ = make(None, seed=seed)
            model = nn.Sequential(nn.ModuleDict({name: model}))
            ht.quantize_(model, spec, persistent=persistent)
            kind = ht.optim.MasterWeights if persistent else torch.optim.AdamW
            args = (torch.optim.AdamW,) if persistent else ()
            return model, kind(*args, model.parameters())

        model, optimizer = named("fp8", True, 0)
        checkpoint.save(tmp_path, 1, {"model": model, "optimizer": optimizer})
        other, other_optimizer = named("mxfp8", False, 1)
        checkpoint.load(tmp_path, {"model": other, "optimizer": other_optimizer}, any_recipe=True)
        for parameter, loaded in zip(model.parameters(), other.parameters(), strict=True):
            values = loaded.dequantize() if isinstance(loaded, ht.MasterWeight) else loaded
            assert torch.equal(optimizer.masters().get(parameter, parameter), values)

    @pytest.mark.parametrize("target", [None, "fp8", "fp8_delayed", ("mxfp8", True)], ids=str)
    @pytest.mark.parametrize("source", [None, "fp8", "fp8_delayed", ("fp8", True)], ids=str)
    def test_a_layer_that_the_model_lacks_is_an_error(self, source, target, tmp_path):
        """Whatever its recipe is."""
        states = []
        for recipe, layers in ((source, 3), (target, 2)):
            model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(layers)))
            spec, persistent = recipe if isinstance(recipe, tuple) else (recipe, False)
            if spec is not None:
                ht.quantize_(model, spec, persistent=persistent)
            kind = partial(ht.optim.MasterWeights, torch.optim.AdamW) if persistent else torch.optim.AdamW
            states.append({"model": model, "optimizer": kind(model.parameters())})
        checkpoint.save(tmp_path, 1, states[0])
        with pytest.raises(ValueError, match=r"model\.2\.\S* is not here"):
            checkpoint.load(tmp_path, {"model": states[1]["model"]}, any_recipe=True)

    def test_a_persistent_one_needs_values(self, tmp_path):
        model, _ = make("fp8", True)
        checkpoint.save(tmp_path, 1, {"model": model})
        with pytest.raises(ValueError, match=r"model.0.weight is not in it"):
            checkpoint.load(tmp_path, {"model": make("mxfp8")[0]}, any_recipe=True)


def test_a_weight_without_a_recipe_is_not_saved(tmp_path):
    """As ``load_safetensors`` gives it; a checkpoint says how each weight was made."""
    layer = nn.Linear(64, 64, bias=False)
    layer.weight = nn.Parameter(ht.Float8Quantizer().quantize(layer.weight.detach()), requires_grad=False)
    with pytest.raises(ValueError, match=r"the weight model\.weight has no recipe"):
        checkpoint.save(tmp_path, 1, {"model": layer})
    assert not any(tmp_path.iterdir())


def test_groups_without_parameters_keep_their_own_values(tmp_path):
    model, _ = make("fp8")
    groups = [{"params": [], "lr": 0.1}, {"params": list(model.parameters())}, {"params": [], "lr": 0.3}]
    optimizer = torch.optim.AdamW(groups, lr=0.2)
    checkpoint.save(tmp_path, 1, {"model": model, "optimizer": optimizer})
    for group in optimizer.param_groups:
        group["lr"] = 1.0
    checkpoint.load(tmp_path, {"model": model, "optimizer": optimizer})
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2, 0.3]


def test_names_that_an_optimizer_has_stay_those_of_its_parameters(tmp_path):
    """Also if the groups, and the parameters in them, have another order."""
    model, _ = make("fp8")
    named = list(model.named_parameters())
    checkpoint.save(tmp_path, 1, {"model": model, "optimizer": torch.optim.AdamW([{"params": named}])})
    optimizer = torch.optim.AdamW([{"params": named[::-1]}])
    checkpoint.load(tmp_path, {"model": model, "optimizer": optimizer})
    (group,) = optimizer.param_groups
    assert list(zip(group["param_names"], map(id, group["params"]), strict=True)) == [
        (n, id(p)) for n, p in named[::-1]
    ]


@pytest.mark.parametrize("persistent", [False, True])
def test_optimizers_whose_defaults_torch_adds_to_are_loaded(persistent, tmp_path):
    """When it loads any state; again, too, by one that has loaded before."""

    def new():
        model, _ = make("mxfp8", persistent)
        cls = torch.optim.Adafactor
        wrap = partial(ht.optim.MasterWeights, cls) if persistent else cls
        return {"model": model, "optimizer": wrap(model.parameters(), lr=0.01)}

    first, other = new(), new()
    train(*first.values(), 0, 1)
    checkpoint.save(tmp_path, 1, first)
    train(*first.values(), 1, 2)
    for _ in range(2):
        checkpoint.load(tmp_path, other)
        train(*other.values(), 1, 2)
        assert bits(**other) == bits(**first)


class TestMisfits:
    def check(self, path, state, message, **options):
        with pytest.raises(ValueError, match=message):
            checkpoint.load(path, state, **options)

    def test_are_errors_before_anything_is_written(self, tmp_path):
        saved(tmp_path, 1)
        model, optimizer = make("fp8")
        self.check(tmp_path, {"other": model}, r"has no entry 'other' \(module\)")
        self.check(tmp_path, {"model": optimizer, "m": model}, r"has no entry 'model' \(optimizer\)")
        wide = ht.quantize_(nn.Sequential(nn.Linear(32, 128), nn.SiLU(), nn.Linear(128, 32)), "fp8")
        before = bits(wide)
        self.check(tmp_path, {"model": wide}, r"model.0.weight is \(64, 32\) in it, \(128, 32\) here")
        assert bits(wide) == before
        self.check(tmp_path, {"model": model.bfloat16()}, "model.0.weight is torch.float32 in it, torch.bfloat16 here")
        checkpoint.load(tmp_path, {"model": model}, any_recipe=True)
        narrow, _ = make("fp8")
        narrow[0].bias = None
        self.check(tmp_path, {"model": narrow}, "model.0.bias is not here")
        narrow.append(nn.LayerNorm(32))
        self.check(tmp_path, {"model": narrow}, "model.3.weight is not in it; model.3.bias is not in it; model.0.bias")
        model, _ = make("fp8")
        two = torch.optim.AdamW([{"params": p} for p in model.parameters()])
        self.check(
            tmp_path, {"model": model, "optimizer": two}, r"are in groups of \[1, 1, 1, 1\] here, of \[4\] in it;"
        )
        some = torch.optim.AdamW([model[0].weight])
        told = r"of 'optimizer' are not those of the checkpoint: 0\.bias is not here; 2\.bias is not here; 2\.weight is"
        self.check(tmp_path, {"model": model, "optimizer": some}, told)

    def test_another_class_of_optimizer_changes_nothing(self, tmp_path):
        saved(tmp_path, 1)
        model, _ = make("fp8")
        sgd = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        before = bits(model), copy.deepcopy(sgd.state_dict())
        told = "^checkpoint.load: 'optimizer' is of SGD, got the state of another class, without dampening, momentum;"
        self.check(tmp_path, {"model": model, "optimizer": sgd}, told)
        assert (bits(model), sgd.state_dict()) == before

    def test_of_arguments(self, tmp_path):
        model, optimizer = make("fp8")
        cases = [
            (ValueError, 'names without dots are required, got none; pass {"model": model, ', 1, {}),
            (ValueError, r"names without dots are required, got 'a\.b' \(of a state dict\?\); pass", 1, {"a.b": model}),
            (ValueError, "'0.0', .* '0.4' and 95 more .of a", 1, {f"0.{i}": 0 for i in range(100)}),
            (TypeError, "a dictionary from names to modules.*got Sequential; pass", 1, model),
            (TypeError, "a dictionary from names to modules.*got dict; pass", 1, {1: model}),
            (TypeError, "the number of a step is required, got 1.5", 1.5, {"model": model}),
            (TypeError, "the number of a step is required, got True", True, {"model": model}),
            (ValueError, "0 or more, is required, got -1", -1, {"model": model}),
            (ValueError, "'o' steps parameters of shapes .* that no module of the state has", 1, {"o": optimizer}),
        ]
        for kind, message, step, state in cases:
            with pytest.raises(kind, match=message):
                checkpoint.save(tmp_path, step, state)
        with pytest.raises(TypeError, match="a folder is required, got 3"):
            checkpoint.save(3, 1, {"model": model})
        assert not list(tmp_path.iterdir())

    def test_a_good_step_is_not_replaced_unless_asked_for(self, tmp_path):
        expected = saved(tmp_path, 1, 2)
        model, optimizer = make("fp8", seed=3)
        state = {"model": model, "optimizer": optimizer}
        with pytest.raises(ValueError, match=r"step 1 is there already, .*overwrite=True"):
            checkpoint.save(tmp_path, 1, state)
        with pytest.raises(ValueError, match=r"^checkpoint.async_save: step 1 is there already"):
            checkpoint.async_save(tmp_path, 1, state)
        assert load(tmp_path, step=1)[1] == expected[1]
        checkpoint.save(tmp_path, 1, state, overwrite=True)
        assert load(tmp_path, step=1)[1] == bits(model, optimizer)
        flip(folder(tmp_path, 2) / "__0_0.distcp")
        checkpoint.save(tmp_path, 2, state)
        assert checkpoint.verify(tmp_path) == {2: [], 1: []}
