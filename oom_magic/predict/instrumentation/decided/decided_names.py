"""Names that the user's code decided for the CPU before a dry run, because the machine has no GPU.

``device = "cuda" if torch.cuda.is_available() else "cpu"`` stands above most training code. Without a GPU, its result
contradicts the pretend GPU of the dry run. The statements that asked are read from the user's source, and those that
only compute (no side effect, nothing slow) are evaluated again inside the dry run, where the pretend GPU answers. The
result is what the user's code would have with a GPU, so nothing is guessed. Models and tensors that the code placed by
such a name (``model.to(device)``), or made from those, are then on the GPU (see ``placement_reader``).
"""

from __future__ import annotations

import ast
import contextlib
import linecache
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from oom_magic.half_built import is_built
from oom_magic.language import _, ngettext
from oom_magic.predict.instrumentation.decided.computed import (
    QUESTIONS,
    asking_function,
    is_pure,
    is_question,
    is_same,
    scope,
    unwarned,
)
from oom_magic.predict.instrumentation.decided.placement_calls import CHOOSING
from oom_magic.predict.instrumentation.decided.placement_reader import DEFAULT, read_placements
from oom_magic.predict.instrumentation.decided.placements import (
    Place,
    Where,
    is_cpu,
    move_to_gpu,
    name_gpu,
    optimizer_state,
    tensors_placed,
)
from oom_magic.predict.isolation.reach import codes_of_other_threads, is_users_module
from oom_magic.predict.isolation.run_threads import threads_of_run
from oom_magic.user_code import is_users_file

_IMPORTS = re.compile(r"^\s*from\s+([\w.]+)\s+import\b", re.MULTILINE)
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
    places: dict[str, Place] = field(default_factory=dict)  # where the code places what the names stand for
    decisions: list[Decision] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    placed: list[str] = field(default_factory=list)  # names whose tensors were moved, or whose fields say the GPU
    _rebound: list[Decision] = field(default_factory=list)
    _undo: list[Callable[[], None]] = field(default_factory=list)

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
        is_asking = any(map(_names_question, sources)) or any(map(_is_asking_module, _modules_named(sources)))
        if torch.cuda.is_available() or not (is_asking or presumed):
            return found
        decided = {name: _as_gpu(name, namespace[name]) for name in presumed}
        statements = list(_statements(sources))
        for statement in statements:
            if decided.keys() & _assigned(statement) & set(presumed):
                continue
            depends = _asks(statement, namespace) or bool(_loaded(statement) & decided.keys())
            is_computed = depends and _is_computed(statement, namespace)
            for name in _assigned(statement):
                if is_computed:
                    decided[name] = statement
                else:
                    decided.pop(name, None)
        found.places = read_placements(statements, namespace, decided.keys(), presumed)
        found._check(decided)
        return found

    @classmethod
    def in_all(cls, namespaces: Sequence[dict[str, Any]], decided: Sequence[DecidedNames] | None) -> list[DecidedNames]:
        """Those of the namespaces (None: read here), after those of the user's modules that names stand for, or that
        define what they stand for."""
        known = set(map(id, namespaces))
        found: dict[int, dict[str, Any]] = {}
        values = [value for names in namespaces for value in list(names.values())]
        for value in (*values, *_imported_from(namespaces)):
            is_defined = isinstance(value, (FunctionType, type))
            module = sys.modules.get(value.__module__ or "") if is_defined else value
            if isinstance(module, ModuleType) and is_users_module(module) and id(vars(module)) not in known:
                found[id(vars(module))] = vars(module)
        return [*map(cls.of, found.values()), *(map(cls.of, namespaces) if decided is None else decided)]

    def _check(self, decided: Mapping[str, ast.stmt]) -> None:
        """Keep names that still have the value of their statement; others were set elsewhere."""
        chosen = {id(statement): statement for statement in decided.values()}
        scratch = _evaluated(chosen.values(), self.namespace)
        self.values = {name: scratch[name] for name in decided if is_same(scratch.get(name, _ABSENT), self._now(name))}
        used = {id(decided[name]) for name in self.values}
        self.statements = [statement for key, statement in chosen.items() if key in used]

    def _now(self, name: str) -> Any:
        return self.namespace.get(name, _ABSENT)

    def follow(self, is_exchanged: Callable[[torch.Tensor], bool]) -> bool:
        """Inside a dry run: give the names the values that they have with a GPU; whether any is another.

        What the code placed so is moved to where it then is: tensors that ``is_exchanged``, or the names of others.
        """
        self.decisions.clear()
        self.undecided.clear()
        self.placed.clear()
        scratch = _evaluated(self.statements, self.namespace) if self.values else {}
        elsewhere = self._read_elsewhere() if self.values else set()
        for name, before in self.values.items():
            now = scratch.get(name, _ABSENT)
            if now is _ABSENT or is_same(now, before):
                continue
            if name in elsewhere:
                self.undecided.append(name)
                continue
            self._rebind(name, now)
            self.decisions.append(Decision(name, before, now))
        if self.decisions or not self.undecided:
            self._place(is_exchanged)
        return bool(self.decisions or self.placed)

    def _rebind(self, name: str, now: Any) -> None:
        before = self._now(name)
        if self.above.get(name, _ABSENT) is before:
            self.above[name] = now
        if name in self.namespace:
            self._undo.append(partial(self._give_name_back, Decision(name, self.namespace[name], now)))
        self.namespace[name] = now
        self._rebound.append(Decision(name, before, now))

    def _give_name_back(self, decision: Decision) -> None:
        """Unless the code has assigned it: what is decided is not what the code left."""
        if self.namespace.get(decision.name, _ABSENT) is decision.now:
            self.namespace[decision.name] = decision.before

    def _read_elsewhere(self) -> set[str]:
        """The names that the user's code on other threads looks up."""
        codes = codes_of_other_threads(threads_of_run(), self.namespace)
        return set[str]().union(*(_used(self.namespace, code) for code in codes))

    def _place(self, is_exchanged: Callable[[torch.Tensor], bool]) -> None:
        """Move to the GPU what the code placed there."""
        seen = {**self.namespace, **self.above}
        values = {name: value for name in self.places if (value := seen.get(name)) is self.namespace.get(name)}
        placed = {name: list(tensors_placed(self.places[name], value)) for name, value in values.items()}
        found = {id(tensor): tensor for tensors in placed.values() for tensor in tensors}
        for value in seen.values():
            for one in value if type(value) in (list, tuple) else [value]:
                if isinstance(one, torch.optim.Optimizer) and is_built(one):
                    found |= {id(tensor): tensor for tensor in optimizer_state(one, found)}
        grads = [tensor.grad for tensor in found.values() if tensor.is_leaf and tensor.grad is not None]
        found |= {id(grad): grad for grad in grads}
        for name, value in values.items():
            if self.places[name] is Where.HOST and isinstance(value, torch.Tensor) and id(value) in found:
                # with a GPU ``x.cpu()`` is not ``x``
                self._rebind(name, value.detach().clone())
        here = {key: tensor for key, tensor in found.items() if tensor.device.type == "cpu"}
        move_to_gpu([tensor for tensor in here.values() if is_exchanged(tensor)])
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and id(value) in here and not is_exchanged(value):
                self._rebind(name, value.detach().to("cuda"))  # the tensor itself stays real in the run
        if DEFAULT in self.places:
            torch.set_default_device("cuda")
        self.placed = [name for name, tensors in placed.items() if any(id(tensor) in here for tensor in tensors)]
        for name, value in values.items():
            for undo in name_gpu(self.places[name], value):
                self._undo.append(undo)
                self.placed.append(name)
        self.placed = list(dict.fromkeys(self.placed))

    def give_back(self) -> None:
        """At the end of the dry run: undo what was changed in the user's objects and names."""
        while self._undo:
            self._undo[-1]()
            self._undo.pop()

    def leave(self) -> None:
        """After the dry run: undo changes of ``above``."""
        for one in self._rebound:
            if one.name in self.namespace and self.above.get(one.name, _ABSENT) is one.now:
                self.above[one.name] = self.namespace[one.name]
        self._rebound.clear()


