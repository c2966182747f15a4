"""Weighs the words and signs of the reports in this folder: ``python record_likeness.py`` writes the package's table.

A multinomial logistic regression with a quadratic penalty, whose optimum is the same wherever it is computed. Of a
report for which several causes count as right the first is learned, the one that its thread says. Reports that are not
about memory say nothing of its causes.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import torch

from oom_magic.explain.evidence.clues.traceback import find_clues
from oom_magic.explain.evidence.judging import main_failure
from oom_magic.explain.evidence.measured import likeness
from oom_magic.explain.evidence.measured.precedents import features_of
from oom_magic.explain.messages.reading import read

_FILES = ("reports.jsonl", "later_reports.jsonl", "blind_reports.jsonl")
TABLE = Path(likeness.__file__).with_name("likeness.json")
_NO_CAUSES = ("not_oom", "unknown")
_FEWEST = 5  # a feature of fewer reports says more of them than of others
_LOSS = 3.0  # how much the reports count beside the penalty
_MOST_STEPS = 2000
_ABOUT = (
    "How much more likely a feature makes each cause: weights of a logistic regression on the established causes of the"
    " public reports of tests/data, in hundredths, in the order of the causes. A feature is a sign (the kind of message,"
    " whose memory it is about, the phase, the program, what the author tells: keys of author_words) or a word. 'base'"
    " is of any report. Written by tests/data/record_likeness.py."
)


def counted() -> str:
    """The table as JSON, a feature a line."""
    found: list[tuple[str, frozenset[str]]] = []
    for name in _FILES:
        for line in (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines():
            report = json.loads(line)
            if report["causes"] and report["causes"][0] not in _NO_CAUSES:
                found.append((report["causes"][0], _features(report["text"])))
    causes = [cause for cause, _ in Counter(cause for cause, _ in found).most_common()]
    counts = Counter(feature for _, features in found for feature in features)
    kept = sorted(feature for feature, count in counts.items() if count >= _FEWEST)
    weights, base = _learned(found, causes, kept)
    lines = ",\n".join(f"{json.dumps(one, ensure_ascii=False)}: {row}" for one, row in zip(kept, weights, strict=True))
    head = f'"about": {json.dumps(_ABOUT)},\n"causes": {json.dumps(causes)},\n"base": {base}'
    return f'{{{head},\n"features": {{\n{lines}\n}}}}\n'


def _features(text: str) -> frozenset[str]:
    failure = main_failure(read(text))
    start, kind = (None, None) if failure is None else (failure.start, failure.format)
    return features_of(text, failure, find_clues(text, start, kind))


def _learned(
    found: list[tuple[str, frozenset[str]]], causes: list[str], kept: list[str]
) -> tuple[list[list[int]], list[int]]:
    """The weights of each feature and those of any report, in hundredths."""
    known = dict.fromkeys(kept)
    at = {feature: number for number, feature in enumerate(kept)}
    seen = torch.zeros(len(found), len(kept), dtype=torch.float64)
    for row, (_, features) in enumerate(found):
        for feature, size in likeness.sizes_of(feature for feature in features if feature in known):
            seen[row, at[feature]] = size
    right = torch.tensor([causes.index(cause) for cause, _ in found])
    weights = torch.zeros(len(kept), len(causes), dtype=torch.float64, requires_grad=True)
    base = torch.zeros(len(causes), dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS(
        [weights, base], max_iter=_MOST_STEPS, tolerance_grad=1e-8, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def loss() -> torch.Tensor:
        search.zero_grad()
        missed = torch.nn.functional.cross_entropy(seen @ weights + base, right, reduction="sum")
        total = _LOSS * missed + weights.square().sum() / 2
        total.backward()  # type: ignore[no-untyped-call]
        return total

    search.step(loss)  # type: ignore[no-untyped-call]
    learned, start = weights.detach(), base.detach() - base.detach().mean()
    return (100 * learned).round().int().tolist(), (100 * start).round().int().tolist()


if __name__ == "__main__":
    TABLE.write_text(counted(), encoding="utf-8")
