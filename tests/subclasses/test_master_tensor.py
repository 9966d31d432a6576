"""MasterWeight is its high-precision tensor to everything but the linear, and never lends out a stale face."""

import copy
import ctypes
import io
import pickle

import pytest
import torch
from processes import context_for
from torch import nn

import hybridtensor as ht
from hybridtensor import Float8Quantizer, HybridConfig, MasterWeight
from hybridtensor.subclasses import master_tensor, quantized_when_used
from hybridtensor.subclasses.face_cache import EVALUATION, CachedFaces, FaceCache, ForwardUse
from hybridtensor.subclasses.operators import master as operators
from hybridtensor.subclasses.quantizing import face_tensors
from hybridtensor.testing import random_tensor

aten = torch.ops.aten
CONFIG = HybridConfig.parse("fp8")


def weight(*shape, dtype=torch.float32, config=CONFIG, seed=0):
    return MasterWeight(random_tensor(*(shape or (6, 8)), dtype=dtype, seed=seed), config)


def faces(w):
    return w.faces(rowwise=True, columnwise=True, dtype=w.dtype)


def assert_fresh(w):
    """The faces are those of the weight's present value."""
    expected = w.config.weight.quantize(w.master)
    made = face_tensors(faces(w), w.shape, w.dtype)
    for got, face in zip(made, (expected.rowwise, expected.columnwise), strict=True):
        assert torch.equal(got, face)


def _preserving_version(w):
    """Write as code does that hides its writes from autograd (FSDP2 does, on what it gathers)."""
    with torch.autograd._unsafe_preserve_version_counter(w):
        w.view(-1).add_(1.0)


WRITES = {
    "add_": lambda w: w.add_(1.0),
    "mul_": lambda w: w.mul_(3.0),
    "copy_": lambda w: w.copy_(torch.ones(6, 8)),
    "copy_ ours": lambda w: w.copy_(weight(seed=5)),
    "copy_ faces": lambda w: w.copy_(Float8Quantizer().quantize(random_tensor(6, 8, dtype=torch.float32, seed=5))),
    "fill_": lambda w: w.fill_(2.0),
    "zero_": lambda w: w.zero_(),
    "uniform_": lambda w: w.uniform_(),
    "normal_": lambda w: w.normal_(),
    "trunc_normal_": lambda w: nn.init.trunc_normal_(w),
    "kaiming": lambda w: nn.init.kaiming_uniform_(w),
    "xavier": lambda w: nn.init.xavier_normal_(w),
    "orthogonal": lambda w: nn.init.orthogonal_(w),
    "orthogonal of t": lambda w: nn.init.orthogonal_(w.t()),
    "eye": lambda w: nn.init.eye_(w),
    "lerp_": lambda w: w.lerp_(torch.ones(6, 8), 0.5),
    "clamp_": lambda w: w.clamp_(-0.1, 0.1),
    "masked_fill_": lambda w: w.masked_fill_(torch.ones(6, 8, dtype=torch.bool), 4.0),
    "foreach_mul_": lambda w: torch._foreach_mul_([w], 5.0),
    "foreach_add_": lambda w: torch._foreach_add_([w], [torch.ones(6, 8)]),
    "foreach_copy_": lambda w: torch._foreach_copy_([w], [torch.ones(6, 8)]),
    "setitem": lambda w: w.__setitem__(0, 7.0),
    "setitem slice": lambda w: w.__setitem__((slice(1, 3), slice(2, 4)), torch.full((2, 2), 9.0)),
    "view": lambda w: w.view(-1).fill_(1.0),
    "slice": lambda w: w[2:4].mul_(10.0),
    "row": lambda w: w[0].zero_(),
    "transpose": lambda w: w.t()[0].add_(1.0),
    "detach": lambda w: w.detach().add_(1.0),
    "data": lambda w: w.data.mul_(0.5),
    "bits": lambda w: w.view(torch.int32 if w.dtype == torch.float32 else torch.int16).bitwise_and_(-1 << 4),
    "data of a view": lambda w: w.data.view(-1)[3:9].add_(2.0),
    "split": lambda w: w.split(3)[1].zero_(),
    "unbind": lambda w: w.unbind(0)[2].fill_(1.0),
    "addmm_": lambda w: w.addmm_(torch.ones(6, 4), torch.ones(4, 8)),
    "addr_": lambda w: w.addr_(torch.ones(6), torch.ones(8)),
    "masked_scatter_": lambda w: w.masked_scatter_(w > 0, torch.ones(6, 8)),
    "scatter_reduce_": lambda w: w.scatter_reduce_(0, torch.zeros(1, 8, dtype=torch.long), torch.ones(1, 8), "sum"),
    "geometric_": lambda w: w.geometric_(0.5),
    "hardtanh_": lambda w: torch.nn.functional.hardtanh_(w, -0.1, 0.1),
    "foreach_maximum_": lambda w: torch._foreach_maximum_([w], [torch.ones(6, 8)]),
    "foreach_pow_": lambda w: torch._foreach_pow_([w], 2.0),
    "the master itself": lambda w: w.dequantize().add_(1.0),
    "a view, version preserved": lambda w: _preserving_version(w),
    "version bump": lambda w: w.master.view(-1)[:4].copy_(torch.ones(4)),
}


