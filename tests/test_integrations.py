"""Other libraries' ways in and out: Hugging Face, distributed checkpoints, gradient scaling, schedulers."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hugging_face import llama
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim.swa_utils import get_ema_avg_fn, get_ema_multi_avg_fn

import hybridtensor as ht
from hybridtensor import HybridConfig, MasterWeight


@pytest.fixture
def stored(tmp_path):
    """A small Llama on disk."""
    pytest.importorskip("transformers", reason="Hugging Face's loader is tested with transformers")
    model = llama()
    model.save_pretrained(tmp_path / "model")
    return model, tmp_path / "model"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_hugging_face_quantizes_while_it_loads(stored):
    """``from_pretrained`` calls torchao's quantize_ on each module as its root."""
    from transformers import AutoModelForCausalLM, TorchAoConfig

    plain, path = stored
    config = HybridConfig.parse("fp8")
    loaded = AutoModelForCausalLM.from_pretrained(path, quantization_config=TorchAoConfig(quant_type=config))
    converted = [
        n for n, m in loaded.named_modules() if isinstance(m, nn.Linear) and isinstance(m.weight, MasterWeight)
    ]
    assert len(converted) == 14
    assert "lm_head" not in converted
    ht.quantize_(plain.to(loaded.dtype), config)
    tokens = torch.arange(12).reshape(2, 6)
    loaded.train().requires_grad_(True)  # the loader freezes what it quantizes
    plain.train()
    losses = [m(input_ids=tokens, labels=tokens).loss for m in (loaded, plain)]
    assert torch.equal(*losses)
    losses[0].backward()
    assert type(loaded.model.layers[0].self_attn.q_proj.weight.grad) is torch.Tensor


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_hugging_face_model_trains_with_gradient_checkpointing(stored):
    model, _ = stored
    ht.quantize_(model, "fp8+dequantized")
    tokens = torch.arange(12).reshape(2, 6)
    grads = []
    for enabled in (False, True):
        if enabled:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        model.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_savers_of_raw_memory_never_write_garbage(tmp_path):
    """safetensors looks for one storage: it finds none and says so. The plain values can be written."""
    config = HybridConfig.parse("fp8")
    for tensor in (MasterWeight(torch.randn(4, 8), config), ht.Float8Quantizer().quantize(torch.ones(4, 8))):
        with pytest.raises(RuntimeError, match="invalid python storage"):
            save_file({"w": tensor}, tmp_path / "w.safetensors")
        save_file({"w": tensor.dequantize()}, tmp_path / "w.safetensors")
        assert torch.equal(load_file(tmp_path / "w.safetensors")["w"], tensor.dequantize())


