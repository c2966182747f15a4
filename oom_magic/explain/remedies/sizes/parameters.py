"""The number in a user's cell, or among the names it uses, that sets a size such as the batch.

A parameter is accepted only after a rehearsal with another value has changed the shapes of the model's inputs.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from oom_magic.explain.live.called import called_in, object_of
from oom_magic.explain.remedies.own_code.loops import Code
from oom_magic.explain.remedies.own_code.rows.calls import in_rows, model_calls
from oom_magic.explain.remedies.own_code.rows.functions import compared_in_parts, compared_rows
from oom_magic.explain.remedies.own_code.rows.statements import computed_in_parts
from oom_magic.explain.remedies.own_code.rows.steps import first_made_rows, first_rows, made_rows, rows_read
from oom_magic.explain.remedies.sizes.overrides import (
    Override,
    as_pair,
    assigning,
    called_in_parts,
    changed_cell,
    defined_in,
    override_argument,
    override_assigned,
    override_default,
    override_in_calls,
    override_item,
    override_literals,
    override_word,
    set_for_a_while,
)
from oom_magic.explain.remedies.sizes.pictures import NAME as PICTURES
from oom_magic.explain.remedies.sizes.pictures import pairs_held, squares
from oom_magic.explain.syntax import bound_in, names_in
from oom_magic.user_code import is_cell, is_users_file

_BATCH = re.compile(r"batch|(^|_)bs($|_)|^B$", re.IGNORECASE)
_LENGTH = re.compile(r"seq|len|block_size|context|n_ctx|^T$|^S$", re.IGNORECASE)
_ACCUMULATION = re.compile(r"accum", re.IGNORECASE)
NAMES = {"batch": _BATCH, "seq": _LENGTH, "accumulation": _ACCUMULATION, "side": PICTURES}

_ARITHMETIC: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}

_PLAIN = (SimpleNamespace, argparse.Namespace)
_DEEPEST = 2  # settings within settings: cfg["train"]["loader"]["batch_size"]


@dataclass(frozen=True)
class SizeParameter:
    """A place where a size is set. ``label`` names it to the user, such as ``batch_size``.

    ``target`` is the expression that is assigned to override it outside of the cell's code ("": there is none).
    ``rows`` are the tensors whose number of rows it is, where that is nowhere set.
    """

    label: str
    is_named: bool  # whether its name denotes the size
    override: Override  # a context manager over (the cell, its names, the new value)
    target: str = ""
    is_pair: bool = False  # whether it is assigned twice: (height, width)
    rows: Sequence[str] = field(default=(), compare=False)

    def assigned(self, value: int) -> str:
        """The statement that sets it outside of the cell's code."""
        return f"{self.target} = {(value, value) if self.is_pair else value}"


def find_rows(
    tree: ast.Module, names: Mapping[str, Any], value: int, are_free: bool = False
) -> Iterator[SizeParameter]:
    """The data that a step takes as a whole, ``value`` rows. ``are_free``: nothing is trained, and statements compute
    each row by itself."""
    rows = rows_read(tree, names, value)
    if are_free:
        leading = next((name for name in rows if computed_in_parts(tree, names, name, 1)), None)
        if leading is not None and "torch" in names:
            in_parts = partial(computed_in_parts, rows=leading)
            yield SizeParameter(leading, False, partial(changed_cell, in_parts))
        return
    for code, place in _steps_of(tree, names):
        found = [name for name in rows if name in names_in(code)]
        yield SizeParameter("", False, place(partial(first_made_rows, code, value, found)), rows=found)
    if rows:
        yield SizeParameter("", False, lambda _, seen, number: first_rows(rows, seen, number), rows=rows)


def _steps_of(tree: ast.Module, names: Mapping[str, Any]) -> Iterator[tuple[Code, Callable[[Override], Override]]]:
    """The cell, its functions and those of other cells that it runs, of which a step may take what they make as a
    whole, each with what has an override come into the cell."""
    inside: list[Code] = [tree, *(one for one in tree.body if isinstance(one, ast.FunctionDef))]
    yield from ((code, lambda override: override) for code in inside if made_rows(code))
    for one in called_in(tree, names):
        if made_rows(one.definition) and is_cell(one.file) and names.get(one.definition.name) is one.function:
            yield one.definition, partial(partial, defined_in, one.definition)


