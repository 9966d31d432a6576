"""What a former version saved loads into this one, and goes on as it would have there, bit for bit.

``tests/data/write_former.py`` says what is in the files, and which version wrote them.
"""

import importlib
import pickle
import pickletools
import runpy
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hybridtensor import HybridConfig
from hybridtensor.distributed import checkpoint
from hybridtensor.distributed.checkpoint.planners import HybridLoadPlanner
from hybridtensor.former_names import FORMER_NAMES

DATA = Path(__file__).parent / "data"
FORMER = SimpleNamespace(**runpy.run_path(str(DATA / "write_former.py")))
KINDS = list(FORMER.RECIPES)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return the folder of the unpacked files."""
    folder = tmp_path_factory.mktemp("former")
    with tarfile.open(DATA / "former.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def check(model, optimizer, files, kind):
    """Compare a step of training with that of the version that wrote the files."""
    expected = torch.load(files / f"{kind}_expected.pt", weights_only=True)
    found = FORMER.trained(model, optimizer)
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


def with_optimizer(model, optimizer, files, kind):
    """Have the optimizer take the state that was pickled with the model."""
    optimizer.load_state_dict(pickle.loads((files / f"{kind}.pickle").read_bytes())[1])
    return model, optimizer


@pytest.mark.parametrize("kind", KINDS)
class TestFormerFiles:
    def test_checkpoint(self, files, kind):
        model, optimizer = FORMER.build(kind)
        assert checkpoint.load(files / kind, {"model": model, "optimizer": optimizer}) == 2
        check(model, optimizer, files, kind)

    @pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process is meant
    def test_checkpoint_through_torchs_loader(self, files, kind):
        model, _ = FORMER.build(kind)
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=files / kind / "step_00000002", planner=HybridLoadPlanner())
        model.load_state_dict(state["model"])
        expected = torch.load(files / f"{kind}_expected.pt", weights_only=True)
        assert torch.equal(model(next(iter(FORMER.batch()))), expected[0])

    @pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
    def test_state_dict(self, files, kind, assign):
        model, optimizer = FORMER.build(kind)
        saved = torch.load(files / f"{kind}_state.pt", weights_only=True)
        model.load_state_dict(saved, assign=assign)
        assert all("quantization_state.scale" not in name for name in model.state_dict())
        if not assign:  # otherwise the optimizer steps what the layer had
            check(*with_optimizer(model, optimizer, files, kind), files, kind)
        else:
            expected = torch.load(files / f"{kind}_expected.pt", weights_only=True)
            assert torch.equal(model(next(iter(FORMER.batch()))), expected[0])

    def test_pickled_module(self, files, kind):
        model = pickle.loads((files / f"{kind}.pickle").read_bytes())[0]
        assert type(model[0].weight.config) is HybridConfig
        expected = torch.load(files / f"{kind}_expected.pt", weights_only=True)
        x, g = FORMER.batch()
        y = model(x.requires_grad_())
        y.backward(g)
        assert torch.equal(y, expected[0])
        assert torch.equal(x.grad, expected[1])


def test_state_dict_among_the_data_of_a_checkpoint(files):
    model, _ = FORMER.build("master")
    state = {"copy": {"of": model.state_dict()}}
    checkpoint.load(files / "master", state)
    saved = torch.load(files / "master_state.pt", weights_only=True)
    assert state["copy"]["of"].keys() == model.state_dict().keys()
    for mine, theirs in zip(state["copy"]["of"].values(), saved.values(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_former_name_is_one_that_the_files_have_or_that_pickles_could_have(files):
    """Every class of this package that the pickles name is found where they look for it."""
    named = set()
    for kind in KINDS:
        strings = []
        for opcode, argument, _ in pickletools.genops((files / f"{kind}.pickle").read_bytes()):
            if isinstance(argument, str):
                strings.append(argument)
            if opcode.name == "STACK_GLOBAL" and strings[-2].startswith("hybridtensor"):
                named.add(".".join(strings[-2:]))
    assert {"hybridtensor.config.HybridConfig", "hybridtensor.state.LayerState"} <= named
    for former in named | FORMER_NAMES.keys():
        module, _, name = former.rpartition(".")
        found = getattr(importlib.import_module(module), name)
        assert FORMER_NAMES.get(former, found) is found


def test_gone_modules_hold_former_names_only():
    names = vars(importlib.import_module("hybridtensor.config"))
    public = [name for name in names if not name.startswith("__")]
    assert sorted(public) == ["HybridConfig", "QuantizerRole"]
