"""``weight.data = values`` and in-place arithmetic: both kinds of weight take values as plain parameters do."""

import copy
import pickle

import pytest
import torch
from torch import nn

import hybridtensor as ht
from hybridtensor import MasterWeight
from hybridtensor.ops import library
from hybridtensor.subclasses.operators import common

RECIPES = ["fp8", "mxfp8", "fp8_block", "nvfp4", "fp8_delayed", "fp8+dequantized", "fp8+high_precision"]


def layer(recipe="fp8", persistent=False, seed=0, dtype=torch.float32, out_features=128):
    torch.manual_seed(seed)
    made = nn.Linear(128, out_features, dtype=dtype)
    return ht.quantize_(made, recipe, filter_fn=lambda *_: True, persistent=persistent, name="layer")


def plain(seed, *shape, dtype=torch.float32):
    return torch.randn(*(shape or (128, 128)), generator=torch.Generator().manual_seed(seed)).to(dtype)


def step(net, dtype=torch.float32):
    """Return the output and the gradients of one step."""
    x = plain(9, 32, 128, dtype=dtype).requires_grad_()
    net.zero_grad()
    out = net(x)
    out.square().sum().backward()
    return [out, x.grad, net.weight.grad]


def assert_is_made_of(net, values, recipe, persistent):
    """The layer computes bitwise as one that was converted with these values."""
    fresh = nn.Linear(values.shape[1], values.shape[0], dtype=values.dtype)
    fresh.weight.data, fresh.bias.data = values.clone(), net.bias.data.clone().to(values.dtype)
    ht.quantize_(fresh, recipe, filter_fn=lambda *_: True, persistent=persistent, name="layer")
    pairs = zip(step(net, values.dtype), step(fresh, values.dtype), strict=True)
    assert all(torch.equal(got, expected) for got, expected in pairs)


KINDS = pytest.mark.parametrize("persistent", [False, True], ids=["master", "persistent"])


@KINDS
@pytest.mark.parametrize("recipe", RECIPES)
def test_values_are_taken_and_the_recipe_stays(recipe, persistent):
    net = layer(recipe, persistent)
    weight = net.weight
    step(net)  # faces are kept
    weight.data = plain(1)
    assert net.weight is weight
    assert weight.config == layer(recipe).weight.config
    assert_is_made_of(net, plain(1), recipe, persistent)
    weight.data += 1.0
    assert_is_made_of(net, plain(1) + 1.0, recipe, persistent)


@KINDS
def test_another_shape_and_dtype(persistent):
    net = layer(persistent=persistent)
    step(net)
    net.weight.data = plain(1, 64, 128, dtype=torch.bfloat16)
    net.bias.data = net.bias.data[:64].bfloat16()
    assert (net.weight.shape, net.weight.dtype) == ((64, 128), torch.bfloat16)
    assert isinstance(net.weight, nn.Parameter)
    assert net.weight.requires_grad
    assert_is_made_of(net, plain(1, 64, 128, dtype=torch.bfloat16), "fp8", persistent)
    assert net.weight.grad.shape == (64, 128)


def test_the_memory_is_shared_as_that_of_plain_parameters():
    net, values = layer(), plain(1)
    net.weight.data = values
    step(net)
    values.mul_(3.0)  # as a bucket that is written
    assert_is_made_of(net, 3 * plain(1), "fp8", False)
    assert net.weight.master.data_ptr() == values.data_ptr()


@pytest.mark.parametrize("persistent", [False, True])
def test_memory_is_compared_as_that_of_plain_parameters(persistent):
    """By ``is_set_to`` torchrl tells the parameters of a target from those that it follows."""
    weight, other = (layer(persistent=persistent).weight for _ in range(2))
    assert weight.is_set_to(weight.data)
    assert weight.is_set_to(weight[:])
    assert not weight.is_set_to(other)
    assert not weight[:64].is_set_to(weight[64:])
    assert not weight.is_set_to(plain(0))
    assert not plain(0).is_set_to(weight)


@KINDS
def test_a_weight_of_ours_is_taken_as_its_values(persistent):
    net, other = layer(persistent=persistent), layer(persistent=persistent, seed=1)
    net.weight.data = other.weight
    assert torch.equal(net.weight.dequantize(), other.weight.dequantize())
    net.weight.data = layer("fp8_rowwise", not persistent, seed=2).weight
    assert net.weight.config == other.weight.config
    assert torch.equal(step(net)[0], step(net)[0])


