"""What blocks save travels to the host and back: how many bytes, how often, when it is given back; no bit changes."""

import contextlib
import copy
import functools
import gc
import weakref

import pytest
import torch
from tiers import covered
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import hybridtensor as ht
from hybridtensor import offload
from hybridtensor.offload import offload_activations
from hybridtensor.ops import zeros
from hybridtensor.testing import random_tensor

RECIPES = ["bf16", "fp8", "fp8_block", "mxfp8", "nvfp4", "fp8_delayed", "fp8+dequantized"]
TOKENS, WIDTH, BLOCKS = 128, 128, 4


class Block(nn.Module):
    """Three siblings that read one input; what they save is all that it saves."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        return self.q(x) + self.k(x) + self.v(x)


class Gated(nn.Module):
    """Views, an output that is saved, a buffer, a bias."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5, dtype=torch.bfloat16))

    def forward(self, x):
        gate, up = self.up(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(gate.sigmoid() * up * self.scale)


def make(recipe, block=Gated, device="cpu", persistent=False):
    torch.manual_seed(0)
    model = nn.Sequential(*(block() for _ in range(BLOCKS))).to(device, torch.bfloat16)
    return ht.quantize_(model, recipe, persistent=persistent) if recipe else model


def step(model, device="cpu", retain=False, **options):
    """Return output and gradients, with offloading where there are options."""
    x = random_tensor(TOKENS, WIDTH, device=device).requires_grad_()
    traffic = None
    if options:
        with offload_activations(model, **options) as traffic:
            y = model(x.view_as(x))  # what autograd has recorded, as in the middle of a model
    else:
        y = model(x.view_as(x))
    for again in [True, False] if retain else [False]:
        y.backward(random_tensor(TOKENS, WIDTH, device=device, seed=1), retain_graph=again)
    return [y.detach(), x.grad, *[p.grad for p in model.parameters()]], traffic


@pytest.mark.parametrize(("recipe", "keep_last", "retain"), covered(RECIPES, [0, 1, 9], [False, True]), ids=str)
def test_no_bit_changes(recipe, keep_last, retain, device):
    model = make(recipe, device=device)
    expected, _ = step(copy.deepcopy(model), device, retain)
    got, traffic = step(copy.deepcopy(model), device, retain, keep_last=keep_last, min_bytes=0)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert (traffic.to_host > 0) == (keep_last < BLOCKS)
    assert traffic.to_device >= traffic.to_host


@pytest.mark.parametrize("persistent", [False, True], ids=["master", "persistent"])
def test_low_precision_bytes_travel_once(persistent, device):
    """Siblings save one face of their input, and weights none: its bytes, and the bytes of its scales."""
    values, moved = TOKENS * WIDTH, {}
    for recipe in (None, "fp8", "fp8_rowwise", "fp8_delayed", "mxfp8"):
        model = make(recipe, Block, device, persistent and recipe is not None)
        _, traffic = step(model, device, keep_last=0, min_bytes=0)
        assert traffic.to_host == traffic.to_device
        moved[recipe] = traffic.to_host
    assert moved[None] == BLOCKS * 2 * values
    assert moved["fp8"] == BLOCKS * (values + 4)
    assert moved["fp8_delayed"] == moved["fp8"]  # as long as they read the same inputs they have one scale
    assert moved["fp8_rowwise"] == BLOCKS * (values + 4 * WIDTH)
    assert moved["mxfp8"] == BLOCKS * (values + values // 32)


@pytest.mark.parametrize("by_name", [False, True])
def test_blocks_without_parameters_offload_what_is_where_their_inputs_are(by_name, device):
    class Gate(nn.Module):
        def forward(self, x):
            return x * x.sigmoid()

    blocks = [Gate() for _ in range(3)]
    x = random_tensor(TOKENS, WIDTH, device=device).requires_grad_()
    expected = x
    for block in blocks:
        expected = block(expected)
    (grad,) = torch.autograd.grad(expected.sum(), x)
    with offload_activations(blocks, keep_last=1) as traffic:
        out = x
        for block in blocks:
            out = block(x=out) if by_name else block(out)
    out.sum().backward()
    assert torch.equal(x.grad, grad)
    assert traffic.to_host == 2 * 2 * x.nbytes  # of two blocks input and sigmoid


def test_a_tensor_that_all_blocks_save_travels_once(device):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH, device=device))

        def forward(self, x, table):
            return x * self.weight + table.sin() * 0 + self.weight * table

    blocks, table = [Scaled() for _ in range(3)], torch.randn(TOKENS, WIDTH, device=device)
    with offload_activations(blocks, keep_last=0) as traffic:
        x = table
        for block in blocks:
            x = block(x, table)
    x.sum().backward()
    assert traffic.to_host == (1 + 2) * table.nbytes  # the table, which is the first input too, and two inputs


