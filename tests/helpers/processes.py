"""Tests that run in several processes of one group."""

import datetime
import multiprocessing
import time
import traceback
import warnings

import torch
import torch.distributed as dist


def run(body, size, path, *args, expected=None):
    """Run ``body(rank, *args)`` in ``size`` processes; the first failure fails the test.

    Args:
        body: A function of a test module.
        size: Number of ranks.
        path: An empty folder.
        args: For ``body``.
        expected: Exit codes, by default all 0.
    """
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    workers = [context.Process(target=_work, args=(rank, size, body, str(path), queue, args)) for rank in range(size)]
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


def _work(rank, size, body, path, queue, args):
    try:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        warnings.simplefilter("error")
        store = dist.FileStore(f"{path}/store", size)
        timeout = datetime.timedelta(seconds=60)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        body(rank, *args)
    except BaseException:  # pytest.raises fails with one that is no Exception
        queue.put(f"rank {rank}: {traceback.format_exc()}")
