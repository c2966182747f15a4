"""What belongs to a notebook's kernel is after a dry cell what it was: its names, its shell, its loop, its logs."""

from __future__ import annotations

import asyncio
import collections
import contextvars
import copy
import gc
import hashlib
import importlib
import io
import logging.config
import logging.handlers
import selectors
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import oom_magic as om
from oom_magic.memory.report import MemoryReport
from oom_magic.predict.session import DrySession

CARD = "%%gpumem --dry-run --no-plot\n"


def test_a_dry_cell_takes_nothing_from_the_users_iterators(shell: Any) -> None:
    shell.user_ns.update(words=iter("abc"), digest=hashlib.sha256(), seen=[])
    for _ in range(2):
        assert shell.run_cell(CARD + "seen.append(next(words))\ndigest.update(b'x')\nassert next(words) == 'b'").success
    assert next(shell.user_ns["words"]) == "a" and shell.user_ns["seen"] == []
    assert shell.user_ns["digest"].digest() == hashlib.sha256().digest()


def test_a_context_that_was_copied_before_keeps_its_values() -> None:
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="none")
    name.set("mine")
    own = contextvars.copy_context()
    names: dict[str, Any] = {"own": own, "kept": [own]}

    def run() -> None:
        names["own"].run(name.set, "changed")
        assert names["kept"][0].run(name.get) == "changed"

    dry_run(run, names)
    assert names["own"] is own and names["kept"][0] is own and own[name] == "mine"


