"""The largest of some sizes with which a run fits, found in few rehearsals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Memory grows almost in proportion to a size: what interpolation puts this far above the limit is not tried.
_CLEARLY_ABOVE = 1.03
_NOT_IN_PROPORTION = 1.25  # times what was expected


def largest_fitting(
    need: Callable[[int], int], sizes: Sequence[int], before: tuple[int, int], fixed: int, usable: int
) -> int | None:
    """The largest of the ascending ``sizes`` whose ``need`` is at most ``usable`` bytes, or None.

    ``before`` is the size that was too large with its need; ``fixed`` is about what the run needs at size 0.
    What is returned was rehearsed; the next larger size either was too, or lies clearly above the limit.
    """
    known = {0: min(fixed, before[1]), before[0]: before[1]}
    low, high = -1, len(sizes)
    is_off = False
    while high - low > 1:
        guess = next((at for at in range(high - 1, low, -1) if _expected(known, sizes[at]) <= usable), None)
        if guess is None or (low < 0 and is_off):  # then the smallest tells whether any fits
            guess = low + 1
            if low >= 0 and _expected(known, sizes[guess]) > usable * _CLEARLY_ABOVE:
                break
        expected = _expected(known, sizes[guess])
        known[sizes[guess]] = need(sizes[guess])
        is_off = known[sizes[guess]] > expected * _NOT_IN_PROPORTION
        low, high = (guess, high) if known[sizes[guess]] <= usable else (low, guess)
    return sizes[low] if low >= 0 else None


def _expected(known: dict[int, int], size: int) -> float:
    """What a size needs, on the line between its nearest known neighbours."""
    below = max(one for one in known if one <= size)
    above = min(one for one in known if one >= size)
    if above == below:
        return known[size]
    return known[below] + (known[above] - known[below]) * (size - below) / (above - below)
