"""Amaxes of delayed scaling: what a forward measures is recorded in its backward, whatever happens to saved tensors."""

import copy
import functools

import pytest
import torch
from tiers import covered, in_turn
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import hybridtensor as ht
from hybridtensor.state import recording
from hybridtensor.state.training import layer_states
from hybridtensor.testing import random_tensor

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def model(recipe="fp8_delayed", device="cpu"):
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64, bias=False)).to(device)
    return ht.quantize_(made, recipe)


def x_of(step=0, device="cpu"):
    return random_tensor(32, 64, seed=step, dtype=torch.float32, device=device)


def state_of(net):
    return [buffer.clone() for _, buffer in net.named_buffers()]


def assert_same(net, other):
    assert all(map(torch.equal, state_of(net), state_of(other)))
    for a, b in zip(layer_states(net), layer_states(other), strict=True):
        assert (a.amax is None and b.amax is None) or torch.equal(a.amax, b.amax)


def train(net, run=None, steps=3, hooks=None):
    """Return the gradients of steps with small losses, as sums over many tokens are."""
    run, grads = run or net, []
    device = next(net.parameters()).device.type
    for step in range(steps):
        with hooks() if hooks else torch.enable_grad():
            y = run(x_of(step, device))
        (y.square().sum() * 1e-6).backward()
        grads += [p.grad.clone() for p in net.parameters()]
        net.zero_grad()
        ht.step_(net)
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(1.01)
    return grads


def pack(t):
    """As a file would hold it: a compiled graph counts on strides."""
    return t.cpu().contiguous().view(torch.uint8).numpy().tobytes(), t.dtype, t.shape, t.stride(), t.device


def unpack(packed):
    data, dtype, shape, stride, device = packed
    t = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return t.copy_(torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)) if data else t


HOOKS = {
    "copied": lambda: saved_tensors_hooks(lambda t: t.clone(), lambda t: t),
    "copied when unpacked": lambda: saved_tensors_hooks(lambda t: t, lambda t: t.clone()),
    "packed": lambda: saved_tensors_hooks(pack, unpack),
    "save_on_cpu": save_on_cpu,
}
SPECS = ["fp8_delayed", "fp8_delayed/bf16/bf16", "fp8_delayed/fp8_delayed/bf16", "fp8_delayed/mxfp8/mxfp8", "nvfp4"]


@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("spec", SPECS)
def test_hooks_on_saved_tensors_change_nothing(spec, hooks, device):
    check_hooks(spec, hooks, device, compiled=False)


@pytest.mark.parametrize(("spec", "hooks"), in_turn(SPECS, list(HOOKS)))
def test_hooks_on_saved_tensors_change_nothing_in_graphs(spec, hooks, device):
    check_hooks(spec, hooks, device, compiled=True)


def check_hooks(spec, hooks, device, compiled):
    """Oracle: eager code without hooks."""
    expected, net = model(spec, device), model(spec, device)
    grads = train(expected)
    run = torch.compile(net, backend="aot_eager") if compiled else net
    for ours, theirs in zip(train(net, run, hooks=HOOKS[hooks]), grads, strict=True):
        assert torch.equal(ours, theirs)
    assert_same(net, expected)
    assert all(any(s.encode_scale.ne(1)) for s in layer_states(expected) if s.encode_scale is not None)


CHECKPOINTS = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "not reentrant": functools.partial(checkpoint, use_reentrant=False),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("compiled", [False, True])
def test_recomputing_records_the_same(kind, compiled):
    expected, net = model(), model()

    def recomputed(x):
        return CHECKPOINTS[kind](net, x.requires_grad_())

    run = torch.compile(recomputed, backend="aot_eager") if compiled and kind == "not reentrant" else recomputed
    grads = train(expected)
    assert all(map(torch.equal, train(net, run), grads))
    assert_same(net, expected)


# -- forwards that are no part of a step


def forward_alone(net, run, x):
    run(x)


