"""What ``%oom_explain`` explains: the last failure of this kernel, a file, or pasted text. First words, then prices."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display

from oom_magic.notebook.failures import FailureWatch, is_out_of_memory
from oom_magic.notebook.setup_options import setup_from

if TYPE_CHECKING:
    from oom_magic.explain.diagnosis import Diagnosis
    from oom_magic.explain.language import Language
    from oom_magic.notebook.gpumem import CellRunner
    from oom_magic.predict.setups.setup import TrainingSetup


def explain_pasted(shell: InteractiveShell, text: str, options: Any) -> Diagnosis:
    """Explain a message that came from elsewhere."""
    if not text.strip():
        raise _usage_error("usage_no_paste", options)
    return _explain_text(shell, text, options)


def explain_path(shell: InteractiveShell, path: str, options: Any) -> Diagnosis:
    """Explain what a log file says."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise _usage_error("usage_no_file", options, path=path)
    return _explain_text(shell, file, options)


def explain_last(shell: InteractiveShell, failures: FailureWatch, runner: CellRunner, options: Any) -> Diagnosis:
    """Explain the last out-of-memory error; IPython keeps it for ``%debug`` until another error comes."""
    error = getattr(sys, "last_value", None)
    is_live = error is not None and (is_out_of_memory(error) or not failures.last_text)
    problem = error if is_live else failures.last_text
    if not problem:
        raise _usage_error("usage_nothing_failed", options)
    if options.model is not None:
        return _explain_text(shell, problem, options)
    from oom_magic.explain.advice import before_prices
    from oom_magic.explain.diagnosis import explain
    from oom_magic.notebook.pricing import prices
    from oom_magic.notebook.releasing import glance_in, names_and_places

    cell = failures.failed_cell
    report = runner.last_report if cell is not None and cell.is_observed else None
    released = glance_in(shell, runner, problem if isinstance(problem, BaseException) else None)
    names, locate = names_and_places(shell, runner)
    diagnosis = explain(problem, lang=_language(options), report=report, names=names, released=released, locate=locate)
    failure = diagnosis.main_failure
    is_on_host = failure is not None and failure.backend == "cpu"  # rehearsals are of the GPU's memory
    if cell is None or options.fast or not diagnosis.is_oom or is_on_host:
        return diagnosis
    diagnosis = before_prices(diagnosis)
    return _show(shell, diagnosis, prices(shell, runner, cell, diagnosis, report))


def _explain_text(shell: InteractiveShell, problem: Any, options: Any) -> Diagnosis:
    """Explain a failure that cannot be rehearsed itself; prices are those of the run that options describe."""
    from oom_magic.explain.advice import before_prices
    from oom_magic.explain.diagnosis import explain

    language = _language(options)
    failure = explain(problem, lang=language).main_failure if options.model else None
    setup = setup_from(options, language, failure)
    diagnosis = explain(problem, setup, lang=language, fast=True)
    if setup is None or options.fast or not diagnosis.is_oom:
        return diagnosis
    diagnosis = before_prices(diagnosis)
    return _show(shell, diagnosis, _prices_of_setup(diagnosis, setup))


def _prices_of_setup(diagnosis: Diagnosis, setup: TrainingSetup) -> Iterator[Diagnosis]:
    from oom_magic.explain.advice import advise_setup
    from oom_magic.explain.settling import settled_by_setup

    diagnosis = settled_by_setup(diagnosis, setup)
    yield diagnosis
    yield from advise_setup(diagnosis, setup)


def _language(options: Any) -> Language:
    """The language to speak; one that is asked for stays that of the session."""
    from oom_magic.explain.language import ENVIRONMENT_VARIABLE, choose_language

    if options.lang:
        os.environ[ENVIRONMENT_VARIABLE] = options.lang
    return choose_language(options.lang)


def _usage_error(key: str, options: Any, **values: object) -> UsageError:
    from oom_magic.explain.language import say

    return UsageError(say(key, _language(options), **values))


def _show(shell: InteractiveShell, diagnosis: Diagnosis, prices: Iterator[Diagnosis]) -> Diagnosis:
    """Show a diagnosis at once and bring it up to date as prices are found; the last is the magic's value."""
    from oom_magic.explain.language import say

    start = time.monotonic()
    handle = display(diagnosis, display_id=True)
    can_update = getattr(shell, "kernel", None) is not None  # a terminal would print all of it again
    try:
        for diagnosis in prices:
            if can_update and handle is not None:
                handle.update(diagnosis)
    except KeyboardInterrupt:
        pass  # what was found until then counts
    if can_update and handle is not None:
        seconds = f"{time.monotonic() - start:.0f}"
        text = say("priced", diagnosis.lang, count=len(diagnosis.remedies), seconds=seconds)
        handle.update({"text/plain": text}, raw=True)
    return diagnosis
