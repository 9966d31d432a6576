"""Where the numbers of one step are added up: by layer, face and product, on the device.

A layer has one *place* for what is measured of it, and one more for each expert of a stack.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hybridtensor.layers import layers_of
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.watching.statistics import (
    FACE_COUNTS,
    FACE_MAXIMA,
    FACE_NORMS,
    PRODUCT_NORMS,
    FaceNumbers,
)

OPERANDS = tuple(
    (role, direction)
    for role in ("input", "weight", "grad_output")
    for direction in ("rowwise", "columnwise")
)
GEMMS = {  # the operands of each product, as places in OPERANDS
    "output": (0, 2),
    "grad_input": (4, 3),
    "grad_weight": (5, 1),
}


class Watched(NamedTuple):
    """A watched layer: its first place in the sums; its experts' places follow."""

    name: str
    config: HybridConfig
    number: int
    place: int
    experts: int = 0

    @property
    def places(self) -> slice:
        return slice(self.place, self.place + 1 + self.experts)


def watched_layers(model: torch.nn.Module) -> tuple[dict[int, Watched], torch.device]:
    """Return converted layers by state, and their device; raise NotImplementedError for several devices or
    offloading."""
    found: dict[int, Watched] = {}
    devices: dict[torch.device, None] = {}
    place = 0
    for layer in layers_of(model):
        recipe = layer.recipe
        if recipe is not None and id(recipe.state) not in found:
            experts = layer.weight.shape[0] if layer.is_stack else 0
            known = Watched(layer.name or "<root>", recipe.config, len(found), place, experts)
            found[id(recipe.state)] = known
            place = known.places.stop
            devices[layer.weight.device] = None
            _check_device(layer.name, layer.weight)
    if len(devices) > 1:
        raise NotImplementedError(
            f"watch: the model is on several devices, {[str(device) for device in devices]}; watch its parts "
            "by themselves"
        )
    return found, next(iter(devices), torch.device("cpu"))


def _check_device(name: str, weight: Tensor) -> None:
    """Raise NotImplementedError for a parameter on another device than its products."""
    if isinstance(weight, DTensor) and weight.device_mesh.device_type != weight.device.type:
        raise NotImplementedError(
            f"watch: {name} is on {weight.device.type} and multiplied on {weight.device_mesh.device_type}, as "
            "with FSDP2's CPUOffloadPolicy; watch a run without it"
        )


class OfPlace(NamedTuple):
    """Sums of one place: its faces (``OPERANDS``) and products."""

    faces: list[FaceNumbers]
    products: dict[str, Tensor]


class Numbers(NamedTuple):
    """Sums of all places: counts, norms, maxima and products, ``[places, faces or products, ...]``."""

    counts: Tensor
    norms: Tensor
    maxima: Tensor
    products: Tensor

    @classmethod
    def of(cls, places: int, device: torch.device) -> Numbers:
        """Return zeroed numbers of places."""
        faces, double = len(OPERANDS), torch.float64
        return cls(
            torch.zeros(places, faces, len(FACE_COUNTS), dtype=torch.int64, device=device),
            torch.zeros(places, faces, len(FACE_NORMS), dtype=double, device=device),
            # Of a maximum the neutral element. Minima are stored negated, so that one MAX reduces
            # everything over ranks.
            torch.full(
                (places, faces, len(FACE_MAXIMA)), -torch.inf, dtype=torch.float32, device=device
            ),
            torch.zeros(places, len(GEMMS), len(PRODUCT_NORMS), dtype=double, device=device),
        )

    def clear(self) -> None:
        # In place: ``Sums.at`` has cached views.
        for tensor in (self.counts, self.norms, self.products):
            tensor.zero_()
        self.maxima.fill_(-torch.inf)


class Sums:
    """The sums of one step, with the numbers of values and blocks by place and face."""

    def __init__(self, layers: dict[int, Watched], device: torch.device) -> None:
        places = max((layer.places.stop for layer in layers.values()), default=0)
        self.numbers = Numbers.of(places, device)
        self.sizes: dict[tuple[int, int], tuple[int, int]] = {}
        self._places: dict[int, OfPlace] = {}

    def clear(self) -> None:
        self.numbers.clear()
        self.sizes.clear()

    def at(self, place: int) -> OfPlace:
        """Return cached views of a place's numbers."""
        known = self._places.get(place)
        if known is None:
            n = self.numbers
            known = self._places[place] = OfPlace(
                [
                    FaceNumbers(*one)
                    for one in zip(*(t[place].unbind() for t in n[:3]), strict=True)
                ],
                dict(zip(GEMMS, n.products[place].unbind(), strict=True)),
            )
        return known

    def add_amaxes(self, place: int, face: int, amaxes: Tensor) -> None:
        """Record the amaxes of experts, from ``place`` on."""
        known = self.numbers.maxima[place : place + len(amaxes), face, 0]
        torch.maximum(known, amaxes, out=known)

    def add_sizes(self, place: int, face: int, sizes: tuple[int, int]) -> None:
        before = self.sizes.get((place, face), (0, 0))
        self.sizes[place, face] = before[0] + sizes[0], before[1] + sizes[1]

    def all_sizes(self) -> Tensor:
        counts = self.numbers.counts
        sizes = torch.zeros(*counts.shape[:2], 2, dtype=torch.int64, device="cpu")
        if self.sizes:
            places, faces = torch.tensor(list(self.sizes), device="cpu").unbind(1)
            sizes[places, faces] = torch.tensor(list(self.sizes.values()), device="cpu")
        return sizes.to(counts.device)
