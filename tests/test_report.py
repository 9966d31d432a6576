"""``report``: a page of what was watched. Its numbers are read back out of the page, its script runs in node."""

import dataclasses
import functools
import json
import math
import re
import shutil
import subprocess

import pytest
import torch
from experts import WIDTH, Mixture
from pages import Page, recording, strings, trained, with_markup
from torch import nn

import hybridtensor as ht
from hybridtensor.testing import random_tensor
from hybridtensor.watching import Recording


def data_of(path):
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', path.read_text(), re.S)
    return json.loads(found[1])


def test_folders_are_made_for_pages_and_recordings(tmp_path):
    watched = recording(steps=1)
    saved = watched.recording().save(tmp_path / "a" / "run.json")
    assert ht.report(saved, tmp_path / "b" / "c" / "page.html").is_file()
    for path in (tmp_path, saved / "page.html"):
        for who, write in (
            ("report", functools.partial(ht.report, saved)),
            ("Recording.save", watched.recording().save),
        ):
            with pytest.raises(ValueError, match=rf"^{who}: the path of a file is required, got {path}, "):
                write(path)


def test_the_page_is_whole_and_needs_no_network(tmp_path):
    page = Page(ht.report(recording(), tmp_path / "page.html"))
    assert not page.open
    text = (tmp_path / "page.html").read_text()
    assert "<!--" not in text
    assert not re.search(r"https?:|src=|@import|url\(", text)
    assert not [tag for tag, _ in page.tags if tag in ("link", "img", "iframe")]
    shown = " ".join(page.texts)
    specs = [str(ht.HybridConfig.parse(spec)) for spec in ("fp8_rowwise", "nvfp4")]
    for told in (*specs, "*.up_proj x3", "*.down_proj x3", torch.__version__, "smallest cosine"):
        assert told in shown


def test_its_numbers_are_those_of_the_recording(tmp_path):
    watched = recording()
    data = data_of(ht.report(watched, tmp_path / "page.html"))
    assert data["steps"] == [0, 2, 4]
    assert data["layers"] == [f"{i}.{name}_proj" for i in range(3) for name in ("up", "down")]
    for column, sample in enumerate(watched.samples):
        for row in sample.products:
            got = data["values"]["cosine"][row.product][data["layers"].index(row.layer)][column]
            assert got == pytest.approx(row.statistics["cosine"], rel=1e-3)
        for row in sample.faces:
            got = data["values"]["underflows%"][row.operand][data["layers"].index(row.layer)][column]
            assert got == pytest.approx(row.statistics["underflows%"], rel=1e-3)


def test_from_files_and_recordings(tmp_path):
    watched = recording()
    saved = watched.recording().save(tmp_path / "run.json")
    first = ht.report(watched, tmp_path / "a.html").read_text()
    assert ht.report(saved, tmp_path / "b.html").read_text() == first
    assert ht.report(Recording.load(saved), str(tmp_path / "c.html")).read_text() == first


def test_long_runs_are_thinned_and_names_escaped(tmp_path):
    once = recording(steps=1).recording()
    sample = once.samples[0]
    name = "<script>alert('x')</script>"
    faces = tuple(ht.watching.FaceRow(row.step, name, row.operand, row.format, row.statistics) for row in sample.faces)
    many = [sample._replace(step=step, faces=faces) for step in range(200)]
    run = Recording(1, {**once.recipes, name: "fp8"}, once.machine, ((0, 1.0),), tuple(many))
    data = data_of(ht.report(run, tmp_path / "page.html"))
    assert (len(data["steps"]), data["steps"][0], data["steps"][-1]) == (60, 0, 199)
    assert "<script>alert" not in (tmp_path / "page.html").read_text()
    assert not Page(tmp_path / "page.html").open


def test_markup_in_any_string_of_a_recording_is_text(tmp_path):
    """A recording may be someone else's. Oracle: the tags and attributes of the page without markup."""
    experts = ht.quantize_(Mixture(), "fp8")
    optimizer = torch.optim.SGD(experts.parameters(), lr=1e-4)
    with ht.watch(experts, every=1, rows=128) as watched:
        for seed in range(2):
            experts(random_tensor(64, WIDTH, seed=seed, dtype=torch.float32)).square().mean().backward()
            watched.note(1.0)
            optimizer.step()
            ht.step_(experts)
    saved, page = watched.recording().save(tmp_path / "run.json"), tmp_path / "page.html"
    found = json.loads(saved.read_text())
    allowed = {(tag, *attributes) for tag, attributes in Page(ht.report(saved, page)).tags}
    shown = refused = 0
    for path, is_key in strings(found):
        saved.write_text(json.dumps(with_markup(found, path, is_key)))
        try:
            made = Page(ht.report(saved, page))
        except ValueError:
            refused += 1
            continue
        shown += 1
        assert not made.open, path
        assert {(tag, *attributes) for tag, attributes in made.tags} <= allowed, path
        assert sum(tag == "script" for tag, _ in made.tags) == 2, path
    assert shown > 20
    assert refused > 20


