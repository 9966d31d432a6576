"""Putting recipes on models: every way to call it, what stays, what is refused."""

import copy
import logging
import re
from collections import OrderedDict

import pytest
import torch
from faces import tensor_faces
from saving import through_a_file
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torchao.quantization import FqnToConfig
from torchao.quantization import quantize_ as torchao_quantize_

import hybridtensor as ht
from hybridtensor import (
    Float8Quantizer,
    HybridConfig,
    HybridTensor,
    IdentityQuantizer,
    MasterWeight,
    QuantizerRole,
)
from hybridtensor.testing import random_tensor

FP8 = HybridConfig.parse("fp8")


class Block(nn.Module):
    """Names as in the models that people convert."""

    def __init__(self, dim=16):
        super().__init__()
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.gate = nn.Linear(dim, 4, bias=False)
        self.gate_proj = nn.Linear(dim, 2 * dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        return self.gate_proj(self.norm(self.q_proj(x))).sum(-1) + self.gate(x).sum(-1)


class Model(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(16, 32, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)[..., None]
        return self.lm_head(x)


def configs(model):
    """Return the recipe of each linear layer, None where the weight is plain."""
    return {
        name: str(m.weight.config) if isinstance(m.weight, (MasterWeight, HybridTensor)) else None
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear)
    }


CONVERTED = {"layers.0.q_proj", "layers.0.gate_proj", "layers.1.q_proj", "layers.1.gate_proj"}


def test_weights_change_and_nothing_else_does():
    model = Model()
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    types = {name: type(module) for name, module in modules.items()}
    values = {name: p.detach().clone() for name, p in parameters.items()}
    parameters["layers.0.q_proj.weight"].requires_grad_(False)
    parameters["layers.0.q_proj.weight"].tag = "mine"
    assert ht.quantize_(model, "fp8") is model
    assert all(module is modules[name] and type(module) is types[name] for name, module in model.named_modules())
    for name, p in model.named_parameters():
        assert p is parameters[name]
        assert isinstance(p, nn.Parameter)
        assert torch.equal(p.dequantize() if isinstance(p, MasterWeight) else p, values[name])
    assert not model.layers[0].q_proj.weight.requires_grad
    assert model.layers[0].q_proj.weight.tag == "mine"
    assert {name for name, config in configs(model).items() if config} == CONVERTED


def test_the_head_and_routers_are_left_alone_unless_asked_for():
    model = ht.quantize_(Model(), "fp8")
    assert configs(model)["lm_head"] is configs(model)["layers.0.gate"] is None
    model = ht.quantize_(Model(), "fp8", filter_fn=lambda module, name: name == "lm_head")
    assert {name for name, config in configs(model).items() if config} == {"lm_head"}


@pytest.mark.parametrize("router", ["router", "gate"])
def test_what_is_inside_of_a_router_is_left_alone_whatever_its_name(router):
    """As ``mlp.gate.wg`` of Hunyuan, ``router.classifier`` of LongCat and ``router.layer`` of JetMoe."""
    inside = nn.ModuleDict({"wg": nn.Linear(32, 4)})
    model = ht.quantize_(nn.ModuleDict({router: inside, "up": nn.Linear(32, 64)}), "fp8")
    assert {name for name, config in configs(model).items() if config} == {"up"}
    assert router in dict(ht.explain(model).skipped)[f"{router}.wg"]
    assert not [m for m in ht.explain(model).coverage.plain if router == "router" and not m.deliberate]


def test_a_layer_whose_weight_is_that_of_a_layer_inside_is_none():
    """As subclasses of ``nn.Linear`` in PEFT are (VBLoRA, RandLoRA), which call the layer inside."""

    class Adapter(nn.Linear):
        def __init__(self, base_layer):
            super(nn.Linear, self).__init__()
            self.base_layer, self.scale = base_layer, nn.Parameter(torch.ones(64))

        @property
        def weight(self):
            return self.base_layer.weight

        def forward(self, x):
            return self.base_layer(x) + x * self.scale

    net, x = nn.Sequential(Adapter(nn.Linear(64, 64)), nn.Linear(64, 64)), torch.randn(4, 64)
    expected = ht.quantize_(copy.deepcopy(net), "fp8", keep_bf16=["1"])[0].base_layer(x)
    ht.quantize_(net, "fp8")
    assert [row.layer for row in ht.explain(net).layers] == ["0.base_layer", "1"]
    assert torch.equal(net[0](x), expected + x)
    assert ht.check(net, x, strict=True)


def test_a_layer_that_shows_its_own_weight_is_one():
    """Libraries exchange the class of a layer for one with a property, as torch's parametrizations do."""

    class Shown(nn.Linear):
        @property
        def weight(self):
            return self._parameters["weight"]

    net, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(4, 64)
    net[0].__class__ = Shown
    ht.quantize_(net, "fp8")
    assert [row.layer for row in ht.explain(net).layers] == ["0", "1"]
    assert ht.check(net, x, strict=True)


@pytest.mark.parametrize("first", ["taken", "converted"])
@pytest.mark.parametrize("how", ["deleted", "None"])
def test_a_layer_whose_weight_was_taken_is_listed_as_skipped(how, first):
    """LyCORIS folds the weight of a layer into a module of its own, which runs for the layer."""

    class Net(nn.Sequential):
        def forward(self, x):
            return self[1](x)

    model = Net(nn.Linear(64, 64), nn.Linear(64, 64))
    model = ht.quantize_(model, "fp8") if first == "converted" else model
    del model[0].weight
    if how == "None":
        model[0].register_parameter("weight", None)
    ht.quantize_(model, "fp8_rowwise")
    ht.set_config_(model, "fp8")
    found = ht.explain(model)
    assert [row.layer for row in found.layers] == ["1"]
    assert dict(found.skipped)["0"].startswith("it has no weight")
    assert ht.check(model, torch.ones(4, 64), strict=True)


def test_the_gate_of_a_shared_expert_is_left_alone():
    """As in Qwen's models: one number per token, for which a quantized product would be padded to 16."""
    model = ht.quantize_(nn.ModuleDict({"shared_expert_gate": nn.Linear(32, 1), "up": nn.Linear(32, 64)}), "fp8")
    assert {name for name, config in configs(model).items() if config} == {"up"}
    assert dict(ht.explain(model).skipped)["shared_expert_gate"].startswith("the gate of a shared expert")
    assert not [matrix for matrix in ht.explain(model).coverage.plain if not matrix.deliberate]


def test_the_output_head_is_what_the_model_says():
    """Transformers' models say it, with names of their own: ``proj_out`` of Whisper, BERT's ``decoder``."""

    class Named(nn.Module):
        def __init__(self, head):
            super().__init__()
            self.body, self.proj_out = nn.Linear(32, 32), head

        def get_output_embeddings(self):
            return self.proj_out

    for head in (nn.Linear(32, 64), nn.ModuleList([nn.Linear(32, 64)]), nn.Embedding(4, 4), None):
        model = ht.quantize_(nn.Sequential(Named(head)), "fp8")
        assert {name for name, config in configs(model).items() if config} == {"0.body"}
        explained = ht.explain(model)
        assert all("the output head" in why for _, why in explained.skipped)
        assert all(matrix.deliberate for matrix in explained.coverage.plain)
    model = ht.quantize_(Named(nn.Linear(32, 64)), "fp8", filter_fn=lambda _, name: name == "proj_out")
    assert configs(model)["proj_out"] is not None
    for head in (nn.Linear(32, 64), nn.Embedding(64, 32)):  # a layer that is tied to it is the head as well
        model = nn.ModuleDict({"named": Named(head), "tied": nn.Linear(32, 64)})
        model["tied"].weight = head.weight
        ht.quantize_(model, "fp8")
        assert configs(model)["named.body"] is not None
        assert configs(model)["tied"] is None


def test_a_gate_is_a_routers_if_it_is_narrower_than_its_input(caplog):
    def gated(*size):
        return nn.ModuleDict({"up": nn.Linear(32, 64), "gate": nn.Linear(*size)})

    for size, converted in (((32, 64), True), ((32, 32), True), ((32, 16), False)):
        model = ht.quantize_(gated(*size), "fp8")
        assert isinstance(model["gate"].weight, MasterWeight) == converted, size
    assert ht.explain(model, show=False).skipped[0][0] == "gate"
    caplog.clear()
    with caplog.at_level(logging.INFO, "hybridtensor"):
        ht.quantize_(gated(32, 16), "fp8")  # a fifth of the weights: hardly a router's
        ht.quantize_(gated(32, 64), "fp8", keep_bf16=["gate"])
        big = nn.ModuleDict({"mlp": nn.Linear(512, 512), "gate": nn.Linear(64, 2)})
        ht.quantize_(big, "fp8", filter_fn=lambda module, name: name == "mlp")
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.INFO, logging.INFO]
    assert "gate.weight [16, 32]: a router's gate: narrower than its input" in caplog.text


