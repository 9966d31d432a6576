"""Weights for inference from ranks that hold parts of them: quantized bytes travel, in buckets.

Oracle: what a model that is not sharded gives, bitwise.
"""

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from experts import Experts
from processes import here
from safetensors.torch import load_file
from sharding import batch, make, mesh_of, shard
from tensor_parallel import make as make_layers
from tiers import in_turn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import hybridtensor as ht
from hybridtensor.inference import files, gather

OTHERS = ".full.partial-1"  # of an export in another container
SQUARES = ht.HybridConfig(*[ht.Float8Quantizer("block", block="128x128")] * 3)
RECIPES = [
    "fp8",
    "fp8_rowwise",
    "mxfp8",
    "nvfp4",
    "fp8_block",
    "fp8_delayed",
    "bf16",
    "mxfp8/nvfp4/bf16",
    "nvfp4+one_d",
    "fp8+bf16_weight_values",
    "mxfp8+bf16_weight_values",
    "nvfp4+four_over_six",
    "mxfp4",
]


def same(mine, expected):
    assert list(mine) == list(expected)
    for name, tensor in expected.items():
        assert mine[name].dtype == tensor.dtype, name
        assert torch.equal(mine[name].view(torch.uint8), tensor.view(torch.uint8)), name


def plain(**sizes):
    return ht.plain_(make("bf16", **sizes).to(here()))


def twins(recipe, persistent, size):
    whole = ht.quantize_(plain(width=size, hidden=2 * size), recipe, persistent=persistent)
    return whole, copy.deepcopy(whole)


def from_shards(rank, recipe, persistent, size, dim, reshard):
    whole, model = twins(recipe, persistent, size)
    mesh = mesh_of(rank, 2)
    options = {} if dim == 0 else {"shard_placement_fn": lambda p: Shard(1) if p.dim() == 2 else Shard(0)}
    shard(model, mesh, reshard_after_forward=reshard, **options)
    expected = dict(ht.inference_tensors(whole))
    same(dict(ht.inference_tensors(model)), expected)  # before anything ran
    model(batch(0, width=size).float())
    same(dict(ht.inference_tensors(model, bucket_bytes=1)), expected)  # a tensor at a time, some gathered now
    some = dict(ht.inference_tensors(model, ranks="first", bucket_bytes=3 * size * size))
    same(some, expected if rank == 0 else {})
    assert ht.inference_config(model) == ht.inference_config(whole)


@pytest.mark.parametrize(("recipe", "reshard"), in_turn(RECIPES, [True, False]))
def test_what_shards_give(two, recipe, reshard):
    two.run(from_shards, recipe, False, 64, 0, reshard)


@pytest.mark.parametrize("recipe", ["fp8", "mxfp8", "nvfp4"])
def test_persistent_shards(two, recipe):
    two.run(from_shards, recipe, True, 64, 0, True)


@pytest.mark.parametrize("recipe", ["fp8", "fp8_rowwise", "fp8_block"])
def test_uneven_shards_and_columns(two, recipe):
    """Values travel where parts have no faces of their own."""
    two.run(from_shards, recipe, False, 80, 1, True)
    if recipe != "fp8_block":
        two.run(from_shards, recipe, False, 65, 0, True)


def squares(rank):
    """Shards cut blocks of 128x128, whose scales are those of the whole."""
    whole = ht.quantize_(plain(width=192, hidden=320), SQUARES)
    model = shard(copy.deepcopy(whole), mesh_of(rank, 2))
    same(dict(ht.inference_tensors(model)), dict(ht.inference_tensors(whole)))


def test_shards_that_cut_blocks(two):
    two.run(squares)


def experts(rank, recipe, transposed, dim, persistent):
    class Held(Experts):
        is_transposed = transposed

    torch.manual_seed(0)
    whole = ht.quantize_(Held(4, 128, 128).to(here()), recipe, persistent=persistent)
    expected = dict(ht.inference_tensors(whole))
    model = fully_shard(copy.deepcopy(whole), mesh=mesh_of(rank, 2), shard_placement_fn=lambda _: Shard(dim))
    same(dict(ht.inference_tensors(model)), expected)
    same(dict(ht.inference_tensors(model, experts="stacked")), dict(ht.inference_tensors(whole, experts="stacked")))


@pytest.mark.parametrize(
    ("recipe", "transposed", "dim", "persistent"),
    [("fp8", False, 0, False), ("mxfp8", True, 0, False), ("nvfp4", False, 1, False), ("fp8_rowwise", True, 1, False),
     ("mxfp8", False, 0, True), ("fp8_rowwise", False, 2, False), ("deepseek_v4_experts", False, 0, False),
     ("deepseek_v4_experts", True, 0, True)],
)  # fmt: skip
def test_experts_of_shards(two, recipe, transposed, dim, persistent):
    two.run(experts, recipe, transposed, dim, persistent)


