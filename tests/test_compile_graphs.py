"""What is in compiled graphs: one cast for layers that read one input, its faces saved once, and nothing to copy."""

import functools
import gc

import pytest
import torch
from any_layer import ANY_LAYER
from graphs import Graphs
from tiers import in_turn
from torch import nn

import hybridtensor as ht
from hybridtensor.linear.sharing import _of_graphs
from hybridtensor.ops.cast.request import parse_request
from hybridtensor.quantizers.plans import measured_amaxes
from hybridtensor.testing import random_tensor, saved_for_backward

QUANTIZE = torch.ops.hybridtensor.quantize.default


class Siblings(nn.Module):
    """Three layers that read the same input."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, width, bias=False, dtype=torch.bfloat16) for width in (64, 32, 96))

    def forward(self, x):
        return self.q(x), self.k(x), self.v(x)


@functools.cache
def compiled(recipe):
    """Return siblings with a recipe, an input, and the graphs of a compiled step; nobody changes them."""
    torch._dynamo.reset()
    graphs, net, x = Graphs(), ht.quantize_(Siblings(), recipe), random_tensor(128, 64).requires_grad_()
    torch.cat(torch.compile(net, fullgraph=True, backend=graphs.backend())(x), dim=1).sum().backward()
    torch._dynamo.reset()
    return net, x, graphs


def nbytes(tensors):
    return sum(t.numel() * t.itemsize for t in tensors)


@pytest.mark.parametrize("recipe", ANY_LAYER)
def test_siblings_quantize_their_input_once(recipe):
    """Each weight too; only delayed scales belong to a layer, so that three of them make three faces."""
    _, _, graphs = compiled(recipe)
    of_input, of_weights = {
        "bf16": (0, 0),
        "fp8_delayed": (3, 3),
        "high_precision_fwd_mxfp8_bwd": (1, 0),
        "gpt_oss_experts": (0, 3),
    }.get(recipe, (1, 3))
    assert graphs.count("forward", QUANTIZE) == of_input + of_weights  # these make rowwise faces of the weights


def test_amaxes_that_are_recorded_in_backward_are_not_committed():
    """In one more launch per layer; only those of weights that FSDP2 gathered wait for a backward."""
    torch._dynamo.reset()
    graphs, net = Graphs(), ht.quantize_(nn.Sequential(nn.SiLU(), Siblings()), "fp8_delayed")
    x = random_tensor(128, 64).requires_grad_()
    torch.cat(torch.compile(net, fullgraph=True, backend=graphs.backend())(x), dim=1).sum().backward()
    assert graphs.count("backward", torch.ops.hybridtensor.commit.default) == 0
    assert all(layer.quantization_state.amax.all() for layer in (net[1].q, net[1].k, net[1].v))


@pytest.mark.parametrize("recipe", ["fp8", "fp8_block", "mxfp8", "nvfp4"])
def test_siblings_without_gradients_quantize_their_input_once(recipe):
    """Where a compiler takes no equal operations for one."""
    graphs, net = Graphs(), ht.quantize_(Siblings(), recipe)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(net, fullgraph=True, backend=graphs.backend())(2 * random_tensor(128, 64))
    assert graphs.count("forward", QUANTIZE) == 1 + 3  # weights


WRITES = {
    "all": lambda x: x.mul_(3),
    "a slice": lambda x: x[:4].add_(1),
    "a view": lambda x: x.view(-1)[5:9].zero_(),
    "a list": lambda x: torch._foreach_mul_([x], 3),  # neither this nor the next one counts in ``_version``
    "its data": lambda x: x.data.mul_(3),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_siblings_whose_input_is_written_in_between_quantize_it_again(name, grad):
    class Written(Siblings):
        def forward(self, x):
            x = 2 * x
            first = self.q(x)
            with torch.no_grad():
                WRITES[name](x)
            return first, self.k(x), self.v(x)

    graphs, net, x = Graphs(), ht.quantize_(Written(), "fp8"), random_tensor(128, 64).requires_grad_(grad)
    torch._dynamo.reset()
    with torch.set_grad_enabled(grad), ht.share_inputs(False):
        made = torch.compile(net, fullgraph=True, backend=graphs.backend())(x)
        assert all(map(torch.equal, made, net(x)))
    assert graphs.count("forward", QUANTIZE) == 2 + 3


@pytest.mark.parametrize("spec", ["fp8", "mxfp8", "fp8+save_original_input", "fp8+high_precision", "bf16"])
@pytest.mark.parametrize("name", ["a list", "its data"])
def test_an_input_that_is_kept_for_backward_is_not_written_unnoticed(name, spec):
    """Of such writes torch does not know in a graph, which would compute the weight's gradient with what is written."""
    net = ht.quantize_(nn.Linear(64, 64, bias=False).bfloat16(), spec)

    def forward(x, changes):
        x = nn.functional.silu(x)
        y = net(x)
        with torch.no_grad():
            WRITES[name](x if changes else x.clone())
        return y + x

    for changes in (False, True):
        torch._dynamo.reset()
        step = torch.compile(forward, fullgraph=True, backend="aot_eager")
        x = random_tensor(128, 64).requires_grad_()
        if changes:
            with pytest.raises(RuntimeError, match=r"a graph writes \[128, 64\] in torch.bfloat16"):
                step(x, changes)
        else:
            step(x, changes).sum().backward()


