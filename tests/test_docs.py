"""The README and the pages in ``docs``: their tables are those of the result files, their links lead somewhere."""

import json
import math
import re
import types
from collections import Counter
from pathlib import Path

import pytest

import hybridtensor as ht
from hybridtensor.commands.recipes import MODIFIERS as TOLD
from hybridtensor.inference import LAYOUTS
from hybridtensor.recipes.named import TABLE
from hybridtensor.recipes.spec import MODIFIERS, POLICIES, WORDS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text()


def test_the_readme_is_short():
    assert len(README.split()) < 900


def table(name, text=BENCHMARKS):
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
        [r["mode"], r["recipe"], f"{r['peak GiB']:.2f}", f"{r['of BF16']:.3f}x"] for r in rows
    ]
    before = {f"{r['before GiB']:.2f}" for r in rows}
    assert before == {"8.88", "5.99"}
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    assert all(f" {figure}" in text for figure in before)


def test_saved_table():
    rows = results("saved_nvidia_h200")["rows"]
    assert table("saved_nvidia_h200") == [
        [r["recipe"], f"{r['saved MB']:.0f}", f"{r['saved, of BF16']:.2f}x"] for r in rows
    ]


@pytest.mark.parametrize("name", ["linear_nvidia_h200", "linear_nvidia_h100_80gb_hbm3"])
def test_linear_table(name):
    rows = results(name)["rows"]
    speeds = {}
    for row in rows:
        speeds.setdefault(row["recipe"], {})[row["tokens x out x in"]] = row["speed over BF16"]
    assert table(name) == [
        [recipe, *(f"{of[shape]:.2f}x" for shape in ("geometric mean", "16384x4096x4096", "16384x14336x4096"))]
        for recipe, of in speeds.items()
    ]


@pytest.mark.parametrize(("name", "what"), [("cast", "faces"), ("transpose", "gathered")])
def test_tables_of_parts_of_copy_speed(name, what):
    speeds = {}
    for row in results(f"{name}_nvidia_h200")["rows"]:
        speeds.setdefault(row[what], []).append(f"{row['of copy']:.2f}")
    assert table(f"{name}_nvidia_h200") == [[name, *of] for name, of in speeds.items() if name != "copy"]


@pytest.mark.parametrize(
    "name",
    ["end_to_end_nvidia_h200", "end_to_end_nvidia_h100_80gb_hbm3", "end_to_end_fused_nvidia_h100_80gb_hbm3"],
)
def test_end_to_end_table(name):
    rows = results(name)["rows"]
    assert table(name) == [[r["mode"], r["recipe"], f"{r['ms']:.1f}", f"{r['speedup']:.2f}x"] for r in rows]


def test_small_batches_table():
    found = {}
    for row in results("small_batches_nvidia_h100_80gb_hbm3")["rows"]:
        cells = found.setdefault((f"{row['tokens']:,}", row["recipe"]), {})
        cells[row["device thread"]] = [f"{row['ms']:.1f}", f"{row['speedup']:.2f}x"]
    expected = [[*name, *cells[True], *cells[False]] for name, cells in found.items()]
    assert table("small_batches_nvidia_h100_80gb_hbm3") == expected
    ms = [(float(row[4]) / float(row[2]), row[:2]) for row in expected if row[1] in ht.recipes.RECIPES]
    ratios = [ratio for ratio, (tokens, _) in ms if tokens == "2,048"]
    said = words("choosing-a-recipe")
    assert f"of three recipes in another from {min(ratios):.2f} to {max(ratios):.2f} times" in said


def test_what_is_said_of_eager_steps_is_the_range_of_the_tables():
    of = {"small_batches_nvidia_h100_80gb_hbm3": "speedup"}
    of |= dict.fromkeys(
        ("models_nvidia_h100_80gb_hbm3", "models_nvidia_h200", "models_beside_te_nvidia_h100_80gb_hbm3"), "of bf16"
    )
    found = {}
    for name, column in of.items():
        for row in results(name)["rows"]:
            if row["recipe"] == "fp8" and row.get("mode", "eager") == "eager":
                found.setdefault(row["tokens"], []).append(f"{row[column]:.2f}x")
    ends = [f"{min(found[tokens])} to {max(found[tokens])}" for tokens in (8192, 16384)]
    assert f"at {ends[0]} in the tables of this section, with 16,384 tokens at {ends[1]}" in words("benchmarks")


