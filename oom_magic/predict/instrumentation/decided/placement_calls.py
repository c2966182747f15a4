"""Calls in code that ran without a GPU: where what they give would be with one."""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from torch.utils.data import DataLoader

from oom_magic.predict.instrumentation.decided.computed import QUESTIONS, Computed
from oom_magic.predict.instrumentation.decided.placements import (
    REST,
    Function,
    Place,
    PlacedParts,
    Where,
    computed,
    copied,
    item_of,
    joined,
    put,
)
from oom_magic.predict.isolation.reach import is_users_class
from oom_magic.user_code import is_users_file

ON_GPU = (Where.GPU, Where.DEVICE)
_DEVICE_ARGUMENTS = ("device", "map_location", "device_map")
_MOVES = ("to", "to_empty", "cuda", "cpu")
CHOOSING = ("Accelerator", "PartialState")  # accelerate's, which name the GPU where there is one
_PREPARING = ("prepare", "prepare_model", "prepare_data_loader")  # and return what they are given, on it
PLAIN = frozenset(
    {
        "numpy", "item", "tolist", "size", "dim", "numel", "stride", "shape", "dtype", "ndim", "len", "int", "float",
        "bool", "str", "print", "isinstance", "range",
    }
)  # fmt: skip
_CONTEXTS = ("autocast", "nullcontext")
_FILLING = frozenset(
    {
        "append", "extend", "add", "update", "insert", "appendleft", "register_buffer", "register_parameter", "setattr",
        "setdefault", "add_module",
    }
)  # fmt: skip
_MAKING = frozenset(
    {
        "zeros", "ones", "empty", "full", "rand", "randn", "randint", "randperm", "arange", "linspace", "logspace",
        "eye", "tensor",
    }
)  # fmt: skip
_DEEPEST = 8  # calls of the user's functions inside each other


