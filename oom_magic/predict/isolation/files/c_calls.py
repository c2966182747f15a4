"""Redirects files that C libraries open themselves (HDF5, Arrow, PyTorch's own writers, ...) to the run's layer.

They call libc, which raises no audit event. So the calls are replaced (``linkage``): a path becomes that of the
private file behind it, calls that change names go to the layer, and the number of a file that was open before is
that of its private copy. The interpreter itself calls libc so, too: whoever holds ``os.write``, or a file object that
nobody found, is answered alike (``Gates``). All stand-ins have one shape, some words as arguments and one as result,
which is how libc's functions with integers and pointers are called.
"""

from __future__ import annotations

import _imp
import _thread
import contextlib
import ctypes
import errno
import functools
import mmap
import os
import platform
import struct
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from oom_magic.language import _
from oom_magic.predict.isolation.files.descriptors import Descriptors, is_waking
from oom_magic.predict.isolation.files.file_tree import FileTree
from oom_magic.predict.isolation.files.linkage import IS_KNOWN, Links, StandIns
from oom_magic.predict.isolation.patching import Patches, all_patched
from oom_magic.predict.isolation.reach import others_at_work
from oom_magic.predict.isolation.run_threads import Scope, threads_of_run

HAS_GATES = sys.platform == "linux" and platform.machine() == "x86_64"
_MOST_NUMBERS = 1 << 20  # as many as Linux lets a process have (fs.nr_open); higher ones are never marked

# What a call goes by: where a function is, where its stand-in is, and which arguments are numbers of files.
Ways = Mapping[str, tuple[int, int, Collection[int]]]


class Gates:
    """A table of marked numbers, and the addresses of ways into functions, which look in it.

    A call with a marked number goes to Python, any other straight on. ``write`` is also called by handlers of signals,
    by threads that must not wait for Python's lock, and between a fork and the program that it starts, none of which
    may run Python. So what looks the number up are a few instructions of the machine, and only numbers of what was open
    before a dry run, which none of these use, are marked.

    They are never freed, as a thread may be executing one. Raises OSError where the system allows no such memory.
    """

    def __init__(self, ways: Ways) -> None:
        self._table = mmap.mmap(-1, _MOST_NUMBERS)
        self._marked: list[int] = []
        self.addresses: dict[str, int] = {}
        table, made = _address_of(self._table), b""
        for name, (function, stand_in, places) in ways.items():
            self.addresses[name] = len(made)
            made += _instructions(table, function, stand_in, places)
        self._code = mmap.mmap(-1, len(made))
        self._code.write(made)
        begin = _address_of(self._code)
        self.addresses = {name: begin + at for name, at in self.addresses.items()}
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_size_t(begin), ctypes.c_size_t(len(made)), mmap.PROT_READ | mmap.PROT_EXEC):
            raise OSError(ctypes.get_errno(), "mprotect")

    def mark(self, numbers: Collection[int]) -> None:
        """From now on these go to the stand-ins, and no others."""
        before, self._marked = self._marked, [number for number in numbers if number < _MOST_NUMBERS]
        for number in {*before, *self._marked}:
            self._table[number] = number in self._marked


def _address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _instructions(table: int, function: int, stand_in: int, places: Collection[int]) -> bytes:
    """System V ABI: the first arguments are in rdi, rsi and rdx; r10 and r11 are free."""
    made = b"\x49\xbb" + struct.pack("<Q", table)  # mov r11, table
    jump = b"\x49\xbb%s\x41\xff\xe3"  # mov r11, ...; jmp r11
    for place in places:
        made += b"\x41\x89" + (b"\xfa", b"\xf2", b"\xd2")[place]  # mov r10d, argument
        made += b"\x41\x81\xfa" + struct.pack("<I", _MOST_NUMBERS)  # cmp r10d, _MOST_NUMBERS
        made += b"\x73\x14"  # jae: past this argument
        made += b"\x43\x80\x3c\x13\x00\x74\x0d"  # cmp byte [r11 + r10], 0; je: past this argument
        made += jump % struct.pack("<Q", stand_in)
    return made + jump % struct.pack("<Q", function)


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
    numbers: tuple[int, ...] = ()  # which arguments are numbers of files


