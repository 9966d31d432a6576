"""``hybridtensor report`` writes the page of a recording."""

import json
import math

import pytest
from valid_calls import recording

from hybridtensor.__main__ import main


def test_a_page_beside_the_file(tmp_path, capsys):
    found = recording()
    found.save(tmp_path / "run.json")
    assert main(["report", str(tmp_path / "run.json")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'run.html'}\n"
    assert "What the formats did" in (tmp_path / "run.html").read_text()
    assert main(["report", str(tmp_path / "run.json"), str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").read_text() == (tmp_path / "run.html").read_text()
    capsys.readouterr()
    assert main(["report", str(tmp_path / "run.json"), "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["step"] == 0
    assert numbers["numbers"]["<root>/output/cosine"] == found.samples[0].products[0].statistics["cosine"]


def test_data_without_infinities(tmp_path, capsys):
    """Faces without any error have an infinite ratio, which is no number of JSON."""
    found = recording()
    found.samples[0].products[0].statistics["sqnr"] = math.inf
    found.save(tmp_path / "run.json")
    assert main(["report", str(tmp_path / "run.json"), "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["numbers"]
    assert numbers["<root>/output/sqnr"] is None


@pytest.mark.parametrize("name", ["run.json", "."])
def test_no_such_file(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["report", name]) == 1
    told = capsys.readouterr().err
    assert told == f"hybridtensor report: a file that watched.recording().save wrote is required, got {name}\n"
    (tmp_path / "run.json").write_text("{}")
    assert main(["report", "run.json"]) == 1
    assert "hybridtensor report: Recording.load: what Recording.save wrote is required" in capsys.readouterr().err


def test_two_files_on_one_page(tmp_path, capsys):
    first, other = (str(recording().save(tmp_path / f"{name}.json")) for name in ("first", "other"))
    assert main(["report", first, "--beside", other]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'first.html'}\n"
    assert "Side by side: first.json and other.json" in (tmp_path / "first.html").read_text()
    assert main(["report", first, "--beside", str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().err
    assert main(["report", first, "--beside", other, "--json"]) == 1
    assert "one recording, and no page, is required with --json" in capsys.readouterr().err
    assert main(["report", first, str(tmp_path / "page.html"), "--json"]) == 1
    assert "one recording, and no page, is required with --json" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()
