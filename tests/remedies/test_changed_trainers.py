"""What a Trainer fetches, collects and compares."""

from __future__ import annotations

import ast
import types

import numpy as np
import pytest
import torch
from torch import nn

from oom_magic.explain.remedies.cell_rehearsal import CellRehearsal
from oom_magic.explain.remedies.own_code.writing import CodeWriter
from oom_magic.explain.remedies.rehearsal import Variation
from oom_magic.explain.remedies.remedy_code import RemedyCode
from oom_magic.predict.session import DrySession
from oom_magic.predict.what_if import loop_changes as habits
from oom_magic.predict.what_if.kept_classes import KeptClasses, metrics_of_classes
from oom_magic.predict.what_if.survey import Survey
from tests.support.changed_loops import run

transformers = pytest.importorskip("transformers")


class _Labelled(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, number):
        return {"x": torch.ones(8), "labels": 0}


class _Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 2**18)

    def forward(self, x, labels):
        logits = self.head(x.flatten(1)[:, :8])
        return {"loss": logits.mean(), "logits": logits}


@pytest.mark.parametrize("made", [None, 1])
def test_what_a_trainer_collects_goes_to_the_host_after_each_batch(made, tmp_path):
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers.trainer")

    def evaluate():
        options = {"report_to": [], "disable_tqdm": True, "eval_accumulation_steps": made}
        args = transformers.TrainingArguments(str(tmp_path), per_device_eval_batch_size=2, **options)
        trainer = transformers.Trainer(_Wide(), args, eval_dataset=_Labelled(), compute_metrics=lambda _: {})
        trainer.evaluate()

    change = habits.GatheredOnHost()
    survey = Survey([change])
    batch = 2 * 2**18 * 4
    peak = DrySession("RTX 3060", changes=(survey,), has_bar=False).run(evaluate).peak_allocated_bytes
    changed = DrySession("RTX 3060", changes=(change,), has_bar=False).run(evaluate).peak_allocated_bytes
    assert (survey.error(change) is None) == (made is None)
    saved = 0 if made else 15  # each is put to those before it, in new memory; cuBLASLt may have a workspace of its own
    assert (peak - changed) / batch == pytest.approx(saved, abs=0.5)


class _Tokens(_Labelled):
    def __getitem__(self, _):
        return {"x": torch.ones(8), "labels": torch.ones(8, dtype=torch.long)}


class _OfEachToken(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(1, 16)

    def forward(self, x, labels):
        logits = self.head(x.unsqueeze(-1))
        return {"loss": logits.mean(), "logits": logits}


def test_metrics_compare_what_shorter_inputs_give_with_as_many_labels(tmp_path):
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers.trainer")
    shapes = []

    def compute_metrics(prediction):
        shapes.append((prediction.predictions.shape[1:], prediction.label_ids.shape[1:]))
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    def evaluate():
        args = transformers.TrainingArguments(str(tmp_path), report_to=[], disable_tqdm=True)
        data = _Tokens()
        transformers.Trainer(_OfEachToken(), args, eval_dataset=data, compute_metrics=compute_metrics).evaluate()

    DrySession("RTX 3060", changes=(habits.ShorterInputs(1, 8, 2),), has_bar=False).run(evaluate)
    assert shapes == [((2, 16), (2,))]


def test_a_trainer_fetches_the_batches_of_a_step_together(tmp_path):
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers.trainer")

    def train(accumulation):
        def loop():
            options = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "max_steps": 2}
            options |= {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": 2}
            args = transformers.TrainingArguments(str(tmp_path), **options)
            transformers.Trainer(_Wide(), args, train_dataset=_Pictures()).train()

        return loop

    once, changed = (
        run(train(1), habits.AccumulatedGradients()),
        (habits.AccumulatedGradients(), habits.FetchedTogether(6)),
    )
    together, true = run(train(1), *changed), run(train(6))
    assert together.peak_allocated_bytes == pytest.approx(true.peak_allocated_bytes, rel=0.001)
    assert together.peak_allocated_bytes > 1.5 * once.peak_allocated_bytes


class _Pictures(_Labelled):
    def __len__(self):
        return 40

    def __getitem__(self, _):
        return {"x": torch.ones(3, 1024, 1024), "labels": torch.tensor(1)}


def of_array(eval_pred):
    logits, labels = eval_pred
    predictions = np.argmax(logits, axis=-1)
    return {"accuracy": float((predictions == labels).mean())}


def of_attribute(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def of_name_bound_again(eval_pred):
    predictions, labels = eval_pred
    predictions = np.argmax(predictions, 1)
    return {"accuracy": float((predictions == labels).mean())}


def of_shares(eval_pred):
    logits, labels = eval_pred
    shares = np.exp(logits)
    return {"accuracy": float((logits.argmax(-1) == labels).mean()), "mean": float(shares.mean())}


def of_all(eval_pred):
    logits, _ = eval_pred
    return {"largest": int(np.argmax(logits))}


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        (of_array, "predictions = logits"),
        (of_attribute, "return {'accuracy': float((prediction.predictions == prediction.label_ids).mean())}"),
        (of_name_bound_again, "predictions = predictions"),
        (of_shares, None),
        (of_all, None),
        (None, None),
    ],
)
def test_metrics_that_read_the_classes_alone(metrics, line):
    trainer = types.SimpleNamespace(compute_metrics=metrics, preprocess_logits_for_metrics=None)
    made = metrics_of_classes(trainer)
    assert (made is None) == (line is None) and (made is None or line in map(ast.unparse, made.body))
    trainer.preprocess_logits_for_metrics = print
    assert metrics_of_classes(trainer) is None