@pytest.mark.parametrize(
    "name",
    ["models_nvidia_h100_80gb_hbm3", "models_nvidia_h200", "models_beside_te_nvidia_h100_80gb_hbm3"],
)
def test_models_table(name):
    assert table(name) == [
        [r["model"], f"{r['tokens']:,}", r["mode"], r["recipe"], f"{r['bf16 ms']:.1f}", f"{r['ms']:.1f}",
         f"{r['of bf16']:.2f}x", f"{r['host ms']:.1f}", f"{r['kernels ms']:.1f}", f"{r['launches']:,}",
         f"{r['first 4 steps s']:.1f}"]
        for r in results(name)["rows"]
    ]  # fmt: skip


@pytest.mark.parametrize("device", ["h100_80gb_hbm3", "h200"])
def test_models_under_fsdp_table(device):
    rows = results(f"models_2_ranks_nvidia_{device}")["rows"]
    assert table(f"models_2_ranks_nvidia_{device}") == [
        [r["model"], f"{r['tokens']:,}", r["mode"], r["recipe"], f"{r['bf16 ms']:.1f}", f"{r['ms']:.1f}",
         f"{r['of bf16']:.2f}x", f"{r['host ms']:.1f}", f"{r[' peak GiB']:.1f}", f"{r['bf16 peak GiB']:.1f}"]
        for r in rows
    ]  # fmt: skip


def test_the_readme_shows_both_ends():
    devices, recipes, speeds = ("h100_80gb_hbm3", "h200"), ("fp8", "torchao tensorwise"), {}
    for device in devices:
        for row in results(f"models_nvidia_{device}")["rows"]:
            if (row["model"], row["mode"]) == ("Llama 1.2 B", "blocks"):
                speeds.setdefault(row["tokens"], {})[device, row["recipe"]] = f"{row['of bf16']:.2f}x"
    columns = [(device, recipe) for device in devices for recipe in recipes]
    assert table("both ends", README) == [
        [f"{tokens:,}", *(of.get(column, "") for column in columns)] for tokens, of in sorted(speeds.items())
    ]


