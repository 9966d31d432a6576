"""Every operator in the tables of the low-precision classes, one case each, against the same on plain tensors.

The oracle is the plain tensor of dequantized values: an operator that only moves values must commute with dequantizing,
bit for bit, on each face.
"""

import copy

import pytest
import torch

from hybridtensor import Float8Quantizer, HybridQuantizer, HybridTensor, IdentityQuantizer, IdentityTensor
from hybridtensor import QuantizedTensor as Leaf
from hybridtensor.ops import Groups
from hybridtensor.state import Context
from hybridtensor.subclasses.operators import hybrid_values as operators
from hybridtensor.subclasses.operators.common import FUNCTIONAL
from hybridtensor.subclasses.operators.common import PRODUCTS as REFUSED
from hybridtensor.subclasses.structure import flatten
from hybridtensor.testing import random_tensor

aten = torch.ops.aten

QUANTIZERS = {
    "tensor": Float8Quantizer(),
    "row": Float8Quantizer(granularity="row"),
    "hybrid": HybridQuantizer(Float8Quantizer(granularity="row"), Float8Quantizer(dtype="e5m2")),
    "identity": IdentityQuantizer(),
    "dequantized": HybridQuantizer(Float8Quantizer(), IdentityQuantizer(), "rowwise_dequantized"),
}


def faces(x):
    """Return the dequantized values of every face, columnwise and rowwise."""
    if isinstance(x, HybridTensor):
        return [face.dequantize() for face in (x.rowwise, x.columnwise) if face is not None]
    return [x.dequantize()]


# operator -> what to call on any tensor; the result must be of the same class unless listed in PLAIN
MOVES = {
    aten.alias.default: lambda x: aten.alias.default(x),
    aten.detach.default: lambda x: x.detach(),
    aten.lift_fresh.default: lambda x: aten.lift_fresh.default(x),
    aten.as_strided.default: lambda x: torch.as_strided(x, x.shape, x.stride()),
    aten.slice.Tensor: lambda x: x[2:5],
    aten.split.Tensor: lambda x: x.split(3)[1],
    aten.split_with_sizes.default: lambda x: x.split([1, 5, 0])[1],
    aten.t.default: lambda x: x.t(),
    aten.transpose.int: lambda x: x.transpose(0, 1),
    aten.permute.default: lambda x: x.permute(1, 0),
    aten.view.default: lambda x: x.view(2, 3, 8),
    aten._unsafe_view.default: lambda x: aten._unsafe_view.default(x, [2, 3, 8]),
    aten.clone.default: lambda x: x.clone(),
    aten._to_copy.default: lambda x: x.to("cpu", copy=True),
}
QUERIES = {
    aten.is_same_size.default: lambda x: aten.is_same_size.default(x, x),
    aten.is_set_to.default: lambda x: x.is_set_to(x.detach()),
    aten.is_pinned.default: lambda x: x.is_pinned(),
    aten.equal.default: lambda x: torch.equal(x, x.clone()),
}
PLAIN_LIKE = {
    aten.zeros_like.default: torch.zeros_like,
    aten.ones_like.default: torch.ones_like,
    aten.full_like.default: lambda x: torch.full_like(x, 3.0),
    aten.rand_like.default: torch.rand_like,
    aten.randn_like.default: torch.randn_like,
    aten.new_full.default: lambda x: x.new_full(x.shape, 3.0),
    aten.new_ones.default: lambda x: x.new_ones(x.shape),
}
NEW = {
    aten.empty_like.default: lambda x: torch.empty_like(x),
    aten.new_empty.default: lambda x: x.new_empty(4, 8),
    aten.new_zeros.default: lambda x: x.new_zeros(4, 8),
}
IN_PLACE = {aten.copy_.default: lambda x: x.copy_(x.clone())}
PRODUCTS = {
    aten.mm.default: lambda x: torch.mm(x, torch.ones(8, 4, dtype=x.dtype)),
    aten.addmm.default: lambda x: torch.addmm(torch.ones(4, dtype=x.dtype), x, torch.ones(8, 4, dtype=x.dtype)),
    aten.linear.default: lambda x: aten.linear.default(x, torch.ones(4, 8, dtype=x.dtype)),
}
OF_STACKS = {aten.select.int: lambda x: x[-1], aten.unbind.int: lambda x: x.unbind()[1]}
NEEDS_ACCELERATOR = {aten._pin_memory.default}  # tested on a GPU, below
FILLS = {op for op in HybridTensor.ops if op.overloadpacket in (aten.fill_, aten.zero_, aten.uniform_, aten.normal_)}