def spread_experts(rank, recipe):
    torch.manual_seed(0)
    whole = ht.quantize_(Experts(4, 128, 128).to(here()), recipe)
    model, mesh = copy.deepcopy(whole), init_device_mesh(here(), (2,), mesh_dim_names=("ep",))
    for name in ("w1", "w2", "w3"):
        setattr(
            model, name, nn.Parameter(distribute_tensor(getattr(model, name), mesh, [Shard(0)], src_data_rank=None))
        )
    ht.set_mesh_(model, mesh)
    same(dict(ht.inference_tensors(model)), dict(ht.inference_tensors(whole)))


@pytest.mark.parametrize("recipe", ["fp8", "mxfp8", "fp8_delayed", "deepseek_v4_experts"])
def test_experts_on_ranks(two, recipe):
    two.run(spread_experts, recipe)


class Both(Experts):
    """Experts, and a linear layer."""

    def __init__(self, rows):
        super().__init__(4, 128, 128)
        self.up = nn.Linear(256, rows)


def as_deepseek_v4(rank, persistent):
    """One layout has two formats: each goes by its own bytes, experts' as int8."""
    torch.manual_seed(0)
    recipe = ht.recipes.by_type(linear="fp8_block", grouped_linear="deepseek_v4_experts")
    rows = 512 if persistent else 384  # shards that cut blocks have no faces of their own
    whole = ht.quantize_(Both(rows).to(here()), recipe, persistent=persistent)
    model = fully_shard(copy.deepcopy(whole), mesh=mesh_of(rank, 2))
    for experts in ("separate", "stacked"):
        expected = dict(ht.inference_tensors(whole, "hf_deepseek_v4", experts=experts))
        assert {t.dtype for t in expected.values()} >= {torch.int8, torch.float8_e4m3fn, torch.float8_e8m0fnu}
        same(dict(ht.inference_tensors(model, "hf_deepseek_v4", experts=experts)), expected)
        some = dict(ht.inference_tensors(model, experts=experts, ranks="first", bucket_bytes=1))
        same(some, expected if rank == 0 else {})
    assert ht.inference_config(model) == ht.inference_config(whole, "hf_deepseek_v4")


@pytest.mark.parametrize("persistent", [False, True])
def test_a_layout_of_two_formats(two, persistent):
    two.run(as_deepseek_v4, persistent)


def hybrid_shards(rank, recipe):
    whole, model = twins(recipe, False, 64)
    mesh = init_device_mesh(here(), (2, 2), mesh_dim_names=("copies", "shards"))
    shard(model, mesh)
    expected = dict(ht.inference_tensors(whole))
    same(dict(ht.inference_tensors(model)), expected)
    same(dict(ht.inference_tensors(model, ranks="first")), expected if rank == 0 else {})


@pytest.mark.parametrize("recipe", ["fp8", "mxfp8"])
def test_hybrid_shards(four, recipe):
    four.run(hybrid_shards, recipe)


