"""FSDP2 over NCCL: every recipe trains like its unsharded twin. Oracle: the twin; equal losses."""

import pytest
import torch
import torch.multiprocessing as mp
from nccl_ranks import serve

import hybridtensor as ht

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.mark.parametrize("size", [1, torch.cuda.device_count()])
def test_every_recipe_trains_like_the_unsharded_model(size, tmp_path):
    mp.spawn(serve, (size, str(tmp_path / "store"), list(ht.recipes.RECIPES), False), nprocs=size)


def test_compiled_blocks(tmp_path):
    size = torch.cuda.device_count()
    mp.spawn(serve, (size, str(tmp_path / "store"), ["fp8", "fp8_delayed", "mxfp8"], True), nprocs=size)
