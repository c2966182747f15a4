"""Sizes and compiled graphs that were found before, stored in the user's cache folder: the second time they are there
at once.

What decides sizes is in a file's name: the code and its arguments, libraries, switches of the process, the environment,
and rather too much than too little. So a file is never out of date; it only falls out of use.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkstemp
from types import FunctionType
from typing import Any, TypeVar

import platformdirs

from oom_magic.language import choose_language

MOST_BYTES = 200 * 2**20  # of all files; the longest unused go
_ENDING = ".sizes"
is_on = True  # False: nothing is read from the folder or written to it

_T = TypeVar("_T")
# Their code decides what is allocated.
_FOLLOWED = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "deepspeed")
_OTHERS = ("numpy", "safetensors", "tokenizers", "triton", "huggingface_hub")
_VARIABLES = ("PYTORCH_", "TORCH", "CUDA", "CUBLAS", "NVIDIA_", "HF_", "TRANSFORMERS_", "BNB_", "ACCELERATE_", "USE_")
_OF_LOADING = {"TORCHINDUCTOR_CACHE_DIR"}  # set by torch._inductor when it is loaded; nothing is allocated by it
HARMLESS = {"oom_magic", "tqdm", "typing_extensions", *_FOLLOWED, *_OTHERS, *sys.stdlib_module_names}
_CHANGED_BY_OTHERS = ("torch.nn", "torch.optim", "peft.tuners")


_DEFAULTS: dict[str, Any] = {
    "dtype": "torch.float32",
    "grad": True,
    "inference": False,
    "autocast": False,
    "autocast_dtype": "torch.float16",
    "anomaly": False,
    "deterministic": False,
    "matmul": "highest",
    "attention": [True, True, True, True],
    "cudnn": [True, False, False, True],
}


def folder() -> Path:
    """The folder of the files."""
    return Path(platformdirs.user_cache_dir("oom_magic", appauthor=False))


def stored(what: Callable[[], Any], make: Callable[[], _T]) -> _T:
    """What ``make`` returns, from the folder if it was made before for the same ``what()``, whose ``repr`` says all.

    A ``what`` of None is never stored, nor a result whose ``what`` or environment changed while it was made.
    """
    file = _file(what())
    found = None if file is None else _read(file)
    if found is None:
        found = (make(),)
        if file is not None and _file(what()) == file:
            _write(file, found)
    made: _T = found[0]
    return made


def recalled(what: Any) -> Any:
    """What ``stored`` has in the folder for the same ``what``; None for nothing."""
    file = _file(what)
    found = None if file is None else _read(file)
    return None if found is None else found[0]


def recall(key: str) -> Any:
    """What ``keep`` stored under this key, which says all that decides it but this package's code; None for nothing.

    The folder stays as it is.
    """
    found = _load(_kept_file(key)) if is_on else None
    return None if found is None else found[0]


def keep(key: str, made: Any) -> None:
    """Store something under its key; if it is there, it counts as used now."""
    if is_on and not _touch(_kept_file(key)):
        _write(_kept_file(key), (made,))


def _kept_file(key: str) -> Path:
    return folder() / (hashlib.sha256(repr((key, _OWN)).encode()).hexdigest() + _ENDING)


def _file(what: Any) -> Path | None:
    around = environment() if is_on and what is not None else None
    if around is None:
        return None
    return folder() / (hashlib.sha256(repr((what, around)).encode()).hexdigest() + _ENDING)


def _read(file: Path) -> tuple[Any] | None:
    found = _load(file)
    if found is not None:
        _touch(file)
    return found


def _load(file: Path) -> tuple[Any] | None:
    """The content of a file that belongs to the user; None if there is none, or it cannot be read."""
    try:
        if hasattr(os, "getuid") and file.stat().st_uid != os.getuid():
            return None
        found: tuple[Any] = pickle.loads(zlib.decompress(file.read_bytes()))
    except Exception:  # a damaged pickle raises anything
        return None
    return found


def _touch(file: Path) -> bool:
    """Note that a file is used now; returns whether it exists."""
    try:
        os.utime(file)
    except OSError:
        return False
    return True


def _write(file: Path, found: tuple[Any]) -> None:
    """Write a file as a whole or not at all; a full disk, or a value that cannot be pickled, is no error."""
    with suppress(OSError, RecursionError, pickle.PicklingError, TypeError, AttributeError):
        text = zlib.compress(pickle.dumps(found, protocol=5), 1)
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        number, name = mkstemp(dir=file.parent)
        try:
            with os.fdopen(number, "wb") as new:
                new.write(text)
            Path(name).replace(file)
        finally:
            Path(name).unlink(missing_ok=True)
        _delete_unused(file.parent)


def _delete_unused(where: Path) -> None:
    """Delete the files that were not used for longest, and old unfinished ones."""
    files = sorted(where.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True)
    total = 0
    for file in files:
        total += file.stat().st_size
        if total > MOST_BYTES:
            file.unlink(missing_ok=True)


def torch_version() -> str:
    """The version of PyTorch that is loaded or installed."""
    return _loaded_version("torch")


def environment() -> tuple[Any, ...] | None:
    """All of it, as plain values; None where others have changed what a name in a library means.

    Liger and Unsloth put functions of their own in place of a model's, and so may a cell: what they do is not known.
    The same whether PyTorch is loaded or not.
    """
    torch = sys.modules.get("torch")
    if torch is not None and (
        torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack() or any(_foreign())
    ):
        return None
    variables = sorted(
        item for item in os.environ.items() if item[0].startswith(_VARIABLES) and item[0] not in _OF_LOADING
    )
    libraries = [_library(name) for name in _FOLLOWED], [_version(name) for name in _OTHERS]
    switches = {} if torch is None else {name: at for name, at in _switches(torch).items() if at != _DEFAULTS[name]}
    # What could not be followed is said in words, and they are kept with the sizes.
    return sys.version, sys.platform, _OWN, libraries, switches, variables, choose_language()


def _switches(torch: Any) -> dict[str, Any]:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        "dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cuda"),
        "autocast_dtype": str(torch.get_autocast_dtype("cuda")),
        "anomaly": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "attention": [
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ],
        "cudnn": [cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32],
    }


def _foreign() -> Iterator[Any]:
    """Functions and classes of other packages in transformers' models and in PyTorch's modules."""
    for name, module in list(sys.modules.items()):
        if not name.startswith(_CHANGED_BY_OTHERS) and ".modeling_" not in name:
            continue
        for value in list(vars(module).values()):
            members = vars(value).values() if isinstance(value, type) and value.__module__ == name else ()
            yield from (one for one in (value, *members) if _is_foreign(one))


def _is_foreign(value: Any) -> bool:
    function = getattr(value, "__func__", value)
    if not isinstance(function, (type, FunctionType)):
        return False
    root = (function.__module__ or "torch").partition(".")[0]
    return root not in HARMLESS and not root.startswith("namedtuple_")


def _library(name: str) -> tuple[str, str]:
    """The version that is loaded, or would be, and what its files are; files that change later are not loaded."""
    loaded = sys.modules.get(name)
    known = _known_files.get(name)
    if known is None or known[0] != (loaded is not None):
        found = find_spec(name) if loaded is None else None
        folders = getattr(loaded, "__path__", None) or (found and found.submodule_search_locations) or ()
        known = _known_files[name] = loaded is not None, digest_of_code([Path(folder) for folder in folders])
    return _loaded_version(name), known[1]


def _loaded_version(name: str) -> str:
    loaded = sys.modules.get(name)
    return _version(name) if loaded is None else str(getattr(loaded, "__version__", ""))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def digest_of_code(folders: list[Path]) -> str:
    """A digest of the code in some folders, by size and time: a library installed from its repository changes while its
    version stays."""
    digest = hashlib.sha256()
    for folder in folders:
        for where, inside, names in os.walk(folder):
            inside.sort()
            for name in sorted(names):
                if name.endswith((".py", ".toml", ".so", ".pyd")):
                    file = Path(where, name)
                    about = file.stat()
                    digest.update(f"{file} {about.st_size} {about.st_mtime_ns}\n".encode())
    return digest.hexdigest()


_known_files: dict[str, tuple[bool, str]] = {}  # by library: whether it was loaded then, and its files
_OWN = digest_of_code([Path(__file__).parents[2]])  # now: files that come later are not what runs