def tensor_parallel(rank, recipe, ranks):
    """Parts of layers, each with scales of its own; with FSDP2 over the other dimension of four ranks."""
    sizes = (ranks // 2, 2)
    mesh = init_device_mesh(here(), sizes, mesh_dim_names=("dp", "tp"))
    whole = ht.quantize_(make_layers(dtype=torch.float32, width=128, hidden=256), recipe)
    model = copy.deepcopy(whole)
    parallelize_module(
        model, mesh["tp"], {"up": ColwiseParallel(), "side": ColwiseParallel(), "down": RowwiseParallel()}
    )
    if ranks == 4:
        fully_shard(model, mesh=mesh["dp"])
    expected = dict(ht.inference_tensors(whole))
    same(dict(ht.inference_tensors(model)), expected)
    same(dict(ht.inference_tensors(model, ranks="first")), expected if rank == 0 else {})


@pytest.mark.parametrize("recipe", ["mxfp8", "bf16", ht.HybridConfig(*[ht.MXFP8Quantizer(two_d=True)] * 3)])
def test_tensor_parallel_layers(two, recipe):
    two.run(tensor_parallel, recipe, 2)


@pytest.mark.parametrize("recipe", ["mxfp8", "bf16"])
def test_tensor_parallel_and_shards(four, recipe):
    four.run(tensor_parallel, recipe, 4)


def scales_of_parts(rank, recipe):
    """A part of a column-parallel layer has a scale of its own: they are scales of its rows."""
    mesh = init_device_mesh(here(), (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(64, 128, bias=False)).to(here())
    model = ht.quantize_(copy.deepcopy(layer), recipe)
    parallelize_module(model, mesh, {"0": ColwiseParallel()})
    got = dict(ht.inference_tensors(model))
    for i, half in enumerate(layer[0].weight.detach().chunk(2)):
        face = ht.Float8Quantizer().quantize(half.contiguous(), columnwise=False).rowwise
        assert torch.equal(got["0.weight"][64 * i : 64 * i + 64].view(torch.uint8), face.qdata.view(torch.uint8))
        assert torch.equal(got["0.weight_scale"][64 * i : 64 * i + 64], face.scale.expand(64, 1))
    rows = ht.quantize_(copy.deepcopy(layer), recipe)
    parallelize_module(rows, mesh, {"0": RowwiseParallel()})
    with pytest.raises(
        ValueError, match=r"0\.weight: scales that end with each tensor-parallel rank's part \[128, 32\]"
    ):
        ht.inference_tensors(rows)


def test_scales_of_parts(two):
    two.run(scales_of_parts, "fp8")


def refused(rank):
    """Every rank raises, before anything is gathered; also where one rank alone is wrong."""
    bad = ht.Float8Quantizer("block", block="1x128")
    model = shard(ht.quantize_(plain(width=128, hidden=128), ht.HybridConfig(bad, bad, bad)), mesh_of(rank, 2))
    with pytest.raises(ValueError, match="a face that a layout holds is required"):
        ht.inference_tensors(model)
    model = shard(make("mxfp8"), mesh_of(rank, 2))
    with pytest.raises(ValueError, match=r"by layout 'ct_nvfp4', got mxfp8_e4m3"):
        ht.inference_tensors(model, "ct_nvfp4" if rank else "ct_mxfp8")


def test_what_is_refused_is_refused_on_every_rank(two):
    two.run(refused)


def bytes_that_travel(rank):
    """What is handed to the gather, of one recipe and of another."""
    total, original = {}, gather._received
    for recipe in ("mxfp8", "bf16"):
        sent, model = [], shard(make(recipe, width=256, hidden=512), mesh_of(rank, 2))
        gather._received = lambda parts, *args, sent=sent: (
            sent.extend(p.nbytes for p in parts) or original(parts, *args)
        )
        list(ht.inference_tensors(model))
        total[recipe] = sum(sent)
    gather._received = original
    assert total["mxfp8"] < 0.53 * total["bf16"]  # 33 bits for 64, and norms


def test_quantized_bytes_travel(two):
    two.run(bytes_that_travel)


def exported(rank, folder):
    """The first rank writes what one that is not sharded writes; what fails there is told on every rank."""
    whole, model = twins("mxfp8", False, 64)
    shard(model, mesh_of(rank, 2))
    alone = Path(folder) / "alone"
    ht.export_pretrained(whole, alone, bucket_bytes=10_000)
    ht.export_pretrained(model, Path(folder) / "together", shard_bytes=20_000)
    dist.barrier()
    index = json.loads((Path(folder) / "together" / "model.safetensors.index.json").read_text())["weight_map"]
    got = {name: t for file in set(index.values()) for name, t in load_file(Path(folder) / "together" / file).items()}
    expected = load_file(alone / "model.safetensors")
    same({name: got[name] for name in expected}, expected)
    with pytest.raises(ValueError, match="a folder that is not there is required"):
        ht.export_pretrained(model, Path(folder) / "together")
    if rank == 0:
        files._write_json = lambda path, content: (_ for _ in ()).throw(OSError("no space"))
    with pytest.raises((OSError, RuntimeError), match="no space"):
        ht.export_pretrained(model, Path(folder) / "full", shard_bytes=20_000)
    dist.barrier()
    assert sorted(path.name for path in Path(folder).iterdir()) == [OTHERS, "alone", "together"]


def test_one_rank_writes_and_all_hear_of_errors(two, tmp_path):
    (tmp_path / OTHERS).mkdir()
    two.run(exported, str(tmp_path))
    two.stop()
    two.start()  # the first one has a function that fails


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a GPU with the CPU")
@pytest.mark.parametrize("recipe", ["fp8", "fp8_rowwise", "mxfp8", "nvfp4", "nvfp4+one_d"])
def test_a_gpu_gives_the_bytes_of_the_cpu(recipe):
    torch.manual_seed(0)
    models = [ht.quantize_(nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 96)), recipe), None]
    models[1] = copy.deepcopy(models[0]).cuda()
    cpu, gpu = (dict(ht.inference_tensors(model)) for model in models)
    same({name: tensor.cpu() for name, tensor in gpu.items()}, cpu)


