"""Buckets: weights that are quantized together have the bits, and the lives, of weights that are quantized alone.

Oracle: the same program without buckets.
"""

import copy
import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hybridtensor as ht
from hybridtensor import ops
from hybridtensor.linear import sharing, weight_buckets, weight_operands
from hybridtensor.ops.cast import definition
from hybridtensor.subclasses import MasterWeight, face_cache, master_tensor, quantized_when_used
from hybridtensor.testing import random_tensor

RECIPES = [
    "fp8", "fp8_rowwise", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4", "nvfp4+one_d", "fp8+pow2_scale",
    "nvfp4+one_d+rowwise_dequantized_weight", "bf16/fp8/nvfp4", "fp8+dequantized", "fp8+keep_faces",
    "fp8+bf16_weight_values", "nvfp4+four_over_six", "nvfp4+one_d+four_over_six+four_over_six_mse", "mxfp4",
    "mxfp4+mx_two_d",
]  # fmt: skip


class Model(nn.Module):
    """Layers of two shapes, one that only some steps use."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(256, 384, bias=False), nn.Linear(384, 256)
        self.sometimes, self.last = nn.Linear(256, 256), nn.Linear(256, 128)

    def forward(self, x, sometimes=False):
        x = self.second(torch.relu(self.first(x)))
        return self.last(x + self.sometimes(x) if sometimes else x)


@pytest.fixture
def casts(monkeypatch):
    """How many matrices each launch casts, and how many each measures."""
    counts = {"cast": [], "measured": []}

    def counted(name, run):
        def call(xs, *args):
            counts[name].append(len(xs))
            return run(xs, *args)

        return call

    monkeypatch.setattr(ops, "quantize_all", counted("cast", ops.quantize_all))
    monkeypatch.setattr(ops, "measure_all", counted("measured", ops.measure_all))
    return counts


def test_casts_of_one_device_are_done_together():
    """The meta device stands for another one, to which a weight moved after it was put into a bucket."""
    net = ht.quantize_(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "fp8")
    jobs, weights = weight_buckets._Jobs(), [layer.weight for layer in net]

    def plans():
        return [jobs.plans(w.context, torch.float32, w, rowwise=True, columnwise=True) for w in weights]

    assert plans()[0] is plans()[1]
    weights[1] = net[1].to("meta").weight
    here, there = plans()
    assert all(one is not other for one, other in zip(here, there, strict=True))


def built(recipe, device="cpu", **kwargs):
    torch.manual_seed(0)
    model = Model().to(device, torch.bfloat16)
    ht.quantize_(model, recipe, **kwargs)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model, optimizer, device, *, steps=4, call_step=True, microbatches=1):
    """Return losses and gradients of all steps, the state, and the weights."""
    found, generator = [], torch.Generator().manual_seed(1)
    for step in range(steps):
        for _ in range(microbatches):
            x = torch.randn(32, 256, generator=generator).to(device, torch.bfloat16).requires_grad_()
            loss = model(x, sometimes=step % 2 == 1).float().pow(2).mean()
            loss.backward()
            found += [loss.detach(), x.grad]
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        if call_step:
            ht.step_(model)
    return found + [t.clone() for t in ht.plain_state_dict(model).values()] + list(model.buffers())


def train_alone(monkeypatch, recipe, device, **kwargs):
    with monkeypatch.context() as patch:
        patch.setattr(weight_operands, "bucket_of", lambda weight: None)
        patch.setattr(weight_buckets.WeightBucket, "refresh", lambda self: 0)
        return train(*built(recipe, device), device, **kwargs)


def same(mine, theirs):
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)


LAZILY = [recipe for recipe in RECIPES if "delayed" not in recipe and "fp4" not in recipe]  # without steps of a state


@pytest.mark.parametrize(("recipe", "call_step"), [*((r, True) for r in RECIPES), *((r, False) for r in LAZILY)])
def test_bits(recipe, call_step, device, monkeypatch):
    expected = train_alone(monkeypatch, recipe, device, call_step=call_step)
    same(train(*built(recipe, device), device, call_step=call_step), expected)


@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed", "nvfp4"])
def test_bits_of_microbatches(recipe, device, monkeypatch):
    expected = train_alone(monkeypatch, recipe, device, microbatches=3)
    same(train(*built(recipe, device), device, microbatches=3), expected)


@pytest.mark.parametrize("call_step", [True, False], ids=["step", "lazily"])
def test_one_launch_for_all_that_the_last_step_used(casts, call_step):
    """Three layers are used in each step, the fourth in every other one."""
    train(*built("fp8"), "cpu", steps=1, call_step=call_step)
    if call_step:  # for the next step; the first one cast its weights itself, but for the columnwise faces
        assert casts == {"cast": [3, 3], "measured": [3]}
    else:
        assert casts == {"cast": [3], "measured": []}
    casts["cast"].clear()
    casts["measured"].clear()
    train(*built("fp8"), "cpu", steps=3, call_step=call_step)
    assert casts["measured"] == ([3, 4, 3] if call_step else [3, 4])


@pytest.mark.parametrize("variant", ["microbatches", "frozen", "checkpointed", "plain"])
@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed", "nvfp4", "fp8+free_faces", "fp8+dequantized"])
def test_layers_do_not_look_through_their_bucket_in_vain(recipe, variant, monkeypatch):
    """A step of 12 layers asks about each weight a few times, not each layer about all of the bucket."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(12)))
    ht.quantize_(model, recipe)
    if variant == "frozen":
        for layer in model:
            layer.weight.requires_grad_(False)
    optimizer, asked = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), []
    real = weight_buckets._weight_of
    monkeypatch.setattr(weight_buckets, "_weight_of", lambda *args: [asked.append(args), real(*args)][1])
    for _ in range(4):
        asked.clear()
        for _ in range(3 if variant == "microbatches" else 1):
            x = random_tensor(32, 64).requires_grad_()
            y = checkpoint(model, x, use_reentrant=False) if variant == "checkpointed" else model(x)
            y.float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ht.step_(model)
    assert len(asked) <= 3 * len(model)  # for the next step, rowwise where none was made ready, columnwise


