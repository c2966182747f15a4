"""Fixtures that every test may use."""

from __future__ import annotations

import gc
import os
import random
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

os.environ["OOM_MAGIC_LANG"] = "en"  # whatever the machine speaks
GOLDEN = Path(__file__).parent / "golden"

# No test is timed: a slow machine is not a fault of the code.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
_BEGAN = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="Write what tests/golden should hold.")
    parser.addoption("--require-browser", action="store_true", help="Run tests/browser; fail if that cannot be.")
    parser.addoption("--notebooks", action="store_true", help="Execute every notebook; takes minutes.")
    parser.addoption("--slow", action="store_true", help="Run the tests marked slow too; takes many minutes.")
    parser.addoption("--seconds", type=float, help="Leave out the tests that would begin after so many.")
    parser.addoption(
        "--require-truth",
        action="store_true",
        help="Fail where a recorded truth is not compared: other versions are here.",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out a test whose time is used up, in words."""
    seconds = item.config.getoption("--seconds")
    if seconds is not None and time.monotonic() - _BEGAN > seconds:
        pytest.skip(f"left out: the {seconds:.0f} s of --seconds are used up")


@pytest.hookimpl(tryfirst=True)  # before -m selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in _beyond_samples(items):
        item.add_marker(pytest.mark.slow)
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="takes long; run with --slow, as CI does"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    reason = f"no CUDA device (torch {torch.__version__}); shared/fakecuda stands in for one"
    for item in marked:
        item.add_marker(pytest.mark.skip(reason=reason))


def _beyond_samples(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Of each test that is marked ``sampled(n)``, all of its cases but n, which are spread over them evenly."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for some in cases.values():
        number = some[0].get_closest_marker("sampled").args[0]  # type: ignore[union-attr]
        yield from (one for at, one in enumerate(some) if at * number % len(some) >= number)


@pytest.fixture(autouse=True, scope="module")
def _no_other_tests(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of the tests' modules only those are imported that this one imports: each dry run notes all that they hold."""
    own = _imported_by(Path(request.module.__file__))
    files = {name: Path(getattr(module, "__file__", None) or "") for name, module in list(sys.modules.items())}
    others = {name: sys.modules.pop(name) for name, file in files.items() if file in _TESTS - own}
    yield
    sys.modules.update(others | sys.modules)


_TESTS = frozenset(Path(__file__).parent.rglob("[!_]*.py")) - {Path(__file__)}  # packages stay
_IMPORTS = re.compile(r"^ *(?:from|import) tests\b.*", re.MULTILINE)


def _imported_by(file: Path) -> set[Path]:
    """The files of the tests' modules that one of them needs, itself included."""
    found, waiting = set(), {file}
    while waiting:
        found.add(one := waiting.pop())
        names = set(re.findall(r"\w+", " ".join(_IMPORTS.findall(one.read_text(encoding="utf-8")))))
        waiting |= {other for other in _TESTS - found if other.stem in names}
    return found


@pytest.fixture(autouse=True)
def _the_same_draws_each_time() -> None:
    """What a test draws (the order of a shuffled loader, say) decides what is reserved."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    random.seed(0)


@pytest.fixture(autouse=True)
def _nothing_kept_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test finds nothing that another run left in the user's cache folder."""
    from oom_magic.predict.sizing import store

    monkeypatch.setattr(store, "is_on", False)


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dry runs are made where a test can see them, and not on the cores of other tests."""
    from oom_magic.predict.sizing import runs

    monkeypatch.setattr(runs, "most_copies", 0)


@pytest.fixture(autouse=True)
def _room_for_every_test_s_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """All these modules are the user's here, with the truth that they have read: more than a notebook's objects."""
    from oom_magic.predict.isolation.objects import users_objects

    monkeypatch.setattr(users_objects, "MOST_OBJECTS", 100_000)


@pytest.fixture
def fresh_accelerate() -> Iterator[ModuleType]:
    """accelerate, which knows nothing of what tests before made with it for real, nor those after of what this one does."""
    accelerate: ModuleType = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    yield accelerate
    accelerate.state.AcceleratorState._reset_state(True)


@pytest.fixture
def here() -> Iterator[None]:
    """The working folder is put back after the test."""
    before = Path.cwd()
    yield
    os.chdir(before)


_UNCOMPARED: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note tests that were skipped because their truth was recorded with other versions.

    pytest calls a test that fails as expected skipped, too; its truth was compared.
    """
    expected_to_fail = hasattr(report, "wasxfail")
    if report.skipped and not expected_to_fail and "recorded with" in str(report.longrepr):
        _UNCOMPARED.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A new release of a library must not skip all that was recorded with the last, green."""
    if session.config.getoption("--require-truth") and _UNCOMPARED:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--require-truth") and _UNCOMPARED:
        terminalreporter.write_line(
            f"{len(_UNCOMPARED)} recorded truths were not compared, the first: {_UNCOMPARED[0]}"
        )


@pytest.fixture(autouse=True)
def _nothing_left_on() -> Iterator[None]:
    """A test leaves no dispatch mode, no recording of memory history and garbage collection as it was."""
    collects = gc.isenabled()
    yield
    assert gc.isenabled() == collects, "garbage collection was left switched"
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "utils"):
        return
    assert torch._C._len_torch_dispatch_stack() == 0, "a dispatch mode was left on"
    assert torch._C._len_torch_function_stack() == 0, "a torch function mode was left on"
    if torch.cuda.is_initialized():
        assert not torch._C._cuda_isHistoryEnabled(), "recording of memory history was left on"


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    """A bare shell that keeps what is displayed in ``shell.display_pub.outputs``; oom_magic is loaded."""
    monkeypatch.setenv("COLUMNS", "80")
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance(config=config, display_pub_class=CapturingDisplayPublisher)
    shell.run_line_magic("load_ext", "oom_magic")
    yield shell
    shell.extension_manager.unload_extension("oom_magic")
    shell.restore_sys_module_state()
    shell.reset(new_session=False)  # IPython registers each shell with atexit; what its cells made shall not live on
    InteractiveShell.clear_instance()
    sys.__dict__.pop("last_value", None)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(name, text)``: ``text`` is what tests/golden/``name`` holds; ``--update-golden`` writes it.

    The style sheet of HTML is left out: it is a file of its own.
    """
    from oom_magic.views.html import style_element

    def compare(name: str, text: str) -> None:
        file = GOLDEN / name
        text = text.replace(style_element(), "<style></style>")
        if request.config.getoption("--update-golden"):
            file.write_text(text + "\n", encoding="utf-8")
        assert file.read_text(encoding="utf-8") == text + "\n"

    return compare