def forward_in_evaluation(net, run, x):
    net.eval()
    run(x)
    net.train()


def other_weights(net, run, x):
    before = copy.deepcopy(net.state_dict())
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(50)
    run(x)
    with torch.no_grad():
        run(x)
        net.load_state_dict(before)


def averaged_weights(net, run, x):
    before = [p.detach().clone() for p in net.parameters()]
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(50)
        run(x)
        for p, own in zip(net.parameters(), before, strict=True):
            p.copy_(own)


def frozen_weights(net, run, x):
    """In compiled code they would count: it does not know that the layers have a backward in the same step."""
    net.requires_grad_(False)
    with torch.set_grad_enabled(run is net):
        run(x)
    net.requires_grad_(True)


def attribution(net, run, x):
    with ht.without_recording(net):
        y = run(x.requires_grad_())
    torch.autograd.grad(y.sum(), x)


def gradients_of_nobody(net, run, x):
    with ht.without_recording(net):
        torch.autograd.grad(run(x).sum(), list(net.parameters()))


APART = [
    *(forward_alone, forward_in_evaluation, other_weights, averaged_weights, frozen_weights, attribution),
    gradients_of_nobody,
]


@pytest.mark.parametrize(
    ("spec", "apart", "compiled"), covered(["fp8_delayed", "fp8_delayed+dequantized"], APART, [False, True])
)
def test_forwards_that_are_no_part_of_a_step_leave_no_trace(spec, apart, compiled):
    """Their inputs are a thousand times larger; oracle: the same steps without them."""
    expected, net = model(spec), model(spec)
    run = torch.compile(net, backend="aot_eager") if compiled else net
    for _ in range(2):
        assert all(map(torch.equal, train(net, run, steps=2), train(expected, steps=2)))
        apart(net, run, 1000 * x_of(7))
        assert not any(state.amax.any() for state in layer_states(net))
        assert_same(net, expected)


def test_a_face_that_was_made_for_evaluation_is_measured_when_it_is_trained():
    expected, net = model(), model()
    train(expected)
    for _ in range(3):
        with torch.no_grad():
            net(x_of(9))
    with torch.no_grad():
        net(x_of(9))
    train(net)
    assert_same(net, expected)


def test_a_face_that_was_made_by_a_forward_alone_brings_nothing_of_its_input():
    """The forwards that follow use the face, with the amax of the weight, and not what else that forward measured."""
    expected, net = model(), model()
    for one in (expected, net):
        train(one, steps=2)  # of one microbatch each: backward lets the face go
        one(x_of()).sum().backward()
    net(1000 * x_of(7))
    for one in (expected, net):
        one(x_of(1)).sum().backward()
        ht.step_(one)
    assert_same(net, expected)


# -- steps whose amaxes cannot be used


def test_steps_where_tensors_are_made_on_the_device_by_default(default_device, device):
    """What comes back to the host does not follow ``torch.set_default_device``."""
    net = model(device=device)
    for step in range(3):
        net(x_of(step, device)).sum().backward()
        ht.step_(net)
    scales = [state.encode_scale for state in layer_states(net)]
    assert all(scale.device.type == device and bool((scale != 1).all()) for scale in scales)


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
def test_nothing_is_made_on_the_device_by_default(recipe):
    """What is made there, on the meta device, has no values."""
    found = []
    for place in ("cpu", "meta"):
        net, batches = model(recipe), [x_of(step) for step in range(3)]
        with torch.device(place):
            assert all(map(torch.equal, batches, [x_of(step) for step in range(3)]))
            for x in batches:
                net(x).square().mean().backward()
                ht.step_(net)
        found.append(net)
    assert_same(*found)


def test_a_step_without_recording_raises():
    net = model()
    with ht.without_recording(net):
        net(x_of()).sum().backward()
        with pytest.raises(RuntimeError, match="step_: no amaxes were recorded of layer 0, layer 2, although backward"):
            ht.step_(net)
    net(x_of()).sum().backward()
    ht.step_(net)


