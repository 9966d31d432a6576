"""Gradients that an activation quantizes for the layers whose outputs it reads.

Oracle: the same activation returning values as gradients, which the layers then quantize themselves; and torch's own.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tiers import covered
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint

import hybridtensor as ht
from hybridtensor.linear import two_parts
from hybridtensor.linear.output_gradients import OutputGradient
from hybridtensor.linear.products import Backward
from hybridtensor.subclasses.observing import observers
from hybridtensor.testing import random_tensor

SPECS = {
    **dict.fromkeys(("fp8", "fp8_delayed"), True),
    # The others gain nothing: they measure rows, are bound by arithmetic, or have values as gradients
    **dict.fromkeys(("fp8+pow2_scale", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4"), False),
    **dict.fromkeys(("bf16", "fp8_high_precision_backward"), False),
}
"""Recipes, and whether gradients are handed over as faces."""


class MLP(nn.Module):
    """A gated MLP, of two layers or a packed one, by torch's operations, or by ours, which are ``told`` the layers."""

    def __init__(self, packed=False, how="told", hidden=128, bias=False):
        super().__init__()
        sizes = {"gate_up": 2 * hidden} if packed else {"gate": hidden, "up": hidden}
        self.layers = nn.ModuleDict({name: nn.Linear(64, size, bias=bias) for name, size in sizes.items()})
        self.down = nn.Linear(hidden, 64, bias=False)
        self.how = how

    def forward(self, x):
        outputs = [layer(x) for layer in self.layers.values()]
        if self.how == "torch":
            gate, up = outputs[0].chunk(2, dim=-1) if len(outputs) == 1 else outputs
            return self.down(F.silu(gate) * up)
        of = tuple(self.layers.values()) if self.how == "told" else ()
        return self.down(ht.swiglu(*outputs, into=self.down, outputs_of=of))


def models(spec, device, *hows, **options):
    """Return converted models of the same weights."""
    torch.manual_seed(0)
    first = MLP(**options).to(device, torch.bfloat16)
    made = []
    for how in hows:
        model = copy.deepcopy(first)
        model.how = how
        made.append(ht.quantize_(model, spec))
    return made


@pytest.fixture
def handed(monkeypatch):
    """The kinds of gradients that layers of several features got, in the order of backward."""
    kinds = []
    gradients = Backward.gradients

    def seen(self, grad, *args, **kwargs):
        kinds.append(isinstance(grad, ht.HybridTensor))
        return gradients(self, grad, *args, **kwargs)

    monkeypatch.setattr(Backward, "gradients", seen)
    return kinds