@pytest.mark.parametrize("name", WRITES)
def test_no_write_is_missed(name):
    w = nn.Parameter(weight())
    assert_fresh(w)
    before = w.master.clone()
    with torch.no_grad():
        WRITES[name](w)
    assert not torch.equal(w.master, before)
    assert_fresh(w)


def test_an_orthogonal_weight_is_that_of_a_plain_layer():
    w, plain = nn.Parameter(weight()), torch.empty(6, 8)
    for one in (w, plain):
        torch.manual_seed(0)
        nn.init.orthogonal_(one)
    assert torch.equal(w.detach().dequantize(), plain)


def test_faces_are_made_once_per_write():
    w = weight()
    row, column = faces(w)
    assert faces(w)[0].qdata is row.qdata
    assert faces(w)[1].qdata is column.qdata
    w.add_(1)
    assert faces(w)[0].qdata is not row.qdata


def test_a_face_made_for_evaluation_does_not_stand_in_the_way_of_training():
    w = weight()
    row, none = w.faces(rowwise=True, columnwise=False, dtype=w.dtype)
    assert none is None
    assert_fresh(w)
    again = w.faces(rowwise=True, columnwise=False, dtype=w.dtype)[0]
    assert torch.equal(again.qdata.float(), row.qdata.float())


class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_each_cast():
    """A mode may compare what runs in two passes."""
    w = weight()
    before = faces(w)[0].qdata
    with Watch():
        recorded = [faces(w)[0].qdata for _ in range(2)]
    assert len({t.data_ptr() for t in (before, *recorded)}) == 3
    assert all(torch.equal(t.view(torch.uint8), before.view(torch.uint8)) for t in recorded)
    assert faces(w)[0].qdata is before


def test_faces_of_a_capture_are_used_in_it_alone(monkeypatch):
    """Its replays run without Python: they make what they use, and nothing else may use that."""
    w = weight()
    made = [faces(w)[0].qdata]
    for stream in ((0, 1), (0, 2), 0):
        monkeypatch.setattr(quantized_when_used, "stream_of", lambda plain, stream=stream: stream)
        made.append(faces(w)[0].qdata)
        assert faces(w)[0].qdata is made[-1]
    assert len({t.data_ptr() for t in made}) == 4
    assert all(torch.equal(t.view(torch.uint8), made[0].view(torch.uint8)) for t in made)


def test_after_a_write_in_a_cuda_graph_no_face_is_kept(monkeypatch):
    """Replays write the memory without telling anybody, as numpy does."""
    w = weight()
    alias = w.detach()
    monkeypatch.setattr(master_tensor, "is_captured", lambda: True)
    w.add_(1.0)
    monkeypatch.undo()
    for tensor in (w, alias, w.view(-1).view(6, 8)):
        faces(tensor)
        memory = w.master.numpy()
        memory *= 3.0
        assert_fresh(tensor)


