"""``swiglu``. Oracle: torch's own operations, bitwise."""

import pytest
import torch
import torch.nn.functional as F
from graphs import Graphs
from kernels import require_kernels
from torch import nn

import hybridtensor as ht
from hybridtensor.ops.swiglu import swiglu_backward_cuda, swiglu_cuda
from hybridtensor.testing import random_tensor, saved_for_backward

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
EDGES = torch.tensor(
    [0.0, -0.0, 1e-30, -1e-30, 88.0, -88.0, -104.0, 3e38, -3e38, float("inf"), -float("inf"), float("nan")]
)


def torchs(gate, up):
    return F.silu(gate) * up


def gradients(function, gate, up, grad):
    gate, up = (x.detach().requires_grad_() for x in (gate, up))
    y = function(gate, up)
    y.backward(grad)
    return y.detach(), gate.grad, up.grad


def assert_same_bits(made, expected):
    for got, want in zip(made, expected, strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (5, 33), (2, 3, 128), (7, 2048), (0, 16)])
def test_bits_are_torchs(shape, dtype, device):
    gate, up, grad = (random_tensor(*shape, seed=i, device=device).to(dtype) * 3 for i in range(3))
    assert_same_bits(gradients(ht.swiglu, gate, up, grad), gradients(torchs, gate, up, grad))


