"""Which language is spoken, and every key that the code asks for."""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from oom_magic import language
from oom_magic.errors import REFUSALS
from oom_magic.explain.evidence.budget import budget_of
from oom_magic.explain.evidence.causes import Cause, Confidence
from oom_magic.explain.explainer import explain
from oom_magic.explain.live.holders import in_words
from oom_magic.explain.messages.failure import Failure
from oom_magic.explain.messages.others import KINDS, LINE_KINDS
from oom_magic.explain.remedies.from_text.choice import AGAINST
from oom_magic.explain.remedies.rehearsal import NotEvaluatedError, SetupRehearsal, Variation
from oom_magic.explain.remedies.remedy import Remedy
from oom_magic.explain.sentences import catalogue
from oom_magic.explain.sentences.catalogue import SENTENCES, render_evidence, translate
from oom_magic.language import choose_language
from oom_magic.predict.setups.setup import TrainingSetup, wrong_combinations
from oom_magic.predict.what_if.change import Change
from oom_magic.views.blocks import Details, Sentence, Table
from tests.support.oom_templates import VERSIONS, render, shuffled_numbers

PACKAGE = Path(catalogue.__file__).parents[1]


def test_no_sentence_twice():
    counts = Counter(SENTENCES.values())
    assert [sentence for sentence, count in counts.items() if count > 1] == []


def test_every_key_that_the_code_can_ask_for_exists():
    keys = {f"cause_{cause.value}" for cause in Cause} | {f"confidence_{word.value}" for word in Confidence}
    keys |= {f"meaning_{kind.format}" for kind in (*KINDS, *LINE_KINDS)}
    keys |= set(re.findall(r'"(budget_\w+|tensor_\w+)"', (PACKAGE / "evidence" / "budget.py").read_text()))
    keys |= {
        *literal_keys(PACKAGE / "evidence" / "causes.py"),
        *literal_keys(PACKAGE / "evidence" / "rules" / "numbers.py"),
    }
    assert keys - set(SENTENCES) == set()


PREDICT = PACKAGE.parent / "predict"
INAPPLICABLE = ("InapplicableError", "ByHandError", "MissingError")


def test_every_reason_for_a_missing_price_exists():
    """Those of the explaining room are keys of evidence, those of the changes are raised with a key."""
    ours = {key for path in PACKAGE.rglob("*.py") for key in literal_keys(path) if key.startswith("reason_")}
    theirs = set()
    for path in (PREDICT / "what_if").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in INAPPLICABLE:
                theirs.add(f"reason_{node.args[0].value}")
    assert len(ours) > 5 and len(theirs) > 10
    assert ours | theirs == {key for key in SENTENCES if key.startswith("reason_")}


