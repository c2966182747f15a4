"""``%oom_explain``: explains the last failure of this kernel, a file, or pasted text, then evaluates remedies."""

from __future__ import annotations

import ast
import linecache
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display

from oom_magic.explain.live.called import called_in, object_of
from oom_magic.explain.live.fixed_lines import newest_of
from oom_magic.explain.remedies.spelling import Spelling
from oom_magic.notebook.cells.cell_code import CellCode, code_of, newly_assigned_names, timed_lines_known
from oom_magic.notebook.cells.hints import FailureWatch, is_out_of_memory, unwatched_cell
from oom_magic.notebook.options import setup_from, similar_card
from oom_magic.predict.setups.gpus import DEFAULT_GPU, GPU, find_gpu
from oom_magic.user_code import is_cell
from oom_magic.views.text import wrap

if TYPE_CHECKING:
    from oom_magic.explain.diagnosis import Diagnosis
    from oom_magic.explain.live.growth import Growth
    from oom_magic.explain.remedies.room import InTheWay
    from oom_magic.language import Language
    from oom_magic.measure.device.cards import Card
    from oom_magic.measure.history.attribution import Storage
    from oom_magic.measure.holders.reach import Locate
    from oom_magic.measure.holders.release import Released
    from oom_magic.memory.report import Device, MemoryReport
    from oom_magic.notebook.cells.gpumem import CellRunner
    from oom_magic.notebook.cells.hints import FailedCell
    from oom_magic.predict.instrumentation.starting_point import StartingPoint
    from oom_magic.predict.setups.setup import TrainingSetup


def evaluate_remedies(
    shell: InteractiveShell,
    runner: CellRunner,
    cell: FailedCell,
    diagnosis: Diagnosis,
    report: MemoryReport | None,
    find_absent: Callable[[], frozenset[int]],
) -> Iterator[Diagnosis]:
    """The diagnosis with remedies as they are evaluated by dry runs of the cell, without what ``find_absent`` finds."""
    from oom_magic.explain.advice import advise, situation_of
    from oom_magic.explain.remedies.cell_rehearsal import CellRehearsal

    device = None if cell.is_dry else _device(diagnosis)
    gpu, memory = _card_of_run(diagnosis, report, device)
    absent, users = find_absent(), shell.user_ns
    with runner.names.entered(shell) if cell.is_dry else nullcontext(users) as names, _for_many_runs():
        code = code_of(shell, cell.source, names)
        origin = runner.session if cell.is_dry else None
        room = situation_of(diagnosis, gpu, report, memory, device).usable_bytes
        diagnosis, execute = _with_later_backward(_with_what_is_caught(diagnosis, code, cell), code)
        rehearsal = CellRehearsal(
            execute,
            code.tree,
            code.names,
            gpu=gpu,
            memory=memory,
            origin=origin,
            start=cell.start,
            find_in_the_way=_finder_in_the_way(shell, runner, cell, names, code.read_beside, room),
            decided=runner.decided(users, names),
            machine={"num_gpus": _num_cards()} if origin is None else origin.hardware.options,
            arguments=code.arguments,
            absent=absent,
            never_fails=cell.is_caught,
        )
        left = _names_left_finder(names, _locate_made(shell, runner, cell), _made_again(cell, code), room)
        emptied = _taken_back(diagnosis.growth, code.tree, names, _start_of(runner, cell))
        advised = advise(diagnosis, rehearsal, gpu, report, device=device, names_left=left, emptied=emptied)
        yield from _in_users_spelling(advised, _sources(shell, cell, code))


def _in_users_spelling(advised: Iterator[Diagnosis], sources: Iterator[str]) -> Iterator[Diagnosis]:
    spelled: Callable[[str], str] | None = None
    for diagnosis in advised:
        spelled = spelled or cache(Spelling(sources).of)
        remedies = (replace(one, code=spelled(one.code)) for one in diagnosis.remedies)
        yield replace(diagnosis, remedies=tuple(remedies))


def _sources(shell: InteractiveShell, cell: FailedCell, code: CellCode) -> Iterator[str]:
    """The texts of the code that remedies are written into: of the failed cell, of earlier ones and of scripts."""
    yield cell.source
    yield from reversed(getattr(shell.history_manager, "input_hist_raw", []))
    files = (code.file, *(one.file for one in called_in(code.tree, code.names)))
    yield from ("".join(linecache.getlines(file)) for file in dict.fromkeys(files) if not is_cell(file))


