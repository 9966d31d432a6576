"""Detect dry runs, in which torch runs models on uninitialized memory to infer shapes or to warm up.

There is no public flag, so a forward looks for the code of torch's functions on the stack.
"""

from __future__ import annotations

import functools
import sys
from types import CodeType

import torch

from hybridtensor.ops.library import is_captured

_PIPELINING = "torch.distributed.pipelining.stage"
_OF_STAGES = (  # of a stage of a pipeline, by the version of torch that has it
    ("_PipelineStageBase", "_forward_metadata_inference"),  # 2.13
    ("PipelineStage", "_forward_metadata_inference"),
    ("PipelineStage", "_shape_inference"),  # 2.11, 2.12
)


def is_dry_run() -> bool:
    """Return whether torch runs this forward to infer shapes (pipelining) or warm up (``make_graphed_callables``)."""
    pipelining = _PIPELINING in sys.modules
    # Where graphs are warmed up; walking takes longer
    if not pipelining and not _is_on_side_stream():
        return False
    known = _code(pipelining)
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in known:
            # The same function warms up and captures; what is captured is replayed, and so counts.
            return frame.f_code is not _GRAPHED or not is_captured()
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _is_on_side_stream() -> bool:
    if not torch.cuda.is_initialized():
        return False
    return torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice()) != 0


_GRAPHED: CodeType = torch.cuda.make_graphed_callables.__code__


@functools.cache
def _code(pipelining: bool) -> frozenset[CodeType]:
    """Return the code objects of torch's functions that do dry runs."""
    found = {_GRAPHED}
    if pipelining:
        stage = sys.modules[_PIPELINING]
        for owner, name in _OF_STAGES:
            method = getattr(getattr(stage, owner, None), name, None)
            if method is not None:
                found.add(method.__code__)
    return frozenset(found)
