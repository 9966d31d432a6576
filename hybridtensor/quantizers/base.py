"""What every quantizer is: frozen, compared by value, without state; which faces to make is an argument of the call."""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hybridtensor.arguments import require_choice, require_int
from hybridtensor.formats import Format, work_out
from hybridtensor.ops import Cast, CastRequest, Face, Faces
from hybridtensor.quantizers.own_faces import checked
from hybridtensor.quantizers.plans import Plans, cast_plan, check_blocks
from hybridtensor.state import MAX_SEED, Context, DelayedRule

ALONE = Context()


def require_rounding(
    who: str, rounding: object, seed: object, known: tuple[str, ...] = ("nearest", "stochastic")
) -> None:
    """Raise unless ``rounding`` is a known word and the seed is valid."""
    require_choice(who, "rounding", rounding, known)
    require_int(who, seed=seed)
    if not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
        raise ValueError(f"{who}: a seed from 0 to {MAX_SEED} is required, got {seed}")


@dataclass(frozen=True)
class Quantizer(ABC):
    """Makes the faces of a tensor. Subclasses say in which format and how.

    ::

        quantized = ht.MXFP8Quantizer().quantize(x)
        error = quantized.dequantize() - x

    ``quantizer.quantize(x)`` gives a ``HybridTensor`` and ``quantizer.update_(tensor, x)`` overwrites one: see
    ``hybridtensor.subclasses.quantizing``, which adds them here, because tensors are built on quantizers.
    """

    repeatable: ClassVar[bool] = True
    """Whether quantizing one tensor twice gives the same bits whatever happened in between."""

    stochastic: ClassVar[bool] = False
    """Whether elements are rounded at random."""

    requantizes: ClassVar[bool] = False
    """Whether the columnwise face is quantized from the values that the rowwise face holds."""

    derives_columnwise: ClassVar[bool] = False
    """Whether the columnwise face is made from the values that the rowwise face holds, or has just these."""

    draws_from_rowwise: ClassVar[bool] = False
    """Whether each step requantizes the columnwise face from the rowwise one with new random signs (EDEN); persistent
    weights then store the rowwise one alone."""

    rule: ClassVar[str] = ""
    """Which block scale is chosen, where formats leave a choice; see ``Cast``."""

    @functools.cached_property
    def plans(self) -> Plans:
        """A cache of cast plans; no field, since equal quantizers may have cached other plans."""
        return Plans()

    quantize: ClassVar[Callable[..., object]]
    update_: ClassVar[Callable[..., object]]

    def __init_subclass__(cls, *, by_casts: bool = False) -> None:
        # Weights of ours name their quantizers in checkpoints
        torch.serialization.add_safe_globals([cls])
        own = cls.__dict__.get("faces")
        if own is not None and not by_casts:  # casts make faces as their formats say
            type.__setattr__(cls, "faces", checked(own))

    def __getstate__(self) -> dict[str, object]:
        """Return the fields only, without cached plans."""
        # Plans are those of this process and version, and a quantizer is pickled with each weight
        # that it quantizes.
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __setstate__(self, fields: dict[str, object]) -> None:
        self.__dict__.update(fields)
        work_out(self)

    @property
    @abstractmethod
    def rowwise_format(self) -> Format:
        """Format of the rowwise face."""

    @property
    @abstractmethod
    def columnwise_format(self) -> Format:
        """Format of the columnwise face."""

    @abstractmethod
    def faces(
        self,
        x: Tensor,
        *,
        rowwise: bool,
        columnwise: bool,
        dtype: torch.dtype,
        context: Context = ALONE,
    ) -> Faces:
        """Return the faces asked for.

        Args:
            x: Plain tensor, bf16, fp16 or fp32, one to four dimensions. Leading dimensions count as
                rows, of which there may be any number but in a weight: see ``ops.quantize``. With
                groups in the context, tokens or a stack of weights: see ``ops.quantize_groups``.
            rowwise: Make the rowwise face.
            columnwise: Make the columnwise face.
            dtype: Dtype of a face in high precision, which may share the memory of ``x``.
            context: The layer and role of the tensor.

        Raises:
            ValueError: If the features, or the rows of a weight, are not whole blocks.
        """

    def request(
        self, *, rowwise: bool, columnwise: bool, dtype: torch.dtype, context: Context
    ) -> CastRequest | None:
        """Return the one cast that makes exactly the faces of ``faces``, or None if one cast is not enough."""
        return None

    def delayed_rules(self, slot: str) -> dict[str, DelayedRule]:
        """Return the delayed scales that this quantizer needs for the tensor ``slot``, by slot."""
        return {}

    def check_matrix(
        self,
        rows: int | None,
        columns: int | None,
        who: str,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        """Raise ValueError if faces of a ``[rows, columns]`` matrix do not consist of whole blocks; None is any
        number."""
        if rowwise:
            check_blocks(self.rowwise_format, (rows, columns), who, "rowwise")
        if columnwise:
            check_blocks(self.columnwise_format, (columns, rows), who, "columnwise")


def one_face(
    quantizer: Quantizer, x: Tensor, direction: str, dtype: torch.dtype, context: Context = ALONE
) -> Face:
    """Return the ``"rowwise"`` or the ``"columnwise"`` face of a tensor, as ``Quantizer.faces`` makes it."""
    rowwise = direction == "rowwise"
    row, column = quantizer.faces(
        x, rowwise=rowwise, columnwise=not rowwise, dtype=dtype, context=context
    )
    face = row if rowwise else column
    if face is None:
        raise ValueError(
            f"{quantizer}: faces() made no {direction} face; have it return what is asked for"
        )
    return face


class CastQuantizer(Quantizer, by_casts=True):
    """A quantizer whose faces one cast makes where that is possible, and else ``faces_apart``."""

    def faces(
        self,
        x: Tensor,
        *,
        rowwise: bool,
        columnwise: bool,
        dtype: torch.dtype,
        context: Context = ALONE,
    ) -> Faces:
        plan = cast_plan(self, rowwise, columnwise, dtype, context, x.device)
        if plan is None:
            return self.faces_apart(x, rowwise, columnwise, dtype, context)
        return plan.run(x, context)

    def faces_apart(
        self, x: Tensor, rowwise: bool, columnwise: bool, dtype: torch.dtype, context: Context
    ) -> Faces:
        """Return the requested faces where one cast does not make them; see ``faces``."""
        raise NotImplementedError(
            f"{type(self).__name__}: request() gives no cast that makes the faces; define faces_apart()"
        )


class OneFormatQuantizer(CastQuantizer):
    """A quantizer whose faces have one format; subclasses name it and say how it is made."""

    @property
    @abstractmethod
    def format(self) -> Format:
        """Format of both faces."""

    @property
    def rowwise_format(self) -> Format:
        return self.format

    @property
    def columnwise_format(self) -> Format:
        return self.format

    @abstractmethod
    def cast(self, context: Context) -> Cast:
        """Return the cast that makes a face."""

    def request(
        self, *, rowwise: bool, columnwise: bool, dtype: torch.dtype, context: Context
    ) -> CastRequest:
        cast = self.cast(context)
        # Each face draws for itself: with the same numbers the errors of two products would not be
        # independent.
        return CastRequest(cast if rowwise else None, cast.for_columnwise() if columnwise else None)


class RoundingQuantizer(OneFormatQuantizer):
    """A quantizer of one format that rounds to nearest, or at random from a seed."""

    rounding: str
    seed: int

    @functools.cached_property
    def repeatable(self) -> bool:  # type: ignore[override]
        """Whether the same input always gives the same bits."""
        return not self.stochastic

    @functools.cached_property
    def stochastic(self) -> bool:  # type: ignore[override]
        """Whether elements, or their scales, are rounded at random."""
        return self.rounding != "nearest"

    def cast(self, context: Context) -> Cast:
        stream = context.stream(self.seed) if self.stochastic else -1
        return Cast(self.format, stream=stream, rule=self.rule)
