"""Settings that a dry run leaves changed, for the session's next run: PyTorch's, the environment, the folder.

Random numbers begin anew in each run: it draws the same however often it is repeated.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from oom_magic.predict.isolation.process.process_state import restore_environment

_ATTENTION = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")
_DEVICE = "default device"
_CUDNN = ("enabled", "benchmark", "deterministic")


def _folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # somebody has removed it
        return None


def _of(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    return functools.partial(getattr, owner, name), functools.partial(setattr, owner, name)


# What reads a setting, and what sets it.
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    _DEVICE: (lambda: torch.get_default_device(), torch.set_default_device),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "precision of products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    **{f"cuDNN {name}": _of(torch.backends.cudnn, name) for name in _CUDNN},
    **{
        name: (getattr(torch.backends.cuda, f"{name}_enabled"), getattr(torch.backends.cuda, f"enable_{name}"))
        for name in _ATTENTION
    },
    "environment": (lambda: dict(os.environ), restore_environment),
    "folder": (lambda: _folder(), lambda folder: os.chdir(folder)),
}


class SettingsKept:
    """What is ``left`` by earlier runs: by setting, the user's own value then, and the run's."""

    def __init__(self, left: dict[str, tuple[Any, Any]] | None = None) -> None:
        self.begun = dict(left or {})
        self._left = self.begun
        self._users: dict[str, Any] = {}
        self._found: dict[str, Any] = {}  # by the run's code

    def begin(self) -> None:
        """Inside a run, at its beginning: set what the last one left, unless the user has set it since."""
        self._users = _read()
        self.begun = {name: pair for name, pair in self._left.items() if self._users.get(name) == pair[0]}
        for name, (_before, now) in self.begun.items():
            _set(name, now)

    def note_decided(self) -> None:
        """Before its code: what was set since then is not its doing, and is decided in each run; but not the device
        that code of an earlier run has set."""
        if _DEVICE in self.begun:
            _set(_DEVICE, self.begun[_DEVICE][1])
        self._found = _read()

    def end(self) -> None:
        """When its code has ended: note what it, or an earlier one's, has set."""
        now = _read().items()
        is_set = {name: value != self._found[name] or name in self.begun for name, value in now}
        self._left = {name: (self._users[name], value) for name, value in now if is_set[name] and value is not None}


def _set(name: str, value: Any) -> None:
    with contextlib.suppress(OSError, RuntimeError):  # a folder that the run made is gone with it
        _SETTINGS[name][1](value)


def _read() -> dict[str, Any]:
    return {name: read() for name, (read, _write) in _SETTINGS.items()}