_FORMS = {
    "dlopen": _Form("dlopen"),
    "dlsym": _Form("dlsym"),
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


def _of_numbers(names: str, *numbers: int) -> dict[str, _Form]:
    form = _Form("number", (), None, numbers)
    return {f"{name}{bits}": form for name in names.split() for bits in ("", "64")}


_NUMBER_FORMS = {
    **_of_numbers("write writev pwrite pwritev pwritev2 pwritev64v2 read readv pread preadv preadv2 preadv64v2", 0),
    **_of_numbers("lseek ftruncate fallocate posix_fallocate fstat fchmod fchown futimens fsetxattr", 0),
    **_of_numbers("flock lockf fcntl", 0),
    **_of_numbers("sendfile", 0, 1),
    **_of_numbers("copy_file_range splice", 0, 2),
    **_of_numbers("__fxstat", 1),
}
_PYTHONS_FORMS = {  # not replaced for libraries: they close only their own files
    **_of_numbers("dup send sendto sendmsg recv recvfrom recvmsg shutdown setsockopt listen bind connect", 0),
    **_of_numbers("dup2 dup3", 0, 1),
    "close": _Form("close", (), None, (0,)),
}
_ENDING_FORMS = {  # looked up by ctypes only: C code goes on as if they did not return
    **dict.fromkeys(("exit", "quick_exit", "abort", "_Exit", "_exit"), _Form("end", ())),
    "raise": _Form("end", (), 0),
    **dict.fromkeys(("kill", "killpg", "pthread_kill"), _Form("end", (), 1)),
    "tgkill": _Form("end", (), 2),
}


@contextmanager
def c_calls_answered(
    functions: Sequence[Any],
    tree: FileTree,
    scope: Scope,
    numbers: Descriptors,
    calls: Mapping[str, Callable[..., Any]],
    assume: Callable[[str], None],
) -> Iterator[None]:
    """While a dry run lasts. ``calls`` are the layer's own functions by the name of ``os``'s, ``functions`` those of C
    that somebody looked up before."""
    if not IS_KNOWN:
        assume(_("files: on this system, files that C libraries open themselves are not intercepted"))
        yield
        return
    served = _served()
    if served.of_files is None and any(numbers.written()):
        assume(_("files opened before: on this system, only the usual calls that write to them are intercepted"))
    links = Links(served.stand_ins)
    answers = _Answers(tree, scope, numbers, calls, links.exchange, assume)

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
        served.mark(*numbers.written())
        links.exchange()
        with _functions_exchanged(functions), all_patched(table):
            yield
    finally:
        links.give_back()
        served.mark([], [])
        _current.clear()


@contextmanager
def _functions_exchanged(known: Sequence[Any]) -> Iterator[None]:
    """Functions of libc that somebody looked up before by ctypes: their objects begin with the function's address."""
    own = set(map(id, _callbacks))
    words = [ctypes.c_size_t.from_address(ctypes.addressof(one)) for one in known if id(one) not in own]
    before = [(word, word.value) for word in words if word.value in _instead]
    try:
        for word, address in before:
            word.value = _instead[address]
        yield
    finally:
        for word, address in before:
            word.value = address


_current: list[_Answers] = []  # of the run that lasts


@dataclass(frozen=True, slots=True)
class _Served:
    """What is called in place of libc, and what numbers are marked in: for libraries, and for Python."""

    stand_ins: StandIns
    of_files: Gates | None = None
    of_python: Gates | None = None

    def mark(self, files: list[int], others: list[int]) -> None:
        """From now on calls with these numbers are answered."""
        if self.of_files is not None and self.of_python is not None:
            self.of_files.mark(files)
            self.of_python.mark([*files, *others])


@functools.cache
def _served() -> _Served:
    """The stand-ins, which are never freed: a thread may still be executing one."""
    _addresses(_ENDING_FORMS)
    names = {name: stand_in for name, (_real, stand_in, _places) in _addresses(_FORMS).items()}
    if HAS_GATES:
        with contextlib.suppress(OSError):  # no memory for instructions: not all systems give it
            of_files, of_python = Gates(_addresses(_NUMBER_FORMS)), Gates(_addresses(_NUMBER_FORMS | _PYTHONS_FORMS))
            stand_ins = StandIns(names | of_files.addresses, names | of_python.addresses, of_python.addresses)
            return _Served(stand_ins, of_files, of_python)
    return _Served(StandIns(names, names, {}))


_callbacks: list[Any] = []
_instead: dict[int, int] = {}  # stand-ins by what they stand for


def _addresses(forms: Mapping[str, _Form]) -> dict[str, tuple[int, int, tuple[int, ...]]]:
    """Of each function that this libc has: where it is, where its stand-in is, and which arguments are numbers."""
    libc = ctypes.CDLL(None, use_errno=True)
    made = {}
    for name, form in forms.items():
        if hasattr(libc, name):
            real, stand_in = libc[name], _stand_in(libc[name], form)
            addresses = [ctypes.cast(one, ctypes.c_void_p).value or 0 for one in (real, stand_in)]
            made[name] = addresses[0], addresses[1], form.numbers
            _instead[addresses[0]] = addresses[1]
    return made


def _stand_in(real: Any, form: _Form) -> Any:
    real.restype, real.argtypes = _SHAPE[0], _SHAPE[1:]
    failed = 0 if form.action in ("fopen", "dlopen", "dlsym") else -1

    def answer(*words: int) -> int:
        try:
            answers = _current[-1:]  # one look: the run may end meanwhile
            if not answers or not answers[0].applies(sys._getframe().f_back):
                return int(real(*words))
            return answers[0].answer(form, real, words)
        except OSError as error:
            ctypes.set_errno(error.errno or errno.EIO)
        except KeyboardInterrupt:  # C would lose the error: it is raised again once C has returned
            ctypes.set_errno(errno.EINTR)
            _thread.interrupt_main()
        except BaseException:
            ctypes.set_errno(errno.EIO)
        return failed

    _callbacks.extend((real, ctypes.CFUNCTYPE(*_SHAPE, use_errno=True)(answer)))
    return _callbacks[-1]


class _Answers:
    """What the functions do in one run."""

    def __init__(
        self,
        tree: FileTree,
        scope: Scope,
        numbers: Descriptors,
        calls: Mapping[str, Callable[..., Any]],
        has_loaded: Callable[[], None],
        assume: Callable[[str], None],
    ) -> None:
        self._tree = tree
        self._scope = scope
        self._numbers = numbers
        self._calls = calls
        self._has_loaded = has_loaded
        self._assume = assume

    def applies(self, caller: FrameType | None) -> bool:
        """Whether the call is the run's. Threads of C serve it, unless other threads of the user work, too."""
        if caller is None and not others_at_work(threads_of_run()):
            self._scope.join()
        return self._scope.applies() and not is_waking(caller)

    def answer(self, form: _Form, real: Real, words: Words) -> int:
        """The result, with the private file in place of the user's. Raises OSError."""
        if form.action == "dlopen":
            handle = int(real(*words))
            self._has_loaded()
            return handle
        if form.action == "dlsym":
            return _instead.get(int(real(*words)) or 0, int(real(*words)))
        if form.action == "end":
            if form.other is not None and not words[form.other]:  # no signal: whether there is such a process
                return int(real(*words))
            self._assume(_("ctypes: `{name}` was not called, because it can end a process", name=real.__name__))
            raise PermissionError(errno.EPERM, "a dry run ends no process")
        if form.action == "close":
            self._calls["close"](_number(words[0]))
            return 0
        if form.numbers:
            own = [self._numbers.own(_number(word)) if at in form.numbers else word for at, word in enumerate(words)]
            return int(real(*own))
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
        folder = _HERE if folder_at is None else _number(words[folder_at])
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


def _number(word: int) -> int:
    return ctypes.c_int32(word & 0xFFFFFFFF).value
