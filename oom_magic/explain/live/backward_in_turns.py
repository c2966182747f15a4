"""Losses that one backward walks back behind the loop that collects or sums them: each walked back in its own turn.

Gradients add up: the same step is made, and one turn's graph at a time is alive.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from oom_magic.explain.live.called import NOTHING, object_of
from oom_magic.explain.live.later_backward import is_backward, path_in_function
from oom_magic.explain.remedies.own_code.loops import copied
from oom_magic.explain.syntax import Path, bound_in, expression, names_in, read_in

_Places = list[tuple[list[ast.stmt], ast.stmt]]  # statements, each with the block that it is in
_AS_LONG = ("enumerate", "tqdm", "list", "tuple", "sorted", "reversed")  # as their first argument
_COMPREHENSIONS = (ast.ListComp, ast.GeneratorExp)


@dataclass(frozen=True)
class InTurns:
    """Statements ``before``, from the loop to the backward, and ``after``, where each turn has its own, ``backward``.

    ``of_comprehension`` is the name that a comprehension, which stands for the loop, is assigned to; "": there is none.
    """

    before: str
    after: str
    backward: str
    of_comprehension: str


def in_turns(frame: FrameType, line: int, names: Mapping[str, Any]) -> InTurns | None:
    """The statements around a line of a frame's file; None where they have no known form.

    The loss has to be a sum or a mean of what the turns add, each a number; a list or a generator may stand for a loop.
    """
    pristine, path = (path_in_function(frame.f_code.co_filename, frame.f_globals, line) for _ in range(2))
    inner = _level_of_loop(path)
    if inner is None:
        return None
    outer = inner
    while outer and isinstance(_statement(path, outer - 1), ast.With):
        outer -= 1
    following = [(body, one) for body, at in reversed(path[outer : inner + 1]) for one in body[at + 1 :]]
    rewriting = _Rewriting(path, inner, names)
    backward = rewriting.follow(following)
    if backward is None:
        return None
    place = next(number for number, (block, _) in enumerate(path) if block is backward[0])
    body, start = path[place][0], pristine[place][1]
    num_behind = len(body) - body.index(backward[1]) - 1
    before = pristine[place][0][start : len(pristine[place][0]) - num_behind]
    first = rewriting.rewrite(backward)
    after = [*first, *body[start : len(body) - num_behind]]
    made = next((ast.unparse(target) for target in getattr(before[0], "targets", [])), "")
    return InTurns(_unparsed(before), _unparsed(after), ast.unparse(rewriting.turn), made)


def _unparsed(statements: list[ast.stmt]) -> str:
    return "\n".join(ast.unparse(ast.fix_missing_locations(one)) for one in statements)


def _statement(path: Path, number: int) -> ast.stmt:
    block, at = path[number]
    return block[at]


def _level_of_loop(path: Path) -> int | None:
    """Where the innermost loop is in a path; a comprehension at its end is written as one first, in place."""
    if path and not isinstance(_statement(path, -1), ast.For):
        block, at = path[-1]
        made = _as_loop(block[at])
        block[at : at + 1] = made or [block[at]]
        path[-1] = block, at + bool(made)
    return next((one for one in reversed(range(len(path))) if isinstance(_statement(path, one), ast.For)), None)


def _as_loop(statement: ast.stmt) -> list[ast.stmt]:
    """An assignment that collects or sums in a comprehension as a loop that collects; [] of any other statement."""
    found = [node for node in ast.walk(statement) if isinstance(node, _COMPREHENSIONS)]
    if not isinstance(statement, ast.Assign) or len(found) != 1 or len(found[0].generators) != 1:
        return []
    (comprehension,), target = found, ast.unparse(statement.targets[0])
    generator, is_whole = comprehension.generators[0], statement.value is comprehension
    if generator.ifs:
        return []
    name = target if is_whole else "losses"
    loop = f"for {ast.unparse(generator.target)} in {ast.unparse(generator.iter)}:\n"
    loop += f"    {name}.append({ast.unparse(comprehension.elt)})"
    rest = ast.unparse(statement).replace(ast.unparse(comprehension), name)
    if isinstance(comprehension, ast.GeneratorExp):  # as the only argument it has no brackets of its own
        rest = rest.replace(ast.unparse(comprehension)[1:-1], name)
    return ast.parse("\n".join([f"{name} = []", loop, *([] if is_whole else [rest])])).body


class _Rewriting:
    """A loop whose turns add losses to names, and what the code behind it makes of these.

    ``turn`` is the statement that walks back the losses of one turn.
    """

    turn: ast.stmt

    def __init__(self, path: Path, inner: int, names: Mapping[str, Any]) -> None:
        loop = _statement(path, inner)
        assert isinstance(loop, ast.For), "found as one"
        self._number = _number_of_turns(loop, names)
        before = [one for body, at in path[: inner + 1] for one in body[:at]]
        self._adding = {
            name: (inside, statement, added)
            for name, inside, statement, added in _adding(loop.body)
            if _begins_with_nothing(name, before)
        }
        read = read_in(loop)
        bound = bound_in(loop)
        spare = next(name for name in ("loss", "part", "loss_of_turn") if name not in read - bound)
        # A turn's share of each name behind the loop; of a list that of its sum, its mean needs the number of turns.
        self._lists: dict[str, ast.expr] = {}
        self._shares: dict[str, ast.expr] = {}
        self._values: dict[str, str] = {}
        for name, (_, statement, added) in self._adding.items():
            self._values[name] = added.id if isinstance(added, ast.Name) else spare
            table = self._lists if isinstance(statement, ast.Expr) else self._shares
            table[name] = ast.Name(self._values[name])
        self._opaque: set[str] = set()
        self._first: _Places = []

    def follow(self, following: _Places) -> tuple[list[ast.stmt], ast.stmt] | None:
        """The backward of what the loop has added, with its block; None if it is not known what a turn adds to it."""
        for block, statement in following:
            if is_backward(getattr(statement, "value", statement)) and self._is_derived(statement):
                return (block, statement) if self._begin(statement) else None
            if ast.unparse(statement).endswith(".zero_grad()"):
                self._first.append((block, statement))
            elif any(isinstance(node, ast.Attribute) and node.attr == "grad" for node in ast.walk(statement)):
                return None
            else:
                self._derive(statement)
        return None

    def rewrite(self, backward: tuple[list[ast.stmt], ast.stmt]) -> list[ast.stmt]:
        """Change the tree. Returns what has to stand before the loop: gradients are cleared before the first turn."""
        used = set(names_in(self.turn))
        adding = [(self._values[name], one) for name, one in self._adding.items() if self._values[name] in used]
        for number, (value, (block, statement, added)) in enumerate(adding, 1):
            at = block.index(statement)
            is_name = isinstance(added, ast.Name)
            bound: list[ast.stmt] = [] if is_name else [ast.Assign([ast.Name(value, ast.Store())], added)]
            turn = [self.turn] if number == len(adding) else []
            block[at : at + 1] = [*bound, *turn, _adding_detached(statement, value)]
        for block, one in (*self._first, backward):
            block.remove(one)
        return [one for _, one in self._first]

    def _is_derived(self, tree: ast.AST) -> bool:
        known = self._lists.keys() | self._shares.keys() | self._opaque
        return any(isinstance(node, ast.Name) and node.id in known for node in ast.walk(tree))

    def _derive(self, statement: ast.stmt) -> None:
        """Follow what a statement makes of the losses."""
        share, bound = None, ""
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                share, bound = self._share(value), name
            case ast.AugAssign(target=ast.Name(id=name), op=op, value=value):
                share, bound = self._share(ast.BinOp(ast.Name(name), op, value)), name
        if share is not None:
            self._shares[bound] = share
        elif self._is_derived(statement):
            stored = bound_in(statement)
            self._opaque |= stored
            self._shares = {one: made for one, made in self._shares.items() if one not in stored}

    def _begin(self, statement: ast.stmt) -> bool:
        """Make the backward of one turn; whether that is possible."""
        shared = _Shared(self._share)
        turn: Any = shared.visit(copied(statement))
        if not isinstance(turn, ast.Expr) or not isinstance(turn.value, ast.Call):
            return False
        turn.value.keywords = [one for one in turn.value.keywords if one.arg != "retain_graph"]
        values = [self._values[name] for name in self._adding]
        self.turn = turn
        return len(set(values)) == len(values) and not shared.left & (self._opaque | self._lists.keys())

    def _share(self, node: ast.expr) -> ast.expr | None:
        """A turn's share of an expression that is linear in the losses; None of any other."""
        match node:
            case ast.Name(id=name):
                return self._shares.get(name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                share = self._share(operand)
                return None if share is None else ast.UnaryOp(ast.USub(), share)
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
                shares = self._share(left), self._share(right)
                return None if None in shares else ast.BinOp(shares[0], op, shares[1])  # type: ignore[arg-type]
            case ast.BinOp(left=left, op=ast.Div() | ast.Mult() as op, right=right):
                is_behind = self._is_derived(left)
                share = self._share(left if is_behind else right)
                factor = self._factor(right if is_behind else left)
                if share is None or factor is None or not (is_behind or isinstance(op, ast.Mult)):
                    return None
                return ast.BinOp(share, op, factor) if is_behind else ast.BinOp(factor, op, share)
            case ast.Call():
                return self._share_of_list(node)
        return None

    def _factor(self, node: ast.expr) -> ast.expr | None:
        """What losses are multiplied with or divided by: instead of their number that of the turns; None of others."""
        is_number = isinstance(node, ast.Call) and ast.unparse(node.func) == "len"
        if not self._is_derived(node):
            return node
        return self._number if is_number else None

    def _share_of_list(self, call: ast.Call) -> ast.expr | None:
        """Of ``sum(losses)``, ``torch.stack(losses).mean()`` and the like."""
        match call:
            case ast.Call(func=ast.Name(id="sum"), args=[ast.Name(id=name)]):
                return self._lists.get(name)
            case (
                ast.Call(
                    func=ast.Attribute(value=ast.Name(id="torch"), attr="sum" | "mean" as way),
                    args=[ast.Call(func=ast.Attribute(attr="stack"), args=[ast.Name(id=name)])],
                )
                | ast.Call(
                    func=ast.Attribute(
                        value=ast.Call(func=ast.Attribute(attr="stack"), args=[ast.Name(id=name)]),
                        attr="sum" | "mean" as way,
                    )
                )
            ):
                share = self._lists.get(name)
                if share is None or way == "sum":
                    return share
                return None if self._number is None else ast.BinOp(share, ast.Div(), self._number)
        return None


class _Shared(ast.NodeTransformer):
    """Expressions that have a share replaced by it; ``left`` are the names outside of them."""

    def __init__(self, share: Callable[[ast.expr], ast.expr | None]) -> None:
        self._share = share
        self.left: set[str] = set()

    def visit(self, node: ast.AST) -> Any:
        """The share, or the expression with shares in it."""
        share = self._share(node) if isinstance(node, ast.expr) else None
        if isinstance(node, ast.Name) and share is None:
            self.left.add(node.id)
        return self.generic_visit(node) if share is None else share


def _adding(body: list[ast.stmt]) -> Iterator[tuple[str, list[ast.stmt], ast.stmt, ast.expr]]:
    """The names that a loop, or what is under ``with`` in it, adds to, each with block, statement and what is added."""
    for statement in body:
        match statement:
            case ast.With(body=inside):
                yield from _adding(inside)
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[added])):
                yield name, body, statement, added
            case ast.AugAssign(target=ast.Name(id=name), op=ast.Add(), value=added):
                yield name, body, statement, added
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.BinOp(left=ast.Name(id=left), op=ast.Add(), right=added),
            ) if left == name:
                yield name, body, statement, added


