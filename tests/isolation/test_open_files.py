"""Files, descriptors and connections that were open before a dry run are afterwards as they were."""

from __future__ import annotations

import asyncio
import bz2
import csv
import gzip
import logging
import lzma
import mmap
import multiprocessing
import os
import socket
import sqlite3
import sys
import threading
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oom_magic as om
from oom_magic.predict.isolation.files import open_files
from oom_magic.predict.isolation.objects import databases
from oom_magic.predict.session import DrySession


def test_files_that_were_open_are_where_they_were(tmp_path: Path, here: None) -> None:
    os.chdir(tmp_path)
    Path("read.txt").write_text("one\ntwo\nthree\n")
    read, closed = open("read.txt"), open("read.txt", "rb")
    assert (read.readline(), closed.read(5)) == ("one\n", b"one\nt")
    written = open("rows.csv", "w", newline="")
    rows = csv.writer(written)
    rows.writerow(["before"])
    handler = logging.FileHandler("run.log")
    logger = logging.getLogger("test_files")
    logger.addHandler(handler)
    logger.warning("before")

    def train() -> None:
        assert read.readlines() == ["two\n", "three\n"]
        closed.close()
        rows.writerow(["inside"])
        written.flush()
        assert Path("rows.csv").read_text().split() == ["before", "inside"]
        logger.warning("inside")
        assert "inside" in Path("run.log").read_text()

    files = (read, closed, written)
    numbers = [(one.fileno(), os.get_inheritable(one.fileno())) for one in files]
    om.dry_run(train)
    assert [(one.fileno(), os.get_inheritable(one.fileno())) for one in files] == numbers
    assert read.readline() == "two\n" and closed.read() == b"wo\nthree\n"
    rows.writerow(["after"])
    logger.warning("after")
    written.close()
    logger.removeHandler(handler)
    handler.close()
    assert Path("rows.csv").read_text().split() == ["before", "after"]
    assert Path("run.log").read_text().split() == ["before", "after"]


def test_compressed_files_that_were_open_are_where_they_were(tmp_path: Path, here: None) -> None:
    """Whether the run closes them or not; those that were read to their end, too."""
    os.chdir(tmp_path)
    openers: dict[str, Any] = {"gz": gzip.open, "bz2": bz2.open, "xz": lzma.open}
    written: dict[tuple[str, str, str], Any] = {}
    read, whole = dict(written), dict(written)
    for ending, opener in openers.items():
        with opener(f"read.{ending}", "wb") as file:
            file.write(b"one\ntwo\n")
        for kind in "tb":
            for use in ("left", "closed"):
                key = ending, kind, use
                written[key] = opener(f"{kind}{use}.{ending}", f"w{kind}")
                written[key].write(_of(kind, "before "))
                read[key] = opener(f"read.{ending}", f"r{kind}")
                assert read[key].readline() == _of(kind, "one\n")
                whole[key] = opener(f"read.{ending}", f"r{kind}")
                assert whole[key].read()

    def train() -> None:
        for key, file in written.items():
            file.write(_of(key[1], "inside ")), file.flush()
            assert read[key].read() == _of(key[1], "two\n") and not whole[key].read()
            if key[2] == "closed":
                file.close(), read[key].close(), whole[key].close()

    DrySession(has_bar=False, is_lasting=False).run(train, [{"written": written, "read": read, "whole": whole}])
    for key, file in written.items():
        file.write(_of(key[1], "after")), file.close()
        assert openers[key[0]](f"{key[1]}{key[2]}.{key[0]}", "rb").read() == b"before after", key
        assert read[key].read() == _of(key[1], "two\n") and not whole[key].read(), key
        read[key].close(), whole[key].close()


def _of(kind: str, text: str) -> Any:
    return text if kind == "t" else text.encode()