def test_a_layer_that_a_step_left_out_may_have_run_without_recording_before():
    """Its scales stay, as those of a layer that did not run at all."""
    net, expected = model(), model()
    for step in range(3):
        with ht.without_recording(net):
            torch.autograd.grad(net(x_of(step)).sum(), list(net.parameters()))
        for one in (net, expected):
            one[2](x_of(step)).sum().backward()
            ht.step_(one)
        assert_same(net, expected)
    assert (net[0].quantization_state.encode_scale == 1).all()
    with ht.without_recording(net[0]):
        net(x_of()).sum().backward()
    with pytest.raises(RuntimeError, match="no amaxes were recorded of layer 0, although"):
        ht.step_(net)


@pytest.mark.parametrize("after", ["nvfp4", "fp8"])
def test_a_recipe_without_delayed_scales_needs_no_record(after):
    net = model()
    with ht.without_recording(net):
        net(x_of()).sum().backward()
    ht.set_config_(net, after)
    net(x_of()).sum().backward()
    ht.step_(net)
    ht.set_config_(net, "fp8_delayed")
    train(net)


@pytest.mark.parametrize("compiled", [False, True])
def test_an_amax_that_is_not_finite_raises(compiled):
    """Nothing advances, and step_ goes on once the step is skipped."""
    net, expected = model(), model()
    run = torch.compile(net, backend="aot_eager") if compiled else net
    (run(x_of()) * torch.inf).sum().backward()
    with pytest.raises(RuntimeError, match=r"step_: the amaxes of layer 2 \(grad_output\) are not finite"):
        ht.step_(net)
    ht.step_(net, skipped=True)
    net.zero_grad()
    train(net, run), train(expected)
    assert_same(net, expected)


def test_an_amax_that_is_not_finite_raises_after_the_recipe_has_changed(monkeypatch):
    """On a GPU the host looks in a later step: it names the scales that there were."""
    net, arrived = model(), []
    monkeypatch.setattr(recording, "on_host", lambda flags: (flags, lambda: bool(arrived)))
    (net(x_of()) * torch.inf).sum().backward()
    ht.step_(net)
    ht.set_config_(net, "fp8_delayed/bf16/bf16")
    arrived.append(True)
    net(x_of()).sum().backward()
    with pytest.raises(RuntimeError, match=r"step_: the amaxes of layer 2 \(grad_output\) are not finite"):
        ht.step_(net)


def test_bad_input():
    with pytest.raises(TypeError, match="without_recording: a module is required, got int"):
        ht.without_recording(3)


def test_records_are_used_again_and_copied():
    """Of layers that are gone; a copy has one of its own, and so has what is unpickled."""
    net = model()
    net(x_of()).sum().backward()
    copied, address = copy.deepcopy(net), net[0].quantization_state.amax_address.item()
    assert_same(copied, net)
    ht.step_(net)
    assert copied[0].quantization_state.amax.any()
    assert copied[0].quantization_state.amax_address.item() != address
    del net
    fresh = [model() for _ in range(3)]
    assert address in {one[i].quantization_state.amax_address.item() for one in fresh for i in (0, 2)}
    assert not any(state.amax.any() for one in fresh for state in layer_states(one))


# -- recipes that change in the middle of training

CHANGES = {
    "fp8_delayed/fp8_delayed/bf16": {"input_rowwise": "input", "weight": "weight",
                                     "grad_output_rowwise": "grad_output"},
    "bf16/fp8_delayed/fp8_delayed": {"input_columnwise": "input", "weight_columnwise": "weight",
                                     "grad_output": "grad_output"},
    "fp8_delayed/mxfp8/mxfp8": {"input_rowwise": "input", "weight_rowwise": "weight"},
    "fp8_delayed+dequantized": {"input_rowwise": "input", "weight_rowwise": "weight"},
    "fp8_delayed+e4m3_grad": {"input": "input", "weight": "weight"},
}  # fmt: skip


