"""A dry run has no effect outside itself: files behave in it as they do for real, and the disk stays as it is."""

from __future__ import annotations

import csv
import ctypes
import glob
import io
import json
import logging
import multiprocessing
import operator
import os
import shelve
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import oom_magic as om
from oom_magic.predict.isolation.files.effects import isolated
from oom_magic.predict.isolation.files.linkage import IS_KNOWN
from oom_magic.predict.session import DrySession
from tests.support.put_back import observed

# -- a random sequence of calls gives the same results, and the same tree ------------------------------

NAMES = st.sampled_from(
    ["a", "b.txt", "sub", "sub/c", "sub/deep", "sub/deep/d", "link", "new", "new/e", "./b.txt", "sub/../a"]
)
MODES = st.sampled_from(["w", "a", "r+", "w+", "x", "r", "rb", "wb", "ab+"])


def write(name: str, mode: str, text: str) -> Any:
    with open(name, mode) as file:
        data: Any = text.encode() if "b" in mode else text
        if "r" in mode and "+" not in mode:
            return file.read()
        file.write(data)
        file.seek(0)
        return file.read() if "+" in mode else None


def look(name: str) -> Any:
    state = os.stat(name)
    return state.st_mode, state.st_size if os.path.isfile(name) else None, state.st_nlink if os.path.isfile(name) else 0


def walk(name: str) -> Any:
    return [(top, sorted(folders), sorted(files)) for top, folders, files in sorted(os.walk(name))]


def scan(name: str) -> Any:
    with os.scandir(name) as entries:
        return sorted((e.name, e.path, e.is_dir(), e.is_file(), e.is_symlink(), os.fspath(e)) for e in entries)


def low(name: str, flags: int) -> Any:
    number = os.open(name, flags, 0o640)
    try:
        if flags & (os.O_WRONLY | os.O_RDWR):
            os.write(number, b"low")
        return os.fstat(number).st_size if not os.path.isdir(name) else None
    finally:
        os.close(number)


FLAGS = st.sampled_from(
    [
        os.O_RDONLY,
        os.O_WRONLY,
        os.O_RDWR | os.O_CREAT,
        os.O_WRONLY | os.O_CREAT | os.O_EXCL,
        os.O_WRONLY | os.O_TRUNC,
        os.O_WRONLY | os.O_APPEND,
        os.O_RDONLY | os.O_NOFOLLOW,
    ]
)
CALLS: list[tuple[Any, tuple[Any, ...]]] = [  # functions by their names are looked up when they are called
    (write, (NAMES, MODES, st.sampled_from(["", "text", "longer text\n"]))),
    (low, (NAMES, FLAGS)),
    *((call, (NAMES,)) for call in (look, walk, scan)),
    *((f"os.{call}", (NAMES,)) for call in "remove mkdir rmdir listdir readlink chdir makedirs removedirs".split()),
    *((f"os.path.{call}", (NAMES,)) for call in "exists lexists islink isdir realpath abspath".split()),
    *((f"os.{call}", (NAMES, NAMES)) for call in "rename replace symlink link renames".split()),
    *((f"shutil.{call}", (NAMES, NAMES)) for call in "copy move".split()),
    ("shutil.rmtree", (NAMES,)),
    ("os.path.samefile", (NAMES, NAMES)),
    ("os.truncate", (NAMES, st.integers(0, 9))),
    ("os.chmod", (NAMES, st.sampled_from([0o600, 0o755]))),
    ("os.utime", (NAMES, st.just((1e9, 1e9)))),
    ("os.access", (NAMES, st.just(os.F_OK))),
    (lambda name: Path(name).touch(), (NAMES,)),
    (lambda name: sorted(map(str, Path(name).rglob("*"))), (NAMES,)),
    (lambda name: Path(name).mkdir(parents=True, exist_ok=True), (NAMES,)),
    (lambda: sorted(glob.glob("**/*", recursive=True)), ()),
    ("os.getcwd", ()),
]
STEPS = st.lists(
    st.integers(0, len(CALLS) - 1).flatmap(lambda at: st.tuples(st.just(CALLS[at][0]), st.tuples(*CALLS[at][1]))),
    min_size=1,
    max_size=14,
)


def plant(folder: Path) -> None:
    """What the user has."""
    (folder / "sub" / "deep").mkdir(parents=True)
    (folder / "a").write_text("first\n")
    (folder / "sub" / "c").write_text("second\n")
    (folder / "sub" / "deep" / "d").write_bytes(b"\0" * 10)
    (folder / "link").symlink_to("sub")


