"""Root mean square normalization: of each row, ``weight * (factor * x)`` in fp32, rounded once, with
``factor = 1 / sqrt(mean(x ** 2) + eps)`` in float64, rounded to fp32: the order of a sum in float64 next to never
changes that. The weight's gradient is added in fp32, in as many parts as programs run, and is the reference's up to
roundings.

Shape letters: ``M`` rows, ``K`` columns.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hybridtensor.ops.kernel_library import Launch, on_device
from hybridtensor.ops.library import define, implement
from hybridtensor.ops.prologue import Normed
from hybridtensor.ops.references.blocks import block_amax

MOST_COLUMNS = 16384  # that a program holds in registers
_PROGRAMS = 2  # of backward, per multiprocessor


def factors(x: Tensor, eps: float) -> Tensor:
    """Return the rows' factors by differentiable operations."""
    return torch.rsqrt(x.double().square().mean(dim=1) + eps).float()


def _reference(x: Tensor, weight: Tensor, eps: float, measure: bool) -> list[Tensor]:
    factor = factors(x, eps)
    y = Normed(factor, weight).matrix(x)
    return [y, factor, *([block_amax(y, (None, None)).view(1)] if measure else [])]


def backward(grad: Tensor, x: Tensor, weight: Tensor, factor: Tensor) -> list[Tensor]:
    """Return the gradients of ``x`` and ``weight`` by differentiable operations."""
    v, dy = x.float() * factor[:, None], grad.float()
    dv = dy * weight.float()
    inner = (dv * v).mean(dim=1, keepdim=True)
    grad_x = factor[:, None] * (dv - v * inner)
    return [grad_x.to(x.dtype).contiguous(), (dy * v).sum(dim=0).to(weight.dtype)]


def _fake(x: Tensor, weight: Tensor, eps: float, measure: bool) -> list[Tensor]:
    sizes = (x.shape[0], 1) if measure else x.shape[:1]
    return [x.new_empty(x.shape), *(x.new_empty(size, dtype=torch.float32) for size in sizes)]


def _factors_fake(x: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape[:1], dtype=torch.float32)


def _backward_fake(grad: Tensor, x: Tensor, weight: Tensor, factor: Tensor) -> list[Tensor]:
    return [x.new_empty(x.shape), weight.new_empty(weight.shape)]


def norm_cuda(x: Tensor, weight: Tensor, eps: float, measure: bool) -> list[Tensor]:
    """Implement the forward of the RMS norm on a GPU, by the definition for rows longer than a kernel takes."""
    if not _has_kernel(x):
        return _reference(x, weight, eps, measure)
    out, factor = x.new_empty(x.shape), x.new_empty(x.shape[0], dtype=torch.float32)
    amax = factor.new_zeros(1) if measure else None
    _forward(x, weight, eps, out, factor, amax)
    return [out, factor] if amax is None else [out, factor, amax]


def norm_factors_cuda(x: Tensor, eps: float) -> Tensor:
    """Implement the reciprocal root mean square of every row on a GPU, ``[M]``."""
    if not _has_kernel(x):
        return factors(x, eps)
    factor = _factors_fake(x, eps)
    _forward(x, factor, eps, None, factor, None)
    return factor


def _has_kernel(x: Tensor) -> bool:
    return bool(x.numel()) and x.shape[1] <= MOST_COLUMNS


def _forward(
    x: Tensor, weight: Tensor, eps: float, out: Tensor | None, factor: Tensor, amax: Tensor | None
) -> None:
    x, weight = _with_contiguous_rows(x), weight if out is None else weight.contiguous()
    # ``factor`` stands for what this variant of the kernel does not touch: Triton wants a tensor for every pointer.
    given = (x, weight, factor if out is None else out, factor, factor if amax is None else amax)
    with on_device(x.device):
        launch = _launch(
            _kind(x, weight), _aligned(given), store=out is not None, measure=amax is not None
        )
        launch(x, x.stride(0), *given[1:], x.shape[1], eps)


def norm_backward_cuda(grad: Tensor, x: Tensor, weight: Tensor, factor: Tensor) -> list[Tensor]:
    """Implement the backward of the RMS norm on a GPU, by the definition for rows longer than a kernel takes."""
    if not _has_kernel(x):
        return backward(grad, x, weight, factor)
    x, weight, grad = _with_contiguous_rows(x), weight.contiguous(), _with_contiguous_rows(grad)
    grad_x = x.new_empty(x.shape)
    partial = factor.new_empty(_programs(x.device, x.shape[0]), x.shape[1])
    given = (grad, x, weight, factor, grad_x, partial)
    with on_device(x.device):
        launch = _backward_launch(
            _kind(x, weight), _aligned(given), grad.stride(0), partial.shape[0]
        )
        launch(grad, grad.stride(0), x, x.stride(0), *given[2:], *x.shape)
    return [grad_x, partial.sum(dim=0).to(weight.dtype)]


def _with_contiguous_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _programs(device: torch.device, rows: int) -> int:
    if device.type != "cuda":
        return min(rows, _PROGRAMS)
    properties = torch.cuda.get_device_properties(device)
    return min(rows, _PROGRAMS * int(properties.multi_processor_count))


def _aligned(tensors: tuple[Tensor, ...]) -> tuple[bool, ...]:
    return tuple(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def _kind(x: Tensor, weight: Tensor) -> tuple[object, ...]:
    """Return a key of what Triton specializes on, except alignment."""
    return x.shape, x.stride(0), x.dtype, weight.dtype, x.device


# Alignment is no argument of the kernel, but Triton specializes on it, and a Launch keeps the first kernel that it
# compiled.
@functools.lru_cache(maxsize=1024)
def _launch(
    kind: tuple[torch.Size, object], aligned: tuple[bool, ...], *, store: bool, measure: bool
) -> Launch:
    rows, columns = kind[0]
    block = _block(columns)
    options: dict[str, int | None] = {"num_warps": _warps(block)}
    return Launch(
        "norm", "norm_kernel", rows, B=block, STORE=store, MEASURE=measure, options=options
    )


@functools.lru_cache(maxsize=1024)
def _backward_launch(
    kind: tuple[torch.Size, object], aligned: tuple[bool, ...], grad_stride: int, programs: int
) -> Launch:
    block = _block(kind[0][1])
    options: dict[str, int | None] = {"num_warps": _warps(block)}
    return Launch("norm", "norm_backward_kernel", programs, B=block, options=options)


def _block(columns: int) -> int:
    return max(16, 1 << (columns - 1).bit_length())


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


rms_norm = define(
    "rms_norm(Tensor x, Tensor weight, float eps, bool measure) -> Tensor[]",
    reference=_reference,
    fake=_fake,
)
"""The normalized matrix ``[M, K]``, the factors of its rows, fp32 ``[M]``, and if wanted its amax, fp32 ``[1]``."""
implement("rms_norm", norm_cuda)

rms_norm_factors = define(
    "rms_norm_factors(Tensor x, float eps) -> Tensor", reference=factors, fake=_factors_fake
)
"""The factors alone, where a cast normalizes."""
implement("rms_norm_factors", norm_factors_cuda)

rms_norm_backward = define(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor factor) -> Tensor[]",
    reference=backward,
    fake=_backward_fake,
)
"""The gradients of ``x`` and ``weight``."""
implement("rms_norm_backward", norm_backward_cuda)
