"""What a shard sends is made once per write of it, is kept as long as it holds, and no longer."""

import contextlib
import copy
import gc
import weakref
from unittest import mock

import pytest
import torch
from processes import here
from sharding import RECIPES, batch, make, mesh_of, same_bits, shard, train
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

import hybridtensor as ht
from hybridtensor.distributed.fsdp.group import group_of
from hybridtensor.distributed.fsdp.payload import Payload, Sending, WeightPayload
from hybridtensor.distributed.fsdp.plan import COLUMN, ROW, make_plan
from hybridtensor.distributed.fsdp.sending import fill
from hybridtensor.distributed.fsdp.shard import shard_of
from hybridtensor.distributed.fsdp.torch_compat import params_of
from hybridtensor.dtensor import local


@contextlib.contextmanager
def noted():
    """Note what payloads are made of in between."""
    made = []

    def note(share, tensor, shard, **options):
        made.append(share.sending.names)
        return fill(share, tensor, shard, **options)

    with (
        mock.patch("hybridtensor.distributed.fsdp.bundle.fill", note),
        mock.patch.object(WeightPayload, "cached_cast", return_value=None),
    ):
        yield made


def shards(model):
    return [shard_of(s) for module in model.modules() if isinstance(module, nn.Linear) for s in params_of(module)[:1]]


def payload_of(shard):
    """Return what is kept of the weights that are gathered with one, and its share in it; None twice if nothing is."""
    for members, payload in group_of(shard.sharded).payloads.items():
        if shard in members:
            return payload, payload.weights[members.index(shard)]
    return None, None


def kept(model):
    return [payload_of(s)[1] for s in shards(model)]


def loss_of(model, step):
    return model(batch(step)).square().mean()


BOTH = (ROW, COLUMN)


def once_per_write(rank):
    for recipe, names in {"fp8": (ROW,), "fp8_block": (ROW,), "mxfp8": BOTH, "fp8_rowwise": BOTH}.items():
        model = shard(make(recipe, width=256, hidden=256, blocks=1), mesh_of(rank, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            with noted() as made:
                for microbatch in range(2):
                    loss_of_width(model, microbatch).backward()
            first = [(ROW,)] if step == 0 and names == BOTH else []
            assert sorted(made) == sorted(2 * [*first, names]), (recipe, step, made)
            optimizer.step()


def loss_of_width(model, step):
    return model(batch(step, width=256)).square().mean()


def test_what_is_sent_is_made_once_per_write(two):
    two.run(once_per_write)


def writes(rank):
    """Every way to write a weight, on a model that has sent its bytes, does to it what it does to its twin."""
    for recipe in ("mxfp8", "fp8", "fp8_delayed"):
        model, twin = shard(make(recipe), mesh_of(rank, 2)), make(recipe)
        other = make("bf16")

        def load(m, other=other):
            for mine, theirs in zip(m.parameters(), other.parameters(), strict=True):
                values = theirs.detach()
                part = local(mine)
                first = rank * len(part) if len(part) != len(values) else 0
                plain = part.master if isinstance(part, ht.MasterWeight) else part.detach()
                plain.copy_(values[first : first + len(part)])  # as checkpoints do, past the weight

        for write in (
            lambda m: [p.data.mul_(1.5) for p in m.parameters()],
            lambda m: ht.step_(m),
            load,
            lambda m: torch.optim.SGD(m.parameters(), lr=0.5).step(),
            lambda m: ht.step_(m),
            lambda m: ht.set_config_(m, "fp8_block"),
        ):
            for m in (model, twin):
                m.zero_grad()
            losses = [loss_of(m, 0) for m in (model, twin)]
            assert same_bits(*(loss.detach() for loss in losses)), (recipe, write)
            for loss in losses:
                loss.backward()
            for m in (model, twin):
                write(m)
        assert same_bits(*(loss_of(m, 0).detach() for m in (model, twin)))


def test_every_write_is_seen(two):
    two.run(writes)


def follow(rank, recipe, change, *, steps=3):
    """Train a model and its twin, with a change of both in between, and compare every loss."""
    model, twin = shard(make(recipe), mesh_of(rank, 2)), make(recipe)
    for step in range(steps):
        losses = [loss_of(m, step) for m in (model, twin)]
        assert same_bits(*(loss.detach() for loss in losses)), (recipe, step)
        for m, loss in zip((model, twin), losses, strict=True):
            loss.backward()
            with torch.no_grad():
                for p in m.parameters():
                    p.mul_(0.5)
            m.zero_grad()
            ht.step_(m)
            change(m)


def moved(rank):
    """As ``to`` another device and back does: what is fresh begins at the same versions."""
    for recipe in ("mxfp8", "fp8", "fp8_rowwise", "fp8_delayed"):
        follow(rank, recipe, lambda m: [m._apply(torch.clone) for _ in range(2)])
    model = shard(make("fp8"), mesh_of(rank, 2))
    loss_of(model, 0).backward()
    masters = [weakref.ref(local(m.weight).master) for m in model.modules() if isinstance(m, nn.Linear)]
    assert all(masters)
    assert any(kept(model))
    model.zero_grad()
    model._apply(torch.clone)
    gc.collect()
    assert not any(ref() is not None for ref in masters)
    assert not any(kept(model))


def test_weights_that_were_moved(two):
    two.run(moved)


def assigned(rank):
    """Two checkpoints that take the place of the weights, with an evaluation in between."""
    for recipe in ("mxfp8", "fp8"):
        model, twin = shard(make(recipe), mesh_of(rank, 2)), make(recipe)
        for factor in (1.0, 3.0, 0.25):
            for m in (model, twin):
                m.load_state_dict({name: p.detach() * factor for name, p in m.state_dict().items()}, assign=True)
            with torch.no_grad():
                assert same_bits(*(loss_of(m, 0) for m in (model, twin))), (recipe, factor)


def test_checkpoints_that_take_the_place_of_weights(two):
    two.run(assigned)


def compiled_optimizer(rank):
    """Graphs write memory of weights, and say so of the DTensors around them."""
    for recipe in ("fp8",):  # whose scales are exchanged, too
        model, twin = shard(make(recipe, blocks=1), mesh_of(rank, 2)), make(recipe, blocks=1)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, foreach=True) for m in (model, twin)]
        steps = torch.compile(optimizers[0].step, backend="aot_eager"), optimizers[1].step
        for step in range(3):
            losses = [loss_of(m, step) for m in (model, twin)]
            torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)  # gradients are means over ranks
            for m, loss, advance in zip((model, twin), losses, steps, strict=True):
                m.zero_grad()
                loss.backward()
                advance()
        assert losses[0] < 0.99 * loss_of(make(recipe, blocks=1), 2)  # it does train


