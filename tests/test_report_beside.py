"""Two recordings on one page: the same rows, both figures, what got worse, and what only one has."""

import dataclasses
import html
import json
import math
import re

import pytest
from pages import MARKUP, Page, recording, strings, trained, with_markup

import hybridtensor as ht
from hybridtensor.watching import Recording
from hybridtensor.watching.beside import compare


def part_of(page):
    """Return the part of a page that compares, as markup and as text."""
    part = page.read_text().split("<h2>Side by side: ")[1].split("</section>")[0]
    return part, re.sub(r"<[^>]+>", "", part)


def rows_of(part):
    return {
        tuple(cells[:2]): cells[2:]
        for cells in (re.findall(r"<td.*?>(.*?)</td>", row) for row in part.split("<tr")[2:])
    }


@pytest.fixture(scope="module")
def runs():
    return trained("fp8").recording(), trained("fp8_rowwise", layers=3).recording()


def mean(run, layer, name):
    numbers = [
        row.statistics["sqnr"]
        for sample in run.samples
        for row in (*sample.faces, *sample.products)
        if (row.layer, getattr(row, "operand", getattr(row, "product", ""))) == (layer, name)
    ]
    return sum(numbers) / len(numbers)


def test_rows_have_both_figures_and_their_difference(runs, tmp_path):
    part, told = part_of(ht.report(runs[0], tmp_path / "page.html", beside=runs[1]))
    rows = rows_of(part)
    for layer, name in (("0.up_proj", "weight.rowwise"), ("1.down_proj", "grad_weight")):
        a, b = (mean(run, layer, name) for run in runs)
        assert rows[layer, name][2:] == [f"{a:.1f}", f"{b:.1f}", f"{a - b:+.1f}"]
    assert rows["0.up_proj", "input.rowwise"][:2] == ["fp8_e4m3_tensor", "fp8_e4m3_row"]
    assert rows["2.up_proj", "weight.rowwise"][2] == "not measured"
    assert rows["2.up_proj", "weight.rowwise"][4] == ""
    assert {layer for layer, _ in rows} == {f"{i}.{name}_proj" for i in range(3) for name in ("up", "down")}
    assert "Only in the other: 2.up_proj, 2.down_proj" in told
    assert "Only in this one" not in told
    assert "Recipe fp8 in this one, fp8_rowwise in the other: 0.up_proj, 0.down_proj, 1.up_proj" in told
    a, b = (dict(run.losses)[4] for run in runs)
    assert f"Loss in step 4: {a:.6g} in this one, {b:.6g} in the other, difference {a - b:+.3g}" in told


def test_what_got_worse_or_better(runs, tmp_path):
    part, told = part_of(ht.report(runs[0], tmp_path / "page.html", beside=runs[1]))
    layer, name = "0.down_proj", "grad_output.rowwise"  # E5M2, and E4M3
    a, b = (mean(run, layer, name) for run in runs)
    assert b - a > 5
    assert f"{layer} {name}: {b - a:.1f} dB worse in this one ({a:.1f} dB) than in the other ({b:.1f} dB)" in told
    assert "threshold 3.0 dB. Formats: fp8_e5m2_tensor, and fp8_e4m3_row." in told
    assert "0.down_proj weight.rowwise: " not in told  # both E4M3
    items = re.findall(r"<li><a href='#([\w-]+)'>(.*?)</a>", part)
    assert items
    for anchor, where in items:
        layer, name = where.split()
        assert f"<tr id={anchor}><td>{layer}</td><td>{name}</td>" in part
    _, told = part_of(ht.report(runs[1], tmp_path / "page.html", beside=runs[0]))
    assert f"{b - a:.1f} dB better in this one ({b:.1f} dB) than in the other ({a:.1f} dB)" in told
    assert "Only in this one: 2.up_proj, 2.down_proj" in told


def test_a_recording_beside_itself(runs, tmp_path):
    part, told = part_of(ht.report(runs[0], tmp_path / "page.html", beside=runs[0]))
    assert "Nothing got worse or better: the largest difference is 0.0 dB" in told
    assert "where 3.0 dB would count" in told
    assert "Recipe" not in told
    assert "Only in" not in told
    assert {row[-1] for row in rows_of(part).values()} == {"+0.0"}