def find_compared_rows(tree: ast.Module, names: Mapping[str, Any]) -> Iterator[SizeParameter]:
    """The rows that a loop of the cell, or a function that it runs, compares with others; with 0 in their place, the
    code tells ``COUNTED`` how many there are."""
    codes: list[tuple[Code, Callable[[Override], Override]]] = [(tree, lambda override: override)]
    codes += [(one, lambda override: override) for one in tree.body if isinstance(one, ast.FunctionDef)]
    for one in called_in(tree, names):
        if isinstance(one.definition, ast.FunctionDef) and names.get(one.definition.name) is one.function:
            codes.append((one.definition, partial(partial, defined_in, one.definition)))
    for code, place in codes:
        for rows in compared_rows(code, names):
            in_parts = partial(_compared_in_parts, code, rows)
            yield SizeParameter(rows, False, place(partial(changed_cell, in_parts)))


def _compared_in_parts(
    code: Code, rows: str, tree: ast.Module, names: Mapping[str, Any], after: int
) -> ast.Module | None:
    made = compared_in_parts(code, names, rows, after)
    if made is None or isinstance(made, ast.Module):
        return made
    return ast.Module([made if one is code else one for one in tree.body], [])


def find_size_parameters(
    tree: ast.Module,
    names: Mapping[str, Any],
    what: str,
    value: int,
    arguments: list[str] | None = None,
    are_rows_free: bool = False,
) -> list[SizeParameter]:
    """Places that have ``value`` and may set ``what`` ("batch", "seq", "side" or "accumulation"), the best named first.

    ``arguments`` is a script's command line. ``are_rows_free``: the rows of an input may be computed one by one.
    """
    pattern = _pattern(tree, what)
    found = [
        *_of_command_line(arguments or [], pattern, value),
        *(_pictures(tree, names, value) if what == "side" else ()),
        *_given(tree, names, pattern, value),
        *(_strides(tree, value) if what == "batch" else ()),
        *_literals(tree, pattern, value),
        *_computations(tree, names, pattern, value),
        *_variables(tree, names, pattern, value),
    ]
    found += _shapes(tree, what, value)
    found += _defaults(tree, names, pattern, value)
    found += _attributes(names, pattern, value)
    found += _in_functions(tree, names, what, value)
    found += _wholes(tree, names, value) if what == "batch" and are_rows_free else ()
    return sorted(found, key=lambda parameter: not parameter.is_named)


def sizes_called(tree: ast.Module, names: Mapping[str, Any], what: str) -> list[int]:
    """The numbers in a cell, and those that it reads, whose name denotes a size, the largest first."""
    pattern, nodes = NAMES[what], list(ast.walk(tree))
    written = (getattr(one, "value", None) for node in nodes for label, one in _labelled(node) if pattern.search(label))
    read = (names.get(node.id) for node in nodes if isinstance(node, ast.Name) and pattern.search(node.id))
    return sorted({one for one in (*written, *read) if type(one) is int and one > 1}, reverse=True)


def _of_command_line(words: list[str], pattern: re.Pattern[str], value: int) -> Iterator[SizeParameter]:
    """Options with that value: ``--batch-size 8`` or ``--batch-size=8``."""
    for at, word in enumerate(words):
        option, is_joined, given = word.partition("=")
        if is_joined and given == str(value):
            yield SizeParameter(option, bool(pattern.search(option)), override_word(words, at, f"{option}="))
        elif at and word == str(value) and words[at - 1].startswith("-"):
            yield SizeParameter(words[at - 1], bool(pattern.search(words[at - 1])), override_word(words, at, ""))


def _literals(tree: ast.Module, pattern: re.Pattern[str], value: int) -> Iterator[SizeParameter]:
    """Numbers written in the cell itself."""
    for node in ast.walk(tree):
        for label, constant in _labelled(node):
            if isinstance(constant, ast.Constant) and type(constant.value) is int and constant.value == value:
                override = partial(set_for_a_while, constant, "value")
                yield SizeParameter(label or str(value), bool(pattern.search(label)), override)


def _computations(
    tree: ast.Module, names: Mapping[str, Any], pattern: re.Pattern[str], value: int
) -> Iterator[SizeParameter]:
    """What the cell computes for a name of such a size: ``batch_size = 2**7``, ``data.batch_size *= 2``."""
    for one in tree.body:
        if isinstance(one, ast.AugAssign) and _is(value, object_of(one.target, names)):
            label, change = ast.unparse(one.target), partial(assigning, one)
            yield SizeParameter(label, bool(pattern.search(label)), partial(changed_cell, change))
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.BinOp() as computed):
                is_named, is_once = bool(pattern.search(name)), node in tree.body
                # what it is now, or what it was computed to be
                if (is_named and _computed(computed, names) == value) or (is_once and _is(value, names.get(name))):
                    yield SizeParameter(name, is_named, override_assigned(node))


