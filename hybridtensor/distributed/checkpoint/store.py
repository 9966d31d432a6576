"""A folder of checkpoints, one per step: written hidden, with digests and a manifest, then fsynced and renamed."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from hybridtensor.arguments import require_flag, wrong
from hybridtensor.distributed.checkpoint.agreement import (
    check_arguments,
    check_plans,
    compare_replicas,
)
from hybridtensor.distributed.checkpoint.entries import Entries
from hybridtensor.distributed.checkpoint.folders import move_into_place, new_folder
from hybridtensor.distributed.checkpoint.plain import StateDict
from hybridtensor.distributed.checkpoint.planners import HybridSavePlanner
from hybridtensor.ranks import TIMEOUT, Ranks
from hybridtensor.state.contract import stages_of
from hybridtensor.untrusted.files import digest_file, sync_folder, write_synced
from hybridtensor.untrusted.manifest import MANIFEST, Manifest, root_folder, step_path, versions
from hybridtensor.untrusted.metadata import METADATA, Writer


@dataclass(frozen=True)
class _Options:
    faces: bool
    overwrite: bool
    check_replicas: bool


@dataclass
class _Write:
    """A planned step that is not yet written."""

    ranks: Ranks
    root: Path
    folder: Path
    manifest: Manifest
    writer: Writer
    planner: HybridSavePlanner
    plan: SavePlan
    metadata: Metadata

    def run(self) -> Path:
        """Write the step, then rename it."""
        results, files = self.ranks.each(self._write_own)
        everything = self.ranks.gather(lambda: (results, files))
        return self.ranks.first(lambda: self._publish(everything))

    def _write_own(self) -> tuple[list[WriteResult], dict[str, tuple[int, str]]]:
        results = self.writer.write_data(self.plan, self.planner).wait()
        # Each rank syncs what it wrote: of a network file system the first rank could not flush the
        # caches of other machines.
        names = {result.storage_data.relative_path for result in results}
        return results, {name: digest_file(self.folder / name, sync=True) for name in sorted(names)}

    def _publish(
        self, everything: list[tuple[list[WriteResult], dict[str, tuple[int, str]]]]
    ) -> Path:
        """Write the manifest, sync the folder to disk and rename it, on the first rank."""
        self.writer.finish(self.metadata, [results for results, _ in everything])
        for rank, (_, files) in zip(self.ranks.members, everything, strict=True):
            missing = [name for name in files if not (self.folder / name).is_file()]
            if missing:
                raise RuntimeError(
                    f"{self.ranks.who}: what rank {rank} wrote is not in {self.folder} on rank "
                    f"{self.ranks.members[0]}; all ranks must see one folder"
                )
            self.manifest.files.update(files)
        self.manifest.files[METADATA] = digest_file(self.folder / METADATA, sync=True)
        # After all files, with their digests: a folder that has a manifest had everything.
        write_synced(self.folder / MANIFEST, self.manifest.to_json())
        # Before the rename: after a crash a step by its name has its files on the disk.
        sync_folder(self.folder)
        target = step_path(self.root, self.manifest.step)
        move_into_place(self.folder, target)
        return target

    def clean(self) -> None:
        """Remove the unfinished folder after a failure."""
        if self.ranks.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)


def save(
    directory: str | os.PathLike[str],
    step: int,
    state: StateDict,
    *,
    faces: bool = True,
    overwrite: bool = False,
    check_replicas: bool = False,
    group: dist.ProcessGroup | None = None,
    timeout: datetime.timedelta = TIMEOUT,
) -> Path:
    """Write a checkpoint into a new folder of ``directory``, which appears only once it is complete.

    ::

        checkpoint.save("runs/a", step, {"model": model, "optimizer": optimizer})

    All ranks call it, after ``step_``. A failure on one rank, such as a full disk, raises on all ranks; existing steps
    are not changed. It first waits for the previous ``async_save`` of this process.

    Args:
        directory: Folder of a run's checkpoints, which all ranks see and no other run writes to. What crashed saves
            left in it is removed: on the same machine once their process has ended, else after a day without a change.
        step: Number of the step.
        state: Names to modules, optimizers of their parameters (also ``optim.MasterWeights``),
            objects with ``state_dict`` and ``load_state_dict``, and data: tensors, numbers, lists,
            dictionaries. Everything except shards must be the same on all ranks.
        faces: Save the faces of persistent weights. If False, faces that can be quantized from a saved fp32 master
            (not with delayed scales or random rounding) are left out and requantized by ``load``: to the same bits, if
            a step was taken since the last ``set_config_``.
        overwrite: Replace an existing step. A damaged one is always replaced.
        check_replicas: Compare values that must be the same on all ranks, as ``checkpoint.check_replicas`` does;
            otherwise those of one rank are saved unchecked.
        group: Process group of the ranks, whose own timeout then applies; None is all ranks.
        timeout: How long to wait for the slowest rank.

    Returns:
        The folder of the step.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If an intact step of this number exists; if the state contains values that cannot be
            loaded without running code, or differs between ranks; or if ranks pass different
            arguments. On every rank.
        RuntimeError: If writing fails on a rank, or a rank is gone; on every rank.
    """
    wait_for_previous()
    ranks = Ranks("checkpoint.save", group, timeout)
    options = _Options(faces, overwrite, check_replicas)
    with _planned(ranks, directory, step, state, options) as write:
        return write.run()


class Saving:
    """A checkpoint that is being written in the background; see ``async_save``.

    ::

        saving = checkpoint.async_save("runs/a", step, state)
        print(saving.done(), saving.result())  # result() waits
    """

    def __init__(self, write: _Write) -> None:
        self._write = write
        self._path: Path  # once the thread has ended without an error
        self._error: BaseException | None = None
        self._asked = False
        # No daemon: at its end the interpreter waits for such threads, and a save under way is not
        # cut off.
        self._thread = threading.Thread(target=self._run, name="hybridtensor-checkpoint")

    def _run(self) -> None:
        try:
            self._path = self._write.run()
        except BaseException as error:  # raised again where the result is asked for
            self._error = error
            self._write.clean()

    def done(self) -> bool:
        """Return whether the save has ended, with or without an error."""
        return not self._thread.is_alive()

    def result(self) -> Path:
        """Wait for the end and return the folder of the step."""
        self._asked = True
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._path


_previous: list[Saving] = []


def wait_for_previous() -> None:
    """Wait for the last background save, and raise its error if ``result`` was not called."""
    while _previous:
        # Removed first: an error that is raised below is raised once.
        saving = _previous.pop()
        asked = saving._asked
        saving._thread.join()
        if not asked:
            saving.result()


def async_save(
    directory: str | os.PathLike[str],
    step: int,
    state: StateDict,
    *,
    faces: bool = True,
    overwrite: bool = False,
    check_replicas: bool = False,
    group: dist.ProcessGroup | None = None,
    timeout: datetime.timedelta = TIMEOUT,
) -> Saving:
    """Copy the state to the host, and write it in a background thread as ``save`` does.

    ::

        saving = checkpoint.async_save("runs/a", step, {"model": model, "optimizer": optimizer})
        saving.result()  # before the process ends

    Changes after the call are not saved. Only one save runs at a time: the next one waits for it, and
    raises its error if ``result`` was not called.

    Args:
        directory: See ``save``; so are the others.
        step: See ``save``.
        state: See ``save``.
        faces: See ``save``.
        overwrite: See ``save``.
        check_replicas: See ``save``.
        group: See ``save``. Until the save has ended nothing else may use it: pass one of its own (``new_group``).
        timeout: See ``save``.

    Returns:
        The save under way; ``result()`` waits for it.

    Raises:
        TypeError: As ``save``; so are the others. What goes wrong while writing is raised by ``result()``.
        ValueError: As ``save``.
        RuntimeError: As ``save``.
    """
    wait_for_previous()
    ranks = Ranks("checkpoint.async_save", group, timeout, in_background=True)
    options = _Options(faces, overwrite, check_replicas)
    with _planned(ranks, directory, step, state, options) as write:
        # Still inside ``_planned``, which removes the folder on an error; from here on ``Saving``
        # does.
        ranks.each(lambda: write.planner.stage(write.plan))
    saving = Saving(write)
    _previous.append(saving)
    saving._thread.start()
    return saving


@contextlib.contextmanager
def _planned(
    ranks: Ranks,
    directory: str | os.PathLike[str],
    step: int,
    state: StateDict,
    options: _Options,
) -> Iterator[_Write]:
    """Yield the planned step; remove its unfinished folder on failure, also of what runs inside."""
    folder: Path | None = None
    try:
        root, entries = ranks.each(lambda: _given(ranks.who, directory, step, state, options))
        check_arguments(
            ranks, directory=os.path.normpath(root), step=step, **dataclasses.asdict(options)
        )
        planner, plans = _checked_plans(ranks, entries, options)
        # Only now: a state that is refused leaves no folder
        folder = ranks.first(lambda: new_folder(ranks.who, root, step, options.overwrite))
        yield _new_write(ranks, root, folder, step, entries, planner, plans)
    except BaseException:
        if folder is not None and ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _given(
    who: str, directory: str | os.PathLike[str], step: int, state: StateDict, options: _Options
) -> tuple[Path, Entries]:
    """Return folder and state; raise for wrong arguments."""
    if step is None:
        raise wrong(who, "the number of a step", step)
    require_flag(who, **vars(options))
    return root_folder(directory, step), Entries(state)


def _checked_plans(
    ranks: Ranks, entries: Entries, options: _Options
) -> tuple[HybridSavePlanner, list[SavePlan]]:
    """Return this rank's planner and the plans of all ranks, which fit together."""
    # First, with an error that names the ranks: of plans that do not fit DCP says only that they are
    # invalid.
    recipes = ranks.gather(lambda: (entries.weights, entries.kinds, entries.groups))
    _require_one_stage(ranks, entries)
    if any(other != recipes[0] for other in recipes):
        members = zip(ranks.members, recipes, strict=True)
        different = [rank for rank, other in members if other != recipes[0]]
        raise ValueError(
            f"{ranks.who}: ranks {different} have other weights, recipes or entries than rank {ranks.members[0]}; "
            "convert the model alike everywhere"
        )
    planner = HybridSavePlanner()

    def own_plan() -> SavePlan:
        values = entries.collect(faces=options.faces)
        planner.set_up_planner(values, is_coordinator=ranks.rank == 0)
        own = planner.create_local_plan()
        planner.stage_values(own, ranks.who)
        return own

    plans = ranks.gather(own_plan)
    check_plans(ranks, plans)
    if options.check_replicas:
        compare_replicas(ranks, planner.state_dict)
    return planner, plans


