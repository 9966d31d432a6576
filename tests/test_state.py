"""What quantizers remember: delayed scales, the counter of random rounding, and how both advance.

Oracle for the update rule: a transcription, scalar by scalar, of TransformerEngine's delayed-scaling kernel in numpy.
"""

import copy
import dataclasses
import functools
import gc
import io
import pickle
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from faces import tensor_faces
from hypothesis import given
from hypothesis import strategies as st
from kernels import require_kernels
from safetensors.torch import load_model, save_model
from tiers import examples
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import hybridtensor as ht
from hybridtensor import Context, DelayedFloat8Quantizer, HybridConfig, HybridQuantizer, LayerState
from hybridtensor.state import update
from hybridtensor.state.update import LayerScales, Slots, update_reference
from hybridtensor.testing import random_tensor

FP32_MAX = np.finfo(np.float32).max
DELAYED = ht.recipes.fp8_delayed(history_length=4)


def oracle_step(history, scale, last, largest, margin, algorithm):
    """Update one scale: ``history`` (a list, entry 0 free), ``scale`` and the step's amax ``last``, all float32."""
    amax = np.float32(0)
    if last != 0:
        rolled = [*history[1:], last]
        amax = last if algorithm == "most_recent" else max(rolled)
        history = [np.float32(0), *rolled[1:]]
    if np.isfinite(amax) and amax > 0:
        with np.errstate(over="ignore"):
            scale = np.float32(np.float32(largest * 2.0**-margin) / amax)
        scale = FP32_MAX if np.isinf(scale) else scale
    return history, scale


@examples(20)
@given(
    st.lists(
        st.one_of(st.floats(0, 2.0**100, width=32), st.sampled_from([0.0, float("inf"), 2.0**-149, 2.0**-140, 448.0])),
        min_size=1,
        max_size=9,
    ),
    st.integers(1, 5),
    st.sampled_from(["max", "most_recent"]),
    st.integers(-1, 2),
    st.sampled_from(["e4m3", "e5m2"]),
)
def test_the_update_rule_is_the_kernels(amaxes, length, algorithm, margin, dtype):
    quantizer = DelayedFloat8Quantizer(dtype, margin, length, algorithm)
    state = LayerState.of({"input": quantizer})
    history, scale = [np.float32(0)] * length, np.float32(1)
    for amax in amaxes:
        state.amax.copy_(torch.tensor(amax))
        ht.step_(state)
        history, scale = oracle_step(history, scale, np.float32(amax), quantizer.format.max, margin, algorithm)
        assert state.encode_scale.item() == scale
        assert state.amax_history[0].tolist() == history
        assert state.amax.item() == 0


def test_a_history_that_is_shorter_than_another_forgets_earlier():
    """Each scale follows from as many steps as its own rule says, whatever the others of its layer remember."""
    lengths = {"input": 2, "weight": 5}
    quantizers = {role: DelayedFloat8Quantizer(history_length=length) for role, length in lengths.items()}
    state, alone = LayerState.of(quantizers), {role: LayerState.of({role: q}) for role, q in quantizers.items()}
    for amax in (8.0, 1.0, 2.0, 0.5, 0.25, 0.125, 0.0, 4.0, 1.0):
        for one in (state, *alone.values()):
            one.amax.fill_(amax)
            ht.step_(one)
        assert state.encode_scale.tolist() == [one.encode_scale.item() for one in alone.values()]


def several_layers(device):
    """Return states of layers with other rules and numbers of scales, of which some have a history."""
    torch.manual_seed(0)
    rules = [(1, "max", 0), (2, "most_recent", 1), (5, "max", -1), (16, "max", 0), (33, "most_recent", 0)]
    quantizers = [DelayedFloat8Quantizer("e4m3", margin, length, name) for length, name, margin in rules]
    layers = [
        LayerState.of({"input": quantizers[i], "weight": quantizers[j]}, device=device)
        for i, j in [(0, 1), (2, 3), (4, 2), (3, 3)]
    ]
    layers.append(LayerState.of({"grad_output": quantizers[2]}, device=device))
    for state in layers:
        state.amax_history[:, 1:].copy_(torch.rand_like(state.amax_history[:, 1:]) * 100)
        lengths = torch.tensor([[rule.history_length] for rule in state.rules], device=device)
        entries = state.amax_history.shape[1]
        state.amax_history[torch.arange(entries, device=device) <= entries - lengths] = 0
    return layers


@pytest.mark.parametrize("reduced", [False, True])
def test_the_kernel_updates_as_the_reference_does(device, reduced):
    """Bit for bit, of all layers in one launch, with the layers' amaxes or those that ranks reduced."""
    require_kernels(device)
    layers = several_layers(device)
    expected = copy.deepcopy(layers)
    slots = Slots(layers)
    count = sum(len(state.slots) for state in layers)
    for amaxes in (
        torch.rand(count),
        torch.zeros(count),
        torch.full((count,), torch.inf),
        2.0**-149 * torch.ones(count),
    ):
        amaxes = torch.where(torch.rand(count) < 0.2, 0.0, amaxes).to(device)
        parts = amaxes.split([len(state.slots) for state in layers])
        for state, other, part in zip(layers, expected, parts, strict=True):
            other.amax.copy_(part)
            state.amax.copy_(part if not reduced else torch.full_like(part, 7.0))
            update_reference([LayerScales.of(other)], part[None], other.rules)
        with np.errstate(over="ignore"):  # the interpreter divides with numpy
            slots.update(amaxes if reduced else None)
        for state, other in zip(layers, expected, strict=True):
            assert torch.equal(state.encode_scale, other.encode_scale)
            assert torch.equal(state.amax_history, other.amax_history)
            assert not state.amax.any()


def test_tables_of_cuda_graphs_stay(device, monkeypatch):
    """A replay reads the table of addresses again; a full cache frees the others."""

    def slots_of(states):
        return update._slots_of(states, [tensor for state in states for tensor in LayerScales.of(state)])

    monkeypatch.setattr(update, "_KNOWN", type(update._KNOWN)(2))
    captured, *others = [several_layers(device) for _ in range(6)]
    table = weakref.ref(slots_of(captured)._rows)
    with monkeypatch.context() as patch:
        patch.setattr("hybridtensor.ops.cache.is_captured", lambda: True)
        patch.setattr(update, "is_captured", lambda: True)
        assert slots_of(captured)._rows is table()
        assert slots_of(others[0]) is None
    first = weakref.ref(slots_of(others[0])._rows)
    for layers in others[1:]:
        slots_of(layers)
    gc.collect()
    assert table() is not None
    assert first() is None


def test_an_update_counts_as_a_write(device):
    """As every write in place: autograd notices one of what it saved."""
    layers = several_layers(device)
    tensors = [t for state in layers for t in (state.amax, state.encode_scale, state.amax_history)]
    for state in layers:
        state.amax.fill_(3.0)
    before = [tensor._version for tensor in tensors]
    ht.step_(torch.nn.ModuleList(layers))
    assert all(tensor._version > version for tensor, version in zip(tensors, before, strict=True))


