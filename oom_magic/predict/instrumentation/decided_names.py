"""Names that the user's code decided for the CPU before a dry run, because the machine has no GPU.

``device = "cuda" if torch.cuda.is_available() else "cpu"`` stands above most training code. Without a GPU, its result
contradicts the pretend GPU of the dry run. The statements that asked are read from the user's source, and those that
only compute (no side effect, nothing slow) are evaluated again inside the dry run, where the pretend GPU answers. The
result is what the user's code would have with a GPU, so nothing is guessed. Models and tensors placed by such a name
(``model.to(device)``) are then placed by its new value.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import linecache
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from oom_magic.language import _, ngettext
from oom_magic.predict.isolation.reach import codes_of_other_threads
from oom_magic.predict.isolation.run_threads import threads_of_run
from oom_magic.user_code import is_users_file

# Functions by which code finds out whether there is a GPU.
_QUESTIONS = frozenset(
    {
        "is_available", "device_count", "current_accelerator", "is_bf16_supported", "get_device_capability",
        "get_device_properties", "get_device_name", "mem_get_info", "is_torch_cuda_available", "is_cuda_available",
    }
)  # fmt: skip
_COMPUTING = frozenset({"bool", "dict", "float", "getattr", "int", "len", "list", "max", "min", "str", "tuple"})
_RECORDS = frozenset({"SimpleNamespace", "Namespace"})  # of types and argparse
_EXPRESSIONS = (
    ast.Constant, ast.Name, ast.Attribute, ast.Subscript, ast.IfExp, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Compare,
    ast.JoinedStr, ast.FormattedValue, ast.Dict, ast.List, ast.Tuple, ast.Set, ast.Call, ast.keyword, ast.Starred,
    ast.Slice, ast.expr_context, ast.boolop, ast.operator, ast.unaryop, ast.cmpop,
)  # fmt: skip
_FILE = "<ipython-input-decided>"  # counts as the user's code
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Decision:
    """A name, its value before the dry run, and its value with a GPU."""

    name: str
    before: Any
    now: Any


@dataclass
class DecidedNames:
    """Names in ``namespace`` whose values depend on there being no GPU, according to its ``sources``.

    ``follow`` decides again, inside a dry run; ``decisions`` then has what came out differently, ``undecided`` the
    names that stay because code on another thread reads them. ``above`` are names that code sees in place of the
    namespace's, where it has not assigned others.
    """

    namespace: dict[str, Any]
    above: dict[str, Any] = field(default_factory=dict)
    statements: list[ast.stmt] = field(default_factory=list)  # that compute the names' values
    values: dict[str, Any] = field(default_factory=dict)  # before the dry run
    placed: set[str] = field(default_factory=set)  # names of models and tensors that were placed by such a name
    decisions: list[Decision] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        namespace: dict[str, Any],
        sources: Iterable[str] | None = None,
        above: dict[str, Any] | None = None,
        presumed: Collection[str] = (),
    ) -> DecidedNames:
        """Read the sources in the order in which they ran (default: the cells, or the file, of the namespace).

        ``presumed`` are names of the CPU that are to be the GPU, whatever the sources say.
        """
        found = cls(namespace, {} if above is None else above)
        sources = list(sources_of(namespace) if sources is None else sources)
        is_asking = any(question in source for source in sources for question in _QUESTIONS)
        if torch.cuda.is_available() or not (is_asking or presumed):
            return found
        decided = {name: _as_gpu(name, namespace[name]) for name in presumed}
        for statement in _statements(sources):
            if decided.keys() & _assigned(statement) & set(presumed):
                continue
            depends = _asks(statement, namespace) or bool(_loaded(statement) & decided.keys())
            is_computed = depends and _is_computed(statement, namespace)
            for name in _assigned(statement):
                if is_computed:
                    decided[name] = statement
                else:
                    decided.pop(name, None)
                    (found.placed.add if depends else found.placed.discard)(name)
            if depends and not is_computed:
                found.placed |= _receivers(statement)
        found._check(decided)
        return found

    def _check(self, decided: Mapping[str, ast.stmt]) -> None:
        """Keep names that still have the value of their statement; others were set elsewhere."""
        chosen = {id(statement): statement for statement in decided.values()}
        scratch = _evaluated(chosen.values(), self.namespace)
        self.values = {name: scratch[name] for name in decided if _is_same(scratch.get(name, _ABSENT), self._now(name))}
        used = {id(decided[name]) for name in self.values}
        self.statements = [statement for key, statement in chosen.items() if key in used]

    def _now(self, name: str) -> Any:
        return self.namespace.get(name, _ABSENT)

    def follow(self) -> bool:
        """Inside a dry run: give the names the values that they have with a GPU; whether any is another.

        Models and tensors that were placed by such a name are moved to where it now says.
        """
        self.decisions.clear()
        self.undecided.clear()
        scratch = _evaluated(self.statements, self.namespace) if self.values else {}
        elsewhere = self._read_elsewhere() if self.values else set()
        for name, before in self.values.items():
            now = scratch.get(name, _ABSENT)
            if now is _ABSENT or _is_same(now, before):
                continue
            if name in elsewhere:
                self.undecided.append(name)
                continue
            if self.above.get(name, _ABSENT) is self._now(name):
                self.above[name] = now
            self.namespace[name] = now
            self.decisions.append(Decision(name, before, now))
        if self.decisions:
            self._place()
        return bool(self.decisions)

    def _read_elsewhere(self) -> set[str]:
        """The names that the user's code on other threads looks up."""
        codes = codes_of_other_threads(threads_of_run(), self.namespace)
        return set[str]().union(*(_used(self.namespace, code) for code in codes))

    def _place(self) -> None:
        with torch.no_grad():
            seen = {**self.namespace, **self.above}
            moved = {id(parameter) for name in sorted(self.placed) for parameter in self._move(name, seen.get(name))}
            for value in seen.values():
                for one in value if type(value) in (list, tuple) else [value]:
                    if isinstance(one, torch.optim.Optimizer):
                        _move_state(one, moved)

    def _move(self, name: str, value: Any) -> list[torch.Tensor]:
        try:
            return list(_moved(value))
        except RuntimeError:
            if not isinstance(value, torch.Tensor):
                raise
            self.namespace[name] = value.detach().to("cuda")  # the tensor itself stays real in the run
            return []

    def leave(self) -> None:
        """After the dry run: undo changes of ``above``; the dry run itself restores the namespace."""
        for one in self.decisions:
            if one.name in self.namespace and self.above.get(one.name, _ABSENT) is one.now:
                self.above[one.name] = self.namespace[one.name]


