"""Ranks as processes of one group: on a CPU through gloo, or one per GPU through NCCL."""

import contextlib
import datetime
import gc
import importlib
import io
import multiprocessing
import os
import sys
import time
import traceback
import warnings

import pytest
import torch
import torch.distributed as dist

# What processes that need no GPU are forked after: the package, which begins when it is used, and what compiles there
PRELOADED = ["hybridtensor.public", "torch._functorch.aot_autograd", "torch._inductor.compile_fx", "pytest"]
TIMEOUT = datetime.timedelta(seconds=60)


def context_for(device):
    """Return how ranks are started: where they need no GPU, each is forked off a process that has imported all."""
    if device == "cuda":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def seldom_collect_garbage():
    """Let a process collect garbage when there is much: compilers make and drop so much that a quarter of the time of
    tests with graphs went into looking for it.
    """
    gc.set_threshold(100_000, 20, 20)


def seed_the_cpu_only():
    """Without a GPU: torch keeps each seed for three kinds of devices until there is one, each with a stack trace."""
    if not torch.cuda.is_available():
        for devices in (torch.cuda, torch.xpu, torch.mtia):
            devices.manual_seed_all = lambda seed: None


def compile_without_measuring():
    """Without a GPU: after each frame Dynamo empties the CPU's caches to time its guards, and collects garbage. Of each
    graph AOTAutograd prints the code three times, for logs that nobody reads.
    """
    if not torch.cuda.is_available():
        torch._dynamo.config.run_gc_after_compile = False
        torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
        compiling = importlib.import_module("torch._functorch._aot_autograd.graph_compile")
        compiling._log_joint_graph, compiling._log_fw_bw_graphs = lambda *_: None, lambda *_, **__: (None, None)


def call(function, *args):
    """Return what a function of a test module, or of a helper, returns in a new process."""
    with context_for("cuda" if torch.cuda.is_available() else "cpu").Pool(1) as pool:
        return pool.apply(function, args)


def call_program(program, *arguments):
    """Return what a program prints that gets a command line in a new process."""
    return call(_printed, program, [str(argument) for argument in arguments])


def _printed(program, arguments):
    warnings.simplefilter("error")
    sys.argv = ["", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(program, {"__name__": "__main__"})
    return printed.getvalue()


def check_devices(device, size):
    """Skip the test where ranks would have no GPU of their own."""
    if device == "cuda" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} CUDA devices")


def share_connections():
    """Let the groups of this process have their connections in common: each has a thread for its own ones, which polls
    a hundred times a second.
    """
    begin, connections = dist.ProcessGroupGloo.__init__, dist.ProcessGroupGloo.create_default_device()

    def begin_with_these(self, store, rank, size, timeout):
        options = self._Options()
        options._devices, options._timeout = [connections], timeout
        begin(self, store, rank, size, options)

    dist.ProcessGroupGloo.__init__ = begin_with_these


def join(rank, size, store, device):
    """Join the group as a rank; what is made without naming a device is on this rank's own."""
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # libraries that look for a GPU would take one per rank
    torch.set_num_threads(1)
    seed_the_cpu_only()
    compile_without_measuring()
    share_connections()
    torch.manual_seed(0)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=r"`torch\.jit", category=DeprecationWarning)  # torch's own, of Inductor
    options = {"backend": "gloo"}
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device(f"cuda:{rank}")
        options = {"backend": "nccl", "device_id": torch.device("cuda", rank)}
    dist.init_process_group(
        store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=TIMEOUT, **options,
    )  # fmt: skip


def here():
    """Return the type of this rank's device."""
    return torch.get_default_device().type


def generator(seed):
    """Return random numbers that are the same on all ranks."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def run(body, size, path, *args, device="cpu", expected=None):
    """Run ``body(rank, *args)`` in ``size`` processes; the first failure fails the test.

    Args:
        body: A function of a test module.
        size: Number of ranks.
        path: An empty folder.
        args: For ``body``.
        device: Type of the ranks' devices.
        expected: Exit codes, by default all 0.
    """
    check_devices(device, size)
    context = context_for(device)
    queue = context.SimpleQueue()
    given = (size, device, body, str(path), queue, args)
    workers = [context.Process(target=_work, args=(rank, *given)) for rank in range(size)]
    for process in workers:
        process.start()
    deadline = time.monotonic() + 100
    while queue.empty() and time.monotonic() < deadline and any(process.is_alive() for process in workers):
        time.sleep(0.02)
    for process in workers:
        process.join(1 if queue.empty() else 0.1)
    codes = [process.exitcode for process in workers]
    for process in workers:
        process.kill()
    errors = []
    while not queue.empty():
        errors.append(queue.get())
    assert not errors, "\n".join(errors)
    assert codes == (expected or [0] * size)


def _work(rank, size, device, body, path, queue, args):
    gc.freeze()  # see standing_ranks
    try:
        join(rank, size, f"{path}/store", device)
        body(rank, *args)
        if device == "cuda":
            dist.destroy_process_group()  # else NCCL warns
    except BaseException:  # pytest.raises fails with one that is no Exception
        queue.put(f"rank {rank}: {traceback.format_exc()}")
