"""Sequence parallelism: what is quantized on its shard and gathered as bytes is bitwise what is gathered in values and
quantized then. Oracle: torch's own styles, whose inputs and gradients are gathered before layers quantize them.
"""

import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as torch_styles
from expecttest import assert_expected_inline
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from processes import here
from tensor_parallel import cut, data, make, step, tp_mesh, whole
from tiers import few, long
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import run_and_get_code
from torch.distributed import _symmetric_memory as symmetric
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hybridtensor as ht
import hybridtensor.distributed as our_styles
from hybridtensor.distributed.fsdp.plan import ROW
from hybridtensor.distributed.sequence.layout import SequenceLayout
from hybridtensor.distributed.sequence.sends import _gathers as gathers
from hybridtensor.dtensor import local
from hybridtensor.ops import high_precision
from hybridtensor.testing import saved_for_backward

RECIPES = [
    "bf16", "fp8", "fp8_block", "fp8_delayed", "fp8_rowwise", "mxfp8", "nvfp4", "fp8+dequantized", "fp8+high_precision",
    "fp8_rowwise+dequantized", "mxfp8/fp8/bf16", "nvfp4+four_over_six", "mxfp4",
]  # fmt: skip
SHAPES = [(0, (64, 64)), (0, (64, 2, 64)), (1, (2, 64, 64)), (0, (256, 64)), (1, (2, 256, 64))]


def styles(of, dim, **options):
    """Return the plan of a block: its input is gathered once, its output's tokens are split."""
    prepare = of.PrepareModuleInput(input_layouts=(Shard(dim),), desired_input_layouts=(Replicate(),))
    return {
        "0": prepare, "0.up": of.ColwiseParallel(), "0.side": of.ColwiseParallel(),
        "0.down": of.RowwiseParallel(output_layouts=Shard(dim), **options),
    }  # fmt: skip


def block(recipe, mesh, of, dim=0, bias=False, **options):
    model = ht.quantize_(nn.Sequential(make(bias)), recipe)
    return ht.set_mesh_(parallelize_module(model, mesh, styles(of, dim, **options)), mesh)


def same(mine, theirs):
    return all(
        torch.equal(a, b)
        for one, other in zip(mine, theirs, strict=True)
        for a, b in zip(*([t] if torch.is_tensor(t) else t.values() for t in (one, other)), strict=True)
    )


def like_torchs(rank, recipes, shapes, bias):
    mesh = tp_mesh()
    for recipe, along in itertools.product(recipes, {dim for dim, _ in shapes}):
        both = [block(recipe, mesh, of, along, bias) for of in (our_styles, torch_styles)]
        for dim, shape in shapes:
            if dim == along:
                x, grad = data(1, *shape), data(2, *shape)
                with torch.no_grad():
                    x.select(dim, -1)[..., 3] = 40.0  # an outlier of one rank
                x, grad = (t.chunk(2, dim)[rank].contiguous() for t in (x, grad))
                assert same(*(step(model, x, grad) for model in both)), (recipe, dim, shape)


@pytest.mark.parametrize("recipe", RECIPES)
def test_bitwise_what_torch_gathers(two, recipe):
    two.run(like_torchs, [recipe], SHAPES, False)


SQUARES = {
    "nvfp4": ht.NVFP4Quantizer(two_d=True),
    "mxfp4": ht.MXFP4Quantizer(two_d=True),
    "mxfp8": ht.MXFP8Quantizer(two_d=True),
}


@pytest.mark.parametrize("word", SQUARES)
def test_inputs_of_square_blocks_are_transposed(two, word):
    square = SQUARES[word]
    config = ht.HybridConfig(input=square, weight=square, grad_output=ht.IdentityQuantizer())
    two.run(like_torchs, [config], SHAPES, False)


def test_with_a_bias(two):
    two.run(like_torchs, ["mxfp8", "fp8"], SHAPES[:1], True)


def state_of_layers(rank):
    """Layers that read one input have delayed scales each: it is gathered in values, and each takes note of it."""
    mesh = tp_mesh()
    x, grad = (data(seed, 256, 64).chunk(2)[rank] for seed in (1, 2))
    models = [block("fp8_delayed", mesh, of) for of in (our_styles, torch_styles)]
    for factor in (1, 8, 2):
        assert same(*(step(model, x * factor, grad) for model in models))
        for model in models:
            ht.step_(model)
        assert same(*([dict(model.named_buffers())] for model in models))
    (row, _) = ht.explain(models[0], show=False).sequence
    assert (row.forward, row.reason) == ("values", "each layer has its own scales, or draws of its own")