@pytest.mark.parametrize(
    ("recipe", "persistent", "weights"),
    [("fp8", False, 0), ("nvfp4", False, 0), ("fp8", True, 0), ("fp8_delayed", True, 0), ("fp8_delayed", False, 6),
     ("fp8+free_faces", False, 6)],
)  # fmt: skip
def test_faces_of_frozen_weights_stay(recipe, persistent, weights, monkeypatch):
    """Nobody writes them, but ``step_`` gives them other delayed scales."""
    casts, real = [], definition.ReferenceCast.run
    monkeypatch.setattr(definition.ReferenceCast, "run", lambda *args: [casts.append(0), real(*args)][1])
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3))).bfloat16().requires_grad_(False)
    ht.quantize_(model, recipe, persistent=persistent)
    for _ in range(3):
        casts.clear()
        model(random_tensor(32, 64).requires_grad_()).float().square().sum().backward()
        ht.step_(model)
    assert len(casts) == 3 + 3 + weights  # inputs, gradients, and both faces of each weight


def test_weights_that_are_multiplied_transposed_are_not_made_ready_as_they_lie(casts, monkeypatch):
    """As of GPT-2's layers: each is cast once as the product reads it."""
    measured, real = [], definition.ReferenceCast.measure
    monkeypatch.setattr(definition.ReferenceCast, "measure", lambda *args: [measured.append(0), real(*args)][1])
    model = nn.Sequential(*(Conv1D(64, 64) for _ in range(3))).bfloat16()
    ht.quantize_(model, "fp8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        measured.clear()
        model(random_tensor(32, 64).requires_grad_()).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ht.step_(model)
    assert casts == {"cast": [], "measured": []}
    assert len(measured) == 3


class Conv1D(nn.Module):
    """GPT-2's layer: its weight is ``[in, out]``."""

    is_transposed = True

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / 8)

    def forward(self, x):
        return x @ self.weight


