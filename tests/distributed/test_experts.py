"""Experts over ranks: FSDP2 sends the bytes of whole experts, and by value what cuts them.

Oracle: the model that is not sharded, bitwise, with gradients that are averaged over the ranks.
"""

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from any_layer import ANY_LAYER
from experts import ENDS, EXPERTS, HIDDEN, TOKENS, WIDTH, Experts, Stored, offsets, parts
from processes import generator, here
from sharding import mesh_of
from tiers import in_turn
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import hybridtensor as ht
from hybridtensor.distributed import checkpoint
from hybridtensor.dtensor import local

RECIPES = sorted(ANY_LAYER)


def tokens(step, rank):
    return torch.randn(TOKENS, WIDTH, generator=generator(10 * step + rank))


def optimizer_of(model, persistent):
    if persistent:
        return ht.optim.MasterWeights(torch.optim.SGD, model.parameters(), lr=1.0)
    return torch.optim.SGD(model.parameters(), lr=1.0)


def steps(model, optimizer, rank, *, reduce, ends=ENDS):
    """Train for three steps, and return the outputs."""
    found = []
    for step in range(3):
        y = model(tokens(step, rank), offsets(ends[step], here()))
        y.square().mean().backward()
        for p in model.parameters() if reduce else ():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        ht.step_(model)
        found.append(y.detach())
    return found


def like_unsharded(rank, recipe, make, dim, persistent, count=EXPERTS, says=None):
    torch.manual_seed(0)
    plain = make(count).to(here())
    ends = [(*e[:-1], *[e[-1]] * (count - EXPERTS + 1)) for e in ENDS]
    models = [ht.quantize_(copy.deepcopy(plain), recipe, persistent=persistent) for _ in range(2)]
    sharded = fully_shard(models[1], mesh=mesh_of(rank, 2), shard_placement_fn=lambda _: Shard(dim))
    outputs = [
        steps(model, optimizer_of(model, persistent), rank, reduce=model is not sharded, ends=ends) for model in models
    ]
    for mine, theirs in zip(*outputs, strict=True):
        assert torch.equal(mine, theirs), (recipe, make, dim, persistent)
    rows = ht.explain(sharded, show=False).gathers
    assert len(rows) == len(list(plain.parameters()))
    if says is not None:
        assert (rows[0].forward, rows[0].backward, rows[0].reason) == says


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("recipe", "make", "persistent"), in_turn(RECIPES, [Experts, Stored], [False, False, True]))
def test_whole_experts_travel_as_bytes(two, recipe, make, persistent):
    two.run(like_unsharded, recipe, make, 0, persistent)


VALUES = "values, float32"


@pytest.mark.parametrize(
    ("dim", "count", "says"),
    [
        (0, 4, ("rowwise, mxfp8_e4m3", "columnwise, mxfp8_e4m3", "")),
        (1, 4, (VALUES, VALUES, "Shard(1): parts of every expert")),
        (0, 5, (VALUES, VALUES, "5 experts on 2 ranks: FSDP2 takes one tensor of the padded shard's shape")),
    ],
)
@pytest.mark.parametrize("make", [Experts, Stored])
def test_what_travels_is_explained(two, make, dim, count, says):
    two.run(like_unsharded, "mxfp8", make, dim, False, count, says)


@dataclasses.dataclass(frozen=True)
class Own(ht.Quantizer):
    """Says nothing about what has a scale in common."""

    rowwise_format = columnwise_format = ht.MXFP8Quantizer().rowwise_format

    def faces(self, x, **options):
        return ht.MXFP8Quantizer().faces(x, **options)


@pytest.mark.parametrize("make", [Experts, Stored])
def test_columnwise_faces_that_are_quantized_after_the_gather(two, make):
    rows, sent = ht.MXFP8Quantizer(), "rowwise, mxfp8_e4m3"
    for source, backward in (("rowwise_dequantized", sent), ("original", VALUES)):
        recipe = ht.HybridConfig(rows, ht.HybridQuantizer(rows, Own(), source), rows)
        reason = "" if backward == sent else "Own says nothing about its groups"
        two.run(like_unsharded, recipe, make, 0, False, EXPERTS, (sent, backward, reason))


