"""Data that wait on the device for their batch: they stay in the host's memory, and each batch is moved in its turn."""

from __future__ import annotations

import ast
import copy
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from oom_magic.explain.live.called import NOTHING, Called, called_in, object_of
from oom_magic.explain.live.mending import code_of_definition
from oom_magic.explain.remedies.own_code.loops import exchanged, is_module
from oom_magic.explain.syntax import DEFINING, blocks_of, bound_in, is_stored, names_in, read_before_bound

BATCHES_MOVED = "batches_moved"
_Scope: TypeAlias = "ast.Module | ast.FunctionDef | ast.AsyncFunctionDef"
_OF_DEVICE = re.compile(r"cuda|dev(?:ice)?\b", re.IGNORECASE)
_HOLDS = re.compile(r"(?:Dataset|Loader|Subset|random_split|zip|list|tuple)$")  # what is made of data and yields them
_GOES_THROUGH = ("enumerate", "tqdm", "trange", "iter", "list", "zip", "reversed", "track")
_SPLITS = ("split", "chunk")
_TELLS = ("shape", "size", "dtype", "ndim", "dim", "device", "numel", "nbytes")
_BUILDS = ("append", "extend")


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
        self._earlier = self._of_earlier_cells()
        self._made = self._made_here()
        self.move = self._how_to_move()
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
        for statement in _statements(self._tree):
            for target, value in _pairs(statement):
                moves = [node for node in ast.walk(value) if isinstance(node, ast.Call) and self._is_move(node)]
                if moves and not is_module(self._names.get(target)):
                    found.setdefault(target, []).extend(moves)
        return found

    def _is_move(self, call: ast.Call) -> bool:
        """``x.cuda()``, ``x.to(device)`` or ``torch.zeros(n, device=device)``."""
        if any(one.arg == "device" and self._is_device(one.value) for one in call.keywords):
            return True
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        return method == "cuda" or (method == "to" and bool(call.args) and self._is_device(call.args[0]))

    def _is_device(self, node: ast.expr) -> bool:
        value = object_of(node, self._names)
        told = ast.unparse(node) if value is NOTHING else str(value)
        return _OF_DEVICE.search(told) is not None

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
            for statement in _statements(self._tree):
                for target, value in _pairs(statement):
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
            if _HOLDS.search(function) and given & (known | set(self._made)):
                return self.holders
            if _moved_attributes(object_of(value.func, self._names), self):
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
        targets = {target for target, _ in _pairs(statement)}
        if name in targets or targets & {*self.tensors, *self.holders}:
            return True
        if isinstance(around, ast.Subscript):
            return around.value is node
        if isinstance(around, ast.Attribute):
            return around.attr in (*_TELLS, *_SPLITS, *_BUILDS, "dataset")
        if isinstance(around, ast.Call):
            function = ast.unparse(around.func).rpartition(".")[2]
            is_users = any(True for _ in called_in(around, self._names))
            return function in ("len", *_GOES_THROUGH) or _HOLDS.search(function) is not None or is_users
        return isinstance(around, (ast.For, ast.comprehension, ast.keyword))

    def kept(self) -> DataKept | None:
        """The cell and its functions, changed; None where no batch is taken in them."""
        functions = []
        changes = _moved_in(self._tree, self.tensors, self.holders, self)
        for one in called_in(self._tree, self._names):
            inner = copy.deepcopy(one.definition)
            tensors, holders = self._seen_in(one)
            if _moved_in(inner, tensors, holders, self):
                functions.append((one, inner))
        waiting = {*self.tensors, *self.holders}
        taken = [one for name in waiting.intersection(self._earlier) for one in _tensors_of(self._earlier[name])]
        if not (changes or functions or self._moves_batches()):
            return None
        _Left(waiting, self).visit(self._tree)
        self._drop_what_does_nothing()
        self._take_back_what_classes_move()
        self._tree.body[:0] = ast.parse("\n".join(self._taken_back())).body
        ast.fix_missing_locations(self._tree)
        return DataKept(self._tree, functions, frozenset(id(one) for one in taken if self._is_on_device(one)))

    def _moves_batches(self) -> bool:
        """Whether the loops over the holders move each batch already."""
        codes = [self._tree, *(one.definition for one in called_in(self._tree, self._names))]
        calls = (node for code in codes for node in ast.walk(code) if isinstance(node, ast.Call))
        return bool(self.holders) and any(map(self._is_move, calls))

    def _seen_in(self, called: Called) -> tuple[set[str], set[str]]:
        """The names of a function for what waits: those of the notebook, and arguments that calls of the cell give."""
        own = {node.id for node in ast.walk(called.definition) if is_stored(node)}
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
        for node in ast.walk(self._tree):
            for block in filter(None, blocks_of(node)):
                left = [one for one in block if not isinstance(one, ast.stmt) or not _is_same(one)]
                block[:] = left or [ast.Pass()]

    def _take_back_what_classes_move(self) -> None:
        """Behind what makes an object of the user's that moves its data: those taken back."""
        for node in ast.walk(self._tree):
            for block in blocks_of(node):
                for at in range(len(block) - 1, -1, -1):
                    for target, value in _pairs(block[at]):
                        kind = object_of(value.func, self._names) if isinstance(value, ast.Call) else None
                        names = [f"{target}.{one}" for one in _moved_attributes(kind, self)]
                        if target in self.holders and names:
                            made = ast.parse(_all_called(names, ".cpu()")).body
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
            yield _all_called(list(called.values()), ".cpu()")
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
        yield _all_called(names, ".cpu()")


