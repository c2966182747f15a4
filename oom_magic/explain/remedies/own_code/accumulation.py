"""The user's own training loop, rewritten so that gradients of several batches make up a step of the optimizer."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MethodType
from typing import Any, TypeGuard

from oom_magic.explain.live.called import NOTHING, Called, called_in, object_of
from oom_magic.explain.remedies.own_code.loops import (
    backwards,
    called_alone,
    is_module,
    is_update,
    outermost,
    training_loops,
)
from oom_magic.explain.syntax import DEFINING, bound_by, bound_in, expression, statements_in

_WRAPPING = ("enumerate", "tqdm")  # which go over what they are given
ACCUMULATED_BATCHES = "accumulate_grad_batches"  # of Lightning's trainer
TRAINER_LIMITS = ("limit_train_batches", "overfit_batches", "val_check_interval")  # which count its batches
_VALIDATED = ("val_dataloaders", "datamodule")  # what it is given to validate


def accumulating(
    tree: ast.Module, names: Mapping[str, Any], number: int, sizes: Collection[str] = ()
) -> ast.Module | None:
    """A copy of statements, which see ``names``, with a training loop in which the optimizer steps after so many
    batches; of several loops in each whose batches depend on ``sizes``.

    None where they do not contain one in a known form.
    """
    made = ast.parse(ast.unparse(tree))
    loops = training_loops(made)
    changed = _depending(made, sizes)
    if any(loop is not one and loop in ast.walk(one) for one in loops for loop in loops):
        return None  # the inner one makes several steps with a batch, or for one of the outer
    if any(_differ_by_entry(node, sizes) for node in ast.walk(made)):
        return None  # the other phases of a training would accumulate, too
    if len(loops) > 1:
        loops = [loop for loop in loops if changed.intersection(_texts(loop))]
    limits = [[one for one in _limits(loop, names) if one.is_kept(changed)] for loop in loops]
    if not loops or not all(map(_accumulate, loops, limits)):
        return None
    places = {id(body): (body, at) for body, at in (outermost(made, loop) for loop in reversed(loops))}
    for body, at in places.values():
        body.insert(at, ast.parse(f"accumulation = {number}").body[0])
    return ast.fix_missing_locations(made)


def accumulating_step(called: Called, caller: ast.AST, number: int, sizes: Collection[str]) -> ast.Module | None:
    """A copy of a function that makes a batch, whose size is one of ``sizes``, for one step of the optimizer, with so
    many batches in a step; None where it is not so, or the ``caller`` may give it the batch."""
    made = ast.parse(ast.unparse(called.definition))
    function = made.body[0]
    assert isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)), "defined so"
    has_words = ast.get_docstring(function) is not None
    turn = ast.While(ast.Constant(True), function.body[has_words:], [])
    calls = [one for one in ast.walk(caller) if isinstance(one, ast.Call) and _called(one) == function.name]
    given = [part for one in calls for part in (*one.args, *(it.value for it in one.keywords))]
    is_given = not calls or any(_may_be_batch(one, called.names) for one in given)
    if is_given or training_loops(made) or len(list(backwards(turn.body))) != 1:
        return None
    makes = turn.body[: turn.body.index(next(backwards(turn.body)))]
    if set(sizes).isdisjoint(text for one in makes for text in _texts(one)) or not _accumulate(turn, ()):
        return None
    counted = ast.parse(f"accumulation = {number}").body
    function.body = [*function.body[:has_words], *counted, *turn.body]
    return ast.fix_missing_locations(made)


def _may_be_batch(argument: ast.expr, names: Mapping[str, Any]) -> bool:
    """Whether what a function is given may be data: not what is computed of numbers, a model, an optimizer."""
    values = [names.get(node.id, NOTHING) for node in ast.walk(argument) if isinstance(node, ast.Name)]
    return any(not isinstance(one, (int, float, str)) and not hasattr(type(one), "step") and not is_module(one)
               for one in values)  # fmt: skip


def _differ_by_entry(node: ast.AST, sizes: Collection[str]) -> bool:
    """Whether a list or tuple has entries in which one of the ``sizes`` differs, such as the phases of a training."""
    entries = node.elts if isinstance(node, (ast.List, ast.Tuple)) else []
    for size in sizes:
        values = {ast.unparse(value) for one in entries for name, value in _named_in(one) if name == size}
        if len(values) > 1:
            return True
    return False


def _named_in(entry: ast.expr) -> Iterator[tuple[str | None, ast.expr]]:
    """What a dictionary, or a call such as ``dict(...)``, is given by name."""
    if isinstance(entry, ast.Dict):
        keys = (one.value if isinstance(one, ast.Constant) else None for one in entry.keys)
        yield from zip((key if isinstance(key, str) else None for key in keys), entry.values, strict=True)
    elif isinstance(entry, ast.Call):
        yield from ((one.arg, one.value) for one in entry.keywords)


def with_more_batches(
    tree: ast.Module, names: Mapping[str, Any], times: Fraction, sizes: Collection[str] = ()
) -> ast.Module | None:
    """A copy of statements, which see ``names``, whose loop accumulates as it is and ends after a number of batches: it
    gets ``times`` as many and makes as many steps. None where no loop ends so, or its end depends on the changed
    ``sizes``."""
    made = ast.parse(ast.unparse(tree))
    changed = _depending(made, sizes)
    loops = [node for node in ast.walk(made) if isinstance(node, (ast.For, ast.While))]
    steps = [loop for loop in loops if {"backward", "step"} <= set(map(called_alone, _own(loop)))]
    ended = [_end_later(loop, _limits(loop, names), times, changed) for loop in steps]
    ended += [_multiply_limits(made, one, names, times, sizes) for one in trainers_of_lightning(made, names)]
    return ast.fix_missing_locations(made) if any(ended) else None


def _own(loop: ast.For | ast.While) -> Iterator[ast.stmt]:
    """The statements that each turn of a loop runs, in their order, but for those of loops and functions in it."""
    yield from statements_in(loop.body, (ast.For, ast.While, *DEFINING))


def _end_later(
    loop: ast.For | ast.While, limits: Iterable[Argument], times: Fraction, changed: Collection[str]
) -> bool:
    """Let a loop make ``times`` as many turns, where it counts them up to what has not ``changed``; whether it does."""
    limits = list(limits)
    if isinstance(loop, ast.For) and _draws_batches(loop) and isinstance(loop.iter, ast.Call):
        limits += [Argument(loop.iter.args, 0)] if len(loop.iter.args) == 1 else []
    limits = [one for one in limits if one.is_kept(changed)]
    for one in limits:
        more = ast.BinOp(one.value, ast.Mult(), ast.Constant(times.numerator))
        is_whole = times.denominator == 1
        one.value = more if is_whole else ast.BinOp(more, ast.FloorDiv(), ast.Constant(times.denominator))
    counted = [ast.unparse(one.target) for one in loop.body if _counts(one)]
    counters = {name: _slower(name, 0, times, False) for name in counted}
    ends = [loop] if isinstance(loop, ast.While) and not set(changed) & set(_texts(loop.test)) else []
    found = [_count_slower(end, counters) for end in ends]
    counter, start = _own_counter(loop) if isinstance(loop, ast.For) else ("", 0)
    is_done = False  # the batch that the turn counts
    for statement in _own(loop):
        is_done |= called_alone(statement) == "backward"
        if not (isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Break)):
            continue
        if not set(changed) & set(_texts(statement.test)):
            own = {counter: _slower(counter, start, times, is_done)} if counter else {}
            found.append(_count_slower(statement, counters | own))
    return bool(limits) or any(found)


def _slower(counter: str, start: int, times: Fraction, is_done: bool) -> str:
    """What a counter from ``start`` would be in a loop with ``times`` fewer turns; ``is_done``: where the batch of this
    turn is one of those that make up its last."""
    first = start - is_done
    turns = f"({counter} {'-' if first > 0 else '+'} {abs(first)})" if first else counter
    turns += f" * {times.denominator}" if times.denominator > 1 else ""
    turns += f" // {times.numerator}"
    return f"{turns} {'+' if first > 0 else '-'} {abs(first)}" if first else turns


class _Slower(ast.NodeTransformer):
    """Puts what stands for each of the ``counters`` in its place."""

    def __init__(self, counters: Mapping[str, str]) -> None:
        self._counters = counters

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """The expression for a counter."""
        return expression(self._counters[node.id]) if node.id in self._counters else node


def _count_slower(statement: ast.If | ast.While, counters: Mapping[str, str]) -> bool:
    """Let a condition read what stands for each of the ``counters``; whether it reads one."""
    reads = any(isinstance(node, ast.Name) and node.id in counters for node in ast.walk(statement.test))
    statement.test = _Slower(counters).visit(statement.test)
    return reads


def accumulated_by_trainer(
    tree: ast.Module, names: Mapping[str, Any], number: int, sizes: Collection[str] = ()
) -> ast.Module | None:
    """A copy of statements in which the trainer of Lightning's that they make accumulates gradients of so many batches,
    and has as many more where it counts them.

    None where they make none, or one whose settings are unpacked.
    """
    made = ast.parse(ast.unparse(tree))
    trainers = trainers_of_lightning(made, names)
    if len(trainers) != 1 or any(one.arg is None for one in trainers[0].keywords):
        return None
    _multiply_limits(made, trainers[0], names, Fraction(number), sizes)
    kept = [one for one in trainers[0].keywords if one.arg != ACCUMULATED_BATCHES]
    trainers[0].keywords = [*kept, ast.keyword(ACCUMULATED_BATCHES, ast.Constant(number))]
    return ast.fix_missing_locations(made)


def trainers_of_lightning(tree: ast.AST, names: Mapping[str, Any]) -> list[ast.Call]:
    """The calls that make a trainer of Lightning's."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [one for one in calls if is_lightnings_trainer(object_of(one.func, names))]