def test_state_of_layers_that_read_one_input(two):
    two.run(state_of_layers)


def under_autocast(rank):
    """Inputs are rounded to autocast's dtype before they are quantized, as layers do with what was gathered.

    Gradients of inputs are summed in that dtype, where torch's styles sum those of two layers and ranks in fp32.
    """
    mesh = tp_mesh()
    x, grad = (data(seed, 64, 64, dtype=torch.float32).chunk(2)[rank] for seed in (1, 2))
    for recipe in ("mxfp8", "fp8", "fp8_rowwise"):
        results = []
        for of in (our_styles, torch_styles):
            model = ht.quantize_(nn.Sequential(make(dtype=torch.float32)), recipe)
            parallelize_module(model, mesh, styles(of, 0))
            with torch.autocast(here(), torch.bfloat16):
                results.append(step(model, x, grad.bfloat16()))
        (y, dx, grads), (other_y, other_dx, other_grads) = results
        assert same((y, grads), (other_y, other_grads)), recipe
        assert (dx - other_dx).norm() <= 2**-7 * other_dx.norm()


def test_under_autocast(two):
    two.run(under_autocast)


NAMES = {"all_gather_into_tensor": "gather", "reduce_scatter_tensor": "scatter", "all_reduce": "max"}


class Collectives(TorchDispatchMode):
    """Counts what ranks send: bytes of this rank's part, by operation."""

    def __init__(self):
        super().__init__()
        self.sent = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("_c10d_functional.").removesuffix(".default")
        if "_c10d_functional" in str(func) and "wait" not in name and "wrap" not in name:
            count = args[0].nbytes // (2 if "scatter" in name else 1)
            dtype = torch.uint8 if args[0].itemsize == 1 else args[0].dtype  # NCCL knows FP8
            self.sent.append(f"{NAMES[name]} {str(dtype).removeprefix('torch.')} {count}")
        return out


