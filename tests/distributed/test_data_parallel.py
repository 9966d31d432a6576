"""Several ranks, as gloo processes: DDP trains converted models like plain ones."""

import contextlib
import copy
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hybridtensor as ht

WORLD = 2


def make(seed, spec=None, persistent=False):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 8))
    return model if spec is None else ht.quantize_(model, spec, persistent=persistent)


def data(rank):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))


def ddp(rank):
    """Ranks start from different weights, which DDP makes rank 0's, and stay bitwise in step."""
    for spec in ("fp8", "fp8_rowwise", "fp8+dequantized"):
        model = make(rank, spec)
        parallel = DistributedDataParallel(model)
        start = make(0, spec)
        assert torch.equal(model[0].weight.master, start[0].weight.master)
        with torch.no_grad():
            assert torch.equal(model(data(0)), start(data(0)))  # the broadcast left no stale face
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            parallel(data(rank)).square().sum().backward()
            optimizer.step()
        for p in model.parameters():
            mine = (p.dequantize() if isinstance(p, ht.MasterWeight) else p).detach().clone()
            others = [torch.empty_like(mine) for _ in range(WORLD)]
            dist.all_gather(others, mine)
            assert all(torch.equal(other, mine) for other in others)


def ddp_with_state(rank):
    """DDP makes every buffer rank 0's before each forward; amaxes of other ranks and microbatches still count."""
    for spec in ("fp8_delayed", "nvfp4"):
        torch.manual_seed(0)
        model = ht.quantize_(nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)), spec)
        parallel = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            for microbatch in range(2):
                x = torch.full((32, 32), 1.0 + 10 * (rank == 1 and microbatch == 0) + step)
                with parallel.no_sync() if microbatch == 0 else contextlib.nullcontext():
                    parallel(x).square().mean().backward()
            optimizer.step()
            ht.step_(model)
        state = model[0].quantization_state
        if spec == "fp8_delayed":
            assert state.encode_scale[0] == torch.tensor(448.0) / 13
            assert state.amax_history[0, -3:].tolist() == [11.0, 12.0, 13.0]
        for tensor in (state.rounding, state.encode_scale, state.amax_history, model[0].weight.dequantize().detach()):
            if tensor is not None:
                others = [torch.empty_like(tensor) for _ in range(WORLD)]
                dist.all_gather(others, tensor.contiguous())
                assert all(torch.equal(other, tensor) for other in others)


def stateful(spec="fp8_delayed"):
    torch.manual_seed(0)
    return ht.quantize_(nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)), spec)


def scales_are_reduced(rank):
    """Over all ranks by default, or over the group that trains on one batch."""
    own = [dist.new_group([0]), dist.new_group([1])][rank]
    for group, largest in ((None, 2.0), (own, rank + 1.0)):
        model = ht.set_data_parallel_group_(stateful(), group)
        model(torch.full((32, 32), rank + 1.0)).sum().backward()
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduction:
            ht.step_(model)
        assert reduction.call_count == (group is None)  # one for all layers; none where a group has one rank
        state = model[0].quantization_state
        assert state.encode_scale[0] == torch.tensor(448.0) / largest
        everywhere = [torch.empty_like(state.encode_scale) for _ in range(WORLD)]
        dist.all_gather(everywhere, state.encode_scale)
        assert group is not None or all(torch.equal(other, state.encode_scale) for other in everywhere)


def different_scales_raise_on_every_rank(rank):
    """Of other layers, by other rules, or another number."""
    margins = ht.HybridConfig(*(ht.DelayedFloat8Quantizer(margin=2 * rank) for _ in range(3)))
    others = [("fp8_delayed/mxfp8/mxfp8", "fp8_delayed", ""), ("mxfp8", "fp8_delayed", ""), (margins, margins, "")]
    for first, second, name in (*others, ("fp8_delayed", "fp8_delayed", "other")):
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        ht.quantize_(model, second if rank else first, name=name if rank and name else None)
        with pytest.raises(RuntimeError, match=r"the same delayed scales of the same layers are required on all ranks"):
            ht.step_(model)


