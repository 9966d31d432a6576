"""The values of weights in high precision, and the fp32 masters of persistent parameters."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, StateDict, register_optimizer_step_post_hook

from hybridtensor.arguments import require_items, require_kind, wrong
from hybridtensor.dtensor import local
from hybridtensor.ops.library import is_traced
from hybridtensor.printed import level_of_caller
from hybridtensor.quantizers import HybridQuantizer
from hybridtensor.ranks import PATIENCE, Ranks, patience
from hybridtensor.subclasses import HybridTensor, MasterWeight
from hybridtensor.subclasses.op_table import of_layers

T = TypeVar("T")


def high_precision_values(weight: Tensor) -> Tensor:
    """Return the highest-precision values available of a weight, or of its local shard, as a plain tensor."""
    if isinstance(weight, MasterWeight):
        return weight.plain.detach()
    known = weight.known_values if isinstance(weight, HybridTensor) else weight
    return (weight.dequantize() if known is None else known).detach()


def follows_from_master(parameter: Tensor) -> bool:
    """Return whether a persistent parameter, or its local shard, always equals its quantized master."""
    part = persistent_part(parameter)
    weight = part.recipe.weight
    if isinstance(weight, HybridQuantizer) and weight.draws_from_rowwise:
        weight = weight.rowwise  # the other face is not stored
    return part.high_precision.follows and weight.repeatable


def persistent_part(parameter: Tensor) -> HybridTensor:
    """Return the local persistent weight of a parameter; raise TypeError if it is none any more."""
    part = local(parameter)
    if not isinstance(part, HybridTensor):
        raise TypeError(
            f"MasterWeights: a persistent parameter became {type(part).__name__}; make the "
            "optimizer anew"
        )
    return part


def set_master(parameter: Tensor, master: Tensor, *, follows: bool, loaded: bool = False) -> None:
    """Let ``master`` hold the values of a persistent parameter; see ``HighPrecisionValues.set_master``."""
    part = persistent_part(parameter)
    part.record.values = part.high_precision
    part.record.values.set_master(local(master), follows=follows, loaded=loaded)


def is_zero(rate: float | Tensor | None) -> bool:
    """Return whether a learning rate is zero, without synchronizing: a tensor on a GPU counts as nonzero."""
    if rate is None or (isinstance(rate, Tensor) and rate.device.type != "cpu"):
        return False
    return float(rate) == 0


def warn_of_rounded(parameters: Iterable[Tensor]) -> None:
    """Warn if masters are rounded to faces that were written since the last step, or to those that they began with."""
    parts = [persistent_part(parameter) for parameter in parameters]
    rounded = [part for part in parts if part.high_precision.rounded]
    if rounded:
        warnings.warn(
            f"MasterWeights: faces alone, as copies of persistent weights hold, were written into those"
            f"{of_layers(rounded)}, took their place, or were left by an optimizer that is gone; their masters are "
            "rounded to them now. Keep copies of optimizer.masters() instead, make the next optimizer while the former "
            "one lives, or load the optimizer's state after the model's",
            UserWarning,
            stacklevel=level_of_caller(),
        )
    for part in rounded:
        part.high_precision.rounded = False  # it says so once, also of those that are not stepped


def warn_of_lost(who: str, weights: Iterable[Tensor]) -> None:
    """Warn that ``who`` gives what faces hold of persistent weights whose values an optimizer had that is gone."""
    parts = [part for weight in weights if isinstance(part := local(weight), HybridTensor)]
    lost = [part for part in parts if part.high_precision.is_rounded]
    if lost:
        warnings.warn(
            f"{who}: the values in high precision of persistent weights{of_layers(lost)} are gone with their "
            "optimizer, or were left in what was copied or loaded; what the faces hold takes their place. Load the "
            "optimizer with the model, and call it while hybridtensor.optim.MasterWeights lives",
            UserWarning,
            stacklevel=level_of_caller(),
        )


def raising_everywhere(closure: Callable[[], T], parameters: Iterable[Tensor]) -> Callable[[], T]:
    """Wrap a closure so that an error of one rank is raised on all that hold parts of the parameters.

    These quantize the parameters together after each evaluation, and would wait for it.
    """

    def finished() -> T:
        loss = closure()
        patience()  # other ranks may be behind until gradients are reduced
        return loss

    meshes = dict.fromkeys(p.device_mesh for p in parameters if isinstance(p, DTensor))
    evaluate = finished if meshes else closure
    for group in dict.fromkeys(group for mesh in meshes for group in mesh.get_all_groups()):
        evaluate = functools.partial(Ranks("MasterWeights.step", group, PATIENCE).each, evaluate)
    return evaluate


_seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_hooks: list[object] = []


def watch_plain_optimizers() -> None:
    """Warn at an optimizer's first step if it steps persistent weights in a narrow dtype, which rounds small updates
    away."""
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_warn_of_narrow_values))


def _warn_of_narrow_values(optimizer: Optimizer, args: object, kwargs: object) -> None:
    if is_traced() or optimizer in _seen:
        return
    _seen.add(optimizer)
    parts = [
        local(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None
    ]
    values = [part.record.values for part in parts if isinstance(part, HybridTensor)]
    dtypes = {v.original.dtype for v in values if v is not None and v.original is not None}
    narrow = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes if dtype.itemsize < 4)
    if narrow:
        name = type(optimizer).__name__
        warnings.warn(
            f"{name} steps persistent weights whose values are {' and '.join(narrow)}, in which small updates are "
            f"rounded away; use hybridtensor.optim.MasterWeights(torch.optim.{name}, ...), or convert the model "
            "in float32",
            UserWarning,
            stacklevel=2,
        )


def checked_group(who: str, group: object) -> StateDict:
    """Return a parameter group with a list of parameters, or of named ones."""
    if not isinstance(group, dict) or "params" not in group:
        raise wrong(who, "a dictionary with params", group)
    params = group["params"]
    params = [params] if isinstance(params, Tensor) else require_items(who, "parameters", params)
    tensors = [one[-1] if isinstance(one, tuple) else one for one in params]
    for tensor in tensors:
        require_kind(who, "a parameter", tensor, Tensor, "pass model.parameters()")
    if len({id(tensor) for tensor in tensors}) < len(tensors):
        raise ValueError(f"{who}: each parameter once is required, got one twice; drop one of both")
    return {**group, "params": params}


def check_groups(state_dict: object, present: list[StateDict]) -> None:
    """Raise ValueError unless a state dict has parameter groups of the present sizes."""
    who, groups = "MasterWeights.load_state_dict", None
    if isinstance(state_dict, Mapping) and isinstance(state_dict.get("state"), Mapping):
        groups = state_dict.get("param_groups")
    if not isinstance(groups, list) or not all("params" in group for group in groups):
        raise wrong(who, "what state_dict() of an optimizer gives", state_dict)
    wanted, found = ([len(group["params"]) for group in some] for some in (present, groups))
    if wanted != found:
        raise ValueError(
            f"{who}: groups of {wanted} parameters are required, got {found}; give it the state of "
            "an optimizer of the same parameters"
        )