def of(state, slot):
    """Return scale, amax and history of one slot."""
    i = state.slots.index(slot)
    return SimpleNamespace(scale=state.encode_scale[i], amax=state.amax[i], history=state.amax_history[i])


def model(recipe=DELAYED, device="cpu", seed=0):
    torch.manual_seed(seed)
    layers = nn.ModuleDict({"up": nn.Linear(32, 64), "act": nn.SiLU(), "down": nn.Linear(64, 32)})
    sequential = nn.Sequential(*layers.values()).to(device, torch.bfloat16)
    return ht.quantize_(sequential, recipe)


def train(net, optimizer, steps, first=0, device="cpu", microbatches=1, step_=ht.step_):
    """Run some steps; return the losses."""
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        for part in range(microbatches):
            x = random_tensor(64, 32, device=device, seed=100 * step + part)
            loss = net(x).float().square().mean() / 1000
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        step_(net)
    return losses


def states_of(net):
    """Return the states of the layers."""
    return [module for module in net.modules() if isinstance(module, LayerState)]


def amax_of(state):
    """Return the amaxes of the step under way, or a tensor of none."""
    return torch.zeros(0) if state.amax is None else state.amax


def train_once(net):
    """Train a step, and return the model."""
    train(net, torch.optim.SGD(net.parameters(), lr=1e-3), 1)
    return net


def states(net):
    return {name: t.clone() for name, t in net.state_dict().items() if "quantization_state" in name}


WAYS_TO_RUN = {
    "eager": lambda net: net,
    "compiled": lambda net: torch.compile(net, backend="aot_eager"),
    "checkpointed": lambda net: functools.partial(checkpoint, net, use_reentrant=False),
}


