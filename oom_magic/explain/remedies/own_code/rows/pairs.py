"""Rows that are compared with all rows, ``x @ x.T``: which names there stand for a part of them, which for all."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from oom_magic.explain.syntax import bound_in, expression, names_in, read_in

AT = "at"  # where a part begins among the rows
_IN_PAIRS = frozenset({"cdist", "outer", "kron", "tensordot"})


def met_by_all(node: ast.AST) -> Sequence[ast.expr]:
    """What in an expression each row meets as a whole: it comes to stand along another dimension, or is summed over."""
    match node:
        case (
            ast.Attribute(value=value, attr="T" | "H")
            | ast.Call(func=ast.Attribute(value=value, attr="t"))
            | ast.Call(func=ast.Attribute(value=value, attr="unsqueeze"), args=[ast.Constant(value=0)])
            | ast.Subscript(value=value, slice=ast.Constant(value=None))
            | ast.Subscript(value=value, slice=ast.Tuple(elts=[ast.Constant(value=None), *_]))
            | ast.BinOp(op=ast.MatMult(), right=value)
            | ast.Call(func=ast.Attribute(attr="mm" | "matmul"), args=[*_, value])
        ):
            return [value]
        case ast.Call(func=ast.Attribute(attr=name), args=[_, *others]) if name in _IN_PAIRS:
            return others
        case ast.Call(func=ast.Attribute(attr="einsum"), args=[ast.Constant(value=str(equation)), *operands]):
            terms, _, result = equation.replace(" ", "").partition("->")
            return [
                one for term, one in zip(terms.split(","), operands, strict=False) if term[:1] != result[:1] or not term
            ]
    return []


@dataclass(frozen=True)
class Parted:
    """The statements for a part of the rows, behind those that are for ``all`` of them. ``split`` are the names of
    what is taken in parts."""

    all: Sequence[ast.stmt]
    part: Sequence[ast.stmt]
    split: Sequence[str]


def parted(
    block: Sequence[ast.stmt],
    derived: Collection[str],
    mixes: Callable[[ast.AST], bool],
    met: Iterable[ast.AST] = (),
) -> Parted:
    """The statements with names of parts, ``x_part``, but where each row meets all others: in ``met``, in what is
    ``met_by_all``, and in what ``mixes`` rows. ``derived`` are the names of what has the rows."""
    block = [_DiagonalsAt().visit(one) for one in block]
    nodes = [node for one in block for node in ast.walk(one)]
    whole = [*met, *(one for node in nodes for one in ([node] if mixes(node) else met_by_all(node)))]
    stay = {id(node) for one in whole for node in ast.walk(one)}
    named = [node for node in nodes if isinstance(node, ast.Name) and node.id in derived]
    wanted, before = {node.id for node in named if id(node) in stay}, 0
    while len(wanted) > before:
        before = len(wanted)
        wanted |= {name for one in block if bound_in(one) & wanted for name in read_in(one) & set(derived)}
    first = [one for one in block if bound_in(one) & wanted]
    behind = [one for one in block if one not in first]
    made = {name for one in behind for name in bound_in(one)}
    split = dict[str, None]()
    for one in behind:
        for node in ast.walk(one):
            if isinstance(node, ast.Name) and node.id in derived and node.id not in made and id(node) not in stay:
                split[node.id] = None
                node.id = f"{node.id}_part"
    return Parted(first, behind, list(split))


class _DiagonalsAt(ast.NodeTransformer):
    """The diagonal of a part of a matrix's rows in place of that of all."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """``x.fill_diagonal_(0)`` becomes ``x.diagonal(at).fill_(0)``, ``x.diagonal()`` gets its place."""
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Attribute(value=value, attr="fill_diagonal_"), args=[filled]):
                return expression(f"{ast.unparse(value)}.diagonal({AT}).fill_({ast.unparse(filled)})")
            case ast.Call(func=ast.Attribute(attr="diagonal"), args=[], keywords=[]):
                node.args = [ast.Name(AT, ast.Load())]
        return node


def is_in_place(statement: ast.stmt) -> bool:
    """Whether it calls a method that changes what it is called on: ``scores.fill_diagonal_(0)``."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))):
            return name.endswith("_") and not name.endswith("__")
    return False


def loop_over(parted_rows: Parted, after: int) -> tuple[str, str]:
    """The targets of a loop over parts of ``after`` rows, and what it goes through."""
    pairs = {f"{name}_part": f"{name}.split({after})" for name in parted_rows.split}
    if AT in {name for one in parted_rows.part for name in names_in(one)}:
        pairs = {AT: f"range(0, len({parted_rows.split[0]}), {after})", **pairs}
    source = next(iter(pairs.values())) if len(pairs) == 1 else f"zip({', '.join(pairs.values())})"
    return ", ".join(pairs), source
