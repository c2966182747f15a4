"""A line that makes a name grow, rewritten: it keeps numbers, or tensors without graphs or on the host."""

from __future__ import annotations

import ast
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from oom_magic.explain.live.called import object_of
from oom_magic.explain.remedies.own_code.loops import copied
from oom_magic.explain.syntax import expression

if TYPE_CHECKING:
    from oom_magic.measure.holders.inventory import HolderSize

_LEAVING = ("cpu", "item", "tolist", "numpy", "to")  # methods after which a tensor is not on the device, or may not be


def cut_off(statement: ast.stmt, name: str, value: Any) -> str:
    """The statement with the state cut off from the turn before, whose first one may be None."""
    new = copied(statement)
    given = f"{name}.detach()" if is_tensor(value) else f"[one.detach() for one in {name}]"
    call: Any = vars(new)["value"]
    for at, one in enumerate(call.args):
        if ast.unparse(one) == name:
            call.args[at] = expression(f"{name} if {name} is None else {given}")
    return ast.unparse(new)


def added_by(statement: ast.stmt) -> ast.expr | None:
    """The expression that a statement adds to a container or a sum."""
    match statement:
        case ast.Expr(value=ast.Call(args=[*_, added])):
            return added
        case ast.AugAssign(value=added):
            return added
        case ast.Assign(targets=[target], value=ast.BinOp(left=left, right=right) as whole) if names_itself(
            target, whole
        ):
            return right if names_itself(target, left) else left
        case ast.Assign(targets=[ast.Subscript()], value=added):
            return added
    return None


def joined_on_host(statement: ast.Assign, has_graph: bool) -> str:
    """``kept = torch.cat([kept, out])`` with all parts on the host; "" where they are not listed."""
    new: Any = copied(statement)
    parts = getattr(new.value.args[0], "elts", []) if new.value.args else []
    ending = "detach().cpu()" if has_graph else "cpu()"
    for at, part in enumerate(parts):
        parts[at] = expression(f"{ast.unparse(part)}.{ending}")
    return ast.unparse(new) if parts else ""


def collected_on_host(statement: ast.stmt, names: Mapping[str, Any]) -> str:
    """The statement with what its comprehensions collect of a module's calls on the host; "" where there is none."""
    new = copied(statement)
    found = [node for node in ast.walk(new) if isinstance(node, (ast.ListComp, ast.GeneratorExp))]
    kept = [one for one in found if _is_of_module(one.elt, names)]
    for one in kept:
        one.elt = expression(f"{ast.unparse(one.elt)}.cpu()")
    return ast.unparse(new) if kept and not isinstance(statement, (ast.For, ast.While, ast.With)) else ""