@contextmanager
def _for_many_runs() -> Iterator[None]:
    """What dry runs in a row would each do again is done once."""
    from oom_magic.predict.isolation.live_objects import heap_set_aside
    from oom_magic.predict.operators.drawn_numbers import draws_kept

    with heap_set_aside(), draws_kept():
        yield


def _with_what_is_caught(diagnosis: Diagnosis, code: CellCode, cell: FailedCell) -> Diagnosis:
    """The diagnosis, which tells where the code's course depends on running out of memory."""
    if cell.is_caught:  # rehearsals do not run out of it
        return diagnosis
    from oom_magic.explain.evidence.causes import Evidence
    from oom_magic.explain.remedies.own_code.other_cells import handler_of_out_of_memory

    handler = handler_of_out_of_memory(code.tree, code.names)
    told = (Evidence("catches_out_of_memory", {"handler": handler}),) if handler else ()
    return replace(diagnosis, evidence=(*diagnosis.evidence, *told))


def _with_later_backward(
    diagnosis: Diagnosis, code: CellCode
) -> tuple[Diagnosis, Callable[[ast.Module, dict[str, Any]], None]]:
    """The diagnosis and what executes the cell, with the backward that a later cell is to run, if one is."""
    from oom_magic.explain.evidence.causes import Evidence
    from oom_magic.explain.remedies.own_code.other_cells import later_backward

    later = later_backward(code.tree, code.names)
    if later is None:
        return diagnosis, code.execute
    told = Evidence("backward_in_later_cell", {"name": later.name})
    return replace(diagnosis, evidence=(*diagnosis.evidence, told)), later.followed(code.execute)


def _taken_back(growth: Growth | None, tree: ast.Module, names: Mapping[str, Any], start: StartingPoint | None) -> str:
    """The statements without which the cell, run again, would go on from what it has changed."""
    return "\n".join(filter(None, (as_they_were(growth, names, start), *counted(tree, names, start))))


def as_they_were(growth: Growth | None, names: Mapping[str, Any], start: StartingPoint | None) -> str:
    """The statements for all that grew together: what stays on the card could not be joined with what does not."""
    grown = () if growth is None else (growth, *growth.beside)
    return "\n".join(filter(None, dict.fromkeys(_as_it_was(one, names, start) for one in grown)))


def counted(tree: ast.Module, names: Mapping[str, Any], start: StartingPoint | None) -> Iterator[str]:
    """The statements that take back what the cell has computed from what it was, as ``data.batch_size *= 2`` does."""
    for one in tree.body if start is not None else ():
        targets = one.targets if isinstance(one, ast.Assign) else [getattr(one, "target", None)]
        match targets:
            case [ast.Name(id=key) as target]:
                holder: Any = names
            case [ast.Attribute(value=owner, attr=key) as target]:
                holder = getattr(object_of(owner, names), "__dict__", {})
            case _:
                continue
        text, reads = ast.unparse(target), isinstance(one, ast.AugAssign)
        reads = reads or text in map(ast.unparse, ast.walk(getattr(one, "value", None) or ast.Module([], [])))
        before = start.plain_before(holder, key) if reads and start is not None else None
        if type(before) in (int, float) and holder.get(key) != before:
            yield f"{text} = {before!r}"


def _as_it_was(growth: Growth, names: Mapping[str, Any], start: StartingPoint | None) -> str:
    """The statement that takes what grew back to what it was when the cell began; "" where no earlier cell made it."""
    if start is None or not growth.num_tensors:
        return ""
    node = ast.parse(growth.name, mode="eval").body
    grown = object_of(node, names)
    if growth.is_joined:
        line = newest_of(growth.code, growth.name, start.rows_of(growth.name)) if start.rows_of(growth.name) else ""
        return line and f"{growth.name} = {growth.name}{line.removeprefix(growth.code)}.clone()"
    length = start.length_of(grown) if isinstance(grown, (list, dict, set, deque)) else None
    if length is not None and length == len(grown):  # a dry run has put it back
        return ""
    if length is None:
        owner = object_of(node.value, names) if isinstance(node, ast.Subscript) else None
        is_entry = isinstance(owner, (list, dict)) and owner is not grown and start.length_of(owner) is not None
        return f"{growth.name}.clear()" if is_entry else ""  # which the cell made in what an earlier cell made
    return f"del {growth.name}[{length}:]" if length and isinstance(grown, list) else f"{growth.name}.clear()"