def test_a_compiled_optimizer_is_seen(two):
    two.run(compiled_optimizer)


def inference_first(rank):
    """What is kept from a gather in inference mode on can be written later. (What torch gathers itself cannot.)"""
    for recipe in ("mxfp8", "fp8", "fp8_rowwise"):
        torch.manual_seed(0)
        plain = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))
        twin = ht.quantize_(copy.deepcopy(plain), recipe)
        model = shard(ht.quantize_(plain, recipe), mesh_of(rank, 2))
        for step in range(2):
            with torch.inference_mode():
                assert same_bits(*(loss_of(m, step) for m in (model, twin)))
            losses = [loss_of(m, step) for m in (model, twin)]
            assert same_bits(*(loss.detach() for loss in losses))
            for m, loss in zip((model, twin), losses, strict=True):
                loss.backward()
                m.zero_grad()
                with torch.no_grad():
                    for p in m.parameters():
                        p.mul_(0.5)


def test_a_first_gather_in_inference_mode(two):
    two.run(inference_first)


def ragged(rank):
    """On one rank faces travel although their last block is cut."""
    quantizer = ht.Float8Quantizer(granularity="block", block="1x128")
    config = ht.HybridConfig(input=quantizer, weight=quantizer, grad_output=quantizer)
    for hidden in (80, 208):
        model, twin = (make(config, hidden=hidden) for _ in range(2))
        train(rank, shard(model, mesh_of(rank, 1)), twin, steps=2, grad_input=True)


def test_cut_blocks_on_one_rank(two):
    two.run(ragged)


