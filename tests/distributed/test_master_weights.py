"""Weights quantized from masters that are scattered over ranks. Oracle: the bytes of the whole master, quantized."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from any_layer import ANY_LAYER
from processes import generator
from torch import nn

import hybridtensor as ht
from hybridtensor.distributed import quantize_master_weights
from hybridtensor.subclasses.quantizing import refresh_
from hybridtensor.subclasses.structure import flatten

RECIPES = sorted(ANY_LAYER)
SHAPES = [(64, 96), (160, 64), (32, 32)]


IDENTITY = ht.IdentityQuantizer()
ROTATED = ht.NVFP4Quantizer(hadamard=True)


def with_weight(*, grad_output=IDENTITY, **faces):
    """A config whose weight has quantizers that no named recipe gives it."""
    return ht.HybridConfig(input=IDENTITY, weight=ht.HybridQuantizer(**faces), grad_output=grad_output)


UNUSUAL = [
    with_weight(rowwise=ht.NVFP4Quantizer(rounding="stochastic"), columnwise=ht.NVFP4Quantizer(rounding="stochastic")),
    with_weight(
        rowwise=ht.NVFP4Quantizer(row_scaled=True), columnwise=ROTATED,
        grad_output=ht.HybridQuantizer(ROTATED, IDENTITY),
    ),
    with_weight(rowwise=ht.Float8Quantizer(), columnwise=ht.Float8Quantizer(granularity="row")),
    with_weight(
        rowwise=ht.Float8Quantizer(), columnwise=ht.Float8Quantizer(granularity="row"),
        columnwise_source="rowwise_dequantized",
    ),
    with_weight(rowwise=ht.IdentityQuantizer(), columnwise=ht.MXFP8Quantizer()),
    with_weight(rowwise=ht.MXFP8Quantizer(two_d=True), columnwise=ht.IdentityQuantizer()),
]  # fmt: skip


def layers(config):
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(k, n, bias=False) for n, k in SHAPES)
    return ht.quantize_(model.bfloat16(), config, persistent=True)


def masters(seed, *, special=False):
    """Whole fp32 masters, with magnitudes that differ by place; some with NaN and Inf."""
    draws = generator(seed)
    made = []
    for shape in SHAPES:
        whole = torch.randn(shape, generator=draws)
        whole *= torch.exp2(torch.randint(-6, 6, (shape[0], 1), generator=draws).float())
        if special:
            whole[3, 5], whole[3, 7], whole[17, 20], whole[30, 31] = float("nan"), -float("inf"), float("nan"), -0.0
        made.append(whole)
    return made


def cuts(seed, size, numel):
    """Random ranges, one per rank, in any order; some empty, some not at a row's begin."""
    draws = generator(seed)
    inner = torch.randint(0, numel + 1, (size - 1,), generator=draws).sort().values.tolist()
    if seed % 3 == 0:
        inner[0] = 0  # nothing for the first
    edges = [0, *inner, numel]
    ranges = list(itertools.pairwise(edges))
    return [ranges[i] for i in torch.randperm(size, generator=draws).tolist()]


def assert_same_faces(weight, expected):
    for name in ("rowwise", "columnwise"):
        for a, b in zip(flatten(getattr(weight, name))[0], flatten(getattr(expected, name))[0], strict=True):
            assert a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8)), name


def equals_the_whole(rank, configs, special):
    size = dist.get_world_size()
    for number, config in enumerate(configs):
        model = layers(config)
        weights = [layer.weight for layer in model]
        addresses = [t.data_ptr() for w in weights for t in flatten(w.rowwise)[0]]
        twin = copy.deepcopy(model)
        whole = masters(number, special=special)
        shards, offsets = [], []
        for index, master in enumerate(whole):
            begin, end = cuts(number + index, size, master.numel())[rank]
            shards.append(master.flatten()[begin:end] if begin < end else None)
            offsets.append(begin if begin < end else None)
        quantize_master_weights(weights, shards, offsets)
        for weight, layer, master in zip(weights, twin, whole, strict=True):
            refresh_(layer.weight, master)
            assert_same_faces(weight, layer.weight)
        assert addresses == [t.data_ptr() for w in weights for t in flatten(w.rowwise)[0]]


@pytest.mark.parametrize("special", [False, True])
def test_every_recipe_equals_quantizing_the_whole(two, special):
    two.run(equals_the_whole, [*RECIPES, *UNUSUAL, "fp8+bf16_weight_values", "mxfp8+bf16_weight_values"], special)


def one_element_of_a_block_elsewhere(rank):
    """A NaN that is all that another rank has of a block makes the block NaN everywhere."""
    for config in ("nvfp4", "nvfp4_1d_weight", "nvfp4/mxfp8/bf16", "mxfp8"):
        for place in (0, -1):
            whole = torch.randn(SHAPES[0], generator=generator(1))
            whole.view(-1)[place] = float("nan")
            weights = [layers(config)[0].weight for _ in range(2)]
            cut = 1 if place == 0 else whole.numel() - 1
            begin, end = [(0, cut), (cut, whole.numel())][rank]
            quantize_master_weights(weights[:1], [whole.flatten()[begin:end]], [begin])
            refresh_(weights[1], whole)
            assert_same_faces(*weights)
            assert weights[0].original is None


