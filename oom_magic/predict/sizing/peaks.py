"""Peak allocated memory from sizes alone: what the allocator adds to them is learned, not replayed.

A block is larger than its request by up to 1 MiB, as what remains may be too small to split off. Where a
request of 10 MiB or more gets a segment of its own, that is what it lacks to the next 2 MiB; otherwise it
depends on what was cached. Replays at some points teach, for each allocation, which share of the first was
added and how much else on average.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from oom_magic.memory.allocator import AllocatorSettings, CachingAllocator, replay
from oom_magic.memory.categories import CATEGORIES, Breakdown
from oom_magic.memory.segments import GRANULE_BYTES, MIN_BLOCK_BYTES, MIN_LARGE_BYTES, SMALL_BYTES, Block
from oom_magic.memory.timeline import IntArray
from oom_magic.predict.sizing.functions import SizeFunctions
from oom_magic.predict.sizing.structure import Structure

FloatArray = npt.NDArray[np.float64]

_FEW_EVENTS = 4000  # with blocks of the large pool: as many are replayed within some milliseconds
_NEARLY = 0.97  # of the peak at some sample: moments below that at all of them are not looked at


@dataclass(frozen=True, eq=False)
class Peaks:
    """The moments that may be the peak, and what is alive then.

    At moment ``t``, after event ``positions[t]``, ``counts[t, u]`` allocations of kind ``u`` are alive; of what
    such a one lacks to a whole segment ``shares[t, u]`` is allocated too, and ``extras[t]`` bytes besides.
    ``share`` and ``extra`` are the same by allocation. Where few blocks are large they are replayed after all.
    """

    structure: Structure
    kind: IntArray
    functions: SizeFunctions
    positions: IntArray
    counts: FloatArray
    shares: FloatArray
    extras: FloatArray
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
        share, extra = _divide(excess, lacking[kind])
        is_top = (timeline.order >= 0) & (np.append(timeline.order[1:], -1) < 0)
        positions = np.flatnonzero(may_peak & is_top)
        alive = [timeline.live_at(int(position)) for position in positions]
        num_kinds = len(sizes)
        counts = [np.bincount(kind[live], minlength=num_kinds) for live in alive]
        shares = [np.bincount(kind[live], share[live], minlength=num_kinds) for live in alive]
        extras = np.array([extra[live].sum() for live in alive])
        unique = np.unique(np.column_stack([counts, shares, extras]), axis=0, return_index=True)[1]
        keep = np.sort(unique)
        return cls(
            structure, kind, functions, positions[keep],
            np.array(counts, dtype=np.float64)[keep], np.array(shares, dtype=np.float64)[keep], extras[keep],
            share, extra, settings,
        )  # fmt: skip

    def at_least(self, points: IntArray) -> IntArray:
        """The peak at each point without what the allocator adds: never too much."""
        rounded, _ = _blocks(self.functions(points))
        peaks: IntArray = (self.counts @ rounded).max(axis=0, initial=0).astype(np.int64)
        return peaks

    def about(self, points: IntArray) -> IntArray:
        """The peak at each point, nearly."""
        peaks: IntArray = self._sums(points).max(axis=0, initial=0).round().astype(np.int64)
        return peaks

    def at(self, point: IntArray) -> int:
        """The peak at one point: exact where few blocks are large."""
        rounded = _blocks(self.functions(point))[0].astype(np.int64)[self.kind, 0]
        events = self.structure.timeline.order
        is_large = (rounded > SMALL_BYTES)[self._allocations]
        if is_large.sum() > _FEW_EVENTS or max(self.settings.roundup_power2_divisions) > 1:
            return int(self.about(point)[0])
        small = np.cumsum(np.where(is_large, 0, self._signs * rounded[self._allocations]))
        large = _allocated(events[is_large].tolist(), rounded.tolist(), self.settings)
        return int((small + np.append(large, 0)[np.cumsum(is_large) - 1]).max(initial=0))

    @cached_property
    def _allocations(self) -> IntArray:
        order = self.structure.timeline.order
        return np.where(order >= 0, order, ~order)

    @cached_property
    def _signs(self) -> IntArray:
        return np.where(self.structure.timeline.order >= 0, 1, -1)

    def breakdown(self, point: IntArray) -> Breakdown:
        """The peak at ``point`` (one row) by category; sums to ``at``."""
        timeline = self.structure.timeline
        sums = self._sums(point)[:, 0]
        if not len(sums):
            return Breakdown({})
        live = timeline.live_at(int(self.positions[sums.argmax()]))
        rounded, lacking = (blocks[self.kind[live], 0] for blocks in _blocks(self.functions(point)))
        parts = rounded + self.share[live] * lacking + self.extra[live]
        totals = np.bincount(timeline.category[live], parts, minlength=len(CATEGORIES)).round().astype(np.int64)
        totals[totals.argmax()] += self.at(point) - totals.sum()
        return Breakdown({category.value: int(total) for category, total in zip(CATEGORIES, totals, strict=True)})

    def _sums(self, points: IntArray) -> FloatArray:
        """Bytes allocated at each moment (rows) and point (columns)."""
        rounded, lacking = _blocks(self.functions(points))
        sums: FloatArray = self.counts @ rounded + self.shares @ lacking + self.extras[:, None]
        return sums


def _allocated(events: list[int], sizes: list[int], settings: AllocatorSettings) -> IntArray:
    """What is allocated after each of ``events``, which the small pool does not see."""
    allocator = CachingAllocator(settings=settings)
    blocks: dict[int, Block] = {}
    allocated = []
    for event in events:
        if event >= 0:
            blocks[event] = allocator.allocate(sizes[event])
        else:
            allocator.free(blocks.pop(~event))
        allocated.append(allocator.allocated_bytes)
    return np.array(allocated, dtype=np.int64)


def _blocks(sizes: IntArray) -> tuple[FloatArray, FloatArray]:
    """The least block for each size, and what it lacks to a segment of its own that would not be split."""
    rounded = -(-sizes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
    lacking = -rounded % GRANULE_BYTES
    is_whole = (rounded >= MIN_LARGE_BYTES) & (lacking <= SMALL_BYTES)
    return rounded.astype(np.float64), np.where(is_whole, lacking, 0).astype(np.float64)


def _divide(excess: FloatArray, lacking: FloatArray) -> tuple[FloatArray, FloatArray]:
    """For each allocation, the share of ``lacking`` that explains ``excess`` best, and the mean of the rest."""
    squares = (lacking**2).sum(axis=1)
    share = np.clip((excess * lacking).sum(axis=1) / np.maximum(squares, 1), 0, 1)
    return share, (excess - share[:, None] * lacking).mean(axis=1)
