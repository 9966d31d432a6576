"""Whole weights on every rank: DistributedDataParallel, and both versions of ``replicate``."""

import importlib

import pytest
from processes import here
from sharding import batch, make, train
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from tests.distributed import test_fsdp_persistent as persistent

SOME = ["fp8", "fp8_rowwise", "nvfp4_1d_weight", "fp8_delayed", "fp8_dequantized_backward"]


def wrapped(model, how, rank):
    if how == "ddp":
        return DistributedDataParallel(model)
    if how == "replicate":
        return replicate(model)
    module = importlib.import_module("torch.distributed._composable.replicate_with_fsdp")
    mesh = init_device_mesh(here(), (2,))
    for block in model:
        module.replicate(block, mesh=mesh)
    return module.replicate(model, mesh=mesh)


def like_plain_models(rank, how):
    for recipe in SOME:
        train(rank, wrapped(make(recipe), how, rank), make(recipe))


@pytest.mark.parametrize("how", ["ddp", "replicate", "replicate_with_fsdp"])
def test_master_weights(two, how):
    two.run(like_plain_models, how)


def refused(rank, how):
    """DistributedDataParallel refuses when it wraps; ``replicate`` makes one before the first forward."""
    model = persistent.make("fp8")
    if how == "replicate":
        model = wrapped(model, how, rank)
    with pytest.raises((NotImplementedError, ValueError), match=r"HybridTensor.*join persistent weights"):
        model(batch(0)) if how == "replicate" else wrapped(model, how, rank)


@pytest.mark.parametrize("how", ["ddp", "replicate"])
def test_persistent_weights_are_refused(two, how):
    two.run(refused, how)


def kept(rank):
    for recipe in SOME:
        persistent.train(rank, wrapped(persistent.make(recipe), "replicate_with_fsdp", rank), persistent.make(recipe))


def test_persistent_weights_in_replicate_with_fsdp(two):
    two.run(kept)
