"""Descriptors and sockets that were open before a dry run: what the run does with them has no effect.

A descriptor cannot be replaced for the run alone, as other threads may use it. So the calls are: instead of a file's
descriptor they get that of a private copy at the same position, instead of a pipe's one of the null device, which
accepts everything and is empty. Sockets behave alike. The process's own output stays as it is.
"""

from __future__ import annotations

import errno
import functools
import os
import socket
import stat
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from oom_magic.interrupts import wakeup_number
from oom_magic.language import _
from oom_magic.predict.isolation.files.file_tree import FileTree
from oom_magic.predict.isolation.files.open_files import can_write, is_output, private_copy
from oom_magic.predict.isolation.patching import Patches
from oom_magic.predict.isolation.run_threads import Scope
from oom_magic.user_code import is_users_file

_CALLS = (
    "write pwrite writev pwritev read pread readv preadv lseek ftruncate fstat fsync fdatasync posix_fallocate "
    "fchmod fchown dup sendfile copy_file_range splice eventfd_write eventfd_read lockf "
    "get_blocking set_blocking get_inheritable set_inheritable"
)
_NAMED = ("fd", "out_fd", "in_fd", "src", "dst")  # arguments that are descriptors
_TWO = ("sendfile", "copy_file_range", "splice")  # whose second argument is one, too
_WAKES = "_write_to_self"
_TRACKER = "multiprocessing.resource_tracker"
_CLOSED = -1
_OF_ZMQ = ("send", "send_multipart", "recv", "recv_multipart")


