"""Real architectures, tiny and with random weights: one row each, of how a model is made and what it is called with.

Nothing is downloaded. Models come from Transformers, timm and diffusers; where one of these is not installed, or does
not know an architecture, ``Row.make`` skips the test and says so.
"""

import dataclasses
import importlib
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves
from torchvision_stand_in import import_timm

TOKENS, VOCABULARY, WIDTH = 16, 96, 64

# Rounding to a format of m bits of mantissa makes a relative error of 2^-m / 2 at most, and some 2^-m / sqrt(24) in the
# mean square. E4M3 (m = 3) rounds both operands of the forward, E5M2 (m = 2) the gradients. Errors of products that
# follow each other add up as independent ones do. The longest way through a row, to a loss and back, has DEPTH products
# in a row each way that no residual stream carries past each other: two blocks, of eight.
E4M3, E5M2 = 2**-3 / math.sqrt(24), 2**-2 / math.sqrt(24)
DEPTH = 16
FORWARD = math.sqrt(DEPTH * 2 * E4M3**2)
GRADIENT = math.sqrt(DEPTH * (2 * E4M3**2 + E4M3**2 + E5M2**2))


@dataclasses.dataclass(frozen=True)
class Row:
    """An architecture.

    Attributes:
        name: As its library calls it.
        build: Makes the model; takes changes of its config.
        inputs: Makes what it is called with.
        package: Who it comes from.
        experts: The ways that it has to multiply experts, where it has such: ``experts_implementation``.
        plain: What is no linear layer and stays in high precision: regular expressions of parameters' names.
        outside: Why blocks cannot be sharded by themselves, the plain model's neither; or "".
        dtype: Of its weights.
    """

    name: str
    build: Callable[..., torch.nn.Module]
    inputs: Callable[[], dict[str, Any]]
    package: str = "transformers"
    experts: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    outside: str = ""
    dtype: torch.dtype = torch.float32

    def make(self, *, seed=0, **changes):
        """Return the model, in training mode and without dropout, the same each time.

        Args:
            seed: Of its random weights.
            changes: Of its config.
        """
        torch.manual_seed(seed)
        model = self.build(**changes)
        model = model if self.dtype == torch.float32 else model.to(self.dtype)
        drop_nothing(model)
        begin_everywhere(model)
        return model.train()

    def call(self):
        """Return what the model is called with, the same each time."""
        torch.manual_seed(1)
        inputs = self.inputs()
        return {name: value.to(self.dtype) if is_floating(value) else value for name, value in inputs.items()}

    def __str__(self):
        return self.name


def is_floating(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def drop_nothing(model):
    """Turn off all dropout, however a library spells it: what remains is a function of its inputs."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or (isinstance(module, torch.nn.Dropout) and name == "p")):
                setattr(module, name, 0.0)


def begin_everywhere(model):
    """Draw matrices that begin as zeros: a head that does would hide all that is before it."""
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)


def loss_of(out):
    """Return the model's own loss, or else how far all that it returns is from some other numbers."""
    own = out.get("loss") if hasattr(out, "get") else None
    if own is not None:
        return own
    values = [v for v in tree_leaves(dict(out) if hasattr(out, "items") else out) if is_floating(v) and v.requires_grad]
    targets = [torch.arange(v.numel(), device=v.device, dtype=v.dtype).view(v.shape).cos() for v in values]
    return torch.stack([F.mse_loss(v, t) for v, t in zip(values, targets, strict=True)]).sum()


def run(model, row, forward=None):
    """Return the loss of one batch, and the gradients by name.

    Args:
        model: The model.
        row: Its row.
        forward: What is called instead of it.
    """
    model.zero_grad()
    loss = loss_of((model if forward is None else forward)(**row.call()))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def assert_same(found, expected):
    """Check that two runs gave the same bits."""
    (loss, grads), (other_loss, others) = found, expected
    assert torch.equal(loss, other_loss)
    assert grads.keys() == others.keys()
    for name, grad in grads.items():
        assert (grad is None) == (others[name] is None), name
        assert grad is None or torch.equal(grad, others[name]), name


def is_same(found, expected):
    """Return whether two runs gave the same bits."""
    pairs = zip((found[0], *found[1].values()), (expected[0], *expected[1].values()), strict=True)
    return all(a is b or torch.equal(a, b) for a, b in pairs)


def given(grads):
    """Return the gradients that there are."""
    return {name: grad for name, grad in grads.items() if grad is not None}


def distance(mine, theirs):
    """Return the relative error of the tensors that are in ``theirs``, taken together."""
    pairs = [(mine[name].double(), theirs[name].double()) for name in theirs]
    error = sum(float((a - b).square().sum()) for a, b in pairs)
    return math.sqrt(error / sum(float(b.square().sum()) for _, b in pairs))


NAMES_OF_BLOCKS = {
    "layers", "layer", "h", "block", "blocks", "stages", "down_blocks", "up_blocks", "transformer_blocks",
    "single_transformer_blocks",
}  # fmt: skip


def blocks_of(model):
    """Return the blocks of a model: what is in its outermost lists that are called so."""
    found, within = [], set()
    for name, module in model.named_modules():
        is_list = isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential))
        if is_list and name.rpartition(".")[2] in NAMES_OF_BLOCKS and module not in within:
            within.update(module.modules())
            found += module
    return found


