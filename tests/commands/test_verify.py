"""``hybridtensor verify FOLDER``, which ``python -m hybridtensor.verify`` still does."""

import json

import pytest
from torch import nn

import hybridtensor as ht
from hybridtensor import verify
from hybridtensor.__main__ import main
from hybridtensor.distributed import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def run(tmp_path):
    """A folder of two checkpoints."""
    model = ht.quantize_(nn.Linear(32, 32), "fp8")
    for step in (1, 2):
        checkpoint.save(tmp_path, step, {"model": model})
    return tmp_path


def damage(run):
    file = max(run.glob("*2/*.distcp"))
    stored = bytearray(file.read_bytes())
    stored[len(stored) // 2] ^= 1
    file.write_bytes(stored)


@pytest.mark.parametrize("command", [lambda folder: main(["verify", folder]), lambda folder: verify.main([folder])])
def test_tells_what_is_good_and_what_is_not(command, run, capsys):
    assert command(str(run)) == 0
    assert capsys.readouterr().out == "step 2: good\nstep 1: good\n"
    damage(run)
    assert command(str(run)) == 1
    first, *wrong, last = capsys.readouterr().out.splitlines()
    assert (first, last) == ("step 2: DAMAGED", "step 1: good")
    assert "SHA-256" in wrong[0]


@pytest.mark.parametrize("folder", [".", "../step_00000002"])
def test_a_step_from_within(folder, run, monkeypatch, capsys):
    monkeypatch.chdir(run / "step_00000002")
    assert main(["verify", folder]) == 0
    assert capsys.readouterr().out == "step 2: good\n"


def test_no_checkpoint_is_2(tmp_path, capsys):
    assert main(["verify", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"{tmp_path}: no checkpoint\n"
    assert main(["verify", str(tmp_path), "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == {"steps": []}


def test_data(run, capsys):
    damage(run)
    assert main(["verify", str(run), "--json"]) == 1
    second, first = json.loads(capsys.readouterr().out)["steps"]
    assert first == {"step": 1, "problems": []}
    assert second["step"] == 2
    assert second["problems"]


def test_what_was_exported(tmp_path, capsys):
    folder = ht.export_pretrained(ht.quantize_(nn.Sequential(nn.Linear(32, 32)), "fp8"), tmp_path / "out")
    assert main(["verify", str(folder)]) == 0
    assert capsys.readouterr().out == "exported weights: good\n"
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert main(["verify", str(folder)]) == 1
    assert capsys.readouterr().out.startswith(f"exported weights: DAMAGED\n  verify: {file} as it was written")
    assert main(["verify", str(folder), "--json"]) == 1
    assert "as it was written" in json.loads(capsys.readouterr().out)["exported"]["problems"][0]
    (folder / "digests.json").unlink()
    assert main(["verify", str(folder)]) == 2
    assert "safetensors without digests.json" in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "nowhere")]) == 2
    assert "nowhere: no such folder" in capsys.readouterr().err
    assert main(["verify", str(file)]) == 2
    assert "model.safetensors: a file; a folder is required" in capsys.readouterr().err


def test_the_result_is_a_table(run):
    damage(run)
    found = checkpoint.verify(run)
    assert found.keys() == {1, 2}
    assert json.loads(json.dumps(found))["1"] == []
    assert "1 of 2 checkpoints are good" in str(found)
    assert repr(found) == str(found)
    assert "SHA-256" in found._repr_html_()


def test_names_of_a_foreign_folder_are_no_commands_to_the_terminal(tmp_path, capsys):
    folder = ht.export_pretrained(ht.quantize_(nn.Sequential(nn.Linear(32, 32)), "fp8"), tmp_path / "out")
    listed = json.loads((folder / "digests.json").read_text())
    listed["files"]["\x1b[2J\ud800"] = listed["files"]["config.json"]
    (folder / "digests.json").write_text(json.dumps(listed))
    assert main(["verify", str(folder)]) == 1
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "\\x1b[2J\\ud800" in printed
    (tmp_path / "run.json").write_text(json.dumps({"version": "\x1b[2J"}))
    assert main(["report", str(tmp_path / "run.json")]) == 1
    assert "\x1b" not in capsys.readouterr().err