def _made_again(cell: FailedCell, code: CellCode) -> Callable[[], frozenset[str]]:
    """A function that finds the names that the failed cell assigned and does not read before it assigns them again."""
    start = cell.start
    if start is not None:
        return lambda: frozenset(start.dropped - start.needed)
    return lambda: newly_assigned_names(code.tree) if cell.is_dry else frozenset()


def _names_left_finder(
    names: Mapping[str, Any], locate: Locate, find_made: Callable[[], frozenset[str]], room_bytes: int
) -> Callable[[], Collection[str]]:
    """A function that finds the variables, of those that the failed cell made, with which it still holds memory."""
    from oom_magic.explain.remedies.room import find_in_the_way

    @cache
    def holding_memory(candidates: frozenset[str]) -> Collection[str]:
        found = find_in_the_way(names, names.keys() - candidates, locate, room_bytes) if candidates else None
        return () if found is None else found.names

    return lambda: holding_memory(find_made())


def _finder_in_the_way(
    shell: InteractiveShell,
    runner: CellRunner,
    cell: FailedCell,
    names: Mapping[str, Any],
    read_beside: Collection[str],
    room_bytes: int,
) -> Callable[[Collection[str]], InTheWay | None]:
    """A function that finds what earlier cells hold, but for names that are needed."""
    from oom_magic.explain.remedies.room import find_in_the_way

    if cell.is_dry and not (runner.session is not None and runner.session.found_memory):
        return lambda _: None
    there_before = _locate_before(shell, runner, cell)
    return lambda needed: find_in_the_way(names, {*needed, *read_beside}, there_before, room_bytes)


def _locate_before(shell: InteractiveShell, runner: CellRunner, cell: FailedCell) -> Locate:
    """A function that locates tensors, if they were on the device before the failed cell began."""
    from oom_magic.notebook.cells.releasing import names_and_places

    _, locate = names_and_places(shell, runner)
    start, session = cell.start, runner.session

    def there_before(tensor: Any) -> Storage | None:
        if cell.is_dry:
            return locate(tensor) if session is not None and session.was_there_before(tensor) else None
        was = None if start is None else start.tensor(tensor)
        return locate(tensor) if start is None or (was is not None and was.device.type != "cpu") else None

    return there_before


def _rows_before(runner: CellRunner, cell: FailedCell | None) -> Callable[[str], int]:
    """A function that tells how many rows the tensor of a name had when the failed cell began; 0: none, or unknown."""
    start = None if cell is None else _start_of(runner, cell)
    return (lambda _: 0) if start is None else start.rows_of


def _start_of(runner: CellRunner, cell: FailedCell) -> StartingPoint | None:
    """What the failed cell began with, on a real card or of what dry cells made; None where that is not known."""
    session = runner.session if cell.is_dry else None
    return cell.start if session is None else session.start_of_run


def _locate_made(shell: InteractiveShell, runner: CellRunner, cell: FailedCell) -> Locate:
    """A function that locates tensors, on a pretend card only those that the failed cell made."""
    from oom_magic.notebook.cells.releasing import names_and_places

    _, locate = names_and_places(shell, runner)
    session = runner.session if cell.is_dry else None
    return locate if session is None else lambda one: None if session.was_there_before(one) else locate(one)


def _device(diagnosis: Diagnosis) -> Device | None:
    """The card that the cell failed on, as torch and the driver describe it; None without a GPU."""
    from oom_magic.measure.device.cards import current_device, is_available  # these load torch

    return current_device(_device_index(diagnosis)) if is_available() else None


def _read_card(index: int) -> Card | None:
    """The card with torch's number ``index`` as it is now; None without a GPU."""
    from oom_magic.measure.device.cards import is_available, read_cards  # these load torch

    return next((one for one in read_cards() if one.index == index), None) if is_available() else None


def _num_cards() -> int:
    """The number of cards that the cell could see."""
    from oom_magic.measure.device.cards import read_num_cards

    return max(read_num_cards(), 1)


def _device_index(diagnosis: Diagnosis) -> int:
    failure = diagnosis.main_failure
    return 0 if failure is None else failure.device_index or 0