def _is_of_module(node: ast.expr, names: Mapping[str, Any]) -> bool:
    """Whether it is the result of a module's call, a part of it, or what a method that leaves it where it is makes."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Call() | ast.Subscript() | ast.Attribute() as owner, attr=attr)) if (
            _is_of_module(owner, names)
        ):
            return attr not in _LEAVING
        case ast.Call(func=called):
            return isinstance(object_of(called, names), sys.modules["torch"].nn.Module)
        case ast.Attribute(value=owner) | ast.Subscript(value=owner):
            return _is_of_module(owner, names)
    return False


def newest_of(growth_code: str, name: str, rows: int) -> str:
    """``queue = torch.cat([queue, new])`` with the newest rows only; "" where it joins along another dimension."""
    statement: Any = ast.parse(growth_code).body[0]
    call = statement.value
    parts = [ast.unparse(one) for one in getattr(call.args[0], "elts", [])] if call.args else []
    others = [*call.args[1:], *(one.value for one in call.keywords)]
    if name not in (*parts[:1], *parts[-1:]) or any(ast.unparse(one) != "0" for one in others):
        return ""
    return f"{growth_code}[-{rows}:]" if parts[0] == name else f"{growth_code}[:{rows}]"


def fixed_line(
    statement: ast.stmt, holder: HolderSize, names: Mapping[str, Any], value: Any, is_read_as_tensors: bool
) -> str:
    """The statement with what it adds to ``value`` as a number, or without its graph and on the host; "" if it is not
    clear how."""
    number = "detach()" if is_read_as_tensors else "item()"
    ending = number if holder.are_numbers and holder.has_graph else "detach().cpu()" if holder.has_graph else "cpu()"
    added = added_by(statement)
    last = last_entry(value)
    last = [last] if ast.unparse(statement).partition("(")[0].endswith(".extend") else last
    ended = None if added is None else _ended(added, ending, names, last)
    if added is None or ended is None:
        return ""
    text, whole = ast.unparse(added), ast.unparse(statement)
    at = whole.rindex(text)
    kept = [*_optimizers_in(added, last), *_optimizers_of(statement, added, last)] if ".cpu()" in ended else []
    following = (f"; {one}.load_state_dict({one}.state_dict())" for one in kept)  # states go where parameters are
    return "".join([whole[:at], ended, whole[at + len(text) :], *following])


def _optimizers_in(added: ast.expr, value: Any) -> Iterator[str]:
    """The names of the optimizers in the entry that a tuple, a list or a dictionary makes."""
    parts = added.values if isinstance(added, ast.Dict) else getattr(added, "elts", [])
    for part, made in zip(parts, _made_of(parts, {}, value), strict=True):
        if isinstance(part, ast.Name) and isinstance(made, sys.modules["torch"].optim.Optimizer):
            yield part.id


def _optimizers_of(statement: ast.stmt, added: ast.expr, value: Any) -> Iterator[str]:
    """The optimizers in the entry that a call has made, as they are reached in the container."""
    if not isinstance(added, ast.Call):
        return
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner, attr="append"))):
            entry = f"{ast.unparse(owner)}[-1]"
        case ast.Assign(targets=[ast.Subscript() as target]):
            entry = ast.unparse(target)
        case _:
            return
    parts = (
        dict.items(value) if isinstance(value, dict) else enumerate(value if isinstance(value, (list, tuple)) else ())
    )
    for key, one in parts:
        if isinstance(one, sys.modules["torch"].optim.Optimizer):
            yield f"{entry}[{key!r}]"


def last_entry(container: Any) -> Any:
    """The last entry of a list or a dictionary; None for other objects."""
    entries = list(dict.values(container)) if isinstance(container, dict) else container
    return entries[-1] if isinstance(entries, (list, deque)) and entries else None


def holds_modules(entry: Any) -> bool:
    """Whether an entry is or holds a module: that is more than a graph."""
    parts = dict.values(entry) if isinstance(entry, dict) else entry if isinstance(entry, (list, tuple)) else (entry,)
    return any(isinstance(part, sys.modules["torch"].nn.Module) for part in parts)


def _of_each(node: ast.expr, ending: str, value: Any) -> str | None:
    """The code of an expression that makes ``value``, a tuple, a list or a dictionary, with ``ending`` behind each
    tensor in it; None of any other."""
    if not isinstance(node, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)) or "state_dict" in _calls(node):
        return None
    text = ast.unparse(node)
    if isinstance(value, dict) and any(_is_movable(one, ending) for one in dict.values(value)):
        others = (
            ""
            if all(map(is_tensor, dict.values(value)))
            else f' if hasattr(value, "{ending.partition("(")[0]}") else value'
        )
        return f"{{key: value.{ending}{others} for key, value in {text}.items()}}"
    if isinstance(value, (tuple, list)) and value and all(_is_movable(one, ending) for one in value):
        each = f"one.{ending} for one in {text}"
        if isinstance(node, ast.Call) and hasattr(type(value), "_fields"):  # of a namedtuple, by its name
            return f"{ast.unparse(node.func)}._make({each})"
        return f"[{each}]"
    if isinstance(value, (tuple, list)) and all(_is_movable(one, ending) or _is_plain(one) for one in value):
        return f'[one.{ending} if hasattr(one, "cpu") else one for one in {text}]'
    return None


def _ended(node: ast.expr, ending: str, names: Mapping[str, Any], value: Any = None) -> str | None:
    """The code of an expression that made ``value``, with ``ending`` behind each tensor in it; None where it is not
    seen which those are."""
    if not (_is_movable(value, ending) or value is None or isinstance(value, (tuple, list, dict))):
        return None
    match node:
        case ast.Call() if "state_dict" in (calls := _calls(node)) and set(calls) <= {"state_dict", "deepcopy", "copy"}:
            innermost = next(one for one in ast.walk(node) if _calls(one)[:1] == ["state_dict"])
            return f"{{key: value.{ending} for key, value in {ast.unparse(innermost)}.items()}}"
        case ast.Name() | ast.Attribute() | ast.Subscript() | ast.Call():
            return _of_each(node, ending, value) or f"{ast.unparse(node)}.{ending}"
        case ast.IfExp() | ast.BinOp() | ast.UnaryOp() if _is_movable(value, ending):
            return f"({ast.unparse(node)}).{ending}"
        case ast.DictComp(value=part) | ast.ListComp(elt=part):
            inner = _ended(part, ending, names)
            whole, text = ast.unparse(node), ast.unparse(part)
            return None if inner is None else whole.replace(text, inner, 1)
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Dict(values=parts):
            new = copied(node)
            for at, (part, made) in enumerate(zip(parts, _made_of(parts, names, value), strict=True)):
                end = ending if is_tensor(made) else "cpu()"
                if _is_movable(made, end):
                    getattr(new, "values" if isinstance(node, ast.Dict) else "elts")[at] = ast.parse(
                        f"{ast.unparse(part)}.{end}", mode="eval"
                    ).body
            return None if ast.dump(new) == ast.dump(node) else ast.unparse(new)
    return None


def _made_of(parts: list[ast.expr], names: Mapping[str, Any], value: Any) -> list[Any]:
    """What the parts of a tuple, a list or a dictionary stand for: those of ``value``, which it made, else by name."""
    made = list(dict.values(value)) if isinstance(value, dict) else value
    if isinstance(made, (list, tuple)) and len(made) == len(parts):
        return list(made)
    return [object_of(part, names) for part in parts]


def _calls(node: ast.AST) -> list[str]:
    """The function names of nested calls with one argument each, outermost first."""
    if not isinstance(node, ast.Call):
        return []
    name = ast.unparse(node.func).rpartition(".")[2]
    return [name, *(_calls(node.args[0]) if len(node.args) == 1 else [])]


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor."""
    return isinstance(value, sys.modules["torch"].Tensor)


def _is_movable(value: Any, ending: str) -> bool:
    """Whether ``ending`` can be appended to it: a module can be moved to the host like a tensor, but has no graph."""
    return is_tensor(value) or (ending == "cpu()" and isinstance(value, sys.modules["torch"].nn.Module))


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (int, float, str))


def names_itself(target: ast.expr, value: ast.expr) -> bool:
    """Whether an expression reads what it is assigned to."""
    text = ast.unparse(target)
    places = (ast.Name, ast.Attribute, ast.Subscript)
    return any(ast.unparse(node) == text for node in ast.walk(value) if isinstance(node, places))
