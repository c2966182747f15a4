"""Files that C libraries open themselves (HDF5, Arrow, PyTorch's own writers, ...): the run's layer answers them, too.

They call libc, of which no audit event tells. So what they call is exchanged (``linkage``): a path becomes that of the
private file behind it, and what changes names is answered by the layer. All stand-ins have one shape, some words as
arguments and one as the result, which is how libc's functions with integers and pointers are called.
"""

from __future__ import annotations

import _imp
import _thread
import ctypes
import errno
import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from oom_magic.language import _
from oom_magic.predict.isolation.files.file_tree import FileTree
from oom_magic.predict.isolation.files.linkage import IS_KNOWN, Links
from oom_magic.predict.isolation.patching import Patches, all_patched
from oom_magic.predict.isolation.reach import others_at_work
from oom_magic.predict.isolation.run_threads import threads_of_run
from oom_magic.predict.isolation.scope import Scope

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL
_HERE = -100  # AT_FDCWD of fcntl.h
_REMOVES_FOLDER = 0x200  # AT_REMOVEDIR
_SHAPE = (ctypes.c_ssize_t, *[ctypes.c_size_t] * 6)

Words = tuple[int, ...]
Real = Callable[..., int]
At = tuple[int, int | None]  # which argument is the path, and which the folder's descriptor that it begins at


@dataclass(frozen=True, slots=True)
class _Form:
    """What a function does, with which of its arguments: paths, and what else is given on."""

    action: str
    paths: tuple[At, ...] = ((0, None),)
    other: int | None = None


_FORMS = {
    "dlopen": _Form("dlopen"),
    "open": _Form("open", other=1),
    "openat": _Form("open", ((1, 0),), 2),
    "creat": _Form("open"),
    "fopen": _Form("fopen", other=1),
    "freopen": _Form("fopen", other=1),
    "mkstemp": _Form("mkstemp"),
    "mkostemp": _Form("mkstemp"),
    **dict.fromkeys(("stat", "lstat", "statfs", "statvfs", "access"), _Form("look")),
    **dict.fromkeys(("fstatat", "statx", "faccessat"), _Form("look", ((1, 0),))),
    **dict.fromkeys(("__xstat", "__lxstat"), _Form("look", ((1, None),))),
    "__fxstatat": _Form("look", ((2, 1),)),
    "mkdir": _Form("mkdir", other=1),
    "mkdirat": _Form("mkdir", ((1, 0),), 2),
    "rmdir": _Form("rmdir"),
    "unlink": _Form("unlink"),
    "remove": _Form("unlink"),
    "unlinkat": _Form("unlinkat", ((1, 0),), 2),
    "rename": _Form("rename", ((0, None), (1, None))),
    **dict.fromkeys(("renameat", "renameat2"), _Form("rename", ((1, 0), (3, 2)))),
    "link": _Form("link", ((0, None), (1, None))),
    "symlink": _Form("symlink", ((0, None), (1, None))),
    "truncate": _Form("truncate", other=1),
    "chmod": _Form("chmod", other=1),
}
_LARGE = ("open", "openat", "creat", "fopen", "freopen", "mkstemp", "mkostemp", "truncate")
_LARGE_STATES = ("stat", "lstat", "fstatat", "statfs", "statvfs", "__xstat", "__lxstat", "__fxstatat")
_FORMS |= {f"{name}64": _FORMS[name] for name in (*_LARGE, *_LARGE_STATES)}


@contextmanager
def c_calls_answered(
    tree: FileTree, scope: Scope, calls: Mapping[str, Callable[..., Any]], assume: Callable[[str], None]
) -> Iterator[None]:
    """While a dry run lasts. ``calls`` are the layer's own functions by the name of ``os``'s."""
    if not IS_KNOWN:
        assume(_("files: on this system what C libraries open by themselves is not held back"))
        yield
        return
    links = Links(_addresses())
    answers = _Answers(tree, scope, calls, links.exchange)

    def then(load: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load)
        def loaded(*args: Any) -> Any:
            made = load(*args)
            links.exchange()
            return made

        return loaded

    table: Patches = [
        (_imp, {"create_dynamic": then(_imp.create_dynamic)}),
        (ctypes, {"_dlopen": then(ctypes._dlopen)}),  # type: ignore[attr-defined]
    ]
    _current.append(answers)
    try:
        links.exchange()
        with all_patched(table):
            yield
    finally:
        links.give_back()
        _current.clear()


