"""What importing the package does, and which way its imports point."""

import ast
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import tiers

import hybridtensor

PACKAGE = Path(hybridtensor.__file__).parent
MODULES = sorted(p.relative_to(PACKAGE.parent).with_suffix("") for p in PACKAGE.rglob("*.py"))

# Each layer may import those before it; a folder is one layer with an order of its own below.
LAYERS = [
    "lazy", "version", "graph_caches", "arguments", "printed", "recipe_table", "untrusted", "dtensor", "ranks",
    "format_record", "formats", "kernels", "ops", "debug", "state", "quantizers",
    "torchao_compat", "recipes", "costs", "subclasses", "linear", "activations", "masters", "optim", "offload",
    "distributed", "layers", "mesh", "selection", "swap", "state_dicts", "common_scales", "fitting", "undo", "convert",
    "plain", "explanation", "check", "explain", "inference", "export", "watching", "advising", "integrations",
    "commands", "__main__", "verify", "former_names", "public", "testing",
]  # fmt: skip
SUBCLASS_LAYERS = [
    "op_table", "observing", "wrapper", "structure", "high_precision", "face_cache", "record", "owners", "intercepting",
    "common_scale", "quantized_tensor", "identity_tensor", "sharded_face", "faces", "hybrid_tensor",
    "followers", "quantized_when_used", "master_tensor", "quantizing", "operators",
]  # fmt: skip
OPERATOR_LAYERS = ["reads", "common", "matmul", "quantized", "identity", "hybrid", "hybrid_values", "master"]


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


@functools.cache
def imports(path):
    """Return ``(module, inside a function)`` for every import of the package's own modules."""
    found = []
    tree = tree_of(path)
    functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    nested = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names += [node.module] if node.module != "hybridtensor" else []
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            path = PACKAGE.parent / name.replace(".", "/")
            if path.is_relative_to(PACKAGE) and (path.with_suffix(".py").exists() or path.is_dir()):
                found.append((name, id(node) in nested))
    return found


def of_every_module(check):
    """Make one test of what is checked module by module."""

    def test():
        for module in MODULES:
            check(module)

    return test


def place_in_subclasses(parts):
    """Where a module is in the order of its room, and of the room in it."""
    orders = zip((SUBCLASS_LAYERS, OPERATOR_LAYERS), parts[1:], strict=False)
    return tuple(order.index(part) for order, part in orders)


@of_every_module
def test_imports_point_one_way(module):
    parts = module.parts[1:]
    if parts == ("__init__",):
        return
    own = LAYERS.index(parts[0])
    for name, _ in imports((PACKAGE.parent / module).with_suffix(".py")):
        target = name.split(".")[1:]
        if not target:
            raise AssertionError(f"{module} imports the package itself")
        assert LAYERS.index(target[0]) <= own, f"{module} imports {name}"
        if parts[0] == target[0] == "subclasses" and parts[-1] != "__init__" and len(target) > 1:
            assert place_in_subclasses(target) < place_in_subclasses(parts), f"{module} imports {name}"


def test_the_design_lists_packages_in_this_order():
    text = (PACKAGE.parent / "docs" / "design.md").read_text()
    listed = re.findall(r"`(\w+)`", text.split("packages to its left:")[1].split("`tests/")[0])
    assert listed == [layer for layer in LAYERS if layer in listed]
    assert {path.parts[1] for path in MODULES if len(path.parts) > 2} <= set(listed)


@of_every_module
def test_own_imports_are_at_the_top_except_kernels(module):
    for name, nested in imports((PACKAGE.parent / module).with_suffix(".py")):
        assert not nested or name.startswith("hybridtensor.kernels"), f"{module} imports {name} inside a function"


@of_every_module
def test_the_core_imports_only_torch_and_torchao(module):
    allowed = {"hybridtensor", "torch", "torchao", *sys.stdlib_module_names}
    if module.parts[1] == "testing":
        allowed |= {"numpy", "ml_dtypes"}
    if module.parts[1] == "kernels":
        allowed |= {"triton"}
    if module.parts[1] in ("inference", "commands", "untrusted"):
        allowed |= {"safetensors", "transformers", "compressed_tensors"}
    in_framework = module.parts[1] == "integrations"
    if in_framework:  # each of these is imported by who uses its framework
        allowed |= {module.parts[-1], *(["safetensors"] if module.parts[-1] == "transformers" else [])}
    if module.parts[-1] == "numpy_values":
        allowed |= {"numpy"}
    tree = tree_of((PACKAGE.parent / module).with_suffix(".py"))
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            assert name.split(".")[0] in allowed | {"rich"}, f"{module} imports {name}"
            if (
                name.startswith(("rich", "safetensors", "transformers", "compressed_tensors", "numpy"))
                and module.parts[1] != "testing"
                and not in_framework
            ):
                assert node not in tree.body, f"{module} imports {name} when it is itself imported"
            assert "torchao.prototype" not in name


# Codes of a kernel's branch: that of its ``else``
OTHERWISE = {"kernels/numbers.py: FP16", "kernels/dequantize.py: FP32"}
# Called by name: by frameworks, and by the code that Inductor generates
BY_NAME = ("integrations", "ops/graph_calls.py: call_of")


