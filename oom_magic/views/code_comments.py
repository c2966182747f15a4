"""Comments in code to paste, in the language spoken; the code itself stays as it was rehearsed."""

from __future__ import annotations

import re
from functools import cache

from oom_magic.language import Language, Sentences, render

_COMMENTS: Sentences = {
    "attention": 'or from_pretrained(..., attn_implementation="sdpa")',
    "default": "set_to_none=True is the default",
    "outputs": "instead of outputs = {model}(**batch), which keeps the logits",
    "outside": "outside the block",
    "scaled": "outside the block; scale it with torch.amp.GradScaler",
    "forward": "in the model's forward",
    "fused": "or fused=True",
    "before_optimizer": "before the optimizer is made",
    "older_dtype": "torch_dtype= before transformers 4.56",
    "cast": "cast, then move",
    "not_moved": 'and no .to("cuda") behind it',
    "run_with": "run with: {command}",
    "fourth": "with a batch size a fourth of before",
    "instead": "instead of {code}",
    "linux": "Linux, before Python starts",
    "notebook": "in a notebook, before torch uses the GPU:",
    "powershell": "PowerShell (effective under Linux only): {command}",
    "loader": "or DataLoader(..., num_workers=0)",
    "kill": "then close the notebooks and programs it lists: kill <PID>",
    "novram": "then --novram",
    "preallocate": "or XLA_PYTHON_CLIENT_MEM_FRACTION=0.9",
    "each_turn": "at the start of each turn",
    "one_graph": "without retain_graph=True; sum losses of one graph first",
    "mac": "the Mac may then swap or stall",
    "own_function": "your own function",
    "random": "Random batches stand for your data: put your own DataLoader here.",
    "shorter": "the first sequence is shorter",
    "detached": "lets go of the graph before the next forward",
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
    sentences = [sentence for sentence in _COMMENTS.values() if isinstance(sentence, str)]
    return tuple((re.compile(_FIELD.sub(r"(?P<\1>.+)", re.escape(one))), one) for one in sentences)