def scales_are_compared_again_where_they_follow_by_other_rules(rank):
    """Also of rules in memory that others had, which ranks use in another order."""
    model = stateful("fp8_delayed")
    ht.step_(model)
    for recipe, times in (("fp8_delayed", 0), ("fp8_delayed+most_recent", 1), ("fp8_delayed/mxfp8/mxfp8", 1)):
        ht.set_config_(model, "bf16")
        ht.set_config_(model, recipe)
        with mock.patch.object(ht.state.step, "require_alike", wraps=ht.state.step.require_alike) as comparison:
            ht.step_(model)
        assert comparison.call_count == times


def recipes_without_state_follow_those_with_one(rank):
    """The model has no other buffers, which DistributedDataParallel broadcasts."""
    for recipe in ("fp8_delayed", "nvfp4"):
        model = DistributedDataParallel(stateful(recipe))
        names = set(model.state_dict())
        for following in (recipe, "fp8", "bf16", recipe, "fp8"):
            ht.set_config_(model, following)
            model(data(rank).view(4, 32)).sum().backward()
            ht.step_(model)
            assert (set(model.state_dict()) == names) == (following == recipe)
        assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def a_group_is_kept_for_recipes_to_come(rank):
    own = [dist.new_group([0]), dist.new_group([1])][rank]
    model = ht.set_data_parallel_group_(stateful("mxfp8"), own)
    ht.set_config_(model, "fp8_delayed")
    assert model[0].quantization_state.ranks.groups == (own,)


def models_without_state_wait_for_their_group_alone(rank):
    own = [dist.new_group([0]), dist.new_group([1])][rank]
    model = copy.deepcopy(ht.set_data_parallel_group_(stateful("fp8"), own))
    if rank == 0:  # the other one trains something else
        ht.step_(nn.ModuleList([model]))


def random_rounding_does_not_depend_on_the_number_of_ranks(rank):
    """A gradient split over ranks, in order, is rounded as the whole is on one rank."""
    quantizer = ht.NVFP4Quantizer(rounding="stochastic")
    whole = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16().clamp(-4, 4)
    whole[::16] = 4.0  # one amax for every shard
    state = ht.LayerState.of({"grad_output": quantizer}, name="up").tensors()
    assert state.rank == rank
    shard = quantizer.quantize(whole.split(32)[rank], context=ht.Context("grad_output", state))
    expected = quantizer.quantize(whole, context=ht.Context("grad_output", state._replace(rank=0)))
    assert torch.equal(shard.rowwise.qdata, expected.rowwise.qdata.split(32)[rank])
    assert torch.equal(shard.columnwise.qdata, expected.columnwise.qdata.split(16, 1)[rank])


