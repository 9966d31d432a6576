"""The forward of layers whose weight a graph cannot let go by their state."""

from __future__ import annotations

from collections.abc import Callable

from hybridtensor.ops.library import outside_graphs
from hybridtensor.subclasses.op_table import Args, Kwargs


# A graph cannot let it go by the layer's state, and its products would stay plain there, as an adapter's.
@outside_graphs(
    "a factory, such as new_zeros, made the weight of a converted layer of another weight"
)
def in_eager_code(forward: Callable[..., object], args: Args, kwargs: Kwargs) -> object:
    """Call the forward of a layer outside of graphs."""
    return forward(*args, **kwargs)
