"""FSDP2 where a columnwise face is quantized after the gather, from the rowwise bytes that were sent."""

import pytest
import torch
from processes import generator
from sharding import (
    assert_faces_equal,
    batch,
    make,
    mesh_of,
    same_bits,
    same_draws,
    shard,
    train,
    whole,
    with_weight,
)
from tiers import by_group
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchao.quantization import FqnToConfig

import hybridtensor as ht
from hybridtensor.distributed.fsdp.plan import make_plan

STOCHASTIC = ht.NVFP4Quantizer(rounding="stochastic")
SPECS = {
    "the rotated values are scaled": "quartet2",
    "columns are scaled": "fp8_rowwise+rowwise_dequantized_weight",
    "rows are rounded at random": with_weight(
        rowwise=STOCHASTIC, columnwise=STOCHASTIC, columnwise_source="rowwise_dequantized"
    ),
    "blocks have one of two scales": "nvfp4+one_d+four_over_six+rowwise_dequantized_weight",
    "rows are fewer bytes": "nvfp4_fwd_mxfp8_bwd",
    "rows are fewer bytes, columns are scaled by the last steps": with_weight(
        rowwise=ht.MXFP4Quantizer(), columnwise=ht.DelayedFloat8Quantizer(), columnwise_source="rowwise_dequantized"
    ),
}


def of_up(spec, blocks=2):
    """The recipe for layers whose rows are a multiple of 128, which rotations need."""
    config = ht.recipes.from_name(spec) if isinstance(spec, str) else spec
    return FqnToConfig({f"{block}.up": config for block in range(blocks)})


def trains(rank, size, spec, way, hidden=128):
    mesh = mesh_of(rank, size)
    model, twin = (make(of_up(spec), hidden=hidden) for _ in range(2))
    for index, block in enumerate(model):
        if way == "checkpointed":
            block = checkpoint_wrapper(block)
        elif way == "compiled":
            block = torch.compile(block, backend="aot_eager", fullgraph=True)
        model[index] = fully_shard(block, mesh=mesh, reshard_after_forward=way != "stays")
    if way == "autocast":
        for m in (model, twin):
            m.forward = torch.autocast("cpu", torch.bfloat16)(m.forward)
    train(rank, fully_shard(model, mesh=mesh), twin, steps=2, grad_input=True)
    torch._dynamo.reset()


# Three ranks have every recipe reshard
WAYS = [["reshards", "stays", "autocast"], ["checkpointed"], ["compiled"]]


@pytest.mark.parametrize(("way", "spec"), by_group(WAYS, [*SPECS]))
def test_two_ranks_train_like_the_unsharded_model(two, spec, way):
    """Each recipe is checkpointed, compiled, and trained in one of the other ways."""
    two.run(trains, 2, SPECS[spec], way)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_three_ranks_train_like_the_unsharded_model(three, spec):
    three.run(trains, 3, spec, "reshards", 384)


def test_uneven_shards_train_like_the_unsharded_model(three):
    three.run(trains, 3, "quartet2", "reshards")


def accumulates(rank, specs):
    for spec in specs:
        model, twin = shard(make(of_up(spec)), mesh_of(rank, 2)), make(of_up(spec))
        same_draws(rank, model, twin)
        for microbatch in range(3):
            model.set_requires_gradient_sync(microbatch == 2)
            losses = [m(batch(microbatch)).square().mean() for m in (model, twin)]
            assert same_bits(*(loss.detach() for loss in losses)), spec
            for loss in losses:
                loss.backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-5, atol=1e-8)


def test_gradient_accumulation(two):
    two.run(accumulates, list(SPECS.values()))


def gathers_what_the_whole_is_quantized_to(rank, size, specs, sizes):
    for spec in specs:
        for dtype in (torch.float32, torch.bfloat16):
            model, twin = (make(of_up(spec, 1), blocks=1, **sizes) for _ in range(2))
            shard(model, mesh_of(rank, size), mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
            model[0].unshard()
            weight, source = model[0].up.weight, twin[0].up.weight
            context = ht.Context("weight", source.state)
            # rounded once, in the weight's own dtype, whatever the policy computes in
            made = source.config.weight.quantize(source.source, dtype=source.dtype, context=context)
            assert_faces_equal(weight.rowwise, made.rowwise)
            assert_faces_equal(weight.columnwise, made.columnwise)


CUT = [  # rows that a rank has end inside blocks of a columnwise face
    "mxfp8+rowwise_dequantized_weight", "nvfp4+one_d+four_over_six+rowwise_dequantized_weight", "nvfp4_fwd_mxfp8_bwd",
    with_weight(
        rowwise=ht.MXFP4Quantizer(), columnwise=ht.Float8Quantizer(granularity="block", block="128x128"),
        columnwise_source="rowwise_dequantized",
    ),
]  # fmt: skip


def test_gathered_faces_are_those_of_the_whole_weight(two, three, four):
    two.run(gathers_what_the_whole_is_quantized_to, 2, list(SPECS.values()), {})
    three.run(gathers_what_the_whole_is_quantized_to, 3, list(SPECS.values()), {"hidden": 128})  # of values: uneven
    four.run(gathers_what_the_whole_is_quantized_to, 4, CUT, {"hidden": 96})
    four.run(gathers_what_the_whole_is_quantized_to, 4, ["quartet2"], {"hidden": 128, "width": 48})


def four_over_six(rank):
    for seed in (2, 36):
        layers = [torch.nn.Linear(64, 64, bias=False) for _ in range(2)]
        for layer in layers:
            ht.quantize_(layer, "nvfp4+one_d+four_over_six+rowwise_dequantized_weight")
            with torch.no_grad():
                layer.weight.copy_(torch.randn(64, 64, generator=generator(seed)))
        source = layers[1].weight
        made = source.config.weight.quantize(source.source, context=ht.Context("weight", source.state))
        fully_shard(layers[0], mesh=mesh_of(rank, 2)).unshard()
        assert_faces_equal(layers[0].weight.columnwise, made.columnwise)


def test_the_largest_value_of_four_over_six(two):
    """What it is quantized to depends on the other values of its block, and so does the columnwise face's scale."""
    two.run(four_over_six)


def refused(rank):
    """A persistent weight keeps its columnwise face, which its part alone does not give."""
    for spec, reason in (
        ("fp8_rowwise+rowwise_dequantized_weight", "its scales are those of what the rowwise face of all shards holds"),
        ("nvfp4+one_d+four_over_six+rowwise_dequantized_weight", "its scales are those of what the rowwise face"),
    ):
        torch.manual_seed(0)
        model = ht.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 128)), spec, persistent=True)
        with pytest.raises(ValueError, match=f"a persistent weight .* is cut .*{reason}"):
            fully_shard(model, mesh=mesh_of(rank, 2))


def test_persistent_weights_that_are_refused(two):
    two.run(refused)


def test_persistent_weights_send_the_bytes_that_they_keep():
    config = ht.recipes.from_name("nvfp4_fwd_mxfp8_bwd")
    assert make_plan(config, (128, 64), 2, 0).sends(False, True) == ("rowwise",)
    assert make_plan(config, (128, 64), 2, 0, persistent=True).sends(False, True) == ("columnwise",)
