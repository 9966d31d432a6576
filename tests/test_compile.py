"""torch.compile: one graph, no break, the eager results, one recompilation per recipe."""

import pickle

import pytest
import tiers
import torch
from any_layer import ANY_LAYER
from faces import tensor_faces
from tiers import in_turn
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import hybridtensor as ht
from hybridtensor.graph_caches import digest_of
from hybridtensor.subclasses import wrapper
from hybridtensor.testing import random_tensor

pytestmark = pytest.mark.usefixtures("fresh_compiler")
SPECS = [
    "bf16", "fp8", "fp8_rowwise", "fp8/fp8_rowwise/bf16", "fp8+high_precision", "fp8+dequantized", "fp8_block", "mxfp8",
    "nvfp4", "nvfp4+four_over_six", "fp8_delayed", "nvfp4/mxfp8/mxfp8+one_d+row_scaled_input+rowwise_dequantized",
    "nvfp4+dequantized", "mxfp4", "mxfp4+mx_two_d+mx_even+nearest",
]  # fmt: skip


def make(spec, persistent=False, device="cpu"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.SiLU(), nn.Linear(64, 32)).to(device, torch.bfloat16)
    return ht.quantize_(model, spec, persistent=persistent)


def step(function, parameters, x, g):
    for p in parameters:
        p.grad = None
    x = x.detach().clone().requires_grad_()
    y = function(x)
    y.backward(g)
    return [y.detach(), x.grad, *[p.grad for p in parameters]]


@pytest.mark.parametrize(("spec", "persistent"), in_turn(sorted({*SPECS, *ANY_LAYER}), [False, True]), ids=str)
def test_one_graph_equal_to_eager(spec, persistent, device):
    model = make(spec, persistent, device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for seed in range(3):
        x, g = (random_tensor(2, 16, 32, device=device, seed=seed + i) for i in (0, 10))
        expected = step(model, list(model.parameters()), x, g)
        for got, value in zip(step(compiled, list(model.parameters()), x, g), expected, strict=True):
            assert torch.equal(got, value)
    assert counter.frame_count == 1


def test_a_change_of_recipe_is_one_recompilation():
    model = make("fp8")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    x, g = random_tensor(6, 32), random_tensor(6, 32, seed=1)
    for count, spec in enumerate(["fp8", "fp8_rowwise"], start=1):
        ht.set_config_(model, spec)
        for _ in range(2):
            expected = step(model, list(model.parameters()), x, g)
            for got, value in zip(step(compiled, list(model.parameters()), x, g), expected, strict=True):
                assert torch.equal(got, value)
        assert counter.frame_count == count


def test_layers_of_one_recipe_share_a_graph():
    layers = nn.ModuleList(nn.Linear(32, 32, dtype=torch.bfloat16) for _ in range(3))
    ht.quantize_(layers, "fp8")
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def apply(weight, x):
        return torch.nn.functional.linear(x, weight)

    for layer in layers:
        apply(layer.weight, random_tensor(6, 32))
    assert counter.frame_count == 1


def test_writes_by_compiled_code_are_seen():
    """An optimizer step inside a graph writes below the handlers: the cached faces must go all the same."""
    model = make("fp8")
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.5, foreach=True)
    x, g = random_tensor(6, 32), random_tensor(6, 32, seed=1)
    step(model, parameters, x, g)

    @torch.compile(backend="aot_eager")
    def compiled_step():
        optimizer.step()

    compiled_step()
    for layer in (model[0], model[2]):
        row, _ = tensor_faces(layer.weight, columnwise=False, dtype=torch.bfloat16)
        assert torch.equal(row, layer.weight.config.weight.quantize(layer.weight.master).rowwise)


@pytest.mark.parametrize("name", ["Adagrad", "ASGD", "RMSprop", "Rprop"])
def test_a_compiled_step_of_an_optimizer_is_that_of_a_plain_model(name):
    """These update with ``addcdiv_`` or ``addcmul_``, of which Dynamo makes other operators."""

    def updated(model):
        optimizer = getattr(torch.optim, name)(model.parameters())
        step(model, list(model.parameters()), random_tensor(6, 32), random_tensor(6, 32, seed=1))
        counter = CompileCounterWithBackend("aot_eager")
        torch.compile(optimizer.step, backend=counter)()
        return counter.frame_count, [p.detach() + 0 for p in model.parameters()]

    (graphs, got), (expected_graphs, expected) = updated(make("bf16")), updated(ht.plain_(make("bf16")))
    assert graphs == expected_graphs
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


WRITES = {
    "copy_": lambda weight, values: weight.copy_(values),
    "fill_": lambda weight, values: weight.fill_(0.25),
    "data": lambda weight, values: weight.data.mul_(0.5),
    "lerp_": lambda weight, values: weight.lerp_(values, 0.5),
}


