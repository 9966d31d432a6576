"""FSDP2 against an unsharded twin: bytes, losses, gradients and weights, step by step."""

import itertools

import pytest
import tiers
import torch
from sharding import RECIPES, assert_faces_equal, make, mesh_of, shard, train, with_weight
from torch.distributed.fsdp import MixedPrecisionPolicy
from torchao.quantization import FqnToConfig

import hybridtensor as ht


def trains_like_the_twin(rank, recipes, size, options):
    for recipe in recipes:
        model, twin = (make(recipe, blocks=1) for _ in range(2))
        train(rank, shard(model, mesh_of(rank, size), **options), twin, steps=2)


def test_every_recipe_trains_like_the_unsharded_model(two):
    two.run(trains_like_the_twin, [*RECIPES, "mxfp8+bf16_weight_values"], 2, {})


def test_one_rank(two):
    some = ["fp8_block", "fp8_delayed", "fp8_dequantized_backward", "nvfp4_1d_weight", "mxfp8+bf16_weight_values"]
    two.run(trains_like_the_twin, RECIPES if tiers.LONG else some, 1, {})


POLICIES = [MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)]


def gathers_what_the_whole_is_quantized_to(rank, cases, size, sizes):
    for recipe, policy in cases:
        model, twin = (make(recipe, blocks=1, **sizes) for _ in range(2))
        with torch.no_grad():  # rows of very different magnitudes: a scale that misses some is another
            for p in [*model.parameters(), *twin.parameters()]:
                exponents = (torch.arange(len(p)) // 32 * 5) % 8
                p.mul_(2.0 ** exponents.view(-1, *[1] * (p.dim() - 1)))
        shard(model, mesh_of(rank, size), mp_policy=policy)
        for block, other in zip(model, twin, strict=True):
            block.unshard()
            for layer in ("up", "down"):
                weight, source = getattr(block, layer).weight, getattr(other, layer).weight
                assert isinstance(weight, ht.HybridTensor)
                context = ht.Context("weight", source.state)
                dtype = source.dtype if source.config.weight.requantizes else policy.param_dtype or source.dtype
                made = source.config.weight.quantize(source.source, dtype=dtype, context=context)
                assert_faces_equal(weight.rowwise, made.rowwise)
                assert_faces_equal(weight.columnwise, made.columnwise)
            block.reshard()


UNUSUAL = [
    with_weight(rowwise=ht.NVFP4Quantizer(rounding="stochastic"), columnwise=ht.NVFP4Quantizer(rounding="stochastic")),
    with_weight(rowwise=ht.NVFP4Quantizer(row_scaled=True), columnwise=ht.NVFP4Quantizer(row_scaled=True)),
    with_weight(rowwise=ht.Float8Quantizer(), columnwise=ht.Float8Quantizer(granularity="row")),
    with_weight(rowwise=ht.MXFP8Quantizer(two_d=True), columnwise=ht.Float8Quantizer(dtype="e5m2")),
    with_weight(
        rowwise=ht.Float8Quantizer(), columnwise=ht.Float8Quantizer(granularity="row"),
        columnwise_source="rowwise_dequantized",
    ),
    *(with_weight(rowwise=q, columnwise=q) for q in (
        ht.MXFP4Quantizer(), ht.MXFP4Quantizer(two_d=True, scale_rounding="even"),
        ht.NVFP4Quantizer(two_d=True, four_over_six="mse"), ht.NVFP4Quantizer(four_over_six="mae"),
    )),
    with_weight(
        rowwise=ht.Float8Quantizer(granularity="row"), columnwise=ht.Float8Quantizer(),
        columnwise_source="rowwise_dequantized",
    ),
]  # fmt: skip


OF_BF16 = [f"{spec}+bf16_weight_values" for spec in ("fp8", "mxfp8", "fp8_rowwise+high_precision")]
SQUARE = ht.Float8Quantizer(granularity="block", block="128x128")
CUT = [  # square blocks, with each other and with what needs other magnitudes
    with_weight(rowwise=ht.MXFP8Quantizer(two_d=True), columnwise=ht.MXFP8Quantizer(two_d=True)),
    with_weight(rowwise=ht.Float8Quantizer(granularity="row"), columnwise=SQUARE),
    with_weight(rowwise=ht.Float8Quantizer(), columnwise=SQUARE),
    with_weight(rowwise=ht.MXFP8Quantizer(two_d=True), columnwise=SQUARE),
    with_weight(rowwise=SQUARE, columnwise=ht.MXFP8Quantizer(), columnwise_source="rowwise_dequantized"),
    with_weight(rowwise=SQUARE, columnwise=ht.IdentityQuantizer(), columnwise_source="rowwise_dequantized"),
]


@pytest.mark.parametrize("size", [1, 2])
def test_gathered_bytes_are_those_of_the_whole_weight(two, size):
    """One rank, which cuts nothing, gathers under the policies in turn."""
    rows = tiers.in_turn if size == 1 else itertools.product
    cases = list(rows(RECIPES + UNUSUAL + OF_BF16, POLICIES))
    two.run(gathers_what_the_whole_is_quantized_to, cases, size, {})


def test_gathered_bytes_of_uneven_shards_and_cut_blocks(four):
    for recipes, sizes in [
        (["fp8", "fp8_high_precision_backward"], {"hidden": 50}),
        (["fp8_block", "mxfp8", *UNUSUAL[:2], *CUT], {"hidden": 96}),
        (["fp8_block", CUT[0], CUT[4]], {"hidden": 640, "width": 160}),
    ]:
        four.run(gathers_what_the_whole_is_quantized_to, list(itertools.product(recipes, POLICIES)), 4, sizes)


def rotated_under_drawn_signs(rank, specs):
    for spec in specs:
        recipe = FqnToConfig({f"{block}.up": ht.recipes.from_name(spec) for block in range(2)})
        train(rank, shard(make(recipe), mesh_of(rank, 2)), make(recipe), steps=2, grad_input=True)


def test_signs_are_the_same_on_all_ranks(two):
    two.run(rotated_under_drawn_signs, ["nvfp4+eden", "quartet2"])
