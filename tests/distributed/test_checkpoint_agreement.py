"""What ranks must have alike: where they have not, all of them are told so."""

import datetime
import os
import time

import pytest
import torch.distributed as dist
from checkpointing import make
from processes import run

from hybridtensor.distributed import checkpoint


def dies_first(rank, path, when):
    """One rank is gone before the ranks' own group is made, or while it is."""
    state = {"model": make("fp8")[0]}
    dist.barrier()
    if rank == 1 and when == "before":
        os._exit(0)
    if rank == 1:
        dist.new_group = lambda *args, **kwargs: os._exit(0)
    started = time.monotonic()
    told = "rank 1 did not come within 0:00:03" if when == "before" else "got no answer from one of the 3 ranks"
    with pytest.raises(RuntimeError, match=told):
        checkpoint.save(path, 1, state, timeout=datetime.timedelta(seconds=3 if when == "before" else 600))
    assert time.monotonic() - started < (6 if when == "before" else 10)
    os._exit(0)  # the group cannot be taken down in order any more


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_rank_that_is_gone_before_ranks_talk_ends_all(when, tmp_path):
    run(dies_first, 3, tmp_path, str(tmp_path / "run"), when)
