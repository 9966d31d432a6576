"""The README's code runs, and its tables are those of the result files."""

import json
import re
from pathlib import Path

import pytest
import torch

import hybridtensor as ht
from hybridtensor.inference import LAYOUTS
from hybridtensor.recipes.spec import MODIFIERS, POLICIES, WORDS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_code_runs(capsys):
    scope = {"steps": 10}
    first, with_blocks, last = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(first, scope)
    assert "Quantized layers" in capsys.readouterr().out
    small = scope["model"]
    scope["model"] = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))
    exec(with_blocks, scope)
    assert [str(layer.weight.config) for layer in scope["model"][1:2]] == ["bf16/nvfp4/nvfp4"]
    assert type(scope["model"][0].weight) is torch.nn.Parameter
    exec(last, scope | {"model": small})


def test_code_of_the_checkpoints_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {}
    exec(re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "checkpoints.md").read_text(), re.DOTALL)[0], scope)
    assert scope["step"] == 200
    assert (tmp_path / "runs" / "model.safetensors").exists()


def test_the_number_of_recipes_and_all_words_are_told():
    assert f"{['sixteen', 'seventeen', 'eighteen'][len(ht.recipes.RECIPES) - 16]} named recipes" in README
    for word in [*WORDS, *MODIFIERS, *POLICIES]:
        assert re.search(rf"`[^`]*\b{word}\b[^`]*`", README), word


def table(name, text=README):
    """Return the cells of the table behind a marker, header excluded."""
    lines = text.split(f"<!-- table: {name} -->\n")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


