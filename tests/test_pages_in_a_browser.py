"""Pages and what notebooks show, opened in a browser: of markup in a recording or a model nothing runs."""

import dataclasses
import html
import json
import re
import sys

import pytest
import torch
from browser import LINK, SCRIPTS, needs_browser, opened
from pages import recording, trained
from torch import nn

import hybridtensor as ht
from hybridtensor.inference.mismatch import LayerMismatch, Mismatch
from hybridtensor.untrusted.verifying import Verified

pytestmark = needs_browser


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return recordings in which layers stand out, with experts and with layers that were not measured, as JSON."""
    path = tmp_path_factory.mktemp("runs") / "run.json"
    found = []
    for run in (recording().recording(), trained("fp8", outlier=1e6).recording()):
        found.append(json.loads(run.save(path).read_text()))
        for sample in found[-1]["samples"]:
            sample["unseen"] = [["0.up_proj", "a reason"]]
            sample["products"][0]["experts"] = [[0, 0.5], [1, 0.9]]
            sample["faces"][0]["experts"] = [[0, 0.5]]
            sample["faces"][1]["statistics"]["nonfinite"] = 1.0
    return found


NAMES = ("layer", "operand", "product", "format")


def replaced(found, put, only):
    """Put markup into the strings of a recording; ``only`` are the fields that get it."""
    if isinstance(found, str):
        return put(found)
    if isinstance(found, list):
        return [replaced(one, put, only) for one in found]
    if not isinstance(found, dict):
        return found
    return {
        (put(key) if key not in KEYS else key): value
        if (key in NAMES and key not in only) or key == "statistics"
        else replaced(value, put, only)
        for key, value in found.items()
    }


KEYS = {"version", "every", "recipes", "machine", "losses", "samples", "step", "faces", "products", "order", "unseen",
        "layer", "operand", "product", "format", "formats", "statistics", "experts"}  # fmt: skip


def kinds(scripts):
    """Yield ways to put markup into strings: into all, and into those of which findings and remedies depend, not."""
    yield lambda text: f"{text}{scripts}", NAMES
    yield lambda text: f"{scripts}{text}", ("layer",)
    yield lambda text: LINK, ("layer",)


def pages(runs, folder, scripts=SCRIPTS):
    """Yield every kind of page of recordings with markup in all their strings."""
    for number, (put, only) in enumerate(kinds(scripts)):
        paths = []
        for run, name in zip(runs, ("a", "b"), strict=True):
            path = folder / f"{name}{number} {scripts.replace('/', '')[:80]}.json"
            path.write_text(json.dumps(replaced(run, put, only)))
            paths.append(path)
        for other in (paths[1], None)[: 1 if number else 2]:  # on the page of two all is that is on that of one
            yield ht.report(paths[0], folder / "page.html", beside=other).read_text()


def test_no_script_of_a_recording_runs(runs, tmp_path):
    shown = 0
    for page in pages(runs, tmp_path):
        found = opened(page, tmp_path)
        assert found.ran == ()
        assert found.complaints == ()
        links = re.findall(r"<a [^>]*>", found.page)
        assert links
        assert all(re.fullmatch(r"""<a href="#[\w-]+">""", link) for link in links)
        shown += html.escape(SCRIPTS[:60], quote=False) in found.page
    assert shown == 4  # the name of a file, at least, where all others are addresses


@pytest.mark.parametrize("what", ["text", "numbers"])
def test_scripts_of_a_recording_would_run_if_they_were_not_escaped(what, runs, tmp_path, monkeypatch):
    """What shows that the test above can fail: the page with its text, or its numbers, not escaped."""
    if what == "text":
        for name in ("markup", "report", "beside", "findings"):
            monkeypatch.setattr(sys.modules[f"hybridtensor.watching.{name}"], "escape", str)
    else:
        module = sys.modules["hybridtensor.watching.report"]
        plain = module._data
        monkeypatch.setattr(module, "_data", lambda runs: plain(runs).replace("\\u003c", "<"))
    scripts = "</script><script>ran(8)</script><img src=x onerror=ran(6)><svg onload=ran(7)></svg>"  # frames take time
    found = opened(next(pages(runs, tmp_path, scripts)), tmp_path)
    assert found.ran == (6, 7, 8)


def of_a_model(scripts):
    """Return every result that notebooks show, of a model whose layers have markup in their names."""
    torch.manual_seed(0)
    name = scripts.replace(".", "")
    model = nn.Sequential()
    for end in ("a", "b"):
        model.add_module(f"{name}{end}", nn.Linear(64, 64))
    model.add_module(f"{name}c", nn.Linear(64, 3))  # left alone
    x = torch.randn(64, 64)
    advice = ht.advise(
        model, [x], hardware="h100", loss=lambda model, x: model(x).square().mean(), formats=["bf16", "fp8"]
    )
    ht.quantize_(model[:2], "fp8")
    with ht.watch(model) as watched:
        model(x).sum().backward()
        watched.step()
    sample = watched.recording().samples[0]
    rows = tuple(dataclasses.replace(one, operand=name, format=name) for one in sample.faces)
    return {
        "explain": ht.explain(model),
        "check": ht.check(model, x),
        "advise": advice,
        "watch": watched,
        "a recording": dataclasses.replace(watched.recording(), samples=(sample._replace(faces=rows),)),
        "verify": Verified({2: [f"{name}: not what was written"], 1: []}),
        "mismatch": Mismatch((LayerMismatch(*(name,) * 3, 0, 0.0, 0.0),), 0.0, 0.0, 0.0, (1.0, 1.0), 1.0),
    }


def test_no_script_of_a_model_runs_in_a_notebook(tmp_path):
    made = {name: found._repr_html_() for name, found in of_a_model(SCRIPTS).items()}
    found = opened(f"<!doctype html><head></head><body>{''.join(made.values())}</body>", tmp_path)
    assert found.ran == ()
    assert found.complaints == ()
    for name, text in made.items():
        assert not re.findall("<(?!/?(?:pre|span)\\b)[^>]*>", text), name
        told = re.sub(r"\s|<[^>]*>", "", text)
        assert "[bold]d[/bold]" in html.unescape(told), name


def test_a_notebook_would_run_scripts_if_they_were_not_escaped(tmp_path):
    text = html.unescape(ht.explain(nn.Sequential(nn.ModuleDict({SCRIPTS: nn.Linear(64, 64)})))._repr_html_())
    assert opened(f"<!doctype html><head></head><body>{text}</body>", tmp_path).ran