# -- Transformers


def transformers():
    module = pytest.importorskip("transformers", reason="needs transformers: make test-models")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return module


COMMON = {
    "hidden_size": WIDTH, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip


def from_config(kind, auto, common, given, changes):
    config_class = getattr(transformers(), f"{kind}Config", None)
    if config_class is None:
        pytest.skip(f"needs a transformers that has {kind}")
    options = {key: changes.pop(key) for key in ("experts_implementation",) if key in changes}
    config = config_class(**{**common, **given, **changes})
    config.return_dict = True
    make = getattr(transformers(), auto)
    return make.from_config(config, **options) if auto.startswith("Auto") else make(config)


def ids():
    return torch.randint(3, VOCABULARY, (2, TOKENS))


def labelled():
    tokens = ids()
    return {"input_ids": tokens, "labels": tokens}


def language_model(name, kind, given=None, *, auto="AutoModelForCausalLM", **options):
    """Return the row of a decoder that predicts the next token."""

    def build(**changes):
        return from_config(kind, auto, COMMON, given or {}, changes)

    return Row(name, build, labelled, **options)


EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_intermediate_size": 64}


def with_experts(name, kind, given, **options):
    """Return the row of a decoder with experts. Every token goes to all of them: what formats round would else change
    which are chosen.
    """
    every = {"num_experts_per_tok": 4}
    options = {"experts": ("eager", "grouped_mm"), **options}
    return language_model(name, kind, {**EXPERTS, **every, **given}, dtype=torch.bfloat16, **options)


def encoder(name, kind, given=None, *, auto="AutoModelForMaskedLM", **options):
    return language_model(name, kind, given, auto=auto, **options)


def images(size=32):
    return lambda: {"pixel_values": torch.randn(2, 3, size, size)}


VISION = {"image_size": 32, "patch_size": 8, "num_channels": 3}
SMALL_GQA = {"head_dim": 16}
GATED_DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"], "head_dim": 16, "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 64,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 16,
    "num_key_value_heads": 4,
}  # fmt: skip


def seq2seq():
    return {"input_ids": ids(), "labels": ids()}


def sounds():
    return {"input_features": torch.randn(2, 8, 32), "labels": ids()[:, :8]}


def waves():
    return {"input_values": torch.randn(2, 400)}


def pairs():
    return {"input_ids": ids(), "pixel_values": torch.randn(2, 3, 32, 32), "return_loss": True}


def two_towers(kind, given):
    def build(**changes):
        tower = {
            "hidden_size": WIDTH, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        }  # fmt: skip
        text = {**tower, "vocab_size": VOCABULARY, "max_position_embeddings": TOKENS, **given, "eos_token_id": 2}
        common = {"text_config": text, "vision_config": {**tower, **VISION}}
        return from_config(kind, f"{kind}Model", common, {"projection_dim": WIDTH}, changes)

    return build