class Siblings(nn.Module):
    """Two layers, each of which reads an input."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Linear(32, 32, bias=False, dtype=torch.bfloat16) for _ in range(2))

    def forward(self, x, other):
        return self.first(x).sum() + self.second(other).sum()


def equal_everywhere(values):
    others = [torch.empty_like(values) for _ in range(WORLD)]
    dist.all_gather(others, values)
    return all(torch.equal(other, values) for other in others)


def other_inputs_on_another_rank(rank):
    """Two layers read one input here, and two inputs, or one layer none, there: each has its own scale, on all ranks
    the same one, of the largest value that it has read on any.
    """
    for case in ("two inputs", "none", "once"):
        model = ht.quantize_(Siblings(), "fp8_delayed")
        states = [layer.quantization_state for layer in (model.first, model.second)]
        slot = states[0].slots.index("input")
        for step in range(4):
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step)).bfloat16().requires_grad_()
            x, differs = x.view_as(x), rank == 1 and (step == 1 or case != "once")
            if differs and case == "none":
                model.first(x).sum().backward()
            else:
                model(x, x * 4 if differs else x).backward()
            ht.step_(model)
            assert all(equal_everywhere(buffer) for state in states for buffer in state.buffers())
            of_second = x.abs().max() * (1 if case == "none" or (case == "once" and step != 1) else 4)
            assert states[0].amax_history[slot, -1] == x.abs().max()
            assert states[1].amax_history[slot, -1] == of_second
            are_siblings = states[0].lineage == states[1].lineage
            assert are_siblings is (case == "once" and step == 0)


def siblings_under_ddp(rank):
    """They share casts, from the second step on if DDP broadcasts scales; bits are those of layers that do not.

    Before torch 2.12, version counters count what it writes in each forward, and they do not share casts.
    """
    counts = torch.__version__ < "2.12"
    for broadcast in (True, False):
        found = []
        for shared in (True, False):
            torch.manual_seed(0)
            model = ht.quantize_(Siblings(), "fp8_delayed")
            with warnings.catch_warnings(action="ignore"):  # torch 2.13 has another option, which still writes at first
                parallel = DistributedDataParallel(model, broadcast_buffers=broadcast)
            states = [layer.quantization_state for layer in (model.first, model.second)]
            for seed in range(3):
                x = torch.randn(8, 32, generator=torch.Generator().manual_seed(2 * seed + rank)).bfloat16()
                x = x.requires_grad_().view_as(x)
                with ht.share_inputs(shared):
                    parallel(x, x).backward()
                assert (states[0].lineage is None) is (broadcast and (seed == 0 or counts))
                ht.step_(model)
                unknown = seed == 0 or (broadcast and counts)
                assert unknown or (states[0].lineage == states[1].lineage) is shared
            found.append([*(p.grad for p in model.parameters()), *(b for state in states for b in state.buffers())])
        assert all(map(torch.equal, *found))


def uneven_batches(rank):
    """Ranks that have no batches left, or none at all, repeat what DDP reduces, and nothing else."""
    cases = [(spec, False, fewest) for spec in ("fp8", "nvfp4") for fewest in (2, 0)]
    for spec, early, fewest in (*cases, ("fp8_delayed", True, 2), ("fp8_delayed", False, 2)):
        torch.manual_seed(0)
        model = ht.quantize_(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), spec)
        parallel = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        refused = spec == "fp8_delayed" and not early
        with contextlib.ExitStack() as stack:
            if refused or early:
                expected = NotImplementedError if refused else RuntimeError
                stack.enter_context(pytest.raises(expected, match="join" if refused else "exhausted"))
            stack.enter_context(parallel.join(enable=True, throw_on_early_termination=early))
            for _ in range(2 + rank if rank else fewest):
                parallel(torch.ones(32, 32)).sum().backward()
                optimizer.step()
                ht.step_(model)
                optimizer.zero_grad()
        assert refused or early or next(iter(model.parameters())).grad is None


def moved_after_training(rank):
    """While DDP lives, which holds gradient accumulators; as Lightning does when a run ends."""
    model = make(0, "fp8")
    parallel = DistributedDataParallel(model)
    parallel(data(rank)).square().sum().backward()
    expected = model(data(0))
    model.cpu()
    model.double().float()
    assert torch.equal(model(data(0)), expected)
    assert isinstance(model[0].weight, ht.MasterWeight)
    parallel(data(rank)).square().sum().backward()


@pytest.mark.parametrize(
    "body",
    [
        ddp,
        ddp_with_state,
        scales_are_reduced,
        different_scales_raise_on_every_rank,
        scales_are_compared_again_where_they_follow_by_other_rules,
        recipes_without_state_follow_those_with_one,
        a_group_is_kept_for_recipes_to_come,
        models_without_state_wait_for_their_group_alone,
        random_rounding_does_not_depend_on_the_number_of_ranks,
        other_inputs_on_another_rank,
        siblings_under_ddp,
        uneven_batches,
        moved_after_training,
    ],
    ids=lambda f: f.__name__,
)
def test_on_two_ranks(two, body):
    if two.device != "cpu":
        pytest.skip("about gloo")
    two.run(body)
