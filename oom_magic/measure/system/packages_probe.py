"""Versions of the libraries that decide how a model is loaded and trained."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from oom_magic.measure.system.findings import Finding, Seen

_NAMES = ("transformers", "peft", "accelerate", "bitsandbytes")
_MATTERS = {
    ("transformers", (5, 0)): (
        "from_pretrained loads float32 weights whatever the checkpoint has: twice the memory of 16 bits.",
        "Pass dtype=torch.bfloat16 (torch_dtype before 4.56), or update.",
    ),
    ("bitsandbytes", (0, 46, 1)): (
        "transformers refuses to make 4-bit layers with it, so QLoRA does not work.",
        "pip install -U bitsandbytes",
    ),
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
        for (package, since), (why, fix) in _MATTERS.items():
            if package == name and _numbers(installed) < since:
                seen.findings.append(Finding(f"{name} {installed} is older than {_text(since)}.", why, fix))
    return seen


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:3]))


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
