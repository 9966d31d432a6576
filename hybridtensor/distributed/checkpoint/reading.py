"""Load the newest intact checkpoint of a folder, and report which steps are damaged."""

from __future__ import annotations

import datetime
import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan

from hybridtensor.arguments import require_flag
from hybridtensor.distributed.checkpoint.agreement import check_arguments
from hybridtensor.distributed.checkpoint.entries import Entries
from hybridtensor.distributed.checkpoint.plain import StateDict
from hybridtensor.distributed.checkpoint.planners import HybridLoadPlanner
from hybridtensor.distributed.checkpoint.restoration import Restoration
from hybridtensor.distributed.checkpoint.store import wait_for_previous
from hybridtensor.distributed.checkpoint.undo import Snapshot
from hybridtensor.printed import some
from hybridtensor.ranks import TIMEOUT, Ranks
from hybridtensor.untrusted.files import digest_file
from hybridtensor.untrusted.manifest import MANIFEST, Manifest, root_folder
from hybridtensor.untrusted.metadata import read_metadata
from hybridtensor.untrusted.reader import SafeReader, Staged, UnreadableError
from hybridtensor.untrusted.verifying import problems, steps

Checked = tuple[HybridLoadPlanner, Restoration, Metadata]
"""Planner, restoration and metadata of a step that fits the state."""


class _Read(NamedTuple):
    """A step that is on the host, and not yet written into the state."""

    step: int
    planner: HybridLoadPlanner
    restoration: Restoration
    plan: LoadPlan
    staged: Staged


def load(
    directory: str | os.PathLike[str],
    state: StateDict,
    *,
    step: int | None = None,
    any_recipe: bool = False,
    group: dist.ProcessGroup | None = None,
    timeout: datetime.timedelta = TIMEOUT,
) -> int:
    """Load the newest intact step into ``state``, on any number of ranks, and return its number.

    ::

        state = {"model": model, "optimizer": optimizer}
        step = checkpoint.load("runs/a", state)

    Digests, recipes, names and shapes are checked, and everything is read to the host, before ``state`` is written. If
    a load raises, on any rank and for any reason, tensors, optimizers and data are restored; for this the former
    values are kept on the host until all ranks have finished. Other objects load their former ``state_dict`` again;
    side effects of their ``load_state_dict`` remain. Damaged steps are skipped with a warning. No code of a checkpoint
    is executed.

    Args:
        directory: Folder that was passed to ``save``.
        state: As for ``save``; it may have fewer entries. Tensors are loaded in place, other data is replaced in this
            dictionary.
        step: Load only this step; None loads the newest intact one.
        any_recipe: Allow that the recipes of checkpoint and model differ, or that one of them is not quantized: values
            are loaded, and the state of quantizers whose recipe differs is reset. High-precision dtypes are cast.
        group: Process group of the ranks, whose own timeout then applies; None is all ranks.
        timeout: How long to wait for the slowest rank.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If the checkpoint is of another recipe or class of optimizer, names, shapes or dtypes differ, or
            ranks pass different arguments; on every rank.
        RuntimeError: If no step is intact and readable, reading fails on a rank, or a rank is gone; on every rank.
    """
    wait_for_previous()
    ranks = Ranks("checkpoint.load", group, timeout)

    def given() -> tuple[Path, Entries]:
        require_flag(ranks.who, any_recipe=any_recipe)
        return root_folder(directory, step), Entries(state)

    root, entries = ranks.each(given)
    check_arguments(ranks, directory=os.path.normpath(root), step=step, any_recipe=any_recipe)
    read = _read_newest(ranks, root, step, partial(_checked, entries, any_recipe))
    # After reading, which may fail, and before the first write: what is loaded and what was there
    # are both on the host now.
    snapshot = ranks.each(lambda: Snapshot(entries, read.planner.places(read.plan)))
    _put(ranks, read, snapshot)
    return read.step


def _put(ranks: Ranks, read: _Read, snapshot: Snapshot) -> None:
    """Write the staged tensors in place on all ranks, or restore the former ones on all of them."""
    staged, restoration = read.staged, read.restoration

    def put() -> None:
        read.planner.finish_plan(read.plan)
        staged.put()
        restoration.finish()

    try:
        ranks.each(put)
        # After every rank has written its tensors, so that an error on any rank still leaves data unchanged.
        ranks.each(restoration.fill)
    # Also for a KeyboardInterrupt: between two tensors it would leave a mixture of two steps.
    except BaseException as error:
        restoration.empty()
        staged.put_back()
        snapshot.restore(restoration.begun, error)
        raise


