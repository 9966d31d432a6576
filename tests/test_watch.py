"""``watch``: what formats do to operands and products. Oracles: float64 computations from tensors that the test keeps
itself, and a run that is not watched.
"""

import functools
import json
import linecache
import warnings

import pytest
import torch
from face_numbers import KeptFaces, assert_numbers, train_watched
from siblings import Model, inputs
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import hybridtensor as ht
from hybridtensor.optim import MasterWeights
from hybridtensor.subclasses.observing import observers
from hybridtensor.watching import Recording
from hybridtensor.watching.operands import Call

SPECS = ["fp8", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4", "fp8_delayed", "mxfp8/nvfp4/bf16", "fp8+dequantized",
         "mxfp8+save_original_input", "nvfp4+four_over_six",
         "mxfp4"]  # fmt: skip


def model_of(spec):
    torch.manual_seed(0)
    return ht.quantize_(Model(), spec)


train = functools.partial(train_watched, inputs)


# -- the numbers


class Kept(KeptFaces):
    """Observer that keeps the faces of one layer, and hooks that keep its values."""

    def __init__(self, layer):
        super().__init__(layer.weight.layer)
        self.values = {"weight": layer.weight.plain.detach().cpu()}
        layer.register_forward_pre_hook(lambda _, args: self.values.update(input=args[0].detach().cpu()))
        layer.register_full_backward_hook(lambda _, into, out: self.values.update(grad_output=out[0].cpu()))


@pytest.mark.parametrize("spec", SPECS)
def test_numbers_are_those_of_float64(spec, device):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 96, bias=False), nn.Tanh(), nn.Linear(96, 64, bias=False))
    model = ht.quantize_(plain, spec).to(device)
    kept = Kept(model[2])
    observers.append(kept)
    try:
        with ht.watch(model, every=1, rows=128) as watched:
            x = inputs(device=device).clone()
            x[3] *= 1e-4  # some underflow
            model(x).square().mean().backward()
            watched.step()
    finally:
        observers.remove(kept)
    faces = {row.operand: row for row in watched.samples[0].faces if row.layer == "2"}
    products = {row.product: row.statistics for row in watched.samples[0].products if row.layer == "2"}
    assert_numbers(kept.faces, kept.values, faces, products)


def test_underflow_overflow_and_waste_are_counted():
    model = ht.quantize_(nn.Sequential(nn.Linear(64, 64, bias=False)), ht.HybridConfig(
        ht.DelayedFloat8Quantizer(), ht.Float8Quantizer(), ht.IdentityQuantizer()
    ))  # fmt: skip
    x = torch.full((128, 64), 1.0)
    x[:32] = 1e-9  # below half of the smallest element
    x[32:48] = 480.0  # beyond 464, which is half a step above 448
    x[48:64] = 460.0  # rounds to 448
    with ht.watch(model, every=1, rows=128) as watched:
        model(x).sum().backward()
        watched.step()
    found = next(row for row in watched.samples[0].faces if row.operand == "input.rowwise").statistics
    assert (found["underflows%"], found["overflows%"], found["cur_amax"]) == (25.0, 12.5, 480.0)
    assert found["wasted_blocks%"] == 0
    with ht.watch(model, every=1, rows=128) as watched:
        model(x.clamp(max=1.0)).sum().backward()
        watched.step()
    found = next(row for row in watched.samples[0].faces if row.operand == "input.rowwise").statistics
    assert found["wasted_blocks%"] == 100  # a scale 256 times as small would do


# -- the loop


@pytest.mark.parametrize("spec", SPECS)
def test_a_watched_run_is_one_that_is_not(spec, device):
    model, twin = model_of(spec).to(device), model_of(spec).to(device)
    with ht.watch(model, every=2, rows=128) as watched:
        train(model, 4, watched)
    train(twin, 4)
    for mine, other in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(mine, other)
    assert [sample.step for sample in watched.samples] == [0, 2]
    assert not observers
    assert [step for step, _ in watched.recording().losses] == [0, 1, 2, 3]


