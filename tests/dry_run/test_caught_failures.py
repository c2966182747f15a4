"""Code that goes on where memory runs out: rehearsals run out there, too, and tell what comes after it."""

from __future__ import annotations

import ast
import linecache

import pytest
import torch

from oom_magic.explain.remedies.cell_rehearsal import CellRehearsal
from oom_magic.explain.remedies.rehearsal import Variation
from oom_magic.notebook.cells.cell_code import CellCode
from oom_magic.predict.caught_failures import goes_on
from oom_magic.predict.session import DrySession

MIB = 2**20


@pytest.mark.parametrize(
    ("handler", "is_users", "expected"),
    [
        ("except torch.cuda.OutOfMemoryError:\n    batch //= 2", False, True),
        ("except (ValueError, torch.OutOfMemoryError):\n    batch //= 2", False, True),
        ("except torch.OutOfMemoryError:\n    print(batch)\n    raise", True, False),
        (
            "except RuntimeError as e:\n    if 'out of memory' not in str(e):\n        raise\n    batch //= 2",
            False,
            True,
        ),
        (
            "except Exception as e:\n    if should_reduce_batch_size(e):\n        n -= 1\n    else:\n        raise",
            False,
            True,
        ),
        ("except Exception as e:\n    if is_oom_error(e):\n        n -= 1\n    else:\n        raise", False, True),
        ("except Exception:\n    bloom = 1", False, False),
        ("except Exception:\n    bloom = 1", True, True),
        ("except Exception as e:\n    if 'shape' in str(e):\n        raise", True, False),
        ("except KeyError:\n    rooms = 1", True, False),
    ],
)
def test_which_handlers_go_on(handler: str, is_users: bool, expected: bool) -> None:
    statement = ast.parse(f"try:\n    step()\n{handler}").body[0]
    assert isinstance(statement, ast.Try)
    assert goes_on(statement.handlers[0], is_users) == expected


TRY = """
def step(batch):
    net(torch.randn(batch, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
def find(batch):
    while True:
        if batch == 0:
            raise RuntimeError("nothing fits")
        try:
            step(batch)
            return batch
        except torch.OutOfMemoryError:
            batch //= 2
"""
SEARCH = """
net = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 8)).cuda()
optimizer = torch.optim.Adam(net.parameters())
batch = find(65536)
for _ in range(3):
    step(2 * batch)
"""


def rehearsed(usable_bytes: int, cell: str = SEARCH) -> tuple[CellRehearsal, int]:
    """The cell on a card with so much memory for PyTorch, and the peak of its rehearsal."""
    file = "<ipython-input-9-caught>"
    linecache.cache[file] = len(TRY), None, TRY.splitlines(keepends=True), file
    names = {"torch": torch}
    exec(compile(TRY, file, "exec"), names)
    code = CellCode(ast.parse(cell), names)
    rehearsal = CellRehearsal(code.execute, code.tree, names, gpu="RTX 3060")
    return rehearsal, rehearsal.begin([], usable_bytes).peak_allocated_bytes


def test_a_rehearsal_goes_on_with_what_was_found_on_the_card() -> None:
    """Its first try was taken to fit: 65,536 rows, and twice as many behind the search."""
    rehearsal, peak = rehearsed(300 * MIB)
    assert rehearsal.sizes["batch"] == 2 * 4096  # 8,192 rows of 20 KiB, with their gradients, are too many
    _, of_that = rehearsed(2**40, SEARCH.replace("find(65536)", "find(4096)"))
    assert peak == of_that < rehearsal.run(Variation(sizes={"batch": 16384})).peak_allocated_bytes


def test_where_nothing_fits_the_last_try_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many there are is found once: with a change, the search is followed once."""
    sessions: list[DrySession] = []
    run = DrySession.run
    monkeypatch.setattr(DrySession, "run", lambda one, *given: [sessions.append(one), run(one, *given)][1])
    rehearsal, peak = rehearsed(40 * MIB, SEARCH.replace("65536", "4").replace("step(2 * batch)", "step(batch)"))
    assert rehearsal.sizes["batch"] == 1 and peak > 40 * MIB and len(sessions) == 2
    assert rehearsal.run(Variation()).peak_allocated_bytes == peak and len(sessions) == 3


def test_a_loop_that_catches_it_in_the_cell_itself() -> None:
    cell = SEARCH.replace(
        "batch = find(65536)",
        "batch = 65536\nwhile batch:\n    try:\n        step(batch)\n        break\n"
        "    except RuntimeError as e:\n        assert 'out of memory' in str(e)\n        batch //= 2",
    )
    assert rehearsed(300 * MIB, cell)[0].sizes["batch"] == 2 * 4096