class TestDelayedScaling:
    def test_the_state_is_in_the_buffers(self, device):
        net = model(device=device)
        names = [name for name, _ in net.named_buffers()]
        assert names == [
            f"{i}.quantization_state.{what}" for i in (0, 2) for what in ("encode_scale", "amax_history", "layout")
        ]
        assert net[0].quantization_state.slots == ("input", "weight", "grad_output")
        assert all(b.device.type == device for b in net.buffers())

    def test_scales_follow_the_amaxes(self, device):
        net = model(device=device)
        x = random_tensor(64, 32, device=device)
        y = net[0](x.requires_grad_())
        g = random_tensor(64, 64, device=device, seed=1)
        y.backward(g)
        state, wanted = net[0].quantization_state, {}
        for role, values, largest in (("input", x, 448), ("weight", net[0].weight, 448), ("grad_output", g, 57344)):
            amax = values.detach().abs().max().float()
            assert of(state, role).amax == amax
            assert of(state, role).scale == 1
            wanted[role] = torch.tensor(float(largest), device=device) / amax
        ht.step_(net)
        assert {role: of(state, role).scale for role in wanted} == wanted

    def test_the_stored_scale_is_used(self, device):
        net = model(device=device)[0]
        net.quantization_state.encode_scale[0] = 8.0
        x = random_tensor(64, 32, device=device)
        h = DELAYED.input.quantize(x, context=Context("input", net.quantization_state.tensors()))
        assert h.rowwise.scale.item() == h.columnwise.scale.item() == 0.125
        assert torch.equal(h.rowwise.qdata.float(), (x.float() * 8).clamp(-448, 448).to(torch.float8_e4m3fn).float())
        assert torch.equal(h.columnwise.qdata.float(), h.rowwise.qdata.float().t())

    def test_checkpointing_and_accumulation_count_once(self, device):
        """However often a step computes, its largest magnitude is what counts."""
        from torch.utils.checkpoint import checkpoint

        nets = [model(device=device) for _ in range(2)]
        x, more = (random_tensor(64, 32, device=device, seed=seed) for seed in (0, 1))
        for net, again in zip(nets, (False, True), strict=True):
            for part in (x, more, *([x] if again else [])):  # a third microbatch that repeats the first
                leaf = part.clone().requires_grad_()
                (checkpoint(net, leaf, use_reentrant=False) if again else net(leaf)).sum().backward()
            ht.step_(net)
        for a, b in zip(states(nets[0]).values(), states(nets[1]).values(), strict=True):
            assert torch.equal(a, b)
        history = nets[0][0].quantization_state.amax_history[0]
        assert history.count_nonzero() == 1
        assert history[-1] == torch.stack([x, more]).abs().max()

    def test_evaluation_leaves_no_trace(self, device):
        net = model(device=device)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        train(net, optimizer, 2, device=device)
        before = states(net)
        with torch.no_grad():
            net(random_tensor(64, 32, device=device) * 1000)
        ht.step_(net)  # nothing was recorded but the weight, whose amax is in its history already
        after = states(net)
        for name in (name for name in before if not name.endswith("layout")):
            assert torch.equal(before[name][[0, 2]], after[name][[0, 2]])

    def test_either_face_of_a_hybrid_has_a_scale_of_its_own(self, device):
        row, column = DelayedFloat8Quantizer("e4m3"), DelayedFloat8Quantizer("e5m2", margin=1)
        config = HybridConfig(
            input=HybridQuantizer(row, ht.MXFP8Quantizer()),
            weight=HybridQuantizer(row, column, "rowwise_dequantized"),
            grad_output=HybridQuantizer(ht.MXFP8Quantizer(), column),
        )
        net = model(config, device=device)
        state = net[2].quantization_state
        assert list(state.slots) == [
            "input_rowwise",
            "weight_rowwise",
            "weight_columnwise",
            "grad_output_columnwise",
        ]
        train(net, torch.optim.SGD(net.parameters(), lr=1e-3), 3, device=device)
        assert (state.encode_scale != 1).all()
        assert of(state, "weight_columnwise").scale != of(state, "weight_rowwise").scale

    def test_a_change_of_recipe_keeps_what_stays(self, device):
        net = model(device=device)
        train(net, torch.optim.SGD(net.parameters(), lr=1e-3), 3, device=device)
        state = net[2].quantization_state
        before = {slot: vars(of(state, slot)) for slot in state.slots}
        net[2](random_tensor(64, 64, device=device)).sum().backward()  # amaxes of a step under way
        amax = of(state, "weight").amax.clone()
        longer = DelayedFloat8Quantizer("e5m2", history_length=6)
        ht.set_config_(net, HybridConfig(input=ht.MXFP8Quantizer(), weight=DELAYED.weight, grad_output=longer))
        assert state is net[2].quantization_state
        assert state.slots == ("weight", "grad_output")
        assert of(state, "weight").scale == before["weight"]["scale"] != 1
        assert of(state, "weight").amax == amax != 0
        assert of(state, "weight").history.tolist() == [0.0, 0.0, *before["weight"]["history"].tolist()]
        history = before["grad_output"]["history"]  # another rule: its scale follows from the amaxes so far
        assert of(state, "grad_output").scale == 57344 / history.max() != 1

    def test_a_changed_rule_goes_on_from_a_history_of_one_step(self, device):
        """TransformerEngine's ``amax_history_len=1``: only the scale tells what the last amax was."""
        net = model(ht.recipes.fp8_delayed(history_length=1), device=device)
        train(net, torch.optim.SGD(net.parameters(), lr=1e-3), 2, device=device)
        state = net[2].quantization_state
        before = state.encode_scale.clone()
        assert (before != 1).all()
        ht.set_config_(net, ht.recipes.fp8_delayed(history_length=1, margin=1))
        torch.testing.assert_close(state.encode_scale, before / 2)
        ht.set_config_(net, ht.recipes.fp8_delayed(history_length=4))
        torch.testing.assert_close(state.encode_scale, before)
        assert (state.amax_history[:, -1] > 0).all()

    def test_a_shorter_history_forgets_what_is_older_at_once(self, device):
        net = model(ht.recipes.fp8_delayed(history_length=8), device=device)
        state = net[2].quantization_state
        state.amax_history[:] = torch.arange(8.0, 0.0, -1.0)  # 8 is eight steps ago
        ht.set_config_(net, ht.recipes.fp8_delayed(history_length=4))
        assert state.encode_scale[state.slots.index("input")] == 448 / 4
        assert state.amax_history[0].tolist() == [0.0, 3.0, 2.0, 1.0]

    def test_training_goes_as_with_current_scaling(self, device):
        """With the most recent amax of a constant batch, delayed scaling becomes current scaling.

        Each step settles the scales of one more product: two forward, then two backward.
        """
        delayed = model(ht.recipes.fp8_delayed(algorithm="most_recent"), device=device)
        current = model("fp8", device=device)
        x = random_tensor(64, 32, device=device)
        for net in (delayed, current):
            for _ in range(4):
                net.zero_grad()
                net(x).float().square().mean().backward()
                ht.step_(net)
        delayed.zero_grad()
        current.zero_grad()
        out = [net(x) for net in (delayed, current)]
        assert torch.equal(*out)
        for y in out:
            y.float().square().mean().backward()
        for a, b in zip(delayed.parameters(), current.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)

    @pytest.mark.parametrize("persistent", [False, True])
    @pytest.mark.parametrize("way", WAYS_TO_RUN.values(), ids=list(WAYS_TO_RUN))
    def test_frozen_layers_before_all_that_is_trained_follow(self, way, persistent, device):
        """No backward reaches them, and their scales are those that a gradient of the input would give them."""

        def scales(input_grad):
            net = ht.plain_(model("bf16", device=device))
            net[0].requires_grad_(False)
            ht.quantize_(net, DELAYED, persistent=persistent)
            run = way(net)
            for step in range(3):
                x = random_tensor(6, 32, device=device, seed=step) * (step + 1)
                run(x.requires_grad_(input_grad)).square().sum().backward()
                ht.step_(net)
                with torch.no_grad():  # evaluation
                    run(1000 * x)
            return net[0].quantization_state.encode_scale[:2].tolist()

        assert scales(input_grad=False) == scales(input_grad=True) != [1, 1]

    @pytest.mark.parametrize("recipe", [DELAYED, "nvfp4", "fp8_delayed/fp8_delayed/nvfp4"], ids=str)
    def test_resumes_bitwise(self, recipe, device):
        def fresh(seed):
            net = model(recipe, device=device, seed=seed)
            return net, torch.optim.AdamW(net.parameters(), lr=1e-2)

        net, optimizer = fresh(0)
        expected = train(net, optimizer, 6, device=device)
        net, optimizer = fresh(0)
        train(net, optimizer, 3, device=device)
        file = io.BytesIO()
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        net, optimizer = fresh(1)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        assert train(net, optimizer, 3, first=3, device=device) == expected[3:]

    def test_survives_what_happens_to_modules(self, device):
        net = model(device=device)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        train(net, optimizer, 2, device=device)
        before = states(net)
        for other in (copy.deepcopy(net), net.half().bfloat16(), net.to(torch.float64).bfloat16()):
            for a, b in zip(before.values(), states(other).values(), strict=True):
                assert torch.equal(a, b)
            for layer in (other[0], other[2]):
                assert layer.weight.layer is layer.quantization_state
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
        assert again[0].weight.layer is again[0].quantization_state
        assert torch.equal(again[0].quantization_state.encode_scale, net[0].quantization_state.encode_scale)

    def test_a_copy_steps_on_its_own(self):
        net = model()
        other = copy.deepcopy(net)
        train(other, torch.optim.SGD(other.parameters(), lr=1e-3), 1)
        assert (net[0].quantization_state.encode_scale == 1).all()
        assert (other[0].quantization_state.encode_scale != 1).all()

    def test_materialized_from_meta(self):
        with torch.device("meta"):
            net = nn.Sequential(nn.Linear(32, 64))
        ht.quantize_(net, "fp8_delayed/nvfp4/nvfp4")
        assert all(b.is_meta for b in net.buffers())
        net.to_empty(device="cpu")
        net[0].reset_parameters()  # of the layer: its state has begun already
        state = net[0].quantization_state
        assert (state.encode_scale == 1).all()
        assert (state.amax == 0).all()
        assert state.rounding.tolist() == [state._key, 0]
        net(torch.randn(64, 32)).sum().backward()

    @pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4", "fp8_delayed/nvfp4/nvfp4"])
    @pytest.mark.parametrize("has_memory", [False, True])
    def test_what_to_empty_allocates_trains_as_what_was_made_directly(self, recipe, device, has_memory):
        expected = model(recipe, device=device)
        if has_memory:
            net = train_once(model(recipe)).to(device)
            net.zero_grad()
        else:
            with torch.device("meta"):
                net = model(recipe, device="meta")
        filled = torch.utils.deterministic.fill_uninitialized_memory
        assert filled  # so that torch fills new memory with NaN where it is asked to be deterministic
        torch.use_deterministic_algorithms(True)
        try:
            net.to_empty(device=device)
        finally:
            torch.use_deterministic_algorithms(False)
        with torch.no_grad():
            for mine, theirs in zip(net.parameters(), expected.parameters(), strict=True):
                mine.copy_(theirs)
        found = []
        for one in (net, expected):
            x = random_tensor(64, 32, device=device).requires_grad_()
            y = one(x)
            y.backward(random_tensor(64, 32, device=device, seed=1))
            ht.step_(one)
            grads = [p.grad for p in one.parameters()]
            found.append([y.detach(), x.grad, *grads, *one.buffers(), *map(amax_of, states_of(one))])
        for mine, theirs in zip(*found, strict=True):
            assert torch.equal(mine, theirs)

    def test_moving_on_meta_or_off_it_is_no_reset_of_a_state_that_has_memory(self):
        net = train_once(model("fp8_delayed/nvfp4/nvfp4"))
        before = states(net)
        assert net[0].quantization_state.rounding[1] == 1
        for moved in (net.cpu(), net.float(), copy.deepcopy(net)):
            assert all(torch.equal(t, before[name]) for name, t in states(moved).items())

    def test_a_counter_left_on_meta_begins_anew(self):
        with torch.device("meta"):
            net = model("nvfp4", device="meta")
        ht.set_config_(net, "fp8")
        net.to_empty(device="cpu")
        ht.set_config_(net, "nvfp4")
        state = net[0].quantization_state
        assert state.rounding.tolist() == [state._key, 0]

    def test_a_plain_checkpoint_loads_and_its_state_is_fresh(self):
        torch.manual_seed(1)
        plain = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)).bfloat16()
        net = model()
        net.load_state_dict(plain.state_dict())
        assert torch.equal(net[0].weight.dequantize(), plain[0].weight)
        train(net, torch.optim.SGD(net.parameters(), lr=1e-3), 2)
        net.load_state_dict(plain.state_dict())
        assert all((layer.quantization_state.encode_scale == 1).all() for layer in (net[0], net[2]))
        assert all((layer.quantization_state.amax_history == 0).all() for layer in (net[0], net[2]))
        with torch.device("meta"):
            empty = ht.quantize_(nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)), DELAYED)
        empty.load_state_dict(plain.state_dict(), assign=True)
        empty(random_tensor(64, 32)).sum().backward()
        assert of(empty[0].quantization_state, "weight").amax == plain[0].weight.abs().max()
        partial = {k: v for k, v in net.state_dict().items() if "history" not in k}
        with pytest.raises(RuntimeError, match=r"Missing key.*quantization_state\.amax_history"):
            net.load_state_dict(partial)

    def test_a_checkpoint_of_other_scales_is_refused(self):
        net = model("fp8_delayed")
        with pytest.raises(
            RuntimeError, match=r"0.quantization_state: the checkpoint has other delayed scales.*input: "
        ):
            net.load_state_dict(model("fp8_delayed+most_recent").state_dict())

    def test_a_checkpoint_in_half_precision_loads_into_fp32(self):
        net = model()
        half = {name: t.bfloat16() if t.is_floating_point() else t for name, t in net.state_dict().items()}
        net.load_state_dict(half, assign=True)
        assert (
            net[0].quantization_state.encode_scale.dtype
            == net[0].quantization_state.amax_history.dtype
            == torch.float32
        )

    def test_a_parameter_is_saved_with_its_state(self):
        net = model()
        train(net, torch.optim.SGD(net.parameters(), lr=1e-3), 2)
        file = io.BytesIO()
        torch.save(net[0].weight, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert torch.equal(loaded.layer.encode_scale, net[0].quantization_state.encode_scale)

    def test_a_change_of_recipe_and_back_remakes_the_weights_faces(self):
        net = model()
        train(net, torch.optim.SGD(net.parameters(), lr=1e-3), 2)
        x = random_tensor(64, 32)
        net(x)
        ht.set_config_(net, "bf16")
        ht.set_config_(net, DELAYED)
        net(x).sum().backward()
        row = tensor_faces(net[0].weight, columnwise=False, dtype=torch.bfloat16)[0]
        assert row.scale == 1
        assert of(net[0].quantization_state, "weight").amax == net[0].weight.dequantize().abs().max()

    def test_persistent_weights(self, device):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)).to(device, torch.bfloat16)
        ht.quantize_(net, DELAYED, persistent=True)
        optimizer = ht.optim.MasterWeights(torch.optim.SGD, net.parameters(), lr=1e-3)
        train(net, optimizer, 3, device=device)
        scale = of(net[0].quantization_state, "weight").scale
        assert scale != 1
        assert 400 < (net[0].weight.dequantize().abs().max() * scale).item() < 500


