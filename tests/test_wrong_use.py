"""Wrong use ends in an error of this library that says who asked for what and what came, or it works."""

import itertools
import os
import re
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import tiers
import torch
import torch.nn.functional as F
import wrong_use
from torch import nn
from torchao.quantization import FqnToConfig
from valid_calls import FP8, HALF, KINDS, ROWS, linear, nested, persistent

import hybridtensor as ht
from hybridtensor import recipes
from hybridtensor.subclasses import IdentityTensor
from hybridtensor.testing import exact_values, random_tensor

# -- every parameter of everything public


def test_everything_public_has_a_row_with_all_its_parameters():
    found = dict(wrong_use.public())
    with_parameters = {name for name, function in found.items() if wrong_use.parameters(function)}
    assert with_parameters - ROWS.keys() == set()
    assert ROWS.keys() - found.keys() == set()
    for name in ROWS:
        row = ROWS[name]
        assert set(wrong_use.parameters(found[name])) <= {*row.make()[1], *row.plumbing}, name


@pytest.mark.parametrize("name", ROWS)
def test_the_calls_of_the_table_are_valid(name):
    assert wrong_use.result_of(lambda: wrong_use.call_with(ROWS[name])) == "accepted"


@pytest.mark.parametrize("name", ROWS)
def test_every_wrong_kind_of_argument_is_a_clear_error(name):
    assert len(KINDS) >= 6
    wrong = [str(outcome) for outcome in wrong_use.outcomes([name]) if not outcome.is_right]
    assert not wrong, "\n".join(wrong)


