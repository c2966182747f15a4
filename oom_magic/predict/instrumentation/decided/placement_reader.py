"""Where the values of the user's names would be with a GPU, read from code that ran without one.

The code is gone through in the order in which it ran, with places in place of values: what a device's name placed is
on the GPU, and so is what was computed, copied or made from that. Functions and classes of the user's are gone through
where they are called. A place that cannot be known so stays unknown, and the value where it is.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Any

from oom_magic.predict.instrumentation.decided.computed import Closing, Computed, asking_function, is_path, is_question
from oom_magic.predict.instrumentation.decided.placement_calls import ON_GPU, PLAIN, Calls, is_property, name_of
from oom_magic.predict.instrumentation.decided.placements import (
    REST,
    Place,
    PlacedParts,
    Where,
    computed,
    item_of,
    joined,
    whole,
)

_TOLD = (Where.DEVICE, Where.ASKED)
DEFAULT = "torch.get_default_device()"
_MOST_STEPS = 100_000  # expressions gone through


def read_placements(
    statements: Iterable[ast.stmt],
    namespace: Mapping[str, Any],
    decided: Collection[str] = (),
    pinned: Collection[str] = (),
) -> dict[str, Place]:
    """The places of the names that top-level ``statements`` assign; DEFAULT is where PyTorch then makes tensors.

    The names ``decided`` have another value on a GPU, the names ``pinned`` are devices, whatever the code says.
    """
    reader = _Reader(namespace, frozenset(pinned), decided=decided)
    for statement in statements:
        reader.run(statement)
    if reader.default is Where.GPU:
        reader.names[DEFAULT] = Where.DEVICE
    return reader.names


class _Reader(Calls):
    """Goes through the statements of one level: a notebook's, or a function's that is called."""

    # -- statements -------------------------------------------------------------

    def run(self, statement: ast.stmt) -> None:
        """Go through one statement."""
        method = getattr(self, f"_run_{type(statement).__name__.lower()}", None)
        if method is not None:
            method(statement)

    def _run_all(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            self.run(statement)

    def _run_expr(self, statement: ast.Expr) -> None:
        self.place(statement.value)

    def _run_return(self, statement: ast.Return) -> None:
        if statement.value is not None:
            value = self._stored(statement.value)
            if self._decided_by is not None and whole(value) in ON_GPU:
                self.returned, self._has_returned = value, True  # other branches return without a GPU
            elif not self._has_returned:
                is_only = self.returned is Where.UNKNOWN
                self.returned = value if is_only else joined([self.returned, value])

    def _run_assign(self, statement: ast.Assign) -> None:
        value, own = self._stored(statement.value), self._closed(statement.value)
        for target in statement.targets:
            self._bind(target, value)
            self._keep(target, own)

    def _run_annassign(self, statement: ast.AnnAssign) -> None:
        if statement.value is not None:
            own = self._closed(statement.value)
            self._bind(statement.target, self._stored(statement.value))
            self._keep(statement.target, own)

    def _run_augassign(self, statement: ast.AugAssign) -> None:
        was = self.place(statement.target)
        self._bind(statement.target, joined([was, self.place(statement.value)]))

    def _run_functiondef(self, statement: ast.FunctionDef) -> None:
        self._set(statement.name, self._function(statement))

    def _run_classdef(self, statement: ast.ClassDef) -> None:
        made = PlacedParts(kind=statement, is_class=True)
        inner = _Reader(self.namespace, caller=self, names={**self._above, **self.names})
        inner._own = dict(self._own)
        inner._run_all(one for one in statement.body if isinstance(one, (ast.Assign, ast.AnnAssign, ast.If)))
        made.items.update(inner.names)
        self._set(statement.name, made)

    def _run_global(self, statement: ast.Global) -> None:
        self._global.update(statement.names)

    def _run_delete(self, statement: ast.Delete) -> None:
        for target in statement.targets:
            self._bind(target, Where.UNKNOWN)

    def _run_if(self, statement: ast.If) -> None:
        test = self._tested(statement.test)
        branches = [(statement.orelse, None), (statement.body, None if test is None else test.node)]
        if test is not None and test.before:  # ``if not torch.cuda.is_available()``
            branches = [(statement.body, None), (statement.orelse, _negated(test.node))]
        before, own = dict(self.names), dict(self._own)
        self._run_all(branches[0][0])
        (other, self.names), (own_other, self._own) = (self.names, before), (self._own, own)
        outer, self._decided_by = self._decided_by, branches[1][1] or self._decided_by
        self._run_all(branches[1][0])
        self._decided_by = outer
        either = self._join_own(own_other, branches[1][1])
        is_decided = test is not None or self._is_decided(statement.test)
        for name in other.keys() | self.names.keys():
            one, two = self.names.get(name, Where.UNKNOWN), other.get(name, Where.UNKNOWN)
            chosen = next((each for each in (one, two) if whole(each) in ON_GPU), None) if is_decided else None
            if name in either and chosen is None:
                self.names[name] = Computed.of(either[name], self.namespace) or joined([one, two])
            elif one is not two:
                self.names[name] = joined([one, two]) if chosen is None else chosen

    def _join_own(self, other: dict[str, ast.expr], test: ast.expr | None) -> dict[str, ast.expr]:
        """After two branches: what the names that differ were computed from, by the test for a GPU if there is one."""
        either: dict[str, ast.expr] = {}
        for name in self._own.keys() | other.keys():
            one, two = self._own.pop(name, None), other.get(name)
            if one is not None and two is not None and (one is two or test is not None):
                self._own[name] = one
                if one is not two and test is not None:
                    self._own[name] = either[name] = ast.IfExp(test, one, two)
        return either

    def _tested(self, node: ast.expr) -> Computed | None:
        """A test that depends on there being a GPU; None for others."""
        closed = self._closed(node) if self._is_decided(node) else None
        return None if closed is None else Computed.of(closed, self.namespace)

    def _run_for(self, statement: ast.For) -> None:
        self._bind(statement.target, self._element(statement.iter))
        self._run_all((*statement.body, *statement.orelse))

    def _run_while(self, statement: ast.While) -> None:
        self._run_all((*statement.body, *statement.orelse))

    def _run_try(self, statement: ast.Try) -> None:
        self._run_all((*statement.body, *statement.orelse, *statement.finalbody))

    def _run_with(self, statement: ast.With) -> None:
        before = self.default
        for item in statement.items:
            value = self.place(item.context_expr)
            if item.optional_vars is not None:
                self._bind(item.optional_vars, value)
            elif value is Where.DEVICE:  # with torch.device(...)
                self.default = Where.GPU
        self._run_all(statement.body)
        self.default = before

    def _bind(self, target: ast.expr, value: Place) -> None:
        if isinstance(target, ast.Name):
            self._set(target.id, value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for at, item in enumerate(target.elts):
                self._bind(item, item_of(value, at))
        elif isinstance(target, ast.Starred):
            self._bind(target.value, whole(value))
        elif isinstance(target, (ast.Attribute, ast.Subscript)):
            self._fill(target.value, _key(target), value)

    def _set(self, name: str, value: Place) -> None:
        names = self._above if name in self._global else self.names
        if name not in self._pinned:
            names[name] = value

    def _fill(self, owner: ast.expr, key: Hashable, value: Place) -> None:
        """Put a value into an object or a container."""
        held = self.place(owner)
        if not isinstance(held, PlacedParts):
            held = PlacedParts({REST: held})
            self._bind(owner, held)
        held.items[key] = value if key is not REST else joined([held.items.get(REST, Where.UNKNOWN), value])

    # -- expressions ------------------------------------------------------------

    def _stored(self, node: ast.expr) -> Place:
        """The place of a value that is kept; if it has none, how it depends on there being a GPU."""
        found = self.place(node)
        is_name = isinstance(node, ast.Name) and node.id in self.names and not self._has_decided(node.id)
        is_plain = is_name or isinstance(node, ast.Constant)
        if found not in (Where.UNKNOWN, Where.ASKED) or (self._decided_by is None and is_plain):
            return found
        is_decided = self._decided_by is not None or self._depends(node)
        closed = self._closed(node) if is_decided else None
        made = None if closed is None else Computed.of(closed, self.namespace, self._decided_by)
        return found if made is None else made

    def _closed(self, node: ast.expr) -> ast.expr | None:
        """An expression with what the names of this level alone were computed from in their place."""
        return Closing(self._own, self.names if self._is_inner else {}, self.place).closed(node)

    def _keep(self, target: ast.expr, own: ast.expr | None) -> None:
        if self._is_inner and isinstance(target, ast.Name):
            self._own.pop(target.id, None)
            if own is not None:
                self._own[target.id] = own

    def place(self, node: ast.expr) -> Place:
        """The place of an expression's value."""
        if next(self._steps) > _MOST_STEPS:
            return Where.UNKNOWN
        method = getattr(self, f"_place_{type(node).__name__.lower()}", None)
        return Where.UNKNOWN if method is None else method(node)

    def _place_constant(self, node: ast.Constant) -> Place:
        if not isinstance(node.value, str):
            return Where.UNKNOWN
        return Where.DEVICE if node.value.startswith("cuda") else Where.HOST if node.value == "cpu" else Where.UNKNOWN

    def _place_joinedstr(self, node: ast.JoinedStr) -> Place:
        values = [self.place(value) for value in node.values]
        return Where.DEVICE if Where.DEVICE in values else Where.UNKNOWN

    def _place_formattedvalue(self, node: ast.FormattedValue) -> Place:
        return self.place(node.value)

    def _place_name(self, node: ast.Name) -> Place:
        found = self._seen(node.id)
        return Where.UNKNOWN if found in ON_GPU and self._is_plain(node) else found

    def _place_attribute(self, node: ast.Attribute) -> Place:
        if isinstance(node.value, ast.Call) and name_of(node.value.func) == "super":
            return self._inherited(node.attr)
        owner = self.place(node.value)
        if node.attr == "device" and owner is Where.GPU:
            return Where.DEVICE
        if node.attr in PLAIN or (whole(owner) in ON_GPU and self._is_plain(node)):
            return Where.UNKNOWN
        if not isinstance(owner, PlacedParts):
            return owner if isinstance(owner, Where) else Where.UNKNOWN
        if node.attr in owner.items:
            return owner.items[node.attr]
        method = self._method(owner, node.attr)
        if method is None:
            return owner.items.get(REST, Where.UNKNOWN)
        return self._call(method, [], {}) if is_property(method.node) else method

    def _place_subscript(self, node: ast.Subscript) -> Place:
        owner = self.place(node.value)
        return Where.UNKNOWN if whole(owner) in ON_GPU and self._is_plain(node) else item_of(owner, _key(node))

    def _place_ifexp(self, node: ast.IfExp) -> Place:
        both = self.place(node.body), self.place(node.orelse)
        chosen = next((one for one in both if whole(one) in ON_GPU), None) if self._is_decided(node.test) else None
        return joined(both) if chosen is None else chosen

    def _place_binop(self, node: ast.BinOp) -> Place:
        return computed([self.place(node.left), self.place(node.right)])

    def _place_compare(self, node: ast.Compare) -> Place:
        found = computed([self.place(node.left), *map(self.place, node.comparators)])
        return Where.ASKED if found is Where.DEVICE else found

    def _place_boolop(self, node: ast.BoolOp) -> Place:
        values = list(map(self.place, node.values))
        found = joined(values)
        return Where.ASKED if found is Where.UNKNOWN and Where.ASKED in map(whole, values) else found

    def _place_unaryop(self, node: ast.UnaryOp) -> Place:
        return computed([self.place(node.operand)])

    def _place_starred(self, node: ast.Starred) -> Place:
        return whole(self.place(node.value))

    def _place_namedexpr(self, node: ast.NamedExpr) -> Place:
        value = self.place(node.value)
        self._bind(node.target, value)
        return value

    def _place_lambda(self, node: ast.Lambda) -> Place:
        return self._function(node)

    def _place_tuple(self, node: ast.Tuple | ast.List | ast.Set) -> Place:
        return PlacedParts(dict(enumerate(map(self._stored, node.elts))))

    _place_list = _place_set = _place_tuple

    def _place_dict(self, node: ast.Dict) -> Place:
        made = PlacedParts()
        for key, value in zip(node.keys, node.values, strict=True):
            made.items[key.value if isinstance(key, ast.Constant) else REST] = self._stored(value)
        return made

    def _place_listcomp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> Place:
        return PlacedParts({REST: self._made_by(node, node.elt)})

    _place_setcomp = _place_generatorexp = _place_listcomp

    def _place_dictcomp(self, node: ast.DictComp) -> Place:
        return PlacedParts({REST: self._made_by(node, node.value)})

    def _made_by(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, element: ast.expr) -> Place:
        before = dict(self.names)
        for one in node.generators:
            self._bind(one.target, self._element(one.iter))
        made, self.names = self.place(element), before
        return made

    def _element(self, node: ast.expr) -> Place:
        """The place of what a loop over a value gives."""
        name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        if isinstance(node, ast.Call) and name in ("zip", "enumerate"):
            items = [self._element(arg) for arg in node.args]
            return PlacedParts(dict(enumerate([Where.UNKNOWN, *items] if name == "enumerate" else items)))
        held = self.place(node)
        return held if not isinstance(held, PlacedParts) else joined(held.items.values())

    def _is_decided(self, test: ast.expr) -> bool:
        """Whether a test depends on there being a GPU."""
        return self._depends(test) or whole(self.place(test)) in _TOLD

    def _depends(self, node: ast.expr) -> bool:
        """Whether an expression asks for the GPU, or reads what was decided so; its calls are not gone through."""
        parts = list(ast.walk(node))
        calls = [part.func for part in parts if isinstance(part, ast.Call)]
        if any(is_question(call) or asking_function(call, self.namespace) is not None for call in calls):
            return True
        if any(isinstance(part, ast.Name) and self._has_decided(part.id) for part in parts):
            return True
        return any(whole(self.place(part)) in _TOLD for part in parts if is_path(part))


def _key(target: ast.Attribute | ast.Subscript) -> Hashable:
    if isinstance(target, ast.Attribute):
        return target.attr
    return target.slice.value if isinstance(target.slice, ast.Constant) else REST


def _negated(test: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), test)