def test_blocks_table():
    rows = results("blocks_nvidia_h200")["rows"]
    assert table("blocks_nvidia_h200") == [
        [
            r["block"],
            r["recipe"],
            f"{r['modules ms']:.2f}",
            *(f"{r[f'{how} over modules']:.2f}x" for how in ("values", "into")),
        ]
        for r in rows
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


def test_four_bit_casts_table():
    rows = results("cast_nvidia_h100_80gb_hbm3")["rows"]
    shapes = list(dict.fromkeys(r["shape"] for r in rows))
    speeds = {(r["shape"], r["faces"]): (f"{r['of copy']:.2f}", f"{r['ms']:.2f}") for r in rows}
    told = table("cast_nvidia_h100_80gb_hbm3")
    assert {"MXFP8", "NVFP4", "MXFP4", "NVFP4, four over six", "NVFP4, MS-EDEN"} <= {cells[0] for cells in told}
    for faces, *cells, ms in told:
        assert cells == [speeds[shape, faces][0] for shape in shapes]
        assert ms == speeds["16384x4096", faces][1]


def test_resumed_table():
    assert table("resume_nvidia_h100_80gb_hbm3") == [
        [
            r["run"],
            r["recipe"],
            r["ranks"],
            f"{r['bitwise']}",
            f"{r['largest difference %']:.1f} %" if r["largest difference %"] != "" else "",
            f"{r['checkpoint s']:.1f}",
            f"{r['checkpoint MiB'] / 1024:.2f}",
        ]
        for r in results("resume_nvidia_h100_80gb_hbm3")["rows"]
    ]


def test_scaling_table():
    assert table("scale_nvidia_h100_80gb_hbm3") == [
        [
            r["layout"],
            str(r["ranks"]),
            r["recipe"],
            f"{r['tokens/s per GPU']:.0f}",
            f"{r['over BF16']:.2f}x",
            f"{r['efficiency']:.2f}",
            f"{r['all-gather MiB'] / 1024:.1f}",
            f"{r['all-gather ms']:.0f}",
            f"{r['peak GiB']:.1f}",
        ]
        for r in results("scale_nvidia_h100_80gb_hbm3")["rows"]
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


def gap_cells(row):
    noise = "" if row["noise %"] is None else f"{row['noise %']:.2f} %"
    cells = [row["recipe"], str(row["runs"]), f"{row['loss']:.4f}", f"{row['gap %']:+.2f} %", noise]
    return [*cells, f"{row['validation gap %']:+.2f} %"]


def test_convergence_table():
    record, text = results("convergence_nvidia_h200"), page("convergence")
    base = record["rows"][0]["tokens/s"]
    speeds = ["" if r["tokens/s"] is None else f"{r['tokens/s'] / base:.2f}x" for r in record["rows"]]
    assert table("convergence_nvidia_h200", text) == [
        [*gap_cells(r), f"{r['gradient norm gap %']:+.1f} %", speed]
        for r, speed in zip(record["rows"], speeds, strict=True)
    ]
    assert {*ht.recipes.RECIPES} <= {row["recipe"] for row in record["rows"]}
    said = " ".join(text.split())
    assert f"drift apart: by {record['scatter of one run %']:.2f} %" in said
    assert f"({record['degrees of freedom']} degrees of freedom)" in said
    assert record["plan"]["steps"] >= 1000
    assert record["plan"]["tokens"] >= 32768
    assert record["parameters"] >= 114e6
    assert record["text bytes"]["train"] >= 300e6


def runs_of_convergence():
    """Return the last tenths of all runs by recipe and seed, of the files of single runs."""
    files = (ROOT / "benchmarks/results/convergence").glob("*.json")
    runs = [json.loads(path.read_text()) for path in files]
    assert all(run["plan"] == results("convergence_nvidia_h200")["plan"] for run in runs)
    return {(run["recipe"], run["seed"]): sum(run["losses"][-100:]) / 100 for run in runs}


def test_every_run_of_the_convergence_table_is_kept():
    runs = runs_of_convergence()
    count = Counter(name.partition("_disturbed")[0] for name, _ in runs)
    assert count == {row["recipe"]: row["runs"] for row in results("convergence_nvidia_h200")["rows"]}


def test_gaps_are_what_a_reader_would_work_out():
    """Oracle: mean gaps, over the seeds of a recipe, to the mean of BF16's runs, refined by least squares."""
    runs, base = runs_of_convergence(), {}
    for (name, seed), loss in runs.items():
        if name.partition("_disturbed")[0] == "bf16":
            base.setdefault(seed, []).append(loss)
    for row in results("convergence_nvidia_h200")["rows"][1:]:
        own = [(seed, loss) for (name, seed), loss in runs.items() if name == row["recipe"]]
        plain = [100 * (loss * len(base[seed]) / sum(base[seed]) - 1) for seed, loss in own]
        # Least squares take out more, the fewer of the three seeds a recipe has
        assert row["gap %"] == pytest.approx(sum(plain) / len(plain), abs=row["noise %"] / row["runs"]), row["recipe"]


def test_what_the_page_takes_from_convergence():
    """Each figure of the text, from the rows."""
    record = results("convergence_nvidia_h200")
    rows = {r["recipe"]: r for r in record["rows"]}
    gap = {name: row["gap %"] for name, row in rows.items()}
    of_pair = record["scatter of one run %"] * math.sqrt(1 / 3 + 1 / 3)  # of a difference of two recipes of three runs
    names = ("fp8", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8")
    eight = [gap[name] for name in names]
    assert (round(min(eight), 1), round(max(eight), 1)) == (0.1, 0.2)
    assert max(eight) < 0.25 < max(rows[name]["high %"] for name in names) < 0.35
    assert max(eight) - min(eight) < 2 * of_pair
    fewer = ["fp8_high_precision_backward", "fp8_dequantized_backward", "mxfp8_dequantized_backward"]
    fewer = [rows[name] for name in (*fewer, "high_precision_fwd_mxfp8_bwd")]
    assert all(row["low %"] < 0 for row in fewer)
    assert round(gap["mxfp4"], 1) == 2.0
    quartet, forward_alone = gap["quartet2"], gap["nvfp4+one_d+four_over_six+four_over_six_mse+dequantized"]
    assert f"{quartet:.1f} {gap['nvfp4'] - quartet:.2f} {1 - quartet / gap['nvfp4']:.1f}" == "1.1 0.27 0.2"
    assert gap["nvfp4"] - quartet > 2.8 * of_pair
    assert f"{gap['nvfp4+four_over_six']:.2f} {gap['nvfp4+eden']:.2f}" == "1.31 1.52"
    backward = quartet - forward_alone, gap["nvfp4"] - gap["nvfp4_dequantized_backward"]
    assert f"{forward_alone:.1f} {backward[0]:.1f} {backward[1]:.2f}" == "0.9 0.2 0.34"
    assert f"{gap['gpt_oss_experts']:.1f} {gap['deepseek_v4_experts']:.2f}" == "0.5 0.65"
    assert [round(bound(row["gap %"] for row in fewer), 1) for bound in (min, max)] == [0.0, 0.1]
    assert round(gap["fp8_rowwise_hp_grad_weight"], 1) == 0.2
    products = ["nvfp4_fwd_mxfp8_bwd", "mxfp8/nvfp4/mxfp8", "mxfp8/mxfp8/nvfp4", "mxfp8", "nvfp4"]
    assert [f"{gap[name]:.1f}" for name in products] == ["1.0", "0.3", "0.1", "0.1", "1.4"]
    added = [gap[name] - gap["mxfp8"] for name in products]
    assert f"{sum(added[:3]):.1f} {added[4]:.1f}" == "1.0 1.3"
    between = record["scatter of one run %"] * math.sqrt((1 + 1 + 1 + 2**2 + 1) / 3)  # a + b + c - 2 mxfp8 - nvfp4
    assert f"{between:.1f}" == "0.2"
    assert abs(added[4] - sum(added[:3])) < 2 * between
    forward = ["row_scaled_fwd_mxfp8_bwd", "row_scaled_fwd_high_precision_bwd", "dequantized_backward", "fwd_mxfp8_bwd"]
    forward = [gap[f"nvfp4_{name}"] for name in forward]
    assert f"{min(forward):.2f} {max(forward):.2f}" == "0.95 1.06"
    assert max(forward) - min(forward) < 2 * of_pair
    assert f"{gap['mxfp8_fwd_nvfp4_bwd']:.1f} {gap['nvfp4_edge_blocks_bf16']:.1f}" == "0.4 0.6"
    assert rows["mxfp8_fwd_nvfp4_bwd"]["verdict"] == rows["nvfp4_edge_blocks_bf16"]["verdict"] == "within"
    assert rows["nvfp4"]["verdict"] == "above"
    held_out = [rows[name]["validation gap %"] for name in names]
    assert f"{min(held_out):.1f} {max(held_out):.1f} {rows['nvfp4']['validation gap %']:.1f}" == "0.0 0.2 0.9"

    def percent(name, begin, end):
        """Of a part of the curves of three seeds."""
        names = (name, "bf16", "bf16_disturbed", "bf16_disturbed_again")
        of = {one: [record["curves"][f"{one}-{seed}"] for seed in range(3)] for one in names}
        part = slice(int(begin * len(of[name][0])), int(end * len(of[name][0])))
        loss, *base = (sum(sum(curve[part]) for curve in curves) for curves in of.values())
        return 100 * (len(base) * loss / sum(base) - 1)

    assert f"{percent('nvfp4', 0.45, 0.55):.1f} {percent('nvfp4_last_tenth_bf16', 0.95, 1):.1f}" == "0.9 1.0"


def test_losses_in_the_choice_are_those_of_the_table():
    said = re.findall(r"\d\.\d %", page("choosing-a-recipe").partition("After 1,000 steps")[2].partition("##")[0])
    gap = {r["recipe"]: r["gap %"] for r in results("convergence_nvidia_h200")["rows"]}
    eight = max(value for name, value in gap.items() if "fp8" in name and "nvfp4" not in name)
    of = [gap[name] for name in ("nvfp4", "nvfp4_fwd_mxfp8_bwd", "mxfp8_fwd_nvfp4_bwd", "nvfp4_edge_blocks_bf16")]
    assert said == [f"{value:.1f} %" for value in (eight, *of)]


@pytest.mark.parametrize("name", ["demo_cpu", "demo_nvidia_h200"])
def test_every_demo_run_resumed_bitwise_and_stayed_within_a_percent(name):
    for run in results(name)["results"]:
        assert run["resumed_bitwise"]
        assert run["gap_percent"] is None or run["gap_percent"] < 1


def page(name):
    return (ROOT / "docs" / f"{name}.md").read_text()


def words(name):
    return " ".join(page(name).split())


def test_every_word_of_recipes_is_told():
    text = page("recipes")
    count = ["eighteen", "nineteen", "twenty", "twenty-one", "twenty-two"][len(ht.recipes.RECIPES) - 18]
    assert f"{count} named recipes" in text
    assert table("recipes", text) == [[r.name, r.spec, r.promise.replace("``", "`")] for r in TABLE]
    assert [row[0] for row in table("recipes", text)] == list(ht.recipes.RECIPES)
    assert table("modifiers", text) == [list(one) for one in TOLD.items()]
    assert {row[0] for row in table("modifiers", text)} == {*MODIFIERS, *POLICIES}
    for word in WORDS:
        assert re.search(rf"^\| `\"{word}\"` \|", text, re.MULTILINE), word


def test_the_choice_is_of_recipes_that_there_are():
    rows = table("choice", README)
    assert len(rows) == 6
    assert rows == table("choice", page("choosing-a-recipe"))
    for *_, recipe in rows:
        ht.recipes.from_name(recipe)


def test_speeds_in_the_choice_are_those_of_the_benchmarks():
    text = page("choosing-a-recipe")
    steps = {(r["mode"], r["recipe"]): f"{r['speedup']:.2f}x" for r in results("end_to_end_nvidia_h200")["rows"]}
    for recipe in ("fp8", "fp8_delayed", "fp8_rowwise", "fp8_block"):
        said = re.search(rf"^- \*\*`{recipe}`\*\*: (.*?)(?=^- )", text, re.DOTALL | re.MULTILINE).group(1)
        assert re.findall(r"\d\.\d\dx", said) == [steps["eager", recipe], steps["compiled", recipe]]
    rows = results("linear_nvidia_h200")["rows"]
    alone = {r["recipe"]: f"{r['speed over BF16']:.2f}x" for r in rows if r["tokens x out x in"] == "geometric mean"}
    text = " ".join(text.split())
    assert f"`mxfp8` {alone['mxfp8']}, `nvfp4` {alone['nvfp4']};" in text
    backward = alone["fp8_dequantized_backward"], alone["fp8_high_precision_backward"]
    assert f"one linear layer: {', '.join(backward)}" in text


def test_no_other_gpu_or_torch_was_measured():
    names = [path.stem for path in (ROOT / "benchmarks" / "results").glob("*_nvidia_*.json")]
    assert len(names) > 10
    for name in names:
        record = results(name)
        found = record.get("environment") or {"device": record["device"], **record["versions"]}
        assert found["torch"].partition("+")[0] == "2.11.0"
        assert name.endswith(found["device"].lower().replace(" ", "_"))
        assert found["device"] in ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
    assert "Never run: GPUs other than the H200 and the H100, and CUDA with a torch newer than 2.11" in README


def test_the_results_of_the_readme_are_those_of_the_benchmarks():
    speeds = {(r["mode"], r["recipe"]): f"{r['speedup']:.2f}x" for r in results("end_to_end_nvidia_h200")["rows"]}
    losses = {r["recipe"]: f"{r['gap %']:+.2f} %" for r in results("convergence_nvidia_h200")["rows"]}
    assert table("results", README) == [
        [recipe, speeds.get(("eager", recipe), ""), speeds.get(("compiled", recipe), ""), losses.get(recipe, "")]
        for recipe in dict.fromkeys(recipe for _, recipe in speeds)
        if recipe in ht.recipes.RECIPES or recipe.startswith(("torchao", "TransformerEngine"))
    ]
    noise = max(r["noise %"] for r in results("convergence_nvidia_h200")["rows"] if r["recipe"].startswith("fp8"))
    assert f"noise of {noise:.2f} %" in README


def test_frameworks_are_shown_with_recipes_that_are_faster_than_bf16():
    speeds = [(r["recipe"], r["speedup"]) for r in results("end_to_end_nvidia_h200")["rows"]]
    faster = {name for name, _ in speeds if all(speed > 1 for of, speed in speeds if of == name)}
    for text in (README, page("frameworks")):
        snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        shown = {
            name
            for snippet in snippets
            if re.search("integrations.(transformers|lightning|torchtitan)", snippet)
            for name in re.findall('"(\\w+)"', snippet)
            if name in ht.recipes.RECIPES
        }
        assert shown
        assert shown <= faster


def test_examples_of_one_gpu_per_process_keep_autograd_in_its_thread():
    of_frameworks = list((ROOT / "examples" / "frameworks").glob("*.py"))
    assert len(of_frameworks) == 5
    for path in (*of_frameworks, *(ROOT / "examples" / f"{name}.py" for name in ("train", "moe", "pipeline"))):
        assert "torch.autograd.set_multithreading_enabled(False)" in path.read_text(), path
    for name in ("choosing-a-recipe", "when-it-goes-wrong"):
        assert "torch.autograd.set_multithreading_enabled(False)" in page(name)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_files_named_in_the_docs_exist(path):
    names = re.findall(r"`((?:hybridtensor|tests|docs|benchmarks|examples)/[\w/.-]+\.\w+)`", path.read_text())
    for name in names:
        assert (ROOT / name).exists(), name


def anchors(text):
    """Return what GitHub, and the site, call the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        there = path.parent / name if name else path
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there.read_text()), target


def test_the_readme_names_every_command():
    text = " ".join(README.split()).split("On the command line: ")[1].split(" ## ")[0]
    said = [word.split()[0] for word in re.findall(r"`(?:hybridtensor )?([^`]+)`", text)]
    files = {path.stem for path in (ROOT / "hybridtensor" / "commands").glob("*.py")}
    assert set(said) == files - {"__init__", "common"}


def test_the_site_has_every_page():
    """In the list for readers, and in the one that makes the menu."""
    text = page("index")
    listed = re.findall(r"^\| \[[^\]]+\]\((.+)\.md\)", text, re.MULTILINE)
    menu = text.split("```{toctree}")[1].split("```")[0].split("\n\n")[1].split()
    pages = {path.stem for path in ROOT.glob("docs/*.md")} - {"index"}
    assert set(listed) == set(menu) == pages
    assert all(f"docs/{name}.md" in README for name in pages - {"api"})


def test_the_api_has_every_public_name():
    text = page("api")
    for name in ht.__all__:
        if name == "__version__":
            continue
        if isinstance(getattr(ht, name), types.ModuleType):
            assert f".. automodule:: hybridtensor.{name}\n   :members:" in text, name
        else:
            assert re.search(rf"^\.\. auto(class|function):: {name}$", text, re.MULTILINE), name
