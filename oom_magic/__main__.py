"""``python -m oom_magic explain FILE`` and ``python -m oom_magic run train.py --gpu "RTX 3060"``, for terminals and CI.

The options are the magics' own, as far as a command has them.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from oom_magic.language import _, set_language
from oom_magic.notebook.cells.running import trimmed
from oom_magic.notebook.options import (
    CommandParser,
    check_report_options,
    checked,
    dry_run_arguments,
    explanation_arguments,
    make_parser,
    setup_from,
)
from oom_magic.one_line_errors import OneLineErrors, PyTorchMissingError

if TYPE_CHECKING:
    from oom_magic.memory.report import MemoryReport

FITS, DOES_NOT_FIT, NOT_KNOWN = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. The exit code of ``run``: 0 the program fits, 1 it does not, 2 that is not known.

    ``explain`` gives 0 where the text says that memory ran out, 1 where it says otherwise, 2 where that is not known.
    """
    description = _("Explain and predict GPU memory errors.")
    parser: argparse.ArgumentParser = CommandParser(prog="python -m oom_magic", description=description)
    commands = parser.add_subparsers(dest="command", required=True)
    explain = commands.add_parser(
        "explain",
        help=_("explain an out-of-memory error in a log"),
        parents=[make_parser(explanation_arguments)],
    )
    explain.add_argument("file", help=_("a file that contains the error; - for standard input"))
    run = commands.add_parser(
        "run",
        help=_("dry-run a program on a pretend GPU"),
        parents=[make_parser(dry_run_arguments)],
    )
    run.add_argument(
        "-m", dest="module", action="store_true", help=_("the program is named as a module, as after python -m")
    )
    run.add_argument("script", help=_("the program, written for CUDA; its own arguments follow --"))
    given = list(sys.argv[1:] if arguments is None else arguments)
    end = given.index("--") if "--" in given else len(given)
    options, unknown = parser.parse_known_args(given[:end])
    if unknown:
        commands.choices[options.command].error(
            _("unrecognized arguments: {given}; the program's own arguments follow --", given=" ".join(unknown))
        )
    options.arguments = given[end + 1 :]
    try:
        set_language(getattr(options, "lang", None))
        with OneLineErrors("other"):
            return _explain(options) if options.command == "explain" else _run(options)
    except (UsageError, ValueError, OSError, KeyboardInterrupt, PyTorchMissingError) as error:
        print(f"python -m oom_magic {options.command}: {_in_words(error)}", file=sys.stderr)
        return NOT_KNOWN


def _in_words(error: BaseException) -> str:
    """What went wrong; for a file that cannot be read without the number of the system's error."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return _("{path!r} cannot be read: {reason}.", path=str(error.filename), reason=error.strerror)
    return str(error)


def _explain(options: Any) -> int:
    """Print the diagnosis of a text, with prices where ``--model`` says what was trained."""
    from oom_magic.explain.explainer import explain
    from oom_magic.explain.text_files import read_standard_input

    problem = read_standard_input() if options.file == "-" else Path(options.file)
    failure = explain(problem, fast=True).main_failure if options.model else None
    diagnosis = explain(problem, setup_from(options, failure), fast=options.fast)
    _show(diagnosis)
    return {True: 0, False: 1, None: NOT_KNOWN}[diagnosis.is_oom]


def _run(options: Any) -> int:
    """Follow a program, print its report, and say by the exit code whether it fits."""
    from oom_magic.notebook.cells import gpumem
    from oom_magic.predict.dry_run import dry_run
    from oom_magic.predict.instrumentation.loop_code import with_loops
    from oom_magic.views.report import describe_report

    card = gpumem.CardOptions.parse(options.gpu, options.memory, options.num_gpus, options.num_processes, options.rank)
    check_report_options(options)
    steps = checked("--steps", gpumem.parse_steps, options.steps)
    program = _Program.named(options.script, options.module)
    source = program.file.read_bytes()  # as Python reads it: compile knows its encoding
    machine = {"num_gpus": card.num_gpus, "num_processes": card.num_processes, "rank": card.rank or None}
    try:
        code = with_loops(compile(source, str(program.file.resolve()), "exec"))
        with program.as_main(options.arguments) as names:
            report = dry_run(
                lambda: _execute(code, names),
                gpu=card.gpu,
                memory=card.memory_bytes,
                stop_after_steps=steps,
                follow_compile=not options.no_compile,
                **{name: value for name, value in machine.items() if value is not None},
            )
    except UsageError:
        raise
    except Exception as error:
        traceback.print_exception(trimmed(error))
        return NOT_KNOWN
    _show(describe_report(report, options.top))
    if options.json:
        gpumem.save(report, options.json)
    return exit_code(report)


def _show(shown: object) -> None:
    """Print it; a reader that closes the pipe early, as ``head`` does, is no failure."""
    try:
        print(shown, flush=True)
    except BrokenPipeError:
        # What is flushed when Python exits must go nowhere, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@dataclass(frozen=True)
class _Program:
    """What is followed: its file, the folder where it looks for modules first, and its package if it is a module."""

    file: Path
    folder: Path
    package: str | None = None

    @classmethod
    def named(cls, name: str, is_module: bool) -> _Program:
        """A script by its path, or a module as ``python -m`` finds it. UsageError where that is no program.

        No package of the module is imported for it: their code belongs to the dry run.
        """
        if name.endswith(".ipynb"):
            raise UsageError(_("{file} is a notebook; put %%gpumem on its cell that trains.", file=name))
        if not is_module:
            return cls(Path(name), Path(name).resolve().parent)
        for folder in (str(Path.cwd()), *sys.path):
            module = Path(folder, *name.split("."))
            for file, package in ((module.with_suffix(".py"), name.rpartition(".")[0]), (module / "__main__.py", name)):
                if file.is_file():
                    return cls(file, Path.cwd(), package)
        raise UsageError(_("no module named {name}", name=name))

    @contextmanager
    def as_main(self, arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The names of a module ``__main__``: there pickle, dataclasses and the program look for what it defines."""
        module = ModuleType("__main__")
        module.__file__, module.__package__ = str(self.file), self.package
        before = sys.argv, sys.path[:], sys.modules["__main__"]
        sys.argv, sys.path[:] = [str(self.file), *arguments], [str(self.folder), *sys.path]
        sys.modules["__main__"] = module
        try:
            yield vars(module)
        finally:
            sys.argv, sys.path[:], sys.modules["__main__"] = before


def _execute(code: Any, names: dict[str, Any]) -> None:
    """Run the program; ``sys.exit()`` with success counts as a normal end."""
    try:
        exec(code, names)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise UsageError(_("the program ended with exit code {code!r}", code=end.code)) from None


def exit_code(report: MemoryReport) -> int:
    """0: it fits; 1: it does not; 2: unknown, as nothing ran on the GPU, or an upper bound does not fit, or it fits
    only once Python's collector has run."""
    if report.out_of_memory is not None:
        return NOT_KNOWN if report.is_upper_bound else DOES_NOT_FIT
    is_known = report.peak_allocated_bytes and report.verdict_until_collected != "out of memory"
    return FITS if is_known else NOT_KNOWN


if __name__ == "__main__":
    sys.exit(main())
