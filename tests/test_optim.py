"""Optimizers on master weights are bitwise those on plain ones; masters of persistent weights write back exactly."""

import collections
import contextlib
import copy
import functools
import gc
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from faces import tensor_faces
from loops import same
from torch import nn
from torch.optim.optimizer import _foreach_supported_types

import hybridtensor as ht
from hybridtensor import HybridTensor
from hybridtensor.distributed import checkpoint
from hybridtensor.optim import MasterWeights
from hybridtensor.subclasses import quantizing
from hybridtensor.subclasses.structure import flatten

SPECS = ["fp8", "fp8_rowwise", "fp8/fp8_rowwise/bf16", "fp8+dequantized", "bf16"]
OPTIMIZERS = {
    "adamw-loop": (torch.optim.AdamW, {"foreach": False}),
    "adamw-foreach": (torch.optim.AdamW, {"foreach": True}),
    "adamw-fused": (torch.optim.AdamW, {"fused": True}),
    "adamw-amsgrad": (torch.optim.AdamW, {"foreach": True, "amsgrad": True, "maximize": True}),
    "adam": (torch.optim.Adam, {"foreach": True, "weight_decay": 0.1}),
    "sgd-loop": (torch.optim.SGD, {"foreach": False, "weight_decay": 0.1}),
    "sgd-foreach": (torch.optim.SGD, {"foreach": True, "momentum": 0.9, "nesterov": True}),
    "sgd-fused": (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"foreach": True}),
    "rmsprop": (torch.optim.RMSprop, {"foreach": True}),
    "lion-like": (torch.optim.NAdam, {"foreach": False}),
}


def model(dtype=torch.float32, device="cpu"):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 8)).to(device, dtype)


def set_grads(parameters, step):
    generator = torch.Generator().manual_seed(step)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_on_master_weights_equals_the_plain_model(name, dtype, device):
    if name == "sgd-fused" and dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("torch's own fused bf16 SGD differs from run to run on the CPU")
    cls, options = OPTIMIZERS[name]
    plain, ours = model(dtype, device), ht.quantize_(model(dtype, device), "fp8")
    optimizers = [cls(m.parameters(), lr=0.01, **options) for m in (plain, ours)]
    for step in range(4):
        for m, optimizer in zip((plain, ours), optimizers, strict=True):
            ours(torch.randn(2, 16, dtype=dtype, device=device))  # a cached face must not survive the step
            set_grads(m.parameters(), step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=bool(step % 2))
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(p, q.dequantize() if isinstance(q, ht.MasterWeight) else q)
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    for key, state in states[0].items():
        for field, value in state.items():
            assert type(states[1][key][field]) is type(value) is torch.Tensor
            assert torch.equal(states[1][key][field], value)
    weight = ours[0].weight
    row, _ = tensor_faces(weight, columnwise=False, dtype=dtype)
    assert torch.equal(row, weight.config.weight.quantize(weight.master).rowwise)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the default depends on the device")
def test_the_default_implementation_on_a_gpu_is_that_of_plain_parameters():
    calls = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    ours = ht.quantize_(model(device="cuda"), "fp8")
    optimizer = torch.optim.AdamW(ours.parameters())
    set_grads(ours.parameters(), 0)
    with Spy():
        optimizer.step()
    assert any("_foreach_addcdiv_" in call for call in calls)


def test_optimizers_know_master_weights_as_a_type_for_foreach():
    assert ht.MasterWeight in _foreach_supported_types


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", ["adamw-loop", "adamw-foreach", "adamw-fused", "sgd-foreach"])
def test_masters_step_and_write_back(name, spec, device):
    """After every step a persistent weight is quantize(master), and the masters are those of plain fp32 training."""
    cls, options = OPTIMIZERS[name]
    plain, ours = model(device=device), ht.quantize_(model(device=device), spec, persistent=True)
    reference = cls(plain.parameters(), lr=0.01, **options)
    optimizer = MasterWeights(cls, ours.parameters(), lr=0.01, **options)
    assert ours[0].weight.original is None
    for step in range(3):
        addresses = [tensor.data_ptr() for tensor in flatten(ours[0].weight)[0]]
        for m, o in ((plain, reference), (ours, optimizer)):
            set_grads(m.parameters(), step)
            o.step()
            o.zero_grad()
        assert [tensor.data_ptr() for tensor in flatten(ours[0].weight)[0]] == addresses
        for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
            if isinstance(q, HybridTensor):
                assert torch.equal(optimizer.masters()[q], p)
                assert torch.equal(q, _quantized(q, p))
            else:
                assert torch.equal(q, p)
        assert all(p.grad is None for p in ours.parameters())


def _quantized(weight, value):
    made = weight.config.weight.quantize(value)
    return HybridTensor(made.rowwise, made.columnwise, weight.config)


def test_a_step_writes_each_weight_once(monkeypatch):
    ours = ht.quantize_(model(), "fp8", persistent=True)
    optimizer = MasterWeights(torch.optim.AdamW, ours.parameters())
    writes = []
    original = quantizing.update_
    monkeypatch.setattr(
        quantizing, "update_", lambda quantizer, dst, x, **kw: writes.append(dst) or original(quantizer, dst, x, **kw)
    )
    set_grads(ours.parameters(), 0)
    optimizer.step()
    assert [id(w) for w in writes] == [id(ours[0].weight), id(ours[2].weight)]
    ours[0].weight.grad = None
    writes.clear()
    optimizer.step()  # no gradient, no step, no write
    assert [id(w) for w in writes] == [id(ours[2].weight)]


def test_without_an_original_the_master_is_the_dequantized_weight():
    ours = ht.quantize_(model().requires_grad_(False), "fp8", persistent=True)
    ours.requires_grad_(True)
    value = ours[0].weight.dequantize()
    optimizer = MasterWeights(torch.optim.SGD, ours.parameters(), lr=0.1)
    assert torch.equal(optimizer.masters()[ours[0].weight], value)