def test_a_weight_that_a_step_did_not_use_is_not_made_ready_again(casts):
    """The second step alone uses all four; scales of all follow in each."""
    train(*built("fp8_delayed"), "cpu", steps=3)
    assert casts["cast"] == [3, 3, 4, 4, 3, 3]  # columnwise faces, then rowwise ones of the next step


@pytest.fixture
def stream(monkeypatch):
    """Stand in for the current CUDA stream."""
    current = [0]
    for module in (weight_buckets, weight_operands, master_tensor, quantized_when_used, sharing):
        monkeypatch.setattr(module, "stream_of", lambda plain: current[0])
    monkeypatch.setattr(master_tensor, "is_captured", lambda: isinstance(current[0], tuple))
    return current


def test_weights_that_another_stream_wrote_are_quantized_in_their_own_forward(casts, stream):
    model, optimizer = built("fp8")
    train(model, optimizer, "cpu", steps=2, call_step=False)
    casts["cast"].clear()
    with torch.no_grad():
        model.first.weight.mul_(2)
        model.sometimes.weight.mul_(2)
        stream[0] = 1
        model.second.weight.mul_(2)
        model.last.weight.mul_(2)
    stream[0] = 0
    x = random_tensor(32, 256)
    model(x)
    assert casts["cast"] == [2]  # the first one, and one that this step does not use; two are cast alone


def trained(x, recipe="fp8"):
    """Return a model after two steps, the last of which made the faces of the next forward."""
    model, optimizer = built(recipe)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
        ht.step_(model)
    return model, optimizer


def test_each_capture_casts_the_weights_of_the_step_before_together(casts, stream):
    """Streams of captures have their numbers. The optimizer wrote before, on another stream, or in another capture."""
    x = random_tensor(32, 256).requires_grad_()
    model, optimizer = trained(x)
    for number in (1, 2):
        expected = copy.deepcopy(model)(x)
        casts["cast"].clear()
        stream[0] = 5, number
        y = model(x)
        y.sum().backward()
        assert casts["cast"] == [3, 3]  # rowwise, then columnwise faces
        assert torch.equal(y, expected)
        optimizer.step()


def test_no_capture_casts_what_another_one_may_need(casts, stream):
    """Of weights that were used since the write, maybe only some are used in it."""
    x = random_tensor(32, 256).requires_grad_()
    model, _ = trained(x)
    model(x)
    casts["cast"].clear()
    stream[0] = 5, 1
    y = model(x)
    assert casts["cast"] == []
    (cached,) = model.first.weight.record.face_cache._views.values()
    assert (cached.row, cached.column) == (None, None)  # the forward before, in eager code, does not count in it
    stream[0] = 5, 2
    y.sum().backward()
    assert not model.first.weight.record.face_cache.faces()


def test_weights_that_a_fork_of_the_capture_wrote_are_cast_in_their_own_forward(casts, stream):
    model, optimizer = built("fp8")
    model(random_tensor(32, 256)).sum().backward()
    stream[0] = 6, 1
    optimizer.step()
    casts["cast"].clear()
    stream[0] = 5, 1
    model(random_tensor(32, 256))
    assert casts["cast"] == []


def test_what_replays_write_is_quantized_at_each_use(casts, stream):
    """They change memory where nothing counts."""
    model, optimizer = built("fp8+keep_faces")
    x, weight = random_tensor(32, 256), model.first.weight
    model(x).sum().backward()
    stream[0] = 5, 1
    optimizer.step()
    model(x)
    assert weight.record.face_cache.faces()
    stream[0] = 0
    for _ in range(2):
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight.plain):
            weight.plain.mul_(3.0)
        expected = ht.quantize_(ht.plain_(copy.deepcopy(model)), "fp8+keep_faces")(x)
        assert torch.equal(model(x), expected)
        assert not weight.record.face_cache.faces()


