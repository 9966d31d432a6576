"""Results are printed as tables: by ``print``, at a prompt, and in notebooks."""

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