def decided_sentence(decisions: Sequence[Decision]) -> str:
    """The report's sentence about them, in one line."""
    names, before, now = ([get(one) for one in decisions] for get in (_name, _before, _now))
    return ngettext(
        "{names} was decided as {before} before the dry run, as there is no GPU here; with one it is {now}, as followed"
        " here",
        "{names} were decided as {before} before the dry run, as there is no GPU here; with one they are {now}, as"
        " followed here",
        len(decisions),
        names=joined(names),
        before=joined(before),
        now=joined(now),
    )


def undecided_sentence(names: Sequence[str]) -> str:
    """The report's sentence about names that were not decided anew."""
    return ngettext(
        "{names} stays as it was decided without a GPU: code on another thread reads it",
        "{names} stay as they were decided without a GPU: code on another thread reads them",
        len(names),
        names=joined([f"`{name}`" for name in names]),
    )


def cpu_names(namespace: Mapping[str, Any], code: CodeType) -> list[str]:
    """Names that mean the CPU, and that ``code``, or functions of the namespace that it calls, look up."""
    return sorted(name for name in _used(namespace, code) if _is_cpu(namespace.get(name)))


def cpu_fields(namespace: Mapping[str, Any], code: CodeType) -> dict[str, Any]:
    """Fields that mean the CPU, of objects and dictionaries that ``code`` looks up, such as ``cfg.device``."""
    used = _used(namespace, code)
    found: dict[str, Any] = {}
    for name in sorted(used & namespace.keys()):
        owner = namespace[name]
        if isinstance(owner, dict):
            fields = {f"{name}[{key!r}]": value for key, value in owner.items() if isinstance(key, str)}
        elif isinstance(owner, (type, ModuleType)):
            continue
        else:
            own = {**vars(type(owner)), **getattr(owner, "__dict__", {})}
            fields = {f"{name}.{key}": value for key, value in own.items() if key in used}
        found |= {field: value for field, value in fields.items() if _is_cpu(value)}
    return found