def test_another_recipe_or_dtype_makes_other_faces():
    w = weight()
    faces(w)
    w.config = HybridConfig.parse("fp8_rowwise")
    assert faces(w)[0].format.name == "fp8_e4m3_row"
    w.config = HybridConfig.parse("fp8+dequantized")
    assert faces(w)[1].dequantized_rowwise == torch.float32
    assert w.faces(rowwise=True, columnwise=True, dtype=torch.bfloat16)[1].dequantized_rowwise == torch.bfloat16


@pytest.mark.parametrize("op", operators.VIEWS + operators.COPIES, ids=str)
def test_views_and_copies_are_master_weights_with_the_plain_result(op):
    arguments = {
        aten.as_strided.default: ((6, 4), (8, 2), 1), aten.expand.default: ((2, 6, 8),),
        aten.permute.default: ((1, 0),),
        aten.select.int: (1, 2), aten.slice.Tensor: (1, 2, 6, 2), aten.split.Tensor: (4, 1),
        aten.split_with_sizes.default: ([2, 4], 0), aten.squeeze.dim: (0,), aten.transpose.int: (0, 1),
        aten.unsqueeze.default: (1,), aten.view.default: ((2, 24),), aten._unsafe_view.default: ((48,),),
        aten.new_empty.default: ((3, 5),), aten.new_empty_strided.default: ((3, 5), (5, 1)),
        aten.new_zeros.default: ((3, 5),),
    }.get(op, ())  # fmt: skip
    w = weight()
    if op is aten._pin_memory.default and not torch.cuda.is_available():
        pytest.skip("pinned memory needs a CUDA device")
    got, expected = op(w, *arguments), op(w.master, *arguments)
    pairs = zip(got, expected, strict=True) if isinstance(got, list) else [(got, expected)]
    for ours, plain in pairs:
        assert type(ours) is MasterWeight
        assert ours is not w
        assert (ours.shape, ours.stride(), ours.dtype) == (plain.shape, plain.stride(), plain.dtype)
        if op not in (aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default):
            assert torch.equal(ours.master, plain)
        shares = ours.master.untyped_storage().data_ptr() == w.master.untyped_storage().data_ptr()
        assert shares == (op in operators.VIEWS)


