"""``%gpumem_watch``: a device's memory, shown under the cell and updated while other cells run."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from IPython.display import display

from oom_magic.errors import describe_error
from oom_magic.language import _
from oom_magic.memory.categories import DANGER_SHARE, TIGHT_SHARE
from oom_magic.views.blocks import Block, Description, Fact, Facts, Part, Parts, Sentence
from oom_magic.views.text import wrap

if TYPE_CHECKING:
    from oom_magic.measure.device.cards import MemorySample

_NUM_SAMPLES = 120  # samples that the sparkline shows at most
_WIDTH = 60  # characters of the sparkline
_LEVELS = "▁▂▃▄▅▆▇█"
_JOIN_SECONDS = 5.0  # seconds that stopping waits for the thread


class Monitor:
    """Samples a device about once a second in a daemon thread: the main thread is busy while a cell runs.

    Without a device it samples the host's memory. The thread keeps the driver's library open until ``stop``.
    """

    def __init__(self, device: int | None, every_seconds: float, can_update: bool = True) -> None:
        self._device = device
        self._every_seconds = every_seconds
        self._can_update = can_update
        self._record = Record()
        self._stopped = Event()
        self._thread: Thread | None = None

    def start(self) -> None:
        """Show the memory now, then keep it up to date."""
        from oom_magic.measure.device.cards import open_sampler, sample_host

        stack = ExitStack()
        name, sample = _("This machine"), sample_host
        if self._device is not None:
            name, sample = stack.enter_context(open_sampler(self._device))
        self._record = Record(name, is_host=self._device is None)
        self._record.add(sample())
        handle = display(self._record.describe(), display_id=True)
        if not self._can_update:
            text = _(
                "Shown once: a terminal cannot be redrawn. A line appears when {danger:.0f} % is exceeded; run"
                " %gpumem_watch again for a new sample.",
                danger=100 * DANGER_SHARE,
            )
            print("\n".join(wrap(text)))
        self._thread = Thread(target=self._watch, args=(sample, handle, stack), name="gpumem_watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close its handles; the output stays as it is."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)
            self._thread = None

    def _watch(self, sample: Callable[[], MemorySample], handle: Any, stack: ExitStack) -> None:
        with stack:
            while not self._stopped.wait(self._every_seconds):
                try:
                    has_passed = self._record.add(sample())
                except Exception as error:  # of a device that is lost, PyTorch's own calls fail too
                    has_passed = self._record.end(describe_error(error))
                    self._stopped.set()
                if handle is not None and (self._can_update or has_passed):
                    handle.update(self._record.describe())


class Record:
    """The last samples, the highest levels, and when the device was first nearly full."""

    def __init__(self, name: str = "", is_host: bool = False) -> None:
        self._name = name
        self._is_host = is_host
        self._samples: deque[MemorySample] = deque(maxlen=_NUM_SAMPLES)
        self._peak_used = 0
        self._peak_allocated = 0
        self._passed_at = ""
        self._ended_with = ""

    def add(self, sample: MemorySample) -> bool:
        """Add a sample; returns whether the device passed 90 % for the first time."""
        self._samples.append(sample)
        self._peak_used = max(self._peak_used, sample.used_bytes)
        self._peak_allocated = max(self._peak_allocated, sample.allocated_bytes)
        if self._passed_at or sample.used_fraction <= DANGER_SHARE:
            return False
        self._passed_at = time.strftime("%H:%M:%S")
        return True

    def end(self, reason: str) -> bool:
        """Note why sampling ended. Returns True: like passing 90 %, it is shown in any case."""
        self._ended_with = reason
        return True

    def describe(self) -> Description:
        """The memory in parts that add up to the capacity, its peaks, and a sparkline."""
        sample = self._samples[-1]
        blocks: list[Block] = []
        if self._is_host:
            blocks.append(Sentence(_("There is no CUDA device here; this is the host's memory.")))
        if self._passed_at:
            text = _(
                "Passed {danger:.0f} % at {time}: the next peak may not fit.",
                danger=100 * DANGER_SHARE,
                time=self._passed_at,
            )
            blocks.append(Sentence(text, "warning"))
        blocks.append(Parts("", self._parts(sample), _("capacity"), sample.total_bytes, (TIGHT_SHARE, DANGER_SHARE)))
        facts = [Fact(_("peak in use"), self._peak_used)]
        facts += [] if self._is_host else [Fact(_("peak allocated"), self._peak_allocated)]
        blocks += [Facts(tuple(facts)), Sentence(f"{_('in use recently')}  {_sparkline(self._samples)}")]
        if self._ended_with:
            text = _("The monitor stopped; this is its last sample: {reason}.", reason=self._ended_with)
            blocks.insert(0, Sentence(text, "bad"))
        if sample.problem:
            blocks.append(
                Sentence(_("Memory of other processes is unknown: {problem}.", problem=sample.problem), "quiet")
            )
        return Description(_("{name} now", name=self._name), tuple(blocks))

    def _parts(self, sample: MemorySample) -> tuple[Part, ...]:
        free = Part(_("free"), max(sample.total_bytes - sample.used_bytes, 0), "free")
        if self._is_host:
            return Part(_("in use"), sample.used_bytes, "other"), free
        return (
            Part(_("allocated"), sample.allocated_bytes, "parameter"),
            Part(_("reserved on top"), sample.reserved_bytes - sample.allocated_bytes, "cached"),
            Part(_("this process, outside PyTorch"), sample.outside_bytes, "outside"),
            Part(_("other processes"), sample.other_bytes, "other"),
            free,
        )


def can_update(shell: Any) -> bool:
    """Whether output can be updated in place: a terminal would print all of it again."""
    terminal = sys.modules.get("IPython.terminal.interactiveshell")
    return terminal is None or not isinstance(shell, terminal.TerminalInteractiveShell)


def _sparkline(samples: deque[MemorySample]) -> str:
    """The share in use over the last samples; neighbours are merged to their maximum if there are too many."""
    shares = [sample.used_fraction for sample in samples]
    step = -(-len(shares) // _WIDTH)
    highest = [max(shares[at : at + step]) for at in range(0, len(shares), step)]
    return "".join(_LEVELS[min(int(share * len(_LEVELS)), len(_LEVELS) - 1)] for share in highest)
