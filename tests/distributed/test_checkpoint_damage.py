"""Steps that a crash or a bad disk left: they are found, and the last good one is loaded."""

import resource
import runpy
import signal
import sys
from pathlib import Path

import pytest
import tiers
from checkpointing import flip, folder, load, saved, trained
from processes import call_program

from hybridtensor import verify as command
from hybridtensor.distributed import checkpoint
from hybridtensor.untrusted import manifest


class TestDamage:
    @pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "manifest.json"])
    @pytest.mark.parametrize("harm", ["flipped", "missing", "short"])
    def test_is_found_and_the_last_good_step_loaded(self, name, harm, tmp_path):
        expected = saved(tmp_path, 1, 2)
        path = folder(tmp_path, 2) / name
        if harm == "flipped":
            flip(path)
        elif harm == "missing":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-5])
        wrong = checkpoint.verify(tmp_path)
        assert name in wrong[2][0]
        assert not wrong[1]
        assert checkpoint.latest(tmp_path) == 1
        with pytest.warns(UserWarning, match=f"{name}.*; loading step 1"):
            assert load(tmp_path) == (1, expected[1])
        with pytest.raises(RuntimeError, match="no intact checkpoint of step 2 in "):
            load(tmp_path, step=2)

    def test_a_manifest_of_another_version_is_not_read(self, tmp_path, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(manifest, "_VERSION", 99)
            saved(tmp_path, 1)
        assert "it has version 99, this library reads 1" in checkpoint.verify(tmp_path)[1][0]

    def test_of_all_steps_is_told(self, tmp_path):
        with pytest.raises(RuntimeError, match=r"no checkpoint in .*nothing; pass the folder"):
            load(tmp_path / "nothing")
        saved(tmp_path, 1)
        folder(tmp_path, 1).rename(folder(tmp_path, 5))
        with pytest.raises(RuntimeError, match="the manifest is that of step 1"):
            load(tmp_path)
        assert checkpoint.latest(tmp_path) is None

    def test_a_full_disk_keeps_the_last_good_step(self, tmp_path):
        expected = saved(tmp_path, 1)
        model, optimizer = trained()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # a file cannot grow: what a full disk does too
        try:
            with pytest.raises(RuntimeError, match=r"File too large|unexpected pos"):  # which depends on the kernel
                checkpoint.save(tmp_path, 2, {"model": model, "optimizer": optimizer})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
        assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
        assert load(tmp_path) == (1, expected[1])


# What is forked cannot use a GPU
KILLED = """
import os
os.environ["CUDA_VISIBLE_DEVICES"] = ""
import random, signal, sys, time, torch
from checkpointing import bits, make, train
from hybridtensor.distributed import checkpoint
from hybridtensor.untrusted import manifest
torch.set_num_threads(1)
folder = sys.argv[1]
random.seed(0)
model, optimizer = make("nvfp4")
for name in ("first", "second"):  # what a save takes here, once everything is imported
    start = time.perf_counter()
    checkpoint.save(folder + name, 1, {"model": model, "optimizer": optimizer, "step": 1})
    lasts = time.perf_counter() - start
seen, partial = 0, 0
for _ in range(int(sys.argv[2])):
    child = os.fork()
    if child == 0:
        step = (checkpoint.latest(folder) or 0) + 1
        while True:
            with torch.no_grad():
                model[0].weight.fill_(step)
            checkpoint.save(folder, step, {"model": model, "optimizer": optimizer, "step": step})
            step += 1
    time.sleep(lasts * (1.5 + 4 * random.random()))
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "a save failed before it was killed"
    newest = checkpoint.latest(folder)
    if newest is not None:
        state = {"model": make("nvfp4", seed=1)[0], "step": 0}
        assert checkpoint.load(folder, state) == newest == state["step"] >= seen
        assert (state["model"][0].weight.master == newest).all()
        seen = newest
    assert not any(checkpoint.verify(folder).values())
    partial += any("partial" in name for name in (os.listdir(folder) if os.path.isdir(folder) else ()))
print(seen, partial)
"""


def test_killed_at_any_moment_the_last_good_step_loads(tmp_path):
    times = 30 if tiers.LONG else 12
    steps, interrupted = map(int, call_program(KILLED, tmp_path / "run", times).split())
    assert steps > times / 6
    assert interrupted > times / 6


REPLACED = """
import os
os.environ["CUDA_VISIBLE_DEVICES"] = ""
import shutil, sys, torch
from hybridtensor.distributed import checkpoint
from hybridtensor.untrusted import manifest
torch.set_num_threads(1)
folder = sys.argv[1]
names = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.scandir", "shutil.rmtree"}
left = None
def count(event, arguments):
    global left
    if left is not None and event in names and str(arguments[0]).startswith(folder):
        left -= 1
        if left < 0:
            os._exit(9)
sys.addaudithook(count)
def value():
    state = {"x": torch.zeros(1)}
    assert checkpoint.load(folder, state, step=1) == 1
    return state["x"].item()
checkpoint.save(folder, 1, {"x": torch.zeros(1)})
at, found, hidden = 0, [], 0
while True:
    child = os.fork()
    if child == 0:
        left = at
        checkpoint.save(folder, 1, {"x": torch.full((1,), at + 1.0)}, overwrite=True)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    named = os.path.isdir(folder + "/step_00000001")
    hidden += not named
    before = found[-1] if found else 0
    found.append(value())
    assert found[-1] in (before, at + 1)
    assert checkpoint.latest(folder) == 1 and checkpoint.verify(folder) == {1: []}
    checkpoint.save(folder, 2, {"x": torch.zeros(1)})  # tidies up, and loses nothing
    assert value() == found[-1]
    assert sorted(os.listdir(folder)) == ["step_00000001", "step_00000002"], os.listdir(folder)
    shutil.rmtree(folder + "/step_00000002")
    at += 1
    if code == 0:
        break
    assert code == 9
print(at, hidden, len(set(found)))
"""


def test_killed_at_any_file_operation_the_only_step_is_replaced_or_there(tmp_path):
    operations, hidden, replaced = map(int, call_program(REPLACED, tmp_path / "run").split())
    assert operations > 12
    assert hidden  # killed between the two renames, too
    assert replaced > 1


class TestReplaced:
    """A step that was moved away, and whose successor did not come."""

    def moved(self, tmp_path):
        expected = saved(tmp_path, 1)
        hidden = tmp_path / ".step_00000001.replaced-0"
        folder(tmp_path, 1).rename(hidden)
        return expected, hidden

    def test_is_that_step(self, tmp_path):
        expected, _ = self.moved(tmp_path)
        assert checkpoint.latest(tmp_path) == 1
        assert checkpoint.verify(tmp_path) == {1: []}
        assert load(tmp_path) == (1, expected[1])
        assert load(tmp_path, step=1) == (1, expected[1])
        model, _ = trained()
        with pytest.raises(ValueError, match="step 1 is there already, intact"):
            checkpoint.save(tmp_path, 1, {"model": model})
        assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]

    def test_is_none_if_it_is_damaged(self, tmp_path):
        _, hidden = self.moved(tmp_path)
        flip(hidden / "__0_0.distcp")
        assert checkpoint.latest(tmp_path) is None
        assert checkpoint.verify(tmp_path) == {}

    def test_stays_until_its_successor_is_intact(self, tmp_path):
        _, hidden = self.moved(tmp_path)
        saved(tmp_path / "other", 1)
        folder(tmp_path / "other", 1).rename(folder(tmp_path, 1))
        flip(folder(tmp_path, 1) / "__0_0.distcp")
        saved(tmp_path, 2)
        assert hidden.exists()
        flip(folder(tmp_path, 1) / "__0_0.distcp")
        saved(tmp_path, 3)
        assert not hidden.exists()

    def test_is_back_if_the_successor_cannot_take_its_name(self, tmp_path, monkeypatch):
        expected, rename = saved(tmp_path, 1), Path.rename
        monkeypatch.setattr(Path, "rename", lambda a, b: full_disk() if ".partial-" in a.name else rename(a, b))
        with pytest.raises(RuntimeError, match="No space left"):
            checkpoint.save(tmp_path, 1, {"model": trained()[0]}, overwrite=True)
        assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
        assert load(tmp_path) == (1, expected[1])


def full_disk():
    raise OSError(28, "No space left on device")


class TestCommand:
    def test_tells_every_step(self, tmp_path, capsys):
        saved(tmp_path, 1, 2)
        assert command.main([str(tmp_path)]) == 0
        assert capsys.readouterr().out == "step 2: good\nstep 1: good\n"
        flip(folder(tmp_path, 2) / "__0_0.distcp")
        assert command.main([str(tmp_path)]) == 1
        assert "step 2: DAMAGED\n  step_00000002: __0_0.distcp has a wrong SHA-256" in capsys.readouterr().out
        assert command.main([str(folder(tmp_path, 1))]) == 0
        assert command.main([str(tmp_path / "nothing")]) == 2
        assert "nothing: no such folder" in capsys.readouterr().err

    def test_runs_as_a_module(self, tmp_path, monkeypatch, capsys):
        saved(tmp_path, 1)
        monkeypatch.delitem(sys.modules, "hybridtensor.verify")
        monkeypatch.setattr(sys, "argv", ["verify", str(tmp_path)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("hybridtensor.verify", run_name="__main__")
        assert ended.value.code == 0
        assert capsys.readouterr() == ("step 1: good\n", "")