def test_another_stream_does_not_cast_what_step_made_already(casts, stream):
    model, optimizer = built("fp8")
    model(random_tensor(32, 256)).sum().backward()
    optimizer.step()
    ht.step_(model)
    casts["cast"].clear()
    stream[0] = 1
    model(random_tensor(32, 256))
    assert casts["cast"] == []


# The rows of the module's table: microbatches, evaluations; what is cached after forwards and backwards, after
# evaluations, and after step_
ROWS = re.findall(r"(one|two) micro\w+(?:, (\d) \w+)? +``(.+?)`` +(?:``(.+?)``)? +``(.+)``", face_cache.__doc__)


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_the_table_of_the_module_says_which_faces_are_cached(row):
    """After each event in the third of equal steps."""
    layer = ht.quantize_(nn.Linear(64, 64), "fp8")
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)

    def cached():
        (view,) = layer.weight.record.face_cache._views.values() or [(None, None)]
        return ("R" if view[0] else "") + ("C" if view[1] else "") or "-"

    for _ in range(3):
        trained, evaluated = [], []
        for _ in range(["one", "two"].index(row[0]) + 1):
            loss = layer(random_tensor(32, 64, dtype=torch.float32).requires_grad_()).sum()
            trained.append(cached())
            loss.backward()
            trained.append(cached())
        for _ in range(int(row[1] or 0)):
            with torch.no_grad():
                layer(random_tensor(32, 64, dtype=torch.float32))
            evaluated.append(cached())
        optimizer.step()
        optimizer.zero_grad()
        ht.step_(layer)
    assert len(ROWS) == 4
    assert (" ".join(trained), " ".join(evaluated), cached()) == row[2:]


def test_faces_of_another_stream_are_made_again_and_columns_wait_for_none(casts, stream):
    model, optimizer = built("fp8")
    train(model, optimizer, "cpu", steps=2)
    kept = model.second.weight.record.face_cache
    made = kept.faces()
    assert len(made) == 1
    casts["cast"].clear()
    hook = model.second.register_forward_pre_hook(lambda *_: stream.__setitem__(0, 1))
    after = model.second.register_forward_hook(lambda *_: stream.__setitem__(0, 0))
    model(random_tensor(32, 256).requires_grad_()).sum().backward()
    hook.remove()
    after.remove()
    assert casts["cast"] == [2]  # columnwise faces of the two layers on this stream


