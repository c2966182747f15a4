"""What a dry cell did to the user's things in place is there in the next dry cell, or it is said that it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

CARD = "%%gpumem --dry-run --no-plot\n"
READ = "x = torch.ones(2, 1024, device='cuda')"


@pytest.fixture
def dry(shell: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a dry cell, which must succeed; what was shown."""
    monkeypatch.setattr("oom_magic.notebook.magics.has_gpu", lambda: False)
    shell.run_cell("import torch").raise_error()

    def run(code: str) -> str:
        shell.display_pub.outputs.clear()
        assert shell.run_cell(CARD + code).success
        return " ".join(" ".join(str(one["data"].get("text/plain", "")) for one in shell.display_pub.outputs).split())

    return run


@pytest.mark.parametrize(
    ("before", "changed", "read"),
    [
        ("net = torch.nn.Linear(2048, 2048)", "net.half()", "net.bias.element_size()"),
        ("net = torch.nn.Linear(2, 2)", "net.half()", "net.weight.element_size()"),
        ("t = torch.ones(4)", "t.fill_(2)", "int(t[0])"),
        ("t = torch.ones(4); v = t[2:]", "t.fill_(2)", "int(v[0])"),
        ("t = torch.ones(1)", "t.resize_(2)", "len(t)"),
        ("t = torch.ones(1)", "t.data = torch.ones(2)", "len(t)"),
        ("t = torch.ones(4).double()", "t.data = t.half()", "t.element_size()"),
    ],
)
def test_host_tensors_keep_what_a_dry_cell_wrote_to_them(
    shell: Any, dry: Any, before: str, changed: str, read: str
) -> None:
    """The bias of a model in 16 bits was one in 32 bits in the next dry cell, beside weights in 16."""
    shell.run_cell(before).raise_error()
    dry(changed)
    for _again in range(2):
        dry(f"assert {read} == 2; {READ}")
    shell.run_cell(f"real = {read}").raise_error()
    assert shell.user_ns["real"] != 2


def test_a_model_in_16_bits_of_a_dry_cell_runs_in_the_next(shell: Any, dry: Any) -> None:
    shell.run_cell("net = torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.BatchNorm1d(2048))").raise_error()
    dry("net.half()")
    dry("net.cuda()(torch.randn(4, 2048, device='cuda').half())")


def test_what_the_user_writes_to_a_host_tensor_takes_precedence(shell: Any, dry: Any) -> None:
    shell.run_cell("t = torch.ones(4)").raise_error()
    dry("t.fill_(2)")
    shell.run_cell("t.fill_(3)").raise_error()
    dry("assert int(t[0]) == 3")
    dry("t.fill_(4)")
    dry("assert int(t[0]) == 4")


CONFIG = """from types import SimpleNamespace
from dataclasses import dataclass
from collections import deque
class CFG: batch = 1
@dataclass
class Settings:
    batch: int = 1
class Run:
    def __init__(self): self.batch, self.losses, self.net = 1, [], None
settings, run, many = Settings(), Run(), [Settings()]
plain = SimpleNamespace(batch=1, inner={"batch": 1})
table, queue, sizes, count = {"batch": 1, "sizes": [1]}, deque([1, 2]), [3, 2], 1
def more():
    global count
    count += 1"""


@pytest.mark.parametrize(
    ("changed", "read"),
    [
        ("CFG.batch = 2", "CFG.batch"),
        ("settings.batch = 2", "settings.batch"),
        ("many[0].batch = 2", "many[0].batch"),
        ("run.batch = 2; run.losses.append(0.5)", "run.batch"),
        ("run.losses += [1, 2]", "len(run.losses)"),
        ("plain.batch = 2", "plain.batch"),
        ("plain.inner['batch'] = 2", "plain.inner['batch']"),
        ("table['batch'] = 2", "table['batch']"),
        ("table['other'] = 2", "table['other']"),
        ("table['sizes'].append(2)", "len(table['sizes'])"),
        ("queue.popleft()", "queue[0]"),
        ("sizes.sort()", "sizes[0]"),
        ("more()", "count"),
        ("torch.set_default_dtype(torch.float16)", "torch.ones(1).element_size()"),
        ("torch.backends.cudnn.benchmark = True", "1 + torch.backends.cudnn.benchmark"),
        ("torch.set_grad_enabled(False)", "2 - torch.is_grad_enabled()"),
        ("torch.set_default_device('cuda')", "1 + torch.ones(1).is_cuda"),
        ("import os; os.environ['BATCH'] = '2'", "int(os.environ['BATCH'])"),
        ("import os; os.chdir('/')", "1 + (os.getcwd() == '/')"),
    ],
)
def test_numbers_and_words_that_a_dry_cell_set_are_there_in_the_next(
    shell: Any, dry: Any, changed: str, read: str
) -> None:
    """A batch that one dry cell had set was the notebook's own in the next, without a word."""
    shell.run_cell(CONFIG).raise_error()
    dry(changed)
    for _again in range(2):
        dry(f"import os; assert ({read}) == 2; {READ}")
    shell.run_cell(f"import os; real = ({read}) if 'other' not in {read!r} and 'BATCH' not in {read!r} else 0")
    assert shell.user_ns["real"] != 2


def test_the_users_own_change_since_then_takes_precedence(shell: Any, dry: Any) -> None:
    shell.run_cell(CONFIG).raise_error()
    dry("table['batch'] = 2; settings.batch = 2; sizes.append(2)")
    shell.run_cell("table['batch'] = 3; settings = Settings(); sizes = []").raise_error()
    dry("assert (table['batch'], settings.batch, sizes) == (3, 1, [])")


