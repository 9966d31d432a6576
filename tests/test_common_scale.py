"""``common_scale``: the weights of layers that engines fuse have one scale per tensor.

Oracle: the faces of the fused weight, the layers' weights one below the other; bitwise.
"""

import copy
import pickle

import pytest
import tiers
import torch
from saving import through_a_file
from siblings import GROUPS, ROWS, Model, inputs, model_of
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from torchao.quantization import FqnToConfig

import hybridtensor as ht
from hybridtensor.optim import MasterWeights

BACKEND = "inductor" if tiers.LONG else "aot_eager"  # what is asked of graphs no backend decides
SPECS = [
    "fp8",
    "fp8+pow2_scale",
    "nvfp4",
    "nvfp4/fp8/bf16",
    "nvfp4+four_over_six",
    "fp8+bf16_weight_values",
    "fp8+dequantized",
]


def values_of(linear):
    weight = linear.weight
    if isinstance(weight, ht.HybridTensor):
        return weight.high_precision.current
    return weight.plain


def check(model):
    """The faces of every block's siblings are those of the fused weight."""
    for block in model.blocks:
        fused = torch.cat([values_of(linear) for linear in block.siblings])
        config = block.q.weight.config
        if config.bf16_weight_values:
            fused = fused.bfloat16()
        row, column = config.weight.faces(fused, rowwise=True, columnwise=True, dtype=torch.float32)
        first = 0
        for linear, rows in zip(block.siblings, ROWS, strict=True):
            mine = linear.weight.faces(rowwise=True, columnwise=True, dtype=torch.float32)
            same(mine[0], row.cut(0, first, rows))
            if not (mine[1].dequantized_rowwise is not None or column.format.is_identity or column.format.hadamard):
                same(mine[1], column.cut(1, first, rows))
            first += rows
        own = config.weight.faces(values_of(block.k), rowwise=True, columnwise=False, dtype=torch.float32)[0]
        of_tensor = -1 if own.tensor_scale is None else 2
        assert not torch.equal(own.tensors()[of_tensor], mine_of(block.k).tensors()[of_tensor])


def mine_of(linear):
    return linear.weight.faces(rowwise=True, columnwise=False, dtype=torch.float32)[0]


def same(face, expected):
    for one, other in zip(face.tensors(), expected.tensors(), strict=True):
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def train(model, steps=1, forward=None, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-2)
    for seed in range(steps):
        x = inputs(seed, device_of(model))
        (model if forward is None else forward)(x).square().mean().backward()
        optimizer.step()
        ht.step_(model)
        optimizer.zero_grad()


def device_of(model):
    return next(model.parameters()).device


@pytest.mark.parametrize("spec", SPECS)
def test_faces_are_those_of_the_fused_weight(spec, device):
    model = model_of(spec).to(device)
    check(model)
    train(model, steps=2)
    check(model)
    with torch.no_grad():
        model.blocks[1].v.weight.mul_(3)  # one that its siblings learn of
    check(model)


@pytest.mark.parametrize("spec", SPECS)
def test_persistent_weights(spec, device):
    torch.manual_seed(0)
    model = model_of(spec, persistent=True).to(device)
    check(model)
    optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=1e-2)
    train(model, 2, optimizer=optimizer)
    check(model)
    model.blocks[0].k.weight.requires_grad_(False)  # written along with its siblings all the same
    train(model, optimizer=optimizer)
    check(model)
    with torch.no_grad():
        model.blocks[0].q.weight.mul_(40)
    check(model)


def test_steps_under_a_dispatch_mode():
    """It measures the weights at each use, and no scale changes by that between forward and backward."""
    model, other = model_of("fp8"), model_of("fp8")
    train(model, 2)
    with FlopCounterMode(display=False):
        train(other, 2)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.dequantize(), two.dequantize())


def test_products_go_by_the_common_scale():
    model, fused = model_of("fp8"), nn.Linear(64, sum(ROWS), bias=False)
    with torch.no_grad():
        fused.weight.copy_(torch.cat([linear.weight.plain for linear in model.blocks[0].siblings]))
    ht.quantize_(fused, "fp8")
    x = inputs()
    mine = torch.cat([linear(x) for linear in model.blocks[0].siblings], dim=1)
    assert torch.equal(mine, fused(x))
    one = ht.quantize_(copy.deepcopy(model), "fp8")  # without a common scale
    assert not torch.equal(torch.cat([linear(x) for linear in one.blocks[0].siblings], dim=1), mine)