def _adding_detached(statement: ast.stmt, value: str) -> ast.stmt:
    """The statement that adds a value without its graph."""
    made, detached = copied(statement), expression(f"{value}.detach()")
    match made:
        case ast.Expr(value=ast.Call() as call):
            call.args = [detached]
        case ast.AugAssign():
            made.value = detached
        case ast.Assign(value=ast.BinOp() as total):
            total.right = detached
    return made


def _begins_with_nothing(name: str, before: list[ast.stmt]) -> bool:
    """Whether the last of the statements ``before`` that bind a name make it an empty list or a zero."""
    values = [one.value for one in before if isinstance(one, ast.Assign) and name in map(ast.unparse, one.targets)]
    match values[-1:]:
        case [ast.List(elts=[]) | ast.Constant(value=0)]:
            return True
        case [ast.Call(func=function, args=[] | [ast.Constant(value=0)])]:
            return ast.unparse(function) in ("list", "torch.tensor")
        case [ast.Call(func=function)]:
            return ast.unparse(function) == "torch.zeros"
    return False


def _number_of_turns(loop: ast.For, names: Mapping[str, Any]) -> ast.expr | None:
    """The expression that tells how often a loop runs; None where it may be left, or nobody knows."""
    if any(isinstance(node, (ast.Break, ast.Continue)) for node in ast.walk(loop)):
        return None
    source = loop.iter
    while isinstance(source, ast.Call) and ast.unparse(source.func).rpartition(".")[2] in _AS_LONG and source.args:
        source = source.args[0]
    if isinstance(source, ast.Call) and ast.unparse(source.func) in ("range", "trange"):
        if len(source.args) == 1:
            return source.args[0]
        return expression(f"len({ast.unparse(source)})")
    sources = source.args if isinstance(source, ast.Call) and ast.unparse(source.func) == "zip" else [source]
    values = [object_of(one, names) for one in sources]
    if any(one is NOTHING or not hasattr(type(one), "__len__") for one in values):
        return None
    lengths = ", ".join(f"len({ast.unparse(one)})" for one in sources)
    return expression(lengths if len(sources) == 1 else f"min({lengths})")
