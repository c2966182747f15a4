"""What a message says by its kind, where it prints no numbers."""

from __future__ import annotations

import re

from oom_magic.explain.evidence.causes import Evidence
from oom_magic.explain.evidence.checks import is_pytorchs
from oom_magic.explain.evidence.clues.programs import Program
from oom_magic.explain.messages.failure import Failure

_OF_XLA_ON_TPU = re.compile(r"\bhbm\b|\bAborting compilation early\b", re.I)


def meaning_of(failure: Failure, program: Program | None) -> Evidence:
    """What a message without numbers means, by its format and the program that printed it."""
    if failure.words:
        return Evidence("meaning_told", {"words": failure.words})
    if failure.format == "jax" and _OF_XLA_ON_TPU.search(failure.text):
        return Evidence("meaning_xla_hbm")
    is_torch = is_pytorchs(failure) and (program is None or program.is_torch)
    is_elsewhere = failure.format == "cuda_error_oom" and not is_torch
    return Evidence(f"meaning_{failure.format}{'_elsewhere' if is_elsewhere else ''}")
