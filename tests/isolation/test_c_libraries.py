"""A cell that trains and then writes, with libraries that open files themselves: it reads back what it wrote, and
nothing is on the disk."""

from __future__ import annotations

import _socket
import _thread
import contextlib
import ctypes
import functools
import importlib
import io
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import oom_magic as om
from oom_magic.predict.isolation.files.c_calls import HAS_GATES
from oom_magic.predict.isolation.files.effects import isolated
from oom_magic.predict.isolation.files.linkage import IS_KNOWN
from tests.support.put_back import observed

pytestmark = pytest.mark.skipif(not IS_KNOWN, reason="C libraries are held back on Linux with glibc only")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the user is, which is the user's home too: caches and settings are looked for there."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "kept.txt").write_text("kept")
    monkeypatch.chdir(home)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "WANDB_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(home))
    yield home
    assert {path.relative_to(home): path.read_bytes() for path in home.rglob("*")} == {Path("kept.txt"): b"kept"}


def traced() -> None:
    torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)).save("traced.pt")  # type: ignore[no-untyped-call]
    assert Path("traced.pt").stat().st_size and torch.jit.load("traced.pt")(torch.ones(1, 2)).shape == (1, 2)  # type: ignore[no-untyped-call]


def scripted() -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), "scripted.pt")  # type: ignore[no-untyped-call]
    assert torch.jit.load("scripted.pt")(torch.ones(1, 2)).shape == (1, 2)  # type: ignore[no-untyped-call]


def profiled() -> None:
    mark = torch.profiler.record_function
    with mark("outside"), torch.profiler.profile() as profile, mark("inside"):
        torch.ones(3)
    assert [event.key for event in profile.key_averages() if event.key.endswith("side")] == ["inside"]
    profile.export_chrome_trace("trace.json")


def own_writer() -> None:
    torch._C.PyTorchFileWriter("own.zip").write_end_of_file()
    assert Path("own.zip").stat().st_size


def tokens() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.BPE()).save("tokens.json")
    assert tokenizers.Tokenizer.from_file("tokens.json")


def arrays() -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    numpy.save_file({"a": np.ones(3)}, "arrays.safetensors")
    assert numpy.load_file("arrays.safetensors")["a"].sum() == 3


def hdf5() -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File("a.h5", "w") as file:
        file["x"] = np.arange(3)
    Path("a.h5").rename("b.h5")
    with h5py.File("b.h5", "a") as file:
        assert file["x"][2] == 2
        file["y"] = 1


def arrow() -> None:
    pandas, _ = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    pandas.DataFrame({"a": [1, 2]}).to_parquet("a.parquet")
    assert len(pandas.read_parquet("a.parquet")) == 2


def hashed() -> None:
    for name in ("dbm.gnu", "dbm.ndbm", "dbm.dumb"):
        with contextlib.suppress(ImportError):  # not every Python has all
            module = importlib.import_module(name)
            with module.open(name, "c") as table:
                table["a"] = "1"
            with module.open(name, "r") as table:
                assert table["a"] == b"1"


def figures() -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    figure.subplots().plot([1, 2], label="$x$")
    for ending in ("png", "pdf", "svg"):
        figure.savefig(f"f.{ending}")
        assert Path(f"f.{ending}").stat().st_size > 1000


def tables() -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"a": [1, 2]})
    for name in ("csv", "json", "pickle"):
        getattr(table, f"to_{name}")(f"t.{name}")
        assert getattr(pandas, f"read_{name}")(f"t.{name}")["a"].tolist() == [1, 2]
    with sqlite3.connect("t.sqlite") as connection:
        table.to_sql("t", connection)
        assert len(pandas.read_sql("select * from t", connection)) == 2


def images() -> None:
    image = pytest.importorskip("PIL.Image")
    for name in ("i.png", "i.jpg"):
        image.fromarray(np.zeros((8, 8, 3), "u1")).save(name)
        assert np.asarray(image.open(name)).shape == (8, 8, 3)


def sound() -> None:
    soundfile = pytest.importorskip("soundfile")
    soundfile.write("s.wav", np.zeros(100), 8000)
    assert len(soundfile.read("s.wav")[0]) == 100


def tracked() -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter("runs/one") as writer:
        writer.add_scalar("loss", 1.0, 0)
    assert list(Path("runs/one").iterdir())