def _gpu_like(device: Device, index: int) -> GPU:
    """The same card for dry runs."""
    from oom_magic.measure.device.cards import num_multiprocessors

    return GPU(
        device.name,
        device.total_bytes,
        device.capability or (0, 0),
        num_multiprocessors(index),
        device.context_bytes,
        is_read=True,
    )


def _card_of_run(diagnosis: Diagnosis, report: MemoryReport | None, device: Device | None) -> tuple[GPU, int | None]:
    """The card of the failed run, and its memory if that is not the card's: ``device`` where it has failed on one, else
    that of the report, or one of the size that the message states."""
    if device is not None:
        return _gpu_like(device, _device_index(diagnosis)), None
    failure = diagnosis.main_failure
    total = report.device.total_bytes if report is not None else failure.total_bytes if failure else None
    if report is not None:
        try:
            return find_gpu(report.device.name), total
        except ValueError:
            pass
    similar = None if total is None else similar_card(total)
    return similar or find_gpu(DEFAULT_GPU), total


def explain_pasted(shell: InteractiveShell, text: str, options: Any) -> Diagnosis:
    """Explain a pasted text."""
    if not text.strip():
        raise _usage_error("usage_no_paste", options)
    return _explain_text(shell, text, options)


def explain_named(shell: InteractiveShell, runner: CellRunner, name: str, options: Any) -> Diagnosis:
    """Explain a log file, or what a variable holds: a text, or an exception that the user's code caught."""
    from oom_magic.notebook.cells.releasing import names_and_places

    file = Path(name).expanduser()
    if file.is_file():
        return _explain_text(shell, file, options)
    value = names_and_places(shell, runner)[0].get(name) if name.isidentifier() else None
    if isinstance(value, str):
        return explain_pasted(shell, value, options)
    if not isinstance(value, BaseException):
        raise _usage_error("usage_no_file", options, path=name)
    if options.model is not None:
        return _explain_text(shell, value, options)
    is_dry = value is not shell.user_ns.get(name)  # the session that it comes from may have gone on
    cell = None if is_dry else unwatched_cell(shell, value, is_caught=True)
    return _explain_here(shell, runner, value, cell, options)


def explain_last(shell: InteractiveShell, failures: FailureWatch, runner: CellRunner, options: Any) -> Diagnosis:
    """Explain the last out-of-memory error: the exception that IPython keeps for ``%debug``, else its text."""
    error = getattr(sys, "last_value", None)
    if isinstance(error, UsageError):  # a mistyped magic is kept there, too
        error = None
    is_live = error is not None and (is_out_of_memory(error) or not failures.last_text)
    problem = error if is_live else failures.last_text
    if not problem:
        raise _usage_error("usage_nothing_failed", options)
    if options.model is not None:
        return _explain_text(shell, problem, options)
    cell = failures.failed_cell
    if cell is None and isinstance(problem, BaseException):
        cell = unwatched_cell(shell, problem)
    with timed_lines_known(shell, "" if cell is None else cell.source):
        return _explain_here(shell, runner, problem, cell, options)


def _explain_here(
    shell: InteractiveShell, runner: CellRunner, problem: Any, cell: FailedCell | None, options: Any
) -> Diagnosis:
    """Explain an error of this kernel, or its text, and evaluate remedies if the cell that failed is known."""
    from oom_magic.explain.advice import before_evaluation
    from oom_magic.explain.evidence.causes import Evidence
    from oom_magic.explain.explainer import Explainer
    from oom_magic.explain.sentences.catalogue import translate
    from oom_magic.notebook.cells.releasing import find_holders, names_and_places

    report = runner.last_report if cell is not None and cell.is_observed else None
    released = find_holders(shell, runner, problem if isinstance(problem, BaseException) else None)
    find_absent = _earlier_errors_tensors(shell, runner, released)
    if released is not None and cell is not None:
        released = released.with_earlier(cell.held_before)
    names, locate = names_and_places(shell, runner)
    explainer = Explainer(
        lang=_language(options),
        report=report,
        names=names,
        released=released,
        locate=locate,
        grown=runner.grown if cell is not None and cell.is_dry else (),
        find_rows=_rows_before(runner, cell),
        read_card=_read_card if cell is None or not cell.is_dry else lambda _: None,
    )
    diagnosis = explainer.diagnose(problem)
    if report is not None and report.device.rank is not None and diagnosis.is_oom:
        rank, size = report.device.rank
        of_rank = Evidence("of_rank", {"rank": rank, "size": size})
        diagnosis = replace(diagnosis, evidence=(of_rank, *diagnosis.evidence))
    failure = diagnosis.main_failure
    is_on_host = failure is not None and failure.backend == "cpu"  # rehearsals are of the GPU's memory
    if cell is None or options.fast or not diagnosis.is_oom or is_on_host:
        return diagnosis
    print(*wrap(translate("rehearses", diagnosis.lang)), sep="\n")
    diagnosis = before_evaluation(diagnosis)
    if cell.is_inferred:
        diagnosis = replace(diagnosis, evidence=(*diagnosis.evidence, Evidence("start_supposed")))
    return _show(shell, diagnosis, evaluate_remedies(shell, runner, cell, diagnosis, report, find_absent))


