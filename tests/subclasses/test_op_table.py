"""The table that a class dispatches by."""

import pytest
import torch

from hybridtensor.subclasses import HybridTensor, IdentityTensor, MasterWeight, OpTable, QuantizedTensor
from hybridtensor.subclasses.op_table import overloads

aten = torch.ops.aten


def test_a_second_registration_is_an_error():
    table = OpTable("Test", "stop")
    table.register(aten.mm.default)(lambda func, args, kwargs: 1)
    with pytest.raises(ValueError, match=r"Test: aten\.mm\.default has a handler already"):
        table.register(aten.mm.default)(lambda func, args, kwargs: 2)
    assert table.call(aten.mm.default, (), {}) == 1


def test_an_operator_without_overload_is_an_error():
    with pytest.raises(TypeError, match=r"exact overload is required, got aten\.mm"):
        OpTable("Test", "stop").register(aten.mm)


def test_an_unknown_operator_raises_with_its_name_and_advice():
    with pytest.raises(NotImplementedError, match=r"Test: aten\.mm\.default is not an operation .*; stop"):
        OpTable("Test", "stop").call(aten.mm.default, (), {})


def test_overloads_leaves_out_the_out_variants():
    found = overloads(aten.add)
    assert aten.add.Tensor in found
    assert aten.add.Scalar in found
    assert not [f for f in found if "out" in f._overloadname]


@pytest.mark.parametrize("cls", [HybridTensor, IdentityTensor, QuantizedTensor, MasterWeight])
def test_tables_are_not_inherited(cls):
    others = {HybridTensor, IdentityTensor, QuantizedTensor, MasterWeight} - {cls}
    assert all(cls.ops is not other.ops for other in others)
    assert "ops" in cls.__dict__
