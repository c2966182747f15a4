"""Whether code computes each row of its data by itself: nothing mixes the first dimension, as far as can be seen."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping, Sequence, Set

from oom_magic.explain.remedies.own_code.rows.pairs import AT, met_by_all
from oom_magic.explain.syntax import bound_in, names_in

_Function = ast.FunctionDef | ast.AsyncFunctionDef
# What mixes rows, unless it is told another dimension; the place of that argument.
_ALONG = {
    **dict.fromkeys(
        ("mean", "sum", "max", "min", "std", "var", "argmax", "argmin", "softmax", "log_softmax", "logsumexp", "cumsum",
         "prod", "median", "any", "all", "amax", "amin", "argsort", "sort", "cat", "concat", "stack", "flatten"),
        0,
    ),
    "topk": 1,
    "norm": 1,
    "normalize": 1,
}  # fmt: skip
_ALONG_LAST = frozenset({"topk", "sort", "argsort", "normalize"})  # unless another is given
_OF_TWO = frozenset({"max", "min"})
_MIXING = frozenset(
    {"nonzero", "unique", "backward", "item", "diag", "diagonal", "fill_diagonal_", "eye", "trace", "tril", "triu",
     "tril_", "triu_", "solve", "solve_triangular", "cholesky", "cholesky_solve", "lstsq", "inv", "inverse", "pinv",
     "bincount", "histc", "index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce",
     "scatter_reduce_", "index_reduce_",
     "det", "logdet", "slogdet", "svd", "svdvals", "qr", "eig", "eigh", "eigvals", "eigvalsh", "lobpcg", "matrix_exp"}
)  # fmt: skip
_NUMBER_OF_ROWS = re.compile(
    r"^-1$|^len\([\w.]+\)$|^[\w.]+\.shape\[0\]$|^[\w.]+\.size\(0\)$|^\*[\w.]+\.shape\[:-?\d+\]$"
)
_SHAPING = frozenset({"view", "reshape", "permute", "transpose"})


def stay_apart(code: ast.AST, derived: Set[str], called: Sequence[_Function]) -> bool:
    """Whether code computes each row by itself, with the functions that are ``called``, callers first; ``derived`` are
    the names in the code of what has the rows."""
    codes = {code: derived}
    for one in called:
        codes[one] = derived_from(one, _given_to(codes, one))
    nodes = ((node, known) for one, known in codes.items() for node in ast.walk(one))
    return all(not _meets(node, known) and (keeps_rows(node) or _is_same_for_all(node, known)) for node, known in nodes)


def _is_same_for_all(call: ast.AST, derived: Set[str]) -> bool:
    """Whether a call that mixes rows is given none of those that have been ``derived``, nor makes a matrix of all."""
    return derived.isdisjoint(names_in(call)) and ast.unparse(vars(call)["func"]).rpartition(".")[2] not in _MIXING


def _given_to(callers: Mapping[ast.AST, Set[str]], function: _Function) -> set[str]:
    """The arguments for which calls of a function pass what is derived there; all where it is called nowhere."""
    names = [one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)]
    nodes = ((node, derived) for caller, derived in callers.items() for node in ast.walk(caller))
    calls = [(node, derived) for node, derived in nodes if isinstance(node, ast.Call)]
    calls = [pair for pair in calls if ast.unparse(pair[0].func).rpartition(".")[2] == function.name]
    own = names[1:] if names[:1] == ["self"] else names
    given = [(*pair, derived) for call, derived in calls for pair in zip(own, call.args, strict=False)]
    given += [(one.arg or "", one.value, derived) for call, derived in calls for one in call.keywords]
    return {name for name, one, derived in given if not derived.isdisjoint(names_in(one))} if calls else set(names)


def derived_from(code: ast.AST, first: Collection[str]) -> set[str]:
    """The names that code computes from what is in the ``first``, those among them."""
    derived, before = set(first), 0
    bindings = [pair for node in ast.walk(code) for pair in _bindings(node)]
    while len(derived) > before:
        before = len(derived)
        for target, value in bindings:
            if not derived.isdisjoint(names_in(value)):
                derived |= bound_in(target)
    return derived


def _bindings(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """What a statement binds, with the values."""
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)) if len(targets) == len(values):
            return list(zip(targets, values, strict=True))
        case ast.Assign(targets=targets, value=value):
            return [(one, value) for one in targets]
        case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
            return [(target, value)]
    return []


def _meets(node: ast.AST, derived: Set[str]) -> bool:
    """Whether what is ``derived`` from a part of the rows stands where each row meets all."""
    return any(not derived.isdisjoint(names_in(one)) for one in met_by_all(node))


def keeps_rows(node: ast.AST) -> bool:
    """Whether what a node computes has the rows of its operands where they were, none of them mixed with another."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
            if (name in _MIXING and not _is_placed(node)) or (name in _SHAPING and not _keeps_first(node, name)):
                return False
            return name not in _ALONG or _is_along_another(node, name)
    return True


def _is_placed(call: ast.Call) -> bool:
    """Whether it is the diagonal of a part of the rows, ``scores.diagonal(at)``."""
    return ast.unparse(call).endswith(f".diagonal({AT})")


def _keeps_first(call: ast.Call, name: str) -> bool:
    """Whether a tensor that gets another shape has its rows where they were: as many, or each as several."""
    is_method = isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) != "torch"
    given = call.args if is_method else call.args[1:]
    given = given[0].elts if len(given) == 1 and isinstance(given[0], (ast.Tuple, ast.List)) else given
    texts = [ast.unparse(one) for one in given]
    if name == "transpose":
        return len(texts) == 2 and all(one.isdecimal() and one != "0" for one in texts)
    if name == "permute":
        return texts[:1] == ["0"]
    return bool(texts and _NUMBER_OF_ROWS.search(texts[0]))


def _is_along_another(call: ast.Call, name: str) -> bool:
    """Whether a reduction is along another dimension than the first."""
    given = [one.value for one in call.keywords if one.arg in ("dim", "axis")]
    is_method = isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) not in ("torch", "F")
    place = _ALONG[name] + (not is_method)
    given += call.args[place : place + 1]
    if not given:
        return name in _ALONG_LAST
    if name in _OF_TWO and isinstance(given[0], (ast.Subscript, ast.Attribute, ast.BinOp, ast.Call)):
        return True  # of each element and another
    try:
        value = ast.literal_eval(given[0])
    except ValueError:
        return False
    return isinstance(value, int) and value != 0
