"""``import hybridtensor`` imports little, and the first use of anything imports the whole package.

Each use is the first one of its process.
"""

import importlib
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import hybridtensor as ht
from hybridtensor import lazy
from hybridtensor.former_names import FORMER_NAMES

HEAVY = ("torchao", "torch.distributed.tensor", "hybridtensor.public", "hybridtensor.subclasses", "triton", "rich")
BEGIN = f"""
import hybridtensor as ht
heavy = [name for name in {HEAVY!r} if name in sys.modules]
assert not heavy, heavy
"""
# Of torch, for those that would import it then: most of what they would wait for
OF_TORCH = "import torch.ao.quantization, torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor"
# Everything is registered: the layer is converted, and its products are quantized.
END = """
from hybridtensor.recipes.config import HybridConfig
layer = ht.quantize_(torch.nn.Linear(16, 16), "fp8")
x = torch.randn(4, 16)
assert not torch.equal(layer(x), torch.nn.functional.linear(x, ht.plain_(layer).weight, layer.bias))
"""


@pytest.fixture
def files(tmp_path):
    """Return a folder with files of other processes: pickles, an exported program, a checkpoint, exported weights."""
    layer = ht.quantize_(nn.Linear(16, 16), "fp8_delayed")
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    torch.save(ht.HybridConfig.parse("nvfp4"), tmp_path / "recipe.pt")
    torch.save(ht.quantize_(nn.Linear(16, 16), "nvfp4", persistent=True), tmp_path / "module.pt")
    (tmp_path / "former.pkl").write_bytes(b"chybridtensor.subclasses.kept\nKept\n.")
    program = torch.export.export(ht.quantize_(nn.Linear(16, 16), "fp8"), (torch.zeros(4, 16),))
    torch.export.save(program, tmp_path / "program.pt2")
    ht.distributed.checkpoint.save(tmp_path / "run", 1, {"model": layer})
    ht.export_pretrained(nn.Sequential(layer), tmp_path / "exported")
    return tmp_path


FIRST_USES = {
    "an attribute": "assert callable(ht.check)",
    "all names": "from hybridtensor import *; quantize_; assert dir(ht) == sorted(ht.__all__)",
    "a module": "import hybridtensor.subclasses.master_tensor",
    "a module named like a function": "from hybridtensor.check import check; assert ht.check is check",
    "a module and its spec": """
import hybridtensor.watching.report, importlib.resources
assert type(sys.modules["hybridtensor.watching.report"].__spec__.loader).__name__ == "SourceFileLoader"
assert importlib.resources.files("hybridtensor.watching").joinpath("report.html").is_file()
""",
    "a file of state": "assert torch.load('state.pt', weights_only=True)['weight'] is not None",
    "a file of a recipe": "assert type(torch.load('recipe.pt', weights_only=True)) is ht.HybridConfig",
    "a pickled module": "torch.load('module.pt', weights_only=False)",
    "a former module": "import pickle; assert pickle.load(open('former.pkl', 'rb')).__name__ == 'HighPrecisionValues'",
    "a former module without a package": """
import pickle
assert pickle.loads(b"chybridtensor.config\\nHybridConfig\\n.") is ht.HybridConfig
""",
    "a module's spec": """
import importlib.util, pkgutil
spec = importlib.util.find_spec("hybridtensor.watching")
assert spec.loader.get_code("hybridtensor.watching") is not None
assert pkgutil.get_data("hybridtensor.watching", "report.html")
""",
    "a module run as a program": "import runpy; assert runpy.run_module('hybridtensor.formats')['get_format']",
    "a module that the package does not import": """
import hybridtensor.testing
assert hybridtensor.testing.__spec__.loader is hybridtensor.testing.__loader__
assert type(hybridtensor.testing.__loader__).__name__ == "SourceFileLoader"
""",
    "a reload": """
import importlib
assert callable(importlib.reload(ht).quantize_) and importlib.reload(ht) is ht
assert not hasattr(torch.ops.hybridtensor, "no_operator")
""",
    "an attribute that is set": "ht.check = 1; ht.quantize_; assert ht.check == 1; assert callable(ht.explain)",
    "an exported program": """
import warnings
warnings.simplefilter("ignore")  # torch 2.11 warns of its own buffers
assert torch.export.load("program.pt2").module()(torch.ones(4, 16)).shape == (4, 16)
""",
    "an operator": "torch.ops.hybridtensor.no_operator if hasattr(torch.ops.hybridtensor, 'no_operator') else None",
    "a config of torchao": """
from torchao.core.config import config_from_dict
assert config_from_dict({"_type": "HybridConfig", "_version": 1, "_data": CONFIG}) == ht.HybridConfig.parse("mxfp8")
""",
    "two threads": """
import threading
found = []
def use():
    found.append(ht.quantize_)
threads = [threading.Thread(target=use) for _ in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
assert len(set(found)) == 1 and len(found) == 4
""",
}


