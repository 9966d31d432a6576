"""A recipe for each layer of a model, chosen by what formats do to it and what they cost."""

from hybridtensor.advising.advise import FORMATS, Advice, AdvisedProduct, CurvePoint, advise

__all__ = ["FORMATS", "Advice", "AdvisedProduct", "CurvePoint", "advise"]