def _is(value: int, other: Any) -> bool:
    return type(other) is int and other == value


def leading_names(tree: ast.Module) -> set[str]:
    """The variables that stand first in shapes, as a batch does, whatever it is called: ``torch.rand(N_RAYS, 3)``."""
    return {one.id for one in _leading(tree) if isinstance(one, ast.Name)}


def _leading(tree: ast.Module) -> list[ast.expr]:
    parts = [node.elts[:1] for node in ast.walk(tree) if isinstance(node, (ast.Tuple, ast.List))]
    parts += [node.args[:1] for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [one for part in parts for one in part]


def _shapes(tree: ast.Module, what: str, value: int) -> Iterator[SizeParameter]:
    """One size in several shapes, such as those of inputs and labels: a batch stands first in each."""
    constants = [one for one in _leading(tree) if isinstance(one, ast.Constant)]
    firsts = [one for one in constants if type(one.value) is int and one.value == value]
    if what == "batch" and len(firsts) > 1:
        yield SizeParameter(str(value), False, override_literals(firsts))


def _pictures(tree: ast.Module, names: Mapping[str, Any], value: int) -> Iterator[SizeParameter]:
    """The side of pictures, as a pair in what others hold, or twice in a row in the cell."""
    for path, holder, key in pairs_held(names, value):
        override = override_item(key, None if holder is names else holder) if isinstance(holder, dict) else None
        override = override or partial(set_for_a_while, holder, key)
        yield SizeParameter(path, True, partial(as_pair, override), path, is_pair=True)
    if written := squares(tree, value):
        yield SizeParameter(str(value), False, override_literals(written))


def _strides(tree: ast.Module, value: int) -> Iterator[SizeParameter]:
    """The number by which a loop goes through its data: ``for i in range(0, n, 64): x[i : i + 64]``."""
    for steps in _steps(tree):
        sizes = [one for one in steps if isinstance(one, ast.Constant)]
        if len(sizes) == len(steps) and all(one.value == value for one in sizes):
            yield SizeParameter(str(value), False, override_literals(sizes))


def _steps(tree: ast.Module) -> Iterator[list[ast.expr]]:
    """Where loops say by how much they go through their data: the step, and what ends the slices."""
    for node in ast.walk(tree):
        through = [node] if isinstance(node, ast.For) else getattr(node, "generators", [])
        for one in through:
            match one.target, one.iter:
                case ast.Name(id=name), ast.Call(func=ast.Name(id="range"), args=[_, _, step]):
                    uppers = [inside.upper for inside in ast.walk(node) if isinstance(inside, ast.Slice)]
                    ends = [each for each in uppers if isinstance(each, ast.BinOp) and ast.unparse(each.left) == name]
                    if ends:
                        yield [step, *(each.right for each in ends)]


def _pattern(tree: ast.Module, what: str) -> re.Pattern[str]:
    """What a name of such a size looks like; a batch is also what a loop goes through its data by."""
    steps = [{ast.unparse(one) for one in parts} for parts in _steps(tree)] if what == "batch" else []
    names = sorted(name for one in steps if len(one) == 1 for name in one if name.isidentifier())
    return re.compile("|".join((NAMES[what].pattern, *(f"^{name}$" for name in names))), re.IGNORECASE)


def _in_functions(tree: ast.Module, names: Mapping[str, Any], what: str, value: int) -> Iterator[SizeParameter]:
    """Numbers in functions of other cells that the cell runs: they come into it as they are then."""
    for one in called_in(tree, names):
        if is_cell(one.file) and names.get(one.definition.name) is one.function:
            inside = ast.Module([one.definition], [])
            named = (each for each in _literals(inside, _pattern(inside, what), value) if each.is_named)
            for each in (*named, *(_strides(inside, value) if what == "batch" else ())):
                yield replace(each, override=partial(defined_in, one.definition, each.override))


def find_accumulation(tree: ast.Module, names: Mapping[str, Any], value: int) -> SizeParameter | None:
    """The parameter for batches per step: by its name, or as the number that the loop divides by."""
    named = [one for one in find_size_parameters(tree, names, "accumulation", value) if one.is_named]
    named += _of_accelerators(names, value)
    if named:
        return named[0]
    divisions = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp)]
    moduli = {ast.unparse(node.right) for node in divisions if isinstance(node.op, ast.Mod)}
    divisors = [node.right for node in divisions if isinstance(node.op, (ast.Mod, ast.Div))]
    literals = [one for one in divisors if isinstance(one, ast.Constant) and one.value == value]
    if literals and str(value) in moduli:
        return SizeParameter(str(value), False, override_literals(literals))
    return next((one for one in _variables(tree, names, re.compile(""), value) if one.label in moduli), None)