class Descriptors:
    """Those that are open when it is made, and what the calls of the run get in their place."""

    def __init__(self, tree: FileTree, scope: Scope, assume: Callable[[str], None]) -> None:
        self._tree = tree
        self._scope = scope
        self._assume = assume
        self._before = dict(_open_now())
        self._private: dict[int, int] = {}  # by the user's number

    def replacements(self) -> list[tuple[Any, Any]]:
        """Functions of ``os``, each with the one that stands in for it."""
        calls = [(name, getattr(os, name)) for name in _CALLS.split() if hasattr(os, name)]
        made = [(usual, self._answering(usual, 2 if name in _TWO else 1)) for name, usual in calls]
        return [*made, (os.dup2, self._dup2(os.dup2))]

    def patches(self) -> Patches:
        """Methods of sockets."""
        table = {
            name: self._unsent(getattr(socket.socket, name), name) for name in _ANSWERS if hasattr(socket.socket, name)
        }
        ssl, zmq = sys.modules.get("ssl"), sys.modules.get("zmq")
        patches: list[tuple[Any, dict[str, Any]]] = [(socket.socket, table)]
        if ssl is not None:
            methods = vars(ssl.SSLSocket).items()
            patches.append(
                (ssl.SSLSocket, {name: self._unsent(usual, name) for name, usual in methods if name in _ANSWERS})
            )
        if zmq is not None and hasattr(zmq, "Socket"):
            patches.append((zmq.Socket, {name: self._unsent_by_zmq(zmq, name) for name in _OF_ZMQ}))
        return patches

    def _unsent_by_zmq(self, zmq: Any, name: str) -> Callable[..., Any]:
        """What the user's code sends by a socket of ZeroMQ; that of a notebook's kernel shows what is printed."""
        usual = getattr(zmq.Socket, name)

        @functools.wraps(usual)
        def unsent(connection: Any, *args: Any, **kwargs: Any) -> Any:
            frame: Any = sys._getframe(1)
            while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("zmq.", __name__[:9])):
                frame = frame.f_back
            is_users = self._scope.applies() and is_users_file(frame.f_code.co_filename) and not connection.closed
            if not is_users or connection.FD not in self._before:
                return usual(connection, *args, **kwargs)
            self._assume(_sent_nowhere(connection.FD, "zmq"))
            if name.startswith("recv"):
                raise zmq.Again
            return None

        return unsent

    @contextmanager
    def closed_at_the_end(self) -> Iterator[None]:
        """Around the run: copies are closed after it, and what the process reads and prints to is as before."""
        outputs = {}
        for number in range(3):
            with suppress(OSError):  # closed
                outputs[number] = os.dup(number)
        try:
            yield
        finally:
            for number, copy in outputs.items():
                if not _is_same(number, copy):
                    os.dup2(copy, number)
                os.close(copy)
            for number in self._private.values():
                if number != _CLOSED:
                    os.close(number)

    def own(self, number: Any) -> Any:
        """What the run uses in place of a number: itself, unless it was open before."""
        if type(number) is not int or number not in self._before:
            return number
        with self._scope.outside(), self._tree.lock:
            if self._is_users(number) and number not in self._private:
                self._private[number] = self._made_private(number)
            return self._private[number] if self._is_users(number) else number

    def written(self) -> tuple[list[int], list[int]]:
        """What can be written to by its number: files, and others, which have no place to be read from either."""
        files: list[int] = []
        others: list[int] = []
        wakes = wakeup_number()
        with self._scope.outside():
            for number in filter(self._is_users, self._before):
                if not stat.S_ISREG(os.fstat(number).st_mode):
                    if wakes not in (None, number):
                        others.append(number)
                elif can_write(number):
                    files.append(number)
        return files, others

    def lent(self, number: int) -> int:
        """``own`` for a file object that closes it."""
        own = self.own(number)
        return int(own) if own == number else os.dup(own)

    def close(self, number: int) -> None:
        """``os.close``: of the user's numbers only what the run has in their place."""
        own = self.own(number)
        if own != number:
            self._private[number] = _CLOSED
        os.close(own)

    def _is_users(self, number: int) -> bool:
        """Whether the number is still that of what was open: the run may have got it again for a file of its own."""
        with suppress(OSError):
            state = os.fstat(number)
            return (state.st_dev, state.st_ino) == self._before[number]
        return False

    def _made_private(self, number: int) -> int:
        path = _name_of(number)
        if stat.S_ISREG(os.fstat(number).st_mode):
            self._assume(
                _(
                    "descriptor {number} ({path}), opened before the dry run: the run uses a copy",
                    number=number,
                    path=path,
                )
            )
            return private_copy(number, path, self._tree)
        self._assume(_sent_nowhere(number, path))
        return os.open(os.devnull, os.O_RDWR)

    # -- stand-ins ------------------------------------------------------------

    def _answering(self, usual: Callable[..., Any], num_places: int) -> Callable[..., Any]:
        @functools.wraps(usual)
        def answer(*args: Any, **kwargs: Any) -> Any:
            if not self._scope.applies():
                return usual(*args, **kwargs)
            if sys._getframe(1).f_globals.get("__name__") == _TRACKER:
                with self._scope.outside():
                    return usual(*args, **kwargs)
            numbers = map(self.own, args[:num_places])
            named = {name: self.own(value) if name in _NAMED else value for name, value in kwargs.items()}
            return usual(*numbers, *args[num_places:], **named)

        return answer

    def _dup2(self, usual: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(usual)
        def dup2(fd: int, fd2: int, inheritable: bool = True) -> int:
            there, usable = fd2, fd
            if self._scope.applies():
                there, usable = self.own(fd2), self.own(fd)
            if there != _CLOSED or fd2 == _CLOSED:
                usual(usable, there, inheritable)
            else:  # the run has closed it
                with self._scope.outside():
                    self._private[fd2] = os.dup(usable)
            return fd2

        return dup2

    def _unsent(self, usual: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(usual)
        def unsent(connection: Any, *args: Any, **kwargs: Any) -> Any:
            number = connection.fileno()
            if is_waking(sys._getframe(1)):
                with self._scope.outside():
                    return usual(connection, *args, **kwargs)
            if not self._scope.applies() or self.own(number) == number:
                return usual(connection, *args, **kwargs)
            with self._scope.outside():
                return _ANSWERS[name](self.lent(number) if name == "detach" else number, *args)

        return unsent


def is_waking(caller: types.FrameType | None) -> bool:
    """Whether asyncio calls, directly or through a stand-in, to wake the loop of another thread."""
    frames = () if caller is None else (caller, caller.f_back)
    return any(frame is not None and frame.f_code.co_name == _WAKES for frame in frames)


def _sent_nowhere(number: int, path: str) -> str:
    return _(
        "descriptor {number} ({path}), opened before the dry run: nothing is written to it or read from it",
        number=number,
        path=path,
    )


def _open_now() -> Iterator[tuple[int, tuple[int, int]]]:
    """The numbers that are open, each with what tells its file from others; without folders, terminals and outputs."""
    with suppress(OSError):  # no such folder on this system
        for name in os.listdir("/dev/fd"):
            number = int(name)
            with suppress(OSError):
                state = os.fstat(number)
                is_left = stat.S_ISDIR(state.st_mode) or stat.S_ISCHR(state.st_mode) or is_output(number)
                if not is_left:
                    yield number, (state.st_dev, state.st_ino)


def _is_same(number: int, other: int) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.fstat(number), os.fstat(other))
    return False


def _name_of(number: int) -> str:
    with suppress(OSError):
        return os.readlink(f"/dev/fd/{number}")
    return "?"


def _size(data: Any) -> int:
    return memoryview(data).nbytes


def _sizes(buffers: Sequence[Any]) -> int:
    return sum(map(_size, buffers))


def _refused(*_unused: Any) -> Any:
    raise ConnectionAbortedError(errno.ECONNABORTED, _("a dry run accepts no connections on a socket opened before it"))


# What methods of sockets return, by the socket's number and the arguments: all sent, nothing received.
_ANSWERS: dict[str, Callable[..., Any]] = {
    "send": lambda number, data, *_unused: _size(data),
    "write": lambda number, data, *_unused: _size(data),
    "sendall": lambda *_unused: None,
    "sendto": lambda number, data, *_unused: _size(data),
    "sendmsg": lambda number, buffers, *_unused: _sizes(buffers),
    "recv": lambda *_unused: b"",
    "read": lambda number, size=0, buffer=None: b"" if buffer is None else 0,
    "recv_into": lambda *_unused: 0,
    "recvfrom": lambda *_unused: (b"", None),
    "recvfrom_into": lambda *_unused: (0, None),
    "recvmsg": lambda *_unused: (b"", [], 0, None),
    "recvmsg_into": lambda *_unused: (0, [], 0, None),
    "accept": _refused,
    "bind": lambda *_unused: None,
    "connect": lambda *_unused: None,
    "listen": lambda *_unused: None,
    "setsockopt": lambda *_unused: None,
    "settimeout": lambda *_unused: None,
    "setblocking": lambda *_unused: None,
    "shutdown": lambda *_unused: None,
    "close": lambda *_unused: None,
    "detach": lambda number: number,
}
