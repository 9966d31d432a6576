"""Transformers: recipes in ``config.json``, Trainer, PEFT on top; bitwise what ``quantize_`` and plain loops give."""

import json
import subprocess
import sys
import types
from collections import OrderedDict

import pytest
import torch
from hugging_face import llama
from loops import losses
from safetensors.torch import load_file, save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import hybridtensor as ht
from hybridtensor.torchao_compat import FqnToConfig

transformers = pytest.importorskip("transformers", reason="needs transformers: make test-integrations")
pytest.importorskip("accelerate", reason="Trainer needs accelerate: make test-integrations")
from hybridtensor.integrations.transformers import HybridTensorConfig, StepCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages
IDS = torch.arange(32).view(1, 32) % 96
BY_NAME = FqnToConfig(OrderedDict({"re:.*q_proj": ht.HybridConfig.parse("fp8_rowwise"), "re:.*mlp.*": "mxfp8"}))
NO_SPEC = ht.HybridConfig(ht.Float8Quantizer(), ht.Float8Quantizer(pow2_scale=True), ht.Float8Quantizer())
RECIPES = {"fp8": "fp8", "fp8_delayed": "fp8_delayed", "nvfp4": "nvfp4", "by name": BY_NAME, "no spec": NO_SPEC}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small plain Llama on disk."""
    path = tmp_path_factory.mktemp("plain")
    llama().save_pretrained(path)
    return path


def load(folder, recipe=None, **options):
    config = None if recipe is None else HybridTensorConfig(recipe, **options)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return {"input_ids": IDS[0], "labels": IDS[0]}


class Watched:
    def scalars(self):
        return {"layer.0/snr": 3.5}


def trainer_of(model, folder, *callbacks, **options):
    arguments = transformers.TrainingArguments(
        folder, per_device_train_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1,
        lr_scheduler_type="constant", max_grad_norm=0.0, **{"max_steps": 4, "save_steps": 2, **options},
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return transformers.Trainer(
        model, arguments, train_dataset=Data(), callbacks=list(callbacks), optimizers=(optimizer, None)
    )


def assert_same(model, other):
    mine, theirs = model.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_loading_converts_as_quantize_does(recipe, folder):
    model, expected = load(folder, recipe, keep_bf16=["model.layers.1"]), load(folder)
    ht.quantize_(expected, recipe, keep_bf16=["model.layers.1"])
    assert all(p.requires_grad for p in model.parameters())
    assert [type(p) for p in model.parameters()] == [type(p) for p in expected.parameters()]
    assert_same(model, expected)
    assert torch.equal(logits(model), logits(expected))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_what_was_trained_is_saved_plain_and_loaded_with_its_recipe(recipe, folder, tmp_path):
    model = load(folder, recipe)
    trainer_of(model, tmp_path / "run", StepCallback()).train()
    model.save_pretrained(tmp_path / "saved")
    written = load_file(tmp_path / "saved" / "model.safetensors")
    plain = {name for name in written if "quantization_state" not in name}
    assert plain == load(folder).state_dict().keys()
    assert (plain == written.keys()) == (recipe not in ("fp8_delayed", "nvfp4"))
    told = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert told["quant_method"] == "hybridtensor"
    assert told["recipe"] == recipe if isinstance(recipe, str) else isinstance(told["recipe"], dict)
    again, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info.values()), info
    assert_same(again, model)
    assert torch.equal(logits(again), logits(model))
    configs = [str(p.config) for p in model.parameters() if isinstance(p, ht.MasterWeight)]
    assert configs == [str(p.config) for p in again.parameters() if isinstance(p, ht.MasterWeight)] != []


RENAMED = {
    "Mixtral": ("AutoModelForCausalLM", {"num_local_experts": 4, "num_key_value_heads": 2, "vocab_size": 96}),
    "ViT": ("AutoModelForImageClassification", {"image_size": 32, "patch_size": 8, "num_labels": 16}),
    "Llama": ("AutoModel", {"num_key_value_heads": 2, "vocab_size": 96}),
}


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
@pytest.mark.parametrize("name", RENAMED)
def test_state_is_loaded_where_checkpoints_have_other_names(name, recipe, tmp_path, recwarn):
    """Those of former versions of Transformers, or of a model with a head. Oracle: the state that was saved."""
    auto, given = RENAMED[name]
    config = getattr(transformers, f"{name}Config")(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, **given
    )
    whole = getattr(transformers, "AutoModelForCausalLM" if auto == "AutoModel" else auto)
    whole.from_config(config).save_pretrained(tmp_path / "plain")
    saved = whole.from_pretrained(tmp_path / "plain", quantization_config=HybridTensorConfig(recipe))
    states = {name: state for name, state in saved.state_dict().items() if "quantization_state" in name}
    with torch.no_grad():
        for i, (entry, state) in enumerate(states.items()):
            if not entry.endswith("layout"):
                state.add_(i)  # of the buffers themselves
    saved.save_pretrained(tmp_path / "saved")
    again = getattr(transformers, auto).from_pretrained(tmp_path / "saved")
    loaded = {name: state for name, state in again.state_dict().items() if "quantization_state" in name}
    prefix = "model." if auto == "AutoModel" else ""
    assert len(loaded) == len(states) > 0
    for entry, state in loaded.items():
        assert torch.equal(state, states[f"{prefix}{entry}"]), entry
    assert not [w for w in recwarn if "start fresh" in str(w.message)]


def test_state_that_tied_layers_share_is_saved_once(tmp_path, recwarn):
    """Oracle: the state that was saved, under both names."""
    if not hasattr(transformers, "NeoMMEConfig"):
        pytest.skip("needs a transformers that has NeoMME, whose linear layers are tied")
    config = transformers.NeoMMEConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96,
    )  # fmt: skip
    kind = transformers.NeoMMEForMaskedLM
    kind(config).save_pretrained(tmp_path / "plain")
    model = kind.from_pretrained(tmp_path / "plain", quantization_config=HybridTensorConfig("fp8_delayed"))
    state = model.unembedding_projection.quantization_state
    assert state is model.model.embed_tokens.embedding_projection.quantization_state
    state.encode_scale.fill_(3.0)
    model.save_pretrained(tmp_path / "saved")
    again = kind.from_pretrained(tmp_path / "saved")
    assert again.unembedding_projection.weight is again.model.embed_tokens.embedding_projection.weight
    assert_same(again, model)
    assert not [w for w in recwarn if "start fresh" in str(w.message)]
    # beside adapters, where the model is not saved
    (tmp_path / "checkpoint-1").mkdir()
    step = types.SimpleNamespace(global_step=1, is_world_process_zero=True)
    StepCallback().on_save(types.SimpleNamespace(output_dir=tmp_path), step, None, model=model)
    late = kind.from_pretrained(tmp_path / "plain", quantization_config=HybridTensorConfig("fp8_delayed"))
    StepCallback().on_train_begin(types.SimpleNamespace(output_dir=tmp_path), step, None, model=late)
    assert_same(late, model)


def test_layers_without_saved_state_are_named(folder, tmp_path):
    load(folder, "fp8_delayed").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    others = {name: value for name, value in load_file(file).items() if "layers.1.mlp.up_proj.q" not in name}
    save_file(others, file, {"format": "pt"})
    with pytest.warns(UserWarning, match=r"for 1 layers, such as model\.layers\.1\.mlp\.up_proj\.quantization_state"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


CHANGES = {
    "one recipe": lambda model: ht.set_config_(model, "fp8_delayed"),
    "by name": lambda model: ht.set_config_(model, FqnToConfig(OrderedDict({"re:.*q_proj": "nvfp4_1d_weight"}))),
    "one more layer": lambda model: ht.quantize_(model, FqnToConfig(OrderedDict({"lm_head": "nvfp4_1d_weight"}))),
    "a block in a wrapper": lambda model: setattr(model.model.layers, "0", checkpoint_wrapper(model.model.layers[0])),
    "plain": ht.plain_,
    "plain, and quantized anew": lambda model: ht.quantize_(ht.plain_(model), "mxfp8"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_recipes_that_are_saved_are_those_of_the_layers(change, folder, tmp_path):
    """Oracle: the recipe of each layer of the model that was saved."""
    model = load(folder, "fp8", keep_bf16=["model.layers.1.mlp"])
    change(model)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    recipes, others = ([getattr(p, "config", None) for p in each.parameters()] for each in (model, again))
    assert others == recipes
    assert_same(again, model)
    assert ("quantization_config" in json.loads((tmp_path / "config.json").read_text())) == any(recipes)


@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed", "nvfp4"])
def test_trainer_advances_state_once_a_step(recipe, folder, tmp_path):
    """Two microbatches a step; bitwise a loop by hand."""
    model, other = load(folder, recipe), load(folder, recipe)
    trainer_of(model, tmp_path, StepCallback(), gradient_accumulation_steps=2).train()
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3)
    other.train()
    for _ in range(4):
        for _ in range(2):
            rows = IDS.expand(2, -1)
            (other(input_ids=rows, labels=rows).loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        ht.step_(other)
    assert_same(model, other)


def test_a_step_that_a_gradient_scaler_skipped_leaves_no_amaxes(folder):
    """Oracle: a model that never had the overflow."""
    model, other = (load(folder, "fp8_delayed").train() for _ in range(2))
    callback, stepped = StepCallback(), types.SimpleNamespace(step_was_skipped=False)
    model.model.layers[0].mlp.down_proj(torch.ones(1, 128)).backward(torch.full((1, 64), torch.inf))
    overflown = types.SimpleNamespace(step_was_skipped=True)  # Accelerate's optimizer after an overflow
    callback.on_optimizer_step(None, None, None, model=model, optimizer=overflown)
    model.zero_grad()
    for each in (model, other):
        each(input_ids=IDS, labels=IDS).loss.backward()
        callback.on_optimizer_step(None, None, None, model=each, optimizer=stepped)
    assert_same(model, other)


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
def test_resuming_is_bitwise(recipe, folder, tmp_path):
    model, other = load(folder, recipe), load(folder, recipe)
    trainer_of(model, tmp_path / "a", StepCallback()).train()
    trainer_of(other, tmp_path / "b", StepCallback(), max_steps=2).train()
    resumed = load(folder, recipe)
    trainer_of(resumed, tmp_path / "b", StepCallback()).train(resume_from_checkpoint=str(tmp_path / "b/checkpoint-2"))
    assert_same(resumed, model)


def test_without_the_callback_training_stops_with_advice(folder, tmp_path):
    with pytest.raises(RuntimeError, match="keep state, which must advance"):
        trainer_of(load(folder, "nvfp4"), tmp_path).train()


def test_statistics_are_logged_also_by_what_reports(folder, tmp_path):
    seen = []

    class Reports(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    trainer = trainer_of(load(folder, "nvfp4"), tmp_path, Reports())
    StepCallback(Watched()).attach(trainer)
    trainer.train()
    of_training = [entry for entry in seen if "loss" in entry]
    assert len(of_training) == 4
    assert all(entry["layer.0/snr"] == 3.5 for entry in [*of_training, trainer.state.log_history[0]])
    assert "layer.0/snr" not in seen[-1]  # the summary at the end


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_adapters_train_on_top(recipe, folder, tmp_path):
    peft = pytest.importorskip("peft", reason="needs peft: make test-integrations")
    model = load(folder, recipe)
    base = model.model.layers[0].self_attn.q_proj.weight
    before = base.dequantize().clone()
    net = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    trainer_of(net, tmp_path, StepCallback()).train()
    layer = net.base_model.model.model.layers[0].self_attn.q_proj
    assert layer.base_layer.weight is base
    assert torch.equal(base.dequantize(), before)
    assert layer.lora_B["default"].weight.abs().sum() > 0
    if recipe == "nvfp4":
        assert int(layer.base_layer.quantization_state.rounding[1]) == 4


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4", "fp8"])
def test_resuming_adapters_is_bitwise(recipe, folder, tmp_path):
    """Their checkpoints leave out the base, and with it the state of its recipe."""
    peft = pytest.importorskip("peft", reason="needs peft: make test-integrations")

    def adapted():
        torch.manual_seed(3)
        return peft.get_peft_model(load(folder, recipe), peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))

    model, other, resumed, late = (adapted() for _ in range(4))
    trainer_of(model, tmp_path / "a", StepCallback()).train()
    trainer_of(other, tmp_path / "b", StepCallback(), max_steps=2).train()
    saved = tmp_path / "b" / "checkpoint-2"
    assert (saved / "quantization_state.safetensors").exists() == (recipe != "fp8")
    trainer_of(resumed, tmp_path / "b", StepCallback()).train(resume_from_checkpoint=str(saved))
    assert_same(resumed, model)
    if recipe != "fp8":
        (saved / "quantization_state.safetensors").unlink()
        with pytest.warns(UserWarning, match="checkpoint-2 has no state of recipes, so that delayed scales"):
            trainer_of(late, tmp_path / "b", StepCallback()).train(resume_from_checkpoint=str(saved))


def test_a_process_without_the_integration_loads_a_plain_model_and_says_so(folder, tmp_path):
    model = load(folder, "fp8")
    model.save_pretrained(tmp_path)
    program = f"""