@pytest.mark.parametrize("first", ["model", "optimizer"])
@pytest.mark.parametrize("spec", ["fp8", "fp8+dequantized", "fp8_rowwise", "fp8_delayed"])
def test_training_decreases_the_loss_and_resumes_bitwise(spec, first):
    def run(steps, state=None):
        ours = ht.quantize_(model(), spec, persistent=True)
        optimizer = MasterWeights(torch.optim.AdamW, ours.parameters(), lr=0.02)
        start = 0
        if state is not None:
            loading = {"model": ours, "optimizer": optimizer}
            for name in sorted(loading, reverse=first != "model"):
                loading[name].load_state_dict(state[name])
            start = state["step"]
        losses = []
        for step in range(start, start + steps):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(64, 16, generator=generator)
            loss = (ours(x) - x[:, :8].sin()).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ht.step_(ours)
            losses.append(loss.item())
        state = {"model": ours.state_dict(), "optimizer": optimizer.state_dict(), "step": start + steps}
        return losses, copy.deepcopy(state)

    straight, _ = run(20)
    half, state = run(10)
    rest, _ = run(10, state)
    assert half + rest == straight
    assert straight[-1] < 0.8 * straight[0]


def test_schedulers_groups_and_closures_reach_the_masters():
    ours = ht.quantize_(model(), "fp8", persistent=True)
    groups = [{"params": ours[0].parameters(), "lr": 0.1}, {"params": list(ours[2].parameters())}]
    optimizer = MasterWeights(torch.optim.SGD, groups, lr=0.01)
    assert [g["lr"] for g in optimizer.inner.param_groups] == [0.1, 0.01]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    before = optimizer.masters()[ours[0].weight].clone()

    def closure():
        set_grads(ours.parameters(), 0)
        return torch.tensor(3.0)

    assert optimizer.step(closure) == 3.0
    moved = before - optimizer.masters()[ours[0].weight]
    scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.05, 0.005]
    before = optimizer.masters()[ours[0].weight].clone()
    optimizer.step(closure)
    torch.testing.assert_close(before - optimizer.masters()[ours[0].weight], moved / 2)
    late = ht.quantize_(nn.Linear(4, 4), "fp8", persistent=True)
    optimizer.add_param_group({"params": late.parameters(), "lr": 1.0})
    assert late.weight in optimizer.masters()
    set_grads(late.parameters(), 1)
    value = optimizer.masters()[late.weight] - late.weight.grad
    optimizer.step()
    torch.testing.assert_close(optimizer.masters()[late.weight], value)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["copy", "pickle"])
def test_copies_of_optimizers_whose_weights_were_swapped(way):
    ours = ht.quantize_(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), "fp8", persistent=True)
    optimizer = MasterWeights(torch.optim.SGD, ours.parameters(), lr=0.1)
    expected = [optimizer.masters()[layer.weight].clone() for layer in reversed(ours)]
    torch.utils.swap_tensors(ours[0].weight, ours[1].weight)
    model, copied = way((ours, optimizer))
    assert same([copied.masters()[layer.weight] for layer in model], expected)


def test_the_state_of_weights_that_were_swapped():
    ours = ht.quantize_(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), "fp8", persistent=True)
    optimizer = MasterWeights(torch.optim.SGD, ours.parameters(), lr=0.1, momentum=0.9)
    set_grads(ours.parameters(), 0)
    optimizer.step()
    torch.utils.swap_tensors(ours[0].weight, ours[1].weight)
    masters = [ours[i].weight.high_precision.current.clone() for i in (0, 1)]
    assert all(torch.equal(optimizer.state[ours[i].weight]["master"], masters[i]) for i in (0, 1))


def test_a_group_that_the_optimizer_refuses_is_not_added():
    class Refusing(torch.optim.SGD):
        def add_param_group(self, group):
            if group.get("lr") == 2.0:
                raise ValueError("no such rate")
            super().add_param_group(group)

    ours, late = (ht.quantize_(nn.Linear(4, 4), "fp8", persistent=True) for _ in range(2))
    optimizer = MasterWeights(Refusing, ours.parameters(), lr=1.0)
    with pytest.raises(ValueError, match="no such rate"):
        optimizer.add_param_group({"params": late.parameters(), "lr": 2.0})
    assert len(optimizer.param_groups) == len(optimizer.masters()) == 1
    set_grads(ours.parameters(), 0)
    optimizer.step()
    optimizer.add_param_group({"params": late.parameters()})
    assert late.weight in optimizer.masters()


