"""What FSDP2 sends of converted weights, how often, and what stays in memory; and how it fails."""

import functools
import gc
import io
import time
import weakref
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from faces import tensor_faces
from processes import here
from rich.console import Console
from sharding import RECIPES, batch, bytes_per_rank, make, mesh_of, shard
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

import hybridtensor as ht
from hybridtensor.distributed.fsdp.plan import make_plan
from hybridtensor.distributed.fsdp.shard import shard_of
from hybridtensor.distributed.fsdp.torch_compat import params_of

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class CountingGather(DefaultAllGather):
    """Records the bytes that this rank sends in each gather."""

    def __init__(self):
        self.sent = []

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.sent.append(input_tensor.numel() * input_tensor.itemsize)
        return super().__call__(output_tensor, input_tensor, group, async_op)


def one_layer(recipe, mesh, size=256, wrap=lambda m: m, **options):
    """A root without weights, and one layer below it; and what counts the layer's gathers."""
    torch.manual_seed(0)
    layer = nn.Linear(size, size, bias=False)
    model = nn.Sequential(layer if recipe is None else ht.quantize_(layer, recipe))
    model[0] = wrap(model[0])
    fully_shard(model[0], mesh=mesh, mp_policy=BF16, **options)
    fully_shard(model, mesh=mesh, mp_policy=BF16)
    count = CountingGather()
    model[0].set_custom_all_gather(count)
    return model, count


def phases(model, count, size=256):
    """Bytes sent before forward and before backward."""
    out = model(torch.randn(32, size, requires_grad=True))
    forward, count.sent = count.sent, []
    out.sum().backward()
    backward, count.sent = count.sent, []
    return forward, backward


LIMITS = {
    "fp8": 0.51, "mxfp8": 0.53, "nvfp4": 0.29, "fp8_rowwise": 0.51, "fp8_block": 0.51, "fp8_delayed": 0.51,
    "quartet2": 0.29, "nvfp4_fwd_mxfp8_bwd": 0.29, "fp8_rowwise+rowwise_dequantized_weight": 0.51,
}  # fmt: skip


def only_the_face_of_the_phase(rank):
    for recipe in dict.fromkeys([*RECIPES, *LIMITS]):
        config = ht.recipes.from_name(recipe)
        plan = make_plan(config, (256, 256), 2, 0)
        expected = [[bytes_per_rank(plan, *wanted)] for wanted in ((True, False), (False, True))]
        model, count = one_layer(recipe, mesh_of(rank, 2))
        for _ in range(2):
            assert list(phases(model, count)) == expected, recipe
        for sent in expected:
            assert sent[0] <= LIMITS.get(recipe, 1.01) * 128 * 256 * 2, (recipe, sent)
    model, count = one_layer("fp8_block", mesh_of(rank, 2), size=384)  # shards of 192 rows cut blocks of 128
    for sent in phases(model, count, size=384):
        assert sent[0] <= 0.51 * 192 * 384 * 2


def test_only_the_face_of_the_phase_is_sent(two):
    two.run(only_the_face_of_the_phase)


def both_faces_where_the_weight_stays(rank):
    """Square blocks, and faces that are made of the rowwise one, send one face for both, others two."""
    ratios = {"fp8": 0.51, "fp8_block": 0.51, "nvfp4": 0.29, "mxfp8": 1.06, "bf16": 1.0, "quartet2": 0.29}
    for recipe, ratio in ratios.items():
        model, count = one_layer(recipe, mesh_of(rank, 2), reshard_after_forward=False)
        (forward,), backward = phases(model, count)
        assert not backward
        assert forward <= ratio * 128 * 256 * 2, (recipe, forward)


def test_a_weight_that_stays_is_sent_once(two):
    two.run(both_faces_where_the_weight_stays)


