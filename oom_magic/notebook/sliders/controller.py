"""Sliders: the arguments of a training function, or of a TrainingSetup, and what they take of GPU memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import ipywidgets
from IPython import get_ipython
from IPython.display import display

from oom_magic.language import _, choose_language
from oom_magic.memory.report import MemoryReport
from oom_magic.notebook.sliders.background import BackgroundWork, has_frontend, running_loop
from oom_magic.notebook.sliders.cards import SliderCard, SliderMachine, offered_cards
from oom_magic.notebook.sliders.fit_map import Grid
from oom_magic.notebook.sliders.page import SavedSliders, naming_script
from oom_magic.notebook.sliders.panel import CardControl, NumberControl, Panel, choice_control
from oom_magic.notebook.sliders.source import Estimator, FunctionSizer, SetupSizer, Sizer, TraceFailed
from oom_magic.notebook.sliders.view import Estimate, assumption_details, error_blocks, live_blocks, settings_table
from oom_magic.notebook.step_chart import step_picture
from oom_magic.one_line_errors import Interrupted, OneLineErrors
from oom_magic.predict.setups.gpus import checked_num_gpus, counted
from oom_magic.views import to_fallback, to_html, to_text
from oom_magic.views.blocks import Block, Code, Description, Details, Sentence
from oom_magic.views.words import code_in

if TYPE_CHECKING:
    from oom_magic.predict.setups.setup import TrainingSetup
    from oom_magic.predict.sizing.sizes import Sizes

_IDLE_SECONDS = 0.12  # without a move, before the allocator is replayed
_VIEW = "application/vnd.jupyter.widget-view+json"


def sliders(
    fn_or_setup: Callable[..., Any] | TrainingSetup,
    *,
    gpu: str | Iterable[str] | None = None,
    memory: str | int | None = None,
    num_gpus: int = 1,
    num_processes: int | None = None,
    card: int | None = None,
    **ranges: Any,
) -> Sliders:
    """Sliders for the arguments of a training function or the fields of a TrainingSetup: drag, and see the memory.

    Ranges are those of ``size``: ``sliders(train, batch_size=(1, 64), seq_len=(128, 4096), precision=["fp32",
    "bf16"])``; ``True`` or ``False`` makes a checkbox. Without any they are inferred. ``gpu`` is the card to start
    with, or a list of cards to choose from; ``memory`` overrides its capacity. ``num_gpus``, ``num_processes`` and
    ``card`` are those of ``size``; a setup has its own, which the first two replace.

    Raises ValueError or TypeError, naming argument, value and fix, for ranges that make no sense. An error inside
    the function is shown in the panel.
    """
    from oom_magic.predict.setups.setup import TrainingSetup

    with OneLineErrors("function"):
        number, gpu = counted(gpu, num_gpus) if isinstance(gpu, str) else (num_gpus, gpu)
        num_gpus = checked_num_gpus(number)
        if isinstance(fn_or_setup, TrainingSetup):
            given = {"num_gpus": num_gpus, "num_processes": num_processes or 1}
            setup = fn_or_setup.replace(**{name: number for name, number in given.items() if number != 1})
            cards = offered_cards(gpu or setup.gpu, memory or setup.memory)
            return Sliders(SetupSizer(setup, ranges), cards)
        machine = SliderMachine(num_gpus, num_processes, card)
        cards = offered_cards(gpu, memory)
        return Sliders(FunctionSizer(fn_or_setup, ranges, cards[0], machine), cards)


class Sliders(ipywidgets.VBox):
    """The panel. ``values``, ``report`` and ``setup`` follow the sliders; ``controls`` has the widgets by name.

    A move shows sums of sizes at once. When no further move follows, missing sizes are found in the background and the
    allocator is replayed, for reserved memory, the largest batch and the timeline; the next move cancels that.
    """

    def __init__(self, sizer: Sizer, cards: tuple[SliderCard, ...]) -> None:
        self._sizer = sizer
        grid = Grid.of(sizer.ranges.axes)
        self._estimator = Estimator(sizer, grid)
        self._saved = SavedSliders(self._estimator)
        self._refining: asyncio.Task[None] | None = None
        self._work: BackgroundWork | None = None
        self._estimate: Estimate | None = None  # None: nothing is known yet, or ``_failure`` says what went wrong
        self._failure: tuple[Block, ...] = ()
        self._is_shown = self._is_moving_many = self._has_begun = False
        gpu = CardControl([(str(card), card) for card in cards])
        self.controls: dict[str, Any] = {"gpu": gpu, **_controls(sizer)}
        self._live_class, self._still_class = f"oom-live-{gpu.model_id}", f"oom-still-{gpu.model_id}"
        hidden = f"body:not(.jp-Notebook) .{self._still_class}{{display:none}}"
        self._panel = Panel(_("GPU memory of {label}", label=sizer.title), self.controls, grid, self._go_to, hidden)
        super().__init__(self._panel.children)
        self.add_class("oom-live").add_class(self._live_class)
        for control in self.controls.values():
            control.observe(self._moved, names="value")
        self._update()

    @property
    def values(self) -> dict[str, Any]:
        """The arguments as the sliders have them."""
        return {name: self.controls[name].value for name in self._sizer.ranges.names}

    @property
    def card(self) -> SliderCard:
        """The GPU that is chosen."""
        chosen: SliderCard = self.controls["gpu"].value
        return chosen

    @property
    def report(self) -> MemoryReport:
        """What a dry run with these values would report. Raises RuntimeError, saying why, if the function fails."""
        report = self._refined().report
        assert report is not None
        return report

    @property
    def setup(self) -> TrainingSetup | None:
        """The TrainingSetup with these values; None for the sliders of a function."""
        if not isinstance(self._sizer, SetupSizer):
            return None
        return self._sizer.setup(self.values).replace(gpu=self.card.gpu, memory=self.card.memory_bytes)

    # -- while a slider moves -------------------------------------------------

    def _moved(self, _change: Any) -> None:
        if not self._is_moving_many:
            self._update()

    def _go_to(self, values: Mapping[str, int]) -> None:
        """Move several sliders as one."""
        self._is_moving_many = True
        try:
            for name, value in values.items():
                self.controls[name].value = value
        finally:
            self._is_moving_many = False
        self._update()

    def _update(self) -> None:
        """Show what is known of the current setting, and schedule the rest for when no further move follows."""
        self._stop()
        values, card, loop = self.values, self.card, running_loop()
        if loop is None or not self._has_begun:
            is_later = loop is not None and has_frontend()
            if not self._shown_or_failed(lambda: self._show_now(values, card, is_later)):
                return
            self._has_begun = True
        elif not self._shown_or_failed(lambda: self._show_known(values, card)):
            return
        if loop is not None:
            work = self._work = BackgroundWork(loop, self._panel.count)
            self._refining = loop.create_task(self._refine(work, values, card))

    def _stop(self) -> None:
        """Cancel the work for the previous setting."""
        if self._refining is not None:
            self._refining.cancel()
        if self._work is not None:
            self._work.stop()
        self._refining = self._work = None

    def _shown_or_failed(self, show: Callable[[], object]) -> bool:
        """Whether ``show`` succeeded; if not, the panel shows the error."""
        try:
            with OneLineErrors("function"):
                show()
        except Interrupted as interrupted:
            if not self._is_shown:
                raise
            self._fail((Sentence(str(interrupted), "bad"),))  # the next move tries again
        except TraceFailed as failed:
            self._fail(failed.blocks)
        except Exception as error:
            self._fail(error_blocks(error))
        else:
            return True
        return False

    def _fail(self, blocks: tuple[Block, ...]) -> None:
        """Show an error in place of the picture; the sliders stay usable."""
        self._estimate, self._failure = None, blocks
        self._panel.show_failure(blocks)

    def _show_now(self, values: Mapping[str, Any], card: SliderCard, is_later: bool) -> None:
        """Show a setting at once: from a single run where the others come later or are not needed."""
        if self._show_known(values, card):
            return
        sizes = self._sizer.sizes(values, card)
        with self._panel.tracing(self._tracing_words(card), self._is_shown):
            if is_later or (running_loop() is None and not sizes.has_runs):
                self._show(sizes, self._estimator.exact(sizes, values))
                return
            self._sizer.trace(sizes, values, card)
        self._show(sizes, self._estimator.quick(sizes, values))

    def _show_known(self, values: Mapping[str, Any], card: SliderCard) -> bool:
        """Show a setting if its sizes are known; otherwise those of another card for now, if they are."""
        sizes = self._sizer.sizes(values, card)
        is_known = self._sizer.is_known(sizes, values)
        close = sizes if is_known else self._sizer.sizes_elsewhere(values, card)
        if close is None:
            self._estimate, self._failure = None, ()
        else:
            self._show(close, self._estimator.quick(close, values))
        return is_known

    def _tracing_words(self, card: SliderCard) -> str:
        return _("Tracing {label} with these choices on {card} …", label=self._sizer.title, card=card)

    def _show(self, sizes: Sizes, estimate: Estimate) -> None:
        self._estimate, self._failure = estimate, ()
        for name in self._sizer.ranges.axes:
            self.controls[name].disabled = name not in self._sizer.axes(estimate.values)
        self._panel.show(estimate)
        cells = self._estimator.cells(sizes, estimate.values)
        if cells is not None:
            self._panel.show_map(cells, sizes.device)
        self._panel.show_code(self._sizer.code(estimate.values))

    # -- after the last move --------------------------------------------------

    async def _refine(self, work: BackgroundWork, values: Mapping[str, Any], card: SliderCard) -> None:
        """Find the rest; errors are shown in the panel."""
        await asyncio.sleep(_IDLE_SECONDS)
        try:
            with OneLineErrors("function"):
                await self._find(work, values, card)
        except KeyboardInterrupt as interrupted:
            self._fail((Sentence(str(interrupted), "bad"),))
        except TraceFailed as failed:
            self._fail(failed.blocks)
        except Exception as error:
            self._fail(error_blocks(error))

    async def _find(self, work: BackgroundWork, values: Mapping[str, Any], card: SliderCard) -> None:
        """Step by step; each result is shown when it is known."""
        estimator, sizes = self._estimator, self._sizer.sizes(values, card)
        is_known = self._sizer.is_known(sizes, values)
        if not is_known and (self._estimate is None or self._estimate.report is None):
            with self._panel.working(self._tracing_words(card), fades=True):
                estimate = await work.run(estimator.exact, sizes, values)
            self._show(sizes, estimate)
            self._panel.show_details(estimate)
        if not is_known:
            with self._panel.working(_("Traced one run; tracing more to cover all values …")):
                await work.run(self._sizer.trace, sizes, values, card)
        estimate = estimator.quick(sizes, values)
        self._show(sizes, estimate)
        for step in (estimator.exact, estimator.with_largest):
            estimate = self._estimate = await work.run(step, sizes, values, estimate)
            self._panel.show(estimate)
            self._panel.show_details(estimate)
        if not estimate.fits:
            with self._panel.working(_("Looking for settings that fit …")):
                self._estimate = estimate = await work.run(estimator.with_way_out, values, card, estimate)
            self._panel.show(estimate)
        cells = estimator.cells(sizes, values)
        if cells is not None:
            self._panel.show_map(cells, sizes.device)
            for cell in cells.doubtful(sizes.device):
                await work.run(estimator.check_cell, sizes, values, cells, cell)
                self._panel.show_map(cells, sizes.device)
        for point in self._saved.missing(sizes, values):  # after all that is on the screen
            await work.run(self._saved.draw, sizes, point)
        self._save()

    def _refined(self) -> Estimate:
        """The current estimate with its report, computed now if necessary."""
        if self._failure:
            reason = to_text(Description(_("The function fails with these values"), self._failure))
            raise RuntimeError(reason)
        if self._estimate is None or self._estimate.report is None:
            sizes = self._sizer.sizes(self.values, self.card)
            is_known = self._sizer.is_known(sizes, self.values)
            quick = self._estimator.quick(sizes, self.values) if is_known else None
            self._estimate = self._estimator.exact(sizes, self.values, quick)
        return self._estimate

    def _complete(self) -> Estimate:
        """The same with what needs more than one run: what would fit, the largest batch, the map."""
        estimate = self._refined()
        values, card = estimate.values, self.card
        sizes = self._sizer.sizes(values, card)
        if not self._sizer.is_known(sizes, values):
            with self._panel.tracing(self._tracing_words(card), self._is_shown):
                self._sizer.trace(sizes, values, card)
        estimate = self._estimator.with_way_out(values, card, estimate)
        self._estimate = self._estimator.with_largest(sizes, values, estimate)
        return self._estimate

    # -- without a front end --------------------------------------------------

    def describe(self) -> Description:
        """The present setting for a page or a terminal without sliders."""
        title = _("GPU memory of {label} on {card}", label=self._sizer.title, card=self.card)
        values = {**self._sizer.ranges.fixed, **self.values}
        blocks: list[Block] = [settings_table(values)]
        try:
            # With background work, what comes later is shown then.
            estimate = None if self._failure else self._complete() if self._work is None else self._refined()
        except TraceFailed as failed:  # elsewhere in the ranges
            self._fail(failed.blocks)
        if self._failure or estimate is None:
            return Description(title, (*self._failure, *blocks))
        assert estimate.report is not None
        blocks = [*live_blocks(estimate), *blocks]
        cells = self._estimator.cells(self._sizer.sizes(values, self.card), values)
        if self._estimator.grid is not None and cells is not None:
            blocks.append(self._estimator.grid.table(cells, estimate.device))
        blocks.append(step_picture(estimate.report))
        blocks.append(Details(_("Code to paste"), (Code(code_in(choose_language(), self._sizer.code(self.values))),)))
        blocks.append(assumption_details(estimate.assumptions))
        return Description(title, tuple(blocks))

    def __str__(self) -> str:
        return to_text(self.describe())

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self.values.items())
        return f"<Sliders of {self._sizer.label}: {values}>"

    def _repr_mimebundle_(self, **_options: Any) -> dict[str, Any]:
        """The live view, and the current setting for pages without a kernel."""
        return {**super()._repr_mimebundle_(), **self._still()}

    def _ipython_display_(self) -> None:
        """Show the panel, and behind it the still picture that a saved notebook shows; without a kernel only that."""
        self._is_shown = True
        with OneLineErrors("other"):
            self._display()

    def _display(self) -> None:
        if getattr(get_ipython(), "kernel", None) is None:
            display(self._repr_mimebundle_(), raw=True)
            return
        words = _("Sliders of {label}, as last set:", label=self._sizer.title)
        display({_VIEW: super()._repr_mimebundle_()[_VIEW], "text/plain": words}, raw=True)
        script = {"text/plain": "", "text/html": naming_script(self._live_class)}
        display(script, raw=True, display_id=self.model_id)  # at once; the replayed figures follow
        self._save()

    def _save(self) -> None:
        """Renew the still picture."""
        if self._is_shown and getattr(get_ipython(), "kernel", None) is not None:
            display(self._still(), raw=True, display_id=self.model_id, update=True)

    def _still(self) -> dict[str, str]:
        description = self.describe()
        html = to_html(description)
        if not self._failure:
            sizes = self._sizer.sizes(self.values, self.card)
            html += self._saved.html(sizes, self.values) if self._sizer.is_known(sizes, self.values) else ""
        html = f'<div class="{self._still_class}">{html}{naming_script(self._live_class)}</div>'
        return {"text/plain": to_fallback(description), "text/html": html}


def _controls(sizer: Sizer) -> dict[str, Any]:
    """A control for each argument that varies."""
    numbers = {name: NumberControl(name, axis, sizer.starts[name]) for name, axis in sizer.ranges.axes.items()}
    choices = {
        name: choice_control(name, options, sizer.starts[name]) for name, options in sizer.ranges.choices.items()
    }
    return {**numbers, **choices}
