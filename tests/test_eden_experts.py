"""``quartet2`` and ``nvfp4+eden`` in layers of experts: each expert as if it were alone.

Oracle: the products of faces of single matrices, which test_eden and test_scaled_mm compare with numpy and float64.
"""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from experts import offsets, parts
from loops import DRAWS, assert_unbiased, losses, same, watched_sample
from torch import nn
from torch.utils.checkpoint import checkpoint

import hybridtensor as ht
from hybridtensor.linear.grouped import step_of
from hybridtensor.ops import scaled_mm
from hybridtensor.state import Context

E, K, N, TOKENS = 4, 256, 128, 200
ENDS = [(5, 70, 70, 200), (0, 0, 129, 160), (0, 0, 0, 0), (200, 200, 200, 200), (0, 128, 199, 200)]
RECIPES = ["quartet2", "nvfp4+eden", "nvfp4+one_d+eden+rowwise_dequantized_weight"]


class Up(nn.Module):
    """One stack of weights, stored ``[E, out, in]`` or the other way."""

    def __init__(self, transposed=False):
        super().__init__()
        self.num_experts, self.is_transposed = E, transposed
        shape = (E, K, N) if transposed else (E, N, K)
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.bfloat16))

    def forward(self, x, ends):
        weight = self.weight if self.is_transposed else self.weight.transpose(-2, -1)
        return torch._grouped_mm(x, weight, offs=ends)


def stack():
    generator = torch.Generator().manual_seed(7)
    return (torch.randn(E, N, K, generator=generator) / 16 * 4.0 ** torch.arange(E)[:, None, None]).bfloat16()


def layer(recipe, transposed=False, **options):
    model = nn.ModuleDict({"up": Up(transposed)})
    with torch.no_grad():
        model["up"].weight.copy_(stack().transpose(-2, -1) if transposed else stack())
    return ht.quantize_(model, recipe, **options)


def operands():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(TOKENS, K, generator=generator).bfloat16(), torch.randn(
        TOKENS, N, generator=generator
    ).bfloat16()


