"""Layers whose products compute with values, because the device has no such elements.

Oracle: the same layers with faces of elements and scales, whose products multiply the same values: equal bits.
"""

import contextlib
import copy
from unittest.mock import patch

import pytest
import torch
from loops import same
from torch import nn
from torch.utils.checkpoint import checkpoint

import hybridtensor as ht
from hybridtensor import ops
from hybridtensor.ops.captures import stream_of
from hybridtensor.ops.scaled_mm import multiplies_values
from hybridtensor.quantizers import Quantizer
from hybridtensor.subclasses.face_cache import ForwardUse
from hybridtensor.testing import random_tensor, saved_for_backward

SPECS = [
    "mxfp8", "nvfp4", "nvfp4_1d_weight", "mxfp8_fwd_nvfp4_bwd", "nvfp4_fwd_mxfp8_bwd", "nvfp4_row_scaled_fwd_mxfp8_bwd",
    "mxfp8_dequantized_backward", "nvfp4_dequantized_backward", "high_precision_fwd_mxfp8_bwd",
    "mxfp8+save_original_input", "mxfp8+keep_faces",
]  # fmt: skip


@contextlib.contextmanager
def without():
    """Have no face be values."""
    no_values = patch.object(ops, "multiplies_values", lambda fmt, device: False)
    with no_values, patch.object(Quantizer, "plans", property(lambda quantizer: {})):
        yield


@pytest.fixture
def multiplied():
    """Whether the operands of each product were values, in order."""
    seen, product = [], ops.product

    def note(left, right, **options):
        seen.append(tuple(face.format.values_of is not None for face in (left, right)))
        return product(left, right, **options)

    with patch.object(ops, "product", note):
        yield seen


def model(spec, device):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64, bias=False)).to(device, torch.bfloat16)
    ht.quantize_(net, spec)
    return net


def step(net, seeds=(1,), run=None, rows=48):
    """Return outputs and gradients of a step of some microbatches."""
    device = net[0].weight.device
    found = []
    for seed in seeds:
        x = random_tensor(rows, 64, seed=seed, device=device).requires_grad_()
        y = (run or net)(x)
        y.backward(random_tensor(rows, 64, seed=9, device=device))
        found += [y.detach(), x.grad]
    found += [p.grad.clone() for p in net.parameters()]
    for p in net.parameters():
        p.grad = None
    with torch.no_grad():
        net[0].weight.add_(2**-9)
    return found


def steps(net, **options):
    return [t for _ in range(3) for t in step(net, **options)]


def emulates(device):
    """Whether the device multiplies none of these formats."""
    return multiplies_values(ht.formats.MXFP8_E4M3, torch.device(device))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("seeds", [(1,), (1, 2, 3)], ids=["step", "accumulation"])
def test_bits_are_those_of_elements(spec, seeds, device):
    net = model(spec, device)
    twin = copy.deepcopy(net)
    made = steps(net, seeds=seeds)
    with without():
        assert same(steps(twin, seeds=seeds), made)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("rows", [1, 17, 40, 101])
def test_any_number_of_tokens(spec, rows, device):
    """A rotation spreads the last ones over a whole block."""
    net = model(spec, device)
    twin = copy.deepcopy(net)
    made = step(net, rows=rows)
    with without():
        assert same(step(twin, rows=rows), made)


@pytest.mark.parametrize("spec", ["mxfp8", "nvfp4"])
def test_with_checkpoints(spec, device):
    net = model(spec, device)
    twin = copy.deepcopy(net)
    made = steps(net, run=lambda x: checkpoint(net, x, use_reentrant=False))
    with without():
        assert same(steps(twin, run=lambda x: checkpoint(twin, x, use_reentrant=False)), made)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("spec", ["mxfp8", "nvfp4"])
def test_in_graphs(spec, device):
    made = []
    for context in (torch.no_grad(), without()):  # the first means nothing: a context is wanted
        torch._dynamo.reset()
        net = model(spec, device)
        run = torch.compile(net, backend="aot_eager", fullgraph=True)
        with torch.enable_grad(), context, torch.enable_grad():
            made.append(steps(net, run=run))
    torch._dynamo.reset()
    assert same(*made)


def test_which_products_have_values(multiplied, device):
    """Of each layer the output's, that for the input, and that for the weight, whose input was saved as elements."""
    if not emulates(device):
        pytest.skip("this device multiplies the elements")
    net = model("mxfp8", device)
    step(net)
    assert multiplied == [(True, True)] * 2 + [(True, True), (True, False)] * 2
    multiplied.clear()
    step(net, seeds=(1, 2))  # the weight's faces are kept, as elements, once it is known that they are used again
    step(net, seeds=(1, 2))
    assert multiplied[-6:] == [(True, False)] * 6
    multiplied.clear()
    with torch.no_grad():
        net(random_tensor(48, 64, device=device))
    assert multiplied == [(True, False)] * 2  # evaluation may use a weight again


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_values_are_bf16_only(multiplied, dtype, device):
    net = nn.Linear(64, 64).to(device, dtype)
    ht.quantize_(net, "mxfp8")
    net(torch.ones(32, 64, dtype=dtype, device=device)).sum().backward()
    assert not any(map(any, multiplied))


def test_elements_are_saved_and_watched(multiplied, device):
    net = model("mxfp8", device)
    x = random_tensor(48, 64, device=device).requires_grad_()
    with saved_for_backward() as saved:
        net(x)
    large = [t for t in saved.tensors if t.numel() >= 48 * 64 and t.dtype == torch.bfloat16]
    assert all(t.shape == (48, 128) for t in large)  # what the activation saves
    multiplied.clear()
    ht.check(net, x, show=False)
    assert multiplied
    assert not any(map(any, multiplied))


def test_the_next_forward_s_face_has_elements(device):
    """Also while a forward of training holds values."""
    net = model("mxfp8", device)
    weight = net[0].weight
    expected = weight.forward_face()
    stamp = weight.stamp(weight.dtype)
    use = ForwardUse(True, False)
    row = weight.faces_in_eager_code(stamp, stream_of(weight.plain), weight.context, forward=use, columnwise=False).row
    assert (row.format.values_of is not None) == emulates(device)
    made = weight.forward_face()
    assert made.format is expected.format
    assert all(map(torch.equal, (t.view(torch.uint8) for t in made.tensors()),
                   (t.view(torch.uint8) for t in expected.tensors())))  # fmt: skip