class Loop:
    """An event loop with something on it, and all that it shows."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop: Any = loop
        self.done: list[str] = []
        self.ends = socket.socketpair()
        loop.call_soon(self.done.append, "before")
        loop.add_reader(self.ends[0], print)
        self.later = loop.call_later(1000, print)
        self.before = self.values()

    def values(self) -> dict[str, Any]:
        loop, waiting = self.loop, [one for one in (*self.loop._ready, *self.loop._scheduled) if not one.cancelled()]
        return {
            "done": list(self.done),
            "set": (loop.get_debug(), loop.get_task_factory(), loop._exception_handler, loop._default_executor),
            "waiting": list(map(id, waiting)),
            "readers": [[one and one.cancelled() for one in key.data] for key in loop._selector.get_map().values()],
            "open": (loop.is_closed(), loop.is_running(), list(loop._selector.get_map())),
            "methods": sorted(set(vars(loop)) & {"call_soon", "call_at", "close"}),
        }

    async def work(self) -> None:
        self.done.append("task")

    def change(self) -> None:
        loop = self.loop
        for schedule in (loop.call_soon, loop.call_soon_threadsafe, lambda *args: loop.call_later(0, *args)):
            schedule(self.done.append, "inside")
        loop.create_task(self.work())
        loop.set_debug(True)
        loop.set_task_factory(print)
        loop.set_exception_handler(print)
        loop.remove_reader(self.ends[0])
        self.later.cancel()
        loop.add_writer(self.ends[1], print)
        if not loop.is_running():
            loop.run_in_executor(None, len, "")
            loop.stop()
            loop.run_forever()
            loop.close()

    def check(self) -> None:
        assert self.values() == self.before
        for end in self.ends:
            self.loop.remove_reader(end)
            end.close()


def dry_run(function: Any, names: dict[str, Any]) -> list[str]:
    report = DrySession(has_bar=False, is_lasting=False).run(function, [names])
    return [one.text for one in report.assumptions]


@pytest.mark.filterwarnings("error")
def test_the_run_leaves_nothing_on_event_loops(capfd: pytest.CaptureFixture[str]) -> None:
    async def in_a_notebook() -> list[str]:
        own = Loop(asyncio.get_running_loop())
        said = dry_run(own.change, {"own": own})
        own.check()
        await asyncio.sleep(0.01)
        assert own.done == ["before"]
        return said

    assert any("event loop" in one for one in asyncio.run(in_a_notebook()))
    other = Loop(asyncio.new_event_loop())
    dry_run(other.change, {"other": other})
    other.check()
    other.loop.call_later(0.01, other.loop.stop)
    other.loop.run_forever()
    assert other.done == ["before"]
    other.loop.close()
    gc.collect()
    assert "never awaited" not in capfd.readouterr().err


async def train(size: int) -> int:
    """Trains a little, and lets others go on meanwhile."""
    model = torch.nn.Linear(size, size, device="cuda")
    for _ in range(2):
        loss = await asyncio.create_task(later(model, size))
        loss.backward()
    return size


async def later(model: torch.nn.Module, size: int) -> torch.Tensor:
    await asyncio.sleep(0)
    loss: torch.Tensor = model(torch.ones(size, size, device="cuda")).sum()
    return loss


def test_an_async_function_is_run_to_its_end_also_in_a_notebook() -> None:
    async def in_a_notebook() -> MemoryReport:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        report = om.dry_run(train, 1024)
        assert (asyncio.current_task(), asyncio.get_running_loop()) == (task, loop)
        waiting = loop.create_future()
        with pytest.raises(RuntimeError, match="event loop of its own"):
            om.dry_run(lambda: awaiting(waiting))
        await asyncio.sleep(0)
        assert om.dry_run(train, 2**17).out_of_memory is not None
        return report

    async def awaiting(one: Any) -> None:
        await one

    inside, outside = asyncio.run(in_a_notebook()), om.dry_run(lambda: train(1024))
    assert inside.peak_allocated_bytes == outside.peak_allocated_bytes > 3 * 1024**2 * 4
    assert om.size(train, size=(256, 512)).peak_allocated_bytes(size=512) > 512**2 * 4


def test_a_generator_function_is_refused_in_words() -> None:
    def batches() -> Any:
        yield torch.ones(4, device="cuda")

    with pytest.raises(TypeError, match="Pass a function that takes them"):
        om.dry_run(batches)


@pytest.mark.slow
def test_a_cell_awaits_on_a_loop_of_its_own(shell: Any) -> None:
    """As IPython's autoawait lets a cell do; its loops and its background tasks are followed."""
    shell.user_ns.update(train=train, asyncio=asyncio, torch=torch)

    async def in_a_notebook(cell: str) -> Any:
        result = shell.run_cell(CARD + cell)
        await asyncio.sleep(0)
        return result

    assert asyncio.run(in_a_notebook("size = await train(1024)\nsize + 1")).result == 1025
    loop = "for step in range(1000):\n    await asyncio.sleep(0)\n    loss = torch.ones(1024, device='cuda').sum()"
    assert shell.run_cell(CARD + loop).success
    background = "await asyncio.sleep(0)\ntask = asyncio.create_task(train(4096))"
    assert shell.run_cell(CARD.replace("\n", " -o report\n") + background).success
    assert shell.user_ns["report"].peak_allocated_bytes > 3 * 4096**2 * 4
    failed = shell.run_cell(CARD + "async with asyncio.Lock():\n    await train(2**17)").error_in_exec
    assert isinstance(failed, torch.OutOfMemoryError)