def results(model, x, g, ends, run=None):
    """Return output, input gradient and weight gradient ``[E, N, K]``."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = (model["up"] if run is None else run)(x, offsets(ends))
    y.backward(g)
    grad = model["up"].weight.grad.clone()
    return y.detach(), x.grad, grad.transpose(-2, -1) if model["up"].is_transposed else grad


def one_by_one(model, x, g, ends):
    """Return the same of products of single matrices, which draw by the rows among all."""
    config, state = model["up"].weight.config, model["up"].weight.layer.tensors()
    y, dx, dw = torch.zeros_like(g), torch.zeros_like(x), torch.zeros(E, N, K).bfloat16()

    def faces(role, values, first_row):
        context = Context(role, state, first_row=first_row)
        quantizer = getattr(config, role)
        return quantizer.faces(values, rowwise=True, columnwise=True, dtype=values.dtype, context=context)

    for e, (start, stop) in enumerate(parts(ends)):
        if start == stop:
            continue
        rows = slice(start, stop)
        of_x, of_g = faces("input", x[rows], start), faces("grad_output", g[rows], start)
        of_w = faces("weight", stack()[e], N * e)
        y[rows] = scaled_mm(of_x[0], of_w[0], out_dtype=y.dtype)
        dx[rows] = scaled_mm(of_g[0], of_w[1], out_dtype=y.dtype)
        dw[e] = scaled_mm(of_g[1], of_x[1], out_dtype=y.dtype)
    return y, dx, dw


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_bitwise_a_loop_over_experts(recipe, transposed):
    (x, g), model = operands(), layer(recipe, transposed)
    assert step_of(model["up"].weight.config) == 128
    for ends in ENDS:
        assert same(results(model, x, g, ends), one_by_one(model, x, g, ends)), ends
        ht.step_(model)


def test_gradients_converge_on_the_exact_ones():
    (x, g), model, ends = operands(), layer("nvfp4+eden"), (100, 100, 200, 200)
    sums, squares = ([0.0, 0.0] for _ in range(2))
    for _ in range(DRAWS):
        for i, found in enumerate(results(model, x, g, ends)[1:]):
            sums[i], squares[i] = sums[i] + found.double(), squares[i] + found.double() ** 2
        ht.step_(model)
    exact = torch.zeros(TOKENS, K).double(), torch.zeros(E, N, K).double()
    for e, (start, stop) in enumerate(parts(ends)):
        exact[0][start:stop] = g[start:stop].double() @ stack()[e].double()
        exact[1][e] = g[start:stop].double().t() @ x[start:stop].double()
    assert_unbiased(sums, squares, exact)


@pytest.mark.parametrize("recipe", RECIPES[:2])
def test_draws_advance_with_steps_and_are_resumed(recipe):
    (x, g), model = operands(), layer(recipe)
    first = results(model, x, g, ENDS[0])
    assert same(first, results(model, x, g, ENDS[0]))
    ht.step_(model)
    saved, second = copy.deepcopy(model.state_dict()), results(model, x, g, ENDS[0])
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])
    assert not torch.equal(first[2], second[2])
    other = layer(recipe)
    other.load_state_dict(saved)
    assert same(second, results(other, x, g, ENDS[0]))


@pytest.mark.parametrize("keep_faces", ["auto", "always", "never"])
def test_faces_of_a_former_step_are_not_multiplied(keep_faces):
    """A step may leave the weight as it is; its face of before was rotated under other signs."""
    (x, g), model = operands(), layer("quartet2", keep_faces=keep_faces)
    for _ in range(3):
        for _ in range(2):  # gradients accumulate: faces are kept
            assert same(results(model, x, g, ENDS[0]), one_by_one(model, x, g, ENDS[0]))
        ht.step_(model, skipped=True)
        ht.step_(model)


def test_recomputed_forwards_draw_the_same():
    (x, g), model = operands(), layer("quartet2")
    recomputed = results(model, x, g, ENDS[0], lambda x, ends: checkpoint(model["up"], x, ends, use_reentrant=False))
    assert same(recomputed, results(model, x, g, ENDS[0]))


def test_batches_are_groups_of_one_size():
    (x, g), model = operands(), layer("quartet2")
    expected = results(model, x, g, (50, 100, 150, 200))
    batched = results(
        model, x, g, (50, 100, 150, 200),
        lambda x, _: torch.bmm(x.view(E, 50, K), model["up"].weight.transpose(-2, -1)).flatten(0, 1),
    )  # fmt: skip
    assert same(batched, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", RECIPES[:2])
def test_one_graph_for_all_offsets_draws_as_eager_code_does(recipe):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    (x, g), eager, compiled = operands(), layer(recipe), layer(recipe)
    run = torch.compile(compiled["up"], fullgraph=True, backend="aot_eager")
    for ends in ENDS[:2]:
        assert same(results(compiled, x, g, ends, run), results(eager, x, g, ends))
        ht.step_(eager)
        ht.step_(compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_watching_measures_what_was_rotated():
    (x, g), model = operands(), layer("quartet2")
    sample = watched_sample(model, lambda: results(model, x, g, (100, 100, 200, 200)))
    faces = {row.operand: row.statistics for row in sample.faces if row.format == "nvfp4_eden"}
    assert sorted(faces) == ["grad_output.columnwise", "grad_output.rowwise", "input.columnwise", "weight.columnwise"]
    for operand in ("grad_output.columnwise", "grad_output.rowwise"):
        assert faces[operand]["sqnr"] == pytest.approx(20.1, abs=0.7)
    products = {row.product: row.statistics["sqnr"] for row in sample.products}
    assert products["grad_input"] > 14
    assert products["grad_weight"] > 14


def test_it_is_explained():
    rows = ht.explain(layer("quartet2"), show=False).rows
    assert [(row.gemm, row.left, row.right) for row in rows] == [
        ("output", "input.rowwise: nvfp4_max256", "weight.rowwise: nvfp4_max256"),
        ("grad_input", "grad_output.rowwise: nvfp4_eden", "weight.columnwise: nvfp4_eden of rowwise"),
        ("grad_weight", "grad_output.columnwise: nvfp4_eden", "input.columnwise: nvfp4_eden of rowwise"),
    ]
    assert {(row.backend, row.reason.partition(",")[0]) for row in rows} == {("emulated", "group by group")}


def test_the_sizes_of_weights_are_multiples_of_128():
    model = nn.ModuleDict({"up": Up()})
    model["up"].weight = nn.Parameter(torch.zeros(E, 96, K))
    with pytest.raises(ValueError, match="multiple of 128"):
        ht.quantize_(model, "quartet2")


def test_experts_train():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_experts = E
            self.up, self.down = (nn.Parameter(torch.randn(E, 128, 128) / 11) for _ in range(2))

        def forward(self, x, ends):
            hidden = F.gelu(torch._grouped_mm(x, self.up.transpose(-2, -1), offs=ends))
            return torch._grouped_mm(hidden, self.down.transpose(-2, -1), offs=ends)

    torch.manual_seed(0)
    model = ht.quantize_(Experts().bfloat16(), "quartet2")
    optimizer = torch.optim.SGD(model.parameters(), lr=30.0)
    x = torch.randn(TOKENS, 128).bfloat16()
    found = losses(model, optimizer, lambda: (model(x, offsets(ENDS[0])) - x).square().mean())
    assert found[-1] < 0.8 * found[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU is waited for")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_host_does_not_wait(recipe, transposed):
    """And a GPU has the results of the CPU, but for the order of additions."""
    (x, g), model = operands(), layer(recipe, transposed)
    expected = results(model, x, g, ENDS[0])
    model.cuda()
    x, g, ends = x.cuda().requires_grad_(), g.cuda(), offsets(ENDS[0], "cuda")
    model["up"](x, ends).backward(g)
    model.zero_grad()
    x.grad = None
    with warnings.catch_warnings():  # torch says that it is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        y = model["up"](x, ends)
        y.backward(g)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    grad = model["up"].weight.grad
    found = y.detach(), x.grad, grad.transpose(-2, -1) if transposed else grad
    for mine, theirs in zip(found, expected, strict=True):
        difference = (mine.cpu().double() - theirs.double()).abs()
        assert difference.max() <= 2**-7 * theirs.double().abs().max()