def test_stacks_of_experts_are_no_routers_whatever_their_name():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_experts, self.gate = 4, nn.Parameter(torch.randn(4, 16, 32))

    experts = ht.quantize_(Experts(), "fp8")
    assert isinstance(experts.gate, MasterWeight)


@pytest.mark.parametrize("convert", [ht.quantize_, torchao_quantize_], ids=["ours", "torchao"])
class TestBothVerbs:
    def test_config(self, convert):
        model = Model()
        module = model.layers[0].q_proj
        convert(model, FP8)
        assert model.layers[0].q_proj is module
        assert module.weight.config == FP8

    def test_root(self, convert):
        root = nn.Linear(16, 8)
        weight = root.weight
        convert(root, FP8)
        assert root.weight is weight
        assert isinstance(weight, MasterWeight)
        root(torch.randn(4, 16)).sum().backward()

    def test_filter(self, convert):
        model = Model()
        convert(model, FP8, filter_fn=lambda module, name: name.endswith("q_proj"))
        assert {n for n, c in configs(model).items() if c} == {"layers.0.q_proj", "layers.1.q_proj"}

    def test_tied_weights_stay_tied(self, convert):
        model = Model(tied=True)
        convert(model, FP8, filter_fn=lambda module, name: name == "lm_head")
        assert model.lm_head.weight is model.embed.weight
        assert isinstance(model.embed.weight, MasterWeight)
        model(torch.tensor([[1, 2]])).sum().backward()
        assert type(model.embed.weight.grad) is torch.Tensor
        assert len(list(model.parameters())) == len(list(Model(tied=True).parameters()))

    def test_fqn_to_config(self, convert):
        rules = OrderedDict(
            {
                "layers.1.q_proj": None,
                "layers.0.q_proj.weight": HybridConfig.parse("fp8_rowwise"),
                r"re:layers\.\d+\.q_proj": FP8,
                r"re:.*gate_proj\.weight": HybridConfig.parse("bf16"),
            }
        )
        model = Model()
        if convert is torchao_quantize_:
            convert(model, FqnToConfig(rules), filter_fn=None)
        else:
            convert(model, FqnToConfig(rules))
        assert configs(model) == {
            "layers.0.q_proj": "fp8_rowwise", "layers.0.gate": None, "layers.0.gate_proj": "bf16",
            "layers.1.q_proj": None, "layers.1.gate": None, "layers.1.gate_proj": "bf16", "lm_head": None,
        }  # fmt: skip

    def test_a_second_call_changes_the_recipe(self, convert):
        model = Model()
        convert(model, FP8)
        weight = model.layers[0].q_proj.weight
        plain = weight.plain
        convert(model, HybridConfig.parse("fp8_rowwise"))
        assert model.layers[0].q_proj.weight is weight
        assert weight.plain is plain
        assert str(weight.config) == "fp8_rowwise"