def wandb() -> None:
    wandb = pytest.importorskip("wandb")
    with wandb.init(project="p", mode="offline") as run:
        wandb.log({"loss": 1.0})
        run.log({"loss": 2.0})


def compressed() -> None:
    zlib = library()
    write(zlib, b"new.gz")
    assert Path("new.gz").read_bytes()[:2] == b"\x1f\x8b"
    write(zlib, b"kept.txt")
    assert Path("kept.txt").read_bytes()[:2] == b"\x1f\x8b"


def library() -> Any:
    """zlib, which opens files by their names."""
    try:
        return ctypes.CDLL("libz.so.1")
    except OSError:
        pytest.skip("no zlib here")


def write(zlib: Any, path: bytes) -> None:
    zlib.gzopen.restype, zlib.gzclose.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    zlib.gzclose(zlib.gzopen(path, b"wb"))


WAYS = [
    traced, scripted, profiled, own_writer, tokens, arrays, hdf5, arrow, hashed, figures, tables, images, sound, tracked,
    wandb, compressed,
]  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_a_c_library_writes_is_not_written(way: Callable[[], None]) -> None:
    def run() -> None:
        model = torch.nn.Linear(8, 8).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(5):
            model(torch.ones(2, 8, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        try:
            way()  # what it raises is not raised again: training lies behind
        except BaseException as error:
            raised.append(error)
        else:
            raised.append(None)

    raised: list[BaseException | None] = []
    observed(run)
    (error,) = raised
    if isinstance(error, pytest.skip.Exception):
        raise error
    assert error is None


def test_a_library_that_was_loaded_before_is_itself_again_afterwards(tmp_path: Path) -> None:
    zlib = library()
    with isolated(lambda text: None):
        write(zlib, b"inside.gz")
    write(zlib, os.fsencode(tmp_path / "after.gz"))
    assert (tmp_path / "after.gz").exists()


def test_other_threads_write_with_c_libraries_as_always(tmp_path: Path) -> None:
    zlib, go, done = library(), threading.Event(), threading.Event()

    def theirs() -> None:
        go.wait()
        write(zlib, os.fsencode(tmp_path / "theirs.gz"))
        done.set()

    def run() -> None:
        go.set()
        done.wait()
        write(zlib, os.fsencode(tmp_path / "ours.gz"))

    thread = threading.Thread(target=theirs)
    thread.start()
    om.dry_run(run)
    thread.join()
    assert [path.name for path in tmp_path.glob("*.gz")] == ["theirs.gz"]


def test_threads_that_threading_does_not_know_are_the_users_too() -> None:
    """As execnet's, which receives what other processes send."""
    (take, send), received, done = os.pipe(), [], threading.Event()

    def receive() -> None:
        while text := os.read(take, 1):
            received.append(text)
        done.set()

    _thread.start_new_thread(receive, ())
    sender = subprocess.Popen(["sh", "-c", "for i in 1 2 3 4; do printf x; sleep 0.1; done"], stdout=send)
    os.close(send)
    om.dry_run(lambda: time.sleep(0.4))
    assert sender.wait() == 0 and done.wait(9)
    os.close(take)
    assert len(received) == 4


def test_threads_that_the_run_starts_without_threading_are_the_runs(home: Path) -> None:
    number, started, done = os.open(home.parent / "log", os.O_RDWR | os.O_CREAT), [], threading.Event()

    def work(text: bytes) -> None:
        os.write(number, text)
        Path("made.txt").write_text("by the run")
        done.set()

    def run() -> None:
        started.append(_thread.start_new_thread(work, (b"run",)))
        done.wait()
        assert Path("made.txt").exists()

    observed(run)
    assert started and (home.parent / "log").read_bytes() == b""
    os.close(number)


def test_a_file_of_hdf5_that_was_open_is_as_it_was(home: Path) -> None:
    """What the library knows of the file is in its own memory: the next flush would write the run's data."""
    h5py = pytest.importorskip("h5py")
    path = home.parent / "features.h5"
    file = h5py.File(path, "w")
    numbers, group = file.create_dataset("numbers", data=np.arange(4)), file.create_group("group")
    file.attrs["epoch"] = 1

    def run() -> None:
        numbers[0], file["more"], group["inner"], file.attrs["epoch"] = 99, np.ones(3), 5, 2
        file.flush()
        assert (numbers[0], file["more"][0], file["group/inner"][()], file.attrs["epoch"]) == (99, 1, 5, 2)

    om.dry_run(run)

    def content() -> Any:
        return list(file), file["numbers"][:].tolist(), list(file["group"]), dict(file.attrs)

    assert content() == (["group", "numbers"], [0, 1, 2, 3], [], {"epoch": 1})
    numbers[1] = 7
    file.close()
    with h5py.File(path) as file:
        assert content() == (["group", "numbers"], [0, 7, 2, 3], [], {"epoch": 1})


@pytest.mark.skipif(not HAS_GATES, reason="the interpreter's own calls are answered on x86-64 only")
def test_what_was_open_gets_nothing_by_whatever_holds_the_call(tmp_path: Path) -> None:
    import ctypes.util
    import fcntl

    path = tmp_path / "log"
    path.write_bytes(b"before")
    number = os.open(path, os.O_RDWR)
    os.lseek(number, 2, os.SEEK_SET)
    read, write = os.pipe()
    here, there = socket.socketpair()
    there.setblocking(False)
    held = {name: getattr(os, name) for name in ("write", "pwrite", "close", "dup2", "ftruncate", "lseek", "read")}
    pushed = functools.partial(os.write, number)
    libc = ctypes.CDLL(ctypes.util.find_library("c"))

    def run() -> None:
        held["write"](number, b"XY")
        pushed(b"Z")
        io.FileIO(number, "w", closefd=False).write(b"raw")
        libc.write(number, b"C", 1)
        ctypes.CDLL(None).pwrite(number, b"D", 1, 0)
        assert held["lseek"](number, 0, os.SEEK_SET) == 0 and held["read"](number, 99) == b"DeXYZrawC"
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(PermissionError, match="refused"):
            held["ftruncate"](number, 1)
        held["write"](write, b"pipe")
        held["dup2"](read, number)
        held["close"](write)
        with pytest.raises(OSError, match="non-socket"):
            _socket.socket.send(here, b"sent")
        subprocess.run(["true"], check=True)

    report = om.dry_run(run)
    assert path.read_bytes() == b"before" and os.read(number, 9) == b"fore"
    other = os.open(path, os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert os.write(write, b"-") == 1 == len(os.read(read, 9))
    with pytest.raises(BlockingIOError):
        there.recv(9)
    assert sum(str(path) in one.text for one in report.assumptions) == 1
    for one in (number, other, read, write):
        os.close(one)
    here.close(), there.close()


def test_a_table_that_was_being_written_gets_nothing(home: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table({"a": [1, 2]})
    path = home.parent / "table.parquet"
    writer = parquet.ParquetWriter(path, table.schema)
    writer.write_table(table)
    om.dry_run(lambda: writer.write_table(table))
    writer.close()
    assert parquet.read_table(path).num_rows == 2


def test_a_writer_of_the_users_gets_nothing(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    writer = tensorboard.SummaryWriter(tmp_path / "runs")
    writer.add_scalar("loss", 1.0, 0)
    writer.flush()
    (file,) = (tmp_path / "runs").iterdir()
    before = file.read_bytes()

    def run() -> None:
        writer.add_scalar("loss", 2.0, 1)
        writer.flush()

    om.dry_run(run)
    writer.flush()
    assert file.read_bytes() == before
    writer.add_scalar("loss", 3.0, 1)
    writer.close()
    assert len(file.read_bytes()) > len(before)
    assert sys.modules["torch.utils.tensorboard"] is tensorboard


def test_no_process_ends_by_a_call_through_ctypes() -> None:
    libc, known = ctypes.CDLL(None), ctypes.CDLL(None).abort

    def run() -> None:
        known()
        assert libc.kill(os.getpid(), 0) == 0
        for name, args in {"exit": [3], "_exit": [3], "kill": [os.getpid(), 9], "raise": [6], "abort": []}.items():
            assert getattr(ctypes.CDLL(None), name)(*args) == getattr(libc, name)(*args) == -1

    said = [one.text for one in om.dry_run(run).assumptions if "ctypes" in one.text]
    assert len(set(said)) == 5 and "ctypes: `_exit` was not called, because it can end a process" in said
