"""Weights that FSDP2 gathers together: what is done once for all of them, and that they need not be alike."""

import contextlib
from unittest import mock

import pytest
import torch
from processes import here
from sharding import batch, make, mesh_of, same_bits, shard
from tiers import covered
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

import hybridtensor as ht
from hybridtensor.distributed.fsdp.bundle import Bundle, PreparedGather
from hybridtensor.distributed.fsdp.payload import Payload
from hybridtensor.dtensor import local
from hybridtensor.subclasses.intercepting import InterceptingTensor


@contextlib.contextmanager
def noted():
    """Note what happens in between: ``"sent"`` the numbers of bytes of each tensor that a weight sends, ``"cast"`` how
    many weights are cast at once, ``"unpacked"`` once per group.
    """
    found = {"sent": [], "cast": [], "unpacked": 0}
    gathering, cast, unpack = InterceptingTensor.fsdp_hooks, Payload.cast, PreparedGather.unpack

    class Noting(type(gathering)):
        @staticmethod
        def pre_all_gather(tensor, module):
            answer = gathering.pre_all_gather(tensor, module)
            found["sent"].append([sent.numel() for sent in answer[0]])
            return answer

    def casting(self, casts, values):
        found["cast"].append(len(casts))
        cast(self, casts, values)

    def unpacking(self, received):
        found["unpacked"] += 1
        unpack(self, received)

    with (
        mock.patch.object(InterceptingTensor, "fsdp_hooks", Noting()),
        mock.patch.object(Payload, "cast", casting),
        mock.patch.object(PreparedGather, "unpack", unpacking),
    ):
        yield found


def of_blocks(recipes):
    """Return a model with a recipe for each block."""
    model = make(recipes[0], blocks=len(recipes))
    for block, recipe in zip(model, recipes, strict=True):
        ht.set_config_(block, recipe)
    return model


def follow(model, twin, *, steps=3):
    """Compare what forward and backward compute, bit for bit, and change the weights of both in between."""
    for step in range(steps):
        found = []
        for m in (model, twin):
            x = batch(step).requires_grad_()
            loss = m(x).square().mean()
            loss.backward()
            found.append((loss.detach(), x.grad))
        assert all(same_bits(*pair) for pair in zip(*found, strict=True)), step
        shrink(model, twin)
        for m in (model, twin):
            m.zero_grad()
            ht.step_(m)


@torch.no_grad()
def shrink(*models):
    for m in models:
        for p in m.parameters():
            p.mul_(0.5)


def once(rank):
    of_rowwise = ("fp8_dequantized_backward", 0), ("nvfp4_fwd_mxfp8_bwd", 0)
    for recipe, columns in (("fp8", 0), ("fp8_delayed", 0), ("mxfp8", 1), ("fp8_rowwise", 1), *of_rowwise):
        model = shard(make(recipe, blocks=2), mesh_of(rank, 2))
        for step in range(2):
            with noted() as found:
                model(batch(step)).square().mean().backward()
            casts = 2 if step else 2 + 2 * columns  # the first backward asks for the other face, too
            assert found["cast"] == [2] * casts, recipe
            assert found["unpacked"] == 4
            numbers = [len(sent) for sent in found["sent"]]
            assert numbers == [1, 0] * 4
            shrink(model)
    model = shard(make("mxfp8", blocks=1), mesh_of(rank, 1))
    with noted() as found:
        model(batch(0)).square().mean().backward()
    (before, whole), (empty, both) = found["sent"][:2], found["sent"][2:]
    assert before == empty == [0]  # FSDP2 forwards one tensor of each
    assert len(whole) == len(both) == 1
    assert whole[0] > 0 < both[0]


def test_one_payload_and_one_cast_for_a_group(two):
    two.run(once)


QUANTIZED = ["fp8", "mxfp8", "fp8_rowwise"]  # backward sends what does not lie together
MIXED = ["fp8", "mxfp8", "fp8_high_precision_backward", "fp8_rowwise", "bf16", "high_precision_fwd_mxfp8_bwd"]


def mixed(rank, cases):
    for recipes, size, reshard in cases:
        model, twin = of_blocks(recipes), of_blocks(recipes)
        fully_shard(model, mesh=mesh_of(rank, size), reshard_after_forward=reshard)
        follow(model, twin)
        for m in (model, twin):  # in the middle of training, to other layouts in the same group
            ht.set_config_(m[1], "fp8_block")
        follow(model, twin)


def test_several_recipes_in_a_group(two):
    two.run(mixed, covered((QUANTIZED, MIXED), (1, 2), (True, False)))