ZERO, ROWS = torch.tensor([[0]]), torch.full((6,), 0.1)
ONE = torch.ones(1, 1, requires_grad=True)
READS = {
    "abs": torch.abs, "add": lambda w: w + 1, "mul": lambda w: 2 * w, "sub": lambda w: 1 - w, "div": lambda w: w / 2,
    "neg": lambda w: -w, "pow": lambda w: w**2, "norm": torch.linalg.vector_norm, "norm2": lambda w: w.norm(),
    "sum": torch.sum, "mean": lambda w: w.mean(dim=0), "std": torch.std, "max": lambda w: w.max(), "amax": torch.amax,
    "eq": lambda w: w == 0, "isfinite": torch.isfinite, "isnan": torch.isnan, "cat": lambda w: torch.cat([w, w]),
    "stack": lambda w: torch.stack([w, w]), "gather": lambda w: w.gather(0, torch.zeros(1, 8, dtype=torch.long)),
    "index": lambda w: w[torch.tensor([0, 2])], "topk": lambda w: w.topk(2)[0], "where": lambda w: w.where(w > 0, 0.0),
    "embedding": lambda w: nn.functional.embedding(torch.tensor([1, 2]), w),
    "item": lambda w: torch.tensor(w.sum().item()),
    "zeros_like": torch.zeros_like, "ones_like": torch.ones_like, "foreach_norm": lambda w: torch._foreach_norm([w])[0],
    "histc": lambda w: w.histc(4), "median": lambda w: w.median(), "median of rows": lambda w: w.median(0)[0],
    "roll": lambda w: w.roll((1, 2), (0, 1)), "softmax": lambda w: w.softmax(-1),
    "log_softmax": lambda w: w.log_softmax(-1), "var_mean": lambda w: torch.var_mean(w)[0],
    "mv": lambda w: w.mv(torch.ones(8)), "mv of t": lambda w: torch.mv(w.t(), torch.ones(6)),
    "weight_norm": lambda w: torch._weight_norm(w, torch.ones(6, 1)),
    "embedding_bag": lambda w: nn.functional.embedding_bag(torch.tensor([[1, 2]]), w),
    "mask": lambda w: w[w > 0], "rows": lambda w: w[[0, 2]], "tolist": lambda w: torch.tensor(w.tolist()),
    "numpy": lambda w: torch.tensor(w.numpy()), "quantile": lambda w: w.quantile(0.5), "unique": lambda w: w.unique(),
    "flip": lambda w: w.flip(0), "repeat": lambda w: w.repeat(2, 1), "pad": lambda w: nn.functional.pad(w, (1, 1)),
    "mse": lambda w: nn.functional.mse_loss(w, torch.ones(6, 8)), "scatter": lambda w: w.scatter(0, ZERO, 1.0),
    "norm of columns": lambda w: torch.norm_except_dim(w, 2, 0), "trace": torch.trace, "argmax": torch.argmax,
    "fake_quantize": lambda w: torch.fake_quantize_per_tensor_affine(w, 0.1, 0, -128, 127),
    "fake_quantize of rows": lambda w: torch.fake_quantize_per_channel_affine(w, ROWS, ROWS.int() * 0, 0, -128, 127),
    "to_int": lambda w: w.to(torch.int32), "allclose": lambda w: torch.tensor(torch.allclose(w, w)),
    "vector": lambda w: nn.utils.parameters_to_vector([w]),
    "index_copy": lambda w: w.index_copy(0, torch.tensor([0, 2]), torch.ones(2, 8)),
    "index_fill": lambda w: w.index_fill(0, torch.tensor([1]), 3.0),
    "index_put": lambda w: w.index_put((torch.tensor([0, 2]),), torch.ones(2, 8)),
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_reads_give_the_plain_result(name):
    w = weight()
    with torch.no_grad():
        got, expected = READS[name](w), READS[name](w.master)
    assert type(got) is torch.Tensor
    assert torch.equal(got, expected)


PENALTIES = {
    "abs": torch.abs, "norm": lambda w: w.norm(1), "largest": lambda w: w.norm(float("inf")), "sgn": torch.sgn,
    "mse": READS["mse"], "huber": lambda w: nn.functional.huber_loss(w, torch.ones(6, 8)),
    "smooth_l1": lambda w: nn.functional.smooth_l1_loss(w, torch.ones(6, 8)), "gelu": nn.functional.gelu,
    "elu": nn.functional.elu, "leaky_relu": nn.functional.leaky_relu, "softplus": nn.functional.softplus,
    "layer_norm": lambda w: nn.functional.layer_norm(w, (8,)), "cdist": lambda w: torch.cdist(w, torch.ones(6, 8)),
    "weights of a bag": lambda w: nn.functional.embedding_bag(ZERO, w, per_sample_weights=ONE, mode="sum"),
}  # fmt: skip


@pytest.mark.parametrize("name", PENALTIES)
def test_gradients_of_reads_are_the_plain_ones(name):
    """Backward reads the weight once more, by an operator of its own."""
    w = nn.Parameter(weight())
    plain = nn.Parameter(w.detach().dequantize().clone())
    for one in (w, plain):
        PENALTIES[name](one).sum().backward()
    assert type(w.grad) is torch.Tensor
    assert torch.equal(w.grad, plain.grad)


def test_every_write_operator_is_noted():
    """The handler finds what is written from the schema: check that for every operator in the list there is such."""
    for op in operators.WRITES:
        assert any(a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments), op
    for op in operators.READS:
        assert not op._schema.is_mutable, op


def test_products_below_autograd_are_refused():
    w = weight()
    for op in operators.PRODUCTS:
        with pytest.raises(NotImplementedError, match="a product below autograd"):
            op(*[w] * sum(1 for a in op._schema.arguments if not a.has_default_value()))


def test_an_unknown_operator_is_refused():
    with pytest.raises(NotImplementedError, match=r"MasterWeight: aten\.cholesky.* is not an operation"):
        torch.ops.aten.cholesky.default(weight(4, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_pickle_save_and_deepcopy(dtype):
    w = nn.Parameter(weight(dtype=dtype), requires_grad=False)
    faces(w)
    for copied in (pickle.loads(pickle.dumps(w)), copy.deepcopy(w)):
        assert type(copied) is MasterWeight
        assert isinstance(copied, nn.Parameter)
        assert not copied.requires_grad
        assert copied.config == w.config
        assert torch.equal(copied.master, w.master)
        assert copied.master.data_ptr() != w.master.data_ptr()
        with torch.no_grad():
            copied.add_(1)
        assert_fresh(copied)
        assert_fresh(w)
    buffer = io.BytesIO()
    torch.save({"w": w.detach()}, buffer)
    size = buffer.tell()
    assert size < w.numel() * w.itemsize + 4000  # the cached faces are not in it
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=True)["w"].master, w.master)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", [nn.Parameter, torch.detach], ids=["parameter", "tensor"])
def test_deepcopy_copies_a_gradient_where_torch_does(persistent, kind):
    """As of plain tensors: a copy of a parameter has no gradient, a copy of any other leaf has one of its own."""
    layer = ht.quantize_(nn.Linear(16, 16), "fp8", persistent=persistent)
    for tensor in (kind(torch.randn(16, 16)), kind(layer.weight)):
        tensor.requires_grad_().grad = torch.ones(16, 16)
        copied = copy.deepcopy(tensor)
        assert tensor.grad is not None
        assert copied.requires_grad
        assert type(copied) is type(tensor)
        if kind is nn.Parameter:
            assert copied.grad is None
        else:
            assert torch.equal(copied.grad, tensor.grad)
            assert copied.grad is not tensor.grad


def test_swap_tensors_exchanges_class_and_payload():
    w, plain = nn.Parameter(weight()), nn.Parameter(torch.ones(6, 8))
    value = w.master.clone()
    torch.utils.swap_tensors(w, plain)
    assert type(w) is nn.Parameter
    assert type(plain) is MasterWeight
    assert torch.equal(plain.master, value)
    assert_fresh(plain)


@pytest.mark.parametrize("spec", ["fp8", "fp8+high_precision"])
def test_a_write_between_forward_and_backward_is_an_error(spec):
    layer = nn.Linear(8, 6, bias=False)
    ht.quantize_(layer, spec)
    y = layer(torch.randn(4, 8, requires_grad=True))
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="written or replaced between its forward and backward"):
        y.sum().backward()


