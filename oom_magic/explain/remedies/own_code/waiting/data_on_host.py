"""Data that wait on the device for their batch: they stay in the host's memory, and each batch is moved in its turn."""

from __future__ import annotations

import ast
import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from oom_magic.explain.live.called import NOTHING, Called, called_in, object_of
from oom_magic.explain.live.mending import code_of_definition
from oom_magic.explain.remedies.own_code.loops import exchanged, is_module
from oom_magic.explain.remedies.own_code.waiting.batches import GOES_THROUGH, HOLDS, SPLITS, all_called, moved_in
from oom_magic.explain.remedies.own_code.waiting.device_moves import BUILDS, Left, Moves, bindings, moved_attributes
from oom_magic.explain.syntax import blocks_in, bound_in, read_before_bound, statements_in

BATCHES_MOVED = "batches_moved"
_TELLS = ("shape", "size", "dtype", "ndim", "dim", "device", "numel", "nbytes")


@dataclass
class DataKept:
    """A cell and the functions that it runs with data kept in the host's memory.

    ``tree`` is the cell as it was, with other statements; ``functions`` are those of other cells that change, each with
    what it becomes; ``gone`` are the identities of tensors of earlier cells that leave the device.
    """

    tree: ast.Module
    functions: list[tuple[Called, ast.FunctionDef | ast.AsyncFunctionDef]] = field(default_factory=list)
    gone: frozenset[int] = frozenset()

    def code(self, before: ast.Module) -> str:
        """What to paste: the statements of the cell that change, and whole functions."""
        texts, now = ([ast.unparse(one) for one in tree.body] for tree in (before, self.tree))
        added = [one for one in now if one not in texts]
        own = exchanged(texts, now) if len(now) - len(added) < len(texts) else "\n".join(added)
        places = (f"# in {one.place}:\n" if "." in one.place else "" for one, _ in self.functions)
        texts = [f"{place}{ast.unparse(one)}" for place, (_, one) in zip(places, self.functions, strict=True)]
        return "\n\n".join([*texts, own])


def data_kept_on_host(
    tree: ast.Module, names: Mapping[str, Any], is_on_device: Callable[[Any], bool]
) -> DataKept | None:
    """The cell with the data that it moves to the device as a whole, and takes batch by batch, left where they are, and
    those of earlier cells taken back; None where it has none in a known form."""
    found = _Data(tree, names, is_on_device)
    return found.kept() if found.tensors or found.holders else None


