"""Experts on several ranks: each rank's tokens get what the whole model gives them.

Oracle: the model on one device with the tokens of all ranks, bitwise where tokens travel as they are, or as the very
bytes that are multiplied; else the format's own error.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from experts import EXPERTS, WIDTH, Experts, Mixture, offsets
from processes import generator, here
from tiers import few
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import hybridtensor as ht
from hybridtensor.distributed import ExpertParallel, checkpoint
from hybridtensor.dtensor import local

SIZES = [(20, 0, 61, 47), (0, 90, 5, 33)]  # tokens of each expert that the two ranks routed
BEHIND = 7  # tokens that were routed nowhere
FACES = ["mxfp8+rowwise_dequantized", "mxfp8+dequantized", "fp8_rowwise+dequantized", "fp8_block+dequantized"]
VALUES = ["mxfp8", "fp8", "fp8_rowwise", "bf16"]


class Counted(Experts):
    """Experts that take counts."""

    def forward(self, x, counts):
        return super().forward(x, counts.cumsum(0, dtype=torch.int32))


def routed(rank):
    """Return this rank's tokens, sorted by expert, and some more."""
    return torch.randn(sum(SIZES[rank]) + BEHIND, WIDTH, generator=generator(rank)).bfloat16()


def together(per_rank):
    """Return rows of both ranks sorted by expert, and how many each expert has."""
    pieces = [t[: sum(n)].split(n) for t, n in zip(per_rank, SIZES, strict=True)]
    return torch.cat([piece for expert in zip(*pieces, strict=True) for piece in expert])


def apart(rows):
    """Undo ``together``."""
    sizes = [n for expert in zip(*SIZES, strict=True) for n in expert]
    pieces = rows.split(sizes)
    return [torch.cat(pieces[rank::2]) for rank in range(2)]


class Sent(TorchDispatchMode):
    """Bytes that this rank gives to exchanges of tokens."""

    def __init__(self):
        super().__init__()
        self.nbytes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "all_to_all_single" in str(func) and args[0].dtype != torch.int64:
            self.nbytes.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


