"""A live exception: the call that failed and the shapes of its tensors, as plain data.

No tensor, frame or exception is kept alive, and no code of the user's is run.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import operator
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from traceback import format_exception_only
from types import FrameType, ModuleType, TracebackType
from typing import Any

from oom_magic.explain.remedies.own_code.loops import is_module
from oom_magic.explain.syntax import expression
from oom_magic.measure.history.frames import source_line
from oom_magic.predict.shape_inference import (
    Output,
    TensorShape,
    infer,
    is_computable,
    is_followed,
    module_member,
    named_parameters,
    shape_of,
    to_meta,
)
from oom_magic.user_code import is_machinery, is_users_file

_OPTIMIZER_FILE = re.compile(r"[/\\](?:optim|optimizers?|bitsandbytes)[/\\]")
_CACHE_FILE = re.compile(r"[/\\]transformers[/\\](?:cache_utils|.*_cache)\.py$")
_CACHE_NAME = re.compile(r"\b(?:past_(?:k|v|key|value|kv)|(?:k|v|kv|key|value)_?cache|cache_(?:k|v|key|value))")
_OUT_OF_MEMORY = re.compile(r"out of memory|not enough memory|alloc", re.IGNORECASE)
_MOST_FRAMES = 60
_NOTHING = object()
_OWN_REFERENCES = 3  # to a frame's locals: by the frame, by a variable, and by the call that counts them


@dataclass(frozen=True)
class LiveTensor:
    """A tensor that a failing frame sees, by its name there."""

    name: str
    shape: TensorShape


@dataclass(frozen=True)
class LiveCall:
    """The call that a frame was in: its code with the shapes written in, and the tensors it makes.

    ``is_in_cache``: it belongs to a cache of keys and values.
    """

    expression: str
    made: tuple[Output, ...]
    inputs: tuple[LiveTensor, ...]
    is_in_optimizer: bool
    is_in_cache: bool = False


@dataclass(frozen=True)
class LiveFailure:
    """What an exception's frames show, the innermost call first.

    ``place`` and ``code`` are the innermost line of the user's own code; ``parameters`` are those of the
    models in sight, ``tensors`` what the user's frames and the innermost one hold.
    """

    place: str
    code: str
    calls: tuple[LiveCall, ...]
    tensors: tuple[LiveTensor, ...]
    parameters: tuple[LiveTensor, ...]


def inspect_failure(error: BaseException, names: Mapping[str, Any] | None = None) -> LiveFailure | None:
    """What the traceback of an exception shows; None where it has none that leads through code.

    ``names`` are the notebook's, for frames whose globals were emptied since (those of dry cells).
    """
    frames = deepest_frames(error)
    if not frames:
        return None
    users = [item for item in frames if is_users_file(item[0].f_code.co_filename)]
    frame, trace = users[0] if users else frames[0]
    line = source_line(frame.f_code.co_filename, trace.tb_lineno)
    identities: dict[int, str] = {}
    parameters: dict[str, LiveTensor] = {}
    for seen, _ in users:
        for identity, name, shape in named_parameters({**(names or {}), **names_of(seen)}):
            identities.setdefault(identity, name)
            parameters.setdefault(name, LiveTensor(name, shape))
    sights = [frames[0], *users[:3]]
    tensors = {one.name: one for seen, _ in reversed(sights) for one in _tensors_of(_locals_of(seen))}
    known = dict(names or {})
    calls = tuple(filter(None, (_call(seen, at, known, identities) for seen, at in frames[:3])))
    return LiveFailure(line.place, line.text.strip(), calls, tuple(tensors.values()), tuple(parameters.values()))


def model_on_the_way(error: BaseException) -> tuple[str, int] | None:
    """Class and identity of the model that was being built on the device or moved there, or None."""
    for frame, _ in reversed(deepest_frames(error)):
        owner = _locals_of(frame).get("self")
        if frame.f_code.co_name in ("to", "cuda", "_apply", "__init__") and is_module(owner):
            return type(owner).__name__, id(owner)
    return None


def deepest_frames(error: BaseException) -> list[tuple[FrameType, TracebackType]]:
    """The frames of the out-of-memory error in the chain of causes, innermost first and without machinery."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and not any(one is current for one in chain):
        chain.append(current)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    telling = [_frames(one) for one in chain if _OUT_OF_MEMORY.search("".join(format_exception_only(one)))]
    return max(telling or [_frames(error)], key=len)