def test_one_element_of_a_block_elsewhere(two):
    two.run(one_element_of_a_block_elsewhere)


def test_on_four_ranks(four):
    four.run(equals_the_whole, ["fp8", "fp8_block", "mxfp8", "nvfp4", *UNUSUAL], True)


def one_reduction(rank):
    counted = []
    originals = dist.all_reduce, dist.all_gather
    dist.all_reduce = lambda tensor, op=dist.ReduceOp.SUM, group=None: (
        counted.append((str(op), tensor.dtype, tensor.numel())) or originals[0](tensor, op, group=group)
    )
    try:
        model = layers("mxfp8")
        halves = [m.flatten().chunk(2)[rank] for m in masters(0)]
        quantize_master_weights([layer.weight for layer in model], halves, [rank * h.numel() for h in halves])
    finally:
        dist.all_reduce = originals[0]
    (_, agreement), magnitudes, elements = (counted[0][1:], *counted[1:])
    assert agreement == 3
    assert magnitudes[:2] == (str(dist.ReduceOp.MAX), torch.float32)
    assert elements == (str(dist.ReduceOp.SUM), torch.uint8, 2 * sum(n * k for n, k in SHAPES))


def test_two_collectives_for_all_weights(two):
    two.run(one_reduction)


def zero1(rank):
    """A distributed optimizer: gradients are averaged, each rank steps its part of the masters."""
    size = dist.get_world_size()
    alone = [dist.new_group([r]) for r in range(size)][rank]
    for spec in ("fp8_block", "nvfp4"):
        model, twin = layers(spec), layers(spec)
        for m in (model, twin):  # every rank has the whole batch, and draws for it alone
            ht.set_data_parallel_group_(m, alone)
        whole = masters(1)
        reference = ht.optim.MasterWeights(torch.optim.AdamW, twin.parameters(), lr=0.1)
        for master, values in zip(reference.masters().values(), whole, strict=True):
            master.data.copy_(values)
        weights, fragments, offsets = [layer.weight for layer in model], [], []
        for index, values in enumerate(whole):
            begin, end = cuts(index + 1, size, values.numel())[rank]
            fragments.append(nn.Parameter(values.flatten()[begin:end].clone()))
            offsets.append(begin)
        optimizer = torch.optim.AdamW(fragments, lr=0.1)
        for step in range(3):
            for m in (model, twin):
                for layer in m:
                    x = torch.randn(32, layer.in_features, generator=generator(step)).bfloat16()
                    layer(x).float().square().sum().backward()
            for fragment, layer, begin in zip(fragments, model, offsets, strict=True):
                fragment.grad = layer.weight.grad.flatten()[begin : begin + fragment.numel()].float()
                layer.weight.grad = None
            optimizer.step()
            quantize_master_weights(weights, [f.detach() for f in fragments], offsets)
            reference.step()
            twin.zero_grad()
            if step:
                for m in (model, twin):
                    ht.step_(m)
                for weight, layer in zip(weights, twin, strict=True):
                    assert_same_faces(weight, layer.weight)


def test_a_zero1_optimizer_trains_like_the_unsharded_one(two):
    two.run(zero1)


def errors(rank):
    weights = [layer.weight for layer in layers("fp8")]
    whole = masters(0)
    halves = [m.flatten().chunk(2)[rank] for m in whole]
    offsets = [rank * h.numel() for h in halves]
    with pytest.raises((TypeError, RuntimeError), match="fp32 masters" if rank else "another rank"):
        quantize_master_weights(weights, [h.double() if rank else h for h in halves], offsets)
    with pytest.raises((ValueError, RuntimeError), match="inside its weight" if rank else "another rank"):
        quantize_master_weights(weights, halves, [o + rank for o in offsets])
    with pytest.raises(RuntimeError, match="whole of weight 0"):
        quantize_master_weights(weights, halves, [0] * 3)
    twice = whole if rank else halves
    with pytest.raises(RuntimeError, match="each element once"):
        quantize_master_weights(weights, [one.flatten() for one in twice], [0] * 3)
    with pytest.raises(RuntimeError, match="differ in weights or recipes"):
        quantize_master_weights(weights[rank:], halves[rank:], offsets[rank:])
    with pytest.raises(TypeError, match="persistent weights"):
        quantize_master_weights([nn.Parameter(torch.zeros(2, 2))], halves[:1], offsets[:1])
    with pytest.raises(ValueError, match="as many weights"):
        quantize_master_weights(weights, halves, offsets[:1])
    with pytest.raises(ValueError, match="offset of at least 0"):
        quantize_master_weights(weights, halves, [None] * 3)
    quantize_master_weights(weights, halves, offsets)


def test_errors_rise_on_every_rank(two):
    two.run(errors)