def test_refusals():
    """Products that read the weight too, by which one would escape, and writes that replace or resize the memory."""
    w, x = nn.Parameter(weight()), torch.ones(6, 8)
    for run in (
        lambda: torch.mm(w, x.t(), out=torch.empty(6, 6)),
        lambda: torch.empty(6, 6).addmm_(w, x.t()), lambda: w.set_(x), lambda: w.t_(),
        lambda: torch.add(torch.ones(3, 3), 1.0, out=w),
        lambda: torch.ops.aten._resize_output_(w, [3, 3], w.device),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match=r"not an operation|out is not possible|resize"), torch.no_grad():
            run()
    assert w.data_ptr() == w.master.data_ptr()
    assert w.shape == w.master.shape == w.plain.shape == (6, 8)


def test_inference_tensors_are_quantized_afresh_after_writes():
    with torch.inference_mode():
        w = weight()
        assert_fresh(w)
        w.add_(1)
        assert_fresh(w)
        w.view(-1)[:3].zero_()
        assert_fresh(w)


def test_flattened_for_a_graph_as_the_layer_is_now():
    """What ``__tensor_flatten__`` returned before is returned again until something of the layer changes."""
    layer = ht.quantize_(nn.Linear(64, 64), "fp8_delayed")
    weight = layer.weight
    before = weight.__tensor_flatten__()
    assert weight.__tensor_flatten__() is before
    changes = [
        lambda: ht.set_config_(layer, "nvfp4"),
        lambda: setattr(weight.record.layer, "transposed", False),
        lambda: setattr(weight.record, "first", 3),
    ]
    for change in changes:
        change()
        now = weight.__tensor_flatten__()
        assert now != before
        assert now == weight.detach().__tensor_flatten__()  # made anew
        before = now


