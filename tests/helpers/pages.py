"""Pages of recordings: a little run, what a page is made of, markup in a recording."""

import copy
import functools
import html.parser

import torch
from siblings import inputs
from torch import nn
from torchao.quantization import FqnToConfig

import hybridtensor as ht


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(64, 64, bias=False), nn.Linear(64, 64)

    def forward(self, x):
        return x + 0.1 * self.down_proj(torch.tanh(self.up_proj(x)))


def recording(layers=3, steps=5, note=True):
    """Return what was watched of a little model with two recipes and an outlier, with losses or without."""
    specs = {"re:.*up_proj": "fp8_rowwise", "re:.*down_proj": "nvfp4"}
    recipe = FqnToConfig({name: ht.HybridConfig.parse(spec) for name, spec in specs.items()})
    return trained(recipe, outlier=1000, layers=layers, steps=steps, note=note)


def trained(recipe, *, outlier=1.0, layers=2, steps=5, keep_bf16=(), note=True):
    """Return what was watched of a little model with one recipe; one row of a weight may be larger."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(layers)))
    with torch.no_grad():
        model[1].up_proj.weight[3] *= outlier
    ht.quantize_(model, recipe, keep_bf16=keep_bf16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with ht.watch(model, every=2, rows=128) as watched:
        for seed in range(steps):
            loss = model(inputs(seed)).square().mean()
            if note:
                watched.note(loss)
            loss.backward()
            optimizer.step()
            ht.step_(model)
    return watched


class Page(html.parser.HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "input", "line", "polyline"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.texts.append(data)


MARKUP = "'\"><img src=x onerror=alert(1)><script>alert(2)</script><!--data--></td>"


def strings(found, path=()):
    """Yield where the strings of a recording are, keys among them: path, and whether it is a key."""
    if isinstance(found, str):
        yield path, False
    elif isinstance(found, dict):
        for key, value in found.items():
            yield (*path, key), True
            yield from strings(value, (*path, key))
    elif isinstance(found, list):
        for index, value in enumerate(found[:2]):
            yield from strings(value, (*path, index))


def with_markup(found, path, is_key):
    """Return a recording with markup in place of one of its strings."""
    made = copy.deepcopy(found)
    *way, last = path
    place = functools.reduce(lambda one, key: one[key], way, made)
    if is_key:
        place[MARKUP] = place.pop(last)
    else:
        place[last] = MARKUP
    return made