def test_nothing_runs_between_samples():
    model, seen = model_of("fp8"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with ht.watch(model, every=3) as watched:
        for _ in range(7):
            seen.append(len(observers))
            train(model, 1, optimizer=optimizer)
    assert seen == [1, 0, 0, 1, 0, 0, 1]
    assert [sample.step for sample in watched.samples] == [0, 3, 6]


@pytest.mark.filterwarnings("ignore:torch.compile with fullgraph=True found no compiled:UserWarning")  # torch 2.12
def test_compiled_models_run_eagerly_in_sampled_steps_alone():
    model, twin = model_of("fp8"), model_of("fp8")
    ran = []

    def backend(graph, _):
        return lambda *args: ran.append(1) or graph.forward(*args)

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with ht.watch(compiled, every=2) as watched:
        for step in range(4):
            ran.clear()
            train(model, 1, forward=compiled, first=step, optimizer=optimizer)
            assert bool(ran) == (step % 2 == 1)
    assert [sample.step for sample in watched.samples] == [0, 2]
    train(twin, 4)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), other.detach(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("every", [(2, 2), (1, 2), (2, 1)])
def test_two_watches_leave_compiled_code_compiled(every):
    """Each measures in its own steps; both end in the order in which they began, not the other way round."""
    model, compiled = model_of("fp8"), []

    def backend(graph, _):
        compiled.append(graph)
        return graph.forward

    first, second = (ht.watch(model, every=number) for number in every)
    with first, second:
        train(model, 4)
    assert [len(one.samples) for one in (first, second)] == [4 // number for number in every]
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))
    assert compiled


