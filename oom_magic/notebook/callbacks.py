"""Callbacks for trainers: the step table of a real run, printed when it ends.

Each class subclasses one of its library, so it is created when it is first used.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from oom_magic.language import _
from oom_magic.views import to_text
from oom_magic.views.report import describe_steps

if TYPE_CHECKING:
    from oom_magic.measure.measurement import Measurement
    from oom_magic.memory.report import MemoryReport


def hf_callback() -> Any:
    """A ``transformers.TrainerCallback`` that prints what each optimizer step took of the GPU when training ends.

    ``Trainer(..., callbacks=[om.hf_callback()])``; afterwards its ``report`` is the whole MemoryReport (None before,
    and without a CUDA device). In a dry run it keeps quiet: the dry run's report has the steps. Raises ImportError
    where transformers is not installed.
    """
    from transformers import TrainerCallback

    class StepTableCallback(TrainerCallback, _StepTable):
        """Prints the step table; one process of a machine does."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.begin(is_shown=state.is_local_process_zero)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.end()

    return StepTableCallback()


def lightning_callback() -> Any:
    """A ``lightning.pytorch.Callback`` that prints what each optimizer step took of the GPU when ``fit`` ends.

    ``Trainer(callbacks=[om.lightning_callback()])``; otherwise as ``hf_callback``. After an error it prints what came
    before. Raises ImportError where neither lightning nor pytorch_lightning is installed.
    """
    try:
        from lightning.pytorch import Callback
    except ImportError:
        try:
            from pytorch_lightning import Callback
        except ImportError:
            raise ImportError(_("lightning_callback() needs Lightning: pip install lightning.")) from None

    class StepTableCallback(Callback, _StepTable):
        """Prints the step table; one process of a machine does."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.begin(is_shown=trainer.local_rank == 0)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.end()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self.end(exception)

    return StepTableCallback()


class _StepTable:
    """Measures from ``begin`` to ``end``, or to the next ``begin``: Hugging Face calls no ``end`` after an error."""

    report: MemoryReport | None = None
    _stop: Any = None
    _measurement: Measurement | None = None
    _is_shown = True

    def begin(self, *, is_shown: bool = True) -> None:
        """Start to observe, where there is a GPU to observe."""
        from oom_magic.measure.device.cards import is_available
        from oom_magic.measure.measurement import measure
        from oom_magic.predict.isolation.context import is_dry_run

        if self._stop is not None:
            self._stop()
        self._measurement, self._is_shown = None, is_shown
        if is_dry_run():
            return
        if not is_available():
            if is_shown:
                print(
                    _(
                        "There is no CUDA device to measure; om.dry_run(...) shows how much memory this would"
                        " take on one."
                    )
                )
            return
        self._measurement = measure(namespace={})
        self._measurement.__enter__()
        self._stop = weakref.finalize(self, self._measurement.__exit__, None, None, None)

    def end(self, error: BaseException | None = None) -> None:
        """Stop, keep the report and print its steps."""
        if self._measurement is None:
            return
        self._stop.detach()
        self._measurement.__exit__(None if error is None else type(error), error, None)
        self.report, self._measurement, self._stop = self._measurement.report, None, None
        if self._is_shown:
            print(to_text(describe_steps(self.report)))