class OtherLoop(asyncio.AbstractEventLoop):
    """One that is not made as asyncio's own are, such as uvloop's."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def is_closed(self) -> bool:
        return bool(self.done)

    def call_soon(self, *args: Any, **kwargs: Any) -> Any:
        self.done.append("called")

    def close(self) -> None:
        self.done.append("closed")


def test_a_loop_that_cannot_be_restored_can_only_be_asked() -> None:
    loop = OtherLoop()

    def run() -> None:
        assert not loop.is_closed()
        loop.close()
        loop.call_soon(print)

    with pytest.raises(RuntimeError, match="call_soon: an event loop"):
        dry_run(run, {"loop": loop})
    assert not loop.is_closed() and vars(loop) == {"done": []}


def test_selectors_stay_open() -> None:
    ends, selector = socket.socketpair(), selectors.DefaultSelector()
    selector.register(ends[0], selectors.EVENT_WRITE, "mine")

    def run() -> None:
        selector.unregister(ends[0])
        selector.register(ends[1], selectors.EVENT_READ)
        selector.close()

    dry_run(run, {"selector": selector})
    assert [(key.fileobj, key.data) for key, _ in selector.select(0)] == [(ends[0], "mine")]
    for one in (selector, *ends):
        one.close()


CHANGES = """
import sys
ip.ast_transformers.append(print)
ip.input_transformers_post.append(lambda lines: lines)
ip.input_transformer_manager.cleanup_transforms.pop()
ip.events.register("pre_run_cell", lambda *_: None)
ip.register_magic_function(lambda line: 1, "line", "mine")
ip.define_macro("mine_too", "1")
ip.alias_manager.define_alias("my_alias", "ls")
ip.display_formatter.formatters["text/html"].for_type(int, str)
ip.display_formatter.active_types = ["text/plain"]
ip.set_custom_exc((ValueError,), lambda *_: None)
ip.set_hook("editor", print)
ip.ast_node_interactivity = "all"
ip.colors = "linux"
ip.user_ns_hidden["mine"] = 1
ip.showtraceback = print
ip.events.register("post_run_cell", library_of_shells.remembered)
ip.run_line_magic("load_ext", "extension_of_shells")
sys.displayhook, sys.excepthook = print, print
"""


def of_shell(ip: Any) -> dict[str, Any]:
    """What the shell's users set."""
    formatters = ip.display_formatter.formatters
    return {
        "transformers": (list(ip.ast_transformers), list(ip.input_transformers_post)),
        "cleanup": list(ip.input_transformer_manager.cleanup_transforms),
        "events": list(ip.events.callbacks["pre_run_cell"]),
        "magics": {kind: sorted(names) for kind, names in ip.magics_manager.magics.items()},
        "formatters": (dict(formatters["text/html"].type_printers), list(ip.display_formatter.active_types)),
        "enabled": {name: one.enabled for name, one in formatters.items()},
        "errors": (ip.CustomTB, ip.custom_exceptions, "showtraceback" in vars(ip)),
        "hooks": str(ip.hooks["editor"].chain) if hasattr(ip.hooks["editor"], "chain") else ip.hooks["editor"],
        "settings": (ip.ast_node_interactivity, ip.colors, "mine" in ip.user_ns_hidden, "mine_too" in ip.user_ns),
        "python": (sys.displayhook, sys.excepthook),
    }


def test_the_shell_is_as_before(shell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "library_of_shells.py").write_text("def remembered(*_): pass")
    extension = "def mine(*_): pass\ndef load_ipython_extension(ip): ip.events.register('pre_run_cell', mine)"
    (tmp_path / "site-packages" / "extension_of_shells.py").write_text(extension)
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    shell.user_ns["ip"] = shell
    before, callbacks = of_shell(shell), shell.events.callbacks["post_run_cell"]
    assert shell.run_cell(CARD + "import library_of_shells" + CHANGES).success
    assert of_shell(shell) == before
    assert callbacks.pop() is sys.modules.pop("library_of_shells").remembered


@pytest.mark.slow
def test_files_of_logs_stay_open_whatever_the_run_does_to_their_handlers(tmp_path: Path) -> None:
    """A handler holds ``open`` itself, and a file that no name leads to."""
    logger = logging.getLogger("users.files")
    rotating = logging.handlers.RotatingFileHandler(tmp_path / "rotating", backupCount=2)
    handlers = [
        rotating,
        logging.FileHandler(tmp_path / "file"),
        logging.StreamHandler((tmp_path / "stream").open("w")),
    ]
    for handler in handlers:
        logger.addHandler(handler)
    logger.warning("before")

    def run() -> None:
        logger.warning("inside")
        rotating.doRollover()
        for handler in handlers:
            handler.close()
            logger.removeHandler(handler)
        logger.addHandler(logging.FileHandler(tmp_path / "other"))
        logger.warning("inside")
        logging.config.dictConfig({"version": 1})  # forgets all handlers

    numbers = [handler.stream.fileno() for handler in handlers]  # type: ignore[attr-defined]
    num_open = 0
    for _ in range(2):
        dry_run(run, {"rotating": rotating, "handlers": handlers})
        assert [handler.stream.fileno() for handler in handlers] == numbers  # type: ignore[attr-defined]
        gc.collect()
        assert num_open in (0, num_open := len(list(Path("/dev/fd").iterdir())))
    logger.warning("after")
    for handler in handlers:
        handler.stream.close()  # type: ignore[attr-defined]
        logger.removeHandler(handler)
    texts = {file.name: file.read_text().split() for file in tmp_path.iterdir()}
    assert texts == {name: ["before", "after"] for name in ("rotating", "file", "stream")}


