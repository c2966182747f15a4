"""The line that grows, fixed for the time of a rehearsal: in the cell, and in functions of earlier cells."""

from __future__ import annotations

import ast
import functools
from dataclasses import replace

import torch

from oom_magic.explain.live.growth import Growth
from oom_magic.explain.live.mending import is_in, mended


def collect():
    kept = []
    for number in range(2):
        kept.append(str(number))  # noqa: PERF401
    return kept


def closing(step):
    def collect():
        kept = []
        kept.append(str(step))
        return kept

    return collect


GROWTH = Growth("kept", "kept.append(str(number))", "cell:1", 2, 2, False, fixed="kept.append(number)")


def test_a_function_of_an_earlier_cell_is_mended_for_a_while():
    wrapped = functools.wraps(collect)(lambda: collect())
    names = {"collect": collect, "wrapped": wrapped, "number": 3}
    code = collect.__code__
    assert is_in(GROWTH, ast.parse("collect()"), names)
    with mended(GROWTH, ast.parse("collect()"), names):
        assert collect() == wrapped() == [0, 1]
    assert collect.__code__ is code and collect() == ["0", "1"]


def test_what_closes_over_variables_is_mended_also_where_only_a_hook_leads_to_it():
    growth = Growth("kept", "kept.append(str(step))", "cell:1", 2, 2, False, fixed="kept.append(step)")
    net, hooks = torch.nn.Linear(2, 2), [closing(1), closing(2)]
    for hook in hooks:
        net.register_forward_hook(hook)
    tree = ast.parse("net(x)")
    with mended(growth, tree, {"net": net}):
        assert [hook() for hook in hooks] == [[1], [2]]
    assert [hook() for hook in hooks] == [["1"], ["2"]]


def test_the_cell_itself_is_mended_for_a_while():
    tree = ast.parse("kept = []\nfor number in range(2):\n    kept.append(str(number))")
    before = ast.unparse(tree)
    with mended(GROWTH, tree, {}):
        assert "kept.append(number)" in ast.unparse(tree)
    assert ast.unparse(tree) == before


def test_lines_fixed_together_are_fixed_in_one_pass():
    other = Growth("seen", "seen.append(number)", "cell:1", 2, 1, False, fixed="seen.append(-number)")
    tree = ast.parse(
        "kept, seen = [], []\nfor number in range(2):\n    kept.append(str(number))\n    seen.append(number)"
    )
    together = replace(GROWTH, beside=(other,))
    with mended(together, tree, {}):
        assert ast.unparse(tree).endswith("kept.append(number)\n    seen.append(-number)")
    assert together.lines["pairs"].startswith(
        "kept.append(number)\n# instead of kept.append(str(number))\n\nseen.append("
    )