def step(model, x):
    """Train a step, and return the loss, all gradients, and the layers' states."""
    x = x.detach().requires_grad_()
    y = model(x)
    y.backward(random_tensor(*y.shape, seed=9, device=y.device))
    found = [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    ht.step_(model)
    return [*found, *(buffer.clone() for buffer in model.buffers())]


def assert_same(one, other):
    assert len(one) == len(other)
    for got, want in zip(one, other, strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("spec", "shape", "packed"), covered([*SPECS], [(48, 64), (2, 12, 64), (2, 3, 7, 64)], [False, True]), ids=str
)
def test_bits_are_those_of_layers_that_quantize_themselves(spec, shape, packed, device, handed):
    told, values, torchs = models(spec, device, "told", "values", "torch", packed=packed)
    for seed in range(3):  # delayed scales go on
        x = random_tensor(*shape, seed=seed, device=device)
        del handed[:]
        made = step(told, x)
        assert handed[1:] == [SPECS[spec]] * len(told.layers)
        for other in (values, torchs):
            assert_same(made, step(other, x))


@pytest.mark.parametrize("packed", [False, True], ids=["two", "packed"])
@pytest.mark.parametrize("hidden", [16, 48, 80])
def test_features_that_fill_no_tile(hidden, packed, device):
    for spec in ("fp8", "fp8_delayed"):
        told, values = models(spec, device, "told", "values", packed=packed, hidden=hidden)
        for seed in range(2):
            x = random_tensor(33, 64, seed=seed, device=device)
            assert_same(step(told, x), step(values, x))


@pytest.mark.parametrize("spec", ["fp8", "fp8_delayed"])
@pytest.mark.parametrize("frozen", ["input", "a weight", "weights"])
def test_faces_that_nobody_multiplies_are_not_made(spec, frozen, device, handed):
    told, values = models(spec, device, "told", "values")
    x = random_tensor(32, 64, device=device)
    found = []
    for model in (told, values):
        layers = list(model.layers.values())
        for layer in layers[: {"input": 0, "a weight": 1, "weights": 2}[frozen]]:
            layer.weight.requires_grad_(False)
        leaf = x.clone().requires_grad_(frozen != "input")
        for _ in range(2):
            model(leaf).sum().backward()
            ht.step_(model)
        found.append([leaf.grad, *(p.grad for p in model.parameters())])
    for got, want in zip(*found, strict=True):
        assert (got is None) == (want is None)
        assert got is None or torch.equal(got, want)
    assert handed[1:3] == [True, True]


def with_bias(model):
    for layer in model.layers.values():
        layer.bias = nn.Parameter(torch.ones(128, dtype=layer.weight.dtype, device=layer.weight.device))


def hooked(model):
    for layer in model.layers.values():
        layer.register_forward_hook(lambda module, args, out: out.register_hook(lambda grad: grad * 2) and None)


def hooked_backward(model):
    for layer in model.layers.values():
        layer.register_full_backward_hook(lambda module, grads, outs: (grads[0] * 2,))


def retained(model):
    for layer in model.layers.values():
        layer.register_forward_hook(lambda module, args, out: out.retain_grad())


def scaled(model):
    for layer in model.layers.values():
        layer.register_forward_hook(lambda module, args, out: out * 2)


def plain(model):
    ht.plain_(model.layers)


def in_other_order(model):
    gate, up = model.layers.values()
    of = (up, gate) if model.how == "told" else ()
    model.forward = lambda x: model.down(ht.swiglu(gate(x), up(x), into=model.down, outputs_of=of))


def hooked_afterwards(model, action=lambda y: y.register_hook(lambda grad: grad * 2)):
    gate, up = model.layers.values()
    of = (gate, up) if model.how == "told" else ()

    def forward(x):
        model.outputs = gate(x), up(x)
        y = ht.swiglu(*model.outputs, into=model.down, outputs_of=of)
        for output in model.outputs:
            action(output)
        return model.down(y)

    model.forward = forward


def retained_afterwards(model):
    hooked_afterwards(model, torch.Tensor.retain_grad)


def twice_the_same(model):
    gate, _ = model.layers.values()
    of = (gate, gate) if model.how == "told" else ()

    def forward(x):
        y = gate(x)
        return model.down(ht.swiglu(y, y, into=model.down, outputs_of=of))

    model.forward = forward
    model.layers["up"].requires_grad_(False)


CHANGES = [
    with_bias, hooked, hooked_backward, retained, scaled, plain, in_other_order, hooked_afterwards, retained_afterwards,
    twice_the_same,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("spec", ["fp8", "fp8_delayed"])
def test_values_go_where_they_are_wanted(spec, change, device, handed):
    told, values = models(spec, device, "told", "values")
    for model in (told, values):
        change(model)
    for seed in range(2):
        x = random_tensor(32, 64, seed=seed, device=device)
        assert_same(step(told, x), step(values, x))
    assert not any(handed)


def test_who_watches_wants_values(device, handed):
    (told,) = models("fp8", device, "told")
    report = ht.check(told, random_tensor(32, 64, device=device), show=False)
    assert report
    assert not any(handed)


class Observer:
    """Notes the kinds of output gradients."""

    def __init__(self):
        self.kinds = []

    def observe_operand(self, layer, role, values, call):
        if role == "grad_output":
            self.kinds.append(type(values))

    def observe_product(self, layer, gemm, left, right, dtype):
        """Ignore it."""


def test_who_watches_backward_alone_wants_values(device):
    (told,) = models("fp8", device, "told")
    y, watching = told(random_tensor(32, 64, device=device)), Observer()
    observers.append(watching)
    try:
        y.sum().backward()
    finally:
        observers.remove(watching)
    assert watching.kinds == [torch.Tensor] * 3


def test_amaxes_are_measured_once(device, monkeypatch):
    (told,) = models("fp8", device, "told")
    cast, given = OutputGradient.cast, []

    def seen(self, grad, amax):
        given.append((grad.abs().max().float(), self.inputs(grad, amax)))
        return cast(self, grad, amax)

    monkeypatch.setattr(OutputGradient, "cast", seen)
    told(random_tensor(32, 64, device=device).requires_grad_()).sum().backward()
    assert len(given) == 2
    for amax, inputs in given:
        assert inputs.row_amax == inputs.column_amax == amax


def test_anomaly_mode_looks_at_values(device):
    told, values = models("fp8", device, "told", "values")
    x = random_tensor(32, 64, device=device)
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        made = step(told, x)
    assert_same(made, step(values, x))


@pytest.mark.parametrize("shape", [(64,), (0, 64), (2, 0, 64)], ids=str)
def test_a_vector_and_nothing(shape, device):
    for spec in ("fp8", "fp8_delayed"):
        told, values = models(spec, device, "told", "values")
        x = random_tensor(*shape, device=device)
        assert_same(step(told, x), step(values, x))


@pytest.mark.parametrize("when", ["outside", "inside"])
def test_autocast(when, device):
    told, values = models("fp8", device, "told", "values")
    x = random_tensor(32, 64, device=device).float()
    with torch.autocast(device, torch.bfloat16):
        found = [model(x.clone().requires_grad_()) for model in (told, values)]
        if when == "inside":
            [y.sum().backward() for y in found]
    if when == "outside":
        [y.sum().backward() for y in found]
    assert_same([p.grad for p in told.parameters()], [p.grad for p in values.parameters()])


@pytest.mark.parametrize("spec", ["fp8", "fp8_delayed"])
@pytest.mark.parametrize("packed", [False, True], ids=["two", "packed"])
def test_with_checkpoints(packed, spec, device, handed):
    told, values = models(spec, device, "told", "values", packed=packed)
    for seed in range(2):
        x = random_tensor(32, 64, seed=seed, device=device)
        expected = step(values, x)
        del handed[:]
        checkpointed = copy.copy(told)
        checkpointed.forward = lambda x: checkpoint(told, x, use_reentrant=False)
        assert_same(step(checkpointed, x), expected)
        assert handed[1:] == [True] * len(told.layers)


DELAYED = ht.DelayedFloat8Quantizer("e5m2"), ht.DelayedFloat8Quantizer("e4m3")
TWO_SLOTS = ht.HybridConfig(
    input=DELAYED[1], weight=DELAYED[1], grad_output=ht.HybridQuantizer(rowwise=DELAYED[0], columnwise=DELAYED[1])
)


def probed(model, loss, x):
    """Of one layer only, as methods that balance losses do."""
    torch.autograd.grad(1000 * loss, list(model.layers.values())[-1].weight, retain_graph=True)
    loss.backward()


def probed_at_the_input(model, loss, x):
    torch.autograd.grad(1000 * loss, x, retain_graph=True)
    loss.backward()


def of_weights(model, loss, x):
    loss.backward(inputs=list(model.parameters()))


def of_gate(model, loss, x):
    gate, _ = model.outputs
    (grad,) = torch.autograd.grad(1000 * loss, gate, retain_graph=True)
    assert type(grad) is torch.Tensor
    loss.backward()


@pytest.mark.parametrize("backward", [probed, probed_at_the_input, of_weights, of_gate], ids=lambda f: f.__name__)
@pytest.mark.parametrize("spec", ["fp8_delayed", TWO_SLOTS], ids=["one slot", "two slots"])
def test_backwards_that_reach_a_part_record_what_they_use(spec, backward, device):
    found = []
    for model in models(spec, device, "told", "values"):
        hooked_afterwards(model, lambda y: None)
        for seed in range(2):
            x = random_tensor(32, 64, seed=seed, device=device).requires_grad_()
            backward(model, model(x).float().square().sum(), x)
            ht.step_(model)
        found.append([*(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())])
    assert_same(*found)


@pytest.mark.parametrize("packed", [False, True], ids=["two", "packed"])
@pytest.mark.parametrize("spec", ["fp8", "fp8_delayed"])
@pytest.mark.skipif(two_parts._nodes_go(), reason="before torch 2.13 a backward in two parts raises")
def test_a_backward_in_two_parts_gives_the_same(spec, packed, device):
    """The second part begins with the gradient that the first one had, whose faces would not be enough."""
    found = []
    for model in models(spec, device, "told", "values", packed=packed):
        x = random_tensor(32, 64, device=device).requires_grad_()
        y = model(x)
        _, groups = stage_backward_input([y], [torch.ones_like(y)], [x], model.parameters())
        stage_backward_weight(model.parameters(), groups)
        ht.step_(model)
        found.append([x.grad, *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())])
    assert_same(*found)


def test_one_layer_alone_records(device):
    found = []
    for model in models("fp8_delayed", device, "told", "values"):
        gate, up = model.layers.values()
        x = random_tensor(32, 64, device=device).requires_grad_()
        for quiet, loud in ((gate, up), (up, gate)):
            with ht.without_recording(quiet):
                one = quiet(x)
            outputs, of = (one, loud(x)), (quiet, loud) if model.how == "told" else ()
            model.down(ht.swiglu(*outputs, into=model.down, outputs_of=of)).sum().backward()
        model(x).sum().backward()
        ht.step_(model)
        found.append([x.grad, *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())])
    assert_same(*found)


