"""The words for what the record names: categories, phases of a step, states of a block."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from oom_magic.language import Sentences, _, spoken
from oom_magic.views.blocks import Sentence, Tone

_WORDS: Sentences = {
    "parameter": "parameter",
    "gradient": "gradient",
    "optimizer state": "optimizer state",
    "activation": "activation",
    "input": "input",
    "temporary": "temporary",
    "workspace": "workspace",
    "before": "before",
    "other": "other",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "allocated": "allocated",
    "free": "free",
    "peak allocated": "peak allocated",
    "peak reserved": "peak reserved",
}

_TONES: Mapping[str, Tone] = {"safe": "good", "tight": "warning", "danger": "bad"}
_EXACTLY: Sentences = {
    "safe": "Safe: {percent:.1f} % of the card is in use at the peak.",
    "tight": "Tight: {percent:.1f} % of the card is in use at the peak.",
    "danger": "Danger: {percent:.1f} % of the card is in use at the peak.",
}
_AT_MOST: Sentences = {
    "safe": "Safe: at most {percent:.1f} % of the card is in use at the peak.",
    "tight": "Tight: at most {percent:.1f} % of the card is in use at the peak.",
    "danger": "Danger: at most {percent:.1f} % of the card is in use at the peak.",
}
_AT_LEAST: Sentences = {
    "safe": "Safe: at least {percent:.1f} % of the card is in use at the peak.",
    "tight": "Tight: at least {percent:.1f} % of the card is in use at the peak.",
    "danger": "Danger: at least {percent:.1f} % of the card is in use at the peak.",
}
_DEGREES = {"exactly": _EXACTLY, "at most": _AT_MOST, "at least": _AT_LEAST}


def verdict_sentence(verdict: str, used_fraction: float, degree: str = "exactly") -> Sentence:
    """How full the card is at the peak, and what that means; ``degree``: "exactly", "at most" or "at least"."""
    return Sentence(spoken(_DEGREES[degree][verdict], percent=100 * used_fraction), _TONES[verdict])


def upper_bound_sentence(is_failure: bool) -> Sentence:
    """What the verdict on figures means that are upper bounds."""
    if is_failure:
        return Sentence(_("That holds for eager code; compiled code needs less and may fit."), "warning")
    return Sentence(_("Compiled code was followed as eager code: all figures are upper bounds."), "warning")


def word(name: str) -> str:
    """A category, phase or state as it is shown; a name that is none of them as it is."""
    sentence = _WORDS.get(name.replace("_", " "))
    return name if sentence is None else spoken(sentence)


def current_shell() -> Any:
    """IPython's shell where the text is shown in one; None in a terminal."""
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