def unlike(rank):
    """Persistent weights beside masters, one of them frozen, uneven shards, and what is left alone."""
    for options in ({}, {"offload_policy": CPUOffloadPolicy(pin_memory=here() == "cuda")}):
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            layers = [nn.Linear(64, 64), nn.Linear(64, 66), nn.Linear(66, 64), nn.Linear(64, 64), nn.Linear(64, 64)]
            model = nn.Sequential(*layers)
            ht.quantize_(model[:2], "fp8_rowwise")  # 66 rows: whole blocks of no format; 33 on each rank
            ht.quantize_(nn.ModuleList([model[3]]), "mxfp8", persistent=True)
            ht.quantize_(nn.ModuleList([model[4]]), "fp8")
            model[0].weight.requires_grad_(False)
            models.append(model)
        model, twin = models
        fully_shard(model, mesh=mesh_of(rank, 2), **options)
        for step in range(3):
            x = batch(step)
            losses = [m(x if m is twin or not options else x.to(here())).square().mean() for m in models]
            assert same_bits(*(loss.detach() for loss in losses)), (options, step)
            for m, loss in zip(models, losses, strict=True):
                loss.backward()
                with torch.no_grad():
                    for index in (0, 1, 4):
                        m[index].weight.mul_(0.5)
                m.zero_grad()


def test_unlike_weights_in_a_group(two):
    two.run(unlike)


def copies(rank):
    """Parts on the host, of which each hook gets a copy: no weight is there before its hook."""
    made = Bundle.__init__

    def offloaded(self, *args):
        made(self, *args)
        self._is_offloaded, self._keeps = True, False

    with mock.patch.object(Bundle, "__init__", offloaded):
        for recipes in (QUANTIZED, MIXED):
            for size in (1, 2):
                model, twin = of_blocks(recipes), of_blocks(recipes)
                fully_shard(model, mesh=mesh_of(rank, size), reshard_after_forward=True)
                follow(model, twin)


def test_parts_that_come_as_copies(two):
    two.run(copies)


def elsewhere(rank):
    """FSDP2 of torch 2.11 and 2.12 makes memory of its own for every gather under compiled autograd."""
    init = FSDPParam.init_all_gather_outputs

    def anew(self, *args, **kwargs):
        if isinstance(local(self.sharded_param), InterceptingTensor):
            self.all_gather_outputs = []
        init(self, *args, **kwargs)

    with mock.patch.object(FSDPParam, "init_all_gather_outputs", anew):
        for size in (1, 2):
            model, twin = of_blocks(QUANTIZED), of_blocks(QUANTIZED)
            fully_shard(model, mesh=mesh_of(rank, size), reshard_after_forward=True)
            follow(model, twin)


def test_gathers_into_other_memory(two):
    two.run(elsewhere)


def one_written(rank):
    """Only what was written is cast again, whichever weight of the group that is."""
    for recipe in ("mxfp8", "fp8"):
        model, twin = make(recipe), make(recipe)
        fully_shard(model, mesh=mesh_of(rank, 2))
        for step, (block, name) in enumerate([(0, "up"), (1, "down"), (0, "up"), (0, "down")]):
            with torch.no_grad(), noted() as found:
                assert same_bits(*(m(batch(step)) for m in (model, twin)))
                assert found["cast"] == ([4] if recipe == "fp8" or not step else [1]), (recipe, step)
                model.reshard()
                assert same_bits(*(m(batch(step)) for m in (model, twin)))
                assert len(found["cast"]) == 1
                model.reshard()
                for m in (model, twin):
                    getattr(m[block], name).weight.mul_(0.25)


def test_only_what_was_written_is_cast_again(two):
    two.run(one_written)


def interrupted(rank):
    """A gather that fails between the first hooks leaves nothing behind that the next one takes for its own."""
    model, twin = make("fp8"), make("fp8")
    fully_shard(model, mesh=mesh_of(rank, 2))
    with torch.no_grad():
        assert same_bits(*(m(batch(0)) for m in (model, twin)))
    model.reshard()
    gathering = InterceptingTensor.fsdp_hooks

    class Failing(type(gathering)):
        calls = 0

        @classmethod
        def pre_all_gather(cls, tensor, module):
            cls.calls += 1
            if cls.calls == 3:
                raise RuntimeError("interrupted")
            return gathering.pre_all_gather(tensor, module)

    failing = mock.patch.object(InterceptingTensor, "fsdp_hooks", Failing())
    with failing, pytest.raises(RuntimeError, match="interrupted"):
        model.unshard()
    shrink(model, twin)
    follow(model, twin)


def test_a_gather_that_fails_half_way(two):
    two.run(interrupted)


def out_of_turn(rank):
    """A hook that somebody calls alone prepares the group, and what is left of that is not taken later."""
    for recipe in ("fp8", "mxfp8"):
        model, twin = make(recipe), make(recipe)
        fully_shard(model, mesh=mesh_of(rank, 2), reshard_after_forward=True)
        follow(model, twin)
        for layer in (model[0].down, model[1].down):
            sent, _ = local(layer.weight).fsdp_pre_all_gather(None, None, None, layer, None)
            assert sent == ()  # the first one sends
        shrink(model, twin)
        follow(model, twin)


def test_a_hook_out_of_turn(two):
    two.run(out_of_turn)


def errors_everywhere(rank):
    """What is wrong with one weight is said where the group is prepared, and the next gather works."""
    model, twin = make("mxfp8"), make("mxfp8")
    fully_shard(model, mesh=mesh_of(rank, 2))
    with (
        mock.patch.object(Bundle, "prepare", side_effect=ValueError("no memory")),
        pytest.raises(ValueError, match="no memory"),
    ):
        model.unshard()
    follow(model, twin)


def test_a_group_that_cannot_be_prepared(two):
    two.run(errors_everywhere)
