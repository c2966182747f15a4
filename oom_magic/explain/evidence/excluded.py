"""Causes that a text rules out: by its message, by what it shows no sign of, by what its author saw."""

from __future__ import annotations

import re

from oom_magic.explain.evidence.causes import HOST_CAUSES, Cause
from oom_magic.explain.evidence.checks import RESERVING
from oom_magic.explain.evidence.clues.traceback import Clues
from oom_magic.explain.evidence.rules.numbers import (
    MIN_OTHERS_SHARE,
    OF_WHAT_IT_HOLDS,
    are_light,
    holds_nothing,
    others_bytes,
)
from oom_magic.explain.messages.failure import Failure

_OF_DEVICES = re.compile(
    r"\b(?:v?gpus?|cuda|v-?ram|hip|rocm|mps|npu|device|graphics|video (?:card|memory))\b|显存|显卡", re.I
)
_OF_MACHINES = re.compile(r"\b(?:systems?|machines?|computers?|laptops?|pc|ram|ddr\d?)\b|系统|电脑", re.I)
_ALONE_FROM_SHARE = 0.1  # of a device: a request for less is not too big by itself
_OWN_FILL = 0.85  # of a device that PyTorch itself fills: others could hold little
_NO_BYTES = float("inf")
_LARGE_DEVICE_BYTES = 16 * 1024**3  # where a message does not print the device's
_OF_WEIGHTS = {"loads", "loaded", "merges", "saves", "generates_tokens", "smaller_model_works"}
_WITHOUT_LARGE_MODELS = ("cupy", "rapids", "numba", "thrust", "boosting", "matlab", "tensorflow")
_OF_LIMITS = {"names_share", "full_at_any_size", "smaller_share_helps"}
OF_HOST = {"speaks_of_ram", "host_fills", "computes_on_host", "killed"}


def excluded_causes(failure: Failure | None, clues: Clues) -> frozenset[Cause]:
    """Causes that a text rules out: by its message's device or numbers, or as its author saw what they would fill."""
    told = clues.run.told
    words = "" if failure is None else failure.words
    of_device = is_of_device(failure, told)
    if words and (_OF_MACHINES.search(words) or _OF_DEVICES.search(words)):
        of_device = _OF_DEVICES.search(words) is not None
    elif not OF_HOST & told and (failure is None or words):
        of_device = True  # nothing speaks of RAM
    excluded = seen_not_to_be(failure, told, of_device=of_device)
    if are_light(failure, clues) or (clues.program is not None and clues.program.program.key in _WITHOUT_LARGE_MODELS):
        excluded |= {Cause.WEIGHTS_TOO_BIG}
    return excluded | (unshown(failure, clues) & {Cause.MEMORY_FRACTION_LIMIT, Cause.SYSMEM_FALLBACK})


def seen_not_to_be(failure: Failure | None, told: frozenset[str], *, of_device: bool) -> frozenset[Cause]:
    """Causes that a message's device or numbers rule out, or what the author saw: RAM, or a device, that is free."""
    excluded = HOST_CAUSES if of_device or "ram_is_free" in told else frozenset()
    others = frozenset({Cause.OTHER_PROCESS}) if {"device_idle", "alone"} & told else frozenset()
    return excluded | others | contradicted(failure)


def is_of_device(failure: Failure | None, told: frozenset[str]) -> bool:
    """Whether the message is a device's, and its author does not see RAM fill."""
    return failure is not None and failure.is_of_device and "host_fills" not in told


def unshown(failure: Failure | None, clues: Clues) -> frozenset[Cause]:
    """Causes that need something the text shows no sign of: a limit that was set, a model, a large tensor, Windows."""
    takes_share = clues.program is not None and clues.program.program.key in RESERVING
    takes_share = takes_share or (failure is not None and failure.backend == "mps")
    told = clues.run.told
    has_weights = (
        clues.weights_bytes or clues.phase in ("loading", "saving") or not clues.has_prose or _OF_WEIGHTS & told
    )
    has_weights = has_weights or (clues.program is not None and not clues.program.program.trains)
    has_size = failure is not None and (failure.requested_bytes is not None or failure.shape is not None)
    shown = {
        Cause.MEMORY_FRACTION_LIMIT: takes_share or _OF_LIMITS & clues.run.told,
        Cause.WEIGHTS_TOO_BIG: has_weights and not are_light(failure, clues),
        Cause.REQUEST_ALONE_TOO_BIG: has_size or clues.array_bytes or clues.inputs or not clues.has_prose,
        Cause.SYSMEM_FALLBACK: {"Windows", "WSL"} & set(clues.systems),
    }
    return frozenset(cause for cause, is_shown in shown.items() if not is_shown)


def contradicted(failure: Failure | None) -> frozenset[Cause]:
    """Causes that a message's own numbers rule out, whatever the causes of similar reports were."""
    if failure is None or failure.requested_bytes is None:
        return frozenset()
    found = set()
    total = failure.total_bytes
    if failure.requested_bytes < (_LARGE_DEVICE_BYTES if total is None else total * _ALONE_FROM_SHARE):
        found.add(Cause.REQUEST_ALONE_TOO_BIG)
    others = others_bytes(failure)
    has_few = others is not None and others < (failure.total_bytes or 0) * MIN_OTHERS_SHARE
    if has_few or (failure.pytorch_bytes or 0) >= (failure.total_bytes or _NO_BYTES) * _OWN_FILL:
        found.add(Cause.OTHER_PROCESS)
    has_little_free = failure.backend == "jax" and (failure.free_bytes or 0) < failure.requested_bytes  # none is told
    if has_little_free or (failure.stuck_bytes is not None and 2 * failure.stuck_bytes < failure.requested_bytes):
        found.add(Cause.FRAGMENTATION)
    return frozenset(found | OF_WHAT_IT_HOLDS if holds_nothing(failure) else found)
