"""A clock for limits of computing: as long as this process takes on an idle machine."""

from __future__ import annotations

import time


class _Clock:
    """Goes on with the clock on the wall or with the processors' time, whichever has moved less since it was read last.

    The first counts what other processes computed meanwhile; the second counts threads that compute, or only wait for
    the next piece of work as those of OpenMP do, once for each: on 16 cores a rehearsal of a second would count ten.
    """

    def __init__(self) -> None:
        self._read = self._both()
        self._seconds = 0.0

    def seconds(self) -> float:
        """Seconds of computing since the clock was made."""
        before, self._read = self._read, self._both()
        self._seconds += min(now - then for now, then in zip(self._read, before, strict=True))
        return self._seconds

    @staticmethod
    def _both() -> tuple[float, float]:
        return time.monotonic(), time.process_time()


computing_seconds = _Clock().seconds
