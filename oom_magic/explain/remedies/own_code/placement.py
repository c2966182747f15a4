"""The user's own statements that spread a model over processes, with a remedy written into them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from oom_magic.explain.remedies.own_code.models import part_at
from oom_magic.explain.syntax import blocks_in, blocks_of, expression, statements_in

_REPLICATES = ("DistributedDataParallel", "DDP")
_SHARDS = ("fully_shard",)
_DISPATCHES = ("dispatch_model", "from_pretrained")
_CARD = re.compile(r"|\d+|'cuda'|(torch\.device\()?'cuda(:\d+'|', \d+)\)?")  # what .cuda or .to is called with


def own_placement(tree: ast.AST, key: str, values: Mapping[str, Any], chains: Collection[str] = ()) -> str:
    """The statements with a remedy applied; "" where there are none in a known form, or for another remedy.

    ``chains`` are names of sequences of layers, of those that the statements do not make.
    """
    if key == "fully_sharded":
        return _fully_sharded(tree, values.get("path"))
    if key == "fully_sharded_accelerate":
        code = _changed(tree, ("Accelerator",), partial(_set, name="fsdp_plugin", value="plugin"))
        plugin = f"plugin = FullyShardedDataParallelPlugin(\n    {values['plugin']})"
        return code and f"from accelerate import FullyShardedDataParallelPlugin\n{plugin}\n{code}"
    if key == "gradients_in_buckets":
        return _changed(tree, _REPLICATES, partial(_set, name="gradient_as_bucket_view", value="True"))
    if key == "resharded":  # not True, which would free the root's parameters after its forward, too
        return _changed(tree, _SHARDS, partial(_unset, name="reshard_after_forward"))
    if key == "shards_on_host":
        code = _changed(tree, _SHARDS, partial(_set, name="offload_policy", value="CPUOffloadPolicy()"))
        return code and f"from torch.distributed.fsdp import CPUOffloadPolicy\n{code}"
    if key == "balanced_layers":
        if not values["map"]:
            with layers_moved(tree, values["number"], chains) as code:
                return code
        code = _changed(tree, _DISPATCHES, _dispatch_by_name)
        return code and f"device_map = {values['map']}\n{code}"
    return ""


def _fully_sharded(tree: ast.AST, path: str | None) -> str:
    """The model without its wrapper, its blocks (``path`` leads to them) and then the whole sharded."""
    for statement in _statements(tree):
        call = statement.value if isinstance(statement, ast.Assign) else None
        if not (isinstance(call, ast.Call) and _name_of(call) in _REPLICATES and call.args):
            continue
        name, made = ast.unparse(statement.targets[0]), ast.unparse(call.args[0])  # type: ignore[attr-defined]
        lines = ["from torch.distributed.fsdp import fully_shard"]
        if made != name:
            lines.append(f"{name} = {made}   # not {_name_of(call)}")
        if path is not None:
            lines += [f"for block in {part_at(name, path)}:", "    fully_shard(block)"]
        return "\n".join([*lines, f"fully_shard({name})   # before the optimizer is created"])
    return ""


def with_gradient_sync_set(tree: ast.AST) -> str:
    """The loops that accumulate under DDP's ``no_sync()``, as a model of FSDP2 is told so; "" where there are none."""
    lines = []
    for loop in _statements(tree):
        made = _SetsGradientSync().visit(ast.parse(ast.unparse(loop)))
        if isinstance(loop, ast.For) and ast.unparse(made) != ast.unparse(loop):
            lines.append(ast.unparse(ast.fix_missing_locations(made)))
    return "\n".join(lines)


class _SetsGradientSync(ast.NodeTransformer):
    """``set_requires_gradient_sync`` around the body of ``with model.no_sync():``, under a condition or not."""

    def visit_With(self, node: ast.With) -> list[ast.stmt]:
        self.generic_visit(node)
        found = [(item, *_unsynchronized(item.context_expr)) for item in node.items]
        models = [(model, syncs) for _, model, syncs in found if model]
        node.items = [item for item, model, _ in found if not model]
        lines = [f"{model}.set_requires_gradient_sync({syncs})" for model, syncs in models]
        after = [f"{model}.set_requires_gradient_sync(True)" for model, _ in models]
        body: list[ast.stmt] = [node] if node.items else node.body
        return [*ast.parse("\n".join(lines)).body, *body, *ast.parse("\n".join(after)).body]


def _unsynchronized(context: ast.expr) -> tuple[str, str]:
    """Of ``model.no_sync()``, or of that or ``nullcontext()``: the model, and when gradients are reduced; else ""."""
    match context:
        case ast.Call(func=ast.Attribute(value=model, attr="no_sync")):
            return ast.unparse(model), "False"
        case ast.IfExp(test, body, ast.Call() as other) if _name_of(other) == "nullcontext":
            return _unsynchronized(body)[0], ast.unparse(ast.UnaryOp(ast.Not(), test))
        case ast.IfExp(test, ast.Call() as other, body) if _name_of(other) == "nullcontext":
            return _unsynchronized(body)[0], ast.unparse(test)
    return "", ""