def test_siblings_share_nothing_with_another_view_of_the_input():
    class Negated(Siblings):
        def forward(self, x):
            x = 2 * x
            return self.q(x), self.k(torch._neg_view(x))

    net, x = ht.quantize_(Negated(), "fp8"), random_tensor(128, 64).requires_grad_()
    wanted = net.q(2 * x), net.k(-2 * x)
    torch._dynamo.reset()
    for forward in (net, torch.compile(net, fullgraph=True, backend="aot_eager")):
        assert all(map(torch.equal, forward(x), wanted))


@pytest.mark.parametrize("grad", [False, True])
def test_nothing_is_kept_of_what_a_graph_shared(grad):
    torch._dynamo.reset()
    gc.collect()
    before, net = len(_of_graphs), ht.quantize_(Siblings(), "fp8")
    with torch.set_grad_enabled(grad):
        torch.compile(net, fullgraph=True, backend="aot_eager")(random_tensor(128, 64).requires_grad_(grad))
    gc.collect()
    assert len(_of_graphs) == before


def _measured(weight):
    """Return the amaxes of both faces; in eager code casts with powers of two go by what the layer remembers."""
    context = weight.context._replace(state=None) if weight.config.delayed_rules() == {} else weight.context
    return measured_amaxes(weight.config.weight, weight.plain, torch.bfloat16, context)


@pytest.mark.parametrize("recipe", ANY_LAYER)
def test_compiled_siblings_save_the_faces_of_one_eager_layer(recipe):
    """And what weights are scaled by, of which backward makes the columnwise faces; of delayed scales what backward
    records of the input: it measures the weights itself.
    """
    net, x, graphs = compiled(recipe)
    with saved_for_backward() as eager:
        net.q(x)
    of_input = eager.nbytes(without=[net.q.weight]) * (3 if recipe == "fp8_delayed" else 1)
    quantizer = ht.recipes.from_name(recipe).weight
    of_rowwise = getattr(quantizer, "columnwise_source", "") == "rowwise_dequantized"
    amaxes = [_measured(layer.weight)[0 if of_rowwise else 1] for layer in (net.q, net.k, net.v)]
    of_weights = nbytes(amax for amax in amaxes if amax is not None)
    of_amaxes = 3 * 4 * len(net.q.quantization_state.slots) if recipe == "fp8_delayed" else 0
    assert nbytes(graphs.saved(outputs=3)) == of_input + of_weights + of_amaxes


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4", "mxfp8"])
def test_weights_and_states_stay_where_they_are(recipe):
    """CUDA graphs copy every input but those: a copied state would not be the one that ``step_`` advances."""
    net, _, graphs = compiled(recipe)
    inputs = graphs.graphs["forward"].graph.find_nodes(op="placeholder")
    state = net.q.weight.state
    tensors = 1 + (0 if state is None else sum(t is not None for t in state[:3]))
    assert len(graphs.static) == 3 * tensors
    assert len(inputs) == 1 + 3 * tensors


