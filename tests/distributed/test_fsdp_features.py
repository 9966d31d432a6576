"""What FSDP2 offers, with converted weights: each against an unsharded twin."""

import copy
import functools
import itertools
import warnings

import pytest
import tiers
import torch
import torch.distributed as dist
from processes import here
from sharding import Block, batch, make, mesh_of, same_after_changes, same_bits, same_draws, shard, train, whole
from tiers import covered, few, in_turn
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import hybridtensor as ht
from hybridtensor.distributed.fsdp.hooks import find
from hybridtensor.distributed.fsdp.shard import Shard as GatheredShard
from hybridtensor.distributed.fsdp.shard import shard_of
from hybridtensor.dtensor import local, with_local

# The formats that gather differently: per tensor, across columns, square blocks, blocks, two levels, high precision.
FORMATS = ["fp8", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4", "nvfp4_1d_weight", "fp8_dequantized_backward", "bf16"]
SOME = ["fp8_rowwise", "nvfp4_1d_weight", "fp8"]


def layers(model):
    return [m for m in model.modules() if isinstance(m, nn.Linear)]


# -- meshes, resharding, shapes ------------------------------------------------------------------------------------


def on_four_ranks(rank, recipes):
    for recipe in recipes:
        train(rank, shard(make(recipe), mesh_of(rank, 4)), make(recipe), steps=2)


def test_four_ranks(four):
    four.run(on_four_ranks, SOME)


def hybrid_sharding(rank, recipes):
    mesh = init_device_mesh(here(), (2, 2), mesh_dim_names=("replicate", "shard"))
    for recipe in recipes:
        train(rank, shard(make(recipe), mesh), make(recipe), steps=2)


def test_hsdp(four):
    four.run(hybrid_sharding, few(SOME, 2))


def resharding(rank, reshard, recipes):
    for recipe in recipes:
        train(rank, shard(make(recipe), mesh_of(rank, 4), reshard_after_forward=reshard), make(recipe), steps=2)


@pytest.mark.parametrize(("reshard", "recipe"), in_turn([True, False, 2], SOME))
def test_reshard_after_forward(four, reshard, recipe):
    four.run(resharding, reshard, [recipe])


def awkward_shapes(rank, recipes, options):
    for recipe, sizes in recipes:
        model, twin = (make(recipe, blocks=1, **sizes) for _ in range(2))
        train(rank, shard(model, mesh_of(rank, 4), **options), twin, steps=2)


AWKWARD = [
    ("fp8", {"hidden": 50}),  # uneven
    ("fp8", {"hidden": 2}),  # ranks without a row
    ("fp8_rowwise", {"hidden": 6}),
    ("fp8_block", {"hidden": 96}),  # 24 rows per rank: blocks of 128 are cut
    ("mxfp8", {"hidden": 96}),  # blocks of 32 of the columnwise face are cut, the rowwise face is not
    ("nvfp4", {"hidden": 96}),
    ("mxfp8_dequantized_backward", {"hidden": 96}),
    ("nvfp4_1d_weight", {"hidden": 32}),
    ("bf16", {"hidden": 50}),
    ("high_precision_fwd_mxfp8_bwd", {"hidden": 96}),
]


def test_uneven_shards_and_cut_blocks(four):
    four.run(awkward_shapes, AWKWARD, {})


def placed(parameter):
    return Shard(1) if parameter.dim() == 2 else None


def test_shards_of_columns(four):
    four.run(awkward_shapes, [(recipe, {}) for recipe in FORMATS[:5]], {"shard_placement_fn": placed})


# -- precision -----------------------------------------------------------------------------------------------------


def mlp(recipe):
    torch.manual_seed(0)
    return ht.quantize_(
        nn.Sequential(nn.Linear(64, 128, bias=False), nn.SiLU(), nn.Linear(128, 64, bias=False)), recipe
    )


def mixed_precision(rank, recipes):
    """Master weights in fp32 are quantized from fp32, as under autocast; gradients are reduced in fp32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    for recipe in recipes:
        model, twin = mlp(recipe), mlp(recipe)
        same_draws(rank, model, twin)
        for layer in layers(model):
            fully_shard(layer, mesh=mesh_of(rank, 2), mp_policy=policy)
        fully_shard(model, mesh=mesh_of(rank, 2), mp_policy=policy)
        x = batch(0).view(4, 16, 64)
        out = model(x)
        with torch.autocast(here(), dtype=torch.bfloat16):
            expected = twin(x).float()
        assert out.dtype == torch.float32
        assert same_bits(out.detach(), expected.detach()), recipe
        out.square().mean().backward()
        expected.square().mean().backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert p.grad.dtype == torch.float32
            torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-5, atol=1e-8)


def test_mixed_precision(two):
    two.run(mixed_precision, [*FORMATS, "fp8_rowwise+rowwise_dequantized", "nvfp4_fwd_mxfp8_bwd"])


def autocast(rank, recipes):
    for recipe in recipes:
        model, twin = shard(make(recipe), mesh_of(rank, 2)), make(recipe)
        with torch.autocast(here(), dtype=torch.bfloat16):
            losses = [m(batch(0)).square().mean() for m in (model, twin)]
        assert same_bits(*(loss.detach() for loss in losses))
        for loss in losses:
            loss.backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-5, atol=1e-8)


def test_autocast(two):
    two.run(autocast, ["fp8", "fp8_high_precision_backward", "fp8_dequantized_backward", "bf16"])


# -- gradients -----------------------------------------------------------------------------------------------------


def accumulation(rank, recipes):
    for recipe in recipes:
        for keep, names_the_last in ((False, False), (True, False), (False, True), (True, True)):
            model, twin = shard(make(recipe), mesh_of(rank, 2)), make(recipe)
            same_draws(rank, model, twin)
            if keep:
                model.set_reshard_after_backward(False)
            for microbatch in range(3):
                model.set_requires_gradient_sync(microbatch == 2)
                if names_the_last:  # FSDP2 then prefetches blocks whose backward is over
                    model.set_is_last_backward(microbatch == 2)
                for m in (model, twin):
                    m(batch(microbatch)).square().mean().backward()
            for module in [*model, model]:
                module.reshard()
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-5, atol=1e-8)


def test_gradient_accumulation(two):
    two.run(accumulation, few(SOME, 2))


class ByAddress(torch.optim.Optimizer):
    """Writes parts of weights as Triton's kernels do, which get addresses."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            local(p).plain.untyped_storage().fill_(0)


def written_by_address(rank, recipes):
    for recipe in recipes:
        for microbatches in (1, 2):
            model = shard(make(recipe), mesh_of(rank, 2))
            optimizer = ByAddress([p for p in model.parameters() if p.dim() == 2])
            with torch.no_grad():
                assert not torch.equal(model(batch(0)), batch(0))
            for microbatch in range(microbatches):
                model(batch(microbatch)).square().mean().backward()
            optimizer.step()
            assert torch.equal(model(batch(0)), batch(0))  # what blocks add to it is zero


def test_an_optimizer_that_writes_by_address(two):
    """Nothing of it passes a handler, but that it stepped is known."""
    two.run(written_by_address, ["bf16", *SOME, "fp8_delayed"])


class Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(64, 4, bias=False), nn.Linear(4, 128, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def frozen(rank, recipes):
    for recipe in recipes:
        models = [make(recipe), make(recipe)]
        for model in models:
            model.requires_grad_(False)
            for block in model:
                torch.manual_seed(1)
                block.up = Lora(block.up)
        train(rank, shard(models[0], mesh_of(rank, 2)), models[1])


def test_frozen_weights_with_trainable_adapters(two):
    two.run(frozen, few(SOME, 2))


def one_by_one(parameters, lr):
    """torch's foreach operators take no shards together with tensors."""
    return torch.optim.AdamW(parameters, lr=lr, foreach=False)


def ignored_and_shared(rank, recipes):
    for recipe in recipes:
        models = [make(recipe), make(recipe)]
        for model in models:
            model[1].up.weight = model[0].up.weight  # tied
        model, twin = models
        ignored = {model[0].down.weight, model[0].norm.weight}
        fully_shard(model, mesh=mesh_of(rank, 2), ignored_params=ignored)
        assert isinstance(model[0].down.weight, ht.MasterWeight)
        train(rank, model, twin, cls=one_by_one)
        assert model[0].up.weight is model[1].up.weight


def test_ignored_and_shared_parameters(two):
    two.run(ignored_and_shared, few(SOME, 2))


class TiedToEmbedding(nn.Sequential):
    """A head that has its weight in common with an embedding."""

    def __init__(self, blocks, rows):
        super().__init__(*blocks)
        self.embed, self.head = nn.Embedding(rows, 64), nn.Linear(64, rows, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        tokens = (50 * x[:, 0]).abs().long() % self.embed.num_embeddings
        x = self.embed(tokens)
        assert x.dtype == torch.get_default_dtype()
        for block in (self[0], self[1]):
            x = block(x)
        return self.head(x)


def tied(recipe, rows=128, persistent=False):
    torch.manual_seed(0)
    model = TiedToEmbedding((Block(64, 128) for _ in range(2)), rows)
    return ht.quantize_(model, recipe, persistent=persistent)


def tied_to_an_embedding(rank, recipes):
    for recipe in recipes:
        uneven = [{"rows": 126}] if recipe in ("fp8", "bf16") else []
        for options in ({"reshard_after_forward": True}, {"reshard_after_forward": False}, *uneven):
            model = tied(recipe, options.pop("rows", 128))
            twin = copy.deepcopy(model)
            for block in (model[0], model[1]):
                fully_shard(block, mesh=mesh_of(rank, 2))
            fully_shard(model, mesh=mesh_of(rank, 2), **options)
            gathers = {row.layer: row for row in ht.explain(model, show=False).gathers}
            assert gathers["head"].forward == "values, float32"
            assert "reads its values, too" in gathers["head"].reason or model.head.out_features == 126
            assert gathers["0.up"].reason == ""
            train(rank, model, twin, steps=2)
            if options.get("reshard_after_forward"):
                model.reshard()
                weight = local(model.head.weight)
                assert shard_of(find(model.head, weight).sharded).values.untyped_storage().nbytes() == 0


def test_weights_tied_to_an_embedding(two):
    """It reads the values: those are gathered, and quantized after."""
    two.run(tied_to_an_embedding, ["fp8", "nvfp4_1d_weight", "bf16"])


def tied_in_other_ways(rank):
    """Half the gathers in the dtype of the computation; recomputed; persistent; in compiled code."""
    mesh, policy = mesh_of(rank, 2), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = fully_shard(tied("fp8"), mesh=mesh, mp_policy=policy)
    values = whole(model.head.weight)
    model.unshard()
    assert same_bits(model.embed(torch.arange(128, device=here())), values.bfloat16())
    assert same_bits(model.head.weight.rowwise.qdata, tied("fp8").head.weight.faces(
        rowwise=True, columnwise=False, dtype=torch.bfloat16)[0].qdata)  # fmt: skip
    with pytest.raises(NotImplementedError, match=r"max_norm=.* would write to a weight"):
        nn.functional.embedding(torch.arange(3, device=here()), model.embed.weight, max_norm=1.0)
    wrapped = torch._dynamo.exc.InternalTorchDynamoError  # what torch makes of any error here
    with pytest.raises(
        wrapped, match=r"NotImplementedError: fully_shard: compiled code cannot read the values of a weight"
    ):
        torch.compile(model.head, backend="eager")(torch.randn(2, 64, device=here(), dtype=torch.bfloat16))
    model.reshard()
    model, twin = (tied("fp8", persistent=True) for _ in range(2))
    losses = [m(batch(0)).square().mean() for m in (fully_shard(model, mesh=mesh), twin)]
    assert same_bits(*losses)
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(whole(model.head.weight.grad), twin.head.weight.grad, rtol=1e-6, atol=1e-9)
    twin = tied("mxfp8")
    model = checkpoint_wrapper(tied("mxfp8"), checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    train(rank, fully_shard(model, mesh=mesh), twin, steps=2)


def test_weights_tied_to_an_embedding_otherwise(two):
    two.run(tied_in_other_ways)


# -- where weights come from and are ---------------------------------------------------------------------------------


def meta(rank, recipes):
    for recipe in recipes:
        with torch.device("meta"):
            torch.manual_seed(0)
            model = make(recipe)
        shard(model, mesh_of(rank, 2))
        model.to_empty(device=here())
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="DTensor random operators")  # torch, about CPU meshes
            for module in model.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
        twin = make(recipe)
        with torch.no_grad():
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                assert isinstance(local(p), ht.MasterWeight) == isinstance(q, ht.MasterWeight)
                local(q).copy_(whole(p))
        train(rank, model, twin)


def test_meta_initialization(two):
    two.run(meta, [*SOME, "fp8_delayed"])


def offload(rank, recipes):
    """With an optimizer whose steps have the same bits on every device."""
    for recipe in recipes:
        policy = CPUOffloadPolicy(pin_memory=here() == "cuda")
        model = shard(make(recipe), mesh_of(rank, 2), offload_policy=policy)
        assert {local(p).device.type for p in model.parameters()} == {"cpu"}
        train(rank, model, make(recipe), cls=torch.optim.SGD, lr=2.0**-5)


def test_cpu_offload(two):
    two.run(offload, few(SOME, 2))


def plain(value):
    """A sharded value as the checkpoint of a plain model has it."""
    part = local(value)
    return with_local(value, (part.master if isinstance(part, ht.MasterWeight) else part).clone())


def loading(rank, recipes):
    """Checkpoints before and in the middle of training; assigned and copied; uneven, so that FSDP2 pads again."""
    for recipe in recipes:
        for assign in (False, True):
            source, model, twin = (make(recipe, hidden=50, blocks=1) for _ in range(3))
            with torch.no_grad():
                for p in source.parameters():
                    p.mul_(1.5)
            shard(model, mesh_of(rank, 4))
            shard(source, mesh_of(rank, 4))
            model(batch(0)).sum().backward()
            model.zero_grad()
            state = {name: plain(value) for name, value in source.state_dict().items()}
            model.load_state_dict(state, assign=assign)
            with torch.no_grad():
                for p in twin.parameters():
                    p.mul_(1.5)
            assert all(isinstance(local(layer.weight), ht.MasterWeight) for layer in layers(model))
            train(rank, model, twin, steps=2)


def test_load_state_dict(four):
    four.run(loading, ["fp8", "fp8_rowwise"])


# -- schedules -----------------------------------------------------------------------------------------------------


def nested_and_prefetching(rank, recipes):
    for recipe in recipes:
        model, twin = make(recipe, blocks=3), make(recipe, blocks=3)
        for block in model:
            fully_shard(block.up, mesh=mesh_of(rank, 2))
        shard(model, mesh_of(rank, 2))
        model[0].set_modules_to_forward_prefetch([model[1], model[2]])
        model[2].set_modules_to_backward_prefetch([model[1], model[0]])
        train(rank, model, twin, steps=3)


def test_nested_wraps_and_prefetching(two):
    two.run(nested_and_prefetching, few(SOME, 2))


class Looped(nn.Sequential):
    def forward(self, x):
        for _ in range(2):
            x = super().forward(x)
        return x


def prefetched_without_a_forward_that_follows(rank, recipes):
    """The last block prefetches the first one for another round; after the last round backward gets that gather."""
    for recipe in recipes:
        for compiled in (False, True):
            model, twin = (Looped(*make(recipe)) for _ in range(2))
            for block in model if compiled else ():
                block.compile(backend="aot_eager")
            shard(model, mesh_of(rank, 2))
            for block, following in zip(model, [*model[1:], model[0]], strict=True):
                block.set_modules_to_forward_prefetch([following])
            train(rank, model, twin, grad_input=True)
            torch._dynamo.reset()
            every = [shard_of(find(layer, local(layer.weight)).sharded) for layer in layers(model)]
            assert not any(one._recomputed for one in every)


def test_prefetching_in_a_loop(two):
    two.run(prefetched_without_a_forward_that_follows, few(SOME, 1))


def train_eval_train(rank, recipes):
    for recipe in recipes:
        model, twin = shard(make(recipe), mesh_of(rank, 2)), make(recipe)
        for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
            train(rank, model, twin, steps=1)
            outs = []
            for m in (model, twin):
                m.eval()
                with mode():
                    outs.append(m(batch(9)))
                m.train()
            assert same_bits(*outs)


def test_train_eval_train(two):
    two.run(train_eval_train, few(SOME, 2))


def recipe_switch(rank):
    model, twin = shard(make("fp8"), mesh_of(rank, 2)), make("fp8")
    for recipe in ("fp8_rowwise", "mxfp8", "bf16", "fp8_delayed", "fp8", "fp8_dequantized_backward"):
        for m in (model, twin):
            ht.set_config_(m, recipe)
        train(rank, model, twin, steps=2)


def test_recipe_switch_in_the_middle_of_a_run(two):
    two.run(recipe_switch)


def switch_while_gathered(rank):
    """A root stays gathered after evaluation; its next use has the new recipe all the same."""
    model, twin = (ht.quantize_(nn.Sequential(nn.Linear(64, 64)), "fp8_rowwise") for _ in range(2))
    twin.load_state_dict(model.state_dict())
    fully_shard(model, mesh=mesh_of(rank, 2))
    same_after_changes(model, twin, ("mxfp8", "fp8"))


def test_recipe_switch_of_a_weight_that_stays_gathered(two):
    two.run(switch_while_gathered)


def quantized_late(rank):
    """Whether FSDP2 has gathered the weights or not; quantized ones may get another recipe, but no other kind."""
    for run, recipe in itertools.product((False, True), (None, "fp8_rowwise")):
        model = nn.Sequential(nn.Linear(64, 64))
        twin = copy.deepcopy(model)
        if recipe is not None:
            ht.quantize_(model, recipe)
        fully_shard(model, mesh=mesh_of(rank, 2))
        if run:
            with torch.no_grad():
                model(batch(0))
        for persistent in (True, False) if recipe is None else (True,):
            with pytest.raises(TypeError, match="layer 0: FSDP2 shards its weight already; call quantize_ before"):
                ht.quantize_(model, "fp8", persistent=persistent)
        if recipe is not None:
            ht.quantize_(model, "fp8")
            train(rank, model, ht.quantize_(twin, "fp8"))


def test_models_that_are_quantized_after_they_are_sharded(two):
    two.run(quantized_late)


def unrecorded_forwards(rank, backward, groups):
    """Before a step's own forward, whose amaxes alone count; nothing reads the weights in between."""
    torch.manual_seed(0)
    model = ht.quantize_(nn.Sequential(*(nn.Linear(64, 64) for _ in range(2))).to(here()), "fp8_delayed")
    twin = copy.deepcopy(model)
    for layer in (*model, model) if groups == "of layers" else (model,):
        fully_shard(layer, mesh=mesh_of(rank, 2))
    pairs = [(m, torch.optim.SGD(m.parameters(), lr=0.25)) for m in (model, twin)]
    for step in range(3):
        for m, optimizer in pairs:
            x = batch(step).requires_grad_()
            with ht.without_recording(m), torch.set_grad_enabled(backward):
                y = m(x)
                if backward:
                    torch.autograd.grad(y.sum(), x)
            m(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ht.step_(m)
    for ours, other in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(ours, other)


@pytest.mark.parametrize("groups", ["of layers", "root, which stays gathered after a forward"])
@pytest.mark.parametrize("backward", [False, True])
def test_forwards_without_recording_before_a_step(backward, groups, two):
    two.run(unrecorded_forwards, backward, groups)


def evaluated_before_the_step(rank, recipe, persistent):
    """FSDP2 leaves the root gathered after an evaluation, with signs or scales of the step that ends then."""
    torch.manual_seed(0)
    layers = (nn.Linear(128, 128, bias=False) for _ in range(2))
    model = ht.quantize_(nn.Sequential(*layers).to(here(), torch.bfloat16), recipe, persistent=persistent)
    twin = copy.deepcopy(model)
    fully_shard(model[0], mesh=mesh_of(rank, 2))
    fully_shard(model, mesh=mesh_of(rank, 2))
    wrap = ht.optim.MasterWeights if persistent else lambda cls, parameters, **options: cls(parameters, **options)
    pairs = [(m, wrap(torch.optim.SGD, m.parameters(), lr=0.1)) for m in (model, twin)]
    tokens = torch.randn(5, 32, 128).to(here(), torch.bfloat16)
    for step in range(4):
        losses = []
        for m, optimizer in pairs:
            losses.append(m(tokens[step]).square().mean())
            losses[-1].backward()
            for p in m.parameters() if m is twin else ():
                dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
                p.grad.div_(2)
            optimizer.step()
            optimizer.zero_grad()
            with ht.without_recording(m), torch.no_grad():
                m(tokens[-1])
            ht.step_(m)
        assert torch.equal(*losses), (step, losses)


@pytest.mark.parametrize(("recipe", "persistent"), covered(["quartet2", "fp8_delayed", "nvfp4"], [False, True]))
def test_an_evaluation_between_the_optimizers_step_and_the_models(recipe, persistent, two):
    two.run(evaluated_before_the_step, recipe, persistent)


def stepped_while_gathered(rank, persistent):
    model = ht.quantize_(nn.Sequential(nn.Linear(64, 64, bias=False)), "fp8_delayed", persistent=persistent)
    fully_shard(model, mesh=mesh_of(rank, 2))
    with torch.no_grad():
        model(batch(0))
        told = r"HybridTensor of layer 0: .*add_.* a weight that FSDP2 gathered.* call reshard\(\) before it is written"
        with pytest.raises(NotImplementedError, match=told):
            model[0].weight.add_(1.0)
        model.reshard()
        model[0].weight.add_(1.0)


@pytest.mark.parametrize("persistent", [False, True], ids=["masters", "persistent"])
def test_arithmetic_on_a_gathered_weight_says_to_reshard(two, persistent):
    two.run(stepped_while_gathered, persistent)


def switch_before_backward(rank):
    """A backward finishes with the recipe of its forward."""
    model, twin = shard(make("fp8_rowwise"), mesh_of(rank, 2)), make("fp8_rowwise")
    losses = [m(batch(0)).square().mean() for m in (model, twin)]
    for m, loss in zip((model, twin), losses, strict=True):
        ht.set_config_(m, "mxfp8")
        loss.backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-5, atol=1e-8)


def test_recipe_switch_between_forward_and_backward(two):
    two.run(switch_before_backward)


def checkpointing(rank, recipes, impl, order):
    for recipe in recipes:
        model, twin = make(recipe), make(recipe)
        for i, block in enumerate(model):
            if order == "inside":
                model[i] = fully_shard(checkpoint_wrapper(block, checkpoint_impl=impl), mesh=mesh_of(rank, 2))
            else:
                model[i] = checkpoint_wrapper(fully_shard(block, mesh=mesh_of(rank, 2)), checkpoint_impl=impl)
        fully_shard(model, mesh=mesh_of(rank, 2))
        train(rank, model, twin, grad_input=True)


WRAPS = list(itertools.product(CheckpointImpl, ["inside", "outside"]))


@pytest.mark.parametrize(
    ("recipe", "impl", "order"), [(recipe, *wrap) for recipe, wrap in in_turn(SOME, WRAPS)], ids=str
)
def test_activation_checkpointing(two, recipe, impl, order):
    two.run(checkpointing, [recipe], impl, order)


def keeping_products(context, operator, *args, **kwargs):
    is_product = operator is torch.ops.hybridtensor.scaled_mm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def selective_checkpointing(rank, recipes):
    """As torchtitan wraps blocks; bitwise the model that is not sharded."""
    contexts = functools.partial(create_selective_checkpoint_contexts, keeping_products)
    for recipe in recipes:
        model, twin = make(recipe), make(recipe)
        for i, block in enumerate(model):
            model[i] = fully_shard(checkpoint_wrapper(block, context_fn=contexts), mesh=mesh_of(rank, 2))
        fully_shard(model, mesh=mesh_of(rank, 2))
        train(rank, model, twin, grad_input=True)


def test_selective_checkpointing(two):
    two.run(selective_checkpointing, SOME)


def compiled(rank, recipes, backend):
    for recipe in recipes:
        model, twin = make(recipe), make(recipe)
        for i, block in enumerate(model):
            model[i] = fully_shard(torch.compile(block, backend=backend, fullgraph=True), mesh=mesh_of(rank, 2))
        fully_shard(model, mesh=mesh_of(rank, 2))
        train(rank, model, twin, grad_input=True)
        torch._dynamo.reset()


def test_blocks_compiled_before_wrapping(two):
    two.run(compiled, FORMATS if tiers.LONG else ["fp8_block", "nvfp4_1d_weight"], "aot_eager")


def compiled_with_values_in_backward(rank, recipes):
    """Forward must not read the values, which are gathered for backward: neither view them, nor cast them."""
    for recipe, autocast in itertools.product(recipes, (False, True)):
        model, twin = make(recipe), make(recipe)
        for block in model:
            block.compile(backend="aot_eager", fullgraph=True)
        shard(model, mesh_of(rank, 2))
        with torch.autocast(here(), torch.bfloat16, enabled=autocast):
            train(rank, model, twin, grad_input=True)
        torch._dynamo.reset()


def test_compiled_blocks_whose_backward_has_values(two):
    two.run(compiled_with_values_in_backward, ["fp8_high_precision_backward", "fp8/bf16/fp8"])


def compiled_with_checkpointing(rank, recipes, order):
    for recipe in recipes:
        model, twin = make(recipe), make(recipe)
        for i, block in enumerate(model):
            if order == "checkpoint(compile)":
                block = checkpoint_wrapper(torch.compile(block, backend="aot_eager"))
            else:
                block = torch.compile(checkpoint_wrapper(block), backend="aot_eager")
            model[i] = fully_shard(block, mesh=mesh_of(rank, 2))
        fully_shard(model, mesh=mesh_of(rank, 2))
        train(rank, model, twin, grad_input=True)
        torch._dynamo.reset()


@pytest.mark.parametrize("order", ["checkpoint(compile)", "compile(checkpoint)"])
def test_compiled_blocks_with_checkpointing(two, order):
    two.run(compiled_with_checkpointing, ["fp8_rowwise"], order)


def checked(rank):
    """``check`` on every rank: products by the recipe, and nothing of the model is changed."""
    for recipe in ("fp8", "fp8_delayed", "mxfp8+dequantized"):
        model = shard(make(recipe), mesh_of(rank, 2))
        model(batch(0)).sum().backward()
        before = [local(p.grad).clone() for p in model.parameters()]
        found = ht.check(model, batch(1), strict=True)
        assert {row.gemm for row in found.products} == {"output", "grad_input", "grad_weight"}
        assert found.flops == pytest.approx(1 / 3 if "dequantized" in recipe else 1.0)
        for p, grad in zip(model.parameters(), before, strict=True):
            assert torch.equal(local(p.grad), grad)
        other = shard(make(recipe), mesh_of(rank, 2))
        other(batch(0)).sum().backward()
        assert torch.equal(model(batch(2)), other(batch(2)))
        state = ht.plain_state_dict(model)
        assert not any("quantization_state" in name for name in state)
        with pytest.raises(RuntimeError, match="plain_: FSDP2 shards this model"):
            ht.plain_(model)


def test_check_and_the_way_back(two):
    two.run(checked)


class Adapter(nn.Module):
    """A layer and one product more, by a parameter that a factory made of its weight."""

    def __init__(self, layer, make_of):
        super().__init__()
        self.layer, self.more = layer, nn.Parameter(make_of(layer.weight, 64, 64))

    def forward(self, x):
        return self.layer(x) + nn.functional.linear(x, self.more)


FACTORIES = {
    "new_zeros": lambda w, *shape: w.new_zeros(shape), "new_empty": lambda w, *shape: w.new_empty(shape),
    "empty_like": lambda w, *shape: torch.empty_like(w),
    "a copy": lambda w, *shape: copy.deepcopy(nn.Parameter(w.new_zeros(shape))),
    "two in a row": lambda w, *shape: torch.empty_like(w.new_zeros(shape)),
}  # fmt: skip


def adapters(rank, recipe, names):
    """FSDP2 would gather them as the layer's weight, quantized, and measure them for its scales."""
    for name in names:
        layer = ht.quantize_(nn.Sequential(nn.Linear(64, 64)), recipe)[0]
        told = r"more of FSDPAdapter was made of the weight of layer 0 by .* by torch\.zeros"
        with pytest.raises(NotImplementedError, match=told):
            fully_shard(Adapter(layer, FACTORIES[name]), mesh=mesh_of(rank, 2))(batch(0))


@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed"])
def test_adapters_made_of_weights_by_factories_raise_on_every_rank(recipe, two):
    two.run(adapters, recipe, list(FACTORIES))


OTHERS = {**FACTORIES, "cloned": lambda w, *shape: w.detach().clone()}


def made_of_another_layer(rank, name):
    """A converted layer with a weight that came from another layer, or was made of it."""
    models = [ht.quantize_(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "fp8_delayed") for _ in range(2)]
    for model in models:
        torch.manual_seed(0)
        if name == "exchanged":
            model[0].weight, model[1].weight = model[1].weight, model[0].weight
        else:
            model[1].weight = nn.Parameter(OTHERS[name](model[0].weight, 64, 64))
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)
    train(rank, fully_shard(models[0], mesh=mesh_of(rank, 2)), models[1])


@pytest.mark.parametrize("name", [*OTHERS, "exchanged"])
def test_weights_from_other_layers_go_by_the_state_of_their_layer(name, two):
    two.run(made_of_another_layer, name)


class Runs(nn.Module):
    """Two layers compiled together, which ``how`` runs: after FSDP2 gathered the weights."""

    def __init__(self, how):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        self.layers.compile(backend="aot_eager")
        self.how = how

    def forward(self, x):
        return self.how(self.layers, x)


def direct(layers, x):
    return layers(x)


def copied(saved):
    """Copy what a graph saves, as ``save_on_cpu`` does on a GPU; on a CPU it reads nothing."""
    assert saved.untyped_storage().nbytes() or not saved.numel(), "a face that was not gathered is saved"
    return saved.clone()


def on_cpu(layers, x):
    with torch.autograd.graph.saved_tensors_hooks(copied, lambda saved: saved):
        return layers(x)


def checkpointed(layers, x):
    return checkpoint(layers, x, use_reentrant=False)


def hooks_of_graphs(rank, recipe, persistent, reshard, around):
    """Graphs save both faces of a weight, also in forward, where only one is multiplied. That hooks read them is found
    in the first step: later ones gather once."""
    found, gathered_again, gather_both = [], [], GatheredShard._gather_both
    for how in (direct, around):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = ht.quantize_(nn.Sequential(Runs(how), Runs(how)).to(here()), recipe, persistent=persistent)
        for block in (*model, model):
            fully_shard(block, mesh=mesh_of(rank, 2), reshard_after_forward=reshard)
        results = []
        for step in range(3):
            GatheredShard._gather_both = lambda *args, step=step: (gathered_again.append(step), gather_both(*args))
            model(batch(step).requires_grad_()).square().mean().backward()
            results += [whole(p.grad).clone() for p in model.parameters()]
            model.zero_grad()
            ht.step_(model)
        found.append(results)
        gathered = [
            shard_of(find(layer, local(layer.weight)).sharded) for block in model for layer in block.layers[::2]
        ]
        if how in (direct, checkpointed):  # whose hooks read nothing
            assert not any(shard.wants(True, False)[1] for shard in gathered)
    GatheredShard._gather_both = gather_both
    assert set(gathered_again) <= {0}
    assert all(map(torch.equal, *found))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("recipe", "persistent", "reshard", "around"),
    covered(["fp8", "fp8_delayed", "mxfp8"], [False, True], [False, True], [on_cpu, checkpointed]),
)
def test_saved_tensor_hooks_around_graphs(recipe, persistent, reshard, around, two):
    two.run(hooks_of_graphs, recipe, persistent, reshard, around)
