"""One record per weight: no write to its memory is missed, whoever writes, and its aliases share what is known."""

import gc
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import hybridtensor as ht
from hybridtensor import HybridConfig, MasterWeight
from hybridtensor.subclasses.quantizing import face_tensors


def model(recipe="fp8", device="cpu", **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32, device=device), nn.Linear(32, 64, bias=False, device=device))
    return ht.quantize_(net.bfloat16(), recipe, **options)


def faces(weight):
    return face_tensors(weight.faces(rowwise=True, columnwise=True, dtype=weight.dtype), weight.shape, weight.dtype)


def assert_fresh(weight):
    """The faces are those of the weight's present value, which is read here without handing it out."""
    expected = weight.config.weight.quantize(weight.plain)
    for got, face in zip(faces(weight), (expected.rowwise, expected.columnwise), strict=True):
        assert torch.equal(got, face)


@pytest.fixture
def group():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Doubling:
    """Stands for what another rank sends: writes memory without any counter, as collectives do."""

    @staticmethod
    def write(tensor):
        version = tensor._version
        with torch.autograd._unsafe_preserve_version_counter(tensor):
            tensor.mul_(2)
        assert tensor._version == version


UNCOUNTED = {
    "values of a state dict": lambda net: [Doubling.write(v) for v in net.state_dict().values()],
    "data of a state dict": lambda net: net.state_dict()["0.weight"].data.mul_(2),
    "numpy of a state dict": lambda net: net.state_dict()["0.weight"].view(torch.int16).numpy().__iadd__(128),
    "DLPack of a state dict": lambda net: Doubling.write(torch.from_dlpack(net.state_dict()["0.weight"])),
    "the master": lambda net: Doubling.write(net[0].weight.master),
    "data of the master": lambda net: net[0].weight.master.data.mul_(2),
    "dequantize": lambda net: Doubling.write(net[0].weight.dequantize()),
    "a shard for checkpoints": lambda net: Doubling.write(net[0].weight.__get_tensor_shard__(None)),
}


@pytest.mark.parametrize("name", UNCOUNTED)
def test_writes_that_nothing_counts_are_seen(name):
    net = model()
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    before, y = net[0].weight.plain.clone(), net[0](x)
    with torch.no_grad():
        UNCOUNTED[name](net)
    gc.collect()
    assert not torch.equal(net[0].weight.plain, before)
    assert_fresh(net[0].weight)
    assert not torch.equal(net[0](x), y)


ALIASES = {
    "a state dict": lambda w, net: net.state_dict()["0.weight"],
    "numpy": lambda w, net: net.state_dict()["0.weight"].view(torch.int16).numpy(),
    "data": lambda w, net: w.master.data,
    "DLPack": lambda w, net: torch.from_dlpack(w.master),
    "a view": lambda w, net: w.master.view(-1)[7:9],
}


@pytest.mark.parametrize("name", ALIASES)
def test_while_an_alias_lives_faces_are_made_anew_and_once_after(name):
    net = model()
    weight = net[0].weight
    alias = ALIASES[name](weight, net)
    for _ in range(3):
        assert_fresh(weight)
        if name == "numpy":
            alias += 128
        else:
            Doubling.write(alias)
    first = faces(weight)[0].qdata
    assert faces(weight)[0].qdata is not first
    Doubling.write(alias) if name != "numpy" else alias.__iadd__(128)
    del alias
    gc.collect()
    assert_fresh(weight)
    kept = faces(weight)[0].qdata
    assert faces(weight)[0].qdata is kept


def test_explain_names_the_layers_whose_memory_others_hold():
    net = model()
    assert ht.explain(net, show=False).shared == ()
    held = net[0].weight.master
    assert ht.explain(net, show=False).shared == ("0",)
    del held
    assert ht.explain(net, show=False).shared == ()