def _multiply_limits(
    tree: ast.Module, trainer: ast.Call, names: Mapping[str, Any], times: Fraction, sizes: Collection[str]
) -> bool:
    """Let a trainer make ``times`` as many batches where it counts them, also of a validation whose batches depend on
    ``sizes``; whether it does."""
    changed = _depending(tree, sizes)
    fits = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node) == "fit"]
    given = [one for fit in fits for one in [*fit.args[2:], *(it.value for it in fit.keywords if it.arg in _VALIDATED)]]
    is_validated_so = any(changed.intersection(_texts(one)) for one in given)
    limits = (*TRAINER_LIMITS, *(("limit_val_batches",) if is_validated_so else ()))
    counting = [one for one in trainer.keywords if one.arg in limits and _is_whole(one.value, names)]
    for one in counting:
        one.value = _multiplied(one.value, times)
    return bool(counting)


def _is_whole(node: ast.expr, names: Mapping[str, Any]) -> bool:
    """Whether an expression is a whole number: of batches, where a fraction is of the data."""
    return type(node.value if isinstance(node, ast.Constant) else object_of(node, names)) is int


def _multiplied(node: ast.expr, times: Fraction) -> ast.expr:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return ast.Constant(int(node.value * times))
    more = ast.BinOp(node, ast.Mult(), ast.Constant(times.numerator))
    return more if times.denominator == 1 else ast.BinOp(more, ast.FloorDiv(), ast.Constant(times.denominator))


