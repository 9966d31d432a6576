"""Transformers: resizing, saving, training with Trainer."""

import os
import pickle
import sys
import warnings

import processes
import pytest
import torch
from hugging_face import config_of, llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import hybridtensor as ht
from hybridtensor.dtensor import local

transformers = pytest.importorskip("transformers", reason="needs transformers: make test-frameworks")
pytest.importorskip("accelerate", reason="needs accelerate: make test-frameworks")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages
IDS = torch.arange(32).view(1, 32) % 96
KINDS = pytest.mark.parametrize("persistent", [False, True], ids=["master", "persistent"])


def make(tied=False):
    return llama(tie_word_embeddings=tied)


def everything(module, name):
    return True


@KINDS
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_embeddings_are_resized(tied, persistent, caplog):
    """A tied head keeps its recipe; a new head is plain, and said to be."""
    model = ht.quantize_(make(tied), "fp8", persistent=persistent, filter_fn=everything)
    before = model.lm_head.weight.dequantize().clone()
    model.resize_token_embeddings(112)
    assert model.lm_head.weight.shape == (112, 64)
    model(input_ids=IDS, labels=IDS).loss.backward()
    if tied:
        assert model.lm_head.weight is model.get_input_embeddings().weight
        assert ht.subclasses.is_converted(model.lm_head.weight)
        assert torch.equal(ht.plain.high_precision_values(model.lm_head.weight)[:96], before) or persistent
    else:
        assert "lm_head" in {matrix.name.removesuffix(".weight") for matrix in ht.check(model, IDS).coverage.plain}


@KINDS
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_save_pretrained_and_from_pretrained(tied, persistent, tmp_path):
    model = ht.quantize_(make(tied), "fp8", persistent=persistent, filter_fn=everything)
    model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    values = ht.plain_state_dict(model)  # nobody has stepped them
    for name, value in loaded.named_parameters():
        assert torch.equal(value, values[name]), name


