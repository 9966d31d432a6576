"""Every public function and class of ``docs/api.md`` has an example in its docstring, and every example runs.

Those of ``hybridtensor.integrations`` are compiled only: the scripts of ``examples/frameworks`` run the same calls.
"""

import ast
import dataclasses
import importlib
import inspect
import json
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from blocks import Blocks, Mixture
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import hybridtensor as ht
from hybridtensor.distributed import checkpoint
from hybridtensor.formats import REGISTRY
from hybridtensor.linear import Backward, Needs, input_operand, weight_operand

ROOT = Path(__file__).parent.parent
DIRECTIVE = re.compile(r"^\.\. (\w+):: (\S+)\n((?:   :.*\n)*)", re.MULTILINE)
LITERAL = re.compile(r"(?<=::\n)\n((?:    .*\n|\n)+)")
ONLY_COMPILED = {"costs.measure": "it measures a GPU"}
"""Names whose examples do not run, and why; beside all of ``integrations``."""


def listed():
    """Return the names of functions and classes of the page, and of the modules that it takes whole."""
    module, names, modules = "", [], []
    for kind, name, options in DIRECTIVE.findall((ROOT / "docs" / "api.md").read_text()):
        if kind == "currentmodule":
            module = f"{name}."
        elif kind == "automodule":
            modules.append(name)
            names += [f"{name}.{one}" for one in members(name) if f"members: {one}\n" not in options]
        else:
            names.append(name if name.startswith("hybridtensor.") else module + name)
    return [name.removeprefix("hybridtensor.") for name in names], modules


def members(name):
    """Return the functions and classes of a module."""
    module = importlib.import_module(name)
    kinds = ((one, getattr(module, one)) for one in module.__all__)
    return [one for one, kind in kinds if inspect.isroutine(kind) or inspect.isclass(kind)]


def thing(name):
    """Return what a name is of."""
    module, _, own = name.rpartition(".")
    return getattr(importlib.import_module(module), own)


def docstring(name):
    """Return the docstring of a name; of a framework's module from its source, as that imports the framework."""
    if not name.startswith("integrations."):
        return inspect.getdoc(thing(f"hybridtensor.{name}"))
    path, _, own = name.rpartition(".")
    module = ast.parse((ROOT / "hybridtensor" / f"{path.replace('.', '/')}.py").read_text())
    return next(ast.get_docstring(node) for node in module.body if getattr(node, "name", None) == own)


def examples(text):
    """Return the literal blocks of a docstring."""
    return [textwrap.dedent(code) for code in LITERAL.findall(f"{text}\n")]


NAMES, MODULES = listed()
RUN = [name for name in NAMES if not name.startswith("integrations.") and name not in ONLY_COMPILED]


