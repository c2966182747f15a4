"""Versions of the libraries that decide how a model is loaded and trained."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from oom_magic.language import Sentences, _, spoken
from oom_magic.measure.system.findings import Finding, Seen

_NAMES = ("transformers", "peft", "accelerate", "bitsandbytes")
_SINCE = {"transformers": (5, 0), "bitsandbytes": (0, 46, 1)}
_WHY: Sentences = {
    "transformers": "from_pretrained loads float32 weights whatever the checkpoint has: twice the memory of 16 bits.",
    "bitsandbytes": "transformers refuses to make 4-bit layers with it, so QLoRA does not work.",
}
_FIX: Sentences = {
    "transformers": "Pass dtype=torch.bfloat16 (torch_dtype before 4.56), or update.",
    "bitsandbytes": "pip install -U bitsandbytes",
}


def probe_packages() -> Seen:
    """What is installed, and versions known to take more memory or to refuse."""
    seen = Seen()
    for name in _NAMES:
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        seen.rows.append((name, installed))
        if name in _SINCE and _numbers(installed) < _SINCE[name]:
            values = {"name": name, "installed": installed, "since": _text(_SINCE[name])}
            what = _("{name} {installed} is older than {since}.", **values)
            seen.findings.append(Finding(what, spoken(_WHY[name]), spoken(_FIX[name])))
    return seen


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:3]))


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
