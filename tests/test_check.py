"""``check`` says what ran: products by format, weights read as values, layers that never ran, plain matrices."""

import copy
import functools
import logging
import pickle

import pytest
import torch
import torch.nn.functional as F
from any_layer import ANY_LAYER
from rich.console import Console
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils import flop_counter
from torch.utils.checkpoint import checkpoint
from torchao.quantization import FqnToConfig

import hybridtensor as ht

X = torch.randn(32, 64, generator=torch.Generator().manual_seed(4))
PRUNE = functools.partial(prune.l1_unstructured, name="weight", amount=0.3)


def model(recipe="fp8", **options):
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    return ht.quantize_(made, recipe, **options)


def formats(found, layer="0"):
    return {row.gemm: (row.left, row.right) for row in found.products if row.layer == layer}


@pytest.mark.parametrize("persistent", [False, True], ids=["master", "persistent"])
@pytest.mark.parametrize("recipe", ANY_LAYER)
def test_every_product_as_the_recipe_says(recipe, persistent):
    """What ``explain`` reads from the recipe is what ran."""
    net = model(recipe, persistent=persistent)
    found = ht.check(net, X, strict=True)
    assert found.problems == []
    expected = {row.gemm: row for row in ht.explain(net, show=False).rows if row.layer == "2"}
    ran = {row.gemm: row for row in found.products if row.layer == "2"}
    assert ran.keys() == expected.keys()
    assert {name: row.backend for name, row in ran.items()} == {name: row.backend for name, row in expected.items()}
    assert all(row.times == 1 for row in found.products)