@pytest.mark.parametrize("shared", ["before", "after", "inner"])
def test_writes_of_another_process_are_seen(shared):
    """Hogwild, or an actor that reads what a learner writes: nothing in this process counts such a write."""
    layer, x = torch.nn.Linear(64, 64, bias=False), torch.randn(8, 64)
    if shared == "before":
        layer.share_memory()
    ht.quantize_(layer, "fp8")
    assert layer.weight.is_shared() == (shared == "before")
    if shared == "after":
        layer(x)
        layer.share_memory()
        assert layer.weight.is_shared()
    elif shared == "inner":
        layer.weight.plain.share_memory_()
    with torch.no_grad():
        first, again = layer(x), layer(x)
        assert torch.equal(first, again)
        memory = layer.weight.plain.data_ptr()
        ctypes.memset(memory, 0, layer.weight.plain.nbytes)
        assert not layer(x).any()


class Answers:
    """A model in another process, which runs there and is written there."""

    def __init__(self, connection):
        self.connection = connection

    def ask(self, write=False):
        torch.cuda.synchronize()
        self.connection.send(write)
        return self.connection.recv()


def answer(connection, recipe):
    """Run a model that comes from another process, twice each time, and then write it if asked to."""
    model, x = connection.recv()
    if recipe is not None:
        ht.quantize_(model, recipe)
    with torch.no_grad():
        while (write := connection.recv()) is not None:
            connection.send([model(x).cpu() for _ in range(2)])
            if write:
                model.weight.mul_(0)
                torch.cuda.synchronize()
                connection.send("written")


@pytest.mark.gpu
@pytest.mark.parametrize("converted", ["here", "there"])
@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed"])
def test_writes_of_another_process_to_a_gpu_are_seen(recipe, converted):
    """An actor that reads what a learner writes, and a learner that reads what an actor does, by CUDA's handles.

    Oracle: models that are converted after each write.
    """
    if not torch.cuda.is_available():
        pytest.skip("memory of a GPU")
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 64, bias=False, device="cuda"), torch.randn(8, 64, device="cuda")

    def fresh():
        twin = nn.Linear(64, 64, bias=False, device="cuda")
        with torch.no_grad():
            twin.weight.copy_(layer.weight)
            return ht.quantize_(twin, recipe)(x).cpu()

    if converted == "here":
        ht.quantize_(layer, recipe)
    here, there = (context := context_for("cuda")).Pipe()
    process = context.Process(target=answer, args=(there, None if converted == "here" else recipe))
    process.start()
    try:
        here.send((layer, x))
        actor = Answers(here)
        with torch.no_grad():
            for _ in range(3):
                expected = fresh()
                assert all(torch.equal(y, expected) for y in actor.ask())
                layer.weight.mul_(2).add_(0.01)  # as an optimizer does
            before = layer(x)
            assert before.any()
            assert torch.equal(layer(x), before)
            actor.ask(write=True)
            assert here.recv() == "written"
            assert not layer(x).any()
        here.send(None)
    finally:
        process.join(20)
        process.kill()