def recomputation(rank):
    """The first backward that runs a forward again gathers twice, later ones both faces at once."""
    for expected, counts in ((None, [2, 1, 1]), (True, [1, 1, 1])):
        wrap = functools.partial(checkpoint_wrapper)
        model, count = one_layer("mxfp8", mesh_of(rank, 2), wrap=wrap)
        ht.distributed.expect_recompute_(model, expected)
        for number in counts:
            forward, backward = phases(model, count)
            assert len(forward) == 1
            assert len(backward) == number, (expected, backward)
            assert backward[-1] == 2 * forward[0]
    for expected in (None, True, False):  # of which the columnwise face is made: it is there
        model, count = one_layer("quartet2", mesh_of(rank, 2), wrap=wrap)
        ht.distributed.expect_recompute_(model, expected)
        for _ in range(2):
            forward, backward = phases(model, count)
            assert backward == forward, expected
    model, count = one_layer("mxfp8", mesh_of(rank, 2), wrap=wrap)
    ht.distributed.expect_recompute_(model, False)
    with pytest.raises(RuntimeError, match=r"the rowwise face of a weight \(256, 256\) was not gathered"):
        phases(model, count)


def test_recomputation_gathers_both_faces(two):
    two.run(recomputation)


def compiled(rank):
    for expected, factor in ((None, 2), (False, 1)):
        model, count = one_layer("mxfp8", mesh_of(rank, 2), wrap=lambda m: torch.compile(m, backend="aot_eager"))
        ht.distributed.expect_recompute_(model, expected)
        for _ in range(2):
            forward, backward = phases(model, count)
            assert backward == [factor * forward[0]]


def test_compiled_layers_get_both_faces_unless_nothing_is_recomputed(two):
    two.run(compiled)


def reductions(rank):
    """One MAX reduction per step for all weights, none where nothing was written, none where no scale needs it."""
    for recipe, expected in {"fp8": 1, "fp8_rowwise": 1, "nvfp4_1d_weight": 1, "mxfp8": 0, "fp8_delayed": 0}.items():
        model = shard(make(recipe, blocks=3), mesh_of(rank, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _step in range(3):
            with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduction:
                for microbatch in range(2):
                    model(batch(microbatch)).square().mean().backward()
            assert reduction.call_count == expected, (recipe, reduction.call_args_list)
            optimizer.step()
            ht.set_config_(model, recipe)  # an equal recipe changes nothing


def test_one_reduction_per_step(two):
    two.run(reductions)


# -- memory --------------------------------------------------------------------------------------------------------


def living():
    """Return how many memories of tensors there are, by bytes, shape and dtype of one of the tensors."""
    gc.collect()
    seen = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, nn.Parameter):
            storage = item.untyped_storage()
            seen[storage._cdata] = storage.nbytes(), item.shape, item.dtype
    return Counter(seen.values())


def bytes_of(memories):
    return sum(count * nbytes for (nbytes, *_), count in memories.items())


def gathered_bytes(model):
    found = [sharded for module in model.modules() for sharded in params_of(module)]
    shards = [shard_of(sharded) for sharded in found if isinstance(sharded.tensor, ht.MasterWeight)]
    tensors = [tensor for s in shards if s.faces for tensor in s.faces.needed(True, True)]
    outputs = [tensor for sharded in found for tensor in sharded.param.all_gather_outputs]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors + outputs)