def test_default_of_fqn_to_config_takes_the_rest():
    with pytest.warns(UserWarning, match="_default is deprecated"):
        rules = FqnToConfig(OrderedDict({"layers.0.q_proj": "fp8_rowwise", "_default": "fp8"}))
    model = ht.quantize_(Model(), rules)
    assert configs(model)["layers.0.q_proj"] == "fp8_rowwise"
    assert configs(model)["layers.1.q_proj"] == "fp8"
    assert configs(model)["lm_head"] is None


def test_factories_see_every_role_of_every_layer():
    seen = []

    def factory(role: QuantizerRole):
        seen.append(role)
        if role.name.startswith("layers.0"):
            return IdentityQuantizer()
        return Float8Quantizer(dtype="e5m2" if role.tensor_type == "grad_output" else "e4m3")

    model = ht.quantize_(Model(), factory)
    assert {role.name for role in seen} == CONVERTED
    assert {role.tensor_type for role in seen} == {"input", "weight", "grad_output"}
    assert {role.module_type for role in seen} == {"linear"}
    assert configs(model)["layers.0.q_proj"] == "bf16"
    assert configs(model)["layers.1.q_proj"] == "fp8"


def test_an_optimizer_made_before_keeps_working():
    model, x = nn.Linear(16, 8), torch.randn(4, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    ht.quantize_(model, "fp8")
    model(x).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight.master, before)


def test_gradients_survive_conversion():
    model = nn.Linear(16, 8)
    model(torch.randn(4, 16)).sum().backward()
    grad = model.weight.grad
    ht.quantize_(model, "fp8")
    assert model.weight.grad is grad


class TestTied:
    """Layers that hold one weight: it has the recipe."""

    @staticmethod
    def model():
        model = nn.ModuleDict({name: nn.Linear(64, 64, bias=False) for name in "abc"})
        model["b"].weight = model["a"].weight
        return model

    @pytest.mark.parametrize(
        ("recipe", "options", "given"),
        [
            ("fp8", {"keep_bf16": ["b"]}, "fp8 for a, none for b"),
            ("fp8", {"filter_fn": lambda module, name: name != "a"}, "none for a, fp8 for b"),
            (FqnToConfig({"a": "fp8", "re:b|c": "mxfp8"}), {}, "fp8 for a, mxfp8 for b"),
            (FqnToConfig({"a": None, "re:b|c": "mxfp8"}), {}, "none for a, mxfp8 for b"),
        ],
        ids=["kept", "filter", "names", "none"],
    )
    def test_two_recipes_are_refused(self, recipe, options, given):
        model = self.model()
        with pytest.raises(
            ValueError, match=f"hold one weight would get different recipes: {given}; choose all of them"
        ):
            ht.quantize_(model, recipe, **options)
        assert configs(model) == dict.fromkeys("abc")
        ht.quantize_(model, "fp8", keep_bf16=["a", "b"])
        ht.quantize_(model, "fp8")
        assert all(configs(model).values())
        named = recipe if isinstance(recipe, FqnToConfig) else FqnToConfig({"a": "fp8_rowwise"})
        with pytest.raises(ValueError, match="set_config_: layers that hold one weight would get different recipes"):
            ht.set_config_(model, named)

    def test_one_that_was_tied_later_has_it_too(self):
        model = ht.quantize_(self.model(), "fp8")
        model["c"].weight = model["a"].weight
        ht.set_config_(model, "mxfp8")
        assert len({str(config) for config in configs(model).values()}) == 1