@pytest.mark.parametrize("dtype", DTYPES)
def test_edges(dtype, device):
    pairs = torch.cartesian_prod(EDGES, EDGES).to(device, dtype)
    gate, up = (x.contiguous() for x in pairs.unbind(1))
    made, expected = (gradients(f, gate, up, torch.ones_like(gate)) for f in (ht.swiglu, torchs))
    for got, want in zip(made, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("layout", ["chunks", "columns", "transposed"])
def test_strided_rows(layout, device):
    x, grad = random_tensor(6, 64, device=device), random_tensor(6, 32, seed=2, device=device)
    gate, up = x.chunk(2, dim=-1)
    if layout == "columns":
        gate, up = x[:, ::2], x[:, 1::2]
    elif layout == "transposed":
        gate, up, grad = gate.t(), up.t(), grad.t()
    assert_same_bits(gradients(ht.swiglu, gate, up, grad), gradients(torchs, gate, up, grad))


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_compute_what_torch_does(dtype, device):
    """Bit by bit on a GPU; Triton's interpreter has another exponential, at most one rounding away."""
    require_kernels(device)
    gate, up, grad = (random_tensor(9, 40, seed=i, device=device).clamp(-30, 30).to(dtype) for i in range(3))
    made = [*swiglu_cuda(gate, up), *swiglu_backward_cuda(grad, gate, up)]
    expected = gradients(torchs, gate, up, grad)
    if device == "cuda":
        assert_same_bits(made, expected)
    step = torch.finfo(dtype).eps
    for got, want in zip(made, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=4 * step, atol=step / 64)


@pytest.mark.parametrize("shape", [(9, 40), (2, 5, 1040)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_gradients_and_amaxes(dtype, shape, device):
    """Oracle: the two gradients, and the largest of their magnitudes; NaN does not count."""
    require_kernels(device)
    grad, gate, up = (random_tensor(*shape, seed=i, device=device).to(dtype) for i in range(3))
    up.view(-1)[3] = float("nan")
    both = torch.cat([gate, up], dim=-1)
    of_gate, of_up, *amaxes = swiglu_backward_cuda(grad, gate, up, False, True)
    packed, amax = swiglu_backward_cuda(grad, *both.chunk(2, dim=-1), True, True)
    assert_same_bits([packed], [torch.cat([of_gate, of_up], dim=-1)])
    assert_same_bits(amaxes, [x.abs().nan_to_num(0).max().float().view(1) for x in (of_gate, of_up)])
    assert torch.equal(amax, torch.maximum(*amaxes))
    assert_same_bits(swiglu_backward_cuda(grad, gate, up), [of_gate, of_up])


def test_only_the_inputs_are_saved():
    gate, up = (random_tensor(8, 32, seed=i).requires_grad_() for i in range(2))
    with saved_for_backward() as saved:
        ht.swiglu(gate, up)
    assert saved.nbytes() == 2 * gate.nbytes
    with saved_for_backward() as saved:
        torchs(gate, up)
    assert saved.nbytes() == 3 * gate.nbytes


def test_gradients_of_gradients():
    gate, up = (random_tensor(4, 8, seed=i).float().requires_grad_() for i in range(2))

    def second(function):
        first = torch.autograd.grad(function(gate, up).sum(), (gate, up), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), (gate, up))

    for got, expected in zip(second(ht.swiglu), second(torchs), strict=True):
        torch.testing.assert_close(got, expected)


def test_gradients_of_one_input_alone():
    gate, up = random_tensor(4, 8), random_tensor(4, 8, seed=1).requires_grad_()
    ht.swiglu(gate, up).sum().backward()
    assert gate.grad is None
    assert torch.equal(up.grad, F.silu(gate))


@pytest.mark.filterwarnings("default")
def test_a_graph_has_operations_that_a_compiler_fuses():
    gate, up, grad = (random_tensor(4, 32, seed=i) for i in range(3))
    graphs = Graphs()
    compiled = torch.compile(ht.swiglu, fullgraph=True, backend=graphs.backend())
    assert_same_bits(gradients(compiled, gate, up, grad), gradients(torchs, gate, up, grad))
    assert not graphs.count("forward", torch.ops.hybridtensor.swiglu.default)
    torch._dynamo.reset()


class Gated(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.gate_proj, self.up, self.down = nn.Linear(32, 256), nn.Linear(32, 256), nn.Linear(256, 32)
        self.activation = activation

    def forward(self, x):
        return self.down(self.activation(self.gate_proj(x), self.up(x)))


@pytest.mark.filterwarnings("default")
def test_a_graph_makes_the_input_of_the_next_layer_again():
    """What it saves of 64 tokens: gate and up, and with torch's operations also the input of a plain layer behind."""
    saved, results, operations = {}, [], {}
    for activation in (ht.swiglu, torchs):
        for spec in (None, "fp8_block+save_original_input", "fp8_block"):
            torch._dynamo.reset()
            torch.manual_seed(0)
            net, graphs = Gated(activation).bfloat16(), Graphs()
            if spec is not None:
                ht.quantize_(net, spec)
            x = random_tensor(128, 32, seed=5)
            torch.compile(net, fullgraph=True, backend=graphs.backend())(x).sum().backward()
            if spec is not None:
                results.append([parameter.grad for parameter in net.parameters()])
            large = [t for t in graphs.saved(outputs=1) if t.numel() == 128 * 256]
            saved[activation, spec] = sum(t.nbytes for t in large) / (128 * 256)
            nodes = [node for graph in graphs.graphs.values() for node in graph.graph.nodes]
            operations[activation, spec] = [str(node.target) for node in nodes if node.op == "call_function"]
    torch._dynamo.reset()
    assert list(saved.values()) == [4, 4, 4, 6, 4, 4]
    assert operations[ht.swiglu, "fp8_block"] == operations[torchs, "fp8_block"], "nothing is in the compiler's way"
    for other in results[1:]:
        assert_same_bits(other, results[0])


def test_vmap_and_grad():
    gate, up = random_tensor(4, 8).float(), random_tensor(4, 8, seed=1).float()
    assert torch.equal(torch.func.vmap(ht.swiglu)(gate, up), torchs(gate, up))
    found = torch.func.grad(lambda g: ht.swiglu(g, up).sum())(gate)
    assert torch.equal(found, torch.func.grad(lambda g: torchs(g, up).sum())(gate))


@pytest.mark.parametrize(
    ("gate", "up", "error", "told"),
    [
        (torch.ones(2, 3), torch.ones(3, 2), ValueError, r"one shape \[..., N\], dtype and device are required"),
        (torch.ones(2, 3), torch.ones(2, 3).bfloat16(), ValueError, "torch.float32 .* and torch.bfloat16"),
        (torch.ones(()), torch.ones(()), ValueError, "one shape"),
        (torch.ones(2, dtype=torch.int32), torch.ones(2), TypeError, "gate: bfloat16, float16 or float32"),
        ("x", torch.ones(2), TypeError, "gate: a tensor is required"),
    ],
)
def test_wrong_use(gate, up, error, told):
    with pytest.raises(error, match=told):
        ht.swiglu(gate, up)
