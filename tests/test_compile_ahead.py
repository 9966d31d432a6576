"""Kernels of a graph are compiled in threads before its code runs."""

import threading
import time

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import hybridtensor as ht
from hybridtensor.ops.cache import LaunchTables
from hybridtensor.ops.cast import compile_ahead, lengths
from hybridtensor.ops.cast import kernel as kernel_casts
from hybridtensor.ops.cast import multi_tensor as list_casts
from hybridtensor.testing import random_tensor

# torch warns of its own settings for a GPU, and of gradients that it looks for itself
pytestmark = pytest.mark.filterwarnings("default")
ROWS = 1000


class Started(list):
    """What threads run, instead of kernels: names, arguments and the thread."""

    fails = False
    finished = 0

    def function(self, name, device_type):
        """Return what notes its arguments."""

        def run(*args):
            self.append((name, args, threading.current_thread()))
            if self.fails:
                raise RuntimeError("no compiler")
            time.sleep(0.1)
            self.finished += 1

        return run


@pytest.fixture
def started(monkeypatch, device):
    """What is compiled ahead; a CPU is taken for a GPU."""
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU of this process")
    made = Started()
    monkeypatch.setattr(compile_ahead, "_function", made.function)
    monkeypatch.setattr(compile_ahead, "_started", {})
    monkeypatch.setattr(compile_ahead, "_of_weights", set())
    if device == "cpu":
        monkeypatch.setattr(compile_ahead, "_are_on_a_gpu", bool)
        monkeypatch.setattr(torch.cuda, "device", torch.device)
    return made


def test_the_casts_of_a_weight_may_be_traced_inside_those_of_another():
    with compile_ahead.weight_casts():
        with compile_ahead.weight_casts():
            pass
        assert compile_ahead._traces_weight
    assert not compile_ahead._traces_weight


