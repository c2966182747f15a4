"""Names that grow while a loop runs: a list of losses, a running sum, results put together; by line, with the fix."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import CodeType, FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from oom_magic.explain.live.backward_in_turns import InTurns, in_turns
from oom_magic.explain.live.called import NOTHING, called_in, hooks_registered, object_of, parsed
from oom_magic.explain.live.fixed_lines import (
    added_by,
    collected_on_host,
    cut_off,
    fixed_line,
    holds_modules,
    is_tensor,
    joined_on_host,
    last_entry,
    names_itself,
    newest_of,
)
from oom_magic.explain.live.later_backward import (
    MODULE_CALL,
    carried_names,
    is_backward,
    is_walked_back_later,
    path_in_function,
)
from oom_magic.explain.live.read_back import is_read_as_tensors, moved_back
from oom_magic.explain.syntax import bound_by, names_in, statements_in
from oom_magic.user_code import is_users_file

if TYPE_CHECKING:
    from oom_magic.explain.messages.failure import Failure
    from oom_magic.measure.holders.reach import Locate

_ADDING = ("append", "extend", "add", "insert", "appendleft")
_JOINING = ("cat", "concat", "concatenate", "stack", "vstack", "hstack")
_NOTEWORTHY_SHARE = 0.05
# A queue of so many times its first rows is no longer what the run began with, whatever its share of the memory.
_MANY_TIMES = 2
_Run = tuple[
    ast.stmt, ast.stmt, str, Mapping[str, Any]
]  # a statement, what it is in, its file, the names that it finds


@dataclass(frozen=True)
class Growth:
    """A name that grew in the loop that failed, or in one before the line that failed, as plain data.

    ``code`` at ``place`` makes it grow; ``fixed`` is that line so that it keeps numbers, or tensors on the host (""
    where no such line is known). ``has_graph``: what it keeps holds the graphs of the steps. ``is_joined``: each turn
    makes it again from itself; ``is_inherent``: and reads it, as generated text is. ``is_put_together``: the line that
    failed makes one tensor of it. ``remedy`` is what the fixed line does: "detach", "keep_on_host", "keep_newest" of a
    queue that training reads, or "backward_each" where the sum of losses was to be walked back. ``are_entries``: not
    tensors are counted, but entries that hold some, such as models. ``is_of_one_step``: one backward begins from all of
    it. ``beside`` is what else the loop collects in that way: fixed alone, the other would keep the graphs, and what is
    collected together is compared later, so all of it goes to the host or none. ``reads`` are the lines of the loop
    that read what is kept on the host, each with what moves it back to the device. ``run`` are the statements that
    ``fixed`` stands for, where those are more than ``code``: then ``turn`` is the backward of each turn in it.
    ``num_rows`` has what is joined, ``times`` as many as when the cell began; 0 where that is not known.
    """

    name: str
    code: str
    place: str
    num_tensors: int
    num_bytes: int
    has_graph: bool
    is_joined: bool = False
    is_put_together: bool = False
    is_inherent: bool = False
    fixed: str = ""
    remedy: str = "detach"
    are_entries: bool = False
    is_of_one_step: bool = False
    beside: tuple[Growth, ...] = ()
    reads: tuple[tuple[str, str], ...] = ()
    run: str = ""
    turn: str = ""
    num_rows: int = 0
    times: float = 0

    @property
    def is_larger_queue(self) -> bool:
        """Whether it is a queue with a multiple of the rows that the cell began with, and so what is made from it."""
        return self.remedy == "keep_newest" and self.times >= _MANY_TIMES

    @property
    def fixes(self) -> Mapping[str, str]:
        """The statements that are fixed together, each with what stands in their place."""
        together = (self, *self.beside)
        reads = {code: new for one in together for code, new in one.reads}
        return {one.run or one.code: one.fixed for one in together} | reads

    @property
    def as_tensors(self) -> Growth | None:
        """The same with tensors without graphs in place of numbers, for code that goes on with tensors; None where no
        line keeps numbers."""
        fixed = [one.fixed.replace(".item()", ".detach()") for one in (self, *self.beside)]
        made = [replace(one, fixed=new) for one, new in zip((self, *self.beside), fixed, strict=True)]
        has_numbers = any(one.fixed != new.fixed for one, new in zip((self, *self.beside), made, strict=True))
        return replace(made[0], beside=tuple(made[1:])) if has_numbers else None

    @property
    def alone(self) -> Growth | None:
        """The same with no other line fixed; None where none is."""
        return replace(self, beside=()) if self.beside else None

    @property
    def lines(self) -> Mapping[str, str]:
        """What to show of the fixed lines: ``fixed`` and ``line`` in a sentence; ``pairs`` as code, each of them over
        what it stands for."""
        fixed = "; ".join(one.fixed for one in (self, *self.beside))
        heads = ((f"{old.splitlines()[0]} ... {old.splitlines()[-1]}" if "\n" in old else old) for old in self.fixes)
        pairs = (f"{new}\n# instead of {old}" for old, new in zip(heads, self.fixes.values(), strict=True))
        return {"fixed": fixed, "line": self.turn or fixed, "pairs": "\n\n".join(pairs)}


def find_growing_containers(
    error: BaseException | None,
    names: Mapping[str, Any] | None,
    locate: Locate | None,
    failure: Failure,
    find_rows: Callable[[str], int] = lambda _: 0,
    grown: Collection[Growth] = (),
) -> Growth | None:
    """The largest of ``growths`` that is worth a sentence: a noteworthy share of what PyTorch held, or a queue that has
    a multiple of the rows that ``find_rows`` finds it had when the cell began, and keeps so many from now on.

    ``grown``: what ``growths`` has found when the run failed, where its objects are no longer as it left them.
    """
    if error is None or error.__traceback__ is None or "torch" not in sys.modules:
        return None
    try:
        grown = grown or growths(error, dict(names or {}), locate or _on_accelerators())
        found = [_with_newest(one, find_rows) for one in grown]
        least = _NOTEWORTHY_SHARE * (failure.pytorch_bytes or 0)
        largest = next((one for one in found if one.num_bytes > least or one.is_larger_queue), None)
        if largest is None:
            return _in_comprehension(error, names or {})
        return replace(largest, beside=_beside(largest, found))
    except Exception:  # the user's objects may raise anything when they are read
        return None


def _beside(growth: Growth, found: Collection[Growth]) -> tuple[Growth, ...]:
    """Those in the same file that keep graphs as well, or go to the host where ``growth`` does."""

    def belongs(one: Growth) -> bool:
        is_there = one.place.partition(":")[0] == growth.place.partition(":")[0] and one.code != growth.code
        keep_graphs = growth.has_graph and one.has_graph
        go_to_host = ".cpu()" in growth.fixed and ".cpu()" in one.fixed
        return is_there and bool(one.fixed) and (keep_graphs or go_to_host)

    mended = ("detach", "keep_on_host")
    return tuple(one for one in found if growth.remedy in mended and one.remedy in mended and belongs(one))


def _on_accelerators() -> Locate:
    from oom_magic.measure.device.accelerators import find_accelerators  # these imports load torch
    from oom_magic.measure.holders.release import make_locate

    return make_locate(find_accelerators())


def growths(error: BaseException, names: Mapping[str, Any], locate: Locate) -> tuple[Growth, ...]:
    """What grew in the loops that were running when the error came, largest first.

    ``names`` are the notebook's, for frames whose globals were emptied since; ``locate`` finds device memory.
    """
    from oom_magic.explain.live.frames import deepest_frames, names_of  # loads torch

    found: dict[tuple[str, str], Growth] = {}
    frames = deepest_frames(error)
    calls = [at for at, (frame, _) in enumerate(frames) if frame.f_code.co_name == MODULE_CALL]
    for at, (frame, trace) in enumerate(frames):
        file = frame.f_code.co_filename
        if not is_users_file(file):
            continue
        known = {**names, **names_of(frame)}
        is_inside = at < max(calls, default=0)
        joined = _joined_on(file, frame.f_globals, trace.tb_lineno)
        before = list(_collected_before(file, frame.f_globals, trace.tb_lineno, known))
        run = [*_run_by_loops(file, frame.f_globals, trace.tb_lineno, known), *before]
        if at + 1 < len(frames) and _is_library(frames[at + 1][0].f_code):
            run += _kept_after(frame.f_code, trace.tb_lineno, frame.f_globals, known)
        for statement, around, home, seen in run:
            ends = is_inside and _ends_with_call(statement, frame.f_code, known)
            growth = None if ends else _growth(statement, around, home, seen, locate)
            if growth is not None and growth.has_graph and home == file:
                growth = _of_one_step(growth, statement, known, frames[at:])
            if growth is not None and growth.fixed and growth.remedy == "keep_on_host":
                growth = replace(growth, reads=_reads(statement, seen, run))
            if growth is not None:
                is_together = _container(statement) in joined and any(statement is one for one, *_ in before)
                growth = replace(growth, is_put_together=is_together)
                found.setdefault((growth.name, growth.place), growth)
    return tuple(sorted(found.values(), key=lambda one: (-one.num_bytes, -one.num_tensors)))


def _reads(adding: ast.stmt, names: Mapping[str, Any], run: Iterable[_Run]) -> tuple[tuple[str, str], ...]:
    """The lines of a loop that read what ``adding`` makes grow, each with what moves that back to the device."""
    grown = _grown(adding)
    container = None if grown is None else object_of(grown, names)
    made = ((ast.unparse(statement), moved_back(statement, container, seen)) for statement, _, _, seen in run)
    return tuple((code, new) for code, new in made if new is not None)


def _of_one_step(
    growth: Growth, statement: ast.stmt, names: Mapping[str, Any], frames: list[tuple[FrameType, TracebackType]]
) -> Growth | None:
    """None of what a backward after the loop needs as a whole: outputs that a loss compares, a recurrence over time.

    Of losses whose turns do not go on from one another each can be walked back alone.
    """
    if not is_walked_back_later([growth.name], statement.lineno, frames):
        return growth
    frame = frames[0][0]
    states = [names.get(name) for name in carried_names(statement.lineno, frame) if name != growth.name]
    if growth.is_joined or _have_graph(states):
        return None
    turns = in_turns(frame, statement.lineno, names)
    if turns is None and growth.remedy == "backward_each":  # in some turns of its own loop
        return growth
    if turns is None:
        is_list = isinstance(statement, ast.Expr)
        return None if is_list else replace(growth, remedy="backward_each", fixed="", is_of_one_step=True)
    return _by_turns(growth, turns)


def _with_newest(growth: Growth, find_rows: Callable[[str], int]) -> Growth:
    """The growth of a queue with the line that keeps as many rows as it had when the cell began, where it had some."""
    rows = find_rows(growth.name) if growth.remedy == "keep_newest" else 0
    if not rows:
        return growth
    return replace(growth, fixed=newest_of(growth.code, growth.name, rows), times=growth.num_rows / rows)


def _by_turns(growth: Growth, turns: InTurns) -> Growth:
    rewritten = replace(growth, fixed=turns.after, run=turns.before, turn=turns.backward)
    return replace(rewritten, remedy="backward_each", is_of_one_step=True)


def _in_comprehension(error: BaseException, names: Mapping[str, Any]) -> Growth | None:
    """What a comprehension on the line that failed makes: losses that can be walked back in turns, or results of a
    module's calls from which no backward begins.

    Their number and size are not known, for what it had made is gone with it: of results a rehearsal with them in RAM
    shows whether they fill the card.
    """
    from oom_magic.explain.live.frames import deepest_frames, names_of  # loads torch

    frames = deepest_frames(error)
    users = [
        (at, {**names, **names_of(frame)})
        for at, (frame, _) in enumerate(frames)
        # a comprehension's own frame sees its own names alone
        if is_users_file(frame.f_code.co_filename) and frame.f_code.co_name not in ("<listcomp>", "<genexpr>")
    ]
    losses = (_losses(*frames[at], known) for at, known in users)
    results = (_results(frames[at:], known) for at, known in users)
    return next(filter(None, losses), None) or next(filter(None, results), None)


def _losses(frame: FrameType, trace: TracebackType, names: Mapping[str, Any]) -> Growth | None:
    from oom_magic.measure.history.frames import source_line  # loads torch

    turns = in_turns(frame, trace.tb_lineno, names)
    if turns is None or not turns.of_comprehension:
        return None
    line = source_line(frame.f_code.co_filename, trace.tb_lineno)
    return _by_turns(Growth(turns.of_comprehension, line.text, line.place, 0, 0, True), turns)


def _results(frames: list[tuple[FrameType, TracebackType]], names: Mapping[str, Any]) -> Growth | None:
    from oom_magic.measure.history.frames import source_line  # loads torch

    frame, trace = frames[0]
    file = frame.f_code.co_filename
    for statement in [block[at] for block, at in path_in_function(file, frame.f_globals, trace.tb_lineno)[-1:]]:
        code, fixed = ast.unparse(statement), collected_on_host(statement, names)
        targets = [ast.unparse(one) for one in getattr(statement, "targets", ())]
        if fixed and not is_walked_back_later(targets, trace.tb_lineno, frames):
            place = source_line(file, statement.lineno).place
            return Growth(code, code, place, 0, 0, False, fixed=fixed, remedy="keep_on_host")
    return None


def _have_graph(values: Iterable[Any]) -> bool:
    """Whether a tensor among values, or in tuples and lists of them, has a graph."""
    return any(
        value.grad_fn is not None if is_tensor(value) else isinstance(value, (tuple, list)) and _have_graph(value)
        for value in values
    )


def _ends_with_call(statement: ast.stmt, code: CodeType, names: Mapping[str, Any]) -> bool:
    """Whether what a statement makes grow ends with the call of a module: skipped connections, states over time.

    What a caller gave does not, unless it is a tensor, which is not made larger: its name is bound to another.
    """
    grown = _grown(statement)
    name = grown.id if isinstance(grown, ast.Name) else ""
    is_given = name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return name in code.co_varnames and (not is_given or is_tensor(names.get(name)))


def _run_by_loops(file: str, variables: dict[str, Any], line: int, names: Mapping[str, Any]) -> Iterator[_Run]:
    """The statements that the loops around a line run, those of the user's functions included: each with its loop or
    function, its file and the names that it finds."""
    path = path_in_function(file, variables, line)
    hooks = list(hooks_registered((one for block, at in path for one in block[:at]), names))
    for node in ast.walk(parsed(file, variables)):
        if isinstance(node, (ast.For, ast.While)) and node.lineno <= line <= (node.end_lineno or 0):
            yield from ((statement, node, file, names) for statement in statements_in(node.body))
            for one in (*called_in(node, names), *hooks):
                yield from ((each, one.definition, one.file, one.names) for each in statements_in(one.definition.body))


def _collected_before(file: str, variables: dict[str, Any], line: int, names: Mapping[str, Any]) -> Iterator[_Run]:
    """The statements of loops before a line that add to what is put together on it, which is there twice then, and to
    what the same loops collect beside it: that is read together with it."""
    path = path_in_function(file, variables, line)
    joined = _joined_on(file, variables, line)
    before = [one for block, at in path for one in block[:at] if joined]
    for loop in (node for one in before for node in ast.walk(one) if isinstance(node, (ast.For, ast.While))):
        run: list[_Run] = [(statement, loop, file, names) for statement in statements_in(loop.body)]
        for one in called_in(loop, names):  # such as a hook
            run += [(each, one.definition, one.file, one.names) for each in statements_in(one.definition.body)]
        if any(_container(each[0]) in joined for each in run):
            yield from (each for each in run if _container(each[0]))


def _joined_on(file: str, variables: dict[str, Any], line: int) -> set[str]:
    """The names of what is put together on a line."""
    return {name for block, at in path_in_function(file, variables, line)[-1:] for name in _joined_names(block[at])}


def _container(statement: ast.stmt) -> str:
    """The name of the variable that a statement adds to; "" where it does not add to one."""
    grown = _grown(statement)
    whole = None if grown is None else _whole(grown)
    return whole.id if isinstance(whole, ast.Name) else ""


def _joined_names(statement: ast.stmt) -> Iterator[str]:
    """What a statement gives to calls that put tensors together, or what that is taken from in a comprehension."""
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call) and _joins(node)]
    given = {node.id for call in calls for one in call.args for node in ast.walk(one) if isinstance(node, ast.Name)}
    yield from given
    for part in (node for node in ast.walk(statement) if isinstance(node, ast.comprehension)):
        if not given.isdisjoint(names_in(part.target)):
            yield from names_in(part.iter)


def _is_library(code: CodeType) -> bool:
    """Whether it is a library's function, whose loop may call the user's step: not the call of a module."""
    return code.co_name != MODULE_CALL and not is_users_file(code.co_filename)


def _kept_after(code: CodeType, line: int, variables: dict[str, Any], names: Mapping[str, Any]) -> Iterator[_Run]:
    """The statements of the user's function around a line that add to what is there after it, as ``_run_by_loops``."""
    functions = (one for one in ast.walk(parsed(code.co_filename, variables)) if isinstance(one, ast.FunctionDef))
    for one in functions:
        is_around = one.name == code.co_name and one.lineno <= line <= (one.end_lineno or 0)
        for statement in statements_in(one.body) if is_around else ():
            grown = _grown(statement)
            is_own = isinstance(grown, ast.Name) and grown.id in code.co_varnames
            if grown is not None and not is_own:
                yield statement, one, code.co_filename, names


