"""What a syntax tree tells: statements and blocks in their order, also those of ``except`` and ``match``."""

from __future__ import annotations

import ast

from oom_magic.explain.syntax import DEFINING, blocks_in, bound_by, flat, path_to_line, statements_in

CODE = ast.parse("""
x, y = 1, 2
for a in x:
    try:
        b = a
    except ValueError:
        c = b
    else:
        match b:
            case 1:
                d = x
    finally:
        x = b
def f():
    e = 1
""")


def _told(statements: list[ast.stmt]) -> list[str]:
    return [ast.unparse(one).partition("\n")[0] for one in statements]


def test_each_statement_comes_before_those_in_it_and_definitions_stay_closed() -> None:
    assert _told(list(statements_in(CODE.body))) == [
        "x, y = (1, 2)", "for a in x:", "try:", "b = a", "match b:", "d = x", "x = b", "c = b", "def f():",
    ]  # fmt: skip
    assert _told(list(statements_in(CODE.body, (ast.For, *DEFINING)))) == ["x, y = (1, 2)", "for a in x:", "def f():"]
    assert _told(list(flat(CODE.body))) == ["x, y = (1, 2)", "b = a", "d = x", "x = b", "c = b"]


def test_each_block_comes_once_and_outer_ones_first() -> None:
    blocks = [_told(block) for block in blocks_in(CODE) if block]
    assert blocks[0] == ["x, y = (1, 2)", "for a in x:", "def f():"]
    assert blocks[1:3] == [["try:"], ["e = 1"]]
    assert sorted(blocks[3:]) == [["b = a"], ["c = b"], ["d = x"], ["match b:"], ["x = b"]]
    assert ["e = 1"] not in [_told(block) for block in blocks_in(CODE, DEFINING)]


def test_names_are_bound_in_their_order_each_once() -> None:
    assert bound_by(CODE.body[:2]) == ["x", "y", "a", "b", "c", "d"]


def test_a_path_leads_into_an_except_block() -> None:
    assert [_told([block[at]])[0] for block, at in path_to_line(CODE, 7)] == ["for a in x:", "try:", "c = b"]