def one_rank_writes(rank):
    """Scales of a part follow what another rank wrote to its own, once magnitudes are exchanged."""
    model, twin = shard(make("fp8"), mesh_of(rank, 2)), make("fp8")
    for step in range(3):
        losses = [loss_of(m, step) for m in (model, twin)]
        assert same_bits(*(loss.detach() for loss in losses)), step
        with torch.no_grad():
            for m in (model, twin):
                m[0].up.weight.mul_(0.5)
            twin[1].down.weight[: len(twin[1].down.weight) // 2].mul_(8)
            if rank == 0:
                local(model[1].down.weight).mul_(8)


def test_scales_follow_what_one_rank_wrote(two):
    two.run(one_rank_writes)


def memory(rank):
    for recipe in RECIPES:
        model = shard(make(recipe, width=256, hidden=256, blocks=1), mesh_of(rank, 2))
        with torch.no_grad():
            loss_of_width(model, 0)
        assert all(k is None or k.sending.names == (ROW,) for k in kept(model)), recipe
        for step in range(2):
            loss_of_width(model, step).backward()
        plan = make_plan(ht.recipes.from_name(recipe), (256, 256), 2, 0)
        sent = [plan.sends(*wanted) for wanted in ((True, False), (False, True))]
        names = {name for names in sent for name in names if not {"values", "whole"} & set(names)}
        for shard_ in shards(model):
            payload, share = payload_of(shard_)
            assert set(() if share is None else share.sending.names) == names, recipe
            if payload is not None:
                most = 1.04 * len(names) * 128 * 256
                assert payload.layout.nbytes <= most * len(payload.weights), recipe
    model = ht.quantize_(nn.Sequential(nn.Linear(256, 256, bias=False)), "mxfp8", persistent=True)
    shard(model, mesh_of(rank, 2))
    model(batch(0, width=256)).sum().backward()
    assert kept(model) == [None]  # what is sent is what is kept anyway


def test_what_is_kept_is_what_is_sent(two):
    two.run(memory)


def offloaded(rank):
    """Where weights are on the host, nothing of them is kept on the device."""
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=here() == "cuda")}
    model, twin = shard(make("mxfp8"), mesh_of(rank, 2), **options), shard(make("mxfp8"), mesh_of(rank, 2))
    for step in range(2):
        losses = [loss_of(m, step) for m in (model, twin)]
        assert same_bits(*(loss.detach() for loss in losses))
        for loss in losses:
            loss.backward()
    assert all((k is None) == (here() == "cuda") for k in kept(model))


def test_offloaded_weights_keep_nothing_on_the_device(two):
    two.run(offloaded)


def agree_and_shrink(model, twin, step):
    """Compare what both compute; then write all weights, to other scales, and reshard."""
    with torch.no_grad():
        assert same_bits(*(loss_of(m, step) for m in (model, twin)))
        for m in (model, twin):
            for p in m.parameters():
                p.mul_(0.5)
    for block in model:
        block.reshard()


def other_streams(rank):
    """Gathers on streams of their own, as ``unshard()`` by hand makes them, read what was made on another stream."""
    model, twin = shard(make("fp8"), mesh_of(rank, 2)), make("fp8")
    on_cuda = here() == "cuda"
    for step in range(6):
        side = contextlib.nullcontext()
        if on_cuda and step % 2:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())  # which wrote the weights
            side = torch.cuda.stream(stream)
        with side:
            for block in model if step % 3 else ():
                block.unshard()
        if on_cuda:
            torch.cuda.synchronize()
        agree_and_shrink(model, twin, step)


def test_gathers_on_other_streams(two):
    two.run(other_streams)


def late_magnitudes(rank):
    """A cast on another stream than the exchange of magnitudes waits for it, however long that takes."""
    model, twin = shard(make("fp8"), mesh_of(rank, 2)), make("fp8")
    for step in range(3):
        ready = torch.cuda.current_stream().record_event()
        for index, block in enumerate(model):
            stream = torch.cuda.Stream()
            stream.wait_event(ready)  # the weights are written
            with torch.cuda.stream(stream):
                torch.cuda._sleep(0 if index else 50_000_000)
                block.unshard()
        torch.cuda.synchronize()
        agree_and_shrink(model, twin, step)


def test_magnitudes_that_come_late(two):
    if two.device != "cuda":
        pytest.skip("streams need a CUDA device")
    two.run(late_magnitudes)


def test_a_stretch_of_both_faces_is_what_one_face_is_alone():
    for recipe in ("mxfp8", "fp8_rowwise", "mxfp8_fwd_nvfp4_bwd"):
        plan = make_plan(ht.recipes.from_name(recipe), (256, 384), 2, 0)
        both = Payload(2 * (Sending(plan, BOTH, torch.bfloat16),), torch.device("cpu"))
        for name in BOTH:
            alone = Payload(2 * (Sending(plan, (name,), torch.bfloat16),), torch.device("cpu"))
            for number, (mine, theirs) in enumerate(
                zip(*([t for share in p.weights for t in share.tensors[name]] for p in (both, alone)), strict=True)
            ):
                for t in (mine, theirs):
                    t.view(torch.uint8).fill_(number + 1) if t.itemsize == 1 else t.fill_(number + 1)
            stretches = [p.layout.stretches(2 * ((name,),)) for p in (both, alone)]
            assert [len(found) for found in stretches] == [1, 1]  # of both weights
            sent = [p.sent(found)[0] for p, found in zip((both, alone), stretches, strict=True)]
            assert sent[0].shape == sent[1].shape
            assert sent[0].data_ptr() % 16 == 0
            filled = sent[1] != 0
            assert torch.equal(sent[0][filled], sent[1][filled])