def is_lightnings_trainer(kind: Any) -> bool:
    """Whether a value is the class that runs Lightning's loops."""
    module = kind.__module__ if isinstance(kind, type) and kind.__name__ == "Trainer" else ""
    return module.partition(".")[0] in ("lightning", "pytorch_lightning")


def _depending(tree: ast.Module, sizes: Collection[str]) -> set[str]:
    """The ``sizes`` and the names of what is made from them."""
    found = set(sizes)
    for one in ast.walk(tree):
        if isinstance(one, ast.Assign) and found.intersection(_texts(one.value)):
            found.update(ast.unparse(target) for target in one.targets)
    return found


def _texts(node: ast.AST) -> Iterator[str]:
    """The names, dotted or not, in code."""
    return (ast.unparse(one) for one in ast.walk(node) if isinstance(one, (ast.Name, ast.Attribute)))


def _accumulate(loop: ast.For | ast.While, limits: Collection[Argument]) -> bool:
    """Let the optimizer step after ``accumulation`` batches, of which the loop has up to ``limits``; whether that was
    possible."""
    given = [loop.target] if isinstance(loop, ast.For) else []
    made = set(bound_by([*given, *loop.body]))
    updates = [one for one in loop.body if is_update(one, made)]
    if not any(called_alone(node) == "step" for one in updates for node in ast.walk(one)):
        return False
    (backward,) = backwards(loop.body)
    reading = _reading_updates(loop.body, updates)
    if reading is None:
        return False
    updates = [one for one in loop.body if one in updates or one in reading]
    others = [one for one in loop.body if one not in updates]
    divide(backward, "accumulation")
    updates.sort(key=lambda one: called_alone(one) == "zero_grad")  # at the end, else as they were
    if isinstance(loop, ast.While) or _draws_batches(loop):
        return _accumulate_inside(loop, backward, others, updates)
    at = others.index(backward) + 1
    for one in limits:
        one.value = ast.BinOp(one.value, ast.Mult(), ast.Name("accumulation"))
    of_steps = _ends_by_steps(loop, others[:at], others[at:])
    condition = expression(f"{_counter(loop)} % accumulation == 0")
    later = [one for one in others[at:] if one not in of_steps[:-1]]
    if later[:1] == of_steps[-1:]:
        updates, later = [*updates, *of_steps], later[1:]
    later = [ast.If(condition, of_steps, []) if one in of_steps else one for one in later]
    loop.body = [*others[:at], ast.If(condition, updates, []), *later]
    return True


