"""Rewriting the user's functions during a dry run, so that ``loops`` controls their loops.

A function's code is compiled again from its source, where the items of each loop that may train or evaluate go through
``LOOPS``. Nothing else of it changes: names, lines and what it does are the same.
"""

from __future__ import annotations

import ast
import builtins
import linecache
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from importlib.machinery import PathFinder
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from oom_magic.predict.instrumentation.loops import LOOPS, can_be_asked
from oom_magic.predict.isolation.reach import users_modules
from oom_magic.predict.libraries.adapters import imports_followed
from oom_magic.user_code import compiled_cell, is_cell, is_users_file

_PLACE = "<the loops of the dry run>"  # in the compiled code, until LOOPS itself takes its place
_TRAINS = re.compile(r"step|backward|train|eval|valid|test|epoch|loader|batch|fit|infer|advance|no_grad|model|net\b")
_SAYS = re.compile(r"print|log|write|set_(postfix|description)|info|debug|(bar|progress)\.update")
# Classes of libraries with loops that train.
_LIGHTNING = (
    ("fit_loop", "_FitLoop"), ("training_epoch_loop", "_TrainingEpochLoop"), ("evaluation_loop", "_EvaluationLoop"),
    ("prediction_loop", "_PredictionLoop"),
)  # fmt: skip
TRAINERS = (
    ("transformers.trainer", "Trainer"),
    ("trl.trainer.base_trainer", "_BaseTrainer"),
    *(
        (f"{package}.loops.{module}", name)
        for package in ("lightning.pytorch", "pytorch_lightning")
        for module, name in _LIGHTNING
    ),
)


@contextmanager
def loops_known(function: Callable[..., Any], namespaces: Iterable[Mapping[str, Any]]) -> Iterator[None]:
    """Replace the code of functions reachable from ``function`` and the user's modules by ``with_loops``, and that of
    trainers; also of modules that are imported meanwhile."""
    before: list[tuple[FunctionType, CodeType]] = []

    def rewrite(functions: Iterable[FunctionType]) -> None:
        for found in functions:
            code = found.__code__
            made = with_loops(code)
            if made is not code:
                before.append((found, code))
                found.__code__ = made

    try:
        rewrite(_functions(function, namespaces))
        with imports_followed(_is_followed, lambda module: rewrite(_of_module(module))):
            yield
    finally:
        for found, code in before:
            found.__code__ = code


def with_loops(code: CodeType) -> CodeType:
    """``code`` with its loops known; itself where it has none, or where it was not compiled from its source."""
    for original, rewritten in _codes_of(code.co_filename).get((code.co_name, code.co_firstlineno), ()):
        if _content(original) == _content(code):
            return rewritten
    return code


def _content(code: CodeType) -> tuple[object, ...]:
    """What distinguishes code from other code of its name and line, such as two lambdas."""
    constants = [_content(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts]
    return code.co_code, code.co_freevars, code.co_names, *constants


def compiled_with_loops(tree: ast.Module, file: str) -> CodeType:
    """The code of statements with their loops known; each statement counts as one line, its first."""
    source = ast.unparse(ast.fix_missing_locations(tree))
    written = ast.parse(source)
    lines = {id(new): old.lineno for new, old in zip(_statements(written), _statements(tree), strict=False)}
    made = _Rewriter(source).visit(written)
    _place(made, 1, lines)
    return _with_loops_in_place(compiled_cell(made, file))


def _statements(tree: ast.AST) -> list[ast.stmt]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]


def _place(node: ast.AST, line: int, lines: Mapping[int, int]) -> None:
    """Put a node, and those in it, at its statement's line, of ``lines`` by identity; a new one at ``line``."""
    line = lines.get(id(node), line)
    if "lineno" in node._attributes:
        vars(node).update(lineno=line, end_lineno=line, col_offset=0, end_col_offset=0)
    for inside in ast.iter_child_nodes(node):
        _place(inside, line, lines)


Codes = dict[tuple[str, int], list[tuple[CodeType, CodeType]]]
_MOST_FILES = 4096  # each dry run needs all of the user's files in turn: a smaller cache would never have a hit
_by_lines: dict[str, tuple[list[str], Codes]] = {}  # ``linecache`` returns the same list until a file is read again