def _all_called(names: list[str], call: str) -> str:
    """``x, y = x.cpu(), y.cpu()``."""
    return f"{', '.join(names)} = {', '.join(f'{one}{call}' for one in names)}"


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


def _moved_attributes(kind: Any, data: _Data) -> list[str]:
    """The attributes that a data set of the user's own moves to the device when it is made."""
    torch = sys.modules["torch"]
    if not (isinstance(kind, type) and issubclass(kind, torch.utils.data.Dataset) and "__init__" in vars(kind)):
        return []
    made = ast.parse(f"{kind.__name__}.__init__(0)").body[0]
    found = []
    for one in called_in(made, {kind.__name__: kind}):
        for statement in one.definition.body if one.function is vars(kind)["__init__"] else ():
            value = statement.value if isinstance(statement, ast.Assign) else None
            calls = [node for node in ast.walk(value) if isinstance(node, ast.Call)] if value is not None else []
            if isinstance(statement, ast.Assign) and any(map(data._is_move, calls)):
                targets = [target for target in statement.targets if isinstance(target, ast.Attribute)]
                found += [target.attr for target in targets if ast.unparse(target.value) == "self"]
    return found


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements of a cell, also in its loops, but for its functions and classes."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        one = waiting.pop(0)
        if not isinstance(one, DEFINING):
            yield one
            waiting[:0] = [inner for block in blocks_of(one) for inner in block]


def _pairs(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """The names that a statement binds, each with what; also a list with what is appended."""
    match statement:
        case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)) if len(targets) == len(values):
            pairs = zip(targets, values, strict=True)
            yield from ((one.id, value) for one, value in pairs if isinstance(one, ast.Name))
        case ast.Assign([ast.Tuple(targets)], value):
            yield from ((one.id, value) for one in targets if isinstance(one, ast.Name))
        case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(ast.Name(name), value=ast.expr() as value):
            yield name, value
        case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), attr), [value])) if attr in _BUILDS:
            yield name, ast.List([value])


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


def _moved_in(scope: _Scope, tensors: set[str], holders: set[str], data: _Data) -> bool:
    """Move batches where a cell or function takes them; whether it takes any."""
    pieces = _Pieces(tensors, data.move, _indices_on_device(scope, data))
    for one in scope.body:
        pieces.visit_top(one, is_function=not isinstance(scope, ast.Module))
    loops = [node for node in ast.walk(scope) if isinstance(node, ast.For) and _is_over(node.iter, tensors, holders)]
    moved = [_move_targets(loop, data) for loop in loops]
    return pieces.are_found or any(moved)


def _indices_on_device(scope: ast.AST, data: _Data) -> set[str]:
    """The names that are made on the device in a scope, and what is taken of them."""
    found: set[str] = set()
    assigns = [node for node in ast.walk(scope) if isinstance(node, ast.Assign)]
    for _unused in range(2):
        for one in assigns:
            calls = [node for node in ast.walk(one.value) if isinstance(node, ast.Call)]
            if any(map(data._is_move, calls)) or found & set(names_in(one.value)):
                found |= bound_in(one)
    return found


class _Pieces(ast.NodeTransformer):
    """Moves each piece of tensors: ``x[i:j]`` becomes ``x[i:j].to(device)``."""

    def __init__(self, tensors: set[str], move: str, on_device: set[str]) -> None:
        self._tensors, self._move, self._on_device = tensors, move, on_device
        self.are_found = False

    def visit_top(self, statement: ast.stmt, is_function: bool) -> None:
        """A statement of a cell, which splits data where it stands outside any loop, or of a function."""
        if is_function or hasattr(statement, "body"):
            self.visit(statement)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """A piece that is moved already stays."""
        match node.func:
            case ast.Attribute(ast.Subscript(ast.Name(name)), "to" | "cuda") if name in self._tensors:
                self.are_found = True
                return node
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """A piece, moved; an index on the device is taken back for it."""
        self.generic_visit(node)
        is_piece = isinstance(node.value, ast.Name) and node.value.id in self._tensors
        if not is_piece or not isinstance(node.ctx, ast.Load):
            return node
        self.are_found = True
        if isinstance(node.slice, ast.Name) and node.slice.id in self._on_device:
            node.slice = _called(node.slice, ".cpu()")
        return _called(node, self._move)