def _read_newest(
    ranks: Ranks, root: Path, step: int | None, checked: Callable[[Path], Checked]
) -> _Read:
    """Read the newest intact step, or ``step``, to the host."""
    found = ranks.first(lambda: steps(root))
    if step is not None:
        found = {number: path for number, path in found.items() if number == step}
    reasons: list[str] = []
    for number, path in found.items():
        wrong = _defects(ranks, path, number)
        if not wrong:
            planner, restoration, metadata = ranks.each(partial(checked, path))
            # Defects are gathered as texts, not raised: all ranks skip an unreadable step together,
            # and go on to the next one.
            read: list[tuple[LoadPlan, Staged]] = []
            answers = ranks.gather(partial(_read, path, planner, metadata, read))
            wrong = list(dict.fromkeys(filter(None, answers)))
        if not wrong:
            for reason in reasons:
                warnings.warn(f"checkpoint.load: {reason}; loading step {number}", stacklevel=3)
            return _Read(number, planner, restoration, *read[0])
        reasons.append("; ".join(wrong))
    wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
    if not reasons:
        raise RuntimeError(
            f"checkpoint.load: no {wanted} in {root}; pass the folder that save was given"
        )
    raise RuntimeError(
        f"checkpoint.load: no intact {wanted} in {root}: {' | '.join(reasons)}; load an earlier step, or from "
        "another folder"
    )


def _defects(ranks: Ranks, path: Path, number: int) -> list[str]:
    """Return the defects of a step, the same on all ranks."""
    answers = ranks.gather(partial(_digest_and_defects, path, number, (ranks.rank, ranks.size)))
    wrong = list(dict.fromkeys(text for _, texts in answers for text in texts))
    digests = [digest for digest, _ in answers]
    others = [rank for rank, one in zip(ranks.members, digests, strict=True) if one != digests[0]]
    if others and not wrong:
        wrong = [
            f"{path.name}: ranks {others} see another checkpoint there than rank {ranks.members[0]}"
        ]
    return wrong


def _digest_and_defects(path: Path, number: int, share: tuple[int, int]) -> tuple[str, list[str]]:
    """Return the digest of a step's manifest, and the defects of this rank's share of its files."""
    found = problems(path, number, share)
    return "" if found else digest_file(path / MANIFEST)[1], found


def _checked(entries: Entries, any_recipe: bool, path: Path) -> Checked:
    """Make all checks of a step that need no writes, and return its planner, restoration and metadata."""
    manifest = Manifest.read(path)
    metadata = read_metadata(path, manifest.files)
    entries.check_entries(manifest)
    different = entries.differences(manifest, metadata.state_dict_metadata)
    if different and not any_recipe:
        raise ValueError(
            f"checkpoint.load: {path.name} has other recipes than the model: "
            f"{some(different, most=3)}; pass any_recipe=True to load its values only"
        )
    restoration = Restoration(entries, manifest, metadata)
    planner = HybridLoadPlanner()
    planner.set_up_planner(restoration.target, metadata)
    wrong = planner.misfits(casts=any_recipe)
    wrong += [
        f"{name} is not here" for name in restoration.extra(metadata, set(planner.state_dict))
    ]
    if wrong:
        raise ValueError(
            f"checkpoint.load: {path.name} does not fit the state: {some(wrong)}; "
            "build the model and optimizer as they were"
        )
    return planner, restoration, metadata


def _read(
    path: Path,
    planner: HybridLoadPlanner,
    metadata: Metadata,
    read: list[tuple[LoadPlan, Staged]],
) -> str:
    """Stage this rank's plan on the host and append it to ``read``; return the reason if it cannot be read, or
    ``""``."""
    # The steps of ``dcp.load`` in their order, without its collectives: every rank reads its own
    # part, and writes nothing before all have read theirs
    reader = SafeReader(path)
    reader.set_up_storage_reader(metadata, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    try:
        read.append((plan, reader.stage(plan, planner)))
    except UnreadableError as error:
        return str(error)
    return ""
