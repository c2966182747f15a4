"""What the user's code computes for each row of its data by itself, done for some of the rows at a time.

No model's graph is kept there: where a model runs, it evaluates.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from types import FunctionType, MethodType
from typing import Any

from oom_magic.explain.live.called import NOTHING, called_in, object_of
from oom_magic.explain.remedies.own_code.loops import copied, is_module
from oom_magic.user_code import bound_in, is_stored, names_in, read_before_bound, read_in

# Methods of models that compute rows by themselves, as calling the model does.
_OF_ROWS = re.compile(r"^(generate|encode|forward|embed|predict|sample|decode|infer|transform)|_features$|^__call__$")
_AT = "at"
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
_IN_PAIRS = frozenset({"cdist", "outer", "kron", "tensordot"})
_MIXING = frozenset(
    {"nonzero", "unique", "backward", "item", "diag", "diagonal", "fill_diagonal_", "eye", "trace", "tril", "triu",
     "tril_", "triu_", "solve", "solve_triangular", "cholesky", "cholesky_solve", "lstsq", "inv", "inverse", "pinv",
     "det", "logdet", "slogdet", "svd", "svdvals", "qr", "eig", "eigh", "eigvals", "eigvalsh", "lobpcg", "matrix_exp"}
)  # fmt: skip
_NUMBER_OF_ROWS = re.compile(
    r"^-1$|^len\([\w.]+\)$|^[\w.]+\.shape\[0\]$|^[\w.]+\.size\(0\)$|^\*[\w.]+\.shape\[:-?\d+\]$"
)
_SHAPING = frozenset({"view", "reshape", "permute", "transpose"})


def model_calls(tree: ast.Module, names: Mapping[str, Any]) -> Iterator[tuple[Any, Any, ast.expr]]:
    """The calls of models in the cell, each with what is taken of its result, and the place where it stands: a list or
    a dictionary of fields, and the key there."""
    inside: set[int] = set()
    for node in ast.walk(tree):  # what is outside comes first
        for key, value in list(vars(node).items()):
            places = enumerate(value) if isinstance(value, list) else [(key, value)]
            for at, one in places:
                call = _call_of(one, names) if at != "func" else None  # a method is taken with its call
                if call is not None and id(call) not in inside:
                    inside.add(id(call))
                    yield (value if isinstance(value, list) else vars(node)), at, one


def _call_of(taken: Any, names: Mapping[str, Any]) -> ast.Call | None:
    """The call of a model of which an attribute, or the same of each row, is taken: ``model(x).logits[:, -1]``,
    ``model(x).argmax(1)``."""
    while True:
        match taken:
            case (
                ast.Attribute(value=value)
                | ast.Subscript(value=value, slice=ast.Tuple(elts=[ast.Slice(None, None, None), *_]))
            ):
                taken = value
            case ast.Call() if _is_of_model(taken, names):
                return taken
            case ast.Call(func=ast.Attribute(value=value, attr=name), args=args) if _keeps_rows(taken) and (
                name not in ("view", "reshape") or ast.unparse(args[0]) == "-1"  # not a number of all rows
            ):
                taken = value
            case _:
                return None


def in_rows(taken: ast.expr, names: Mapping[str, Any], bound: Collection[str], number: int, after: int) -> str:
    """What is taken of a model's call on ``number`` rows, of calls on ``after`` rows each and joined; "" where it is
    not known what of its arguments has the rows. Names ``bound`` by the code are taken to have them."""
    part = copied(taken)
    call = _call_of(part, names)
    if call is None or any(isinstance(one, ast.Starred) for one in call.args):
        return ""
    rows = _Rows(names, bound, number, after)
    call.args = [rows.visit(one) for one in call.args]
    for one in call.keywords:
        one.value = rows.of_all(one.value) if one.arg is None else rows.visit(one.value)
    if not rows.length:
        return ""
    each, steps = ast.unparse(part), f"range(0, {rows.length}, {after})"
    rows_of_all = f"[row for {_AT} in {steps} for row in {each}]"
    if ast.unparse(call.func).endswith(".generate"):
        return f"torch.nn.utils.rnn.pad_sequence({rows_of_all}, batch_first=True{_padding(call, names)})"
    kinds = _kinds_returned(call, names) if call is part else {"tensor"}
    if kinds == {"list"}:
        return rows_of_all
    joining = {"tensor": "torch.cat", "array": _name_of_numpy(names)}.get(kinds.pop(), "") if len(kinds) == 1 else ""
    return f"{joining}([{each} for {_AT} in {steps}])" if joining else ""


def _kinds_returned(call: ast.Call, names: Mapping[str, Any]) -> set[str]:
    """What a model or a function of the user's returns: "tensor", "array" of NumPy's, "list" of one for each row."""
    function = object_of(call.func, names)
    own = getattr(function, "__func__", function)
    found = [one.definition for one in called_in(call, names) if one.function is own]
    if is_module(function) or not found:
        return {"tensor"}
    made = {name: node.value for node in ast.walk(found[0]) for name in _assigned(node) if isinstance(node, ast.Assign)}
    returned = [node.value for node in ast.walk(found[0]) if isinstance(node, ast.Return)]
    values = [made.get(ast.unparse(one), one) for one in returned if one is not None]
    return {_kind(one) for one in values}


def _assigned(node: ast.AST) -> list[str]:
    return [one.id for one in node.targets if isinstance(one, ast.Name)] if isinstance(node, ast.Assign) else []


def _kind(made: ast.expr) -> str:
    match made:
        case ast.ListComp() | ast.Call(func=ast.Attribute(attr="tolist" | "batch_decode")):
            return "list"
        case ast.Call(func=ast.Attribute(attr="numpy")):
            return "array"
    return "tensor"


def _name_of_numpy(names: Mapping[str, Any]) -> str:
    """The function that joins arrays, as the code may call it; "" where NumPy has no name there."""
    numpy = sys.modules.get("numpy")
    return next((f"{name}.concatenate" for name, one in names.items() if one is numpy and one is not None), "")


def _padding(call: ast.Call, names: Mapping[str, Any]) -> str:
    """What a call of ``generate`` fills shorter rows up with, as an argument; "" for zeros."""
    for one in call.keywords:
        if one.arg == "pad_token_id":
            return f", padding_value={ast.unparse(one.value)}"
        settings = object_of(one.value, names) if one.arg is None else None
        if isinstance(settings, Mapping) and "pad_token_id" in settings:
            return f", padding_value={ast.unparse(one.value)}['pad_token_id']"
    model = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    config = getattr(object_of(model, names), "generation_config", None)
    for name in ("pad_token_id", "eos_token_id"):  # as transformers chooses it
        if isinstance(getattr(config, name, None), int):
            return f", padding_value={ast.unparse(model)}.generation_config.{name}"
    return ""


def _is_of_model(call: ast.Call, names: Mapping[str, Any]) -> bool:
    return _calls_model(call, names) or _is_of_rows(call, names)


def _is_of_rows(call: ast.Call, names: Mapping[str, Any]) -> bool:
    """Whether a call of a function of the user's has a model compute each row of its arguments by itself."""
    if not isinstance(object_of(call.func, names), (FunctionType, MethodType)):
        return False
    called = [one for one in called_in(call, names) if not is_module(one.owner)]
    runs = ((node, one.names) for one in called for node in ast.walk(one.definition) if isinstance(node, ast.Call))
    given = set(names_in(call))
    codes = ((one.definition, _derived(one.definition, _given(call, one.definition, given))) for one in called)
    return any(_calls_model(node, seen) for node, seen in runs) and _stay_apart(codes)


