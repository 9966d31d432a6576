"""Batches of other lengths: their kernels are compiled together when lengths begin to vary, and none later."""

import collections

import pytest
import torch
from torch import nn

import hybridtensor as ht
from hybridtensor.formats import get_format
from hybridtensor.ops import NO_INPUTS, Cast, CastInputs, CastRequest
from hybridtensor.ops.cast import kernel, lengths, swiglu_gradients
from hybridtensor.ops.cast.lengths import lengths_to_compile
from hybridtensor.testing import random_tensor

FORMATS = ["fp8_e4m3_tensor", "fp8_e4m3_row", "fp8_e4m3_1x128", "mxfp8_e4m3", "nvfp4", "nvfp4_hadamard"]


def test_lengths_are_due_once_another_number_divides_them(monkeypatch):
    monkeypatch.setattr(lengths, "_SEEN", {})
    whole = (512, 640, 576)
    for kind, rows, due in (
        ("a", 64, ()), ("a", 512, ()), ("b", 32, ()), ("a", 48, (*whole, 544, 528)), ("a", 32, ()), ("a", 8, (516,)),
        ("a", 4, ()), ("a", 65, (513,)), ("a", 66, ()), ("a", 64, ()), ("b", 96, ()), ("b", 128, (*whole, 544)),
        ("b", 33, (528, 516, 513)), ("c", 7, ()), ("c", 9, ()), ("c", 64, (*whole, 544, 528, 516, 513)),
    ):  # fmt: skip
        assert lengths_to_compile(kind, rows) == due, (kind, rows)


@pytest.fixture
def compiled(monkeypatch):
    """Return a function of how many kernels of casts were compiled in this test."""
    from hybridtensor.kernels import measure, norm, quantize, swiglu

    kernels = [
        quantize.cast_kernel, quantize.recast_kernel, measure.measure_kernel, measure.measure_flat_kernel,
        swiglu.swiglu_kernel, swiglu.swiglu_backward_kernel, swiglu.swiglu_backward_cast_kernel,
        norm.norm_kernel, norm.norm_backward_kernel,
    ]  # fmt: skip
    for one in kernels:
        monkeypatch.setattr(one, "device_caches", collections.defaultdict(one.create_binder))
    return lambda: sum(len(one.device_caches[torch.cuda.current_device()][0]) for one in kernels)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="only kernels of a GPU are compiled")
@pytest.mark.parametrize(("name", "delayed"), [(FORMATS[0], True), *((name, False) for name in FORMATS)])
def test_no_kernel_is_compiled_late(name, delayed, monkeypatch, compiled):
    monkeypatch.setattr(lengths, "_SEEN", {})
    monkeypatch.setattr(kernel, "_CASTS", {})
    cast, inputs = Cast(get_format(name), slot=0 if delayed else -1), NO_INPUTS
    request = CastRequest(cast, cast.for_columnwise())
    if delayed:
        inputs = CastInputs(encode_scale=torch.ones(4, device="cuda"), amax_record=torch.zeros(4, device="cuda"))
    counts, largest = [], 0.0
    for rows in (4096, 6144, 4097, 4128, 4160, 4112, 4100, 4224, 4608, 4106, 5999, 4352):
        x = random_tensor(rows, 256, device="cuda", seed=rows)
        made = kernel.cast_on_gpu(x, request, inputs).run(x, inputs)
        counts.append(compiled())
        assert made[0].qdata.shape[0] == rows
        largest = max(largest, x.abs().max().item())
    assert counts[0] == counts[1] < counts[2], "multiples of 64 have one kernel, until another length is seen"
    assert counts[2:] == counts[2:3] * (len(counts) - 2)
    assert not delayed or inputs.amax_record[0] == largest


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="only kernels of a GPU are compiled")
@pytest.mark.parametrize("packed", [False, True], ids=["two", "packed"])
@pytest.mark.parametrize("recipe", ["fp8", "fp8+pow2_scale", "fp8_delayed", "bf16"])
def test_no_kernel_of_a_norm_or_an_activation_is_compiled_late(recipe, packed, monkeypatch, compiled):
    """Also none of those that cast what they compute."""
    for module, name in ((lengths, "_SEEN"), (kernel, "_CASTS"), (swiglu_gradients, "_LAUNCHES")):
        monkeypatch.setattr(module, name, {})
    sizes = [512] if packed else [256, 256]
    layers = nn.ModuleList([*(nn.Linear(128, size, bias=False) for size in sizes), nn.Linear(256, 128, bias=False)])
    ht.quantize_(layers.to("cuda", torch.bfloat16), recipe)
    *first, last = layers
    counts = []
    for rows in (4096, 6144, 4097, 4128, 4160, 4112, 4100, 4224, 4608, 4106, 5999, 4352):
        x = random_tensor(rows, 128, device="cuda", seed=rows).requires_grad_()
        for _ in range(2):  # with a hint, the second cast runs other kernels
            y = ht.rms_norm(x, into=first)
            y = last(ht.swiglu(*(layer(y) for layer in first), into=last, outputs_of=first))
            y.backward(torch.ones_like(y))  # not expanded, which kernels would read a copy of
        ht.step_(layers)
        counts.append(compiled())
    assert counts[0] == counts[1], "multiples of 64 have one kernel, until another length is seen"
    assert counts[2:] == counts[2:3] * (len(counts) - 2)
