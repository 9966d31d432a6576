"""Whole steps (groups, scaler, clipping, scheduler, state dicts) of every optimizer: bitwise those of a plain model."""

import pytest
import torch
from torch import nn

import hybridtensor as ht
from hybridtensor.optim import MasterWeights
from hybridtensor.subclasses.wrapper import WrapperTensor

# torch 2.12 says so of what the fixture below keeps from compiling
pytestmark = pytest.mark.filterwarnings("ignore:torch.compile with fullgraph=True found no compiled frames")

STEPS, INFINITE = 6, 2
OPTIMIZERS = {
    f"{cls.__name__.lower()}-{name}": (cls, {**options, **more})
    for cls, more in (
        (torch.optim.AdamW, {}), (torch.optim.Adam, {"amsgrad": True}), (torch.optim.SGD, {"momentum": 0.9}),
    )
    for name, options in (
        ("loop", {"foreach": False}), ("foreach", {"foreach": True}), ("fused", {"fused": True}),
        ("capturable", {"capturable": True}),
    )
    if not (cls is torch.optim.SGD and "capturable" in options)
}  # fmt: skip
TORCHAO = ["torchao-8bit", "torchao-offload"]
CASES = [
    (name, kind)
    for name in (*OPTIMIZERS, *TORCHAO)
    for kind in ("master", "persistent")
    if (name, kind) != ("torchao-offload", "persistent")  # is refused, see test_optim.py
]


def optimizer_of(name, device):
    """Return a class and its options."""
    if name in OPTIMIZERS:
        if "capturable" in name and device == "cpu":
            pytest.skip("torch's capturable optimizers refuse parameters on a CPU")
        return OPTIMIZERS[name]
    torchao = pytest.importorskip("torchao.optim", reason="torchao's optimizers are tested with torchao")
    if name == "torchao-8bit":
        return torchao.AdamW8bit, {}
    if device == "cpu":
        pytest.skip("torchao's CPUOffloadOptimizer needs a GPU to offload from")
    return torchao.CPUOffloadOptimizer, {"optimizer_class": torch.optim.AdamW}


@pytest.fixture(autouse=True)
def eager():
    """AdamW8bit compiles its step, which takes a minute and is torch's business."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


class Training:
    """A model and everything that steps it; the gradients are given."""

    def __init__(self, kind, name, device, *, seed=0, state=None):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64)).to(device)
        self.device = device
        if kind != "plain":
            ht.quantize_(self.model, "fp8", persistent=kind == "persistent")
        if state is not None:  # first: torchao's offload copies the weights that it finds
            self.model.load_state_dict(state["model"])
        cls, options = optimizer_of(name, device)
        weights = [p for p in self.model.parameters() if p.dim() == 2]
        groups = [
            {"params": weights, "weight_decay": 0.1, "lr": 0.02},
            {"params": [p for p in self.model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ]
        wrapped = kind == "persistent"
        self.optimizer = MasterWeights(cls, groups, lr=0.01, **options) if wrapped else cls(groups, lr=0.01, **options)
        # torch's scaler copies its scale to gradients on the host without waiting for it: what is read may be zero
        enabled = name != "torchao-offload"
        self.scaler = torch.amp.GradScaler(device, init_scale=8.0, growth_interval=2, enabled=enabled)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        for part in ("optimizer", "scaler", "scheduler") if state is not None else ():
            getattr(self, part).load_state_dict(state[part])

    def step(self, number):
        """Unscale, clip, step, update: one of the steps has an Inf and is left out."""
        self.model(torch.randn(2, 64, device=self.device))  # a cached face must not survive the step
        scale = self.scaler.scale(torch.ones((), device=self.device))
        parameters, gradients = list(self.model.parameters()), []
        for i, p in enumerate(parameters):
            generator = torch.Generator().manual_seed(100 * number + i)
            gradients.append(torch.randn(p.shape, generator=generator).to(self.device) * scale)
        if number == INFINITE and self.scaler.is_enabled():
            gradients[0][0, 0] = float("inf")
        torch.autograd.backward(parameters, gradients)
        if self.device == "cuda":
            torch.cuda.synchronize()  # torchao's offload copies gradients that are clipped next
        self.scaler.unscale_(self.optimizer)
        self.norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def state(self):
        parts = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler, "scheduler": self.scheduler}
        return {name: part.state_dict() for name, part in parts.items()}

    def values(self):
        """Return the high-precision values of all parameters."""
        masters = self.optimizer.masters() if isinstance(self.optimizer, MasterWeights) else {}
        values = [masters.get(p, p) for p in self.model.parameters()]
        return [v.dequantize() if isinstance(v, ht.MasterWeight) else v.detach() for v in values]


def tensors_in(state):
    """Return all tensors in a state dict."""
    if isinstance(state, torch.Tensor):
        return [state]
    children = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else []
    return [t for child in children for t in tensors_in(child)]


def differences(ours, plain):
    """Return how far parameters are apart."""
    return [(a - b).abs().max().item() for a, b in zip(ours.values(), plain.values(), strict=True)]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_steps_are_bitwise_those_of_a_plain_model(name, kind, device):
    plain, ours = Training("plain", name, device), Training(kind, name, device)
    start = plain.values()[0].clone()
    for number in range(STEPS):
        if number == STEPS // 2:  # resumed by others
            assert all(differences(Training(kind, name, device, seed=1), plain))
            ours = Training(kind, name, device, seed=1, state=ours.state())
            if name == "torchao-offload":  # whose groups for schedulers are not those that it loads
                plain = Training("plain", name, device, seed=1, state=plain.state())
        before = plain.values()[0].clone()
        for training in (plain, ours):
            training.step(number)
        assert torch.equal(plain.values()[0], before) == (number == INFINITE and plain.scaler.is_enabled())
        assert not any(differences(ours, plain)), (number, differences(ours, plain))
        assert torch.equal(ours.norm, plain.norm)
        assert ours.scaler.get_scale() == plain.scaler.get_scale()
        assert ours.scheduler.get_last_lr() == plain.scheduler.get_last_lr()
    assert not torch.equal(start, plain.values()[0])
    if kind == "persistent":
        for parameter, master in ours.optimizer.masters().items():
            made = parameter.config.weight.quantize(master.detach())
            assert torch.equal(parameter.rowwise.qdata, made.rowwise.qdata)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_no_state_is_quantized_by_us(name, kind, device):
    """In its kinds and dtypes, state is that of a plain model; nothing of it is a tensor of this library."""
    found = []
    for each in ("plain", kind):
        training = Training(each, name, device)
        training.step(0)
        state = training.optimizer.state_dict()
        if each == "persistent":
            masters = [of_one.pop("master") for of_one in state["state"].values() if "master" in of_one]
            assert [(type(t), t.dtype) for t in masters] == 2 * [(torch.Tensor, torch.float32)]
        found.append(tensors_in(state))
    kinds = [[(type(t), t.dtype, t.shape) for t in tensors] for tensors in found]
    assert kinds[0] == kinds[1] != []
    assert not any(isinstance(t, WrapperTensor) for tensors in found for t in tensors)
    if not name.startswith("torchao"):
        assert {t.dtype for t in found[1]} == {torch.float32}
