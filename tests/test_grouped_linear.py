"""The linear layers of experts: one grouped product instead of a product each.

Oracle: a loop over linear layers, one per expert, bitwise; what those are bitwise is tested in test_linear.
"""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from experts import ENDS, EXPERTS, TOKENS, Experts, Mixture, offsets, one_by_one, parts
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples
from torch import nn
from torch.utils.checkpoint import checkpoint

import hybridtensor as ht
from hybridtensor import ops
from hybridtensor.linear.grouped import step_of
from hybridtensor.ops import Groups
from hybridtensor.ops.groups import checked
from hybridtensor.ops.references import float8
from hybridtensor.recipes import RECIPES, by_type, from_name
from hybridtensor.recipes.config import QuantizerRole
from hybridtensor.state import Context
from hybridtensor.subclasses import MasterWeight
from hybridtensor.testing import random_tensor

N, K = 96, 64
DETERMINISTIC = [name for name in RECIPES if not from_name(name).stochastic and not from_name(name).delayed_rules()]


def operands(dtype=torch.bfloat16, n=64, k=K, tokens=TOKENS, experts=EXPERTS):
    x, g = random_tensor(tokens, k, dtype=dtype, seed=1), random_tensor(tokens, n, dtype=dtype, seed=2)
    w = torch.stack([random_tensor(n, k, dtype=dtype, seed=3 + e) for e in range(experts)])
    return x, w, g


def grouped(x, w, g, ends, config, *, transposed=False):
    """Return output, input gradient and weight gradient of one grouped product."""
    stored = w.transpose(-2, -1).contiguous() if transposed else w.clone()
    weight = nn.Parameter(MasterWeight(stored, config))
    x = x.clone().requires_grad_()
    ends = offsets(ends, x.device)
    y = torch._grouped_mm(x, weight if transposed else weight.transpose(-2, -1), offs=ends)
    y.backward(g)
    return y.detach(), x.grad, weight.grad.transpose(-2, -1) if transposed else weight.grad


