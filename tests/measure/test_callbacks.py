"""Callbacks for trainers: quiet in a dry run, one line without a GPU, the step table with one, nothing left on."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import oom_magic as om
from oom_magic.measure import measurement
from oom_magic.measure.device import cards
from tests.support.samples import failed, measured


class FakeMeasurement:
    """Stands for a measurement, without a GPU."""

    running = 0

    def __init__(self, report: Any = None) -> None:
        self.report = report or measured()

    def __enter__(self) -> FakeMeasurement:
        FakeMeasurement.running += 1
        return self

    def __exit__(self, *_: object) -> None:
        FakeMeasurement.running -= 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were one."""
    monkeypatch.setattr(cards, "is_available", lambda: True)
    monkeypatch.setattr(measurement, "measure", lambda **_: FakeMeasurement())
    FakeMeasurement.running = 0


def hf_trainer(folder: Path, callback: Any, **settings: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    rows = [{"input_ids": [1] * 8, "labels": [1] * 8}] * 8
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=2, per_device_train_batch_size=2, report_to=[], save_strategy="no", disable_tqdm=True,
        **settings,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    return transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[callback])


def test_a_trainer_without_a_gpu_trains_and_says_so_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = om.hf_callback()
    hf_trainer(tmp_path, callback, use_cpu=True).train()
    assert capsys.readouterr().out.count("There is no CUDA device to measure") == 1
    assert callback.report is None


def test_in_a_dry_run_it_keeps_quiet(tmp_path: Path, capsys: pytest.CaptureFixture[str], gpu: None) -> None:
    callback = om.hf_callback()
    report = om.dry_run(lambda: hf_trainer(tmp_path, callback).train(), gpu="RTX 3060")
    assert len(report.steps) == 2
    assert "GPU memory" not in capsys.readouterr().out and callback.report is None


@pytest.mark.parametrize("shown", [True, False])
def test_the_steps_of_a_run_are_printed(gpu: None, capsys: pytest.CaptureFixture[str], shown: bool) -> None:
    pytest.importorskip("transformers")
    callback = om.hf_callback()
    state = type("State", (), {"is_local_process_zero": shown})()
    callback.on_train_begin(None, state, None)
    assert FakeMeasurement.running == 1
    callback.on_train_end(None, state, None)
    text = capsys.readouterr().out
    assert ("peak allocated" in text and "measured on" in text) is shown
    assert callback.report.steps == measured().steps
    assert FakeMeasurement.running == 0


def test_a_training_that_failed_leaves_no_recording_behind(gpu: None) -> None:
    pytest.importorskip("transformers")
    state = type("State", (), {"is_local_process_zero": True})()
    callback = om.hf_callback()
    for _ in range(2):  # Hugging Face calls no callback after an error
        callback.on_train_begin(None, state, None)
        assert FakeMeasurement.running == 1
    del callback
    gc.collect()
    assert FakeMeasurement.running == 0


def test_lightning(gpu: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lightning = pytest.importorskip("lightning.pytorch")

    class Net(lightning.LightningModule):  # type: ignore[misc, name-defined]
        fails = False

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            if self.fails:
                raise ValueError("on purpose")
            return self.layer(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    def fit(callback: Any, net: Net) -> None:
        trainer = lightning.Trainer(
            max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[callback],
        )  # fmt: skip
        trainer.fit(net, torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2))

    callback = om.lightning_callback()
    fit(callback, Net())
    assert "peak allocated" in capsys.readouterr().out and FakeMeasurement.running == 0
    net = Net()
    net.fails = True
    monkeypatch.setattr(measurement, "measure", lambda **_: FakeMeasurement(failed()))
    with pytest.raises(ValueError, match="on purpose"):
        fit(callback, net)
    assert "Out of memory" in capsys.readouterr().out and FakeMeasurement.running == 0