COVERED = {*MOVES, *QUERIES, *PLAIN_LIKE, *NEW, *IN_PLACE, *PRODUCTS, *OF_STACKS, *NEEDS_ACCELERATOR}


def make(cls, name):
    hybrid = QUANTIZERS[name].quantize(random_tensor(6, 8))
    if cls is HybridTensor:
        return hybrid
    face = hybrid.columnwise if cls is IdentityTensor else hybrid.rowwise
    return face if isinstance(face, cls) else None


CASES = [
    pytest.param(cls, name, id=f"{cls.__name__}-{name}")
    for cls in (HybridTensor, Leaf, IdentityTensor)
    for name in QUANTIZERS
    if make(cls, name) is not None
]


@pytest.mark.parametrize("cls", [HybridTensor, Leaf, IdentityTensor])
def test_every_operator_of_the_table_has_a_case_here(cls):
    """But for those that write weights, which tests/subclasses/test_assignment.py and test_collectives have, ``t_``,
    which test_hybrid_tensor.py has, and what tests/test_exported.py and, of an embedding,
    tests/distributed/test_tensor_parallel.py run."""
    fills = FILLS if cls is not Leaf else set()
    writes = {*operators.WRITES_OF_WEIGHTS, *operators.COLLECTIVES, aten.set_data.default}
    exported = torch.ops.hybridtensor.without_gradient.default
    of_weights = {
        *operators.READS_OF_WEIGHTS,
        *operators.JOINS,
        *FUNCTIONAL,
        *REFUSED,
        exported,
        aten.embedding.default,
        aten.t_.default,
    }
    weights = writes | of_weights if cls is HybridTensor else set()
    assert set(cls.ops) == COVERED | fills | weights


@pytest.mark.parametrize(("cls", "name"), CASES)
@pytest.mark.parametrize("op", MOVES, ids=str)
def test_moves_commute_with_dequantizing(op, cls, name):
    x = make(cls, name)
    y = MOVES[op](x)
    expected = MOVES[op](x.dequantize())
    assert type(y) is cls
    assert y is not x
    assert y.shape == expected.shape
    assert y.dtype == expected.dtype
    swapped = op in (aten.t.default, aten.transpose.int, aten.permute.default)
    before = faces(x)[::-1] if swapped else faces(x)
    for got, value in zip(faces(y), before, strict=True):
        assert torch.equal(got, MOVES[op](value))
    if isinstance(x, HybridTensor):
        assert not {id(y.rowwise), id(y.columnwise)} & {id(x.rowwise), id(x.columnwise)} - {id(None)}


@pytest.mark.parametrize(("cls", "name"), CASES)
@pytest.mark.parametrize("op", QUERIES, ids=str)
def test_queries(op, cls, name):
    assert QUERIES[op](make(cls, name)) is (op is not aten.is_pinned.default)


@pytest.mark.parametrize(("cls", "name"), CASES)
@pytest.mark.parametrize("op", PLAIN_LIKE, ids=str)
def test_like_functions_give_plain_tensors_for_optimizer_state(op, cls, name):
    x = make(cls, name)
    y = PLAIN_LIKE[op](x)
    assert type(y) is torch.Tensor
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    turned = x.t() if x.dim() == 2 else x
    plain = torch.empty_strided(turned.shape, turned.stride(), dtype=x.dtype)
    assert PLAIN_LIKE[op](turned).stride() == PLAIN_LIKE[op](plain).stride()


@pytest.mark.parametrize(("cls", "name"), CASES)
@pytest.mark.parametrize("op", NEW, ids=str)
def test_new_tensors_keep_class_and_format(op, cls, name):
    x = make(cls, name)
    y = NEW[op](x)
    assert type(y) is cls
    assert y.dtype == x.dtype
    assert op is not aten.empty_like.default or torch.empty_like(x.t()).stride() == x.t().stride()
    assert tuple(y.shape) == (tuple(x.shape) if op is aten.empty_like.default else (4, 8))
    if isinstance(x, Leaf):
        assert (y.format, y.axis) == (x.format, x.axis)
        assert tuple(y.scale.shape) == y.format.scale_shape(*y.qdata.shape)
    if op is aten.new_zeros.default:
        assert all(value.eq(0).all() for value in faces(y))
        if isinstance(y, Leaf):
            assert y.scale.float().eq(1).all()