def same(mine, theirs):
    return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_bitwise_a_loop_over_experts(name):
    config, (x, w, g) = from_name(name), operands()
    for ends in ENDS:
        expected = one_by_one(x, w, g, ends, config)
        assert same(grouped(x, w, g, ends, config), expected), ends
    expected = one_by_one(x, w, g, ENDS[1], config, transposed=True)
    assert same(grouped(x, w, g, ENDS[1], config, transposed=True), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a GPU with the CPU")
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_on_a_gpu(name):
    """Oracle: the CPU. Faces have the same bits, so that results differ by the order of additions: by one unit in the
    last place of bf16, 2^-7, of the largest element; rows and weights of no tokens by nothing.
    """
    config, (x, w, g) = from_name(name), operands()
    for ends in ENDS:
        for transposed in (False, True):
            expected = grouped(x, w, g, ends, config, transposed=transposed)
            made = grouped(x.cuda(), w.cuda(), g.cuda(), ends, config, transposed=transposed)
            for mine, theirs in zip(made, expected, strict=True):
                difference = (mine.cpu().double() - theirs.double()).abs()
                assert difference.max() <= 2**-7 * theirs.double().abs().max(), ends
                assert not difference[theirs == 0].any()


MIXES = ["fp8/fp8_rowwise/bf16", "mxfp8+save_original_input", "nvfp4+nearest", "fp8+pow2_scale", "mxfp8+mx_two_d",
         "bf16/mxfp8/fp8", "fp8_rowwise/nvfp4/mxfp8+nearest",
         "nvfp4+nearest+four_over_six", "mxfp4+nearest+mx_even"]  # fmt: skip


@pytest.mark.parametrize("spec", MIXES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_of_any_formats_and_dtype(spec, dtype):
    config, (x, w, g) = from_name(spec), operands(dtype)
    for ends in ENDS[:2]:
        assert same(grouped(x, w, g, ends, config), one_by_one(x, w, g, ends, config)), ends


@examples(15)
@given(st.lists(st.integers(0, 60), min_size=EXPERTS, max_size=EXPERTS), st.sampled_from(DETERMINISTIC))
def test_of_any_offsets(sizes, name):
    ends = torch.tensor(sizes).cumsum(0).tolist()
    config, (x, w, g) = from_name(name), operands(tokens=240)
    assert same(grouped(x, w, g, ends, config), one_by_one(x, w, g, ends, config))


@pytest.mark.parametrize("name", ["mxfp8", "fp8_rowwise", "fp8_block"])
def test_one_expert_is_a_linear_layer(name):
    config, (x, w, g) = from_name(name), operands(experts=1)
    assert same(grouped(x, w, g, (TOKENS,), config), one_by_one(x, w, g, (TOKENS,), config))


def test_batches_are_groups_of_one_size():
    config, (x, w, g) = from_name("mxfp8"), operands()
    ends = [40, 80, 120, 160]
    expected = one_by_one(x, w, g, ends, config)
    batched = [t.view(EXPERTS, 40, -1) for t in (x, g)]
    for multiply in (torch.bmm, torch.matmul, torch._grouped_mm, lambda a, b: a @ b):
        weight, tokens = nn.Parameter(MasterWeight(w.clone(), config)), batched[0].clone().requires_grad_()
        y = multiply(tokens, weight.transpose(-2, -1))
        y.backward(batched[1])
        assert same([y.detach().flatten(0, 1), tokens.grad.flatten(0, 1), weight.grad], expected)


def test_one_by_one_is_quantized_too():
    """As models loop over experts: ``F.linear(x, w[e])``, ``x @ w[e].T``."""
    config, (x, w, g) = from_name("mxfp8"), operands()
    expected = one_by_one(x, w, g, ENDS[0], config)
    for multiply in (F.linear, lambda a, b: a @ b.T):
        weight, tokens = nn.Parameter(MasterWeight(w.clone(), config)), x.clone().requires_grad_()
        y = torch.cat([multiply(tokens[s:t], weight[e]) for e, (s, t) in enumerate(parts(ENDS[0]))])
        y.backward(g)
        assert same([y.detach(), tokens.grad, weight.grad], expected)


def test_what_is_frozen_gets_no_gradient():
    config, (x, w, g) = from_name("mxfp8"), operands()
    _, dx, dw = one_by_one(x, w, g, ENDS[0], config)
    frozen = nn.Parameter(MasterWeight(w.clone(), config), requires_grad=False)
    tokens = x.clone().requires_grad_()
    torch._grouped_mm(tokens, frozen.transpose(-2, -1), offs=offsets(ENDS[0])).backward(g)
    assert frozen.grad is None
    assert torch.equal(tokens.grad, dx)
    weight = nn.Parameter(MasterWeight(w.clone(), config))
    torch._grouped_mm(x, weight.transpose(-2, -1), offs=offsets(ENDS[0])).backward(g)
    assert torch.equal(weight.grad, dw)
    with torch.no_grad():
        assert not torch._grouped_mm(x, weight.transpose(-2, -1), offs=offsets(ENDS[0])).requires_grad


def test_an_expanded_gradient():
    """Of ``y.sum()``: torch's own grouped product refuses its strides."""
    config, (x, w, _) = from_name("mxfp8"), operands()
    expanded = torch.ones(1, 1, dtype=x.dtype).expand(TOKENS, w.shape[1])
    assert same(grouped(x, w, expanded, ENDS[0], config), one_by_one(x, w, expanded, ENDS[0], config))


def test_delayed_scales_are_of_each_expert():
    """Two steps, so that scales differ: those of a linear layer per expert."""
    model = ht.quantize_(Experts().bfloat16(), "fp8_delayed")
    x, _, _ = operands()
    alone = [nn.Linear(K, 128, bias=False, dtype=torch.bfloat16) for _ in range(EXPERTS)]
    with torch.no_grad():
        for e, layer in enumerate(alone):
            layer.weight.copy_(ht.plain_state_dict(model)["w1"][e])
    alone = ht.quantize_(nn.ModuleList(alone), "fp8_delayed")
    state = model.w1_quantization_state
    assert state.slots == tuple(f"{role}[{e}]" for role in ("input", "weight", "grad_output") for e in range(EXPERTS))
    for step in range(3):
        ends = offsets(ENDS[step])
        y = torch._grouped_mm(x * (step + 1), model.w1.transpose(-2, -1), offs=ends)
        grad = torch.randn_like(y)
        y.backward(grad)
        for e, (start, stop) in enumerate(parts(ENDS[step])):
            own = alone[e](x[start:stop] * (step + 1))
            own.backward(grad[start:stop])
            assert torch.equal(own, y[start:stop])
        for e, layer in enumerate(alone):
            scales = state.encode_scale.view(3, EXPERTS)[:, e]
            assert torch.equal(scales, layer.quantization_state.encode_scale)
        ht.step_(model)
        ht.step_(alone)
    with pytest.raises(NotImplementedError, match=r"a product of one expert .* multiply by F\.grouped_mm"):
        F.linear(x, model.w1[0])


def test_draws_repeat_and_differ():
    """Random rounding draws by the row among all tokens: two groups of the same tokens are not rounded alike."""
    model = ht.quantize_(Experts().bfloat16(), "nvfp4")
    x, _, _ = operands()
    x[80:] = x[:80]
    context = Context("grad_output", model.w1.layer.tensors(), groups=Groups(2, offsets((80, 160)), 16))

    def drawn():
        faces = from_name("nvfp4").grad_output.faces(x, rowwise=True, columnwise=False, dtype=x.dtype, context=context)
        return faces[0].qdata

    first = drawn()
    assert torch.equal(first, drawn())
    assert not torch.equal(first[:80], first[80:])
    ht.step_(model)
    assert not torch.equal(first, drawn())


@pytest.mark.parametrize(
    "name", ["mxfp8", "fp8", "fp8_rowwise", "fp8_block", "nvfp4_1d_weight", "fp8_dequantized_backward"]
)
def test_no_scale_is_of_two_experts(name):
    """Each expert's faces are those of its matrix alone, however loud its neighbour is."""
    config, (x, w, _) = from_name(name), operands()
    w[1] *= 100
    x[32:96] *= 100
    weight = MasterWeight(w, config)
    stack = weight.quantized(rowwise=True, columnwise=True, dtype=w.dtype)
    for e in range(EXPERTS):
        alone = MasterWeight(w[e].clone(), config).quantized(rowwise=True, columnwise=True, dtype=w.dtype)
        for of_stack, one in zip(stack, alone, strict=True):
            for mine, theirs in zip(of_stack.tensors(), one.tensors(), strict=True):
                assert torch.equal(mine[e].view(torch.uint8), theirs.view(torch.uint8))


def test_padded_rows_have_room_for_whole_steps():
    for name in RECIPES:
        step = step_of(from_name(name))
        for role in ("input", "grad_output"):
            quantizer = getattr(from_name(name), role)
            for extent in (quantizer.columnwise_format.block[1], quantizer.rowwise_format.block[0]):
                assert extent is None or step % extent == 0
        assert step % 16 == 0


def test_siblings_share_a_cast(monkeypatch):
    """w1 and w3 read one input: two inputs, three gradients, and three weights by each face; then, as nothing writes
    them, by both at once; then weights are known.
    """
    counts = []
    cast = ops.quantize_groups
    monkeypatch.setattr("hybridtensor.ops.quantize_groups", lambda *args: counts.append(1) or cast(*args))
    model, x = ht.quantize_(Experts().bfloat16(), "mxfp8"), operands()[0].requires_grad_()
    for expected in (11, 8, 5):
        counts.clear()
        model(x * 1, offsets(ENDS[0])).sum().backward()
        assert len(counts) == expected


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe", ["fp8", "fp8_rowwise"])
def test_stacks_are_measured_once_for_both_faces(recipe, compiled, monkeypatch):
    """Forward measures what backward casts by; the gradients are those of weights that each cast measures."""
    model, (x, _, g) = ht.quantize_(Experts().bfloat16(), recipe), operands()
    run = torch.compile(model, backend="aot_eager") if compiled else model

    def gradients():
        torch._dynamo.reset()
        model.zero_grad()
        given = x.clone().requires_grad_()
        out = run(given, offsets(ENDS[0]))
        out.backward(g[:, : out.shape[1]])
        ht.step_(model)
        with torch.no_grad():
            torch._foreach_mul_(list(model.parameters()), 1)  # cached faces are old
        return [out, given.grad, *(p.grad for p in model.parameters())]

    counts, amaxes, real, cast = [], [], ops.measure_stack, float8.quantize
    monkeypatch.setattr("hybridtensor.ops.measure_stack", lambda *args: counts.append(1) or real(*args))
    monkeypatch.setattr(float8, "quantize", lambda x, *args: amaxes.append(args[-1]) or cast(x, *args))
    together = gradients()
    assert compiled or len(counts) == 3  # a compiler traces more than once
    # both faces of each matrix of three weights
    assert sum(amax is not None for amax in amaxes) == 2 * 3 * EXPERTS
    monkeypatch.setattr("hybridtensor.ops.measure_stack", lambda *args: (None, None))
    for mine, theirs in zip(together, gradients(), strict=True):
        assert torch.equal(mine, theirs)


def test_offsets_are_not_written_before_backward():
    config, (x, w, g) = from_name("mxfp8"), operands()
    weight, ends = nn.Parameter(MasterWeight(w, config)), offsets(ENDS[0])
    y = torch._grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    ends.copy_(offsets(ENDS[1]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(g)


def test_other_offsets_share_nothing():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_experts = EXPERTS
            self.a, self.b = (nn.Parameter(torch.ones(EXPERTS, N, K)) for _ in range(2))

        def forward(self, x, one, other):
            return (
                torch._grouped_mm(x, w.transpose(-2, -1), offs=ends) for w, ends in ((self.a, one), (self.b, other))
            )

    model, x = ht.quantize_(Twice().bfloat16(), "fp8"), operands()[0]
    x[:40] *= 100
    mine = list(model(x.clone().requires_grad_() * 1, offsets(ENDS[0]), offsets(ENDS[1])))
    with ht.share_inputs(False):
        alone = list(model(x.clone().requires_grad_() * 1, offsets(ENDS[0]), offsets(ENDS[1])))
    assert same(mine, alone)
    assert not torch.equal(*mine)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["mxfp8", "fp8", "fp8_rowwise", "fp8_dequantized_backward", "fp8_delayed"])
def test_one_graph_for_all_offsets(name, device):
    model = ht.quantize_(Experts().bfloat16().to(device), name)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for ends in ENDS:
        results = []
        for run in (model, compiled):
            x = operands()[0].to(device).requires_grad_()
            y = run(x, offsets(ends, device))
            y.backward(torch.ones_like(y))
            results.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
            model.zero_grad()
        assert same(*results)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU is waited for")
@pytest.mark.parametrize("name", ["fp8_rowwise", "fp8", "fp8_block", "mxfp8", "nvfp4", "bf16/mxfp8/bf16"])
def test_the_host_does_not_wait(name):
    model, ends = ht.quantize_(Experts().bfloat16().cuda(), name), offsets(ENDS[0], "cuda")
    x = operands()[0].cuda().requires_grad_()
    g = torch.ones_like(model(x, ends))

    def step():
        x.grad = None
        model.zero_grad()
        model(x * 1, ends).backward(g)

    step()
    with warnings.catch_warnings():  # torch says that it is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiled", [False, True])
def test_wrong_offsets_are_found_on_request(device, compiled):
    """On a GPU, where the host looks at offsets only then. On a CPU always."""
    x, wrong = operands()[0].to(device), offsets((32, 16, 96, 160), device)
    model = ht.quantize_(Experts().bfloat16().to(device), "fp8_rowwise")
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    says = r"offsets that do not decrease, up to 160 rows, are required, got \[32, 16, 96, 160\]"
    with ht.debug(offsets=True), pytest.raises(ValueError, match=says):
        run(x, wrong)
    if device == "cpu":
        with pytest.raises(ValueError, match=says):
            run(x, wrong)


def test_offsets_are_checked_until_a_context_ends():
    groups = Groups(2, offsets((9, 3)), 32)
    checked(groups, 16)
    with ht.debug(offsets=True), pytest.raises(ValueError, match="do not decrease"):
        checked(groups, 16)
    checked(groups, 16)
    with pytest.raises(TypeError, match="debug: offsets is True or False, got 'all'"):
        ht.debug(offsets="all")


def test_recomputed_and_offloaded():
    model, (x, _, _) = ht.quantize_(Experts().bfloat16(), "mxfp8"), operands()

    def step(run):
        tokens = x.clone().requires_grad_()
        run(tokens).square().sum().backward()
        found = [tokens.grad, *(p.grad.clone() for p in model.parameters())]
        model.zero_grad()
        return found

    expected = step(lambda t: model(t, offsets(ENDS[0])))
    assert same(step(lambda t: checkpoint(model, t, offsets(ENDS[0]), use_reentrant=False)), expected)
    with torch.autograd.graph.save_on_cpu():
        assert same(step(lambda t: model(t, offsets(ENDS[0]))), expected)


def test_a_mixture_of_experts_is_quantized():
    model = ht.quantize_(nn.Sequential(Mixture(), Mixture()).bfloat16(), "mxfp8")
    x = operands()[0]
    said = ht.explain(model, show=False)
    assert said.coverage.parameters > 0.99
    assert {row.layer for row in said.rows} == {f"{i}.experts.{w}" for i in range(2) for w in ("w1", "w2", "w3")}
    assert {row.backend for row in said.rows} == {"emulated"}
    assert said.rows[0].reason.startswith("group by group")
    assert [name for name, _ in said.skipped] == ["0.router", "1.router"]
    found = ht.check(model, x)
    assert not found.problems
    assert found.flops > 0.9
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_saved_loaded_copied_and_made_plain():
    torch.manual_seed(0)
    plain = Mixture().bfloat16()
    x = operands()[0]
    for name in ("mxfp8", "fp8_delayed"):
        model = ht.quantize_(copy.deepcopy(plain), name)
        for _ in range(2):
            model(x).sum().backward()
            ht.step_(model)
        expected, state = model(x).detach(), model.state_dict()
        for options in ({}, {"assign": True}):
            other = ht.quantize_(Mixture().bfloat16(), name)
            other.load_state_dict(state, **options)
            assert torch.equal(other(x), expected), options
        assert torch.equal(copy.deepcopy(model)(x), expected)
        back = Mixture().bfloat16()
        back.load_state_dict(ht.plain_state_dict(model))
        assert torch.equal(back.experts.w1, plain.experts.w1)
        assert type(ht.plain_(model).experts.w1) is nn.Parameter
        assert list(model.state_dict()) == list(plain.state_dict())


class Turned(nn.Module):
    """One stack that is stored the other way."""

    def __init__(self):
        super().__init__()
        self.num_experts, self.is_transposed = EXPERTS, True
        self.w = nn.Parameter(torch.randn(EXPERTS, K, N) / 8)

    def forward(self, x):
        return torch._grouped_mm(x, self.w, offs=offsets(ENDS[0], x.device))


class Straight(Turned):
    """The same stack as linear layers store their weights."""

    def __init__(self):
        super().__init__()
        self.is_transposed, self.w = False, nn.Parameter(self.w.detach().transpose(-2, -1).contiguous())

    def forward(self, x):
        return torch._grouped_mm(x, self.w.transpose(-2, -1), offs=offsets(ENDS[0], x.device))


@pytest.mark.parametrize("spec", ["fp8", "fp8_rowwise", "fp8_block", "mxfp8", "bf16"])
def test_gradients_of_a_transposed_stack_are_those_of_the_other(spec, device):
    """Bit for bit, but for sums in another order on a GPU, whose matrix units get the operands the other way round."""
    grads = []
    for make in (Turned, Straight):
        torch.manual_seed(0)
        model = ht.quantize_(make().to(device, torch.bfloat16), spec)
        x = random_tensor(TOKENS, K, device=device).requires_grad_()
        model(x).backward(random_tensor(TOKENS, N, seed=1, device=device))
        grads.append((x.grad, model.w.grad))
    assert torch.equal(grads[0][0], grads[1][0])
    mine, theirs = grads[0][1].transpose(-2, -1), grads[1][1]
    assert (mine - theirs).norm() <= (2**-8 * theirs.norm() if device == "cuda" else 0)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["fp8", "fp8_rowwise", "mxfp8", "bf16"])
def test_gradients_of_a_transposed_stack_lie_as_it_does(name, compiled):
    """Else autograd copies each one into the order of its parameter."""
    model, lie = ht.quantize_(Turned(), name), []
    model.w.register_hook(lambda grad: lie.append((grad.shape, grad.is_contiguous())))
    run = torch.compile(model, backend="aot_eager") if compiled else model
    run(torch.randn(TOKENS, K)).sum().backward()
    assert lie == [((EXPERTS, K, N), True)]


@pytest.mark.parametrize("make", [Mixture, Turned])
@pytest.mark.parametrize("name", ["mxfp8", "fp8", "fp8_high_precision_backward", "nvfp4_row_scaled_fwd_mxfp8_bwd"])
def test_persistent_experts_train_as_masters_do(name, make, tmp_path):
    torch.manual_seed(0)
    plain, x = make(), torch.randn(TOKENS, K)
    models = [ht.quantize_(copy.deepcopy(plain), name, persistent=persistent) for persistent in (False, True)]
    optimizers = [
        torch.optim.AdamW(models[0].parameters(), lr=1e-2),
        ht.optim.MasterWeights(torch.optim.AdamW, models[1].parameters(), lr=1e-2),
    ]
    for _ in range(3):
        outputs = [model(x) for model in models]
        assert torch.equal(*outputs)
        for y, optimizer in zip(outputs, optimizers, strict=True):
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    other = ht.quantize_(make(), name, persistent=True)
    other.load_state_dict(models[1].state_dict())
    assert torch.equal(other(x), models[1](x))
    path = tmp_path / "weights.safetensors"
    ht.export_safetensors(models[1], path, dtype="quantized", columnwise=True)
    loaded = ht.load_safetensors(path)
    for key, weight in models[1].named_parameters():
        if "w" in key.rpartition(".")[2] and weight.dim() == 3:
            assert torch.equal(loaded[key].dequantize(), weight.dequantize())


def test_from_the_meta_device():
    with torch.device("meta"):
        model = ht.quantize_(Mixture().bfloat16(), "fp8_delayed")
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.1)
    assert torch.isfinite(model(operands()[0])).all()


class Stored(nn.Module):
    """Experts stored the other way."""

    def __init__(self, says=True):
        super().__init__()
        self.num_experts = EXPERTS
        if says:
            self.is_transposed = True
        self.w = nn.Parameter(torch.randn(EXPERTS, K, N))

    def forward(self, x, ends):
        return F.grouped_mm(x, self.w, offs=ends) if hasattr(F, "grouped_mm") else torch._grouped_mm(x, self.w, ends)


def test_the_other_layout():
    x, ends = operands()[0], offsets(ENDS[0])
    for says, options in ((True, {}), (False, {"transposed": ["*w"]})):
        torch.manual_seed(0)
        plain = Stored(says).bfloat16()
        model = ht.quantize_(copy.deepcopy(plain), "mxfp8", **options)
        y = model(x, ends)
        w = plain.w.detach().transpose(-2, -1).contiguous()
        assert torch.equal(y, one_by_one(x, w, torch.zeros_like(y), ENDS[0], from_name("mxfp8"))[0])
    with pytest.raises(
        ValueError, match=r"converted as stored \[E, out, in\], and were multiplied in the other layout"
    ):
        ht.quantize_(Stored(False).bfloat16(), "mxfp8")(x, ends)
    with pytest.raises(ValueError, match="transposed must name experts, got 'nothing'; experts to convert are: w"):
        ht.quantize_(Stored(), "mxfp8", transposed=["nothing"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("persistent", [False, True])
def test_a_graph_knows_the_layout(persistent):
    """Which product is refused, and how a write is quantized."""
    x, ends, torch_model = operands()[0], offsets(ENDS[0]), Stored(False).bfloat16()
    wrong = ht.quantize_(copy.deepcopy(torch_model), "mxfp8/nvfp4/bf16", persistent=persistent)
    torch._dynamo.reset()
    with pytest.raises(
        RuntimeError,
        match=r"experts of a layer were converted as stored \[E, out, in\], and were multiplied in the other layout",
    ):
        torch.compile(wrong, backend="aot_eager")(x, ends)
    spec, values = "fp8_rowwise+rowwise_dequantized_weight", torch.randn(EXPERTS, K, N).bfloat16()
    written, made = (Stored().bfloat16().requires_grad_(False) for _ in range(2))
    made.w.copy_(values)
    for model in (written, made):
        ht.quantize_(model, spec, persistent=persistent)
    torch.compile(lambda weight, new: weight.copy_(new), backend="aot_eager")(written.w, values)
    assert torch.equal(written(x, ends), made(x, ends))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_slice_does_not_take_delayed_scales_of_others(compiled):
    model = ht.quantize_(Experts().bfloat16(), "fp8_delayed")

    def run(x, ends):
        return torch._grouped_mm(x, model.w1[2:].transpose(-2, -1), offs=ends)

    torch._dynamo.reset()
    call = torch.compile(run, backend="aot_eager") if compiled else run
    with pytest.raises((ValueError, RuntimeError), match="has delayed scales of 4 experts, but weights of 2"):
        call(operands()[0], offsets((64, 160)))


def test_under_autocast_experts_run_in_its_dtype():
    """As linear layers do. Oracle: torch's product, which autocast leaves alone, of operands in bf16."""
    model, (x, _, _), ends = Experts(), operands(torch.float32), offsets((64, 64, 96, 160))
    expected = torch._grouped_mm(x.bfloat16(), model.w1.detach().bfloat16().transpose(-2, -1), offs=ends)
    ht.quantize_(model, "bf16")
    with torch.autocast("cpu", torch.bfloat16):
        found = torch._grouped_mm(x, model.w1.transpose(-2, -1), offs=ends)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)


@pytest.mark.parametrize("count", [1, 4])
def test_groups_of_the_rows_of_one_matrix_have_no_delayed_scales(count):
    """As ``o_a_proj`` of DeepSeek V4: a linear layer whose forward multiplies groups of its rows."""

    class Grouped(nn.Linear):
        def forward(self, x):
            return torch.bmm(x.view(count, -1, K), self.weight.view(count, -1, K).transpose(1, 2))

    def make():
        torch.manual_seed(0)
        return nn.Sequential(Grouped(K, 128, bias=False).bfloat16())

    x, _, _ = operands()
    with pytest.raises(NotImplementedError, match=rf"layer 0 is a matrix with one delayed scale .* {count} groups"):
        ht.quantize_(make(), "fp8_delayed")(x)
    plain, found = make()(x), ht.quantize_(make(), "fp8")(x)
    assert 0 < (found - plain).norm() <= 2**-3 * plain.norm()  # both operands in E4M3, 2^-4 off at most


def test_recipes_by_kind_and_name():
    model = Mixture()
    ht.quantize_(
        model, by_type(linear="fp8", grouped_linear="nvfp4_row_scaled_fwd_mxfp8_bwd"), filter_fn=lambda *_: True
    )
    assert str(model.router.weight.config) == "fp8"
    assert model.experts.w1.config == from_name("nvfp4_row_scaled_fwd_mxfp8_bwd")
    only = ht.quantize_(Mixture(), by_type(grouped_linear="mxfp8"), filter_fn=lambda *_: True)
    assert type(only.router.weight) is nn.Parameter
    names = []

    def factory(role: QuantizerRole):
        names.append((role.module_type, role.name))
        return from_name("mxfp8").input

    ht.quantize_(Mixture(), factory)
    assert names[::3][:EXPERTS] == [("grouped_linear", f"experts.w1[{e}]") for e in range(EXPERTS)]
    named = ht.quantize_(Mixture(), ht.torchao_compat.FqnToConfig({"experts.w2": "mxfp8", r"re:experts\.w[13]": "fp8"}))
    assert [str(getattr(named.experts, w).config) for w in ("w1", "w2", "w3")] == ["fp8", "mxfp8", "fp8"]
    ht.set_config_(named, "fp8_rowwise")
    assert {str(getattr(named.experts, w).config) for w in ("w1", "w2", "w3")} == {"fp8_rowwise"}
    with pytest.raises(
        ValueError, match=r"one recipe for all experts of experts.w1 is required, got mxfp8 .* for experts.w1\[2\]"
    ):
        ht.quantize_(Mixture(), lambda role: from_name("fp8" if "[2]" in role.name else "mxfp8").input)


def test_what_is_no_expert_is_left_alone():
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.ones(3, 8, 8))

    model = nn.Sequential(nn.Conv1d(4, 4, 3), Other(), nn.Linear(64, 64))
    ht.quantize_(model, "mxfp8")
    assert type(model[0].weight) is nn.Parameter
    assert type(model[1].table) is nn.Parameter
    said = dict(ht.explain(model, show=False).skipped)
    assert said == {"1.table": "Other has no num_experts that is its first extent"}


def call(x=None, ends=None, weight=None, **options):
    tokens, w, _ = operands()
    weight = MasterWeight(w, from_name("mxfp8")) if weight is None else weight
    return torch._grouped_mm(tokens if x is None else x, weight.transpose(-2, -1),
                             offs=offsets(ENDS[0]) if ends is None else ends, **options)  # fmt: skip


@pytest.mark.parametrize(("options", "error", "says"), [
    ({"ends": offsets((32, 16, 96, 160))}, ValueError, "offsets that do not decrease, up to 160 rows, are required"),
    ({"ends": offsets((32, 64, 96, 161))}, ValueError, "offsets that do not decrease, up to 160 rows, are required"),
    ({"ends": offsets((32, 64, 96))}, ValueError, r"int32 offsets \[4\], one for each expert, are required"),
    ({"ends": offsets(ENDS[0]).long()}, ValueError, r"int32 offsets \[4\].* are required, got torch.int64"),
    ({"x": torch.ones(TOKENS, 32).bfloat16()}, ValueError, r"tokens \[T, K\] and weights \[E, N, K\] are required"),
    ({"x": torch.ones(TOKENS, K)}, ValueError, "one dtype is required, got tokens in torch.float32"),
    ({"bias": torch.ones(EXPERTS, K)}, NotImplementedError, "is not possible with the weight of a layer"),
])  # fmt: skip
def test_bad_calls(options, error, says):
    with pytest.raises(error, match=says):
        call(**options)


def test_what_experts_cannot_do():
    model = ht.quantize_(Experts().bfloat16(), "mxfp8")
    with pytest.raises(NotImplementedError, match="experts_implementation='grouped_mm'"):
        model.w1[torch.tensor([0, 1, 1])]
    with pytest.raises(NotImplementedError, match="does not multiply tokens by the weights of experts"):
        torch._grouped_mm(model.w1, operands()[0].view(EXPERTS, -1, K).transpose(-2, -1))
    with pytest.raises(NotImplementedError, match=r"F\.grouped_mm for experts"):
        torch.einsum("tk,enk->ten", operands()[0], model.w1)
    for tokens in (torch.ones(2, EXPERTS, 5, K), torch.ones(2, 5, K)):
        with pytest.raises(ValueError, match=r"tokens \[E, T, K\] for weights \(.*\) of layer w1 are required"):
            tokens.bfloat16() @ model.w1.transpose(-2, -1)
    with pytest.raises(ValueError, match="a multiple of 32 along the contraction axis"):
        ht.quantize_(Experts(hidden=72), "mxfp8")
    weight = ht.quantize_(Experts().bfloat16(), "mxfp8", persistent=True).w1.detach()
    assert torch.equal(weight[1:3].dequantize(), weight.dequantize()[1:3])
    with pytest.raises(NotImplementedError, match="whole matrices of a stack can be sliced, got dimension 2"):
        weight[..., :32]
    with pytest.raises(ValueError, match="a recipe for a kind of layer is required"):
        by_type()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="only matrix units accumulate with fewer bits")