class TestSetConfig:
    @pytest.mark.parametrize("recipe", ["fp8_rowwise", "fp8+dequantized", HybridConfig.parse("bf16")], ids=str)
    def test_the_next_step_uses_it(self, recipe):
        model = ht.quantize_(nn.Linear(32, 16), "fp8")
        x = torch.randn(4, 32)
        model(x).sum().backward()
        fresh = nn.Linear(32, 16)
        fresh.load_state_dict(
            {k: v.dequantize() if isinstance(v, MasterWeight) else v for k, v in model.state_dict().items()}
        )
        ht.quantize_(fresh, recipe)
        assert ht.set_config_(model, recipe) is model
        for m in (model, fresh):
            m.zero_grad()
            m(x).sum().backward()
        assert torch.equal(model(x), fresh(x))
        assert torch.equal(model.weight.grad, fresh.weight.grad)

    def test_only_converted_layers_change_and_optimizer_state_stays(self):
        model = ht.quantize_(Model(), "fp8", filter_fn=lambda m, name: name in ("lm_head", "layers.0.q_proj"))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.tensor([[1, 2]])).sum().backward()
        optimizer.step()
        before = copy.deepcopy(optimizer.state_dict())
        ht.set_config_(model, "fp8_rowwise")
        assert {n: c for n, c in configs(model).items() if c} == {
            "layers.0.q_proj": "fp8_rowwise",
            "lm_head": "fp8_rowwise",
        }
        after = optimizer.state_dict()
        for key, state in before["state"].items():
            assert all(torch.equal(value, after["state"][key][name]) for name, value in state.items())

    def test_persistent_weights_are_remade(self):
        model = ht.quantize_(nn.Linear(32, 16).requires_grad_(False), "fp8", persistent=True)
        value = model.weight.dequantize()
        ht.set_config_(model, "fp8_rowwise")
        expected = Float8Quantizer(granularity="row").quantize(value)
        assert torch.equal(model.weight.rowwise, expected.rowwise)
        assert torch.equal(model.weight.columnwise, expected.columnwise)

    def test_schedules_by_factory_and_names(self):
        model = ht.quantize_(Model(), "fp8")
        ht.set_config_(model, lambda role: IdentityQuantizer() if "layers.0" in role.name else Float8Quantizer())
        assert configs(model)["layers.0.q_proj"] == "bf16"
        ht.set_config_(model, FqnToConfig(OrderedDict({"layers.1.q_proj": "fp8_rowwise"})))
        assert configs(model)["layers.1.q_proj"] == "fp8_rowwise"
        assert configs(model)["layers.0.q_proj"] == "bf16"


class TestStateDict:
    @pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
    @pytest.mark.parametrize("persistent", [False, True], ids=["master", "persistent"])
    @pytest.mark.parametrize("source", ["plain", "master", "persistent", "other recipe"])
    @pytest.mark.parametrize("swap", [False, True], ids=["", "swap"])
    def test_load_keeps_the_recipe(self, source, persistent, assign, swap, request):
        torch.manual_seed(1)
        other = nn.Linear(16, 8).bfloat16()
        value = other.weight.detach().clone()
        if source != "plain":
            spec = "fp8_rowwise" if source == "other recipe" else "fp8"
            ht.quantize_(other, spec, persistent=source == "persistent")
        state = other.state_dict()
        model = ht.quantize_(nn.Linear(16, 8).bfloat16(), "fp8", persistent=persistent)
        torch.__future__.set_swap_module_params_on_conversion(swap)
        request.addfinalizer(lambda: torch.__future__.set_swap_module_params_on_conversion(False))
        model.load_state_dict(state, assign=assign)
        weight = model.weight
        assert isinstance(weight, HybridTensor if persistent else MasterWeight)
        assert isinstance(weight, nn.Parameter)
        assert weight.requires_grad
        assert str(weight.config) == "fp8"
        expected = Float8Quantizer().quantize(value)
        if source == "persistent":
            expected = expected if persistent else Float8Quantizer().quantize(expected.dequantize())
        row, column = tensor_faces(weight, dtype=torch.bfloat16)
        assert torch.equal(row, expected.rowwise)
        assert torch.equal(column, expected.columnwise)
        model(torch.randn(2, 16).bfloat16()).sum().backward()
        assert type(weight.grad) is torch.Tensor

    @pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
    def test_a_plain_model_loads_ours(self, assign):
        source = ht.quantize_(nn.Linear(16, 8), "fp8")
        plain = nn.Linear(16, 8)
        plain.load_state_dict(source.state_dict(), assign=assign)
        value = plain.weight.dequantize() if isinstance(plain.weight, MasterWeight) else plain.weight
        assert torch.equal(value, source.weight.master)

    def test_assign_on_meta_loads_without_a_copy(self):
        with torch.device("meta"):
            model = nn.Linear(16, 8)
        ht.quantize_(model, "fp8")
        value = torch.randn(8, 16)
        model.load_state_dict({"weight": value, "bias": torch.zeros(8)}, assign=True)
        assert isinstance(model.weight, MasterWeight)
        assert model.weight.master.data_ptr() == value.data_ptr()
        model(torch.randn(2, 16)).sum().backward()

    @pytest.mark.parametrize("persistent", [False, True], ids=["master", "persistent"])
    def test_torch_save_weights_only_round_trip(self, persistent):
        model = ht.quantize_(nn.Linear(16, 8), "fp8/fp8_rowwise/bf16", persistent=persistent)
        again = ht.quantize_(nn.Linear(16, 8), "fp8/fp8_rowwise/bf16", persistent=persistent)
        again.load_state_dict(through_a_file(model.state_dict(), weights_only=True))
        x = torch.randn(4, 16)
        assert torch.equal(again(x), model(x))

    def test_whole_models_pickle_and_copy(self):
        model = ht.quantize_(Model(), "fp8")
        x = torch.tensor([[1, 2, 3]])
        for again in (copy.deepcopy(model), through_a_file(model, weights_only=False)):
            assert configs(again) == configs(model)
            assert torch.equal(again(x), model(x))
            state = {k: v.dequantize() if isinstance(v, MasterWeight) else v for k, v in model.state_dict().items()}
            again.load_state_dict(state, assign=True)
            assert configs(again) == configs(model)


