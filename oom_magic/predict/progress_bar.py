"""The progress bar of dry runs."""

from __future__ import annotations

import threading

from tqdm.auto import tqdm


class ProgressBar(tqdm):  # type: ignore[misc]
    """A bar whose lock is of threads: tqdm's own settles how processes start, for which Python 3.14 writes a file.

    It starts no thread that watches it, which would stay after the run.
    """

    monitor_interval = 0


ProgressBar.set_lock(threading.RLock())