def test_a_trainer_keeps_the_classes_in_place_of_the_logits(tmp_path):
    """It was advised in words only, where the logits are too many for the RAM, too."""
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers.trainer")
    options = {"report_to": [], "disable_tqdm": True, "per_device_eval_batch_size": 2}

    def make():
        args = transformers.TrainingArguments(str(tmp_path), **options)
        return transformers.Trainer(_Wide(), args, eval_dataset=_Labelled(), compute_metrics=of_array)

    change = KeptClasses()
    survey = Survey([change])
    peaks = [
        DrySession("RTX 3060", changes=(one,), has_bar=False).run(lambda: make().evaluate()).peak_allocated_bytes
        for one in (survey, change)
    ]
    assert survey.error(change) is None
    assert (peaks[0] - peaks[1]) / (2 * 2**18 * 4) == pytest.approx(15, abs=0.5)
    trainer = make()
    code = CodeWriter(ast.parse("trainer.evaluate()"), {"trainer": trainer}, []).kept_classes()
    names = {"trainer": trainer, "np": np}
    exec(code, names)
    given = np.array([1, 2]), np.array([1, 0])
    assert names["trainer"].compute_metrics(given) == {"accuracy": 0.5}
    assert trainer.preprocess_logits_for_metrics(torch.eye(3), None).tolist() == [0, 1, 2]


@pytest.mark.parametrize("is_made_there", [False, True])
def test_a_trainer_is_given_shorter_sequences_by_code(is_made_there, tmp_path):
    """Of a Trainer only a comment told to tokenize anew. Pasted twice, the batches are as short."""
    pytest.importorskip("accelerate")
    rows = [{"input_ids": [1] * 96, "labels": [1] * 96} for _ in range(4)]
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=96)
    args = transformers.TrainingArguments(str(tmp_path), per_device_train_batch_size=2, report_to=[], max_steps=1)
    make = "trainer = Trainer(GPT2LMHeadModel(config), args, train_dataset=rows)"
    known = {"config": config, "args": args, "rows": rows}
    names = {"Trainer": transformers.Trainer, "GPT2LMHeadModel": transformers.GPT2LMHeadModel, **known}
    exec(make, names)
    tree = ast.parse(f"{make}\ntrainer.train()" if is_made_there else "trainer.train()")
    rehearsal = CellRehearsal(lambda code, seen: exec(compile(code, "<cell>", "exec"), seen), tree, names)
    rehearsal.begin((), 0)
    rehearsal.run(Variation(sizes={"seq": 48}))
    code, _ = RemedyCode(rehearsal, "trainer", None).of("shorter_sequences", {"name": "seq_len", "after": 48})
    assert code.startswith("# after the line that makes trainer:\n") == is_made_there
    for _unused in range(2):
        exec(code, names)
    assert {tuple(one.shape) for one in names["trainer"].data_collator(rows[:2]).values()} == {(2, 48)}
