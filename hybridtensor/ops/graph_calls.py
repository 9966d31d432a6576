"""What the code that Inductor generates calls in place of operators; see ``ops.inductor``."""

from __future__ import annotations

from collections.abc import Callable

from hybridtensor.ops.cast.compile_ahead import wait_for_kernels
from hybridtensor.ops.cast.list_operator import MeasureAllInGraph, QuantizeAllInGraph
from hybridtensor.ops.cast.operator import CastInGraph
from hybridtensor.ops.library import implementation

_WITH_CACHE: dict[str, Callable[[], Callable[..., object]]] = {
    "quantize_into": CastInGraph,
    "measure_all_into": MeasureAllInGraph,
    "quantize_all_into": QuantizeAllInGraph,
}


def call_of(name: str, device_type: str) -> Callable[..., object]:
    """Return the callable that one place in a graph uses for the operator ``name`` on ``device_type``."""
    # The graph's code is loaded here, before it runs.
    wait_for_kernels()
    made = _WITH_CACHE.get(name)
    return implementation(name, device_type) if made is None else made()