def test_a_dry_cell_that_failed_can_be_tried_again(shell: Any, dry: Any) -> None:
    shell.run_cell(CONFIG).raise_error()
    shell.display_pub.outputs.clear()
    assert not shell.run_cell(f"{CARD}table['batch'] = 2\n1 / 0").success
    dry("assert table['batch'] == 1")


def test_a_folder_that_is_gone_at_the_end_is_not_gone_on_with(dry: Any) -> None:
    """Asking for it raised, in place of what the cell raised."""
    dry("import os, tempfile\nwith tempfile.TemporaryDirectory() as folder: os.chdir(folder)")
    dry(f"import os; assert os.path.isdir(os.getcwd()); {READ}")


SAID = "is as your notebook has it"


def test_objects_that_a_dry_cell_put_elsewhere_are_not_kept_and_named(shell: Any, dry: Any) -> None:
    """With the number beside them: an object that counts what it no longer holds fails."""
    shell.run_cell(CONFIG).raise_error()
    assert SAID not in dry("run.net = torch.nn.Linear(4, 4).cuda(); run.batch = 2")
    assert SAID not in dry(READ)
    shown = dry(f"assert (run.batch, run.net) == (1, None); {READ}")
    assert f"`run.net` {SAID}" in shown
    assert SAID not in dry("run.net = torch.nn.Linear(4, 4).cuda(); run.batch = 2")
    shell.run_cell("run = Run()").raise_error()
    assert SAID not in dry(f"run; {READ}")


def test_what_a_dry_cell_removed_is_named(shell: Any, dry: Any) -> None:
    shell.run_cell(CONFIG).raise_error()
    dry("del table['sizes']")
    assert f"`table['sizes']` {SAID}" in dry(f"assert 'sizes' in table; {READ}")


def test_what_a_function_of_the_notebook_reads_is_named(shell: Any, dry: Any) -> None:
    shell.run_cell(f"{CONFIG}\ndef train(): return len(queue)").raise_error()
    dry("queue.append(torch.ones(1, device='cuda'))")
    assert f"`queue` {SAID}" in dry(f"train(); {READ}")


OTHERS = """import functools, itertools
import numpy as np
class Run:
    def __init__(self): self.scores, self.rows = np.ones(3), iter([1, 2])
array, table, run, data = np.ones(4), {"scores": np.ones(3)}, Run(), bytearray(b"abc")
rows, counted, squares = iter([1, 2, 3]), itertools.count(1), (n * n for n in range(1, 9))
def f(x=1): return x
@functools.lru_cache
def ones(n): return torch.ones(n)
@functools.cache
def zeros(n): return torch.zeros(n)
@functools.lru_cache
def double(n): return 2 * n"""


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ("array[0] = 2", "array"),
        ("table['scores'] += 1", "table['scores']"),
        ("run.scores[0] = 2", "run.scores"),
        ("data.extend(b'd')", "data"),
        ("next(rows)", "rows"),
        ("next(counted)", "counted"),
        ("next(squares)", "squares"),
        ("next(run.rows)", "run.rows"),
        ("f.__defaults__ = (2,)", "f"),
        ("ones(3)", "ones"),
        ("zeros(3)", "zeros"),
    ],
)
def test_contents_that_are_not_kept_are_named(shell: Any, dry: Any, changed: str, part: str) -> None:
    """What an array held was the notebook's own in the next dry cell, without a word."""
    shell.run_cell(OTHERS).raise_error()
    assert SAID not in dry(changed)
    name = part.partition("[")[0].partition(".")[0]
    assert f"`{part}` {SAID}" in dry(f"{name}; {READ}")
    assert (SAID in dry(changed)) == ("next" in changed)  # an iterator begins where the notebook left it
    assert SAID not in dry(READ)


@pytest.mark.parametrize(
    ("changed", "read"),
    [("f.calls = 2", "f.calls == 2"), ("double(3)", "double(3) == 6"), ("array; run", "array[0] == 1")],
)
def test_what_is_kept_or_only_read_is_not_named(shell: Any, dry: Any, changed: str, read: str) -> None:
    shell.run_cell(OTHERS).raise_error()
    assert SAID not in dry(changed)
    assert SAID not in dry(f"assert {read}; {READ}")


def test_a_name_that_a_dry_cell_deleted_is_gone_in_the_next(shell: Any, dry: Any) -> None:
    shell.run_cell("net, n = torch.nn.Linear(2, 2), 5").raise_error()
    dry("del net, n")
    for _again in range(2):
        dry(f"assert not {{'net', 'n'}} & set(globals()); {READ}")
    shell.display_pub.outputs.clear()
    assert isinstance(shell.run_cell(f"{CARD}net.half()").error_in_exec, NameError)
    shell.run_cell("assert n == 5; net = torch.nn.Linear(2, 2)").raise_error()
    dry("assert net.weight.element_size() == 4")


def test_a_name_that_a_failed_dry_cell_deleted_is_there_again(shell: Any, dry: Any) -> None:
    shell.run_cell("n = 5").raise_error()
    assert not shell.run_cell(f"{CARD}del n\n1 / 0").success
    dry("assert n == 5")


def test_a_device_that_a_dry_cell_set_is_not_decided_again(shell: Any, dry: Any) -> None:
    """Real code chose it by asking for a GPU, and was asked anew with each dry cell."""
    shell.run_cell("torch.set_default_device('cuda' if torch.cuda.is_available() else 'cpu')").raise_error()
    dry("assert torch.ones(1).is_cuda; torch.set_default_device('cpu')")
    for _again in range(2):
        dry(f"assert not torch.ones(1).is_cuda; {READ}")
    torch.set_default_device(None)