class Block(nn.Module):
    """Layers by the names that a gated MLP has, and attention's."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, 64) for _ in range(3))
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(64, 64) for _ in range(3))
        self.gate_up_proj = nn.Linear(64, 128)


class Losses(Blocks):
    """The same, which returns its loss as models of transformers do."""

    def forward(self, x):
        return SimpleNamespace(loss=super().forward(x).square().mean())


def one_rank_mesh(device, shape, mesh_dim_names):
    """Return a mesh of as many dimensions, on the one rank that there is."""
    return init_device_mesh("cpu", (1,) * len(shape), mesh_dim_names=mesh_dim_names)


def common(saved):
    """Return what an example takes for granted: modules, a model after ``quantize_``, what trains it, data.

    Args:
        saved: Whether its training was saved.
    """
    model = ht.quantize_(Blocks(), "fp8")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(64, 64)
    for step in range(2):
        model(x).mean().backward()
        if saved:
            checkpoint.save("runs/a", step, {"model": model, "optimizer": optimizer})
    optimizer.zero_grad()
    modules = {"ht": ht, "torch": torch, "nn": nn, "dist": dist, "dcp": dcp, "json": json, "dataclasses": dataclasses}
    torch_s = {"fully_shard": fully_shard, "parallelize_module": parallelize_module, "Shard": Shard}
    return modules | torch_s | {
        "Replicate": Replicate, "init_device_mesh": one_rank_mesh, "checkpoint": checkpoint,
        "mesh": one_rank_mesh("cpu", (1, 1), ("dp", "tp")), "model": model, "optimizer": optimizer,
        "state": {"model": model, "optimizer": optimizer}, "step": 2, "steps": 10, "x": x, "batch": x, "tokens": x,
        "batches": [x] * 3, "data": [x] * 3, "engine_weights": {}, "train": lambda model: train(model, optimizer, x),
        "loss": lambda model, batch: model(batch).mean(),
    }  # fmt: skip


def train(model, optimizer, x):
    model(x).mean().backward()
    optimizer.step()


def of_recipe(recipe, **options):
    """Return a scope whose model has a recipe."""
    return lambda: {"model": ht.quantize_(Blocks(), recipe, **options)}


def plain():
    return {"model": Blocks()}


def with_scaler():
    """Return a scope whose optimizer has gradients of a scaled loss."""
    model, scaler = ht.quantize_(Blocks(), "fp8"), torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.randn(64, 64)).mean()).backward()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3), "scaler": scaler}


def inside_a_block():
    block = Block()
    return {"self": block, "block": nn.ModuleDict({"mlp": block})}


def products():
    """Faces of a product in high precision, as plain matrices."""
    faces = {"input": torch.randn(32, 64), "weight": torch.randn(16, 64), "grad_output": torch.randn(32, 16)}
    return {name: SimpleNamespace(rowwise=face, columnwise=face) for name, face in faces.items()}


def layer():
    """A layer, and what its products have in common, made as the examples beside it do."""
    layer = ht.quantize_(nn.Linear(64, 64), "fp8")
    x, weight = torch.randn(64, 64), layer.weight
    needs, context = Needs(input=True, weight=True, bias=False), ht.Context("input", weight.state)
    left = input_operand(x, x, weight, weight.config, needs, context)
    right = weight_operand(weight, needs, x.dtype, context, weight.context)
    return {"layer": layer, "weight": weight, "x": x, "needs": needs, "context": context, "left": left, "right": right}


def backward():
    scope, grad = layer(), torch.randn(64, 64)
    made = (scope[name] for name in ("left", "right"))
    backward, saved = Backward.save(*made, scope["weight"].config, scope["needs"], scope["context"])
    return {"backward": backward, "saved": saved, "grad_output": grad}


def masters():
    model = ht.quantize_(Blocks(), "fp8", persistent=True)
    shards = [torch.randn(64 * 64) for _ in model.blocks]
    return {"model": model, "master_shards": shards, "offsets": [0] * len(shards)}


def saved_plain():
    model = ht.quantize_(Blocks(), "fp8")
    dcp.save({"model": model.state_dict()}, checkpoint_id="runs/plain", planner=checkpoint.HybridSavePlanner())
    return {"model": model}


def exported():
    ht.export_pretrained(ht.quantize_(Blocks(), "fp8_rowwise"), "exported")
    return plain()


def tools():
    from hybridtensor import testing

    return {"testing": testing, "weight": torch.randn(32, 64)}


OWN = {
    "quantize_": plain,
    "advise": lambda: {"model": Losses()},
    "step_after": with_scaler,
    "without_recording": lambda: {"x": torch.randn(4, 64, requires_grad=True)},
    "swiglu": lambda: inside_a_block() | {"x": torch.randn(4, 64)},
    "rms_norm": inside_a_block,
    "HybridConfig": lambda: plain() | products(),
    "Context": of_recipe("fp8_delayed"),
    "LayerState": of_recipe("fp8_delayed"),
    "HybridTensor": of_recipe("mxfp8", persistent=True),
    "load_pretrained": exported,
    "distributed.ExpertParallel": lambda: {
        "model": Mixture().bfloat16(), "mesh": one_rank_mesh("cpu", (1, 1), ("dp", "ep")),
    },
    "distributed.PrepareModuleInput": inside_a_block,
    "distributed.quantize_master_weights": masters,
    "distributed.checkpoint.HybridLoadPlanner": saved_plain,
    "distributed.checkpoint.SafeReader": saved_plain,
    "optim": plain,
    "recipes.edge_blocks": plain,
    "recipes.quartet2": lambda: {"model": Blocks(128)},
    "linear": layer,
    "linear.Backward": lambda: layer() | backward(),
    "linear.Gradients": backward,
    "testing": tools,
}  # fmt: skip
"""What examples of a name, or of a module, have beside or in place of what is common."""


def scope_of(name, text):
    """Return the names that the examples of a docstring have."""
    own = OWN.get(name) or OWN.get(name.partition(".")[0], dict)
    return common("runs/a" in text) | own()


@pytest.fixture
def one_rank(tmp_path, monkeypatch):
    """A group of one rank, in an empty folder; what an example sets for the whole process is undone."""
    monkeypatch.chdir(tmp_path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    known = dict(REGISTRY)
    with ht.share_inputs(True), ht.debug(offsets=False):
        yield
    REGISTRY.clear()
    REGISTRY.update(known)
    dist.destroy_process_group()


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_an_example(name):
    found = examples(docstring(name))
    assert found, f"{name}: an example of two or three lines is required in its docstring, after ::"
    for code in found:
        compile(as_statement(code), name, "exec")
    function = name.rpartition(".")[2]
    assert function[0].isupper() or any(re.search(rf"\b{function}\(", code) for code in found), "it calls another one"


def as_statement(code):
    """Return an example of what a method returns as a statement of a module."""
    return re.sub(r"^return ", "returned = ", code)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", [*RUN, *MODULES])
def test_examples_run(name, capsys):
    torch.manual_seed(0)
    text = importlib.import_module(name).__doc__ if name in MODULES else docstring(name)
    scope = scope_of(name, text)
    for code in examples(text):
        exec(as_statement(code), scope)
    assert " method " not in capsys.readouterr().out, "it prints a method, which it does not call"


def test_the_page_lists_what_it_is_of():
    assert len(NAMES) > 100
    assert {"quantize_", "recipes.fp8", "linear.Operand", "integrations.torchtitan.quantized"} < set(NAMES)
    assert ONLY_COMPILED.keys() < set(NAMES)