def _called(node: ast.expr, call: str) -> ast.expr:
    made: Any = ast.parse(f"x{call}", mode="eval").body
    made.func.value = node
    found: ast.expr = ast.fix_missing_locations(ast.copy_location(made, node))
    return found


def _is_over(iterated: ast.expr, tensors: set[str], holders: set[str]) -> bool:
    """Whether a loop takes what holders yield, or parts of tensors."""
    match iterated:
        case ast.Name(name):
            return name in holders
        case ast.Call(ast.Attribute(ast.Name(name), attr)) if attr in _SPLITS:
            return name in tensors
        case ast.Call(function, [first, *_]) if ast.unparse(function).rpartition(".")[2] in _GOES_THROUGH:
            return _is_over(first, tensors, holders)
        case ast.Call(function, [first, *_]) if _HOLDS.search(ast.unparse(function)):  # made for the loop alone
            return _is_over(first, tensors, holders) or bool({*tensors, *holders} & set(names_in(first)))
    return False


def _move_targets(loop: ast.For, data: _Data) -> bool:
    """Move what a loop takes at its beginning, or behind the statement that takes it apart; whether there is any."""
    target = loop.target
    is_counted = isinstance(loop.iter, ast.Call) and ast.unparse(loop.iter.func) == "enumerate"
    if is_counted and isinstance(target, ast.Tuple) and len(target.elts) == 2:
        target = target.elts[1]
    at = 0
    if isinstance(target, ast.Name):
        match loop.body[0]:
            case ast.Assign([ast.Tuple() as parts], ast.Name(name)) if name == target.id:
                target, at = parts, 1
    if isinstance(target, ast.Tuple):
        names = [one.id for one in target.elts if isinstance(one, ast.Name)]
        names = [one for one in names if not _is_moved(one, loop, data)]
        made = _all_called(names, data.move) if names else ""
    else:
        made = "" if _is_moved(ast.unparse(target), loop, data) else _batch_moved(ast.unparse(target), loop, data.move)
    loop.body[at:at] = [ast.copy_location(one, loop.body[0]) for one in ast.parse(made).body]
    ast.fix_missing_locations(loop)
    return True


def _batch_moved(name: str, loop: ast.For, move: str) -> str:
    """The statement that moves a batch which the loop uses as a dictionary, a list or a tensor."""
    keys = [
        node.slice for node in ast.walk(loop) if isinstance(node, ast.Subscript) and ast.unparse(node.value) == name
    ]
    if any(isinstance(one, ast.Constant) and isinstance(one.value, str) for one in keys):
        return f"{name} = {{key: value{move} for key, value in {name}.items()}}"
    if any(isinstance(one, ast.Constant) for one in keys):
        return f"{name} = [one{move} for one in {name}]"
    return f"{name} = {name}{move}"


def _is_moved(name: str, loop: ast.For, data: _Data) -> bool:
    """Whether a loop moves what has this name, or a part of it."""
    moves = [node for node in ast.walk(loop) if isinstance(node, ast.Call) and data._is_move(node)]
    return any(name in names_in(one) for one in moves)


class _Left(ast.NodeTransformer):
    """Leaves what the names are bound to where it is: ``x.to(device)`` becomes ``x``."""

    def __init__(self, names: set[str], data: _Data) -> None:
        self._names, self._data = names, data
        self._is_inside = False

    def visit(self, node: ast.AST) -> Any:
        """Statements that bind one of the names are changed."""
        if isinstance(node, DEFINING):
            return node
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Tuple)
            and isinstance(node.value, ast.Tuple)
        ):
            for target, at in zip(node.targets[0].elts, range(len(node.value.elts)), strict=False):
                if ast.unparse(target) in self._names:
                    node.value.elts[at] = self._left(node.value.elts[at])
            return node
        if isinstance(node, ast.stmt) and self._names & {target for target, _ in _pairs(node)}:
            return self._left(node)
        return super().visit(node)

    def _left(self, node: Any) -> Any:
        before, self._is_inside = self._is_inside, True
        try:
            return self.generic_visit(node) if isinstance(node, ast.stmt) else self.visit(node)
        finally:
            self._is_inside = before

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """The call without the device; what it is called of, where nothing else is asked of it."""
        self.generic_visit(node)
        if not self._is_inside or not self._data._is_move(node):
            return node
        node.keywords = [one for one in node.keywords if one.arg != "device"]
        is_to = isinstance(node.func, ast.Attribute) and node.func.attr in ("to", "cuda")
        if is_to and node.args and self._data._is_device(node.args[0]):
            del node.args[0]
        elif is_to and node.args:
            return node
        others = [one for one in node.keywords if one.arg not in ("non_blocking", "copy")]
        return node.func.value if is_to and not node.args and not others else node  # type: ignore[attr-defined]


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