def _reading_updates(body: list[ast.stmt], updates: list[ast.stmt]) -> list[ast.stmt] | None:
    """The statements of a loop that read what an update keeps, such as the norm that clipping returns, or what such
    statements make: they belong to the step. None where one runs before it, or may end the turn."""
    kept: set[str] = set()
    found: list[ast.stmt] = []
    for one in body:
        if one in updates or kept.intersection(_texts(one)):
            kept |= bound_in(one)
            found += [] if one in updates else [one]
    others = (one for one in body if one not in updates and one not in found)
    is_read_before = any(kept.intersection(_texts(one)) for one in others)
    return None if is_read_before or any(map(_leads_out, found)) else found


def _accumulate_inside(
    loop: ast.For | ast.While, backward: ast.stmt, others: list[ast.stmt], updates: list[ast.stmt]
) -> bool:
    """The same where each turn makes its batch itself: those of a step in a loop inside. What ends the loop, counts its
    turns or follows the step without reading what was made of a batch, as drawing samples does, stays outside."""
    if isinstance(loop, ast.While) and any(isinstance(node, (ast.Call, ast.NamedExpr)) for node in ast.walk(loop.test)):
        return False  # it may get the batch
    at = others.index(backward) + 1
    first = next((number for number, one in enumerate(others[:at]) if not _leads_out(one)), at)
    if any(map(_leads_out, others[first:at])):
        return False
    made = set(bound_by(others[: at - 1]))
    step = next(at for at, one in enumerate(loop.body) if one in updates and "step" in map(called_alone, ast.walk(one)))
    behind = [one for one in loop.body[step:] if not made.intersection(_texts(one))]
    after: list[ast.stmt] = []
    for one in others[at:]:
        reads_later = any(bound_in(later).intersection(_texts(one)) for later in after)
        after += [one] if _leads_out(one) or _counts(one) or one in behind or reads_later else []
    inside = [one for one in others[first:] if one not in after]
    each = ast.For(ast.Name("_"), expression("range(accumulation)"), inside, [])
    loop.body = [*others[:first], each, *updates, *after]
    return True


