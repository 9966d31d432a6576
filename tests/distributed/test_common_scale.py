"""Common scales of weights that ranks hold parts of. Oracle: the model that is not sharded, bitwise."""

import copy

import pytest
import torch
from processes import here
from sharding import assert_faces_equal, mesh_of, whole
from siblings import GROUPS, inputs, model_of
from tiers import in_turn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import hybridtensor as ht
from hybridtensor.distributed import quantize_master_weights
from hybridtensor.optim import MasterWeights

NVFP4, ONE_D = (  # which round to nearest, and so do not depend on whose rows are whose
    ht.HybridConfig(ht.NVFP4Quantizer(), ht.NVFP4Quantizer(two_d=two_d), ht.IdentityQuantizer())
    for two_d in (True, False)
)
OF_ROWWISE = ht.HybridConfig(  # whose columnwise face is scaled by what the rowwise one holds
    ht.NVFP4Quantizer(),
    ht.HybridQuantizer(ht.NVFP4Quantizer(), ht.Float8Quantizer(), "rowwise_dequantized"),
    ht.IdentityQuantizer(),
)
RECIPES = ["fp8", NVFP4, "fp8+dequantized", "fp8_delayed", "fp8+bf16_weight_values", ONE_D, OF_ROWWISE, OF_ROWWISE]


def same(mine, expected):
    assert list(mine) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(mine[name].view(torch.uint8), tensor.view(torch.uint8)), name


def shard(model, mesh, **options):
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def optimizer_of(model, persistent):
    if persistent:
        return MasterWeights(torch.optim.SGD, model.parameters(), lr=1e-2)
    return torch.optim.SGD(model.parameters(), lr=1e-2)


def step(model, optimizer, seed):
    model(inputs(seed, here())).square().mean().backward()
    optimizer.step()
    ht.step_(model)
    optimizer.zero_grad()


def trains_like_the_whole(rank, recipe, ranks, persistent, options, rows=None):
    twin = model_of(recipe, persistent=persistent, rows=rows).to(here())
    model = shard(copy.deepcopy(twin), mesh_of(rank, ranks), **options)
    optimizers = [optimizer_of(one, persistent) for one in (twin, model)]
    same(dict(ht.inference_tensors(model)), dict(ht.inference_tensors(twin)))
    for seed in range(3):
        step(twin, optimizers[0], seed)
        step(model, optimizers[1], seed)
        for mine, expected in zip(model.parameters(), twin.parameters(), strict=True):
            if not persistent:
                assert torch.equal(whole(mine), whole(expected))
    for one in (twin, model) if recipe != "fp8_delayed" else ():
        one(inputs(device=here()))
        if one is model:
            model.blocks[0].reshard()
        with torch.no_grad():
            one.blocks[0].v.weight.mul_(3)  # alone: its siblings learn of it
    assert torch.equal(model(inputs(device=here())), twin(inputs(device=here())))
    expected = dict(ht.inference_tensors(twin))
    same(dict(ht.inference_tensors(model)), expected)
    names = [name for name in expected if name.endswith(("weight_scale", "weight_global_scale"))]
    scales = [
        expected[name] for name in names if "blocks.0" in name and ".o." not in name and expected[name].numel() == 1
    ]
    assert len(scales) == 3
    assert scales[0] == scales[1] == scales[2]


@pytest.mark.parametrize(("recipe", "reshard"), in_turn(RECIPES, [True, False]))
def test_shards(two, recipe, reshard):
    two.run(trains_like_the_whole, recipe, 2, False, {"reshard_after_forward": reshard})


@pytest.mark.parametrize("recipe", ["fp8", NVFP4])
def test_persistent_shards(two, recipe):
    two.run(trains_like_the_whole, recipe, 2, True, {})


def one_closure_raises(rank):
    model = shard(model_of("fp8", persistent=True).to(here()), mesh_of(rank, 2))
    optimizer = optimizer_of(model, True)

    def closure():
        if rank == 0:
            raise ValueError("data: no batch is left")
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
        return 0.0

    with pytest.raises(ValueError, match=r"no batch is left.*rank 0"):
        optimizer.step(closure)
    step(model, optimizer, 0)  # and no rank waits for what another one left undone


def test_a_closure_that_raises_on_one_rank_raises_on_all(two):
    two.run(one_closure_raises)


@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed"])
def test_values_that_travel(two, recipe):
    """Uneven shards, and shards of columns, are quantized after the gather."""
    two.run(trains_like_the_whole, recipe, 2, False, {}, (63, 33, 95))
    two.run(trains_like_the_whole, recipe, 2, False, {"shard_placement_fn": _columns})


def _columns(parameter):
    return Shard(1) if parameter.dim() == 2 else Shard(0)


@pytest.mark.parametrize("recipe", ["fp8", NVFP4])
def test_one_rank(two, recipe):
    two.run(trains_like_the_whole, recipe, 1, False, {})