@pytest.mark.parametrize(
    "recipe", ["fp8", "fp8+pow2_scale", "nvfp4_1d_weight", "nvfp4_fwd_mxfp8_bwd", "fp8_rowwise", "mxfp8"]
)
def test_what_has_one_scale_is_measured_by_operations_that_can_be_fused(recipe):
    """So that a compiler measures a tensor where it makes it, if that is all that has to be measured; a weight is
    measured once for both faces.
    """
    net, _, graphs = compiled(recipe)
    weights = {tuple(parameter.shape) for parameter in net.parameters()}
    for name in ("forward", "backward"):
        casts = [node for node in graphs.graphs[name].graph.nodes if node.target is QUANTIZE]
        made = [node for node in casts if tuple(node.args[0].meta["val"].shape) not in weights]
        assert made
        for node in casts:
            row, column, source, _ = parse_request(node.args[1])
            of_x = row or source, None if source else column
            amaxes = dict(zip(of_x, (*node.args[6:8], None, None)[:2], strict=True))
            amaxes.pop(None, None)
            whole = {cast for cast in amaxes if cast.amax_per == "tensor"}
            if node in made:
                plain = not any(cast.format.hadamard or cast.amax_per == "row" for cast in amaxes)
                expected = whole if plain else set()
            else:
                expected = {cast for cast in amaxes if cast.amax_per is not None}
            assert {cast for cast, amax in amaxes.items() if amax is not None} == expected
    assert graphs.count("forward", torch.ops.hybridtensor.measure.default) == (0 if recipe == "mxfp8" else 3)
    assert not graphs.count("backward", torch.ops.hybridtensor.measure.default)
    assert bool(graphs.count("forward", torch.ops.aten.amax.default)) == (
        recipe in ("fp8", "fp8+pow2_scale", "nvfp4_fwd_mxfp8_bwd")
    )


@pytest.mark.parametrize("rows", [1, 2])
def test_a_single_row_is_measured_when_it_is_stored(rows):
    """A compiler would measure it before it is rounded; of several it stores their amaxes, rounded as they are."""
    torch._dynamo.reset()
    graphs, net = Graphs(), ht.quantize_(Siblings(), "fp8")
    with torch.no_grad():
        torch.compile(net, fullgraph=True, backend=graphs.backend())(random_tensor(rows, 64))
    assert bool(graphs.count("forward", torch.ops.aten.amax.default)) == (rows > 1)


@pytest.mark.parametrize(
    ("recipe", "edge"),
    in_turn(["fp8", "fp8+pow2_scale", "nvfp4_fwd_mxfp8_bwd"], ["normal", "nan", "inf", "zeros", "nothing"]),
)
def test_measuring_in_the_graph_changes_no_bit(recipe, edge, device):
    torch._dynamo.reset()
    net = ht.quantize_(Siblings(), recipe).to(device)
    x = random_tensor(0 if edge == "nothing" else 128, 64, device=device)
    if edge == "zeros":
        x.zero_()
    elif edge in ("nan", "inf"):
        x[3, 5], x[77] = float(edge), -float(edge)
    eager = net(x)
    fast = torch.compile(net, fullgraph=True, backend="aot_eager")(x)
    assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(eager, fast, strict=True))


def test_a_region_of_a_layer_runs_where_it_occurs_once():
    """It becomes a part of its graph. Of equal ones, of persistent weights, and of any before torch 2.13, torch says
    that it has no rule."""
    torch._dynamo.reset()
    region = torch.compiler.nested_compile_region(lambda layer, x: layer(x))

    def compiled(x, *layers):
        run = functools.partial(functools.reduce, lambda x, layer: region(layer, x))
        return torch.compile(run, fullgraph=True, backend="aot_eager")(layers, x)

    x = random_tensor(32, 64, dtype=torch.float32).requires_grad_()
    net = ht.quantize_(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "fp8")
    if torch.__version__ >= "2.13":
        assert torch.equal(compiled(x, net[0]), net[0](x))
    with pytest.raises(Exception, match=r"no rule registered for HOP invoke_subgraph|Expected FakeTensor"):
        compiled(x, *net)
    with pytest.raises(Exception, match="Expected FakeTensor"):
        compiled(x, *ht.quantize_(nn.Sequential(nn.Linear(64, 64)), "fp8", persistent=True))