def _require_one_stage(ranks: Ranks, entries: Entries) -> None:
    """Raise ValueError on every rank if ranks have unlike stages of a pipeline, of which equal names would be one."""

    def own_stages() -> list[int]:
        found = (stages_of(module) for module in entries.modules.values() if entries.weights)
        return sorted({stage.stage_index for stages in found for stage in stages})

    every = ranks.gather(own_stages)
    if any(stages != every[0] for stages in every):
        raise ValueError(
            f"{ranks.who}: one stage of a pipeline is required, got {every} on ranks {list(ranks.members)}; pass the "
            "ranks of a stage as group, and a directory for each stage"
        )


def _new_write(
    ranks: Ranks,
    root: Path,
    folder: Path,
    step: int,
    entries: Entries,
    planner: HybridSavePlanner,
    plans: list[SavePlan],
) -> _Write:
    """Plan on all ranks together what each of them writes."""
    named = entries.kinds, entries.weights, entries.recipes, entries.groups
    manifest = Manifest(step, ranks.size, versions(), *named)
    # The other steps of ``dcp.save`` in their order, with our collectives in between, where an error of
    # one rank reaches all. A torch that asks planners or writers for another order fails here.
    writer = Writer(folder)
    writer.set_up_storage_writer(ranks.rank == 0)
    ranks.each(lambda: writer.prepare_local_plan(plans[ranks.rank]))

    def all_plans() -> tuple[list[SavePlan], Metadata]:
        made, metadata = planner.create_global_plan(plans)
        return writer.prepare_global_plan(made), metadata

    made, metadata = ranks.first(all_plans)
    plan = planner.finish_plan(made[ranks.rank])
    return _Write(ranks, root, folder, manifest, writer, planner, plan, metadata)
