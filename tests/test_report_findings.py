"""What a page begins with: findings in words, their thresholds, the rows that they link to."""

import dataclasses
import html
import json
import math
import re

import pytest
import torch
from pages import MARKUP, Page, recording, strings, trained, with_markup
from torch import nn

import hybridtensor as ht
from hybridtensor.formats import REGISTRY
from hybridtensor.testing import decode_oracle, float8_oracle, mx_oracle, random_tensor
from hybridtensor.watching import Recording
from hybridtensor.watching.expected import expected, expected_of_face, expected_of_product
from hybridtensor.watching.judging import judged
from hybridtensor.watching.remedies import remedy

ONE_BIT = 6.0206  # dB: twice the distance of elements


def text_of(page):
    """Return the findings of a page as text, and the anchors that they link to."""
    part = page.read_text().split('<section id="findings">')[1].split("</section>")[0]
    return html.unescape(re.sub(r"<[^>]+>", "", part)), re.findall(r"href='#([\w-]+)'", part)


def with_faces(run, change):
    """Return a recording of one sample whose faces are changed."""
    sample = run.samples[-1]
    faces = tuple(dataclasses.replace(one, statistics=change(i, one)) for i, one in enumerate(sample.faces))
    return dataclasses.replace(run, samples=(sample._replace(faces=faces),))


@pytest.fixture(scope="module")
def outlier():
    """A layer of which one row of the weight is so large that fp8 holds nothing else."""
    return trained("fp8", outlier=1e6).recording()