WRONG = {
    "a number for a name": lambda found: found["samples"][0]["faces"][0].update(layer=3),
    "a list for a product": lambda found: found["samples"][0]["products"][0].update(product=["output"]),
    "no statistics": lambda found: found["samples"][0]["faces"][0].update(statistics={}),
    "text for a number": lambda found: found["samples"][0]["products"][0]["statistics"].update(cosine="<b>"),
    "recipes in a list": lambda found: found.update(recipes=["fp8"]),
    "a field too many": lambda found: found["samples"][0]["faces"][0].update(more=1),
    "samples in a number": lambda found: found.update(samples=3),
    "text for every": lambda found: found.update(every="2"),
    "a fraction for every": lambda found: found.update(every=2.5),
    "no steps between": lambda found: found.update(every=0),
    "a truth for a step": lambda found: found["samples"][0].update(step=True),
    "a fraction for a step": lambda found: found["samples"][0]["faces"][0].update(step=0.5),
    "a step before the first": lambda found: found["samples"][0].update(step=-1),
    "text for a step of a loss": lambda found: found.update(losses=[["0", 1.0]]),
    "text for a loss": lambda found: found.update(losses=[[0, "1.0"]]),
    "a truth for a number": lambda found: found["samples"][0]["faces"][0]["statistics"].update(sqnr=True),
    "a number in text": lambda found: found["samples"][0]["faces"][0]["statistics"].update(sqnr="30"),
    "text for an expert": lambda found: found["samples"][0]["products"][0].update(experts=[["0", 0.5]]),
    "experts by name": lambda found: found["samples"][0]["products"][0].update(experts={"01": 0.5}),
    "a string of two letters for a pair": lambda found: found["samples"][0]["products"][0].update(formats="ab"),
    "strings of two letters for pairs": lambda found: found["samples"][0].update(unseen=["ab"]),
    "a version that is a truth": lambda found: found.update(version=True),
}


def saved_after(change, folder):
    """Return the file of a recording whose data ``change`` has changed."""
    saved = recording(steps=1).recording().save(folder / "run.json")
    found = json.loads(saved.read_text())
    change(found)
    saved.write_text(json.dumps(found))
    return saved


@pytest.mark.parametrize("name", WRONG)
def test_a_recording_of_other_types_is_refused(name, tmp_path):
    saved = saved_after(WRONG[name], tmp_path)
    with pytest.raises(ValueError, match=r"Recording\.load: what Recording\.save wrote is required, got .*run\.json"):
        ht.report(saved, tmp_path / "page.html")


def test_what_was_not_noted_or_not_finite_is_said(tmp_path):
    shown = " ".join(Page(ht.report(recording(note=False), tmp_path / "page.html")).texts)
    assert "No losses were noted" in shown
    assert "Not finite" not in shown
    once = recording().recording()
    sample = once.samples[1]
    bad = sample.faces[3]
    worse = dataclasses.replace(bad, statistics=bad.statistics | {"nonfinite": 1.0})
    sample = sample._replace(faces=(*sample.faces[:3], worse))
    run = Recording(once.every, once.recipes, once.machine, once.losses, (sample,))
    shown = " ".join(Page(ht.report(run, tmp_path / "page.html")).texts)
    assert f"Not finite: step 2: {bad.layer} {bad.operand}" in shown