@KINDS
def test_what_was_taken_before_keeps_its_values(persistent):
    """As averaging of weights does: keep ``data``, assign other values, assign what was kept."""
    net = layer(persistent=persistent)
    optimizer = ht.optim.MasterWeights(torch.optim.SGD, net.parameters(), lr=0.01) if persistent else None
    before = step(net)
    if optimizer is not None:
        optimizer.step()
        before = step(net)
    master = None if optimizer is None else net.weight.high_precision.current.clone()
    kept = net.weight.data
    net.weight.data = plain(1)
    assert not torch.equal(step(net)[0], before[0])
    if optimizer is not None:
        assert torch.equal(net.weight.high_precision.current, plain(1))
    net.weight.data = kept
    assert all(torch.equal(a, b) for a, b in zip(step(net), before, strict=True))
    if optimizer is not None:
        assert torch.equal(net.weight.high_precision.current, master)


@KINDS
def test_tied_layers_stay_tied_and_optimizers_go_on(persistent):
    net = nn.Sequential(layer(persistent=persistent), layer(persistent=persistent))
    net[1].weight = net[0].weight
    make = ht.optim.MasterWeights if persistent else lambda cls, parameters, **kw: cls(parameters, **kw)
    optimizer = make(torch.optim.AdamW, net.parameters(), lr=0.1)
    net(plain(3)).sum().backward()
    optimizer.step()
    net[0].weight.data = plain(1)
    assert net[1].weight is net[0].weight
    before = net(plain(3))
    net(plain(3)).sum().backward()
    optimizer.step()
    assert not torch.equal(net(plain(3)), before)
    assert (net[0].weight.dequantize() - plain(1)).abs().max() < 0.5  # a step from what was assigned


def test_hooks_of_the_parameter_stay():
    net, seen = layer(), []
    net.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    net.weight.data = plain(1, 64, 128)
    net.bias = None
    step(net)
    assert seen == [(64, 128)]


@KINDS
def test_a_write_is_counted_for_the_layers_state(persistent):
    """A layer with state notices that its weight changed and ``step_`` was not called."""
    net = layer("fp8_delayed", persistent)
    for seed in range(6):
        step(net)
        with torch.no_grad():
            net.weight.add_(plain(seed)) if seed % 2 else net.weight.data.add_(plain(seed))
        ht.step_(net)
    step(net)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (3, TypeError, r"MasterWeight\.data of layer layer: a floating-point tensor is required, got int"),
        (torch.ones(4, 4, dtype=torch.int64), TypeError, "a floating-point tensor is required, got torch.int64"),
        (torch.eye(4).to_sparse(), TypeError, "a plain dense tensor is required"),
    ],
    ids=["number", "integers", "sparse"],
)
def test_what_is_no_weight_is_refused(value, error, message):
    net = layer()
    before = step(net)
    with pytest.raises(error, match=message):
        net.weight.data = value
    assert all(torch.equal(a, b) for a, b in zip(step(net), before, strict=True))


@KINDS
def test_a_capture_is_refused(persistent, monkeypatch):
    net = layer(persistent=persistent)
    monkeypatch.setattr(common, "is_captured", lambda: True)
    with pytest.raises(RuntimeError, match=r"a CUDA graph is being captured, .* use the former memory"):
        net.weight.data = plain(1)
    assert library.is_captured() is False


def test_a_master_of_another_shape_is_not_left_behind():
    net = layer(persistent=True)
    optimizer = ht.optim.MasterWeights(torch.optim.SGD, net.parameters(), lr=0.1)
    before = step(net)
    with pytest.raises(
        RuntimeError, match=r"master of this weight, of shape \(128, 128\), and got values of \(64, 128\)"
    ):
        net.weight.data = plain(1, 64, 128)
    assert all(torch.equal(a, b) for a, b in zip(step(net), before, strict=True))
    optimizer.step()


def test_faces_on_their_own_have_no_data_to_replace():
    faces = ht.Float8Quantizer().quantize(plain(0))
    with pytest.raises(NotImplementedError, match=r"HybridTensor\.data: .* has no recipe"):
        faces.data = plain(1)
    for leaf in (faces.rowwise, ht.IdentityTensor(plain(0))):
        with pytest.raises(NotImplementedError, match=r"aten\.set_data\.default is not an operation"):
            leaf.data = plain(1)


