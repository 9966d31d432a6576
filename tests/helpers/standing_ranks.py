"""Ranks that stay for all tests of a session: starting them is what takes time. Through gloo, on GPUs through NCCL."""

import contextlib
import faulthandler
import functools
import gc
import os
import signal
import traceback
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import check_devices, context_for, join
from torch.distributed import device_mesh

KINDS = ["cpu"]
if torch.cuda.is_available():
    KINDS.append(pytest.param("cuda", marks=pytest.mark.gpu))


STARTED = []


class Ranks:
    """``size`` processes in one process group; ``run(body, *args)`` calls ``body(rank, *args)`` in each.

    They start when something is run, and one that does not answer in 120 s is ended, and the error says where its
    threads were.
    """

    def __init__(self, size, directory, device):
        self.size, self.directory, self.device, self.starts = size, directory, device, 0
        self.pipes, self.processes = [], []

    def start(self):
        context = context_for(self.device)
        self.pipes, self.processes = [], []
        self.starts += 1
        for rank in range(self.size):
            mine, theirs = context.Pipe()
            store = self._store()
            args = (rank, self.size, str(store), self.device, theirs)
            process = context.Process(target=serve, args=args, daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)

    def _store(self):
        return self.directory / f"store{self.starts}"

    def run(self, body, *args):
        if not self.processes:
            self.start()
        for pipe in self.pipes:
            pipe.send((body, args))
        answers = [self._answer(rank, pipe) for rank, pipe in enumerate(self.pipes)]
        errors = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer]
        if errors:  # collectives may be left half done
            self.stop()
        assert not errors, "\n".join(errors)

    def _answer(self, rank, pipe):
        process = self.processes[rank]
        try:
            if pipe.poll(120):
                return pipe.recv()
            happened = "no answer in 120 s"
            os.kill(process.pid, signal.SIGABRT)  # writes where its threads are
            process.join(5)
        except EOFError:
            process.join(5)
            happened = f"the process ended with exit code {process.exitcode}"
        return f"{happened}\n{crash_of(rank, self._store()).read_text()}"

    def stop(self):
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(5)
            process.kill()
        self.pipes, self.processes = [], []


def crash_of(rank, store):
    """Return the file that has the stacks of a rank's threads where a signal ended it."""
    return Path(f"{store}.{rank}")


def serve(rank, size, path, device, pipe):
    """Run what comes through ``pipe`` until None comes. What is there by then stays, and nobody looks through it again:
    the garbage collector does not, and a model's first step, which asks for who wraps it, does not.
    """
    faulthandler.enable(crash_of(rank, path).open("w"))
    # Before tests import it: one mesh of each kind. The groups of each have threads that poll, of which four ranks had
    # 476 each late in a run, and took 3/4 of a core while they waited. torch's caches of DTensors take equal meshes for
    # one, so that groups cannot be destroyed after a test.
    device_mesh.init_device_mesh = functools.cache(device_mesh.init_device_mesh)
    join(rank, size, path, device)
    warnings.filterwarnings("ignore", message="The .grad attribute")  # torch's own, when it traces a gathered input
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")  # in a thread that ran nothing before
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # of any cut layer that FSDP2 wraps alone
    while (work := pipe.recv()) is not None:
        body, args = work
        # What earlier tests compiled counts for Dynamo's limits, which code of the package that they share has, too
        torch._dynamo.reset()
        gc.collect()
        gc.freeze()
        torch.manual_seed(0)
        try:
            body(rank, *args)
            pipe.send(None)
        except BaseException:  # pytest.raises fails with one that is no Exception
            pipe.send(traceback.format_exc())
    dist.destroy_process_group()


def started(size, request, tmp_path_factory):
    check_devices(request.param, size)
    ranks = Ranks(size, tmp_path_factory.mktemp(f"{request.param}{size}"), request.param)
    STARTED.append(ranks)
    yield ranks
    ranks.stop()


def stop_idle():
    """Stop the ranks of this process: their connections are polled a hundred times a second. Those on GPUs take long to
    start again.
    """
    for ranks in STARTED:
        if ranks.device == "cpu":
            ranks.stop()
