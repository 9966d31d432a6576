"""Format records against the published formats."""

import copy
import dataclasses
import functools
import pickle

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch

from hybridtensor import format_record, formats, ops
from hybridtensor.formats import FP8_E4M3_ROW, FP8_E4M3_TENSOR, FP8_E5M2_TENSOR, IDENTITY, Format
from hybridtensor.ops.dequantize import element_values
from hybridtensor.ops.references.float8 import cast_saturating
from hybridtensor.ops.references.nvfp4 import e2m1_encode

CODECS = [
    pytest.param(FP8_E4M3_TENSOR, ml_dtypes.float8_e4m3fn, gfloat.formats.format_info_ocp_e4m3, id="e4m3"),
    pytest.param(FP8_E5M2_TENSOR, ml_dtypes.float8_e5m2, gfloat.formats.format_info_ocp_e5m2, id="e5m2"),
]
E2M1 = gfloat.formats.format_info_ocp_e2m1


@pytest.mark.parametrize(("fmt", "element", "info"), CODECS)
def test_max_is_the_largest_finite_element(fmt, element, info):
    assert fmt.max == float(ml_dtypes.finfo(element).max) == info.max
    assert fmt.max == torch.finfo(fmt.element).max


@pytest.mark.parametrize(("fmt", "element", "info"), CODECS)
def test_every_bf16_value_is_encoded_as_ml_dtypes_and_gfloat_do(fmt, element, info, device):
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    codes = cast_saturating(x.to(device).float(), fmt).cpu().view(torch.uint8).numpy()
    values = x.float().numpy()
    with np.errstate(invalid="ignore"):
        expected = np.clip(values, -fmt.max, fmt.max).astype(element).view(np.uint8)
    expected = np.where(np.isnan(values), 0x7F, expected)
    np.testing.assert_array_equal(codes, expected)
    some = np.arange(0, 65536, 7)  # gfloat is slow: a seventh of them, which covers every exponent
    for i in some[~np.isnan(values[some])]:
        decoded = gfloat.decode_float(info, int(codes[i])).fval
        assert decoded == gfloat.round_float(info, float(values[i]), sat=True)


@pytest.mark.parametrize(("fmt", "element", "info"), CODECS)
def test_fp32_ties_go_to_even(fmt, element, info, device):
    finite = np.arange(256, dtype=np.uint8).view(element).astype(np.float32)
    finite = np.sort(finite[np.isfinite(finite)])
    ties = (finite[1:].astype(np.float64) + finite[:-1]) / 2
    around = np.concatenate([np.nextafter(ties.astype(np.float32), np.float32(s)) for s in (-np.inf, np.inf)])
    x = np.concatenate([ties.astype(np.float32), around])
    codes = cast_saturating(torch.from_numpy(x).to(device), fmt).cpu().view(torch.uint8).numpy()
    np.testing.assert_array_equal(codes, x.astype(element).view(np.uint8))


def test_every_bf16_value_is_encoded_in_e2m1_as_ml_dtypes_and_gfloat_do(device):
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[~x.isnan()]
    codes = e2m1_encode(x.to(device).float()).cpu().numpy()
    values = x.float().numpy()
    expected = np.clip(values, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 0xF
    np.testing.assert_array_equal(codes, expected)
    for i in range(0, len(values), 7):
        assert gfloat.decode_float(E2M1, int(codes[i])).fval == gfloat.round_float(E2M1, float(values[i]), sat=True)
    assert E2M1.max == formats.E2M1_MAX


def test_fp32_ties_in_e2m1_go_to_even(device):
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=np.float32)
    x = np.concatenate([ties, *(np.nextafter(ties, np.float32(s)) for s in (-np.inf, np.inf))])
    x = np.concatenate([x, -x])
    codes = e2m1_encode(torch.from_numpy(x).to(device)).cpu().numpy()
    np.testing.assert_array_equal(codes, x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 0xF)


def test_every_pair_of_e2m1_codes_decodes_as_ml_dtypes_does(device):
    packed = torch.arange(256, dtype=torch.int32).to(torch.uint8)[:, None].to(device)
    values = element_values(packed, formats.NVFP4).cpu().numpy()
    low, high = (np.arange(256) & 0xF).astype(np.uint8), (np.arange(256) >> 4).astype(np.uint8)
    expected = np.stack([c.view(ml_dtypes.float4_e2m1fn).astype(np.float32) for c in (low, high)], axis=1)
    np.testing.assert_array_equal(values.view(np.uint32), expected.view(np.uint32))


def test_every_e8m0_scale_decodes_as_ml_dtypes_does(device):
    scale = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values = scale.to(device).view(torch.float8_e8m0fnu).float().cpu().numpy()
    np.testing.assert_array_equal(values, scale.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32))


