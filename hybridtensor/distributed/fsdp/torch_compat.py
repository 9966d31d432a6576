"""All private names of FSDP2 that this library uses; no other file uses any.

Read in torch 2.11 to 2.13; ``tests/distributed/test_torch_compat.py`` fails where a version lacks one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from hybridtensor.dtensor import local
from hybridtensor.ops.autograd import version_of
from hybridtensor.ops.library import backward_that_runs, saved_tensors_hooks

MISSING = ""  # the name that this torch lacks
try:
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        FSDPMeshInfo,
        HSDPMeshInfo,
        TrainingState,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_param import (
        FSDPParam,
        alloc_storage,
        free_storage,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
except ImportError as error:  # everything but FSDP2 works
    MISSING = str(error)

__all__ = [
    "MISSING",
    "ShardedParam",
    "all_params",
    "alloc_storage",
    "free_storage",
    "hooks_read",
    "params_of",
]


class ShardedParam(NamedTuple):
    """A parameter as FSDP2 holds it.

    Attributes:
        state: State of the module that was wrapped.
        group: The parameters that are gathered together.
        param: The parameter.
    """

    state: FSDPState
    group: FSDPParamGroup
    param: FSDPParam

    # -- what it is

    @property
    def tensor(self) -> Tensor:
        return local(self.param.sharded_param)

    @property
    def is_trained(self) -> bool:
        return self.param.sharded_param.requires_grad

    @property
    def version(self) -> int:
        """Version counter of the DTensor, or -1 for an inference tensor."""
        return version_of(self.param.sharded_param)

    @property
    def size(self) -> tuple[int, ...]:
        return tuple(self.param._orig_size)

    @property
    def padded_size(self) -> tuple[int, ...]:
        """Shape of a shard, padded where shards are uneven."""
        return tuple(self.param.padded_sharded_param_size)

    @property
    def dim(self) -> int:
        return self.param.fsdp_placement.dim

    @property
    def device(self) -> torch.device:
        return self.param.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the mixed-precision policy computes in, or that of the parameter."""
        return self.param.mp_policy.param_dtype or self.tensor.dtype

    @property
    def places(self) -> list[tuple[nn.Module, str]]:
        """The modules that own the parameter, and its name in each."""
        info = self.param._module_info
        shared = zip(info.shared_modules, info.shared_param_names, strict=True)
        return [(info.module, info.param_name), *shared]

    @property
    def readers(self) -> list[nn.Module]:
        """The modules that own the parameter."""
        return [module for module, _ in self.places]

    def holds(self, parameter: Tensor) -> bool:
        """Return whether a module's parameter is this one: its parts, or all of it while it is gathered."""
        gathered = getattr(self.param, "_unsharded_param", None)
        return parameter is self.param.sharded_param or parameter is gathered

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh that FSDP2 got: dimensions of shards and replicas."""
        return self.param.mesh_info.mesh

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold one part each; None where every rank holds the whole (``replicate``)."""
        info = self.param.mesh_info
        return info.shard_process_group if isinstance(info, FSDPMeshInfo) else None

    @property
    def num_ranks(self) -> int:
        info = self.param.mesh_info
        return info.shard_mesh_size if isinstance(info, FSDPMeshInfo) else 1

    @property
    def rank(self) -> int:
        info = self.param.mesh_info
        return info.shard_mesh_rank if isinstance(info, FSDPMeshInfo) else 0

    def process_groups(self) -> list[dist.ProcessGroup]:
        """Return the groups whose successive reductions reach every rank that holds a shard."""
        info = self.param.mesh_info
        groups = [] if self.process_group is None else [self.process_group]
        if not isinstance(info, FSDPMeshInfo) or isinstance(info, HSDPMeshInfo):
            groups.append(info.replicate_process_group)
        return groups

    def under_the_same_root(self) -> Iterator[ShardedParam]:
        """Yield every parameter under the same root, on every rank in the same order."""
        # The state that all wrapped modules under one root share, filled by the root's first forward. Without it,
        # weights under one root could not be found in the same order on every rank, and their collectives would hang.
        for state in self.state._state_ctx.all_states or [self.state]:
            yield from _parameters(state)

    def of_the_group(self) -> list[ShardedParam]:
        """Return the parameters of the same FSDP2 group, in its order."""
        return [ShardedParam(self.state, self.group, param) for param in self.group.fsdp_params]

    def parts_of_the_group(self) -> list[Tensor]:
        """Return the local shards of the same FSDP2 group."""
        # As FSDP2 itself reads them: ``sharded_param`` is a DTensor
        return [param.sharded_param._local_tensor for param in self.group.fsdp_params]  # type: ignore[attr-defined]

    @property
    def is_offloaded(self) -> bool:
        """Whether the shard is on the host, and FSDP2 gathers a copy of it."""
        return self.param.offload_to_cpu

    # -- what happens to it

    def wants(self) -> tuple[bool, bool]:
        """Return whether the gather that is being prepared needs the rowwise face, and the columnwise one.

        If backward gathers again, forward needs the rowwise face alone; if the next forward gathers again, backward
        needs the columnwise face alone. Whatever else gathers (recomputation, ``unshard()``) may need either.
        """
        # FSDP2 says nowhere publicly what a gather is for: ``_training_state`` is set around its
        # hooks, and autograd's task id is -1 outside of a backward. Another meaning in a later
        # torch would leave a layer without its face, which ``Shard.require`` raises for.
        state, in_backward = self.group._training_state, backward_that_runs() != -1
        if state == TrainingState.FORWARD and self.group._reshard_after_forward and not in_backward:
            return True, self._may_stay_until_backward
        if state == TrainingState.PRE_BACKWARD and self.group.reshard_after_backward:
            # With ``set_is_last_backward(False)`` FSDP2 prefetches groups whose backward is over, which the next
            # forward then finds: no forward of theirs awaits a backward.
            return not self.group._post_forward_indices, True
        return True, True

    @property
    def _may_stay_until_backward(self) -> bool:
        """Whether this is a prefetch of a group whose forward ran before: maybe only its backward follows."""
        # FSDP2 gathers again for backward only what is sharded then. The state of a module whose own forward gathers
        # is FORWARD, too, and each forward with gradients leaves an index until backward has ended.
        is_prefetch = self.state._training_state != TrainingState.FORWARD
        return is_prefetch and bool(self.group._post_forward_indices)

    @property
    def in_forward(self) -> bool:
        return self.group._training_state == TrainingState.FORWARD and not self.before_backward

    @property
    def before_backward(self) -> bool:
        in_backward = backward_that_runs() != -1
        return in_backward or self.group._training_state == TrainingState.PRE_BACKWARD

    @property
    def reshards_to_fewer_ranks(self) -> bool:
        """Whether ``reshard_after_forward`` is, or was, a number of ranks."""
        return self.group._use_post_forward_mesh or getattr(
            self.group, "_hybridtensor_widened", False
        )

    def reshard_to_all_ranks(self) -> None:
        """Set resharding after forward to all ranks: extensions cannot be gathered from fewer."""
        # ``_use_post_forward_mesh`` is whether the two meshes differ: made equal, FSDP2 reshards to
        # all ranks as for ``reshard_after_forward=True``
        # (which compares all that these hold, before every gather: ask first whether they are one)
        if self.group.post_forward_mesh_info is self.group.mesh_info:
            return
        if self.group._use_post_forward_mesh:
            self.group.post_forward_mesh_info = self.group.mesh_info  # type: ignore[assignment]
            self.group._hybridtensor_widened = True  # type: ignore[attr-defined]

    def gather_into(self, outputs: list[Tensor]) -> None:
        """Set the uint8 buffers of the next gather; without any FSDP2 frees those that it has, and makes its own."""
        # FSDP2 would write the next gather into what it has whatever its size: with other sizes, silently the wrong
        # bytes.
        # FSDP2 makes new buffers only where this list is empty (``init_all_gather_outputs``); it allocates their memory
        # before it writes them
        self.param.all_gather_outputs = outputs

    def free_on_reshard(self, tensors: list[Tensor]) -> None:
        """Set the tensors whose storage FSDP2 frees on reshard and allocates before a gather."""
        # The list that FSDP2 fills from ``fsdp_post_all_gather`` once; set anew here because the
        # faces wanted change from gather to gather. If torch ignored it, gathered memory would
        # stay.
        self.param._unsharded_inner_tensors = tensors

    def reshard(self) -> None:
        """Reshard if no gather is pending: the next use gathers again."""
        # What ``FSDPModule.reshard`` does, for one group; in the middle of a forward or backward it
        # would free memory that a layer reads
        if self.group.is_unsharded and self.group._training_state == TrainingState.IDLE:
            self.group._to_sharded()

    def gather_again(self) -> None:
        """Gather the group in the middle of a forward or backward, with both faces."""
        # FSDP2 gathers only what is sharded, and ``wants`` returns both faces in the state IDLE. A
        # torch whose ``unshard`` checks for a running backward would raise here, on activation
        # checkpointing. Out of sight of dispatch modes: selective checkpointing refuses, in its second pass, operators
        # that its first had not.
        others = self._in_their_place()
        with _disable_current_modes(), self.group.use_training_state(TrainingState.IDLE):
            self.group._to_sharded()
            self.group.unshard()
            self.group.wait_for_unshard()
        for module, name, tensor in others:  # FSDP2 registered its own
            module._parameters[name] = tensor

    def _in_their_place(self) -> list[tuple[nn.Module, str, nn.Parameter]]:
        """Return tensors, such as local ones, that a running forward put at the places of the group's parameters."""
        found = []
        for param in self.group.fsdp_params:
            one = self._replace(param=param)
            for module, name in one.places:
                tensor = module._parameters.get(name)
                if tensor is not None and not one.holds(tensor):
                    found.append((module, name, tensor))
        return found


