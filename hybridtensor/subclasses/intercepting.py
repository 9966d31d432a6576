"""What both kinds of weight share: torch functions seen before autograd takes them apart, a record, FSDP2's hooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hybridtensor.ops import Groups
from hybridtensor.state import Context, LayerState, StateTensors, Traced
from hybridtensor.subclasses.op_table import Args, Func, Kwargs, OpTable
from hybridtensor.subclasses.owners import place_of, settle
from hybridtensor.subclasses.record import WeightRecord
from hybridtensor.subclasses.wrapper import Attributes, Metadata, Size, Stride, WrapperTensor

if TYPE_CHECKING:
    from hybridtensor.recipes.config import HybridConfig

_STATE_NAMES = ("state_rounding", "state_encode_scale", "state_amax_address", "state_common_amax")
_NEW = ("of no layer",)  # in place of a state, for a graph

_GRAD: Any = torch._C.TensorBase.grad  # torch's getter and setter


class FSDPHooks(Protocol):
    """FSDP2's hooks of a weight, implemented by ``hybridtensor.distributed.fsdp``."""

    def pre_all_gather(
        self, tensor: InterceptingTensor, module: nn.Module
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Return the payload, and the ``metadata`` for ``post_all_gather``."""

    def post_all_gather(
        self,
        tensor: InterceptingTensor,
        outputs: tuple[Tensor, ...],
        metadata: Any,
        dtype: torch.dtype,
        out: Tensor | None,
    ) -> object:
        """Return the gathered weight, and the tensors whose storage FSDP2 manages."""

    def check_shards(self, weight: InterceptingTensor, size: int, dim: int) -> None:
        """Raise if parts of ``size`` along ``dim`` of a persistent weight cannot be gathered."""

    def refresh(self, pairs: list[tuple[Any, Tensor]]) -> list[tuple[Any, Tensor]]:
        """Quantize new values into local shards; return the pairs without FSDP2."""


class PreAllGather:
    """The first FSDP2 hook as an object with a signature."""

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
    ) -> tuple[tuple[Tensor, ...], Any]:
        tensor = self._tensor
        return _required(tensor.fsdp_hooks).pre_all_gather(tensor, module)

    # FSDP2 inspects the hook before every gather. ``inspect`` takes this attribute, and is slow for a method.
    __signature__ = inspect.Signature(list(inspect.signature(__call__).parameters.values())[1:])


class _Flattened(NamedTuple):
    """What ``__tensor_flatten__`` returned, and what it depends on."""

    state: StateTensors
    config: HybridConfig | None
    first: int | None
    is_set: tuple[bool, ...]
    result: tuple[list[str], tuple[Metadata, Metadata | None]]


class InterceptingTensor(WrapperTensor):
    """A wrapper that sees torch functions, such as ``F.linear``, before autograd takes them apart.

    ``functions`` holds those that it handles; all others do what torch does.

    Taken apart by ``torch.compile``, it carries the tensors of its layer's state along, so that
    they are inputs of the graph.

    Attributes:
        config: The recipe of the layer whose weight this is, or None.
        record: Metadata of the weight, shared by its aliases and views.
        is_data: Whether this was read as ``weight.data``, or made of it; copied with it.
    """

    functions: ClassVar[OpTable]
    fsdp_hooks: ClassVar[FSDPHooks | None] = None  # hybridtensor.distributed.fsdp enters it
    transient_names: ClassVar[tuple[str, ...]] = (
        *WrapperTensor.transient_names,
        "record",
        "_flattened",
    )
    _flattened: _Flattened | None = None
    is_data: bool = False
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
                f"{type(self).__name__}: no recipe is known of {self!r}; call quantize_"
            )
        return self.config

    @property
    def layer(self) -> LayerState | StateTensors | None:
        """State of the weight's layer, or None; its tensors in a compiled graph."""
        return self.record.layer

    @layer.setter
    def layer(self, layer: LayerState | StateTensors | None) -> None:
        if self.record.layer is not layer:
            self.record.layer = layer
            self.record.changes += 1  # faces may be of other scales

    # Optimizers ask five times per step for it, which takes 2 us each where it passes through ``__torch_function__``
    @property
    def grad(self) -> Tensor | None:
        """The gradient, as of any tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            found: Tensor | None = _GRAD.__get__(self)
            return found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__delete__(self)

    @property
    def is_of_no_layer(self) -> bool:
        """Whether this was made of a layer's weight by a factory, such as ``new_zeros``, and is not that layer's: its
        products stay plain, as of an adapter that is made so."""
        record = self.record
        if not record.is_new:
            return False
        if isinstance(record.layer, LayerState) and place_of(record.layer, record) is not None:
            record.is_new = 0
        return record.is_new > 0

    @property
    def computes_as_values(self) -> bool:
        """Whether products by ``@`` are of values: those of ``weight.data``, by which adapters are merged."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.is_data and not (getattr(self, "_is_param", False) or self.requires_grad)

    def read_data(self) -> Tensor:
        made = self.detach()
        if not torch.compiler.is_dynamo_compiling():
            made.is_data = True
        return made

    @property
    def state(self) -> StateTensors | None:
        """The tensors of the layer's state that quantizing needs."""
        layer = self.record.layer
        return layer.tensors() if isinstance(layer, LayerState) else layer

    @property
    def layer_name(self) -> str:
        """The name of the weight's layer for errors, or an empty one."""
        state = self.state
        return "" if state is None else state.name

    @property
    def is_transposed(self) -> bool:
        """Whether the weight is stored ``[in, out]``, or ``[E, in, out]``."""
        layer = self.record.layer
        return layer is not None and bool(layer.transposed)

    @property
    def is_stack(self) -> bool:
        """Whether this is a stack of matrices."""
        return self.dim() == 3

    @property
    def context(self) -> Context:
        """The quantizers' context: the layer's weight, its section under tensor parallelism, or a stack."""
        record = self.record
        layer = record.layer
        state = layer.tensors() if isinstance(layer, LayerState) else layer
        if self.dim() == 3 and self.is_stack:  # every linear layer comes here: no call for a matrix
            groups = Groups(self.shape[0], first=record.first or 0)
            return Context("weight", state, section=record.section, groups=groups)
        known = record.context  # of a matrix, maybe of one of a stack, whose record it shares
        if known is not None and known.state is state and known.section is record.section:
            return known
        made = Context("weight", state, section=record.section)
        if isinstance(layer, LayerState):  # in a graph its tensors
            record.context = made
        return made

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Metadata, Metadata | None]]:
        # Guards and AOTAutograd ask three times per call of a graph. The state's tensors are new if anything of the
        # layer changed, and always where a common scale must be measured.
        record, known, is_set = self.record, self._flattened, self.is_set()
        layer = record.layer
        state = layer.tensors() if isinstance(layer, LayerState) else None
        if (
            known is not None
            and known.state is state
            and known.config is self.config
            and known.first == record.first
            and known.is_set == is_set
            and (record.place is None or record.place.has(record))
        ):
            return known.result
        if getattr(self, "_is_param", False) or record.section is not None:
            settle(record, self.config)  # a graph runs no forward of the layer, which would do it
        result = super().__tensor_flatten__()
        state = self.state
        if isinstance(record.layer, LayerState) and state is not None and not record.is_new:
            self._flattened = _Flattened(state, self.config, record.first, is_set, result)
        return result

    def is_set(self) -> tuple[bool, ...]:
        """Return for each inner tensor that may be None whether it is set."""
        return ()

    def carried(self) -> tuple[list[str], Metadata | None]:
        """See ``WrapperTensor.carried``: tensors of the layer's state, without its name, so that equal layers share
        graphs."""
        layer, state = self.record.layer, self.state
        if self.is_of_no_layer:
            return [], _NEW
        if state is None:
            return [], None
        if isinstance(layer, LayerState):
            # Module.__setattr__ would look through parameters first
            layer.__dict__["is_in_graphs"] = True
        tensors = (state.rounding, state.encode_scale, self.state_amax_address, state.common_amax)
        # AOTAutograd reads these names as attributes, and knows no None: hence the properties below, and names of
        # those that are there only.
        names = [
            name for name, tensor in zip(_STATE_NAMES, tensors, strict=True) if tensor is not None
        ]
        traced = Traced(layer) if isinstance(layer, LayerState) else state.traced
        return names, (state.slots, state.rank, state.transposed, self.record.first, traced)

    def take_carried(self, tensors: dict[str, Tensor], meaning: Metadata | None) -> None:
        self.record.is_new = int(meaning == _NEW)
        if meaning is not None and meaning != _NEW:
            slots, rank, transposed, self.record.first, traced = meaning
            rounding, encode_scale, address, common = (tensors.get(name) for name in _STATE_NAMES)
            self.record.layer = StateTensors(
                rounding,
                encode_scale,
                address,
                slots,
                rank,
                common_amax=common,
                transposed=transposed,
                step_record=address,
                traced=traced,
            )

    @property
    def state_rounding(self) -> Tensor | None:
        return None if self.state is None else self.state.rounding

    @property
    def state_encode_scale(self) -> Tensor | None:
        return None if self.state is None else self.state.encode_scale

    @property
    def state_amax_address(self) -> Tensor | None:
        """Address of the record of the layer's amaxes."""
        layer = self.record.layer
        if isinstance(layer, LayerState):
            return layer.amax_address
        address = None if layer is None else layer.step_record
        return address if isinstance(address, Tensor) else None

    @property
    def state_common_amax(self) -> Tensor | None:
        return None if self.state is None else self.state.common_amax

    def like(self, other: Self) -> Self:
        """Take over the layer, section and shard record of ``other``; return this tensor."""
        self.record.layer, self.record.shard = other.record.layer, other.record.shard
        self.record.section, self.record.first = other.record.section, other.record.first
        self.record.is_copy = True
        return self

    def become(self, other: Self) -> None:
        """Become ``other`` in place, of any shape, dtype and device; existing aliases keep their memory."""
        # torch's own setter: it gives this object, where there is no Python, the shape, dtype and
        # device of another of its class.
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        own = self.own_names() - {"_empty_storage"}
        self.__dict__.update({n: v for n, v in other.__dict__.items() if n in own})

    @classmethod
    def parameter_of(cls, data: Tensor, requires_grad: bool) -> nn.Parameter:
        """Return ``type(parameter)(data, requires_grad=...)``, as Accelerate calls it; raise TypeError for a plain
        stack."""
        # A plain matrix may become a plain parameter: its layer applies the recipe to any tensor at ``weight``. Of
        # experts nothing else knows the recipe.
        if not isinstance(data, InterceptingTensor) and data.dim() != 2:
            raise TypeError(
                f"{cls.__name__}: a plain tensor {list(data.shape)} would become a parameter of experts "
                "without a recipe; experts cannot be offloaded by replacing their parameters: leave their "
                "module where it is, or leave it out of quantize_ (keep_bf16)"
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
        return super().map_inner(fn, size=size, stride=stride, **metadata).like(self)

    def alias_of(self, other: Self) -> Self:
        """See ``WrapperTensor.alias_of``: shares the record."""
        self.record = other.record
        return self

    def _user_attributes(self) -> Attributes:
        """See ``WrapperTensor._user_attributes``; a parameter includes its layer's state."""
        attributes = super()._user_attributes()
        if isinstance(self, nn.Parameter) and self.record.layer is not None:
            attributes["layer"] = self.record.layer
        if self.record.is_new:
            attributes["is_new"] = self.record.is_new
        return attributes

    def _take_attributes(self, attributes: Attributes) -> None:
        own = dict(attributes)
        self.record.layer = own.pop("layer", self.record.layer)
        self.record.is_new = own.pop("is_new", 0)
        super()._take_attributes(own)

    @property
    def fsdp_pre_all_gather(self) -> PreAllGather:
        """Return the payload for FSDP2; see ``hybridtensor.distributed.fsdp``."""
        return PreAllGather(self)

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> object:
        """Return the gathered weight from all ranks' payloads."""
        return _required(self.fsdp_hooks).post_all_gather(self, outputs, metadata, param_dtype, out)

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Func, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        handler = cls.functions.handlers.get(func)
        if handler is not None:
            return handler(func, args, kwargs or {})
        # Private; as ``Tensor.__torch_function__`` does, so that torch's own code does not come here again.
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        source = args[0] if args else next(iter((kwargs or {}).values()), None)
        if isinstance(source, InterceptingTensor) and source.is_data:
            for made in tree_leaves(result):
                if isinstance(made, InterceptingTensor):
                    made.is_data = source.computes_as_values
        return result


def _required(hooks: FSDPHooks | None) -> FSDPHooks:
    if hooks is None:
        raise RuntimeError("fully_shard: hybridtensor.distributed is not imported; import it")
    return hooks