def _calls_model(call: ast.Call, names: Mapping[str, Any]) -> bool:
    """Whether it calls a module, or a method of one that computes rows."""
    if is_module(object_of(call.func, names)):
        return True
    is_method = isinstance(call.func, ast.Attribute) and is_module(object_of(call.func.value, names))
    return is_method and bool(_OF_ROWS.search(vars(call.func)["attr"]))


class _Rows(ast.NodeTransformer):
    """Some rows in place of what has all of them; ``length`` is how many those are."""

    def __init__(self, names: Mapping[str, Any], bound: Collection[str], number: int, after: int) -> None:
        self._names, self._bound, self._number, self._after = names, bound, number, after
        self.length = ""

    def of_all(self, mapping: ast.expr) -> ast.expr:
        """Some rows of all that a mapping has: ``**inputs``; itself where it has none: ``**settings``."""
        value = self._known(mapping)
        if isinstance(value, Mapping) and not any(self._has_rows(one) for one in value.values()):
            return mapping
        text = ast.unparse(mapping)
        self.length = self.length or f"len(next(iter({text}.values())))"
        return _parsed(f"{{name: value[{_AT}:{_AT} + {self._after}] for name, value in {text}.items()}}")

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """Not the function itself."""
        if isinstance(node.func, ast.Attribute):
            node.func.value = self.visit(node.func.value)
        node.args = [self.visit(one) for one in node.args]
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """A name of rows."""
        return self._of_rows(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        """An entry that is rows."""
        return self._of_rows(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """An attribute that is rows."""
        return self._of_rows(node)

    def _of_rows(self, node: ast.expr) -> ast.expr:
        value = self._known(node)
        if value is not NOTHING and not self._has_rows(value):
            return node
        text = ast.unparse(node)
        self.length = self.length or f"len({text})"
        return _parsed(f"{text}[{_AT}:{_AT} + {self._after}]")

    def _known(self, node: ast.expr) -> Any:
        """What an expression is before the code runs; NOTHING of what the code binds."""
        root = node
        while isinstance(root, (ast.Attribute, ast.Subscript)):
            root = root.value
        return NOTHING if isinstance(root, ast.Name) and root.id in self._bound else object_of(node, self._names)

    def _has_rows(self, value: Any) -> bool:
        is_list = isinstance(value, list) and len(value) == self._number  # such as texts
        return is_list or tuple(getattr(value, "shape", ()))[:1] == (self._number,)


def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def leading_rows(tree: ast.Module, names: Mapping[str, Any]) -> tuple[str, int] | None:
    """The tensor of an earlier cell, and its number of rows, that the cell may take some rows at a time; None: none."""
    read = sorted(
        (node for node in ast.walk(tree) if isinstance(node, ast.Name)), key=lambda one: (one.lineno, one.col_offset)
    )
    for name in dict.fromkeys(node.id for node in read):
        shape = tuple(getattr(names.get(name), "shape", ())) if _is_tensor(names.get(name)) else ()
        if len(shape) > 1 and shape[0] > 1 and computed_in_parts(tree, names, name, 1):
            return name, int(shape[0])
    return None


def _is_tensor(value: Any) -> bool:
    return type(value).__name__ == "Tensor"


def computed_in_parts(tree: ast.Module, names: Mapping[str, Any], rows: str, after: int) -> ast.Module | None:
    """The cell with the statements that compute something of ``rows`` done for ``after`` rows at a time, and the
    results joined; None where rows are not computed by themselves."""
    body = tree.body
    reads = [at for at, one in enumerate(body) if rows in read_in(one)]
    if not reads or any(rows in bound_in(one) for one in body):
        return None
    start, stop = _stretch(body, reads[0])
    block, part = ast.Module(body[start:stop], []), f"{rows}_part"
    used = _results(block.body, body[stop:])
    begun = read_before_bound(block) & bound_in(block)
    inside = _of_part(block.body, names, rows, part) if used and not begun and reads[-1] < stop else []
    parted = _in_parts(inside, used, part, f"{rows}.split({after})")
    if not parted:
        return None
    return ast.fix_missing_locations(ast.Module([*body[:start], *parted, *body[stop:]], []))


def _in_parts(inside: Sequence[ast.stmt], used: Sequence[str], part: str, parts: str) -> list[ast.stmt]:
    """The statements in a loop over parts of the rows, behind those that read none, and what is ``used`` of their
    results joined; nothing where none is used."""
    derived = _derived(ast.Module(list(inside), []), {part})
    results = [name for name in used if name in derived]
    if not results:
        return []
    alike = [one for one in inside if derived.isdisjoint(names_in(one)) and not bound_in(one) & _filled(inside)]
    looped = [one for one in inside if one not in alike]
    loop = ast.parse(f"for {part} in {parts}:\n    pass").body[0]
    assert isinstance(loop, ast.For)
    together = results[0] if len(results) == 1 else f"({', '.join(results)})"
    passing = [name for name in _made_by(looped) if name not in used]  # what is left would be of the last part alone
    behind = f"parts.append({together})" + (f"\ndel {', '.join(passing)}" if passing else "")
    left = sorted(_made_in_loops(looped) - {*used, *passing})
    behind += f"\n{' = '.join(left)} = None" if left else ""
    loop.body = [*looped, *ast.parse(behind).body]
    joined = f"{results[0]} = torch.cat(parts)"
    if len(results) > 1:
        joined = f"{', '.join(results)} = map(torch.cat, zip(*parts))"
    return [*alike, *ast.parse("parts = []").body, loop, *ast.parse(joined).body]


def _filled(block: Sequence[ast.stmt]) -> set[str]:
    """The names of what a method or an item may be set in: ``kept.append(row)``, ``table[0] = row``."""
    nodes = [node for one in block for node in ast.walk(one)]
    called = [node.func.value for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    stored = [node.value for node in nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)]
    return {one.id for one in (*called, *stored) if isinstance(one, ast.Name)}


def _stretch(body: Sequence[ast.stmt], first: int) -> tuple[int, int]:
    """The statements from the first that reads the rows, and those before it that begin what it binds, to the last
    before one that only uses a result."""
    stop = next((at for at in range(first, len(body)) if isinstance(body[at], ast.Expr)), len(body))
    bound = _bound(body[first:stop])
    start = next((at for at in range(first) if bound_in(body[at]) & bound), first)
    return start, stop


def _results(block: Sequence[ast.stmt], behind: Sequence[ast.stmt]) -> list[str]:
    """The names of the block that are read behind it, and those that its last statement binds, under ``with`` too."""
    last = block[-1]
    while isinstance(last, ast.With):
        last = last.body[-1]
    used = {name for one in behind for name in read_in(one)} | set(_made_by([last]))
    return [name for name in dict.fromkeys(node.id for node in _stored(block)) if name in used]


def _made_by(block: Sequence[ast.stmt]) -> list[str]:
    """The names that assignments in the block, or under ``with`` in it, bind, but not those within loops."""
    inside = [_made_by(one.body) if isinstance(one, ast.With) else () for one in block]
    made = [node.id for node in _stored([one for one in block if isinstance(one, ast.Assign)])]
    return list(dict.fromkeys([*made, *(name for names in inside for name in names)]))


def _made_in_loops(block: Sequence[ast.stmt]) -> set[str]:
    """The names that assignments in loops bind, which may not run."""
    loops = (node for one in block for node in ast.walk(one) if isinstance(node, (ast.For, ast.While)))
    made = (node for loop in loops for node in ast.walk(loop) if isinstance(node, ast.Assign))
    return _bound(list(made))


def _of_part(block: Sequence[ast.stmt], names: Mapping[str, Any], rows: str, part: str) -> list[ast.stmt]:
    """The statements for a part of the rows; none where they, or the user's functions that they call, do not compute
    each row by itself, as far as can be seen: nothing mixes the first dimension. Where each row is compared with all,
    ``torch.cdist(x, x)``, those of the part are."""
    made = [copied(one) for one in block]
    module = ast.Module(made, [])
    if any(isinstance(node, (ast.AugAssign, ast.FunctionDef, ast.ClassDef)) for node in ast.walk(module)):
        return []
    called = [one.definition for one in called_in(module, names)]

    def stay_apart(first: str) -> bool:
        derived = _derived(module, {first})
        codes = [(module, derived), *((one, _derived(one, _given(module, one, derived))) for one in called)]
        return _stay_apart(codes)

    read = [
        [node for node in ast.walk(one) if isinstance(node, ast.Name) and node.id == rows] for one in _parts(module)
    ]
    twice = [each for each in read if len(each) > 1]
    if len(twice) > 1 or any(len(each) > 2 for each in twice) or (twice and stay_apart(rows)):
        return []
    once = [node for each in read if len(each) == 1 for node in each]
    for chosen in twice[0] if twice else [None]:  # the rows of the part are on one side
        for node in (*once, *([chosen] if chosen is not None else ())):
            node.id = part
        if stay_apart(part):
            return made
        if chosen is not None:
            chosen.id = rows
    return []


def _stay_apart(codes: Iterable[tuple[ast.AST, Set[str]]]) -> bool:
    """Whether code computes each row by itself, of pairs of code and the names there of what has the rows."""
    return all(_keeps_rows(node) and not _meets(node, derived) for code, derived in codes for node in ast.walk(code))


def _parts(code: ast.AST) -> Iterator[ast.AST]:
    """What is computed at once: simple statements, the conditions of others, the values of a tuple each by itself."""
    for node in ast.walk(code):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            yield from node.value.elts
        elif isinstance(node, ast.stmt) and not hasattr(node, "body"):
            yield node
        elif isinstance(node, ast.stmt):
            yield from (one for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr))


def _given(caller: ast.AST, function: ast.FunctionDef | ast.AsyncFunctionDef, derived: Collection[str]) -> set[str]:
    """The arguments for which calls of a function pass what is ``derived``; all where it is not called there."""
    names = [one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)]
    calls = [one for one in ast.walk(caller) if isinstance(one, ast.Call)]
    calls = [one for one in calls if ast.unparse(one.func).rpartition(".")[2] == function.name]
    own = names[1:] if names[:1] == ["self"] else names
    given = [pair for call in calls for pair in zip(own, call.args, strict=False)]
    given += [(one.arg or "", one.value) for call in calls for one in call.keywords]
    return {name for name, one in given if not set(derived).isdisjoint(names_in(one))} if calls else set(names)