@pytest.mark.parametrize("spec", ["fp8", "nvfp4", "fp8/fp8_rowwise/fp8"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_sibling_that_is_written_between_forward_and_backward(spec, compiled):
    """As an optimizer in backward does: an error, or the gradient with the scales that forward used."""
    torch._dynamo.reset()
    model = model_of(spec)
    first, second, _ = model.blocks[0].siblings
    run, x = torch.compile(first, backend="aot_eager") if compiled else first, inputs().requires_grad_()
    expected = torch.autograd.grad(run(x).sum(), x)[0]
    y = run(x)
    with torch.no_grad():
        second.weight.mul_(10)
    if compiled:
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)
    else:
        with pytest.raises(
            RuntimeError,
            match=r"the weight of layer blocks\.0\..* changed between its forward and backward; .* common_scale",
        ):
            y.sum().backward()


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_delayed_scales_follow_from_all_siblings(algorithm):
    quantizers = [ht.DelayedFloat8Quantizer(algorithm=algorithm, history_length=4)] * 3
    torch.manual_seed(0)
    model = model_of(ht.HybridConfig(*quantizers))
    amaxes = [max(float(one.weight.plain.abs().max()) for one in block.siblings) for block in model.blocks]
    train(model)
    for block, amax in zip(model.blocks, amaxes, strict=True):
        scales = [s.encode_scale[s.slots.index("weight")] for s in (linear.weight.layer for linear in block.siblings)]
        assert all(torch.equal(scale, torch.tensor(448.0) / torch.tensor(amax)) for scale in scales)


@pytest.mark.parametrize("spec", ["fp8", "nvfp4"])
@pytest.mark.parametrize("layout", ["compiled", "checkpointed", "autocast", "eval"])
def test_wherever_a_forward_runs(spec, layout, device):
    model, twin = model_of(spec).to(device), model_of(spec).to(device)
    forward = {
        "compiled": lambda: torch.compile(model, fullgraph=True, backend=BACKEND),
        "checkpointed": lambda: lambda x: checkpoint(model, x, use_reentrant=False),
        "autocast": lambda: torch.autocast("cpu", enabled=False)(model),
        "eval": lambda: model.eval(),
    }[layout]()
    train(model, 3, forward)
    train(twin, 3)
    check(model)
    for mine, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.detach(), expected.detach()) or layout == "compiled"
        torch.testing.assert_close(mine.detach(), expected.detach(), rtol=1e-4, atol=1e-5)


def test_compiled_code_sees_what_is_written_between_its_runs():
    model = model_of("fp8")
    compiled = torch.compile(model.blocks[0].q, fullgraph=True, backend=BACKEND)
    x = inputs()
    torch.testing.assert_close(compiled(x), model.blocks[0].q(x))
    before = compiled(x)
    with torch.no_grad():
        model.blocks[0].v.weight.mul_(7.3)
    assert not torch.equal(compiled(x), before)
    torch.testing.assert_close(compiled(x), model.blocks[0].q(x))


def test_a_graph_that_writes_before_it_uses_is_refused():
    model = model_of("fp8")
    linear = model.blocks[0].q

    @torch.compile(fullgraph=True, backend=BACKEND)
    def written(x):
        with torch.no_grad():
            linear.weight.mul_(2)
        return linear(x)

    with pytest.raises(Exception, match="writes a weight and then multiplies by it"):
        written(inputs())


def test_one_measurement_per_write(monkeypatch):
    model, measured = model_of("fp8"), []
    scale = type(model.blocks[0].q.weight.layer.common)
    original = scale.measure
    monkeypatch.setattr(scale, "measure", lambda self, values: measured.append(len(values)) or original(self, values))
    train(model, 3)
    model(inputs())
    model(inputs(1))
    assert measured == [3] * 2 * 4  # per block, before each of three steps and after


def copied(model):
    return copy.deepcopy(model)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved(model):
    return through_a_file(model, weights_only=False)


@pytest.mark.parametrize("duplicate", [copied, pickled, saved])
@pytest.mark.parametrize("persistent", [False, True])
def test_copies_have_a_common_scale_of_their_own(duplicate, persistent):
    model = model_of("fp8", persistent=persistent)
    model(inputs())
    new = duplicate(model)
    states = [linear.weight.layer for linear in new.blocks[0].siblings]
    assert len({id(state.common) for state in states}) == 1
    assert states[0].common is not model.blocks[0].q.weight.layer.common
    with torch.no_grad():
        model.blocks[0].q.weight.mul_(40)
    check(model)
    check(new)


def test_state_dicts_hold_what_they_held():
    model, plain = model_of("fp8"), model_of("fp8", groups=())
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(through_a_file(model.state_dict()))
    other = model_of("fp8", seed=3)
    other.load_state_dict(plain.state_dict())
    check(other)
    for one, twin in zip(other.blocks, model.blocks, strict=True):
        same(mine_of(one.k), mine_of(twin.k))


@pytest.mark.parametrize("persistent", [False, True])
def test_changes_of_recipe(persistent):
    model = model_of("fp8", persistent=persistent)
    ht.set_config_(model, "nvfp4")
    check(model)
    ht.set_config_(model, "fp8_block")  # has no scale per tensor
    train(model)
    ht.set_config_(model, "fp8")
    check(model)
    ht.quantize_(model, "fp8", persistent=persistent)
    assert model.blocks[0].q.weight.layer.common is None
    for linear in model.blocks[0].siblings:
        own = linear.weight.config.weight.faces(values_of(linear), rowwise=True, columnwise=False, dtype=torch.float32)[
            0
        ]
        same(mine_of(linear), own)
    ht.quantize_(model, "fp8", persistent=persistent, common_scale=GROUPS)
    check(model)


