"""Measure quantization errors of operands and products while a model trains."""

from hybridtensor.watching.recording import Recording
from hybridtensor.watching.records import FaceRow, ProductRow, Sample
from hybridtensor.watching.report import report
from hybridtensor.watching.statistics import NAMES, PRODUCT_NAMES
from hybridtensor.watching.watch import watch

__all__ = [
    "NAMES",
    "PRODUCT_NAMES",
    "FaceRow",
    "ProductRow",
    "Recording",
    "Sample",
    "report",
    "watch",
]