def test_a_hook_of_the_graph_cannot_copy_faces(device):
    (told,) = models("fp8", device, "told")
    gate, up = (layer(random_tensor(32, 64, device=device)) for layer in told.layers.values())
    memory = torch.zeros_like(gate)
    gate.grad_fn.register_prehook(lambda grads: memory.copy_(grads[0]) and None)
    with pytest.raises(ValueError, match=r"copy_: .* was quantized for other layers .* leave into= or outputs_of= out"):
        ht.swiglu(gate, up, outputs_of=tuple(told.layers.values())).sum().backward()


@pytest.mark.parametrize("packed", [False, True], ids=["two", "packed"])
def test_batched_gradients(packed):
    """Oracle: one after the other. They are torch's own operations, which batch."""
    given = [random_tensor(4, 8, seed=i).float().requires_grad_() for i in range(1 if packed else 2)]
    y = ht.rms_norm(ht.swiglu(*given))
    grads = random_tensor(3, *y.shape, seed=5).float()
    made = torch.autograd.grad(y, given, grads, is_grads_batched=True, retain_graph=True)
    for i, grad in enumerate(grads):
        for got, want in zip(made, torch.autograd.grad(y, given, grad, retain_graph=True), strict=True):
            torch.testing.assert_close(got[i], want)