class TestConversions:
    @pytest.mark.parametrize("persistent", [False, True], ids=["master", "persistent"])
    @pytest.mark.parametrize("swap", [False, True], ids=["", "swap"])
    def test_module_to_dtype_and_device(self, persistent, swap, device, request):
        torch.__future__.set_swap_module_params_on_conversion(swap)
        request.addfinalizer(lambda: torch.__future__.set_swap_module_params_on_conversion(False))
        model = ht.quantize_(nn.Linear(16, 8), "fp8", persistent=persistent)
        weight = model.weight
        model.to(device).to(torch.bfloat16)
        assert model.weight is weight
        assert isinstance(weight, HybridTensor if persistent else MasterWeight)
        assert (weight.dtype, weight.device.type) == (torch.bfloat16, device)
        y = model(random_tensor(4, 16, device=device))
        y.sum().backward()
        assert y.dtype == torch.bfloat16

    @pytest.mark.parametrize("persistent", [False, True], ids=["master", "persistent"])
    def test_meta_then_to_empty_then_init(self, persistent):
        with torch.device("meta"):
            model = nn.Linear(16, 8)
        ht.quantize_(model, "fp8", persistent=persistent)
        model.to_empty(device="cpu")
        assert isinstance(model.weight, HybridTensor if persistent else MasterWeight)
        model.reset_parameters()
        values = model.weight.dequantize()
        assert 0 < values.abs().max() <= 0.3
        model(torch.randn(4, 16)).sum().backward()

    def test_functional_call_and_parametrized_training_utilities(self):
        model = ht.quantize_(nn.Linear(16, 8), "fp8")
        x = torch.randn(4, 16)
        expected = model(x)
        assert torch.equal(torch.func.functional_call(model, dict(model.named_parameters()), (x,)), expected)
        expected.sum().backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 0
        assert torch.nn.utils.parameters_to_vector(model.parameters()).shape == (16 * 8 + 8,)


class TestPersistent:
    def test_only_faces_are_kept(self):
        model = ht.quantize_(nn.Linear(16, 8).requires_grad_(False), "fp8", persistent=True)
        assert isinstance(model.weight, HybridTensor)
        assert model.weight.original is None
        assert not model.weight.requires_grad

    def test_a_trainable_one_holds_on_to_its_original(self):
        plain = nn.Linear(16, 8)
        value = plain.weight.detach().clone()
        model = ht.quantize_(plain, "fp8", persistent=True)
        assert torch.equal(model.weight.original, value)
        assert torch.equal(copy.deepcopy(model).weight.original, value)

    @pytest.mark.parametrize("recipe", ["fp8", "nvfp4", "mxfp8", "bf16"])
    def test_an_embedding_reads_what_forward_products_read(self, recipe, device):
        """And both give gradients to the weight that they have in common."""
        model = nn.ModuleDict({"embed": nn.Embedding(64, 32), "head": nn.Linear(32, 64, bias=False)}).to(device)
        model["head"].weight = model["embed"].weight
        ht.quantize_(model, recipe, persistent=True)
        weight, tokens = model["embed"].weight, torch.tensor([[3, 5], [5, 63]], device=device)
        y = model["embed"](tokens)
        assert torch.equal(y, weight.rowwise.dequantize()[tokens])
        y.sum().backward()
        expected = torch.zeros(64, 32, device=device).index_add_(0, tokens.view(-1), torch.ones(4, 32, device=device))
        assert torch.equal(weight.grad, expected)
        assert torch.equal(torch.compile(model["embed"], fullgraph=True, backend="aot_eager")(tokens), y)
        with pytest.raises(NotImplementedError, match=r"max_norm=.* would write to a weight"):
            nn.functional.embedding(tokens, weight, max_norm=1.0)

    def test_master_weights_can_become_persistent_but_not_the_reverse(self):
        model = ht.quantize_(nn.Linear(16, 8), "fp8")
        y = model(torch.ones(1, 16))
        ht.quantize_(model, "fp8", persistent=True)
        assert isinstance(model.weight, HybridTensor)
        assert torch.equal(model(torch.ones(1, 16)), y)
        with pytest.raises(ValueError, match="weight is persistent and has no high-precision value"):
            ht.quantize_(model, "fp8")


