"""Whose code a text shows: the author's, or only settings of a program that others wrote."""

from __future__ import annotations

import re
from collections.abc import Iterator

# The keys, beside those of ``author_words``.
SHOWN = frozenset({"shows_code", "pasted_code", "shows_settings"})
_LIBRARIES = (
    r"torch\w*|transformers|trl|peft|accelerate|deepspeed|lightning|pytorch_lightning|diffusers|datasets|vllm|sglang"
    r"|mm\w+|bitsandbytes|unsloth\w*|keras|tensorflow|jax\w*|flax|paddle|numpy|triton|fairscale|apex"
)
# A frame with the line that it quotes, of a library or of an installed program.
_OF_OTHERS = re.compile(
    r'File "?(?:[^"\n]{0,300}(?:site-packages|dist-packages|/lib/python3|[/\\]bin[/\\])|<frozen'
    rf'|(?:[^"\n]{{0,200}}[/\\])?(?:{_LIBRARIES})[/\\])[^\n]{{0,300}}(?:\n[^\n]{{0,300}})?'
    r"|(?m:^)[^\n]{0,20}/[^\n]{0,200}(?:site-packages|dist-packages)[^\n]{0,300}"
    r"(?:\n(?:[ \t]{0,8}(?:-{2,6}> ?)?\d{1,6}\b[^\n]{0,300}|[ \t]{0,8}(?=\n)))*"
)
_CODE = re.compile(
    r"\bloss\w*\.backward\(|\.zero_grad\(|\boptim\w*\.step\(|\bno_grad\(|\bautocast\(|\bnn\.Module\b"
    r"|(?m:^)[^\w\n]{0,16}(?:\d{1,4}[ \t])?[ \t]{0,24}for [\w, ()]{1,40} in [^\n]{1,80}:[ \t]{0,4}$"
    r"|(?m:^)[^\w\n]{0,16}(?:import|from) (?:torch|tensorflow|keras|jax|paddle|transformers|trl|diffusers)\b"
    r"|\b(?:\w{1,30}, ?)?\w{1,30} ?= ?(?:self\.)?(?:model|net|unet|generator|discriminator|encoder|decoder)\(\w"
    r"|\bCell In ?\[|<ipython-input|\bipykernel_|<stdin>|\b\w*Trainer\(|\bTrainingArguments\("
    r"|(?m:^)[ \t]{0,16}(?:class|def) \w{1,60}\([^\n]{0,120}\):|\bDataLoader\("
    r"|\bjax\.(?:jit|grad|vmap)\b",
    re.A,
)
# With the line that it quotes: an installed program shows none.
_OWN_FRAME = re.compile(
    r'File "[^"\n]{1,300}\.py"?, line \d{1,7}, in [\w<>.]{1,80}\n(?![ \t]{0,8}File )[^\n]{0,40}[(=]'
)
_FRAME = re.compile(r'File "[^"\n]{1,300}"?, line \d{1,7}[^\n]{0,120}(?:\n[^\n]{0,300})?')
_OPTION = r"--?[a-z][\w.-]{1,60}(?:[ =](?!-)[^\s\\]{1,120})?"
_SETTINGS = re.compile(
    rf"(?:{_OPTION}[\s\\]{{1,12}}){{3}}"
    r"|(?m:(?:^[ \t]{0,4}[a-z][a-z0-9_.-]{2,50} ?[:=] ?[^\s({:=][^\n]{0,80}\n){4})"
)


def shown_in(text: str) -> Iterator[str]:
    """The keys of ``SHOWN`` for a cleaned text; of frames only those count that are not a library's."""
    own = _OF_OTHERS.sub("", text)
    if _CODE.search(_FRAME.sub("", own)):
        yield "pasted_code"
    if _CODE.search(own) or _OWN_FRAME.search(own):
        yield "shows_code"
    elif _SETTINGS.search(own):
        yield "shows_settings"
