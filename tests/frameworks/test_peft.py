"""PEFT: adapters on quantized bases are initialized, trained and merged."""

import copy
import logging

import pytest
import torch

import hybridtensor as ht

transformers = pytest.importorskip("transformers", reason="needs transformers: make test-frameworks")
peft = pytest.importorskip("peft", reason="needs peft: make test-frameworks")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages
IDS = torch.arange(32).view(1, 32) % 96


def base(frozen, persistent):
    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    if frozen:
        model.requires_grad_(False)
    return ht.quantize_(model, "fp8", persistent=persistent)


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