class TestBadInput:
    def test_nothing_matches(self):
        with pytest.raises(ValueError, match="the model has no linear layers, but modules whose parameters are of Lay"):
            ht.quantize_(nn.LayerNorm(4), "fp8")
        with pytest.raises(ValueError, match="layers are: lm_head"):
            ht.quantize_(nn.ModuleDict({"lm_head": nn.Linear(4, 4)}), "fp8")
        with pytest.raises(ValueError, match=r"must match a layer, got layer\.0, re:foo matching none"):
            ht.quantize_(Model(), FqnToConfig(OrderedDict({"layer.0": FP8, "re:foo": FP8, "lm_head": FP8})))
        with pytest.raises(ValueError, match="the model has no quantized weights"):
            ht.set_config_(Model(), "fp8")

    def test_unknown_recipe(self):
        model = Model()
        with pytest.raises(ValueError, match="unknown format 'fp88'; did you mean 'fp8'"):
            ht.quantize_(model, "fp88")
        assert set(configs(model).values()) == {None}

    @pytest.mark.parametrize("recipe", [None, 8, FP8.input, HybridConfig], ids=str)
    def test_wrong_kind_of_recipe(self, recipe):
        with pytest.raises(TypeError, match=r"recipe name, .* recipes\.by_type or factory is required"):
            ht.quantize_(Model(), recipe)

    def test_wrong_kind_of_model_and_rule(self):
        for call in (lambda: ht.quantize_([nn.Linear(4, 4)], "fp8"), lambda: ht.set_config_("model", "fp8")):
            with pytest.raises(TypeError, match="a module is required, got"):
                call()
        with pytest.raises(TypeError, match="must name a HybridConfig or None, got 8 for lm_head"):
            ht.quantize_(Model(), FqnToConfig(OrderedDict({"lm_head": 8})))
        with pytest.raises(ValueError, match="selects layers itself, got a filter_fn too"):
            ht.quantize_(Model(), FqnToConfig(OrderedDict({"lm_head": FP8})), filter_fn=lambda m, n: True)

    def test_a_factory_that_fails_leaves_the_model_alone(self):
        model = Model()
        with pytest.raises(TypeError, match=r"returned None for QuantizerRole.*name='layers\.0\.q_proj'"):
            ht.quantize_(model, lambda role: None)
        with pytest.raises(RuntimeError, match="no such layer"):
            ht.quantize_(model, lambda role: {}[f"no such layer {role.name}"])
        assert set(configs(model).values()) == {None}

    def test_weights_that_cannot_be_converted(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
        with pytest.raises(
            TypeError, match=r"layer 1: its weight is in torch\.float64, not bfloat16, float16 or float32"
        ):
            ht.quantize_(model, "fp8")
        assert not isinstance(model[0].weight, MasterWeight)
        computed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        with pytest.raises(TypeError, match="its weight is a Tensor, not a Parameter"):
            ht.quantize_(computed, "fp8", persistent=True)
        foreign = nn.Linear(4, 4)
        foreign.weight = nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)))
        with pytest.raises(TypeError, match="its weight is a TwoTensor, not a plain Parameter"):
            ht.quantize_(foreign, "fp8")

    def test_a_live_graph_is_refused_and_nothing_is_lost(self):
        model = nn.Linear(4, 4)
        y = model(torch.randn(2, 4))
        view = model.weight.t()
        with pytest.raises(RuntimeError, match="live graph or a weak reference"):
            ht.quantize_(model, "fp8")
        assert type(model.weight) is nn.Parameter
        del view
        y.sum().backward()
        ht.quantize_(model, "fp8")

    def test_a_profiler_that_records_shapes_is_named(self):
        """It holds weak references to the operands of what it saw, here the initializers."""
        with torch.profiler.profile(record_shapes=True, acc_events=True):
            model = nn.Linear(4, 4)
            with pytest.raises(RuntimeError, match="outside of forward/backward and of a profiler"):
                ht.quantize_(model, "fp8")
        ht.quantize_(model, "fp8")

    def test_multihead_attention_is_left_alone_and_says_why(self):
        model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        ht.quantize_(model, "fp8")
        assert configs(model) == {"self_attn.out_proj": None, "linear1": "fp8", "linear2": "fp8"}
        model(torch.randn(2, 3, 16)).sum().backward()
        skipped = dict(ht.explain(model, show=False).skipped)
        assert "below autograd" in skipped["self_attn.out_proj"]
        ht.quantize_(model, "fp8", filter_fn=lambda m, name: True)
        with pytest.raises(NotImplementedError, match=r"below autograd with the weight of layer self_attn\.out_proj,"):
            model(torch.randn(2, 3, 16))
        layer = ht.quantize_(nn.Sequential(nn.Linear(16, 16)), "fp8")
        with pytest.raises(NotImplementedError, match="einsum: this product with the weight of layer 0 is not"):
            torch.einsum("tk,nk->tn", torch.randn(2, 16), layer[0].weight)

    def test_torchao_with_other_modules(self):
        with pytest.raises(TypeError, match="converts weights of linear layers and experts, got weight of Embedding"):
            torchao_quantize_(nn.Embedding(4, 4), FP8, filter_fn=lambda m, n: True)