def _of_accelerators(names: Mapping[str, Any], value: int) -> Iterator[SizeParameter]:
    """Those of ``Accelerator``s that earlier cells made."""
    setting = "gradient_accumulation_steps"
    for name, one in list(names.items()):
        if type(one).__module__ == "accelerate.accelerator" and getattr(one, setting, None) == value:
            yield SizeParameter(setting, True, partial(set_for_a_while, one, setting), f"{name}.{setting}")


def _labelled(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """(name, value) pairs in a node: keywords, assignments, defaults; other values without a name."""
    if isinstance(node, ast.Call):
        option = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
        is_option = isinstance(option, str) and option.startswith("--")  # argparse: the default of an option
        labels = ((str(option) if is_option and one.arg == "default" else one.arg, one) for one in node.keywords)
        yield from ((label or "", one.value) for label, one in labels)
        yield from (("", argument) for argument in node.args)
    elif isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets]
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs += zip(target.elts, node.value.elts, strict=False)
        yield from ((label, item) for one, item in pairs for label in _names_of(one))
    elif isinstance(node, ast.Dict):
        keys = (key.value if isinstance(key, ast.Constant) else "" for key in node.keys)
        yield from ((str(key), item) for key, item in zip(keys, node.values, strict=True))
    elif isinstance(node, (ast.Tuple, ast.List)):
        yield from (("", item) for item in node.elts)
    elif isinstance(node, ast.arguments):
        arguments = [*node.posonlyargs, *node.args]
        defaults = node.defaults
        yield from ((a.arg, d) for a, d in zip(arguments[-len(defaults) or len(arguments) :], defaults, strict=False))


def _names_of(target: ast.expr) -> Iterator[str]:
    """The name of what is assigned: a variable, an attribute or an entry."""
    match target:
        case ast.Name(name) | ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(str(name))):
            yield name


def _variables(
    tree: ast.Module, names: Mapping[str, Any], pattern: re.Pattern[str], value: int
) -> Iterator[SizeParameter]:
    """Variables that earlier cells set, but for the place where others split data: ``rows[:n]``, ``rows[n:]``."""
    slices = [node for node in ast.walk(tree) if isinstance(node, ast.Slice)]
    splits = {ast.unparse(one.lower) for one in slices if one.lower is not None and one.upper is None}
    assigned = bound_in(tree)
    for name, current in names.items():
        if type(current) is int and current == value and name not in assigned and not name.startswith("_"):
            is_named = bool(pattern.search(name))
            if is_named or name not in splits:
                yield SizeParameter(name, is_named, override_item(name), name)


def _defaults(
    tree: ast.Module, names: Mapping[str, Any], pattern: re.Pattern[str], value: int
) -> Iterator[SizeParameter]:
    """Default arguments of the user's functions and classes, overridden in the cell's calls; others by name."""
    for name, made in names.items():
        function = made.__init__ if inspect.isclass(made) and _is_users(made) else made
        if not inspect.isfunction(function) or not function.__defaults__:
            continue
        parameters = [p.name for p in inspect.signature(function).parameters.values() if p.default is not p.empty]
        for position, (parameter, default) in enumerate(zip(parameters, function.__defaults__, strict=False)):
            calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call) and ast.unparse(one.func) == name]
            is_named = bool(pattern.search(parameter))
            is_possible = calls or (is_named and function is made)  # objects of earlier cells have their own
            if type(default) is int and default == value and is_possible:
                override = override_in_calls(calls, parameter) if calls else override_default(function, position)
                yield SizeParameter(parameter, is_named, override)


def _given(tree: ast.Module, names: Mapping[str, Any], pattern: re.Pattern[str], value: int) -> Iterator[SizeParameter]:
    """What the cell gives to arguments of the user's functions, named as they are there: ``train(4 * batch)``."""
    for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
        function = names.get(call.func.id) if isinstance(call.func, ast.Name) else None
        if not inspect.isfunction(function) or any(isinstance(one, ast.Starred) for one in call.args):
            continue
        given = dict(zip(inspect.signature(function).parameters, call.args, strict=False))
        given |= {one.arg: one.value for one in call.keywords if one.arg}
        for name, argument in given.items():
            is_literal = isinstance(argument, ast.Constant) and argument not in call.args
            if pattern.search(name) and not is_literal and _computed(argument, names) == value:
                yield SizeParameter(name, True, override_argument(call, argument))


