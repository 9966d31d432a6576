"""Real architectures on two ranks: FSDP2 shards each block, and the rest."""

import warnings

import pytest
import torch
from real_models import ROWS, blocks_of, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hybridtensor as ht

BY_NAME = {row.name: row for row in ROWS}


def steps(model, row):
    """Return the losses of two steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        loss = loss_of(model(**row.call()))
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        ht.step_(model)
    return losses


def sharded(model, blocks):
    """Shard each block, and the rest; FSDP2 takes no parameters without dimensions."""
    mesh = init_device_mesh("cpu", (2,))
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    scalars = {p for p in model.parameters() if not p.dim()}
    return fully_shard(model, mesh=mesh, reshard_after_forward=True, ignored_params=scalars)


def like_unsharded(rank, name, recipe):
    """Both ranks have the same batch, so that the mean of their gradients is that of one.

    FSDP2 may sum some gradients in another order: then the plain model's second loss, too, is one of others.
    """
    warnings.filterwarnings("ignore")  # of the packages
    row = BY_NAME[name]
    expected = steps(ht.quantize_(row.make(), recipe), row)
    model = ht.quantize_(row.make(), recipe)
    blocks = [] if row.outside else blocks_of(model)
    assert row.outside or len(blocks) >= 2
    found = steps(sharded(model, blocks), row)
    assert ht.explain(model, show=False).gathers
    assert torch.equal(found[0], expected[0])
    if row.package == "diffusers" and not torch.equal(found[1], expected[1]):
        assert abs(found[1] - expected[1]) <= 2**-12 * expected[1]
    else:
        assert torch.equal(found[1], expected[1])


@pytest.mark.filterwarnings("ignore")  # of the packages
@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed"])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_losses_are_those_of_the_whole_model(two, row, recipe):
    row.make()  # skips the test where a package is absent
    two.run(like_unsharded, row.name, recipe)


def called_from_outside(rank, name):
    warnings.filterwarnings("ignore")  # of the packages
    row = BY_NAME[name]
    model = row.make()
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        sharded(model, blocks_of(model))(**row.call())
    model = ht.quantize_(row.make(), "fp8")
    with pytest.raises(
        TypeError, match=r"the weight of layer transformer_blocks\.0\.norm1\.emb.*; under FSDP2, layers are"
    ):
        sharded(model, blocks_of(model))(**row.call())


@pytest.mark.filterwarnings("ignore")  # of the packages
@pytest.mark.parametrize("row", [row for row in ROWS if row.outside], ids=str)
def test_layers_that_are_called_from_outside_of_their_block_are_named(two, row):
    row.make()
    two.run(called_from_outside, row.name)
