"""Code to paste as the user writes it: what stays as it was keeps their comments, line breaks, quotes and numbers.

Remedies are written into a syntax tree, which knows none of these: ``3e-4`` comes out of it as ``0.0003``.
"""

from __future__ import annotations

import ast
import re
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from operator import attrgetter

_MAGIC = re.compile(r"^(\s*)[%!?].*$", re.MULTILINE)
_WORD = re.compile(r"\w+")
_TO_THE_END = re.compile(rb"\s*(?:#.*)?")  # of a line, behind a statement

Place = tuple[int, int]  # the number of a source, and of a line in it
Literal = tuple[type, object]


@dataclass(frozen=True)
class _Spelled:
    """A statement, or the head of a compound one, in the user's lines, with the comments right above."""

    place: Place
    indent: str
    lines: Sequence[str]

    def at(self, indent: str) -> list[str]:
        """The lines with another indent."""
        return [indent + line.removeprefix(self.indent) for line in self.lines]


class Spelling:
    """How the user wrote the statements and literals of ``sources``, of which the first counts most.

    The others, all cells of a long session among them, are only parsed where they have the names of a statement.
    """

    def __init__(self, sources: Iterable[str]) -> None:
        self._statements: dict[str, list[_Spelled]] = defaultdict(list)
        self._literals: dict[Literal, Counter[str]] = defaultdict(Counter)
        self._unread = {
            number: (source, frozenset(_WORD.findall(source))) for number, source in enumerate(dict.fromkeys(sources))
        }
        self._words = frozenset(word for _source, words in self._unread.values() for word in words)
        self._read(list(self._unread)[:1])

    def _read(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            lines = _without_magics(self._unread.pop(number)[0]).split("\n")
            for statement in _statements(lines):
                self._note(statement, lines, number)

    def _read_about(self, statement: ast.stmt) -> None:
        """Read the sources that have all names of a statement, but for those that a remedy has put into it."""
        names = self._words.intersection(
            name for one in _own_nodes(statement) for name in (getattr(one, "id", None), getattr(one, "attr", None))
        )
        self._read([number for number, (_source, words) in self._unread.items() if names <= words])

    def _note(self, statement: ast.stmt, lines: list[str], source: int) -> None:
        start, end = _extent(statement, lines)
        key = _key(statement, lines)
        if key and start < end and _can_move(statement, lines):
            first = start
            while first and lines[first - 1].lstrip().startswith("#"):
                first -= 1
            indent = lines[start][: -len(lines[start].lstrip())]
            above = [indent + line.lstrip() for line in lines[first:start]]
            spelled = _Spelled((source, start), indent, [*above, *lines[start:end]])
            insort(self._statements[key], spelled, key=attrgetter("place"))
        for one in _literals_of(statement):
            written = lines[one.lineno - 1].encode()[one.col_offset : one.end_col_offset].decode()
            self._literals[type(one.value), one.value][written] += 1

    def of(self, code: str) -> str:
        """The code in this spelling; as it is, if it is not Python."""
        lines = code.split("\n")
        exchanged: list[tuple[int, int, list[str]]] = []
        last: Place = (0, -1)  # where code comes twice, it is that which comes next
        for statement in _statements(_without_magics(code).split("\n")):
            self._read_about(statement)
            start, end = _extent(statement, lines)
            key = _key(statement, lines)
            found = self._statements.get(key, [])
            if found and start < end:
                spelled = next((one for one in found if one.place > last), found[0])
                last = spelled.place
                indent = lines[start][: -len(lines[start].lstrip())]
                exchanged.append((start, end, spelled.at(indent)))
            else:
                self._respell_literals(statement, lines)
        for start, end, own in reversed(exchanged):
            lines[start:end] = own
        return "\n".join(lines)

    def _respell_literals(self, statement: ast.stmt, lines: list[str]) -> None:
        for one in reversed(_literals_of(statement)):
            written = self._literals.get((type(one.value), one.value))
            if written:
                line, spelling = lines[one.lineno - 1].encode(), max(written, key=written.__getitem__)
                line = line[: one.col_offset] + spelling.encode() + line[one.end_col_offset :]
                lines[one.lineno - 1] = line.decode()


def _without_magics(source: str) -> str:
    """With as many lines; those that call a magic or the shell do nothing."""
    return _MAGIC.sub(r"\1pass", source)


def _statements(lines: list[str]) -> list[ast.stmt]:
    """In the order of their lines; none of what is not Python."""
    try:
        tree = ast.parse("\n".join(lines))
    except (SyntaxError, ValueError):  # ValueError: text with null bytes
        return []
    found = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    return sorted(found, key=lambda one: (one.lineno, one.col_offset))


def _key(statement: ast.stmt, lines: Sequence[str]) -> str:
    """Equal where a statement is, or what stands before its block; "" of what has several, or stands for a magic."""
    if isinstance(statement, (ast.Match, ast.Pass)) or hasattr(statement, "handlers"):
        return ""
    head = copy(statement)
    for name, block in (("body", [ast.Pass()]), ("orelse", [])):
        if hasattr(head, name):
            setattr(head, name, block)
    is_elif = isinstance(statement, ast.If) and lines[statement.lineno - 1][statement.col_offset :].startswith("elif")
    return f"{'el' if is_elif else ''}{ast.unparse(ast.fix_missing_locations(head))}"


def _extent(statement: ast.stmt, lines: Sequence[str]) -> tuple[int, int]:
    """The lines of a statement, or of what stands before its block: the first, and that behind the last, from 0."""
    decorators: Sequence[ast.expr] = getattr(statement, "decorator_list", ())
    start = min([statement.lineno, *(one.lineno for one in decorators)]) - 1
    body: Sequence[ast.stmt] = getattr(statement, "body", ())
    if not body:
        return start, statement.end_lineno or statement.lineno
    end = _extent(body[0], lines)[0]
    while end > start and lines[end - 1].lstrip()[:1] in ("", "#"):
        end -= 1
    return start, end


def _can_move(statement: ast.stmt, lines: Sequence[str]) -> bool:
    """Whether its lines are its own, and mean the same with another indent."""
    starts_line = not lines[statement.lineno - 1].encode()[: statement.col_offset].strip()
    end_line, end = statement.end_lineno or statement.lineno, statement.end_col_offset or 0
    ends_line = hasattr(statement, "body") or _TO_THE_END.fullmatch(lines[end_line - 1].encode()[end:]) is not None
    texts = [node for node in _own_nodes(statement) if isinstance(node, (ast.Constant, ast.JoinedStr))]
    return starts_line and ends_line and all(one.lineno == one.end_lineno for one in texts)


def _own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """What a statement is made of, but for the statements in it and the parts of f-strings, whose places Python 3.12
    first knows."""
    waiting: list[ast.AST] = [statement]
    for node in waiting:
        yield node
        if not isinstance(node, ast.JoinedStr):
            waiting += [one for one in ast.iter_child_nodes(node) if not isinstance(one, (ast.stmt, ast.excepthandler))]


def _literals_of(statement: ast.stmt) -> list[ast.Constant]:
    """The numbers and strings of one line, in their order."""
    found = [one for one in _own_nodes(statement) if isinstance(one, ast.Constant) and one.lineno == one.end_lineno]
    return sorted(found, key=lambda one: (one.lineno, one.col_offset))
