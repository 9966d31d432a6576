"""Programs of ``torch.export``: the model's forward bit for bit, and gradients never quietly missing."""

import copy
import io
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from experts import Experts, Mixture
from tiers import covered, in_turn, long
from torch import nn
from torch._inductor.exc import InductorError
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.export import Dim

import hybridtensor as ht

RECIPES = ["bf16", "fp8", "fp8_delayed", "mxfp8"]
REASON = "linear: an exported program holds only the forward of a converted layer; train the model that was exported"


class Transposed(nn.Linear):
    def forward(self, x):
        return x @ self.weight.t() + self.bias


class Part(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight[:64])


class Of(nn.Module):
    """Tokens through a part of a weight that two views were taken of."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 128)

    def forward(self, x):
        return F.linear(x, self.layer.weight.split(64)[1].t().t())


class TwoWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return x @ (self.a.weight @ self.b.weight)


class Tied(nn.Module):
    """Reads the weight of its layer in an embedding only."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 64), nn.Linear(64, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.embed(x[:, 0].abs().long())


@pytest.fixture
def x(device):
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)


def mlp():
    return nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64, bias=False))


def convert(x, make, recipe, persistent=False):
    torch.manual_seed(0)
    return ht.quantize_(nn.ModuleList([make()]).to(x), recipe, persistent=persistent)[0]


MODELS = [mlp, lambda: Transposed(64, 128), lambda: Part(64, 128), Of, Experts, Mixture]


@pytest.mark.parametrize(
    ("make", "recipe", "persistent", "strict"),
    [
        *covered([*MODELS, TwoWeights], RECIPES, [False], [False, True]),
        *in_turn([*MODELS, Tied], RECIPES[1:], [True], [False, True]),  # the first has no faces
    ],
)
def test_a_program_is_the_model_and_raises_in_backward(x, make, recipe, persistent, strict):
    net = convert(x, make, recipe, persistent)
    ends = torch.tensor([8, 16, 16, 32], dtype=torch.int32, device=x.device)
    inputs = (x, ends) if make is Experts else (x,)
    program = torch.export.export(net, inputs, strict=strict).module()
    out = program(*inputs)
    assert torch.equal(out, net(*inputs))
    with pytest.raises(NotImplementedError, match=REASON):
        out.float().sum().backward()


def test_an_embedding_by_the_weight_of_a_layer_has_its_gradient(x):
    net = convert(x, Tied, "fp8")
    for module in (net, torch.export.export(net, (x,)).module()):
        module(x).sum().backward()
    assert torch.equal(net.embed.weight.grad, module.embed.weight.grad)
    assert net.embed.weight.grad.any()


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_input_that_requires_a_gradient_is_enough(x, recipe, with_gradients):
    net = convert(x, mlp, recipe).requires_grad_(False)
    with torch.set_grad_enabled(with_gradients):
        program = torch.export.export(net, (x,)).module()
    assert not program(x).requires_grad
    trained = x.clone().requires_grad_()
    with torch.no_grad():
        assert not program(trained).requires_grad
    with torch.inference_mode():
        assert torch.equal(program(trained), net(x))
    with pytest.raises(NotImplementedError, match=REASON):
        program(trained).sum().backward()


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_program_runs_and_raises_in_backward(x, recipe, backend):
    net = convert(x, mlp, recipe)
    compiled = torch.compile(torch.export.export(net, (x,)).module(), backend=backend)
    with torch.no_grad():
        assert torch.equal(compiled(x), net(x))
    out = compiled(x)
    assert torch.equal(out, net(x))
    with pytest.raises(NotImplementedError, match=REASON):
        out.sum().backward()


@pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning", "ignore:The given buffer:UserWarning")  # torch's own
@pytest.mark.parametrize(("recipe", "persistent"), [("bf16", False), ("fp8", False), ("fp8", True)])
def test_saved_and_decomposed_programs(x, recipe, persistent):
    net = convert(x, mlp, recipe, persistent)
    program, file = torch.export.export(net, (x,)), io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for other in (torch.export.load(file), program.run_decompositions({})):
        out = other.module()(x)
        assert torch.equal(out, net(x))
        with pytest.raises(NotImplementedError, match=REASON):
            out.sum().backward()


LOADS = """\
import sys
import torch
import hybridtensor.ops
x, expected = torch.load(sys.argv[2])
sys.exit(not torch.equal(torch._inductor.aoti_load_package(sys.argv[1])(x), expected))
"""


@long("AOTInductor compiles for 20 s")
@pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning", "ignore:The given buffer:UserWarning")  # torch's own
@pytest.mark.parametrize("recipe", ["fp8", "mxfp8"])
@pytest.mark.parametrize("persistent", [False, True])
def test_another_process_loads_what_aotinductor_compiled(x, recipe, persistent, tmp_path):
    net = convert(x, mlp, recipe, persistent).requires_grad_(False)
    with torch.no_grad():
        program = torch.export.export(net, (x,))
        if torch.__version__ < "2.12":
            with pytest.raises(InductorError, match=r"hybridtensor\..*: AOTInductor of torch 2\.11.* would crash; use"):
                torch._inductor.aoti_compile_and_package(program)
            return
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "net.pt2"))
        torch.save((x, net(x)), tmp_path / "expected")
    assert subprocess.run([sys.executable, "-c", LOADS, package, str(tmp_path / "expected")]).returncode == 0


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("recipe", ["fp8", "fp8_block", "mxfp8"])
def test_any_number_of_tokens(x, recipe, strict):
    net = convert(x, mlp, recipe)
    shapes = ({0: Dim("tokens", min=2, max=64)},)
    program = torch.export.export(net, (x,), dynamic_shapes=shapes, strict=strict).module()
    for tokens in (32, 17):
        assert torch.equal(program(x[:tokens]), net(x[:tokens]))


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_a_parametrized_layer_is_refused(x, recipe):
    net = convert(x, mlp, recipe)
    nn.utils.parametrizations.weight_norm(net[0])
    message = r"torch\.export: another tensor is at the weight of layer 0\.0, such as"
    with pytest.raises(NotImplementedError, match=message):
        torch.export.export(net, (x,), strict=False)
    plain = ht.plain_(copy.deepcopy(net))
    assert torch.equal(torch.export.export(plain, (x,)).module()(x), plain(x))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch's tracer, about its own trees
def test_stages_that_torch_traces_hold_the_forward_only(x, recipe):
    """``docs/pipeline.md`` says so: they are exported programs, which cannot be moved or trained."""
    model = ht.quantize_(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(x), recipe)
    traced = pipeline(model, (x,), split_spec={"1": SplitPoint.BEGINNING})
    stages = [traced.get_stage_module(index) for index in range(2)]
    y = stages[1](stages[0](x))
    assert torch.equal(y, model(x))
    with pytest.raises(NotImplementedError, match=REASON):
        y.sum().backward()
    with pytest.raises(RuntimeError, match="Couldn't swap"):
        stages[0].to("cpu")
