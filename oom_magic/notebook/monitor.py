"""The live monitor: a device's memory under the cell that asked, refreshed while other cells run."""

from __future__ import annotations

from threading import Event, Thread
from typing import TYPE_CHECKING

from IPython.display import display

if TYPE_CHECKING:
    from IPython.core.display_functions import DisplayHandle

    from oom_magic.description import Describable


class Monitor:
    """Looks at a device every few seconds, in a daemon thread: the main one is busy while a cell computes."""

    def __init__(self, device: int | None, every_seconds: float) -> None:
        self.device = device
        self.every_seconds = every_seconds
        self._stopped = Event()
        self._thread = Thread(target=self._watch, name="gpumem_watch", daemon=True)
        self._handle: DisplayHandle | None = None

    def start(self) -> None:
        """Show the memory now, then keep it up to date."""
        self._handle = display(self._look(), display_id=True)
        self._thread.start()

    def stop(self) -> None:
        """Leave what is shown as it is."""
        self._stopped.set()

    def _watch(self) -> None:
        while self._handle is not None and not self._stopped.wait(self.every_seconds):
            self._handle.update(self._look())

    def _look(self) -> Describable:
        from oom_magic.measure.device_memory import read_device_memory

        return read_device_memory(self.device)
