"""Blocks effects of a dry run outside the process (programs, connections, signals); the report lists them.

Calls with known effects get a replacement here. An audit hook refuses all others with an error that names the call; a
hook cannot be removed, so between dry runs it makes one check and returns.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures.process import ProcessPoolExecutor
from contextlib import contextmanager
from ipaddress import ip_address
from multiprocessing.pool import Pool, ThreadPool
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import torch

from oom_magic.language import _
from oom_magic.predict.isolation.files.file_tree import FileTree
from oom_magic.predict.isolation.files.open_files import can_write
from oom_magic.predict.isolation.patching import Patches
from oom_magic.predict.isolation.run_threads import Scope
from oom_magic.user_code import is_users_file

_NOBODY = (1 << 22) + 1  # above the largest number that Linux gives a process, proc(5)
_BEFORE_PIPES = 9  # arguments of Popen._execute_child between the command and the ends of its pipes
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_OF_SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/")
_ON_FILES = frozenset(
    (
        "os.remove os.rename os.mkdir os.rmdir os.link os.symlink os.truncate os.chmod os.chown os.utime "
        "os.setxattr os.removexattr os.chflags os.lockf"
    ).split()
)
_ON_PROCESSES = frozenset(
    (
        "os.system os.exec os.posix_spawn os.spawn os.fork os.forkpty os.startfile os.kill os.killpg "
        "pty.spawn subprocess.Popen signal.pthread_kill socket.sethostname syslog.syslog"
    ).split()
)
_ON_ADDRESSES = frozenset(["socket.connect", "socket.sendto", "socket.sendmsg"])
_ON_NAMES = frozenset(["socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"])
_JUDGED = (
    _ON_FILES
    | _ON_PROCESSES
    | _ON_ADDRESSES
    | _ON_NAMES
    | {
        "open",
        "http.client.send",
        "mmap.__new__",
        "sqlite3.connect",
    }
)


_UNDOABLE = {  # by their modules
    "os": (
        "nice setpriority sched_setscheduler sched_setparam setsid setpgid setpgrp setuid setgid seteuid setegid "
        "setreuid setregid setresuid setresgid setgroups initgroups chroot setns unshare tcsetpgrp"
    ),
    "time": "clock_settime clock_settime_ns",
    "faulthandler": "dump_traceback_later register",
    "torch": "set_num_interop_threads",
}
_POOLS: tuple[tuple[Any, str, tuple[str, ...]], ...] = (  # what each use begins with, and what ends one
    (Pool, "_check_running", ("close", "terminate")),
    (ProcessPoolExecutor, "submit", ("shutdown",)),
)
_ENDING: tuple[Callable[..., Any], ...] = (  # what can end the process
    os._exit,
    os.abort,
    signal.raise_signal,
    *(one for one in (getattr(signal, "pidfd_send_signal", None),) if one),
)
_NAMES_BACKEND = torch.utils.backend_registration.rename_privateuse1_backend  # once for a process
_FOR_LATER = tuple(
    function for function in (atexit.register, sys.addaudithook, getattr(os, "register_at_fork", None)) if function
)


class RefusedCallError(PermissionError):
    """A call with an effect outside the dry run, which was not made."""


class UnreachableError(ConnectionRefusedError):
    """A connection to another machine, which was not made: to programs this machine looks offline."""


_net: Callable[[str, tuple[Any, ...]], None] | None = None
_read: set[str] | None = None  # what is opened, where somebody asks
_is_hooked = False


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event in _JUDGED and _net is not None:  # most events are reads of a frame's code, our own among them
        _net(event, args)


@contextmanager
def reads_noted() -> Iterator[set[str]]:
    """The files that dry runs inside open and that are neither a library's nor the system's."""
    global _read
    before, _read = _read, set()
    try:
        yield _read
    finally:
        _read = before


class Boundary:
    """The audit hook and the answers, for the threads of one run."""

    def __init__(self, tree: FileTree, scope: Scope, assume: Callable[[str], None]) -> None:
        self._tree = tree
        self._scope = scope
        self._assume = assume

    @contextmanager
    def closed(self) -> Iterator[None]:
        """While the dry run lasts."""
        global _net, _is_hooked
        if not _is_hooked:
            sys.addaudithook(_hook)
            _is_hooked = True
        _net = self._judge
        try:
            yield
        finally:
            _net = None

    def patches(self) -> Patches:
        """Methods that start programs and processes, with what is called in their place."""
        table: list[tuple[Any, dict[str, Any]]] = [
            (subprocess.Popen, {"_execute_child": self._execute_child()}),
        ]
        multiprocessing = sys.modules.get("multiprocessing.process")
        if multiprocessing is not None:
            process = multiprocessing.BaseProcess
            table.append((process, {"start": self._start(process.start)}))
        table.append((SharedMemory, {"close": self._closing(SharedMemory.close)}))
        for pool, using, ending in _POOLS:
            used = self._pool_refused(getattr(pool, using))
            table.append((pool, {using: used} | {end: self._unchanged(getattr(pool, end)) for end in ending}))
        return table

    def replacements(self) -> list[tuple[Any, Any]]:
        """Functions, each with the one that stands in for it."""
        return [
            (os.system, self._system(os.system, _not_run)),
            *((usual, self._system(usual, _not_started)) for usual in _escapes()),
            *((usual, self._ending(usual)) for usual in _ENDING),
            *((usual, self._registered(usual)) for usual in _FOR_LATER),
            *((usual, self._unchanged(usual)) for usual in _for_good()),
            (_NAMES_BACKEND, self._registered(_NAMES_BACKEND)),
            *((usual, self._limited(usual)) for usual in _limits()),
            *((usual, self._answered(usual)) for usual in (os.putenv, os.unsetenv)),
            *((usual, stand_in) for usual, stand_in in self._waiting()),
        ]

    # -- the audit hook -------------------------------------------------------

    def _judge(self, event: str, args: tuple[Any, ...]) -> None:
        """Raise for an event that has an effect outside."""
        if not self._scope.applies():
            return
        if event == "open":
            self._judge_open(*args)
        elif event in _ON_FILES:
            if not self._is_private(args[0]):
                self._refuse(event, args[0])
        elif event in _ON_ADDRESSES:
            self._judge_address(event, args[1])
        elif event in _ON_NAMES:
            self._judge_name(event, args[0])
        elif event == "http.client.send":
            self._judge_name(event, args[0].host)
        elif event in _ON_PROCESSES and not (event == "subprocess.Popen" and _is_import()):
            self._refuse(event, args[0] if args else "")
        elif event == "mmap.__new__":
            self._judge_map(*args)
        elif event == "sqlite3.connect" and not self._is_private_database(args[0]):
            self._refuse(event, args[0])

    def _judge_open(self, path: Any, mode: Any, flags: int) -> None:
        if isinstance(path, int):
            return
        if flags & _WRITING and not self._is_private(path):
            self._refuse("open", path)
        if _read is not None:
            name = os.path.abspath(os.fsdecode(path))
            if is_users_file(name) and not name.startswith(_OF_SYSTEM) and not _is_import():
                _read.add(name)

    def _judge_map(self, number: int, length: int, access: int, offset: int) -> None:
        with self._scope.outside():
            is_written = access in (mmap.ACCESS_DEFAULT, mmap.ACCESS_WRITE) and number >= 0 and can_write(number)
        if is_written and not self._is_private(number):
            self._refuse("mmap", _path_of(number))

    def _is_private(self, path: Any) -> bool:
        if isinstance(path, int):
            path = _path_of(path)
        path = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
        return path == os.devnull or self._tree.is_private(path)

    def _is_private_database(self, name: Any) -> bool:
        name = os.fsdecode(name)
        return name in ("", ":memory:") or self._tree.is_private(name.removeprefix("file:")) or ":memory:" in name

    def _judge_address(self, event: str, address: Any) -> None:
        if isinstance(address, tuple) and address:  # others are local: names of UNIX sockets
            self._judge_name(event, address[0])

    def _judge_name(self, event: str, host: Any) -> None:
        host = host.decode() if isinstance(host, bytes) else host
        if not _is_here(host) and not (event == "socket.getaddrinfo" and _is_number(host)):
            self._assume(_("{event}({host!r}): refused; a dry run sends nothing", event=event, host=host))
            text = _("{host}: a dry run connects to nothing outside this machine; the call was not made", host=host)
            raise UnreachableError(text)

    def _refuse(self, event: str, what: Any) -> None:
        with self._scope.outside():
            text = _("{event}({what!r}): refused; a dry run changes nothing outside itself", event=event, what=what)
            self._assume(text)
        raise RefusedCallError(
            _(
                "{event}({what!r}) was refused: a dry run changes nothing outside itself, and cannot fake this"
                " call. Leave it out, or run it outside the dry run.",
                event=event,
                what=what,
            )
        )

    # -- answers --------------------------------------------------------------

    def _execute_child(self) -> Callable[..., None]:
        usual = subprocess.Popen._execute_child  # type: ignore[attr-defined]

        def _execute_child(process: Any, args: Any, *rest: Any) -> None:
            if not self._scope.applies() or _is_import():
                return usual(process, args, *rest)
            if not _shown(args).startswith("nvidia-smi"):  # libraries call it; it has no effect anyway
                self._assume(_not_started(_shown(args)))
            pipes = rest[_BEFORE_PIPES : _BEFORE_PIPES + 6]
            with self._scope.outside():
                process._close_pipe_fds(*pipes)  # the child's ends of the pipes: reading the output ends at once
                to_child = int(pipes[1])
                if to_child != -1:
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, to_child)
                    os.close(nowhere)
            process.pid, process.returncode = _NOBODY, 0
            return None

        return _execute_child

    def _system(self, usual: Callable[[Any], int], words: Callable[[Any], str]) -> Callable[[Any], int]:
        """Instead of a function that runs a command; ``words`` say that it was not run."""

        def system(command: Any) -> int:
            if not self._scope.applies():
                return usual(command)
            self._assume(words(command))
            return 0

        return system

    def _unchanged(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        def unchanged(*args: Any, **kwargs: Any) -> Any:
            is_asked = usual.__name__ == "nice" and args == (0,)
            if is_asked or isinstance(args[0] if args else None, ThreadPool) or not self._scope.applies():
                return usual(*args, **kwargs)
            name = f"{usual.__module__}.{usual.__qualname__}".replace("posix.", "os.")
            given = tuple(one for one in args if not isinstance(one, (Pool, ProcessPoolExecutor)))
            self._assume(_("{name}{args}: skipped, because it could not be undone", name=name, args=given))
            return usual(0) + args[0] if usual.__name__ == "nice" else None

        return unchanged

    def _limited(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        """Ignore a lowered hard limit, which could not be raised again, and limits of other processes."""
        import resource

        def limited(*args: Any) -> Any:
            *whose, kind, limits = args if usual.__name__ == "setrlimit" or len(args) > 2 else (*args, None)
            if limits is None or not self._scope.applies():
                return usual(*args)
            upper = resource.getrlimit(kind)[1]
            is_own = whose in ([], [0], [os.getpid()])
            if not is_own or limits[1] != upper:
                name = f"resource.{usual.__name__}"
                self._assume(_("{name}{args}: skipped, because it could not be undone", name=name, args=args))
            return usual(*whose, kind, (limits[0], upper)) if is_own else resource.getrlimit(kind)

        return limited

    def _ending(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        def end(*args: Any) -> Any:
            is_handled = usual is signal.raise_signal and callable(signal.getsignal(args[0]))
            if is_handled or not self._scope.applies():
                return usual(*args)
            self._refuse(f"{usual.__module__}.{usual.__name__}".replace("posix", "os").lstrip("_"), *args[:1] or ("",))
            return None

        return end

    def _registered(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        def register(*args: Any, **kwargs: Any) -> Any:
            if not self._scope.applies() or not is_users_file(sys._getframe(1).f_code.co_filename):
                return usual(*args, **kwargs)  # a library's that stays loaded
            name = f"{usual.__module__}.{usual.__name__}".replace("posix.", "os.")
            self._assume(_("{name}: not registered, because it would be called after the dry run", name=name))
            return args[0] if args else None

        return register

    def _answered(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        """Of the environment only what ``os.environ`` holds, too, is put back."""

        def answered(*args: Any) -> Any:
            if not self._scope.applies() or sys._getframe(1).f_globals is vars(os):
                return usual(*args)
            self._assume(_("os.{name}{args}: skipped", name=usual.__name__, args=args))
            return None

        return answered

    def _waiting(self) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
        """Wait for a program that the user started without reaping it, so that the user still can."""
        if not hasattr(os, "waitid"):
            return
        usual = os.waitid

        def waitpid(pid: int, options: int) -> tuple[int, int]:
            if pid == _NOBODY:
                return pid, 0
            if not self._scope.applies():
                return before(pid, options)
            kind = os.P_ALL if pid == -1 else os.P_PID if pid > 0 else os.P_PGID
            ended = usual(kind, max(abs(pid), 0), os.WEXITED | os.WNOWAIT | options & os.WNOHANG)
            if ended is None:
                return 0, 0
            return ended.si_pid, ended.si_status << 8 if ended.si_code == os.CLD_EXITED else ended.si_status

        before = os.waitpid
        yield before, waitpid

        def waitid(idtype: int, id: int, options: int) -> Any:  # noqa: A002
            return usual(idtype, id, options | os.WNOWAIT if self._scope.applies() else options)

        yield usual, waitid
        yield os.wait, lambda: waitpid(-1, 0) if self._scope.applies() else wait()
        wait = os.wait

    def _start(self, usual: Callable[[Any], None]) -> Callable[[Any], None]:
        def start(process: Any) -> None:
            if not self._scope.applies():
                return usual(process)
            self._refuse("multiprocessing.Process.start", process.name)
            return None

        return start

    def _closing(self, usual: Callable[[Any], None]) -> Callable[[Any], None]:
        def close(shared: Any) -> None:
            """What the user's own memory lends cannot be lent again once it was closed."""
            if self._is_private(shared._fd):
                usual(shared)

        return close

    def _pool_refused(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        """Refuse to give work to a pool of processes that was started before: they would really do it."""

        @functools.wraps(usual)
        def refused(pool: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(pool, ThreadPool) or not self._scope.applies():  # threads of the run, see ``RunThreads``
                return usual(pool, *args, **kwargs)
            is_check = usual.__name__.startswith("_")  # by the method that was called
            method = sys._getframe(2).f_code.co_name.strip("_") if is_check else usual.__name__
            self._refuse(f"{usual.__module__}.{type(pool).__name__}", method)
            return None

        return refused


def _for_good() -> Iterator[Callable[..., Any]]:
    """Calls that change the process in a way that cannot always be undone."""
    for owner, names in _UNDOABLE.items():
        for name in names.split():
            if hasattr(sys.modules.get(owner), name):
                yield getattr(sys.modules[owner], name)


def _limits() -> Iterator[Callable[..., Any]]:
    """What sets limits of a process, where the system has them."""
    with contextlib.suppress(ImportError):
        import resource

        yield resource.setrlimit
        if hasattr(resource, "prlimit"):
            yield resource.prlimit


def _not_run(command: Any) -> str:
    return _("os.system({command!r}): not run; assumed to succeed", command=command)


def _not_started(command: str) -> str:
    return _("program {command}: not started; assumed to succeed without output", command=command)


def _escapes() -> Iterator[Callable[[str], int]]:
    """What a notebook's ``!`` calls: on a terminal of its own, by a fork."""
    process = sys.modules.get("IPython.utils.process")
    if process is not None:
        yield process.system


def _is_import() -> bool:
    """Whether a library is being imported, which asks programs about the machine (``ctypes.util.find_library``)."""
    frame = sys._getframe(1)
    while frame is not None and not is_users_file(frame.f_code.co_filename):
        is_ours = frame.f_globals.get("__name__", "").startswith("oom_magic.")
        if frame.f_code.co_name == "<module>" and not is_ours:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _path_of(number: int) -> str:
    """The path behind a file descriptor, where the system tells it."""
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return ""


def _is_here(host: Any) -> bool:
    """Whether a host is this machine."""
    if not host or host in ("localhost", "localhost.localdomain", "ip6-localhost", socket.gethostname()):
        return True
    return _is_number(host) and (ip_address(host.partition("%")[0]).is_loopback or host in ("0.0.0.0", "::"))


def _is_number(host: Any) -> bool:
    try:
        ip_address(str(host).partition("%")[0])
    except ValueError:
        return False
    return True


def _shown(args: Any) -> str:
    text = " ".join(map(str, args)) if isinstance(args, (list, tuple)) else str(args)
    return text if len(text) < 60 else f"{text[:57]}..."