@pytest.mark.parametrize("persistent", [False, True], ids=["masters", "persistent"])
def test_hooks_of_parameters_go_on(persistent):
    """Those of before, and their handles."""
    model, seen = nn.Linear(32, 32), []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(("after", tuple(p.shape))))
    handles = [p.register_hook(lambda g: seen.append(("gradient", tuple(g.shape)))) for p in model.parameters()]
    ht.quantize_(model, "fp8", persistent=persistent, filter_fn=lambda *_: True)
    model(torch.randn(8, 32)).sum().backward()
    assert sorted(seen) == sorted((what, shape) for what in ("after", "gradient") for shape in ((32, 32), (32,)))
    for handle in handles:
        handle.remove()
    seen.clear()
    model(torch.randn(8, 32)).sum().backward()
    assert sorted(seen) == [("after", (32,)), ("after", (32, 32))]


class TestNames:
    def model(self):
        return nn.ModuleDict({"up": nn.Linear(32, 32), "down": nn.Linear(32, 32), "gate": nn.Linear(32, 16)})

    def converted(self, model):
        return [name for name, module in model.items() if isinstance(module.weight, ht.MasterWeight)]

    def test_everything_that_chooses_by_name_sees_the_whole_name(self):
        seen = []
        ht.quantize_(self.model(), "fp8", filter_fn=lambda _, name: seen.append(name) is None, name="blocks.0.mlp")
        assert seen == ["blocks.0.mlp.up", "blocks.0.mlp.down", "blocks.0.mlp.gate"]
        model = ht.quantize_(self.model(), "fp8", keep_bf16=["blocks.?.mlp.up"], name="blocks.0.mlp")
        assert self.converted(model) == ["down"]
        roles = []
        ht.quantize_(self.model(), lambda role: roles.append(role.name) or ht.Float8Quantizer(), name="blocks.0.mlp")
        assert set(roles) == {"blocks.0.mlp.up", "blocks.0.mlp.down"}
        model = ht.quantize_(self.model(), FqnToConfig({"blocks.0.mlp.down": "fp8"}), name="blocks.0.mlp")
        assert self.converted(model) == ["down"]
        with pytest.raises(ValueError, match=r"layers are: blocks\.0\.router$"):
            ht.quantize_(nn.Linear(32, 32), "fp8", name="blocks.0.router")

    @pytest.mark.parametrize("name", ["", ".", "a.", ".a", "a..b"])
    def test_a_name_has_no_empty_part(self, name):
        with pytest.raises(ValueError, match=f"a name without empty parts is required, got {re.escape(repr(name))}"):
            ht.quantize_(nn.Linear(32, 32), "fp8", name=name)

    def test_a_name_is_a_string(self):
        with pytest.raises(TypeError, match="a string as name is required, got 3"):
            ht.quantize_(nn.Linear(32, 32), "fp8", name=3)


def test_keep_faces_is_that_of_all_recipes_that_quantize_weights():
    model = nn.ModuleDict({name: nn.Linear(32, 32) for name in ("a", "b", "c")})
    rules = {"a": "fp8", "b": "mxfp8+free_faces", "c": "bf16/fp8/bf16"}
    recipe = FqnToConfig({name: ht.HybridConfig.parse(spec) for name, spec in rules.items()})
    ht.quantize_(model, recipe, keep_faces="always")
    assert [model[name].weight.config.keep_faces for name in "abc"] == ["always"] * 3
    ht.quantize_(model, recipe)
    assert [model[name].weight.config.keep_faces for name in "abc"] == ["auto", "never", "auto"]
    assert ht.quantize_(nn.Linear(32, 32), "bf16", keep_faces="never").weight.config == ht.HybridConfig.parse("bf16")
    with pytest.raises(ValueError, match="unknown keep_faces 'yes'; known: auto, always, never"):
        ht.quantize_(model, "fp8", keep_faces="yes")


def test_persistent_weights_have_no_faces_to_keep():
    for options in ({"recipe": "fp8", "keep_faces": "never"}, {"recipe": "fp8+keep_faces"}):
        layer = nn.Linear(32, 32)
        with pytest.raises(ValueError, match="keep_faces is for weights in high precision, got a persistent weight"):
            ht.quantize_(layer, **options, persistent=True)
        assert type(layer.weight) is nn.Parameter
    ht.quantize_(layer, "fp8", persistent=True)
    for convert in (ht.set_config_, lambda layer, spec: torchao_quantize_(layer, ht.HybridConfig.parse(spec))):
        with pytest.raises(ValueError, match="keep_faces is for weights in high precision, got a persistent weight"):
            convert(layer, "fp8+keep_faces")
    assert layer.weight.config == ht.HybridConfig.parse("fp8")