FORGOTTEN = r"step_: the recipes of Sequential keep state, .* but {} took 3 steps without; call .*step_\(model\)"


class TestForgottenStep:
    @pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
    def test_is_an_error_some_steps_later(self, recipe):
        net = model(recipe)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        train(net, optimizer, 2, step_=lambda net: None)
        with pytest.raises(RuntimeError, match=FORGOTTEN.format("SGD")):
            train(net, optimizer, 1, step_=lambda net: None)
        ht.step_(net)
        train(net, optimizer, 2, step_=lambda net: None)

    def test_is_found_where_hooks_of_gradients_step_the_optimizer(self):
        net = model("fp8_delayed")
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        for p in net.parameters():
            p.register_post_accumulate_grad_hook(lambda p: step_in_backward(optimizer))
        for _ in range(2):
            net(random_tensor(64, 32)).sum().backward()
        with pytest.raises(RuntimeError, match=FORGOTTEN.format("SGD")):
            net(random_tensor(64, 32)).sum().backward()

    @pytest.mark.parametrize("case", ["compiled", "frozen", "persistent", "adapters", "recipe changed", "a part"])
    def test_is_found_wherever_optimizers_step_a_parameter_of_the_model(self, case):
        persistent = case == "persistent"
        net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.LayerNorm(32)).bfloat16()
        if case == "recipe changed":
            ht.set_config_(ht.quantize_(net, "mxfp8"), "fp8_delayed")
        elif case == "a part":
            ht.quantize_(net[1], "fp8_delayed", name="1")
        else:
            ht.quantize_(net, "fp8_delayed", persistent=persistent)
        if case == "frozen":
            net[:2].requires_grad_(False)
        if case == "adapters":  # added after conversion, and all that is trained
            net.requires_grad_(False).append(nn.Linear(32, 32).bfloat16())
        trained = [p for p in net.parameters() if p.requires_grad]
        make = ht.optim.MasterWeights if persistent else lambda cls, parameters, **kw: cls(parameters, **kw)
        optimizer = make(torch.optim.SGD, trained, lr=1e-3)
        run = torch.compile(net, backend="aot_eager") if case == "compiled" else net
        train(run, optimizer, 2, step_=lambda net: None)
        with pytest.raises(RuntimeError, match=r"keep state, .* took 3 steps without"):
            train(run, optimizer, 1, step_=lambda net: None)

    def test_without_an_optimizer_nobody_complains(self):
        net, other = model("nvfp4"), model("mxfp8", seed=1)
        x = random_tensor(64, 32)
        for _ in range(6):  # writes, evaluation, functional calls, optimizers of other models
            net(x).sum().backward()
            with torch.no_grad():
                net[0].weight.mul_(1.01)
            torch.func.functional_call(net, {name: p.clone() for name, p in net.named_parameters()}, (x,))
        train(other, torch.optim.SGD(other.parameters(), lr=1e-3), 6, step_=lambda net: None)

    def test_two_changes_per_step_are_forgiven(self):
        """As sharpness-aware optimizers make them."""
        net = model("nvfp4")
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        for _ in range(4):
            train(net, optimizer, 2, step_=lambda net: None)
            ht.step_(net)

    def test_one_optimizer_per_parameter(self):
        net = model("fp8_delayed")
        optimizers = [torch.optim.SGD([p], lr=1e-3) for p in net.parameters()]
        for _ in range(4):
            net(random_tensor(64, 32)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            ht.step_(net)

    def test_a_plain_model_needs_no_step(self):
        net = model("fp8_delayed")
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        train(ht.plain_(net), optimizer, 6, step_=lambda net: None)

    def test_a_copy_in_the_middle_of_a_step_is_no_step(self):
        net = model("nvfp4")
        train(net, torch.optim.SGD(net.parameters(), lr=1e-3), 2)
        net(random_tensor(64, 32)).sum().backward()
        copy.deepcopy(net)(random_tensor(64, 32)).sum().backward()

    def test_recipes_without_state_need_no_step(self):
        net = model("mxfp8")
        train(net, torch.optim.SGD(net.parameters(), lr=1e-3), 2, step_=lambda net: None)
        assert ht.step_(net) is net

    def test_loading_in_between_is_no_step(self):
        net = model("nvfp4")
        net(random_tensor(64, 32)).sum().backward()
        net.load_state_dict(model("nvfp4", seed=1).state_dict())
        net(random_tensor(64, 32)).sum().backward()

    def test_a_module_is_required(self):
        with pytest.raises(TypeError, match="a module is required, got list"):
            ht.step_([])


def step_in_backward(optimizer):
    optimizer.step()
    optimizer.zero_grad()


def scaled_steps(net, factors, fused):
    """Train with a gradient scaler and ``step_after``; yield the factor of each loss after its step."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, backoff_factor=0.5)
    ht.step_after(optimizer, net)
    for factor in factors:
        optimizer.zero_grad()
        scaler.scale(net(random_tensor(64, 32)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update(4.0)
        yield factor


class TestStepAfter:
    def test_equals_the_call_after_every_step(self):
        runs = []
        for follow in (False, True):
            net = model("nvfp4")
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            if follow:
                ht.step_after(optimizer, net)
            runs.append(train(net, optimizer, 4, step_=(lambda net: None) if follow else ht.step_))
        assert runs[0] == runs[1]

    def test_several_optimizers_advance_once(self):
        net = model("nvfp4")
        optimizers = [torch.optim.SGD([p], lr=0.1) for p in net.parameters()]
        ht.step_after(iter(optimizers), net)
        counter = net[0].quantization_state.rounding
        for step in range(3):
            for optimizer in optimizers:
                assert counter[1] == step
                optimizer.step()
            assert counter[1] == step + 1
        for _ in range(3):  # the others skip
            optimizers[0].step()
        assert counter[1] == 5

    @pytest.mark.parametrize("wrap", [lambda net: net, nn.Sequential], ids=["the model", "a wrapper of it"])
    def test_called_again_the_state_advances_once(self, wrap):
        net, other = model("nvfp4"), model("nvfp4")
        optimizer = torch.optim.SGD([*net.parameters(), *other.parameters()], lr=0.1)
        for it in (net, other, wrap(net)):
            ht.step_after(optimizer, it)
        optimizer.step()
        assert [it[0].quantization_state.rounding[1] for it in (net, other)] == [1, 1]

    @pytest.mark.parametrize("order", [1, -1], ids=["a wrapper last", "a wrapper first"])
    def test_called_again_before_any_layer_has_a_state(self, order):
        net = model("bf16")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for it in [net, nn.Sequential(net)][::order]:
            ht.step_after(optimizer, it)
        ht.set_config_(net, "nvfp4")
        optimizer.step()
        assert net[0].quantization_state.rounding[1] == 1

    def test_a_part_and_then_the_whole(self):
        net = model("nvfp4")
        whole = nn.Sequential(net, model("nvfp4"))
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
        for it in (net, whole):
            ht.step_after(optimizer, it)
        optimizer.step()
        assert [it[0].quantization_state.rounding[1] for it in whole] == [1, 1]

    def test_states_of_layers_do_not_cover_each_other(self):
        """They have no parameters."""
        net = model("nvfp4")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        states = [net[i].quantization_state for i in (0, 2)]
        for state in states:
            ht.step_after(optimizer, state)
        optimizer.step()
        assert [state.rounding[1] for state in states] == [1, 1]

    @pytest.mark.parametrize("count", [1, 2])
    def test_frees_the_model_together_with_its_optimizers(self, count):
        """At once, as without it: the memory of a model is not left to the garbage collector."""
        net = model("nvfp4")
        optimizers = [torch.optim.SGD([p], lr=0.1) for p in list(net.parameters())[:count]]
        ht.step_after(optimizers, net)
        train(net, optimizers[0], 1, step_=lambda net: None)
        gc.collect()
        gone = [weakref.ref(it) for it in (net, *net.parameters(), *optimizers)]
        gc.disable()
        try:
            del net, optimizers
            assert [it() for it in gone] == [None] * len(gone)
        finally:
            gc.enable()

    @pytest.mark.parametrize("fused", [False, True])
    def test_a_step_that_the_scaler_skips_does_not_count(self, fused):
        net = model("nvfp4")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        ht.step_after(optimizer, net)
        counts = []
        for factor in (1.0, torch.inf, 1.0):
            optimizer.zero_grad()
            scaler.scale(net(random_tensor(64, 32)).sum()).backward()
            net[2].weight.grad.mul_(factor)
            scaler.step(optimizer)
            scaler.update()
            counts.append(int(net[0].quantization_state.rounding[1]))
        assert counts == [1, 1, 2]

    @pytest.mark.parametrize("skipping", [[0], [1], [0, 1]], ids=str)
    def test_a_step_that_some_of_several_optimizers_skip_does_not_count(self, skipping):
        """And the state advances after the last of them in later steps."""
        net = model("nvfp4")
        optimizers = [torch.optim.SGD(net[i].parameters(), lr=0.1, fused=True) for i in (0, 2)]
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        ht.step_after(optimizers, net)
        counter, counts = net[0].quantization_state.rounding[1], []
        for step in range(3):
            scaler.scale(net(random_tensor(64, 32)).sum()).backward()
            for index in skipping if step == 1 else []:
                net[2 * index].weight.grad.fill_(torch.inf)
            for optimizer in optimizers:
                scaler.step(optimizer)
                counts.append(int(counter))
                optimizer.zero_grad()
            scaler.update()
        assert counts == [0, 1, 1, 1, 1, 2]

    def test_an_optimizer_that_is_given_twice_is_one(self):
        net = model("nvfp4")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        ht.step_after([optimizer, optimizer], net)
        optimizer.step()
        assert net[0].quantization_state.rounding[1] == 1

    @pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
    @pytest.mark.parametrize("several", [False, True])
    @pytest.mark.parametrize("how", ["step_", "step_after"])
    def test_hooks_of_gradients_may_step_the_optimizer(self, recipe, several, how):
        """One that is called for each parameter, or one for each; oracle: a step after backward."""
        losses, found = [], []
        for in_hooks in (False, True):
            net = model(recipe)
            parameters = list(net.parameters())
            parts = [[p] for p in parameters] if several else [parameters]
            optimizers = [torch.optim.SGD(part, lr=1e-3) for part in parts]
            if how == "step_after":
                ht.step_after(optimizers, net)
            by_parameter = {p: optimizers[i if several else 0] for i, p in enumerate(parameters)}
            for p in parameters if in_hooks else []:
                p.register_post_accumulate_grad_hook(lambda p, of=by_parameter: step_in_backward(of[p]))
            for seed in range(5):
                losses.append(net(random_tensor(64, 32, seed=seed)).float().square().mean())
                losses[-1].backward()
                for optimizer in [] if in_hooks else optimizers:
                    step_in_backward(optimizer)
                if how == "step_":
                    ht.step_(net)
            found.append([*losses[-5:], *net.parameters(), *net.buffers()])
        assert all(map(torch.equal, *found))

    @pytest.mark.parametrize("called", ["by a fused optimizer", "by hand"])
    def test_amaxes_of_a_step_that_is_skipped_are_forgotten(self, called):
        """Oracle: the same steps without it."""
        found = []
        for factors in ((1.0, torch.inf, 1.0), (1.0, 1.0)):
            net = model("fp8_delayed")
            steps = scaled_steps(net, factors, fused=called == "by a fused optimizer")
            for factor in steps:
                if factor == torch.inf and called == "by hand":
                    ht.step_(net, skipped=True)
            found.append([state.clone() for state in net.buffers()])
        assert all(map(torch.equal, *found))

    def test_a_step_that_is_skipped_and_nobody_says_so_raises(self):
        net = model("fp8_delayed")
        with pytest.raises(RuntimeError, match=r"the amaxes of layer 2 \(grad_output\) are not finite.* skipped=True"):
            list(scaled_steps(net, (1.0, torch.inf, 1.0), fused=False))

    def test_can_be_removed(self):
        net = model("nvfp4")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        ht.step_after(optimizer, net).remove()
        train(net, optimizer, 2, step_=lambda net: None)
        assert net[0].quantization_state.rounding[1] == 0

    def test_bad_input(self):
        net = model("nvfp4")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with pytest.raises(TypeError, match="step_after: a module is required, got SGD"):
            ht.step_after(net, optimizer)
        for wrong in (None, 3, [net], "SGD"):
            with pytest.raises(TypeError, match="step_after: an optimizer, or a list of them, is required, got"):
                ht.step_after(wrong, net)
        with pytest.raises(ValueError, match="step_after: no optimizer was given"):
            ht.step_after([], net)

    def test_an_optimizer_that_has_no_hooks_is_refused(self):
        """As torch's wrapper for local SGD, which never calls ``Optimizer.__init__``."""
        net = model("fp8_delayed")
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        with pytest.raises(TypeError, match="got PostLocalSGDOptimizer, which has none; pass the"):
            ht.step_after(PostLocalSGDOptimizer(inner, averager=None), net)
        ht.step_after(inner, net)


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
def test_state_on_another_device_is_refused(recipe):
    """A kernel would read memory of the wrong device; as when parameters are offloaded, and buffers moved with them."""
    net = ht.quantize_(nn.Linear(64, 64), recipe)
    net.quantization_state.to("meta")
    with pytest.raises(ValueError, match=r"state on meta, and what is quantized is on cpu; move"):
        net(random_tensor(64, 64, dtype=torch.float32)).sum().backward()


@pytest.mark.parametrize(("spec", "dtype"), [("fp8_delayed", torch.bfloat16), ("nvfp4", torch.float32)])
def test_a_state_in_another_dtype_raises(spec, dtype):
    """As DistributedDataParallel's mixed precision casts all buffers, through ``data``: scales would be rounded, and a
    kernel would read what they are not.
    """
    net = ht.quantize_(nn.Sequential(nn.Linear(32, 32)), spec)
    for buffer in net.buffers():
        buffer.data = buffer.to(dtype)
    with pytest.raises(ValueError, match=rf"layer 0 has its state in {dtype}, not torch\.\w+; cast the model by to"):
        net(torch.randn(4, 32)).sum().backward()


class TestStochasticRounding:
    def test_a_detour_does_not_repeat_draws(self):
        net = model("nvfp4")
        ht.step_(ht.step_(net))
        for recipe in ("bf16", "fp8_delayed", "mxfp8"):
            ht.set_config_(net, recipe)
            assert not any(name.endswith("rounding") for name, _ in net.named_buffers())
        ht.set_config_(net, "nvfp4")
        assert net[0].quantization_state.rounding[1] == 2

    def test_draws_anew_after_a_step_and_only_then(self, device):
        net, x, g = model("nvfp4", device=device), random_tensor(64, 32, device=device), random_tensor(64, 32, seed=1)
        grads = []
        for steps in (0, 0, 1, 0):
            for _ in range(steps):
                ht.step_(net)
            net.zero_grad()
            net(x).backward(g.to(device))
            grads.append(net[0].weight.grad.clone())
        assert torch.equal(grads[0], grads[1])
        assert not torch.equal(grads[1], grads[2])
        assert torch.equal(grads[2], grads[3])
        assert net[0].quantization_state.rounding[1] == 1

    def test_draws_by_layer_name_and_step(self):
        runs = [train(net, torch.optim.SGD(net.parameters(), lr=10.0), 3) for net in (model("nvfp4"), model("nvfp4"))]
        assert runs[0] == runs[1]
        net = model(ht.recipes.nvfp4(seed=1))
        assert train(net, torch.optim.SGD(net.parameters(), lr=10.0), 3) != runs[0]

    def test_layers_without_a_name_draw_keys_of_their_own_that_a_seed_repeats(self):
        found = []
        for seed in (3, 3, 4):
            net = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
            torch.manual_seed(seed)
            for layer in net:
                ht.quantize_(layer, "nvfp4")
            found.append([layer.quantization_state.rounding[0].item() for layer in net])
        assert found[0] == found[1]
        assert len({*found[0], *found[2]}) == 4

    def test_layers_converted_by_name_are_those_of_the_whole_model(self):
        whole, parts = model("nvfp4"), nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)).bfloat16()
        parts.load_state_dict({name: t for name, t in whole.state_dict().items() if "quantization_state" not in name})
        drawn = torch.get_rng_state()
        ht.quantize_(parts[0], "nvfp4", name="0")
        ht.quantize_(parts[2], "nvfp4", name="2")
        assert torch.equal(torch.get_rng_state(), drawn)
        assert states(parts).keys() == states(whole).keys()
        runs = [train(net, torch.optim.SGD(net.parameters(), lr=10.0), 3) for net in (whole, parts)]
        assert runs[0] == runs[1]
        for name, t in states(whole).items():
            assert torch.equal(states(parts)[name], t)

    @pytest.mark.parametrize("wrapped", ["model", "a layer", "a checkpointed layer"])
    def test_wrapped_modules_have_the_random_numbers_of_others(self, wrapped):
        def net():
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)).bfloat16()

        plain, other = ht.quantize_(net(), "nvfp4"), net()
        if wrapped == "model":
            other = torch.compile(other, backend="eager")
        elif wrapped == "a layer":
            other[2] = torch.compile(other[2], backend="eager")
        else:
            other[0] = checkpoint_wrapper(other[0])
        ht.quantize_(other, "nvfp4")
        expected = [layer.quantization_state.rounding for layer in (plain[0], plain[2])]
        found = [m.rounding for name, m in other.named_modules() if name.endswith("quantization_state")]
        assert torch.stack(found).tolist() == torch.stack(expected).tolist()

    @pytest.mark.parametrize("verb", ["ours", "torchao"])
    def test_nothing_is_drawn_where_nothing_rounds_at_random_or_there_is_no_memory(self, verb):
        from torchao.quantization import quantize_

        convert = ht.quantize_ if verb == "ours" else quantize_
        layer = nn.Linear(32, 64)
        with torch.device("meta"):
            empty = nn.Linear(32, 64)
        torch.manual_seed(6)
        before = torch.get_rng_state()
        for recipe in ("fp8", "fp8_delayed", "nvfp4+nearest"):
            convert(layer, HybridConfig.parse(recipe))
        with torch.device("meta"):
            convert(empty, HybridConfig.parse("nvfp4"))
        assert torch.equal(torch.get_rng_state(), before)
        with torch.device("meta"):  # where tensors are made must not matter
            convert(layer, HybridConfig.parse("nvfp4"))
        key = layer.quantization_state.rounding[0].item()
        torch.manual_seed(6)
        empty.to_empty(device="cpu")
        assert empty.quantization_state.rounding.tolist() == [key, 0]
        empty.quantization_state.reset_parameters()
        assert empty.quantization_state.rounding.tolist() == [key, 0]

    def test_a_name_comes_to_a_state_that_has_drawn_nothing_by_none(self):
        layer = ht.quantize_(nn.Linear(32, 64), "fp8_delayed")
        ht.quantize_(layer, "nvfp4", name="up")
        named = ht.quantize_(nn.Linear(32, 64), "nvfp4", name="up")
        assert torch.equal(layer.quantization_state.rounding, named.quantization_state.rounding)
        ht.quantize_(layer, "nvfp4", name="down")
        assert torch.equal(layer.quantization_state.rounding, named.quantization_state.rounding)

    def test_torchaos_verb_gives_layers_keys_of_their_own(self):
        from torchao.quantization import quantize_

        net = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
        quantize_(net, HybridConfig.parse("nvfp4"), filter_fn=lambda m, _: isinstance(m, nn.Linear))
        keys = [net[i].quantization_state.rounding[0].item() for i in (0, 1)]
        assert keys[0] != keys[1]
        torch.manual_seed(5)
        again = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
        again.load_state_dict(net.state_dict(), strict=False)
        quantize_(again, HybridConfig.parse("nvfp4"), filter_fn=lambda m, _: isinstance(m, nn.Linear))
        again.load_state_dict(net.state_dict())
        assert [again[i].quantization_state.rounding[0].item() for i in (0, 1)] == keys


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
def test_a_part_of_a_model_is_loaded_without_the_state_of_the_rest(recipe):
    """As of adapters, or of biases alone; the weight of a layer without its state begins anew."""

    def values(layer):
        return [buffer.clone() for buffer in layer.quantization_state.buffers()]

    torch.manual_seed(0)
    net, x = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)), torch.randn(16, 32)
    ht.quantize_(net, recipe)
    for _ in range(2):
        (100 * net(x)).sum().backward()
        ht.step_(net)
    versions, before = [net[i].quantization_state.version for i in (1, 2)], [values(net[i]) for i in (1, 2)]
    part = {"0.weight": net[0].weight, "1.bias": net[1].bias, "2.lora_A": torch.ones(2)}
    net.load_state_dict({name: value.detach().clone() for name, value in part.items()}, strict=False)
    assert versions == [net[i].quantization_state.version for i in (1, 2)]
    for layer, own in zip(net[1:], before, strict=True):
        assert all(map(torch.equal, values(layer), own))
    net.load_state_dict({"1.weight": net[1].weight.detach().clone()}, strict=False)
    assert not all(map(torch.equal, values(net[1]), before[0]))
    assert all(map(torch.equal, values(net[2]), before[1]))


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
def test_tied_layers_load_from_a_file_that_has_one_of_their_names(recipe, tmp_path):
    """``load_model`` of safetensors asks what ``load_state_dict`` found missing: all names but those of the file."""

    def tied():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
        net[1].weight = net[0].weight
        return ht.quantize_(net, recipe)

    net, again = tied(), tied()
    for _ in range(2):
        (100 * net(torch.randn(16, 32))).sum().backward()
        ht.step_(net)
    save_model(net, tmp_path / "model.safetensors")
    load_model(again, tmp_path / "model.safetensors")
    saved, loaded = net.state_dict(), again.state_dict()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


