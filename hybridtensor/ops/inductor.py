"""Lowering of this package's operators in Inductor: to calls without the dispatcher, and weights cast together.

A graph's code calls an object of its own at each place, which caches what was looked up. All private names of Inductor
are used here only: ``FallbackKernel`` is what an operator without lowering becomes, an instance prints its
``python_kernel_name`` into the code, and ``add_import_once`` adds a line at the beginning of the module, also from
subgraphs. Where Inductor writes C++ instead of Python, operators are not lowered.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import getitem as _getitem
from typing import Any, NamedTuple

import torch
from torch._functorch._aot_autograd.descriptors import SubclassGetAttrAOTInput
from torch._inductor import ir, lowering
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import convert_shape_to_inductor
from torch._inductor.virtualized import V
from torch._library.utils import get_layout_constraint_tag
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.types import IntLikeType
from torch.utils._pytree import PyTree

from hybridtensor.ops.cast.compile_ahead import compile_ahead
from hybridtensor.ops.cast.list_operator import (
    MEASURE_ALL,
    QUANTIZE_ALL,
    Written,
    amaxes_written,
    faces_written,
    shapes_of,
)
from hybridtensor.ops.cast.multi_tensor import lies_whole
from hybridtensor.ops.cast.operator import MEASURE, QUANTIZE, QUANTIZE_INTO
from hybridtensor.ops.cast.request import parse_request
from hybridtensor.ops.library import Operator

_MOST_ELEMENTS = 1 << 26
"""Of weights that are cast together: their faces are all there from then on, one or two bytes per element."""


class DirectKernel(ir.FallbackKernel):
    """A direct call of an operator's implementation."""

    def codegen(self, wrapper: PythonWrapperCodegen) -> None:
        """Print the call, and its import at the beginning of the module."""
        if not V.graph.cpp_wrapper:
            name = f"hybridtensor_{self.get_name()}"
            of_self: Any = self
            operator = of_self.op_overload._schema.name.rpartition("::")[2]
            device = of_self.get_device().type
            wrapper.add_import_once("from hybridtensor.ops.graph_calls import call_of")
            wrapper.add_import_once(f"{name} = call_of({operator!r}, {device!r})")
            self.python_kernel_name = name
        super().codegen(wrapper)