def test_no_stream_uses_faces_that_another_one_made(stream):
    """Nor do exports."""
    layer = ht.quantize_(nn.Linear(64, 64), "fp8")

    def evaluate(on, times=1):
        stream[0] = on
        with torch.no_grad():
            for _ in range(times):
                layer(torch.ones(64, 64))
        (face,) = layer.weight.record.face_cache.faces()
        return face

    here = evaluate(0, times=3)
    assert evaluate(0) is here
    there = evaluate(1)
    assert there is not here
    assert evaluate(1) is there
    assert layer.weight.forward_face() is there
    stream[0] = 0
    assert layer.weight.forward_face() is not there


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams need a CUDA device")
@pytest.mark.parametrize("recipe", ["fp8", "fp8_block", "nvfp4"])
def test_streams_that_do_not_wait_for_each_other(recipe):
    """Streams are still busy with what comes before their casts when the last one uses the weight."""
    x = random_tensor(256, 256, dtype=torch.float32, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(3)]

    @torch.no_grad()
    def difference():
        layer = ht.quantize_(nn.Linear(256, 256, device="cuda"), recipe)
        torch.cuda.synchronize()
        outputs = []
        for busy, stream in zip((1, 1, 0), streams, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(busy * 500_000_000)
                outputs += [layer(x), layer(x)]
        torch.cuda.synchronize()
        return [bool((output != layer(x)).any()) for output in outputs]

    difference()  # compiles kernels, which takes longer than they wait for
    assert difference() == [False] * 6


def test_an_evaluation_before_the_backward_leaves_the_columns_together(casts):
    model, optimizer = built("fp8")
    train(model, optimizer, "cpu", steps=2)
    weights, x = (model.first.weight, model.second.weight, model.last.weight), random_tensor(32, 256).requires_grad_()

    def evaluate():
        with torch.no_grad():
            model(x)
        return [weight.record.face_cache.awaits_column for weight in weights]

    casts["cast"].clear()
    loss = model(x).sum()
    assert evaluate() == [True] * 3
    loss.backward()
    assert casts["cast"] == [3]
    assert evaluate() == [False] * 3
    model(x)
    with torch.no_grad():
        torch._foreach_mul_(weights, 2)
    assert evaluate() == [False] * 3  # no backward can follow the forward before the write


def test_a_bucket_ends_with_its_elements(monkeypatch, casts):
    monkeypatch.setattr(weight_buckets, "_BUCKET", 256 * 384 + 256 * 384)
    model, optimizer = built("fp8")
    assert [len(list(bucket.weights())) for bucket in weight_buckets._OF_MODELS[model]] == [2, 2]
    train(model, optimizer, "cpu", steps=2)
    assert max(casts["cast"]) == 2


def test_a_tied_weight_is_cast_once(casts):
    """Also where the backward of another layer comes first."""
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(3)), nn.Embedding(128, 128)).bfloat16()
    model[3].weight = model[1].weight
    ht.quantize_(model, "fp8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model[:3](model[3](torch.arange(32))).sum().backward()
        optimizer.step()
        ht.step_(model)
    assert casts["cast"] == [3, 3] * 2


def test_recipes_dtypes_and_plain_layers_have_buckets_of_their_own():
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))
    model[4].bfloat16()
    ht.quantize_(model, "fp8")
    ht.set_config_(model[1], "mxfp8")
    ht.set_config_(model[3], "mxfp8")
    buckets = weight_buckets.bucket_weights(model)
    assert [len(list(bucket.weights())) for bucket in buckets] == [3, 2, 1]


def test_step_stops_at_its_limit(monkeypatch, casts):
    monkeypatch.setattr(weight_buckets, "_BUCKET", 1)
    monkeypatch.setattr(weight_buckets, "_AFTER_STEP", 256 * 384)
    train(*built("fp8"), "cpu", steps=1)
    assert casts["cast"] == [1, 1]


def test_faces_go_as_those_of_one_weight_do():
    """Rowwise faces go with their forward, columnwise ones with their backward."""
    model, optimizer = built("fp8")
    train(model, optimizer, "cpu", steps=2)
    layers = [model.first, model.second, model.last]
    kept = [layer.weight.record.face_cache for layer in layers]
    assert [len(faces.faces()) for faces in kept] == [1, 1, 1]
    out = model(random_tensor(32, 256).requires_grad_())
    assert [len(faces.faces()) for faces in kept] == [0, 0, 0]
    out.sum().backward()
    assert [len(faces.faces()) for faces in kept] == [0, 0, 0]


def test_a_write_between_step_and_forward(monkeypatch):
    """What was quantized in ``step_`` is not used for weights that were written since."""

    def run():
        model, optimizer = built("fp8")
        train(model, optimizer, "cpu", steps=2)
        with torch.no_grad():
            model.second.weight.mul_(3)
            model.last.weight.data.add_(1)
        return train(model, optimizer, "cpu", steps=1)

    got = run()
    monkeypatch.setattr(weight_operands, "bucket_of", lambda weight: None)
    monkeypatch.setattr(weight_buckets.WeightBucket, "refresh", lambda self: 0)
    same(got, run())


def test_memory_that_somebody_else_holds_is_quantized_alone(casts):
    model, optimizer = built("fp8")
    held = [model.first.weight.master, model.second.weight.master]
    train(model, optimizer, "cpu", steps=3)
    assert len(held) == 2
    assert max(casts["cast"]) <= 2


