"""What the tensor classes share: inner tensors by name, dispatch by table, copying, pickling, refusals.

A wrapper has no storage of its own. It has a logical shape, a nominal dtype (the dtype of the high-precision tensor it
stands for), *inner tensors* (attributes named in ``inner_names``; some may be None) and *metadata* (attributes named in
``metadata_names``; frozen and compared by value, so that equal wrappers share one compiled graph).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for

from hybridtensor.state import LayerState, StateTensors
from hybridtensor.subclasses.op_table import OpTable


class WrapperTensor(Tensor):
    """Base of the tensor classes; see the module's docstring."""

    ops: ClassVar[OpTable]
    inner_names: ClassVar[tuple[str, ...]]
    metadata_names: ClassVar[tuple[str, ...]]
    transient_names: ClassVar[tuple[str, ...]] = ()  # attributes that belong to one object: never copied or pickled
    parameter_names: ClassVar[tuple[str, ...]] = ()  # attributes that are pickled with a Parameter only

    @classmethod
    def _make(
        cls,
        size: torch.Size | tuple[int, ...],
        stride: tuple[int, ...] | None,
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool = False,
    ) -> Self:
        """Make the outer tensor; ``stride=None`` is contiguous."""
        size = tuple(size)
        with _normal_mode():
            return torch.Tensor._make_wrapper_subclass(
                cls,
                size,
                strides=make_contiguous_strides_for(size) if stride is None else stride,
                dtype=dtype,
                device=device,
                requires_grad=requires_grad,
            )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return cls.ops.call(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values as a plain tensor of this shape, in ``dtype`` (default: the nominal dtype)."""
        raise NotImplementedError(f"{type(self).__name__}: dequantize() is for the classes that hold values")

    # -- inner tensors and metadata -----------------------------------------------------------------------------

    def parts(self) -> tuple[list[str], tuple[Any, ...]]:
        """Return the names of the inner tensors that are there, and the metadata."""
        names = [name for name in self.inner_names if getattr(self, name) is not None]
        return names, tuple(getattr(self, name) for name in self.metadata_names)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return self.parts()

    @classmethod
    def from_parts(
        cls,
        inner: dict[str, Tensor],
        metadata: tuple[Any, ...],
        size: torch.Size | tuple[int, ...],
        stride: tuple[int, ...] | None,
    ) -> Self:
        """Undo ``parts``."""
        tensors = {name: inner.get(name) for name in cls.inner_names}
        values = dict(zip(cls.metadata_names, metadata, strict=True))
        make: Any = cls
        made: Self = make(**tensors, **values, size=size, stride=stride)
        return made

    @classmethod
    def __tensor_unflatten__(
        cls,
        inner: dict[str, Tensor],
        metadata: tuple[Any, ...],
        outer_size: torch.Size | tuple[int, ...],
        outer_stride: tuple[int, ...] | None,
    ) -> Self:
        return cls.from_parts(inner, metadata, outer_size, outer_stride)

    def _stable_hash_for_caching(self) -> str:
        """Let torch.compile's caches key on what this tensor is, in every process; its values do not matter.

        And on the code of this package, which compiled graphs hold traces of: they lie on disk across upgrades.
        """
        names, metadata = self.__tensor_flatten__()
        inner = [_stable_hash(getattr(self, name)) for name in names]
        values = [_stable_hash(value) for value in metadata]
        return (
            f"{_code()}{type(self).__name__}{tuple(self.shape)}{tuple(self.stride())}{self.dtype}{names}{inner}{values}"
        )

    def map_inner(
        self,
        fn: Callable[[Tensor], Tensor],
        *,
        size: torch.Size | tuple[int, ...] | None = None,
        stride: tuple[int, ...] | None = None,
        **metadata: Any,
    ) -> Self:
        """Rebuild this tensor with ``fn`` applied to every inner tensor. The one way to make one from another.

        Args:
            fn: Called once per inner tensor that is there.
            size: Logical shape of the result; by default this tensor's, with its strides.
            stride: Strides of the result; by default contiguous if ``size`` is given.
            metadata: Metadata that differs in the result.
        """
        if size is None:
            size, stride = self.size(), stride or self.stride()
        names, old = self.parts()
        new = {**dict(zip(self.metadata_names, old, strict=True)), **metadata}
        inner = {name: fn(getattr(self, name)) for name in names}
        return self.from_parts(inner, tuple(new.values()), size, stride)

    def alias_of(self, other: Self) -> Self:
        """Know of the memory that this tensor has in common with ``other`` what that one knows; return this tensor."""
        return self

    # -- copying and pickling -----------------------------------------------------------------------------------

    def _user_attributes(self) -> dict[str, Any]:
        """Return what others put on the object, such as the mark that makes it a Parameter."""
        own = {*self.inner_names, *self.metadata_names, *self.transient_names}
        if not isinstance(self, torch.nn.Parameter):
            own.update(self.parameter_names)
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __reduce_ex__(self, protocol: Any) -> Any:
        names, metadata = self.parts()
        inner = {name: _as_bytes(getattr(self, name)) for name in names}
        state = (type(self), inner, metadata, tuple(self.size()), tuple(self.stride()), self.requires_grad)
        return _rebuild, (*state, self._user_attributes())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        if not self.is_leaf:
            raise RuntimeError(f"{type(self).__name__}: deepcopy needs a leaf tensor, got a result; detach it first")
        with torch.no_grad():
            new: Any = self.clone()
        new.requires_grad_(self.requires_grad)
        if self.grad is not None:
            new.grad = copy.deepcopy(self.grad, memo)
        new.__dict__.update(copy.deepcopy(self._user_attributes(), memo))
        memo[id(self)] = new
        copied: Self = new
        return copied

    # -- what a tensor without storage cannot do by inheritance ---------------------------------------------------

    def data_ptr(self) -> int:
        """Return the address of the first inner tensor: a wrapper has no memory, its payload has."""
        names, _ = self.parts()
        address: int = getattr(self, names[0]).data_ptr()
        return address

    def share_memory_(self) -> Self:
        """Refuse: the inherited one would touch a storage that is not there."""
        raise NotImplementedError(
            f"{type(self).__name__}: share_memory_() needs one storage, got a tensor of several; "
            "share the inner tensors, or send the state dict"
        )

    @property
    def data(self) -> Tensor:
        """Return a detached tensor of the same class."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise NotImplementedError(
            f"{type(self).__name__}: assigning .data would leave the payload behind, got a {type(value).__name__}; "
            "use copy_(), or torch.utils.swap_tensors"
        )

    def numpy(self, *, force: bool = False) -> Any:
        """Return the dequantized values as fp32 numpy array (``force=True``), as plain tensors do."""
        if not force:
            raise TypeError(
                f"{type(self).__name__}: numpy() needs plain memory; call dequantize() or numpy(force=True)"
            )
        return self.dequantize().float().cpu().numpy()