def _used(namespace: Mapping[str, Any], code: CodeType) -> set[str]:
    """The names that ``code``, and functions of the namespace that it calls, look up."""
    used: set[str] = set()
    pending = [code]
    while pending:
        code = pending.pop()
        pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        for name in set(code.co_names) - used:
            used.add(name)
            value = namespace.get(name)
            if isinstance(value, FunctionType) and is_users_file(value.__code__.co_filename):
                pending.append(value.__code__)
    return used


def _is_cpu(value: Any) -> bool:
    return value == "cpu" if isinstance(value, str) else isinstance(value, torch.device) and value.type == "cpu"


def _as_gpu(name: str, value: Any) -> ast.stmt:
    """A statement that lets a name of the CPU be the GPU, where there is one."""
    text = "'cuda' if torch.cuda.is_available() else 'cpu'"
    return ast.parse(f"{name} = " + (text if isinstance(value, str) else f"torch.device({text})")).body[0]


def _name(one: Decision) -> str:
    return f"`{one.name}`"


def _before(one: Decision) -> str:
    return shown(one.before)


def _now(one: Decision) -> str:
    return shown(one.now)


def joined(words: Sequence[str]) -> str:
    """``"a, b and c"``."""
    if len(words) < 2:
        return "".join(words)
    return _("{most} and {last}", most=", ".join(words[:-1]), last=words[-1])


def shown(value: Any) -> str:
    """A value as one would write it: ``'cpu'`` for a device."""
    return repr(str(value)) if isinstance(value, torch.device) else repr(value)


def sources_of(namespace: Mapping[str, Any]) -> list[str]:
    """The cells that ran in a notebook's namespace, or the file of a module's."""
    cells, file = namespace.get("In"), namespace.get("__file__")
    if isinstance(cells, list):
        return [cell for cell in cells if isinstance(cell, str)]
    return ["".join(linecache.getlines(file))] if isinstance(file, str) else []


def _statements(sources: Iterable[str]) -> Iterator[ast.stmt]:
    for source in sources:
        with contextlib.suppress(SyntaxError, ValueError):  # then it did not run either
            yield from ast.parse(source).body


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a statement does, without the bodies of functions, which run later."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _parts(child)


def _running(statement: ast.stmt) -> Iterator[ast.AST]:
    is_definition = isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    return iter(()) if is_definition else _parts(statement)


