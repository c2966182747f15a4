"""What is alive beside a dry run, and would be used by it: workers, queues between processes, what modules hold."""

from __future__ import annotations

import collections
import hmac
import logging
import multiprocessing
import sys
import types
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any
from xml.dom import minidom

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from oom_magic.predict.session import DrySession
from tests.support.put_back import check_put_back


def dry_run(function: Any, names: dict[str, Any]) -> list[str]:
    report = DrySession(has_bar=False, is_lasting=False).run(function, [names])
    return [one.text for one in report.assumptions]


def test_workers_that_wait_for_the_next_batch_are_not_disturbed() -> None:
    loader = DataLoader(range(40), 4, num_workers=2, persistent_workers=True)  # type: ignore[arg-type]
    batches = iter(loader)
    first = next(batches)
    seen: list[Any] = []
    dry_run(lambda: [seen.append(batch) for batch in loader], {"loader": loader, "batches": batches})
    assert torch.cat([first, *batches]).tolist() == list(range(40)), "neither reset nor taken from"
    assert len(list(loader)) == 10


def test_a_thread_that_sends_what_a_queue_holds_gets_nothing_of_the_run() -> None:
    mine: Any = multiprocessing.Queue()
    mine.put("before")
    assert mine.get(timeout=10) == "before"
    got: list[Any] = []

    def run() -> None:
        mine.put("inside")
        got.append(mine.get(timeout=10))

    said = dry_run(run, {"mine": mine, "got": []})
    assert got == ["inside"] and any("multiprocessing.Queue.put" in one for one in said)
    mine.put("after")
    assert mine.get(timeout=10) == "after", "its thread still waits for more"
    mine.close()
    mine.join_thread()


def test_shared_memory_stays_open() -> None:
    mine = SharedMemory(create=True, size=8)
    assert mine.buf is not None
    mine.buf[:2] = b"me"

    def run() -> None:
        assert mine.buf is not None
        mine.buf[:2] = b"no"
        mine.close()
        other = SharedMemory(create=True, size=8)
        other.close()
        other.unlink()

    dry_run(run, {"mine": mine})
    assert bytes(mine.buf[:2]) == b"me"
    mine.close()
    mine.unlink()


def test_what_code_sets_beside_attributes_is_put_back() -> None:
    class Named:
        pass

    table: collections.defaultdict[str, list[int]] = collections.defaultdict(list)
    array, made = np.ones(3), types.ModuleType("made_by_hand")
    array.setflags(write=False)
    sys.modules["made_by_hand"] = made
    vars(made)["state"] = {"seen": [1]}
    rows, keyed, page = np.zeros(3, dtype=[("x", int)]), hmac.new(b"key", digestmod="sha1"), minidom.parseString("<a/>")
    root = page.documentElement
    assert root is not None

    def unlock() -> None:
        array.setflags(write=True)
        array[0] = 9

    try:
        check_put_back(
            {
                "name of a class": (lambda: Named.__name__, lambda: setattr(Named, "__name__", "Other")),
                "default factory": (lambda: table.default_factory, lambda: setattr(table, "default_factory", set)),
                "an array that could only be read": (lambda: (array.tolist(), array.flags.writeable), unlock),
                "a module made by hand": (lambda: repr(vars(made)["state"]), lambda: made.state["seen"].append(2)),
                "rows of a table": (lambda: rows.tolist(), lambda: rows.resize(5, refcheck=False)),
                "what a slot of a library's holds": (keyed.hexdigest, lambda: keyed.update(b"more")),
                "attributes in a slot": (page.toxml, lambda: root.setAttribute("b", "1")),
            },
            {"Named": Named, "table": table, "array": array, "made": made, "held": (rows, keyed, page)},
        )
        assert rows.shape == (3,) and array.tolist() == [1.0] * 3 and "Other" not in repr(Named)
    finally:
        del sys.modules["made_by_hand"]


_LIBRARY = """\
import threading, weakref
settings = threading.local()
settings.of_display = {"mode_of_display": "usual"}
class Bar:
    open_bars = weakref.WeakSet()
    def __init__(self): self.open_bars.add(self)
    def close(self): self.open_bars.discard(self)
class Store:
    _open_item = staticmethod(open)
    def write(self, name): self._open_item(name, "w").close()
"""


def test_a_library_that_holds_settings_of_threads_open_objects_and_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "library_with_bars.py").write_text(_LIBRARY)
    monkeypatch.syspath_prepend(str(folder))
    import library_with_bars as library  # type: ignore[import-not-found]

    mine, left = library.Bar(), []

    def run() -> None:
        import library_with_bars as library

        library.settings.of_display["mode_of_display"] = "other"
        mine.close()
        left.append(library.Bar())
        library.Store().write(tmp_path / "written")
        assert (tmp_path / "written").exists()

    try:
        dry_run(run, {"mine": mine, "library": library, "run": run})
        assert library.settings.of_display == {"mode_of_display": "usual"}
        assert list(library.Bar.open_bars) == [mine] and not (tmp_path / "written").exists()
    finally:
        del sys.modules["library_with_bars"]


def test_loggers_that_the_run_makes_are_gone() -> None:
    child = logging.getLogger("users_tree.branch.leaf")

    def run() -> None:
        logging.getLogger("users_tree.branch").setLevel(5)
        logging.getLogger("users_other_tree")

    before = dict(logging.root.manager.loggerDict)
    dry_run(run, {"run": run})
    tree = logging.root.manager.loggerDict
    assert "users_other_tree" not in tree and tree["users_tree.branch"] is before["users_tree.branch"]
    assert child.parent is logging.root
    assert logging.getLogger("users_tree.branch") is child.parent


def test_a_module_without_a_name_stays_where_it_is(shell: Any) -> None:
    """``%run`` empties its module; one that an error leaves so was asked for its name."""
    nameless = types.ModuleType("nameless")
    vars(nameless).clear()
    shell.user_ns["nameless"] = nameless
    assert shell.run_cell("%%gpumem --dry-run --no-plot\nget_ipython().nameless = nameless").success
    assert not hasattr(shell, "nameless")


@pytest.mark.skipif(torch.__version__ < "2.7", reason="weight_norm has no backward on meta before PyTorch 2.7")
def test_a_weight_without_data_takes_over_a_tensor_of_the_host() -> None:
    layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4))
    before = layer.weight.detach().clone()

    def run() -> None:
        layer.weight = torch.zeros(4, 4)
        layer(torch.ones(1, 4)).sum().backward()

    dry_run(run, {"layer": layer})
    assert torch.equal(layer.weight, before)