_STATE_NAMES = ("state_rounding", "state_encode_scale", "state_amax")


class InterceptingTensor(WrapperTensor):
    """A wrapper that sees torch functions, such as ``F.linear``, before autograd takes them apart.

    ``functions`` holds those that it handles; all others do what torch does.

    Taken apart by ``torch.compile``, it carries the tensors of its layer's state along, so that they are inputs of the
    graph.

    Attributes:
        layer: State of the layer whose weight this is, or None: a ``LayerState``, or while compiling its tensors.
        gathered: What keeps the faces of a weight that FSDP2 gathered (a ``distributed.shard.Shard``), or None.
    """

    functions: ClassVar[OpTable]
    gathering: ClassVar[Any] = None  # what FSDP2's hooks do; hybridtensor.distributed enters it
    parameter_names = ("layer",)
    layer: LayerState | StateTensors | None = None
    gathered: Any = None

    @property
    def state(self) -> StateTensors | None:
        """What quantizing needs of the layer's state."""
        return self.layer.tensors() if isinstance(self.layer, LayerState) else self.layer

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        names, metadata = self.parts()
        state = self.state
        if state is None:
            return names, (metadata, None)
        kept = [name for name in _STATE_NAMES if getattr(self, name) is not None]
        return [*names, *kept], (metadata, (state.slots, state.rank))

    @classmethod
    def __tensor_unflatten__(
        cls,
        inner: dict[str, Tensor],
        metadata: tuple[Any, ...],
        outer_size: torch.Size | tuple[int, ...],
        outer_stride: tuple[int, ...] | None,
    ) -> Self:
        own, of_state = metadata
        made = super().__tensor_unflatten__(inner, own, outer_size, outer_stride)
        if of_state is not None:
            tensors = (inner.get(name) for name in _STATE_NAMES)
            made.layer = StateTensors(*tensors, *of_state)  # type: ignore[arg-type]
        return made

    @property
    def state_rounding(self) -> Tensor | None:
        """``rounding`` of the layer's state."""
        return None if self.state is None else self.state.rounding

    @property
    def state_encode_scale(self) -> Tensor | None:
        """``encode_scale`` of the layer's state."""
        return None if self.state is None else self.state.encode_scale

    @property
    def state_amax(self) -> Tensor | None:
        """``amax`` of the layer's state."""
        return None if self.state is None else self.state.amax

    def like(self, other: Self) -> Self:
        """Belong to the layer that ``other`` belongs to; return this tensor."""
        self.layer = other.layer
        return self

    def map_inner(self, fn: Callable[[Tensor], Tensor], **changes: Any) -> Self:
        """See ``WrapperTensor.map_inner``; the result belongs to the same layer."""
        return super().map_inner(fn, **changes).like(self)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Return what this rank sends when FSDP2 gathers; see ``hybridtensor.distributed.fsdp``."""
        return self.gathering.pre_all_gather(self, module)  # type: ignore[no-any-return]

    # FSDP2 asks for the signature before every gather of every weight; working it out takes longer than the answer
    fsdp_pre_all_gather.__signature__ = inspect.signature(fsdp_pre_all_gather)  # type: ignore[attr-defined]

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """Return the gathered weight, made of what all ranks sent."""
        return self.gathering.post_all_gather(self, outputs, metadata, param_dtype, out)

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        handler = cls.functions.get(func)
        if handler is not None:
            return handler(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@functools.cache
def _code(folder: Path = Path(__file__).parent.parent) -> str:
    """Return a digest of all Python files below a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _stable_hash(value: Any) -> str:
    """Return a text that is equal for equal values, in every process."""
    if hasattr(value, "_stable_hash_for_caching"):
        return value._stable_hash_for_caching()  # type: ignore[no-any-return]
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)}{value.stride()}{value.dtype}{value.device}"
    return str(value)