def test_a_recipe_that_keeps_no_faces_makes_each_when_it_is_used(casts):
    train(*built("fp8+free_faces"), "cpu", steps=3)
    assert casts == {"cast": [], "measured": []}


def test_copies_and_moved_models(casts):
    model, optimizer = built("fp8")
    train(model, optimizer, "cpu", steps=1)
    clone = copy.deepcopy(model)
    casts["cast"].clear()
    train(clone, torch.optim.SGD(clone.parameters(), lr=0.1), "cpu", steps=3)
    assert max(casts["cast"]) == 4
    assert clone.first.weight.record is not model.first.weight.record
    moved = model.float()
    casts["cast"].clear()
    x = torch.randn(32, 256)
    for _ in range(3):
        moved(x).sum().backward()
        optimizer.step()
    assert max(casts["cast"]) == 3


def test_who_watches_gets_elements(device):
    """What ``step_`` made for products only, values on a GPU without such elements, is not what others get."""
    model, optimizer = built("nvfp4", device)
    train(model, optimizer, device, steps=2)
    weight = model.second.weight
    row, _ = weight.faces(rowwise=True, columnwise=False, dtype=weight.dtype)
    assert row.format.values_of is None
    assert row.qdata.dtype == torch.uint8


def test_weights_that_cannot_take_part():
    model, _ = built("fp8")
    model.first.weight.record.replayed = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.second.weight.record, "gathered", object())
        assert [w for bucket in weight_buckets.bucket_weights(model) for w in bucket.weights()] == [
            model.sometimes.weight, model.last.weight,
        ]  # fmt: skip
    assert isinstance(model.first.weight, MasterWeight)


@pytest.mark.parametrize("recipe", ["mxfp8", "bf16"])
def test_a_part_of_the_model_gets_another_recipe(device, recipe):
    """Its weights were put into a bucket with others before."""
    model, optimizer = built("fp8", device)
    train(model, optimizer, device, steps=2)
    ht.set_config_(model.second, recipe)
    train(model, optimizer, device, steps=2, call_step=False)
    twin = copy.deepcopy(model)
    for m, steps in ((model, True), (twin, False)):
        with torch.no_grad():
            for p in m.parameters():
                p.mul_(0.5)
        if steps:  # quantizes weights for the next forward
            ht.step_(m)
    x = random_tensor(32, 256, dtype=torch.bfloat16, device=device)
    assert torch.equal(model(x), twin(x))


@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed", "fp8_rowwise", "mxfp8"])
@pytest.mark.parametrize("order", ["before", "between", "behind"])
def test_an_evaluation_in_each_step_casts_nothing_more(recipe, order, casts, monkeypatch):
    """As log probabilities of a policy do; the bits are those without it, and no face stays behind."""
    made = []
    quantized = MasterWeight.quantized
    monkeypatch.setattr(
        MasterWeight, "quantized", lambda self, *args, **kw: made.append(1) or quantized(self, *args, **kw)
    )

    def run(evaluates):
        (model, optimizer), found = built(recipe), []
        optimizer.param_groups[0]["lr"] = 1e-3
        x = random_tensor(32, 256, dtype=torch.bfloat16, seed=1)

        def evaluate(now):
            if evaluates and now == order:
                with torch.no_grad():
                    model(x, sometimes=True)

        for step in range(7):
            if step == 4:
                made.clear()
                casts["cast"].clear()
            evaluate("before")
            y = model(x, sometimes=True)
            evaluate("between")
            y.float().pow(2).mean().backward()
            found.append(y.detach())
            kept = [face for layer in model.modules() if isinstance(layer, nn.Linear) for face in
                    layer.weight.record.face_cache.faces()]  # fmt: skip
            evaluate("behind")
            optimizer.step()
            optimizer.zero_grad()
            ht.step_(model)
        return found, len(kept)

    outputs, kept = run(True)
    counts = len(made), len(casts["cast"])
    expected, kept_without = run(False)
    same(outputs, expected)
    assert counts == (len(made), len(casts["cast"]))
    if order != "behind":
        assert kept == kept_without