ROUNDED_AT_RANDOM = dataclasses.replace(HybridConfig.parse("nvfp4"), weight=ht.NVFP4Quantizer(rounding="stochastic"))


@pytest.mark.parametrize(
    ("recipe", "once"),
    [("nvfp4", True), ("mxfp8/mxfp8/fp8_delayed", True), ("fp8_delayed", False), (ROUNDED_AT_RANDOM, False)],
    ids=["nvfp4", "other tensors delayed", "delayed", "stochastic"],
)
def test_a_frozen_weight_is_quantized_again_only_if_steps_change_its_faces(recipe, once):
    net = model(recipe)
    net[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(net[2].parameters(), lr=1e-3)

    def face():
        return net[0].weight.faces(rowwise=True, columnwise=False, dtype=torch.bfloat16)[0]

    train(net, optimizer, 1)
    first = face()
    train(net, optimizer, 2)
    assert (face() is first) is once
    net.load_state_dict(net.state_dict())  # writes weights and states
    assert face() is not first


def test_a_weight_whose_step_is_in_a_cuda_graph_keeps_no_face(monkeypatch):
    """Replays advance the scale that it is cast with, and count nothing."""
    net = model(DELAYED)
    weight, layer = net[0].weight, net[0].quantization_state
    monkeypatch.setattr("hybridtensor.state.step.is_captured", lambda: True)
    ht.step_(net)
    monkeypatch.undo()
    for factor in (1.0, 2.0):
        layer.encode_scale.numpy()[:] = factor
        row, _ = weight.faces(rowwise=True, columnwise=False, dtype=weight.dtype)
        assert row.scale.item() == 1 / factor


@pytest.mark.parametrize("assign", [False, True])
def test_loaded_values_are_quantized_by_the_scales_that_are_loaded_with_them(assign):
    """Oracle: the weight in high precision, which quantizes its values when it is used."""
    trained = model("fp8_delayed")
    train(trained, torch.optim.SGD(trained.parameters(), lr=1e-3), 3)
    layers = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)).to(torch.bfloat16)
    loaded = ht.quantize_(layers, "fp8_delayed", persistent=True)
    loaded.load_state_dict(trained.state_dict(), assign=assign)
    x = random_tensor(64, 32, seed=9)
    assert trained[0].quantization_state.encode_scale[1] != 1
    assert torch.equal(loaded(x), trained(x))