def keep_all(context, operator, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize(
    "options",
    [
        {"use_reentrant": True},
        {"use_reentrant": False},
        # Which must not see what measures: it would keep sums, and find them changed
        {"use_reentrant": False, "context_fn": lambda: create_selective_checkpoint_contexts(keep_all)},
    ],
    ids=["reentrant", "not reentrant", "selective"],
)
def test_recomputation(options):
    model, plain = model_of("mxfp8"), model_of("mxfp8")

    def checkpointed(x):
        return checkpoint(model, x.requires_grad_(), **options)

    with ht.watch(model, every=1) as watched, ht.watch(plain, every=1) as other:
        train(model, 2, forward=checkpointed)
        train(plain, 2)
    assert len(watched.samples) == len(other.samples) == 2
    mine, wanted = watched.samples[1].scalars(), other.samples[1].scalars()
    # the plain input of the first block asks for no gradient there
    assert {name: mine[name] for name in wanted} == pytest.approx(wanted, nan_ok=True)


def test_dispatch_modes_do_not_see_what_measures():
    model, flops = model_of("mxfp8"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with ht.watch(model, every=2) as watched:
        for _ in range(2):
            with FlopCounterMode(display=False) as counter:
                train(model, 1, optimizer=optimizer)
            flops.append(counter.get_total_flops())
    assert len(watched.samples) == 1
    assert flops[0] == flops[1]


def test_microbatches_and_several_optimizers():
    model = model_of("fp8")
    groups = [list(model.blocks[0].parameters()), list(model.blocks[1].parameters())]
    optimizers = [torch.optim.SGD(group, lr=1e-2) for group in groups]
    with ht.watch(model, every=2) as watched:
        for step in range(4):
            for micro in range(2):
                model(inputs(2 * step + micro)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert watched.steps == step + 1
    assert [sample.step for sample in watched.samples] == [0, 2]


def test_persistent_and_frozen_weights():
    torch.manual_seed(0)
    model = Model()
    model.blocks[1].requires_grad_(False)
    ht.quantize_(model, "mxfp8", persistent=True)
    optimizer = MasterWeights(torch.optim.SGD, [p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with ht.watch(model, every=1) as watched:
        train(model, 2, optimizer=optimizer)
    operands = {(row.layer, row.operand) for row in watched.samples[1].faces}
    assert ("blocks.0.q", "weight.rowwise") in operands
    assert ("blocks.1.q", "weight.rowwise") not in operands  # whose values nobody has
    assert ("blocks.1.q", "input.rowwise") in operands


def test_evaluation_in_a_sampled_step_does_not_count():
    model, plain = model_of("mxfp8"), model_of("mxfp8")
    with ht.watch(model, every=1) as watched:
        with torch.no_grad():
            model(inputs(9) * 100)
        train(model, 1)
    with ht.watch(plain, every=1) as other:
        train(plain, 1)
    assert watched.scalars() == pytest.approx(other.scalars(), nan_ok=True)


def test_a_forward_with_gradients_counts_without_a_backward():
    """Whether one follows is known only later."""
    model, x = model_of("mxfp8"), inputs(9) * 100
    with ht.watch(model, every=1) as watched:
        model(x)
        train(model, 1)
    first = watched.scalars()["blocks.0.q/input.rowwise/cur_amax"]
    assert first == x.abs().max()


def test_evaluation_after_a_backward_does_not_count():
    """The first layer has no gradient: what came before its product is another layer's backward."""

    def sampled(evaluates):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
        ht.quantize_(model, "mxfp8")[0].requires_grad_(False)
        with ht.watch(model, every=1) as watched:
            model(inputs()).square().mean().backward()
            if evaluates:
                with torch.no_grad():
                    model(inputs(9) * 100)
            watched.step()
        return watched.scalars()

    assert sampled(True) == pytest.approx(sampled(False), nan_ok=True)


def test_a_loop_that_raises_leaves_nothing_behind():
    def fails():
        train(model, 1)
        raise ZeroDivisionError

    model = model_of("fp8")
    model.blocks[1].k.weight.data[3, 5] = float("nan")
    with pytest.raises(ZeroDivisionError), ht.watch(model, every=1, alarm="raise") as watched:
        fails()
    assert not observers
    (sample,) = watched.samples  # its alarm would hide the error
    assert any(row.statistics["nonfinite"] for row in sample.faces)
    model(inputs()).sum().backward()


@pytest.mark.parametrize("tokens", [33, 40])
def test_tokens_that_are_no_whole_blocks(tokens):
    model = ht.quantize_(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "nvfp4")
    with ht.watch(model, every=1) as watched:
        model(torch.randn(tokens, 64)).square().sum().backward()
        watched.step()
    cosines = [row.statistics["cosine"] for row in watched.samples[0].products]
    assert len(cosines) == 5
    assert min(cosines) > 0.95


def test_recipes_that_change_while_watched():
    model = model_of("mxfp8")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with ht.watch(model, every=1) as watched:
        train(model, 1, optimizer=optimizer)
        ht.set_config_(model, "fp8")
        train(model, 1, optimizer=optimizer)
    formats = [{row.format for row in sample.faces} for sample in watched.samples]
    assert formats == [{"mxfp8_e4m3"}, {"fp8_e4m3_tensor", "fp8_e5m2_tensor"}]


def test_losses_of_long_runs_are_packed():
    watched = ht.watch(model_of("fp8"))
    for step in range(2500):
        watched.note(float(step), step=step)
    assert len(watched._losses) < 1024
    assert watched.recording().losses == tuple((step, float(step)) for step in range(2500))


# -- where it goes


def test_sinks(tmp_path):
    class Writer:
        def __init__(self):
            self.seen = {}

        def add_scalar(self, name, value, step):
            self.seen[name, step] = value

    class Logger:
        def log_metrics(self, metrics, step):
            self.seen = metrics, step

    class Run:
        def log(self, metrics):
            self.seen = metrics

    model, writer, logger, run, given = model_of("nvfp4"), Writer(), Logger(), Run(), []
    with ht.watch(model, every=2, sinks=[tmp_path / "log.jsonl", writer, logger, run, given.append]) as watched:
        train(model, 4, watched)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2]
    assert given == list(watched.samples)
    assert logger.seen == (watched.scalars(), 2)
    assert run.seen == watched.scalars() | {"hybridtensor/step": 2}
    assert {name: value for (name, step), value in writer.seen.items() if step == 2} == watched.scalars()
    assert "blocks.0.q/grad_weight/cosine" in watched.scalars()


def test_the_folder_of_a_sink_is_made(tmp_path):
    path = tmp_path / "logs" / "today" / "log.jsonl"
    with ht.watch(model_of("fp8"), every=2, sinks=[path]) as watched:
        train(watched.model, 4, watched)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 2]


def test_a_sink_where_no_file_can_be_is_an_error_before_the_run(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "log.jsonl"):
        with pytest.raises(ValueError, match=rf"^watch: the path of a file is required, got {path}, "):
            ht.watch(model_of("fp8"), sinks=[path])


def test_recordings_are_read_again(tmp_path, capsys):
    model = model_of("mxfp8/nvfp4/bf16")
    with ht.watch(model, every=2) as watched:
        train(model, 3, watched)
    recording = watched.recording()
    assert Recording.load(recording.save(tmp_path / "run.json")) == recording
    assert recording.recipes["blocks.0.q"] == "mxfp8/nvfp4/bf16"
    watched.show()
    printed = capsys.readouterr().out
    assert "noisiest of" in printed
    assert "…" not in printed, "a name or a number is cut"
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"what Recording\.save wrote is required"):
        Recording.load(tmp_path / "other.json")


# -- alarms


@pytest.mark.parametrize(("value", "what"), [(float("nan"), "is not finite"), (float("inf"), "is not finite")])
def test_alarms_name_the_first_face(value, what):
    model, told = model_of("fp8"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with ht.watch(model, every=2, alarm=told.append):
        train(model, 2, optimizer=optimizer)
        model.blocks[1].k.weight.data[3, 5] = value
        train(model, 2, optimizer=optimizer)
    assert told == [f"watch: blocks.1.k: the face weight.rowwise (fp8_e4m3_tensor) {what}, in step 2"]


def test_alarms_warn_and_raise():
    model = model_of("fp8_delayed")  # whose scale is 1 in the first step
    with torch.no_grad():
        model.blocks[0].v.weight.mul_(1e5)
    match = r"blocks\.0\.v: the face weight\.rowwise .* is saturated: .* % of it overflow, in step 0"
    with pytest.warns(RuntimeWarning, match=match), ht.watch(model, every=1, alarm="warn", saturated=50):
        train(model, 1)
    model = model_of("fp8")
    model.blocks[1].k.weight.data[3, 5] = float("nan")
    with pytest.raises(RuntimeError, match="is not finite"), ht.watch(model, every=5, alarm="raise"):
        train(model, 2)
    assert not observers
    model, raised = model_of("fp8"), []
    with ht.watch(model, every=1, alarm="raise") as watched:
        for step in range(5):
            with torch.no_grad():
                model.blocks[1].k.weight[3, 5] = float("nan") if step == 1 else 1.0
            model(inputs()).sum().backward()
            try:
                watched.step()
            except RuntimeError as error:
                raised.append(str(error))
    assert len(raised) == 1
    assert raised[0].endswith("in step 1")
    assert [sample.step for sample in watched.samples] == [0, 1, 2, 3, 4]
    assert [bool([r for r in s.faces if r.statistics["nonfinite"]]) for s in watched.samples] == [0, 1, 0, 0, 0]
    with warnings.catch_warnings(), ht.watch(model_of("fp8"), every=1, alarm="warn") as watched:
        warnings.simplefilter("error")
        train(watched.model, 2)


def test_alarms_point_to_the_loop():
    model = model_of("fp8")
    model.blocks[1].k.weight.data[3, 5] = float("nan")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ht.watch(model, every=1, alarm="warn") as watched:
            for end in (optimizer.step, watched.step):
                model(inputs()).sum().backward()
                end()
    assert [(one.filename, linecache.getline(one.filename, one.lineno).strip()) for one in caught] == [
        (__file__, "end()"), (__file__, 'with ht.watch(model, every=1, alarm="warn") as watched:')
    ]  # fmt: skip


# -- wrong use


@pytest.mark.parametrize(
    ("error", "options", "match"),
    [
        (ValueError, {"every": 0}, "every"),
        (TypeError, {"every": 1.5}, "every"),
        (ValueError, {"rows": 64}, "rows"),
        (TypeError, {"alarm": 3}, "alarm"),
        (ValueError, {"alarm": "ring"}, "alarm"),
        (TypeError, {"sinks": 3}, "a list of sinks"),
        (TypeError, {"sinks": [3]}, "a path, a writer, a logger or a function"),
        (TypeError, {"saturated": "x"}, "saturated"),
    ],
)
def test_wrong_arguments(error, options, match):
    with pytest.raises(error, match=match):
        ht.watch(model_of("fp8"), **options)


def test_models_on_several_devices():
    model = model_of("fp8")
    model.blocks[1].to("meta")
    with pytest.raises(NotImplementedError, match="the model is on several devices"), ht.watch(model):
        pass


def test_wrong_models():
    with pytest.raises(TypeError, match="a module is required"):
        ht.watch(3)
    with pytest.raises(ValueError, match="the model has no quantized weights"), ht.watch(nn.Linear(4, 4)):
        pass
    with (
        ht.watch(model_of("fp8")) as watched,
        pytest.raises(
            ValueError, match=r"^watch\.note: a loss of one number is required, got shape \(3,\); pass its mean"
        ),
    ):
        watched.note(torch.ones(3))
    with pytest.raises(
        TypeError, match=r"^watch\.note: a real number as loss is required, got .*complex64; pass its real"
    ):
        watched.note(torch.tensor(1 + 2j))
    with watched, pytest.raises(RuntimeError, match="watch: this watch is entered already"), watched:
        pass
    with pytest.raises(RuntimeError, match=r"^watch\.step: this watch is not entered"):
        watched.step()
    with watched:
        pass
    with pytest.raises(TypeError, match="a number or a tensor as loss is required, got 'x'"):
        watched.note("x")


@pytest.mark.parametrize("extent", [64, 128, 129, 192, 256, 384, 1000, 1024, 1152, 1920, 2048, 9216])
@pytest.mark.parametrize("most", [128, 256])
def test_stretches_reach_every_place(extent, most):
    """Also where the places are a multiple of the distance between two samples': 256 of 1024 began at 0, always."""
    places = max(0, extent - most) // 128 + 1
    firsts = [Call(None, turn).stretch(extent, most)[0] for turn in range(places)]
    assert sorted(firsts) == [128 * i for i in range(places)]
    assert all(first + most <= extent for first in firsts) or extent <= most


def test_a_loss_is_what_it_was_when_it_was_noted():
    """Loops add up losses in place, and replays of CUDA graphs write each into the memory of the last."""
    total = torch.zeros(())
    with ht.watch(ht.quantize_(nn.Sequential(nn.Linear(32, 32)), "fp8")) as watched:
        for step in range(3):
            total.fill_(step)
            watched.note(total, step=step)
    assert watched.recording().losses == ((0, 0.0), (1, 1.0), (2, 2.0))


def test_losses_of_several_devices_are_recorded():
    with ht.watch(ht.quantize_(nn.Sequential(nn.Linear(32, 32)), "fp8")) as watched:
        watched.note(1.0)
        for _ in range(2048):
            watched.note(torch.ones((), device="meta"))