class _Data:
    """The names in a cell of what waits on the device: ``tensors``, and ``holders``, such as data sets and lists."""

    def __init__(self, tree: ast.Module, names: Mapping[str, Any], is_on_device: Callable[[Any], bool]) -> None:
        self._tree, self._names, self._is_on_device = copy.deepcopy(tree), names, is_on_device
        self._moves = Moves(names)
        self._earlier = self._of_earlier_cells()
        self._made = self._made_here()
        self._move = self._how_to_move()
        self.tensors = {name for name, value in self._earlier.items() if _is_tensor(value)}
        self.holders = set(self._earlier) - self.tensors
        self._follow()

    def _of_earlier_cells(self) -> dict[str, Any]:
        read = read_before_bound(self._tree)
        for one in called_in(self._tree, self._names):
            outside = (node.id for node in ast.walk(one.definition) if isinstance(node, ast.Name))
            read |= {name for name in outside if one.names.get(name, NOTHING) is self._names.get(name)}
        values = {name: self._names[name] for name in sorted(read) if name in self._names}
        return {name: value for name, value in values.items() if any(map(self._is_on_device, _tensors_of(value)))}

    def _made_here(self) -> dict[str, list[ast.Call]]:
        """The names that statements of the cell bind to what they move to the device, each with the calls that do."""
        found: dict[str, list[ast.Call]] = {}
        for statement in statements_in(self._tree.body):
            for target, value in bindings(statement):
                moves = [node for node in ast.walk(value) if isinstance(node, ast.Call) and self._moves.is_move(node)]
                if moves and not is_module(self._names.get(target)):
                    found.setdefault(target, []).extend(moves)
        return found

    def _how_to_move(self) -> str:
        """The call that moves a batch, as the cell moves the data: ``.to(device)``."""
        for call in (one for calls in self._made.values() for one in calls):
            given = next((one.value for one in call.keywords if one.arg == "device"), None)
            given = given or next(iter(call.args), None)
            return ".cuda()" if given is None else f".to({ast.unparse(given)})"
        devices = (name for name, value in self._names.items() if type(value).__name__ == "device")
        return f".to({next((name for name in devices if not name.startswith('_')), repr('cuda'))})"

    def _follow(self) -> None:
        """Find what of the names is taken by piece, and what is made of it."""
        changed = True
        while changed:
            changed = False
            for statement in statements_in(self._tree.body):
                for target, value in bindings(statement):
                    kind = self._kind(target, value)
                    if kind is not None and target not in kind:
                        kind.add(target)
                        changed = True
        self.tensors -= {name for name in self.tensors if not self._is_by_piece(name)}
        self.holders -= {name for name in self.holders if not self._is_by_piece(name)}

    def _kind(self, target: str, value: ast.expr) -> set[str] | None:
        """Where a name belongs that is bound to such a value: ``tensors``, ``holders`` or None."""
        known = {*self.tensors, *self.holders}
        if isinstance(value, ast.Call):
            function = ast.unparse(value.func).rpartition(".")[2]
            given = {node.id for one in value.args for node in ast.walk(one) if isinstance(node, ast.Name)}
            if HOLDS.search(function) and given & (known | set(self._made)):
                return self.holders
            if moved_attributes(object_of(value.func, self._names), self._moves):
                return self.holders
        if isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name) and value.value.id in self.tensors:
            return self.tensors  # X_train = X[:n]
        if target not in self._made:
            return None
        return self.holders if isinstance(value, (ast.ListComp, ast.List, ast.Tuple)) else self.tensors

    def _is_by_piece(self, name: str) -> bool:
        """Whether nothing but pieces of it is used, beside what it is made of, or is given to the user's functions."""
        uses = list(_uses(self._tree, name))
        told = [node for node, around, statement in uses if self._is_harmless(name, node, around, statement)]
        return bool(uses) and len(told) == len(uses)

    def _is_harmless(self, name: str, node: ast.Name, around: ast.AST | None, statement: ast.stmt) -> bool:
        targets = {target for target, _ in bindings(statement)}
        if name in targets or targets & {*self.tensors, *self.holders}:
            return True
        if isinstance(around, ast.Subscript):
            return around.value is node
        if isinstance(around, ast.Attribute):
            return around.attr in (*_TELLS, *SPLITS, *BUILDS, "dataset")
        if isinstance(around, ast.Call):
            function = ast.unparse(around.func).rpartition(".")[2]
            is_users = any(True for _ in called_in(around, self._names))
            return function in ("len", *GOES_THROUGH) or HOLDS.search(function) is not None or is_users
        return isinstance(around, (ast.For, ast.comprehension, ast.keyword))

    def kept(self) -> DataKept | None:
        """The cell and its functions, changed; None where no batch is taken in them."""
        functions = []
        changes = moved_in(self._tree, self.tensors, self.holders, self._moves, self._move)
        for one in called_in(self._tree, self._names):
            inner = copy.deepcopy(one.definition)
            tensors, holders = self._seen_in(one)
            if moved_in(inner, tensors, holders, self._moves, self._move):
                functions.append((one, inner))
        waiting = {*self.tensors, *self.holders}
        taken = [one for name in waiting.intersection(self._earlier) for one in _tensors_of(self._earlier[name])]
        if not (changes or functions or self._moves_batches()):
            return None
        Left(waiting, self._moves).visit(self._tree)
        self._drop_what_does_nothing()
        self._take_back_what_classes_move()
        self._tree.body[:0] = ast.parse("\n".join(self._taken_back())).body
        ast.fix_missing_locations(self._tree)
        return DataKept(self._tree, functions, frozenset(id(one) for one in taken if self._is_on_device(one)))

    def _moves_batches(self) -> bool:
        """Whether the loops over the holders move each batch already."""
        codes = [self._tree, *(one.definition for one in called_in(self._tree, self._names))]
        calls = (node for code in codes for node in ast.walk(code) if isinstance(node, ast.Call))
        return bool(self.holders) and any(map(self._moves.is_move, calls))

    def _seen_in(self, called: Called) -> tuple[set[str], set[str]]:
        """The names of a function for what waits: those of the notebook, and arguments that calls of the cell give."""
        own = bound_in(called.definition)
        pairs = {name: name for name in (*self.tensors, *self.holders) if name not in own and name in called.names}
        for call in [node for node in ast.walk(self._tree) if isinstance(node, ast.Call)]:
            function = object_of(call.func, self._names)
            if getattr(function, "__func__", function) is called.function:
                arguments = [one.arg for one in called.definition.args.args]
                is_bound = getattr(function, "__self__", None) is not None
                given = list(zip(arguments[is_bound:], call.args, strict=False))
                given += [(one.arg, one.value) for one in call.keywords if one.arg]
                pairs |= {name: one.id for name, one in given if isinstance(one, ast.Name)}
        of_kind = ({name for name, one in pairs.items() if one in kind} for kind in (self.tensors, self.holders))
        return next(of_kind), next(of_kind)

    def _drop_what_does_nothing(self) -> None:
        """``x = x``, which is left of ``x = x.to(device)``, and ``x, y = x, y``."""
        for block in filter(None, blocks_in(self._tree)):
            block[:] = [one for one in block if not _is_same(one)] or [ast.Pass()]

    def _take_back_what_classes_move(self) -> None:
        """Behind what makes an object of the user's that moves its data: those taken back."""
        for block in blocks_in(self._tree):
            for at in range(len(block) - 1, -1, -1):
                for target, value in bindings(block[at]):
                    kind = object_of(value.func, self._names) if isinstance(value, ast.Call) else None
                    names = [f"{target}.{one}" for one in moved_attributes(kind, self._moves)]
                    if target in self.holders and names:
                        made = ast.parse(all_called(names, ".cpu()")).body
                        block[at + 1 : at + 1] = [ast.copy_location(one, block[at]) for one in made]

    def _taken_back(self) -> Iterator[str]:
        """The statements that take back what earlier cells moved, with every name for it."""
        waiting = {name: value for name, value in self._earlier.items() if name in {*self.tensors, *self.holders}}
        gone = {id(one): one for value in waiting.values() for one in _tensors_of(value) if self._is_on_device(one)}
        called: dict[int, str] = {}
        for name, value in self._names.items():
            if id(value) in gone and not name.startswith("_"):
                called.setdefault(id(value), name)
        if called:
            yield all_called(list(called.values()), ".cpu()")
        for name, value in waiting.items():
            if not _is_tensor(value):
                yield from _taken_back(name, value, called)