def _computed(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of a number or of a product, quotient or sum of numbers and names; None of other code."""
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.BinOp(left=left, right=right, op=op) if type(op) in _ARITHMETIC:
            first, second = (
                names.get(one.id) if isinstance(one, ast.Name) else _computed(one, names) for one in (left, right)
            )
            if not (isinstance(first, int) and isinstance(second, int) and second):
                return None
            return _ARITHMETIC[type(op)](first, second)
    return None


def _attributes(names: Mapping[str, Any], pattern: re.Pattern[str], value: int) -> Iterator[SizeParameter]:
    """Settings in configuration objects and dictionaries, in classes, and the batch size of data loaders."""
    held = {name: one for name, one in names.items() if not name.startswith("_") and name != "Out"}  # IPython's results
    for name, holder in held.items():
        yield from _of_loader(name, holder, pattern, value)
        if not (_is_loader(holder) or inspect.isclass(holder) or inspect.ismodule(holder)):
            yield from _settings(name, holder, pattern, value, _DEEPEST)
    for name, holder in sorted(held.items(), key=lambda one: inspect.isclass(one[1])):
        yield from _of_class(name, holder, pattern, value)


def _of_class(label: str, holder: Any, pattern: re.Pattern[str], value: int) -> Iterator[SizeParameter]:
    """Settings that a class of the user's has, or that of an object: ``class CFG: batch_size = 8``."""
    own = () if inspect.isclass(holder) else getattr(holder, "__dict__", ())
    for kind in (holder if inspect.isclass(holder) else type(holder)).__mro__:
        given = getattr(kind, "__dataclass_fields__", ())  # each object of it has its own
        for key, one in list(vars(kind).items()) if _is_users(kind) else ():
            if type(one) is int and one == value and pattern.search(key) and key not in own and key not in given:
                yield SizeParameter(f"{label}.{key}", True, partial(set_for_a_while, kind, key), f"{label}.{key}")


def _is_users(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is None or is_users_file(file)


def _is_loader(value: Any) -> bool:
    return any(kind.__module__ == "torch.utils.data.dataloader" for kind in type(value).__mro__)


def _of_loader(label: str, holder: Any, pattern: re.Pattern[str], value: int) -> Iterator[SizeParameter]:
    sampler = getattr(holder, "batch_sampler", None) if pattern.search("batch_size") and _is_loader(holder) else None
    if getattr(sampler, "batch_size", None) == value:
        target = f"{label}.batch_sampler.batch_size"  # a loader's own batch_size cannot be set
        yield SizeParameter("batch_size", True, override_item("batch_size", vars(sampler)), target)


def _wholes(tree: ast.Module, names: Mapping[str, Any], value: int) -> Iterator[SizeParameter]:
    """Calls of models in the cell with all ``value`` rows of tensors at once, which may be called with parts."""
    bound = bound_in(tree)
    for holder, key, taken in model_calls(tree, names):
        if "torch" in names and in_rows(taken, names, bound, value, 1):
            in_parts = partial(in_rows, taken, names, bound, value)
            yield SizeParameter("", False, partial(called_in_parts, holder, key, in_parts))


def _settings(label: str, holder: Any, pattern: re.Pattern[str], value: int, depth: int) -> Iterator[SizeParameter]:
    """Those in a dictionary or in an object's attributes, in the dictionaries and plain objects in it, and loaders."""
    is_dict = isinstance(holder, dict)
    held: dict[Any, Any] = holder if is_dict else getattr(holder, "__dict__", {})
    for key, one in list(held.items()):
        name = str(key) if isinstance(key, (str, int)) else "_"  # a tensor's own words would be computed on the device
        if name.startswith("_"):
            continue
        path = f"{label}[{key!r}]" if is_dict else f"{label}.{key}"
        yield from _of_loader(path, one, pattern, value)
        if type(one) is int and one == value and pattern.search(name):
            yield SizeParameter(path, True, override_item(key, held), path)
        elif depth and (isinstance(one, (dict, *_PLAIN)) or (is_dataclass(one) and not isinstance(one, type))):
            yield from _settings(path, one, pattern, value, depth - 1)