class Counting(torch.optim.SGD):
    """Keeps a count of its steps among the options of its groups, as Prodigy and schedule-free optimizers do."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            with torch.enable_grad():
                closure is not None and closure()
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / group["count"])


@pytest.mark.parametrize(("cls", "by_closure"), [(Counting, False), (Counting, True), (torch.optim.LBFGS, True)])
def test_what_an_optimizer_keeps_among_its_options_is_kept(cls, by_closure):
    """Oracle: plain parameters, with one set of options; a scheduler writes others, and a run resumes."""
    found = []
    for persistent in (False, True):
        ours = nn.Sequential(nn.Linear(32, 32, bias=False))
        nn.init.ones_(ours[0].weight)
        if persistent:
            ht.quantize_(ours, "mxfp8", persistent=True)
            optimizer = MasterWeights(cls, ours.parameters(), lr=0.5)
        else:
            optimizer = cls(ours.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

        def closure(ours=ours, optimizer=optimizer):
            set_grads(ours.parameters(), 0)
            found.append(optimizer.param_groups[0].get("count"))
            return torch.tensor(3.0)

        for step in range(4):
            if step == 2:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if by_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            scheduler.step()
        weight = ours[0].weight
        found.append((optimizer.masters()[weight] if persistent else weight).detach().tolist())
    assert found[: len(found) // 2] == found[len(found) // 2 :]


def test_a_group_that_is_added_leaves_what_a_scheduler_wrote():
    ours = ht.quantize_(model(), "fp8", persistent=True)
    optimizer = MasterWeights(torch.optim.SGD, ours[0].parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step()
    scheduler.step()
    optimizer.add_param_group({"params": ours[2].parameters()})
    for groups in (optimizer.param_groups, optimizer.inner.param_groups):
        assert [group["lr"] for group in groups] == [0.25, 0.5]


class Averaging(torch.optim.SGD):
    """Evaluates an average of its steps, as schedule-free optimizers do, and steps twice, as sharpness-aware ones."""

    @torch.no_grad()
    def eval(self, weight=0.5):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["stepped"] = p.detach().clone()
            p.data.lerp_(state.get("average", p), weight)

    @torch.no_grad()
    def train(self):
        for p in self.param_groups[0]["params"]:
            p.copy_(self.state[p].pop("stepped"))
            self.state[p]["average"] = p.detach().clone()

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=self.param_groups[0]["lr"])
        if zero_grad:
            self.zero_grad()


def test_methods_of_the_optimizer_alone_get_masters_and_gradients():
    """Oracle: plain parameters; faces are those of the masters after each."""
    found = []
    for persistent in (False, True):
        ours = nn.Sequential(nn.Linear(32, 32))
        nn.init.ones_(ours[0].weight)
        nn.init.ones_(ours[0].bias)
        if persistent:
            ht.quantize_(ours, "mxfp8", persistent=True)
        optimizer = (functools.partial(MasterWeights, Averaging) if persistent else Averaging)(
            ours.parameters(), lr=0.5
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        values = []
        for step in range(3):
            set_grads(ours.parameters(), step)
            calls = (
                lambda optimizer=optimizer: optimizer.first_step(zero_grad=True),
                optimizer.step,
                lambda optimizer=optimizer: optimizer.eval(weight=0.25),
                optimizer.train,
            )
            for call in calls:
                call()
                masters = optimizer.masters() if persistent else {}
                values += [masters.get(p, p).tolist() for p in ours.parameters()]
                values += [p.grad is None for p in ours.parameters()]
                for p, master in masters.items():
                    assert torch.equal(p.dequantize(), ht.MXFP8Quantizer().quantize(master).dequantize())
            scheduler.step()
        found.append(values)
    assert found[0] == found[1]
    with pytest.raises(AttributeError, match="'MasterWeights' object has no attribute 'evaluate'"):
        optimizer.evaluate()
    assert not hasattr(optimizer, "_step_supports_amp_scaling")


def split(group):
    return [{**group, "params": group["params"][:1]}, {**group, "params": group["params"][1:]}]


@pytest.mark.parametrize(
    "changed",
    [
        lambda group: [{**group, "params": group["params"][:1]}],
        lambda group: [{**group, "params": [nn.Parameter(torch.zeros(4, 4)), *group["params"][1:]]}],
        split,
    ],
    ids=["dropped", "replaced", "split"],
)
def test_parameters_that_change_in_groups_are_no_longer_stepped_unseen(changed):
    ours = ht.quantize_(model(), "fp8", persistent=True)
    optimizer = MasterWeights(torch.optim.AdamW, ours.parameters())
    set_grads(ours.parameters(), 0)
    optimizer.param_groups[:] = changed(optimizer.param_groups[0])
    for use in (optimizer.step, optimizer.state_dict):
        with pytest.raises(RuntimeError, match=r"^MasterWeights: param_groups have other parameters .*; make another"):
            use()


@pytest.mark.parametrize("kept", [False, True])
def test_a_state_that_is_set_is_that_of_the_next_step(kept):
    """Empty, as where a run restarts its optimizer, or one of before. Oracle: plain parameters."""
    found = []
    for persistent in (False, True):
        torch.manual_seed(0)
        ours = nn.Sequential(nn.Linear(32, 32))
        nn.init.ones_(ours[0].weight)
        if persistent:
            ht.quantize_(ours, "mxfp8", persistent=True)
        wrap = functools.partial(MasterWeights, torch.optim.AdamW) if persistent else torch.optim.AdamW
        optimizer = wrap(ours.parameters(), lr=0.01)
        before = {}
        for step in range(4):
            if step == 1:
                before = {p: copy.deepcopy(state) for p, state in optimizer.state.items()}
            if step == 3:
                optimizer.state = collections.defaultdict(dict, before if kept else {})
            set_grads(ours.parameters(), step)
            optimizer.step()
        masters = optimizer.masters() if persistent else {}
        found.append([masters.get(p, p).tolist() for p in ours.parameters()])
    assert found[0] == found[1]


def test_one_fp32_master_per_persistent_weight_of_a_bf16_model():
    ours = ht.quantize_(model(torch.bfloat16), "fp8", persistent=True)
    optimizer = MasterWeights(torch.optim.AdamW, ours.parameters(), lr=1e-3)
    ours(torch.randn(4, 16).bfloat16()).sum().backward()
    assert ours[0].weight.grad.dtype == torch.bfloat16
    optimizer.step()
    assert {m.dtype for m in optimizer.masters().values()} == {torch.float32}
    assert ours[0].weight.dtype == torch.bfloat16


class OneGroupEach(torch.optim.SGD):
    """Makes groups as torchao's ``CPUOffloadOptimizer`` does."""

    def __init__(self, groups):
        super().__init__([{**group, "params": [p]} for group in groups for p in group["params"]])


def test_torchao_offload_of_persistent_weights_is_refused(device):
    """It steps from hooks in backward, which masters of persistent weights have no part in: nothing would happen."""
    if device == "cpu":
        pytest.skip("torchao's CPUOffloadOptimizer needs a GPU to offload from")
    torchao = pytest.importorskip("torchao.optim", reason="torchao's optimizers are tested with torchao")
    parameters = model(device=device).parameters()
    with pytest.raises(TypeError, match="an optimizer that keeps its parameter groups is required"):
        MasterWeights(torchao.CPUOffloadOptimizer, parameters, optimizer_class=torch.optim.AdamW, minimal_size=1)


def test_bad_input():
    ours = ht.quantize_(model(), "fp8", persistent=True)
    with pytest.raises(TypeError, match="keeps its parameter groups is required, got OneGroupEach; give"):
        MasterWeights(OneGroupEach, model().parameters())
    with pytest.raises(TypeError, match="an Optimizer class is required, got 'AdamW'"):
        MasterWeights("AdamW", ours.parameters())
    with pytest.raises(TypeError, match=r"^MasterWeights: an Optimizer class is required, got .*MasterWeights'>; pass"):
        MasterWeights(MasterWeights, ours.parameters())
    for given in (ours, [ours]):
        with pytest.raises(TypeError, match=r"^MasterWeights: a parameter is required, got .*; pass model\.parameters"):
            MasterWeights(torch.optim.SGD, given)
    with pytest.raises(
        TypeError, match=r"^MasterWeights: what model\.parameters\(\) gives is required, got the module Lin"
    ):
        MasterWeights(torch.optim.SGD, ours[0])
    with pytest.raises(ValueError, match="empty parameter list"):
        MasterWeights(torch.optim.SGD, iter([]))
    optimizer = MasterWeights(torch.optim.SGD, ours.parameters(), lr=0.1)
    state = optimizer.state_dict()
    del state["state"][2]["master"]
    with pytest.raises(
        ValueError, match=r"masters of \[\(32, 16\), \(8, 32\)\] are required, got \[\(32, 16\), None\]"
    ):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=str)