def test_scatter_raises_the_threshold(runs):
    """Oracle: the formula, of figures that are written here."""
    one = runs[0]

    def scattered(by):
        samples = []
        for i, sample in enumerate(one.samples[:2]):
            face = sample.faces[0]
            samples.append(
                sample._replace(
                    faces=(dataclasses.replace(face, statistics=face.statistics | {"sqnr": 30.0 + by * i}),),
                    products=(),
                )
            )
        return dataclasses.replace(one, samples=tuple(samples))

    found = compare(scattered(8.0), scattered(2.0), ("a", "b"))
    assert found.scatter == pytest.approx(math.sqrt((32 + 2) / 2))
    (pair,) = found.pairs
    assert pair.difference == pytest.approx(3.0)
    assert found.threshold(pair) == pytest.approx(3 * found.scatter * math.sqrt(1 / 2 + 1 / 2))
    assert compare(scattered(0.0), scattered(0.0), ("a", "b")).threshold(pair) == pytest.approx(3.0103)


def test_steps_that_both_have_are_compared(runs, tmp_path):
    first = runs[0]
    second = dataclasses.replace(first, samples=first.samples[1:])
    assert compare(first, second, ("a", "b")).steps == (2, 2)
    later = tuple(sample._replace(step=sample.step + 100) for sample in first.samples[:2])
    page = ht.report(first, tmp_path / "page.html", beside=dataclasses.replace(first, samples=later))
    assert "all sampled steps, 3 and 2, as none has the same number" in part_of(page)[1]
    once = [dataclasses.replace(first, samples=first.samples[:1])] * 2
    page = ht.report(once[0], tmp_path / "page.html", beside=once[1])
    assert "is not known: each has been measured once" in part_of(page)[1]


def test_no_layer_in_common(runs, tmp_path):
    text = json.dumps(json.loads(runs[0].save(tmp_path / "a.json").read_text())).replace("_proj", "_other")
    (tmp_path / "b.json").write_text(text)
    _, told = part_of(ht.report(runs[0], tmp_path / "page.html", beside=tmp_path / "b.json"))
    assert "No layer has figures in both recordings." in told
    assert "Only in this one: 0.up_proj" in told
    assert "Only in b.json: 0.up_other" in told


@pytest.mark.parametrize("numbers", [(math.nan, 30.0), (math.inf, 30.0), (math.inf, -math.inf), (1e308, -1e308)])
def test_figures_that_are_no_numbers(numbers, runs, tmp_path):
    def with_number(number):
        sample = runs[0].samples[0]
        face = dataclasses.replace(sample.faces[0], statistics=sample.faces[0].statistics | {"sqnr": number})
        again = dataclasses.replace(face, statistics=face.statistics | {"sqnr": -number})
        samples = (sample._replace(faces=(face,)), sample._replace(faces=(again,), step=1))
        return dataclasses.replace(runs[0], samples=samples[: 1 if math.isnan(numbers[0]) else 2])

    one, other = (with_number(number) for number in numbers)
    _, told = part_of(ht.report(one, tmp_path / "page.html", beside=other))
    if math.isnan(numbers[0]):
        assert "not finite in this one; not finite in this one, 30.0 dB in the other." in told


def test_names_are_those_of_the_files(runs, tmp_path):
    a, b = (run.save(tmp_path / f"{name}.json") for name, run in zip("ab", runs, strict=True))
    _, told = part_of(ht.report(a, tmp_path / "page.html", beside=str(b)))
    assert told.startswith("a.json and b.json")
    (tmp_path / "more").mkdir()
    same = runs[1].save(tmp_path / "more" / "a.json")
    _, told = part_of(ht.report(a, tmp_path / "page.html", beside=same))
    assert told.startswith(f"{a} and {same}")
    _, told = part_of(ht.report(a, tmp_path / "page.html", beside=a))
    assert told.startswith("this one and the other")


def test_a_page_of_one_recording_compares_nothing(runs, tmp_path):
    assert "Side by side" not in ht.report(runs[0], tmp_path / "page.html").read_text()


