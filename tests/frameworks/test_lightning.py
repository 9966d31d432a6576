"""Lightning: fit, also of compiled modules; its figures; and exporting to ONNX after the way back."""

import pytest
import torch
from torch import nn

import hybridtensor as ht

lightning = pytest.importorskip("lightning", reason="needs lightning: make test-frameworks")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages


class Module(lightning.LightningModule):
    def __init__(self, recipe, compiled=False):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64))
        if recipe is not None:
            ht.quantize_(self.net, recipe)
        self.run = torch.compile(self.net, backend="aot_eager") if compiled else self.net

    def training_step(self, batch, index):
        return self.run(batch[0]).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        ht.step_after(optimizer, self.net)
        return optimizer


def fit(module, epochs=2):
    rows = torch.randn(62, 64, generator=torch.Generator().manual_seed(1))  # the last batch is odd
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=32)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    lightning.Trainer(max_epochs=epochs, accelerator="cpu", **quiet).fit(module, data)


@pytest.mark.parametrize("recipe", ["fp8", "mxfp8", "fp8_delayed", "nvfp4"])
def test_fit_with_a_compiled_module(recipe):
    """Also its teardown, which moves modules that compiled graphs refer to; bitwise the eager one."""
    modules = [Module(recipe, compiled) for compiled in (False, True)]
    for module in modules:
        fit(module)
    eager, compiled = (module.net[0].weight for module in modules)
    assert torch.equal(eager.dequantize(), compiled.dequantize())
    if recipe in ("fp8_delayed", "nvfp4"):
        assert modules[0].net[0].quantization_state.steps >= 4
    whole = Module(recipe)
    fit(torch.compile(whole, backend="aot_eager"), 1)
    assert ht.subclasses.is_converted(whole.net[0].weight)


@pytest.mark.parametrize("recipe", ["fp8", "mxfp8", "nvfp4", "fp8+high_precision"])
def test_figures_are_those_of_the_plain_model(recipe):
    from lightning.fabric.utilities.throughput import measure_flops

    counts = []
    for kind in (None, recipe):
        with torch.device("meta"):
            module = Module(kind)
            batch = torch.randn(32, 64)
        counts.append(measure_flops(module, lambda m=module, b=batch: m.net(b), torch.Tensor.sum))
    assert counts[0] == counts[1] > 0


def test_onnx_after_the_way_back():
    pytest.importorskip("onnxscript", reason="needs onnxscript: make test-frameworks")
    net = ht.plain_(Module("fp8").net)
    program = torch.onnx.export(net, (torch.randn(2, 64),), dynamo=True, verbose=False)
    assert any(node.op_type in ("Gemm", "MatMul") for node in program.model.graph)