def test_nothing_is_left_allocated(monkeypatch):
    made, sources = [], []
    original = offload._Offload.copy

    def spy(self, memory, source, target):
        copied = original(self, memory, source, target)
        made.append(weakref.ref(copied.untyped_storage()))
        sources.append(weakref.ref(memory))
        return copied

    monkeypatch.setattr(offload._Offload, "copy", spy)
    gc.collect()
    gc.disable()  # no cycle may hold on to memory
    try:
        step(make("fp8"), keep_last=1)
        assert len(made) > 10
        assert not [ref for ref in made + sources if ref() is not None]
        model = make("fp8")
        with offload_activations(model, keep_last=0):
            y = model(random_tensor(TOKENS, WIDTH))
        held = [ref() for ref in sources if ref() is not None]
        assert held
        assert all(memory.source is None and memory.fetched is None for memory in held)  # the device has nothing
        del held, y
        assert not [ref for ref in made + sources if ref() is not None]
    finally:
        gc.enable()


def test_at_most_two_blocks_are_on_the_device(monkeypatch):
    """In forward the block that runs and the one before it, in backward likewise."""
    seen, groups = [], []
    original = offload._Offload.send
    monkeypatch.setattr(
        offload._Offload, "send", lambda self, group, held: (groups.append(group), original(self, group, held), note())
    )

    def note():
        copied = [[m for m in group.alive() if m.host is not None] for group in groups]  # not the weights' own faces
        there = [any(m.source is not None or m.fetched is not None for m in memories) for memories in copied]
        seen.append([number for number, on_device in enumerate(there) if on_device])

    model = make("fp8")
    for block in model:
        block.register_full_backward_pre_hook(lambda *_: note())
    with offload_activations(model, keep_last=0):
        y = model(random_tensor(TOKENS, WIDTH).requires_grad_())
    forward = len(seen)
    assert seen == [[0], [0, 1], [1, 2], [2, 3]]
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert seen[forward:][:3] == [[], [2, 3], [1, 2]]  # a block's is on its way before the block begins
    assert all(len(numbers) <= 2 for numbers in seen[forward:])


def test_a_change_in_place_is_an_error_or_of_no_effect():
    class Changes(nn.Module):
        def __init__(self, after):
            super().__init__()
            self.scale, self.after = nn.Parameter(torch.ones(WIDTH)), after

        def forward(self, x):
            y = (x * self.scale).exp()
            return y.add_(1) if not self.after else y * self.scale

    x = torch.randn(TOKENS, WIDTH)
    block = Changes(after=False)
    with offload_activations([block], keep_last=0):
        y = block(x)
    with pytest.raises(RuntimeError, match="was changed in place before it was copied"):
        y.sum().backward()
    block = Changes(after=True)
    block(x).sum().backward()
    expected, block.scale.grad = block.scale.grad, None
    value = x.clone()
    with offload_activations([block], keep_last=0):
        y = block(value)
    value.zero_()  # was copied
    y.sum().backward()
    assert torch.equal(block.scale.grad, expected)


