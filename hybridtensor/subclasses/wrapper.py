"""What the tensor classes share: inner tensors by name, dispatch by table, copying, pickling, refusals.

A wrapper has no storage of its own. It has a logical shape, a nominal dtype (the dtype of the high-precision tensor it
stands for), *inner tensors* (attributes named in ``inner_names``; some may be None) and *metadata* (attributes named in
``metadata_names``; frozen and compared by value, so that equal wrappers share one compiled graph).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, SupportsIndex

import torch
from torch import Tensor, nn

from hybridtensor.arguments import require_flag, require_tensor
from hybridtensor.graph_caches import SOURCES
from hybridtensor.ops.library import compile_methods_in_callers_only
from hybridtensor.subclasses.op_table import Args, Func, Kwargs, OpTable

Size = torch.Size | tuple[int, ...]
"""A logical shape."""
Stride = tuple[int, ...] | None
"""Strides of the logical shape; None is contiguous."""
Metadata = tuple[Any, ...]
"""Values of the attributes in ``metadata_names``, in their order."""
Attributes = dict[str, Any]
"""What others put on an object, by name."""


class _NoMemory(torch.UntypedStorage):
    """The storage of a wrapper: empty, and its address raises."""

    def data_ptr(self) -> int:
        raise RuntimeError(
            "hybridtensor: a wrapper has no memory of its own to read or write (an invalid python storage); use "
            "dequantize(), and hybridtensor.optim.MasterWeights where an optimizer asks for persistent weights"
        )


class WrapperTensor(Tensor):
    """Base of the tensor classes; see the module's docstring."""

    ops: ClassVar[OpTable]
    inner_names: ClassVar[tuple[str, ...]]
    metadata_names: ClassVar[tuple[str, ...]]
    transient_names: ClassVar[tuple[str, ...]] = (
        "_empty_storage",
    )  # attributes that belong to one object: never copied or pickled
    former_names: ClassVar[
        dict[str, str]
    ] = {}  # what inner tensors were called in pickles of earlier versions

    @classmethod
    def _make(
        cls,
        size: Size,
        stride: Stride,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Self:
        """Create the outer tensor; ``stride=None`` is contiguous."""
        size = tuple(size)
        # ``_make_wrapper_subclass`` is private, and the one way to a tensor with a shape and no
        # memory that dispatches to its class.
        with _normal_mode():
            made = torch.Tensor._make_wrapper_subclass(
                cls,
                size,
                strides=contiguous_strides(size) if stride is None else stride,
                storage_size=0,  # whoever takes the storage gets no bytes, not memory that is not there
                dtype=dtype,
                device=device,
            )
        # DLPack asks for the address in C++, past ``__dlpack__``; only this private flag refuses there.
        torch._C._set_throw_on_mutable_data_ptr(made)
        return made

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        compile_methods_in_callers_only(cls)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Func, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        return cls.ops.call(func, args, kwargs or {})

    # Private, and what torch's own subclasses have: torch functions then go straight to autograd.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values as a plain tensor of this shape, in ``dtype`` (default: the nominal dtype)."""
        raise NotImplementedError(f"{type(self).__name__}: dequantize() is missing; define it")

    if TYPE_CHECKING:  # handlers of each class return its own tensors

        def clone(self, *, memory_format: torch.memory_format | None = None) -> Self: ...

        def detach(self) -> Self: ...

        def t(self) -> Self: ...

        def transpose(self, dim0: int, dim1: int) -> Self: ...

        def view(self, *size: object) -> Self: ...

    # -- inner tensors and metadata

    def parts(self) -> tuple[list[str], Metadata]:
        """Return the names of the inner tensors that are not None, and the metadata."""
        names = [name for name in self.inner_names if getattr(self, name) is not None]
        return names, tuple(getattr(self, name) for name in self.metadata_names)

    @classmethod
    def from_parts(
        cls,
        inner: dict[str, Tensor],
        metadata: Metadata,
        size: Size,
        stride: Stride,
    ) -> Self:
        tensors = {name: inner.get(name) for name in cls.inner_names}
        values = dict(zip(cls.metadata_names, metadata, strict=True))
        make: Any = cls
        made: Self = make(**tensors, **values, size=size, stride=stride)
        return made

    def carried(self) -> tuple[list[str], Metadata | None]:
        """Return names of additional tensors for compiled graphs, and their metadata; none by default."""
        return [], None

    def take_carried(self, tensors: dict[str, Tensor], meaning: Metadata | None) -> None:
        """Undo ``carried``."""

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Metadata, Metadata | None]]:
        names, metadata = self.parts()
        # torch reads every name as an attribute of the wrapper: what is carried needs a property of its name.
        others, meaning = self.carried()
        return [*names, *others], (metadata, meaning)

    @classmethod
    def __tensor_unflatten__(
        cls,
        inner: dict[str, Tensor],
        metadata: tuple[Metadata, Metadata | None],
        outer_size: Size,
        outer_stride: Stride,
    ) -> Self:
        own, meaning = metadata
        made = cls.from_parts(inner, own, outer_size, outer_stride)
        made.take_carried(inner, meaning)
        return made

    def _stable_hash_for_caching(self) -> str:
        """Return a stable hash for torch.compile's caches: of metadata and this package's sources, not of values."""
        # The sources are part of it because compiled graphs, which contain traces of them, stay on disk across
        # upgrades.
        names, (metadata, meaning) = self.__tensor_flatten__()
        inner = [_stable_hash(getattr(self, name)) for name in names]
        values = [_stable_hash(value) for value in (*metadata, meaning)]
        what = [type(self).__name__, tuple(self.shape), tuple(self.stride()), self.dtype]
        return f"{SOURCES}{what}{names}{inner}{values}"

    def map_inner(
        self,
        fn: Callable[[Tensor], Tensor],
        *,
        size: Size | None = None,
        stride: Stride = None,
        **metadata: object,
    ) -> Self:
        """Rebuild this tensor with ``fn`` applied to every inner tensor. The one way to make one from another."""
        if size is None:
            size, stride = self.size(), stride or self.stride()
        names, old = self.parts()
        new = {**dict(zip(self.metadata_names, old, strict=True)), **metadata}
        inner = {name: fn(getattr(self, name)) for name in names}
        return self.from_parts(inner, tuple(new.values()), size, stride)

    def alias_of(self, other: Self) -> Self:
        """Share the record of the memory that this tensor and ``other`` alias; return this tensor."""
        return self

    # -- copying and pickling

    def own_names(self) -> set[str]:
        """Return the attribute names that belong to the class, not to the user."""
        return {*self.inner_names, *self.metadata_names, *self.transient_names}

    def _user_attributes(self) -> Attributes:
        """Return the user's attributes, such as the one that marks a Parameter."""
        own = self.own_names()
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def _take_attributes(self, attributes: Attributes) -> None:
        self.__dict__.update(attributes)

    def __reduce_ex__(
        self, protocol: SupportsIndex
    ) -> tuple[Callable[..., WrapperTensor], tuple[object, ...]]:
        names, metadata = self.parts()
        inner = {name: _as_bytes(getattr(self, name)) for name in names}
        state = (
            type(self),
            inner,
            metadata,
            tuple(self.size()),
            tuple(self.stride()),
            self.requires_grad,
        )
        # A function of this module with arguments by position: torch.load(weights_only=True) calls only functions
        # that are on its list, and files of earlier versions hold these arguments in this order.
        return _rebuild, (*state, self._user_attributes())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) in memo:
            known: Self = memo[id(self)]
            return known
        if not self.is_leaf:
            raise RuntimeError(
                f"{type(self).__name__}: deepcopy cannot copy the result of an operation that autograd "
                "recorded; detach it first"
            )
        with torch.no_grad():
            new = self.clone()
        memo[id(self)] = new  # before attributes, which may refer to this tensor
        new.requires_grad_(self.requires_grad)
        # A copy of a parameter has no gradient: ``nn.Parameter.__deepcopy__``, which this one replaces, copies none.
        if self.grad is not None and not isinstance(self, nn.Parameter):
            new.grad = copy.deepcopy(self.grad, memo)
        new._take_attributes(copy.deepcopy(self._user_attributes(), memo))
        return new

    # -- what a tensor without storage cannot do by inheritance

    def data_ptr(self) -> int:
        """Raise RuntimeError: kernels given an address would read and write values where there are none."""
        return self.untyped_storage().data_ptr()

    def __dlpack__(self, **_: object) -> NoReturn:
        """Raise: a wrapper has no memory to export."""
        raise NotImplementedError(
            f"{type(self).__name__}: DLPack cannot export a wrapper of several tensors; export dequantize()"
        )

    def __dlpack_device__(self) -> NoReturn:
        """Raise as ``__dlpack__``, which is called later."""
        self.__dlpack__()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return an empty storage, one per object: a wrapper has no bytes of its own."""
        # Not the storage of an inner tensor, which savers of raw memory would like: torch.compile copies what it gets
        # here into its fake tensors, and fails.
        known: torch.UntypedStorage | None = self.__dict__.get("_empty_storage")
        if known is None:
            known = self.__dict__["_empty_storage"] = _NoMemory(0, device=self.device)  # type: ignore[no-untyped-call]
        return known

    def share_memory_(self) -> Self:
        """Raise: the inherited method would access a missing storage."""
        raise NotImplementedError(
            f"{type(self).__name__}: share_memory_() cannot share a tensor of several storages; send the state "
            "dict, or share a model with master weights: quantize_ without persistent=True"
        )

    @property
    def data(self) -> Tensor:
        """Return a detached tensor of the same class."""
        return self.read_data()

    @data.setter
    def data(self, value: Tensor) -> None:
        """Assign the data, for classes with a handler of ``aten.set_data``."""
        self.ops.call(torch.ops.aten.set_data.default, (self, value), {})

    def read_data(self) -> Tensor:
        """Return a detached tensor of the same class, for ``data``; subclasses mark theirs."""
        return self.detach()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the dequantized values as fp32 numpy array (``force=True``), as plain tensors do."""
        require_flag(f"{type(self).__name__}.numpy", force=force)
        if not force:
            raise TypeError(
                f"{type(self).__name__}: numpy() needs plain memory; call dequantize() or numpy(force=True)"
            )
        return self.dequantize().float().cpu().numpy()

    def tolist(self) -> list[Any]:
        """Return the values as nested lists of numbers."""
        return self.dequantize().tolist()


