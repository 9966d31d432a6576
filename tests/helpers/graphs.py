"""A torch.compile backend that keeps the graphs of forward and backward, and runs them as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition


class Graphs:
    """The graphs of what was compiled last.

    Attributes:
        graphs: ``"forward"`` and ``"backward"``.
        static: Which inputs of the forward keep their memory from call to call.
    """

    def __init__(self) -> None:
        self.graphs: dict[str, fx.GraphModule] = {}
        self.static: list[int] = []

    def backend(self) -> Any:
        """Return the backend; it partitions as inductor does."""
        return aot_autograd(
            fw_compiler=self._keep("forward"),
            bw_compiler=self._keep("backward"),
            partition_fn=min_cut_rematerialization_partition,
        )

    def _keep(self, name: str) -> Callable[[fx.GraphModule, Any], Any]:
        def compile(graph: fx.GraphModule, inputs: Any) -> Any:
            self.graphs[name] = graph
            if name == "forward":
                self.static = list(torch._guards.TracingContext.get().fw_metadata.static_input_indices)
            return make_boxed_func(graph.forward)

        return compile

    def count(self, name: str, op: Any) -> int:
        """Return how often an operator is in a graph."""
        return sum(node.target is op for node in self.graphs[name].graph.nodes)

    def saved(self, outputs: int) -> list[Tensor]:
        """Return what the forward saves, after its ``outputs``, without inputs that stay where they are."""
        graph = self.graphs["forward"].graph
        inputs = graph.find_nodes(op="placeholder")
        kept = {inputs[i] for i in self.static}
        saved = [node for node in graph.output_node().args[0][outputs:] if _is_tensor(node) and node not in kept]
        return [node.meta["val"] for node in saved]


def _is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), Tensor)