def test_what_handlers_of_logs_keep_is_as_before() -> None:
    class Last(logging.Handler):
        def __init__(self) -> None:
            super().__init__()
            self.seen: collections.deque[str] = collections.deque(["before"], maxlen=3)

        def emit(self, record: logging.LogRecord) -> None:
            self.seen.append(record.getMessage())

    logger, text = logging.getLogger("users.log"), logging.StreamHandler(io.StringIO())
    memory, last = logging.handlers.MemoryHandler(100, target=text), Last()
    handlers: list[Any] = [text, memory, last]
    text.setFormatter(logging.Formatter("{message}", style="{"))
    for handler in handlers:
        logger.addHandler(handler)
    logger.warning("before")

    def values() -> Any:
        kept = text.stream.getvalue(), [one.msg for one in memory.buffer], list(last.seen)
        return kept, [(one.level, one.filters, one.formatter) for one in handlers], text.formatter.datefmt  # type: ignore[union-attr]

    def run() -> None:
        logger.warning("inside")
        memory.flush()
        text.formatter.datefmt = "x"  # type: ignore[union-attr]
        for handler in handlers:
            handler.addFilter(print)
            handler.setLevel(5)
        text.setFormatter(None)
        text.setStream(io.StringIO())

    before, stream = copy.deepcopy(values()[0]), text.stream
    rest = values()[1:]
    dry_run(run, {})
    assert values()[0] == before and values()[1:] == rest and rest[0][0][1] == [] and text.stream is stream
    for handler in handlers:
        logger.removeHandler(handler)


LIBRARY = """
class Logger:
    def __init__(self):
        self.sinks, self.level = {}, 10
    def add(self, path):
        self.sinks[path] = open(path, "w")
    def log(self, text):
        for sink in self.sinks.values():
            sink.write(text)
            sink.flush()
logger = Logger()
"""


def test_a_library_s_own_object_is_put_back_where_only_its_module_leads_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "site-packages"
    home.mkdir()
    (home / "dry_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(home)
    library: Any = importlib.import_module("dry_library")
    before, after = str(tmp_path / "a.log"), str(tmp_path / "b.log")
    library.logger.add(before)

    def run() -> None:
        library.logger.log("inside")
        library.logger.sinks.pop(before).close()
        library.logger.add(after)
        library.logger.level = 0

    dry_run(run, {"library": library})
    library.logger.log("outside")
    assert list(library.logger.sinks) == [before] and library.logger.level == 10
    assert Path(before).read_text() == "outside" and not Path(after).exists()
    library.logger.sinks[before].close()


FUNCTION = """batch, calls = 32, 0
def train():
    global calls
    calls += 1
    return torch.ones(batch, 1024, device="cuda")
class Trainer:
    def fit(self):
        return train()
trainer = Trainer()
def other(): return torch.ones(1, device="cuda")"""
SAID = "is of a cell that ran for real"


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("batch = 256\ntrain()", "`train` is of a cell that ran for real: it uses the notebook's own `batch`, `calls`"),
        ("batch = 256\ntrainer.fit()", "`batch`, `calls`, not what dry runs assigned"),
        ("batch = 256\nother()", ""),
        ("def train(): return torch.ones(batch, 1, device='cuda')\nbatch = 256\ntrain()", ""),
        ("batch = 256\ntorch.ones(batch, device='cuda')", ""),
    ],
)
def test_functions_of_real_cells_are_named_that_do_not_see_what_dry_cells_assign(
    shell: Any, monkeypatch: pytest.MonkeyPatch, cell: str, said: str
) -> None:
    """The batch of the notebook was run without a word, in place of the one that the dry cell had set."""
    monkeypatch.setattr("oom_magic.notebook.magics.has_gpu", lambda: False)
    shell.run_cell(f"import torch\n{FUNCTION}")
    assert shell.run_cell(f"{CARD}{cell}").success
    shown = " ".join(" ".join(str(one["data"].get("text/plain", "")) for one in shell.display_pub.outputs).split())
    assert said in shown and (said or SAID not in shown)
    assert shell.user_ns["batch"] == 32 and shell.user_ns["calls"] == 0
