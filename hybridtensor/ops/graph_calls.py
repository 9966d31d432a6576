"""What the code that Inductor generates calls in place of operators; see ``ops.inductor``."""

from __future__ import annotations

from collections.abc import Callable

from hybridtensor.ops.cast.compile_ahead import wait_for_kernels
from hybridtensor.ops.cast.in_graphs import CastInGraph
from hybridtensor.ops.cast.list_operator import measured, quantized
from hybridtensor.ops.library import implementation


def call_of(name: str, device_type: str) -> Callable[..., object]:
    """Return the callable that one place in a graph uses for the operator ``name`` on ``device_type``."""
    # The graph's code is loaded here, before it runs.
    wait_for_kernels()
    if name == "quantize":
        return CastInGraph()
    known: dict[str, Callable[..., object]] = {"measure_all": measured, "quantize_all": quantized}
    return known.get(name) or implementation(name, device_type)