def _codes_of(file: str) -> Codes:
    lines = linecache.getlines(file)
    known = _by_lines.get(file)
    if known is None or known[0] is not lines:
        known = _by_lines[file] = lines, _compiled(file, "".join(lines))
        while len(_by_lines) > _MOST_FILES:
            del _by_lines[next(iter(_by_lines))]
    return known[1]


@lru_cache(maxsize=_MOST_FILES)
def _compiled(file: str, source: str) -> Codes:
    """All code objects of a file by name and first line: as they are, and with their loops known."""
    found: Codes = {}
    try:
        tree, other = ast.parse(source), _Rewriter(source).visit(ast.parse(source))
        for part in _units(file, tree.body):
            original, rewritten = (compiled_cell(ast.Module(one.body[part], []), file) for one in (tree, other))
            _collect(original, _with_loops_in_place(rewritten), found)
    except (SyntaxError, ValueError, RecursionError):  # a cell with magics in it
        found.clear()
    return found


def _units(file: str, statements: list[ast.stmt]) -> list[slice]:
    """The units of compilation: a whole file; a cell whole, without its last expression, or by statement."""
    units = [slice(None)]
    if is_cell(file):
        units += [slice(0, -1), *(slice(number, number + 1) for number in range(len(statements)))]
    return units


def _collect(original: CodeType, rewritten: CodeType, found: Codes) -> None:
    """Record both code objects and those inside of them, which come in the same order."""
    found.setdefault((original.co_name, original.co_firstlineno), []).append((original, rewritten))
    inner = [[one for one in code.co_consts if isinstance(one, CodeType)] for code in (original, rewritten)]
    for one, other in zip(*inner, strict=True):
        _collect(one, other, found)


def _with_loops_in_place(code: CodeType) -> CodeType:
    consts = tuple(
        _with_loops_in_place(constant) if isinstance(constant, CodeType) else LOOPS if constant == _PLACE else constant
        for constant in code.co_consts
    )
    return code.replace(co_consts=consts)  # type: ignore[arg-type]


class _Rewriter(ast.NodeTransformer):
    """Rewrites loops to get their items from ``LOOPS``; code of models stays unchanged, for compilers."""

    def __init__(self, source: str) -> None:
        self._lines = source.splitlines()

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        if any(ast.unparse(base).endswith("Module") for base in node.bases):
            return node
        return self.generic_visit(node)

    def visit_For(self, node: ast.For) -> ast.AST:
        if not self._may_train(node):
            return self.generic_visit(node)
        counter = _counter(node)
        conditions = self._conditions(node, counter)
        self.generic_visit(node)
        call = _call("each", [node.iter, ast.Constant(node.lineno), ast.Constant(counter), conditions])
        node.iter = ast.fix_missing_locations(ast.copy_location(call, node.iter))
        return node

    def visit_While(self, node: ast.While) -> ast.AST:
        if node.orelse or not self._may_train(node):
            return self.generic_visit(node)
        conditions = self._conditions(node, "")
        self.generic_visit(node)
        leave = ast.If(ast.UnaryOp(ast.Not(), node.test), [ast.Break()], [])
        target = ast.Attribute(ast.Constant(_PLACE), "turn", ast.Store())
        loop = ast.For(target, _call("turns", [ast.Constant(node.lineno), conditions]), [leave, *node.body], [])
        for made in (leave, target, loop.iter):
            ast.fix_missing_locations(ast.copy_location(made, node.test))
        return ast.fix_missing_locations(ast.copy_location(loop, node))

    def _conditions(self, loop: ast.For | ast.While, counter: str) -> ast.expr:
        """The conditions in a loop, rewritten to report to ``LOOPS``: see ``loops.Condition``."""
        found: list[ast.expr] = []
        for node in _statements_of(loop):
            if isinstance(node, ast.If):
                test = ast.unparse(node.test) if counter and can_be_asked(node.test, counter) else ""
                guarded = self._lines[node.body[0].lineno - 1 : node.body[-1].end_lineno]
                is_jump = isinstance(node.body[0], (ast.Raise, ast.Break, ast.Continue, ast.Return, ast.Pass))
                matters = not is_jump and any(map(_TRAINS.search, guarded))
                keeps = bool(test) and not is_jump and not all(map(_is_said, node.body))
                known = (node.lineno, test, matters, keeps)
                found.append(ast.Tuple([ast.Constant(one) for one in known], ast.Load()))
                if not _is_decided(node.test):
                    call = _call("decided", [node.test, ast.Constant(node.lineno)])
                    node.test = ast.fix_missing_locations(ast.copy_location(call, node.test))
        return ast.Tuple(found, ast.Load())

    def _may_train(self, node: ast.For | ast.While) -> bool:
        """Whether a model may be called in a loop: by a name that says so, or by any that Python lacks."""
        called = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
        if any(isinstance(one, ast.Name) and not hasattr(builtins, one.id) for one in called):
            return True
        return bool(called) and any(map(_TRAINS.search, self._lines[node.lineno - 1 : node.end_lineno]))