def test_gradients_accumulate_fast_on_request():
    """A long sum of terms of one sign tells who added it up: the units alone lose more than a part in 64 of it.

    Oracle: float64.
    """
    tokens = 40000
    x, g = (torch.rand(tokens, 64, device="cuda").bfloat16() + 1 for _ in range(2))
    exact, errors = g.double().t() @ x.double(), []
    for spec in ("fp8_rowwise", "fp8_rowwise+fast_accum"):
        grad = grouped(x, operands()[1].cuda(), g, (tokens,) * EXPERTS, from_name(spec))[2]
        errors.append((grad[0].double() / exact - 1).abs().max().item())
    assert errors[0] < 1 / 64 < errors[1]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_weights_of_experts_on_the_left(transposed, persistent):
    x, w, _ = operands(torch.float32)
    tokens = x.view(EXPERTS, -1, K)

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_experts, self.is_transposed = EXPERTS, transposed
            self.w = nn.Parameter(w.transpose(-2, -1).contiguous() if transposed else w.clone())

    made = ht.quantize_(Stack(), "mxfp8", persistent=persistent).w
    as_stored = made.transpose(-2, -1) if transposed else made  # [E, N, K]
    assert torch.equal(as_stored @ tokens.mT, torch.bmm(tokens, as_stored.transpose(-2, -1)).mT)


