"""Results are printed as tables: by ``print``, at a prompt, and in notebooks."""

import dataclasses

import pytest
import torch
from processes import call_program
from torch import nn

import hybridtensor as ht


def explained(net, x):
    return ht.explain(net)


def checked(net, x):
    return ht.check(net, x)


def watched(net, x):
    with ht.watch(net) as watching:
        pass
    return watching.recording()


def watching(net, x):
    with ht.watch(net) as watched:
        net(x).sum().backward()
        watched.step()
    return watched


def compared(net, x):
    return ht.mismatch(net, x)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (explained, "layer"),
        (checked, "product"),
        (watched, "Nothing was measured yet"),
        (watching, "noisiest"),
        (compared, "training"),
    ],
)
def test_results_are_tables(make, says, capsys):
    net = ht.quantize_(nn.Sequential(nn.Linear(128, 128)), "fp8_block")
    found = make(net, torch.randn(128, 128))
    assert not capsys.readouterr().out
    print(found)
    printed = capsys.readouterr().out.rstrip("\n")
    assert printed == str(found) == repr(found)
    assert says in printed
    assert len(printed.splitlines()) < 40
    html = found._repr_html_()
    assert html.startswith("<pre")
    assert says.split()[0] in html


def test_as_wide_as_the_terminal(monkeypatch):
    found = ht.explain(ht.quantize_(nn.Sequential(nn.Linear(128, 128)), "fp8"))
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, str(found).splitlines())) <= 60


def test_rich_is_imported_when_something_is_printed():
    code = (
        "import sys, torch, hybridtensor as ht\n"
        "found = ht.explain(ht.quantize_(torch.nn.Sequential(torch.nn.Linear(8, 8)), 'fp8'))\n"
        "assert 'rich' not in sys.modules\nstr(found)\nassert 'rich' in sys.modules"
    )
    call_program(code)


def test_markup_and_commands_to_terminals_are_shown_as_they_are(monkeypatch):
    """What names say is someone else's: rich makes links of markup, terminals obey what begins with an escape."""
    names = "[link=javascript:x]a[/link]", "[/bold]", "\x1b[2Jb\x07\x9b"
    model = nn.Sequential()
    for name in names:
        model.add_module(name, nn.Linear(128, 128))
    x = torch.randn(128, 128)
    advice = ht.advise(
        model, [x], hardware="h100", loss=lambda model, x: model(x).square().mean(), formats=["bf16", "fp8"]
    )
    ht.quantize_(model, "fp8_block")
    monkeypatch.setenv("COLUMNS", "300")
    for found in (advice, *(make(model, x) for make in (explained, checked, watching))):
        shown = str(found)
        assert "[link=javascript:x]a[/link]" in shown
        assert "[/bold]" in shown
        assert "\\x1b[2Jb\\x07\\x9b" in shown
        assert not set(shown) & set("\x1b\x07\x9b")
        assert "href" not in found._repr_html_()


def test_half_of_a_surrogate_pair_is_shown():
    """JSON may have one, and no terminal takes it."""
    found = watching(ht.quantize_(nn.Sequential(nn.Linear(128, 128)), "fp8"), torch.randn(128, 128)).recording()
    sample = found.samples[0]
    sample = sample._replace(faces=tuple(dataclasses.replace(one, layer="a\ud800") for one in sample.faces))
    assert b"a\\ud800" in str(dataclasses.replace(found, samples=(sample,))).encode()


def test_names_are_whole_and_tables_fit_on_a_screen(monkeypatch):
    """Of 77 layers with names as models have them; the smallest screen has 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
             "mlp.up_proj", "mlp.down_proj")  # fmt: skip
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleDict({"self_attn": nn.Module(), "mlp": nn.Module()}) for _ in range(11))
    for layer in model.layers:
        for name in names:
            layer.set_submodule(name, nn.Linear(32, 32, bias=False))
    model.forward = lambda x: sum(layer(x) for layer in model.modules() if isinstance(layer, nn.Linear))
    model = nn.ModuleDict({"model": model})
    model.forward = model["model"].forward
    x = torch.randn(32, 32)
    options = {"hardware": "h100", "formats": ["bf16", "fp8"], "loss": lambda model, x: model(x).square().mean()}
    advice = ht.advise(model, [x], **options)
    ht.quantize_(model, "fp8")
    for found in (advice, *(make(model, x) for make in (explained, checked, watching))):
        lines = str(found).splitlines()
        assert len(lines) < 40, type(found)
        assert max(map(len, lines)) <= 80
        assert not any("…" in line for line in lines)