def _frames(error: BaseException) -> list[tuple[FrameType, TracebackType]]:
    found = []
    trace = error.__traceback__
    while trace is not None:
        if not is_machinery(trace.tb_frame.f_code.co_filename):
            found.append((trace.tb_frame, trace))
        trace = trace.tb_next
    return found[-_MOST_FRAMES:][::-1]


def names_of(frame: FrameType) -> dict[str, Any]:
    """The names that a frame sees, with their values."""
    return {**frame.f_globals, **_locals_of(frame)}


def _locals_of(frame: FrameType) -> dict[str, Any]:
    """A frame's variables. Up to Python 3.12 reading them leaves a copy in the frame, which would keep them
    alive: the exception too, while the function that caught it runs. It is emptied, unless the user holds it."""
    variables = frame.f_locals
    names = dict(variables)
    is_function = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
    if is_function and type(variables) is dict and sys.getrefcount(variables) <= _OWN_REFERENCES:
        variables.clear()
    return names


def _tensors_of(names: Mapping[str, Any]) -> Iterator[LiveTensor]:
    for name, value in list(names.items()):
        shape = shape_of(value)
        if shape is not None:
            yield LiveTensor(name, shape)


def _call(
    frame: FrameType, trace: TracebackType, known: Mapping[str, Any], identities: Mapping[int, str]
) -> LiveCall | None:
    """The call that a frame was in when it failed, followed on shapes alone; None if that is not possible."""
    node = _failing_expression(frame, trace)
    if node is None:
        return None
    reader = _Reader({**known, **names_of(frame)}, identities)
    with suppress(Exception):  # shapes that do not match, in torch's own words
        reader.value(node)
    if not reader.made:
        return None
    text = ast.unparse(_Written(reader).visit(node))
    inputs = tuple(reader.inputs.values())
    file = frame.f_code.co_filename
    is_in_cache = bool(_CACHE_FILE.search(file) or _CACHE_NAME.search(text))
    return LiveCall(text, tuple(reader.made), inputs, bool(_OPTIMIZER_FILE.search(file)), is_in_cache)


def _failing_expression(frame: FrameType, trace: TracebackType) -> ast.expr | None:
    """The expression that was computed: by its position (Python 3.11 and later), else the statement's."""
    file, names = frame.f_code.co_filename, frame.f_globals
    position = _position(frame, trace)
    if position is None:
        return _statements_expression(linecache.getlines(file, names), trace.tb_lineno, frame.f_code.co_name)
    start, end, column, end_column = position
    lines = linecache.getlines(file, names)[start - 1 : end]
    if not lines:
        return None
    lines[-1] = lines[-1].encode()[:end_column].decode(errors="replace")
    lines[0] = lines[0].encode()[column:].decode(errors="replace")
    return _parsed("".join(lines))


def _statements_expression(lines: list[str], line: int, function: str) -> ast.expr | None:
    """The value of the innermost statement around a line; for a lambda, its body."""
    try:
        nodes = list(ast.walk(ast.parse("".join(lines))))
    except (SyntaxError, ValueError):
        return None
    kind = ast.Lambda if function == "<lambda>" else ast.stmt
    around = [node for node in nodes if isinstance(node, kind) and node.lineno <= line <= (node.end_lineno or 0)]
    innermost = max(around, key=lambda node: node.lineno, default=None)
    return innermost.body if isinstance(innermost, ast.Lambda) else getattr(innermost, "value", None)