@pytest.mark.parametrize(("persistent", "inner"), [(False, N), (True, N), (False, K), (True, K)])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_layout_that_shapes_show(transposed, persistent, inner):
    """As Llama 4's experts, whose module does not say how they are stored; ``down_proj`` may be square."""

    class Unsaid(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_experts, self.hidden_size = EXPERTS, K
            shapes = {"gate_up_proj": (2 * inner, K), "down_proj": (K, inner)}
            for name, shape in shapes.items():
                stored = torch.randn(EXPERTS, *(reversed(shape) if transposed else shape)) / 8
                setattr(self, name, nn.Parameter(stored))

        def forward(self, x):
            up, down = (w if transposed else w.transpose(-2, -1) for w in (self.gate_up_proj, self.down_proj))
            gate, up = torch.bmm(x, up).chunk(2, dim=-1)
            return torch.bmm(F.silu(gate) * up, down)

    torch.manual_seed(0)
    model, x = Unsaid(), torch.randn(EXPERTS, 32, K)
    with torch.no_grad():
        expected = model(x)
    made = ht.quantize_(model, "mxfp8", persistent=persistent)(x)
    made.sum().backward()
    assert (made - expected).norm() < 0.1 * expected.norm()
    assert all(p.layer.transposed is transposed for p in model.parameters())