def nothing_stays(rank):
    for recipe, policy in (
        ("fp8_rowwise", BF16),
        ("fp8_dequantized_backward", MixedPrecisionPolicy()),
        ("fp8_rowwise+rowwise_dequantized_weight", BF16),
    ):
        model = make(recipe, width=32, hidden=32)
        for block in model:
            fully_shard(block, mesh=mesh_of(rank, 2), mp_policy=policy)
        fully_shard(model, mesh=mesh_of(rank, 2), mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        after = []
        for step in range(30):
            loss = model(batch(step, tokens=32, width=32)).square().mean()
            assert gathered_bytes(model) == 0
            loss.backward()
            assert gathered_bytes(model) == 0
            optimizer.step()
            optimizer.zero_grad()
            del loss
            if step in (2, 29):
                after.append(living())
        for _ in range(50):  # gloo's threads let go of what they have sent a little later
            if bytes_of(after[1]) > bytes_of(after[0]):
                time.sleep(0.1)
                after[1] = living()
        # less where earlier models are let go late
        assert bytes_of(after[1]) <= bytes_of(after[0]), (recipe, after[1] - after[0])
        ht.set_config_(model, "mxfp8")
        for _ in range(2):
            loss = model(batch(0, tokens=32, width=32)).square().mean()
            assert gathered_bytes(model) == 0
            loss.backward()
            assert gathered_bytes(model) == 0


def test_nothing_stays_and_nothing_grows(two):
    two.run(nothing_stays)


def models_are_let_go(rank):
    model = shard(make("fp8"), mesh_of(rank, 2))
    model(batch(0)).sum().backward()
    watched = weakref.ref(model[0].up)
    del model
    gc.collect()
    assert watched() is None


def test_a_model_can_be_collected(two):
    two.run(models_are_let_go)


# -- errors --------------------------------------------------------------------------------------------------------


def forgotten_step(rank):
    model = shard(make("fp8_delayed"), mesh_of(rank, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(batch(step)).sum().backward()
        optimizer.step()
    model(batch(2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"call hybridtensor\.step_"):
        optimizer.step()


def test_a_state_that_never_advances_raises(two):
    two.run(forgotten_step)


def values_are_those_that_are_there(rank):
    """The columnwise face is more precise, but not gathered before forward."""
    model, twin = (make("fp8_high_precision_backward", blocks=1) for _ in range(2))
    shard(model, mesh_of(rank, 2))
    faces = tensor_faces(twin[0].up.weight, columnwise=False, dtype=torch.float32)
    values = []
    model[0].up.register_forward_hook(lambda layer, *_: values.append(layer.weight.dequantize()))
    model(batch(0))
    assert torch.equal(values[0], faces[0].dequantize())


def test_dequantize_of_a_gathered_weight(two):
    two.run(values_are_those_that_are_there)


class Product(nn.Linear):
    """A layer that multiplies by operators: ``x @ w.t()`` is ``F.linear``, ``x @ w`` needs the other face, which is
    gathered then."""

    transposed = True

    def forward(self, x):
        return x @ (self.weight.t() if self.transposed else self.weight)


def products(rank):
    for reshard in (True, False):
        torch.manual_seed(0)
        layers = [ht.quantize_(Product(64, 64, bias=False), "fp8_rowwise") for _ in range(2)]
        layers[1].load_state_dict(layers[0].state_dict())
        fully_shard(layers[0], mesh=mesh_of(rank, 2), reshard_after_forward=reshard)
        for Product.transposed in (True, False):
            inputs = [batch(0).requires_grad_() for _ in layers]
            for layer, x in zip(layers, inputs, strict=True):
                layer(x).square().mean().backward()
            torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=0, atol=0)


def test_products_by_operators(two):
    two.run(products)


class Tied(nn.Module):
    """An autoencoder whose decoder multiplies by the encoder's weight, in the other layout."""

    def __init__(self, width):
        super().__init__()
        self.encoder = nn.Linear(64, width)

    def forward(self, x):
        return F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t())


def compiled_products_in_the_other_layout(rank, recipe, width):
    """Oracle: eager code, which gathers the face when it is used."""
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(*(Tied(width) for _ in range(2)))
        ht.quantize_(model, recipe, filter_fn=lambda module, name: True)
        for block in model if compiled else ():
            block.compile(backend="aot_eager")  # one graph for both
        for block in model:
            fully_shard(block, mesh=mesh_of(rank, 2), reshard_after_forward=True)
        for _ in range(2):
            x = batch(0).requires_grad_()
            y = model(x)
            y.square().mean().backward()
            found.append([y, x.grad, *(p.grad.to_local() for p in model.parameters())])
            model.zero_grad()
            ht.step_(model)
    assert all(map(torch.equal, found[0] + found[1], found[2] + found[3]))


@pytest.mark.parametrize(("recipe", "width"), [("fp8_rowwise", 128), ("fp8_delayed", 128), ("fp8", 1)])
def test_compiled_products_in_the_other_layout(two, recipe, width):
    two.run(compiled_products_in_the_other_layout, recipe, width)


def product_by_the_other_face(rank):
    layer = ht.quantize_(Product(64, 64, bias=False), "fp8+high_precision")
    layer.transposed = False
    fully_shard(layer, mesh=mesh_of(rank, 2))
    with pytest.raises(NotImplementedError, match="is gathered by FSDP2 and was multiplied in the other layout"):
        layer(batch(0))


def test_a_product_by_a_face_of_another_format_raises(two):
    two.run(product_by_the_other_face)


def disagreement(rank):
    start = time.time()
    model = shard(make("fp8" if rank else "mxfp8"), mesh_of(rank, 2))
    with pytest.raises(RuntimeError, match=r"ranks differ in weights or recipes: weight 0 .*\) of layer "):
        model(batch(0))
    assert time.time() - start < 20


def test_ranks_with_other_recipes_raise_on_every_rank(two):
    two.run(disagreement)


def disagreement_on_kinds(rank):
    """Of persistent and of frozen weights, whose collectives would differ."""
    for match, persistent, frozen in (("in high .* on rank 0, .* persistent", rank, 0), ("frozen on", 0, rank)):
        layer = ht.quantize_(nn.Linear(64, 64), "fp8", persistent=bool(persistent))
        layer.weight.requires_grad_(not frozen)
        start = time.time()
        with pytest.raises(RuntimeError, match=rf"ranks differ in weights or recipes: .*{match}"):
            fully_shard(layer, mesh=mesh_of(rank, 2))(batch(0))
        assert time.time() - start < 20


def test_ranks_with_other_kinds_of_weights_raise_on_every_rank(two):
    two.run(disagreement_on_kinds)


def one_replica_disagrees(rank):
    mesh = init_device_mesh(here(), (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(make("fp8" if rank == 3 else "fp8_rowwise"), mesh)
    with pytest.raises(RuntimeError, match=r"ranks differ in weights or recipes"):
        model(batch(0))


def test_one_rank_of_replicas_with_another_recipe_raises_on_every_rank(four):
    four.run(one_replica_disagrees)


# -- what explain says ---------------------------------------------------------------------------------------------


def rendered(explanation):
    console = Console(width=120, file=io.StringIO())
    console.print(explanation)
    return console.file.getvalue()


def explained(rank):
    for recipe, sizes, options, expected in (
        ("fp8", {}, {}, ("rowwise, fp8_e4m3_tensor", "rowwise, fp8_e4m3_tensor", "")),
        ("mxfp8", {}, {}, ("rowwise, mxfp8_e4m3", "columnwise, mxfp8_e4m3", "")),
        ("fp8_dequantized_backward", {}, {}, ("rowwise, fp8_e4m3_tensor", "rowwise, fp8_e4m3_tensor", "")),
        ("fp8_high_precision_backward", {}, {}, ("rowwise, fp8_e4m3_tensor", "values, float32", "")),
        ("nvfp4_fwd_mxfp8_bwd", {}, {}, ("rowwise, nvfp4", "rowwise, nvfp4", "")),
        ("fp8_rowwise+rowwise_dequantized_weight", {}, {}, ("rowwise, fp8_e4m3_row", "rowwise, fp8_e4m3_row", "")),
        ("fp8", {"hidden": 50}, {}, ("values, float32", "values, float32", "50 rows on 4 ranks")),
        ("mxfp8", {"hidden": 96}, {}, ("rowwise, mxfp8_e4m3", "values, float32", "shards of 24 rows cut blocks of 32")),
        ("fp8", {}, {"reshard_after_forward": 2}, (None, None, "reshard_after_forward is taken as True")),
    ):
        model = shard(make(recipe, **sizes), mesh_of(rank, 4), **options)
        for _ in range(2):
            rows = ht.explain(model, show=False).gathers
            assert [row.layer for row in rows] == ["0.up", "0.down", "1.up", "1.down"]
            row = rows[2]
            assert expected[0] in (None, row.forward)
            assert expected[1] in (None, row.backward)
            assert expected[2] in row.reason
            assert bool(expected[2]) == bool(row.reason)
            model(batch(0))
    assert "Gathered by FSDP2" in rendered(ht.explain(model, show=False))


def test_explain_says_what_is_sent(four):
    four.run(explained)