LIGHT = f"""
assert not [name for name in {HEAVY!r} if name in sys.modules]
"""
COMMAND = "from hybridtensor.__main__ import main\n"
OTHER_USES = {
    "questions about the module": f"""
import inspect
assert not hasattr(ht, "__wrapped__")
inspect.getmodule(ht); ht.__version__{LIGHT}""",
    "a pickle of the module": f"import pickle; assert pickle.loads(pickle.dumps(ht)) is ht{LIGHT}",
    "the spec of torchao's configs": """
import importlib.util
assert importlib.util.find_spec("torchao.core.config").loader.get_code("torchao.core.config") is not None
""",
    "torchao found by another finder": """
import importlib.machinery, importlib.util
class Finder:
    names = []
    def find_spec(self, name, path=None, target=None):
        self.names.append(name)
        return importlib.machinery.PathFinder.find_spec(name, path)
sys.meta_path.insert(1, Finder())
importlib.util.find_spec("torchao.core.config")
assert "torchao.core.config" in Finder.names
""",
    "recipes": f"{COMMAND}assert main(['recipes']) == 0{LIGHT}",
    "recipes as data": f"{COMMAND}assert main(['recipes', '--json']) == 0{LIGHT}",
    "verify a folder that is not there": f"{COMMAND}assert main(['verify', 'nowhere']) == 2{LIGHT}",
    "verify what was exported": f"{COMMAND}assert main(['verify', 'exported']) == 0{LIGHT}",
    "verify a checkpoint": f"{COMMAND}assert main(['verify', 'run']) == 0; assert 'torchao' not in sys.modules",
    "an import that fails, and again": f"""
class Block:
    def find_spec(self, name, path=None, target=None):
        if name == "torchao":
            raise ImportError("no torchao")
sys.meta_path.insert(0, Block())
for name in ("quantize_", "check"):
    try:
        getattr(ht, name)
    except ImportError as error:
        assert "no torchao" in str(error)
    else:
        raise SystemExit("imported")
from hybridtensor.__main__ import main
assert main(["doctor"]) == 1
del sys.meta_path[0]
{END}""",
}
TORCHAO_FIRST = {
    "torchao first": """
warnings.simplefilter("ignore")
import torchao, hybridtensor
from torchao.core.config import ALLOWED_AO_MODULES
assert "hybridtensor" in ALLOWED_AO_MODULES and "hybridtensor.public" not in sys.modules
"""
}
# They import torchao, or do not
ALONE = {
    *(use for use, program in OTHER_USES.items() if LIGHT not in program),
    "an attribute", "a module", "a file of state", "a config of torchao",
}  # fmt: skip


def test_each_first_use_imports_everything_and_others_little(files):
    """Each use runs in a process forked after ``import hybridtensor``, but for the one before it."""
    from torchao.core.config import config_to_dict

    config = config_to_dict(ht.HybridConfig.parse("mxfp8"))["_data"]
    first = {use: f"CONFIG = {config!r}\n{program}\n{END}" for use, program in FIRST_USES.items()}
    light = {use: program for use, program in OTHER_USES.items() if LIGHT in program}
    alone = {use: program for use, program in {**OTHER_USES, **first}.items() if use in ALONE}
    rest = {use: program for use, program in first.items() if use not in ALONE}
    once = f"sys.pycache_prefix, sys.dont_write_bytecode = {str(files / 'compiled')!r}, False"  # a file is compiled
    stages = [("", TORCHAO_FIRST), (BEGIN, light), (f"{OF_TORCH}; {once}", alone), ("import torchao", rest)]
    assert light.keys() | alone.keys() == OTHER_USES.keys() | ALONE
    forking = f"""
import gc, os, sys, torch, traceback, warnings
gc.disable()  # which looks through all that torch has imported, in each process again
warnings.simplefilter("ignore", DeprecationWarning)  # of forking, which is what this does
warnings.simplefilter("ignore", SyntaxWarning)  # torchao's own
for beginning, uses in {stages!r}:
    exec(beginning)
    for use, program in uses.items():
        sys.stdout.flush()
        if os.fork() == 0:
            failed = ""
            try:
                exec(program, {{**globals()}})
            except BaseException:
                failed = traceback.format_exc()
            open(f"{{use}}.failed", "w").write(failed)
            os._exit(0)
        os.wait()
print("done")
"""
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-W", "error", "-c", forking]
    ran = subprocess.run(command, capture_output=True, text=True, env=env, cwd=files)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("done\n"), ran.stdout
    failures = [
        f"{use}: {failed}" for _, uses in stages for use in uses if (failed := (files / f"{use}.failed").read_text())
    ]
    assert not failures, "\n".join(failures)


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="hybridtensor: no attribute 'quantise_'"):
        ht.quantise_  # noqa: B018


def test_each_allowed_name_is_there_and_each_former_one_is_allowed():
    names = {f"hybridtensor.{module}.{name}" for module, names in lazy.ALLOWED.items() for name in names}
    assert FORMER_NAMES.keys() <= names
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert callable(getattr(importlib.import_module(module), attribute))
    assert names <= torch._weights_only_unpickler._get_user_allowed_globals().keys()