_current: list[_Answers] = []  # of the run that lasts


@functools.cache
def _addresses() -> dict[str, int]:
    """The stand-ins' addresses by name. They are there for good: a thread may be inside of one for a while yet."""
    found = {name: ctypes.cast(_stand_in(name, form), ctypes.c_void_p).value for name, form in _FORMS.items()}
    return {name: address for name, address in found.items() if address}


_kept: list[Any] = []


def _stand_in(name: str, form: _Form) -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, name):
        return None
    real = libc[name]
    real.restype, real.argtypes = _SHAPE[0], _SHAPE[1:]
    failed = 0 if form.action in ("fopen", "dlopen") else -1

    def answer(*words: int) -> int:
        try:
            if not _current or not _current[-1].applies():
                return int(real(*words))
            return _current[-1].answer(form, real, words)
        except OSError as error:
            ctypes.set_errno(error.errno or errno.EIO)
        except KeyboardInterrupt:  # C would lose it: it comes again when C is done
            ctypes.set_errno(errno.EINTR)
            _thread.interrupt_main()
        except BaseException:
            ctypes.set_errno(errno.EIO)
        return failed

    _kept.append(ctypes.CFUNCTYPE(*_SHAPE, use_errno=True)(answer))
    return _kept[-1]


class _Answers:
    """What the functions do in one run."""

    def __init__(
        self, tree: FileTree, scope: Scope, calls: Mapping[str, Callable[..., Any]], has_loaded: Callable[[], None]
    ) -> None:
        self._tree = tree
        self._scope = scope
        self._calls = calls
        self._has_loaded = has_loaded

    def applies(self) -> bool:
        """Whether the call is the run's. Threads of C serve it, unless other threads of the user work, too."""
        is_known = threading.get_ident() in threading._active  # type: ignore[attr-defined]
        if not is_known and not others_at_work(threads_of_run()):
            self._scope.join()
        return self._scope.applies()

    def answer(self, form: _Form, real: Real, words: Words) -> int:
        """The result, with the private file in place of the user's. Raises OSError."""
        if form.action == "dlopen":
            handle = int(real(*words))
            self._has_loaded()
            return handle
        paths = [self._path(words, at) for at in form.paths]
        other = 0 if form.other is None else words[form.other]
        if form.action == "look":
            return self._with_path(real, words, form, paths[0], False)
        if form.action == "open":
            flags = _WRITING if form.other is None else other
            return self._with_path(real, words, form, paths[0], bool(flags & _WRITING))
        if form.action == "fopen":
            is_written = bool(set(ctypes.string_at(other)) & set(b"wa+"))
            return self._with_path(real, words, form, paths[0], is_written)
        if form.action == "mkstemp":
            return self._make_temporary(words[0], paths[0])
        if form.action == "unlinkat":
            self._calls["rmdir" if other & _REMOVES_FOLDER else "unlink"](paths[0])
        else:
            self._calls[form.action](*paths, *([] if form.other is None else [other & 0xFFFFFFFF]))
        return 0

    def _path(self, words: Words, at: At) -> str:
        position, folder_at = at
        path = os.fsdecode(ctypes.string_at(words[position])) if words[position] else ""
        folder = _HERE if folder_at is None else ctypes.c_int32(words[folder_at] & 0xFFFFFFFF).value
        if not path or os.path.isabs(path) or folder == _HERE:
            return path
        with self._scope.outside():
            opened = self._tree.folders_open.get(folder)
            above = os.readlink(f"/proc/self/fd/{folder}") if opened is None else self._tree.path(opened)
        return os.path.join(above, path)

    def _with_path(self, real: Real, words: Words, form: _Form, path: str, is_written: bool) -> int:
        tree, at = self._tree, form.paths[0][0]
        if not path or tree.is_private(path) or (tree.is_untouched and not is_written):
            return int(real(*words))
        with self._scope.outside():
            there = tree.promise(path) if is_written else tree.real_path(path)
        buffer = ctypes.create_string_buffer(os.fsencode(there))
        return int(real(*words[:at], ctypes.addressof(buffer), *words[at + 1 :]))

    def _make_temporary(self, template: int, path: str) -> int:
        """``mkstemp``: the six letters at the end become a name that is free."""
        path = path[:-6] + os.urandom(3).hex()
        ctypes.memmove(template, os.fsencode(path), len(os.fsencode(path)))
        return int(self._calls["os_open"](path, _NEW, 0o600))
