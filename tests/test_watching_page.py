"""docs/watching.md: its code runs, it tells all numbers, its table is that of the results."""

import json
import re
from pathlib import Path

import hybridtensor as ht
from hybridtensor.watching import NAMES, PRODUCT_NAMES

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "watching.md").read_text()


def test_the_table_of_advice():
    record = json.loads((ROOT / "benchmarks" / "results" / "advise_nvidia_h200.json").read_text())
    lines = PAGE.split("<!-- table: advise_nvidia_h200 -->\n")[1].split("\n\n")[0].splitlines()[2:]
    errors = ["predicted error %", "gradient error %", *(key for key in record["rows"][0] if "outlier in" in key)]
    assert [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines] == [
        [row["recipe"], f"{row['cost']:.3f}", *(f"{row[error]:.1f} %" for error in errors)] for row in record["rows"]
    ]
    assert [one["wider"] for one in record["outliers"]] == [one["cost"] == 0.375 for one in record["outliers"]]


def test_the_table_of_losses():
    record = json.loads((ROOT / "benchmarks" / "results" / "convergence_nvidia_h200.json").read_text())
    rows = {row["recipe"]: row for row in record["rows"]}
    lines = PAGE.split("<!-- table: convergence_nvidia_h200, advice -->\n")[1].split("\n\n")[0].splitlines()[2:]
    names = {"advised": "advised, 0.5", "random": "random, 0.5, median of 20"}
    assert [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines] == [
        [
            names.get(name, name),
            f"{rows[name]['loss']:.4f}",
            f"{rows[name]['gap %']:+.2f} %",
            "" if name == "bf16" else f"{rows[name]['noise %']:.2f} %",
            f"{rows[name]['validation gap %']:+.2f} %",
        ]
        for name in ("bf16", "fp8", "fp8_rowwise", *names)
    ]
    gap = {name: row["gap %"] for name, row in rows.items()}
    assert gap["advised"] <= min(gap["fp8"], gap["fp8_rowwise"]) < gap["random"]
    said = " ".join(PAGE.split())
    assert f"and {gap['random'] - gap['advised']:.2f} % less" in said
    runs = [rows[name]["runs"] for name in names]
    assert runs == [3, 3]
    noise = record["scatter of one run %"] * (sum(1 / count for count in runs)) ** 0.5
    assert f"the noise of a difference is {noise:.2f} %" in said


def test_code_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    scope = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(code, scope)
    assert [sample.step for sample in scope["watched"].samples] == [0, 5]
    assert "noisiest" in capsys.readouterr().out
    assert (tmp_path / "run.html").is_file()
    assert ht.watching.Recording.load("run.json").every == 5
    assert type(scope["plain"][0].weight) is ht.MasterWeight


def test_all_numbers_are_told():
    for name in (*NAMES, *PRODUCT_NAMES):
        assert f"`{name}`" in PAGE, name


def test_table_of_costs():
    rows = json.loads((ROOT / "benchmarks" / "results" / "watch_nvidia_h200.json").read_text())["rows"]
    lines = PAGE.split("<!-- table: watch_nvidia_h200 -->\n")[1].split("\n\n")[0].splitlines()[2:]
    assert [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines] == [
        [
            row["mode"],
            row["recipe"],
            f"{row['between / ms']:.2f}x",
            f"{row['measured / ms']:.2f}x",
            f"{row['overhead, one of 100']:.1%}",
        ]
        for row in rows
    ]