def _parameters(state: FSDPState) -> Iterator[ShardedParam]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11 has one group
        group = state._fsdp_param_group
        groups = [] if group is None else [group]
    for group in groups:
        for param in group.fsdp_params:
            yield ShardedParam(state, group, param)


def params_of(module: nn.Module) -> list[ShardedParam]:
    """Return the parameters of ``module`` itself that FSDP2 holds."""
    return [s for s in all_params() if any(reader is module for reader in s.readers)]


def all_params() -> Iterator[ShardedParam]:
    """Yield all parameters that FSDP2 holds in this process."""
    if MISSING:
        return
    # torch's private table from modules to their FSDP states: parameters say nowhere which state
    # holds them. Where it lacks a weight, ``hooks.find`` raises at the first gather.
    references = list(_module_state_mapping.values())
    states = [ref if isinstance(ref, FSDPState) else ref() for ref in references]
    for state in dict.fromkeys(state for state in states if isinstance(state, FSDPState)):
        yield from _parameters(state)


def hooks_read() -> bool:
    """Return whether saved-tensor hooks are open that may read what a graph saves now, such as ``save_on_cpu``."""
    hooks = saved_tensors_hooks(False)
    # While a graph is traced nothing is saved.
    if hooks is None or TracingContext.try_get() is not None:
        return False
    pack = getattr(hooks[0], "func", hooks[0])  # of a partial function
    return getattr(pack, "__module__", None) not in _READ_NO_WEIGHTS


_READ_NO_WEIGHTS = ("torch.utils.checkpoint", "hybridtensor.offload")
