"""Say which ranks train what: the groups that scales, amaxes and random draws belong to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hybridtensor.arguments import require_group, require_kind, require_module, require_text
from hybridtensor.dtensor import local
from hybridtensor.layers import layers_of
from hybridtensor.linear.grouped import first_expert
from hybridtensor.linear.layer_forward import recipe_of
from hybridtensor.linear.tensor_parallel import mark_section
from hybridtensor.state import LayerState, TrainingRanks
from hybridtensor.state.contract import require_contract
from hybridtensor.state.training import layer_states
from hybridtensor.subclasses import is_converted

Names = str | tuple[str, ...]
"""Dimensions of a mesh."""


def set_mesh_(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    dp: Names = "dp",
    cp: Names = "cp",
    tp: Names = "tp",
    ep: Names = "ep",
    pp: Names = "pp",
) -> nn.Module:
    """Assign the dimensions of a device mesh to data, context, tensor, expert and pipeline parallelism.

    ::

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
        ht.set_mesh_(model, mesh)

    Delayed scales are reduced over dp, cp, tp and ep, as each rank sees a part of the batch or of the layer: they are
    those of the model on one device. Random rounding draws by the rank's part of the batch and of the weight, so that
    no two ranks draw alike for different numbers, and alike for the same ones. Over the stages of a pipeline nothing is
    reduced: each has other layers. Dimensions of other names have nothing to do with it.

    Args:
        model: A model that went through ``quantize_``.
        mesh: The mesh, or a part of it; with names.
        dp: Dimensions that parts of a batch are spread over, in order: ``("dp_replicate", "dp_shard")`` for HSDP.
        cp: Dimension that the tokens of each sequence are spread over.
        tp: Dimension that parts of a layer are spread over.
        ep: Dimension of experts. To all other layers its ranks are data-parallel ones. Each expert has
            delayed scales of its own, known to all ranks.
        pp: Dimension that pipeline stages are spread over.

    Returns:
        ``model``.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If the mesh has no names, or none of these, or a dimension has two of the roles. If the model has
            layers that ``quantize_`` converts, and none of them is.
    """
    require_module("set_mesh_", model)
    require_kind("set_mesh_", "a DeviceMesh", mesh, DeviceMesh)
    roles = _roles(mesh, {"dp": dp, "cp": cp, "tp": tp, "ep": ep, "pp": pp})
    batch = (*roles["dp"], *roles["cp"], *roles["ep"])
    used = (*batch, *roles["tp"])
    ranks = TrainingRanks(
        tuple(mesh.get_group(name) for name in used), _part_of_batch(mesh, batch), named=True
    )
    # Before anything changes: it raises on every rank, or on none.
    require_contract("set_mesh_", model, ranks.groups)
    _require_converted("set_mesh_", model)
    _mark_parts(model, roles["tp"], roles["ep"])  # raises where parts cut blocks
    for state in _states(model):
        state.ranks = ranks
    return model


def _roles(mesh: DeviceMesh, given: dict[str, Names]) -> dict[str, tuple[str, ...]]:
    """Return the dimensions of the mesh by role; raise ValueError unless each has one, and there is one."""
    roles = {role: _dimensions(mesh, role, names) for role, names in given.items()}
    named = [name for names in roles.values() for name in names]
    if not named or len(set(named)) < len(named):
        got = ", ".join(f"{role}={names!r}" for role, names in given.items())
        raise ValueError(
            f"set_mesh_: dimensions of the mesh, each for one thing, are required as {', '.join(given)}, got {got} for "
            f"{mesh.mesh_dim_names}; name those that there are"
        )
    return roles


def _require_converted(who: str, model: nn.Module) -> None:
    """Raise ValueError for a model that is yet to be converted, whose layers would not know of the ranks."""
    plain = [layer.name for layer in layers_of(model) if layer.why_skipped() is None]
    if plain and next(_states(model), None) is None:
        raise ValueError(
            f"{who}: a model that went through quantize_ is required, got {type(model).__name__} with plain layers "
            f"only, {plain[0] or '<root>'} among them; call quantize_ first"
        )


def _part_of_batch(mesh: DeviceMesh, batch: Iterable[str]) -> int:
    """Return this rank's index among the parts of a batch, which dimensions of a mesh are spread over."""
    rank = 0
    # The first dimension outermost, as ranks are numbered in a mesh: so a loader deals out the
    # parts of a batch.
    for name in batch:
        rank = rank * mesh[name].size() + mesh.get_local_rank(name)
    return rank


def _mark_parts(model: nn.Module, parts: tuple[str, ...], experts: tuple[str, ...]) -> None:
    """Record the mesh dimensions that shard layers (``parts``) and experts, on every weight."""
    for parameter in model.parameters():
        part = local(parameter)
        if not isinstance(parameter, DTensor) or not is_converted(part):
            continue
        known = parameter.device_mesh.mesh_dim_names or ()
        if part.dim() != 3:
            mark_section(parameter, part, [known.index(name) for name in parts if name in known])
            continue
        spread = [known.index(name) for name in experts if name in known]
        if spread or part.record.first is None:
            part.record.first = first_expert(parameter, spread)


def _dimensions(mesh: DeviceMesh, role: str, names: Names) -> tuple[str, ...]:
    """Return the named dimensions that the mesh has; names other than the default must exist."""
    given = names if isinstance(names, tuple) else (names,)
    for name in given:
        require_text("set_mesh_", **{role: name})
    known = mesh.mesh_dim_names or ()
    missing = [name for name in given if name not in known]
    if missing and names != role:
        raise ValueError(
            f"set_mesh_: dimensions of the mesh are required as {role}, got {names!r} for "
            f"{mesh.mesh_dim_names}; init_device_mesh names them with mesh_dim_names"
        )
    return tuple(name for name in given if name in known)


def set_data_parallel_group_(model: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    """Set the data-parallel process group (all ranks by default). ``set_mesh_`` does so by a mesh.

    ::

        ht.set_data_parallel_group_(model, mesh.get_group("dp"))

    Over them delayed scales are reduced, and by the rank in it random rounding draws, so that a run does not depend on
    how many they are (given that a batch is split among them in order and evenly).

    Args:
        model: A model that went through ``quantize_``.
        group: The data-parallel group; None is all ranks.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If the model has layers that ``quantize_`` converts, and none of them is.
    """
    require_module("set_data_parallel_group_", model)
    require_group("set_data_parallel_group_", group)
    _require_converted("set_data_parallel_group_", model)
    for state in _states(model):
        state.ranks = TrainingRanks((group,), named=group is not None)
    return model


def _states(model: nn.Module) -> Iterator[LayerState]:
    # A state without tensors is known to its layer's recipe or, of experts, to their weight; it
    # need not be a submodule.
    yield from layer_states(model)
    for module in model.modules():
        recipe = recipe_of(module)
        if recipe is not None:
            yield recipe.state
    for parameter in model.parameters():
        layer = getattr(local(parameter), "layer", None)
        if isinstance(layer, LayerState):
            yield layer