def decided_sentence(decided: Sequence[DecidedNames]) -> str:
    """The report's sentence about them, or about what was placed without such a name, in one line."""
    found = [decision for one in decided for decision in one.decisions]
    decisions = list({(one.name, shown(one.before), shown(one.now)): one for one in found}.values())
    if not decisions:
        placed = [name for one in decided for name in one.placed]
        return ngettext(
            "{names} is on the CPU because there is no GPU here; the dry run puts it on the GPU, as with one",
            "{names} are on the CPU because there is no GPU here; the dry run puts them on the GPU, as with one",
            len(placed),
            names=joined([f"`{name}`" for name in placed]),
        )
    names, before, now = ([get(one) for one in decisions] for get in (_name, _before, _now))
    return ngettext(
        "{names} was set to {before} before the dry run because there is no GPU here; the dry run uses {now}, as"
        " on a GPU",
        (
            "{names} were set to {before} before the dry run because there is no GPU here; the dry run uses {now}, as"
            " on a GPU"
        ),
        len(decisions),
        names=joined(names),
        before=joined(before),
        now=joined(now),
    )


def undecided_sentence(names: Sequence[str]) -> str:
    """The report's sentence about names that were not decided anew."""
    return ngettext(
        "{names} stays as set without a GPU, because code on another thread reads it",
        "{names} stay as set without a GPU, because code on another thread reads them",
        len(names),
        names=joined([f"`{name}`" for name in names]),
    )


def cpu_names(namespace: Mapping[str, Any], code: CodeType) -> list[str]:
    """Names that mean the CPU, and that ``code``, or functions of the namespace that it calls, look up."""
    return sorted(name for name in _used(namespace, code) if is_cpu(namespace.get(name)))