@tiers.long("test_imports shows that no check vanishes there; torch is compiled anew for it")
def test_and_so_it_is_under_python_o():
    helpers = str(Path(wrong_use.__file__).parent)
    path = os.pathsep.join([helpers, str(Path(wrong_use.PACKAGE).parent), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-O", "-c", "import wrong_use; wrong_use.main()"],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.fullmatch(r"\d{4} tried, 0 not right, __debug__ is False\n", run.stdout)


# -- torch's functions on weights


@pytest.fixture
def weight():
    torch.manual_seed(0)
    return ht.quantize_(nn.Linear(32, 16, bias=False), "fp8").weight


X, OUT = torch.ones(4, 32), torch.empty(4, 16)

MISUSE_OF_WEIGHTS = {
    "mm out": lambda w: torch.mm(X, w.t(), out=OUT),
    "matmul out": lambda w: torch.matmul(X, w.t(), out=OUT),
    "addmm out": lambda w: torch.addmm(torch.ones(16), X, w.t(), out=OUT),
    "mm into a weight": lambda w: torch.mm(torch.ones(16, 4), torch.ones(4, 32), out=w),
    "short bias": lambda w: F.linear(X, w, torch.ones(1)),
    "bias of the input": lambda w: F.linear(X, w, torch.ones(32)),
    "bias with rows": lambda w: F.linear(X, w, torch.ones(4, 16)),
    "bias in integers": lambda w: F.linear(X, w, torch.ones(16, dtype=torch.int32)),
    "bias elsewhere": lambda w: F.linear(X, w, torch.ones(16, device="meta")),
    "sparse": lambda w: F.linear(X.to_sparse(), w),
    "nested": lambda w: F.linear(nested(torch.strided), w),
    "jagged": lambda w: F.linear(nested(torch.jagged), w),
    "complex": lambda w: F.linear(X.to(torch.complex64), w),
    "meta": lambda w: F.linear(X.to("meta"), w),
    "number": lambda w: F.linear(torch.tensor(1.0), w),
    "a weight of one dimension": lambda w: F.linear(X, w[0]),
    "a weight of three dimensions": lambda w: F.linear(X, w[None]),
    "vector of other features right of a weight": lambda w: w @ torch.ones(16),
    "dequantize to integers": lambda w: w.dequantize(torch.int8),
    "dequantize to a string": lambda w: w.dequantize("fp32"),
    "einsum": lambda w: torch.einsum("tk,nk->tn", X, w),
    "absent face": lambda w: torch.mm(X, ht.Float8Quantizer().quantize(HALF, columnwise=False)),
    "unknown face": lambda w: ht.Float8Quantizer().quantize(HALF).require_face("sideways", name="x", gemm="mm"),
}


@pytest.mark.parametrize("what", MISUSE_OF_WEIGHTS)
def test_misuse_of_weights(what, weight):
    with torch.no_grad():
        result = wrong_use.result_of(lambda: MISUSE_OF_WEIGHTS[what](weight))
    assert result == "clear error"


@pytest.mark.parametrize("grad", [True, False])
def test_products_take_operands_by_name_in_any_order(weight, grad):
    x, bias = random_tensor(4, 32, dtype=torch.float32), torch.randn(16)
    by_name = {"mat2": weight.t(), "mat1": x, "input": bias}
    with torch.set_grad_enabled(grad):
        assert torch.equal(torch.addmm(**by_name), torch.addmm(bias, x, weight.t()))
        assert torch.equal(torch.addmm(**by_name), F.linear(x, weight, bias))
        assert torch.equal(torch.addmm(**by_name, beta=2, alpha=3), torch.addmm(bias, x, weight.t(), beta=2, alpha=3))
        assert torch.equal(torch.mm(mat2=weight.t(), input=x), torch.mm(x, weight.t()))
        assert torch.equal(torch.matmul(other=weight.t(), input=x), x @ weight.t())
        assert torch.equal(
            bias.expand(4, 16).addmm(mat2=weight.t(), mat1=x), torch.addmm(bias.expand(4, 16), x, weight.t())
        )


@pytest.mark.parametrize("recipe", ["fp8", "fp8_rowwise", "fp8_block", "mxfp8+mx_two_d", "nvfp4", "nvfp4+one_d"])
def test_dequantizing_to_float64_is_exact(recipe):
    """Bit for bit what numpy makes of the bytes; the rotation back, which numpy does not know, is exact in float64."""
    x = random_tensor(128, 128)
    config = ht.HybridConfig.parse(recipe)
    for role in ("input", "weight", "grad_output"):
        whole = getattr(config, role).quantize(x)
        for face in (whole.rowwise, whole.columnwise):
            got = face.dequantize(torch.float64)
            assert got.dtype == torch.float64
            if face.format.hadamard:
                assert torch.equal(got.float(), face.dequantize(torch.float32)) or torch.allclose(
                    got, face.dequantize(torch.float32).double(), rtol=2.0**-20, atol=2.0**-20 * got.abs().max().item()
                )
            else:
                expected = exact_values(face)
                assert torch.equal(got, expected if face.axis == -1 else expected.t())
        assert whole.dequantize(torch.float64).dtype == torch.float64


def test_float64_of_values_that_are_not_quantized():
    x = random_tensor(32, 32)
    assert torch.equal(ht.MasterWeight(x, FP8).dequantize(torch.float64), x.double())
    assert torch.equal(IdentityTensor(x).dequantize(torch.float64), x.double())
    assert torch.equal(ht.IdentityQuantizer().quantize(x).dequantize(torch.float64), x.double())


# -- values that are of the right kind

WRONG_VALUES = {
    "a context that is a role": lambda: ht.Float8Quantizer().quantize(HALF, context="input"),
    "an unknown role": lambda: ht.Float8Quantizer().quantize(HALF, context=ht.Context("weigth")),
    "an unknown direction": lambda: ht.Float8Quantizer().quantize(HALF, context=ht.Context(direction="up")),
    "a delayed scale without a state": lambda: ht.DelayedFloat8Quantizer().quantize(HALF),
    "a recipe that is a string": lambda: ht.MasterWeight(HALF, "fp8"),
    "a negative history": lambda: ht.DelayedFloat8Quantizer(history_length=-4),
    "half a margin": lambda: recipes.fp8_delayed(margin=0.5),
    "a margin that leaves fp32": lambda: recipes.fp8_delayed(margin=1000),
    "a negative seed": lambda: recipes.nvfp4(seed=-1),
    "a seed beyond 29 bits": lambda: recipes.nvfp4(seed=2**29),
    "persistent in words": lambda: ht.quantize_(nn.Linear(4, 4), "fp8", persistent="no"),
    "strict in words": lambda: ht.check(linear(), torch.ones(4, 32), strict="yes"),
    "a number to keep": lambda: ht.quantize_(nn.Linear(4, 4), "fp8", keep_bf16=[0]),
    "a pattern that is none": lambda: ht.quantize_(nn.Linear(4, 4), FqnToConfig(OrderedDict({"re:(": FP8}))),
    "a format that is none": lambda: ht.formats.get_format("fp7"),
    "a model in float64": lambda: ht.quantize_(nn.Linear(32, 32).double(), "fp8"),
    "an unknown face": lambda: ht.HybridConfig.by_gemm(output="fp8", grad_input="fp8", grad_weight="fp9"),
    "no blocks": lambda: recipes.edge_blocks(nn.Linear(4, 4)),
    "a fraction of blocks": lambda: recipes.edge_blocks(nn.ModuleList([nn.Identity()] * 4), first=0.5),
    "half a step": lambda: recipes.schedule({0: "fp8"}).at(0.5),
    "a schedule of numbers": lambda: recipes.schedule({0: 8}),
    "a group that is a number": lambda: ht.set_data_parallel_group_(linear(), 3),
    "a group before quantize_": lambda: ht.set_data_parallel_group_(nn.Linear(32, 32), None),
    "five dimensions": lambda: ht.Float8Quantizer().quantize(torch.ones(1, 1, 1, 1, 32)),
    "no dimension": lambda: ht.Float8Quantizer().quantize(torch.tensor(1.0)),
    "no face": lambda: ht.Float8Quantizer().quantize(HALF, rowwise=False, columnwise=False),
    "meta into memory": lambda: ht.Float8Quantizer().update_(persistent(), HALF.to("meta")),
}


@pytest.mark.parametrize("what", WRONG_VALUES)
def test_wrong_values(what):
    assert wrong_use.result_of(WRONG_VALUES[what]) == "clear error"


# -- the wrong order


def optimizer_of(*shapes):
    weights = [ht.quantize_(nn.Linear(*shape, bias=False), "fp8", persistent=True).weight for shape in shapes]
    return ht.optim.MasterWeights(torch.optim.SGD, weights, lr=0.1)


WRONG_ORDERS = {
    "set_config_ before quantize_": lambda: ht.set_config_(nn.Linear(4, 4), "fp8"),
    "state of another model": lambda: optimizer_of((32, 32)).load_state_dict(optimizer_of((32, 16)).state_dict()),
    "state of more parameters": lambda: optimizer_of((32, 32)).load_state_dict(
        optimizer_of((32, 32), (32, 32)).state_dict()
    ),
    "state of a plain optimizer": lambda: optimizer_of((32, 32)).load_state_dict(
        torch.optim.SGD([torch.ones(32, 32)]).state_dict()
    ),
    "offloading twice": lambda: nest_offloading(same=True),
    "offloading inside of what is offloaded": lambda: nest_offloading(same=False),
    "fragments without ranks": lambda: ht.distributed.quantize_master_weights([persistent()], [None], [None]),
}


def nest_offloading(same):
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    with ht.offload.offload_activations(blocks), ht.offload.offload_activations(blocks if same else blocks[0]):
        pass


@pytest.mark.parametrize("what", WRONG_ORDERS)
def test_wrong_orders(what):
    assert wrong_use.result_of(WRONG_ORDERS[what]) == "clear error"


def test_orders_that_are_fine():
    plain = nn.Linear(32, 32)
    assert ht.step_(plain) is plain
    assert ht.plain_(ht.plain_(linear())).weight.dtype == torch.float32
    optimizer = ht.optim.MasterWeights(torch.optim.SGD, plain.parameters(), lr=0.1)
    plain(torch.ones(4, 32)).sum().backward()
    before = plain.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(plain.weight, before)
    for first, second in itertools.permutations(["fp8", "mxfp8"], 2):
        assert str(ht.quantize_(linear(first), second).weight.config) == second


def test_what_errors_tell_of_a_value_is_short():
    """Never the elements of a tensor, nor a table."""
    with pytest.raises(TypeError, match=r"a path is required, got a value of watch$"):
        ht.report("run.json", ht.watch(linear()))
    for wrong in (torch.ones(1000), [torch.ones(1000)], "x" * 10_000, {i: i for i in range(10_000)}):
        with pytest.raises((TypeError, ValueError)) as raised:
            ht.MXFP8Quantizer(dtype=wrong)
        assert len(str(raised.value)) < 250


def test_random_tensor_without_a_shape():
    with pytest.raises(ValueError, match="random_tensor: a shape is required, got none"):
        random_tensor()