# -- thresholds


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_expected_noise_is_that_of_other_codecs(element):
    """Oracle: ml_dtypes on other random numbers."""
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(7))
    rows = float8_oracle(x, dtype=element, granularity="row")
    codes, exponents = mx_oracle(x, dtype=element)
    blocks = codes, decode_oracle(exponents, "e8m0")
    for name, (qdata, scale) in {f"fp8_{element}_row": rows, f"mxfp8_{element}": blocks}.items():
        scale = torch.from_numpy(scale).double().reshape(256, -1)
        values = torch.from_numpy(decode_oracle(qdata, element)) * scale.repeat_interleave(64 // scale.shape[1], dim=1)
        sqnr = 10 * math.log10(x.double().square().sum() / (x.double() - values).square().sum())
        assert expected(name).sqnr == pytest.approx(sqnr, abs=0.3)


def test_the_choice_of_scales_is_expected_to_have_less_noise():
    plain, chosen = (expected("nvfp4_max256", rule=rule).sqnr for rule in ("", "mse"))
    assert chosen > plain + 0.5
    assert expected_of_face("nvfp4+four_over_six", "weight.rowwise", "nvfp4_max256").sqnr > plain + 0.3
    assert expected_of_face("bf16", "weight.rowwise", "nvfp4_max256").sqnr == plain


def test_every_format_has_an_expectation():
    own = {name: fmt for name, fmt in REGISTRY.items() if fmt.has_kernels}  # other tests register more
    assert len(own) > 15
    for name, fmt in own.items():
        known = expected(name)
        if fmt.is_identity:
            assert known == (math.inf, math.inf)
            continue
        # the noise of values that are spread evenly over a binade: 12 * 2^(2 m) * 1.5 / ln 2; E2M1 has 3 binades only,
        # of which normal values in a large block under a power of two are in the lowest, whose steps are equal
        theory = 10 * math.log10(12 * 4**fmt.mantissa_bits * 1.5 / math.log(2))
        assert known.sqnr == pytest.approx(
            theory, abs=1 if fmt.mantissa_bits > 1 else 4 if name == "mxfp4_32x32" else 2
        ), name
        assert known.sqnr - 5 < known.row_sqnr < known.sqnr, name
        assert expected(f"{name}, dequantized") == known
    assert expected("no format") is None


def test_stochastic_rounding_has_twice_the_noise():
    nearest = expected_of_face("nvfp4+nearest", "grad_output.rowwise", "nvfp4").sqnr
    assert expected_of_face("nvfp4", "grad_output.rowwise", "nvfp4").sqnr == pytest.approx(nearest - 3, abs=0.3)
    assert expected_of_face("nvfp4", "input.rowwise", "nvfp4").sqnr == nearest
    assert expected_of_face("no recipe", "grad_output.rowwise", "nvfp4").sqnr == nearest


def test_rounding_through_scales_has_the_noise_of_nearest():
    nearest = expected("nvfp4").sqnr
    for recipe in ("nvfp4+eden", "no recipe"):
        known = expected_of_face(recipe, "grad_output.rowwise", "nvfp4_eden").sqnr
        assert known == pytest.approx(nearest, abs=0.4)


def test_noise_of_operands_adds_up():
    a, b = (expected(name).sqnr for name in ("fp8_e5m2_tensor", "fp8_e4m3_tensor"))
    got = expected_of_product("fp8", "grad_input", ("fp8_e5m2_tensor", "fp8_e4m3_tensor"))
    assert 10 ** (-got / 10) == pytest.approx(10 ** (-a / 10) + 10 ** (-b / 10))
    assert expected_of_product("fp8/bf16/bf16", "output", ("fp8_e4m3_tensor", "identity")) == pytest.approx(b)
    assert expected_of_product("fp8", "output", ("fp8_e4m3_tensor", "unknown")) is None
    assert expected_of_product("fp8", "no product", ("fp8_e4m3_tensor",) * 2) is None


@pytest.mark.parametrize("spec", ["fp8", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4"])
def test_layers_without_outliers_come_near_what_is_expected(spec):
    """So that a threshold of one bit neither misses nor invents."""
    for one in judged(trained(spec).recording()):
        assert one.sqnr == pytest.approx(one.expected, abs=3), one
        assert one.margin > 4
        if one.is_face:
            assert one.row_sqnr < one.sqnr
            assert one.row_margin > 1


# -- findings


def test_nothing_stands_out_and_by_what_margin(tmp_path):
    run = trained("fp8_rowwise").recording()
    told, links = text_of(ht.report(run, tmp_path / "page.html"))
    nearest = min(judged(run), key=lambda one: min(one.margin, one.row_margin if one.is_face else math.inf))
    assert f"Nothing stands out. The nearest to its threshold is {nearest.row.layer} {nearest.row.name}: " in told
    assert f"{nearest.sqnr:.1f} dB, {nearest.margin:.1f} dB above {nearest.threshold:.1f} dB" in told
    assert f"its noisiest row {nearest.row_margin:.1f} dB above" in told
    assert "normally distributed values" in told
    assert "6.0 dB, one bit of mantissa" in told
    assert links == [nearest.anchor]
    assert f"<tr id={links[0]}>" in (tmp_path / "page.html").read_text()


def test_an_outlier_that_vanishes_in_the_mean_is_found(outlier, tmp_path):
    weight = next(r for r in outlier.samples[-1].faces if (r.layer, r.operand) == ("1.up_proj", "weight.rowwise"))
    assert weight.statistics["sqnr"] > 30  # looks well
    assert weight.statistics["row_sqnr"] == 0  # rows of zeros
    told, links = text_of(ht.report(outlier, tmp_path / "page.html"))
    threshold = expected("fp8_e4m3_tensor").row_sqnr - ONE_BIT
    assert (
        f"1.up_proj weight.rowwise (fp8_e4m3_tensor): {weight.statistics['sqnr']:.1f} dB overall hide a row of "
        f"0.0 dB, {threshold:.1f} dB below the threshold of {threshold:.1f} dB" in told
    )
    assert f"{weight.statistics['underflows%']:.3g} % of its values became zero" in told
    assert "1.up_proj grad_input (fp8_e5m2_tensor x fp8_e4m3_tensor): 0.0 dB, " in told
    assert "in 3 of 3 sampled steps" in told
    assert "0.up_proj" not in told
    page = (tmp_path / "page.html").read_text()
    rows = dict(re.findall(r"<tr id=([\w-]+)>(.*?)</tr>", page))
    assert len(links) == len(set(links)) >= 2
    for one in judged(outlier):
        if one.anchor in links:
            assert f"<td>{one.row.layer}</td><td>{one.row.name}</td>" in rows[one.anchor]


def test_what_to_try_is_a_recipe_that_mends_it(outlier):
    """The first recipe of each finding, tried in its layer."""
    found = [one for one in judged(outlier) if one.margin < 0 or one.row_margin < 0]
    weight = next(one for one in found if one.row.name == "weight.rowwise")
    told = remedy(weight, "fp8")
    assert "keep_bf16=['1.up_proj']" in told
    specs = re.findall(r"the recipe (\S+) for", told)
    assert specs == ["fp8_rowwise/fp8/fp8", "mxfp8/fp8/fp8"]
    for spec in specs:
        again = judged(trained(spec, outlier=1e6).recording())
        mended = next(o for o in again if (o.row.layer, o.row.name) == ("1.up_proj", "weight.rowwise"))
        assert mended.row_margin > 0
    trained("fp8", keep_bf16=["1.up_proj"])  # such a name is taken


def test_remedies_by_format():
    faces = {(one.row.layer, one.row.name): one for one in judged(recording().recording())}
    nvfp4 = faces["0.down_proj", "grad_output.columnwise"]
    assert "the recipe nvfp4/nvfp4/mxfp8 for this layer (mxfp8 for grad_weight" in remedy(nvfp4, "nvfp4")
    rowwise = faces["1.up_proj", "weight.rowwise"]
    assert "the recipe mxfp8/fp8_rowwise/fp8_rowwise for" in remedy(rowwise, "fp8_rowwise")
    assert remedy(rowwise, "no recipe") == "keep_bf16=['1.up_proj']"
    block = rowwise._replace(rows=[dataclasses.replace(rowwise.row, format="mxfp8_e4m3")])
    assert "the recipe bf16/mxfp8/mxfp8 for" in remedy(block, "mxfp8")
    numbers = rowwise.row.statistics | {"overflows%": 3.0}
    late = rowwise._replace(rows=[dataclasses.replace(rowwise.row, format="fp8_e4m3_tensor", statistics=numbers)])
    assert "the recipe fp8/fp8_delayed/fp8_delayed for" in remedy(late, "fp8_delayed")
    root = rowwise._replace(rows=[dataclasses.replace(rowwise.row, layer="<root>")])
    assert "keep_bf16" not in remedy(root, "fp8")
    assert remedy(root, "no recipe") == "bf16 for this product"


def test_what_is_not_finite_comes_first(outlier, tmp_path):
    bad = with_faces(outlier, lambda i, one: one.statistics | ({"nonfinite": 1.0, "sqnr": math.nan} if i == 5 else {}))
    face = bad.samples[-1].faces[5]
    told, _ = text_of(ht.report(bad, tmp_path / "page.html"))
    assert told.startswith(f"Findings{face.layer} {face.operand} ({face.format}): not finite in step {face.step}")
    assert "Try a look at the step before" in told
    assert "NaN and Inf come from the values, whatever the format" in told


@pytest.mark.parametrize(
    "numbers", [{"nonfinite": 1.0, "sqnr": math.nan}, {"nonfinite": 1.0}], ids=["measured", "elsewhere"]
)
def test_what_was_not_finite_in_an_earlier_step_is_not_blamed_on_its_format(numbers, tmp_path):
    run = trained("fp8_rowwise").recording()
    first = run.samples[0]
    face = first.faces[0]
    faces = dataclasses.replace(face, statistics=face.statistics | numbers), *first.faces[1:]
    run = dataclasses.replace(run, samples=(first._replace(faces=faces), *run.samples[1:]))
    told, _ = text_of(ht.report(run, tmp_path / "page.html"))
    found = f"{face.layer} {face.operand} (fp8_e4m3_row): not finite in step 0, in 1 of 3 sampled steps; no longer in"
    assert found in told
    assert "NaN and Inf come from the values, whatever the format" in told
    assert "keep_bf16" not in told
    assert "not finite dB" not in told


def test_what_was_below_in_an_earlier_step_is_told(tmp_path):
    run = trained("fp8_rowwise").recording()
    first = run.samples[0]
    faces = (
        dataclasses.replace(first.faces[0], statistics=first.faces[0].statistics | {"sqnr": 3.0}),
        *first.faces[1:],
    )
    run = dataclasses.replace(run, samples=(first._replace(faces=faces), *run.samples[1:]))
    told, _ = text_of(ht.report(run, tmp_path / "page.html"))
    assert f"{faces[0].layer} {faces[0].operand} (fp8_e4m3_row): 3.0 dB in step 0, below the threshold" in told
    assert "in 1 of 3 sampled steps; no longer in the last one" in told


def test_formats_that_are_not_known_are_compared_with_the_median(tmp_path):
    run = trained("fp8_rowwise").recording()
    sample = run.samples[-1]
    faces = [dataclasses.replace(one, format="theirs") for one in sample.faces]
    faces[2] = dataclasses.replace(faces[2], statistics=faces[2].statistics | {"sqnr": 12.0})
    products = [dataclasses.replace(one, formats=("theirs", "theirs")) for one in sample.products[:2]]
    run = dataclasses.replace(run, samples=(sample._replace(faces=tuple(faces), products=tuple(products)),))
    told, _ = text_of(ht.report(run, tmp_path / "page.html"))
    middle = sorted(one.statistics["sqnr"] for one in faces)
    median = (middle[(len(middle) - 1) // 2] + middle[len(middle) // 2]) / 2
    assert f"{faces[2].layer} {faces[2].operand} (theirs): 12.0 dB, {median - ONE_BIT - 12:.1f} dB below" in told
    assert f"the median of {len(faces)} in this recording" in told
    assert "Of formats that are not known here the median of the same recording is taken" in told
    assert "2 faces or products have no threshold" in told


def test_many_findings_are_cut(tmp_path):
    run = trained("fp8_rowwise").recording()
    bad = with_faces(run, lambda i, one: one.statistics | {"sqnr": float(i)})
    bad = dataclasses.replace(bad, samples=(bad.samples[0]._replace(products=()),))
    told, links = text_of(ht.report(bad, tmp_path / "page.html"))
    assert len(links) == 12
    count = len([face for i, face in enumerate(bad.samples[0].faces) if i < expected("fp8_e4m3_row").sqnr - ONE_BIT])
    assert f"And {count - 12} more, which the tables have" in told
    assert links[0] == "face-0"  # the farthest below


def test_nothing_to_compare_with(tmp_path):
    run = trained("fp8").recording()
    run = dataclasses.replace(run, samples=(run.samples[0]._replace(faces=(), products=()),))
    assert "there is nothing to compare with" in text_of(ht.report(run, tmp_path / "page.html"))[0]


# -- rows


def test_the_noisiest_row_is_that_of_the_values():
    """Oracle: the rows of the weight that the layer holds, in float64."""
    model = ht.quantize_(nn.Linear(64, 32, bias=False), "fp8")
    with torch.no_grad():
        model.weight[5] *= 2.0**-17  # its values are subnormal beside the others
        model.weight[6] = 0
    with ht.watch(model, every=1, rows=128) as watched:
        model(random_tensor(4, 64, dtype=torch.float32)).sum().backward()
        watched.step()
    weight = model.weight.detach().dequantize(torch.float64)
    quantized = ht.Float8Quantizer().quantize(weight.float(), columnwise=False).dequantize(torch.float64)
    found = [
        10 * math.log10(x.square().sum() / (x - q).square().sum())
        for x, q in zip(weight, quantized, strict=True)
        if x.any()
    ]
    row = next(one for one in watched.samples[0].faces if one.operand == "weight.rowwise")
    assert row.statistics["row_sqnr"] == pytest.approx(min(found), abs=1e-3)
    assert min(found) == found[5] < 20 < row.statistics["sqnr"]


def without_rows(found):
    for sample in found["samples"]:
        for face in sample["faces"]:
            del face["statistics"]["row_sqnr"]


def test_recordings_of_earlier_versions_load_and_say_what_they_lack(outlier, tmp_path):
    saved = outlier.save(tmp_path / "run.json")
    found = json.loads(saved.read_text())
    without_rows(found)
    saved.write_text(json.dumps(found))
    run = Recording.load(saved)
    assert "row_sqnr" not in run.samples[0].faces[0].statistics
    assert json.loads(run.save(tmp_path / "again.json").read_text()) == found
    told, _ = text_of(ht.report(saved, tmp_path / "page.html"))
    assert "This recording has no SQNR per row" in told
    assert "The tables have each face's worst step instead" in told
    assert "grad_input" in told
    assert "not recorded" in (tmp_path / "page.html").read_text()
    ht.report(saved, tmp_path / "page.html", beside=outlier)
    other, _ = text_of(ht.report(outlier, tmp_path / "page.html"))
    assert "no SQNR per row" not in other


def test_markup_in_findings_is_text(outlier, tmp_path):
    """Where layers stand out. Oracle: the tags and attributes of the page without markup."""
    saved, page = outlier.save(tmp_path / "run.json"), tmp_path / "page.html"
    found = json.loads(saved.read_text())
    found["samples"] = found["samples"][-1:]
    names = {"layer", "operand", "product", "format", "formats", "recipes"}
    saved.write_text(json.dumps(found))
    allowed = {(tag, *attributes) for tag, attributes in Page(ht.report(saved, page)).tags}
    # a finding of a layer of that name in each of its rows
    renamed = json.loads(json.dumps(found).replace("1.up_proj", "NAME"))
    renamed = json.loads(json.dumps(renamed).replace("NAME", MARKUP.replace('"', '\\"')))
    # a format that is not known here, of which one face stands out
    of_theirs = json.loads(json.dumps(found).replace('"fp8_e4m3_tensor"', json.dumps(MARKUP)))
    made = [renamed, of_theirs, *(with_markup(found, *one) for one in strings(found) if names & set(one[0]))]
    shown = 0
    for one in made:
        saved.write_text(json.dumps(one))
        try:
            told = Page(ht.report(saved, page))
        except ValueError:
            continue
        shown += 1
        assert not told.open
        assert {(tag, *attributes) for tag, attributes in told.tags} <= allowed
        assert all(re.fullmatch(r"[\w-]+", to.get("id", "x")) for tag, to in told.tags if tag == "tr")
    assert shown > 10
    for one in (renamed, of_theirs):
        saved.write_text(json.dumps(one))
        assert MARKUP in text_of(ht.report(saved, page))[0]
