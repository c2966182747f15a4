"""A cell and the functions that it runs, with a remedy written into them."""

from __future__ import annotations

import ast
import contextlib
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from oom_magic.explain.live.called import Called, called_in, methods_given
from oom_magic.explain.live.mending import mended
from oom_magic.explain.remedies.code import IN_A_LOOP, code_for, is_placed, lacks_names, placed_after, rebinds_model
from oom_magic.explain.remedies.own_code.accumulation import (
    ACCUMULATED_BATCHES,
    TRAINER_LIMITS,
    accumulated_by_trainer,
    accumulating,
    accumulating_step,
    is_lightnings_trainer,
    with_more_batches,
)
from oom_magic.explain.remedies.own_code.drawn_edges import with_edges_drawn
from oom_magic.explain.remedies.own_code.gradients_off import (
    evaluations_without_gradients,
    frozen_in_function,
    frozen_without_gradients,
    lines_without_gradients,
    without_gradients,
)
from oom_magic.explain.remedies.own_code.loops import (
    Code,
    copied,
    is_module,
    loop_of,
    shown,
    training_block,
    training_loops,
    with_outputs_dropped,
)
from oom_magic.explain.remedies.own_code.optimizers import (
    OPTIMIZERS,
    optimizer_of_adapters,
    with_optimizer,
    with_optimizer_exchanged,
)
from oom_magic.explain.remedies.own_code.placement import layers_moved, own_placement, with_gradient_sync_set
from oom_magic.explain.remedies.own_code.precision import in_precision_of_trainer, single_precision, under_autocast
from oom_magic.explain.remedies.own_code.rows.steps import given_rows, in_parts
from oom_magic.explain.remedies.own_code.waiting.data_on_host import BATCHES_MOVED, DataKept, written_so
from oom_magic.explain.syntax import bound_in
from oom_magic.user_code import Lines, is_cell

if TYPE_CHECKING:
    from oom_magic.explain.live.growth import Growth
    from oom_magic.explain.remedies.sizes.parameters import SizeParameter
    from oom_magic.predict.what_if.change import Change

_DEFINES = ("def ", "class ", "async def ", "@")
_ADAPTERS = ("lora", "qlora")
_SHORTER_ROWS = """\
{trainer}.data_collator = lambda rows, collate={trainer}.data_collator: {{
    name: value[:, :{after}] if value.dim() > 1 else value
    for name, value in collate(rows).items()}}"""
KEEP_CLASSES = """\
def keep_classes(logits, labels):
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)"""


def own_code(tree: Code, names: Mapping[str, Any], key: str, values: Mapping[str, Any]) -> str:
    """The statements of a cell or function with a remedy applied; "" where it does not contain them in a known form.

    ``names`` is what the code sees.
    """
    if key in OPTIMIZERS:
        return with_optimizer(tree, names, key)
    if key == "no_grad":
        return without_gradients(tree) if isinstance(tree, ast.Module) else ""
    if key == "drawn_edges":
        return with_edges_drawn(tree, names, values["parts"], values["edges"])
    if key == "mixed_precision":
        own = under_autocast(tree, names, values["dtype"])
        return own or in_precision_of_trainer(tree, names, values["dtype"])
    found = training_block(tree) if key == "dropped_outputs" else None
    return "" if found is None else with_outputs_dropped(copied(found))


@contextlib.contextmanager
def rewritten_cell(
    tree: ast.Module,
    names: dict[str, Any],
    overridden: Mapping[SizeParameter, int],
    growth: Growth | None,
    written: Sequence[Change],
    kept: DataKept | None,
) -> Iterator[None]:
    """A cell and its names with other sizes, a fixed line and changes that are written into it, for a while; ``kept``
    is the cell with its data on the host."""
    with contextlib.ExitStack() as stack:
        if growth is not None:
            stack.enter_context(mended(growth, tree, names))
        for parameter, value in overridden.items():
            stack.enter_context(parameter.override(tree, names, value))
        for change in written:
            if change.written_as == BATCHES_MOVED and kept is not None:
                stack.enter_context(written_so(kept, tree))
            elif change.written_as:
                stack.enter_context(single_precision(tree, names))
            else:
                stack.enter_context(layers_moved(tree, change.values["number"], chains_in(names)))
        yield