UPDATES = {
    "add_": lambda w: w.add_(plain(3), alpha=0.5),
    "sub_": lambda w: w.sub_(plain(3)),
    "mul_": lambda w: w.mul_(1.5),
    "div_": lambda w: w.div_(plain(3).abs() + 1),
    "lerp_": lambda w: w.lerp_(plain(3), 0.25),
    "addcmul_": lambda w: w.addcmul_(plain(3), plain(4), value=0.5),
    "addcdiv_": lambda w: w.addcdiv_(plain(3), plain(4).abs() + 1),
    "clamp_": lambda w: w.clamp_(-0.5, 0.5),
    "clamp_min_": lambda w: w.clamp_min_(0.0),
    "clamp_max_": lambda w: w.clamp_max_(0.0),
    "masked_fill_": lambda w: w.masked_fill_(plain(3) > 0, 2.0),
    "neg_": lambda w: w.neg_(),
}


@pytest.mark.parametrize("name", UPDATES)
def test_a_frozen_persistent_weight_changes_by_what_its_faces_hold(name):
    net = layer(persistent=True)
    net.weight.requires_grad_(False)
    frozen = copy.deepcopy(net)
    frozen.weight.record.values = None
    frozen.weight.data = frozen.weight.data  # a frozen weight that was assigned has no values either
    expected = UPDATES[name](frozen.weight.dequantize())
    UPDATES[name](frozen.weight.data)
    again = layer(persistent=True)
    again.weight.data = expected
    assert torch.equal(frozen.weight.dequantize(), again.weight.dequantize())
    assert torch.equal(frozen.weight.columnwise.dequantize(), again.weight.columnwise.dequantize())


USES = {
    "original": lambda model, _: model[0].weight.original,
    "set_config_": lambda model, _: ht.set_config_(model, "mxfp8"),
    "export_safetensors": lambda model, folder: ht.export_safetensors(model, folder / "model.safetensors"),
    "load_state_dict": lambda model, _: model.load_state_dict(model.state_dict()),
}


@pytest.mark.parametrize("use", USES)
def test_reading_a_frozen_persistent_weight_does_not_depend_on_what_came_before(use, tmp_path):
    model = nn.Sequential(nn.Linear(128, 128)).requires_grad_(False)
    ht.quantize_(model, "fp8", filter_fn=lambda *_: True, persistent=True)
    USES[use](model, tmp_path)
    weight = model[0].weight
    assert torch.equal(weight.data.sum(0), weight.dequantize().sum(0))


@pytest.mark.parametrize("name", UPDATES)
def test_a_trainable_persistent_weight_changes_by_its_values(name):
    """Many changes that are below the resolution of the faces add up."""
    net, reference = layer(persistent=True), plain(0)
    net.weight.data = reference.clone()
    for _ in range(3):
        with torch.no_grad():
            UPDATES[name](net.weight)
        UPDATES[name](reference)
    assert torch.equal(net.weight.original, reference)
    assert_is_made_of(net, reference, "fp8", True)


ROWS = torch.tensor([5, 2])
OPERANDS = {
    "lerp_": lambda w, x: w.lerp_(x, 0.25),
    "addmm_": lambda w, x: w.addmm_(x, x),
    "index_add_": lambda w, x: w.index_add_(0, ROWS, x[:2]),
    "index_copy_": lambda w, x: w.index_copy_(0, ROWS, x[:2]),
    "index_put_": lambda w, x: w.index_put_((ROWS,), x[:2]),
    "scatter_": lambda w, x: w.scatter_(0, ROWS[:, None].expand(2, 128), x),
    "masked_scatter_": lambda w, x: w.masked_scatter_(x > 0, x),
    "put_": lambda w, x: w.put_(ROWS, x[0, :2]),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_a_master_in_fp32_takes_operands_of_the_weights_dtype(name):
    """For these operators torch requires operands of one dtype. Oracle: the same in fp32."""
    net, x = layer(persistent=True, dtype=torch.bfloat16), plain(3, dtype=torch.bfloat16)
    optimizer = ht.optim.MasterWeights(torch.optim.SGD, net.parameters(), lr=0.1)
    expected = net.weight.high_precision.current.clone()
    assert expected.dtype == torch.float32
    OPERANDS[name](net.weight.data, x)
    OPERANDS[name](expected, x.float())
    assert torch.equal(net.weight.high_precision.current, expected)
    del optimizer  # which holds the master


@pytest.mark.parametrize("with_master", [False, True])
def test_averages_of_weights_and_plain_parameters_are_written_at_once(with_master):
    """As ``AveragedModel`` does; the copy was made before the optimizer was."""
    model = layer(persistent=True, dtype=torch.bfloat16)
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.75))
    optimizer = ht.optim.MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1) if with_master else None
    weight, bias = averaged.module.weight, averaged.module.bias
    averaged.update_parameters(model)  # the first one copies, also the precision of masters
    assert weight.original.dtype == (torch.float32 if with_master else torch.bfloat16)
    expected = weight.original.clone(), bias.detach().clone()
    with torch.no_grad():
        for parameter, seed in ((model.weight, 4), (model.bias, 5)):
            parameter.copy_(plain(seed, *parameter.shape, dtype=torch.bfloat16))
    averaged.update_parameters(model)
    for found, before, seed in zip((weight.original, bias), expected, (4, 5), strict=True):
        assert torch.equal(found, before.lerp(plain(seed, *found.shape, dtype=torch.bfloat16).to(before.dtype), 0.25))
    del optimizer


