"""Inputs that backward has anyway are quantized there. Oracle: eager layers, which quantize their inputs in forward."""

import copy
import functools
import weakref

import pytest
import torch
import torch.nn.functional as F
from graphs import Graphs
from tiers import long
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import hybridtensor as ht
from hybridtensor.linear import SavedInput
from hybridtensor.ops.cast.request import parse_request
from hybridtensor.subclasses.sharded_face import SharedFace
from hybridtensor.testing import random_tensor, saved_for_backward

QUANTIZE = torch.ops.hybridtensor.quantize.default
TOKENS, SIZE = 128, 64
RECIPES = ["fp8", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4"]


class Normed(nn.Module):
    """A norm, and layers that read what it returns."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(SIZE)
        self.q, self.k = (nn.Linear(SIZE, width, bias=False) for width in (SIZE, 3 * SIZE))

    def forward(self, x):
        x = self.norm(x)
        return torch.cat([self.q(x), self.k(x)], dim=-1)


class After(nn.Module):
    """A layer that reads what a function makes of its input, and of a product."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.first, self.second = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(2))

    def forward(self, x):
        return self.second(self.function(self.first(x), x))


def attention(y, x):
    heads = (t.view(2, -1, 2, SIZE // 2).transpose(1, 2) for t in (y, x, x))
    return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(-2).view(-1, SIZE)


HAD = {
    "gelu": lambda y, x: F.gelu(y),
    "gated": lambda y, x: F.silu(y) * x,
    "masked activation": lambda y, x: F.silu(y) * (x > 0),
    "power": lambda y, x: y**2,
    "half of a norm": lambda y, x: 0.5 * F.rms_norm(y, (SIZE,)),
    "attention": attention,
}
NOT_HAD = {
    "product": lambda y, x: y,
    "sum": lambda y, x: y + x,
    "multiple": lambda y, x: 2 * y,
    "masked": lambda y, x: y * (x.detach() > 0),
    "one of two": lambda y, x: torch.where(x.detach() > 0, y, x),
    "negative": lambda y, x: -y,
    "rows": lambda y, x: y.index_select(0, torch.arange(len(y)).flip(0)),
    "norm of what has no gradient": lambda y, x: F.rms_norm(x.detach(), (SIZE,)) + 0 * y,
}


def gradients(call, module, x):
    """Return the output and all gradients of one step."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    out = call(x)
    out.backward(torch.ones_like(out))
    return [out.detach(), x.grad, *(parameter.grad.clone() for parameter in module.parameters())]


def traced(module, x):
    """Return what a compiled step gives, and its graphs."""
    torch._dynamo.reset()
    graphs = Graphs()
    found = gradients(torch.compile(module, fullgraph=True, backend=graphs.backend()), module, x)
    torch._dynamo.reset()
    return found, graphs


def assert_same_bits(made, expected):
    assert len(made) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))


def converted(module, recipe):
    torch.manual_seed(0)
    return ht.quantize_(module.bfloat16(), recipe)


def faces_saved(graphs):
    """Return how many 8-bit copies of an input are saved."""
    saved = [t for t in graphs.saved(outputs=1) if t.dtype is not torch.bool]
    return sum(t.numel() == TOKENS * SIZE and t.itemsize == 1 for t in saved)


def copies_saved(graphs):
    """Return how many tensors of the size of an input are saved in bf16."""
    return sum(t.numel() == TOKENS * SIZE and t.dtype == torch.bfloat16 for t in graphs.saved(outputs=1))


def columnwise_casts(graphs):
    """Return how many casts of the tokens are in backward that make only the columnwise face."""
    casts = graphs.graphs["backward"].graph.find_nodes(op="call_function", target=QUANTIZE)
    tokens = [cast for cast in casts if cast.args[0].meta["val"].shape == (TOKENS, SIZE)]
    return sum(parse_request(cast.args[1]).row is None for cast in tokens)


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_a_norm_returned_is_made_again(recipe):
    """Of which layers without scales of their own make one columnwise face together."""
    net, x = converted(Normed(), recipe), random_tensor(TOKENS, SIZE)
    found, graphs = traced(net, x)
    assert_same_bits(found, gradients(net, net, x))
    assert faces_saved(graphs) == 0
    assert copies_saved(graphs) == 1  # the norm's input
    assert columnwise_casts(graphs) == (2 if recipe == "fp8_delayed" else 1)


class Viewed(Normed):
    """Each layer has a view of its own, as parts of DTensors are."""

    def forward(self, x):
        x = self.norm(x)
        return torch.cat([self.q(x.view_as(x)), self.k(x.view_as(x))], dim=-1)


def test_views_of_one_input_share_a_cast():
    net, x = converted(Viewed(), "fp8"), random_tensor(TOKENS, SIZE)
    found, graphs = traced(net, x)
    assert_same_bits(found, gradients(net, net, x))
    assert columnwise_casts(graphs) == 1


class Halves(Normed):
    """Two layers read the two halves of one tensor: views of one place and of another."""

    def forward(self, x):
        x = self.norm(x)
        return torch.cat([self.q(x[: TOKENS // 2]), self.k(x[TOKENS // 2 :])], dim=-1)


def test_other_elements_of_one_tensor_are_cast_apart():
    net, x = converted(Halves(), "fp8+save_original_input"), random_tensor(TOKENS, SIZE)
    found, _ = traced(net, x)
    assert_same_bits(found, gradients(net, net, x))


@pytest.mark.parametrize("function", HAD)
def test_what_backward_has_is_not_saved_again(function):
    """Neither it nor its face: backward needs the product that it was made of, but for attention, which keeps both."""
    net, x = converted(After(HAD[function]), "fp8"), random_tensor(TOKENS, SIZE)
    found, graphs = traced(net, x)
    assert_same_bits(found, gradients(net, net, x))
    assert faces_saved(graphs) == 1  # of ``x``
    _, plain = traced(After(HAD[function]).bfloat16(), x)
    assert copies_saved(graphs) <= copies_saved(plain)


@pytest.mark.parametrize("function", NOT_HAD)
def test_of_what_backward_does_not_have_the_face_is_saved(function):
    net, x = converted(After(NOT_HAD[function]), "fp8"), random_tensor(TOKENS, SIZE)
    found, graphs = traced(net, x)
    assert_same_bits(found, gradients(net, net, x))
    assert faces_saved(graphs) == 2
    assert copies_saved(graphs) == 0
    _, kept = traced(converted(After(NOT_HAD[function]), "fp8+save_original_input"), x)
    _, plain = traced(After(NOT_HAD[function]).bfloat16(), x)
    assert copies_saved(kept) <= copies_saved(plain)


def test_faces_that_are_to_be_kept_are():
    net, x = converted(After(HAD["gelu"]), "fp8+keep_faces"), random_tensor(TOKENS, SIZE)
    found, graphs = traced(net, x)
    assert_same_bits(found, gradients(net, net, x))
    assert faces_saved(graphs) == 2
    out = net.second(attention(net.first(x), x))
    assert not isinstance(out.grad_fn.products.input, SavedInput)


@pytest.mark.parametrize("recipe", ["fp8+dequantized", "fp8+high_precision", "nvfp4/bf16/nvfp4"])
def test_recipes_that_make_no_face_of_the_input_itself_save_what_they_did(recipe):
    net, x = converted(After(HAD["gelu"]), recipe), random_tensor(TOKENS, SIZE)
    found, _ = traced(net, x)
    assert_same_bits(found, gradients(net, net, x))


def test_random_rounding_draws_in_forward():
    rounded = ht.NVFP4Quantizer(rounding="stochastic")
    net = converted(Normed(), ht.HybridConfig(input=rounded, weight=ht.NVFP4Quantizer(), grad_output=rounded))
    found, graphs = traced(net, random_tensor(TOKENS, SIZE))
    assert columnwise_casts(graphs) == 0
    assert all(x.isfinite().all() for x in found)


class Centered(nn.Module):
    """A layer that reads what is made of its input and of a buffer, which is written then."""

    def __init__(self, sign):
        super().__init__()
        self.sign, self.layer = sign, nn.Linear(SIZE, SIZE, bias=False)
        self.register_buffer("seen", torch.ones(SIZE))

    def forward(self, x):
        made = F.silu(x + self.sign * self.seen)
        with torch.no_grad():
            self.seen.lerp_(x.mean(0), 0.9)
        return self.layer(made)


@pytest.mark.parametrize("sign", [1, -1])
def test_what_is_made_of_a_buffer_is_not_made_again(sign):
    """A compiler would make it of what the graph has written by then. The input's own gradient is torch's matter."""
    net, x = converted(Centered(sign), "fp8"), random_tensor(TOKENS, SIZE)
    twin = copy.deepcopy(net)
    torch._dynamo.reset()
    found = gradients(torch.compile(net, fullgraph=True, backend="aot_eager"), net, x)
    expected = gradients(twin, twin, x)
    assert_same_bits([found[0], found[2]], [expected[0], expected[2]])


class Positions(nn.Module):
    """A residual stream that begins with a buffer."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Normed() for _ in range(3))
        self.outs = nn.ModuleList(nn.Linear(4 * SIZE, SIZE, bias=False) for _ in range(3))
        self.register_buffer("positions", torch.ones(TOKENS, SIZE))

    def forward(self, x):
        x = x + self.positions
        for block, out in zip(self.blocks, self.outs, strict=True):
            x = x + out(block(x))
        return x


def test_a_residual_stream_ends_what_is_made_of_a_buffer():
    """Of three norms one reads the buffer itself: its input is not a sum of two results."""
    net, x = converted(Positions(), "fp8"), random_tensor(TOKENS, SIZE)
    found, graphs = traced(net, x)
    assert_same_bits(found, gradients(net, net, x))
    assert faces_saved(graphs) == 1


class Written(Normed):
    """The input of both layers is written in between."""

    def forward(self, x):
        x = self.norm(x)
        q = self.q(x)
        return torch.cat([q, self.k(x.mul_(2))], dim=-1)


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_a_write_before_backward_raises_as_of_plain_layers(recipe):
    net = converted(Written(), recipe)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        traced(net, random_tensor(TOKENS, SIZE))


def test_state_that_changes_before_backward_raises():
    net, x = converted(Normed(), "fp8_delayed"), random_tensor(TOKENS, SIZE).requires_grad_()
    torch._dynamo.reset()
    out = torch.compile(net, fullgraph=True, backend=Graphs().backend())(x)
    ht.step_(net)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    torch._dynamo.reset()


@pytest.mark.parametrize("then", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_a_checkpointed_region_is_done_as_its_policy_says(then):
    """Its casts make both faces, when it is done again; a policy that saves the activation is not overruled."""
    net, x = converted(After(HAD["gelu"]), "fp8"), random_tensor(TOKENS, SIZE)

    def policy(context, op, *args, **kwargs):
        return then if op is torch.ops.aten.gelu.default else CheckpointPolicy.PREFER_RECOMPUTE

    def call(x):
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(net, x, use_reentrant=False, context_fn=contexts)

    torch._dynamo.reset()
    graphs = Graphs()
    found = gradients(torch.compile(call, fullgraph=True, backend=graphs.backend()), net, x)
    torch._dynamo.reset()
    assert_same_bits(found, gradients(net, net, x))
    assert columnwise_casts(graphs) == 0
    if then is CheckpointPolicy.MUST_SAVE:
        assert not graphs.count("backward", torch.ops.aten.gelu.default)


def of_layer(out):
    """Return the operand of the input that a layer's output remembers, and what it saved."""
    products = out.grad_fn.products
    return products.input, out.grad_fn.saved_tensors[: products.num_saved]


@pytest.mark.parametrize("recipe", RECIPES)
def test_eager_layers_keep_what_attention_returned(recipe, device):
    """The same memory that attention keeps; delayed scales may be others in backward."""
    net = converted(After(attention), recipe).to(device)
    x = random_tensor(TOKENS, SIZE, device=device).requires_grad_()
    mixed = attention(net.first(x), x)
    out = net.second(mixed)
    operand, saved = of_layer(out)
    if recipe == "fp8_delayed":
        assert not isinstance(operand, SavedInput)
    else:
        assert [t.data_ptr() for t in saved] == [mixed.data_ptr()]
    out.backward(torch.ones_like(out))
    kept = [x.grad, *(layer.weight.grad for layer in (net.first, net.second))]
    x.grad, net.first.weight.grad, net.second.weight.grad = None, None, None
    mixed = attention(net.first(x), x)
    out = net.second(mixed * 1)  # no longer attention's
    assert not isinstance(of_layer(out)[0], SavedInput)
    out.backward(torch.ones_like(out))
    assert_same_bits(kept, [x.grad, *(layer.weight.grad for layer in (net.first, net.second))])


def test_where_hooks_take_what_is_saved_the_face_is():
    net, x = converted(After(attention), "fp8"), random_tensor(TOKENS, SIZE).requires_grad_()
    with saved_for_backward():
        out = net.second(attention(net.first(x), x))
    assert not isinstance(out.grad_fn.products.input, SavedInput)


def test_eager_siblings_make_one_columnwise_face_in_backward(monkeypatch):
    made, net = [], converted(Normed(), "fp8+save_original_input")
    original = ht.Float8Quantizer.faces

    def counted(self, x, *, context, **how):
        if context.role == "input" and how["columnwise"]:
            made.append(how["rowwise"])
        return original(self, x, context=context, **how)

    monkeypatch.setattr(ht.Float8Quantizer, "faces", counted)
    x = random_tensor(TOKENS, SIZE)
    once = gradients(net, net, x)
    assert made == [False]
    with ht.share_inputs(False):
        assert_same_bits(once, gradients(net, net, x))
    assert made == [False] * 3


def test_a_face_that_others_will_not_ask_for_goes_with_backward(monkeypatch):
    """Of two siblings only one is used; the loss, and so the graph, lives on."""
    faces, net = [], converted(Normed(), "fp8+save_original_input")
    original = SharedFace.take
    monkeypatch.setattr(SharedFace, "take", lambda self, make: faces.append(original(self, make)) or faces[-1])
    x = net.norm(random_tensor(TOKENS, SIZE).requires_grad_())
    net.register_forward_pre_hook(lambda *_: None)
    monkeypatch.setattr(Normed, "forward", lambda self, x: (self.q(x), self.k(x)))
    used, other = net(x)
    loss = used.sum()
    loss.backward()
    face = weakref.ref(faces.pop().qdata)
    assert other.grad_fn.products.input._sharing.layers == 2
    assert face() is None


def test_only_some_ask_in_each_of_several_backwards():
    net, x = converted(Normed(), "fp8+save_original_input"), random_tensor(TOKENS, SIZE)
    whole = gradients(net, net, x)
    net.zero_grad()
    leaf = x.clone().requires_grad_()
    q, k = net(leaf).split([SIZE, 3 * SIZE], dim=-1)
    q.sum().backward(retain_graph=True)
    q.sum().backward(retain_graph=True)
    net.q.weight.grad = None
    q.sum().backward(retain_graph=True)
    k.sum().backward()
    assert torch.equal(net.q.weight.grad, whole[3])
    assert torch.equal(net.k.weight.grad, whole[4])


def test_what_autocast_made_is_a_copy_of_what_attention_keeps():
    net, x = converted(After(attention), "fp8"), random_tensor(TOKENS, SIZE).float().requires_grad_()
    mixed = attention(x, x)
    with torch.autocast("cpu", torch.bfloat16):
        out = net.second(mixed)
    assert not isinstance(out.grad_fn.products.input, SavedInput)


def test_a_frozen_sibling_shares_the_cast_of_forward(monkeypatch):
    made, net = [], converted(Normed(), "fp8+save_original_input")
    net.k.weight.requires_grad_(False)
    original = ht.Float8Quantizer.faces

    def counted(self, x, *, context, **how):
        if context.role == "input" and how["rowwise"]:
            made.append(x.shape)
        return original(self, x, context=context, **how)

    monkeypatch.setattr(ht.Float8Quantizer, "faces", counted)
    net(random_tensor(TOKENS, SIZE).requires_grad_()).sum().backward()
    assert len(made) == 1


def test_a_retained_graph_makes_the_face_again():
    net, x = converted(Normed(), "fp8+save_original_input"), random_tensor(TOKENS, SIZE).requires_grad_()
    out = net(x)
    out.sum().backward(retain_graph=True)
    first = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    out.sum().backward()
    assert_same_bits(first, [parameter.grad for parameter in net.parameters()])


@long("Inductor compiles three steps")
@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="Inductor's emulate_precision_casts leaves roundings out before torch 2.13"
)
def test_only_roundings_that_inductor_skips_differ():
    """Of an activation of a sum, which forward does not round in between; oracle: faces that were kept."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(3))

        def forward(self, x):
            return self.third(F.gelu(self.first(x) + self.second(x))).float().sin()

    def gradient(recipe):
        net, x = converted(Sum(), recipe), random_tensor(TOKENS, SIZE)
        torch._dynamo.reset()
        return gradients(torch.compile(net, fullgraph=True), net, x)[-1]

    kept, again = gradient("fp8+keep_faces"), gradient("fp8")
    assert not torch.equal(again, kept)
    assert (again - kept).norm() <= 2**-8 * kept.norm()
    with torch._inductor.config.patch(emulate_precision_casts=True):
        assert torch.equal(gradient("fp8"), gradient("fp8+keep_faces"))
    torch._dynamo.reset()