def _earlier_errors_tensors(
    shell: InteractiveShell, runner: CellRunner, released: Released | None
) -> Callable[[], frozenset[int]]:
    """Finds what ``held_by_earlier_errors``: a look through all objects, which is left out where none hold memory."""
    from oom_magic.notebook.cells.releasing import held_by_earlier_errors

    if released is None or all(one.is_of_error for one in released.freed):
        return frozenset
    return partial(held_by_earlier_errors, shell, runner, getattr(sys, "last_value", None))


def _explain_text(shell: InteractiveShell, problem: Any, options: Any) -> Diagnosis:
    """Explain a failure by its text, and evaluate remedies if the options describe a run."""
    from oom_magic.explain.advice import before_evaluation
    from oom_magic.explain.explainer import explain

    language = _language(options)
    failure = explain(problem, lang=language).main_failure if options.model else None
    setup = setup_from(options, failure)
    diagnosis = explain(problem, setup, lang=language, fast=True)
    if setup is None or options.fast or not diagnosis.is_oom:
        return diagnosis
    diagnosis = before_evaluation(diagnosis)
    return _show(shell, diagnosis, _evaluations_of_setup(diagnosis, setup))


def _evaluations_of_setup(diagnosis: Diagnosis, setup: TrainingSetup) -> Iterator[Diagnosis]:
    from oom_magic.explain.advice import advise_setup
    from oom_magic.explain.live.refinement import refine_with_setup

    diagnosis = refine_with_setup(diagnosis, setup)
    yield diagnosis
    yield from advise_setup(diagnosis, setup)


def _language(options: Any) -> Language:
    """The language to use; one given as an option stays that of the session."""
    from oom_magic.language import choose_language, set_language

    if options.lang:
        set_language(options.lang)
    return choose_language(options.lang)


def _usage_error(key: str, options: Any, **values: object) -> UsageError:
    from oom_magic.explain.sentences.catalogue import translate

    return UsageError(translate(key, _language(options), **values))


def _show(shell: InteractiveShell, diagnosis: Diagnosis, evaluate_remedies: Iterator[Diagnosis]) -> Diagnosis:
    """Show the diagnosis, updated as remedies are evaluated; a terminal gets a headline, then all at the end."""
    from oom_magic.explain.sentences.catalogue import translate

    start = time.monotonic()
    can_update = getattr(shell, "kernel", None) is not None
    handle = display(diagnosis, display_id=True) if can_update else None
    if not can_update:
        print(_headline(diagnosis))
    try:
        for diagnosis in evaluate_remedies:
            if handle is not None:
                handle.update(diagnosis)
    except KeyboardInterrupt:  # what was found until then counts
        print(translate("interrupted_rehearsals", diagnosis.lang, count=_num_rehearsed(diagnosis)))
    if handle is not None:
        seconds = f"{time.monotonic() - start:.0f}"
        text = translate("priced", diagnosis.lang, count=_num_rehearsed(diagnosis), seconds=seconds)
        handle.update({"text/plain": text}, raw=True)
    return diagnosis


def _num_rehearsed(diagnosis: Diagnosis) -> int:
    """How many remedies were rehearsed: a larger card needs no run, and some take too long."""
    return sum(remedy.peak_allocated_bytes is not None for remedy in diagnosis.remedies)


def _headline(diagnosis: Diagnosis) -> str:
    """What did not fit and why, without remedies."""
    from oom_magic.views.blocks import Sentence

    description = diagnosis.describe()
    why = [block for block in description.blocks if isinstance(block, Sentence) and block.tone == "strong"]
    return str(replace(description, blocks=tuple(why[:1])))
