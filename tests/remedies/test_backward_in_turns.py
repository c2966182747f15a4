"""Losses that are collected or summed, and walked back behind the loop: the code that walks back each in its turn."""

from __future__ import annotations

import ast
import linecache

import pytest

from oom_magic.explain.live.backward_in_turns import in_turns

TURNS = """
losses = []
for x in data:
    out = net(x)
    losses.append(out.sum())
opt.zero_grad()
loss = sum(losses) / len(losses)
loss.backward()
opt.step()
"""


def of(code: str, line_of: str, **names):
    """What ``in_turns`` makes of code whose line that begins so fails."""
    file = f"<turns {hash(code)}>"
    lines = code.splitlines(keepends=True)
    linecache.cache[file] = (len(code), None, lines, file)
    line = next(number for number, one in enumerate(lines, 1) if one.strip().startswith(line_of))
    return in_turns(_Frame(file), line, names)


class _Frame:
    """As much of a frame as is read: its file and its globals."""

    def __init__(self, file: str) -> None:
        self.f_globals = {}
        self.f_code = type("Code", (), {"co_filename": file})()


def test_a_mean_of_a_list_is_divided_by_the_turns_and_gradients_are_cleared_before_them():
    found = of(TURNS, "losses.append", data=[1, 2])
    assert found.after.splitlines() == [
        "opt.zero_grad()",
        "for x in data:",
        "    out = net(x)",
        "    loss = out.sum()",
        "    (loss / len(data)).backward()",
        "    losses.append(loss.detach())",
        "loss = sum(losses) / len(losses)",
    ]
    assert found.before.startswith("for x") and found.before.endswith("loss.backward()")
    assert found.of_comprehension == ""
    assert found.backward == "(loss / len(data)).backward()"


@pytest.mark.parametrize(
    ("code", "at", "backward"),
    [
        ("total = 0\nfor x in data:\n    loss = net(x) / 4\n    total += loss\ntotal.backward()", "total +=", "loss.backward()"),
        ("total = 0.0\nfor _ in range(n):\n    total = total + net(1)\ntotal = total / n\nscaler.scale(total).backward()",
         "total = total +", "scaler.scale(loss / n).backward()"),
        ("kept = []\nfor i, x in enumerate(data):\n    loss = net(x)\n    kept.append(loss)\naccelerator.backward(torch.stack(kept).mean())",
         "kept.append", "accelerator.backward(loss / len(data))"),
        ("kept = []\nwith autocast():\n    for x in data:\n        kept.append(net(x))\n    loss = torch.mean(torch.stack(kept))\nloss.backward(retain_graph=True)",
         "kept.append", "(loss / len(data)).backward()"),
        ("total = 0\nfor x in data:\n    total = total + (net(x) + net(1))\ntotal.backward()", "total = total +", "loss.backward()"),
        ("loss = sum(net(x) for x in data) / len(data)\nloss.backward()", "loss = sum", "(loss / len(data)).backward()"),
        ("kept = [net(x) for x in data]\nsum(kept).backward()", "kept =", "loss.backward()"),
        ("a, b = 1, 2\nfirst = []\nsecond = []\nfor x in data:\n    one, two = net(x)\n    first.append(one)\n    second.append(two)\n"
         "loss = sum(first) + 0.5 * sum(second)\nloss.backward()", "second.append", "(one + 0.5 * two).backward()"),
    ],
)  # fmt: skip
def test_each_turn_walks_back_its_share(code, at, backward):
    found = of(code, at, data=[1, 2])
    assert found.backward == backward
    ast.parse(found.after)
    assert found.after.count("backward(") == 1 and found.after.count(".detach()") >= 1


@pytest.mark.parametrize(
    "code",
    [
        TURNS.replace("sum(losses) / len(losses)", "torch.stack(losses).max()"),  # not linear
        TURNS.replace("sum(losses) / len(losses)", "(sum(losses) / len(losses)) ** 2"),
        TURNS.replace("losses = []", "losses = [penalty]"),  # whose graph is there before
        TURNS.replace("    out =", "    if not x: continue\n    out ="),  # fewer turns than data
        TURNS.replace("opt.zero_grad()", "for p in net.parameters(): p.grad = None"),
        TURNS.replace("loss.backward()", "loss = loss + penalty\nloss.backward()"),
    ],
)
def test_other_losses_are_left_as_they_are(code):
    assert of(code, "losses.append", data=[1, 2]) is None