def _normal_mode() -> contextlib.AbstractContextManager[object]:
    """Leave inference mode: a wrapper made inside it could not be a view of one made outside."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


def _as_bytes(tensor: Tensor) -> Tensor | tuple[Tensor, torch.dtype]:
    """Return an FP8 tensor as bytes and its dtype: torch reads such tensors back from torch.save, not from pickle."""
    if isinstance(tensor, WrapperTensor) or tensor.itemsize != 1 or not tensor.is_floating_point():
        return tensor
    return tensor.view(torch.uint8), tensor.dtype


def _rebuild(
    cls: type[WrapperTensor],
    inner: dict[str, Tensor | tuple[Tensor, torch.dtype]],
    metadata: tuple[Any, ...],
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    attributes: dict[str, Any],
) -> WrapperTensor:
    """Undo ``__reduce_ex__``."""
    tensors = {name: t if isinstance(t, Tensor) else t[0].view(t[1]) for name, t in inner.items()}
    tensor = cls.from_parts(tensors, metadata, size, stride)
    tensor.requires_grad_(requires_grad)
    tensor.__dict__.update(attributes)
    return tensor


class Structure(NamedTuple):
    """How to put a flattened wrapper together again; hashable."""

    cls: type[WrapperTensor]
    names: tuple[str, ...]
    metadata: tuple[Any, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    children: tuple[Structure | None, ...]


def flatten(tensor: Tensor) -> tuple[list[Tensor], Structure | None]:
    """Take ``tensor`` apart into plain tensors, however deep it is nested, and the structure to rebuild it."""
    if not isinstance(tensor, WrapperTensor):
        return [tensor], None
    names, metadata = tensor.parts()
    plain: list[Tensor] = []
    children = []
    for name in names:
        tensors, child = flatten(getattr(tensor, name))
        plain += tensors
        children.append(child)
    shape = tuple(tensor.size()), tuple(tensor.stride())
    return plain, Structure(type(tensor), tuple(names), metadata, *shape, tuple(children))


def unflatten(plain: list[Tensor], structure: Structure | None) -> Tensor:
    """Undo ``flatten``; takes its tensors off the front of ``plain``."""
    if structure is None:
        return plain.pop(0)
    inner = {name: unflatten(plain, child) for name, child in zip(structure.names, structure.children, strict=True)}
    return structure.cls.from_parts(inner, structure.metadata, structure.size, structure.stride)


torch.serialization.add_safe_globals([_rebuild])