def test_loading_keeps_the_notes_where_they_are():
    """CUDA graphs hold their address."""
    net = model(DELAYED)
    amax = net[0].quantization_state.amax
    amax.fill_(3.0)
    net.load_state_dict(net.state_dict())
    assert net[0].quantization_state.amax is amax
    assert not amax.any()


@pytest.mark.parametrize("backend", ["aot_eager"])
@pytest.mark.parametrize("recipe", [DELAYED, "nvfp4", "fp8_delayed/mxfp8/nvfp4"], ids=str)
def test_compiled_training_equals_eager(recipe, backend, device):
    """One graph, no break; the buffers are read and the amaxes recorded inside it."""
    torch._dynamo.reset()
    eager, compiled = model(recipe, device=device), model(recipe, device=device)
    counter = CompileCounterWithBackend(backend)
    runs = []
    for net, forward in ((eager, eager), (compiled, torch.compile(compiled, fullgraph=True, backend=counter))):
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
        runs.append([])
        for step in range(4):
            optimizer.zero_grad()
            loss = forward(random_tensor(64, 32, device=device, seed=step)).float().square().mean() / 1000
            loss.backward()
            optimizer.step()
            ht.step_(net)
            runs[-1].append(loss.item())
    assert runs[0] == runs[1]
    assert counter.frame_count == 1
    for a, b in zip(states(eager).values(), states(compiled).values(), strict=True):
        assert torch.equal(a, b)
    torch._dynamo.reset()