class CodeWriter:
    """Writes remedies into a cell that sees ``names``; ``arguments`` is the command line of the script that it runs."""

    def __init__(self, tree: ast.Module, names: dict[str, Any], arguments: list[str]) -> None:
        self._tree, self._names, self._arguments = tree, names, arguments

    def rewritten(self, rewrite: Callable[[Code, Mapping[str, Any]], str]) -> str:
        """What ``rewrite`` makes of the cell, else of the first function that it runs of which it makes anything.

        It gets each with the names that are seen there.
        """
        return self._rewritten_of(called_in(self._tree, self._names), rewrite)

    def _rewritten_of(self, called: Iterable[Called], rewrite: Callable[[Code, Mapping[str, Any]], str]) -> str:
        code = rewrite(self._tree, self._names)
        for one in () if code else called:
            code = rewrite(one.definition, one.names)
            if code:
                return f"# in {one.definition.name}:\n{code}"
        return code

    def in_parts(self, rows: Collection[str], after: int, number: int) -> str:
        """The step of the cell, or of a function that it gives ``rows`` to, on ``number`` parts of them."""
        given = {*rows, *given_rows(self._tree, self._names, rows)}
        return self.rewritten(
            lambda code, _: in_parts(code, rows if isinstance(code, ast.Module) else sorted(given), after, number)
        )

    def beside(self, key: str, values: Mapping[str, Any], names: Mapping[str, str]) -> str | None:
        """The code of a remedy that is not written into the user's statements, with the model of ``names``; None where
        its template applies, "" where nothing does."""
        if key in OPTIMIZERS:
            exchanged = with_optimizer_exchanged(self._tree, self._names, key, names.get("model", ""))
            given = (
                (one, with_optimizer(one.definition, one.names, key)) for one in methods_given(self._tree, self._names)
            )
            return exchanged or next((f"# in {one.place}:\n{code}" for one, code in given if code), "")
        if key in IN_A_LOOP or lacks_names(key, names):
            return ""
        model = names.get("model", "")
        more = optimizer_of_adapters(self._tree, self._names, model) if key in _ADAPTERS and model else ""
        if more is None:
            return ""
        root = model.partition(".")[0]
        is_made_here = root in bound_in(self._tree)
        if not rebinds_model(key) or not (is_made_here or more):
            return None
        code = "\n".join(filter(None, (code_for(key, "plain", {**names, **values})[0], more)))
        return placed_after(root, code) if is_made_here and not is_placed(code) else code

    def placed(self, key: str, values: Mapping[str, Any]) -> str:
        """The statements that spread the model over processes, of the cell or a function that it runs, changed."""
        code = self.rewritten(lambda tree, names: own_placement(tree, key, values, chains_in(names)))
        loops = self.rewritten(lambda tree, _: with_gradient_sync_set(tree)) if code and key == "fully_sharded" else ""
        return "\n\n".join(filter(None, (code, loops)))

    def no_grad(
        self,
        has_trained: bool,
        runs_frozen: bool,
        size: tuple[SizeParameter | None, int] | None,
        unwalked: Collection[Lines] = (),
    ) -> str | None:
        """What runs without a graph, with another ``size`` or as it is, under ``no_grad``: models in evaluation mode in
        a step of training, else loops that evaluate, or the lines that call models whose graphs are ``unwalked``; ""
        where it cannot be written, None where all of the cell may be.
        """
        if size is not None:
            return self._with_size(has_trained, unwalked, *size)
        if not (has_trained or runs_frozen):
            return None
        ways = (frozen_without_gradients, frozen_in_function) if runs_frozen else ()
        return next(filter(None, map(self.rewritten, ways)), "") or self._without_gradients(unwalked)

    def _without_gradients(self, unwalked: Collection[Lines]) -> str:
        """The loops that evaluate beside a training, of the cell or a function that it runs, under ``no_grad``."""
        models = {name for name, value in self._names.items() if is_module(value)}
        told = self.rewritten(lambda tree, _: evaluations_without_gradients(tree, models))
        if told or not unwalked:
            return told
        ends, called = {lines[-1] for lines in unwalked}, list(called_in(self._tree, self._names))
        within = {id(one.definition): {end for end in ends if one.has_line(*end)} for one in called}
        within[id(self._tree)] = ends.difference(*within.values())
        return self._rewritten_of(
            called, lambda code, _: lines_without_gradients(code, {line for _, line in within[id(code)]})
        )

    def _with_size(self, has_trained: bool, unwalked: Collection[Lines], size: SizeParameter | None, after: int) -> str:
        """What evaluates in the cell, which else trains or not, under ``no_grad`` and with another size; "" where that
        cannot be set."""
        if size is None or size.rows:
            return ""
        with size.override(self._tree, self._names, after):
            if has_trained:
                code = self._without_gradients(unwalked)
            else:
                code = self.rewritten(lambda tree, names: own_code(tree, names, "no_grad", {}))
        return f"{size.target} = {after}\n{code}" if code and size.target else code

    def shorter_rows(self, after: int) -> str:
        """What cuts the batches of the one Trainer that a name stands for to so many tokens; "" where it is not one."""
        trainers = {
            name: one for name, one in self._names.items() if not name.startswith("_") and _is_transformers_trainer(one)
        }
        if len(set(map(id, trainers.values()))) != 1:
            return ""
        name = next(iter(trainers))
        code = _SHORTER_ROWS.format(trainer=name, after=after)
        return placed_after(name, code) if name in bound_in(self._tree) else code

    def kept_classes(self) -> str:
        """The metrics of a trainer that a name stands for, and what makes the classes that they then read; "" where
        there is none whose metrics read the classes alone."""
        from oom_magic.predict.what_if.kept_classes import metrics_of_classes  # loads torch

        for name, trainer in list(self._names.items()):
            is_trainer = not name.startswith("_") and _is_transformers_trainer(trainer)
            metrics = metrics_of_classes(trainer) if is_trainer else None
            if metrics is not None:
                lines = [
                    f"{KEEP_CLASSES}\n\n{ast.unparse(metrics)}\n",
                    f"{name}.preprocess_logits_for_metrics = keep_classes",
                    f"{name}.compute_metrics = {metrics.name}",
                ]
                code = "\n".join(lines)
                return placed_after(name, code) if name in bound_in(self._tree) else code
        return ""

    def with_sizes(self, overridden: Mapping[SizeParameter, int], accumulation: int, before_it: int = 1) -> str:
        """The statements changed by sizes, and assignments for those that other cells set; with more batches per step
        than ``before_it``, the loop, too."""
        times = Fraction(accumulation, before_it) if before_it > 1 else Fraction(1)
        before, words = [ast.unparse(one) for one in self._tree.body], list(self._arguments)
        with contextlib.ExitStack() as stack:
            for parameter, value in overridden.items():
                stack.enter_context(parameter.override(self._tree, self._names, value))
            targets = [one.assigned(value) for one, value in overridden.items() if one.target]
            if self._arguments != words:
                return f"%run {shlex.join(self._arguments)}"
            sizes = {name for one in overridden for name in (one.label, one.target) if name}
            longer = with_more_batches(self._tree, self._names, times, sizes) if times > 1 else None
            changed = [*targets, *shown(longer or self._tree, before)]
            if accumulation == 1 or before_it > 1 or not changed:
                code = "\n".join([*changed, *_instead_of(before, longer or self._tree)])
                elsewhere = self._longer_elsewhere(times, sizes) if code and times > 1 and longer is None else ""
                return "\n\n".join(filter(None, (code, elsewhere)))
            tree = accumulating(self._tree, self._names, accumulation, sizes)
            tree = tree or accumulated_by_trainer(self._tree, self._names, accumulation, sizes)
            if tree is not None:
                return "\n".join([*targets, *shown(tree, before, sizes)])
        parts = ["\n".join(changed), self._loop_elsewhere(accumulation, sizes)]
        is_defined = parts[1].startswith(_DEFINES) and changed != targets  # what calls it comes behind it
        return "\n\n".join(parts[::-1] if is_defined else parts)

    def _loop_elsewhere(self, accumulation: int, sizes: Collection[str]) -> str:
        """The loop of a function that the cell runs, which accumulates, or what to do."""
        for name, value in list(self._names.items()):
            if is_lightnings_trainer(type(value)) and not name.startswith("_"):
                limits = {one: getattr(value, one, None) for one in TRAINER_LIMITS}
                more = {one: accumulation * limit for one, limit in limits.items() if type(limit) is int}
                settings = {ACCUMULATED_BATCHES: accumulation, **more}
                return "\n".join(f"{name}.{setting} = {number}" for setting, number in settings.items())
        own = {*sizes, *(f"self.{one.rpartition('.')[2]}" for one in sizes)}  # as a method calls them
        code = self._in_function(lambda tree, names: accumulating(tree, names, accumulation, own))
        return code or self._step_elsewhere(accumulation, sizes) or accumulated_in_words(accumulation)

    def _step_elsewhere(self, accumulation: int, sizes: Collection[str]) -> str:
        """The notebook's function that makes a step of such a batch, accumulating; "" where there is none."""
        for one in called_in(self._tree, self._names):
            if (
                is_cell(one.file)
                and getattr(self._names.get(one.definition.name), "__code__", None) is one.function.__code__
            ):
                tree = accumulating_step(one, self._tree, accumulation, sizes)
                if tree is not None:
                    return ast.unparse(tree)
        return ""

    def _longer_elsewhere(self, times: Fraction, sizes: Collection[str]) -> str:
        """The loop of a function that the cell runs, with ``times`` as many batches; "" where none counts."""
        return self._in_function(lambda tree, names: with_more_batches(tree, names, times, sizes))

    def _in_function(self, change: Callable[[ast.Module, Mapping[str, Any]], ast.Module | None]) -> str:
        """The first function that the cell runs which ``change`` changes, or its loop; "" where there is none."""
        for one in called_in(self._tree, self._names):
            name = one.definition.name
            tree = change(ast.Module([one.definition], []), one.names)
            if tree is not None:
                is_notebooks = is_cell(one.file) and getattr(self._names.get(name), "__name__", "") == name
                is_whole = is_notebooks or len(training_loops(tree)) != 1
                return "\n".join(shown(tree, ())) if is_whole else loop_of(tree)
        return ""


def _is_transformers_trainer(value: Any) -> bool:
    return hasattr(value, "preprocess_logits_for_metrics")


def accumulated_in_words(number: int) -> str:
    """What to do where no loop is known in which it could be written."""
    return f"# step the optimizer every {number} batches and divide each loss by that number"


def _instead_of(before: Sequence[str], tree: ast.Module) -> Iterator[str]:
    """What several statements are replaced by others together stands for."""
    now = {ast.unparse(one) for one in tree.body}
    gone = [text.partition("\n")[0] for text in before if text not in now]
    blocks = [hasattr(one, "body") for text in before for one in ast.parse(text).body]
    if gone and blocks != [hasattr(one, "body") for one in tree.body]:
        yield f"# instead of {' ... '.join(dict.fromkeys([gone[0], gone[-1]]))}"


def chains_in(names: Mapping[str, Any]) -> set[str]:
    """The names of sequences of layers."""
    return {name for name, value in list(names.items()) if type(value).__name__ == "Sequential"}