NODE = """
const page = require("fs").readFileSync(process.argv[2], "utf8");
const script = page.match(/<script>\\n([\\s\\S]*?)<\\/script>/)[1];
const data = page.match(/type="application\\/json">([\\s\\S]*?)<\\/script>/)[1];
const nodes = {}, made = [];
function node(tag) {
  const self = { tag, dataset: {}, style: {}, children: [], value: "", textContent: "", addEventListener() {},
    append(...c) { self.children.push(...c); if (self.value === "" && c[0].value) self.value = c[0].value; },
    replaceChildren() { self.children = []; },
    getContext: () => ({ createImageData: (w, h) => ({ data: new Array(4 * w * h).fill(0) }),
      putImageData(image) { self.pixels = image.data; } }) };
  return self;
}
const get = (id) => nodes[id] ??= Object.assign(node(id), id === "data" ? { textContent: data } : {});
get("order").value = "worst";
const colors = { "--good": "#000000", "--mid": "#808080", "--bad": "#ffffff" };
const document = { getElementById: get, createElement: node, documentElement: {} };
const getComputedStyle = () => ({ getPropertyValue: (name) => colors[name] });
const matchMedia = () => ({ addEventListener() {} });
function Option(name) { return { value: name }; }
const given = { document, getComputedStyle, matchMedia, Option };
new Function(...Object.keys(given), script)(...Object.values(given));
const map = get("map").children;
console.log(JSON.stringify({
  metrics: get("metric").children.map((o) => o.value),
  names: map.filter((c) => c.className === "name").map((c) => c.title),
  pixels: map.filter((c) => c.tag === "canvas").map((c) => c.pixels) }));
"""


def drawn_by(page):
    """Return what the script of a page draws."""
    script = page.with_suffix(".js")
    script.write_text(NODE)
    return json.loads(subprocess.run(["node", script, page], capture_output=True, text=True, check=True).stdout)


needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node runs the page's script")


def test_recipes_name_their_layers(tmp_path):
    one = recording(layers=3).recording()
    run = dataclasses.replace(
        one, recipes={name: "fp8" if name[0] == "1" else spec for name, spec in one.recipes.items()}
    )
    page = ht.report(run, tmp_path / "page.html").read_text()
    assert "<dd>1.up_proj, 1.down_proj</dd>" in page
    assert "<dd>[0,2].up_proj x2</dd>" in page