def test_one_layer_gets_the_recipe_that_its_siblings_have():
    model = model_of("fp8", persistent=True)
    ht.set_config_(model, FqnToConfig({"blocks.0.q": ht.HybridConfig.parse("fp8")}))
    check(model)


def test_frozen_persistent_weights_have_it_from_their_values():
    torch.manual_seed(0)
    model = Model().requires_grad_(False)
    values = [linear.weight.clone() for linear in model.blocks[0].siblings]
    ht.quantize_(model, "fp8", persistent=True, common_scale=GROUPS)
    row = ht.Float8Quantizer().faces(torch.cat(values), rowwise=True, columnwise=False, dtype=torch.float32)[0]
    first = 0
    for linear, rows in zip(model.blocks[0].siblings, ROWS, strict=True):
        same(mine_of(linear), row.cut(0, first, rows))
        first += rows
    before = model.blocks[0].q.weight.dequantize()
    with pytest.raises(RuntimeError, match=r"layer blocks\.0\.k has .*, and no values in high precision"):
        model.blocks[0].q.weight.copy_(values[0] * 2)
    assert torch.equal(model.blocks[0].q.weight.dequantize(), before)


@pytest.mark.parametrize("spec", ["fp8", "nvfp4", "fp8_delayed"])
def test_exports_have_one_scale(spec):
    model = model_of(spec)
    train(model)
    tensors = dict(ht.inference_tensors(model))
    name = "weight_global_scale" if spec == "nvfp4" else "weight_scale"
    for block in range(2):
        scales = [tensors[f"blocks.{block}.{part}.{name}"] for part in "qkv"]
        assert all(torch.equal(scale, scales[0]) for scale in scales)
    if spec != "fp8_delayed":
        pytest.importorskip("compressed_tensors", reason="the engine decodes NVFP4 by it")
        found = ht.mismatch(model, inputs(), activation="tensor" if spec == "fp8" else "1x16")
        assert found.kl < 1e-9


def test_models_are_collected():
    import gc
    import weakref

    model = model_of("fp8")
    train(model)
    gone = weakref.ref(model.blocks[0].q.weight.plain)
    del model
    gc.collect()
    assert gone() is None


def refused(error, match, groups, spec="fp8", model=None):
    model = model or Model()
    with pytest.raises(error, match=match):
        ht.quantize_(model, spec, common_scale=groups)
    assert not [m for m in model.modules() if isinstance(m, nn.Linear) and type(m.weight) is not nn.Parameter]


@pytest.mark.parametrize(
    ("error", "match", "groups"),
    [
        (TypeError, "list of lists of patterns", 3),
        (TypeError, "list of patterns for each", [3]),
        (TypeError, "list of patterns for each", ["*.q"]),
        (TypeError, "a pattern", [(1, 2)]),
        (ValueError, "at least two layers", [("*.q",)]),
        (ValueError, "layers to convert are required, got '\\*.w'", [("*.q", "*.w")]),
        (ValueError, r"without one for \['blocks.1.k'\]", [("blocks.?.q", "blocks.1.k")]),
        (ValueError, "got one for several", [("*.q", "*.q")]),
        (ValueError, "is in two groups", [("*.q", "*.k"), ("*.k", "*.v")]),
    ],
)
def test_wrong_groups(error, match, groups):
    refused(error, match, groups)


@pytest.mark.parametrize("spec", ["fp8_rowwise", "fp8_block", "mxfp8", "nvfp4_rowwise", "bf16"])
def test_recipes_without_a_scale_per_tensor(spec):
    if spec == "nvfp4_rowwise":
        spec = ht.HybridConfig(*[ht.NVFP4Quantizer(row_scaled=True)] * 3)
    refused(ValueError, "a scale per tensor", GROUPS, spec)


def test_siblings_are_quantized_alike():
    rules = ht.torchao_compat.FqnToConfig(
        {"re:.*[qvo]": ht.HybridConfig.parse("fp8"), "re:.*k": ht.HybridConfig.parse("nvfp4")}
    )
    refused(ValueError, "one recipe for the weights", GROUPS, rules)
    model = Model()
    model.blocks[0].k.bfloat16()
    refused(ValueError, "different dtypes", GROUPS, "fp8", model)
    model = model_of("fp8")
    with pytest.raises(ValueError, match="have a common scale"):
        ht.set_config_(model, rules)


def test_layers_that_are_gone_or_other_weights_are_told():
    model = model_of("fp8")
    q = model.blocks[0].q
    del model
    with pytest.raises(RuntimeError, match="of the layers of one common scale 1 are left"):
        q(inputs())
    for name in ("q", "k"):
        model = model_of("fp8")
        ht.plain_(getattr(model.blocks[0], name))
        with pytest.raises(RuntimeError, match=r"hold \['Parameter'\] beside quantized weights"):
            model(inputs())
    model = model_of("fp8", persistent=True)
    ht.plain_(model.blocks[0].q)
    with pytest.raises(RuntimeError, match=r"hold \['Parameter'\] beside quantized weights"), torch.no_grad():
        model.blocks[0].k.weight.mul_(2)
