"""Amax records: memory that is used again once a layer is gone, and what compiled graphs commit to them."""

import functools
import gc
import threading

import pytest
import torch

from hybridtensor.ops import amaxes
from hybridtensor.ops.amaxes import AmaxRecord, commit, nowhere

CPU = torch.device("cpu")


@pytest.fixture
def memory(monkeypatch):
    """Memory that no other test has records in."""
    monkeypatch.setattr(amaxes, "_memory", functools.cache(amaxes._Memory))
    return amaxes._memory(CPU)


def in_a_cycle():
    """Make a record that only the collector frees."""
    record = AmaxRecord(3, CPU)
    record.itself = record
    return record.total.data_ptr()


def test_memory_is_used_again(memory):
    first = in_a_cycle()
    gc.collect()
    record = AmaxRecord(3, CPU)
    assert record.total.data_ptr() == first
    record.total.fill_(2)
    del record
    assert not AmaxRecord(3, CPU).total.any()


def test_the_collector_runs_while_memory_is_taken(memory, monkeypatch):
    """A collection in ``take`` returns memory in the same thread: it waited for a lock that this thread held."""
    allocate = torch.zeros

    def collecting(*args, **options):
        gc.collect()
        return allocate(*args, **options)

    def work():
        in_a_cycle()
        monkeypatch.setattr(torch, "zeros", collecting)
        memory.take(amaxes._CHUNK)  # does not fit what is left: allocates a chunk

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert len(memory._chunks) == 2


@pytest.mark.parametrize("amaxes", [[], [[1.0, 0.5, 2.0]], [[1.0, 0.5, 0.0], [0.0, 3.0, 0.25]]])
def test_a_commit_raises_a_record_and_says_that_a_backward_ran(amaxes, device):
    record = AmaxRecord(3, torch.device(device))
    record.total.copy_(torch.tensor([0.75, 0.75, 0.75]))
    assert not record.used_in_graphs.any()
    given = [torch.tensor(amax, device=device) for amax in amaxes]
    commit(record.address, given, torch.ones(1, device=device), 3)
    assert torch.equal(record.total, torch.stack([torch.full((3,), 0.75, device=device), *given]).amax(0))
    assert torch.equal(record.used_in_graphs.cpu(), torch.ones(3))
    assert not record.of_gathers.any()
    commit(nowhere(torch.device(device)), given, torch.ones(1, device=device), 3)