def traced(name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Register the lowering of an operator that is traced, and start to compile the kernels of a cast."""
    _register(name)
    # Private: while Inductor's graph is traced, forward and backward, its fake mode is set.
    if name in ("quantize", "measure") and isinstance(V.fake_mode, FakeTensorMode):
        operator = getattr(torch.ops.hybridtensor, name).default
        compile_ahead(name, _by_position(operator, args, kwargs))


@functools.cache
def _register(name: str) -> None:
    """Lower an operator of this package, unless it mutates an argument."""
    # Casts stay calls. As operations of torch, which Inductor puts into the kernel that makes the matrix, whole steps
    # were up to 1 % faster and up to 2.6 % slower: memory traffic is saved, and instructions are added.
    operator = getattr(torch.ops.hybridtensor, name).default
    if operator._schema.is_mutable:
        return
    # First as any operator, which keeps the strides that it was traced with
    tag = get_layout_constraint_tag(operator, with_default=True)
    lowering.make_fallback(operator, lowering.tag_to_layout_constraint(tag))
    # Through the dispatcher, each weight by itself, a compiled step of Llama 1.2 B with 2,048 tokens took 157 ms, and
    # takes 93 by these (BF16 43 and 41).
    lower = _LOWER.get(name)
    lowering.register_lowering(operator, type_promotion_kind=None)(
        lower or functools.partial(_lower, operator)
    )


def _lower(operator: Operator, *args: object, **kwargs: object) -> PyTree:
    made = DirectKernel.create(operator, *_by_position(operator, args, kwargs))
    # A ``TorchVersion``, which compares numbers
    if V.graph.aot_mode and isinstance(made, list) and torch.__version__ < "2.12":
        raise NotImplementedError(
            f"{operator}: AOTInductor of torch {torch.__version__} mistakes lists of tensors, and the process would "
            "crash; use torch 2.12 or later, or torch.compile"
        )
    # AOTInductor calls operators otherwise, by their schemas.
    if V.graph.cpp_wrapper and not V.graph.aot_mode and isinstance(made, list) and len(made) == 1:
        raise NotImplementedError(
            f"{operator}: Inductor's C++ wrapper (cpp_wrapper) takes a list of one tensor for a tensor, and the "
            "process would crash; compile without it"
        )
    return torch.utils._pytree.tree_map(
        lambda one: ir.TensorBox.create(one) if isinstance(one, ir.IRNode) else one, made
    )


def _by_position(
    operator: Operator, args: Sequence[object], kwargs: Mapping[str, object]
) -> list[object]:
    """Return all arguments by position, as the dispatcher calls implementations."""
    rest = operator._schema.arguments[len(args) :]
    return [*args, *(kwargs.get(one.name, one.default_value) for one in rest)]


# -- weights that are cast together


class _WeightCall(NamedTuple):
    """Arguments of a weight's cast or measurement, as nodes or constants."""

    x: Node
    request: str
    num_amaxes: int = 0
    scale: Node | None = None
    record: Node | None = None
    row_amax: Node | None = None
    column_amax: Node | None = None

    def kind(self) -> tuple[object, ...]:
        """Return a key of calls that can run together."""
        value = self.x.meta["val"]
        return (
            self.request,
            value.dtype,
            value.device,
            self.num_amaxes,
            *(n is None for n in self[3:]),
        )


_MADE: weakref.WeakKeyDictionary[GraphLowering, dict[Node, list[object]]] = (
    weakref.WeakKeyDictionary()
)
"""By graph: what nodes that come later are lowered to."""


def _lower_measure(*args: object, **kwargs: object) -> PyTree:
    """Lower a measurement together with later ones of other weights."""
    return _lower_together(MEASURE, _measure_together, args, kwargs)


def _lower_quantize(*args: object, **kwargs: object) -> PyTree:
    """Lower a cast together with later ones of other weights."""
    return _lower_together(QUANTIZE, _quantize_together, args, kwargs)


def _lower_together(
    operator: Operator,
    together: Callable[[list[_WeightCall], object], list[list[object]]],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> PyTree:
    node, made = V.graph.current_node, _MADE.setdefault(V.graph, {})
    if node in made:
        return made[node]
    plans_memory = _plans_memory()
    nodes = _alike(node) if plans_memory else []
    if len(nodes) < 2:
        given = _by_position(operator, node.args, node.kwargs)
        compile_ahead(operator._opname, given, is_lowered=True)
        if operator is MEASURE or not plans_memory:
            return _lower(operator, *args, **kwargs)
        out = [_empty(t.shape, t.stride(), t.dtype, t.device) for t in node.meta["val"]]
        x, *others = _by_position(operator, args, kwargs)
        DirectKernel.create(QUANTIZE_INTO, x, out, *others)
        return out
    calls = [call for call in map(_call_of, nodes) if call is not None]
    # Its place in the schema of ``quantize``; ``measure`` has none.
    after = args[8] if len(args) > 8 else kwargs.get("after")
    made.update(zip(nodes, together(calls, after), strict=True))
    return made[node]


def _plans_memory() -> bool:
    """Return whether casts write into buffers that Inductor allocates."""
    # Buffers that no kernel of its own writes are allocated on the device that is current, whatever theirs is: a graph
    # of several GPUs would get some on the wrong one.
    return not V.graph.cpp_wrapper and len(V.graph.device_idxs) <= 1


def _measure_together(calls: list[_WeightCall], after: object) -> list[list[object]]:
    xs, request = [call.x for call in calls], calls[0].request
    compile_ahead("measure_all", (xs, request), is_lowered=True)
    written = amaxes_written(_shapes(xs), parse_request(request))
    buffers = _buffers(written, xs[0])
    DirectKernel.create(MEASURE_ALL, [_value(x) for x in xs], *buffers, request)
    return _views(written, buffers)


def _quantize_together(calls: list[_WeightCall], after: object) -> list[list[object]]:
    nodes = [
        [node for node in each if node is not None]
        for each in zip(*(call[3:] for call in calls), strict=True)
    ]
    lists = [[_value(node) for node in each] for each in nodes]
    xs, first = [call.x for call in calls], calls[0]
    compile_ahead(
        "quantize_all", (xs, first.request, *nodes, None, first.num_amaxes), is_lowered=True
    )
    written = faces_written(_shapes(xs), parse_request(first.request), first.num_amaxes)
    buffers, values = _buffers(written, xs[0]), [_value(x) for x in xs]
    DirectKernel.create(
        QUANTIZE_ALL, values, buffers, first.request, *lists, after, first.num_amaxes
    )
    return _views(written, buffers)


def _shapes(xs: list[Node]) -> list[tuple[int, int]]:
    return shapes_of([x.meta["val"] for x in xs])


def _buffers(written: Written, x: Node) -> list[ir.TensorBox]:
    device = x.meta["val"].device
    return [_empty((size,), (1,), dtype, device) for size, dtype in written.sizes]


def _views(written: Written, buffers: list[ir.TensorBox]) -> list[list[object]]:
    return [
        [lowering.as_strided(buffers[i], *place) for i, place in each] for each in written.places
    ]


def _empty(
    shape: Sequence[IntLikeType],
    strides: Sequence[IntLikeType],
    dtype: torch.dtype,
    device: torch.device,
) -> ir.TensorBox:
    """Allocate a tensor that Inductor plans the memory of."""
    convert = convert_shape_to_inductor
    made: ir.TensorBox = lowering.empty_strided(
        convert(shape), convert(strides), dtype=dtype, device=device
    )
    return made


def _alike(node: Node) -> list[Node]:
    """Return this node and later ones that do the same with other weights, which no graph writes before its end."""
    first = _call_of(node)
    if first is None:
        return []
    found, room, following = [node], _MOST_ELEMENTS - first.x.meta["val"].numel(), node.next
    while following.op != "output":
        call = _call_of(following) if following.target is node.target else None
        if call is not None and call.kind() == first.kind():
            # All faces of a list exist from the first use on: the list is bounded.
            room -= call.x.meta["val"].numel()
            if room < 0:
                break
            found.append(following)
        following = following.next
    return found


def _call_of(node: Node) -> _WeightCall | None:
    """Return the call of a weight whose inputs are all computed already, else None."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    x = given["x"]
    if not _is_weight(x) or given.get("rounding") is not None or given.get("first_row"):
        return None
    others = [
        given.get(name) for name in ("encode_scale", "amax_record", "row_amax", "column_amax")
    ]
    if not all(other is None or _is_there(other) for other in others):
        return None
    return _WeightCall(x, given["request"], given.get("num_amaxes", 0), *others)


def _is_weight(node: object) -> bool:
    """Return whether a graph input is a ``MasterWeight``'s tensor, whose address is the same in every call, and which
    kernels of lists can read."""
    if not isinstance(node, Node) or node.op != "placeholder":
        return False
    # AOTAutograd's private description of an input: which attribute of which subclass it is. Without it weights are
    # cast one by one.
    known, value = node.meta.get("desc"), node.meta["val"]
    return (
        isinstance(known, SubclassGetAttrAOTInput)
        and known.attr == "plain"
        and all(isinstance(extent, int) and extent for extent in value.shape)
        and lies_whole(value)
    )


def _is_there(node: Node) -> bool:
    return node.op == "placeholder" or _measured_early(node) is not None


def _measured_early(node: Node) -> object:
    """Return the amax of a node that was measured together with others, else None."""
    if node.target is not _getitem:
        return None
    source: Any
    index: Any
    source, index = node.args
    made = _MADE.get(V.graph, {}).get(source)
    return None if made is None else made[index]


def _value(node: Node) -> object:
    early = _measured_early(node)
    return V.graph.env[node] if early is None else early


_LOWER: dict[str, Callable[..., PyTree]] = {
    "measure": _lower_measure,
    "quantize": _lower_quantize,
    "without_gradient": lambda x, of: x,  # a name for autograd, which ran before Inductor
}
"""By operator: its lowering, if it is no call of its implementation."""
