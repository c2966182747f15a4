"""Which code is the user's, which is a library's or this package's; the names and lines of files and cells."""

from __future__ import annotations

import ast
import linecache
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from types import CodeType
from typing import Any

# Frames between the user's code and an operator: wrappers of calls under a dispatch mode, and what runs a cell.
_AROUND_CALLS = re.compile(
    r"/torch/(?:_dynamo|_compile|_ops|overrides|_prims_common)|/torch/utils/(?:_python_dispatch|_device|_contextlib)"
    r"|/IPython/"
)
# Packages and the standard library of any Python: a snapshot's frames may come from another machine.
_INSTALLED = re.compile(r"/(?:site|dist)-packages/|/lib/python3\.\d+/")
# What Inductor writes, into any folder (torch/_inductor/codecache.py, get_path): named by its hash, beside others of
# its first two letters.
_INDUCTOR = re.compile(r"/([a-z2-7]{2})/c\1[a-z2-7]{40,60}\.py$")
_IPYKERNEL_CELL = re.compile(r"/ipykernel_\d+/")
# The user's code that has no file: cells of IPython in a terminal, cells under %%time, Python's own prompt.
_TYPED_CODE = ("<ipython-input-", "<timed ", "<stdin>", "<training code")


@lru_cache(maxsize=4096)
def is_users_file(file: str) -> bool:
    """Whether a code object's file is the user's: a cell, a script, a package that is not installed.

    ipykernel names cells ``<temporary folder>/ipykernel_<pid>/<hash>.py``, IPython in a terminal
    ``<ipython-input-...>``. Python's files, installed packages, this package and what a compiler writes are not the
    user's.
    """
    if file.startswith("<"):
        return file.startswith(_TYPED_CODE)
    path, folders = file.replace("\\", "/"), _library_folders(tuple(sys.path))
    return not (_INSTALLED.search(path) or _INDUCTOR.search(path) or _normal(file).startswith(folders))


def is_cell(file: str) -> bool:
    """Whether a code object's file is a notebook cell, or code without a file (see ``is_users_file``)."""
    return file.startswith("<") or _IPYKERNEL_CELL.search(file.replace("\\", "/")) is not None


def compiled_cell(tree: Any, file: str, mode: str = "exec") -> CodeType:
    """Code of a cell's syntax tree. As IPython's, it may await outside functions: a call then gives a coroutine."""
    found: CodeType = compile(tree, file, mode, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    return found


@lru_cache(maxsize=4096)
def is_own_file(file: str) -> bool:
    """Whether a file belongs to this package."""
    return _normal(file).startswith(_own_folders())


def is_machinery(file: str) -> bool:
    """Whether a frame of this file only runs the user's code: this package, PyTorch's call wrappers, IPython."""
    return is_own_file(file) or _AROUND_CALLS.search(file.replace("\\", "/")) is not None


def cell_name(file: str) -> str:
    """``"Cell In[3]"``, IPython's own name, for the file name of the third cell; other names as they are."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    name_of: Any = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)
    named = name_of(file)
    return " ".join(named) if named else file


def source_text(file: str, line: int, module_globals: dict[str, Any] | None = None) -> str:
    """The text of a line, stripped; empty where it cannot be read."""
    return linecache.getline(file, line, module_globals).strip()


Lines = tuple[tuple[str, int], ...]  # of running code, each with its file, the outermost first


def running_lines() -> Lines:
    """The lines of the user's code that run now."""
    frame, found = sys._getframe(1), list[tuple[str, int]]()
    while frame is not None:
        if is_users_file(frame.f_code.co_filename):
            found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(reversed(found))


@lru_cache(maxsize=4)
def _library_folders(path: tuple[str, ...]) -> tuple[str, ...]:
    named = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    named += [*site.getsitepackages(), site.getusersitepackages()]
    named += [entry for entry in path if Path(entry).name in ("site-packages", "dist-packages")]
    named += _installed_beside(entry for entry in path if entry not in named)
    torch = find_spec("torch")
    if torch is not None and torch.origin is not None:
        named.append(str(Path(torch.origin).parent))
    return (*_own_folders(), *_spellings(named))


def _installed_beside(folders: Iterable[str]) -> Iterator[str]:
    """Packages that ``pip install --target`` put into a folder, such as one on a drive, beside code of the user's."""
    for folder in folders:
        if folder and any(Path(folder).glob("*.dist-info")):
            files = (file for one in distributions(path=[folder]) for file in one.files or ())
            yield from {
                str(Path(folder, file.parts[0])) for file in files if len(file.parts) > 1 and file.parts[0] != ".."
            }


@lru_cache(maxsize=1)
def _own_folders() -> tuple[str, ...]:
    return tuple(_spellings([str(Path(__file__).parent)]))


def _spellings(folders: list[str]) -> Iterator[str]:
    """Each folder as named and with symbolic links resolved, with a trailing separator so that it is a safe prefix."""
    for folder in folders:
        for path in {folder, os.path.realpath(folder)}:
            yield _normal(path).rstrip("/") + "/"


def _normal(path: str) -> str:
    return os.path.normcase(path).replace("\\", "/")