def _derived(code: ast.AST, first: Collection[str]) -> set[str]:
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
    """Whether each row meets others there: of what is ``derived`` from rows, these come to stand elsewhere, or two are
    compared in pairs."""

    def is_derived(one: ast.AST) -> bool:
        return not derived.isdisjoint(names_in(one))

    match node:
        case ast.Attribute(value=value, attr="T" | "H") | ast.Call(func=ast.Attribute(value=value, attr="t")):
            return is_derived(value)
        case (
            ast.Call(func=ast.Attribute(value=value, attr="unsqueeze"), args=[ast.Constant(value=0)])
            | ast.Subscript(value=value, slice=ast.Constant(value=None))
            | ast.Subscript(value=value, slice=ast.Tuple(elts=[ast.Constant(value=None), *_]))
        ):
            return is_derived(value)
        case ast.Call(func=ast.Attribute(attr=name), args=args) if name in _IN_PAIRS:
            return sum(map(is_derived, args)) > 1
        case ast.BinOp(left=left, op=ast.MatMult(), right=right):
            return is_derived(right) and not is_derived(left)  # a sum over rows
        case ast.Call(func=ast.Attribute(attr="einsum"), args=[ast.Constant(value=str(equation)), *operands]):
            terms, _, result = equation.replace(" ", "").partition("->")
            own = {term[:1] for term, one in zip(terms.split(","), operands, strict=False) if is_derived(one)}
            return bool(own) and own != {result[:1]}
    return False


def _keeps_rows(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
            if name in _MIXING or (name in _SHAPING and not _keeps_first(node, name)):
                return False
            return name not in _ALONG or _is_along_another(node, name)
    return True


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
    try:
        value = ast.literal_eval(given[0])
    except ValueError:
        return False
    return isinstance(value, int) and value != 0


def _stored(block: Sequence[ast.stmt]) -> list[ast.Name]:
    return [node for one in block for node in ast.walk(one) if isinstance(node, ast.Name) and is_stored(node)]


def _bound(block: Sequence[ast.stmt]) -> set[str]:
    return bound_in(ast.Module(list(block), []))