def results(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def test_demo_table():
    runs = results("demo_cpu")["results"]
    base = runs[0]
    assert table("demo_cpu") == [
        [
            r["recipe"],
            f"{r['validation'][-1][1]:.4f}",
            "" if r is base else f"{r['gap_percent']:+.2f} %",
            f"{r['linear_input_bytes'] / base['linear_input_bytes']:.2f}x",
        ]
        for r in runs
    ]


def test_memory_table():
    rows = results("memory_nvidia_h200")["rows"]
    assert table("memory_nvidia_h200") == [
        [r["recipe"], f"{r['saved MB']:.0f}", f"{r['saved, of BF16']:.2f}x", f"{r['peak MB']:.0f}"] for r in rows
    ]


def test_linear_table():
    rows = results("linear_nvidia_h200")["rows"]
    speeds = {}
    for row in rows:
        speeds.setdefault(row["recipe"], {})[row["tokens x out x in"]] = row["speed over BF16"]
    assert table("linear_nvidia_h200") == [
        [name, *(f"{of[shape]:.2f}x" for shape in ("geometric mean", "16384x4096x4096", "16384x14336x4096"))]
        for name, of in speeds.items()
    ]


@pytest.mark.parametrize(("name", "what"), [("cast", "faces"), ("transpose", "gathered")])
def test_tables_of_parts_of_copy_speed(name, what):
    speeds = {}
    for row in results(f"{name}_nvidia_h200")["rows"]:
        speeds.setdefault(row[what], []).append(f"{row['of copy']:.2f}")
    assert table(f"{name}_nvidia_h200") == [[name, *of] for name, of in speeds.items() if name != "copy"]


def test_end_to_end_table():
    rows = results("end_to_end_nvidia_h200")["rows"]
    assert table("end_to_end_nvidia_h200") == [
        [r["mode"], r["recipe"], f"{r['ms']:.1f}", f"{r['speedup']:.2f}x"] for r in rows
    ]


def test_fsdp_table():
    rows = results("fsdp_4_ranks_nvidia_h200")["rows"]
    assert table("fsdp_4_ranks_nvidia_h200") == [
        [
            r["mode"],
            r["recipe"],
            f"{r['tokens/s per rank']:.0f}",
            f"{r['over BF16']:.2f}x",
            f"{r['all-gather MiB'] / 1024:.1f}",
            f"{r['all-gather ms']:.0f}",
        ]
        for r in rows
    ]


def test_tensor_parallel_table():
    rows = results("tensor_parallel_2_ranks_nvidia_h200")["rows"]
    assert table("tensor_parallel_2_ranks_nvidia_h200") == [
        [r["mode"], r["recipe"], f"{r['tokens/s']:.0f}", f"{r['over BF16']:.2f}x", f"{r['gathers ms']:.1f}"]
        for r in rows
    ]


def test_tables_of_inference():
    text = (ROOT / "docs" / "inference.md").read_text()
    assert table("export_2_ranks_nvidia_h200", text) == [
        [
            r["weights"],
            r["recipe"],
            str(r["bucket MiB"]),
            f"{r['ms']:.0f}",
            f"{r['of its time']:.2f}x",
            f"{r['of its bytes']:.2f}x",
            f"{r['peak MiB']:.0f}",
        ]
        for r in results("export_2_ranks_nvidia_h200")["rows"]
    ]
    assert table("rollout_cpu", text) == [
        [r["training"], r["sampler"], f"{r['k3']:.1e}", f"{r['largest |log ratio|']:.2g}"]
        for r in results("rollout_cpu")["rows"]
    ]
    assert [cells[0] for cells in table("layouts", text)] == list(LAYOUTS)


def test_tables_of_experts():
    text, rows = (ROOT / "docs" / "experts.md").read_text(), results("grouped_nvidia_h200")["rows"]
    speeds, blocks = {}, []
    for r in rows:
        shape, speed = r["tokens x out x in, experts"], f"{r['speed over BF16']:.2f}x"
        if r["recipe"].startswith("bf16"):
            continue
        if shape.startswith("block"):
            blocks.append([r["groups"], r["recipe"], speed])
        else:
            speeds.setdefault((shape, r["recipe"]), []).append(speed)
    assert table("grouped_nvidia_h200", text) == [[*key, *of] for key, of in speeds.items()]
    assert table("grouped_nvidia_h200, block", text) == blocks
    losses = results("moe_losses_nvidia_h200")["rows"]
    assert table("moe_losses_nvidia_h200", text) == [
        [r["recipe"], f"{r['mean loss of the last 50 steps']:.3f}"] for r in losses
    ]


def test_convergence_table():
    record = results("convergence_nvidia_h200")
    assert table("convergence_nvidia_h200") == [
        [
            r["recipe"],
            str(r["seeds"]),
            f"{r['loss']:.3f}",
            f"{r['gap %']:+.2f} %",
            "" if r["noise %"] is None else f"{r['noise %']:.2f} %",
            f"{r['validation gap %']:+.2f} %",
        ]
        for r in record["rows"]
    ]
    not_measured = ["nvfp4_row_scaled_fwd_high_precision_bwd"]  # named after the runs
    assert [r["recipe"] for r in record["rows"]] + not_measured == list(ht.recipes.RECIPES)
    assert record["plan"]["steps"] >= 1500
    assert record["parameters"] >= 100e6
    assert record["text bytes"]["train"] >= 100e6


def test_no_recipe_is_above_its_goal_by_more_than_noise():
    record = results("convergence_nvidia_h200")
    for row in record["rows"]:
        assert row["gap %"] - 2 * (row["noise %"] or 0) <= row["allowed %"]
    assert max(map(abs, record["gaps of replicas %"])) == pytest.approx(0.6, abs=0.05)


@pytest.mark.parametrize("name", ["demo_cpu", "demo_nvidia_h200"])
def test_every_demo_run_resumed_bitwise_and_stayed_within_a_percent(name):
    for run in results(name)["results"]:
        assert run["resumed_bitwise"]
        assert run["gap_percent"] is None or run["gap_percent"] < 1


@pytest.mark.parametrize(
    "path",
    [
        "docs/design.md",
        "docs/experts.md",
        "docs/frameworks.md",
        "docs/inference.md",
        "docs/numerics.md",
        "CONTRIBUTING.md",
        "README.md",
    ],
)
def test_files_named_in_the_docs_exist(path):
    for name in re.findall(
        r"`((?:hybridtensor|tests|docs|benchmarks|examples)/[\w/.]+\.\w+)`", (ROOT / path).read_text()
    ):
        assert (ROOT / name).exists(), name
