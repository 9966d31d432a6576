"""Random programs under FSDP2 on two ranks give the bits of one process that runs them conservatively."""

import pytest
import tiers
import torch
from processes import here
from programs import Program, Run
from sharding import mesh_of
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

SEEDS = range(400) if tiers.LONG else range(12)
PER_TEST = 4


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Sharded(Run):
    """A program on the ranks of a mesh; each of them has the same batch, so that means over ranks are exact."""

    def steps(self):
        found = []
        for step, events in enumerate(self.program.events):
            found += [whole(value) for value in self.step(step, events)]
        return found


def on_two_ranks(rank, seeds):
    for seed in seeds:
        program = Program.draw(seed, ranks=2, steps=3 if tiers.LONG else 2)

        def shard(model):
            for block in model:
                fully_shard(block, mesh=mesh_of(rank, 2))
            fully_shard(model, mesh=mesh_of(rank, 2))

        ours = Sharded(program, conservative=False, device=here(), wrap=shard).steps()
        expected = Run(program, conservative=True, device=here())
        theirs = [value for step, events in enumerate(program.events) for value in expected.step(step, events)]
        assert len(ours) == len(theirs), str(program)
        for index, (mine, value) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(mine, value), f"{program}: result {index} of {len(ours)}"
        torch._dynamo.reset()


@pytest.mark.parametrize("first", SEEDS[::PER_TEST])
def test_programs(two, first):
    two.run(on_two_ranks, range(first, first + PER_TEST))