class ByAddress(torch.optim.Optimizer):
    """Writes as Triton's kernels do, which get addresses."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    ctypes.memset(p.data_ptr(), 0, p.nbytes)


@pytest.mark.parametrize("recipe", ["fp8", "fp8+keep_faces", "fp8_delayed", "nvfp4"])
@pytest.mark.parametrize("before", ["t", "tt", "et", "te", "eet", "tte"])
def test_an_optimizer_that_writes_by_address(before, recipe):
    """Nothing of it passes a handler, but that it stepped is known. Before: trained, evaluated."""
    layer, x = ht.quantize_(nn.Linear(64, 64, bias=False), recipe), torch.randn(8, 64)
    optimizer = ByAddress(layer.parameters())
    for kind in before:
        with torch.set_grad_enabled(kind == "t"):
            y = layer(x)
        assert y.any()
        if kind == "t":
            y.sum().backward()
    optimizer.step()
    with torch.no_grad():
        assert not layer(x).any()
    assert not layer(x).any()


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4", "bf16"])
def test_persistent_weights_have_no_address_to_write_to(recipe):
    """Values would be written over faces, and beyond the end of their memory; masters have addresses."""
    layer, x = ht.quantize_(nn.Linear(64, 64, bias=False), recipe, persistent=True), torch.randn(8, 64)
    layer(x).sum().backward()
    before = layer.weight.dequantize()
    with pytest.raises(RuntimeError, match=r"no memory of its own .*hybridtensor.optim.MasterWeights"):
        ByAddress(layer.parameters()).step()
    assert torch.equal(layer.weight.dequantize(), before)
    ht.optim.MasterWeights(ByAddress, layer.parameters()).step()
    assert not layer(x).any()


def test_one_optimizer_that_hooks_call_for_each_parameter():
    """All calls within one backward are one step, and each of them writes."""
    net, x = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(3)]), torch.randn(8, 64)
    ht.quantize_(net, "fp8+keep_faces")
    with torch.no_grad():
        assert net(x).any()
    optimizer, called = ByAddress(net.parameters()), []

    def step(p):
        called.append(p)
        optimizer.step()
        p.grad = None

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(step)
    net(x).sum().backward()
    assert len(called) == 3
    for layer in net:
        assert not layer(x).any()


def test_another_thread_may_free_faces_while_a_forward_ends():
    """Two threads train one model: the backward of one clears what the forward of the other looks through."""

    class Clearing(CachedFaces):
        @property
        def column(self):
            cache.clear()

    cache = FaceCache()
    for use in (cache.faces, lambda: cache.end_forward("auto", ForwardUse(True, True))):
        cache._views.update({place: Clearing() for place in range(3)})
        use()


@pytest.mark.parametrize("recipe", ["fp8", "fp8+free_faces"])
def test_a_thread_has_the_faces_that_it_got_though_another_one_frees_them(recipe):
    layer = ht.quantize_(nn.Linear(32, 32), recipe)
    weight, use = layer.weight, ForwardUse(True, True)
    for _ in range(2):  # made, then cached
        found = weight.faces_in_eager_code(
            weight.stamp(torch.float32), 0, weight.context, forward=use, columnwise=False, amax_record=None
        )
        weight.record.face_cache.end_forward(weight.config.keep_faces, use)
        assert found.row is not None


def test_another_thread_may_use_its_own_stream_while_faces_are_looked_up():
    stamp, place = (0, None, None, torch.float32), object()
    made, of_other = CachedFaces(amaxes=(torch.ones(1), None)), CachedFaces(amaxes=(torch.ones(1), None))

    class Use(ForwardUse):
        @property
        def trained(self):  # read after the stream is compared, before the faces are looked up
            cache.use(place, stamp, 2, EVALUATION)
            cache.store(place, stamp, of_other, 2)
            return False

    cache = FaceCache()
    cache.use(place, stamp, 0, EVALUATION)
    cache.store(place, stamp, made, 0)
    assert cache.use(place, stamp, 0, EVALUATION) is made
    found = cache.use(place, stamp, 1, Use(False, False))
    assert cache.current(place, stamp, 2) is of_other
    assert found is not made
    assert found is not of_other


def test_faces_of_a_weight_that_another_thread_writes_while_a_forward_ends_are_dropped():
    old, new, place = (0, None, None, torch.float32), (1, None, None, torch.float32), object()

    class Written(CachedFaces):
        @property
        def column(self):  # read while the forward ends
            cache.use(place, new, 0, EVALUATION)
            return self[1]

    cache, trained = FaceCache(), ForwardUse(True, True)
    cache.use(place, old, 0, trained)
    cache.store(place, old, CachedFaces(), 0)
    cache._views[place, 0] = Written(column="of the old values")
    cache.end_forward("never", trained)
    assert cache.current(place, new, 0).column is None


@pytest.mark.parametrize("persistent", [False, True])
def test_deepcopy_of_weights_that_name_each_other(persistent):
    model = ht.quantize_(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), "fp8", persistent=persistent)
    model[0].weight.sibling, model[1].weight.sibling = model[1].weight, model[0].weight
    made = copy.deepcopy(model)
    assert made[0].weight.sibling is made[1].weight
    assert made[1].weight.sibling is made[0].weight