def perform(folder: Path, steps: list[Any]) -> list[Any]:
    """What each call returned or raised, and the tree they left."""
    results: list[Any] = []
    os.chdir(folder)
    for call, args in steps:
        try:
            results.append((operator.attrgetter(call[3:])(os) if call[:3] == "os." else getattr(shutil, call[7:]))(*args)
                           if isinstance(call, str) else call(*args))  # fmt: skip
        except shutil.Error as error:
            results.append(("Error", str(error)))
        except OSError as error:
            results.append((type(error).__name__, error.errno))
    os.chdir(folder if os.path.exists(folder) else folder.parent)
    results.append([(top, files, [look(os.path.join(top, file)) for file in files if os.path.exists(os.path.join(top, file))])
                    for top, _, files in walk(str(folder.parent))])  # fmt: skip
    return json.loads(json.dumps(results, default=repr).replace(str(folder.parent), "HERE"))


def on_disk(folder: Path) -> dict[str, Any]:
    """Everything below a folder: kind, state and contents."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        state = path.lstat()
        data = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = (state.st_mode, state.st_mtime_ns, state.st_ino, data)
    return found


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="the calls are those of POSIX")
@settings(max_examples=150)
@given(steps=STEPS)
@example([("os.symlink", ("b.txt", "b.txt")), ("shutil.rmtree", ("b.txt",))])
@example([("shutil.copy", ("sub", "a")), ("shutil.rmtree", ("a",))])
def test_calls_give_what_they_give_for_real(steps: list[Any]) -> None:
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        for folder in (one, two):
            plant(Path(folder, "home").resolve())
        try:
            expected = perform(Path(one, "home").resolve(), steps)
            untouched = on_disk(Path(two))
            os.chdir(before)
            with isolated(lambda text: None):
                found = perform(Path(two, "home").resolve(), steps)
            assert os.getcwd() == before
        finally:
            os.chdir(before)
        assert found == expected
        assert on_disk(Path(two)) == untouched


# -- each way to the outside ---------------------------------------------------------------------------


def numpy_files() -> None:
    np.save("n.npy", np.arange(3))
    np.savez("n.npz", a=np.arange(3))
    mapped = np.memmap("m.dat", mode="w+", dtype="f4", shape=(10,))
    mapped[:] = 1
    mapped.flush()
    np.savetxt("s.txt", np.eye(2))
    np.arange(9).tofile("t.bin")
    assert np.load("n.npy").sum() == np.load("n.npz")["a"].sum() == 3
    assert np.loadtxt("s.txt").shape == (2, 2)
    assert np.memmap("m.dat", mode="r", dtype="f4")[3] == 1 and np.fromfile("t.bin", dtype=int)[3] == 3


def standard_files() -> None:
    with open("t.csv", "w", newline="") as file:
        csv.writer(file).writerow([1, 2])
    json.dump({"a": 1}, open("j.json", "w"))
    with shelve.open("shelf") as shelf:
        shelf["a"] = 1
    with shelve.open("shelf") as shelf:
        assert shelf["a"] == 1
    with zipfile.ZipFile("z.zip", "w") as archive:
        archive.writestr("member", "text")
    shutil.make_archive("all", "tar", ".")
    shutil.unpack_archive("all.tar", "unpacked")
    assert os.path.exists("unpacked/z.zip") and Path("t.csv").read_text() == "1,2\n"
    with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile(dir=folder) as file:
        assert os.path.exists(file.name)
    tempfile.TemporaryFile().write(b"1")
    tempfile.tempdir = None  # whoever is the first to ask tries by writing, and holds a lock meanwhile
    assert os.path.isdir(tempfile.gettempdir())


def users_files() -> None:
    Path("kept.txt").write_text("overwritten")
    with open("kept.txt", "a") as file:
        file.write("!")
    assert Path("kept.txt").read_text() == "overwritten!"
    shutil.copytree("folder", "copied")
    assert Path("copied/inner.txt").read_text() == "kept too"
    shutil.rmtree("copied")
    os.rename("folder", "moved")
    os.remove("moved/inner.txt")
    shutil.rmtree("moved")
    os.remove("kept.txt")
    assert os.listdir(".") == []
    os.makedirs("again")
    os.chdir("again")
    assert os.getcwd().endswith("again") and not glob.glob("../kept*")


def databases() -> None:
    with sqlite3.connect("new.sqlite") as connection:
        connection.execute("create table t(a)")
    assert sqlite3.connect("new.sqlite").execute("select count(*) from t").fetchone() == (0,)
    with sqlite3.connect(f"file:{os.path.abspath('new.sqlite')}?mode=rw", uri=True) as connection:
        connection.execute("insert into t values (1)")
        with pytest.raises(sqlite3.DatabaseError):
            connection.execute("attach 'other.sqlite' as other")
        with pytest.raises(sqlite3.DatabaseError):
            connection.execute("attach ? as other", ("other.sqlite",))


def programs() -> None:
    assert subprocess.run(["touch", "evil"], capture_output=True, text=True, check=True).stdout == ""
    assert os.system("touch evil") == 0 and subprocess.check_output("echo 1 > evil", shell=True) == b""
    with subprocess.Popen(["tee", "evil"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.communicate(b"x" * 1_000_000)[0] == b""
    os.popen("touch evil").close()


def threads() -> None:
    thread = threading.Thread(target=lambda: Path("thread.txt").write_text("x"))
    thread.start()
    thread.join()
    assert Path("thread.txt").exists()


def logs() -> None:
    handler = logging.FileHandler("new.log")
    logging.getLogger("test").addHandler(handler)
    logging.getLogger("test").warning("said")
    logging.getLogger("test").removeHandler(handler)
    handler.close()
    assert "said" in Path("new.log").read_text()


def tensors() -> None:
    import torch

    model = torch.nn.Linear(4, 4).cuda()
    torch.save(model.state_dict(), "step.tmp")
    os.replace("step.tmp", "best.pt")
    model.load_state_dict(torch.load("best.pt"))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=False).weight.is_cuda


WAYS = [numpy_files, standard_files, users_files, databases, programs, threads, logs, tensors]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_a_dry_run_does_is_not_done(
    way: Callable[[], None], tmp_path: Path, here: None, tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("shared")))  # where nobody else's dry run is
    home = tmp_path / "home"
    (home / "folder").mkdir(parents=True)
    (home / "kept.txt").write_text("kept")
    (home / "folder" / "inner.txt").write_text("kept too")
    os.chdir(home)
    om.dry_run(lambda: None)  # what is imported for it sets its own variables
    before, environment = on_disk(tmp_path), dict(os.environ)
    report = om.dry_run(way)
    assert on_disk(tmp_path) == before
    assert not [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("oom_magic_")]
    assert os.getcwd() == str(home) and dict(os.environ) == environment
    assert report.assumptions


def test_what_a_notebook_calls_with_an_exclamation_mark_is_not_started(shell: Any, tmp_path: Path, here: None) -> None:
    os.chdir(tmp_path)
    cell = (
        "%%gpumem --dry-run --no-plot -o report\nimport torch\n!touch evil\nfound = !ls\ntorch.ones(3, device='cuda')"
    )
    assert shell.run_cell(cell, store_history=True).success and not list(tmp_path.iterdir())
    said = [one.text for one in shell.user_ns["report"].assumptions]
    assert sum("not started" in one for one in said) == 2


REFUSED: dict[str, Callable[[], Any]] = {
    "os.fork": lambda: os.fork(),
    "multiprocessing": lambda: multiprocessing.get_context("spawn").Process(target=print).start(),
    "os._exit": lambda: os._exit(3),
    "os.kill": lambda: os.kill(os.getpid(), 9),
    "os.abort": lambda: os.abort(),
    "raise_signal": lambda: signal.raise_signal(signal.SIGTERM),
    "os.execv": lambda: os.execv(sys.executable, ["python"]),
    "connect": lambda: socket.create_connection(("192.0.2.1", 80), timeout=5),
    "sendto": lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.1", 80)),
    "urlopen": lambda: urllib.request.urlopen("http://example.invalid/", timeout=5),
    "FileIO": lambda: io.FileIO("raw.bin", "w"),
    "a function that was kept": lambda: KEPT["mkdir"]("made"),
}
KEPT = {"mkdir": os.mkdir}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", REFUSED)
def test_what_was_not_foreseen_is_refused_by_name_and_line(name: str, tmp_path: Path, here: None) -> None:
    os.chdir(tmp_path)

    def train() -> None:
        with pytest.raises(OSError, match="dry run"):
            REFUSED[name]()

    report = om.dry_run(train)
    assert not list(tmp_path.iterdir())
    assert any("refused" in one.text and one.line is not None for one in report.assumptions)


def test_a_name_that_a_users_module_binds_anew_is_answered(
    tmp_path: Path, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of its names is the same, so nothing that was learned of the module in an earlier run may be kept."""
    os.chdir(tmp_path)
    Path("bound_anew.py").write_text("class Kept:\n    drop = None\n\ndrop = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    import bound_anew  # type: ignore[import-not-found]

    om.dry_run(lambda: None)
    bound_anew.drop, bound_anew.Kept.drop = os.remove, staticmethod(os.rmdir)
    Path("file").write_text("kept")
    Path("folder").mkdir()
    om.dry_run(lambda: (bound_anew.drop("file"), bound_anew.Kept.drop("folder")))
    assert Path("file").read_text() == "kept" and Path("folder").is_dir()
    del sys.modules["bound_anew"]


@pytest.mark.skipif(not IS_KNOWN, reason="libc is not answered on this system, and the report says so")
def test_functions_of_c_that_were_looked_up_before_are_answered(tmp_path: Path, here: None) -> None:
    os.chdir(tmp_path)
    Path("kept").write_text("kept")
    number = os.open("kept", os.O_WRONLY)
    libc = ctypes.CDLL(None)
    write, unlink, make = libc.write, libc.unlink, libc.mkdir

    def train() -> None:
        assert write(number, b"HELD", 4) == 4 and make(b"made", 0o700) == 0 and os.path.isdir("made")
        assert unlink(b"kept") == 0 and not os.path.exists("kept")

    om.dry_run(train)
    assert os.listdir() == ["kept"] and Path("kept").read_text() == "kept"
    assert write(number, b"mine", 4) == 4 and Path("kept").read_text() == "mine"
    os.close(number)


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="POSIX")
def test_programs_that_were_started_before_end_for_the_user() -> None:
    programs = [subprocess.Popen(["sh", "-c", f"exit {status}"]) for status in (3, 4)]
    stopped = subprocess.Popen(["sleep", "100"])
    seen: list[Any] = []

    def train() -> None:
        seen.extend([programs[0].wait(), stopped.poll(), os.waitpid(programs[1].pid, 0)[1] >> 8])
        with pytest.raises(PermissionError):
            stopped.kill()

    DrySession(has_bar=False, is_lasting=False).run(train, [{"programs": programs, "stopped": stopped}])
    stopped.kill()
    assert seen == [3, None, 4] and [one.wait() for one in programs] == [3, 4] and stopped.wait() == -signal.SIGKILL