def _call(name: str, arguments: list[ast.expr]) -> ast.Call:
    return ast.Call(ast.Attribute(ast.Constant(_PLACE), name, ast.Load()), arguments, [])


def _is_said(statement: ast.stmt) -> bool:
    """Whether a statement only prints or updates a progress bar."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and _SAYS.search(ast.unparse(call.func)) is not None


def _is_decided(test: ast.expr) -> bool:
    return isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute) and test.func.attr == "decided"


def _counter(loop: ast.For) -> str:
    """The name of a loop's counter: its target, or the first target of ``enumerate``."""
    target = loop.target
    if isinstance(target, ast.Tuple) and "enumerate(" in ast.unparse(loop.iter):
        target = target.elts[0]
    return target.id if isinstance(target, ast.Name) else ""


def _statements_of(loop: ast.For | ast.While) -> Iterator[ast.AST]:
    """The statements of a loop, without those of functions and classes defined in it."""
    waiting: list[ast.AST] = [*loop.body]
    while waiting:
        node = waiting.pop(0)
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.expr)):
            waiting += ast.iter_child_nodes(node)


def _functions(function: Callable[..., Any], namespaces: Iterable[Mapping[str, Any]]) -> list[FunctionType]:
    """The user's functions in ``function``, these namespaces and the user's modules, and trainers' methods."""
    waiting: list[Any] = [function, *(value for names in namespaces for value in list(names.values()))]
    waiting += (value for module in users_modules() for value in list(vars(module).values()))
    found = _users_functions(waiting)
    imported = (sys.modules[name] for name in dict(TRAINERS) if name in sys.modules)
    return [*found, *(one for module in imported for one in _of_trainers(module))]


def _is_followed(name: str, path: Any) -> bool:
    """Whether a module that is to be imported is the user's, or has a trainer."""
    if name in dict(TRAINERS):
        return True
    spec = PathFinder.find_spec(name, path)
    return spec is not None and is_users_file(spec.origin or "<>")


def _of_module(module: ModuleType) -> list[FunctionType]:
    """The functions with loops of a module that has just been imported."""
    return [*_of_trainers(module)] or _users_functions(list(vars(module).values()))


def _users_functions(waiting: list[Any]) -> list[FunctionType]:
    """The user's functions among some objects, and inside of them."""
    found: dict[int, FunctionType] = {}
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, FunctionType):
            if is_users_file(one.__code__.co_filename):
                found[id(one)] = one
            waiting += _wrapped_by(one)
        else:
            waiting += _parts(one)
    return list(found.values())


def _of_trainers(module: ModuleType) -> Iterator[FunctionType]:
    """The methods of the trainers that a module of a library defines."""
    for name, trainer in TRAINERS:
        if name == module.__name__:
            methods = [one for one in vars(getattr(module, trainer, object)).values() if callable(one)]
            wrapped = [inner for one in methods if isinstance(one, FunctionType) for inner in _wrapped_by(one)]
            yield from (one for one in (*methods, *wrapped) if isinstance(one, FunctionType))


def _wrapped_by(function: FunctionType) -> Iterator[Any]:
    yield getattr(function, "__wrapped__", None)
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not assigned yet
            yield cell.cell_contents


def _parts(value: Any) -> list[Any]:
    """Functions inside a value: of methods, partials, classes, objects of the user's classes."""
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, partial):
        return [value.func]
    kind = value if isinstance(value, type) else type(value)
    home = sys.modules.get(kind.__module__ or "")
    is_users = is_users_file(getattr(home, "__file__", None) or ("<stdin>" if kind.__module__ == "__main__" else "<>"))
    if not is_users or issubclass(kind, torch.nn.Module):
        return []
    return [*vars(kind).values(), *(base for base in kind.__mro__[1:-1])]
