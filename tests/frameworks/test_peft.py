"""PEFT: adapters on quantized bases are initialized, trained and merged."""

import contextlib
import copy

import pytest
import torch
from hugging_face import llama

import hybridtensor as ht
from hybridtensor.recipes.spec import GEMMS

transformers = pytest.importorskip("transformers", reason="needs transformers: make test-frameworks")
peft = pytest.importorskip("peft", reason="needs peft: make test-frameworks")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages
IDS = torch.arange(32).view(1, 32) % 96


def base(frozen, persistent, recipe="fp8"):
    model = llama()
    if frozen:
        model.requires_grad_(False)
    return model if recipe is None else ht.quantize_(model, recipe, persistent=persistent)


def adapted(model, init):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=init)
    net = peft.get_peft_model(model, config)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        net(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.eval()


def values(weight):
    return ht.plain.high_precision_values(weight).clone()


KINDS = pytest.mark.parametrize(
    ("frozen", "persistent"), [(False, False), (True, False), (True, True)], ids=["master", "frozen", "persistent"]
)


@KINDS
@pytest.mark.parametrize("init", ["gaussian", "pissa", "olora", True])
def test_merging(init, frozen, persistent):
    """The merged weight is base plus product of the adapter, quantized by the recipe; unmerging undoes it."""
    net = adapted(base(frozen, persistent), init)
    layer = net.base_model.model.model.layers[0].self_attn.q_proj
    before = values(layer.base_layer.weight)
    delta = layer.get_delta_weight("default")
    with torch.no_grad():
        separate = net(input_ids=IDS).logits
        net.merge_adapter()
        merged = net(input_ids=IDS).logits
    expected = before + delta
    fresh = ht.quantize_(torch.nn.Linear(64, 64, bias=False), "fp8", persistent=persistent)
    fresh.weight.data = expected
    assert torch.equal(values(layer.base_layer.weight), fresh.weight.dequantize() if persistent else expected)
    assert torch.equal(layer.base_layer(torch.eye(64)), fresh(torch.eye(64)))
    assert 0 < (merged - separate).norm() < 0.1 * separate.norm()
    again = copy.deepcopy(net)
    with torch.no_grad():
        net.unmerge_adapter()
        if not persistent:  # faces alone round twice
            assert torch.equal(net(input_ids=IDS).logits, separate) or (
                (net(input_ids=IDS).logits - separate).norm() < 1e-2 * separate.norm()
            )
        whole = again.merge_and_unload()
        assert torch.equal(whole(input_ids=IDS).logits, merged)
    assert ht.subclasses.is_converted(whole.model.layers[0].self_attn.q_proj.weight)


def test_merge_and_save(tmp_path):
    """What is saved loads into a plain model."""
    whole = adapted(base(True, True), "gaussian").merge_and_unload()
    whole.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    for name, value in ht.plain_state_dict(whole).items():
        assert torch.equal(loaded.state_dict()[name], value), name


ALL = {"target_modules": ["q_proj", "o_proj"]}
ADAPTERS = {
    "Lora": {"use_dora": True, **ALL}, "AdaLora": {"total_step": 9, **ALL}, "LoHa": {"r": 4, **ALL},
    "LoKr": {"r": 4, **ALL}, "IA3": {"feedforward_modules": [], **ALL}, "OFT": {"r": 0, "oft_block_size": 8, **ALL},
    "BOFT": {"boft_block_size": 4, **ALL}, "HRA": {"r": 4, **ALL}, "Road": {"group_size": 16, **ALL},
    "Vera": {"r": 4, **ALL}, "VBLoRA": {"r": 4, "num_vectors": 10, "vector_length": 16, **ALL},
    "RandLora": {"r": 4, **ALL}, "FourierFT": {"n_frequency": 20, **ALL}, "Shira": {"r": 4, **ALL},
    "C3A": {"block_size": 16, **ALL}, "Miss": {"r": 4, **ALL},
}  # fmt: skip


def with_adapter(model, name):
    if not hasattr(peft, f"{name}Config"):
        pytest.skip(f"peft {peft.__version__} has no {name}")
    torch.manual_seed(1)
    return peft.get_peft_model(model, getattr(peft, f"{name}Config")(**ADAPTERS[name]))


def trained(net, steps=2):
    """Train adapters; return losses."""
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    if any(map(ht.subclasses.is_converted, net.parameters())):
        ht.step_after(optimizer, net)
    losses = []
    for _ in range(steps):
        losses.append(net(input_ids=IDS, labels=IDS).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    net.eval()
    return losses


@pytest.mark.parametrize("first", ["quantize_", "get_peft_model"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_every_adapter_is_bitwise_that_of_a_plain_model(name, first):
    """With the recipe that quantizes nothing: what is trained, merged and unmerged."""
    found = []
    for recipe in ("bf16", None):
        model = base(False, False, recipe=None)
        if recipe and first == "quantize_":
            ht.quantize_(model, recipe)
        net = with_adapter(model, name)
        if recipe and first == "get_peft_model":
            ht.quantize_(net, recipe)
        results = trained(net)
        with torch.no_grad():
            results.append(net(input_ids=IDS).logits)
            net.merge_adapter()
            results.append(net(input_ids=IDS).logits)
            net.unmerge_adapter()
            results.append(net(input_ids=IDS).logits)
            results.append(net.merge_and_unload()(input_ids=IDS).logits)
        found.append(results)
    for number, (got, expected) in enumerate(zip(*found, strict=True)):
        assert torch.equal(got, expected), number


@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_merged_weights_are_not_rounded(name, recipe):
    """Oracle: a plain model with the same weights and adapter. Some adapters are merged by products with the weight."""
    net = with_adapter(base(False, False, recipe=recipe), name)
    trained(net)
    plain = with_adapter(base(False, False, recipe=None), name)
    ours = {n: v for n, v in net.state_dict().items() if "quantization_state" not in n}
    plain.load_state_dict({n: v.dequantize() if ht.subclasses.is_converted(v) else v for n, v in ours.items()})
    merged, expected = net.merge_and_unload(), plain.merge_and_unload()
    for (parameter, value), other in zip(merged.named_parameters(), expected.parameters(), strict=True):
        got = values(value) if ht.subclasses.is_converted(value) else value
        assert torch.equal(got, other), parameter


def test_fast_singular_vectors():
    adapted(base(False, False), "pissa_niter_4")


def test_adapters_of_experts():
    """Their sum with the weights, which PEFT computes in each forward, is quantized by the experts' recipe."""
    config = transformers.Qwen3MoeConfig(
        hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=96, num_experts=4, num_experts_per_tok=2, head_dim=16,
    )  # fmt: skip
    found = []
    for recipe in ("fp8", "bf16", None):
        torch.manual_seed(0)
        model = transformers.Qwen3MoeForCausalLM(config)
        if recipe:
            ht.quantize_(model, recipe)
        torch.manual_seed(1)
        targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        net = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=targets))
        losses = trained(net)
        if recipe == "fp8":
            products = ht.check(net, input_ids=IDS, labels=IDS).products
            assert {p.gemm for p in products if p.layer.endswith("gate_up_proj")} == {gemm.name for gemm in GEMMS}
            assert all(product.expected for product in products)
        found.append([*losses, net.merge_and_unload()(input_ids=IDS).logits])
    for quantized, got, expected in zip(*found, strict=True):
        assert torch.equal(got, expected)
        assert not torch.equal(quantized, expected)


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8_delayed"])
def test_tokens_are_trained_of_an_embedding_that_is_tied_to_a_quantized_head(recipe):
    """The head multiplies by what PEFT computes of its weight, in high precision, and training warns of it."""
    found = []
    for quantized in (False, True):
        model = llama(tie_word_embeddings=True)
        if quantized:
            ht.quantize_(model, recipe, filter_fn=lambda module, name: name == "lm_head")
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[1, 2, 3])
        net = peft.get_peft_model(model, config)
        said = pytest.warns(UserWarning, match="layer lm_head: its weight was read as values")
        with said if quantized else contextlib.nullcontext():
            results = trained(net)
        with torch.no_grad():
            results.append(net(input_ids=IDS).logits)
        found.append(results)
    for got, expected in zip(*found, strict=True):
        assert torch.equal(got, expected)