def test_what_cannot_be_undone_is_not_done_and_said() -> None:
    called: list[str] = []

    def train() -> None:
        sys.addaudithook(lambda event, args: called.append(event) if event == "mine" else None)
        os.register_at_fork(before=lambda: called.append("fork"))
        os.setsid()
        os.putenv("USERS", "1")

    session = os.getsid(0)
    report = om.dry_run(train)
    sys.audit("mine")
    assert not called and os.getsid(0) == session
    assert sum(one.line is not None for one in report.assumptions) == 4


def test_connections_within_the_machine_are_made() -> None:
    said: list[bytes] = []

    def train() -> None:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname()) as client,
            server.accept()[0] as connection,
        ):
            connection.sendall(b"hello")
            said.append(client.recv(5))

    observed(train)
    assert said == [b"hello"]


def test_a_name_imported_before_and_one_imported_inside_serve_alike(tmp_path: Path) -> None:
    names: dict[str, Any] = {"remove": os.remove, "open": open}
    (tmp_path / "kept").write_text("kept")
    code = f"from os import mkdir; remove(r'{tmp_path / 'kept'}'); mkdir(r'{tmp_path / 'made'}')"
    with isolated(lambda text: None, [names]):
        exec(compile(code, "<stdin>", "exec"), names)
    assert [one.name for one in tmp_path.iterdir()] == ["kept"]
    assert names["remove"] is os.remove and names["mkdir"] is os.mkdir and os.mkdir is KEPT["mkdir"]


def test_what_the_process_prints_to_is_as_before(here: None) -> None:
    number = os.open(os.devnull, os.O_WRONLY)
    before = [os.fstat(one) for one in range(3)]

    def train() -> None:
        for one in (1, 2):
            os.dup2(number, one)
        os.close(0)

    om.dry_run(train)
    os.close(number)
    assert [os.fstat(one)[:3] for one in range(3)] == [one[:3] for one in before]