def test_evaluation_errors_and_checkpoints_leave_no_trace():
    model = make("fp8")
    before = [(len(b._forward_hooks), len(b._forward_pre_hooks)) for b in model]
    with torch.no_grad(), offload_activations(model) as traffic:
        model(random_tensor(TOKENS, WIDTH))
    assert traffic.to_host == 0
    with pytest.raises(RuntimeError, match="normalized_shape"), offload_activations(model):
        model(random_tensor(TOKENS, 64))
    assert [(len(b._forward_hooks), len(b._forward_pre_hooks)) for b in model] == before
    expected, _ = step(copy.deepcopy(model))
    inner = model[0].down.forward
    model[0].down.forward = lambda x: checkpoint(inner, x, use_reentrant=False)
    got, _ = step(model, keep_last=0)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant", "selective"])
def test_inputs_of_checkpoints_inside_of_blocks_travel_and_kept_outputs_do_not(kind):
    options = {"use_reentrant": kind == "reentrant"}
    if kind == "selective":
        keep = functools.partial(
            create_selective_checkpoint_contexts, lambda *args, **kwargs: CheckpointPolicy.MUST_SAVE
        )
        options["context_fn"] = keep
    block = nn.LayerNorm(WIDTH)  # only parameters say on which device what it saves is
    block.forward = lambda x: checkpoint(torch.tanh, x * 2, **options)
    x = random_tensor(TOKENS, WIDTH).requires_grad_()
    with offload_activations([block], keep_last=0) as traffic:
        y = block(x)
    assert traffic.to_host == x.nbytes
    y.backward(torch.ones_like(y))
    assert torch.equal(x.grad, torch.autograd.grad(torch.tanh(x * 2), x, torch.ones_like(x))[0])