def hybrid_shards(rank, recipe):
    """Two copies of two shards each."""
    torch.manual_seed(0)
    plain = Experts().to(here())
    one, sharded = (ht.quantize_(copy.deepcopy(plain), recipe) for _ in range(2))
    mesh = init_device_mesh(here(), (2, 2), mesh_dim_names=("copies", "shards"))
    fully_shard(sharded, mesh=mesh)
    alike, mine = (steps(m, optimizer_of(m, False), rank, reduce=m is one) for m in (one, sharded))
    assert torch.equal(mine[0], alike[0])
    for got, expected in zip(mine[1:], alike[1:], strict=True):  # gradients of four ranks are summed in another order
        assert (got - expected).norm() <= 2**-6 * expected.norm()
    assert ht.explain(sharded, show=False).gathers[0].forward.startswith("rowwise")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_rowwise", "fp8_delayed"])
def test_hybrid_shards(four, recipe):
    four.run(hybrid_shards, recipe)


def cut_experts_persistent(rank):
    model = ht.quantize_(Experts(), "mxfp8", persistent=True)
    with pytest.raises(ValueError, match="is cut inside a row or block"):
        fully_shard(model, mesh=mesh_of(rank, 2), shard_placement_fn=lambda _: Shard(1))


def test_persistent_experts_are_not_cut(two):
    two.run(cut_experts_persistent)


def saved_and_loaded(rank, folder):
    """Saved from two ranks, loaded into one that is not sharded, a plain one, and other shards."""
    torch.manual_seed(0)
    model = ht.quantize_(Experts().to(here()), "mxfp8")
    fully_shard(model, mesh=mesh_of(rank, 2))
    optimizer = optimizer_of(model, False)
    steps(model, optimizer, rank, reduce=False)
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    x, ends = tokens(9, 0), offsets(ENDS[0], here())
    expected = model(x, ends)
    for placement in (None, 0, 1):
        other = ht.quantize_(Experts().to(here()), "mxfp8")
        if placement is not None:
            fully_shard(other, mesh=mesh_of(rank, 2), shard_placement_fn=lambda _, dim=placement: Shard(dim))
        state = get_model_state_dict(other)
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(other, state)
        assert torch.equal(other(x, ends), expected), placement
    plain = Experts().to(here())
    state = plain.state_dict()
    dcp.load(state, checkpoint_id=folder)
    plain.load_state_dict(state)
    assert torch.equal(ht.quantize_(plain, "mxfp8")(x, ends), expected)


@pytest.mark.filterwarnings("ignore")
def test_checkpoints_of_other_ranks(two, tmp_path):
    two.run(saved_and_loaded, str(tmp_path))


def kept(rank, folder, recipe, persistent):
    """Training state saved from two ranks goes on, bit for bit, on two and on one."""

    def build(sharded):
        torch.manual_seed(0)
        model = ht.quantize_(Experts().to(here()), recipe, persistent=persistent)
        if sharded:
            fully_shard(model, mesh=mesh_of(rank, 2))
        return model, optimizer_of(model, persistent)

    model, optimizer = build(True)
    steps(model, optimizer, 0, reduce=False)
    checkpoint.save(folder, 3, {"model": model, "optimizer": optimizer})
    expected = steps(model, optimizer, 0, reduce=False)
    for sharded in (True, False):
        other, its = build(sharded)
        checkpoint.load(folder, {"model": other, "optimizer": its})
        mine = steps(other, its, 0, reduce=False)
        assert all(map(torch.equal, mine, expected)), sharded


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_delayed"])
def test_training_goes_on_from_other_ranks(two, tmp_path, recipe, persistent):
    two.run(kept, str(tmp_path), recipe, persistent)


