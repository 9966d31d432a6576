"""Compiling the kernels of a graph in threads, while AOTAutograd and Inductor work on the graph.

Triton compiles a kernel when it is launched first, one after the other, and builds a launcher in C for each signature:
0.4 s for casts to FP8, up to 4 s where values are rotated and rounded at random. Most of it runs outside of Python's
lock. Each cast that Inductor's graph will have therefore runs once in a thread, on a small matrix of zeros: Triton then
has the kernels that the graph launches. A thread that fails changes nothing: the graph's launch compiles, and raises.
The code of a graph waits for its own kernels only: forward runs while those of backward are compiled.

Weights are cast in lists, which the graph's lowering puts together. While a weight is traced, the kernel of lists is
compiled, for two like it; each kernel in vain would hold up the others, whose Python parts run one at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import torch
from torch import Tensor
from torch._inductor import config
from torch.utils import _pytree as pytree
from torch.utils._pytree import PyTree

from hybridtensor.ops.cast.lengths import few_like
from hybridtensor.ops.cast.list_operator import measured, quantized
from hybridtensor.ops.library import implementation

_THREADS = 8
_MOST_SEEN = 4096

_executor: ThreadPoolExecutor | None = None
_started: dict[object, Future[None]] = {}  # equal blocks of a model have equal casts
_needed: set[Future[None]] = set()  # of the graph that is lowered now
_traces_weight = False
_of_weights: set[object] = set()


class _Zeros(NamedTuple):
    """A tensor of zeros that a thread allocates."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def compile_ahead(name: str, args: PyTree, *, is_lowered: bool = False) -> None:
    """Start to compile the kernels that a call of an operator launches, unless that was started.

    Args:
        name: One of ``quantize``, ``measure``, ``quantize_all`` and ``measure_all``.
        args: The operator's arguments by position: traced tensors, or nodes of a graph.
        is_lowered: The next code of a graph calls it, and ``wait_for_kernels`` waits for it.
    """
    values = torch.fx.node.map_arg(tuple(args), lambda node: node.meta["val"])
    tensors = [value for value in pytree.tree_leaves(values) if isinstance(value, Tensor)]
    if not _are_on_a_gpu(tensors):
        return
    few = pytree.tree_map(_few, values)
    key = name, str(few)
    if _traces_weight:
        _of_weights.add(key)
        name, few = _of_list(name, few)
    elif key in _of_weights and not is_lowered:
        return  # Inductor traces the graph again
    if name.endswith("_all"):
        few = _two_of_each(few)
    key = name, str(few)
    if key not in _started:
        if len(_started) >= _MOST_SEEN:
            _started.clear()
            _of_weights.clear()
        global _executor
        if _executor is None:
            _executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="hybridtensor-compile")
        _started[key] = _executor.submit(_run, name, few, tensors[0].device)
    if is_lowered:
        _needed.add(_started[key])


@contextlib.contextmanager
def weight_casts() -> Iterator[None]:
    """Compile the kernels of lists for casts that are traced inside: they are of a weight."""
    global _traces_weight
    before, _traces_weight = _traces_weight, True
    try:
        yield
    finally:
        _traces_weight = before


def _of_list(name: str, args: tuple[object, ...]) -> tuple[str, tuple[object, ...]]:
    """Return the operator of lists in place of ``name``, with its arguments; the same if lists cannot be cast so."""
    if name == "measure":
        x, request = args
        return "measure_all", ([x], request)
    x, request, scale, record, rounding, first_row, of_row, of_column, _, num_amaxes = args
    if rounding is not None or first_row:
        return name, args
    lists = ([] if given is None else [given] for given in (scale, record, of_row, of_column))
    return "quantize_all", ([x], request, *lists, None, num_amaxes)


def _two_of_each(args: tuple[object, ...]) -> tuple[object, ...]:
    """Return arguments whose lists have different matrices only, two at least: one kernel casts any number."""
    lists = {i: given for i, given in enumerate(args) if isinstance(given, list) and given}
    different = list(dict.fromkeys(zip(*lists.values(), strict=True)))
    columns = zip(*(different * 2 if len(different) == 1 else different), strict=True)
    chosen = dict(zip(lists, map(list, columns), strict=True))
    return tuple(chosen.get(i, given) for i, given in enumerate(args))


def wait_for_kernels() -> None:
    """Wait until the kernels of calls that were lowered are compiled; if CUDA graphs are captured, all kernels."""
    global _executor
    # During the capture of a graph no thread may allocate memory or load a kernel.
    wait(_started.values() if config.triton.cudagraphs else _needed)
    _needed.clear()
    if _executor is not None and all(future.done() for future in _started.values()):
        _executor.shutdown()
        _executor = None


def _run(name: str, args: tuple[object, ...], device: torch.device) -> None:
    """Run an operator on zeros, in a thread in which nothing traces."""
    # What it raises stays in its future, which nobody asks.
    with torch.cuda.device(device), torch.no_grad():
        allocated = pytree.tree_map(_allocate, args, is_leaf=_is_zeros)
        _function(name, device.type)(*allocated)


def _function(name: str, device_type: str) -> Callable[..., object]:
    of_lists: dict[str, Callable[..., object]] = {
        "measure_all": measured,
        "quantize_all": quantized,
    }
    return of_lists.get(name) or implementation(name, device_type)


def _are_on_a_gpu(tensors: list[Tensor]) -> bool:
    return torch.cuda.is_initialized() and all(tensor.is_cuda for tensor in tensors)


def _few(value: object) -> object:
    """Return an argument, zeros of a smaller shape in place of a tensor, or 0 for a symbol."""
    if isinstance(value, Tensor):
        return _Zeros(tuple(map(few_like, value.shape)), value.dtype, value.device)
    return 0 if isinstance(value, torch.SymInt) else value


def _is_zeros(value: object) -> bool:
    return isinstance(value, _Zeros)  # to pytree a tuple with three leaves


def _allocate(value: object) -> object:
    return (
        torch.zeros(value.shape, dtype=value.dtype, device=value.device)
        if isinstance(value, _Zeros)
        else value
    )