@pytest.mark.parametrize("inside", [False, True], ids=["backward after it", "backward inside"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", [None, "bf16", "nvfp4"])
def test_checkpoints_around_blocks_change_no_bit(recipe, reentrant, inside):
    """Their recomputation, where these hooks may be gone, looks for what the first forward gave to the checkpoint."""
    model = make(recipe)
    expected, _ = step(copy.deepcopy(model))
    x = random_tensor(TOKENS, WIDTH).requires_grad_()
    context = contextlib.ExitStack()
    context.enter_context(offload_activations(model))
    y = checkpoint(model[2:], checkpoint(model[:2], x, use_reentrant=reentrant), use_reentrant=reentrant)
    if not inside:
        context.close()
    y.backward(random_tensor(TOKENS, WIDTH, seed=1))
    context.close()
    got = [y.detach(), x.grad, *(p.grad for p in model.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_generic_hooks_change_no_bit(recipe):
    """torch's own, and hooks that hand bytes on."""
    model = make(recipe)
    expected, _ = step(copy.deepcopy(model))
    for hooks in (
        torch.autograd.graph.save_on_cpu(pin_memory=False),
        torch.autograd.graph.saved_tensors_hooks(
            lambda t: (t.dtype, t.contiguous().reshape(-1).view(torch.uint8).clone(), t.shape),
            lambda packed: packed[1].view(packed[0]).reshape(packed[2]),
        ),
    ):
        with hooks:
            got, _ = step(copy.deepcopy(model))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def compiled(model, how):
    """Return what to call instead of the model, and its blocks; Dynamo runs, and what it makes runs eagerly."""
    if how == "the whole":
        return torch.compile(model, backend="aot_eager"), list(model)
    if how == "wrapped":
        blocks = [torch.compile(block, backend="aot_eager") for block in model]
        return nn.Sequential(*blocks), blocks
    for block in model:
        (block if how == "in place" else block.up).compile(backend="aot_eager")
    return model, list(model)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks at it
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo of torch 2.11 does
@pytest.mark.parametrize("how", ["in place", "wrapped", "inside", "the whole"])
def test_compiled_blocks_are_offloaded_too(how, device, monkeypatch):
    """Oracles: the same graphs without offloading, bit for bit, and eager code. Graphs save amaxes, too."""
    model = make("fp8", device=device)
    found = []
    for keep_last in (1, BLOCKS, 1):
        torch._dynamo.reset()
        monkeypatch.setattr(zeros, "_READY", {})  # as in the first step of a process
        mine = copy.deepcopy(model)
        called, blocks = compiled(mine, how)
        x = random_tensor(TOKENS, WIDTH, device=device).requires_grad_()
        with offload_activations(blocks, keep_last=keep_last, min_bytes=0) as traffic:
            y = called(x.view_as(x))
        sent = traffic.to_host
        y.backward(random_tensor(TOKENS, WIDTH, device=device, seed=1))
        found.append([y.detach(), x.grad, *[p.grad for p in mine.parameters()]])
        assert sent >= (BLOCKS - keep_last) * TOKENS * WIDTH
        assert traffic.to_device == sent
    assert all(torch.equal(a, b) and torch.equal(b, c) for a, b, c in zip(*found, strict=True))
    expected, _ = step(model, device)  # last: what eager code leaves in the pool of zeros is not like what graphs do
    pairs = zip(found[0], expected, strict=True)
    assert all(torch.allclose(a.float(), b.float(), rtol=2**-5, atol=2**-4) for a, b in pairs)


def test_one_graph_of_what_is_offloaded_is_refused():
    torch._dynamo.reset()
    model = make("fp8")
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    with offload_activations(model), pytest.raises(RuntimeError, match="offload_activations works between compiled"):
        whole(random_tensor(TOKENS, WIDTH))


def test_contexts_follow_each_other_and_are_not_nested():
    model = make("fp8")
    message = "another open context offloads one of these blocks"
    for blocks in (model, [model[0].up], [nn.Sequential(*model)]):
        with offload_activations(model), pytest.raises(RuntimeError, match=message), offload_activations(blocks):
            pass
    with offload_activations(list(model)[:2]), offload_activations(list(model)[2:]):
        pass
    step(model, keep_last=0)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (nn.Linear(2, 2), {}, TypeError, "several blocks are required, got one Linear; put it in a list"),
        (3, {}, TypeError, "a list of blocks is required, got 3; give for example model.blocks"),
        ([3], {}, TypeError, "a module as block is required, got 3; give for example"),
        ([], {}, ValueError, "blocks is empty; pass at least one module"),
        ([nn.Sequential(nn.Linear(2, 2))] * 2, {}, ValueError, "a block is given twice, or is inside of another one"),
        ([nn.Linear(2, 2)], {"keep_last": -1}, ValueError, "0 or more is required as keep_last, got -1"),
        ([nn.Linear(2, 2)], {"min_bytes": 1.5}, TypeError, "an integer as min_bytes is required, got 1.5"),
    ],
)
def test_bad_input(arguments, options, error, message):
    with pytest.raises(error, match=message), offload_activations(arguments, **options):
        pass


class Rotated(nn.Module):
    """Saves a conjugate that is not computed before it is read, and its imaginary part."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        z = torch.view_as_complex(self.up(x).unflatten(-1, (-1, 2)))
        conjugate = (z * 1j).conj()
        return torch.view_as_real(z * conjugate).flatten(-2) * conjugate.imag.repeat(1, 2)


def test_conjugates_stay_conjugates():
    torch.manual_seed(0)
    model = nn.Sequential(Rotated(), Rotated())
    x = torch.randn(TOKENS, WIDTH)
    expected = torch.autograd.grad(model(x).sum(), [*model.parameters()])
    with offload_activations(model, keep_last=0):
        loss = model(x).sum()
    found = torch.autograd.grad(loss, [*model.parameters()])
    assert all(map(torch.equal, found, expected))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_stay_on_the_device():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    x = torch.nested.nested_tensor([torch.randn(33, 64), torch.randn(20, 64)])
    losses = []
    for blocks in ([], list(model)):
        with offload_activations(blocks, keep_last=0) if blocks else contextlib.nullcontext():
            losses.append(sum(part.square().sum() for part in model(x).unbind()))
    expected, found = (torch.autograd.grad(loss, [*model.parameters()]) for loss in losses)
    assert all(map(torch.equal, found, expected))
