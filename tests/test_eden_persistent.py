"""Persistent weights whose columnwise face each step makes of the rowwise one, under signs of its own: ``quartet2``.

Oracle: weights in high precision with the same values, bitwise.
"""

import copy
import functools

import loops
import pytest
import torch
from checkpointing import folder
from experts import offsets
from graphs import Graphs
from loops import optimizer_of, same, watched_sample
from saving import through_a_file
from tiers import LONG
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute

import hybridtensor as ht
from hybridtensor.distributed import checkpoint
from hybridtensor.subclasses.structure import flatten

WIDTH, HIDDEN, EXPERTS, TOKENS = 128, 256, 3, 200
ENDS = (5, 130, 200)
RECIPES = ["quartet2", "nvfp4+one_d+eden+rowwise_dequantized_weight"]


class Experts(nn.Module):
    """Experts that are stored ``[E, in, out]``, and others ``[E, out, in]``."""

    def __init__(self):
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 11)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 16)

    def forward(self, x):
        ends = offsets(ENDS)
        hidden = torch._grouped_mm(x, self.up, offs=ends).relu()
        return torch._grouped_mm(hidden, self.down.transpose(-2, -1), offs=ends)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.experts, self.last = nn.Linear(WIDTH, WIDTH), Experts(), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.last(self.experts(self.first(x)))


def model(recipe="quartet2", *, persistent=True):
    torch.manual_seed(0)
    return ht.quantize_(Model(), recipe, persistent=persistent, transposed=["experts.up"])


def weights(made):
    return [p for p in made.parameters() if isinstance(p, (ht.HybridTensor, ht.MasterWeight))]


def tokens(step):
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(step))


COUNT = 3 if LONG else 2
steps = functools.partial(loops.steps, batch=tokens, count=COUNT)


@functools.cache
def trained(recipe="quartet2"):
    """Return what the first steps of a model with persistent weights give; nobody changes it."""
    made = model(recipe)
    return steps(made, optimizer_of(made))


