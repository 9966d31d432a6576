"""What a layer's quantizers remember from step to step: scales with their amax histories, and the random counter.

Quantizers are frozen values; whatever changes while training lives here, in the buffers of a small module that
``quantize_`` hangs into the layer (``layer.quantization_state``) when its recipe needs one. Buffers are saved, loaded
and moved with the model. ``hybridtensor.step_`` advances all of them once per optimizer step.

Shape letters: ``S`` scales, one per *slot* (a role, or a role and a direction); ``L`` history length.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from hybridtensor.arguments import place, require_choice, require_kind, require_text, wrong
from hybridtensor.ops import Hint
from hybridtensor.ops.amaxes import AmaxRecord, nowhere
from hybridtensor.state.dry_runs import is_dry_run
from hybridtensor.state.keys import FORMER_NAMES, has_layer, hash64, key_of_name, take_former_names
from hybridtensor.state.lineage import NOTHING, Lineage, digest
from hybridtensor.state.module import StateModule
from hybridtensor.state.ranks import ALL_RANKS
from hybridtensor.state.rules import ROLES, DelayedRule, StatefulQuantizer, in_words, same_tensor
from hybridtensor.state.tensors import CommonAmax, StateTensors


class LayerState(StateModule):
    """The state of one layer's quantizers.

    ::

        state = model.blocks[0].quantization_state  # after quantize_(model, "fp8_delayed")
        print(state.slots, state.encode_scale, state.amax_history)

    Args:
        name: Fully qualified name of the layer, from which the key of random rounding follows.
            Without one, None, the key is drawn from torch's generator when it is first needed.

    Attributes:
        rounding: Buffer int64 ``[2]``, the layer's key and the step; None where nothing rounds at random.
        encode_scale: Buffer fp32 ``[S]``, what values are multiplied with before a delayed cast; None without such.
        amax_history: Buffer fp32 ``[S, L]``, the amaxes of past steps, the newest last. A history
            shorter than the longest uses the last entries; the first entry of each is always free.
        layout: Buffer int64 ``[1]``, a hash of slots and rules, by which a checkpoint says what it holds.
        record: The record of the step's amaxes; None without delayed scales.
        recording: Whether amaxes are recorded; see ``without_recording``.
        unrecorded: Whether a backward ran since the last step and recorded nothing.
        recorded: Whether a backward ran since the last step and recorded its amaxes.
        multiplied: Whether a product of the layer ran or was traced, or a warning said that none did.
        is_in_graphs: Whether compiled graphs take the weight, whose products are traced for one of equal layers only.
        parent: Name of the module whose forward calls the layer, or None if that is not known.
        transposed: Whether the weight is stored ``[in, out]``, or a stack of experts' ``[E, in, out]``; None of one
            of ``nn.Linear``.
        slots: Names of the delayed scales: a role, or ``<role>_<direction>`` in a hybrid.
        rules: Rule by which each scale follows from amaxes.
        common: The common scale that the weight has with those of other layers, or None.
        ranks: The ranks that train the layer together.
        version: Counts changes of what the weight is quantized by, for caches of its faces.
        steps: Number of calls of ``step_``, those of skipped steps included.
        steps_change_weight: Whether the weight's faces depend on the step, by delayed scales, random numbers or signs.
        replayed: Whether a step went into a CUDA graph: its replays change the state without being counted.
    """

    rounding: Tensor | None
    encode_scale: Tensor | None
    amax_history: Tensor | None
    layout: Tensor | None
    transposed: bool | None = None

    def __init__(self, name: str | None) -> None:
        if name is not None:
            require_text("LayerState", name=name)
        super().__init__()
        self.name = name or ""
        self.parent: str | None = None
        self._key = None if name is None else key_of_name(name)
        self.slots: tuple[str, ...] = ()
        self.rules: tuple[DelayedRule, ...] = ()
        self.record: AmaxRecord | None = None
        self.recording = True
        self.unrecorded = self.recorded = self.replayed = False
        self.multiplied = self.is_in_graphs = False
        self.common: CommonAmax | None = None
        self.ranks = ALL_RANKS
        self.version, self.steps, self.steps_change_weight = 0, 0, False
        self.hints: dict[str, Hint] = {}
        self._left: Tensor | None = None  # a counter that no recipe needs at the moment
        self._lineage = Lineage()
        for buffer in ("rounding", "encode_scale", "amax_history", "layout"):
            self.register_buffer(buffer, None)

    @classmethod
    def of(
        cls,
        quantizers: Mapping[str, StatefulQuantizer],
        *,
        name: str | None = "",
        device: torch.device | str = "cpu",
    ) -> LayerState:
        """Return the state of quantizers that are used on their own, without a layer.

        Args:
            quantizers: Quantizer by role.
            name: Name from which the key of random rounding follows; None for a key from torch's generator.
            device: Where the tensors are.

        Raises:
            TypeError: If an argument is of the wrong kind.
            ValueError: If a role or the device is unknown.
        """
        who = "LayerState.of"
        require_kind(who, "a dictionary of quantizers by role", quantizers, Mapping)
        state, where = cls(name), place(who, device)
        rules: dict[str, DelayedRule] = {}
        for role, quantizer in quantizers.items():
            require_choice(who, "role", role, ROLES)
            if not hasattr(quantizer, "delayed_rules"):
                raise wrong(who, f"a quantizer for {role}", quantizer)
            rules |= quantizer.delayed_rules(role)
        stochastic = {role for role, quantizer in quantizers.items() if quantizer.stochastic}
        state.require(rules, stochastic=stochastic, device=where)
        return state

    @property
    def is_empty(self) -> bool:
        return self._buffers["rounding"] is self._buffers["encode_scale"] is None

    @property
    def amax(self) -> Tensor | None:
        """fp32 ``[S]``, the amaxes since the last step; None without delayed scales."""
        # Not a buffer: DistributedDataParallel overwrites buffers with those of rank 0.
        return None if self.record is None else self.record.amax

    @property
    def amax_address(self) -> Tensor | None:
        """int64 ``[1]``, by which compiled graphs record amaxes; None without delayed scales."""
        record = self.record
        if record is None:
            return None
        if not self.recording or is_dry_run():
            return nowhere(record.address.device)
        self.set_lineage(None)  # a graph records what nobody sees
        return record.address

    @property
    def lineage(self) -> object | None:
        """Identifier of the input scales' history: layers with equal ones have equal scales; None if unknown."""
        # None if a compiled graph records amaxes of this layer, or something other than ``step_`` wrote the scales:
        # DistributedDataParallel broadcasts buffers when it wraps a model.
        if self.replayed:
            return None
        buffers, lineage = self._buffers, self.__dict__["_lineage"]
        inputs: object = lineage.inputs_of(buffers["encode_scale"], buffers["amax_history"])
        return inputs

    def set_lineage(self, inputs: object | None) -> None:
        """Set the lineage of the input's delayed scales; None if unknown."""
        buffers = self._buffers
        made = Lineage.of(inputs, buffers["encode_scale"], buffers["amax_history"])
        self.__dict__["_lineage"] = made  # faster than an attribute of a module

    def mark_backward(self, recorded: bool) -> None:
        """Record that a backward of the layer ran."""
        own = self.__dict__  # Module.__setattr__ would look through parameters and buffers first
        own["recorded" if recorded else "unrecorded"] = True
        if recorded and own["record"] is not None:  # a recipe that was set since may have none
            own["record"].is_used = True

    def tensors(self) -> StateTensors:
        """Return the state's tensors for quantizers."""
        # Asked several times per product: a module's attributes take longer to look up, and so does making them again.
        # ``__setattr__`` forgets what is known; buffers, the ranks and a common scale also change without it.
        own = self.__dict__
        known: StateTensors | None = own.get("_tensors")
        buffers, common = own["_buffers"], own["common"]
        rounding, encode_scale = buffers["rounding"], buffers["encode_scale"]
        rank = 0 if rounding is None else own["ranks"].part_of_batch()
        if (
            known is not None
            and known[0] is rounding
            and known[1] is encode_scale
            and known[4] == rank
            and common is None
        ):
            return known
        record: AmaxRecord | None = own["record"] if own["recording"] else None
        made = own["_tensors"] = StateTensors(
            rounding,
            encode_scale,
            None if record is None else record.total,
            self.slots,
            rank,
            self.name,
            self.hints,
            None if common is None else common.amax,
            self.transposed,
            record,
        )
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__.pop("_tensors", None)
        super().__setattr__(name, value)

    def require(
        self, rules: dict[str, DelayedRule], *, stochastic: Collection[str], device: torch.device
    ) -> None:
        """Create the scales of ``rules``, and a counter for ``stochastic`` roles if any, keeping existing ones."""
        delayed = any(slot.startswith("weight") for slot in rules)
        self.steps_change_weight = delayed or "weight" in stochastic
        if not stochastic:
            self._left, self.rounding = self.rounding if self._left is None else self._left, None
        elif self.rounding is None:
            left, self._left = self._left, None
            self.rounding = torch.empty(2, dtype=torch.int64, device=device)
            if left is None or left.is_meta:
                self._start_counter(self.rounding)
            else:
                self.rounding.copy_(left)
        before = dict(zip(self.slots, self.rules, strict=True))
        if rules == before:
            return
        old = {slot: [t[i] for t in self._per_slot()] for i, slot in enumerate(self.slots)}
        self.version += 1
        self.slots, self.rules = tuple(rules), tuple(rules.values())
        self._allocate(device)
        for index, slot in enumerate(rules):
            former = next((name for name in same_tensor(slot) if name in old), None)
            if former is not None:
                self._continue(index, old[former], before[former])

    def _continue(self, index: int, former: list[Tensor], before: DelayedRule) -> None:
        """Initialize a scale, its amax and history by those of the same tensor under the rule ``before``."""
        encode_scale, amax, history = (t[index] for t in self._per_slot())
        rule, (former_scale, former_amax, _) = self.rules[index], former
        amax.copy_(former_amax)
        history.copy_(rule.continued(before, former_scale, former[2], len(history)))
        if rule == before:
            encode_scale.copy_(former_scale)
        elif not history.is_meta:
            encode_scale.copy_(rule.encode_scale(history))
        history[: len(history) - rule.history_length + 1] = 0.0  # free, once the scale is known

    def _start_counter(self, rounding: Tensor) -> None:
        """Set key and step; draw the key of a layer without a name, unless on the meta device."""
        if rounding.is_meta:
            return
        if self._key is None:
            # From torch's generator of the CPU, which ranks that share the layer seed alike.
            self._key = int(torch.randint(-(2**63), 2**63 - 1, (), device="cpu"))
        rounding.copy_(torch.tensor([self._key, 0], device="cpu"))

    def count_step(self, replayed: bool) -> None:
        """Increment the step; ``replayed`` if it was captured in a CUDA graph."""
        own = self.__dict__  # Module.__setattr__ would look through parameters and buffers first
        own["steps"] += 1
        own["version"] += own["steps_change_weight"]
        own["replayed"] = own["replayed"] or replayed
        own["recorded"] = own["unrecorded"] = False

    def take_name(self, name: str) -> None:
        """Set ``name``, unless there is a name or key already."""
        if not self.name and self._key is None:
            self.name, self._key = name, key_of_name(name)

    def _allocate(self, device: torch.device) -> None:
        """Allocate the delayed scales: scale 1, no history."""
        if not self.slots:
            self.encode_scale = self.amax_history = self.record = self.layout = None
            return
        length = max(rule.history_length for rule in self.rules)
        count, fp32 = len(self.slots), torch.float32  # whatever the default is
        self.encode_scale = torch.ones(count, dtype=fp32, device=device)
        self.amax_history = torch.zeros(count, length, dtype=fp32, device=device)
        self.record = AmaxRecord(count, self.encode_scale.device)
        self.layout = torch.tensor([self._layout()], device=device)
        self.set_lineage(NOTHING)

    def _layout(self) -> int:
        """Return a 64-bit hash of slots and rules."""
        return hash64(repr(list(zip(self.slots, self.rules, strict=True))))

    def _per_slot(self) -> list[Tensor]:
        return [t for t in (self.encode_scale, self.amax, self.amax_history) if t is not None]

    def reset_parameters(self) -> None:
        """Reset to step 0, scale 1, no history."""
        if self.rounding is not None:
            self._start_counter(self.rounding)
        if self.layout is not None:
            self.layout.fill_(self._layout())
        for tensor, value in zip(self._per_slot(), (1.0, 0.0, 0.0), strict=False):
            tensor.fill_(value)
        self.version += 1
        self._left = None
        self.set_lineage(NOTHING)

    def __deepcopy__(self, memo: dict[int, object]) -> LayerState:
        """Copy everything but the ranks, which are shared, and the hints."""
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        others = ("ranks", "hints", "record", "_lineage", "_tensors")
        own = {name: value for name, value in self.__dict__.items() if name not in others}
        new.__dict__.update(
            copy.deepcopy(own, memo), ranks=self.ranks, hints={}, _lineage=Lineage()
        )
        new._take_record(self.amax)
        new.set_lineage(self.lineage)
        return new

    def _take_record(self, amax: Tensor | None, device: torch.device | None = None) -> None:
        """Record amaxes in new memory that starts with the given ones."""
        self.record = None
        if amax is not None:
            self.record = AmaxRecord(len(amax), amax.device if device is None else device)
            if not amax.is_meta:
                self.record.total.copy_(amax)

    def _move_others(self, fn: Callable[[Tensor], Tensor]) -> None:
        """See ``StateModule._move_others``: moves the record of amaxes."""
        if self.amax is not None:
            # ``fn`` shows where it moves by what it returns only.
            device = fn(torch.empty_like(self.amax)).device
            if device != self.amax.device:
                self._take_record(self.amax, device)

    def __getstate__(self) -> dict[str, object]:
        """Return the state without what belongs to this process: ranks, hints, amax records."""
        others = ("ranks", "record", "_lineage", "_tensors")
        own = {name: v for name, v in self.__dict__.items() if name not in others}
        # As numbers: a spawned process opens a tensor's memory later, when a copy would be gone.
        amax = self.amax if self.amax is None or self.amax.is_meta else self.amax.tolist()
        return own | {"hints": {}, "amax": amax}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled state; those of former versions lack some attributes."""
        buffers = {FORMER_NAMES.get(name, name): b for name, b in state["_buffers"].items()}
        state.pop("group", None)  # of former versions
        amax = state.pop("amax")
        since = {"recording": True, "common": None, "steps": 0, "steps_change_weight": True}
        since |= dict.fromkeys(("recorded", "unrecorded", "multiplied", "is_in_graphs"), False)
        own = {"hints": {}, "ranks": ALL_RANKS} | since | state | {"_buffers": buffers}
        super().__setstate__(own)  # type: ignore[no-untyped-call]
        self._lineage = Lineage()
        if (scale := self.encode_scale) is not None:  # former versions pickled a tensor
            amax = torch.as_tensor(amax, dtype=torch.float32, device=scale.device)
        self._take_record(amax)
        self.set_lineage(digest(self.slots, self.encode_scale, self.amax_history))

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        """Load the buffers; reset them where the checkpoint has the layer without them, as of a plain model."""
        # The last argument of torch's private method: messages that load_state_dict raises together.
        errors: list[str] = args[-1]
        take_former_names(state_dict, prefix)
        if not has_layer(state_dict, prefix):
            return  # a part of the model is loaded, such as biases or an adapter
        if not any(key.startswith(prefix) for key in state_dict):
            self.reset_parameters()
        elif self._fits(state_dict.get(f"{prefix}layout"), prefix, errors):
            super()._load_from_state_dict(state_dict, prefix, *args)
            self._to_fp32()
            self.set_lineage(digest(self.slots, self.encode_scale, self.amax_history))
        self.version += 1

    def _fits(self, layout: Tensor | None, prefix: str, errors: list[str]) -> bool:
        """Return whether a checkpoint's scales match this recipe; append an error if not."""
        if layout is None or self.layout is None or layout.is_meta or int(layout) == self._layout():
            return True  # what is missing or too much is an error without us
        scales = ", ".join(in_words(self.slots, self.rules))
        errors.append(
            f"{prefix[:-1]}: the checkpoint has other delayed scales than this model, ({scales}); "
            "load it into a model with its own recipe, then change recipes with set_config_; or its buffers were "
            "averaged, as by AveragedModel(use_buffers=True): average parameters only"
        )
        return False

    def _to_fp32(self) -> None:
        """Cast loaded buffers back to fp32, and reset the step's amax."""
        for name in ("encode_scale", "amax_history"):
            if (buffer := self._buffers[name]) is not None:
                self._buffers[name] = buffer.float()
        scale, amax = self.encode_scale, self.amax
        if scale is not None and amax is not None and amax.device == scale.device:
            amax.zero_()  # in place: CUDA graphs hold its address
        else:
            self._take_record(None if scale is None else torch.zeros_like(scale))

    def extra_repr(self) -> str:
        """Return the slots and settings to print."""
        kept = in_words(self.slots, self.rules)
        if self.rounding is not None:
            kept.append("stochastic rounding")
        return ", ".join(kept)