def test_no_name_of_a_module_is_unused():
    """Read in its module, imported, an attribute, public, or registered by a decorator."""
    trees = {path: tree_of(path) for path in sorted(PACKAGE.rglob("*.py"))}
    elsewhere = set().union(*map(taken_from_elsewhere, trees.values()))
    unused = []
    for path, tree in trees.items():
        known = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        known |= {e.value for node in tree.body if assigned(node) == ["__all__"] for e in node.value.elts}
        names = [name for node in tree.body for name in assigned(node) if name not in known | elsewhere]
        unused += [(path.relative_to(PACKAGE), name) for name in names if not name.startswith("__")]
    words = re.compile(rf"\b({'|'.join(name for _, name in unused)})\b")
    tests = [path.read_text() for path in Path(__file__).parent.rglob("*.py")]
    by_tests = set().union(*(taken_from_elsewhere(ast.parse(text)) for text in tests if words.search(text)))
    places = [f"{path}: {name}" for path, name in unused if name not in by_tests]
    assert not [place for place in places if not place.startswith(BY_NAME) and place not in OTHERWISE]


def taken_from_elsewhere(tree):
    """Return the names that a module imports, or takes as attributes."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.ImportFrom, ast.Attribute))]
    return {
        name
        for node in nodes
        for name in ([node.attr] if isinstance(node, ast.Attribute) else [alias.name for alias in node.names])
    }


def assigned(node):
    """Return the names that a statement gives, but for those of functions and classes that a decorator takes."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [] if node.decorator_list else [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [n.id for t in targets if t for n in ast.walk(t) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]


@of_every_module
def test_no_check_vanishes_under_python_o(module):
    tree = tree_of((PACKAGE.parent / module).with_suffix(".py"))
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Assert)], module
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "__debug__"], module


def python(program, *options):
    return subprocess.run(
        [sys.executable, "-W", "error", *options, "-c", program], capture_output=True, text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip


BLOCKED = """
import importlib.abc, sys
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        heavy = ("triton", "rich", "safetensors", "numpy.f2py", "matplotlib", "ml_dtypes",
                 "torchao.prototype.mx_formats",
                 "torchao.prototype.moe_training", "torchao.prototype.blockwise_fp8_training")
        if any(name == h or name.startswith(h + ".") for h in heavy):
            raise ImportError(f"blocked: {name}")
sys.meta_path.insert(0, Block())
"""


def test_what_is_listed_is_what_is_public():
    assert dir(hybridtensor) == sorted(hybridtensor.__all__)


def test_importing_and_training_are_silent_and_need_neither_triton_nor_rich_nor_cuda_nor_frameworks():
    program = """
import torch, hybridtensor as ht
assert not torch.cuda.is_initialized()
frameworks = {"accelerate", "lightning", "torchtitan", "transformers", "transformer_engine"}
assert not [name for name in sys.modules if name.split(".")[0] in frameworks or "integrations" in name]
assert "hybridtensor.verify" not in sys.modules  # or python -m would warn of it
print("imported")
model = ht.quantize_(torch.nn.Linear(16, 16), "fp8")
model(torch.randn(4, 16)).sum().backward()
assert not ht.explain(model, show=False).skipped
print("trained")
"""
    run = python(BLOCKED + program)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "imported\ntrained\n"
    assert run.stderr == ""


@tiers.long("shows of some errors what the test above says of all; torch is compiled anew for it")
def test_errors_rise_under_python_o_too():
    program = """
import torch, hybridtensor as ht
from torch import nn
linear = ht.quantize_(nn.Linear(16, 8), "fp8")
persistent = ht.quantize_(nn.Linear(16, 8), "fp8", persistent=True)
row = ht.Float8Quantizer().quantize(torch.ones(4, 16), columnwise=False)
cases = {
    TypeError: [
        lambda: linear(torch.zeros(4, 16, dtype=torch.int32)), lambda: ht.quantize_(linear, 3),
        lambda: ht.Float8Quantizer().quantize(torch.zeros(2, 2, dtype=torch.bool)),
        lambda: ht.quantize_(nn.Linear(4, 4), lambda role: None),
    ],
    ValueError: [
        lambda: ht.quantize_(nn.Linear(4, 4), "fp9"), lambda: ht.quantize_(nn.LayerNorm(4), "fp8"),
        lambda: linear(torch.zeros(4, 15)), lambda: torch.mm(torch.ones(4, 4), row),
        lambda: linear(torch.zeros(4, 16, dtype=torch.bfloat16)), lambda: linear(torch.zeros(4, 16, device="meta")),
        lambda: ht.HybridConfig.parse("fp8+dequantized+save_original_input"),
        lambda: ht.Float8Quantizer().quantize(torch.zeros(1, 1, 1, 1, 1)),
    ],
    NotImplementedError: [
        lambda: persistent.weight.abs(), lambda: row.abs(), lambda: row.copy_(torch.ones(4, 16)),
        lambda: persistent.weight.share_memory_(),
    ],
}
for kind, calls in cases.items():
    for i, call in enumerate(calls):
        try:
            with torch.no_grad():
                call()
        except kind as error:
            if type(error) is not kind:
                raise
        else:
            raise SystemExit(f"{kind.__name__} case {i} did not raise")
print("done", __debug__)
"""
    run = python(program, "-O")
    assert run.stdout == "done False\n", run.stderr