def _loaded(statement: ast.stmt) -> set[str]:
    return {node.id for node in _running(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _assigned(statement: ast.stmt) -> set[str]:
    return {
        node.id for node in _running(statement) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    }


def _receivers(statement: ast.stmt) -> set[str]:
    """``model`` in ``model.to(device)`` and ``model.cuda()``."""
    calls = (node.func for node in _running(statement) if isinstance(node, ast.Call))
    owners = (call.value for call in calls if isinstance(call, ast.Attribute) and call.attr in ("to", "cuda"))
    return {owner.id for owner in owners if isinstance(owner, ast.Name)}


def _asks(statement: ast.stmt, namespace: Mapping[str, Any]) -> bool:
    """Whether a statement asks for the GPU, directly or through a function of the user's."""
    calls = [node.func for node in _running(statement) if isinstance(node, ast.Call)]
    return any(_is_question(call) or _asking_function(call, namespace) is not None for call in calls)


def _is_question(call: ast.expr) -> bool:
    return (call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "")) in _QUESTIONS


def _asking_function(call: ast.expr, namespace: Mapping[str, Any]) -> FunctionType | None:
    found = namespace.get(call.id) if isinstance(call, ast.Name) else None
    if isinstance(found, FunctionType) and is_users_file(found.__code__.co_filename):
        return found if _QUESTIONS & set(found.__code__.co_names) else None
    return None


def _is_computed(statement: ast.stmt, namespace: Mapping[str, Any]) -> bool:
    """Whether a statement only computes values for names."""
    if isinstance(statement, ast.If):
        return _is_pure(statement.test, namespace) and all(
            _is_computed(one, namespace) for one in (*statement.body, *statement.orelse)
        )
    targets: list[ast.expr]
    if isinstance(statement, ast.AnnAssign):
        targets, value = [statement.target], statement.value
    elif isinstance(statement, ast.Assign):
        targets, value = statement.targets, statement.value
    else:
        return False
    names = [item for target in targets for item in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return value is not None and all(isinstance(name, ast.Name) for name in names) and _is_pure(value, namespace)


def _is_pure(expression: ast.expr, namespace: Mapping[str, Any]) -> bool:
    return all(
        isinstance(node, _EXPRESSIONS) and (not isinstance(node, ast.Call) or _is_computing(node.func, namespace))
        for node in ast.walk(expression)
    )


def _is_computing(call: ast.expr, namespace: Mapping[str, Any]) -> bool:
    """Whether a call has no side effects: a query, a device, a string, a record."""
    if _is_question(call) or _asking_function(call, namespace) is not None:
        return True
    if isinstance(call, ast.Attribute):
        return call.attr in ("device", "format", "lower", "get", *_RECORDS)
    return isinstance(call, ast.Name) and (
        namespace.get(call.id) is torch.device
        or call.id in _RECORDS
        or (call.id in _COMPUTING and namespace.get(call.id, _ABSENT) is _ABSENT)
    )


def _evaluated(statements: Iterable[ast.stmt], namespace: Mapping[str, Any]) -> dict[str, Any]:
    """What the statements assign, evaluated now; names of statements that fail are left out."""
    scratch: dict[str, Any] = {"__builtins__": builtins, "torch": torch, **namespace}
    assigned: dict[str, Any] = {}
    for statement in statements:
        code = compile(ast.Module([statement], []), _FILE, "exec", dont_inherit=True)
        with contextlib.suppress(Exception):  # a deleted name, for instance: the statement is skipped
            exec(code, scratch)
        assigned |= {name: scratch[name] for name in _assigned(statement) if name in scratch}
    return assigned


def _is_same(one: Any, other: Any) -> bool:
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:
        return False


def _moved(value: Any) -> Iterator[torch.Tensor]:
    """Move a model, or tensors, from the host to the GPU; yields the parameters so moved."""
    if isinstance(value, torch.nn.Module):
        if all(tensor.device.type == "cpu" for tensor in (*value.parameters(), *value.buffers())):
            value.to("cuda")
            yield from value.parameters()
    elif isinstance(value, torch.Tensor):
        if value.device.type == "cpu":
            value.data = value.data.to("cuda")
    elif type(value) in (list, tuple):
        for item in value:
            yield from _moved(item)


def _move_state(optimizer: torch.optim.Optimizer, moved: set[int]) -> None:
    """Move an optimizer's state to its parameters' device."""
    for parameter, state in optimizer.state.items():
        for key, value in list(state.items()) if id(parameter) in moved else ():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                state[key] = value.to("cuda")