def test_plain_optimizers_of_several_weights_at_once(options):
    """They step the high-precision values, as the loop over weights does. Oracle: plain parameters."""
    ours, plain = ht.quantize_(model(), "fp8", persistent=True), model()
    for m in (ours, plain):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1, **options)
        set_grads(m.parameters(), 0)
        optimizer.step()
    for mine, values in zip(ours.parameters(), ht.quantize_(plain, "fp8", persistent=True).parameters(), strict=True):
        assert torch.equal(mine.dequantize(), values.dequantize())


@pytest.mark.parametrize("cls", [torch.optim.Rprop, torch.optim.ASGD, torch.optim.SGD])
def test_a_rate_of_zero_is_where_some_begin(cls):
    """Rprop and ASGD step by rates of their own, whatever the group's says."""
    model = ht.quantize_(nn.Sequential(nn.Linear(32, 32, bias=False)), "fp8", persistent=True)
    optimizer = MasterWeights(cls, model.parameters(), lr=0.05)
    for rate in (0.05, 0.05, 0.0):
        set_grads(model.parameters(), 1)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        (master,) = optimizer.masters().values()
        made = ht.quantize_(nn.Sequential(nn.Linear(32, 32, bias=False)), "fp8", persistent=True)
        made[0].weight.detach().copy_(master.detach())
        assert torch.equal(model[0].weight.dequantize(), made[0].weight.dequantize())


WAYS = ["copy_", "initializer", "plain state dict", "state dict without originals", "distributed checkpoint"]