@pytest.mark.parametrize("recipe", RECIPES)
def test_trains_as_weights_in_high_precision(recipe):
    made = model(recipe, persistent=False)
    found = steps(made, optimizer_of(made, persistent=False))
    assert same(found, trained(recipe))
    assert not torch.equal(*found[:: len(found) // COUNT][:2])


def test_autocast_does_not_round_what_the_rowwise_face_holds():
    """Of gradients of inputs, which the columnwise faces are for."""
    found = []
    for persistent in (True, False):
        x, made = tokens(0).requires_grad_(), model(persistent=persistent)
        with torch.autocast("cpu", torch.bfloat16):
            loss = made(x).float().square().mean()
        loss.backward()
        found.append([loss.detach(), x.grad, made.first.bias.grad])
    assert same(*found)


def test_it_is_the_rowwise_face_alone():
    made = model()
    held = {name: [p.rowwise, p.columnwise] for name, p in made.named_parameters() if isinstance(p, ht.HybridTensor)}
    for name, faces in held.items():
        turned = name == "experts.up"
        assert faces[turned].format.name == "nvfp4_max256"
        assert faces[not turned] is None
    assert ht.explain(made, show=False).rows[1].right == "weight.columnwise: nvfp4_eden of rowwise"
    x = tokens(0)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        made.last(x.requires_grad_())
    own = {t.data_ptr() for t in flatten(made.last.weight)[0]}
    assert own <= {t.data_ptr() for t in saved}  # no copy of it


@pytest.mark.parametrize("spec", ["nvfp4+eden", "nvfp4+one_d+eden"])
def test_faces_of_the_master_are_refused(spec):
    with pytest.raises(
        NotImplementedError, match=r"in the columnwise face of a persistent weight .* add .*rowwise_deq"
    ):
        model(spec)
    kept = model("nvfp4")
    with pytest.raises(NotImplementedError, match="made of the rowwise one"):
        ht.set_config_(kept, spec)


def test_other_operands_may_be_under_drawn_signs():
    """Where the weight itself is not."""
    found = [
        steps(m, optimizer_of(m, p)) for p in (False, True) for m in [model("nvfp4/bf16/nvfp4+eden", persistent=p)]
    ]
    assert same(*found)


def test_another_recipe_adds_and_drops_the_face():
    made, wanted = model("nvfp4+one_d+nearest"), model()
    ht.set_config_(made, "quartet2")
    assert [(p.rowwise is None, p.columnwise is None) for p in weights(made)] == [
        (p.rowwise is None, p.columnwise is None) for p in weights(wanted)
    ]
    for mine, theirs in zip(weights(made), weights(wanted), strict=True):
        assert torch.equal(mine.dequantize(), theirs.dequantize())
    ht.set_config_(made, "nvfp4+one_d")
    assert all(p.rowwise is not None and p.columnwise is not None for p in weights(made))
    assert torch.isfinite(torch.stack([g.sum() for g in steps(made, optimizer_of(made), count=1)])).all()


def test_a_write_between_forward_and_backward_is_an_error():
    made, other = model(), model()
    with torch.no_grad():
        for p in weights(other):
            p.mul_(2.0)
    loss = made(tokens(0)).sum()
    with torch.no_grad():
        made.last.weight.copy_(other.last.weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_recomputed_forwards_draw_the_same():
    made = model()
    found = steps(made, optimizer_of(made), run=lambda x: recompute(made, x, use_reentrant=False))
    assert same(found, trained())


@pytest.mark.filterwarnings("ignore")
def test_a_graph_draws_as_eager_code_does():
    torch._dynamo.reset()
    compiled = model()
    run = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    assert same(steps(compiled, optimizer_of(compiled), run=run), trained())
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
def test_a_graph_makes_the_columnwise_face_in_backward():
    """Of the parameter, so that forward saves neither that face nor values of it."""
    torch._dynamo.reset()
    graphs = Graphs()
    layer = ht.quantize_(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)), "quartet2", persistent=True)
    run = torch.compile(layer, fullgraph=True, backend=graphs.backend())
    run(tokens(0).requires_grad_()).sum().backward()
    dequantize = torch.ops.hybridtensor.dequantize.default
    assert (graphs.count("forward", dequantize), graphs.count("backward", dequantize)) == (0, 1)
    saved = {(*t.shape, t.dtype) for t in graphs.saved(outputs=1)}
    assert (WIDTH, WIDTH, torch.float32) not in saved
    assert sum(t.numel() * t.itemsize for t in graphs.saved(outputs=1)) <= 256 * WIDTH * 9 / 16 + 36
    torch._dynamo.reset()


def test_training_goes_on(tmp_path):
    """From state dicts, pickles of them, and checkpoints."""
    made = model()
    optimizer = optimizer_of(made)
    steps(made, optimizer)
    checkpoint.save(tmp_path, COUNT, {"model": made, "optimizer": optimizer})
    saved = copy.deepcopy((made.state_dict(), optimizer.state_dict()))
    loaded = through_a_file(saved)
    expected = steps(made, optimizer, first=COUNT)
    for state in (saved, loaded, None):
        other = model()
        its = optimizer_of(other)
        if state is None:
            checkpoint.load(tmp_path, {"model": other, "optimizer": its})
        else:
            other.load_state_dict(state[0])
            its.load_state_dict(state[1])
        assert same(steps(other, its, first=COUNT), expected)


def test_a_checkpoint_may_leave_out_the_stored_face(tmp_path):
    """It follows from the master: what a step draws is not stored."""
    made, other = model(), model()
    optimizer, its = optimizer_of(made), optimizer_of(other)
    steps(made, optimizer)
    checkpoint.save(tmp_path, COUNT, {"model": made, "optimizer": optimizer}, faces=False)
    metadata = checkpoint.SafeReader(folder(tmp_path, COUNT)).read_metadata()
    assert not any("rowwise" in name for name in metadata.state_dict_metadata)
    checkpoint.load(tmp_path, {"model": other, "optimizer": its})
    assert same(steps(other, its, first=COUNT), steps(made, optimizer, first=COUNT))


def test_copies_are_independent():
    made = model()
    other = copy.deepcopy(made)
    assert same(steps(made, optimizer_of(made), count=1), trained()[: len(trained()) // COUNT])
    assert same(steps(other, optimizer_of(other)), trained())


def test_it_is_watched():
    made = model()
    sample = watched_sample(made, lambda: made(tokens(0).requires_grad_()).square().mean().backward())
    found = {(row.layer, row.product): row.statistics["sqnr"] for row in sample.products}
    assert found["last", "grad_input"] > 14
    assert found["first", "grad_input"] > 14
