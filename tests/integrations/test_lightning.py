"""Lightning: Trainer and Fabric with the plugins, bitwise the same training by hand."""

import gc
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

import hybridtensor as ht

lightning = pytest.importorskip("lightning", reason="needs lightning: make test-integrations")
from hybridtensor.integrations.lightning import FabricHybridPrecision, HybridPrecision  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages
RECIPES = pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed", "nvfp4"])
QUIET = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False,
}  # fmt: skip
ROWS = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        return self.net(batch[0]).float().square().mean()

    test_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader():
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ROWS), batch_size=32)


def fit(plugin, module=None, **options):
    module = Module() if module is None else module
    trainer = lightning.Trainer(max_epochs=1, plugins=plugin, **QUIET, **options)
    trainer.fit(module, loader())
    return module


def by_hand(recipe, accumulate=1, dtype=torch.float32, autocast=False):
    module = Module().to(dtype)
    ht.quantize_(module, recipe)
    optimizer = module.configure_optimizers()
    for i, rows in enumerate(ROWS.split(32)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = module.net(rows.to(dtype)).float().square().mean() / accumulate
        loss.backward()
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            ht.step_(module)
    return module


def assert_same(module, expected):
    for (name, mine), theirs in zip(module.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name


@RECIPES
@pytest.mark.parametrize("accumulate", [1, 2])
def test_fit(recipe, accumulate):
    module = fit(HybridPrecision(recipe), accumulate_grad_batches=accumulate)
    assert isinstance(module.net[0].weight, ht.MasterWeight)
    assert_same(module, by_hand(recipe, accumulate))


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_precision_of_the_rest(precision):
    module = fit(HybridPrecision("nvfp4", precision=precision))
    mixed = precision == "bf16-mixed"
    assert_same(module, by_hand("nvfp4", 1, torch.float32 if mixed else torch.bfloat16, autocast=mixed))


def test_autocast_is_of_the_device_of_the_module_on_machines_that_have_others(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        plugins = [kind("nvfp4", precision="bf16-mixed") for kind in (HybridPrecision, FabricHybridPrecision)]
    assert_same(fit(plugins[0]), by_hand("nvfp4", autocast=True))
    module = lightning.Fabric(accelerator="cpu", plugins=plugins[1]).setup_module(Module().net)
    with torch.autocast("cpu", torch.bfloat16):
        expected = module.module(ROWS[:32])
    assert torch.equal(module(ROWS[:32]), expected.float())


BOTH = pytest.mark.parametrize("kind", [HybridPrecision, FabricHybridPrecision])


@BOTH
def test_a_module_without_memory_runs_under_autocast(kind):
    plugin = kind("fp8", precision="bf16-mixed")
    module = plugin.convert_module(nn.Linear(64, 64, device="meta"))
    with plugin.forward_context():
        assert module(torch.empty(32, 64, device="meta")).shape == (32, 64)


@BOTH
def test_autocast_of_shards_on_the_host_is_of_the_device_that_computes(kind, monkeypatch):
    """FSDP2 offloads them there."""
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh, part = torch.distributed.init_device_mesh("cuda", (2,)), torch.zeros(32, 64)
        meta = TensorMeta(torch.Size((64, 64)), (64, 1), part.dtype)
        weight = DTensor(part, DTensorSpec(mesh, (Shard(0),), tensor_meta=meta), requires_grad=True)
    finally:
        torch.distributed.destroy_process_group()
    plugin = kind("fp8", precision="bf16-mixed")
    module = plugin.convert_module(nn.Linear(64, 64))
    module.weight = nn.Parameter(weight)
    found, autocast = [], torch.autocast
    with monkeypatch.context() as patch:
        patch.setattr(torch, "autocast", lambda device, **options: found.append(device) or autocast("cpu", **options))
        with plugin.forward_context():
            assert found == ["cuda"]


def test_a_plugin_is_pickled_without_the_module_that_it_converted():
    plugin = HybridPrecision("fp8", precision="bf16-mixed")
    assert_same(fit(plugin), fit(pickle.loads(pickle.dumps(plugin))))


def test_two_fits_and_a_test_convert_once():
    plugin = HybridPrecision("fp8_delayed", keep_bf16=["net.2"])
    module = fit(plugin)
    assert not isinstance(module.net[2].weight, ht.MasterWeight)
    state = module.net[0].quantization_state
    fit(plugin, module)
    lightning.Trainer(plugins=plugin, **QUIET).test(module, loader(), verbose=False)
    assert module.net[0].quantization_state is state
    assert (state.amax_history[0] > 0).sum() == 2 * len(loader())  # one entry a step


def test_what_was_converted_keeps_its_recipe():
    module = Module()
    ht.quantize_(module, "mxfp8")
    fit(HybridPrecision("fp8"), module)
    assert str(module.net[0].weight.config) == "mxfp8"


@RECIPES
def test_fabric(recipe):
    fabric = lightning.Fabric(accelerator="cpu", plugins=FabricHybridPrecision(recipe))
    module = Module().net
    made, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
    for rows in ROWS.split(32):
        fabric.backward(made(rows).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    expected = Module().net
    ht.quantize_(expected, recipe)
    plain = torch.optim.AdamW(expected.parameters(), lr=1e-2)
    for rows in ROWS.split(32):
        expected(rows).square().mean().backward()
        plain.step()
        plain.zero_grad()
        ht.step_(expected)
    assert_same(module, expected)


def test_fabric_advances_each_module_with_its_own_optimizer():
    fabric = lightning.Fabric(accelerator="cpu", plugins=FabricHybridPrecision("nvfp4"))
    modules = [Module().net for _ in range(2)]
    pairs = [fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1)) for module in modules]
    for i in (0, 0, 1):
        made, optimizer = pairs[i]
        fabric.backward(made(ROWS[:32]).square().mean())
        optimizer.step()
    assert [int(module[0].quantization_state.rounding[1]) for module in modules] == [2, 1]


def test_fabric_advances_with_the_optimizer_that_replaces_another():
    fabric = lightning.Fabric(accelerator="cpu", plugins=FabricHybridPrecision("nvfp4"))
    module = Module().net
    made = fabric.setup_module(module)
    for steps in (1, 2):
        optimizer = fabric.setup_optimizers(torch.optim.SGD(module.parameters(), lr=0.1))
        fabric.backward(made(ROWS[:32]).square().mean())
        optimizer.step()
        del optimizer
        gc.collect()
        assert int(module[0].quantization_state.rounding[1]) == steps


def test_unknown_precision():
    with pytest.raises(ValueError, match="HybridPrecision: unknown precision '16-mixed'"):
        HybridPrecision("fp8", precision="16-mixed")


def test_an_iterator_of_names_serves_every_module():
    plugin = FabricHybridPrecision("fp8", keep_bf16=iter(["net.0"]))
    for module in (Module(), Module()):
        plugin.convert_module(module)
        assert type(module.net[0].weight) is nn.Parameter
        assert type(module.net[2].weight) is ht.MasterWeight