def _growth(statement: ast.stmt, loop: ast.stmt, file: str, names: Mapping[str, Any], locate: Locate) -> Growth | None:
    """What a statement makes grow, if that holds tensors."""
    carried = _carried(statement, loop, names)
    grown = carried or _grown(statement)
    value: Any = NOTHING if grown is None else object_of(grown, names)
    if grown is None or value is NOTHING:
        return None
    from oom_magic.measure.history.frames import source_line
    from oom_magic.measure.holders.inventory import measure_holder  # loads torch

    whole = _whole(grown)
    holder = measure_holder(object_of(whole, names), locate, names.values())
    is_sum = isinstance(statement, ast.AugAssign) or getattr(statement, "targets", [None])[0] is grown
    number = holder.num_tensors or holder.num_entries
    if is_tensor(value) and isinstance(_first_target(statement), ast.Subscript) and not holder.has_graph:
        return None  # a tensor's entries are there before they are set
    if not number or ((is_sum or carried) and not (holder.has_graph or _is_joined(statement))):
        return None  # a running sum of numbers takes no device memory
    line = source_line(file, statement.lineno)
    name = ast.unparse(grown)
    remedy = "detach" if holder.has_graph else "keep_on_host"
    as_tensors = is_read_as_tensors(_scope(whole, statement, file, dict(names)), name, names)
    fixed = cut_off(statement, name, value) if carried else fixed_line(statement, holder, names, value, as_tensors)
    if ".load_state_dict(" in fixed or holds_modules(last_entry(value)):
        remedy = "keep_on_host"
    if is_sum and f"{name}.backward(" in ast.unparse(loop):
        added = added_by(statement)
        remedy, fixed = "backward_each", f"{ast.unparse(added)}.backward()" if added is not None else ""
    growth = Growth(
        ast.unparse(whole),
        ast.unparse(statement),
        line.place,
        number,
        holder.num_bytes,
        holder.has_graph,
        _is_joined(statement),
        fixed=fixed,
        remedy=remedy,
        are_entries=not holder.num_tensors,
        num_rows=value.shape[0] if is_tensor(value) and value.ndim else 0,
    )
    return _joined(growth, statement, loop) if growth.is_joined else growth