def _position(frame: FrameType, trace: TracebackType) -> tuple[int, int, int, int] | None:
    positions = getattr(frame.f_code, "co_positions", None)
    if positions is None:
        return None
    found = next(islice(positions(), trace.tb_lasti // 2, None), None)
    if found is None or None in found:
        return None
    first, last, column, end_column = found
    return first, last, column, end_column


def _parsed(text: str) -> ast.expr | None:
    try:
        return expression(f"({textwrap.dedent(text).strip()})")
    except (SyntaxError, ValueError):
        return None


class _Reader:
    """Evaluates an expression on meta tensors: names, parts of modules, torch's calls, arithmetic."""

    def __init__(self, names: Mapping[str, Any], parameters: Mapping[int, str]) -> None:
        self._names = names
        self._parameters = parameters
        self.made: list[Output] = []
        self.inputs: dict[str, LiveTensor] = {}

    def value(self, node: ast.expr) -> Any:
        """The value of an expression, tensors on the meta device; ValueError for unsupported code."""
        match node:
            case ast.Name() | ast.Attribute():
                return self._looked_up(node)
            case ast.Constant():
                return node.value
            case ast.Call():
                return self._called(node)
            case ast.BinOp():
                return self._computed(node)
            case ast.UnaryOp(op=ast.USub()):
                return -self.value(node.operand)
            case ast.Tuple() | ast.List():
                return [self.value(item) for item in node.elts]
            case ast.Subscript():
                return self._item(self.value(node.value), self._index(node.slice))
            case ast.IfExp() | ast.Compare() | ast.BoolOp():
                return None
        raise ValueError(f"{type(node).__name__} is not followed")

    def _index(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Slice):
            ends = (node.lower, node.upper, node.step)
            return slice(*(None if end is None else self.value(end) for end in ends))
        return tuple(map(self._index, node.elts)) if isinstance(node, ast.Tuple) else self.value(node)

    def _item(self, value: Any, index: Any) -> Any:
        if is_computable(value):
            return self._followed(operator.getitem, [value, index])
        if type(value) in (list, tuple, dict):
            return to_meta(value[index])
        raise ValueError("only tensors, lists and dictionaries are looked into")

    def _looked_up(self, node: ast.Name | ast.Attribute) -> Any:
        found = self._raw(node)
        if found is _NOTHING:
            raise ValueError(f"{ast.unparse(node)} is not known")
        shape = shape_of(found)
        if shape is not None:
            name = ast.unparse(node)
            self.inputs[name] = LiveTensor(self._parameters.get(id(found), name), shape)
        return to_meta(found)

    def _raw(self, node: ast.expr) -> Any:
        """The object that a dotted name stands for; only dictionaries are searched."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id, _NOTHING)
        if not isinstance(node, ast.Attribute):
            return _NOTHING
        base = self._raw(node.value)
        if base is _NOTHING:
            base = self.value(node.value)
        if shape_of(base) is not None or isinstance(base, ModuleType):
            return getattr(base, node.attr, _NOTHING)
        own: Mapping[str, Any] = {}
        with suppress(AttributeError):  # object's own lookup, which does not run a class's __getattr__
            own = object.__getattribute__(base, "__dict__")
        return module_member(base, node.attr, own.get(node.attr, _NOTHING))

    def _called(self, node: ast.Call) -> Any:
        function = self._raw(node.func)
        owner = getattr(function, "__self__", None)
        if isinstance(node.func, ast.Attribute) and owner is not None and not isinstance(owner, ModuleType):
            function = getattr(to_meta(self.value(node.func.value)), node.func.attr, None)
        if not is_followed(function):
            raise ValueError(f"{ast.unparse(node.func)} is not followed")
        args = [self.value(item) for item in node.args]
        kwargs = {item.arg: self.value(item.value) for item in node.keywords if item.arg}
        for item in node.keywords:
            unpacked = self._raw(item.value) if item.arg is None else {}
            kwargs |= to_meta(unpacked) if type(unpacked) is dict else {}
        return self._followed(function, args, kwargs)

    def _computed(self, node: ast.BinOp) -> Any:
        left, right = self.value(node.left), self.value(node.right)
        if not (is_computable(left) and is_computable(right)):
            raise ValueError("only numbers and tensors are computed with")
        names = {"Mult": "mul", "Div": "truediv", "MatMult": "matmul", "Mod": "mod", "FloorDiv": "floordiv"}
        name = type(node.op).__name__
        return self._followed(getattr(operator, names.get(name, name.lower())), [left, right])

    def _followed(self, function: Any, args: list[Any], kwargs: Mapping[str, Any] | None = None) -> Any:
        result, made = infer(function, args, kwargs or {})
        self.made += made
        return result


class _Written(ast.NodeTransformer):
    """Writes each tensor's shape behind its name."""

    def __init__(self, reader: _Reader) -> None:
        self._inputs = reader.inputs

    def visit(self, node: ast.AST) -> Any:
        """The node, a name with its shape where it is one of the reader's tensors."""
        if isinstance(node, (ast.Name, ast.Attribute)):
            tensor = self._inputs.get(ast.unparse(node))
            if tensor is not None:
                return ast.Name(f"{tensor.name}{list(tensor.shape.shape)}")
        return super().visit(node)