class Walked(nn.Sequential):
    def forward(self, x):
        for module in self.modules():
            x = module(x) if isinstance(module, nn.Linear) else x
        return x * len(dict(self.named_parameters()))


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
@pytest.mark.parametrize("call", ["forward", "functional_call"])
def test_a_graph_walks_through_modules_with_a_state(recipe, call):
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = ht.quantize_(Walked(nn.Linear(64, 64), nn.Linear(64, 64)), recipe)
    forward = functools.partial(torch.func.functional_call, net, dict(net.named_parameters()))
    compiled = torch.compile(net if call == "forward" else forward, backend="aot_eager", fullgraph=True)
    x = torch.randn(32, 64)
    assert torch.equal(compiled(x), net(x))


def test_hints_are_not_saved_and_not_copied():
    """A parameter with what its layer remembers is read back by torch's restricted unpickler."""
    layer = ht.quantize_(nn.Linear(32, 32), "fp8+pow2_scale")
    layer(torch.randn(4, 32)).sum().backward()
    state = layer.weight.layer
    assert set(state.hints) == {"input", "weight", "grad_output"}
    file = io.BytesIO()
    torch.save(list(layer.parameters()), file)
    file.seek(0)
    weight, _ = torch.load(file, weights_only=True)
    assert torch.equal(weight.master, layer.weight.master)
    assert weight.layer.hints == copy.deepcopy(layer).weight.layer.hints == {}
    old = {name: value for name, value in state.__getstate__().items() if name != "hints"}
    before_hints = LayerState.__new__(LayerState)
    before_hints.__setstate__(old)
    assert before_hints.tensors().hints == {}


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
def test_a_root_lists_its_state_as_a_submodule_does(recipe):
    """Whatever walks buffers (averages, broadcasts, moves to another device) finds them."""
    root, inside = (ht.quantize_(m, recipe) for m in (nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64))))
    for of in (nn.Module.named_buffers, nn.Module.named_modules):
        names = {name for name, _ in of(root)}
        assert names == {name.partition(".")[2] for name, _ in of(inside) if name} | ({""} if "" in names else set())
    assert {name for name, _ in root.named_buffers()} == {n for n in root.state_dict() if "quantization_state" in n}