OURS = {
    "data": lambda w: w.data,
    "detach": lambda w: w.detach(),
    "to_local": lambda w: DTensor.from_local(w, init_device_mesh("cpu", (1,)), [Replicate()]).to_local(),
    "a view of everything": lambda w: w.view(32, 64),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", OURS)
def test_an_alias_of_ours_has_the_faces_and_counts_its_writes(name):
    weight = model()[0].weight
    kept = faces(weight)[0].qdata
    with torch.no_grad():
        alias = OURS[name](weight)
        assert type(alias) in (MasterWeight, nn.Parameter)
        assert faces(alias)[0].qdata is kept
        alias.mul_(2)
    assert_fresh(weight)
    assert_fresh(alias)
    assert faces(weight)[0].qdata is not kept
    assert faces(weight)[0].qdata is faces(alias)[0].qdata


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("through", ["weight", "alias"])
def test_one_write_is_counted_once_for_the_weight_and_a_new_alias(name, through):
    """As of a weight that each step multiplies through a new view: what the view made is not old then."""
    weight = model()[0].weight
    faces(weight)
    with torch.no_grad():
        old = OURS[name](weight)
        (weight if through == "weight" else old).mul_(2)
        new = OURS[name](weight)
    made = faces(new)[0].qdata
    assert faces(weight)[0].qdata is made
    assert faces(new)[0].qdata is made
    assert_fresh(weight)


def test_views_keep_faces_of_their_own():
    """As of experts whose weights are one parameter."""
    weight = MasterWeight(torch.randn(3, 32, 64), HybridConfig.parse("fp8"))
    kept = [weight[e].faces(rowwise=True, columnwise=False, dtype=weight.dtype)[0].qdata for e in range(3)]
    again = [weight[e].faces(rowwise=True, columnwise=False, dtype=weight.dtype)[0].qdata for e in range(3)]
    assert all(a is b for a, b in zip(kept, again, strict=True))
    weight[1].mul_(2)
    assert_fresh(weight[0])
    assert_fresh(weight[1])


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "DTensor"])
def test_collectives_into_a_weight_are_writes(sharded):
    """The rank is alone: what is broadcast is what is there, so only the count tells."""
    net = model()
    if sharded:
        mesh = init_device_mesh("cpu", (1,))
        for layer in net:
            layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh, [Replicate()]))
    weight = net[0].weight.to_local() if sharded else net[0].weight
    for write in (
        lambda: dist.broadcast(weight.detach(), 0),
        lambda: dist.all_reduce(weight.detach()),
        lambda: dist.all_reduce(weight.detach(), async_op=True).wait(),
    ):
        kept = faces(weight)[0].qdata
        write()
        assert faces(weight)[0].qdata is not kept
        assert_fresh(weight)


@pytest.mark.parametrize("persistent", [False, True])
def test_swap_tensors_after_a_forward(persistent):
    net = model(persistent=persistent)
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    net(x)
    other = nn.Parameter(torch.ones(32, 64, dtype=torch.bfloat16))
    expected = net(x)
    torch.utils.swap_tensors(net[0].weight, other)
    assert type(net[0].weight) is nn.Parameter
    net(x)
    torch.utils.swap_tensors(net[0].weight, other)
    assert torch.equal(net(x), expected)


TAKE_MEMORY = {
    "from_dlpack": torch.from_dlpack,
    "to_dlpack": lambda t: torch.from_dlpack(torch.utils.dlpack.to_dlpack(t)),
    "set_": lambda t: torch.empty(0).set_(t.untyped_storage()).sum(),
    "set_ with a size": lambda t: torch.empty(0).set_(t.untyped_storage(), 0, (4, 4), (4, 1)).shape,
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a crash is caught in a process of its own")
@pytest.mark.parametrize("how", TAKE_MEMORY)
def test_taking_memory_that_is_not_there_raises_or_gives_none(how):
    hybrid = ht.Float8Quantizer().quantize(torch.randn(8, 8))
    tensors = [MasterWeight(torch.ones(8, 8), HybridConfig.parse("fp8")), hybrid, hybrid.rowwise]
    tensors.append(ht.IdentityTensor(torch.ones(8, 8)))
    for tensor in tensors:
        process = os.fork()
        if not process:
            try:
                taken = TAKE_MEMORY[how](tensor)
                os._exit(0 if how.startswith("set_") and taken is not None else 2)
            except (RuntimeError, NotImplementedError):
                os._exit(0)
            finally:
                os._exit(3)
        assert os.waitpid(process, 0)[1] == 0, type(tensor).__name__


@pytest.mark.parametrize("write", ["copy_", "fill_", "refresh"])
@pytest.mark.parametrize("spec", ["bf16", "fp8+high_precision", "mxfp8+dequantized", "fp8"])
def test_a_persistent_weight_written_between_forward_and_backward_is_an_error(spec, write):
    net = model(spec, persistent=True)
    x = torch.randn(8, 64, dtype=torch.bfloat16, requires_grad=True)
    y = net(x).sum()
    with torch.no_grad():
        if write == "copy_":
            net[0].weight.copy_(torch.ones(32, 64))
        elif write == "fill_":
            net[0].weight.fill_(2.0)
        else:
            net[0].weight.copy_(ht.quantize_(nn.Linear(64, 32).bfloat16(), spec, persistent=True).weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_a_quantizer_that_says_nothing_is_refused():
    """Neither ``faces`` nor ``request``: an instance could only call itself."""

    class Silent(ht.Quantizer):
        rowwise_format = columnwise_format = ht.formats.IDENTITY

    with pytest.raises(TypeError, match=r"abstract method '?faces"):
        Silent()