def test_blocks_give_the_shape_of_the_scales():
    assert FP8_E4M3_TENSOR.scale_shape(5, 7) == (1, 1)
    assert FP8_E4M3_ROW.scale_shape(5, 7) == (5, 1)
    assert Format("x", torch.uint8, 6.0, block=(1, 16), scale_dtype=torch.float8_e4m3fn).scale_shape(5, 40) == (5, 3)
    assert Format("x", torch.uint8, 6.0, block=(128, 128), scale_dtype=torch.float32).scale_shape(130, 128) == (2, 1)


def test_what_is_stored_along_the_contraction_is_whole_steps():
    for name, tokens, stored in (
        ("fp8_e4m3_row", 7, 7),
        ("fp8_e4m3_128x128", 7, 7),
        ("identity", 7, 7),
        ("mxfp8_e4m3", 33, 64),
        ("mxfp8_e4m3_32x32", 32, 32),
        ("mxfp4", 33, 64),
        ("nvfp4", 33, 48),
        ("nvfp4_16x16", 0, 0),
    ):
        assert formats.get_format(name).stored(tokens) == stored


def test_bytes_per_row_counts_elements_and_scales():
    assert IDENTITY.bytes_per_row(64) == 128
    assert FP8_E4M3_TENSOR.bytes_per_row(64) == 64
    assert FP8_E4M3_ROW.bytes_per_row(64) == 68
    packed = Format("x", torch.uint8, 6.0, (1, 16), torch.float8_e4m3fn, elements_per_byte=2)
    assert packed.bytes_per_row(64) == 32 + 4


def test_there_is_one_record_of_a_name():
    assert pickle.loads(pickle.dumps(FP8_E4M3_ROW)) is FP8_E4M3_ROW
    again = Format("fp8_e4m3_row", torch.float8_e4m3fn, 448.0, (1, None), torch.float32)
    assert formats.register_format(again) is FP8_E4M3_ROW


def test_an_unknown_format_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'fp8_e4m3_row'"):
        formats.get_format("fp8_e4m3_rows")


@pytest.mark.parametrize(
    ("element", "largest"),
    [(torch.float8_e4m3fn, 449.0), (torch.float8_e5m2, float("inf")), (torch.float4_e2m1fn_x2, 8.0)],
)
def test_a_largest_value_that_no_element_has_is_refused(element, largest):
    """Values beyond the largest element would be clipped, and those divided by Inf all be zeros."""
    for value in (0.0, largest):
        with pytest.raises(ValueError, match=rf"Format: a max above 0 and at most .* is required .* got {value}"):
            formats.Format("no_such_element", element, value, (1, 32), torch.float32)


def test_a_second_record_of_one_name_is_refused():
    with pytest.raises(ValueError, match="names are unique"):
        formats.register_format(Format("fp8_e4m3_row", torch.float8_e5m2, 1.0))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["", "a;b", "a|b", "mxfp8_e4m3_values"])
def test_a_name_that_operators_cannot_read_is_refused(name):
    """Operators get their casts as text, between separators, and the values of a format by its name."""
    fmt = dataclasses.replace(FP8_E4M3_ROW, name=name, block=(1, 40))
    with pytest.raises(ValueError, match=r"register_format: .* got .*choose another name"):
        formats.register_format(fmt)
    assert formats.format_of_face("mxfp8_e4m3_values") is formats.MXFP8_E4M3.values


def test_a_trace_works_out_nothing_of_a_record(monkeypatch):
    """Dynamo cannot enter the lock of a value that is worked out at its first use."""
    monkeypatch.setattr(format_record, "REGISTRY", dict(formats.REGISTRY))
    fmt = formats.register_format(dataclasses.replace(formats.NVFP4, name="like_nvfp4"))
    for one in (fmt, fmt.values):
        known = {name for name, member in vars(Format).items() if isinstance(member, functools.cached_property)}
        assert known <= vars(one).keys()
    request = ops.CastRequest(ops.Cast(fmt), ops.Cast(fmt))
    compiled = torch.compile(lambda x: ops.quantize(x, request)[0].qdata, fullgraph=True, backend="aot_eager")
    x = torch.ones(32, 64, dtype=torch.bfloat16)
    assert torch.equal(compiled(x), ops.quantize(x, request)[0].qdata)
    torch._dynamo.reset()


def test_records_with_equal_fields_are_one_object():
    fields = {field.name: getattr(formats.MXFP8_E4M3, field.name) for field in dataclasses.fields(formats.Format)}
    assert formats.Format(**fields) is formats.MXFP8_E4M3
    assert formats.Format(**fields | {"max": 240.0}) != formats.MXFP8_E4M3
    for fmt in (formats.NVFP4, formats.NVFP4.values):
        assert copy.copy(fmt) is copy.deepcopy(fmt) is pickle.loads(pickle.dumps(fmt)) is fmt


def test_a_record_that_is_not_registered_is_not_pickled():
    """Its name might find another record."""
    fmt = dataclasses.replace(formats.MXFP8_E4M3, max=240.0)
    assert copy.deepcopy(fmt) is fmt
    with pytest.raises(ValueError, match="pickle: format 'mxfp8_e4m3' is not registered; call register_format"):
        pickle.dumps(fmt)
