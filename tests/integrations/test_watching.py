"""``ht.watch`` around the loops of frameworks, and in their loggers. Oracle: the samples themselves."""

import csv
import math

import pytest
import torch
from hugging_face import llama
from torch import nn

import hybridtensor as ht
from hybridtensor.testing import random_tensor

pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages


def read_events(folder):
    """Return what TensorBoard reads of a folder: ``{(name, step): value}``."""
    events = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard: make test-integrations"
    )
    reader = events.EventAccumulator(str(folder))
    reader.Reload()
    return {(name, e.step): e.value for name in reader.Tags()["scalars"] for e in reader.Scalars(name)}


def assert_logged(found, samples):
    """What was logged for the step of each sample is what is in the sample."""
    assert samples
    for sample in samples:
        numbers = {name: value for name, value in sample.scalars().items() if math.isfinite(value)}
        assert len(numbers) > 20
        for name, value in numbers.items():
            assert found[name, sample.step] == pytest.approx(value, rel=1e-6), name


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def test_a_loop_with_tensorboard(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="needs tensorboard: make test-integrations")
    model, writer = ht.quantize_(Module(), "fp8"), tensorboard.SummaryWriter(tmp_path)
    with ht.watch(model, every=2, sinks=[writer]) as watched:
        for i in range(4):
            model(random_tensor(32, 64, seed=i).float()).square().mean().backward()
            ht.step_(model)
            watched.step()
    writer.close()
    assert [sample.step for sample in watched.samples] == [0, 2]
    assert_logged(read_events(tmp_path), watched.samples)


def test_lightning_with_its_loggers(tmp_path):
    lightning = pytest.importorskip("lightning", reason="needs lightning: make test-integrations")
    loggers = pytest.importorskip("lightning.pytorch.loggers")
    from hybridtensor.integrations.lightning import HybridPrecision

    class Trained(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Module()

        def training_step(self, batch, index):
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    module = Trained()
    ht.quantize_(module, "fp8_delayed")
    to_csv, to_board = loggers.CSVLogger(tmp_path / "csv"), loggers.TensorBoardLogger(tmp_path / "board")
    rows = torch.utils.data.TensorDataset(random_tensor(128, 64).float())
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", plugins=HybridPrecision("fp8_delayed"), logger=[to_csv, to_board],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with ht.watch(module, every=2, sinks=[to_csv, to_board]) as watched:
        trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=32))
    assert [sample.step for sample in watched.samples] == [0, 2]
    assert_logged(read_events(to_board.log_dir), watched.samples)
    to_csv.save()
    with open(f"{to_csv.log_dir}/metrics.csv") as file:
        found = {
            (name, int(row["step"])): float(value)
            for row in csv.DictReader(file)
            for name, value in row.items()
            if value and name != "step"
        }
    assert_logged(found, watched.samples)


def test_trainer_of_transformers(tmp_path):
    """Trainer logs with the loss of a step the statistics of the one before, which nothing had to wait for."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch.utils.tensorboard", reason="needs tensorboard: make test-integrations")
    from hybridtensor.integrations.transformers import StepCallback

    model = ht.quantize_(llama(), "nvfp4")
    tokens = torch.arange(32) % 64
    arguments = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, max_steps=4, logging_steps=1, use_cpu=True, disable_tqdm=True,
        report_to=["tensorboard"], save_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=[{"input_ids": tokens, "labels": tokens}] * 8)

    with ht.watch(model, every=1) as watched:
        StepCallback(watched).attach(trainer)
        trainer.train()
    assert [sample.step for sample in watched.samples] == [0, 1, 2, 3]
    (folder,) = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}
    found = {(name.removeprefix("train/"), step - 2): value for (name, step), value in read_events(folder).items()}
    assert_logged(found, watched.samples[:-1])
    assert "loss" in trainer.state.log_history[0]