@pytest.mark.parametrize("spec", CHANGES)
@pytest.mark.parametrize("persistent", [False, True])
def test_a_tensor_keeps_its_scale_when_another_quantizer_changes(spec, persistent):
    """And has it still when the recipe comes back."""
    net = ht.quantize_(model("bf16"), "fp8_delayed", persistent=persistent)
    for step in range(3):
        (net(x_of(step)).square().sum() * 1e-6).backward()
        net.zero_grad()
        ht.step_(net)
    state = net[0].quantization_state
    before = dict(
        zip(state.slots, zip(state.encode_scale.tolist(), state.amax_history.tolist(), strict=True), strict=True)
    )
    assert all(scale != 1 for scale, _ in before.values())
    for changed, names in ((spec, CHANGES[spec]), ("fp8_delayed", {"input": "input", "weight": "weight"})):
        ht.set_config_(net, changed)
        state = net[0].quantization_state
        for slot, former in names.items():
            index = state.slots.index(slot)
            assert (state.encode_scale[index].item(), state.amax_history[index].tolist()) == before[former]


@pytest.mark.parametrize(("spec", "largest"), [("fp8_delayed+most_recent", 448.0), ("fp8_delayed+margin", 448.0)])
def test_another_rule_goes_on_with_the_history(spec, largest):
    """Oracle: the scale that the new rule gives for the amaxes so far."""
    net = model()
    train(net)
    state = net[0].quantization_state
    history = state.amax_history[state.slots.index("input")].clone()
    rule = {"fp8_delayed+most_recent": {"algorithm": "most_recent"}, "fp8_delayed+margin": {"margin": 1}}[spec]
    quantizer = ht.DelayedFloat8Quantizer(**rule)
    config = ht.HybridConfig.parse("fp8_delayed")
    ht.set_config_(net, ht.HybridConfig(quantizer, config.weight, config.grad_output))
    amax = history[-1] if "algorithm" in rule else history.max()
    state = net[0].quantization_state
    expected = torch.tensor(largest * 2.0 ** -rule.get("margin", 0)) / amax
    assert torch.equal(state.encode_scale[state.slots.index("input")], expected)
    assert torch.equal(state.amax_history[state.slots.index("input")], history)


# -- dry runs of torch


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")  # torch's, of plain modules, too
@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8", "nvfp4"])
def test_warming_up_a_graphed_callable_leaves_no_trace(recipe):
    """Oracle: eager steps."""
    expected, net = model(recipe, "cuda"), model(recipe, "cuda")
    # torch refuses a module with hooks; those of a root with layers that could share an input are its own
    run = torch.cuda.make_graphed_callables(nn.Sequential(net), (1000 * x_of(9, "cuda"),))
    assert all(map(torch.equal, train(net, run), train(expected)))
    assert_same(net, expected)


def test_backwards_without_a_step_keep_no_more_and_more():
    """Of a frozen model whose input's gradient is wanted no step ends; the largest amax is that of all backwards."""
    frozen, twin = model().requires_grad_(False), model().requires_grad_(False)
    live = []
    for step in range(1100):
        x = x_of(step % 7) * (3 if step == 400 else 1)
        frozen(x.requires_grad_()).sum().backward()
        if step in (540, 1080):
            live.append(
                sum(len(state.record._committed) + len(state.record.of_inputs) for state in layer_states(frozen))
            )
        if step == 400:
            twin(x.detach().requires_grad_()).sum().backward()
    assert all(count < 4 * 2 * 256 for count in live)
    of_input = [[state.amax[state.slots.index("input")] for state in layer_states(net)] for net in (frozen, twin)]
    assert of_input[0][0] == of_input[1][0]
    ht.step_(frozen)
    assert not any(state.record._committed or state.record.of_inputs for state in layer_states(frozen))
