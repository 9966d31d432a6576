"""Random programs give the bits of their conservative runs: sharing, keeping, recomputing, compiling change none."""

import contextlib

import pytest
import torch
from pairwise import most_pairs
from programs import Program, difference
from tiers import LONG

STEPS = 3 if LONG else 2
# Fifty of 600 programs, in which as many pairs of features meet as in the first hundred
SEEDS = range(3000) if LONG else most_pairs({seed: Program.draw(seed, steps=STEPS).features for seed in range(600)}, 50)
PER_TEST = 5
BATCHES = pytest.mark.parametrize(
    "seeds", [pytest.param(SEEDS[i : i + PER_TEST], id=str(SEEDS[i])) for i in range(0, len(SEEDS), PER_TEST)]
)


def check(seeds, device="cpu"):
    for seed in seeds:
        program = Program.draw(seed, steps=STEPS)
        found = difference(program, device)
        assert found is None, f"{program}: {found}"


@pytest.mark.filterwarnings("ignore:torch._dynamo hit config:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo's, of what follows a break
@pytest.mark.filterwarnings("ignore:.* does not have a deterministic implementation:UserWarning")  # of filled memory
@pytest.mark.filterwarnings("ignore:.*persistent weights whose values are bfloat16:UserWarning")
@pytest.mark.filterwarnings("ignore:MasterWeights. faces alone:UserWarning")  # of states that are loaded again
@BATCHES
def test_programs(seeds):
    check(seeds)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("where", ["default stream", "side stream", "not the current GPU"])
@BATCHES
def test_programs_on_a_gpu(seeds, where):
    device = "cuda:1" if where == "not the current GPU" else "cuda"
    if device == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs in one process")
    with torch.cuda.stream(torch.cuda.Stream()) if where == "side stream" else contextlib.nullcontext():
        check(seeds, device)
    torch.cuda.synchronize(device)
