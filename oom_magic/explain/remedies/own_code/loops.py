"""The user's own code with a remedy written into it: the cell's training loop or optimizer, to paste."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import takewhile
from types import FunctionType
from typing import Any, TypeVar

from oom_magic.explain.live.called import called_in, object_of
from oom_magic.explain.syntax import bound_in, expression, names_in, path_to
from oom_magic.user_code import is_users_file

Code = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
Block = ast.For | ast.While | ast.FunctionDef
Node = TypeVar("Node", ast.stmt, ast.expr, ast.For, ast.Call, Block)

_AVERAGING = re.compile(r"(^|_)(ema|polyak|(moving|update)_(average|target|teacher|param)\w*|\w+_update)(_|$)", re.I)
_STEPPING = re.compile(r"step_\w+$|optim(izer)?_step$")
_UPDATES = ("step", "update", "unscale_", "zero_grad", "clip_grad_norm_", "clip_grad_value_")
_TRAINER_ARGUMENTS = {"output_dir", "per_device_train_batch_size", "num_train_epochs"}  # SFTConfig, DPOConfig, ...
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_MOST_LINES = 60  # of a statement that is shown whole


def own_arguments(tree: ast.Module, code: str) -> str:
    """The cell's own ``TrainingArguments(...)`` with the arguments that calls in ``code`` set; "" where it has none.

    Lines of ``code`` that only comment come first, its paragraphs without such calls last. Where another call is given
    the arguments as they are made, it is the whole statement.
    """
    own = next(((target, call) for target, call in _assigned_calls(tree) if _is_arguments(call)), None)
    if own is None:
        return ""
    statements = (one for one in ast.walk(tree) if isinstance(one, (ast.Assign, ast.Expr)))
    around = next((one for one in statements if any(node is own[1] for node in ast.walk(one.value))), None)
    return (own_inline_arguments(around, code) if around is not None else "") or _with_arguments(*own, code)


def own_inline_arguments(statement: ast.Assign | ast.Expr, code: str) -> str:
    """Like ``own_arguments``, of a statement that makes the arguments inside another call: the whole statement."""
    own = next((call for target, call in _assigned_calls(ast.Module([statement], [])) if _is_arguments(call)), None)
    if own is None or own is statement.value:
        return ""
    before, call, after = ast.unparse(statement).partition(ast.unparse(own))
    return _with_arguments(before, own, code, after) if call else ""


def _with_arguments(before: str, own: ast.Call, code: str, after: str = "") -> str:
    """``own`` between ``before`` and ``after``, with the arguments that calls in ``code`` set."""
    try:
        parts = {part: _arguments_in(part) for part in code.split("\n\n")}
    except SyntaxError:  # a command for the shell
        return ""
    wanted = [call for calls in parts.values() for call in calls]
    if not wanted:
        return ""
    call = copied(own)
    given = {one.arg: ast.unparse(one.value) for one in call.keywords}
    changed = {one.arg: one for new in wanted for one in new.keywords if given.get(one.arg) != ast.unparse(one.value)}
    call.keywords = [changed.pop(one.arg, one) for one in call.keywords] + list(changed.values())
    lines = [line for part, calls in parts.items() if calls for line in part.splitlines() if line.startswith("#")]
    others = [part for part, calls in parts.items() if not calls]
    written = "".join(f"    {one},\n" for one in map(ast.unparse, [*call.args, *call.keywords]))
    return "\n\n".join(["\n".join([*lines, f"{before}{ast.unparse(call.func)}(\n{written}){after}"]), *others])


def _arguments_in(code: str) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call) and _is_arguments(node)]


def copied(node: Node) -> Node:
    """The same code as a new tree.

    ``copy.deepcopy`` follows attributes that tools set on nodes: after a traceback of IPython's even the contexts that
    all trees share (``ast.Load()``) have a ``parent`` in some library's source, which is copied as a whole.
    """
    text = ast.unparse(node)
    made: Any = expression(text) if isinstance(node, ast.expr) else ast.parse(text).body[0]
    return made  # type: ignore[no-any-return]


def _assigned_calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """The calls in a cell, each with the ``"name = "`` that it is assigned by, or ""."""
    assigned = {id(node.value): node for node in ast.walk(tree) if isinstance(node, ast.Assign)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            targets = assigned[id(node)].targets if id(node) in assigned else []
            yield "".join(f"{ast.unparse(one)} = " for one in targets), node


def _is_arguments(call: ast.Call) -> bool:
    """Whether a call makes a Trainer's arguments: TrainingArguments, or a configuration such as SFTConfig."""
    name = ast.unparse(call.func).rpartition(".")[2]
    sets = {one.arg for one in call.keywords}
    return name.endswith("TrainingArguments") or bool(name.endswith("Config") and sets & _TRAINER_ARGUMENTS)


def backwards(block: list[ast.stmt]) -> Iterator[ast.Expr]:
    """The statements of a block, not of those in it, that begin a backward."""
    for statement in block:
        call = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "backward":
            yield statement  # type: ignore[misc]


