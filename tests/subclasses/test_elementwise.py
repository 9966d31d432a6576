"""Elementwise operators compute with the values of weights: all that this torch has.

Oracle: the same operator on plain tensors, bitwise.
"""

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import hybridtensor as ht
from hybridtensor.masters import high_precision_values

aten = torch.ops.aten
SHAPE = 32, 32
GIVEN = {"Scalar": 2, "number": 2, "float": 0.5, "int": 1, "bool": False}
"""Operands other than tensors."""


def is_elementwise(name):
    packet = getattr(aten, name, None)
    return packet is not None and any(torch.Tag.pointwise in getattr(packet, own).tags for own in packet.overloads())


def operators():
    """Every overload without ``out`` of operators on each element, and of lists of them."""
    names = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "aten::" in name}
    for name in sorted(names):
        if not is_elementwise(name.removeprefix("_foreach_")):
            continue
        packet = getattr(aten, name)
        for own in packet.overloads():
            op = getattr(packet, own)
            out = any(one.kwarg_only and one.alias_info and one.alias_info.is_write for one in op._schema.arguments)
            if not out and str(op._schema.arguments[0].type).startswith(("Tensor", "List[Tensor")):
                yield op


def operands(op, x):
    """Operands of an operator whose first one is ``x``; None if there are none that plain tensors take."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if argument.has_default_value() or argument.kwarg_only:
            break
        if not made:
            made.append([x] if kind.startswith("List") else x)
        elif kind == "Tensor" and argument.name == "condition":
            made.append(torch.rand(SHAPE, generator=generator) < 0.5)
        elif kind == "Tensor":
            made.append(
                torch.rand(() if "Tensor" in op._overloadname and "foreach" in str(op) else SHAPE, generator=generator)
            )
        elif kind == "List[Tensor]":
            made.append([torch.rand(SHAPE, generator=generator)])
        elif kind.startswith("List"):
            made.append([2])
        elif kind in GIVEN:
            made.append(GIVEN[kind])
        else:
            return None
    return made


def run(op, x):
    torch.manual_seed(0)
    return op(*operands(op, x))


def possible(op):
    """Whether plain tensors can be the operands: some take integers only."""
    try:
        return operands(op, torch.rand(SHAPE)) is not None and (run(op, torch.rand(SHAPE)), True)[1]
    except (RuntimeError, NotImplementedError):
        return False


OTHERS = {
    aten.equal.default,  # compares faces
    aten.rrelu.default,  # is composed of an operator that also returns what it drew
}
OPERATORS = [op for op in operators() if possible(op) and op not in OTHERS]


def weight_of(values, persistent):
    layer = nn.Linear(*SHAPE, bias=False)
    layer.weight.data.copy_(values)
    return ht.quantize_(layer, "fp8", persistent=persistent).weight


def same(got, expected):
    if not isinstance(expected, torch.Tensor):
        return got == expected
    return torch.equal(high_precision_values(got).nan_to_num(), expected.nan_to_num())


def test_most_operators_on_each_element_are_here():
    assert len(OPERATORS) > 400
    assert {aten.acos.default, aten.mul_.Tensor, aten._foreach_addcdiv.Scalar} < set(OPERATORS)


@pytest.mark.parametrize("persistent", [False, True], ids=["master", "persistent"])
def test_operators_on_each_element(persistent):
    x, before = torch.ones(SHAPE), torch.rand(SHAPE, generator=torch.Generator().manual_seed(2))
    wrong = {}
    for op in OPERATORS:
        values, weight = before.clone(), weight_of(before, persistent)
        expected = run(op, values)
        try:
            found = run(op, weight.data)
            pairs = [*zip(tree_leaves(found), tree_leaves(expected), strict=True), (weight, values)]
            output, fresh = (nn.functional.linear(x, one) for one in (weight, weight_of(values, persistent)))
            if not all(same(*pair) for pair in (*pairs, (output, fresh.detach()))):
                wrong[op] = "other values"
        except Exception as error:
            wrong[op] = error
    assert not wrong


def into_out(op):
    """The overload of an operator that writes each element into ``out``, or None; most are tagged."""

    def taken(one):
        return [(argument.name, str(argument.type)) for argument in one._schema.arguments]

    packet = op._overloadpacket
    found = [getattr(packet, own) for own in packet.overloads()]
    found = [one for one in found if torch.Tag.pointwise in one.tags]
    return next((one for one in found if taken(one) == [*taken(op), ("out", "Tensor")]), None)


INTO_OUT = {op: into_out(op) for op in OPERATORS if not op._schema.is_mutable and "_foreach_" not in str(op)}


@pytest.mark.parametrize("persistent", [False, True], ids=["master", "persistent"])
def test_operators_that_write_into_out(persistent):
    """Oracle: the operator on plain tensors, and the product of a weight that is converted with its result."""
    x, before = torch.ones(SHAPE), torch.rand(SHAPE, generator=torch.Generator().manual_seed(2))
    wrong, tried = {}, 0
    for op, into in INTO_OUT.items():
        expected = into and run(op, before)
        if not isinstance(expected, torch.Tensor) or expected.dtype != before.dtype:
            continue
        weight, tried = weight_of(before, persistent), tried + 1
        nn.functional.linear(x, weight)  # which leaves a face
        try:
            torch.manual_seed(0)
            into(*operands(op, weight.data), out=weight.data)
            output, fresh = (nn.functional.linear(x, one) for one in (weight, weight_of(expected, persistent)))
            if not same(weight, expected) or not torch.equal(output.nan_to_num(), fresh.nan_to_num()):
                wrong[op] = "other values"
        except Exception as error:
            wrong[op] = error
    assert not wrong
    assert tried > 100


@pytest.mark.parametrize("persistent", [False, True], ids=["master", "persistent"])
def test_out_of_another_size_raises_and_is_unchanged(persistent):
    weight = weight_of(torch.ones(SHAPE), persistent)
    told = r"aten\.add\.out would resize the weight of a layer to \[2, 32, 32\], got out of \[32, 32\]"
    with pytest.raises(NotImplementedError, match=told):
        torch.add(weight.data, torch.ones(2, *SHAPE), out=weight.data)
    assert same(weight, torch.ones(SHAPE))
