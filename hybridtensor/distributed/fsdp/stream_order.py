"""Order among streams that use the same persistent tensors."""

from __future__ import annotations

import torch
from torch import Tensor


class StreamOrder:
    """The stream that used some persistent tensors last; the next one waits for it."""

    def __init__(self) -> None:
        self._last: torch.cuda.Stream | None = None

    def wait_for_last_use(self, *tensors: Tensor) -> None:
        """Make the current stream wait for the last stream that used the tensors."""
        device = tensors[0].device
        if device.type != "cuda":
            return
        # The private raw handle: making a Python stream to compare costs more than this whole call
        last = self._last
        if last is not None and last.cuda_stream == torch._C._cuda_getCurrentRawStream(
            device.index
        ):
            return
        self._last = now = torch.cuda.current_stream(device)
        if last is not None:
            now.wait_stream(last)
            for tensor in tensors:
                tensor.record_stream(now)