def test_another_reader_of_the_outputs_raises(device):
    """Autograd would add its gradient to faces."""
    told, _ = models("fp8", device, "told", "values")
    gate, up = (layer(random_tensor(32, 64, device=device)) for layer in told.layers.values())
    y = ht.swiglu(gate, up, outputs_of=tuple(told.layers.values()))
    with pytest.raises(NotImplementedError, match="add"):
        (y.sum() + gate.sum()).backward()


def test_gradients_of_gradients(device):
    gate_up = random_tensor(4, 16, device=device).float().requires_grad_()

    def second(function):
        (first,) = torch.autograd.grad(function(gate_up).sum(), gate_up, create_graph=True)
        return torch.autograd.grad(first.square().sum(), gate_up)

    def torchs(x):
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    for got, expected in zip(second(ht.swiglu), second(torchs), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("packed", [False, True], ids=["two", "packed"])
def test_in_graphs_values_go_on(packed, device):
    told, torchs = models("fp8", device, "told", "torch", packed=packed)
    x = random_tensor(32, 64, device=device)
    found = [step(torch.compile(model, backend="aot_eager", fullgraph=True), x) for model in (told, torchs)]
    assert_same(*found)
    torch._dynamo.reset()


def test_what_is_told_is_checked():
    gate, up = random_tensor(4, 8), random_tensor(4, 8, seed=1)
    layer = nn.Linear(8, 8)
    for given, of in (((gate, up), layer), ((gate,), (layer, layer)), ((gate, up), (layer,) * 3)):
        with pytest.raises(ValueError, match="one layer of each of"):
            ht.swiglu(*given, outputs_of=of)
    scripted = SimpleNamespace(get=None)  # not a table of parameters
    other = nn.Identity()
    object.__setattr__(other, "_parameters", scripted)
    assert torch.equal(ht.swiglu(gate, up, outputs_of=(other, other)), ht.swiglu(gate, up))
    with pytest.raises(TypeError, match="linear layers as outputs_of"):
        ht.swiglu(gate, up, outputs_of=(layer, 3))
    for odd in (random_tensor(4, 7), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"\[\.\.\., 2 \* N\] is required without up"):
            ht.swiglu(odd)