def training_loops(tree: ast.AST) -> list[ast.For | ast.While]:
    """The loops that have one backward of their own."""
    loops = (loop for loop in ast.walk(tree) if isinstance(loop, (ast.For, ast.While)))
    return [loop for loop in loops if len(list(backwards(loop.body))) == 1]


def _training_loop(tree: ast.AST) -> ast.For | ast.While | None:
    """The one loop that has a backward of its own."""
    loops = training_loops(tree)
    return loops[0] if len(loops) == 1 else None


def training_block(tree: ast.AST, most: int = 1) -> Block | None:
    """The one loop, or else the one function, such as a closure or a step, that has a backward of its own; where more
    are allowed, with loops in it that have others, ``most`` in all."""
    blocks = training_blocks(tree)
    found = [node for node in blocks if not isinstance(node, ast.FunctionDef)] or blocks
    outer = found[0] if found else None  # the outermost, as ``ast.walk`` goes
    inside = [] if outer is None else training_blocks(outer)
    number = sum(len(list(backwards(node.body))) for node in inside)
    return outer if number <= most and all(node in inside for node in found) else None


def training_blocks(tree: ast.AST) -> list[Block]:
    """The loops and functions that have a backward of their own."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, (ast.For, ast.While, ast.FunctionDef)))
    return [node for node in nodes if any(True for _ in backwards(node.body))]


def trained_in(tree: ast.AST) -> set[str]:
    """The names of models that code makes itself: those whose ``parameters()`` it asks for."""
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    owners = (one.value for one in calls if isinstance(one, ast.Attribute) and one.attr == "parameters")
    return {one.id for one in owners if isinstance(one, ast.Name)}


def shown(tree: ast.Module, before: Collection[str], names: Collection[str] = ()) -> list[str]:
    """The statements that are not among those of ``before``, and those between two loops of them; of a long one that
    holds a training loop the loop. Before a loop also those that use what has changed, or ``names`` that have."""
    changed = [at for at, one in enumerate(tree.body) if ast.unparse(one) not in before]
    loops = [at for at in changed if isinstance(tree.body[at], (ast.For, ast.While))]
    between = range(loops[0], loops[-1]) if loops else ()
    made_anew = _made_anew(tree.body[: loops[0]], changed, names) if loops else set()
    chosen = (one for at, one in enumerate(tree.body) if at in made_anew.union(changed, between))
    return [_as_short(one) + _instead_of(one, before) for one in chosen]


def exchanged(before: Sequence[str], now: Sequence[str]) -> str:
    """Statements from the first that is new to the last, with what they stand for."""
    head = _same(before, now)
    tail = _same(before[:head:-1], now[:head:-1])
    gone = [text.partition("\n")[0] for text in before[head : len(before) - tail]]
    instead = " ... ".join(dict.fromkeys([gone[0], gone[-1]]))
    return "\n".join([*now[head : len(now) - tail], f"# instead of {instead}"])


def _same(some: Sequence[str], others: Sequence[str]) -> int:
    """How many at the beginning are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(some, others, strict=False)))


def _instead_of(statement: ast.stmt, before: Collection[str]) -> str:
    """A comment, where a statement assigns what one of ``before`` computed from what it was; else ""."""
    target = re.escape(ast.unparse(statement.targets[0])) if isinstance(statement, ast.Assign) else "(?!)"
    instead = next((one for one in before if re.match(rf"{target} [^\s=]+= ", one)), None)
    return "" if instead is None else f"\n# instead of {instead}"


def _made_anew(statements: Sequence[ast.stmt], changed: Collection[int], names: Collection[str]) -> set[int]:
    """The assignments, by number, from what the ``changed`` statements or ``names`` give, such as a loader's batch."""
    found, anew = set(), set(names)
    for at, one in enumerate(statements):
        used = [node for node in ast.walk(one) if isinstance(node, ast.Name)]
        if isinstance(one, ast.Assign) and any(isinstance(node.ctx, ast.Load) and node.id in anew for node in used):
            found.add(at)
        if at in found or at in changed:
            anew.update(node.id for node in used if isinstance(node.ctx, ast.Store))
    return found


def _as_short(statement: ast.stmt) -> str:
    text = ast.unparse(statement)
    is_long = text.count("\n") >= _MOST_LINES and not isinstance(statement, ast.For)
    return loop_of(ast.Module([statement], [])) if is_long and _training_loop(statement) is not None else text


def loop_of(tree: ast.Module) -> str:
    """The training loop of a statement, with what ``accumulating`` put before it."""
    (statement,) = tree.body
    loop = _training_loop(statement)
    assert loop is not None, "asked for where there is one"
    body, at = outermost(tree, loop)
    name = getattr(statement, "name", ast.unparse(statement).partition("\n")[0].rstrip(":"))
    return "\n".join([f"# in {name}:", *map(ast.unparse, body[max(at - 1, 0) : at + 1])])


