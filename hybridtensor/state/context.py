"""Which tensor of which layer is quantized."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtensor.arguments import require_choice, require_flag, require_int, require_kind, wrong
from hybridtensor.ops import Groups
from hybridtensor.state.ranks import Section
from hybridtensor.state.rules import ROLES
from hybridtensor.state.tensors import StateTensors

_STREAMS_PER_SEED = 8  # a role and a direction need three bits
# A stream is one word of 32 bits of Philox's counter.
MAX_SEED = 2**32 // _STREAMS_PER_SEED - 1


class Context(NamedTuple):
    """Which tensor of which layer is quantized: for errors, and to find its state.

    ::

        layer = model.blocks[0]  # after quantize_(model, "fp8_delayed")
        context = ht.Context("input", layer.quantization_state.tensors())
        quantized = layer.weight.config.input.quantize(x, context=context)

    Attributes:
        role: ``"input"``, ``"weight"`` or ``"grad_output"``.
        state: State of the layer, or None for a tensor on its own.
        direction: Inside a hybrid, which of its quantizers is meant.
        record: Whether delayed scaling records amaxes of this tensor: where gradients are enabled.
        first_row: Index of the first row in the whole tensor, for random rounding. By default ranks
            have the rows of one batch in order, and all of a weight.
        section: This rank's section of the layer under tensor parallelism; None is all of it.
        groups: Which rows belong to which of several weights, or None; see ``ops.groups``.
        amaxes: Largest magnitudes that the rowwise and the columnwise face are scaled by, where the
            tensor is a part of one whose scales it gets; see ``ops.quantize``.
        after: What a graph computes before it quantizes this; see ``ops.order``.
        values: Whether the rowwise and the columnwise face are read by one product only, so that they may hold
            dequantized values if the device cannot multiply the format; see ``Format.values``.
        direct: Whether no mode or tracer observes operators on the tensor: ``runs_directly``, asked once by the layer.
    """

    role: str = "input"
    state: StateTensors | None = None
    direction: str | None = None
    record: bool = True
    first_row: int | None = None
    section: Section | None = None
    amaxes: tuple[Tensor | None, Tensor | None] = (None, None)
    groups: Groups | None = None
    after: Tensor | None = None
    values: tuple[bool, bool] = (False, False)
    direct: bool = False

    def __str__(self) -> str:
        return (
            self.role
            if self.state is None or not self.state.name
            else f"layer {self.state.name}, {self.role}"
        )

    def in_backward(self) -> Context:
        """Return the context of what backward quantizes; see ``StateTensors.in_backward``."""
        return self if self.state is None else self._replace(state=self.state.in_backward())

    def with_values(self, values: tuple[bool, bool]) -> Context:
        return tuple.__new__(Context, (*self[:9], values, self.direct))  # faster than _replace

    def of_gradient(self, after: Tensor | None, values: bool, direct: bool) -> Context:
        """Return the context of the output's gradient, from that of the input; ``values`` is of both faces."""
        _, state, direction, record, first_row, section, amaxes, groups, *_ = self
        if state is not None and not direct:
            state = state.in_backward()
        of_layer = state, direction, record, first_row, section, amaxes, groups
        return Context("grad_output", *of_layer, after, (values, values), direct)

    @property
    def slot(self) -> str:
        """Name of this tensor's delayed scale, or its first group's."""
        of_direction = self.role if self.direction is None else f"{self.role}_{self.direction}"
        return of_direction if self.groups is None else f"{of_direction}[{self.groups.first}]"

    @property
    def tokens_groups(self) -> Groups | None:
        """The groups of tokens; None for a matrix or a stack of weights."""
        return None if self.groups is None or self.groups.ends is None else self.groups

    def stream(self, seed: int) -> int:
        """Return the random stream of the rowwise face; the columnwise face uses the next one."""
        return seed * _STREAMS_PER_SEED + 2 * ROLES.index(self.role)

    def draws(self, rows: int, device: torch.device) -> tuple[Tensor, int]:
        """Return key and step of random rounding, int64 ``[2]``, and the index of the first of ``rows``."""
        # Counted, not drawn from torch's generator: a run would depend on how many ranks there are, and on what else
        # draws.
        # The ranks of a data-parallel group hold the rows of one batch in order, equally many each. Tensor-parallel
        # parts of rows draw as if they were concatenated. Without a layer, key and step are drawn from torch's
        # generator.
        if self.state is None:
            return torch.randint(2**63 - 1, (2,), device=device), 0
        if self.state.rounding is None:
            raise ValueError(
                f"{self}: no counter for stochastic rounding; change recipes with set_config_"
            )
        index, count = (0, 1) if self.section is None else self.section.columns(self.role)
        first = self.first_row
        if first is None and self.role == "weight" and self.groups is not None:
            first = self.groups.first * (rows // max(self.groups.num_groups, 1))
        elif first is None and self.role == "weight":
            first = 0 if self.section is None else self.section.first_out
        elif first is None:
            first = self.state.rank * rows
        return self.state.rounding, first * count + index * rows


def require_context(who: str, context: object) -> None:
    """Raise unless ``context`` is a ``Context`` that names a tensor of a layer."""
    if not isinstance(context, Context):
        raise wrong(who, "a Context", context, "pass Context(role, state)")
    require_choice(who, "role", context.role, ROLES)
    require_kind(who, "LayerState.tensors() as state, or None,", context.state, _STATE)
    if context.direction is not None:
        require_choice(who, "direction", context.direction, ("rowwise", "columnwise"))
    require_flag(who, record=context.record)
    if context.direct is not False:
        raise wrong(who, "False as direct, which layers set,", context.direct, "leave it out")
    if context.first_row is not None:
        require_int(who, at_least=0, first_row=context.first_row)
    require_kind(who, "a Section or None as section", context.section, (Section, type(None)))
    require_kind(who, "Groups or None as groups", context.groups, (Groups, type(None)))
    require_kind(who, "a tensor or None as after", context.after, (Tensor, type(None)))
    if not (isinstance(context.values, tuple) and len(context.values) == 2):
        raise wrong(who, "a pair of flags as values", context.values)
    require_flag(who, row_values=context.values[0], column_values=context.values[1])
    amaxes = context.amaxes
    if not (isinstance(amaxes, tuple) and len(amaxes) == 2):
        raise wrong(who, "a pair of tensors or None as amaxes", amaxes)
    for amax in amaxes:
        require_kind(who, "a tensor or None in amaxes", amax, (Tensor, type(None)))


_STATE = (StateTensors, type(None))