def contiguous_strides(size: Size) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor; extents may be symbols, which are two or more."""
    strides, step = [], 1
    for extent in reversed(size):
        strides.append(step)
        step = step * extent if isinstance(extent, torch.SymInt) else step * max(extent, 1)
    return tuple(reversed(strides))


def require_plain(who: str, x: object) -> None:
    """Raise TypeError unless ``x`` is a dense floating-point tensor in high precision."""
    if isinstance(x, WrapperTensor):
        raise TypeError(f"{who}: a plain tensor is required, got {x!r}; call dequantize() on it")
    require_tensor(who, x)
    if isinstance(x, Tensor) and not x.is_floating_point():
        raise TypeError(f"{who}: a floating-point tensor is required, got {x.dtype}; cast it")


def _stable_hash(value: object) -> str:
    """Return a text that is equal for equal values, in every process."""
    if hasattr(value, "_stable_hash_for_caching"):
        text: str = value._stable_hash_for_caching()
        return text
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)}{value.stride()}{value.dtype}{value.device}"
    return str(value)


def _normal_mode() -> contextlib.AbstractContextManager[object]:
    """Leave inference mode: a wrapper created inside cannot be a view of one created outside."""
    return (
        torch.inference_mode(False)
        if torch.is_inference_mode_enabled()
        else contextlib.nullcontext()
    )


def _as_bytes(tensor: Tensor) -> Tensor | tuple[Tensor, torch.dtype]:
    """View FP8 as bytes, with its dtype: torch unpickles FP8 only from torch.save."""
    if isinstance(tensor, WrapperTensor) or tensor.itemsize != 1 or not tensor.is_floating_point():
        return tensor
    return tensor.view(torch.uint8), tensor.dtype


def _rebuild(
    cls: type[WrapperTensor],
    inner: dict[str, Tensor | tuple[Tensor, torch.dtype]],
    metadata: Metadata,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    attributes: Attributes,
) -> WrapperTensor:
    tensors = {
        cls.former_names.get(name, name): t if isinstance(t, Tensor) else t[0].view(t[1])
        for name, t in inner.items()
    }
    tensor = cls.from_parts(tensors, metadata, size, stride)
    tensor.requires_grad_(requires_grad)
    tensor._take_attributes(attributes)
    return tensor