def outermost(tree: ast.AST, loop: ast.stmt) -> tuple[list[ast.stmt], int]:
    """Where the outermost loop around a loop stands in its function: the block, and its place there."""
    path = path_to(tree, lambda one: any(node is loop for node in ast.walk(one)))
    for number, (body, at) in enumerate(path):
        is_innermost = not any(isinstance(inside[at_], _SCOPES) for inside, at_ in path[number:])
        if is_innermost and isinstance(body[at], (ast.For, ast.While)):
            return body, at
    raise AssertionError("the loop is one itself")


def with_outputs_dropped(loop: Block) -> str:
    """The loop or function with the outputs deleted before the backward; "" where they are used after the loss."""
    (backward,) = backwards(loop.body)
    uses = [node for node in ast.walk(loop) if isinstance(node, ast.Attribute) and node.attr == "loss"]
    names = [node for node in ast.walk(loop) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    outputs = uses[0].value if len(uses) == 1 else None
    if not isinstance(outputs, ast.Name) or sum(one.id == outputs.id for one in names) != 1:
        return ""
    at = loop.body.index(backward)
    call = backward.value
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
    if call.func.value is uses[0]:
        loop.body.insert(at, ast.Assign([ast.Name("loss")], uses[0]))
        call.func.value = ast.Name("loss")
        at += 1
    loop.body.insert(at, ast.Delete([ast.Name(outputs.id)]))
    return ast.unparse(ast.fix_missing_locations(loop))


def arguments_of(tree: Code) -> set[str]:
    """The names of a function's arguments, of which nothing is known: each may be a model."""
    return set() if isinstance(tree, ast.Module) else {one.arg for one in tree.args.args}


def runs_model(tree: ast.AST, names: Mapping[str, Any], given: Collection[str] = ()) -> bool:
    """Whether code calls a module: itself, by a method, or by a function of the user's that it gives one to.

    ``given`` are names that may be modules.
    """
    parts = [(tree, names), *((one.definition, one.names) for one in called_in(tree, names))]
    calls = [(node, known) for part, known in parts for node in ast.walk(part) if isinstance(node, ast.Call)]
    return any(_may_run(call, known, given) for call, known in calls)


def _may_run(call: ast.Call, names: Mapping[str, Any], given: Collection[str]) -> bool:
    function = object_of(call.func, names)
    if is_module(function) or ast.unparse(call.func).partition(".")[0] in given:
        return True
    values = [*call.args, *(one.value for one in call.keywords)]
    is_users = isinstance(function, FunctionType) and is_users_file(function.__code__.co_filename)
    return is_users and any(is_module(object_of(one, names)) or ast.unparse(one) in given for one in values)


def is_update(statement: ast.stmt, made: Collection[str] = ()) -> bool:
    """Whether it belongs to the optimizer's step; nothing that takes in what the loop has ``made``, as metrics do."""
    if isinstance(statement, ast.If) and not statement.orelse:
        return all(is_update(one, made) for one in statement.body)
    if _averages(statement):
        own = bound_in(statement)
        return (set(made) - own).isdisjoint(names_in(statement))
    if called_alone(statement) == "update":
        given = [node for one in statement.value.args for node in ast.walk(one)]  # type: ignore[attr-defined]
        return not any(
            isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id in made) for node in given
        )
    return called_alone(statement) in _UPDATES


def _averages(statement: ast.stmt) -> bool:
    """Whether it lets other weights follow the trained ones: a function by such a name, or a loop over parameters that
    changes them in place."""
    if isinstance(statement, ast.With):
        return all(map(_averages, statement.body))
    if isinstance(statement, ast.For):
        is_of_weights = "parameters()" in ast.unparse(statement.iter)
        return is_of_weights and all(map(_changes_in_place, statement.body))
    return bool(_AVERAGING.search(called_alone(statement)))


def _changes_in_place(statement: ast.stmt) -> bool:
    """``average.lerp_(weight, 0.1)``, or an assignment to ``average.data``."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return called_alone(statement).endswith("_") or any(getattr(one, "attr", "") == "data" for one in targets)


def called_alone(statement: ast.AST) -> str:
    """The last name of the function that a statement calls, and nothing else but to keep the norm that clipping
    returns; "step" of an object of the user's around an optimizer: ``optimizer.step_and_update_lr()``."""
    call = statement.value if isinstance(statement, (ast.Expr, ast.Assign)) else None
    name = ast.unparse(call.func).rpartition(".")[2] if isinstance(call, ast.Call) else ""
    if isinstance(call, ast.Call) and not call.args and _STEPPING.match(name):
        return "step"
    return name if isinstance(statement, ast.Expr) or name.startswith("clip_grad_") else ""


def is_module(value: Any) -> bool:
    """Whether an object is a module, by its class alone."""
    return any(kind.__module__ == "torch.nn.modules.module" for kind in type(value).__mro__)