def _taken_back(name: str, value: Any, called: Mapping[int, str]) -> Iterator[str]:
    """The statements for a data set, its loader, or a list of batches."""
    if hasattr(value, "dataset"):
        yield from _taken_back(f"{name}.dataset", value.dataset, called)
    elif type(value).__name__ == "TensorDataset":
        parts = [called.get(id(one), f"{name}.tensors[{at}].cpu()") for at, one in enumerate(value.tensors)]
        yield f"{name}.tensors = ({', '.join(parts)},)"
    elif isinstance(value, list):
        each = "one.cpu()" if _is_tensor(value[0]) else "tuple(part.cpu() for part in one)"
        yield f"{name} = [{each} for one in {name}]"
    else:
        names = [f"{name}.{one}" for one, part in vars(value).items() if _is_tensor(part)]
        yield all_called(names, ".cpu()")


def _is_tensor(value: Any) -> bool:
    return type(value).__name__ == "Tensor"


def _tensors_of(value: Any) -> list[Any]:
    """The data tensors of what may hold some: a tensor, a list of batches, a data set or its loader."""
    if _is_tensor(value):
        return [] if value.requires_grad else [value]
    data = sys.modules["torch"].utils.data
    if isinstance(value, data.DataLoader):
        return _tensors_of(value.dataset)
    if isinstance(value, data.TensorDataset):
        return [one for one in value.tensors if _is_tensor(one)]
    if isinstance(value, data.Dataset):
        return [one for one in vars(value).values() if _is_tensor(one)]
    if isinstance(value, list):
        parts = [part for one in value for part in (one if isinstance(one, (list, tuple)) else (one,))]
        return parts if parts and all(map(_is_tensor, parts)) else []
    return []


def _is_same(statement: ast.stmt) -> bool:
    if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1):
        return False
    return ast.unparse(statement.targets[0]) == ast.unparse(statement.value)


def _uses(tree: ast.AST, name: str) -> Iterator[tuple[ast.Name, ast.AST | None, ast.stmt]]:
    """Where a name is read: each with what is around it, and its statement."""
    waiting: list[tuple[ast.AST, ast.AST | None, ast.stmt | None]] = [(tree, None, None)]
    while waiting:
        node, around, statement = waiting.pop()
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load) and statement is not None:
            yield node, around, statement
        inside = node if isinstance(node, ast.stmt) else statement
        waiting += [(one, node, inside) for one in ast.iter_child_nodes(node)]


@contextmanager
def written_so(kept: DataKept, tree: ast.Module) -> Iterator[None]:
    """The same written into the cell and the functions, for a while."""
    before, codes = list(tree.body), [(one.function, one.function.__code__) for one, _ in kept.functions]
    tree.body[:] = kept.tree.body
    for one, definition in kept.functions:
        made = code_of_definition(one.function, ast.Module([definition], []))
        one.function.__code__ = made if made is not None else one.function.__code__
    try:
        yield
    finally:
        tree.body[:] = before
        for function, code in codes:
            function.__code__ = code
