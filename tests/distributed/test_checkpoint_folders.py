"""Unfinished folders of saves: those of living processes stay, those of crashed ones go."""

import os
import signal
import time

import pytest
import torch
from processes import context_for

from hybridtensor.distributed import checkpoint
from hybridtensor.distributed.checkpoint import owners, store

PARTIAL = ".step_00000001.partial-"


def slow(folder):
    """Save step 1 into ``run``; once all is written, make a file ``paused`` and wait for a file ``go_on``."""
    digest = store.digest_file

    def waiting(path, **options):
        (folder / "paused").touch()
        wait_for(folder / "go_on")
        return digest(path, **options)

    store.digest_file = waiting
    checkpoint.save(folder / "run", 1, {"x": torch.full((4,), 1.0)})


def wait_for(file):
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def other(tmp_path):
    """A process that is in a save of step 1 until there is a file ``go_on``."""
    process = context_for("cpu").Process(target=slow, args=(tmp_path,))
    process.start()
    wait_for(tmp_path / "paused")
    yield process
    process.kill()
    process.join()


def names(root):
    return sorted(path.name for path in root.iterdir())


def save(root, step):
    return checkpoint.save(root, step, {"x": torch.full((4,), float(step))})


def age(path, seconds):
    """Make a folder and what is in it so much older."""
    for each in (*path.iterdir(), path):
        then = each.stat().st_mtime - seconds
        os.utime(each, (then, then))


def test_a_save_of_another_process_is_left_alone(tmp_path, other):
    """Two processes save into one folder: the second one removed what the first had written, and that one failed."""
    save(tmp_path / "run", 2)
    partial, done = names(tmp_path / "run")
    assert partial.startswith(PARTIAL)
    assert done == "step_00000002"
    (tmp_path / "go_on").touch()
    other.join(60)
    assert other.exitcode == 0
    assert names(tmp_path / "run") == ["step_00000001", "step_00000002"]
    assert checkpoint.verify(tmp_path / "run") == {2: [], 1: []}
    state = {"x": torch.zeros(4)}
    assert checkpoint.load(tmp_path / "run", state, step=1) == 1
    assert (state["x"] == 1).all()


def test_what_a_killed_process_left_goes(tmp_path, other):
    os.kill(other.pid, signal.SIGKILL)
    other.join(60)
    assert names(tmp_path / "run")[0].startswith(PARTIAL)
    save(tmp_path / "run", 2)
    assert names(tmp_path / "run") == ["step_00000002"]


@pytest.mark.parametrize("known", ["other machine", "no owner"])
def test_of_an_unknown_process_what_is_a_day_old_goes(tmp_path, known):
    """Whether a process of another machine lives, nobody here can tell."""
    ending = {"other machine": f"{'0' * 16}-1-1-12345678", "no owner": "12345678"}[known]
    left = tmp_path / f"{PARTIAL}{ending}"
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(b"half")
    save(tmp_path, 2)
    age(left, owners.FORGOTTEN - 600)
    save(tmp_path, 3)
    assert left.exists()
    age(left, 1200)
    (left / "__0_1.distcp").write_bytes(b"of a save that goes on")
    save(tmp_path, 4)
    assert left.exists()
    age(left, owners.FORGOTTEN)
    save(tmp_path, 5)
    assert not left.exists()


def test_numbers_of_processes_come_again(tmp_path, monkeypatch):
    """A process with the number of one that is gone started at another time."""
    save(tmp_path, 1)
    _, machine, number, start, _ = owners.owned_name().split("-")
    left = tmp_path / f"{PARTIAL}{machine}-{number}-{int(start) - 1}-12345678"
    mine = tmp_path / f"{PARTIAL}{machine}-{number}-{start}-12345678"
    left.mkdir()
    mine.mkdir()
    save(tmp_path, 2)
    assert not left.exists()
    assert mine.exists()


def test_a_step_that_another_process_replaces_is_left_alone(tmp_path, other):
    """Between its two renames: giving the former step its name back made that process fail."""
    root = tmp_path / "run"
    save(root, 3)
    (unfinished,) = root.glob(f"{PARTIAL}*")
    owner = unfinished.name.removeprefix(PARTIAL)
    hidden = root / f".step_00000003.replaced-{owner}"
    (root / "step_00000003").rename(hidden)
    save(root, 4)
    assert hidden.exists()
    assert checkpoint.latest(root) == 4
    assert list(checkpoint.verify(root)) == [4, 3]
    os.kill(other.pid, signal.SIGKILL)
    other.join(60)
    save(root, 5)
    assert names(root) == ["step_00000003", "step_00000004", "step_00000005"]


def test_without_proc(tmp_path, monkeypatch):
    """Systems that tell nothing of processes: only age tells."""
    monkeypatch.setattr(owners, "_PROC", tmp_path / "nothing")
    left = tmp_path / f".step_00000001.partial{owners.owned_name()}"
    left.mkdir()
    save(tmp_path, 2)
    assert left.exists()
    age(left, owners.FORGOTTEN + 60)
    time.sleep(0.01)
    save(tmp_path, 3)
    assert not left.exists()


@pytest.mark.parametrize("inside", ["", "run"])
def test_a_file_is_no_folder(tmp_path, inside):
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError, match=r"^checkpoint\.save: a folder is required .*, where .*/file is a file; name an"
    ):
        save(tmp_path / "file" / inside, 1)
    assert names(tmp_path) == ["file"]
