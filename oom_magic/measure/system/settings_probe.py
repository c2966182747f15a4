"""Settings that decide how much memory a run can have, how they contradict each other, and outdated packages."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from oom_magic.language import Sentences, _, spoken
from oom_magic.measure.device.host import notebook_platform
from oom_magic.measure.system.host_probe import Finding, Seen
from oom_magic.memory.allocator.settings import AllocatorSettings

_NEW, _OLD = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
SETTINGS = (
    _NEW, _OLD, "PYTORCH_NO_CUDA_MEMORY_CACHING", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "CUDA_MODULE_LOADING",
)  # fmt: skip
_KNOWS_NEW = (2, 9)  # the version of torch from which on it reads PYTORCH_ALLOC_CONF


def probe_settings(environment: Mapping[str, str] = os.environ) -> Seen:
    """The variables that are set, and what is wrong with them."""
    found = {name: environment[name] for name in SETTINGS if name in environment}
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    return Seen(list(found.items()), [*_about_allocator(found, version), *_about_others(found)])


def _about_allocator(found: Mapping[str, str], version: tuple[int, ...]) -> Iterator[Finding]:
    why = _("The allocator's options decide how much memory is lost between tensors.")
    if _NEW in found and _OLD in found:
        yield Finding(_("Both {new} and {old} are set.", new=_NEW, old=_OLD), why, _("Keep one."))
    if _NEW in found and version < _KNOWS_NEW:
        yield Finding(
            _("torch {version} does not read {name}.", version=torch.__version__, name=_NEW),
            why,
            _("Set {name} instead.", name=_OLD),
        )
    for name in (_NEW, _OLD):
        if name not in found:
            continue
        try:
            settings = AllocatorSettings.parse(found[name])
        except ValueError as error:
            yield Finding(
                f"{name}={found[name]}: {error}", _("torch may refuse to start with it."), _("Correct it."), "bad"
            )
            continue
        if settings.expandable_segments and notebook_platform() == "Windows":
            yield Finding(
                _("{name} asks for expandable_segments.", name=name), _("Windows has none."), _("Leave it out.")
            )
        if settings.expandable_segments and settings.max_split_size_bytes is not None:
            both = _(
                "Both are against fragmentation; the limit keeps large blocks from being used for smaller tensors."
            )
            yield Finding(
                _("{name} sets expandable_segments and max_split_size_mb.", name=name),
                both,
                _("Keep expandable_segments."),
            )
        if not _was_there_at_start(name):
            late = _("It counts only if that was before torch first used the GPU.")
            yield Finding(
                _("{name} was set after this kernel had started.", name=name), late, _("Set it in the first cell.")
            )


def _about_others(found: Mapping[str, str]) -> Iterator[Finding]:
    if found.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "0") not in ("", "0"):
        why = _("Every tensor is asked of the driver: slow, and torch's reserved memory means nothing.")
        yield Finding(_("{name} is set.", name="PYTORCH_NO_CUDA_MEMORY_CACHING"), why, _("Unset it."))
    if found.get("CUDA_LAUNCH_BLOCKING") == "1":
        why = _("Training is slow; memory does not change.")
        yield Finding(_("{name} is set.", name="CUDA_LAUNCH_BLOCKING=1"), why, _("Unset it when you do not debug."))


def _was_there_at_start(name: str) -> bool:
    """Whether this process began with the variable; yes where that is not known."""
    with suppress(OSError):
        variables = Path("/proc/self/environ").read_bytes().split(b"\0")
        return any(one.startswith(name.encode() + b"=") for one in variables)
    return True


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