@pytest.mark.parametrize(("cls", "name"), CASES)
def test_copy_replaces_the_payload_in_place(cls, name):
    x, other = make(cls, name), make(cls, name)
    other = other.new_zeros(6, 8)
    addresses = [t.data_ptr() for t in flatten(x)[0]]
    assert x.copy_(other) is x
    assert [t.data_ptr() for t in flatten(x)[0]] == addresses
    assert all(value.eq(0).all() for value in faces(x))


@pytest.mark.parametrize(("cls", "name"), CASES)
def test_copy_into_a_plain_tensor_dequantizes(cls, name):
    x = make(cls, name)
    for dtype in (torch.bfloat16, torch.float32):
        plain = torch.empty(6, 8, dtype=dtype).copy_(x)
        assert torch.equal(plain, x.dequantize(dtype))
    for dtype in (torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2):
        plain, expected = (torch.empty(6, 8, dtype=dtype).copy_(values) for values in (x, x.dequantize()))
        assert torch.equal(plain, expected)


@pytest.mark.parametrize(("cls", "name"), CASES)
@pytest.mark.parametrize("op", PRODUCTS, ids=str)
def test_products_run(op, cls, name):
    x = make(cls, name)
    if isinstance(x, Leaf) and x.axis != -1:
        pytest.skip("a columnwise leaf cannot be a left operand; tested in test_matmul")
    y = PRODUCTS[op](x)
    row = x.rowwise if isinstance(x, HybridTensor) else x
    exact = row.dequantize(torch.float32).sum(dim=1, keepdim=True).expand(6, 4) + (op is aten.addmm.default)
    torch.testing.assert_close(y.float(), exact, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("op", sorted(FILLS, key=str), ids=str)
def test_fills_need_a_recipe_on_a_hybrid_and_write_through_an_identity(op):
    arguments = {aten.fill_: (2.0,), aten.zero_: (), aten.uniform_: (2.0, 3.0), aten.normal_: (5.0, 0.1)}
    given = (torch.tensor(2.0),) if op is aten.fill_.Tensor else arguments[op.overloadpacket]
    identity = make(IdentityTensor, "identity")
    op(identity, *given)
    plain = torch.empty(6, 8, dtype=torch.bfloat16)
    torch.testing.assert_close(identity.dequantize().float().mean(), op(plain, *given).float().mean(), rtol=0.1, atol=0)
    with pytest.raises(NotImplementedError, match="no recipe"):
        op(make(HybridTensor, "tensor"), *given)


def test_the_nominal_dtype_changes_without_touching_bytes():
    x = make(HybridTensor, "hybrid")
    y = x.to(torch.float32)
    assert type(y) is HybridTensor
    assert y.dtype == y.rowwise.dtype == torch.float32
    assert torch.equal(y.rowwise.qdata.view(torch.uint8), x.rowwise.qdata.view(torch.uint8))
    assert torch.equal(y.rowwise.dequantize(), x.rowwise.dequantize(torch.float32))
    with pytest.raises(TypeError, match=r"floating-point dtype is required, got torch\.int32"):
        x.to(torch.int32)


@pytest.mark.parametrize("name", ["tensor", "row", "hybrid", "identity"])
@pytest.mark.parametrize(
    "cut", [lambda x: x[:], lambda x: x[0:], lambda x: x[0:6:1], lambda x: x[:, :], lambda x: x[-6:]], ids=range(5)
)
def test_no_op_slices_stay_ours_and_are_new_objects(name, cut):
    x = make(HybridTensor, name)
    y = cut(x)
    assert type(y) is HybridTensor
    assert y is not x
    assert y.rowwise is not x.rowwise
    assert torch.equal(x, y)


@pytest.mark.parametrize("name", ["tensor", "row", "hybrid", "identity"])
@pytest.mark.parametrize(
    "cut", [lambda x: x[1:4], lambda x: x[::2], lambda x: x[:, 3:7], lambda x: x[2:3, ::3], lambda x: x[:0]],
    ids=["rows", "step", "columns", "both", "none"],
)  # fmt: skip
def test_slices_keep_the_values(name, cut):
    x = make(HybridTensor, name)
    for got, value in zip(faces(cut(x)), faces(x), strict=True):
        assert torch.equal(got, cut(value))


@pytest.mark.parametrize("name", ["row", "hybrid", "identity"])
@pytest.mark.parametrize(
    "cut", [lambda x: x[1:4], lambda x: x[::2], lambda x: x[:, 3:7], lambda x: x.t()[2:5], lambda x: x[:, 1:2]],
    ids=["rows", "step", "columns", "transposed", "column"],
)  # fmt: skip
def test_slices_lie_as_those_of_plain_tensors(name, cut):
    """What is made contiguous, or flattened, of one that has gaps is a copy."""
    x, plain = make(HybridTensor, name), random_tensor(6, 8)
    part, expected = cut(x), cut(plain)
    for made in (lambda t: t, torch.clone, lambda t: t.contiguous(), lambda t: t.reshape(-1), lambda t: t.float()):
        assert made(part).stride() == made(expected).stride()
    aliases = [
        [u.data_ptr() for u in flatten(t.contiguous())[0]] == [u.data_ptr() for u in flatten(t)[0]]
        for t in (part, expected)
    ]
    assert aliases[0] == aliases[1]


def test_slices_of_a_batch_take_whole_groups_of_rows():
    x = Float8Quantizer(granularity="row").quantize(random_tensor(4, 3, 8))
    for got, value in zip(faces(x[1:3]), faces(x), strict=True):
        assert torch.equal(got, value[1:3])
    for got, value in zip(faces(x[..., 2:6]), faces(x), strict=True):
        assert torch.equal(got, value[..., 2:6])
    with pytest.raises(NotImplementedError, match="first or the last dimension"):
        x[:, 1:2]


def test_writing_through_a_slice_cannot_change_the_rest():
    """A slice of a per-tensor face shares the one scale: a write that changes it would rescale the other rows."""
    x = Float8Quantizer().quantize(random_tensor(6, 8), columnwise=False)
    before = x.dequantize()
    with pytest.raises(ValueError, match="would change the rest of the group"):
        x[:2].copy_(Float8Quantizer().quantize(random_tensor(2, 8, seed=9) * 100, columnwise=False))
    assert torch.equal(x.dequantize(), before)
    x[:2].detach().copy_(x[2:4])  # the same scale: no harm
    assert torch.equal(x.dequantize()[:2], before[2:4])
    rows = Float8Quantizer(granularity="row").quantize(random_tensor(6, 8), columnwise=False)
    rows[:2].copy_(Float8Quantizer(granularity="row").quantize(random_tensor(2, 8, seed=9) * 100, columnwise=False))
    assert rows.dequantize()[:2].abs().max() > 100


@pytest.mark.parametrize("name", QUANTIZERS)
def test_views_of_leading_dimensions_and_flattening(name):
    x = QUANTIZERS[name].quantize(random_tensor(2, 3, 8))
    for size in ((6, 8), (3, 2, 8), (-1, 8), (1, 2, 3, 8), (-1,), (48,)):
        for got, value in zip(faces(x.view(size)), faces(x), strict=True):
            assert torch.equal(got, value.view(size))
    assert torch.equal(x.view(-1).view(2, 3, 8), x)


def test_views_that_a_face_cannot_represent_say_why():
    x = QUANTIZERS["row"].quantize(random_tensor(6, 8))
    with pytest.raises(NotImplementedError, match="would split the scale groups"):
        x.view(12, 4)
    with pytest.raises(RuntimeError, match="is not contiguous"):
        x.t().view(-1)
    with pytest.raises(NotImplementedError, match="as_strided"):
        torch.as_strided(x, (3, 8), (8, 1))
    with pytest.raises(NotImplementedError, match="only the matrices of a stack can be selected"):
        x[0]
    with pytest.raises(NotImplementedError, match="only a matrix, or each of a stack, can be transposed"):
        x.rowwise.view(2, 3, 8).transpose(0, 1)


@pytest.mark.parametrize("function", [torch.abs, lambda x: x + 1, torch.relu, torch.norm, lambda x: torch.cat([x, x])])
@pytest.mark.parametrize("cls", [HybridTensor, Leaf, IdentityTensor])
def test_nothing_dequantizes_silently(cls, function):
    x = make(cls, "identity" if cls is IdentityTensor else "tensor")
    with pytest.raises(NotImplementedError, match=rf"{cls.__name__}: aten\..* is not an operation of this class; call"):
        function(x)


@pytest.mark.parametrize(("cls", "name"), CASES)
def test_clone_is_independent(cls, name):
    x = make(cls, name)
    y = x.clone()
    before = faces(y)
    x.copy_(x.new_zeros(6, 8))
    assert all(torch.equal(a, b) for a, b in zip(faces(y), before, strict=True))


@pytest.mark.parametrize(("cls", "name"), CASES)
def test_deepcopy_keeps_class_values_and_user_attributes(cls, name):
    x = make(cls, name)
    x.note = ["mine"]
    y = copy.deepcopy(x)
    assert type(y) is cls
    assert torch.equal(x, y)
    assert not {t.data_ptr() for t in flatten(x)[0]} & {t.data_ptr() for t in flatten(y)[0]}
    assert y.note == ["mine"]
    assert y.note is not x.note


def test_copy_between_other_formats_needs_a_recipe():
    x, y = make(HybridTensor, "tensor"), make(HybridTensor, "row")
    with pytest.raises(NotImplementedError, match="no recipe to quantize"):
        x.copy_(y)
    with pytest.raises(NotImplementedError, match="no recipe to quantize"):
        x.copy_(torch.zeros(6, 8))
    with pytest.raises(ValueError, match="one format, axis and shape are required"):
        x.rowwise.copy_(y.rowwise)
    with pytest.raises(NotImplementedError, match="does not know how it was quantized"):
        x.rowwise.copy_(torch.zeros(6, 8))


def test_refusals_of_what_needs_one_storage():
    x = make(HybridTensor, "tensor")
    with pytest.raises(NotImplementedError, match="share_memory_"):
        x.share_memory_()
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()
    assert x.numpy(force=True).shape == (6, 8)
    for tensor in (x, x.rowwise, make(IdentityTensor, "identity")):
        with pytest.raises(RuntimeError, match="no memory of its own"):
            tensor.data_ptr()
    assert type(x.data) is HybridTensor


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("inference", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_views_work_in_inference_mode(name, inference):
    x = make(HybridTensor, name)
    with inference():
        assert torch.equal(x.view(-1).view(6, 8), x)
        y = QUANTIZERS[name].quantize(random_tensor(6, 8))
        assert torch.equal(y.t().t(), x)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs a CUDA device")
@pytest.mark.parametrize(("cls", "name"), CASES)
def test_pinning_and_moving(cls, name):
    x = make(cls, name)
    pinned = x.pin_memory()
    assert type(pinned) is cls
    assert pinned.is_pinned()
    assert not x.is_pinned()
    assert torch.equal(pinned, x)
    moved = x.to("cuda", non_blocking=True)
    assert type(moved) is cls
    assert moved.device.type == "cuda"
    assert all(torch.equal(a.cpu(), b) for a, b in zip(faces(moved), faces(x), strict=True))
    assert torch.equal(moved.cpu(), x)


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("op", OF_STACKS, ids=str)
def test_the_matrices_of_a_stack(op, name):
    stack = QUANTIZERS[name].quantize(random_tensor(12, 8).view(2, 6, 8), context=Context("weight", groups=Groups(2)))
    one = OF_STACKS[op](stack)
    assert torch.equal(one.dequantize(), stack.dequantize()[1])
    for face, of_all in zip(faces(one), faces(stack), strict=True):
        assert torch.equal(face, of_all[1])
    for wrong in (lambda: make(HybridTensor, name)[0], lambda: stack.select(1, 0), lambda: stack.unbind(2)):
        with pytest.raises(NotImplementedError, match="only the matrices of a stack can be selected"):
            wrong()
    with pytest.raises(IndexError):
        stack[2]


def test_permute_transposes_the_matrices_of_a_stack():
    stack = QUANTIZERS["row"].quantize(random_tensor(12, 8).view(2, 6, 8), context=Context("weight", groups=Groups(2)))
    assert torch.equal(stack.permute(0, -1, 1), stack.transpose(1, 2))
    with pytest.raises(NotImplementedError, match=r"can be transposed, got dimensions \{0, 1\}"):
        stack.permute(1, 0, 2)