def _leads_out(statement: ast.stmt) -> bool:
    """Whether it may end a turn of the loop that it stands in, the loop or the function."""
    is_loop = isinstance(statement, (ast.For, ast.While))
    return not is_loop and any(isinstance(one, (ast.Break, ast.Continue, ast.Return)) for one in ast.walk(statement))


def _ends_by_steps(loop: ast.For, before: list[ast.stmt], later: list[ast.stmt]) -> list[ast.stmt]:
    """Let a loop that leaves after a number of batches make as many steps of the optimizer. Returns those of the
    statements ``later`` than the backward that then belong to a step: what ends the loop, and what counts for it."""
    counts = {ast.unparse(one.target): one for one in later if _counts(one)}
    counter, start = _own_counter(loop)
    steps = f"(({counter} - {start}) // accumulation + {start})" if start else f"{counter} // accumulation"
    belong: list[ast.stmt] = []
    for one in (*before, *later):
        if not (isinstance(one, ast.If) and isinstance(one.body[-1], ast.Break)):
            continue
        read = set(_texts(one.test))
        counted = [counts[name] for name in read & counts.keys()]
        belong += [one, *counted] if one in later and read & {counter, *counts} else counted
        for node in ast.walk(one.test):
            if isinstance(node, ast.Name) and node.id == counter:
                node.id = steps
    return [one for one in later if one in belong]


@dataclass
class Argument:
    """What a call is given: an entry of its arguments, or the value of a keyword."""

    owner: Any
    key: int | str

    @property
    def value(self) -> ast.expr:
        """The expression, which can be set."""
        found: ast.expr = self.owner[self.key]
        return found

    @value.setter
    def value(self, value: ast.expr) -> None:
        self.owner[self.key] = value

    def is_kept(self, changed: Collection[str]) -> bool:
        """Whether it is the same number of batches when what has ``changed`` has."""
        return "len(" not in ast.unparse(self.value) and not set(changed) & set(_texts(self.value))


def _limits(loop: ast.For | ast.While, names: Mapping[str, Any]) -> Iterator[Argument]:
    """What says how many batches a loop has at most."""
    node = loop.iter if isinstance(loop, ast.For) else None
    while isinstance(node, ast.Call) and _called(node) in _WRAPPING and node.args:
        node = node.args[0]
    if not isinstance(node, ast.Call):
        return
    if _called(node) == "islice" and len(node.args) > 1:
        yield Argument(node.args, 1)
    for one in node.args if _called(node) == "zip" else ():
        if isinstance(one, ast.Call) and _called(one) == "range" and len(one.args) == 1:
            yield Argument(one.args, 0)
    yield from _counted_by_generator(node, names)


def _counted_by_generator(call: ast.Call, names: Mapping[str, Any]) -> Iterator[Argument]:
    """What a function of the user's is given that yields so many batches."""
    function = object_of(call.func, names)
    found = next(
        (one for one in called_in(call, names) if one.function is getattr(function, "__func__", function)), None
    )
    if found is None:
        return
    match [one for one in found.definition.body if _yields(one)]:
        case [ast.For(iter=ast.Call(func=ast.Name(id="range"), args=[ast.Name(id=name)])) as each] if _is_simple(each):
            yield from _given_as(name, call, found, isinstance(function, MethodType))


def _is_simple(loop: ast.For) -> bool:
    """Whether one statement of a loop yields, and each turn comes to it."""
    nodes = (node for one in loop.body for node in ast.walk(one))
    leads = any(isinstance(node, (ast.For, ast.While, ast.Break, ast.Continue)) for node in nodes)
    return not leads and [_yields(one) for one in loop.body].count(True) == 1


def _yields(tree: ast.AST) -> bool:
    return any(isinstance(one, ast.Yield) for one in ast.walk(tree))