def test_tensors_that_are_replaced_in_a_module_s_table_count():
    """As ``functional_call`` and ``Module._apply`` replace buffers: no attribute is set."""
    layer = ht.quantize_(nn.Linear(32, 32), "fp8_delayed")
    state = layer.quantization_state
    before = state.tensors()
    assert state.tensors() is before
    other = torch.full_like(before.encode_scale, 2.0)
    state._buffers["encode_scale"] = other
    assert state.tensors().encode_scale is other


def test_a_state_of_a_derived_class_is_one():
    """As a framework derives one to name its buffers."""

    class Derived(LayerState):
        pass

    torch.manual_seed(0)
    model, x = ht.quantize_(nn.Linear(32, 32), "fp8_delayed"), random_tensor(32, 32, dtype=torch.float32)
    other = copy.deepcopy(model)
    other.quantization_state.__class__ = Derived
    for _ in range(2):
        for net in (model, other):
            net(x).square().sum().backward()
            ht.step_(net)
    assert torch.equal(model.weight.grad, other.weight.grad)
    assert torch.equal(model.quantization_state.encode_scale, other.quantization_state.encode_scale)
    assert not torch.equal(other.quantization_state.encode_scale, torch.ones(3))


def test_pickling_makes_no_tensors():
    """A process that is spawned opens the memory of tensors later, when that of a temporary one would be gone."""
    net = ht.quantize_(nn.Sequential(nn.Linear(32, 32)), "fp8_delayed")
    net(torch.ones(4, 32)).sum().backward()
    state = net[0].quantization_state
    own = {buffer.data_ptr() for buffer in state.buffers()}
    found = [value for value in tree_leaves(state.__getstate__()) if isinstance(value, torch.Tensor)]
    assert all(tensor.data_ptr() in own for tensor in found)
    again = pickle.loads(pickle.dumps(net))[0].quantization_state
    assert torch.equal(again.amax, state.amax)
    assert state.amax.any()