class Two(nn.Module):
    """Two layers in one graph: Dynamo leaves out the frames of containers of torch."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Linear(64, 64, bias=False) for _ in range(2))

    def forward(self, x):
        """Return ``[M, 64]``."""
        return self.second(self.first(x))


def train(device, recipe, dynamic=None):
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Two().to(device, torch.bfloat16)
    ht.quantize_(net, recipe)
    net.compile(dynamic=dynamic)
    with torch._inductor.config.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        y = net(random_tensor(ROWS, 64, device=device).requires_grad_())
        y.float().square().sum().backward()
    return [y.detach(), *(p.grad for p in net.parameters())]


@pytest.mark.parametrize("recipe", ["fp8", "fp8_rowwise", "nvfp4"])
def test_every_cast_of_a_graph_is_started_with_few_rows(started, device, recipe):
    train(device, recipe)
    names = {name for name, *_ in started}
    assert "quantize" in names
    assert names & {"quantize_all", "measure_all"}, "weights are cast together"
    for name, args, thread in started:
        assert thread is not threading.main_thread()
        of_weights = name.endswith("_all")
        matrices = args[0] if of_weights else [args[0]]
        assert len(matrices) == 1 + of_weights, "weights by themselves are compiled in vain"
        for matrix in matrices:
            assert type(matrix) is torch.Tensor
            assert matrix.shape == ((64 if of_weights else lengths.few_like(ROWS)), 64)
            assert not matrix.any()
    if recipe == "nvfp4":  # while the weights are traced, lists of any number
        assert [name for name, *_ in started].count("measure_all") == 1


def test_a_weight_by_itself_is_compiled_when_the_graph_is_lowered(started, device):
    torch._dynamo.reset()
    net = ht.quantize_(nn.Linear(64, 64, bias=False).to(device, torch.bfloat16), "fp8")
    with torch._inductor.config.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        torch.compile(lambda x: net(x) * 2)(random_tensor(ROWS, 64, device=device))
    shapes = [tuple(args[0].shape) for name, args, _ in started if name == "quantize"]
    assert (64, 64) in shapes


def test_lists_of_equal_matrices_start_one_kernel(started, device):
    a, b, scale = torch.empty(64, 64, device=device), torch.empty(128, 64, device=device), torch.empty(1, device=device)
    for xs in ([a], [a, a, a], [a, b], [a, b, a]):
        compile_ahead.compile_ahead("quantize_all", (xs, "", [scale] * len(xs), [], [], []))
    compile_ahead.wait(compile_ahead._started.values())
    assert sorted([len(x) for x in args[0]] for _, args, _ in started) == [[64, 64], [64, 128]]
    assert all(len(args[2]) == 2 for _, args, _ in started)


def test_a_thread_that_fails_changes_nothing(started, device):
    expected = train(device, "fp8")
    started.fails = True
    compile_ahead._started.clear()
    started.clear()
    for got, want in zip(train(device, "fp8"), expected, strict=True):
        assert torch.equal(got, want)
    assert started


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_the_code_of_a_graph_waits_for_its_own_kernels(started, monkeypatch, device, cuda_graphs):
    """Where CUDA graphs are captured, for all."""
    waits = []
    wait = compile_ahead.wait

    def watched(futures):
        awaited = set(futures)
        waits.append((awaited, set(compile_ahead._needed), set(compile_ahead._started.values())))
        wait(awaited)
        assert all(future.done() for future in awaited)

    monkeypatch.setattr(compile_ahead, "wait", watched)
    with compile_ahead.config.patch({"triton.cudagraphs": cuda_graphs}):
        train(device, "nvfp4")
    awaited, forward, begun = waits[0]
    assert forward
    assert forward < begun, "the threads of backward run, too"
    assert awaited == (begun if cuda_graphs else forward)
    assert (begun - forward) & set().union(*(needed for _, needed, _ in waits[1:])), "for which backward waits"


def test_symbols_become_numbers(started, device):
    train(device, "fp8", dynamic=True)
    assert started
    for _, args, _ in started:
        for argument in torch.utils._pytree.tree_leaves(args):
            assert not isinstance(argument, torch.SymInt)
            assert not isinstance(argument, torch.Tensor) or all(type(extent) is int for extent in argument.shape)


def test_a_symbol_by_itself_becomes_zero(started, device):
    x = torch.empty(ROWS, 64, device=device)
    symbol = ShapeEnv().create_unbacked_symint()
    compile_ahead.compile_ahead("quantize", (x, "", None, None, None, symbol), is_lowered=True)
    compile_ahead.wait_for_kernels()
    ((_, args, _),) = started
    assert args[1:] == ("", None, None, None, 0)


@pytest.mark.parametrize("rows", [1, 100, 513, 1000, 1024, 1152, 4097, 4096, 4000, 4100, 12000, 16384])
def test_few_rows_are_as_many_for_kernels(rows):
    """Oracle: Triton tells multiples of 16 from other extents, and launches tell whole tiles, of 16 to 512 rows."""
    few = lengths.few_like(rows)
    assert few <= 640
    for extent in (4, 16, 32, 64):
        assert (few % extent == 0) == (rows % extent == 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels are compiled for a GPU")
@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4"])
def test_graphs_launch_what_threads_compiled(recipe, monkeypatch):
    """Of the kernels that cast, none is compiled in the thread that trains."""
    import triton

    from hybridtensor.kernels import measure, multi_tensor, quantize

    casting = [quantize.cast_kernel, measure.measure_kernel, measure.measure_flat_kernel]
    casting += [multi_tensor.multi_tensor_cast_kernel, multi_tensor.multi_tensor_measure_kernel]
    compiled = []

    def listener(*, src, **_):
        compiled.append((src.name, threading.current_thread() is threading.main_thread()))

    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    monkeypatch.setattr(compile_ahead, "_started", {})
    for kernel in casting:
        kernel.device_caches.clear()
    kernel_casts._CASTS.clear()
    monkeypatch.setattr(list_casts, "_LISTS", LaunchTables(most=8))
    train("cuda", recipe)
    names = {kernel.__name__ for kernel in casting}
    found = [in_main for name, in_main in compiled if name in names]
    assert found
    assert not any(found), compiled