def like_one_device(rank, recipe, options, ends, exact):
    mesh = init_device_mesh(here(), (2,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    plain = (Experts if ends else Counted)().bfloat16().to(here())
    whole = ht.quantize_(copy.deepcopy(plain), recipe)
    counts = torch.tensor(SIZES, device=here())
    of_all = counts.sum(0).cumsum(0, dtype=torch.int32) if ends else counts.sum(0)
    x, grad = together([routed(r) for r in range(2)]).requires_grad_(), torch.randn(257, WIDTH, generator=generator(9))
    grad = grad[: sum(map(sum, SIZES))].bfloat16()
    y = whole(x, of_all)
    y.backward(grad)
    mine = ht.quantize_(copy.deepcopy(plain), recipe)
    parallelize_module(mine, mesh, ExpertParallel(ends=ends, **options))
    assert list(mine.state_dict()) == list(plain.state_dict())
    own = routed(rank).requires_grad_()
    given = counts[rank].cumsum(0, dtype=torch.int32) if ends else counts[rank]
    out = mine(own, given)
    n = sum(SIZES[rank])
    out.backward(torch.cat([apart(grad)[rank], torch.ones(BEHIND, WIDTH, device=here()).bfloat16()]))
    assert not out[n:].any()
    assert not own.grad[n:].any()
    pairs = [(out[:n].detach(), apart(y.detach())[rank]), (own.grad[:n], apart(x.grad)[rank])]
    pairs += [(local(p.grad), getattr(whole, name).grad.chunk(2)[rank]) for name, p in mine.named_parameters()]
    for got, expected in pairs:
        if exact:
            assert torch.equal(got, expected)
        else:
            # of a few roundings to E4M3, whose error is 2**-4 at most
            assert (got - expected).norm() <= 2**-4 * expected.norm()


@pytest.mark.parametrize("recipe", VALUES + FACES)
@pytest.mark.parametrize("ends", [False, True])
def test_bitwise_one_device(two, recipe, ends):
    two.run(like_one_device, recipe, {}, ends, True)


@pytest.mark.parametrize("options", [{"combine": "mxfp8"}, {"gradients": "fp8_rowwise"}, {"combine": "fp8_block"}])
def test_quantized_on_the_way_back(two, options):
    two.run(like_one_device, "mxfp8+rowwise_dequantized", options, True, False)


def bytes_of(rank):
    """Elements and a scale per 32 of them, instead of two bytes each; outputs come back as values."""
    mesh = init_device_mesh(here(), (2,), mesh_dim_names=("ep",))
    counts, values = torch.tensor(SIZES, device=here())[rank], sum(SIZES[rank]) * WIDTH * 2
    for recipe, first, says in (
        ("bf16", [values], "the rowwise face is in high precision"),
        ("mxfp8", [values], "the columnwise face is made of the original tokens"),
        ("mxfp8+rowwise_dequantized", [values // 2, values // 64], ""),
        ("fp8+dequantized", [values], "fp8_e4m3_tensor: its scales, or draws, are not those of a token"),
    ):
        model = ht.quantize_(Counted().bfloat16().to(here()), recipe)
        parallelize_module(model, mesh, ExpertParallel())
        with Sent() as sent:
            model(routed(rank), counts)
        assert sent.nbytes[:-1] == first, recipe
        (row,) = ht.explain(model, show=False).sequence
        forward = "values" if says else "rowwise, mxfp8_e4m3"
        assert (row.tensor, row.forward, row.backward, row.reason) == ("tokens", forward, "values", says)

    model = ht.quantize_(Counted().bfloat16().to(here()), "mxfp8")
    parallelize_module(model, mesh, ExpertParallel(combine="mxfp8", gradients="fp8_rowwise"))
    own = routed(rank).requires_grad_()
    with Sent() as sent:
        y = model(own, counts)
    here_now = model_tokens(rank)
    assert sent.nbytes[1:] == [here_now * WIDTH, here_now * WIDTH // 32]
    with Sent() as sent:
        y.sum().backward()
    mine = sum(SIZES[rank])
    assert sent.nbytes == [mine * WIDTH, mine * 4, here_now * WIDTH, here_now * 4]


def model_tokens(rank):
    """Return how many tokens a rank's experts have."""
    return sum(sum(sizes[2 * rank : 2 * rank + 2]) for sizes in SIZES)


def test_bytes_of_tokens(two):
    two.run(bytes_of)


def under_fsdp(rank, recipe):
    """Two by two ranks: experts over one dimension, their shards and the batch over the other; as one process."""
    mesh = init_device_mesh(here(), (2, 2), mesh_dim_names=("dp", "ep"))
    torch.manual_seed(0)
    plain = Mixture().to(here())
    x = torch.randn(4, 32, WIDTH, generator=generator(3))
    one = ht.quantize_(copy.deepcopy(plain), recipe)
    many = ht.quantize_(copy.deepcopy(plain), recipe)
    parallelize_module(many, mesh["ep"], {"experts": ExpertParallel(ends=True)})
    fully_shard(many.experts, mesh=mesh["dp"])
    ht.set_mesh_(many, mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (one, many)]
    for _ in range(3):
        y = one(x.flatten(0, 1)).unflatten(0, (4, 32))
        y.square().mean().backward()
        mine = many(x[rank])
        assert (mine - y[rank]).norm() <= 2**-6 * y[rank].norm()  # gradients are sums in another order
        (mine.square().mean() / 4).backward()  # a part of the mean over all tokens
        dist.all_reduce(many.router.weight.grad)
        for p in many.experts.parameters():
            assert isinstance(p.grad, DTensor)
            p.grad *= 2  # FSDP2 took the mean over its ranks
        for optimizer, model in zip(optimizers, (one, many), strict=True):
            optimizer.step()
            optimizer.zero_grad()
            ht.step_(model)
    if recipe != "fp8_delayed":
        return
    for name in ("w1", "w2", "w3"):
        known, mine = (getattr(m.experts, f"{name}_quantization_state").encode_scale for m in (one, many))
        assert len(known.unique()) > 2 * EXPERTS  # a token may be the loudest of both its experts
        assert mine.tolist() == pytest.approx(known.tolist(), rel=0.05)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", ["mxfp8+rowwise_dequantized", "fp8_delayed"])
def test_with_fsdp2(four, recipe):
    four.run(under_fsdp, recipe)


def kept_with_fsdp(rank, folder, recipe, frozen):
    """Persistent experts that two dimensions of ranks cut are saved, and go on where the dimensions are others."""

    def build(shape):
        mesh = init_device_mesh(here(), shape, mesh_dim_names=("dp", "ep"))
        torch.manual_seed(0)
        model = torch.nn.Sequential(Experts().to(here()))
        model[0].w1.requires_grad_(not frozen)
        ht.quantize_(model, recipe, persistent=True)
        parallelize_module(model, mesh["ep"], {"0": ExpertParallel(ends=True)})
        if shape[0] > 1:
            fully_shard(model[0], mesh=mesh["dp"])
        ht.set_mesh_(model, mesh)
        trained = [p for p in model.parameters() if p.requires_grad]
        return model, ht.optim.MasterWeights(torch.optim.SGD, trained, lr=0.5)

    model, optimizer = build((2, 2))
    x, ends = torch.randn(64, WIDTH, generator=generator(1)), offsets((10, 20, 40, 64), here())
    model[0](x, ends).square().mean().backward()
    optimizer.step()
    ht.step_(model)
    checkpoint.save(folder, 1, {"model": model, "optimizer": optimizer})
    with torch.no_grad():
        expected = model[0](x, ends)
        for shape in ((2, 2), (1, 4)):
            other, its = build(shape)
            checkpoint.load(folder, {"model": other, "optimizer": its})
            assert torch.equal(other[0](x, ends), expected), shape


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("recipe", "frozen"), [("mxfp8", False), ("fp8_delayed", False), ("fp8_rowwise", True)])
def test_persistent_experts_under_fsdp2_are_saved(four, tmp_path, recipe, frozen):
    four.run(kept_with_fsdp, str(tmp_path), recipe, frozen)


class Layer(torch.nn.Module):
    """Two linear layers, and experts."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)
        self.mixture = Mixture()

    def forward(self, x):
        h = x + self.down(self.up(x).relu())
        return h + self.mixture(h)


def with_tensor_parallel(rank, shape, compiled):
    """Three dimensions of ranks: linear layers cut over one, experts spread over another, shards over the third."""
    mesh = init_device_mesh(here(), shape, mesh_dim_names=("dp", "ep", "tp"))
    torch.manual_seed(0)
    plain = Layer().to(here())
    x = torch.randn(4, 32, WIDTH, generator=generator(3))
    recipe = "mxfp8+rowwise_dequantized"
    one, many = (ht.quantize_(copy.deepcopy(plain), recipe) for _ in range(2))
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(many, mesh["tp"], styles)
    parallelize_module(many, mesh["ep"], {"mixture.experts": ExpertParallel(ends=True)})
    fully_shard(many.mixture.experts, mesh=mesh["dp"])
    ht.set_mesh_(many, mesh)
    data = mesh["dp", "ep"]._flatten("data")
    run = torch.compile(many, backend="aot_eager") if compiled else many
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (one, many)]
    count, index = data.size(), data.get_local_rank()
    for _ in range(2):
        y = one(x[:count].flatten(0, 1)).unflatten(0, (count, 32))
        y.square().mean().backward()
        mine = run(x[index])
        assert (mine - y[index]).norm() <= 2**-6 * y[index].norm()  # sums over ranks are in another order
        (mine.square().mean() / count).backward()
        for name, p in many.named_parameters():
            if "experts" in name:
                p.grad *= mesh["dp"].size()  # FSDP2 took the mean over its ranks
            else:
                dist.all_reduce(local(p.grad), group=data.get_group())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("shape", "compiled"), few([((2, 2, 1), False), ((1, 2, 2), True), ((1, 2, 2), False)], 2))
def test_with_tensor_parallel(four, shape, compiled):
    four.run(with_tensor_parallel, shape, compiled)


def refused(rank):
    mesh = init_device_mesh(here(), (2,), mesh_dim_names=("ep",))
    with pytest.raises(ValueError, match="3 experts cannot be spread evenly over 2 ranks"):
        parallelize_module(Counted(3), mesh, ExpertParallel())
    with pytest.raises(TypeError, match="a module with num_experts is required, got Linear"):
        parallelize_module(torch.nn.Linear(4, 4), mesh, ExpertParallel())
    for options, says in (
        ({"dispatch": "sideways"}, "'faces' or 'bf16' is required as dispatch"),
        ({"combine": "fp8"}, "a format with scales within a token, is required as combine, got 'fp8'"),
        ({"gradients": "nvfp4"}, "is required as gradients, got 'nvfp4'"),
    ):
        with pytest.raises(ValueError, match=says):
            ExpertParallel(**options)
    model = parallelize_module(ht.quantize_(Counted().bfloat16(), "mxfp8"), mesh, ExpertParallel())
    good, tokens = torch.tensor([5, 5, 5, 5]), routed(rank)
    for bad in (torch.tensor([5, 5, 5]), torch.tensor([5, -1, 5, 5]), torch.tensor([1000, 5, 5, 5])):
        says = "got .* of" if rank == 0 else "got others on another rank"
        with pytest.raises(ValueError, match=f"tokens of each of 4 experts, none negative .* are required, {says}"):
            model(tokens, bad if rank == 0 else good)
    with pytest.raises(ValueError, match="parameters whose first extent is num_experts"):
        parallelize_module(Empty(), mesh, ExpertParallel())


class Empty(torch.nn.Module):
    """Experts that are modules of their own."""

    num_experts = 4


def other_ways(rank):
    """Evaluation, autocast, copies, and a mesh that does not have the experts' dimension."""
    mesh = init_device_mesh(here(), (1, 2), mesh_dim_names=("dp", "ep"))
    counts, x = torch.tensor(SIZES)[rank], routed(rank)
    torch.manual_seed(0)
    plain = Counted()
    for recipe in ("mxfp8+rowwise_dequantized", "fp8_delayed"):
        model = ht.quantize_(copy.deepcopy(plain).bfloat16(), recipe)
        parallelize_module(model, mesh["ep"], ExpertParallel())
        ht.set_mesh_(model, mesh["dp"])
        assert local(model.w1).record.first == 2 * rank
        y = model(x, counts)
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                assert torch.equal(model(x, counts), y)
        ht.quantize_(model, recipe, persistent=True)
        assert local(model.w1).record.first == 2 * rank
        assert torch.equal(model(x, counts), y)
    before = model.w1_quantization_state.amax.clone()
    other = copy.deepcopy(model)
    other(x * 100, counts).sum().backward()
    assert torch.equal(model.w1_quantization_state.amax, before)
    assert other.w1_quantization_state.amax.max() > 50 * before.max()
    cast = ht.quantize_(copy.deepcopy(plain).bfloat16(), "mxfp8+dequantized")
    parallelize_module(cast, mesh["ep"], ExpertParallel())
    own = x.float().requires_grad_()
    with torch.autocast(here(), torch.bfloat16):
        y = cast(own, counts)
    assert torch.equal(y, cast(x, counts))
    y.sum().backward()
    assert own.grad.dtype == torch.float32


@pytest.mark.filterwarnings("ignore")
def test_evaluated_copied_and_under_autocast(two):
    two.run(other_ways)


def test_bad_use(two):
    two.run(refused)


def moved_weights(rank, recipe, move):
    """Stacks of experts keep their scales where weights move."""
    mesh = init_device_mesh(here(), (2,), mesh_dim_names=("ep",))
    counts, found = torch.tensor(SIZES, device=here())[rank], []
    for how in ("values", "weights"):
        torch.manual_seed(0)
        model = ht.quantize_(torch.nn.ModuleList([Counted(), Counted()]).bfloat16().to(here()), recipe)
        one, other = (parallelize_module(experts, mesh, ExpertParallel()) for experts in model)
        names = [name for name, _ in one.named_parameters()]
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(20)  # so that the two have other scales
        for index in range(4):
            if index == 2 and how == "values":
                with torch.no_grad():
                    for name in names:
                        before = getattr(one, name).clone()
                        getattr(one, name).copy_(getattr(other, name))
                        getattr(other, name).copy_(before)
            elif index == 2:
                for name in names:
                    move(one, other, name)
            x = routed(rank) * (index + 1)
            out = one(x, counts) + other(x, counts)
            out.square().mean().backward()
            grads = [local(getattr(experts, name).grad) for experts in (one, other) for name in names]
            found.append([out.detach(), *(grad.clone() for grad in grads)])
            model.zero_grad()
            del out, grads  # swap_tensors would poison its graph
            ht.step_(model)
    for expected, got in zip(found[:4], found[4:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def exchange(one, other, name):
    first, second = getattr(one, name), getattr(other, name)
    setattr(one, name, second)
    setattr(other, name, first)


def swap(one, other, name):
    torch.utils.swap_tensors(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
@pytest.mark.parametrize("move", [exchange, swap])
def test_weights_that_move_between_stacks(two, recipe, move):
    two.run(moved_weights, recipe, move)