def test_keep_bf16_does_not_leave_a_layer_quantized():
    model = ht.quantize_(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), "fp8")
    with pytest.raises(ValueError, match="layers in high precision, got 0, which has the recipe fp8; make it plain"):
        ht.quantize_(model, "mxfp8", keep_bf16=["0"])
    assert [str(layer.weight.config) for layer in model] == ["fp8", "fp8"]
    ht.set_config_(model[0], "bf16")
    ht.quantize_(model, "mxfp8", keep_bf16=["0"])
    assert [str(layer.weight.config) for layer in model] == ["bf16", "mxfp8"]
    ht.plain_(model[0])
    ht.quantize_(model, "fp8", keep_bf16=["0"])
    assert type(model[0].weight) is nn.Parameter
    assert str(model[1].weight.config) == "fp8"


@pytest.mark.parametrize("recipe", [FqnToConfig({"1": "fp8"}), ht.recipes.by_type(grouped_linear="fp8")], ids=str)
def test_a_recipe_for_no_converted_layer_is_an_error_of_set_config_(recipe):
    model = ht.quantize_(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), "fp8", keep_bf16=["1"])
    with pytest.raises(ValueError, match=r"the recipe matches no converted layer; converted layers are: 0$"):
        ht.set_config_(model, recipe)


@pytest.mark.parametrize(
    ("recipe", "persistent"),
    [
        (3, False),
        (FqnToConfig({"0": 3}), False),
        (FqnToConfig({"7": "fp8"}), False),
        (FqnToConfig({"re:(": "fp8"}), False),
        ("mxfp8", False),
        ("fp8+keep_faces", True),
        (ht.recipes.fp8, False),
    ],
    ids=["number", "of a layer", "of no layer", "no pattern", "sizes", "kept faces", "function"],
)
def test_errors_of_set_config_begin_with_its_name(recipe, persistent):
    model = ht.quantize_(nn.Sequential(nn.Linear(48, 32)), "fp8", persistent=persistent)
    with pytest.raises((TypeError, ValueError), match=r"^set_config_: "):
        ht.set_config_(model, recipe)
    assert str(model[0].weight.config) == "fp8"


def test_a_function_that_makes_a_recipe_is_no_factory():
    with pytest.raises(TypeError, match=r"got the function recipes\.fp8_block, which makes one; call it"):
        ht.quantize_(nn.Linear(32, 32), ht.recipes.fp8_block)


def test_torchao_converts_products_of_libraries_that_are_imported_by_now(monkeypatch):
    from hybridtensor.linear import interception

    monkeypatch.setattr(interception, "_GROUPED_OF_OTHERS", (("aten", "_grouped_mm"),))
    torchao_quantize_(nn.Linear(32, 32), FP8)
    assert torch.ops.aten._grouped_mm in ht.MasterWeight.functions.handlers


class TestInInferenceMode:
    """What is made there is trained later."""

    @staticmethod
    def train(model):
        parameters = [p for p in model.parameters() if isinstance(p, ht.HybridTensor)]
        kind = ht.optim.MasterWeights if parameters else lambda cls, *args, **options: cls(*args, **options)
        optimizer = kind(torch.optim.SGD, model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(32, 64)).sum().backward()
            optimizer.step()
            ht.step_(model)

    @pytest.mark.parametrize("persistent", [False, True], ids=["masters", "persistent"])
    @pytest.mark.parametrize("spec", ["fp8_rowwise", "fp8_delayed"])
    def test_another_recipe(self, spec, persistent):
        model = ht.quantize_(nn.Sequential(nn.Linear(64, 64)), "fp8", persistent=persistent)
        with torch.inference_mode():
            ht.set_config_(model, spec)
        self.train(model)

    def test_torchao(self):
        model = nn.Sequential(nn.Linear(64, 64))
        with torch.inference_mode():
            torchao_quantize_(model, ht.HybridConfig.parse("fp8_delayed"))
        self.train(model)

    def test_plain_again_of_what_was_made_there(self):
        with torch.inference_mode():
            model = ht.quantize_(nn.Sequential(nn.Linear(64, 64)), "fp8")
            expected = model[0].weight.dequantize().clone()
            ht.plain_(model)
        assert not model[0].weight.is_inference()
        assert torch.equal(model[0].weight, expected)

    def test_plain_again(self):
        model = ht.quantize_(nn.Sequential(nn.Linear(64, 64)).requires_grad_(False), "fp8", persistent=True)
        with torch.inference_mode():
            ht.plain_(model)
        assert not model[0].weight.is_inference()
        self.train(model.requires_grad_(True))

    def test_check(self):
        model = ht.quantize_(nn.Sequential(nn.Linear(64, 64)), "fp8")
        x = torch.ones(32, 64)
        with torch.inference_mode():
            assert not ht.check(model, x).problems