class Calls(ABC):
    """The names of one level of code, a notebook's or a called function's, and what calls in it give."""

    def __init__(
        self,
        namespace: Mapping[str, Any],
        pinned: frozenset[str] = frozenset(),
        caller: Calls | None = None,
        names: dict[str, Place] | None = None,
        decided: Collection[str] = frozenset(),  # names of the module with another value on a GPU
    ) -> None:
        self.namespace = namespace
        self.names: dict[str, Place] = dict.fromkeys(pinned, Where.DEVICE)
        self.returned: Place = Where.UNKNOWN
        self._above = {} if names is None else names  # the names of the level above
        self._own: dict[str, ast.expr] = {}  # what the names of this level alone were computed from
        self._decided: Collection[str] = decided if caller is None else caller._decided
        self._pinned = pinned
        self._is_inner = caller is not None
        self._depth: int = 0 if caller is None else caller._depth + 1
        self._steps: Iterator[int] = itertools.count() if caller is None else caller._steps
        self.default: Where = Where.HOST if caller is None else caller.default  # where PyTorch makes tensors
        self._decided_by: ast.expr | None = None  # the test of the branch that a GPU leads into
        self._has_returned = False
        self._global: set[str] = set()
        self._method_of: Function | None = None  # that is gone through

    @abstractmethod
    def place(self, node: ast.expr) -> Place:
        """The place of an expression's value."""

    @abstractmethod
    def _stored(self, node: ast.expr) -> Place:
        """The place of a value that is kept; if it has none, how it depends on there being a GPU."""

    @abstractmethod
    def _run_all(self, statements: Iterable[ast.stmt]) -> None:
        """Go through statements."""

    @abstractmethod
    def _bind(self, target: ast.expr, value: Place) -> None:
        """Give a name, an attribute or an item a place."""

    @abstractmethod
    def _fill(self, owner: ast.expr, key: Hashable, value: Place) -> None:
        """Put a value into an object or a container."""

    def _seen(self, name: str) -> Place:
        return self.names.get(name, self._above.get(name, Where.UNKNOWN))

    def _has_decided(self, name: str) -> bool:
        """Whether a name is one of the module that has another value on a GPU."""
        return name in self._decided and not (self._is_inner and name in self.names)

    def _is_plain(self, node: ast.expr) -> bool:
        """Whether an expression can be looked up, and is a number, a text or a type that says no device."""
        value = self._value(node)
        is_device = isinstance(value, torch.device) or (isinstance(value, str) and value == "cpu")
        return isinstance(value, (str, int, float, torch.dtype, torch.Size)) and not is_device

    def _value(self, node: ast.expr) -> Any:
        """The value that the user's name, or an attribute of it, has now; None if there is none."""
        if isinstance(node, ast.Name):
            return None if self._is_inner and node.id in self.names else self.namespace.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._value(node.value)
            return None if owner is None else inspect.getattr_static(owner, node.attr, None)
        return None

    def _place_call(self, node: ast.Call) -> Place:
        name = name_of(node.func)
        if name in QUESTIONS:
            return Where.ASKED
        if name in _MOVES and isinstance(node.func, ast.Attribute):
            return self._moved(node.func, node)
        if name in _PREPARING and isinstance(node.func, ast.Attribute) and self.place(node.func.value) is Where.DEVICE:
            given = [self._put(arg, self.place(arg), Where.GPU) for arg in node.args]
            return given[0] if len(given) == 1 else PlacedParts(dict(enumerate(given)))
        args = list(map(self._stored, node.args))
        options = {one.arg or "": self._stored(one.value) for one in node.keywords}
        rest = options.get("")
        if isinstance(rest, PlacedParts):  # ``**settings``
            options |= {key: value for key, value in rest.items.items() if isinstance(key, str)}
        if name in PLAIN or name in _CONTEXTS:
            return Where.UNKNOWN
        if name == "set_default_device":
            self.default = Where.GPU if Where.DEVICE in args else Where.HOST
            return Where.UNKNOWN
        if name in _FILLING:
            self._filled(node, args)
            return Where.UNKNOWN
        called = self._called(node.func)
        if isinstance(rest, Computed):
            options |= {name: one for name, one in self._spread(node, rest) if name not in options}
        if isinstance(called, PlacedParts) and called.is_class:
            return self._instance(called, args, options)
        if isinstance(called, Function):
            return self._call(called, args, options)
        settings = self._settings(name, node, args, options)
        return self._made(node, args, options, called) if settings is None else settings

    def _spread(self, node: ast.Call, settings: Computed) -> Iterator[tuple[str, Computed]]:
        """The arguments that ``**settings``, which depend on there being a GPU, may give, or else their defaults."""
        value = self._value(node.func)
        with contextlib.suppress(TypeError, ValueError):  # no function, or one of C without a signature
            for name, one in inspect.signature(value).parameters.items():
                is_told = isinstance(one.default, (bool, int, float, str, tuple, type(None)))
                is_among = ast.Compare(ast.Constant(name), [ast.In()], [settings.node])
                item = ast.Subscript(settings.node, ast.Constant(name), ast.Load())
                either = ast.IfExp(is_among, item, ast.Constant(one.default if is_told else None))
                made = Computed.of(either, settings.names)
                if made is not None:
                    yield name, made

    def _settings(self, name: str, node: ast.Call, args: list[Place], options: dict[str, Place]) -> Place | None:
        """What calls of ``functools``, ``dataclasses``, ``argparse``, ``os``, ``copy`` and accelerate give; None for
        others."""
        if name in CHOOSING:
            return Where.UNKNOWN if "cpu" in options else Where.DEVICE
        if name == "dict" and not args:
            return PlacedParts(dict(options.items()))
        if name in ("copy", "deepcopy") and args and isinstance(args[0], PlacedParts):
            return copied(args[0])
        if name in ("get", "getenv", "pop") and args and isinstance(node.func, ast.Attribute):
            owner = self.place(node.func.value)
            key = node.args[0].value if isinstance(node.args[0], ast.Constant) else REST
            owner = item_of(owner, "environ") if name == "getenv" else owner
            return item_of(owner, key) if isinstance(owner, PlacedParts) else None
        if name == "partial":
            return PlacedParts(dict(options.items()))
        if name in ("field", "ib"):  # also attrs'
            made = options.get("default_factory", options.get("factory"))
            return self._call(made, [], {}) if isinstance(made, Function) else options.get("default", Where.UNKNOWN)
        if name == "add_argument" and isinstance(node.func, ast.Attribute):
            self._fill(node.func.value, _destination(node), options.get("default", Where.UNKNOWN))
            return Where.UNKNOWN
        if name in ("parse_args", "parse_known_args") and isinstance(node.func, ast.Attribute):
            parser = self.place(node.func.value)
            told = PlacedParts(dict(parser.items)) if isinstance(parser, PlacedParts) else Where.UNKNOWN
            return told if name == "parse_args" else PlacedParts({0: told})
        return None

    def _made(self, node: ast.Call, args: list[Place], options: dict[str, Place], called: Place) -> Place:
        """The place of what a library's function gives."""
        name = name_of(node.func)
        named = next((options[one] for one in _DEVICE_ARGUMENTS if options.get(one) in (*ON_GPU, Where.HOST)), None)
        if named is not None:
            return Where.GPU if named in ON_GPU else Where.HOST
        if name in _MAKING or self._is_layer(node.func):
            return self.default
        if name in ("Sequential", "ModuleList", "tuple", "list") and (name != "list" or not args):
            return PlacedParts(dict(enumerate(args)))
        if name == "device":
            return next(iter(args), Where.UNKNOWN)
        kind = self._value(node.func)
        if args and isinstance(args[0], PlacedParts) and isinstance(kind, type) and issubclass(kind, torch.nn.Module):
            return PlacedParts({REST: copied(args[0])})  # as AveragedModel, which holds a copy
        owner = self.place(node.func.value) if isinstance(node.func, ast.Attribute) else called
        found: Place
        found = (joined if isinstance(kind, type) else computed)([owner, *args, *options.values()])
        found = Where.GPU if found is Where.DEVICE else found
        if found is Where.UNKNOWN and len(args) == 1 and isinstance(args[0], PlacedParts) and args[0].kind is None:
            return copied(args[0])  # settings, as OmegaConf.create makes them of a dictionary
        if not isinstance(kind, type) or not issubclass(kind, (torch.optim.Optimizer, DataLoader)):
            return found
        given = {**dict(zip(inspect.signature(kind).parameters, args, strict=False)), **options}
        decided: dict[Hashable, Place] = {name: one for name, one in given.items() if isinstance(one, Computed)}
        return PlacedParts({**decided, REST: found}) if decided else found

    def _moved(self, func: ast.Attribute, node: ast.Call) -> Place:
        """``x.to(device)``; a module and what it holds are moved in place."""
        owner = self.place(func.value)
        said = [self.place(arg) for arg in (*node.args, *(one.value for one in node.keywords))]
        fixed = {"cuda": Where.GPU, "cpu": Where.HOST}.get(func.attr)
        if fixed is None:
            fixed = Where.GPU if any(map(ON_GPU.__contains__, said)) else Where.HOST if Where.HOST in said else None
        if fixed is None:
            return owner
        return self._put(func.value, owner, fixed)

    def _put(self, node: ast.expr, owner: Place, where: Where) -> Place:
        """The place of a value that is moved; a module, and what it holds, in place."""
        is_tensor = isinstance(self._value(node), torch.Tensor)
        if isinstance(owner, PlacedParts):
            put(owner, where)
        elif not is_tensor and isinstance(node, (ast.Name, ast.Attribute)) and self._is_model(node):
            self._bind(node, where)
        return owner if isinstance(owner, PlacedParts) else where

    def _is_model(self, node: ast.expr) -> bool:
        return self._is_inner or isinstance(self._value(node), torch.nn.Module)

    def _filled(self, node: ast.Call, args: list[Place]) -> None:
        """``items.append(x)``, ``module.register_buffer("name", x)``, ``setattr(owner, "name", x)``."""
        owner = node.func.value if isinstance(node.func, ast.Attribute) else next(iter(node.args), None)
        if owner is None or not (args or node.keywords):
            return
        if name_of(node.func) == "update":
            told: dict[Hashable, Place] = {}
            told |= args[0].items if args and isinstance(args[0], PlacedParts) else {}
            told |= {one.arg: self._stored(one.value) for one in node.keywords if one.arg is not None}
            for key, value in told.items():
                self._fill(owner, key, value)
        if not args or (name_of(node.func) == "update" and isinstance(args[0], PlacedParts)):
            return
        names = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        self._fill(owner, names[0] if names else REST, args[-1] if len(args) < 4 else Where.UNKNOWN)

    def _called(self, func: ast.expr) -> Place:
        """The user's function or class that is called, or else the place of what is."""
        found = self.place(func)
        if found is not Where.UNKNOWN:
            return found
        value = self._value(func)
        is_function = isinstance(value, FunctionType) and is_users_file(value.__code__.co_filename)
        if not is_function and not (isinstance(value, type) and is_users_class(value)):
            return found
        try:
            [definition] = ast.parse(textwrap.dedent(inspect.getsource(value))).body
        except (OSError, TypeError, SyntaxError, ValueError):
            return found
        if isinstance(definition, ast.FunctionDef) and isinstance(value, FunctionType):
            return Function(definition, {}, value.__globals__, self._defaults(definition.args))
        return PlacedParts(kind=definition, is_class=True) if isinstance(definition, ast.ClassDef) else found

    def _is_layer(self, func: ast.expr) -> bool:
        """Whether a layer of PyTorch's is made, which takes no tensors."""
        value = self._value(func)
        is_module = isinstance(value, type) and issubclass(value, torch.nn.Module)
        home = value.__module__.removeprefix("torch.nn.modules.") if is_module else ""
        return is_module and home != value.__module__ and home not in ("container", "loss")

    def _function(self, node: ast.FunctionDef | ast.Lambda) -> Function:
        above = self.names if not self._is_inner else {**self._above, **self.names}
        return Function(node, above, self.namespace, self._defaults(node.args))

    def _defaults(self, args: ast.arguments) -> dict[str, Place]:
        names = [one.arg for one in (*args.posonlyargs, *args.args)]
        found = dict(zip(reversed(names), map(self._stored, reversed(args.defaults)), strict=False))
        named = zip(args.kwonlyargs, args.kw_defaults, strict=True)
        return found | {one.arg: self._stored(value) for one, value in named if value is not None}

    def _instance(self, kind: PlacedParts, args: list[Place], options: dict[str, Place]) -> PlacedParts:
        made = PlacedParts(kind=kind.kind)
        for one in reversed(list(self._lines(kind))):
            made.items |= one.items
        made.items |= {name: value for name, value in options.items() if name in made.items}  # of a dataclass
        begin, rest = self._method(made, "__init__"), self._method(made, "__post_init__")
        if begin is not None:
            self._call(begin, args, options)
        elif rest is not None:  # a dataclass's
            self._call(rest, [], {})
        return made

    def _method(self, owner: PlacedParts, name: str, after: PlacedParts | None = None) -> Function | None:
        """The method of this name of an object, or of the classes that follow ``after``."""
        lines = list(self._lines(owner))
        for kind in lines if after is None else _after(lines, after):
            for one in kind.kind.body if kind.kind is not None else ():
                if isinstance(one, ast.FunctionDef) and one.name == name:
                    bound = None if "staticmethod" in map(name_of, one.decorator_list) else owner
                    return Function(one, self._top(), self.namespace, self._defaults(one.args), bound, kind)
        return None

    def _inherited(self, name: str) -> Place:
        method = self._method_of
        found = None if method is None or method.owner is None else self._method(method.owner, name, method.kind)
        return Where.UNKNOWN if found is None else found

    def _lines(self, kind: PlacedParts) -> Iterator[PlacedParts]:
        """A class of the user's, or of an object, and those that it inherits from."""
        if kind.kind is not None:
            yield kind
            for base in kind.kind.bases:
                found = self._top().get(name_of(base))
                if isinstance(found, PlacedParts) and found.is_class and found.kind is not kind.kind:
                    yield from self._lines(found)

    def _top(self) -> dict[str, Place]:
        return self._above if self._is_inner else self.names

    def _call(self, function: Function, args: list[Place], options: dict[str, Place]) -> Place:
        """What a function of the user's returns; what it does to its arguments is done."""
        if self._depth >= _DEEPEST:
            return Where.UNKNOWN
        inner = type(self)(function.above, caller=self, names=function.names)
        inner._method_of = function
        given = [*([] if function.owner is None else [function.owner]), *args]
        wanted = function.node.args
        names = [one.arg for one in (*wanted.posonlyargs, *wanted.args)]
        inner.names.update(dict.fromkeys(names, Where.UNKNOWN))
        inner.names.update(function.defaults)
        inner.names.update(zip(names, given, strict=False))
        inner.names.update({name: value for name, value in options.items() if name})
        if wanted.vararg is not None:
            inner.names[wanted.vararg.arg] = PlacedParts(dict(enumerate(given[len(names) :])))
        if isinstance(function.node, ast.Lambda):
            return inner._stored(function.node.body)
        inner._run_all(function.node.body)
        return inner.returned


def name_of(func: ast.expr) -> str:
    """The last name of an expression such as ``torch.zeros``; empty for others."""
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""


def _destination(node: ast.Call) -> str:
    """The attribute of an argument that ``add_argument`` adds."""
    named = [one.value for one in node.keywords if one.arg == "dest"]
    texts = [one.value for one in (*named, *node.args) if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    found = next((one for one in texts if one.startswith("--")), texts[0] if texts else "")
    return (texts[0] if named and texts else found).lstrip("-").replace("-", "_")


def _after(kinds: list[PlacedParts], one: PlacedParts) -> list[PlacedParts]:
    """The classes that follow the one with the same code."""
    at = next((at for at, kind in enumerate(kinds) if kind.kind is one.kind), len(kinds))
    return kinds[at + 1 :]


def is_property(node: ast.FunctionDef | ast.Lambda) -> bool:
    """Whether a method is read as an attribute."""
    return isinstance(node, ast.FunctionDef) and "property" in map(name_of, node.decorator_list)
