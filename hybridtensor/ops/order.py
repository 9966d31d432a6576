"""Tell a compiler when operations of a graph are to be done."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from hybridtensor.ops.library import define

_AFTER = define(
    "after(Tensor x, Tensor other) -> Tensor",
    reference=lambda x, other: x.clone(),
    fake=lambda x, other: torch.empty_like(x),
)


def after(x: Tensor, other: Tensor) -> Tensor:
    """Return a copy of ``x``, which a graph makes after ``other``.

    A compiler that cuts a graph into forward and backward would do in forward what depends on
    nothing of backward, and keep what comes of it.
    """
    if x.itemsize > 1:
        return _AFTER(x, other)  # type: ignore[no-any-return]
    copied: Tensor = _AFTER(x.view(torch.uint8), other)
    return copied.view(x.dtype)


def make_again(x: Tensor) -> None:
    """Have a compiler make ``x`` again in backward, if operations make it that it does again elsewhere.

    It would keep what an operator reads into which it fuses nothing. Outside of traces, nothing happens.
    """
    node = _producer(x)
    if node is not None and _is_cheap(node):
        node.meta.setdefault("recompute", _AGAIN)  # as a checkpointed region marks its own


def is_kept_anyway(x: Tensor) -> bool:
    """Return whether the backward of the graph that is traced has ``x``, or makes it again of what it has.

    Attention keeps what it returns, and most operations what they are given: not sums, copies and
    multiples. Not in a checkpointed region, all of which is done again, or what a policy says.
    """
    if _is_in_region(x):
        return False
    node = _producer(x)
    while node is not None and node.target in _LINEAR:
        large = [arg for arg in node.all_input_nodes if _is_as_large(arg, x)]
        of_two = len(node.all_input_nodes) > 1 and node.target in _PRODUCTS
        if len(large) != 1 or of_two:
            break
        node = _behind_views(large[0])
    if node is None or (node.target in _LINEAR and node.target not in _PRODUCTS):
        return False
    if node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return str(node.target).startswith(_ATTENTION) or _is_cheap(node)


_AGAIN = CheckpointPolicy.PREFER_RECOMPUTE
_ATEN = torch.ops.aten
_PRODUCTS = (_ATEN.mul.Tensor, _ATEN.div.Tensor)
_LINEAR = (
    *_PRODUCTS,
    _ATEN.add.Tensor,
    _ATEN.sub.Tensor,
    _ATEN.clone.default,
    _ATEN._to_copy.default,
    torch.ops.prims.convert_element_type.default,
)
_VIEWS = (  # that the compiler puts others in place of, after it has traced
    _ATEN.transpose.int,
    _ATEN.detach.default,
    _ATEN._unsafe_view.default,
    _ATEN.unsqueeze.default,
    _ATEN.squeeze.dim,
)
_ATTENTION = ("aten._scaled_dot_product", "flex_attention")


def _is_cheap(node: fx.Node) -> bool:
    """Return whether a compiler does an operation again; of one of several results it cannot be asked."""
    return node.target is not operator.getitem and bool(_operations().is_recomputable(node))


def _is_in_region(x: Tensor) -> bool:
    """Return whether a checkpointed region is traced: it marks every operation, such as one done here, which
    nothing uses.
    """
    node = _node(x.detach())
    return node is not None and "ac_graph_id" in node.meta


def _is_as_large(node: fx.Node, x: Tensor) -> bool:
    """Return whether a node has as many elements; of unknown extents none is compared, which would guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    value = node.meta.get("val")
    return isinstance(value, Tensor) and statically_known_true(value.numel() >= x.numel())


def _producer(x: Tensor) -> fx.Node | None:
    """Return the node that makes ``x``, or what it is a view of, in the graph that is traced now; None
    without one.
    """
    return _behind_views(_node(x))


def _node(x: Tensor) -> fx.Node | None:
    """Return the node that ``x`` is in the graph that is traced now; None without one.

    All of it is private in torch: AOTAutograd runs operations on functional tensors, inside of which
    are those that its tracer knows.
    """
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


def _behind_views(node: Any) -> fx.Node | None:
    while isinstance(node, fx.Node) and node.op == "call_function" and _is_view(node):
        node = node.args[0]
    return node if isinstance(node, fx.Node) and node.op == "call_function" else None


def _is_view(node: fx.Node) -> bool:
    return node.target in _VIEWS or bool(_operations().is_view(node))


@functools.cache
def _operations() -> Any:
    """Return what the partitioner of AOTAutograd knows about operations."""
    from torch._functorch.partitioners import get_default_op_list

    return get_default_op_list()