def test_numbers_that_were_open_are_where_they_were(tmp_path: Path, here: None) -> None:
    file = tmp_path / "log"
    file.write_text("before ")
    number, read = os.open(file, os.O_RDWR), os.open(file, os.O_RDONLY)
    os.lseek(number, 0, os.SEEK_END)
    from_pipe, to_pipe = os.pipe()
    os.write(to_pipe, b"waiting")
    to_pipe_too = os.dup(to_pipe)
    held = {"pipe": os.fdopen(os.dup(to_pipe), "w")}

    def train() -> None:
        assert os.write(number, b"in") == 2 and os.writev(number, [b"si", b"de"]) == 4
        assert os.pread(number, 20, 0) == b"before inside" and os.read(read, 3) == b"bef"
        assert os.pwrite(number, b"B", 0) == 1 and os.fstat(number).st_size == os.stat(number).st_size == 13
        with open(number, "r+b") as again:
            again.write(b"!")
        os.ftruncate(number, 3)
        os.truncate(number, 2)
        os.dup2(from_pipe, number)
        for one in (number, to_pipe):
            os.close(one)
            with pytest.raises(OSError, match="descriptor"):
                os.write(one, b"closed")
        made, also_made = os.pipe()
        assert os.write(also_made, b"own") == 3 == len(os.read(made, 3))
        with pytest.raises(PermissionError, match="mmap"):
            mmap.mmap(number, 0)
        assert mmap.mmap(read, 0, access=mmap.ACCESS_READ)[:6] == b"before"
        assert os.read(from_pipe, 7) == b"" and os.write(to_pipe_too, b"x") == 1
        held["pipe"].write("more")
        held["pipe"].close()

    report = om.dry_run(train)
    assert sum(one.line is not None and "descriptor" in one.text for one in report.assumptions) == 5
    held["pipe"].close()
    for one in (to_pipe, to_pipe_too):
        os.close(one)
    assert os.read(from_pipe, 99) == b"waiting" and os.read(from_pipe, 9) == b""
    assert os.write(number, b"after") == 5 and file.read_text() == "before after" and os.read(read, 3) == b"bef"
    for one in (number, read, from_pipe):
        os.close(one)


def test_sockets_of_zeromq_that_were_open_send_and_lose_nothing() -> None:
    zmq = pytest.importorskip("zmq")
    with zmq.Context() as context, context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as theirs:
        ours.bind("inproc://test")
        theirs.connect("inproc://test")
        ours.send_string("before")

        def train() -> None:
            ours.send(b"lost")
            ours.send_json({"lost": 1})
            with pytest.raises(zmq.Again):
                theirs.recv(zmq.NOBLOCK)
            with zmq.Context() as own, own.socket(zmq.PAIR) as one, own.socket(zmq.PAIR) as other:
                one.bind("inproc://own")
                other.connect("inproc://own")
                one.send(b"own")
                assert other.recv() == b"own"

        report = om.dry_run(train)
        assert sum("zmq" in one.text for one in report.assumptions) == 3
        assert theirs.recv() == b"before" and not theirs.poll(50)


def test_connections_that_were_open_send_and_lose_nothing() -> None:
    ours, theirs = socket.socketpair()
    server = socket.create_server(("127.0.0.1", 0))
    sender, receiver = multiprocessing.Pipe()
    theirs.sendall(b"waiting")
    writer = ours.makefile("wb")

    def train() -> None:
        assert ours.send(b"lost") == 4 and ours.sendall(b"lost") is None and ours.sendmsg([b"lo", b"st"]) == 4
        assert ours.recv(9) == b"" and ours.recv_into(bytearray(9)) == 0
        writer.write(b"lost")
        writer.flush()
        ours.shutdown(socket.SHUT_WR)
        ours.close()
        with pytest.raises(ConnectionAbortedError, match="dry run"):
            server.accept()
        sender.send("lost")
        mine, there = socket.socketpair()
        mine.sendall(b"own")
        assert there.recv(3) == b"own"

    report = om.dry_run(train)
    assert sum("opened before" in one.text for one in report.assumptions) == 3
    receiver.send("answer")
    assert not receiver.poll() and sender.recv() == "answer"
    ours.sendall(b"after")
    assert theirs.recv(99) == b"after" and ours.recv(99) == b"waiting"
    for one in (writer, ours, theirs, server, sender, receiver):
        one.close()


def test_other_threads_write_as_always(tmp_path: Path) -> None:
    file = tmp_path / "theirs.txt"
    go, done = threading.Event(), threading.Event()

    def theirs() -> None:
        go.wait()
        file.write_text("theirs")
        done.set()

    thread = threading.Thread(target=theirs)
    thread.start()

    def train() -> None:
        go.set()
        done.wait()
        file.with_name("ours.txt").write_text("ours")

    om.dry_run(train)
    thread.join()
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("theirs.txt", "theirs")]