def test_everything_is_restored():
    net = model("fp8_delayed")
    net(X).sum().backward()
    other, twin, x = copy.deepcopy(net), copy.deepcopy(net), X.clone().requires_grad_()
    x.grad = torch.ones_like(X)
    steps = []
    net[0].weight.register_post_accumulate_grad_hook(steps.append)
    for g in (net, other):
        for p, q in zip(g.parameters(), twin.parameters(), strict=True):
            p.grad = q.grad = torch.full_like(p.dequantize() if hasattr(p, "config") else p, 2.0)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    ht.check(net, x)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(x.grad, torch.ones_like(X))
    assert not steps
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    for a, b in zip(net.buffers(), other.buffers(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(net[0].quantization_state.amax, other[0].quantization_state.amax)
    assert torch.equal(net(X), other(X))
    net(X).sum().backward()
    assert len(steps) == 1  # the hook is back


@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed"])
def test_a_backward_can_run_after_it_whose_forward_ran_before(recipe):
    """BatchNorm saves the buffers that a training forward writes, and a layer knows which scales its forward had."""
    net = model(recipe)
    twin, x = copy.deepcopy(net), X.clone().requires_grad_()
    expected = X.clone().requires_grad_()
    out, other = net(x).square().sum(), twin(expected).square().sum()
    ht.check(net, X)
    ht.mismatch(net, X)
    out.backward()
    other.backward()
    assert torch.equal(x.grad, expected.grad)
    for a, b in zip(net.buffers(), twin.buffers(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_buffers():
    net = ht.quantize_(nn.Sequential(nn.Linear(64, 64)), "fp8")
    net.register_buffer("adjacent", torch.eye(64).to_sparse_csr())
    net(X).sum().backward()
    before = net[0].weight.grad
    assert ht.check(net, X).products
    assert net[0].weight.grad is before


class Positions(nn.Module):
    """Adds embeddings of positions, which are parameters, and multiplies by a matrix that is one, too."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.pos_embed = nn.Parameter(torch.zeros(1, 32, 64))
        self.absolute_position_embeddings = nn.Parameter(torch.zeros(32, 64))
        self.proj = nn.Parameter(torch.eye(64))

    def forward(self, x):
        return self.linear(x + self.pos_embed + self.absolute_position_embeddings) @ self.proj


def test_embeddings_of_positions_are_added_and_no_problem():
    net = ht.quantize_(Positions(), "fp8")
    assert [matrix.name for matrix in ht.check(net, X).coverage.plain] == ["proj"]
    assert ht.explain(net).coverage.products == pytest.approx(1 / 2)


class Aliasing(nn.Module):
    """Writes a buffer through another one that is a view of it, and through an attribute that is none."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("cache", torch.zeros(2, 64))
        self.register_buffer("first", self.cache[0])
        self.register_buffer("count", torch.zeros(()))
        self.steps = [self.count]

    def forward(self, x):
        self.first += x[0].detach()
        self.steps[0] += 1
        return self.linear(x + self.cache[0])


def test_buffers_with_aliases_are_restored():
    net = ht.quantize_(Aliasing(), "fp8")
    twin = copy.deepcopy(net)
    expected = twin(X)
    found = []
    net.linear.register_forward_hook(lambda module, args, out: found.append(out))
    ht.check(net, X)
    assert torch.equal(found[0], expected)  # it sees what was written through the view
    assert not net.cache.any()
    assert not net.count.any()
    assert net.first.data_ptr() == net.cache.data_ptr()


class Expanding(nn.Module):
    """Adds an expanded buffer, and writes what it is a view of."""

    def __init__(self):
        super().__init__()
        self.linear, self.own = nn.Linear(64, 64), torch.zeros(1, 64)
        self.register_buffer("shift", self.own.expand(len(X), 64))

    def forward(self, x):
        self.own += 1
        return self.linear(x + self.shift)


def test_expanded_buffers_are_restored():
    net = ht.quantize_(Expanding(), "fp8")
    assert ht.check(net, X).products
    assert not net.shift.any()


def test_buffers_that_inference_mode_made():
    """A forward outside of it may read them."""
    net = ht.quantize_(Expanding(), "fp8")
    with torch.inference_mode():
        net.shift = torch.ones(64)
    assert ht.check(net, X).products
    assert torch.equal(net.shift, torch.ones(64))


class Reassigning(nn.Module):
    """Assigns a new tensor and number in each forward, as rotary embeddings of Transformers do that grow."""

    def __init__(self):
        super().__init__()
        self.linear, self.steps, self.head = nn.Linear(64, 64), 0, None
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("cached", None)

    def forward(self, x):
        self.mean, self.cached, self.steps = 0.9 * self.mean + x.mean(0), x, self.steps + 1
        if self.steps > 1:
            raise KeyError("the second forward")
        self.head = self.head or nn.LazyLinear(8)
        self.head(x)
        return self.linear(x)


def test_what_a_forward_assigns_is_restored():
    net = ht.quantize_(Reassigning(), "fp8")
    mean, twin = net.mean, copy.deepcopy(net)
    ht.check(net, X)
    ht.mismatch(net, X)
    net.steps = 1
    with pytest.raises(KeyError, match="second"):
        ht.check(net, X)
    assert net.mean is mean
    assert not mean.any()
    assert net.cached is None
    assert net.steps == 1
    assert net.head.in_features == 64  # made by the forward, as its parameters are, which optimizers know
    net.steps = 0
    assert torch.equal(net(X), twin(X))


class Gated(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight * 2.0)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.other = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.used(x)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.stack = nn.Linear(64, 64), nn.Parameter(torch.randn(4, 64, 64))

    def forward(self, x):
        return torch.einsum("tk,eko->to", self.linear(x), self.stack)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.linear = nn.MultiheadAttention(64, 2, batch_first=True), nn.Linear(64, 64)

    def forward(self, x):
        return self.linear(self.attention(x[None], x[None], x[None])[0])


SILENT = {
    "a gated weight": (lambda: Gated(64, 64), r"<root>: its weight was read as values by aten\.mul"),
    "a layer that never runs": (Unused, "other: none of its products ran"),
    "stacked experts": (Experts, r"stack \[4, 64, 64\]: Experts has no num_experts that is its first extent"),
    "in_proj": (Attending, r"attention\.in_proj_weight \[192, 64\]: nn\.MultiheadAttention computes"),
}  # fmt: skip


@pytest.mark.parametrize("name", SILENT)
def test_what_is_not_quantized_is_named(name):
    make, message = SILENT[name]
    torch.manual_seed(0)
    net = ht.quantize_(make(), "fp8")
    with pytest.raises(RuntimeError, match=r"check: not everything is quantized:\n  " + message):
        ht.check(net, X, strict=True)


def test_quantization_aware_layers_are_named():
    torchao = pytest.importorskip("torchao.quantization.qat")
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    config = torchao.IntxFakeQuantizeConfig(torch.int8, "per_channel")
    net[0] = torchao.FakeQuantizedLinear.from_linear(net[0], None, config)
    ht.quantize_(net, "fp8", filter_fn=lambda *_: True)
    found = ht.check(net, X)
    assert found.unused == ("0",)
    assert any(text.startswith("0: its weight was read as values by aten.") for text in found.problems)


def test_a_new_head_and_a_model_that_is_not_converted():
    net = model()
    net[2] = nn.Linear(64, 64)
    found = ht.check(net, X)
    assert 0.4 < found.coverage.products < 0.6
    assert [(m.name, m.deliberate) for m in found.coverage.plain] == [("2.weight", True)]
    assert found.flops == 2 / 5  # the first layer's input needs no gradient
    assert ht.check(model(), X).flops == 1.0
    plain = ht.check(nn.Linear(64, 64), X)
    assert (plain.products, plain.coverage.parameters, plain.flops) == ((), 0.0, 0.0)


def test_frozen_layers_tied_layers_and_embeddings():
    embedding, head = nn.Embedding(64, 64), nn.Linear(64, 64, bias=False)
    head.weight = embedding.weight
    net = ht.quantize_(nn.Sequential(embedding, nn.Linear(64, 64), head), "fp8", filter_fn=lambda *_: True)
    net[1].requires_grad_(False)
    found = ht.check(net, torch.arange(32), strict=True)
    assert set(formats(found, "1")) == {"output", "grad_input"}
    assert {(row.layer, row.reader.partition(".")[0]) for row in found.reads} == {("2", "aten")}


def test_recomputation_is_counted():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x):
            return checkpoint(self.linear, x, use_reentrant=False)

    found = ht.check(ht.quantize_(Block(), "fp8"), X.clone().requires_grad_())
    assert {row.gemm: row.times for row in found.products} == {"output": 2, "grad_input": 1, "grad_weight": 1}


def test_compiled_models_and_blocks():
    net = model()
    net[0] = torch.compile(net[0], backend="aot_eager")
    for whole in (net, torch.compile(model(), backend="aot_eager")):
        whole(X)
        assert {row.gemm for row in ht.check(whole, X, strict=True).products} == {"output", "grad_input", "grad_weight"}


def test_formulas_for_flops_may_raise(monkeypatch):
    """As torch 2.11's for attention of grouped queries does."""

    def refuse(*args, **kwargs):
        raise AssertionError("shapes are incompatible")

    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.other = nn.Linear(64, 64), torch.ones(64, 64)

        def forward(self, x):
            return torch.bmm(self.linear(x)[None], self.other[None])

    monkeypatch.setitem(flop_counter.flop_registry, torch.ops.aten.bmm, refuse)
    net = ht.quantize_(Mixing(), "fp8")
    found = ht.check(net, X, strict=True)
    assert found.flops == 1.0
    assert found.uncounted == ("aten.bmm",)
    console = Console(width=200, record=True)
    console.print(found)
    assert "of the operations of this run without aten.bmm" in console.export_text()
    assert ht.check(model(), X).uncounted == ()


def test_layers_that_quantize_never_saw_are_named():
    net = nn.ModuleDict({"body": model(), "side": nn.Linear(64, 64), "lm_head": nn.Linear(64, 64)})
    net.forward = lambda x: net["lm_head"](net["side"](net["body"](x)))
    found = ht.check(net, X)
    assert found.untouched == ("side",)
    with pytest.raises(RuntimeError, match="side: not quantized, and quantize_ never saw it"):
        ht.check(net, X, strict=True)


@pytest.mark.parametrize(
    "options",
    [{"keep_bf16": ["2"]}, {"filter_fn": lambda module, name: name == "0"}, {"recipe": FqnToConfig({"0": "fp8"})}],
    ids=["keep_bf16", "filter_fn", "FqnToConfig"],
)
def test_layers_that_were_left_alone_on_purpose_are_no_problem(options):
    net = model(**options)
    for one in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert ht.check(one, X, strict=True).untouched == ()
    ht.set_config_(net, "mxfp8")
    assert ht.check(net, X, strict=True).untouched == ()
    net[2] = nn.Linear(64, 64)
    assert ht.check(net, X).untouched == ("2",)
    ht.set_config_(net, "fp8")  # which chooses nothing
    assert ht.check(net, X).untouched == ("2",)


def test_layers_that_stay_plain_anyway_may_be_named():
    net = nn.ModuleDict({"body": nn.Linear(64, 64), "lm_head": nn.Linear(64, 64)})
    net.forward = lambda x: net["lm_head"](net["body"](x))
    ht.quantize_(net, "fp8", keep_bf16=["lm_head"])
    assert ht.check(net, X, strict=True).untouched == ()
    assert net["lm_head"].weight.dtype == torch.float32
    with pytest.raises(ValueError, match="keep_bf16 must name a layer, got 'head'; layers to convert are: body"):
        ht.quantize_(net, "fp8", keep_bf16=["head"])


def test_losses():
    class Output(dict):
        loss = None

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x, *, scale):
            out = Output(logits=self.linear(x), extra=[torch.ones(3)])
            out.loss = out["logits"].sum() * scale
            return out

    net = ht.quantize_(Net(), "fp8")
    assert len(ht.check(net, X, scale=2.0).products) == 2  # the input needs no gradient
    assert len(ht.check(net, X, scale=2.0, loss=lambda out: out["logits"].mean()).products) == 2
    with pytest.raises(TypeError, match="check: a loss of one real number is required, got a tensor"):
        ht.check(net, X, scale=2.0, loss=lambda out: out["logits"])
    with pytest.raises(TypeError, match=r"check: a loss of one real number is required, got .*complex64"):
        ht.check(net, X, scale=2.0, loss=lambda out: out["logits"].mean() + 0j)
    with pytest.raises(TypeError, match="check: a module is required, got Tensor"):
        ht.check(X, X)
    with pytest.raises(TypeError, match="check: strict is True or False, got 'yes'"):
        ht.check(net, X, strict="yes")
    with pytest.raises(TypeError, match="check: a function as loss is required, got 3"):
        ht.check(net, X, loss=3)


def test_the_loss_of_an_output_may_be_an_entry_of_a_dictionary():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.head = nn.Linear(64, 64), nn.Linear(64, 32)

        def forward(self, x):
            hidden = self.trunk(x)
            return {"loss": hidden.square().mean(), "logits": self.head(hidden)}

    ran = [(row.layer, row.gemm) for row in ht.check(ht.quantize_(Net(), "fp8"), X).products]
    assert ran == [("trunk", "output"), ("trunk", "grad_weight"), ("head", "output")]


@pytest.mark.parametrize(
    "loss_of", [lambda y: y.square().mean(-1), lambda y: y.mean().detach()], ids=["a vector", "detached"]
)
def test_a_loss_in_an_output_that_gives_no_gradients_is_not_the_loss(loss_of):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(64, 32)

        def forward(self, x):
            logits = self.head(x)
            return {"loss": loss_of(logits), "logits": logits}

    ran = [(row.layer, row.gemm) for row in ht.check(ht.quantize_(Net(), "fp8"), X).products]
    assert ran == [("head", "output"), ("head", "grad_weight")]


def test_is_shown(capsys):
    console = Console(width=100, record=True)
    console.print(ht.check(ht.quantize_(Experts(), "fp8"), X))
    text = console.export_text()
    assert "Products that ran" in text
    assert "stack [4, 64, 64]: Experts has no num_experts that is its first extent" in text
    assert "of the operations of this run" in text
    ht.check(model(), X, show=True)
    assert "Products that ran" in capsys.readouterr().out


def test_quantize_logs_what_is_left(caplog):
    """A warning where nobody decided so; else for who wants to know."""
    with caplog.at_level(logging.INFO, "hybridtensor"):
        ht.quantize_(Experts(), "fp8")
        ht.quantize_(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "fp8", keep_bf16=["1"])
    experts, kept = caplog.records
    assert (experts.levelno, kept.levelno) == (logging.WARNING, logging.INFO)
    assert "stack [4, 64, 64]: Experts has no num_experts that is its first extent" in experts.getMessage()
    assert "quantized: 20.2% of the parameters, 20.0% of the multiplications" not in experts.getMessage()
    assert "1.weight [64, 64]: not chosen" in kept.getMessage()
    assert "50.0% of the multiplications" in kept.getMessage()


def test_explain_names_them_too():
    console = Console(width=120, record=True)
    net = ht.quantize_(Experts(), "fp8")
    console.print(ht.explain(net, show=False))
    text = console.export_text()
    assert "Large matrices that no recipe reaches" in text
    assert "20.0% of the multiplications of a token" in text


def test_what_is_alike_is_said_once():
    """224 layers on a screen."""
    net = nn.Sequential(*(nn.Sequential(*(nn.Linear(64, 64) for _ in range(7))) for _ in range(32)))
    printed = str(ht.check(ht.quantize_(net, "fp8"), X))
    assert len(printed.splitlines()) < 40
    assert " x223" in printed
    assert len(str(ht.check(nn.Sequential(*(nn.Linear(64, 64) for _ in range(99))), X)).splitlines()) < 40


class TookOver(nn.Module):
    """Has the weight of a layer that it does not have."""

    def __init__(self, layer, multiply):
        super().__init__()
        self.weight, self.multiply = layer.weight, multiply

    def forward(self, x):
        return self.multiply(x, self.weight)


@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed"])
def test_weights_whose_layer_is_gone_are_reported(recipe):
    net = ht.quantize_(model(), recipe)
    net[2] = TookOver(net[2], F.linear)
    assert {row.layer for row in ht.check(net, X, strict=True).products} == {"0", "2.weight"}
    net[2].multiply = lambda x, weight: (x[:, None] * weight).sum(-1)
    with pytest.raises(RuntimeError, match=r"2\.weight: its weight was read as values by aten\.mul"):
        ht.check(net, X, strict=True)


@pytest.mark.parametrize(
    "prepare",
    [parametrizations.weight_norm, parametrizations.spectral_norm, PRUNE],
    ids=["weight_norm", "spectral_norm", "prune"],
)
def test_a_weight_is_not_reported_where_its_layer_multiplies_what_is_computed_of_it(prepare):
    net = model()
    prepare(net[0])
    found = ht.check(net, X, strict=True)
    assert len(formats(found)) == 2
    assert found.reads == ()


class WithAdapter(nn.Linear):
    def forward(self, x):
        return super().forward(x) + F.linear(F.linear(x, self.down), self.up)


@pytest.mark.parametrize("make", [lambda w: torch.zeros(64, 64), lambda w: w.new_zeros(64, 64)])
def test_adapters_in_a_layers_module_are_plain(make):
    net = ht.quantize_(WithAdapter(64, 64, bias=False), "fp8")
    net.down, net.up = (nn.Parameter(make(net.weight)) for _ in range(2))
    found = ht.check(net, X.detach(), strict=True)
    assert found.coverage.parameters == pytest.approx(1 / 3)
    assert [matrix.name for matrix in found.coverage.plain] == ["down", "up"]
    assert found.flops == pytest.approx(2 / 7)  # x needs no gradient
    assert len(found.products) == 2


@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed"])
def test_layers_that_were_tied_later_are_one(recipe):
    net = ht.quantize_(nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)), recipe)
    net[1].weight = net[0].weight
    assert {(row.layer, row.times) for row in ht.check(net, X, strict=True).products} == {("0, 1", 2), ("0, 1", 1)}
