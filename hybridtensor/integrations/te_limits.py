"""What TransformerEngine cannot do of our configs: known before training, not when a layer first runs."""

from __future__ import annotations

from hybridtensor import quantizers as ours
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.recipes.spec import GEMMS, Faces
from hybridtensor.state import ROLES


def check(config: HybridConfig) -> None:
    """Raise NotImplementedError if TransformerEngine cannot do what a config says."""
    faces = Faces.of_config(config)
    hybrids = {role for role in ROLES if isinstance(getattr(config, role), ours.HybridQuantizer)}
    for (role, direction), face in faces.quantizers.items():
        _check_face(face, role, direction, in_hybrid=role in hybrids)
    for gemm in GEMMS:
        left, right = (faces.quantizers[operand] for operand in gemm[1:])
        formats = [str(fmt) for fmt in config.formats(gemm)]
        if _family(left) != _family(right):
            raise _unable(
                f"operands of one kind in {gemm.name} are",
                " by ".join(formats),
                "give both the same format",
            )
        if all("e5m2" in name for name in formats):
            raise _unable(
                f"an E4M3 operand in {gemm.name} is", "E5M2 by E5M2", "make one of them E4M3"
            )
        if all("128x128" in name for name in formats):
            raise _unable(
                f"a 1x128 operand in {gemm.name} is", "128x128 by 128x128", "make one of them 1x128"
            )
    for flag, advice in (
        ("fast_accum", "drop it"),
        ("bf16_weight_values", "give its layers bf16 weights and drop it"),
    ):
        if getattr(config, flag):
            raise _unable("a config without policies of our own products is", flag, advice)


def _check_face(face: ours.Quantizer, role: str, direction: str, *, in_hybrid: bool) -> None:
    """Raise NotImplementedError if TransformerEngine cannot make one face of an operand."""
    where = f"{role}.{direction}"
    if getattr(face, "granularity", "") == "row":
        raise _unable(
            f"a scale per tensor or block in {where} is",
            "one per row",
            "use fp8, fp8_block or mxfp8",
        )
    of_tensor = isinstance(face, ours.Float8Quantizer) and face.granularity == "tensor"
    if in_hybrid and of_tensor and direction == "columnwise":
        raise _unable(
            f"a rowwise face of the same format beside {where} is",
            "one of another",
            f"give both products of {role} one format",
        )
    if isinstance(face, ours.DelayedFloat8Quantizer):
        if in_hybrid:
            raise _unable(
                f"current scaling in {where} is",
                "delayed scaling of one direction",
                "use fp8 there",
            )
        if role != "grad_output" and face.dtype != "e4m3":
            raise _unable(f"delayed scaling to E4M3 in {where} is", face.dtype, "drop its dtype")
    if isinstance(face, ours.MXFP4Quantizer):
        raise _unable(f"another format in {where} is", "mxfp4", "use mxfp8 or nvfp4")
    if isinstance(face, ours.NVFP4Quantizer):
        if face.format.drawn_signs:
            raise _unable(
                f"rounding of elements in {where} is",
                f"rounding={face.rounding!r}",
                "use rounding='stochastic'",
            )
        if face.hadamard and direction == "rowwise":
            raise _unable(
                f"rotation of columnwise faces only in {where} is",
                "hadamard",
                "rotate both of grad_weight",
            )
        if face.row_scaled and (direction == "columnwise" or face.stochastic or face.hadamard):
            raise _unable(
                f"rows scaled in the forward only, in {where}, are",
                str(face),
                "drop row_scaled there",
            )
        if face.four_over_six is not None and face.hadamard:
            raise _unable(
                f"four_over_six without rotation in {where} is", "both", "drop one of them there"
            )
        if face.four_over_six is None and face.scale_max != 448:
            raise _unable(
                f"four_over_six with other block scales than up to 448 in {where} is",
                f"scale_max={face.scale_max} alone",
                "drop it there",
            )


def _family(face: ours.Quantizer) -> str:
    """Name the kind of a quantizer, which must be the same for both operands of a product."""
    if isinstance(face, ours.Float8Quantizer) and face.granularity == "block":
        return "block"
    return type(face).__name__.removeprefix("Delayed")  # scales per tensor, wherever they come from


def _unable(required: str, got: str, advice: str) -> NotImplementedError:
    return NotImplementedError(
        f"qfactory: {required} required by TransformerEngine, got {got}; {advice}"
    )