def cpu_fields(namespace: Mapping[str, Any], code: CodeType) -> dict[str, Any]:
    """Fields that mean the CPU, of objects and dictionaries that ``code`` looks up, such as ``cfg.device``.

    Devices of objects count whether the code looks at them or not: what places models does so itself.
    """
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
            if hasattr(owner, "__dict__") and not isinstance(owner, (torch.Tensor, torch.nn.Module)):
                with contextlib.suppress(Exception):  # what places models, such as Lightning's Fabric
                    fields[f"{name}.device"] = owner.device  # a property of the class, most often
        found |= {field: value for field, value in fields.items() if is_cpu(value)}
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
    if isinstance(value, torch.amp.GradScaler):
        return f"GradScaler(enabled={value.is_enabled()})"
    if isinstance(value, torch.autocast):
        return f"autocast({value.device!r}, dtype={value.fast_dtype})"
    if isinstance(value, contextlib.nullcontext):
        return "nullcontext()"
    return repr(str(value)) if isinstance(value, torch.device) else repr(value)


def _names_question(source: str) -> bool:
    return any(question in source for question in (*QUESTIONS, *CHOOSING))


def _imported_from(namespaces: Sequence[dict[str, Any]]) -> list[ModuleType]:
    return [module for names in namespaces for module in _modules_named(sources_of(names))]


def _modules_named(sources: Iterable[str]) -> list[ModuleType]:
    """The user's modules from which code imports names."""
    found = {name for source in sources for name in _IMPORTS.findall(source)}
    return [module for module in map(sys.modules.get, sorted(found)) if module is not None and is_users_module(module)]


def _is_asking_module(module: ModuleType) -> bool:
    return any(map(_names_question, sources_of(vars(module))))


def sources_of(namespace: Mapping[str, Any]) -> list[str]:
    """The cells that ran in a notebook's namespace, or the file of a module's."""
    cells, file = namespace.get("In"), namespace.get("__file__")
    if isinstance(cells, list):
        return [cell for cell in cells if isinstance(cell, str)]
    return ["".join(linecache.getlines(file))] if isinstance(file, str) else []


def _statements(sources: Iterable[str]) -> Iterator[ast.stmt]:
    for source in sources:
        with contextlib.suppress(SyntaxError, ValueError):  # then it did not run either
            yield from map(_without_output, ast.parse(source).body)


def _without_output(statement: ast.stmt) -> ast.stmt:
    """A statement whose branches print nothing: what they compute can then be computed again."""
    if isinstance(statement, ast.If):
        statement.body, statement.orelse = (
            list(map(_without_output, part)) for part in (statement.body, statement.orelse)
        )
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        function = statement.value.func
        if isinstance(function, ast.Name) and function.id == "print":
            return ast.copy_location(ast.Pass(), statement)
    return statement


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
    if isinstance(statement, ast.ImportFrom):
        names = {one.asname or one.name for one in statement.names}
        return names if names != {"*"} else _public_names(sys.modules.get(statement.module or ""))
    return {
        node.id for node in _running(statement) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    }


def _public_names(module: ModuleType | None) -> set[str]:
    """The names that ``from module import *`` gives."""
    names = {} if module is None else vars(module)
    return set(names.get("__all__", [name for name in names if not name.startswith("_")]))


def _asks(statement: ast.stmt, namespace: Mapping[str, Any]) -> bool:
    """Whether a statement asks for the GPU, directly, through a function or from a module of the user's."""
    if isinstance(statement, ast.ImportFrom):
        return _is_imported(statement)
    calls = [node.func for node in _running(statement) if isinstance(node, ast.Call)]
    return any(is_question(call) or asking_function(call, namespace) is not None for call in calls)


def _is_imported(statement: ast.ImportFrom) -> bool:
    """Whether names come from a module of the user's that asks, and is there already."""
    module = None if statement.level else sys.modules.get(statement.module or "")
    return module is not None and is_users_module(module) and _is_asking_module(module)


def _is_computed(statement: ast.stmt, namespace: Mapping[str, Any]) -> bool:
    """Whether a statement only computes values for names."""
    if isinstance(statement, ast.If):
        return is_pure(statement.test, namespace) and all(
            _is_computed(one, namespace) for one in (*statement.body, *statement.orelse)
        )
    if isinstance(statement, (ast.Pass, ast.ImportFrom)):
        return isinstance(statement, ast.Pass) or _is_imported(statement)
    targets: list[ast.expr]
    if isinstance(statement, ast.AnnAssign):
        targets, value = [statement.target], statement.value
    elif isinstance(statement, ast.Assign):
        targets, value = statement.targets, statement.value
    else:
        return False
    names = [item for target in targets for item in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return value is not None and all(isinstance(name, ast.Name) for name in names) and is_pure(value, namespace)


def _evaluated(statements: Iterable[ast.stmt], namespace: Mapping[str, Any]) -> dict[str, Any]:
    """What the statements assign, evaluated now; names of statements that fail are left out."""
    scratch = scope(namespace)
    assigned: dict[str, Any] = {}
    for statement in statements:
        code = compile(ast.Module([statement], []), _FILE, "exec", dont_inherit=True)
        with contextlib.suppress(Exception), unwarned():  # a deleted name, for instance: the statement is skipped
            exec(code, scratch)
        assigned |= {name: scratch[name] for name in _assigned(statement) if name in scratch}
    return assigned
