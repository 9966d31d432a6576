"""Ordering and recomputation of operations in a graph that a compiler partitions."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy

from hybridtensor.ops.library import define

if TYPE_CHECKING:
    from torch._functorch.partitioners import OpTypes

_AFTER = define(
    "after(Tensor x, Tensor other) -> Tensor",
    reference=lambda x, other: x.clone(),
    fake=lambda x, other: torch.empty_like(x),
)


def after(x: Tensor, other: Tensor) -> Tensor:
    """Return a copy of ``x``, which a graph makes after ``other``."""
    # A compiler that cuts a graph into forward and backward would do in forward what depends on nothing of backward,
    # and keep what comes of it.
    if x.itemsize > 1:
        copied: Tensor = _AFTER(x, other)
        return copied
    copied = _AFTER(x.view(torch.uint8), other)
    return copied.view(x.dtype)


@contextlib.contextmanager
def in_backward() -> Iterator[None]:
    """Keep in backward what is traced here, also what depends on no gradient: what it reads may come after forward."""
    # A private tag, which AOTAutograd sets while it traces a backward, and asks when it cuts the graph
    tag = "partitioner_tag"
    before = traceback.current_meta.get(tag)
    if before is not None:
        traceback.current_meta[tag] = "must_be_in_backward"
    try:
        yield
    finally:
        if before is not None:
            traceback.current_meta[tag] = before


def can_recompute(x: Tensor) -> bool:
    """Return whether ``prefer_recompute`` has an effect: while tracing, outside of checkpointed regions, for one cheap
    operation without buffers."""
    # A checkpointed region is recomputed as its policy says. A buffer may be written in the graph: what reads it would
    # be recomputed from the new contents.
    node = _producer(x)
    return node is not None and _is_cheap(node) and not is_in_region(x) and not _reads_state(node)


def prefer_recompute(x: Tensor) -> None:
    """Mark ``x`` for recomputation in backward; a compiler otherwise saves what an opaque operator reads."""
    node = _producer(x)
    if node is not None and can_recompute(x):
        node.meta.setdefault(
            "recompute", CheckpointPolicy.PREFER_RECOMPUTE
        )  # as checkpointed regions


def is_in_region(x: Tensor) -> bool:
    """Return whether a checkpointed region is traced: all its operations are marked, also an unused one that is
    added here."""
    node = node_of(x.detach())
    return node is not None and "ac_graph_id" in node.meta


def node_of(x: Tensor) -> fx.Node | None:
    """Return the node of ``x`` in the traced graph, or None; drives private functional tensors of AOTAutograd."""
    # Private in torch: AOTAutograd runs operations on functional tensors, which wrap those that its tracer knows.
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    mode = get_proxy_mode()
    if mode is None:
        return None
    if isinstance(x, FunctionalTensor):
        torch._functionalize_sync(x.elem)
        x = torch._from_functional_tensor(x.elem)
    found: fx.Node | None = get_proxy_slot(x, mode.tracer, None, lambda known: known.proxy.node)
    return found


_ATEN = torch.ops.aten
_VIEWS = (  # that the compiler puts others in place of, after it has traced
    _ATEN.transpose.int,
    _ATEN.detach.default,
    _ATEN._unsafe_view.default,
    _ATEN.unsqueeze.default,
    _ATEN.squeeze.dim,
)


def _is_cheap(node: fx.Node) -> bool:
    """Return whether a compiler recomputes an operation; not possible for one of several results."""
    return node.target is not operator.getitem and _is_recomputable(node)


def _is_recomputable(node: fx.Node) -> bool:
    return bool(_operations().is_recomputable(node)) or _is_view(node)


def _producer(x: Tensor) -> fx.Node | None:
    """Return the node that computes ``x``, or its base, in the traced graph; or None."""
    return _behind_views(node_of(x))


def _behind_views(node: object) -> fx.Node | None:
    while isinstance(node, fx.Node) and node.op == "call_function" and _is_view(node):
        node = node.args[0]
    return node if isinstance(node, fx.Node) and node.op == "call_function" else None


def _reads_state(node: fx.Node) -> bool:
    """Return whether cheap operations compute a node from a floating-point input without gradient, such as a buffer."""
    seen, left = {node}, [node]
    while left:
        at = left.pop()
        if at.op == "placeholder":
            known = at.meta.get("tensor_meta")
            if known is not None and known.dtype.is_floating_point and not known.requires_grad:
                return True
        if at.op == "call_function" and _is_recomputable(at) and not _is_residual(at):
            before = set(at.all_input_nodes) - seen
            seen |= before
            left += before
    return False


def _is_residual(node: fx.Node) -> bool:
    """Return whether a node is the sum of two results, as in a residual stream, which compilers save."""
    terms = node.all_input_nodes
    return node.target is _ATEN.add.Tensor and len(terms) == 2 and all(map(_behind_views, terms))


def _is_view(node: fx.Node) -> bool:
    return node.target in _VIEWS or bool(_operations().is_view(node))


@functools.cache
def _operations() -> OpTypes:
    """Return AOTAutograd's private lists of operations for partitioning."""
    from torch._functorch.partitioners import get_default_op_list

    return get_default_op_list()


def require_node(tensor: Tensor, node: fx.Node | None) -> None:
    """Raise RuntimeError if a graph writes a saved tensor in place in a way that torch does not check."""
    if node is not None and node_of(tensor) not in (node, None):
        raise RuntimeError(
            f"linear: a graph writes {list(tensor.shape)} in {tensor.dtype}, which a layer saved for "
            "backward, by an operator of lists or through data; write a copy"
        )