def compiled(rank):
    twin = model_of("fp8").to(here())
    model = shard(copy.deepcopy(twin), mesh_of(rank, 2))
    optimizers = [optimizer_of(one, False) for one in (twin, model)]
    for block in model.blocks:
        block.compile(backend="aot_eager")
    for seed in range(2):
        step(twin, optimizers[0], seed)
        step(model, optimizers[1], seed)
    for mine, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(whole(mine), whole(expected), rtol=1e-3, atol=1e-5)
    for one in (twin, model):  # of the same values
        for parameter in one.parameters():
            with torch.no_grad():
                parameter.copy_(parameter * 0 + 0.5 if parameter.dim() == 1 else parameter)
    amaxes = [block.q.weight.layer.common.amax for block in twin.blocks]
    assert all(amax > 0 for amax in amaxes)


def test_compiled_blocks(two):
    two.run(compiled)


def read_by_compiled_code(rank):
    """A graph that reads a part of a sharded weight asks for its common scale, which is that of all ranks."""
    model = shard(model_of("fp8").to(here()), mesh_of(rank, 2))
    with torch.no_grad():
        before = model(inputs(device=here()))
        model.blocks[0].reshard()
        torch.compile(lambda p: (p * 2).sum(), backend="aot_eager")(model.blocks[0].q.weight)
        assert torch.equal(model(inputs(device=here())), before)


def test_graphs_that_read_parts(two):
    two.run(read_by_compiled_code)


def apart(rank):
    """Siblings under different roots would not learn of each other's writes."""
    model = model_of("fp8").to(here())
    mesh = mesh_of(rank, 2)
    block = model.blocks[0]
    for linear in block.siblings:
        fully_shard(linear, mesh=mesh)
    with pytest.raises(RuntimeError, match="of the 3 weights of a common scale were given"):
        block.q(inputs(device=here()))


def test_siblings_under_different_roots(two):
    two.run(apart)


def tensor_parallel(rank):
    """The parts of a rank have a scale in common, as if they were layers of their own."""
    mesh = init_device_mesh(here(), (2,), mesh_dim_names=("tp",))
    model = model_of("fp8").to(here())
    values = [linear.weight.plain.detach().chunk(2)[rank].clone() for linear in model.blocks[0].siblings]
    parallelize_module(model.blocks[0], mesh, dict.fromkeys("qkv", ColwiseParallel()))
    outputs = [linear(inputs(device=here())) for linear in model.blocks[0].siblings]
    row = ht.Float8Quantizer().faces(torch.cat(values), rowwise=True, columnwise=False, dtype=torch.float32)[0]
    twin = nn.Linear(64, sum(len(v) for v in values), bias=False).to(here())
    with torch.no_grad():
        twin.weight.copy_(torch.cat(values))
    ht.quantize_(twin, "fp8")
    assert torch.equal(torch.cat(outputs, 1), twin(inputs(device=here())))
    scale = model.blocks[0].q.weight.to_local().layer.common.amax / 448
    assert torch.equal(scale.view(-1), row.scale.view(-1))


def test_tensor_parallel(two):
    two.run(tensor_parallel)


def fragments(rank, recipe):
    expected, model = model_of(recipe, persistent=True), model_of(recipe, persistent=True)
    weights = [linear.weight for linear in model.blocks[0].siblings]
    masters = [linear.weight.high_precision.current * (i + 2) for i, linear in enumerate(model.blocks[0].siblings)]
    with torch.no_grad():
        for linear, master in zip(expected.blocks[0].siblings, masters, strict=True):
            linear.weight.copy_(master)
    cuts = [master.numel() // 3 for master in masters]
    parts = [m.reshape(-1)[:c] if rank == 0 else m.reshape(-1)[c:] for m, c in zip(masters, cuts, strict=True)]
    offsets = [0 if rank == 0 else c for c in cuts]
    quantize_master_weights(weights, parts, offsets)
    same(dict(ht.inference_tensors(model)), dict(ht.inference_tensors(expected)))
    for mine, theirs in zip(weights, expected.blocks[0].siblings, strict=True):
        assert_faces_equal(mine.columnwise, theirs.weight.columnwise)
    with pytest.raises(RuntimeError, match="of the 3 weights of a common scale were given"):
        quantize_master_weights(weights[:2], parts[:2], offsets[:2])


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4", OF_ROWWISE])
def test_fragments(two, recipe):
    two.run(fragments, recipe)


def set_recipe(rank):
    twin = model_of("fp8", persistent=True).to(here())
    model = shard(copy.deepcopy(twin), mesh_of(rank, 2))
    for recipe in ("nvfp4", "fp8_rowwise", "fp8"):
        for one in (twin, model):
            ht.set_config_(one, recipe)
        same(dict(ht.inference_tensors(model)), dict(ht.inference_tensors(twin)))
    plain = copy.deepcopy(model_of("fp8", groups=())).to(here())
    sharded = shard(copy.deepcopy(plain), mesh_of(rank, 2))
    for one in (plain, sharded):
        ht.quantize_(one, "fp8", common_scale=GROUPS)
    same(dict(ht.inference_tensors(sharded)), dict(ht.inference_tensors(plain)))


def test_recipes_of_shards_change(two):
    two.run(set_recipe)