def test_without_values_a_trainable_weight_is_not_changed():
    net = layer(persistent=True)
    net.weight.high_precision.release_original()
    before = net.weight.dequantize()
    with pytest.raises(NotImplementedError, match=r"faces only, in which small changes are lost; step it through"):
        net.weight.data += 1.0
    assert torch.equal(net.weight.dequantize(), before)


def test_a_weight_is_added_to_another():
    """By their high-precision values; the other one stays."""
    net, other = (layer("mxfp8", persistent=True) for _ in range(2))
    net.weight.data, other.weight.data = plain(0), plain(1)
    net.weight.data.add_(other.weight.data, alpha=0.5)
    assert torch.equal(net.weight.original, plain(0).add_(plain(1), alpha=0.5))
    assert torch.equal(other.weight.original, plain(1))


def test_views_change_the_part_that_they_are():
    net = layer("mxfp8", persistent=True)
    net.weight.data = plain(0)
    net.weight.data[32:64] *= 2.0
    expected = plain(0)
    expected[32:64] *= 2.0
    assert torch.equal(net.weight.original, expected)


@pytest.mark.parametrize("recipe", ["fp8", "fp8_rowwise", "nvfp4"])
def test_writes_of_empty_views_change_nothing(recipe):
    net, other = layer(recipe, persistent=True), layer(recipe, persistent=True, seed=1)
    before = copy.deepcopy(net.weight)
    with torch.no_grad():
        for data in (net.weight, net.weight.t()):
            data[:0].copy_(plain(1)[:0])
            data[128:] = other.weight.detach()[:0]
            data[:, :0] = 3.0
            data[:0].zero_().mul_(2.0)
    assert torch.equal(net.weight, before)
    assert net.weight.high_precision.follows
    with pytest.raises(RuntimeError, match="size"):
        net.weight.data[:0].copy_(plain(1)[:3])


