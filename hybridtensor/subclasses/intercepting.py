"""What both kinds of weight share: torch functions seen before autograd takes them apart, a record,
FSDP2's hooks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from hybridtensor.ops import Groups
from hybridtensor.state import Context, LayerState, StateTensors
from hybridtensor.subclasses.op_table import Args, Func, Kwargs, OpTable
from hybridtensor.subclasses.record import WeightRecord
from hybridtensor.subclasses.wrapper import Attributes, Metadata, Size, Stride, WrapperTensor

if TYPE_CHECKING:
    from hybridtensor.recipes.config import HybridConfig

_STATE_NAMES = ("state_rounding", "state_encode_scale", "state_amax_address", "state_common_amax")


Sent = Any
"""What the first half of a gather hands to the second, through FSDP2."""


class Gathering(Protocol):
    """What FSDP2 does with a weight; ``hybridtensor.distributed.fsdp`` provides it."""

    def pre_all_gather(self, tensor: Any, module: nn.Module) -> tuple[tuple[Tensor, ...], Sent]:
        """Return the tensors that this rank sends, and the ``metadata`` of ``post_all_gather``."""

    def post_all_gather(
        self,
        tensor: Any,
        outputs: tuple[Tensor, ...],
        metadata: Sent,
        dtype: torch.dtype,
        out: Tensor | None,
    ) -> object:
        """Return the gathered weight, and what memory it takes."""

    def check_shards(self, weight: Any, size: int, dim: int) -> None:
        """Raise if parts of ``size`` along ``dim`` of a persistent weight cannot be gathered."""

    def refresh(self, pairs: list[tuple[Any, Tensor]]) -> list[tuple[Any, Tensor]]:
        """Quantize new values into parts of persistent weights; return those that are none."""


class PreAllGather:
    """The first hook of FSDP2 on a weight.

    FSDP2 asks for its signature before every gather of every weight. To work out that of a method takes longer than
    what a gather asks of this package; an object that has one is asked at once.

    Args:
        tensor: The weight.
    """

    __slots__ = ("_tensor",)

    def __init__(self, tensor: InterceptingTensor) -> None:
        self._tensor = tensor

    def __call__(
        self,
        mesh: object,
        outer_size: object,
        outer_stride: object,
        module: nn.Module,
        mp_policy: object,
    ) -> tuple[tuple[Tensor, ...], Sent]:
        """Return the tensors that this rank sends, and what the second hook needs."""
        tensor = self._tensor
        return (tensor.gathering or _required(None)).pre_all_gather(tensor, module)

    __signature__ = inspect.Signature(list(inspect.signature(__call__).parameters.values())[1:])


class InterceptingTensor(WrapperTensor):
    """A wrapper that sees torch functions, such as ``F.linear``, before autograd takes them apart.

    ``functions`` holds those that it handles; all others do what torch does.

    Taken apart by ``torch.compile``, it carries the tensors of its layer's state along, so that
    they are inputs of the graph.

    Attributes:
        config: The recipe of the layer whose weight this is, or None.
        record: What is known of the weight, shared by its aliases and views.
    """

    functions: ClassVar[OpTable]
    gathering: ClassVar[Gathering | None] = None  # hybridtensor.distributed.fsdp enters it
    transient_names: ClassVar[tuple[str, ...]] = ("record", "_empty_storage")
    config: HybridConfig | None
    record: WeightRecord

    @property
    def recipe(self) -> HybridConfig:
        """The recipe of the layer whose weight this is.

        Raises:
            ValueError: If this is no layer's weight.
        """
        if self.config is None:
            raise ValueError(
                f"{type(self).__name__}: the weight of a converted layer is required, got {self!r}"
            )
        return self.config

    @property
    def layer(self) -> LayerState | StateTensors | None:
        """State of the layer whose weight this is, or None; in a graph that is being compiled its
        tensors.
        """
        return self.record.layer

    @layer.setter
    def layer(self, layer: LayerState | StateTensors | None) -> None:
        self.record.layer = layer

    @property
    def state(self) -> StateTensors | None:
        """The tensors of the layer's state that quantizing needs."""
        layer = self.record.layer
        return layer.tensors() if isinstance(layer, LayerState) else layer

    @property
    def is_transposed(self) -> bool:
        """Whether this is a weight that is stored ``[in, out]``, or a stack of experts' ``[E, in, out]``."""
        layer = self.record.layer
        return layer is not None and bool(layer.transposed)

    @property
    def context(self) -> Context:
        """Which tensor this is to quantizers: the weight of its layer, or a rank's section of it, or
        a stack of experts' weights.
        """
        record = self.record
        layer = record.layer
        state = layer.tensors() if isinstance(layer, LayerState) else layer
        if self.dim() == 3:
            groups = Groups(self.shape[0], first=record.first or 0)
            return Context("weight", state, section=record.section, groups=groups)
        known = record.context  # of a matrix, maybe of one of a stack, whose record it shares
        if known is not None and known.state is state and known.section is record.section:
            return known
        made = Context("weight", state, section=record.section)
        if isinstance(layer, LayerState):  # in a graph its tensors
            record.context = made
        return made

    def carried(self) -> tuple[list[str], Metadata | None]:
        """See ``WrapperTensor.carried``: the tensors of the layer's state, and what a graph is made for: no
        name, by which equal layers would get graphs of their own.
        """
        state = self.state
        if state is None:
            return [], None
        tensors = (state.rounding, state.encode_scale, self.state_amax_address, state.common_amax)
        names = [
            name for name, tensor in zip(_STATE_NAMES, tensors, strict=True) if tensor is not None
        ]
        return names, (state.slots, state.rank, state.transposed, self.record.first)

    def take_carried(self, tensors: dict[str, Tensor], meaning: Metadata | None) -> None:
        """See ``WrapperTensor.take_carried``."""
        if meaning is not None:
            slots, rank, transposed, self.record.first = meaning
            rounding, encode_scale, address, common = (tensors.get(name) for name in _STATE_NAMES)
            self.record.layer = StateTensors(
                rounding,
                encode_scale,
                address,
                slots,
                rank,
                common_amax=common,
                transposed=transposed,
                step_amax=address,
            )

    @property
    def state_rounding(self) -> Tensor | None:
        """``rounding`` of the layer's state."""
        return None if self.state is None else self.state.rounding

    @property
    def state_encode_scale(self) -> Tensor | None:
        """``encode_scale`` of the layer's state."""
        return None if self.state is None else self.state.encode_scale

    @property
    def state_amax_address(self) -> Tensor | None:
        """Address of the record of the layer's amaxes."""
        layer = self.record.layer
        if isinstance(layer, LayerState):
            return layer.amax_address
        address = None if layer is None else layer.step_amax
        return address if isinstance(address, Tensor) else None

    @property
    def state_common_amax(self) -> Tensor | None:
        """``common_amax`` of the layer's state."""
        return None if self.state is None else self.state.common_amax

    def like(self, other: Self) -> Self:
        """Belong to the layer, its section and the shard that ``other`` belongs to; return this
        tensor.
        """
        self.record.layer, self.record.shard = other.record.layer, other.record.shard
        self.record.section, self.record.first = other.record.section, other.record.first
        return self

    def become(self, other: Self) -> None:
        """Be what ``other`` is, of any shape, dtype and device; this object, and what holds it, stays.

        Aliases and views so far keep the memory that they have.
        """
        # torch's own setter: it gives this object, where there is no Python, the shape, dtype and
        # device of another of its class.
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        own = self.own_names() - {"_empty_storage"}
        self.__dict__.update({n: v for n, v in other.__dict__.items() if n in own})

    @classmethod
    def parameter_of(cls, data: Tensor, requires_grad: bool) -> nn.Parameter:
        """Return what ``type(parameter)(data, requires_grad=...)`` makes, as Accelerate replaces parameters.

        It is a weight with a recipe if ``data`` is one. A plain matrix makes a plain parameter: its layer
        knows the recipe, and applies it to whatever it holds.

        Raises:
            TypeError: If it is a plain tensor of another shape: of experts nobody else knows the recipe.
        """
        if not isinstance(data, InterceptingTensor) and data.dim() != 2:
            raise TypeError(
                f"{cls.__name__}: a weight with a recipe is required to make a parameter of {list(data.shape)}, got a "
                "plain tensor; experts cannot be offloaded by replacing their parameters: leave their module where it "
                "is, or leave it out of quantize_ (keep_bf16)"
            )
        return nn.Parameter(data, requires_grad=requires_grad)

    def map_inner(
        self,
        fn: Callable[[Tensor], Tensor],
        *,
        size: Size | None = None,
        stride: Stride = None,
        **metadata: object,
    ) -> Self:
        """See ``WrapperTensor.map_inner``; the result belongs to the same layer."""
        return super().map_inner(fn, size=size, stride=stride, **metadata).like(self)

    def alias_of(self, other: Self) -> Self:
        """See ``WrapperTensor.alias_of``: the record is shared."""
        self.record = other.record
        return self

    def _user_attributes(self) -> Attributes:
        """See ``WrapperTensor._user_attributes``; a parameter brings the state of its layer along."""
        attributes = super()._user_attributes()
        if isinstance(self, nn.Parameter) and self.record.layer is not None:
            attributes["layer"] = self.record.layer
        return attributes

    def _take_attributes(self, attributes: Attributes) -> None:
        """See ``WrapperTensor._take_attributes``."""
        own = dict(attributes)
        self.record.layer = own.pop("layer", self.record.layer)
        super()._take_attributes(own)

    @property
    def fsdp_pre_all_gather(self) -> PreAllGather:
        """What FSDP2 calls for the tensors that this rank sends; see ``hybridtensor.distributed.fsdp``."""
        return PreAllGather(self)

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: Sent,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> object:
        """Return the gathered weight, made of what all ranks sent."""
        gathering = self.gathering or _required(None)
        return gathering.post_all_gather(self, outputs, metadata, param_dtype, out)

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Func, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        handler = cls.functions.handlers.get(func)
        if handler is not None:
            return handler(func, args, kwargs or {})
        # Private; as ``Tensor.__torch_function__`` does, so that torch's own code does not come here again.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _required(gathering: Gathering | None) -> Gathering:
    if gathering is None:
        raise RuntimeError(
            "fully_shard: hybridtensor.distributed is required, got a package without it; import it"
        )
    return gathering
