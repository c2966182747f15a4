"""The largest size, such as a batch, with which a run fits, found with few rehearsals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Memory grows almost in proportion: a size expected this far above the limit is not tried. Any other is tried
# before the smaller ones, as it would be after them.
_CLEARLY_ABOVE = 1.03
_NOT_IN_PROPORTION = 1.25  # times what was expected


def largest_fitting(
    need: Callable[[int], int], sizes: Sequence[int], before: tuple[int, int], fixed: int, usable: int, power: int = 1
) -> int | None:
    """The largest of the ascending ``sizes`` whose ``need`` is at most ``usable`` bytes, or None.

    ``before`` is the size that was too large with its need; ``fixed`` is about what the run needs at size 0; memory
    grows with ``size**power``.
    The returned size was rehearsed; the next larger one was too, or is clearly above the limit.
    """
    known = {0: min(fixed, before[1]), before[0]: before[1]}
    low, high = -1, len(sizes)
    is_off = False
    while high - low > 1:
        likely = (
            at for at in range(high - 1, low, -1) if _expected(known, sizes[at], power) <= usable * _CLEARLY_ABOVE
        )
        guess = next(likely, None)
        if low >= 0 and guess is None:
            break
        if guess is None or (low < 0 and is_off):  # then the smallest shows whether any fits
            guess = 0
        expected = _expected(known, sizes[guess], power)
        known[sizes[guess]] = need(sizes[guess])
        is_off = known[sizes[guess]] > expected * _NOT_IN_PROPORTION
        low, high = (guess, high) if known[sizes[guess]] <= usable else (low, guess)
    return sizes[low] if low >= 0 else None


def _expected(known: dict[int, int], size: int, power: int) -> float:
    """The need of a size, interpolated between its nearest known neighbours."""
    below = max(one for one in known if one <= size)
    above = min(one for one in known if one >= size)
    if above == below:
        return known[size]
    share: float = (size**power - below**power) / (above**power - below**power)
    return known[below] + (known[above] - known[below]) * share