def write(model, values, way, folder):
    """Write values into a persistent model, or what an initializer draws."""
    source = ht.quantize_(nn.Sequential(nn.Linear(32, 32, bias=False)), "mxfp8", persistent=True)
    source[0].weight.detach().copy_(values)
    source[0].weight.high_precision.release_original()
    if way == "copy_":
        model[0].weight.detach().copy_(values)
    elif way == "initializer":
        nn.init.uniform_(model[0].weight)
    elif way == "plain state dict":
        model.load_state_dict({"0.weight": values})
    elif way == "state dict without originals":
        model.load_state_dict(source.state_dict())
    else:
        planners = checkpoint.HybridSavePlanner(), checkpoint.HybridLoadPlanner()
        dcp.save(source.state_dict(), checkpoint_id=folder, planner=planners[0], no_dist=True)
        dcp.load(model.state_dict(), checkpoint_id=folder, planner=planners[1], no_dist=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("way", WAYS)
def test_masters_are_of_what_was_written_last(way, tmp_path):
    """Not of what the weight was made from at first. What MXFP8 holds is what it makes of it again."""
    model = ht.quantize_(nn.Sequential(nn.Linear(32, 32, bias=False)), "mxfp8", persistent=True)
    values, before = torch.randn(32, 32), model[0].weight.dequantize()
    write(model, values, way, tmp_path)
    faces = model[0].weight.dequantize()
    assert not torch.equal(faces, before)
    (master,) = MasterWeights(torch.optim.SGD, model.parameters(), lr=0.0).masters().values()
    assert torch.equal(ht.MXFP8Quantizer().quantize(master.detach()).dequantize(), faces)
    assert torch.equal(master, values) == (way in ("copy_", "plain state dict"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("way", WAYS)
def test_what_is_written_reaches_masters_that_were_there_before(way, tmp_path):
    """Training goes on from it, not from what the optimizer knew."""
    model = ht.quantize_(nn.Sequential(nn.Linear(32, 32, bias=False)), "mxfp8", persistent=True)
    alias = model[0].weight.detach()
    optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1)
    (master,) = optimizer.masters().values()
    values, before = torch.randn(32, 32), model[0].weight.dequantize()
    write(model, values, way, tmp_path)
    faces = model[0].weight.dequantize()
    assert not torch.equal(faces, before)
    faces_alone = way in ("state dict without originals", "distributed checkpoint")
    with pytest.warns(UserWarning, match="are rounded to them") if faces_alone else contextlib.nullcontext():
        stand(model, optimizer)
    assert torch.equal(model[0].weight.dequantize(), faces)
    assert torch.equal(master, values) == (way in ("copy_", "plain state dict"))
    alias.copy_(2 * values)
    assert torch.equal(master, 2 * values)


def stand(model, optimizer):
    """Take a step that changes no master."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    optimizer.step()


VIEWS = {
    "view_as": lambda w, v: w.view_as(v).copy_(v),
    "t": lambda w, v: w.t().copy_(v.t()),
    "slices": lambda w, v: [part.copy_(u) for part, u in zip(w.split(32), v.split(32), strict=True)],
}


@pytest.mark.parametrize("first", ["optimizer", "write"])
@pytest.mark.parametrize("name", VIEWS)
def test_what_is_written_through_a_view_reaches_masters(name, first):
    model, values = persistent("mxfp8", width=64), torch.randn(64, 64)
    views = [model[0].weight.detach()[32:], model[0].weight.detach().t()]
    made = [] if first == "write" else [MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1)]
    with torch.no_grad():
        VIEWS[name](model[0].weight, values)
    faces = model[0].weight.dequantize()
    optimizer = made[0] if made else MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1)
    assert torch.equal(optimizer.masters()[model[0].weight], values)
    stand(model, optimizer)
    assert torch.equal(model[0].weight.dequantize(), faces)
    views[0].fill_(1.0)  # views that were there before the optimizer
    values[32:] = 1.0
    assert torch.equal(optimizer.masters()[model[0].weight], values)
    views[1].copy_(values)
    assert torch.equal(optimizer.masters()[model[0].weight], values.t())


def persistent(spec, dtype=torch.float32, seed=0, width=32):
    torch.manual_seed(seed)
    return ht.quantize_(nn.Sequential(nn.Linear(width, width, bias=False, dtype=dtype)), spec, persistent=True)


@pytest.mark.parametrize("spec", ["fp8", "mxfp8"])
def test_values_of_more_precision_than_the_weight_are_kept_whole(spec):
    """So that the weight follows from its master also after it was loaded."""
    model, values = persistent(spec, torch.bfloat16), torch.randn(32, 32)
    for each in (values.bfloat16(), values):
        model.load_state_dict({"0.weight": each})
    optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1)
    assert torch.equal(optimizer.masters()[model[0].weight], values)
    before = model[0].weight.detach().clone()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(model[0].weight, before)


def test_originals_in_memory_of_others_are_not_written():
    state, plain = {"0.weight": torch.randn(32, 32)}, nn.Linear(32, 32, bias=False)
    models = [persistent("fp8"), persistent("fp8")]
    for model in models:
        model.load_state_dict(state, assign=True)
    memory, values = plain.weight.data, plain.weight.detach().clone()
    models.append(ht.quantize_(nn.Sequential(plain), "fp8", persistent=True))
    with torch.no_grad():
        for model in (models[0], models[2]):
            model[0].weight.fill_(1.0)
    assert torch.equal(models[1][0].weight.original, state["0.weight"])
    assert torch.equal(memory, values)


def test_originals_of_weights_that_began_without_memory():
    with torch.device("meta"):
        model = persistent("fp8")
    model.to_empty(device="cpu")
    model.load_state_dict({"0.weight": (values := torch.randn(32, 32))})
    assert torch.equal(MasterWeights(torch.optim.SGD, model.parameters()).masters()[model[0].weight], values)


@pytest.mark.parametrize("way", ["copy_", "initializer", "plain state dict", "persistent state dict"])
@pytest.mark.parametrize("gone", ["optimizer", "copy", "pickle"])
def test_what_is_written_after_the_masters_are_gone_is_kept_whole(gone, way, device):
    """The next optimizer begins with what was written, as if there had not been one before."""
    models = [persistent("fp8").to(device), persistent("fp8").to(device)]
    optimizer = MasterWeights(torch.optim.SGD, models[0].parameters(), lr=0.1)
    if gone == "copy":
        models[0] = copy.deepcopy(models[0])
    elif gone == "pickle":
        models[0] = pickle.loads(pickle.dumps(models[0]))
    del optimizer
    gc.collect()
    values, masters = torch.randn(32, 32, device=device), []
    for model in models:
        if way == "copy_":
            model[0].weight.detach().copy_(values)
        elif way == "initializer":
            torch.manual_seed(0)
            nn.init.normal_(model[0].weight)
        elif way == "plain state dict":
            model.load_state_dict({"0.weight": values})
        else:
            other = persistent("fp8").to(device)
            other[0].weight.detach().copy_(values)
            model.load_state_dict(other.state_dict())
        masters += MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1).masters().values()
    assert torch.equal(*masters)


def loaded(model):
    """Return a new model with the state dict that a file has of another one."""
    made = persistent("fp8", seed=1).to(model[0].weight.device)
    made.load_state_dict(pickle.loads(pickle.dumps(model.state_dict())))
    return made


GONE = {
    "optimizer": lambda model: model,
    "copied": copy.deepcopy,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
    "copied twice": lambda model: copy.deepcopy(pickle.loads(pickle.dumps(model))),
}


@pytest.mark.parametrize("gone", [*GONE, "loaded"])
@pytest.mark.parametrize("then", ["step", "recipe", "write", "load", "in time"])
def test_masters_that_begin_with_faces_for_want_of_their_values_warn(gone, then, device):
    """Values that were there before are rounded, unless others take their place."""
    model = persistent("fp8").to(device)
    former = MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1)
    stand(model, former)
    state, masters = former.state_dict(), [master.detach().clone() for master in former.masters().values()]
    if then == "in time":
        optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1)
    else:
        model = {**GONE, "loaded": loaded}[gone](model)
        del former
        gc.collect()
        if then == "write":
            model[0].weight.detach().copy_(torch.randn(32, 32, device=device))
        elif then == "recipe":
            ht.set_config_(model, "mxfp8")
        optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1)
        if then == "load":
            optimizer.load_state_dict(state)
    warns = then in ("step", "recipe")
    with pytest.warns(UserWarning, match="layer 0, .*rounded") if warns else contextlib.nullcontext():
        stand(model, optimizer)
    stand(model, optimizer)  # says it once
    assert same(list(optimizer.masters().values()), masters) == (then in ("load", "in time"))


@pytest.mark.parametrize("gone", GONE)
@pytest.mark.parametrize("call", [ht.plain_state_dict, lambda model: ht.plain_(model).state_dict()])
def test_plain_values_that_are_gone_warn(gone, call):
    model = persistent("fp8")
    former = MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1)
    stand(model, former)
    if gone != "optimizer":  # while the masters live
        model = GONE[gone](model)
    faces = model[0].weight.dequantize()
    del former
    gc.collect()
    with pytest.warns(UserWarning, match="plain.*: .* layer 0 are gone") as told:
        assert torch.equal(call(model)["0.weight"], faces)
    assert told[0].filename == __file__


def in_place(model):
    model[0].weight.detach().copy_(model[0].weight.detach().clone())
    return model


def own_state(model):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    return model


def own_data(model):
    model[0].weight.data = model[0].weight.data.clone()
    return model


def data_of_another(model):
    made = persistent("fp8", seed=1)
    made[0].weight.data = model[0].weight.data
    return made


@pytest.mark.parametrize("write", [in_place, own_state, own_data, data_of_another, loaded])
def test_faces_whose_values_are_gone_warn_wherever_they_are_written(write):
    model = persistent("fp8")
    former = MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1)
    stand(model, former)
    del former
    gc.collect()
    model = write(model)
    with pytest.warns(UserWarning, match="layer 0 are gone"):
        ht.plain_state_dict(model)
    optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="layer 0, .*rounded"):
        stand(model, optimizer)
    ht.plain_state_dict(model)  # without a word: the optimizer has them


def test_a_checkpoint_that_is_loaded_without_its_optimizer_warns(tmp_path):
    """Where the next optimizer would begin with faces, though the file has better values."""
    model, resumed, alone = (persistent("fp8", seed=seed) for seed in range(3))
    optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1)
    stand(model, optimizer)
    checkpoint.save(tmp_path, 1, {"model": model, "optimizer": optimizer})
    other = MasterWeights(torch.optim.SGD, resumed.parameters(), lr=0.1)
    checkpoint.load(tmp_path, {"model": resumed, "optimizer": other})
    stand(resumed, other)
    checkpoint.load(tmp_path, {"model": alone})
    with pytest.warns(UserWarning, match="layer 0 are gone"):
        ht.plain_state_dict(alone)
    other = MasterWeights(torch.optim.SGD, alone.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="layer 0, .*rounded"):
        stand(alone, other)


@pytest.mark.parametrize("gone", GONE)
def test_parts_that_are_written_after_the_masters_are_gone_warn(gone):
    """Of the rest there are no values to hold theirs beside."""
    model = persistent("mxfp8", width=64)
    former = MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1)
    model = GONE[gone](model)
    del former
    gc.collect()
    model[0].weight.detach()[:32] = torch.randn(32, 64)
    with pytest.warns(UserWarning, match="layer 0 are gone"):
        ht.plain_state_dict(model)
    optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="layer 0, .*rounded"):
        stand(model, optimizer)


@pytest.mark.parametrize(
    "gone", ["never trained", "held", "written", "loaded", "for inference", "of a pickle with its"]
)
def test_plain_values_that_are_there_do_not_warn(gone):
    model = persistent("fp8")
    if gone != "never trained":
        optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1)
        stand(model, optimizer)
    if gone == "written":
        del optimizer
        model[0].weight.detach().copy_(torch.ones(32, 32))
    elif gone == "loaded":
        other = persistent("fp8")
        other.load_state_dict(ht.plain_state_dict(model))
        model = other
    elif gone == "for inference":
        model = pickle.loads(pickle.dumps(model)).eval()
        model[0](torch.randn(4, 32))
        return
    elif gone == "of a pickle with its":
        model, optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    state = ht.plain_state_dict(model)  # warnings are errors here
    if gone != "never trained" and gone != "written":
        assert torch.equal(state["0.weight"], model[0].weight.high_precision.current)
    ht.mismatch(model, torch.randn(4, 32)) if gone == "held" else ht.plain_(model)


@pytest.mark.parametrize("written", [False, True])
def test_masters_of_weights_that_were_cast(written):
    """They go on from what they know, or from what was written since."""
    model = persistent("mxfp8")
    optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1)
    exact = optimizer.masters()[model[0].weight].detach().clone()
    model.to(torch.bfloat16)
    if written:
        model.load_state_dict({"0.weight": (exact := torch.randn(32, 32))})
    faces = model[0].weight.dequantize()
    stand(model, optimizer)
    assert torch.equal(model[0].weight.dequantize(), faces)
    assert torch.equal(optimizer.masters()[model[0].weight], exact)
    with torch.no_grad():
        model[0].weight.fill_(2.0)
    assert torch.equal(optimizer.masters()[model[0].weight], torch.full((32, 32), 2.0))


def test_aliases_with_the_faces_of_another_recipe_reach_no_master():
    model = persistent("fp8")
    optimizer, alias = MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1), model[0].weight.detach()
    (master,) = optimizer.masters().values()
    exact = master.detach().clone()
    ht.set_config_(model, "mxfp8")
    assert torch.equal(model[0].weight, ht.MXFP8Quantizer().quantize(exact))
    alias.fill_(1.0)
    assert torch.equal(master, exact)
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    assert torch.equal(master, torch.ones(32, 32))


def test_two_optimizers_of_one_weight():
    model = persistent("fp8")
    optimizers = [MasterWeights(torch.optim.SGD, model.parameters(), lr=1.0) for _ in range(2)]
    values = optimizers[0].masters()[model[0].weight].detach().clone()
    for optimizer in (*optimizers, optimizers[0]):
        model[0].weight.grad = torch.ones(32, 32)
        optimizer.step()
    assert torch.equal(optimizers[0].masters()[model[0].weight], values - 1 - 1 - 1)


def test_parameters_with_names_hooks_and_duplicates():
    model = ht.quantize_(nn.Sequential(nn.Linear(32, 32)), "fp8", persistent=True)
    optimizer = MasterWeights(torch.optim.AdamW, model.named_parameters(), lr=0.1)
    assert optimizer.param_groups[0]["param_names"] == ["0.weight", "0.bias"]
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        optimizer.add_param_group({"params": [("again", model[0].weight)]})
    with pytest.raises(ValueError, match="each parameter once is required, got one twice"):
        MasterWeights(torch.optim.SGD, [model[0].weight, model[0].weight], lr=0.1)
    set_grads(model.parameters(), 0)
    optimizer.step()
    assert len(optimizer.inner.param_groups) == 1
    calls = []
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "more": 1})
    optimizer.register_load_state_dict_pre_hook(lambda o, state: calls.append(state["more"]))
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("after loading"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["before saving", 1, "after loading"]


def test_what_is_written_after_a_state_was_loaded_reaches_masters_too():
    """What is loaded then is what the masters gave; but who draws or copies values means those."""
    model = ht.quantize_(nn.Sequential(nn.Linear(32, 32, bias=False)), "fp8", persistent=True)
    optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=0.0)
    (master,) = optimizer.masters().values()
    exact = master.detach().clone()
    states = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
    optimizer.load_state_dict(states[0])
    model.load_state_dict(states[1])
    assert torch.equal(master, exact)
    with torch.no_grad():
        model[0].weight.copy_(values := torch.randn(32, 32))
    assert torch.equal(master, values)
    model.load_state_dict(states[1])
    assert torch.equal(master, model[0].weight.dequantize())
    optimizer.load_state_dict(states[0])
    optimizer.step()  # also one without gradients
    model.load_state_dict(states[1])
    assert torch.equal(master, model[0].weight.dequantize())
    for first in ("model", "optimizer"):  # another state, after both were loaded
        for name in sorted(("model", "optimizer"), reverse=first != "model"):
            model.load_state_dict(states[1]) if name == "model" else optimizer.load_state_dict(states[0])
        assert torch.equal(master, exact)
        other = persistent("fp8", seed=1)
        MasterWeights(torch.optim.SGD, other.parameters())
        model.load_state_dict(other.state_dict())
        assert torch.equal(master, other[0].weight.dequantize())


def _frozen(model):
    model.requires_grad_(False)


def _another_recipe(model):
    ht.set_config_(model, "mxfp8")


@pytest.mark.parametrize("spec", ["fp8_rowwise", "fp8_delayed", "nvfp4"])
@pytest.mark.parametrize("prepare", [_frozen, _another_recipe, lambda model: None], ids=["frozen", "recipe", "as made"])
def test_loading_changes_no_bit_of_a_parameter(prepare, spec):
    """Also of one that is not what its master gives: frozen, of values of less precision, of a step with its scales."""

    def made():
        torch.manual_seed(0)
        ours = nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 128))
        if prepare is _frozen:
            prepare(ours)
        ht.quantize_(ours, spec, persistent=True)
        optimizer = MasterWeights(torch.optim.SGD, ours.parameters(), lr=0.1)
        return ours, optimizer

    ours, optimizer = made()
    for step in range(2):
        for p in ours.parameters():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)) if p.requires_grad else None
        ours(torch.randn(32, 128))
        optimizer.step()
        ht.step_(ours)
    if prepare is not _frozen:
        prepare(ours)
    again, other = made()
    if prepare is _another_recipe:
        prepare(again)
    again.load_state_dict(copy.deepcopy(ours.state_dict()))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, q in zip(ours.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)
    for p, q in zip(optimizer.masters().values(), other.masters().values(), strict=True):
        assert torch.equal(p, q)


def test_masters_are_the_optimizers_to_keep_copy_and_save():
    model = ht.quantize_(nn.Sequential(nn.Linear(64, 64, bias=False)), "fp8", persistent=True)
    whole = len(pickle.dumps(model.state_dict()))
    optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=0.0)
    assert len(pickle.dumps(model.state_dict())) < whole - 64 * 64 * 4
    weight = model[0].weight
    assert torch.equal(weight.high_precision.current, optimizer.masters()[weight])
    assert copy.deepcopy(weight).high_precision.current is None
    assert weight.detach().clone().high_precision.current is None
    del optimizer
    gc.collect()
    assert weight.high_precision.current is None


def test_masters_keep_the_precision_of_the_original_in_another_dtype():
    model = nn.Linear(32, 32, bias=False)
    values = model.weight.detach().clone()
    ht.quantize_(model, "fp8", persistent=True, filter_fn=lambda *_: True)
    (master,) = MasterWeights(torch.optim.SGD, model.bfloat16().parameters(), lr=0.0).masters().values()
    assert torch.equal(master, values.bfloat16().float())


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_copies_have_masters_of_their_own(copied):
    model = ht.quantize_(nn.Sequential(nn.Linear(32, 32)), "fp8", persistent=True)
    pairs = [(model, MasterWeights(torch.optim.AdamW, model.parameters(), lr=0.1))]
    for _ in range(2):
        for each, optimizer in pairs:
            torch.manual_seed(1)
            each(torch.randn(8, 32)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(torch.equal(a, b) for (m, _), (n, _) in [(pairs[0], pairs[-1])] for a, b in values_of(m, n))
        pairs = [pairs[0], copied(pairs[0])]
    assert pairs[0][1].masters().keys().isdisjoint(pairs[1][1].masters())


def values_of(*models):
    """Return parameters in high precision, model by model."""
    plain = [[p.dequantize() if isinstance(p, ht.HybridTensor) else p for p in m.parameters()] for m in models]
    return zip(*plain, strict=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_plain_optimizer_of_persistent_weights_warns_once(dtype):
    """In bf16 200 steps of 1e-5 are rounded away, which masters are not."""
    net = ht.quantize_(nn.Linear(64, 64, bias=False, dtype=dtype), "fp8", persistent=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-5)
    net.weight.grad = torch.ones(64, 64, dtype=dtype)
    if dtype == torch.bfloat16:
        with pytest.warns(UserWarning, match=r"SGD steps persistent weights whose values are bfloat16.*MasterWeights"):
            optimizer.step()
    optimizer.step()  # warnings are errors


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_evaluates_its_closure_several_times(line_search):
    """Parameters follow their masters before each evaluation. Oracle: LBFGS on weights in high precision, bitwise."""
    losses = []
    for persistent in (False, True):
        torch.manual_seed(0)
        net = ht.quantize_(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)), "fp8", persistent=persistent)
        x, target = torch.randn(16, 32), torch.randn(16, 32)
        options = {"lr": 0.5, "max_iter": 5, "line_search_fn": line_search}
        make = functools.partial(ht.optim.MasterWeights, torch.optim.LBFGS) if persistent else torch.optim.LBFGS
        optimizer, seen = make(net.parameters(), **options), []

        def closure(net=net, x=x, target=target, optimizer=optimizer, seen=seen):
            optimizer.zero_grad()
            loss = (net(x) - target).square().mean()
            loss.backward()
            seen.append(loss.item())
            return loss

        for _ in range(2):
            optimizer.step(closure)
        losses.append([*seen, net(x).square().sum().item()])
    assert losses[0] == losses[1]
    assert len(losses[0]) > 5
    assert losses[0][-2] < losses[0][0]


def two_layers(seed=0, cls=torch.optim.SGD):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    net = ht.quantize_(net, "fp8", persistent=True)
    return net, MasterWeights(cls, net.parameters(), lr=0.01)


def stepped(net, optimizer):
    set_grads(net.parameters(), 1)
    optimizer.step()
    return [master.clone() for master in optimizer.masters().values()]


@pytest.mark.parametrize("through", ["masters", "step", "state_dict", "load_state_dict"])
def test_weights_that_are_swapped_take_their_values_along(through):
    """Each master would be overwritten by the next one's, which reads it."""
    (net, optimizer), (other, others) = two_layers(), two_layers()
    a, b = (master.clone() for master in optimizer.masters().values())
    torch.utils.swap_tensors(net[0].weight, net[1].weight)
    if through == "load_state_dict":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif through == "state_dict":
        optimizer.state_dict()
    if through == "step":
        with torch.no_grad():
            other[0].weight.copy_(b)
            other[1].weight.copy_(a)
        expected, got = stepped(other, others), stepped(net, optimizer)
    else:
        expected, got = [b, a], list(optimizer.masters().values())
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("between", ["nothing", "state_dict", "load_state_dict", "step"])
def test_averages_that_are_swapped_in_and_out_leave_masters_as_they_were(between):
    net, optimizer = two_layers()
    average = copy.deepcopy(net)
    with torch.no_grad():
        for weight in average.parameters():
            weight.copy_(torch.randn(64, 64) / 8)
    before = [master.clone() for master in optimizer.masters().values()]
    faces = [weight.dequantize() for weight in net.parameters()]

    def swap():
        for mine, theirs in zip(net.parameters(), average.parameters(), strict=True):
            torch.utils.swap_tensors(mine, theirs)

    saved = copy.deepcopy(optimizer.state_dict())
    swap()
    if between == "state_dict":
        inside = optimizer.state_dict()["state"]
        for index, weight in enumerate(net.parameters()):
            assert torch.equal(inside[index]["master"], weight.high_precision.current)
    elif between == "load_state_dict":
        optimizer.load_state_dict(saved)
    elif between == "step":
        stepped(net, optimizer)
    swap()
    assert all(map(torch.equal, optimizer.masters().values(), before))
    assert all(map(torch.equal, [weight.dequantize() for weight in net.parameters()], faces))


def assigned(weight, copied):
    weight.data = copied


@pytest.mark.parametrize("way", [lambda w: nn.Parameter(w.detach().clone()), copy.deepcopy], ids=["clone", "copy"])
def test_copies_that_are_swapped_in_before_a_write_have_the_master(way):
    net, optimizer = two_layers()
    stepped(net, optimizer)
    before = [master.clone() for master in optimizer.masters().values()]
    for layer in net:
        torch.utils.swap_tensors(layer.weight, way(layer.weight))
    assert same(list(optimizer.masters().values()), before)


@pytest.mark.parametrize("written", ["copy_", "data", "state", "swapped", "moved"])
@pytest.mark.parametrize("by", ["step", "first_step"])
def test_copies_that_are_written_back_warn_at_the_next_step(written, by):
    """Sharpness-aware optimizers do so, and whoever goes back to the best state of a run."""
    net, optimizer = two_layers(cls=Averaging)
    stepped(net, optimizer)
    state, masters = copy.deepcopy(net.state_dict()), optimizer.masters()
    best = copy.deepcopy(optimizer.state_dict())
    before = [master.clone() for master in masters.values()]
    copies = [weight.detach().clone() for weight in masters]
    with torch.no_grad():
        for weight in masters:
            weight.add_(0.1)
    if written == "state":
        net.load_state_dict(state)
    elif written == "swapped":
        for weight, copied in zip(masters, copies, strict=True):
            torch.utils.swap_tensors(weight, nn.Parameter(copied.clone()))
        for weight, master in optimizer.masters().items():
            assert torch.equal(weight.dequantize(), master)  # not what it was of late
    else:
        for weight, copied in zip(masters, copies, strict=True):
            assigned(weight, copied) if written == "data" else weight.detach().copy_(copied)
    if written == "moved":  # to new faces
        for recipe in ("mxfp8", "fp8"):
            ht.set_config_(net, recipe)
    assert not any(map(torch.equal, masters.values(), before))
    set_grads(net.parameters(), 1)
    with pytest.warns(UserWarning, match=r"into those of layer 0, 1, .*their masters are rounded") as told:
        getattr(optimizer, by)()
    assert told[0].filename == __file__
    optimizer.step()  # says it once
    with torch.no_grad():
        for weight, copied, values in zip(masters, copies, before, strict=True):
            weight.copy_(copied)
            weight.copy_(values)
    optimizer.step()  # all is overwritten by values
    net.load_state_dict(state)
    optimizer.load_state_dict(best)
    assert all(map(torch.equal, optimizer.masters().values(), before))
    stepped(net, optimizer)


# torch 2.11 says so where it leaves weak references to eager code
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
@pytest.mark.parametrize("what", ["step of the optimizer", "whole step"])
@pytest.mark.parametrize("recipe", ["fp8", "mxfp8"])
def test_compiled_steps_of_weights_of_several_shapes(recipe, what, fresh_compiler):
    """Bitwise what eager code gives; Dynamo raised at the second shape."""

    def trained(compiled):
        torch.manual_seed(0)
        net = ht.quantize_(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)), recipe, persistent=True)
        # A power of two: torch 2.11 multiplies and adds otherwise in graphs
        optimizer = MasterWeights(torch.optim.SGD, net.parameters(), lr=0.125)

        def backward(x):
            net(x).square().mean().backward()

        def update():
            optimizer.step()
            optimizer.zero_grad()

        def whole(x):
            backward(x)
            update()

        if compiled and what == "whole step":
            whole = torch.compile(whole, backend="aot_eager")
        elif compiled:
            update = torch.compile(update, backend="aot_eager")
        for seed in range(3):
            whole(torch.randn(32, 32, generator=torch.Generator().manual_seed(seed)))
        return [*(p.dequantize() for p in net.parameters() if p.dim() == 2), *optimizer.masters().values()]

    assert all(map(torch.equal, trained(True), trained(False)))