@pytest.mark.parametrize("spec", ["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
def test_writes_of_a_persistent_weight_by_compiled_code_reach_its_master(write, spec):
    def masters(compiled):
        model = make(spec, persistent=True)
        weight, values = model[0].weight, random_tensor(64, 32, seed=2)
        optimizer = ht.optim.MasterWeights(torch.optim.SGD, model.parameters(), lr=0.5)

        def written():
            write(weight, values)

        with torch.no_grad():
            (torch.compile(written, backend="aot_eager") if compiled else written)()
        step(model, list(model.parameters()), random_tensor(6, 32), random_tensor(6, 32, seed=1))
        optimizer.step()
        return [*optimizer.masters().values(), model(random_tensor(6, 32))]

    for got, expected in zip(masters(compiled=True), masters(compiled=False), strict=True):
        assert torch.equal(got, expected)


USES_OF_ALIASES = {"write": lambda alias: alias.mul_(0.5), "read": torch.norm}


@pytest.mark.parametrize("use", USES_OF_ALIASES.values(), ids=list(USES_OF_ALIASES))
def test_an_alias_of_a_persistent_weight_that_compiled_code_made_is_refused(use):
    """It has the memory of the faces, and nothing of the values in high precision."""
    weight = make("fp8", persistent=True)[0].weight
    alias = torch.compile(lambda: weight.detach(), backend="aot_eager")()
    before = weight.dequantize()
    with pytest.raises(NotImplementedError, match="leave both out of"):
        use(alias)
    assert torch.equal(weight.dequantize(), before)


@pytest.mark.parametrize("spec", ["fp8_delayed", "nvfp4"])
def test_a_step_that_advances_the_state_is_compiled_once(spec):
    def train(compiled):
        model = make(spec)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def step(x):
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ht.step_(model)

        run = torch.compile(step, backend="aot_eager") if compiled else step
        for seed in range(4):
            with torch.compiler.set_stance("fail_on_recompile" if seed else "default"):
                run(random_tensor(6, 32, seed=seed))
        return model(random_tensor(6, 32, seed=4))

    assert torch.equal(train(compiled=True), train(compiled=False))


def test_dynamic_token_counts_make_one_graph():
    model = make("fp8")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=True)
    for tokens in (8, 12, 20):
        x, g = random_tensor(tokens, 32), random_tensor(tokens, 32, seed=1)
        expected = step(model, list(model.parameters()), x, g)
        for got, value in zip(step(compiled, list(model.parameters()), x, g), expected, strict=True):
            assert torch.equal(got, value)
    assert counter.frame_count == 1


@tiers.long("a model with its backward is compiled by Inductor elsewhere")
def test_inductor_runs():
    model = make("fp8")
    x = random_tensor(6, 32)
    torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), model(x), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("persistent", [False, True], ids=["master", "persistent"])
def test_caches_of_compiled_graphs_key_on_what_a_weight_is(persistent):
    def key(spec, features=32):
        layer = ht.quantize_(nn.Linear(features, 64, bias=False), spec, persistent=persistent)
        return layer.weight._stable_hash_for_caching()

    assert key("fp8") == key("fp8")
    assert len({key("fp8"), key("fp8_rowwise"), key("fp8", features=16)}) == 3
    assert "0x" not in key("fp8"), "an address differs from process to process"


def test_caches_of_compiled_graphs_key_on_the_code(tmp_path, monkeypatch):
    """Graphs hold traces of it, and lie on disk: an upgrade must not run those of before."""
    weight = make("fp8")[0].weight
    before = weight._stable_hash_for_caching()
    digests = []
    for value in (1, 2):
        (tmp_path / f"{value}").mkdir()
        (tmp_path / f"{value}" / "new.py").write_text(f"x = {value}")
        digests.append(digest_of(tmp_path / f"{value}"))
    assert len({*digests, wrapper.SOURCES}) == 3
    monkeypatch.setattr(wrapper, "SOURCES", digests[0])
    assert weight._stable_hash_for_caching() != before


QUANTIZERS = {
    "fp8": ht.Float8Quantizer(), "fp8_block": ht.Float8Quantizer(granularity="block"), "mxfp8": ht.MXFP8Quantizer(),
    "nvfp4": ht.NVFP4Quantizer(), "pair": ht.HybridQuantizer(ht.Float8Quantizer(), ht.MXFP8Quantizer()),
}  # fmt: skip


def test_what_a_graph_quantizes_is_what_eager_code_quantizes():
    """Also by one function for several quantizers, and compared and copied as whole tensors."""
    x = random_tensor(32, 64)
    for quantizer in QUANTIZERS.values():

        def quantize(x, quantizer=quantizer):
            return quantizer.quantize(x)

        made, expected = torch.compile(quantize, fullgraph=True, backend="aot_eager")(x), quantizer.quantize(x)
        assert torch.equal(made, expected)
        assert made.rowwise.format is expected.rowwise.format
        expected.copy_(made)


def test_what_was_quantized_passes_a_graph_break():
    def function(x):
        made = QUANTIZERS["fp8"].quantize(x)
        torch._dynamo.graph_break()
        return made.dequantize() + 1

    x = random_tensor(32, 64)
    assert torch.equal(torch.compile(function, backend="aot_eager")(x), function(x))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_quantizer_is_first_used_in_a_graph(name):
    """On Python 3.11 Dynamo cannot enter the lock of a cached property."""
    quantizer = pickle.loads(pickle.dumps(QUANTIZERS[name]))
    quantize = torch.compile(lambda x: quantizer.quantize(x).dequantize(), fullgraph=True, backend="aot_eager")
    assert quantize(random_tensor(32, 64)).shape == (32, 64)