def _scope(grown: ast.expr, statement: ast.stmt, file: str, variables: dict[str, Any]) -> ast.Module:
    """The code that may read what a statement makes grow: of a function's variable that function, else the file."""
    path = path_in_function(file, variables, statement.lineno) if isinstance(grown, ast.Name) else []
    return ast.Module(path[0][0], []) if path else parsed(file, variables)


def _joined(growth: Growth, statement: ast.stmt, loop: ast.stmt) -> Growth:
    """What is joined with itself is collected where the loop does not read it, and is a queue where a training does."""
    assert isinstance(statement, ast.Assign), "joined"
    inside = {id(node) for node in ast.walk(statement)}
    others = [node for node in ast.walk(loop) if isinstance(node, (ast.Name, ast.Attribute)) and id(node) not in inside]
    is_read = any(ast.unparse(node) == growth.name and isinstance(node.ctx, ast.Load) for node in others)
    if not is_read:
        return replace(growth, fixed=joined_on_host(statement, growth.has_graph), remedy="keep_on_host")
    is_queue = any(map(is_backward, ast.walk(loop))) and not growth.has_graph
    return replace(growth, remedy="keep_newest") if is_queue else replace(growth, is_inherent=True)


def _carried(statement: ast.stmt, loop: ast.stmt, seen: Mapping[str, Any]) -> ast.expr | None:
    """A state that goes through a call from turn to turn, though each turn walks back its loss: the graphs of all turns
    hang together. A recurrence within a turn starts anew in it."""
    match statement:
        case ast.Assign(targets=[target], value=ast.Call(args=given)) if ".backward(" in ast.unparse(loop):
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            names = {one.id for one in given if isinstance(one, ast.Name)}
            name = next((one for one in parts if isinstance(one, ast.Name) and one.id in names), None)
            body = getattr(loop, "body", [])
            if name is None or statement not in body:
                return None
            earlier = bound_by(body[: body.index(statement)])
            is_cut = f"{name.id}.detach" in ast.unparse(loop) or _detaches(statement, seen)
            return None if name.id in earlier or is_cut else name
    return None