def test_an_optimizer_that_is_not_made_leaves_original_values():
    net = nn.Sequential(nn.Linear(64, 32))
    values = net[0].weight.detach().clone()
    ht.quantize_(net, "fp8", persistent=True)
    twice = [{"params": net.parameters()}, {"params": list(net.parameters())[:1]}]
    for params, options in ((net.parameters(), {"lr": -1}), (twice, {})):
        with pytest.raises(ValueError, match=r"learning rate|more than one parameter group"):
            MasterWeights(torch.optim.AdamW, params, **options)
    gc.collect()
    masters = MasterWeights(torch.optim.AdamW, net.parameters()).masters()
    assert torch.equal(masters[net[0].weight], values)


class FailsAtTheSecond(torch.optim.SGD):
    """Writes the first parameter, then raises."""

    def step(self, closure=None):
        if closure is not None:
            closure()
        with torch.no_grad():
            first = self.param_groups[0]["params"][0]
            first.sub_(first.grad)
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("by_closure", [False, True])
def test_after_a_step_that_raises_weights_equal_their_quantized_masters(by_closure):
    net = ht.quantize_(
        nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 32, bias=False)), "fp8", persistent=True
    )
    optimizer = MasterWeights(FailsAtTheSecond, net.parameters(), lr=1)
    before = [p.dequantize() for p in net.parameters()]

    def closure():
        loss = net(torch.ones(4, 64)).sum()
        loss.backward()
        return loss

    if not by_closure:
        closure()
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(closure if by_closure else None)
    after = [p.dequantize() for p in net.parameters()]
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [False, True]
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    assert all(torch.equal(a, p.dequantize()) for a, p in zip(after, net.parameters(), strict=True))
