"""The user's own code in another precision: training under autocast, with models and losses inside, backwards outside
and float16's losses scaled; float32 in place of float64."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from oom_magic.explain.live.called import NOTHING, object_of
from oom_magic.explain.remedies.own_code.accumulation import trainers_of_lightning
from oom_magic.explain.remedies.own_code.loops import (
    Block,
    Code,
    arguments_of,
    backwards,
    called_alone,
    copied,
    exchanged,
    is_module,
    is_update,
    runs_model,
    trained_in,
    training_block,
    training_blocks,
)
from oom_magic.explain.syntax import blocks_in, expression, read_before_bound

_MOST_BACKWARDS = 4  # of a turn, such as those of a generator and a discriminator
_TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16"}
_CLIPS = ("clip_grad_norm_", "clip_grad_value_")
_NO_OPTIMIZER = re.compile(r"sched|warm|prof|lr_|env|ema|accelerator|scaler", re.IGNORECASE)  # but has a step
_WIDE = {"float64": "float32", "double": "float"}


def under_autocast(tree: Code, names: Mapping[str, Any], dtype: str) -> str:
    """The training loop or function of ``tree`` in mixed precision, "bf16" or "fp16"; "" where it has no known form.

    ``names`` is what the code sees: models among them decide what runs under autocast.
    """
    block, given = _trained(tree), {*arguments_of(tree), *trained_in(tree)}
    if block is None:
        return ""
    covered: list[bool | None] = []
    for part in [block] if isinstance(block, ast.Module) else training_blocks(block):
        walked = [at for at, one in enumerate(part.body) if list(backwards([one])) or training_blocks(one)]
        for backward in reversed(list(backwards(part.body))):
            first = max((at + 1 for at in walked if at < part.body.index(backward)), default=0)
            covered.append(_cover(part.body, first, backward, names, given, _TORCH_NAMES[dtype]))
    is_possible = None not in covered and any(covered)
    if not is_possible or (dtype == "fp16" and not _scaled(block, names)):
        return ""
    code = ast.unparse(ast.fix_missing_locations(block))
    if isinstance(block, ast.Module):
        code = exchanged(list(map(ast.unparse, tree.body)), list(map(ast.unparse, block.body)))
    return f'scaler = torch.amp.GradScaler("cuda")   # once, before the first step\n{code}' if dtype == "fp16" else code


def _trained(tree: Code) -> Block | ast.Module | None:
    """The one loop or function of code that trains, copied, or a cell whose step stands outside any."""
    found = training_block(tree, most=_MOST_BACKWARDS)
    if found is None:
        return ast.parse(ast.unparse(tree)) if isinstance(tree, ast.Module) and not training_blocks(tree) else None
    return copied(found)


def in_precision_of_trainer(tree: Code, names: Mapping[str, Any], dtype: str) -> str:
    """The statement that makes the trainer of Lightning's, in mixed precision; "" where ``tree`` has none, or its
    precision is set."""
    made = ast.parse(ast.unparse(tree))
    trainers = trainers_of_lightning(made, names)
    if len(trainers) != 1 or any(one.arg in (None, "precision", "plugins") for one in trainers[0].keywords):
        return ""
    trainers[0].keywords.append(ast.keyword("precision", ast.Constant(f"{dtype.removeprefix('fp')}-mixed")))
    simple = (one for one in ast.walk(made) if isinstance(one, (ast.Assign, ast.Expr, ast.Return)))
    return ast.unparse(next(one for one in simple if trainers[0] in ast.walk(one)))


def _cover(
    body: list[ast.stmt],
    first: int,
    backward: ast.Expr,
    names: Mapping[str, Any],
    given: Collection[str],
    dtype: str,
) -> bool | None:
    """Put what leads to a backward, from the first call of a model on, under autocast; False where there is no such
    call behind ``first``, None where updates lie between."""
    end = body.index(backward)
    made = range(first, end + 1)
    start = next((at for at in made if not is_update(body[at]) and runs_model(body[at], names, given)), None)
    if start is None:
        return False
    # Gradients may be cleared right before the backward.
    end = next((at for at in range(start, end) if all(map(is_update, body[at:end]))), end)
    covered = body[start:end]
    if not covered:  # model(x).sum().backward()
        call = backward.value
        assert isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        covered = [ast.Assign([ast.Name("loss")], call.func.value)]
        call.func.value = ast.Name("loss")
    cleared = [one for one in covered if called_alone(one) == "zero_grad"]  # which no forward reads
    covered = [one for one in covered if one not in cleared]
    if any(map(is_update, covered)):
        return None
    context = ast.parse(f'with torch.autocast("cuda", dtype=torch.{dtype}):\n    pass').body[0]
    assert isinstance(context, ast.With)
    context.body = covered
    _Switched(names, given).generic_visit(context)
    body[start:end] = [*cleared, context]
    return True


class _Switched(ast.NodeTransformer):
    """Takes away an autocast of the user's around a model, which is switched off: ``enabled=use_amp``."""

    def __init__(self, names: Mapping[str, Any], given: Collection[str]) -> None:
        self._names, self._given = names, given

    def visit_With(self, node: ast.With) -> ast.With | list[ast.stmt]:
        """The statement without it; what it stands around, if nothing else is left of it."""
        self.generic_visit(node)
        if runs_model(node, self._names, self._given):
            node.items = [one for one in node.items if not _is_autocast(one.context_expr)]
        return node if node.items else node.body