def _detaches(statement: ast.stmt, names: Mapping[str, Any]) -> bool:
    """Whether a function of the user's that a statement calls cuts graphs off, as one that repackages hidden states."""
    texts = (ast.unparse(one.definition) for one in called_in(statement, names))
    return any(".detach(" in text or ".detach_(" in text or ".data" in text for text in texts)


def _grown(statement: ast.stmt) -> ast.expr | None:
    """What a statement adds to: a container, a sum, or what is put together with itself."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner, attr=attr), args=[*_])) if attr in _ADDING:
            return owner
        case ast.AugAssign(target=target, op=ast.Add()):
            return target
        case ast.Assign(targets=[ast.Subscript(value=owner, slice=key)]) if not isinstance(key, ast.Constant):
            return owner
        case ast.Assign(targets=[ast.Name() | ast.Attribute() | ast.Subscript() as target], value=value):
            is_sum = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)
            return target if (is_sum or _is_joined(statement)) and names_itself(target, value) else None
    return None


def _whole(grown: ast.expr) -> ast.expr:
    """The container of what is reached by a key: ``kept`` of ``kept[name]`` and of ``kept.setdefault(name, [])``."""
    match grown:
        case ast.Subscript(value=owner, slice=key) if not isinstance(key, ast.Constant):
            return _whole(owner)
        case ast.Call(func=ast.Attribute(value=owner, attr="setdefault" | "get")):
            return _whole(owner)
    return grown


def _first_target(statement: ast.stmt) -> ast.expr | None:
    return statement.targets[0] if isinstance(statement, ast.Assign) else None


def _is_joined(statement: ast.stmt) -> bool:
    value = getattr(statement, "value", None)
    return isinstance(statement, ast.Assign) and isinstance(value, ast.Call) and _joins(value)


def _joins(call: ast.Call) -> bool:
    return ast.unparse(call.func).rpartition(".")[2] in _JOINING