@pytest.mark.filterwarnings("ignore:.*persistent weights whose values are bfloat16:UserWarning")
@pytest.mark.parametrize("copied", [False, True], ids=["itself", "a copy"])  # as of a GPU's tensors
@pytest.mark.parametrize("masters", [False, True], ids=["plain", "masters"])
def test_savers_of_raw_memory_write_the_values_of_persistent_weights(tmp_path, masters, copied):
    """Those that no optimizer saves, from which training goes on; beside masters, those of the faces, which load so."""

    def trained(steps):
        torch.manual_seed(0)
        net = ht.quantize_(nn.Linear(32, 16, bias=False, dtype=torch.bfloat16), "fp8", persistent=True)
        kind = torch.optim.SGD
        made = ht.optim.MasterWeights(kind, net.parameters(), lr=0.1) if masters else kind(net.parameters(), lr=0.1)
        train(net, made, steps)
        return net, made

    def train(net, optimizer, steps):
        for _ in range(steps):
            net(torch.ones(2, 32, dtype=torch.bfloat16)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    net, optimizer = trained(2)
    saved = net.state_dict()
    save_file({name: t.clone() if copied else t for name, t in saved.items()}, tmp_path / "w.safetensors")
    values = load_file(tmp_path / "w.safetensors")["weight"]
    assert torch.equal(values, net.weight.dequantize() if masters else saved["weight"].known_values)
    again, other = trained(1)
    again.load_state_dict({"weight": values})
    assert torch.equal(again.weight.rowwise.qdata.float(), net.weight.rowwise.qdata.float())
    if not masters:
        train(net, optimizer, 1)
        train(again, other, 1)
        assert torch.equal(again.weight.known_values, net.weight.known_values)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
class TestDistributedCheckpoint:
    def state(self, model, optimizer):
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state}

    def trained(self, spec):
        torch.manual_seed(0)
        model = nn.Linear(16, 8)
        if spec is not None:
            ht.quantize_(model, spec)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        return model, optimizer

    @pytest.mark.parametrize(("source", "target"), [("fp8", "fp8"), ("fp8", None), (None, "fp8_rowwise")])
    def test_checkpoints_do_not_know_of_quantization(self, source, target, tmp_path):
        model, optimizer = self.trained(source)
        dcp.save(self.state(model, optimizer), checkpoint_id=tmp_path)
        value = model.weight.dequantize() if source else model.weight
        other, other_optimizer = self.trained(target)
        with torch.no_grad():
            other.weight.zero_()
        y = other(torch.ones(2, 16))  # caches the faces of zeros, which the load must not leave behind
        state = self.state(other, other_optimizer)
        dcp.load(state, checkpoint_id=tmp_path)
        set_state_dict(other, other_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        assert torch.equal(other.weight.dequantize() if target else other.weight, value)
        assert not torch.equal(other(torch.ones(2, 16)), y)
        moments = [o.state[m.weight]["exp_avg"] for m, o in ((model, optimizer), (other, other_optimizer))]
        assert torch.equal(*moments)
        assert all(type(m) is torch.Tensor for m in moments)


def test_gradient_scaling():
    model = ht.quantize_(nn.Linear(16, 8), "fp8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = model.weight.master.clone()
    scaler.scale(model(torch.ones(2, 16)).sum()).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(model.weight.master, before)


def test_average_models_and_ema():
    model = ht.quantize_(nn.Linear(16, 8), "fp8")
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    with torch.no_grad():
        model.weight.add_(2.0)
    averaged.update_parameters(model)
    torch.testing.assert_close(averaged.module.weight.master, model.weight.master - 1.0)


@pytest.mark.parametrize("persistent", [False, True])
def test_an_average_that_moves_little_moves(persistent):
    """Oracle: the average of the plain model. Faces would round each small change away."""
    plain = nn.Linear(64, 64, bias=False)
    models = plain, ht.quantize_(copy.deepcopy(plain), "mxfp8", persistent=persistent)
    averages = [torch.optim.swa_utils.AveragedModel(m, avg_fn=get_ema_avg_fn(0.99)) for m in models]
    target = torch.randn(64, 64)
    for step in range(100):
        for average, model in zip(averages, models, strict=True):
            average.update_parameters(model)
            if step == 0:
                model.weight.detach().copy_(target)
    wanted, found = (ht.plain_state_dict(average.module)["weight"] for average in averages)
    assert torch.equal(found, wanted)


AVERAGES = [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.99)}]


def with_masters(dtype):
    model = ht.quantize_(nn.Linear(64, 64, bias=False, dtype=dtype), "mxfp8", persistent=True)
    return model, ht.optim.MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1)


@pytest.mark.parametrize("kwargs", AVERAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_average_without_masters_is_refused(kwargs, dtype):
    """Their optimizer had them, and the model has only faces."""
    model, optimizer = with_masters(dtype)
    del optimizer
    averaged = torch.optim.swa_utils.AveragedModel(model, **kwargs)
    averaged.update_parameters(model)
    with pytest.raises(
        NotImplementedError, match=r"which small changes are lost|of a trainable weight needs its values"
    ):
        averaged.update_parameters(model)


@pytest.mark.parametrize("kwargs", AVERAGES)
def test_an_average_begins_with_the_masters(kwargs):
    """Oracle: the average of a plain model that has the masters' values in each step."""
    model, optimizer = with_masters(torch.float32)
    (master,) = optimizer.masters().values()
    plain = nn.Linear(64, 64, bias=False)
    averages = [torch.optim.swa_utils.AveragedModel(m, **kwargs) for m in (model, plain)]
    for _ in range(4):
        plain.weight.data.copy_(master)
        for averaged, m in zip(averages, (model, plain), strict=True):
            averaged.update_parameters(m)
        model.weight.grad = torch.randn(64, 64) / 64
        optimizer.step()
    assert torch.equal(ht.plain_state_dict(averages[0].module)["weight"], averages[1].module.weight)