class Local(Experts):
    """Experts of this rank, as frameworks write them: the local part of each weight."""

    def forward(self, x, ends):
        own = [w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w3, self.w2)]
        w1, w3, w2 = (w.bfloat16().transpose(-2, -1) for w in own)
        hidden = nn.functional.silu(torch._grouped_mm(x, w1, offs=ends)) * torch._grouped_mm(x, w3, offs=ends)
        return torch._grouped_mm(hidden, w2, offs=ends)


def on_ranks(rank, recipe):
    """Each rank has half of the experts, and their tokens: outputs and gradients are those of the whole."""
    mesh = init_device_mesh(here(), (2,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    plain = Local().bfloat16().to(here())
    whole = ht.quantize_(copy.deepcopy(plain), recipe)
    x, ends = tokens(0, 0).bfloat16(), (32, 60, 96, 160)
    y = whole(x, offsets(ends, here()))
    grad = torch.randn(y.shape, generator=generator(5)).bfloat16()
    y.backward(grad)
    with pytest.raises(
        TypeError, match=r"grouped_mm: the tokens of layer w1 are a DTensor, and its weight is none; give"
    ):
        whole(DTensor.from_local(x, mesh, [Replicate()], run_check=False), offsets(ends, here()))
    first, middle = (0, ends[1]) if rank == 0 else (ends[1], ends[3])
    for order in ("quantize", "distribute"):
        part = copy.deepcopy(plain)
        for act in (order, "distribute" if order == "quantize" else "quantize"):
            if act == "quantize":
                ht.quantize_(part, recipe)
            else:
                source = 0 if order == "quantize" else None  # the first rank sends the others theirs
                for name in ("w1", "w2", "w3"):
                    cut = distribute_tensor(getattr(part, name), mesh, [Shard(0)], src_data_rank=source)
                    setattr(part, name, nn.Parameter(cut))
        own = torch.tensor(ends[2 * rank : 2 * rank + 2], dtype=torch.int32, device=here()) - first
        mine = part(x[first:middle], own)
        assert torch.equal(mine, y[first:middle])
        mine.backward(grad[first:middle])
        for name in ("w1", "w2", "w3"):
            theirs = getattr(whole, name).grad.chunk(2)[rank]
            assert torch.equal(local(getattr(part, name).grad), theirs), name


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8", "fp8_rowwise"])
def test_half_of_the_experts_on_each_rank(two, recipe):
    two.run(on_ranks, recipe)


def counted_by_part(rank, shards):
    """The model is cut while it is empty, and its parameters are loaded afterwards."""
    mesh = init_device_mesh(here(), (shards, 2), mesh_dim_names=("dp", "ep"))
    with torch.device("meta"):
        experts = Local()
    for name in ("w1", "w2", "w3"):
        cut = distribute_tensor(getattr(experts, name), mesh["ep"], [Shard(0)], src_data_rank=None)
        setattr(experts, name, nn.Parameter(cut))
    experts.num_experts = EXPERTS // 2
    if shards > 1:
        fully_shard(experts, mesh=mesh["dp"])
    for name in ("w1", "w2", "w3"):
        setattr(experts, name, nn.Parameter(torch.zeros_like(getattr(experts, name), device=here())))
    ht.quantize_(experts, "mxfp8")
    assert not ht.explain(experts, show=False).skipped
    assert all(isinstance(local(weight), ht.MasterWeight) for weight in experts.parameters())
    assert all(local(weight).record.first == rank % 2 * 2 for weight in experts.parameters())


@pytest.mark.parametrize("shards", [1, 2])
def test_experts_whose_module_counts_those_of_its_rank(two, four, shards):
    """Expert parallelism of Transformers sets ``num_experts`` so."""
    (two if shards == 1 else four).run(counted_by_part, shards)


def delayed_on_ranks(rank, compiled):
    """Scales of three steps: each rank's experts have those that they have on one device, and know all of them."""
    mesh = init_device_mesh(here(), (2,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    plain, ends = Local().bfloat16().to(here()), (32, 60, 96, 160)
    whole = ht.quantize_(copy.deepcopy(plain), "fp8_delayed")
    first, middle = (0, ends[1]) if rank == 0 else (ends[1], ends[3])
    own = torch.tensor(ends[2 * rank : 2 * rank + 2], dtype=torch.int32, device=here()) - first
    parts = {}
    for order in (("quantize", "distribute"), ("distribute", "quantize")):
        part = copy.deepcopy(plain)
        for act in order:
            if act == "quantize":
                ht.quantize_(part, "fp8_delayed")
                continue
            for name in ("w1", "w2", "w3"):
                cut = distribute_tensor(getattr(part, name), mesh, [Shard(0)], src_data_rank=None)
                setattr(part, name, nn.Parameter(cut))
        parts[order[0]] = part
    with pytest.raises(ValueError, match=r"has delayed scales of 4 experts, but weights of 2 .*; call .*set_mesh_"):
        parts["quantize"](tokens(0, 0).bfloat16()[first:middle], own)
    for part in parts.values():
        ht.set_mesh_(part, mesh)
    torch._dynamo.reset()
    runs = {part: torch.compile(part, backend="aot_eager") if compiled else part for part in parts.values()}
    for step in range(3):
        x = tokens(step, 0).bfloat16() * (step + 1)
        grad = torch.randn(x.shape, generator=generator(step)).bfloat16()
        expected = whole(x, offsets(ends, here()))
        expected.backward(grad)
        for part, run in runs.items():
            mine = run(x[first:middle], own)
            assert torch.equal(mine, expected[first:middle])
            mine.backward(grad[first:middle])
            ht.step_(part)
        ht.step_(whole)
        scales = whole.w1_quantization_state.encode_scale
        assert len(scales.unique()) > 6 or step == 0
        for part in parts.values():
            assert torch.equal(part.w1_quantization_state.encode_scale, scales)


@pytest.mark.filterwarnings("ignore")  # compiling, torch warns of its own ways
@pytest.mark.parametrize("compiled", [False, True])
def test_delayed_scales_of_experts_on_ranks(two, compiled):
    two.run(delayed_on_ranks, compiled)


class Looped(nn.Module):
    """One product for each expert, as Transformers' ``experts_implementation="eager"`` does."""

    def __init__(self, transposed):
        super().__init__()
        self.num_experts, self.is_transposed = EXPERTS, transposed
        shape = (WIDTH, HIDDEN) if transposed else (HIDDEN, WIDTH)
        self.up = nn.Parameter(torch.randn(EXPERTS, *shape) / 8)

    def forward(self, x, ends):
        out = x.new_zeros(x.shape[0], HIDDEN)
        for expert, (start, stop) in enumerate(parts(ends.tolist())):
            weight, tokens = self.up[expert], x[start:stop]
            out[start:stop] = tokens @ weight if self.is_transposed else F.linear(tokens, weight)
        return out


class OneByOne(Looped):
    """The same, of weights that are taken apart at once."""

    def forward(self, x, ends):
        weights = [w if self.is_transposed else w.t() for w in self.up]
        return torch.cat([x[i:j] @ w for w, (i, j) in zip(weights, parts(ends.tolist()), strict=True)])


class Wrapped(nn.Module):
    """Experts inside of a model."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, x, ends):
        return self.experts(x, ends)


def in_a_group_of_their_own(rank, recipe, kind, transposed, persistent):
    torch.manual_seed(0)
    plain = Wrapped(kind(transposed) if kind in (Looped, OneByOne) else kind()).to(here())
    ends = [(*e[:-1], TOKENS) for e in ENDS]
    whole, sharded = (ht.quantize_(copy.deepcopy(plain), recipe, persistent=persistent) for _ in range(2))
    fully_shard(sharded.experts, mesh=mesh_of(rank, 2), reshard_after_forward=True)
    fully_shard(sharded, mesh=mesh_of(rank, 2))
    found = [steps(m, optimizer_of(m, persistent), rank, reduce=m is whole, ends=ends) for m in (whole, sharded)]
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


GROUPED = [
    ("mxfp8", Stored, True),
    ("fp8_delayed", Stored, True),
    ("mxfp8", Experts, False),
    ("mxfp8", Looped, False),
    ("nvfp4_fwd_mxfp8_bwd", Stored, True),
    ("fp8", Looped, True),
    ("bf16/mxfp8/fp8", Looped, True),
    ("fp8_block", OneByOne, False),
    # faces in high precision are transposed in forward, while their memory is not there
    ("fp8+high_precision", Stored, True),
    ("fp8+high_precision", Experts, False),
    ("fp8+high_precision", OneByOne, False),
    ("nvfp4_fwd_mxfp8_bwd", OneByOne, True),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("case", "persistent"), in_turn(GROUPED, [False, True]))
def test_gathered_again_for_backward(two, case, persistent):
    """Experts in an FSDP2 group of their own, which has one face at a time, as those that are not sharded."""
    two.run(in_a_group_of_their_own, *case, persistent)


def loaded_into_shards(rank):
    torch.manual_seed(0)
    plain, ends = Wrapped(Experts()).to(here()), [(*e[:-1], TOKENS) for e in ENDS]
    whole = ht.quantize_(copy.deepcopy(plain), "fp8_delayed")
    with torch.device("meta"):
        empty = Wrapped(Experts())
    sharded = fully_shard(empty, mesh=mesh_of(rank, 2))
    for name, shard in list(sharded.experts.named_parameters()):
        values = distribute_tensor(getattr(plain.experts, name), shard.device_mesh, shard.placements)
        setattr(sharded.experts, name, nn.Parameter(values))
    ht.quantize_(sharded, "fp8_delayed")
    found = [steps(m, optimizer_of(m, False), rank, reduce=m is whole, ends=ends) for m in (whole, sharded)]
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


def test_shards_of_fsdp2_are_not_those_of_expert_parallelism(two):
    """Transformers shards an empty model, gives it the parameters that it loads, and calls ``quantize_``."""
    two.run(loaded_into_shards)


class Swapping(Experts):
    """Experts that run with the local tensors of their weights, as expert parallelism of Transformers does it."""

    def forward(self, x, ends):
        own = dict(self._parameters)
        self._parameters.update({name: weight.to_local() for name, weight in own.items()})
        try:
            return super().forward(x, ends)
        finally:
            self._parameters.update(own)


def recomputed_while_swapped(rank):
    mesh = init_device_mesh(here(), (2, 1), mesh_dim_names=("dp", "ep"))
    torch.manual_seed(0)
    models = [Wrapped(checkpoint_wrapper(Swapping()) if recomputes else Swapping()) for recomputes in (False, True)]
    models[1].experts.load_state_dict(models[0].experts.state_dict())
    found = []
    for model in models:
        experts = next(module for module in model.modules() if isinstance(module, Swapping)).to(here())
        for name in ("w1", "w2", "w3"):
            cut = distribute_tensor(getattr(experts, name), mesh["ep"], [Shard(0)], src_data_rank=None)
            setattr(experts, name, nn.Parameter(cut))
        ht.quantize_(model, "mxfp8")
        fully_shard(experts, mesh=mesh["dp"], reshard_after_forward=True)
        fully_shard(model, mesh=mesh["dp"])
        model(tokens(0, rank), offsets(ENDS[0], here())).square().mean().backward()
        found.append([weight.grad.full_tensor() for weight in experts.parameters()])
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.filterwarnings("ignore")
def test_experts_that_are_recomputed_keep_what_stands_at_their_weights(two):
    """The second gather of a backward, in the middle of a forward, leaves the local tensors there."""
    two.run(recomputed_while_swapped)
