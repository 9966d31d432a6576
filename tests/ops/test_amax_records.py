"""Amax records: memory that is used again once a layer is gone, and what compiled graphs commit to them."""

import functools
import gc
import threading

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import checkpoint

import hybridtensor as ht
from hybridtensor.ops import amaxes, zeros
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


def chain():
    torch.manual_seed(0)
    return ht.quantize_(nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))), "fp8_delayed")


def nested(model, x):
    """A backward within a backward."""

    def again(gradient):
        with torch.enable_grad():
            model(3 * x).sum().backward()

    hidden = model(x)
    hidden.register_hook(again)
    model(hidden).sum().backward()


def twice(model, x):
    y = model(x)
    y.sum().backward(retain_graph=True)
    (8 * y).sum().backward()


def in_threads(model, x):
    threads = [threading.Thread(target=lambda by=by: model(by * x).sum().backward()) for by in (1, 2, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def gradients_alone(model, x):
    model(64 * x)  # no backward follows
    torch.autograd.grad(model(x).sum(), [model[1].weight])


def steps_within(model, x):
    def step(weight):
        ht.step_(model)

    model[0].weight.register_post_accumulate_grad_hook(step)  # the last of the backward
    model(x).sum().backward()
    model(2 * x).sum().backward()


def steps_within_a_checkpoint(model, x):
    """The step is in the backward that reentrant checkpointing runs within that of the other layers."""

    def step(weight):
        ht.step_(model)

    model[0].weight.register_post_accumulate_grad_hook(step)
    for by in (1, 2):
        model[1:](checkpoint(model[0], by * x, use_reentrant=True)).sum().backward()


def in_compiled_autograd(model, x):
    """It calls nothing that is queued for the end of a backward."""
    y = model(x)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        y.sum().backward()


WAYS = [nested, twice, in_threads, gradients_alone, steps_within, steps_within_a_checkpoint, in_compiled_autograd]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of graph breaks
@pytest.mark.parametrize("run", WAYS)
def test_layers_on_a_cpu_record_what_they_do_in_eager_code_while_a_graph_is_captured(run, monkeypatch):
    found = []
    for captured in (False, True):
        monkeypatch.setattr(amaxes, "is_captured", lambda captured=captured: captured)
        model = chain()
        run(model, torch.randn(32, 32).requires_grad_())
        assert not amaxes._CAPTURED
        monkeypatch.setattr(amaxes, "is_captured", lambda: False)
        ht.step_(model)
        found.append([*model.buffers()])
    assert all(map(torch.equal, *found))


def test_zeros_of_a_capture_are_where_their_record_is(monkeypatch):
    monkeypatch.setattr(zeros, "is_captured", lambda: True)
    taken = [AmaxRecord(3, torch.device(kind)).provisional() for kind in ("cpu", "meta", "cpu")]
    assert [tensor.device.type for tensor in taken] == ["cpu", "meta", "cpu"]


@pytest.mark.parametrize("captured", [False, True])
def test_zeros_for_a_fake_tensor_are_fake_where_no_mode_is_active(captured, monkeypatch):
    """Records of amaxes disable dispatch modes, and real tensors cannot be added to fake ones."""
    monkeypatch.setattr(zeros, "is_captured", lambda: captured)
    with FakeTensorMode():
        like = torch.ones(3)
    assert isinstance(zeros.zeros(3, like), FakeTensor)


def test_zeros_of_a_capture_are_filled_together_while_some_are_in_use(monkeypatch):
    """Each at an address of its own that kernels take; nothing keeps memory that none of them is in any more."""
    x, stream = torch.ones(1), 0
    monkeypatch.setattr(zeros, "_FILLED", {})
    monkeypatch.setattr(zeros, "is_captured", lambda: True)
    monkeypatch.setattr(zeros, "stream_of", lambda tensor: stream)
    taken = [zeros.zeros(size, x) for size in (1, 3, 8, 1)] + [zeros.zero(x)]
    assert len({one.untyped_storage().data_ptr() for one in taken}) == 1
    for index, one in enumerate(taken):
        assert one.data_ptr() % 16 == 0
        assert not one.any()
        one.fill_(index + 1)
    assert [one.unique().tolist() for one in taken] == [[1], [2], [3], [4], [5]]
    stream = 1
    others = [zeros.zeros(1, x), zeros.zeros(4096, x)]
    assert len({one.untyped_storage().data_ptr() for one in [taken[0], *others]}) == 3
    memory = [reference for reference, _ in zeros._FILLED.values()]
    assert all(reference() is not None for reference in memory)
    with torch.inference_mode():
        assert not zeros.zeros(1, x).is_inference()
    del taken, others, one
    assert all(reference() is None for reference in memory)
    many = [zeros.zeros(1, x) for _ in range(2000)]
    assert len({one.data_ptr() for one in many}) == 2000
    assert not torch.cat(many).any()


def test_a_forward_alone_is_part_of_a_capture_that_ends_within_a_backward(monkeypatch):
    model, x, found = chain().requires_grad_(False), torch.randn(32, 32), []

    def capture(gradient):
        monkeypatch.setattr(amaxes, "is_captured", lambda: True)
        with torch.enable_grad():
            model(x)
        monkeypatch.setattr(amaxes, "is_captured", lambda: False)
        found.extend(layer.quantization_state.record.total.clone() for layer in model)

    around = torch.ones(1, requires_grad=True) * 1.0
    around.register_hook(capture)
    around.backward()
    assert all(total.any() for total in found)
    assert len(found) == 3