def test_every_remedy_can_be_said():
    makes = (node for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    keys = {
        node.args[0].value
        for node in makes
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") in ("_made", "Remedy", "_freeing")
        and isinstance(node.args[0], ast.Constant)
    }
    keys |= {key for against in AGAINST.values() for key in against}
    assert len(keys) > 25
    assert {f"remedy_{key}" for key in keys} <= set(SENTENCES)


def test_every_refusal_of_a_setting_and_of_the_magic_exists():
    files = [file for room in ("predict", "notebook") for file in (PACKAGE.parent / room).rglob("*.py")]
    files.append(PACKAGE.parent / "inputs.py")
    refused = {key for file in files for key in literal_keys(file, "InvalidSettingError")}
    magic = {key for file in files for key in literal_keys(file, "_usage_error")}
    assert len(refused) > 10 and len(magic) > 2
    assert refused | wrong_combinations(TrainingSetup("gpt2")).keys() | {"did_you_mean"} == set(REFUSALS)
    assert magic == {key for key in SENTENCES if key.startswith("usage_")}


def literal_keys(path, name="Evidence"):
    """The first arguments of calls of ``name`` that are plain strings."""
    for node in ast.walk(ast.parse(path.read_text())):
        is_meant = isinstance(node, ast.Call) and getattr(node.func, "id", "") == name
        if is_meant and isinstance(node.args[0], ast.Constant):
            yield node.args[0].value


@pytest.mark.parametrize(
    ("lang", "environment", "chosen"),
    [
        ("zh", {}, "zh"),
        ("zh-CN", {"OOM_MAGIC_LANG": "en"}, "zh"),
        (None, {"OOM_MAGIC_LANG": "zh"}, "zh"),
        (None, {"OOM_MAGIC_LANG": "en", "LANG": "zh_CN.UTF-8"}, "en"),
        (None, {"LANG": "zh_CN.UTF-8"}, "zh"),
        (None, {"LC_ALL": "en_US.UTF-8", "LANG": "zh_CN.UTF-8"}, "en"),
        (None, {"LANG": "C.UTF-8"}, "en"),
        (None, {}, "en"),
    ],
)
def test_choice_of_language(lang, environment, chosen, monkeypatch):
    for name in ("OOM_MAGIC_LANG", "LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(language.locale, "getlocale", lambda: (None, None))
    assert choose_language(lang) == chosen


@pytest.mark.parametrize(
    "what",
    [
        "module GPT2Model", "optimizer AdamW, its state", "gradients", "autograd graph", "shown result",
        "functools cache", "OutOfMemoryError in forward, Cell In[1]:10",
    ],
)  # fmt: skip
def test_what_holds_memory_is_said_in_both_languages(what):
    words = in_words(what)
    assert render_evidence(words, "en") == what
    assert re.search("[\u4e00-\u9fff]", render_evidence(words, "zh"))


def test_unknown_language_is_refused():
    with pytest.raises(ValueError, match="'fr'"):
        choose_language("fr")


def test_sizes_are_written_as_sizes():
    values = {"stuck_bytes": 3 * 2**30, "requested_bytes": 500 * 2**20}
    assert "3.00 GiB" in translate("stuck_above_request", "en", **values)
    assert "500.00 MiB" in translate("stuck_above_request", "zh", **values)


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("seed", range(60))
def test_everything_a_diagnosis_says_can_be_said(seed, lang):
    message, _ = render(VERSIONS[seed % len(VERSIONS)], shuffled_numbers(seed))
    frames = [
        "loss.backward()",
        "optimizer.step()",
        "attn = q @ k",
        "x = model(x)",
        "loss = F.cross_entropy(a, b)",
    ]
    diagnosis = explain(f"{frames[seed % 5]}\n{message}")
    said = [translate(item.key, lang, **item.values) for item in (*diagnosis.evidence, *diagnosis.facts)]
    said += [
        translate(f"cause_{diagnosis.cause.value}", lang),
        translate(f"confidence_{diagnosis.confidence.value}", lang),
    ]
    said += [translate(f"tensor_name_{candidate.name}", lang) for candidate in diagnosis.tensors]
    said += [translate(diagnosis.tensor_note, lang)] if diagnosis.tensor_note else []
    said += [translate(row.key, lang) for row in diagnosis.budget.rows] if diagnosis.budget else []
    assert all(said)


def english_in(blocks):
    """What a description says in English: four words in a row, but for code and the message itself."""
    for block in blocks:
        if isinstance(block, Details) and block.title != translate("heading_message", "zh"):
            yield from english_in(block.blocks)
            yield from re.findall(r"(?:[a-z]{2,}[ ,]+){3,}[a-z]+", block.title)
        texts = [block.text] if isinstance(block, Sentence) else []
        texts += [str(cell) for row in block.rows for cell in row] if isinstance(block, Table) else []
        for text in texts:
            yield from re.findall(r"(?:[a-z]{2,}[ ,]+){3,}[a-z]+", text)


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_a_chinese_page_has_no_english_sentence(lang):
    message, _ = render("T6", shuffled_numbers(1))
    setup = TrainingSetup("roberta-base", precision="fp32", gradient_accumulation_steps=2, gpu="RTX 3060")
    diagnosis = explain(message, setup, lang=lang, fast=True)
    refused = []
    for changes in ({"method": "qlora"}, {"loss": "chunked"}, {"method": "lora", "rank": 4096}, {"seq_len": 4096}):
        with pytest.raises(NotEvaluatedError) as error:
            SetupRehearsal(setup).run(Variation(((Change(), changes),)))
        refused.append(Remedy("qlora", 1, "same", {"rank": 16}, note=error.value.reason))
    page = replace(diagnosis, remedies=tuple(refused)).describe()
    assert bool(list(english_in(page.blocks))) is (lang == "en")
    assert "roberta-base" in str(diagnosis)


def test_budget_keys_exist():
    failure = Failure("x", "cuda", total_bytes=2**34, free_bytes=2**30, allocated_bytes=2**33)
    assert all(row.key in SENTENCES for row in budget_of(failure).rows)
