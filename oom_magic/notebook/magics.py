"""The magics: their options, and what the user reads in ``%gpumem?``."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult, InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments

from oom_magic.interrupts import Interrupts
from oom_magic.language import _
from oom_magic.notebook.cells import gpumem
from oom_magic.notebook.cells.explanations import explain_last, explain_named, explain_pasted
from oom_magic.notebook.cells.gpumem import CardOptions, CellRunner
from oom_magic.notebook.cells.hints import FailureWatch
from oom_magic.notebook.cells.running import around_cells, compile_cell
from oom_magic.notebook.monitor import Monitor, can_update
from oom_magic.notebook.options import (
    check_report_options,
    checked,
    dry_run_arguments,
    explanation_arguments,
    parse_line,
    parse_options,
    silenced_by_semicolon,
    slider_arguments,
    unquoted,
)
from oom_magic.one_line_errors import OneLineErrors
from oom_magic.predict.setups.gpus import list_gpus
from oom_magic.predict.setups.models import list_models
from oom_magic.units import format_bytes


def gpu_table(words: str = "") -> str:
    """Every card with its memory, by generation; only those whose name contains ``words``, if there are any."""
    cards = sorted(list_gpus(), key=lambda card: (card.capability, card.total_bytes, card.name))
    cards = [card for card in cards if _has_words(card.name, words)] or cards
    width = max(len(card.name) for card in cards)
    return "\n".join(f"{card.name:<{width}}  {format_bytes(card.total_bytes):>10}" for card in cards)


def model_table(words: str = "") -> str:
    """Every preset with its number of parameters and name on the hub; only those with ``words``, if there are any."""
    known = list_models()
    models = [model for model in known if _has_words(f"{model.name} {model.hub_id}", words)] or known
    width = max(len(model.name) for model in models)
    return "\n".join(f"{model.name:<{width}}  {model.num_parameters / 1e9:7.2f} B  {model.hub_id}" for model in models)


def _has_words(text: str, words: str) -> bool:
    return all(word in text.lower() for word in words.lower().split())


@magics_class
class OOMMagics(Magics):
    """What ``%load_ext oom_magic`` adds."""

    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self.runner = CellRunner(shell)
        self.levels = AllocationWatch(self.runner)
        self.failures = FailureWatch(shell, self.runner)
        self.monitor: Monitor | None = None

    @silenced_by_semicolon
    @no_var_expand
    @magic_arguments()
    @argument(
        "--dry-run",
        action="store_true",
        help=_("Dry-run the cell on a pretend GPU, as --gpu and similar options do; nothing runs for real."),
    )
    @dry_run_arguments
    @argument("--device", type=int, help=_("Number of the CUDA device to measure (default: the current one)."))
    @argument("--list-gpus", action="store_true", help=_("List the cards that --gpu knows."))
    @argument("--no-plot", action="store_true", help=_("Leave out the timeline picture."))
    @argument("-o", "--output", metavar="NAME", help=_("Assign the report to this variable."))
    @line_cell_magic
    def gpumem(self, line: str, cell: str | None = None) -> Any:
        """Show how much GPU memory a cell or statement takes: when, on which line and for what.

        With a CUDA device the code runs and is measured; without one it is dry-run on a pretend GPU.
        ``%gpumem --gpu "A100 80GB"`` alone chooses the pretend GPU of the notebook.

        Examples::

            %%gpumem --gpu "RTX 3060" -o report
            train(batch_size=4)

            %gpumem train(batch_size=4)
        """
        __tracebackhide__ = True
        options, statement = parse_options(self.gpumem, line, is_statement=True)
        if options.list_gpus:
            print(gpu_table(statement))
            return None
        card = CardOptions.parse(options.gpu, options.memory, options.num_gpus, options.num_processes, options.rank)
        stop_after_steps = checked("--steps", gpumem.parse_steps, options.steps)
        self._check(options, statement, cell)
        if cell is None and not statement:
            return self._choose(card)
        compiled = compile_cell(self.shell, statement if cell is None else cell, 0 if cell is None else 1)
        self.runner.last_report = None
        with OneLineErrors("other"):  # it may load PyTorch
            is_dry = options.dry_run or card or not has_gpu()
        with OneLineErrors("dry run" if is_dry else "cell"):
            try:
                if is_dry:
                    return self.runner.dry_run(compiled, card, stop_after_steps, follows_compile=not options.no_compile)
                if compiled.awaits:
                    raise UsageError(
                        _(
                            "A cell that is measured cannot use await at its top level, as the notebook's event loop"
                            " already runs it. Let it use `with om.measure() as measurement:` instead of this magic."
                        )
                    )
                return self.runner.measure(compiled, options.device)
            finally:
                self._show(options)

    def _check(self, options: Any, statement: str, cell: str | None) -> None:
        if cell is not None and statement:
            raise UsageError(_("%%gpumem takes options only; move {statement!r} into the cell.", statement=statement))
        check_report_options(options)
        if options.output is not None and not options.output.isidentifier():
            raise UsageError(_("-o: {output!r} is not a valid variable name.", output=options.output))

    def _choose(self, card: CardOptions) -> None:
        if not card:
            raise UsageError(
                _(
                    "%gpumem needs a statement to run, or --gpu, --num-gpus, --num-processes or --memory to choose"
                    " a pretend GPU."
                )
            )
        self.runner.card = card
        print(_("Dry runs of this notebook now use {card}.", card=card))

    def _show(self, options: Any) -> None:
        report = self.runner.last_report
        if report is None:
            return
        gpumem.show(report, options.top, not options.no_plot)
        if options.output:
            self.shell.user_ns[options.output] = report
        if options.json:
            gpumem.save(report, options.json)

    @partial(silenced_by_semicolon, is_cell_code=False)
    @no_var_expand
    @magic_arguments()
    @explanation_arguments
    @argument("--off", action="store_true", help=_("Show no more hints under out-of-memory errors."))
    @line_cell_magic
    def oom_explain(self, line: str, cell: str | None = None) -> Any:
        """Explain an out-of-memory error: the last one, one in a FILE, or the text under %%oom_explain.

        A variable that holds a text, or an exception that your code caught, is explained by its name.

        Remedies for the last error are evaluated by dry runs of the cell that failed; remedies for an error in a file
        or text, by dry runs of the training run that --model and the other options describe.

        Examples::

            %oom_explain train.log --lang en

            %%oom_explain --model roberta-base --batch 4 --seq 512
            RuntimeError: CUDA out of memory. Tried to allocate 192.00 MiB (GPU 0; ...
        """
        options, path = parse_options(self.oom_explain, line)
        if options.off:
            self.failures.is_hinting = False
            return None
        with OneLineErrors("explanation"):
            if cell is not None:
                return explain_pasted(self.shell, cell, options)
            if path:
                return explain_named(self.shell, self.runner, unquoted(path), options)
            return explain_last(self.shell, self.failures, self.runner, options)

    @silenced_by_semicolon
    @magic_arguments()
    @argument("--names", nargs="+", default=[], metavar="NAME", help=_("Also delete these variables."))
    @argument("--out", action="store_true", help=_("Also forget the results that IPython keeps (Out, _, _3)."))
    @argument("--dry-run", action="store_true", help=_("Change nothing; show what would be freed."))
    @line_magic
    def oom_free(self, line: str) -> Any:
        """Release the memory that failed cells still hold; show what was freed, what remains and what holds it.

        Your variables stay unless --names lists them. Afterwards %debug can no longer inspect earlier errors.

        Examples::

            %oom_free
            %oom_free --names model optimizer --dry-run
        """
        options = parse_line(self.oom_free, line)
        wishes = {"names": options.names, "out": options.out, "dry_run": options.dry_run}
        with OneLineErrors("release"):
            from oom_magic.notebook.cells.releasing import release_in

            released = release_in(self.shell, self.runner, allocated_before=self.levels.before_failure, **wishes)
            if not options.dry_run:
                self.failures.forget_held()
            return released

    @silenced_by_semicolon
    @magic_arguments()
    @argument(
        "--model",
        type=unquoted,
        nargs="*",
        metavar="NAME",
        help=_(
            "Find the largest training setup of these models that fits comfortably, by dry runs (no name: three"
            " typical models)."
        ),
    )
    @argument(
        "--gpu",
        type=unquoted,
        help=_('The card to recommend for, such as "RTX 3060" (default: the one in this machine).'),
    )
    @argument("--memory", type=unquoted, help=_("Its memory, if it differs from the catalogue: 10GiB."))
    @argument(
        "--no-cache", action="store_true", help=_("Neither read nor write cached results on disk in this session.")
    )
    @line_magic
    def oom_doctor(self, line: str) -> Any:
        """Check the host, GPU, driver, processes and settings; say what to change and, for a model, how to train it.

        Examples::

            %oom_doctor
            %oom_doctor --model qwen2.5-1.5b --gpu "RTX 3060"
        """
        options = parse_line(self.oom_doctor, line)
        if options.no_cache:
            disable_store()
        card = self.runner.card
        with OneLineErrors("other"):
            from oom_magic.explain.doctor import TYPICAL_MODELS, doctor

            models = TYPICAL_MODELS if options.model == [] else options.model or ()
            try:
                return doctor(models, gpu=options.gpu or card.gpu, memory=options.memory or card.memory_bytes)
            except ValueError as error:
                raise UsageError(f"%oom_doctor: {error}") from None

    @magic_arguments()
    @argument("what", nargs="?", choices=("stop",), help=_("Stop the running monitor."))
    @argument("--device", type=int, help=_("Number of the CUDA device (default: the current one)."))
    @argument(
        "--every", type=float, default=1.0, metavar="SECONDS", help=_("Seconds between two samples (default: 1).")
    )
    @line_magic
    def gpumem_watch(self, line: str) -> None:
        """Show a device's memory live below this cell while other cells run, until %gpumem_watch stop.

        Examples::

            %gpumem_watch --every 0.5
            %gpumem_watch stop
        """
        options = parse_line(self.gpumem_watch, line)
        if options.every < 0.1:
            raise UsageError(_("--every: {every} seconds is too often; use 0.1 or more.", every=options.every))
        with OneLineErrors("other"):
            self.stop_watching()
            if options.what == "stop":
                return
            device = _device_to_watch(options.device)  # it may load PyTorch
            self.monitor = Monitor(device, options.every, can_update(self.shell))
            try:
                with Interrupts().waiting():  # the driver's library is not left open
                    self.monitor.start()
            except BaseException:
                self.stop_watching()
                raise

    @magic_arguments()
    @slider_arguments
    @line_magic
    def oom_sliders(self, line: str) -> Any:
        """Open the sliders for a preset, or for a function of the notebook.

        Examples::

            %oom_sliders --model qwen2.5-7b --method qlora --gpu "RTX 3060"
            %oom_sliders train
        """
        options, rest = parse_options(self.oom_sliders, line)
        if options.no_cache:
            disable_store()
        if options.list_models:
            print(model_table(rest))
            return None
        with OneLineErrors("other"):
            from oom_magic.notebook.sliders.magic import sliders_from

            return sliders_from(options, rest, self.shell)

    def stop_watching(self) -> None:
        """End the live monitor, if one runs."""
        if self.monitor is not None:
            self.monitor.stop()
            self.monitor = None


def disable_store() -> None:
    """From now on this process neither reads nor writes results on disk."""
    from oom_magic.predict.sizing import store

    store.is_on = False


def has_gpu() -> bool:
    """Whether a cell can be measured here."""
    from oom_magic.measure.device.cards import is_available

    return is_available()


def _device_to_watch(device: int | None) -> int | None:
    """The device that ``--device`` names, else the current one; None without a GPU. Raises UsageError."""
    from oom_magic.measure.device.cards import default_device

    if not has_gpu():
        if device is not None:
            raise UsageError(_("--device: there is no CUDA device {device} here.", device=device))
        return None
    return default_device() if device is None else device


class AllocationWatch:
    """Notes what is allocated before each cell; ``before_failure`` is that of the last cell that failed.

    Bytes by device.
    """

    def __init__(self, runner: CellRunner) -> None:
        self.shell = runner.shell
        self._runner = runner
        self._now: dict[str, int] = {}
        self.before_failure: dict[str, int] = {}

    @around_cells
    def before_cell(self, _: ExecutionInfo) -> None:
        """IPython's ``pre_run_cell``: note what is allocated."""
        self._now = {}
        if "torch" in sys.modules:
            from oom_magic.notebook.cells.releasing import allocated_now

            self._now = allocated_now(self._runner)

    @around_cells
    def after_cell(self, result: ExecutionResult) -> None:
        """IPython's ``post_run_cell``: keep what was noted if the cell failed."""
        self._runner.after_cell(result)
        if not result.success:
            self.before_failure = self._now