def _given_as(name: str, call: ast.Call, called: Called, is_bound: bool) -> Iterator[Argument]:
    """What a call gives a parameter; its default, if that is a constant, becomes an argument."""
    parameters = [one.arg for one in called.definition.args.args][is_bound:]
    if name not in parameters or any(isinstance(one, ast.Starred) for one in call.args):
        return
    at = parameters.index(name)
    if at < len(call.args):
        yield Argument(call.args, at)
        return
    default = inspect.signature(called.function).parameters[name].default
    given = next((one for one in call.keywords if one.arg == name), None)
    if given is None and type(default) is int:
        given = ast.keyword(name, ast.Constant(default))
        call.keywords.append(given)
    if given is not None:
        yield Argument(vars(given), "value")


def _called(node: ast.expr) -> str:
    """The last name of the function that is called."""
    return ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""


def _counts(statement: ast.stmt) -> TypeGuard[ast.AugAssign]:
    return isinstance(statement, ast.AugAssign) and isinstance(statement.value, ast.Constant)


def _draws_batches(loop: ast.For) -> bool:
    """Whether each iteration makes its batch itself, rather than getting it from a loader or from its place in data."""
    counter = ast.unparse(loop.target)
    slices = [node.slice for one in loop.body for node in ast.walk(one) if isinstance(node, ast.Subscript)]
    is_place = any(isinstance(node, ast.Name) and node.id == counter for one in slices for node in ast.walk(one))
    return isinstance(loop.iter, ast.Call) and ast.unparse(loop.iter.func) in ("range", "trange") and not is_place


def divide(backward: ast.Expr, by: str) -> None:
    """``loss.backward()`` becomes ``(loss / by).backward()``; a scaler's or accelerator's argument is divided."""
    call = backward.value
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
    loss = call.func.value
    if isinstance(loss, ast.Call) and len(loss.args) == 1 and ast.unparse(loss.func).endswith("scale"):
        loss.args[0] = ast.BinOp(loss.args[0], ast.Div(), ast.Name(by))
    elif call.args and ast.unparse(loss).endswith("accelerator"):
        call.args[0] = ast.BinOp(call.args[0], ast.Div(), ast.Name(by))
    else:
        call.func.value = ast.BinOp(loss, ast.Div(), ast.Name(by))


def _counter(loop: ast.For) -> str:
    """An expression that counts iterations from 1; a counter is added to the loop if it has none."""
    counter, start = _own_counter(loop)
    if counter:
        return counter if start == 1 else f"({counter} + {1 - start})" if start < 1 else f"({counter} - {start - 1})"
    loop.target = ast.Tuple([ast.Name("number"), loop.target])
    loop.iter = expression(f"enumerate({ast.unparse(loop.iter)}, 1)")
    return "number"


def _own_counter(loop: ast.For) -> tuple[str, int]:
    """The name that counts a loop's iterations, and from where; "" if there is none."""
    name, targets = _called(loop.iter), loop.target.elts if isinstance(loop.target, ast.Tuple) else []
    given: Sequence[ast.expr] = loop.iter.args if isinstance(loop.iter, ast.Call) else ()
    keywords = {one.arg: one.value for one in loop.iter.keywords} if isinstance(loop.iter, ast.Call) else {}
    found: tuple[ast.expr, ast.expr] | None = None
    if name == "enumerate" and targets:
        found = targets[0], given[1] if len(given) > 1 else keywords.get("start", ast.Constant(0))
    elif name == "zip" and len(targets) == len(given):
        counted = (one for one in zip(targets, given, strict=True) if _called(one[1]) in ("range", "count"))
        found = next(((one, ast.Constant(0)) for one, call in counted if len(call.args) < 2), None)  # type: ignore[attr-defined]
    if found is None:
        return "", 0
    target, start = found
    is_known = isinstance(target, ast.Name) and isinstance(start, ast.Constant) and isinstance(start.value, int)
    return (target.id, start.value) if is_known else ("", 0)  # type: ignore[attr-defined]
