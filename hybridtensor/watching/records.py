"""What a sampled step comes to: numbers by layer, operand and product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from hybridtensor.quantizers import HybridQuantizer
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.recipes.spec import GEMMS as PRODUCTS
from hybridtensor.watching.statistics import face_statistics, product_statistics
from hybridtensor.watching.sums import GEMMS, OPERANDS, Numbers, Watched


@dataclass(frozen=True)
class FaceRow:
    """What a format did to one face in one sampled step.

    Attributes:
        step: How many steps the optimizer had taken.
        layer: Fully qualified name.
        operand: ``input.rowwise``, ``weight.columnwise``, ...
        format: Its format.
        statistics: By the names of ``hybridtensor.watching.NAMES``.
    """

    step: int
    layer: str
    operand: str
    format: str
    statistics: dict[str, float]


@dataclass(frozen=True)
class ProductRow:
    """What the formats of both operands did to one product in one sampled step.

    Attributes:
        step: How many steps the optimizer had taken.
        layer: Fully qualified name.
        product: ``output``, ``grad_input`` or ``grad_weight``.
        formats: Those of the left and of the right operand.
        statistics: By the names of ``hybridtensor.watching.PRODUCT_NAMES``.
    """

    step: int
    layer: str
    product: str
    formats: tuple[str, str]
    statistics: dict[str, float]


class Sample(NamedTuple):
    """One sampled step.

    Attributes:
        step: How many steps the optimizer had taken.
        faces: Its faces, by layer in the model's order.
        products: Its products, in the same order.
        order: Faces, by layer and operand, in the order in which they were first used on this rank.
        unseen: Layers with products that are not measured, and why.
    """

    step: int
    faces: tuple[FaceRow, ...]
    products: tuple[ProductRow, ...]
    order: tuple[tuple[str, str], ...]
    unseen: tuple[tuple[str, str], ...]

    def scalars(self) -> dict[str, float]:
        """Return all numbers by one name each, ``layer/input.rowwise/sqnr``, as loggers take them."""
        of_faces = {
            f"{row.layer}/{row.operand}/{k}": v
            for row in self.faces
            for k, v in row.statistics.items()
        }
        of_products = {
            f"{row.layer}/{row.product}/{k}": v
            for row in self.products
            for k, v in row.statistics.items()
        }
        return of_faces | of_products


def sample_of(
    step: int,
    layers: Sequence[Watched],
    order: Sequence[tuple[int, int]],
    unseen: Sequence[tuple[str, str]],
    numbers: Numbers,
    sizes: Tensor,
) -> Sample:
    """Return what was measured.

    Args:
        step: Of the sample.
        layers: Those that are watched, with the recipes of the step.
        order: Of the faces, as the sampler has them.
        unseen: Layers that are not measured, and why.
        numbers: Of all layers, on the host.
        sizes: Values and blocks, int64 ``[layers, faces, 2]``.
    """
    counts, norms, maxima, products = (tensor.tolist() for tensor in numbers)
    faces, multiplied = [], []
    for layer in layers:
        at = layer.place
        for place, (role, direction) in enumerate(OPERANDS):
            values, blocks = sizes[at][place].tolist()
            if values:
                found = face_statistics(
                    counts[at][place], norms[at][place], maxima[at][place], (values, blocks)
                )
                fmt = _format(layer.config, role, direction)
                faces.append(FaceRow(step, layer.name, f"{role}.{direction}", fmt, found))
        for place, gemm in enumerate(GEMMS):
            if any(products[at][place]):
                of_product = product_statistics(products[at][place])
                multiplied.append(
                    ProductRow(step, layer.name, gemm, _formats(layer, gemm), of_product)
                )
    named = tuple((layers[layer].name, ".".join(OPERANDS[place])) for layer, place in order)
    return Sample(step, tuple(faces), tuple(multiplied), named, tuple(unseen))


def _formats(layer: Watched, gemm: str) -> tuple[str, str]:
    """Return what stands for both operands of a product."""
    product = next(one for one in PRODUCTS if one.name == gemm)
    left, right = (_format(layer.config, *operand) for operand in (product.left, product.right))
    return left, right


def _format(config: HybridConfig, role: str, direction: str) -> str:
    """Return the format of a face, in words where it is what the rowwise one holds."""
    quantizer = getattr(config, role)
    fmt = getattr(quantizer, f"{direction}_format")
    of_rowwise = (
        isinstance(quantizer, HybridQuantizer)
        and quantizer.columnwise_source == "rowwise_dequantized"
    )
    if direction == "columnwise" and of_rowwise and fmt.is_identity:
        return f"{quantizer.rowwise_format}, dequantized"
    return str(fmt)
