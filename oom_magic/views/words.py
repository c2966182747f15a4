"""Words for categories, phases and states, and comments in code to paste, in the chosen language."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from oom_magic.language import Language, Sentences, _, choose_language, render, translated
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

_TONES: Mapping[str, Tone] = {"safe": "good", "tight": "warning", "danger": "bad", "out of memory": "bad"}
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
_UNTIL_COLLECTED: Sentences = {
    "safe": (
        "Safe: up to {most:.1f} % of the card is in use at the peak before Python's garbage collector runs,"
        " {percent:.1f} % if it runs at once."
    ),
    "tight": (
        "Tight: up to {most:.1f} % of the card is in use at the peak before Python's garbage collector runs,"
        " {percent:.1f} % if it runs at once."
    ),
    "danger": (
        "Danger: up to {most:.1f} % of the card is in use at the peak before Python's garbage collector runs,"
        " {percent:.1f} % if it runs at once."
    ),
    "out of memory": (
        "May not fit: up to {most:.1f} % of the card is needed at the peak before Python's garbage collector runs,"
        " {percent:.1f} % if it runs at once."
    ),
}
_DEGREES = {"exactly": _EXACTLY, "at most": _AT_MOST, "at least": _AT_LEAST}


def verdict_sentence(verdict: str, used_fraction: float, degree: str = "exactly") -> Sentence:
    """How full the card is at the peak, and what that means; ``degree``: "exactly", "at most" or "at least"."""
    return Sentence(translated(_DEGREES[degree][verdict], percent=100 * used_fraction), _TONES[verdict])


def part_sentence(used_fraction: float) -> Sentence:
    """How full the card is at the peak of what was followed of a run."""
    text = _(
        "At least {percent:.1f} % of the card is in use at the peak; what was not followed can take more.",
        percent=100 * used_fraction,
    )
    return Sentence(text, "warning")


def late_verdict_sentence(verdict: str, most_fraction: float, used_fraction: float) -> Sentence:
    """``verdict`` on the most that is needed until Python's collector has run, and what is needed if it runs at
    once."""
    text = translated(_UNTIL_COLLECTED[verdict], most=100 * most_fraction, percent=100 * used_fraction)
    return Sentence(text, _TONES[verdict])


def upper_bound_sentence(is_failure: bool) -> Sentence:
    """What the verdict on figures means that are upper bounds."""
    if is_failure:
        return Sentence(_("This holds for eager code; compiled code needs less and may fit."), "warning")
    return Sentence(_("Compiled code was treated as eager code: all figures are upper bounds."), "warning")


def at_most(figure: str, is_upper_bound: bool) -> str:
    """The name of a figure, marked where that is an upper bound."""
    return _("{figure}, at most", figure=figure) if is_upper_bound else figure


def listed(parts: Iterable[str]) -> str:
    """Names one after another, as the language separates them."""
    return ("，" if choose_language() == "zh" else ", ").join(parts)


def word(name: str) -> str:
    """A category, phase or state as it is shown; any other name as it is."""
    sentence = _WORDS.get(name.replace("_", " "))
    return name if sentence is None else translated(sentence)


def current_shell() -> Any:
    """IPython's shell where the text is shown in one; None in a terminal."""
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()


COMMENTS: Sentences = {
    "attention": 'or from_pretrained(..., attn_implementation="sdpa")',
    "default": "set_to_none=True is the default",
    "outputs": "instead of outputs = {model}(**batch), which keeps the logits",
    "outside": "outside the block",
    "scaled": "outside the block; scale it with torch.amp.GradScaler",
    "forward": "in the model's forward",
    "made_in": "in {name}, after the line that makes {model}:",
    "made": "after the line that makes {model}:",
    "run_once": "run this, then the failed cell again:",
    "in_cell": "in the cell that failed:",
    "function": "in {name}:",
    "accumulates": "step the optimizer every {number} batches and divide each loss by that number",
    "fused": "or fused=True",
    "before_optimizer": "before the optimizer is created",
    "first_step": "before the first step",
    "once": "once, before the first step",
    "older_dtype": "torch_dtype= before transformers 4.56",
    "cast": "cast, then move",
    "not_moved": 'and no .to("cuda") after it',
    "run_with": "run with: {command}",
    "fourth": "with a quarter of the batch size",
    "instead": "instead of {code}",
    "linux": "Linux, before Python starts",
    "notebook": "in a notebook, before torch uses the GPU:",
    "powershell": "PowerShell (takes effect on Linux only):",
    "loader": "or DataLoader(..., num_workers=0)",
    "kill": "then close the notebooks and programs it lists: kill <PID>",
    "novram": "then --novram",
    "less": "LESS: a smaller number than now",
    "less_than_default": "LESS: a smaller number than now ({default} unless set)",
    "more": "MORE: a larger number than now",
    "more_than_default": "MORE: a larger number than now ({default} unless set)",
    "now_and_less": "now {value}; LESS: a smaller number than now",
    "now": "now {value}",
    "below": "below the {size} MiB requested",
    "below_request": "LESS: less than the request",
    "sizes": "HALF, TWICE: half and twice the current values",
    "each_turn": "at the start of each iteration",
    "one_graph": "without retain_graph=True; first sum the losses that share a graph",
    "mac": "the Mac may then swap or freeze",
    "own_function": "your own function",
    "random": "Random batches stand in for your data: use your own DataLoader here.",
    "shorter": "the first sequence is shorter",
    "detached": "frees the graph before the next forward pass",
    "sequences": "sequences of {number} tokens: {call}",
}
_COMMENT = re.compile(r"(?<=# )[^#\n]+$", re.MULTILINE)
_FIELD = re.compile(r"\\\{(\w+)\\\}")


def code_in(lang: Language, code: str) -> str:
    """The code with its comments in a language; one that is not known stays as it is."""
    return _COMMENT.sub(lambda found: _comment(found[0], lang), code)


def _comment(text: str, lang: Language) -> str:
    for pattern, sentence in _patterns():
        if found := pattern.fullmatch(text):
            return render(sentence, lang, found.groupdict())
    return text


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], str], ...]:
    sentences = [sentence for sentence in COMMENTS.values() if isinstance(sentence, str)]
    sentences.sort(key=lambda sentence: "{" in sentence)  # "in {name}:" is also how others begin and end
    return tuple((re.compile(_FIELD.sub(r"(?P<\1>.+)", re.escape(one))), one) for one in sentences)
