"""A tensor with two faces, each in its own format."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from hybridtensor.arguments import require_choice, require_kind
from hybridtensor.ops import Face, Faces
from hybridtensor.ops.autograd import version_of
from hybridtensor.ops.library import is_traced
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.subclasses.faces import FaceTensor, columnwise_face, rowwise_face
from hybridtensor.subclasses.high_precision import HighPrecisionValues, View, is_same, whole
from hybridtensor.subclasses.identity_tensor import IdentityTensor
from hybridtensor.subclasses.intercepting import InterceptingTensor
from hybridtensor.subclasses.op_table import OpTable
from hybridtensor.subclasses.quantized_tensor import QuantizedTensor
from hybridtensor.subclasses.record import Gathered, ReadBy, WeightRecord
from hybridtensor.subclasses.sharded_face import ShardedFace
from hybridtensor.subclasses.structure import flatten
from hybridtensor.subclasses.wrapper import Attributes, Metadata, Size, Stride

_FACE = (QuantizedTensor, IdentityTensor, ShardedFace, type(None))
_CONFIG = (HybridConfig, type(None))
_OPPOSITE = {"rowwise": "columnwise", "columnwise": "rowwise"}


class HybridTensor(InterceptingTensor):
    """A tensor that carries a rowwise and a columnwise face; either may be absent.

    ::

        weight = model.blocks[0].weight  # after quantize_(model, "mxfp8", persistent=True)
        print(weight.rowwise.qdata, weight.columnwise.scale, weight.dequantize())

    ``t()`` swaps the faces, and a matrix product takes ``rowwise`` of its left and ``columnwise`` of its right operand.
    As a parameter it is a persistent low-precision weight: there is no high-precision copy.

    Attributes:
        rowwise: Face whose scale groups run along the last dimension, or None.
        columnwise: Face whose scale groups run along the first dimension, or None.
        config: The recipe of the layer whose weight this is, or None.
        taken: Function that takes the part of the weight's high-precision values which this view of it shows.
        swapped: Whether this is the transpose of that weight, so that its rowwise face is the weight's columnwise one.
        is_of_all_ranks: Whether this is the tokens of all ranks, whose gradient is summed over them:
            only column-parallel layers may read it.
        is_saved: Whether this is of a state dict: savers that ask for its memory, as safetensors do,
            get that of its values; see ``_saved``.
    """

    ops = OpTable(
        "HybridTensor",
        "call dequantize() first, step a weight through hybridtensor.optim.MasterWeights, or leave out the into= or "
        "outputs_of= that made it",
    )
    functions = OpTable("HybridTensor", "", of_functions=True)
    inner_names = ("rowwise", "columnwise")
    metadata_names = ("config",)
    transient_names = (
        *InterceptingTensor.transient_names,
        "taken",
        "swapped",
        "is_of_all_ranks",
        "is_saved",
        "_plain",
    )

    rowwise: FaceTensor | None
    columnwise: FaceTensor | None
    config: HybridConfig | None
    taken: View
    swapped: bool
    is_of_all_ranks: bool
    is_saved: bool
    _plain: tuple[tuple[int, ...], Tensor] | None

    @staticmethod
    def __new__(
        cls,
        rowwise: FaceTensor | None,
        columnwise: FaceTensor | None = None,
        config: HybridConfig | None = None,
        size: Size | None = None,
        stride: Stride = None,
        *,
        requires_grad: bool | None = None,
    ) -> Self:
        if requires_grad is not None:
            return cls.parameter_of(rowwise, requires_grad)  # type: ignore[arg-type,return-value]
        require_kind("HybridTensor", "a face or None as rowwise", rowwise, _FACE)
        require_kind("HybridTensor", "a face or None as columnwise", columnwise, _FACE)
        require_kind("HybridTensor", "a HybridConfig or None", config, _CONFIG)
        face = rowwise if rowwise is not None else columnwise
        if face is None:
            raise ValueError(
                "HybridTensor: at least one face is required, got rowwise=None and columnwise=None"
            )
        if rowwise is not None and columnwise is not None:
            _check_same(rowwise, columnwise)
        size = face.size() if size is None else size
        made = cls._make(size, face.stride() if stride is None else stride, face.dtype, face.device)
        made.rowwise, made.columnwise, made.config = rowwise, columnwise, config
        made.record, made.taken, made.swapped = WeightRecord(), whole, False
        made.is_of_all_ranks = made.is_saved = False
        made._plain = None
        return made

    @property
    def high_precision(self) -> HighPrecisionValues:
        """High-precision values of the weight, which its aliases and views share; empty if there never were any."""
        return HighPrecisionValues() if self.record.values is None else self.record.values

    @property
    def known_values(self) -> Tensor | None:
        """High-precision values of this weight or view, maybe aliased; or None."""
        current = self.high_precision.current
        return None if current is None else self.taken(current)

    @property
    def original(self) -> Tensor | None:
        """High-precision value that a trainable weight was made from, until an optimizer takes it; or None."""
        return self.high_precision.original if self.taken is whole else self.known_values

    @property
    def is_gathered(self) -> bool:
        """Whether FSDP2 gathered this weight, whose faces then come and go; compiled graphs hold their tensors."""
        return self._gathered is not None

    @property
    def _gathered(self) -> Gathered | None:
        """The shard record of a gathered weight, outside of compiled graphs."""
        gathered = self.record.gathered
        return None if gathered is None or is_traced() else gathered

    def require_face(self, direction: str, *, name: str, gemm: str) -> FaceTensor:
        """Return the face in ``direction``.

        Args:
            direction: ``"rowwise"`` or ``"columnwise"``.
            name: What this tensor is to the caller, for the error.
            gemm: Name of the product, for the error.

        Raises:
            ValueError: If the face is absent: it is not made up silently; or unknown.
        """
        if not isinstance(direction, str) or direction not in _OPPOSITE:
            require_choice("HybridTensor.require_face", "direction", direction, _OPPOSITE)
        gathered, face = self._gathered, getattr(self, direction)
        if gathered is not None:
            # A gather fills the memory of tensors that stay: ``face``, taken before, is filled by this call.
            of_all = gathered.require(_OPPOSITE[direction] if self.swapped else direction)
            if face is None:  # it had no memory when this view was taken
                face = self.taken(of_all)
        if face is None:
            advice = f"quantize with {direction}=True"
            if self.record.readers is not None:  # as in a reentrant checkpoint that ends here
                advice = "compute it with gradients enabled, or leave into= out"
            raise ValueError(
                f"{gemm}: {name} has no {direction} face, a HybridTensor of shape {tuple(self.shape)}; {advice}"
            )
        found: FaceTensor = face
        return found

    @property
    def is_stack(self) -> bool:
        """Whether this is a stack of matrices, such as experts' weights."""
        faces = [face for face in (self.rowwise, self.columnwise) if face is not None]
        return self.dim() == 3 and all(getattr(face, "is_stack", False) for face in faces)

    def rows(self) -> Tensor:
        """The values for an embedding lookup: those of the rowwise face, or of the gathered weight."""
        face = self.require_face("rowwise", name="weight", gemm="embedding")
        gathered = self._gathered
        values = None if gathered is None else gathered.values
        if values is None:
            return face.dequantize()
        return values.t() if self.swapped else values

    def faces(self, *, rowwise: bool, columnwise: bool, dtype: torch.dtype) -> Faces:
        """Return the requested faces, in high precision with ``dtype``; raise ValueError if one is absent."""
        row = column = None
        if rowwise:
            row = rowwise_face(
                self.require_face("rowwise", name="weight", gemm="output"),
                dtype,
                stack=self.is_stack,
            )
        if columnwise:
            column = columnwise_face(
                self.require_face("columnwise", name="weight", gemm="grad_input"),
                dtype,
                stack=self.is_stack,
            )
        return row, column

    @torch.no_grad()
    def forward_face(self) -> Face:
        """Return the rowwise face; raise ValueError if it is absent."""
        face = self.require_face("rowwise", name="weight", gemm="output")
        return rowwise_face(face, self.dtype, stack=self.is_stack)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Metadata, Metadata | None]]:
        # A graph holds a gathered weight's faces
        if self.record.gathered is not None:
            self.record.gathered.mark_traced()
        return super().__tensor_flatten__()

    def take_carried(self, tensors: dict[str, Tensor], meaning: Metadata | None) -> None:
        super().take_carried(tensors, meaning)
        self.record.is_of_graph = True

    def is_set(self) -> tuple[bool, ...]:
        return self.rowwise is not None, self.columnwise is not None

    def like(self, other: Self) -> Self:
        """See ``InterceptingTensor.like``; also copies the gathered faces' record and the layers of a quantized
        input."""
        self.record.gathered, self.swapped = other.record.gathered, other.swapped
        self.record.readers = other.record.readers
        if other.record.gathered is not None:
            self.taken = other.taken
        return super().like(other)

    def alias_of(self, other: Self) -> Self:
        self.taken, self.swapped = other.taken, other.swapped
        return super().alias_of(other)

    def view_of(self, other: Self, view: View) -> Self:
        """Share the record of ``other``, of which this is a view; return this tensor."""
        before = other.taken
        self.record, self.swapped = other.record, other.swapped
        self.taken = view if before is whole else lambda values: view(before(values))
        return self

    def _user_attributes(self) -> Attributes:
        attributes = super()._user_attributes()
        if self.record.readers is not None:
            attributes["has_readers"] = True
        if self.record.values is not None:
            # A view is pickled with its own part of the values, not with those of the whole weight.
            is_whole = self.taken is whole
            attributes["values"] = (
                self.high_precision if is_whole else HighPrecisionValues(self.original)
            )
        return attributes

    def _take_attributes(self, attributes: Attributes) -> None:
        own = dict(attributes)
        if own.pop("has_readers", False) and self.record.readers is None:
            self.record.readers = ReadBy((), None)  # who they were is not pickled: nobody reads it
        # ``kept`` is what the values were called in pickles of earlier versions.
        for name in ("kept", "values"):
            self.record.values = own.pop(name, self.record.values)
        super()._take_attributes(own)

    def untyped_storage(self) -> torch.UntypedStorage:
        """See ``WrapperTensor.untyped_storage``; of a state dict's tensor, that of its values."""
        return self._saved().untyped_storage() if self.is_saved else super().untyped_storage()

    def data_ptr(self) -> int:
        """See ``WrapperTensor.data_ptr``; of a state dict's tensor, return the address of its values."""
        return self._saved().data_ptr() if self.is_saved else super().data_ptr()

    def _saved(self) -> Tensor:
        """Return a plain copy of the weight's original, or of the values of its faces where an optimizer has masters;
        cached until they are written."""
        # Nothing else saves an original, while masters are in their optimizer's state. The values of the faces load as
        # the same faces; masters, rounded to this dtype, might not.
        # A copy, because Transformers refuses tied weights that share memory and have no addresses of single elements.
        original = self.original
        read = [*flatten(self)[0], *([] if original is None else [original])]
        versions = tuple(version_of(tensor) for tensor in read)
        if self._plain is None or self._plain[0] != versions:
            values = self.dequantize() if original is None else original.to(self.dtype, copy=True)
            self._plain = versions, values.contiguous()
        return self._plain[1]

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values of a weight as a numpy array that cannot be written: it is a copy.

        Raises:
            TypeError: If this is no weight, unless ``force``.
            RuntimeError: If a gradient is required, unless ``force``.
        """
        if self.config is None or force is not False:
            return super().numpy(force=force)
        if self.requires_grad:
            raise RuntimeError(
                "HybridTensor: numpy() would lose the gradient that this weight requires; call "
                "detach().numpy()"
            )
        values = self.dequantize().numpy()
        values.flags.writeable = False
        return values

    def check_shards(self, size: int, dim: int) -> None:
        """Raise ValueError where ``fully_shard`` would cut this weight into shards that cannot be gathered."""
        if self.config is not None and self.fsdp_hooks is not None:
            self.fsdp_hooks.check_shards(self, size, dim)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values of the more precise face as a plain tensor, in ``dtype`` (default: the nominal dtype).

        A plain high-precision face is the most precise; then more mantissa, then the rowwise one.
        """
        faces = [
            face
            for face in (self.present("rowwise"), self.present("columnwise"))
            if face is not None and not isinstance(face, ShardedFace)
        ]
        # Of equally precise faces ``max`` returns the first, the rowwise one.
        return max(faces, key=_precision).dequantize(dtype)

    def present(self, direction: str) -> FaceTensor | None:
        """Return a face, or None if it is absent or not gathered."""
        gathered, where = self._gathered, _OPPOSITE[direction] if self.swapped else direction
        if gathered is not None and not gathered.is_there(where):
            return None
        face: FaceTensor | None = getattr(self, direction)
        return face

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        faces = ", ".join(f"{n}={_format_of(getattr(self, n))}" for n in self.inner_names)
        return f"HybridTensor({faces}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def _check_same(rowwise: FaceTensor, columnwise: FaceTensor) -> None:
    for what in ("shape", "dtype", "device"):
        row, column = getattr(rowwise, what), getattr(columnwise, what)
        if row != column:
            raise ValueError(
                f"HybridTensor: faces of one {what} are required, got rowwise {row} and columnwise {column}; "
                "make both from one tensor"
            )


def is_of(face: FaceTensor | None, other: FaceTensor | None) -> bool:
    """Return whether ``face`` is the dequantized ``other``, in the same memory."""
    source = face.source if isinstance(face, IdentityTensor) else None
    if not isinstance(source, QuantizedTensor) or not isinstance(other, QuantizedTensor):
        return False
    names, metadata = source.parts()
    return (names, metadata) == other.parts() and all(
        is_same(getattr(source, n), getattr(other, n)) for n in names
    )


def _format_of(face: FaceTensor | None) -> str:
    if isinstance(face, IdentityTensor) and isinstance(face.source, QuantizedTensor):
        return f"identity of {face.source.format}"
    return "None" if face is None else str(face.format)


def _precision(face: FaceTensor) -> tuple[bool, int, bool, bool]:
    """Return a sort key of precision: plain, then mantissa bits, no rotation, fewer values per scale."""
    leaf = face.source if isinstance(face, IdentityTensor) else face
    if not isinstance(leaf, QuantizedTensor) or leaf.format.element is None:
        return True, 0, True, True
    return (
        False,
        leaf.format.mantissa_bits,
        not leaf.format.hadamard,
        leaf.format.block != (None, None),
    )
