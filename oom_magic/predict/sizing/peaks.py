"""Peak allocated memory from sizes alone: what the allocator adds to them is learned, not replayed.

A block is larger than its request by up to 1 MiB, because the rest may be too small to split off. If a request of 10
MiB or more gets a segment of its own, the difference is the rounding to 2 MiB; otherwise it depends on what was cached.
From replays at some points, the share of that rounding and the average of the rest are learned for each allocation.
Where that could be wrong by more than a small margin, the large blocks are replayed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from oom_magic.memory.allocator.large_pool import allocated_bytes
from oom_magic.memory.allocator.replay import replay
from oom_magic.memory.allocator.segments import GRANULE_BYTES, MIN_BLOCK_BYTES, MIN_LARGE_BYTES, SMALL_BYTES
from oom_magic.memory.allocator.settings import AllocatorSettings
from oom_magic.memory.categories import CATEGORIES, Breakdown
from oom_magic.memory.timeline import IntArray, MarkKind
from oom_magic.predict.sizing.polynomials import SizeFunctions
from oom_magic.predict.sizing.structure import Structure

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

_NEARLY = 0.97  # of the peak at some sample: moments below that at all of them are not looked at
_FEW_EVENTS = 1000  # with large blocks: as many are replayed in any case
# Of the peak: if blocks in doubt could add no more, what was learned was seen to be right to 0.1 %, to which
# tests/sizing/test_sizes.py holds it. Found by trying with PyTorch 2.13.
_DOUBT = 0.006


@dataclass(frozen=True, eq=False)
class Peaks:
    """The moments that may be the peak, and what is alive then.

    At moment ``t``, after event ``positions[t]``, ``counts[t, u]`` allocations of kind ``u`` are alive; of what
    such a one lacks to a whole segment ``shares[t, u]`` is allocated too, and ``extras[t]`` bytes besides.
    ``share`` and ``extra`` are the same by allocation. What is added to ``doubts[t, u]`` of those alive varies.
    """

    structure: Structure
    kind: IntArray
    functions: SizeFunctions
    positions: IntArray
    counts: FloatArray
    shares: FloatArray
    extras: FloatArray
    doubts: FloatArray
    share: FloatArray
    extra: FloatArray
    settings: AllocatorSettings

    @classmethod
    def learn(
        cls,
        structure: Structure,
        kind: IntArray,
        functions: SizeFunctions,
        samples: IntArray,
        settings: AllocatorSettings,
    ) -> Peaks:
        """From replays of the structure with the sizes at each of ``samples`` (one point per row)."""
        timeline = structure.timeline
        sizes = functions(samples)
        rounded, lacking = _blocks(sizes)
        excess = np.empty((timeline.num_allocations, len(samples)))
        events, signs = np.where(timeline.order >= 0, timeline.order, ~timeline.order), np.sign(timeline.order + 0.5)
        may_peak = np.zeros(timeline.num_events, dtype=bool)
        for sample in range(len(samples)):
            requested = sizes[kind, sample]
            blocks = np.zeros(len(kind), dtype=np.int64)
            blocks[requested > 0] = replay(structure.with_sizes(requested), settings=settings).block_bytes
            excess[:, sample] = blocks - rounded[kind, sample]
            allocated = np.cumsum(signs * blocks[events])
            may_peak |= allocated >= _NEARLY * allocated.max(initial=0)
        share, extra, varies = _divide(excess, lacking[kind])
        is_top = (timeline.order >= 0) & (np.append(timeline.order[1:], -1) < 0)
        positions = np.flatnonzero(may_peak & is_top)
        alive = [timeline.live_at(int(position)) for position in positions]

        def by_kind(weights: FloatArray) -> FloatArray:
            sums = [np.bincount(kind[live], weights[live], minlength=len(sizes)) for live in alive]
            return np.array(sums, dtype=np.float64).reshape(len(alive), len(sizes))

        counts, shares, doubts = (
            by_kind(weights) for weights in (np.ones(len(kind)), share, varies.astype(np.float64))
        )
        extras = np.array([extra[live].sum() for live in alive])
        columns = np.column_stack([counts, shares, extras])
        keep = np.sort(np.unique(columns, axis=0, return_index=True)[1])
        return cls(
            structure, kind, functions, positions[keep], counts[keep], shares[keep], extras[keep], doubts[keep],
            share, extra, settings,
        )  # fmt: skip

    def at_least(self, points: IntArray) -> IntArray:
        """A lower bound of the peak at each point: without what the allocator adds."""
        rounded, _ = _blocks(self.functions(points))
        peaks: IntArray = (self.counts @ rounded).max(axis=0, initial=0).astype(np.int64)
        return peaks

    def about(self, points: IntArray) -> IntArray:
        """The approximate peak at each point."""
        sums = self._sums(*_blocks(self.functions(points)))
        peaks: IntArray = sums.max(axis=0, initial=0).round().astype(np.int64)
        return peaks

    def at(self, point: IntArray) -> int:
        """The peak at one point: as learned, or replayed if the learned value is in doubt."""
        rounded, lacking = _blocks(self.functions(point))
        sums = self._sums(rounded, lacking)[:, 0]
        if not len(sums):
            return 0
        is_large = rounded[:, 0] > SMALL_BYTES
        in_doubt = SMALL_BYTES * (self.doubts[sums.argmax()] @ is_large)
        is_sure = in_doubt <= _DOUBT * sums.max() and self._num_events @ is_large > _FEW_EVENTS
        return round(sums.max()) if is_sure else self._replayed(rounded[self.kind, 0].astype(np.int64))

    def _replayed(self, rounded: IntArray) -> int:
        """The exact peak of allocations with these smallest blocks."""
        if replace(self.settings, is_by_address=False) != AllocatorSettings():
            return replay(self.structure.with_sizes(rounded), settings=self.settings).peak_allocated_bytes
        is_large = rounded[self._allocations] > SMALL_BYTES
        small = np.cumsum(np.where(is_large, 0, self._signs * rounded[self._allocations]))
        num_large = np.cumsum(is_large)
        empties = set(np.append(0, num_large)[self._empties].tolist())
        large = allocated_bytes(self.structure.timeline.order[is_large].tolist(), rounded.tolist(), empties)
        return int((small + np.array([*large, 0])[num_large - 1]).max())

    @cached_property
    def _allocations(self) -> IntArray:
        order = self.structure.timeline.order
        return np.where(order >= 0, order, ~order)

    @cached_property
    def _empties(self) -> list[int]:
        """The events before which the cache is emptied."""
        return self.structure.timeline.positions(MarkKind.EMPTY_CACHE)

    @cached_property
    def _signs(self) -> IntArray:
        return np.where(self.structure.timeline.order >= 0, 1, -1)

    @cached_property
    def _num_events(self) -> IntArray:
        """How many events each kind has."""
        return np.bincount(self.kind[self._allocations], minlength=self.counts.shape[1])

    def breakdown(self, point: IntArray) -> Breakdown:
        """The peak at ``point`` (one row) by category; sums to ``at``."""
        timeline = self.structure.timeline
        rounded, lacking = _blocks(self.functions(point))
        sums = self._sums(rounded, lacking)[:, 0]
        if not len(sums):
            return Breakdown({})
        live = timeline.live_at(int(self.positions[sums.argmax()]))
        rounded, lacking = rounded[self.kind[live], 0], lacking[self.kind[live], 0]
        parts = rounded + self.share[live] * lacking + self.extra[live]
        totals = np.bincount(timeline.category[live], parts, minlength=len(CATEGORIES)).round().astype(np.int64)
        totals[totals.argmax()] += self.at(point) - totals.sum()
        return Breakdown({category.value: int(total) for category, total in zip(CATEGORIES, totals, strict=True)})

    def _sums(self, rounded: FloatArray, lacking: FloatArray) -> FloatArray:
        """Bytes allocated at each moment (rows) and point (columns)."""
        sums: FloatArray = self.counts @ rounded + self.shares @ lacking + self.extras[:, None]
        return sums


def _blocks(sizes: IntArray) -> tuple[FloatArray, FloatArray]:
    """The smallest block for each size, and its distance to a whole segment that would not be split."""
    rounded = -(-sizes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
    lacking = -rounded % GRANULE_BYTES
    is_whole = (rounded >= MIN_LARGE_BYTES) & (lacking <= SMALL_BYTES)
    return rounded.astype(np.float64), np.where(is_whole, lacking, 0).astype(np.float64)


def _divide(excess: FloatArray, lacking: FloatArray) -> tuple[FloatArray, FloatArray, BoolArray]:
    """For each allocation its share of ``lacking`` (the mean of those that fit best), and whether that varies."""
    squares = (lacking**2).sum(axis=1)
    share = np.clip((excess * lacking).sum(axis=1) / np.maximum(squares, 1), 0, 1)
    rest = excess - share[:, None] * lacking
    return share, rest.mean(axis=1), np.ptp(rest, axis=1) > MIN_BLOCK_BYTES