def _is_autocast(context: ast.expr) -> bool:
    return isinstance(context, ast.Call) and ast.unparse(context.func).rpartition(".")[2] == "autocast"


def _scaled(block: Block | ast.Module, names: Mapping[str, Any]) -> bool:
    """Let ``scaler`` scale each loss, and step the optimizers; whether that was possible.

    As "Automatic Mixed Precision examples" of PyTorch's notes has it: gradients are unscaled before they are clipped,
    and the scale is updated once, behind the last step.
    """
    steps = list(_steps(block, names))
    bodies = {id(body) for body, _ in steps}
    clips = [one for body in blocks_in(block) for one in body if called_alone(one) in _CLIPS]
    reads_gradients = any(
        isinstance(node, ast.Attribute) and node.attr in ("grad", "closure") for node in ast.walk(block)
    )
    if len(bodies) != 1 or reads_gradients or (clips and len(steps) > 1):
        return False
    for body in blocks_in(block):
        for backward in backwards(body):
            call: Any = backward.value
            loss = ast.unparse(call.func.value)
            if loss.endswith("accelerator"):
                return False
            call.func.value = expression(f"scaler.scale({loss})")
    body = steps[0][0]
    for _, step in steps:
        call = step.value
        owner = ast.unparse(call.func.value)
        if clips:
            clipping = next((each for each in blocks_in(block) if clips[0] in each), body)
            clipping.insert(clipping.index(clips[0]), ast.parse(f"scaler.unscale_({owner})").body[0])
        step.value = expression(f"scaler.step({owner})")
    body.insert(body.index(steps[-1][1]) + 1, ast.parse("scaler.update()").body[0])
    return True


def _steps(block: Block | ast.Module, names: Mapping[str, Any]) -> Iterator[tuple[list[ast.stmt], Any]]:
    """The statements that step an optimizer, each with the body that it stands in."""
    for body in blocks_in(block):
        for one in body:
            match one:
                case ast.Expr(ast.Call(ast.Attribute(owner, "step"), [], [])) if _is_optimizer(owner, names):
                    yield body, one


def _is_optimizer(owner: ast.expr, names: Mapping[str, Any]) -> bool:
    """Whether it is one, or, where that is not known, is not called like something else that has a step."""
    value = object_of(owner, names)
    if value is NOTHING:
        return _NO_OPTIMIZER.search(ast.unparse(owner)) is None
    return any(kind.__module__ == "torch.optim.optimizer" for kind in type(value).__mro__)


def in_single_precision(tree: ast.Module, names: Mapping[str, Any]) -> str:
    """The statements of a cell that name float64 with float32 in its place, behind those that cast what it reads of
    ``names``: the default type, modules, tensors; "" where there is nothing of either."""
    changed = [made for made in map(_narrowed, tree.body) if made]
    return "\n".join([*_casts(tree, names), *changed])


@contextmanager
def single_precision(tree: ast.Module, names: Mapping[str, Any]) -> Iterator[None]:
    """The same written into the cell, for a while."""
    before = list(tree.body)
    casts = ast.parse("\n".join(_casts(tree, names))).body
    narrowed = [ast.parse(_narrowed(one)).body or [one] for one in before]
    tree.body[:] = [ast.copy_location(one, before[0]) for one in casts]
    for old, new in zip(before, narrowed, strict=True):
        tree.body += [one if one is old else ast.copy_location(one, old) for one in new]
    ast.fix_missing_locations(tree)
    try:
        yield
    finally:
        tree.body[:] = before


def _casts(tree: ast.Module, names: Mapping[str, Any]) -> list[str]:
    """The statements that cast what earlier cells made and the cell reads."""
    torch = sys.modules["torch"]
    read = read_before_bound(tree)
    sees = {name: value for name, value in names.items() if name in read}
    modules = [name for name, value in sees.items() if is_module(value) and _is_wide(value.parameters())]
    tensors = [name for name, value in sees.items() if isinstance(value, torch.Tensor) and _is_wide([value])]
    before = [f"{name} = {name}.float()   # before the optimizer is created" for name in modules]
    if tensors:
        before.append(f"{', '.join(tensors)} = {', '.join(f'{name}.float()' for name in tensors)}")
    if torch.get_default_dtype() is torch.float64:
        before.insert(0, "torch.set_default_dtype(torch.float32)")
    return before


def _is_wide(tensors: Any) -> bool:
    return any(one.dtype is sys.modules["torch"].float64 for one in tensors)


def _narrowed(statement: ast.stmt) -> str:
    """A statement with float32 in place of float64; "" where it names none."""
    made = ast.parse(ast.unparse(statement)).body[0]
    found = False
    for node in ast.walk(made):
        if isinstance(node, ast.Attribute) and node.attr in _WIDE:
            node.attr, found = _WIDE[node.attr], True
    return ast.unparse(made) if found else ""