@needs_node
def test_the_script_draws_both_recordings(tmp_path):
    """A row of each for each layer, in the same colours; of what one lacks, the row of the other alone."""
    one = recording().recording()
    other = dataclasses.replace(one, recipes=dict(list(one.recipes.items())[:4]), samples=one.samples[:2])
    page = ht.report(one, tmp_path / "page.html", beside=other)
    data, (second,), found = data_of(page), data_of(page)["beside"], drawn_by(page)
    assert (data["name"], second["name"]) == ("this one", "the other")
    assert second == {"name": "the other", **{key: data_of(ht.report(other, tmp_path / "other.html"))[key] for key in
                                              ("steps", "layers", "values")}}  # fmt: skip
    layers = [name.removesuffix(" (this one)") for name in found["names"] if name.endswith(" (this one)")]
    expected = [[f"{name} (this one)", *[f"{name} (the other)"] * (name in second["layers"])] for name in layers]
    assert found["names"] == [name for names in expected for name in names]
    assert sorted(layers) == sorted(data["layers"])
    counts = [len(pixels) // 4 for pixels in found["pixels"][:: len(found["pixels"]) // len(found["names"])]]
    assert counts == [len((data if "this" in name else second)["steps"]) for name in found["names"]]
    alone = dict(zip(*columns_of(drawn_by(ht.report(one, tmp_path / "alone.html"))), strict=True))
    beside = dict(zip(*columns_of(found), strict=True))
    for name in second["layers"]:  # the second one has the beginning of the first, of the same numbers
        mine = beside[f"{name} (this one)"]
        assert [pixels[:8] for pixels in mine] == [pixels[:8] for pixels in beside[f"{name} (the other)"]]
        assert mine == alone[name]


def columns_of(found):
    """Return names of rows, and the pixels of each."""
    width = len(found["pixels"]) // len(found["names"])
    return found["names"], [found["pixels"][i * width : (i + 1) * width] for i in range(len(found["names"]))]


@needs_node
def test_the_script_puts_the_worst_layer_first(tmp_path):
    watched = recording()
    page = ht.report(watched, tmp_path / "page.html")
    found = drawn_by(page)
    assert found["metrics"][0] == "cosine"
    smallest = {}
    for row in watched.samples[-1].products:
        smallest[row.layer] = min(smallest.get(row.layer, 1.0), row.statistics["cosine"])
    layers = data_of(page)["layers"]
    assert found["names"] == sorted(layers, key=lambda name: (round(smallest[name], 6), layers.index(name)))
    steps = len(watched.samples)
    assert len(found["pixels"]) == 3 * len(layers)
    assert all(len(pixels) == 4 * steps for pixels in found["pixels"])
    drawn = [pixels for pixels in found["pixels"] if pixels[3] == 255]
    assert len(drawn) == 3 * len(layers) - 1  # nobody asks for the gradient of the model's input
    reds = [pixels[4 * i] for pixels in drawn for i in range(steps)]
    assert max(reds) > 200  # the worst of all, in the colour of the worst
    assert min(reds) < 40


@needs_node
def test_a_product_of_zeros_is_the_worst_one(tmp_path):
    """Its cosine is no number. It is drawn, first and in the worst colour, which others do not pale beside."""
    watched = trained("fp8", outlier=1e6)
    row = next(row for row in watched.samples[-1].products if (row.layer, row.product) == ("1.up_proj", "grad_input"))
    assert math.isnan(row.statistics["cosine"])
    page = ht.report(watched, tmp_path / "page.html")
    found = drawn_by(page)
    assert found["names"][0] == "1.up_proj"
    _, pixels = columns_of(found)
    drawn = [color for columns in pixels for column in columns for color in column[:3] if column[3]]
    grad_input = data_of(page)["values"]["cosine"]["grad_input"][2]
    assert grad_input == [-1e308] * 3
    assert pixels[0][1] == [255, 255, 255, 255] * 3  # between output and grad_weight
    assert min(drawn) < 40
    told = re.sub("<script.*", "", page.read_text(), flags=re.S)
    assert "<b>not a number</b>" in told
    assert not re.search(r">nan\b", told)


def test_what_a_row_is_judged_by_comes_first(tmp_path):
    page = ht.report(recording(), tmp_path / "page.html").read_text()
    heads = [re.findall(r"<th\b[^>]*>([^<]*)</th>", head) for head in re.findall("<thead>.*?</thead>", page)]
    compared = ["expected", "threshold", "worst step", "in step"]
    assert heads[0][:9] == ["layer", "face", "format", "sqnr", "row_sqnr", *compared]
    assert heads[1] == ["layer", "product", "format", "cosine", "sqnr", *compared]
    assert len(set(heads[0])) == len(heads[0]) == 3 + len(ht.watching.NAMES) + 4


def test_nothing_measured(tmp_path):
    model = ht.quantize_(nn.Linear(32, 32, bias=False), "fp8")
    with ht.watch(model, every=1) as watched, torch.no_grad():
        model(torch.ones(4, 32))
        watched.step()
    with pytest.raises(
        ValueError, match="report: no product was measured in 1 steps, as without gradients; watch steps"
    ):
        ht.report(watched, tmp_path / "page.html")
    with pytest.raises(ValueError, match=r"no step was measured; watch an optimizer's step, or call"):
        ht.report(ht.watch(model), tmp_path / "page.html")
    with pytest.raises(TypeError, match="what watch returned, a Recording or its file"):
        ht.report(3, tmp_path / "page.html")


ODD = {
    "half of a surrogate pair": lambda found: found["recipes"].update({"a\ud800": "fp8"}),
    "numbers of steps that no float holds": lambda found: found["losses"].extend([[10**400, 1.0], [10**401, 2.0]]),
    "a step that no float holds": lambda found: found["samples"][0].update(step=10**400),
    "losses as far apart as floats are": lambda found: found["losses"].extend([[7, 1.7e308], [8, -1.7e308]]),
}

REFUSED = [name for name in ODD if "no float holds" in name]


@pytest.mark.parametrize("name", ODD)
def test_odd_values_of_a_recording_make_a_page_or_one_error(name, tmp_path):
    saved = saved_after(ODD[name], tmp_path)
    page = tmp_path / "page.html"
    if name in REFUSED:
        with pytest.raises(ValueError, match=r"run\.json"):
            ht.report(saved, page, beside=saved)
        assert not page.exists()
        return
    assert not Page(ht.report(saved, page, beside=saved)).open
    assert not re.search("(?<![a-z])(nan|inf)(?![a-z])", page.read_text())


def test_losses_that_are_not_finite_were_noted(tmp_path):
    run = dataclasses.replace(recording(note=False).recording(), losses=((0, math.nan), (1, 2.0)))
    shown = " ".join(Page(ht.report(run, tmp_path / "page.html")).texts)
    assert "fewer than two are finite" in shown
    assert "No losses were noted" not in shown


def test_a_page_is_not_written_over_its_recordings(tmp_path):
    """Also by another name of the file: the page of the command is FILE with .html, which may be FILE."""
    saved, other = (recording(steps=1).recording().save(tmp_path / name) for name in ("run.html", "other.json"))
    for given in ({"watched": saved}, {"watched": other, "beside": str(saved)}):
        before = saved.read_bytes()
        with pytest.raises(ValueError, match="report: a path of the page alone is required"):
            ht.report(**given, path=tmp_path / ".." / tmp_path.name / "run.html")
        assert saved.read_bytes() == before