class InFlight(TorchDispatchMode):
    """The most all-gathers of which none was waited for."""

    def __init__(self):
        super().__init__()
        self.now, self.most = set(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops._c10d_functional.all_gather_into_tensor.default:
            self.now.add(out.data_ptr())
            self.most = max(self.most, len(self.now))
        elif func is torch.ops._c10d_functional.wait_tensor.default:
            self.now.discard(args[0].data_ptr())
        return out


def gathered_one_by_one(rank):
    mesh = tp_mesh()
    x, grad = (data(seed, 512, 64).chunk(2)[rank].requires_grad_() for seed in (1, 2))
    for recipe in ("mxfp8", "nvfp4", "fp8_rowwise+dequantized"):
        model = block(recipe, mesh, our_styles)
        with InFlight() as gathers:
            model(x).backward(grad)
        assert (gathers.most == 1) == x.is_cpu, (recipe, gathers.most)


def test_gloo_gathers_one_by_one(two):
    """gloo of torch 2.11 corrupts memory where several functional all-gathers are in flight."""
    two.run(gathered_one_by_one)


def traffic(model, x, grad):
    x = x.clone().requires_grad_()
    with Collectives() as forward:
        y = model(x)
    with Collectives() as backward:
        y.backward(grad)
    return forward.sent, backward.sent


def log(rank, recipes, path):
    mesh, lines = tp_mesh(), []
    x, grad = (data(seed, 512, 64).chunk(2)[rank] for seed in (1, 2))
    for recipe in recipes:
        for name, of in (("torch", torch_styles), ("ours", our_styles)):
            if name == "torch" and recipe != "bf16":
                continue
            model = block(recipe, mesh, of)
            for phase, sent in zip(("forward", "backward"), traffic(model, x, grad), strict=True):
                lines.append(f"{recipe}, {name}, {phase}: {', '.join(sent)}")
    if rank == 0:
        path.write_text("\n".join(lines))


def test_bytes_per_phase(two, tmp_path):
    """Of 256 tokens of 64 features on each rank, 32768 bytes in bf16, each rank sends its face; and as many of sums.

    TransformerEngine, with quantizers of its own choice per face, gathers values (32768) in forward and in backward.
    """
    two.run(log, ["bf16", "fp8", "fp8_rowwise", "fp8_block", "mxfp8", "fp8_rowwise+dequantized"], tmp_path / "log")
    assert_expected_inline(
        (tmp_path / "log").read_text(),
        """\
bf16, torch, forward: gather bfloat16 32768, scatter bfloat16 32768
bf16, torch, backward: gather bfloat16 32768, scatter bfloat16 32768
bf16, ours, forward: gather bfloat16 32768, scatter bfloat16 32768
bf16, ours, backward: gather bfloat16 32768, scatter bfloat16 32768
fp8, ours, forward: max float32 4, gather uint8 16384, scatter bfloat16 32768
fp8, ours, backward: max float32 4, gather uint8 16384, scatter bfloat16 32768
fp8_rowwise, ours, forward: max float32 256, gather uint8 16384, gather float32 1024, scatter bfloat16 32768
fp8_rowwise, ours, backward: gather bfloat16 32768, gather uint8 16384, scatter bfloat16 32768
fp8_block, ours, forward: gather uint8 16384, gather float32 1024, scatter bfloat16 32768
fp8_block, ours, backward: gather bfloat16 32768, gather uint8 16384, gather float32 512, scatter bfloat16 32768
mxfp8, ours, forward: gather uint8 16384, gather uint8 512, scatter bfloat16 32768
mxfp8, ours, backward: gather bfloat16 32768, gather uint8 16384, gather uint8 512, scatter bfloat16 32768
fp8_rowwise+dequantized, ours, forward: gather uint8 16384, gather float32 1024, scatter bfloat16 32768
fp8_rowwise+dequantized, ours, backward: gather bfloat16 32768, scatter bfloat16 32768""",
    )


def collectives_of(graph):
    names = [str(node.target).split(".")[1] for node in graph.graph.nodes if "c10d" in str(node.target)]
    return [NAMES[name] for name in names if name in NAMES]


def compiled(rank, recipes):
    mesh = tp_mesh()
    x, grad = (data(seed, 256, 64).chunk(2)[rank] for seed in (1, 2))
    for recipe in recipes:
        model = block(recipe, mesh, our_styles)
        outer = nn.Sequential(model)  # what a compiled root's hook returns would be a graph's output
        expected, graphs = step(outer, x, grad), []

        def keep(graph, inputs, graphs=graphs):
            graphs.append(collectives_of(graph))
            return make_boxed_func(graph)

        torch._dynamo.reset()
        backend = aot_autograd(fw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
        made = torch.compile(outer, backend=backend, fullgraph=True)
        assert same(step(made, x, grad), expected), recipe
        eager = [[line.split()[0] for line in phase] for phase in traffic(outer, x, grad)]
        assert [sorted(graph) for graph in graphs] == [sorted(phase) for phase in eager], (recipe, graphs, eager)


@pytest.mark.filterwarnings("ignore")
def test_one_graph_that_sends_as_much(two):
    """One forward and one backward graph, with the collectives of eager mode: siblings share theirs."""
    two.run(compiled, few(["fp8", "mxfp8", "fp8_delayed", "fp8_rowwise"], 3))


def compiled_root(rank, dim):
    torch._dynamo.reset()
    made = torch.compile(block("fp8", tp_mesh(), our_styles, dim)[0], backend="aot_eager")
    with pytest.raises(Exception, match=r"a compiled graph returns what was gathered.*compile a module around"):
        made(data(1, *(2,) * dim, 64, 64).requires_grad_())


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_root_that_gathers_says_what_to_compile(two):
    for dim in (0, 1):
        two.run(compiled_root, dim)


def in_symmetric_memory(rank, recipe):
    mesh = tp_mesh()
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # says it is not needed, but the pass asks
        symmetric.enable_symm_mem_for_group(mesh.get_group().group_name)
    x, grad = (data(seed, 256, 64).chunk(2)[rank] for seed in (1, 2))
    results = []
    for switch in (False, True):
        torch._dynamo.reset()
        made = torch.compile(nn.Sequential(block(recipe, mesh, our_styles)), fullgraph=True)
        with (
            warnings.catch_warnings(),
            torch._inductor.config.patch(_micro_pipeline_tp=switch, fx_graph_cache=False),
            torch._functorch.config.patch(enable_autograd_cache=False),
        ):
            warnings.filterwarnings("ignore", message="erase_node")  # torch 2.11's pass erases a product twice
            result, codes = run_and_get_code(lambda made=made: step(made, x, grad))
        for operator in ("fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter"):
            assert any(operator in code for code in codes) == switch, (operator, switch)
        results.append(result)
    (y, dx, grads), (other_y, other_dx, other_grads) = results
    for one, other in ((y, other_y), (dx, other_dx), *((grads[name], other_grads[name]) for name in grads)):
        # the same products, in parts: their sums are rounded to bfloat16 once more, before ranks add them
        assert (one - other).norm() <= 2**-8 * other.norm()


def test_torch_fuses_gathers_with_products(two):
    if two.device != "cuda":
        pytest.skip("symmetric memory is of GPUs")
    two.run(in_symmetric_memory, "fp8")


def recomputed(rank):
    mesh = tp_mesh()
    x, grad = (data(seed, 256, 64).chunk(2)[rank] for seed in (1, 2))
    for recipe in ("mxfp8", "fp8"):
        model = block(recipe, mesh, our_styles)

        class Recomputed(nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def forward(self, x):
                return checkpoint(self.inner, x, use_reentrant=False)

        assert same(step(Recomputed(model), x, grad), step(model, x, grad)), recipe
        y = model(x)
        y.sum().backward(retain_graph=True)
        once = [whole(p.grad).clone() for p in model.parameters()]
        y.sum().backward()
        assert all(torch.equal(whole(p.grad), 2 * g) for p, g in zip(model.parameters(), once, strict=True))


def test_recomputed_and_twice(two):
    two.run(recomputed)


def saved(rank):
    """Column-parallel layers save their rank's columnwise face: a byte per number and its scales, once for both."""
    mesh = tp_mesh()
    x = data(1, 256, 64).chunk(2)[rank].requires_grad_()
    sizes = {}
    for name, of in (("torch", torch_styles), ("ours", our_styles)):
        model = block("mxfp8", mesh, of)
        model[0].forward = lambda y, m=model[0]: m.up(y) + m.side(y)
        with saved_for_backward() as counted:
            model(x)
        sizes[name] = counted.nbytes()
    assert sizes["torch"] - sizes["ours"] == (256 - 128) * 64 * 33 // 32


def test_saved_activations_shrink(two):
    two.run(saved)


def told(rank):
    mesh = tp_mesh()
    rows = ht.explain(block("mxfp8", mesh, our_styles), show=False).sequence
    assert [(row.module, row.tensor, row.forward, row.backward) for row in rows] == [
        ("0", "input", "rowwise, mxfp8_e4m3", "columnwise, mxfp8_e4m3"),
        ("0.down", "grad_output", "", "values"),
    ]
    assert [row.reason for row in rows] == [
        "where a rank has a multiple of 32 tokens of a sequence",
        "two faces are as many bytes as values",
    ]
    rows = ht.explain(block("fp8", mesh, our_styles), show=False).sequence
    assert [(row.forward, row.backward, row.reason) for row in rows] == [
        ("rowwise, fp8_e4m3_tensor", "", ""),
        ("", "rowwise, fp8_e5m2_tensor", ""),
    ]
    (_, row) = ht.explain(block("fp8", mesh, our_styles, bias=True), show=False).sequence
    assert row.reason == "the bias needs a sum of values"
    mixed = nn.Sequential(make())
    ht.quantize_(mixed, ht.torchao_compat.FqnToConfig({"0.up": "mxfp8", "0.side": "fp8", "0.down": "fp8"}))
    parallelize_module(mixed, mesh, styles(our_styles, 0))
    assert ht.explain(mixed, show=False).sequence[0].reason.startswith("its layers quantize it by different recipes")
    x = data(1).chunk(2)[rank]
    assert torch.isfinite(mixed(x)).all()


def test_what_travels_is_explained(two):
    two.run(told)


def fall_back(rank):
    """Twenty tokens on a rank cut blocks of 32: values are gathered, the same numbers."""
    mesh = tp_mesh()
    x, grad = (data(seed, 40, 64).chunk(2)[rank] for seed in (1, 2))
    with Collectives() as sent:
        block("mxfp8", mesh, our_styles)(x)
    assert sent.sent[:1] == ["gather uint8 1280"]  # rows are cut by no block
    for recipe in ("mxfp8", "nvfp4", "fp8_block"):
        assert same(*(step(block(recipe, mesh, of), x, grad) for of in (our_styles, torch_styles))), recipe


def test_shards_that_cut_blocks(two):
    two.run(fall_back)


def errors(rank):
    mesh = tp_mesh()
    plan = styles(our_styles, 0) | {"0.up": torch_styles.ColwiseParallel()}
    model = parallelize_module(ht.quantize_(nn.Sequential(make()), "mxfp8"), mesh, plan)
    x = data(1).chunk(2)[rank]
    with pytest.raises((ValueError, NotImplementedError), match=r"hybridtensor\.distributed\.ColwiseParallel|view"):
        model(x)
    model = block("mxfp8", mesh, our_styles)
    with pytest.raises(ValueError, match="PrepareModuleInput: as many inputs as layouts, 1, are required, got 2"):
        model[0](x, x)


def test_errors(two):
    two.run(errors)


def alone(rank):
    """A column-parallel layer gathers its own input; plain layers and embeddings do as torch's."""
    mesh = tp_mesh()
    x, grad = data(1).chunk(2)[rank], data(2, 64, 128)
    results = []
    for of in (our_styles, torch_styles):
        model = ht.quantize_(nn.Sequential(make().up), "mxfp8")
        style = of.ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate())
        results.append(step(parallelize_module(model, mesh, {"0": style}), x, grad))
        plain = parallelize_module(make(), mesh, {"up": of.ColwiseParallel(input_layouts=Shard(0))})
        assert plain.up(x).shape == (64, 64)
        table = nn.Embedding(16, 8).to(here())
        assert parallelize_module(table, mesh, of.ColwiseParallel())(torch.arange(4, device=here())).shape == (4, 4)
    assert same(*results)
    uncut = cut("mxfp8", mesh)
    assert isinstance(local(uncut.up.weight), ht.MasterWeight)
    given = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
    assert torch.equal(model(given), model(x))
    uneven = distribute_tensor(data(1)[:33], mesh, [Shard(0)])  # 17 and 16 tokens: in values, as torch pads them
    ours = parallelize_module(
        ht.quantize_(nn.Sequential(make().up), "mxfp8"), mesh,
        {"0": our_styles.ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate())},
    )  # fmt: skip
    assert torch.equal(ours(uneven), model(uneven))


def test_a_layer_alone(two):
    two.run(alone)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = make(dtype=torch.float32)

    def forward(self, x):
        return x + self.inner(x)


def under_fsdp(rank, recipe):
    """FSDP2 over the cut layers, and compiled blocks: the losses of the model that is only cut, bit for bit."""
    mesh = init_device_mesh(here(), (2, 2), mesh_dim_names=("dp", "tp"))
    x = data(1, 128, 64, dtype=torch.float32).chunk(4)[rank].clone().requires_grad_()
    plan = {name.replace("0", "inner"): style for name, style in styles(our_styles, 0).items()}
    losses = {}
    for how in ("cut", "sharded", "layers", "compiled"):
        torch._dynamo.reset()
        model = ht.quantize_(nn.Sequential(Residual(), Residual()), recipe)
        for layer in model:
            parallelize_module(layer, mesh["tp"], plan)
        ht.set_mesh_(model, mesh)
        said = ht.explain(model, show=False).sequence
        for layer in model if how != "cut" else ():
            if how == "compiled":
                layer.compile(backend="aot_eager", fullgraph=True)
            for inner in layer.modules() if how == "layers" else ():
                if isinstance(inner, nn.Linear):
                    fully_shard(inner, mesh=mesh["dp"])
            fully_shard(layer, mesh=mesh["dp"])
        if how == "layers":
            assert ht.explain(model, show=False).sequence == said
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses[how] = []
        for _ in range(2):
            loss = model(x).square().mean()
            loss.backward()
            for p in model.parameters() if how == "cut" else ():
                dist.all_reduce(local(p.grad), group=mesh.get_group("dp"))
                local(p.grad).div_(2)
            optimizer.step()
            optimizer.zero_grad()
            ht.step_(model)
            losses[how].append(loss.item())
    assert losses["cut"] == losses["sharded"] == losses["layers"] == losses["compiled"]
    assert losses["cut"][1] < losses["cut"][0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", ["mxfp8", pytest.param("fp8_delayed", marks=long("one with state"))])
def test_under_fsdp2_and_compiled(four, recipe):
    four.run(under_fsdp, recipe)


def test_what_was_sent_is_not_copied_again():
    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func is not torch.ops.aten.clone.default
            return func(*args, **(kwargs or {}))

    face = high_precision(data(0).t())  # no contiguous matrix: sending it takes a copy
    received = face.qdata.contiguous()
    with Copies():
        whole = SequenceLayout("", 1, False).finish(face, ROW, [received], received.shape)
    assert whole.qdata is received


def other_readers(rank):
    """A layer that is not cut by columns would give all of its gradient on each rank, and the sum be too large."""
    mesh = tp_mesh()
    x = data(1).chunk(2)[rank]

    def with_side(placement):
        model = ht.quantize_(nn.Sequential(make()), "mxfp8")
        plan = {name: style for name, style in styles(our_styles, 0).items() if name != "0.side"}
        parallelize_module(model, mesh, plan)
        if placement is not None:
            model[0].side.weight = nn.Parameter(distribute_tensor(model[0].side.weight, mesh, [placement]))
        return model

    for placement in (None, Replicate(), Shard(1)):
        with pytest.raises(ValueError, match="gathered the input of a layer that is not column-parallel"):
            with_side(placement)(x)


def scales_of_their_own(rank):
    """Bytes of one rank mean nothing by the delayed scale of another."""
    mesh = tp_mesh()
    own = [dist.new_group([r]) for r in range(2)][rank]
    model = parallelize_module(
        ht.quantize_(nn.Sequential(make().up), "fp8_delayed"), mesh,
        {"0": our_styles.ColwiseParallel(input_layouts=Shard(0))},
    )  # fmt: skip
    ht.set_data_parallel_group_(model, own)
    with pytest.raises(ValueError, match="has delayed scales that differ between tensor-parallel ranks"):
        model(data(1).chunk(2)[rank])
    ht.set_mesh_(model, mesh)
    assert torch.isfinite(model(data(1).chunk(2)[rank])).all()


def ways_to_call(rank):
    """Inference mode, module hooks, named inputs beside others, and a forward that goes on after the product."""
    mesh = tp_mesh()
    x, grad = (data(seed, 256, 64).chunk(2)[rank] for seed in (1, 2))
    for recipe in ("mxfp8", "fp8"):
        model, expected = block(recipe, mesh, our_styles), None
        expected = step(model, x, grad)
        with torch.inference_mode():
            assert torch.equal(model(x), expected[0]), recipe
        handles = [m.register_full_backward_hook(lambda *_: None) for m in (model[0], model[0].up)]
        assert same(step(model, x, grad), expected), recipe
        for handle in handles:
            handle.remove()

    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 0.5

    results = []
    for of in (our_styles, torch_styles):
        inner = make()
        inner.down.__class__ = Scaled
        model = parallelize_module(ht.quantize_(nn.Sequential(inner), "fp8"), mesh, styles(of, 0))
        results.append(step(model, x, grad))
    assert same(*results)

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make()

        def forward(self, scale, *, x):
            return self.inner(x) * scale

    results = []
    for of in (our_styles, torch_styles):
        model = ht.quantize_(nn.Sequential(Named()), "mxfp8")
        plan = {name.replace("0.", "0.inner."): style for name, style in styles(of, 0).items() if name != "0"}
        plan["0"] = of.PrepareModuleInput(
            input_kwarg_layouts={"x": Shard(0)}, desired_input_kwarg_layouts={"x": Replicate()}
        )
        results.append(parallelize_module(model, mesh, plan)[0](2.0, x=x))
    assert torch.equal(*results)


def test_layouts_of_keywords_are_paired_by_name():
    style = our_styles.PrepareModuleInput(
        input_kwarg_layouts={"x": Shard(0), "scale": Replicate()},
        desired_input_kwarg_layouts={"scale": Shard(0), "x": Replicate()},
    )
    assert gathers(style)


def other_batches(rank):
    """One compiled model takes batches of other sizes."""
    mesh = tp_mesh()
    model = nn.Sequential(block("mxfp8", mesh, our_styles, dim=1))
    torch._dynamo.reset()
    made = torch.compile(model, backend="aot_eager")
    for size in (2, 3, 5):
        x, grad = (data(seed, size, 64, 64).chunk(2, 1)[rank].contiguous() for seed in (1, 2))
        assert same(step(made, x, grad), step(model, x, grad)), size


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("body", [other_readers, scales_of_their_own, ways_to_call, other_batches])
def test_ways_to_use_it(two, body):
    two.run(body)