def colliding(rank):
    """The first rank alone finds it, and goes on until the others are through."""
    made = nn.Module()
    made.experts = Experts(2, 64, 64)
    made.experts.add_module("0", nn.Module())
    made.experts.get_submodule("0").w1 = nn.Linear(64, 64)
    model = fully_shard(ht.quantize_(made.to(here()), "fp8"), mesh=mesh_of(rank, 2))
    if rank:
        assert not list(ht.inference_tensors(model, ranks="first", bucket_bytes=1))
        return
    with pytest.raises(ValueError, match=r"a second 'experts\.0\.w1\.weight'"):
        list(ht.inference_tensors(model, ranks="first", bucket_bytes=1))


def test_an_error_of_the_first_rank_leaves_nobody_waiting(two):
    two.run(colliding)


def gathered_now(rank):
    """What FSDP2 has gathered for the forward, in another dtype, is not what is exported."""
    whole, model = twins("mxfp8", False, 64)
    with torch.no_grad():
        for one in (whole, model):
            one[0].norm.weight.fill_(1.001)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    shard(model, mesh_of(rank, 2), reshard_after_forward=False, mp_policy=policy)
    with torch.no_grad():
        model(batch(0))
    same(dict(ht.inference_tensors(model, dtype=torch.float32)), dict(ht.inference_tensors(whole, dtype=torch.float32)))
    with pytest.raises(NotImplementedError, match="the model is sharded"):
        ht.mismatch(model, batch(0))


def test_models_that_are_gathered_now(two):
    two.run(gathered_now)


def parts_by_value(rank):
    """Values of tensor-parallel parts, each with a scale of its own, cannot be quantized as one."""
    mesh = init_device_mesh(here(), (1, 2), mesh_dim_names=("dp", "tp"))
    model = ht.quantize_(nn.Sequential(nn.Linear(64, 128, bias=False)).to(here()), "fp8")
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"], shard_placement_fn=lambda _: Shard(1))
    with pytest.raises(ValueError, match="of which every part has its own"):
        ht.inference_tensors(model)


def test_values_of_parts_are_refused(two):
    two.run(parts_by_value)


def halves_of_two(rank):
    """Transformers cuts gate and up, which are one matrix, each on its own."""
    mesh = init_device_mesh(here(), (2,), mesh_dim_names=("tp",))
    layer = nn.Linear(64, 128, bias=False).to(here())
    cut = distribute_tensor(layer.weight, mesh, [_StridedShard(0, split_factor=2)], src_data_rank=None)
    layer.weight = nn.Parameter(cut)
    for recipe in ("bf16", "mxfp8"):
        model = ht.quantize_(nn.Sequential(layer), recipe)
        with pytest.raises(ValueError, match=r"inference_tensors: 0.weight: one section on each rank .*; save_pret"):
            dict(ht.inference_tensors(model))


def test_parts_of_several_sections_are_refused(two):
    two.run(halves_of_two)


def other_recipes(rank):
    mesh = init_device_mesh(here(), (2,), mesh_dim_names=("tp",))
    model = ht.quantize_(nn.Sequential(nn.Linear(64, 128, bias=False)).to(here()), "mxfp8" if rank else "fp8_rowwise")
    parallelize_module(model, mesh, {"0": ColwiseParallel()})
    with pytest.raises(ValueError, match="ranks passed different arguments: weights="):
        ht.inference_tensors(model)


def test_ranks_with_other_recipes(two):
    two.run(other_recipes)


def other_arguments(rank, folder):
    """On one rank: others would wait for it, or gather other bytes."""
    mesh = init_device_mesh(here(), (2,), mesh_dim_names=("tp",))
    model = ht.quantize_(nn.Sequential(nn.Linear(64, 128, bias=False)).to(here()), "fp8_rowwise")
    parallelize_module(model, mesh, {"0": ColwiseParallel()})
    for name, other in {"dtype": torch.float32, "ranks": "first", "bucket_bytes": 7, "experts": "stacked"}.items():
        with pytest.raises(ValueError, match=f"ranks passed different arguments: {name}=.* on rank 1"):
            ht.inference_tensors(model, **({name: other} if rank else {}))
    for name, wrong in {"dtype": "bf16", "ranks": "some", "bucket_bytes": 0, "layout": "hf"}.items():
        with pytest.raises((TypeError, ValueError), match=r"inference_tensors: .*\(rank 1\)"):
            ht.inference_tensors(model, **({name: wrong} if rank else {}))
    with pytest.raises(ValueError, match=r"export_pretrained: .*shard_bytes.*\(rank 1\)"):
        ht.export_pretrained(model, folder, shard_bytes=0 if rank else 1)


def test_ranks_with_other_arguments(two, tmp_path):
    two.run(other_arguments, str(tmp_path / "out"))
    assert not list(tmp_path.iterdir())