@KINDS
@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed"])
def test_trainer(recipe, persistent, tmp_path):
    """Checkpoints in between, and bitwise a loop by hand."""

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, i):
            return {"input_ids": IDS[0], "labels": IDS[0]}

    def optimizer_of(model):
        make_one = ht.optim.MasterWeights if persistent else lambda cls, parameters, **kw: cls(parameters, **kw)
        optimizer = make_one(torch.optim.AdamW, model.parameters(), lr=1e-3)
        ht.step_after(optimizer, model)
        return optimizer

    model, other = (ht.quantize_(make(), recipe, persistent=persistent) for _ in range(2))
    arguments = transformers.TrainingArguments(
        tmp_path, max_steps=4, save_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        disable_tqdm=True, lr_scheduler_type="constant", max_grad_norm=0.0,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=Data(), optimizers=(optimizer_of(model), None))
    trainer.train()
    optimizer = optimizer_of(other)
    other.train()
    for _ in range(4):
        other(input_ids=IDS.expand(2, -1), labels=IDS.expand(2, -1)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        pair = [p.dequantize() if ht.subclasses.is_converted(p) else p for p in (mine, theirs)]
        assert torch.equal(*pair), name
    if recipe == "fp8_delayed":
        state = model.model.layers[0].self_attn.q_proj.quantization_state
        assert state.steps >= 4
    assert {"model.safetensors", "optimizer.pt"} <= {path.name for path in (tmp_path / "checkpoint-4").iterdir()}
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    weight = model.model.layers[0].self_attn.q_proj.weight
    assert torch.equal(loaded.model.layers[0].self_attn.q_proj.weight, weight.dequantize())


def test_a_vector_of_parameters():
    model = ht.quantize_(make(), "fp8")
    vector = torch.nn.utils.parameters_to_vector(model.parameters())
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
        torch.nn.utils.vector_to_parameters(vector.clone(), model.parameters())
        assert torch.equal(model(input_ids=IDS).logits, expected)
        torch.nn.utils.vector_to_parameters(1.5 * vector, model.parameters())
        assert not torch.equal(model(input_ids=IDS).logits, expected)


@KINDS
def test_histograms_of_every_parameter(persistent, tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="needs tensorboard: make test-frameworks")
    with tensorboard.SummaryWriter(tmp_path) as writer:
        for name, parameter in ht.quantize_(make(), "fp8", persistent=persistent).named_parameters():
            writer.add_histogram(name, parameter, 0)
    assert any(tmp_path.iterdir())


def loaded_in_parts(rank, path):
    """``tp_plan="auto"``, then ``quantize_``: layers run on their parts, as Transformers says or as we do."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    warnings.filterwarnings("ignore")
    whole = ht.quantize_(transformers.LlamaForCausalLM.from_pretrained(path), "mxfp8")
    model = transformers.LlamaForCausalLM.from_pretrained(path, tp_plan="auto")
    with torch.no_grad():
        plain = model(IDS).logits
    ht.set_mesh_(ht.quantize_(model, "mxfp8"), model.model.layers[0].mlp.up_proj.weight.device_mesh)
    assert isinstance(local(model.model.layers[0].mlp.up_proj.weight), ht.MasterWeight)
    logits, expected = model(IDS).logits, whole(IDS).logits
    assert (
        logits - expected
    ).norm() <= 2**-8 * expected.norm()  # sums in another order, and what then rounds otherwise
    assert (plain - expected).norm() > 2**-6 * expected.norm()  # which quantizing does
    logits.square().mean().backward()
    expected.square().mean().backward()
    for name, p in model.named_parameters():
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        other = whole.get_parameter(name).grad
        assert (grad - other).norm() <= 2**-5 * other.norm(), name


def test_tensor_parallel_models(tmp_path):
    llama(hidden_size=128, intermediate_size=256, num_key_value_heads=4).save_pretrained(tmp_path / "model")
    processes.run(loaded_in_parts, 2, tmp_path, str(tmp_path / "model"))


def cut_by_transformers(rank):
    """Its own styles on layers that were quantized before."""
    from transformers.distributed.tensor_parallel import ColwiseParallel, RowwiseParallel

    warnings.filterwarnings("ignore")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(64, 128, bias=False), torch.nn.Linear(128, 64, bias=False))
    expected = ht.quantize_(layers, "mxfp8")(X)
    for layer, style in zip(layers, (ColwiseParallel(), RowwiseParallel()), strict=True):
        style.shard_param(layer, "weight", mesh)
        style.install_forward(layer, mesh)
    y = layers(X)
    y = y.full_tensor() if isinstance(y, DTensor) else y
    assert (y - expected).norm() <= 2**-18 * expected.norm()  # one fp32 sum in another order
    y.sum().backward()
    assert isinstance(layers[0].weight.grad, DTensor)


def test_its_styles_on_quantized_layers(tmp_path):
    processes.run(cut_by_transformers, 2, tmp_path)


X = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


EXPERT_MODELS = {"Mixtral": {}, "Qwen3Moe": {"moe_intermediate_size": 64, "head_dim": 32}, "GptOss": {"head_dim": 32}}


def experts_model(name, implementation):
    experts = {"num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4}
    config = config_of(name, **experts, **EXPERT_MODELS[name])
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, experts_implementation=implementation
    )


@pytest.mark.parametrize("name", list(EXPERT_MODELS))
def test_experts_are_quantized(name):
    """As the models are written: two layouts, with and without biases; both ways of multiplying give one loss."""
    losses = []
    for implementation in ("grouped_mm", "eager"):
        plain = experts_model(name, implementation)
        reference = plain(input_ids=IDS, labels=IDS).loss.item()
        model = ht.quantize_(plain, "mxfp8")
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        assert loss.item() == pytest.approx(reference, rel=0.02)  # random experts hardly change what is predicted
        assert all(p.grad is not None for n, p in model.named_parameters() if "experts" in n)
        found = ht.check(model, input_ids=IDS, labels=IDS)
        assert not found.problems, found.problems
        assert found.coverage.parameters > 0.85
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=2**-8)  # other sums of the experts' outputs


@KINDS
def test_generating_on_a_gpu_multiplies_quantized_experts_in_groups(persistent):
    """There ``generate`` takes ``batched_mm``, which copies experts for each token. Oracle: ``grouped_mm``."""
    model, plain = experts_model("Mixtral", "grouped_mm"), experts_model("Mixtral", "batched_mm")
    unlike = plain(input_ids=IDS).logits
    ht.quantize_(model, "mxfp8", persistent=persistent)
    expected = model(input_ids=IDS).logits
    model.set_experts_implementation("batched_mm")
    assert torch.equal(model(input_ids=IDS).logits, expected)
    assert torch.equal(plain(input_ids=IDS).logits, unlike)  # models that are not converted run what they did


def test_experts_are_multiplied_in_groups_in_a_process_that_did_not_quantize_them():
    """Oracle: the model that was pickled."""
    model = ht.quantize_(experts_model("Mixtral", "batched_mm"), "mxfp8")
    expected, pickled = model(input_ids=IDS).logits, pickle.dumps(model)
    ways = sys.modules["transformers.integrations.moe"].ALL_EXPERTS_FUNCTIONS
    ways.register("batched_mm", ways["batched_mm"].args[0])  # Transformers' own, as in another process
    assert torch.equal(pickle.loads(pickled)(input_ids=IDS).logits, expected)


def test_experts_that_are_not_in_bf16_are_compiled_in_a_process_that_did_not_quantize_them():
    """Transformers multiplies them by an operator of its own in graphs. Oracle: eager code."""
    model = ht.quantize_(experts_model("Mixtral", "grouped_mm").float(), "mxfp8")
    expected, pickled = model(input_ids=IDS).logits, pickle.dumps(model)
    operator = torch.ops.transformers.grouped_mm_fallback
    for kind in (ht.MasterWeight, ht.HybridTensor):
        del kind.functions.handlers[operator]  # as in another process
    again = pickle.loads(pickled)
    torch._dynamo.reset()
    for layer in again.model.layers:
        layer.compile(backend="aot_eager")
    assert torch.equal(again(input_ids=IDS).logits, expected)


def test_most_of_mixtral_is_quantized():
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.MixtralConfig(), dtype=torch.bfloat16)
    covered = ht.explain(ht.quantize_(model, "mxfp8"), show=False).coverage
    assert covered.parameters > 0.99
    assert all(matrix.deliberate for matrix in covered.plain)


def test_experts_are_saved_and_loaded(tmp_path):
    model = ht.quantize_(experts_model("Mixtral", "grouped_mm"), "mxfp8")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, experts_implementation="grouped_mm"
    )
    expected = model(input_ids=IDS).logits
    assert torch.equal(ht.quantize_(loaded, "mxfp8")(input_ids=IDS).logits, expected)