@pytest.mark.parametrize("recipe", ["fp8", "fp8_rowwise", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("size", [(2, -1, plain(0).shape[1]), (-1,)], ids=["grouped", "flat"])
def test_views_of_a_matrix_in_other_dimensions_change_it(size, recipe):
    """Three dimensions are a stack of matrices only where the weight is one."""
    net = layer(recipe, persistent=True)
    net.weight.data = plain(0)
    net.weight.data.view(size).mul_(2.0)
    net.weight.data.view(size).add_(0.5)
    expected = plain(0).mul_(2.0).add_(0.5)
    assert torch.equal(net.weight.original, expected)
    assert_is_made_of(net, expected, recipe, True)


def test_arrays_share_the_memory():
    net = layer()
    step(net)
    array = net.weight.detach().numpy()
    array[:] = plain(1).numpy()
    del array
    assert_is_made_of(net, plain(1), "fp8", False)
    with pytest.raises(RuntimeError, match=r"numpy\(\) would lose the gradient"):
        net.weight.numpy()
    assert net.weight.tolist() == plain(1).tolist()
    assert isinstance(net.weight, MasterWeight)


READS = {
    "svd": lambda w: torch.linalg.svd(w, full_matrices=False)[1], "qr": lambda w: torch.linalg.qr(w)[1],
    "mean": lambda w: w.mean(dim=0), "sub": lambda w: w - w.mean(dim=0), "norm": torch.linalg.vector_norm,
    "mul": lambda w: 2 * w, "isfinite": torch.isfinite, "histc": lambda w: w.histc(8), "max": torch.max,
    "rows": lambda w: w[torch.tensor([1, 3])], "median": torch.median,
    "tolist": lambda w: torch.tensor(w.tolist()), "numpy": lambda w: torch.tensor(w.numpy()),
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_reads_of_a_persistent_weights_data_give_its_values(name):
    """A parameter itself is not read: a model that does would compute in high precision without a word."""
    net, twin = layer(persistent=True), layer("bf16")
    known = net.weight.dequantize() if name in ("tolist", "numpy") else twin.weight.data  # those tell what it holds
    assert torch.equal(READS[name](net.weight.data), READS[name](known))
    if name not in ("tolist", "numpy"):
        for parameter in (net.weight, net.weight.t().detach().requires_grad_()):
            told = r"HybridTensor of layer layer: .* the values of a weight that is persistent"
            with pytest.raises(NotImplementedError, match=told):
                READS[name](parameter)
        with pytest.raises(NotImplementedError, match="is not an operation of this class; call dequantize"):
            READS[name](ht.Float8Quantizer().quantize(plain(0)))


def test_reads_of_a_masters_weight_have_the_weights_dtype():
    """An optimizer's master is in fp32, whatever the weight is in."""
    net = layer(persistent=True, dtype=torch.bfloat16)
    (master,) = ht.optim.MasterWeights(torch.optim.SGD, [net.weight], lr=0.1).masters().values()
    read = 2 * net.weight.data
    assert read.dtype == torch.bfloat16
    assert torch.equal(read, 2 * master.detach().bfloat16())


@pytest.mark.parametrize("stepped", [False, True])
def test_values_of_more_precision_than_the_weight_are_quantized_as_they_are(stepped):
    """What is loaded into a BF16 weight with an fp32 master is that master, not rounded to BF16."""
    net, values = layer(persistent=True, dtype=torch.bfloat16), plain(1)
    optimizer = ht.optim.MasterWeights(torch.optim.SGD, [net.weight], lr=0.1) if stepped else None
    with torch.no_grad():
        net.weight.copy_(values)
    master = net.weight.high_precision.current if optimizer is None else optimizer.masters()[net.weight]
    assert torch.equal(master, values)
    expected = ht.Float8Quantizer().quantize(values).rowwise.dequantize(torch.bfloat16)
    assert torch.equal(net.weight.rowwise.dequantize(), expected)


def test_writes_into_a_weight_in_float64_are_quantized_from_fp32():
    """Optimizers that compute in float64 cast ``data`` first; no cast reads such values."""
    net, values = layer(persistent=True), plain(1)
    net.weight.data = net.weight.data.double()
    with torch.no_grad():
        net.weight.mul_(0).add_(values)
    assert torch.equal(net.weight.rowwise.dequantize(torch.float32), ht.Float8Quantizer().quantize(values).dequantize())


def test_persistent_weights_are_not_joined():
    """DistributedDataParallel joins parameters, sends them, and writes the parts back."""
    data = layer(persistent=True).weight.data
    for join in (torch.cat, torch.stack):
        told = r"HybridTensor of layer layer: aten\.\w+\.default would join persistent weights, .*; use fully_shard"
        with pytest.raises(NotImplementedError, match=told):
            join([data, data])


def test_arrays_of_persistent_weights_are_not_written():
    net = layer(persistent=True)
    with pytest.raises(RuntimeError, match=r"numpy\(\) would lose the gradient"):
        net.weight.numpy()
    with pytest.raises(ValueError, match="read-only"):
        net.weight.data.numpy()[0] = 1.0


@pytest.fixture
def others():
    """Operators as other libraries define them: one that steps weights, one that returns, one that says nothing."""
    name = "hybridtensor_other_library"
    with torch.library._scoped_library(name, "DEF") as made:
        made.define("step_(Tensor(a!) weight, Tensor grad, Tensor(b!)[] states, *, float lr) -> ()")
        made.define("scale_(Tensor(a!) weight, float by) -> Tensor(a!)")
        made.define("read(Tensor weight) -> Tensor")

        def step_(weight, grad, states, *, lr):
            assert type(weight) is torch.Tensor
            states[0].add_(grad)
            weight.sub_(states[0] * lr)

        made.impl("step_", step_, "CompositeExplicitAutograd")
        made.impl("scale_", lambda weight, by: weight.mul_(by), "CompositeExplicitAutograd")
        made.impl("read", lambda weight: weight.sum(), "CompositeExplicitAutograd")
        yield getattr(torch.ops, name)


@pytest.mark.parametrize("persistent", [False, True])
def test_operators_of_other_libraries_write_the_values(others, persistent):
    """As optimizers of other libraries do: on values in high precision, and counted as writes."""
    net, twin = layer(persistent=persistent), layer(persistent=persistent)
    x, grad, states = plain(1, 4, 128), torch.ones_like(net.weight), [torch.zeros_like(net.weight)]
    assert torch.equal(net(x), twin(x))
    with torch.no_grad():
        others.step_(net.weight, grad, states, lr=0.5)
        twin.weight.sub_(0.5 * torch.ones_like(twin.weight))
        assert others.scale_(net.weight, 3.0) is net.weight
        twin.weight.mul_(3.0)
    assert torch.equal(states[0], grad)
    assert torch.equal(net.weight.dequantize(), twin.weight.dequantize())
    assert torch.equal(net(x), twin(x))
    with pytest.raises(
        NotImplementedError, match=r"other_library.*\.read.* is an operator of the library hybridtensor_"
    ):
        others.read(net.weight)


def test_operators_of_other_libraries_need_values(others):
    net = layer(persistent=True)
    ht.optim.MasterWeights(torch.optim.SGD, [net.weight], lr=0.1)  # which takes the values, and is gone
    with torch.no_grad(), pytest.raises(NotImplementedError, match=r"scale_.* needs its values in high precision"):
        others.scale_(net.weight, 3.0)
    with pytest.raises(NotImplementedError, match="is not an operation of this class"):
        others.scale_(ht.Float8Quantizer().quantize(plain(0)), 3.0)


MERGES = {
    "mm": lambda w, r: torch.mm(r, w),
    "@": lambda w, r: r @ w,
    "matmul of a copy": lambda w, r: torch.matmul(r, w.clone()),
    "right": lambda w, r: w @ r,
    "transposed": lambda w, r: torch.mm(r, w.t().to(r.dtype)).t(),
    "by name": lambda w, r: torch.mm(input=r, mat2=w),
    "addmm": lambda w, r: torch.addmm(r, r, w),
    "chunks": lambda w, r: torch.cat([part @ r for part in w.chunk(2)]),
    "turned by name": lambda w, r: torch.mm(r, torch.t(input=w)),
    "bmm of views": lambda w, r: torch.bmm(r[None], w.view(1, 128, 128))[0],
}


@KINDS
@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed", "mxfp8"])
@pytest.mark.parametrize("name", MERGES)
def test_data_is_multiplied_as_values(name, recipe, persistent):
    """Adapters that rotate a weight are merged so (OFT, BOFT, HRA, RoAd of PEFT): with the bits of plain tensors."""
    if persistent and name == "bmm of views":
        pytest.skip("a persistent matrix has no view in three dimensions")
    net, rotation = layer(recipe, persistent), torch.linalg.qr(plain(3)).Q
    step(net)
    expected = MERGES[name](net.weight.original if persistent else net.weight.dequantize().clone(), rotation)
    found = MERGES[name](net.weight.data, rotation)
    assert type(found) is torch.Tensor
    assert torch.equal(found, expected)
    net.weight.data = found.contiguous()
    assert_is_made_of(net, expected, recipe, persistent)


def test_data_that_a_module_has_is_multiplied_as_a_weight():
    class Transposed(nn.Module):
        is_transposed = True

        def __init__(self, values):
            super().__init__()
            self.weight = nn.Parameter(values)

        def forward(self, x):
            return x @ self.weight

    net, x = layer("fp8"), plain(9, 32, 128)
    expected = nn.functional.linear(x, net.weight)
    again = nn.Parameter(net.weight.data)
    turned = ht.quantize_(Transposed(plain(0)), "fp8", filter_fn=lambda *_: True)
    with torch.no_grad():
        for found in (x @ again.t(), x @ again.detach().t(), nn.functional.linear(x, net.weight.data)):
            assert torch.equal(found, expected)
        data = turned.weight.data
        assert torch.equal(torch.func.functional_call(turned, {"weight": data}, (x,)), turned(x))
        assert torch.equal(x @ data, x @ turned.weight.dequantize())  # still multiplied as values outside of it


@KINDS
def test_copies_of_data_are_multiplied_as_values(persistent):
    net, rotation = layer("fp8", persistent), torch.linalg.qr(plain(3)).Q
    data = net.weight.data
    for copied in (copy.deepcopy(data), copy.copy(data), pickle.loads(pickle.dumps(data))):
        assert torch.equal(rotation @ copied, rotation @ data)