def _changed(tree: ast.AST, names: tuple[str, ...], change: Callable[[ast.Call], None]) -> str:
    """The statements that call one of these, each such call changed; "" where that changes none."""
    lines = []
    for statement in _statements(tree):
        before = ast.unparse(statement)
        made = ast.parse(before)
        for node in ast.walk(made):
            if isinstance(node, ast.Call) and _name_of(node) in names:
                change(node)
        if ast.unparse(made) != before:
            lines.append(ast.unparse(made))
    return "\n".join(lines)


def _set(call: ast.Call, name: str, value: str) -> None:
    others = [one for one in call.keywords if one.arg != name]
    call.keywords = [*others, ast.keyword(name, expression(value))]


def _unset(call: ast.Call, name: str) -> None:
    call.keywords = [one for one in call.keywords if one.arg != name]


def _dispatch_by_name(call: ast.Call) -> None:
    """Take ``device_map`` from that name; a call that says nothing of devices stays, as a tokenizer's."""
    is_dispatch, given = _name_of(call) == "dispatch_model", {one.arg for one in call.keywords}
    if is_dispatch or "device_map" in given:
        call.args = call.args[:1] if is_dispatch else call.args
        _unset(call, "max_memory")
        _set(call, "device_map", "device_map")


@contextmanager
def layers_moved(tree: ast.AST, number: int, chains: Collection[str] = ()) -> Iterator[str]:
    """A tree whose statements such as ``first = nn.Sequential(...).to("cuda:0")`` share all ``number`` layers equally.

    It is so for a while. Yields the statements as code; "" where there are none in one block. ``chains`` are names of
    sequences of layers that it does not make.
    """
    known = {*chains, *_made_chains(tree)}
    for block in blocks_in(tree):
        placed = {at: found for at, one in enumerate(block) if (found := _placed(one, known))}
        parts = [part for found in placed.values() for part in found]
        if len({part.move for part in parts}) > 1:
            break
    else:
        yield ""
        return
    bounds = [number * at // len(parts) for at in range(len(parts) + 1)]
    lines = [f"layers = [{', '.join(f'*{part.name}' for part in parts)}]"]
    for part, start, end in zip(parts, bounds, bounds[1:], strict=False):
        lines.append(f"{part.name} = type({part.name})(*layers[{start}:{end}]){part.move}")
    instead = {at: [f"{part.name} = {part.made}" for part in found if part.made] for at, found in placed.items()}
    instead[max(placed)] += lines
    before = block[:]
    block.clear()
    for at, one in enumerate(before):
        new = ast.parse("\n".join(instead[at])).body if at in instead else [one]
        block += [ast.fix_missing_locations(ast.copy_location(made, one)) for made in new]
    try:
        yield "\n".join(line for new in instead.values() for line in new)
    finally:
        block[:] = before


@dataclass(frozen=True)
class _Part:
    """Layers in sequence on a card: their ``name``, what makes them ("" where they have it already) and the move."""

    name: str
    made: str
    move: str


def _placed(statement: ast.stmt, chains: Collection[str]) -> list[_Part]:
    """The sequences of layers that a statement moves to a card."""
    pairs: list[tuple[ast.expr | None, ast.expr]] = []
    match statement:
        case ast.Expr(value):
            pairs = [(None, value)]
        case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)) if len(targets) == len(values):
            pairs = list(zip(targets, values, strict=True))
        case ast.Assign([named], value):
            pairs = [(named, value)]
    found = []
    for target, moved in pairs:
        match moved:
            case ast.Call(ast.Attribute(inner, "to" | "cuda" as method), arguments, []):
                made, card = ast.unparse(inner), ", ".join(map(ast.unparse, arguments))
                name = made if target is None else ast.unparse(target)
                if _CARD.fullmatch(card) and (made in chains or _is_chain(inner)):
                    found.append(_Part(name, made if made != name else "", f".{method}({card})"))
    return found if len(found) == len(pairs) else []


def _is_chain(node: ast.expr) -> bool:
    """Whether an expression is a sequence of layers, or several of them."""
    match node:
        case ast.Tuple(parts):
            return all(map(_is_chain, parts))
        case ast.GeneratorExp(part) | ast.ListComp(part):
            return _is_chain(part)
    return isinstance(node, ast.Call) and _name_of(node) == "Sequential"


def _made_chains(tree: ast.AST) -> Iterator[str]:
    """The names that are given to sequences of layers."""
    for one in ast.walk(tree):
        if isinstance(one, ast.Assign) and _is_chain(one.value):
            yield from map(ast.unparse, (node for target in one.targets for node in ast.walk(target)))


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Assignments, calls and loops, outermost first, of functions and blocks too."""
    inside = (one for block in blocks_of(tree) for one in statements_in(block, (ast.For, ast.While)))
    yield from (one for one in inside if isinstance(one, (ast.Assign, ast.Expr, ast.For)))


def _name_of(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]
