"""Where a test runs a kernel by itself."""

import pytest
import torch


def require_kernels(device):
    """Skip the test where kernels do not run on ``device``: on a CPU they need Triton's interpreter."""
    if device == "cpu":
        pytest.importorskip("triton", reason="Triton's interpreter is needed")
        if torch.cuda.is_available():
            pytest.skip("kernels are compiled in this process")
