"""Names that a cell rebinds: memory that only they held is freed then, as in a real run.

A dry run keeps the user's objects alive, to give them back afterwards. So their memory is let go where the cell's own
statements drop the last name that leads to them.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import operator
import weakref
from collections.abc import Collection, Container, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from oom_magic.predict.fake_cuda.places import Place
from oom_magic.predict.isolation.live_objects import find_live_objects
from oom_magic.predict.isolation.reach import Reach, users_modules

if TYPE_CHECKING:
    from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU

_PLAIN = (str, bytes, int, float, complex, bool, type(None), type(ast))
_NAME = "__oom_magic_names_are_bound__"
_ABSENT = object()


class Leaves:
    """Each result of autograd that is alive when this is made, and the weights that its graph keeps alive.

    ``AccumulateGrad`` holds its variable (torch/csrc/autograd/functions/accumulate_grad.h), also after the backward.
    Only real results have such a graph: a dry run's doubles have none.
    """

    def __init__(self) -> None:
        self._weights: list[weakref.ref[torch.Tensor]] = []
        self._under: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # bits of weights, by the result's identity
        bits: dict[Any, int] = {}  # by node: graphs of many results share most of theirs
        for tensor in find_live_objects().tensors:
            try:
                with torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
                    node = tensor.grad_fn
            except (RuntimeError, NotImplementedError, AttributeError):  # wrappers of functorch and others
                continue
            if node is not None:
                self._walk_down(node, bits)
                self._under[id(tensor)] = weakref.ref(tensor), bits[node]

    def kept_by(self, identities: Container[int]) -> list[torch.Tensor]:
        """The weights that graphs of these results keep alive, of those that still are."""
        kept = 0
        for identity, (result, bits) in self._under.items():
            if identity in identities and result() is not None:
                kept |= bits
        alive = (weight() for at, weight in enumerate(self._weights) if kept >> at & 1)
        return [weight for weight in alive if weight is not None]

    def _walk_down(self, root: Any, bits: dict[Any, int]) -> None:
        """Note what is under each node of a graph."""
        waiting = [root]
        while waiting:
            node = waiting[-1]
            following = [one for one, _ in node.next_functions if one is not None]
            if unknown := [one for one in following if one not in bits]:
                waiting += unknown
                continue
            waiting.pop()
            if node not in bits:
                own = self._bit_of(getattr(node, "variable", None))
                bits[node] = functools.reduce(operator.or_, (bits[one] for one in following), own)

    def _bit_of(self, variable: Any) -> int:
        """The bit of what a node holds as its variable; 0 where that is no weight."""
        if not isinstance(variable, torch.Tensor):
            return 0
        self._weights.append(weakref.ref(variable))
        return 1 << len(self._weights) - 1


class ReboundNames:
    """Watches ``names``, as they are now, through one run of a cell on ``gpu``; ``leaves`` are of graphs before it.

    Only the names ``among`` let go of what they held, if those are given.
    """

    def __init__(
        self, names: dict[str, Any], gpu: FakeGPU, leaves: Leaves, among: Collection[str] | None = None
    ) -> None:
        self._names = names
        self._gpu = gpu
        self._leaves = leaves
        self._values = {name: value for name, value in self._items(among) if not isinstance(value, _PLAIN)}

    def __enter__(self) -> ReboundNames:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the names that were added."""
        self._names.pop(_NAME, None)

    def _items(self, among: Collection[str] | None) -> list[tuple[str, Any]]:
        return [(name, value) for name, value in self._names.items() if among is None or name in among]

    def watched(self, tree: ast.Module) -> ast.Module:
        """A copy of the statements with a check of the names after each that binds one."""
        self._names[_NAME] = self._look
        return ast.Module(_with_looks(tree.body), tree.type_ignores)

    def _look(self) -> None:
        gone = [name for name, value in self._values.items() if self._names.get(name, _ABSENT) is not value]
        if not gone:
            return
        before = self._reach([self._values.pop(name) for name in gone])
        candidates = [one for one in find_live_objects().tensors if one in before]
        if not any(self._gpu.place(one) is Place.GPU for one in candidates):
            return
        now = self._reach([*self._names.values(), *users_modules()])
        for tensor in candidates:
            if tensor not in now and self._gpu.place(tensor) is Place.GPU:
                _empty(tensor)

    def _reach(self, roots: list[Any]) -> Reach:
        """Everything reachable from ``roots``, also through autograd graphs; functions do not lead to all globals."""
        found = Reach(seen={id(self._names)})
        found.walk(roots)
        found.walk(self._leaves.kept_by(found.seen))
        return found


def _empty(tensor: torch.Tensor) -> None:
    """Free the memory of a stand-in for a user's tensor, whose own data is set aside, and of its graph."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():  # type: ignore[attr-defined]
        nothing = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        if tensor.grad_fn is not None and tensor._is_view():  # it cannot be detached
            with contextlib.suppress(RuntimeError):
                torch._C._swap_tensor_impl(tensor, nothing)  # type: ignore[attr-defined]
            return
        tensor.detach_()
        tensor.data = nothing


def _with_looks(statements: Iterable[ast.stmt]) -> list[ast.stmt]:
    found: list[ast.stmt] = []
    for one in statements:
        found += _with_look(one)
    return found


def _with_look(statement: ast.stmt) -> Iterator[ast.stmt]:
    parts = {name: part for name in ("body", "orelse", "finalbody") if (part := getattr(statement, name, None))}
    handlers = getattr(statement, "handlers", ())
    is_scope = isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    if is_scope or not parts:
        yield statement
        if _binds(statement):
            yield _call(statement)
        return
    made = copy.copy(statement)
    for name, part in parts.items():
        begin = [_call(part[0])] if name == "body" and not isinstance(statement, (ast.If, ast.Try)) else []
        setattr(made, name, [*begin, *_with_looks(part)])
    if handlers:
        made.handlers = [_handler(one) for one in handlers]  # type: ignore[attr-defined]
    yield made


def _handler(handler: ast.ExceptHandler) -> ast.ExceptHandler:
    made = copy.copy(handler)
    made.body = _with_looks(handler.body)
    return made


def _binds(statement: ast.stmt) -> bool:
    return any(isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load) for one in ast.walk(statement))


def _call(beside: ast.stmt) -> ast.stmt:
    call = ast.Expr(ast.Call(ast.Name(_NAME, ast.Load()), [], []))
    return ast.fix_missing_locations(ast.copy_location(call, beside))
