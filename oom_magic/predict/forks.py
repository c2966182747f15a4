"""Copies of this process (forks) that compute jobs from a shared queue, on cores that would be idle.

The queue is a pipe: the process that reads a job from it computes it. Copies only save time: a job that fails or does
not finish in one of them is computed here, as are all that follow. There are no copies if a GPU is in use or a fork is
not safe (outside Linux).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import pickle
import select
import signal
import stat
import struct
import sys
import time
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch

from oom_magic.predict.isolation.live_objects import heap_set_aside

_JOB_BYTES = 512  # in the queue, padded: below PIPE_BUF, so that a job is written and read as a whole
_DONE = struct.Struct("qqqq")  # number of the job, process, where its result begins in the copy's file, and its length
_POLL_SECONDS = 0.5  # between two checks whether the copies are still alive
_END_SECONDS = 1.0  # for a copy to undo its changes outside of its memory
MOST_POLLS = 120  # seconds without a result after which the copies are given up
_MOST_COPIED_BYTES = 1 << 28  # of a piece of shared memory that has no file
_FIXED = 0x10  # MAP_FIXED of sys/mman.h
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG

_Job = TypeVar("_Job", bound=Hashable)
_Result = TypeVar("_Result")


@dataclass(eq=False)
class Forks(Generic[_Job, _Result]):
    """Computes ``compute(job)`` in copies of this process, which start when a job is submitted.

    There is one copy for each core, at most ``most``; if this process ``works``, too, one core is left to it.
    ``at_rest`` calls its argument when no work is unfinished, so that a fork copies none.
    """

    compute: Callable[[_Job], _Result]
    at_rest: Callable[[Callable[[], None]], object]
    most: int
    works: bool

    def __post_init__(self) -> None:
        self._jobs: list[_Job] = []
        self._open: set[_Job] = set()  # in the queue, or taken from it
        self._results: dict[_Job, _Result] = {}
        self._files: dict[int, int] = {}  # of results, by process
        self._pipes: tuple[int, ...] = ()  # both ends of the queue of jobs, both ends of that of results
        self._num_polls = 0

    def submit(self, jobs: Iterable[_Job]) -> None:
        """Put jobs into the queue whose results will be asked for, in this order."""
        fresh = [job for job in dict.fromkeys(jobs) if job not in self._open and job not in self._results]
        if len(fresh) + len(self._open) <= self.works:  # a single one is computed here as fast
            return
        if not self._pipes and self._num_copies():
            self.at_rest(self._start)
        for job in fresh if self._files else ():
            text = pickle.dumps((len(self._jobs), job))
            with suppress(BlockingIOError):  # the queue is full
                if len(text) <= _JOB_BYTES:
                    os.write(self._pipes[1], text.ljust(_JOB_BYTES, b"\0"))
                    self._jobs.append(job)
                    self._open.add(job)

    def result(self, job: _Job, compute_here: Callable[[_Job], _Result]) -> _Result:
        """The result of a job: from a copy, or by ``compute_here``, after other jobs in the queue."""
        self.submit([job])
        while True:
            self._collect()
            if job in self._results:
                return self._results.pop(job)
            next_job = job if job not in self._open else self._next_job() if self.works else None
            if next_job is None:
                self._wait()
                continue
            self._open.discard(next_job)
            if next_job == job:
                return compute_here(job)
            with suppress(Exception):  # it is raised where this job is asked for
                self._results[next_job] = compute_here(next_job)

    def close(self, ended: Collection[int] = ()) -> None:
        """End the copies that have not ``ended``, with an interrupt first, so that their work leaves no files."""
        running = set(self._files.keys() - ended)
        until = time.monotonic() + _END_SECONDS
        for sent in (signal.SIGTERM, signal.SIGKILL):
            for process in running:
                with suppress(ProcessLookupError):
                    os.kill(process, sent)
            while running and (sent == signal.SIGKILL or time.monotonic() < until):
                running = {process for process in running if not _has_ended(process)}
                time.sleep(_END_SECONDS / 100 if running else 0)
        for number in (*self._files.values(), *self._pipes):
            os.close(number)
        self._files, self._pipes = {}, ()
        self._open.clear()

    def _start(self) -> None:
        self._pipes = (*os.pipe(), *os.pipe())
        for number in self._pipes:
            os.set_blocking(number, False)
        with warnings.catch_warnings(), suppress(OSError):  # no memory for one is no error
            warnings.simplefilter("ignore")  # Python 3.12 and newer warn of forks beside threads
            for _unused in range(self._num_copies()):
                file = os.memfd_create("oom_magic")
                process = os.fork()
                if not process:
                    try:
                        self._serve(file)
                    finally:
                        os._exit(0)  # so that the parent's exit handlers do not run again
                self._files[process] = file

    def _serve(self, file: int) -> None:
        """The work of a copy: jobs, until the queue is closed.

        Interrupts are for the parent; the copy ends when the parent does.
        """
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        _make_shared_memory_private()
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        jobs, writable, _unused, done = self._pipes
        os.close(writable)
        torch.set_num_threads(1)  # OpenMP's threads are not there
        length = 0
        with heap_set_aside(collects=False):
            while True:
                select.select([jobs], [], [])
                with suppress(BlockingIOError):  # another was faster
                    text = os.read(jobs, _JOB_BYTES)
                    if not text:
                        return
                    number, job = pickle.loads(text)
                    found = self._pickled(job)
                    os.pwrite(file, found, length)
                    os.write(done, _DONE.pack(number, os.getpid(), length, len(found)))
                    length += len(found)

    def _pickled(self, job: _Job) -> bytes:
        """The result of a job, pickled; empty if it failed. Raises KeyboardInterrupt if this copy is to end."""
        try:
            return pickle.dumps(self.compute(job), protocol=5)
        except KeyboardInterrupt:
            raise
        except BaseException:
            return b""

    def _next_job(self) -> _Job | None:
        """The next job in the queue, for this process."""
        try:
            text = os.read(self._pipes[0], _JOB_BYTES)
        except BlockingIOError:
            return None
        job: _Job = pickle.loads(text)[1]
        return job

    def _collect(self) -> None:
        """Read the results of copies."""
        while self._pipes:
            try:
                number, process, at, length = _DONE.unpack(os.read(self._pipes[2], _DONE.size))
            except BlockingIOError:
                return
            self._num_polls = 0
            job = self._jobs[number]
            self._open.discard(job)
            if not length:  # such as with a driver: autograd's threads for its devices are not in a fork
                self.close()
                self.most = 0
                return
            self._results[job] = pickle.loads(os.pread(self._files[process], length, at))

    def _wait(self) -> None:
        """Wait for a result; all copies are given up if one has ended, or after ``MOST_POLLS``."""
        select.select([self._pipes[2]], [], [], _POLL_SECONDS)
        self._num_polls += 1
        ended = [process for process in self._files if os.waitpid(process, os.WNOHANG)[0]]
        if ended or self._num_polls > MOST_POLLS:
            self._collect()
            self.close(ended)

    def _num_copies(self) -> int:
        if not sys.platform.startswith("linux") or torch.cuda.is_initialized():
            return 0
        return min(len(os.sched_getaffinity(0)) - self.works, self.most)


def _has_ended(process: int) -> bool:
    """Whether a child has ended; its exit status is collected."""
    try:
        return os.waitpid(process, os.WNOHANG)[0] == process
    except ChildProcessError:
        return True


def _make_shared_memory_private() -> None:
    """Replace writable memory that other processes share (maps of files, semaphores) by copies in the same place.

    A fork shares it, so a dry run would write into the user's map of a file. Raises OSError for what cannot be copied.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, offset, _device, inode, *path = line.split(maxsplit=5)
        if "w" not in rights or not rights.endswith("s"):
            continue
        start, end = (int(number, 16) for number in place.split("-"))
        file = _opened(path, int(inode))
        if file == -1 and end - start > _MOST_COPIED_BYTES:
            raise OSError(errno.ENOMEM, "mmap")
        contents = ctypes.string_at(start, end - start) if file == -1 else b""
        flags = mmap.MAP_PRIVATE | _FIXED | (mmap.MAP_ANONYMOUS if file == -1 else 0)
        granted = mmap.PROT_READ | mmap.PROT_WRITE | (mmap.PROT_EXEC if "x" in rights else 0)
        if libc.mmap(start, end - start, granted, flags, file, int(offset, 16)) != start:
            raise OSError(ctypes.get_errno(), "mmap")
        ctypes.memmove(start, contents, len(contents))
        if file != -1:
            os.close(file)


def _opened(path: list[str], inode: int) -> int:
    """A new descriptor of a mapped file; -1 if it has no name any more. Raises OSError for a device."""
    try:
        found = Path(path[0]).stat()
    except (OSError, IndexError):
        return -1
    if found.st_ino != inode:
        return -1
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.ENOTSUP, "mmap")
    return os.open(path[0], os.O_RDONLY)