from transformers import AutoModelForCausalLM
import torch
model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
print(type(model.model.layers[0].self_attn.q_proj.weight) is torch.nn.Parameter)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout == "True\n", run.stderr
    assert "Unknown quantization type, got hybridtensor" in run.stderr


def test_recipes_that_cannot_be_written_are_refused():
    with pytest.raises(TypeError, match="got <function"):
        HybridTensorConfig(lambda role: ht.Float8Quantizer())
    with pytest.raises(TypeError, match="a spec, HybridConfig or FqnToConfig is required, got ByType"):
        HybridTensorConfig(ht.recipes.by_type(linear="fp8"))
    with pytest.raises(ValueError, match="unknown format 'fp9'"):
        HybridTensorConfig("fp9")
    with pytest.raises(ValueError, match=r"recipe and keep_bf16 are required, got \{'bits': 4\}"):
        HybridTensorConfig("fp8", bits=4)
    with pytest.raises(TypeError, match=r"a method scalars\(\) is required"):
        StepCallback(3)
    with pytest.raises(TypeError, match="a Trainer is required"):
        StepCallback().attach(None)


@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed"])
def test_experts_that_are_not_in_bf16_are_quantized_in_graphs(recipe):
    """In graphs Transformers multiplies them by an operator of its own. Oracle: the same model in eager code."""

    def trained(compiled):
        torch.manual_seed(0)
        config = transformers.OlmoeConfig(
            hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=96, num_experts=4, num_experts_per_tok=2, use_cache=False,
        )  # fmt: skip
        model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="grouped_mm")
        ht.quantize_(model, recipe)
        if compiled:
            model.model.layers[0].compile(backend="aot_eager")
        optimizer = torch.optim.AdamW(model.parameters())
        return losses(model, optimizer, lambda: model(input_ids=IDS, labels=IDS).loss, count=2)

    torch._dynamo.reset()
    assert trained(True) == trained(False)