BROKEN = {
    "no JSON": lambda found: "{",
    "another file": lambda found: json.dumps({"a": 1}),
    "no text": lambda found: "\x00",
    "an infinite step": lambda found: json.dumps(found).replace('"step": 0', '"step": Infinity'),
    "a number that no float holds": lambda found: re.sub(r'"mse": [^,]+', f'"mse": 1{"0" * 400}', json.dumps(found)),
    "three operands": lambda found: json.dumps(found).replace('"formats": [', '"formats": ["fp8_e4m3_row", '),
    "one operand": lambda found: re.sub(r'"formats": \["\w+", ', '"formats": [', json.dumps(found)),
    "no samples": lambda found: json.dumps({**found, "samples": []}),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_recording_is_an_error_that_names_its_file(what, runs, tmp_path):
    saved = runs[1].save(tmp_path / "broken.json")
    saved.write_text(BROKEN[what](json.loads(saved.read_text())))
    for arguments in ((runs[0], saved), (saved, runs[0])):
        with pytest.raises(ValueError, match=r"broken\.json"):
            ht.report(arguments[0], tmp_path / "page.html", beside=arguments[1])
    assert not (tmp_path / "page.html").exists()


def test_other_arguments_are_refused(runs, tmp_path):
    with pytest.raises(TypeError, match="what watch returned, a Recording or its file"):
        ht.report(runs[0], tmp_path / "page.html", beside=3)
    with pytest.raises(ValueError, match=r"none\.json"):
        ht.report(runs[0], tmp_path / "page.html", beside=tmp_path / "none.json")


def test_markup_in_either_recording_is_text(runs, tmp_path):
    """Both may be someone else's. Oracle: the tags and attributes of pages without markup."""
    paths = [run.save(tmp_path / f"{name}.json") for name, run in zip("ab", runs, strict=True)]
    found = [json.loads(path.read_text()) for path in paths]
    page = tmp_path / "page.html"
    allowed = set()
    mixed = recording().recording()
    for first, second in ((*runs,), (runs[1], runs[0]), (runs[0], runs[0]), (mixed, runs[0])):
        allowed |= {(tag, *attributes) for tag, attributes in Page(ht.report(first, page, beside=second)).tags}
    shown = 0
    for which in (0, 1):
        for path, is_key in strings(found[which]):
            paths[which].write_text(json.dumps(with_markup(found[which], path, is_key)))
            try:
                made = Page(ht.report(paths[0], page, beside=paths[1]))
            except ValueError:
                continue
            shown += 1
            assert not made.open, path
            assert {(tag, *attributes) for tag, attributes in made.tags} <= allowed, path
            assert sum(tag == "script" for tag, _ in made.tags) == 2, path
            assert all(re.fullmatch(r"[\w-]+", to.get("id", "x")) for tag, to in made.tags if tag == "tr"), path
        paths[which].write_text(json.dumps(found[which]))
    assert shown > 50


def test_markup_in_the_name_of_a_layer_that_got_worse_is_text(runs, tmp_path):
    paths = [run.save(tmp_path / f"{name}.json") for name, run in zip("ab", runs, strict=True)]
    page = tmp_path / "page.html"
    allowed = {(tag, *attributes) for tag, attributes in Page(ht.report(*paths[:1], page, beside=paths[1])).tags}
    for path in paths:
        path.write_text(path.read_text().replace("1.up_proj", json.dumps(MARKUP)[1:-1]))
    made = Page(ht.report(paths[0], page, beside=paths[1]))
    assert not made.open
    assert {(tag, *attributes) for tag, attributes in made.tags} <= allowed
    assert f"{MARKUP} grad_output.rowwise" in html.unescape(part_of(page)[1])


def test_markup_in_the_name_of_a_file_is_text(runs, tmp_path):
    name = MARKUP.replace("/", "") + ".json"
    saved = runs[1].save(tmp_path / name)
    made = Page(ht.report(runs[0], tmp_path / "page.html", beside=saved))
    assert not made.open
    assert name in "".join(made.texts)
    assert sum(tag == "script" for tag, _ in made.tags) == 2
    assert Recording.load(saved).every == 2