def test_what_the_run_hands_to_a_loop_of_another_thread_writes_nothing(tmp_path: Path, here: None) -> None:
    os.chdir(tmp_path)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def write(text: str) -> str:
        Path("rows").write_text(text)
        return Path("rows").read_text()

    async def written(text: str) -> str:
        return await asyncio.to_thread(write, text)

    def wait_for(text: str) -> str:
        return asyncio.run_coroutine_threadsafe(written(text), loop).result(20)

    async def waiting(text: str) -> str:  # wakes the loop from a thread of another one
        return await asyncio.to_thread(wait_for, text)

    def run() -> None:
        assert wait_for("inside") == "inside"
        assert asyncio.run_coroutine_threadsafe(waiting("inside"), loop).result(20) == "inside"

    om.dry_run(run)
    assert not Path("rows").exists() and wait_for("after") == "after" and Path("rows").exists()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def test_shared_memory_is_as_before() -> None:
    held = shared_memory.SharedMemory(create=True, size=8)
    held.buf[0] = 1

    def run() -> None:
        other = shared_memory.SharedMemory(held.name)
        other.buf[0] = 2
        other.close()
        made = shared_memory.SharedMemory(create=True, size=8)
        made.close()
        made.unlink()
        held.unlink()

    om.dry_run(run)
    again = shared_memory.SharedMemory(held.name)
    assert again.buf[0] == held.buf[0] == 1
    for one in (again, held):
        one.close()
    held.unlink()


def test_databases_that_were_open_hold_what_they_held(tmp_path: Path) -> None:
    first, second = (sqlite3.connect(tmp_path / name) for name in ("first", "second"))
    for one in (first, second):
        one.execute("create table steps (loss)")
        one.commit()
    second.execute("insert into steps values (1)")  # not committed
    names: dict[str, Any] = {"first": first, "cursor": first.cursor(), "second": second}

    def log() -> None:
        names["cursor"].execute("insert into steps values (0.5)")
        names["first"].commit()
        assert names["first"].execute("select * from steps").fetchall() == [(0.5,)]
        with pytest.raises(sqlite3.DatabaseError):
            names["first"].execute("attach ? as other", (str(tmp_path / "other"),))
        names["first"].close()

    DrySession(has_bar=False, is_lasting=False).run(log, [names])
    assert names["first"] is first and names["cursor"].connection is first
    assert first.execute("select * from steps").fetchall() == [] and not (tmp_path / "other").exists()

    def undo() -> None:
        if sys.version_info >= (3, 11):
            assert names["second"].execute("select * from steps").fetchall() == [(1,)]
            names["second"].rollback()
        names["second"].close()

    DrySession(has_bar=False, is_lasting=False).run(undo, [names])
    assert second.execute("select * from steps").fetchall() == [(1,)] and second.in_transaction
    first.close(), second.close()


def test_a_name_for_the_notebooks_own_history_leads_to_a_copy_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is open in every notebook; a look for it everywhere would go through all that the names hold, in vain."""
    names = {"db": sqlite3.connect(tmp_path / "history")}
    names["db"].execute("create table inputs (source)")
    names["db"].commit()
    monkeypatch.setattr(open_files, "history_connections", lambda: [names["db"]])
    DrySession(has_bar=False).run(lambda: names["db"].execute("insert into inputs values (1)"), [names])
    assert names["db"].execute("select * from inputs").fetchall() == []
    names["db"].close()


def test_a_large_database_that_was_open_can_be_read_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(databases, "MOST_COPIED_BYTES", 0)
    names = {"large": sqlite3.connect(tmp_path / "large"), "again": iter([1, 2])}
    large = names["large"]
    large.execute("create table steps (loss)")

    def read() -> None:
        assert names["large"].execute("select * from steps").fetchall() == [] and next(names["again"]) == 1
        names["large"].close()

    report = DrySession(has_bar=False, is_lasting=False).run(read, [names])
    assert report.assumptions == () and next(names["again"]) == 1
    with pytest.raises(sqlite3.OperationalError, match="A dry run cannot write to a database"):
        DrySession(has_bar=False).run(lambda: names["large"].execute("insert into steps values (1)"), [names])
    large.close()


def test_what_cannot_be_written_to_says_why(tmp_path: Path) -> None:
    names = {"mapped": np.memmap(tmp_path / "map", np.uint8, "w+", shape=(4,)), "large": np.zeros(1 << 22)}
    for name in names:
        with pytest.raises(ValueError, match="A dry run cannot write to memory maps or arrays"):
            DrySession(has_bar=False).run(lambda name=name: names[name].fill(1), [names])  # type: ignore[misc]
        assert names[name].flags.writeable and not names[name].any()
