"""Sizes that were found before, kept in the user's cache folder: the second time they are there at once.

What decides sizes is in a file's name: the code that was run, its arguments, the card, the versions of all libraries
that take part and of this package. So a file is never out of date; it only falls out of use.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

import platformdirs

_LIBRARIES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "numpy", "safetensors", "triton")
_VARIABLES = ("PYTORCH_", "TORCH", "CUDA", "CUBLAS", "HF_", "TRANSFORMERS_", "BNB_", "ACCELERATE_", "USE_")
_MOST_BYTES = 200 * 2**20  # of all files; the longest unused go
_PACKAGE = Path(__file__).parents[2]
_ENDING = ".sizes"
is_on = True  # False: nothing is read from the folder or written to it

_T = TypeVar("_T")


def folder() -> Path:
    """Where the files are."""
    return Path(platformdirs.user_cache_dir("oom_magic", appauthor=False))


def kept(what: Any, make: Callable[[], _T]) -> _T:
    """What ``make`` returns, from the folder if it was made before for the same ``what``, whose ``repr`` says all."""
    if not is_on:
        return make()
    file = folder() / (hashlib.sha256(repr((what, _surroundings())).encode()).hexdigest() + _ENDING)
    found = _read(file)
    if found is None:
        found = (make(),)
        _write(file, found)
    made: _T = found[0]
    return made


def _read(file: Path) -> tuple[Any] | None:
    """What is in a file of the user's own; None if there is none, or none that can be read."""
    try:
        if hasattr(os, "getuid") and file.stat().st_uid != os.getuid():
            return None
        found: tuple[Any] = pickle.loads(zlib.decompress(file.read_bytes()))
        os.utime(file)
    except Exception:  # a damaged pickle raises anything
        return None
    return found


def _write(file: Path, found: tuple[Any]) -> None:
    """Write a file as a whole or not at all; a full disk or what cannot be pickled only costs time later."""
    with suppress(OSError, pickle.PicklingError, TypeError, AttributeError):
        text = zlib.compress(pickle.dumps(found, protocol=5), 1)
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=file.parent, delete=False) as new:
            try:
                new.write(text)
                new.flush()
                Path(new.name).replace(file)
            finally:
                Path(new.name).unlink(missing_ok=True)
        _forget_unused(file.parent)


def _forget_unused(where: Path) -> None:
    files = sorted(where.glob(f"*{_ENDING}"), key=lambda file: file.stat().st_mtime, reverse=True)
    total = 0
    for file in files:
        total += file.stat().st_size
        if total > _MOST_BYTES:
            file.unlink()


def _surroundings() -> tuple[Any, ...]:
    """What else decides sizes: versions, this package's files, settings of the process."""
    import torch

    backends = torch.backends.cuda
    switches = (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        backends.flash_sdp_enabled(),
        backends.mem_efficient_sdp_enabled(),
        backends.math_sdp_enabled(),
        backends.cudnn_sdp_enabled(),
        backends.matmul.allow_tf32,
        torch.backends.cudnn.enabled,
    )
    variables = sorted(item for item in os.environ.items() if item[0].startswith(_VARIABLES))
    return _versions(), switches, variables


@cache
def _versions() -> tuple[Any, ...]:
    files = sorted(path for kind in ("*.py", "*.toml") for path in _PACKAGE.rglob(kind))
    own = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    digest = hashlib.sha256(repr(own).encode()).hexdigest()
    return sys.version, sys.platform, digest, tuple((name, _version(name)) for name in _LIBRARIES)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