CONVOLUTIONS = (r"\.conv1d\.weight$",)
SCANS = (*CONVOLUTIONS, r"\.A_log$")
PATCHES = (r"^embeddings\.patch_embeddings\.projection\.weight$",)

ROWS = [
    language_model("llama", "Llama"),
    language_model("qwen2", "Qwen2"),
    language_model("qwen3", "Qwen3", SMALL_GQA),
    with_experts("qwen3_moe", "Qwen3Moe", SMALL_GQA),
    with_experts("qwen3_next", "Qwen3Next", GATED_DELTA, plain=CONVOLUTIONS),
    language_model("mistral", "Mistral"),
    with_experts("mixtral", "Mixtral", {}),
    language_model("gemma2", "Gemma2", SMALL_GQA),
    language_model("gemma3", "Gemma3Text", SMALL_GQA),
    language_model("phi3", "Phi3"),
    language_model("gpt2", "GPT2", {"n_inner": 128}),
    language_model("gpt_neox", "GPTNeoX"),
    language_model("opt", "OPT", {"ffn_dim": 128, "word_embed_proj_dim": WIDTH}),
    language_model("bloom", "Bloom", {"n_layer": 2, "n_head": 4}),
    language_model("falcon", "Falcon"),
    with_experts("gpt_oss", "GptOss", SMALL_GQA),
    with_experts("llama4_text", "Llama4Text", {
        "intermediate_size_mlp": 128, "interleave_moe_layer_step": 1, **SMALL_GQA,
    }, experts=("eager",)),
    with_experts("deepseek_v2", "DeepseekV2", LATENT),
    with_experts("deepseek_v3", "DeepseekV3", LATENT),
    language_model("mamba", "Mamba", {"state_size": 8, "expand": 2}, plain=SCANS),
    language_model("mamba2", "Mamba2", {
        "num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8,
    }, plain=CONVOLUTIONS),
    with_experts("jamba", "Jamba", {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "mamba_d_state": 8, "mamba_dt_rank": 8, "use_mamba_kernels": False,
    }, plain=SCANS),
    language_model("bamba", "Bamba", {
        "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
    }, plain=CONVOLUTIONS),
    language_model("falcon_h1", "FalconH1", {
        "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8,
        "mamba_d_ssm": 128, **SMALL_GQA,
    }, plain=CONVOLUTIONS),
    language_model("rwkv", "Rwkv", {"attention_hidden_size": WIDTH, "context_length": 64}),
    encoder("bert", "Bert"),
    encoder("roberta", "Roberta"),
    encoder("deberta_v2", "DebertaV2", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    encoder("distilbert", "DistilBert", {"dim": WIDTH, "n_layers": 2, "n_heads": 4, "hidden_dim": 128}),
    encoder("electra", "Electra", {"embedding_size": WIDTH}),
    Row("t5", lambda **c: from_config("T5", "AutoModelForSeq2SeqLM", COMMON, {
        "d_model": WIDTH, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0,
    }, c), seq2seq),
    Row("bart", lambda **c: from_config("Bart", "AutoModelForSeq2SeqLM", COMMON, {
        "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "decoder_start_token_id": 2,
    }, c), seq2seq),
    Row("whisper", lambda **c: from_config("Whisper", "WhisperForConditionalGeneration", COMMON, {
        "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "decoder_start_token_id": 2,
        "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16,
    }, c), sounds, plain=(r"encoder\.conv\d\.weight",)),
    Row("vit", lambda **c: from_config("ViT", "ViTModel", COMMON, VISION, c), images(), plain=PATCHES),
    Row("dinov2", lambda **c: from_config("Dinov2", "Dinov2Model", COMMON, VISION, c), images(), plain=PATCHES),
    Row("clip", two_towers("CLIP", {}), pairs, plain=(r"patch_embedding\.weight",)),
    Row("siglip", two_towers("Siglip", {"projection_size": WIDTH}), pairs,
        plain=(r"patch_embedding\.weight", r"head\.attention\.in_proj_weight", r"head\.attention\.out_proj")),
    Row("wav2vec2", lambda **c: from_config("Wav2Vec2", "Wav2Vec2Model", COMMON, {
        "conv_dim": [WIDTH, WIDTH], "conv_stride": [5, 4], "conv_kernel": [10, 8], "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0, "layerdrop": 0.0,
    }, c), waves, plain=(r"conv_layers\.\d\.conv\.weight", r"pos_conv_embed\.conv\.")),
]  # fmt: skip


# -- timm and diffusers


def timm():
    pytest.importorskip("huggingface_hub", reason="needs what timm needs: make test-models")
    try:
        return import_timm()
    except ImportError as error:
        pytest.skip(f"needs timm, and torchvision or what stands in for it: make test-models ({error})")


def of_timm(name, class_name, plain, **given):
    def build(**changes):
        module, _, kind = class_name.rpartition(".")
        timm()
        return getattr(importlib.import_module(f"timm.models.{module}"), kind)(**{**given, **changes})

    return Row(name, build, lambda: {"x": torch.randn(2, 3, 32, 32)}, package="timm", plain=plain)


def of_diffusers(name, kind, inputs, plain, *, outside="", **given):
    def build(**changes):
        module = pytest.importorskip("diffusers", reason="needs diffusers: make test-models")
        return getattr(module, kind)(**{**given, **changes})

    return Row(name, build, inputs, package="diffusers", plain=plain, outside=outside)


ROWS += [
    of_timm(
        "timm_vit", "vision_transformer.VisionTransformer", (r"^patch_embed\.proj\.weight",),
        img_size=32, patch_size=8, depth=2, embed_dim=WIDTH, num_heads=4, num_classes=10),
    of_timm(
        "timm_convnext", "convnext.ConvNeXt", (r"^stem\.0", r"conv_dw", r"downsample\.1"),
        depths=(1, 1, 2, 1), dims=(32, 32, 64, 64), num_classes=10, ls_init_value=1.0),
    of_timm(
        "timm_mixer", "mlp_mixer.MlpMixer", (r"^stem\.proj",),
        img_size=32, patch_size=8, num_blocks=2, embed_dim=WIDTH, num_classes=10),
    of_diffusers(
        "unet2d_condition", "UNet2DConditionModel",
        lambda: {"sample": torch.randn(2, 4, 16, 16), "timestep": torch.tensor([1, 7]),
                 "encoder_hidden_states": torch.randn(2, TOKENS, WIDTH)},
        (r"conv", r"attentions\.\d\.proj_(in|out)\.weight"),
        sample_size=16, in_channels=4, out_channels=4, block_out_channels=(32, 64),
        layers_per_block=1, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=WIDTH, attention_head_dim=16,
        norm_num_groups=8),
    of_diffusers(
        "dit", "DiTTransformer2DModel",
        lambda: {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([1, 7]),
                 "class_labels": torch.tensor([0, 1])},
        (r"^pos_embed\.proj",), sample_size=8, in_channels=4, num_layers=2, num_attention_heads=4,
        attention_head_dim=16, num_embeds_ada_norm=16, norm_num_groups=8,
        outside="its forward calls a layer of its first block by itself"),
    of_diffusers(
        "sd3", "SD3Transformer2DModel",
        lambda: {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([1, 7]),
                 "encoder_hidden_states": torch.randn(2, TOKENS, WIDTH), "pooled_projections": torch.randn(2, 32)},
        (r"^pos_embed\.proj",), sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=4, joint_attention_dim=WIDTH, caption_projection_dim=WIDTH, pooled_projection_dim=32,
        out_channels=4, pos_embed_max_size=8),
    of_diffusers(
        "flux", "FluxTransformer2DModel",
        lambda: {"hidden_states": torch.randn(2, TOKENS, 16), "timestep": torch.tensor([0.1, 0.7]),
                 "encoder_hidden_states": torch.randn(2, 8, WIDTH), "pooled_projections": torch.randn(2, 32),
                 "txt_ids": torch.zeros(8, 3), "img_ids": torch.randn(TOKENS, 3)},
        (), patch_size=1, in_channels=16, num_layers=1,
        num_single_layers=1, attention_head_dim=16, num_attention_heads=4, joint_attention_dim=WIDTH,
        pooled_projection_dim=32, axes_dims_rope=(4, 4, 8)),
]  # fmt: skip
