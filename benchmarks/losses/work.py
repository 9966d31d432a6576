"""Which run is next, and doing them one by one: by several processes, if there are several, that share a folder."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from losses.files import Record, of_plan, path_of, read, record_of, write
from losses.recipes import BASELINE, Candidate
from losses.training import OutOfTime, Plan, Trainer

_CLAIM, _LOG = ".claim", ".log"


class Run(NamedTuple):
    """One training run.

    Attributes:
        recipe: Name of what it is trained by.
        seed: Of initial weights and batches.
        round: Runs of lower rounds come first.
    """

    recipe: str
    seed: int
    round: int = 0

    def __str__(self) -> str:
        return f"{self.recipe}-{self.seed}"


def in_rounds(first: Sequence[str], seeds: int, then: Sequence[str] = (), then_seeds: int = 1) -> list[Run]:
    """Return all runs in their order: one seed of all recipes before the next, so that what is finished compares.

    Args:
        first: Recipes that come first, with all their seeds; BF16 is before them in every round.
        seeds: Of these.
        then: Recipes after those.
        then_seeds: Of these, at most as many as the first have.
    """
    runs = [Run(name, seed, seed) for seed in range(seeds) for name in (BASELINE, *first)]
    rest = range(min(then_seeds, seeds))
    return runs + [Run(name, seed, seeds + seed) for seed in rest for name in then]


@dataclass(frozen=True)
class Job:
    """What the processes of one benchmark share.

    Attributes:
        plan: Of all runs.
        candidates: What runs are trained by, by name.
        fingerprints: Of each, today.
        runs: In their order.
        out: Folder of text and finished runs.
        known: Other folders of finished runs.
        until: When all has to be done, by ``time.time()``.
        about: What the file of a run says beside its outcome, by recipe.
    """

    plan: Plan
    candidates: dict[str, Candidate]
    fingerprints: dict[str, str]
    runs: list[Run]
    out: Path
    known: tuple[Path, ...]
    until: float
    about: dict[str, dict[str, Any]]

    def finished(self) -> list[Record]:
        """Return the finished runs of the plan, also by recipes that are not asked for."""
        return of_plan(read([self.out, *self.known]), self.plan, self.fingerprints)

    def waiting(self, records: Iterable[Record]) -> list[Run]:
        """Return the runs that nobody has finished, works on, or has failed at."""
        done = {(record["recipe"], record["seed"]) for record in records}
        left = [run for run in self.runs if (run.recipe, run.seed) not in done]
        return [run for run in left if not any(self.path(run, kind).exists() for kind in (_CLAIM, _LOG))]

    def path(self, run: Run, kind: str) -> Path:
        """Return a file that is about a run."""
        return path_of(self.out, run.recipe, run.seed, self.plan).with_suffix(kind)


def work(job: Job, device: str, say: Callable[[str], None]) -> None:
    """Do runs until none is left that fits into the time; a run that fails leaves a ``.log``.

    Args:
        job: What there is to do.
        device: Where.
        say: Takes a line for each run.
    """
    trainer, stopped = Trainer(job.plan, job.out, device), set[Run]()
    while True:
        records = job.finished()
        waiting = [run for run in job.waiting(records) if run not in stopped]
        run = choose(waiting, records, trainer.knows, job.until - time.time())
        if run is None:
            return
        with _claimed(job.path(run, _CLAIM)) as mine:
            if not mine:
                continue
            try:
                told = _do(job, run, trainer)
            except OutOfTime:
                stopped.add(run)
                told = "stopped: would end too late"
            say(f"{run!s:>40}  {told}")


def _do(job: Job, run: Run, trainer: Trainer) -> str:
    """Do one run, and return what became of it."""
    try:
        outcome = trainer.train(job.candidates[run.recipe], run.seed, job.until)
    except OutOfTime:
        raise
    except Exception:
        log = job.path(run, _LOG)
        log.write_text(traceback.format_exc())
        return f"FAILED: see {log}"
    write(record_of(outcome, job.plan, recipe=run.recipe, seed=run.seed, **job.about[run.recipe]), job.out)
    return f"loss {outcome.losses[-1]:.4f}, {outcome.seconds:.0f} s, {outcome.tokens_per_second:,.0f} tokens/s"


def choose(waiting: Sequence[Run], records: Sequence[Record], knows: Callable[[str], bool], left: float) -> Run | None:
    """Return the next run, None if there is none that fits.

    Of the first round that has a run which fits, recipes that this process has compiled come first, and then those
    that no other one has.

    Args:
        waiting: Runs that nobody works on.
        records: Finished ones.
        knows: Whether a recipe has run in this process.
        left: Seconds.
    """
    fitting = [run for run in waiting if seconds_of(run.recipe, records, knows(run.recipe)) < left]
    tried = {record["recipe"] for record in records}
    return min(fitting, key=lambda run: (run.round, not knows(run.recipe), run.recipe in tried), default=None)


def seconds_of(recipe: str, records: Sequence[Record], known: bool) -> float:
    """Return how long a run may take, by the finished runs of its recipe, or else by the slowest of all; 0 without any.

    Args:
        recipe: By which.
        records: Finished runs.
        known: Whether its model is there, compiled.
    """
    alike = [record for record in records if record["recipe"] == recipe] or records
    if not alike:
        return 0.0
    set_up = [record["set up seconds"] for record in alike]
    trained = max(record["seconds"] - record["set up seconds"] for record in alike)
    return trained + (min(set_up) if known else max(set_up))


@contextlib.contextmanager
def _claimed(claim: Path) -> Iterator[bool]:
    """Have a run for oneself; False if another process was faster."""
    try:
        claim.open("x").close()
    except FileExistsError:
        yield False
        return
    try:
        yield True
    finally:
        claim.unlink(missing_ok=True)


def drop_claims(folder: Path) -> None:
    """Forget what processes that were killed have claimed, and what failed before."""
    for kind in (_CLAIM, _LOG, ".partial"):
        for path in folder.glob(f"*{kind}"):
            path.unlink()


def failures(folder: Path) -> list[str]:
    """Return the files that tell why runs failed."""
    return [str(path) for path in sorted(folder.glob(f"*{_LOG}"))]
