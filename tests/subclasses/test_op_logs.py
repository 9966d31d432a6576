"""Which operators torch's optimizers and FSDP2 call on weights: what a new version of torch may change.

A log that differs is read, and accepted with ``EXPECTTEST_ACCEPT=1`` where the operators that are new to it have cases
in the other files of this folder.
"""

import pytest
import torch
import torch.distributed as dist
from recorder import OpLog
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import hybridtensor as ht
from hybridtensor.testing import random_tensor

expecttest = pytest.importorskip("expecttest", reason="the logs are compared by it")
equals = expecttest.assert_expected_inline
VERSION = "2.13"
pytestmark = pytest.mark.skipif(not torch.__version__.startswith(VERSION), reason=f"the logs are of torch {VERSION}")


@pytest.fixture
def log(monkeypatch):
    return OpLog(monkeypatch, ht.MasterWeight, ht.HybridTensor)


def make(persistent=False):
    """Return two layers, of which an optimizer steps one weight and one bias each."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    return ht.quantize_(model, "mxfp8", persistent=persistent)


def backward(model):
    model(random_tensor(32, 64, dtype=torch.float32)).sum().backward()


def logged_step(log, cls, **options):
    """Return what the second step calls, which makes no states any more."""
    model = make()
    optimizer = cls(model.parameters(), **options)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model)
        log.take()
        optimizer.step()
    return log.take()


def test_sgd_one_by_one(log):
    equals(logged_step(log, torch.optim.SGD, foreach=False), """MasterWeight: aten.add_.Tensor x 2""")


def test_adamw_one_by_one(log):
    equals(
        logged_step(log, torch.optim.AdamW, foreach=False),
        """\
MasterWeight: aten.mul_.Tensor
MasterWeight: aten.addcdiv_.default
MasterWeight: aten.mul_.Tensor
MasterWeight: aten.addcdiv_.default""",
    )


def test_adamw_all_at_once(log):
    equals(
        logged_step(log, torch.optim.AdamW, foreach=True),
        """\
MasterWeight: aten._foreach_mul_.Scalar
MasterWeight: aten._foreach_addcdiv_.ScalarList""",
    )


def test_adamw_fused(log):
    equals(logged_step(log, torch.optim.AdamW, fused=True), """MasterWeight: aten._fused_adamw_.default""")


def test_forward_and_backward(log):
    """Products are intercepted before they are operators."""
    model = make()
    log.take()
    backward(model)
    equals(log.take(), """""")


def test_forward_and_backward_of_persistent_weights(log):
    model = make(persistent=True)
    log.take()
    backward(model)
    equals(log.take(), """""")


def test_a_step_on_masters_of_persistent_weights(log):
    model = make(persistent=True)
    optimizer = ht.optim.MasterWeights(torch.optim.AdamW, model.parameters(), foreach=False)
    backward(model)
    log.take()
    optimizer.step()
    equals(log.take(), """""")


@pytest.fixture
def mesh():
    """Two ranks, of which the other one is not there: what it would send is whatever lies in memory."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def logged_sharding(log, mesh, persistent):
    """Return what wrapping calls, and what a step does."""
    model = make(persistent)
    log.take()
    fully_shard(model, mesh=mesh)
    wrapping = log.take()
    backward(model)
    return wrapping, log.take()


@pytest.mark.parametrize("name", ["MasterWeight", "HybridTensor"])
def test_fsdp2(log, mesh, name):
    """Wrapping a persistent weight calls what wrapping a master weight does; so does a step."""
    wrapping, step = logged_sharding(log, mesh, persistent=name == "HybridTensor")
    equals(
        wrapping.replace(name, "the weight"),
        """\
the weight: aten.split.Tensor
the weight: aten.new_zeros.default
the weight: aten.slice.Tensor
the weight: aten.copy_.default
the weight: aten.view.default
the weight: aten.slice.Tensor
the weight: aten.detach.default
the weight: aten.split.Tensor x 2
the weight: aten.new_zeros.default
the weight: aten.slice.Tensor
the weight: aten.copy_.default
the weight: aten.view.default
the weight: aten.slice.Tensor
the weight: aten.detach.default
the weight: aten.split.Tensor""",
    )
    equals(
        step.replace(f"{name}: aten.view", "the weight: aten.view"),
        """\
the weight: aten.view.default x 2
HybridTensor: aten.as_strided.default
HybridTensor: aten.detach.default
HybridTensor: aten.as_strided.default
HybridTensor: aten.detach.default""",
    )
