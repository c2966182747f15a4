"""The simulated allocator against PyTorch's own, event by event, and its invariants."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oom_magic.memory.allocator.caching_allocator import AllocatorOutOfMemory, CachingAllocator
from oom_magic.memory.allocator.later_steps import course_of
from oom_magic.memory.allocator.replay import minimum_device_bytes, replay
from oom_magic.memory.allocator.segments import UNLIMITED, Block
from oom_magic.memory.allocator.settings import AllocatorSettings
from oom_magic.memory.timeline import PHASES, Mark, MarkKind, Phase, Timeline
from oom_magic.units import GIB, MIB
from tests.support.folders import DATA

HISTORIES = sorted((DATA / "allocator_histories").glob("*.npz"))
ALLOCATION, FREE, EMPTY_CACHE, OUT_OF_MEMORY = range(4)  # as in data/record_histories.py


@dataclass
class History:
    """What PyTorch did: see data/record_histories.py."""

    rows: list[tuple[int, int, int, int, int]]  # kind, value, stream, allocated, reserved
    meta: dict
    settings: AllocatorSettings

    @classmethod
    def load(cls, path: Path) -> History:
        with np.load(path) as columns:
            names = ("kind", "value", "stream", "allocated", "reserved")
            rows = list(zip(*(columns[name].tolist() for name in names), strict=True))
            meta = json.loads(str(columns["meta"]))
        return cls(rows, meta, AllocatorSettings.parse(meta["settings"]))


def timeline(order, requested, stream=None, marks=()) -> Timeline:
    """A timeline of which only the memory matters."""
    none = np.zeros(len(requested), dtype=np.int64)
    return Timeline(
        order=np.array(order, dtype=np.int64),
        requested_bytes=np.array(requested, dtype=np.int64),
        stream=none if stream is None else np.array(stream, dtype=np.int64),
        **dict.fromkeys(("category", "phase", "step", "operator", "line", "module"), none),
        marks=tuple(marks),
    )


@pytest.fixture(params=HISTORIES, ids=lambda path: path.stem)
def history(request) -> History:
    return History.load(request.param)


def test_there_are_histories():
    metas = [History.load(path).meta for path in HISTORIES]
    assert len(metas) >= 15
    assert any(meta["num_retries"] for meta in metas)
    assert {meta["torch"] for meta in metas} == {"2.13.0+cu130"}


def check_online(history: History) -> None:
    allocator = CachingAllocator(history.meta["capacity_bytes"], history.settings)
    blocks: list[Block] = []
    for position, (kind, value, stream, allocated, reserved) in enumerate(history.rows):
        if kind == ALLOCATION:
            before = allocator.allocated_bytes
            blocks.append(allocator.allocate(value, stream))
            assert blocks[-1].size_bytes == allocated - before
        elif kind == FREE:
            allocator.free(blocks[value])
        elif kind == OUT_OF_MEMORY:
            with pytest.raises(AllocatorOutOfMemory):
                allocator.allocate(value, stream)
        else:
            allocator.empty_cache()  # the next event shows what it released
            continue
        assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved), position
    assert allocator.num_retries == history.meta["num_retries"]
    assert allocator.peak_allocated_bytes == history.meta["peak_allocated_bytes"]
    assert allocator.peak_reserved_bytes == history.meta["peak_reserved_bytes"]


def test_online_agrees_with_pytorch_after_every_event(history):
    check_online(history)


def test_a_wrong_rule_would_be_noticed():
    history = History.load(next(path for path in HISTORIES if path.stem == "stress_expandable"))
    history.settings = AllocatorSettings()
    with pytest.raises(AssertionError):
        check_online(history)


def test_replay_agrees_with_pytorch_up_to_the_first_failure(history):
    order, requested, streams, marks, truth = [], [], [], [], []
    failure = None
    for kind, value, stream, allocated, reserved in history.rows:
        if kind == EMPTY_CACHE:
            marks.append(Mark(len(order), MarkKind.EMPTY_CACHE))
            continue
        if kind != FREE:
            order.append(len(requested))
            requested.append(value)
            streams.append(stream)
        else:
            order.append(~value)
        if kind == OUT_OF_MEMORY:
            failure = (len(order) - 1, order[-1], value)
            break
        truth.append((allocated, reserved))
    replayed = replay(
        timeline(order, requested, streams, marks),
        capacity_bytes=history.meta["capacity_bytes"],
        settings=history.settings,
    )
    assert list(zip(replayed.allocated_bytes, replayed.reserved_bytes, strict=True)) == truth
    found = replayed.failure
    assert (found and (found.position, found.allocation, found.requested_bytes)) == failure
    if failure is None:
        assert replayed.num_retries == history.meta["num_retries"]
        assert replayed.peak_allocated_bytes == history.meta["peak_allocated_bytes"]
        assert replayed.peak_reserved_bytes == history.meta["peak_reserved_bytes"]


@pytest.mark.parametrize(
    ("requested", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # 1 MiB left over is too little to split off
    ],
)
def test_block_and_segment_of_a_first_request(requested, block, segment):
    allocator = CachingAllocator()
    assert allocator.allocate(requested).size_bytes == block
    assert allocator.reserved_bytes == segment
    assert allocator.allocated_bytes == allocator.peak_allocated_bytes == block


def test_a_request_of_zero_bytes_takes_nothing():
    allocator = CachingAllocator(0)
    block = allocator.allocate(0)
    allocator.free(block)
    allocator.free(allocator.allocate(0))
    assert block.size_bytes == allocator.reserved_bytes == allocator.allocated_bytes == 0


def test_freeing_twice_is_refused():
    allocator = CachingAllocator()
    block = allocator.allocate(100)
    allocator.free(block)
    with pytest.raises(ValueError, match="already freed"):
        allocator.free(block)


def test_streams_do_not_share_memory():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(100, stream=0))
    allocator.allocate(100, stream=7)
    assert allocator.reserved_bytes == 4 * MIB
    assert allocator.num_device_allocs == 2


def test_running_out_says_the_numbers_of_the_message():
    allocator = CachingAllocator(33 * MIB)
    allocator.allocate(5 * MIB)
    with pytest.raises(AllocatorOutOfMemory, match=r"Tried to allocate 18\.00 MiB for 17\.00 MiB") as caught:
        allocator.allocate(17 * MIB)
    assert vars(caught.value) == {
        "requested_bytes": 17 * MIB,
        "segment_bytes": 18 * MIB,
        "free_bytes": 13 * MIB,
        "allocated_bytes": 5 * MIB,
        "reserved_bytes": 20 * MIB,
        "capacity_bytes": 33 * MIB,
    }
    assert allocator.num_retries == 1


def test_a_cached_segment_is_released_before_giving_up():
    allocator = CachingAllocator(40 * MIB)
    allocator.free(allocator.allocate(30 * MIB))
    allocator.allocate(36 * MIB)
    assert (allocator.num_retries, allocator.num_device_frees) == (1, 1)
    assert allocator.reserved_bytes == 36 * MIB


def test_memory_fraction_is_of_the_whole_device():
    halved = AllocatorSettings(memory_fraction=0.5)
    CachingAllocator(90 * MIB, halved, device_bytes=100 * MIB).allocate(50 * MIB)
    with pytest.raises(AllocatorOutOfMemory):
        CachingAllocator(90 * MIB, halved).allocate(50 * MIB)


def test_replay_stops_at_the_failure():
    replayed = replay(timeline([0, ~0, 1, 2, ~2], [30 * MIB, 20 * MIB, 30 * MIB]), capacity_bytes=40 * MIB)
    assert replayed.failure is not None
    assert (replayed.failure.position, replayed.failure.allocation) == (3, 2)
    assert replayed.failure.free_bytes == 20 * MIB - 10 * MIB
    assert replayed.allocated_bytes.tolist() == [30 * MIB, 0, 20 * MIB]
    assert replayed.block_bytes.tolist() == [30 * MIB, 20 * MIB, 0]
    assert (replayed.peak_allocated_bytes, replayed.peak_position) == (30 * MIB, 0)


def test_replay_empties_the_cache_where_marked():
    order, requested = [0, ~0, 1], [30 * MIB, 100]
    kept = replay(timeline(order, requested))
    emptied = replay(timeline(order, requested, marks=[Mark(2, MarkKind.EMPTY_CACHE)]))
    assert kept.reserved_bytes.tolist() == [30 * MIB, 30 * MIB, 32 * MIB]
    assert emptied.reserved_bytes.tolist() == [30 * MIB, 30 * MIB, 2 * MIB]


def test_replay_of_nothing():
    replayed = replay(timeline([], []))
    assert (replayed.peak_allocated_bytes, replayed.peak_reserved_bytes, replayed.peak_position) == (0, 0, -1)
    assert minimum_device_bytes(timeline([], [])) == 0


# ---- invariants ----

PROGRAMS = st.lists(
    st.one_of(
        st.tuples(
            st.just("allocate"),
            st.sampled_from([1, 512, 700, MIB, 3 * MIB, 12 * MIB]) | st.integers(1, 40 * MIB),
        ),
        st.tuples(st.just("free"), st.integers(0, 1000)),
        st.tuples(st.just("empty"), st.none()),
    ),
    max_size=60,
)
SETTINGS = st.sampled_from(
    ["", "expandable_segments:True", "max_split_size_mb:20", "roundup_power2_divisions:4",
     "garbage_collection_threshold:0.5,per_process_memory_fraction:0.9"]
)  # fmt: skip


def segment_of(block: Block) -> list[Block]:
    """All blocks of the segment, by address."""
    while block.previous is not None:
        block = block.previous
    blocks = [block]
    while blocks[-1].next is not None:
        blocks.append(blocks[-1].next)
    return blocks


def check_segment(blocks: list[Block]) -> None:
    for left, right in pairwise(blocks):
        assert right.previous is left
        assert left.address + left.size_bytes == right.address
        assert not (left.is_free and right.is_free), "free neighbours are merged"
        assert left.is_mapped or right.is_mapped


@given(PROGRAMS, SETTINGS, st.sampled_from([None, 60 * MIB, 120 * MIB]))
@settings(max_examples=150)
def test_invariants(program, text, capacity):
    allocator = CachingAllocator(capacity, AllocatorSettings.parse(text))
    live: list[Block] = []
    for action, value in program:
        if action == "allocate":
            try:
                live.append(allocator.allocate(value))
            except AllocatorOutOfMemory as error:
                assert error.free_bytes < error.segment_bytes or "fraction" in text or "expandable" in text
        elif action == "free" and live:
            allocator.free(live.pop(value % len(live)))
        elif action == "empty":
            allocator.empty_cache()
        assert allocator.allocated_bytes == sum(block.size_bytes for block in live)
        assert allocator.allocated_bytes <= allocator.reserved_bytes <= (UNLIMITED if capacity is None else capacity)
        for block in live:
            check_segment(segment_of(block))
    for block in live:
        allocator.free(block)
    assert allocator.allocated_bytes == 0
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert allocator.num_device_allocs >= allocator.num_device_frees or "expandable" in text


def timeline_of(program) -> Timeline:
    order, requested, live = [], [], []
    for action, value in program:
        if action == "allocate":
            live.append(len(requested))
            order.append(len(requested))
            requested.append(value)
        elif action == "free" and live:
            order.append(~live.pop(value % len(live)))
    return timeline(order, requested)


@given(PROGRAMS, SETTINGS)
@settings(max_examples=60)
def test_minimum_device_bytes_is_enough_and_less_is_not(program, text):
    run, options = timeline_of(program), AllocatorSettings.parse(text)
    least = minimum_device_bytes(run, options)
    assert replay(run, capacity_bytes=least, settings=options).failure is None
    if run.num_allocations:
        assert replay(run, capacity_bytes=least - 2 * MIB, settings=options).failure is not None


@given(PROGRAMS, SETTINGS, st.integers(0, 300))
@settings(max_examples=60)
def test_the_search_ends_earlier_only_for_what_does_not_fit(program, text, device):
    run, options = timeline_of(program), AllocatorSettings.parse(text)
    least = minimum_device_bytes(run, options)
    found = minimum_device_bytes(run, options, exact_up_to_bytes=device * MIB)
    assert found == least if least <= device * MIB else least <= found <= least * (1 + 1 / 512) + 2 * MIB
    assert replay(run, capacity_bytes=found, settings=options).failure is None


@dataclass
class Training:
    """Steps of random sizes that are all alike: each frees at some point what the step before left."""

    batch: list[tuple[int, int]]  # bytes, and after how many further allocations they are freed
    gradients: list[int]

    def left_after(self, num_steps: int, num_batches: int) -> Timeline:
        """The run that was left after so many steps, of so many batches but for the first."""
        order, requested, phase, waiting, gradients, marks = [], [], [], [], [], []

        def allocate(size: int, kind: Phase) -> int:
            order.append(len(requested))
            requested.append(size)
            phase.append(PHASES.index(kind))
            return order[-1]

        for step in range(num_steps):
            for batch in range(num_batches if step else 1):
                for size, wait in self.batch:
                    waiting.append((allocate(size, Phase.FORWARD), wait % len(self.batch)))
                    order.extend(~number for number, left in waiting if not left)
                    waiting = [(number, left - 1) for number, left in waiting if left]
                for size in self.gradients:
                    made = allocate(size, Phase.BACKWARD)
                    if batch:
                        order.append(~made)
                    else:
                        gradients.append(made)
            if step == 0:
                for size in self.gradients:
                    allocate(size, Phase.OPTIMIZER)
            order.extend(~one for one in gradients)
            gradients.clear()
            marks.append(Mark(len(order), MarkKind.STEP_END))
        marks.append(Mark(len(order), MarkKind.LEFT))
        run = timeline(order, requested, marks=marks)
        return replace(run, phase=np.array(phase, dtype=np.int64))


TRAININGS = st.builds(
    Training,
    st.lists(st.tuples(st.integers(1, 60 * MIB), st.integers(0, 4)), min_size=1, max_size=8),
    st.lists(st.integers(1, 30 * MIB), min_size=1, max_size=4),
)


# The first two steps that come again fit in 348 MiB, a later one does not.
LATE = [(6, 4), (32, 4), (24, 0), (22, 0), (10, 4), (4, 3), (44, 1)]


@given(TRAININGS, st.integers(2, 5))
@example(Training([(size * MIB, wait) for size, wait in LATE], [26 * MIB, 24 * MIB, 30 * MIB, 30 * MIB]), 3)
@settings(max_examples=60)
def test_what_is_enough_for_two_steps_left_is_enough_for_many(training, num_batches):
    least = minimum_device_bytes(training.left_after(2, 2), batches=2, more_batches=num_batches - 2)
    many = training.left_after(22, num_batches)
    assert least == minimum_device_bytes(replace(many, marks=()))


def test_the_third_step_can_need_more_than_two_did():
    left = Training([(20 * MIB, 1), (50 * MIB, 1), (20 * MIB, 1)], [10 * MIB]).left_after(2, 1)
    assert minimum_device_bytes(replace(left, marks=())) == 100 * MIB
    assert minimum_device_bytes(left) == 120 * MIB


def test_steps_that_alternate_are_followed_until_they_repeat():
    class Counting(CachingAllocator):
        num_calls = 0

        def allocate(self, requested_bytes: int, stream: int = 0) -> Block:
            self.num_calls += 1
            return super().allocate(requested_bytes, stream)

    marks = [Mark(1, MarkKind.STEP_END), Mark(3, MarkKind.STEP_END), Mark(3, MarkKind.LEFT)]
    moving = timeline([0, 1, ~0], [8 * MIB, 8 * MIB], marks=marks)  # what each step keeps lies now here, now there
    allocator = Counting(None)
    course_of(moving).run(allocator)
    assert (allocator.num_calls, allocator.reserved_bytes) == (2 + 3, 20 * MIB)


def test_what_grows_is_replayed_no_further():
    leak = Training([(20 * MIB, 0)], [10 * MIB]).left_after(2, 1)
    last = len(leak.order) - 1
    marks = tuple(replace(one, position=min(one.position, last)) for one in leak.marks)
    kept = replace(leak, order=leak.order[:last], marks=marks)  # the last gradient
    assert minimum_device_bytes(kept) == minimum_device_bytes(replace(kept, marks=()))


def test_no_device_is_enough_for_a_fraction_of_nothing():
    with pytest.raises(ValueError, match="memory_fraction 0"):
        minimum_device_bytes(timeline([0], [100]), AllocatorSettings(memory_fraction=0.0))


# ---- settings ----


@pytest.mark.parametrize(
    ("value", "divisions"),
    [  # as torch.cuda.memory._snapshot()["allocator_settings"] of PyTorch 2.13 shows them
        ("4", [4] * 16),
        ("[]", [0] * 16),
        ("[>:2]", [0] + [2] * 15),
        ("[256:8,>:2]", [8] * 9 + [2] * 7),
        ("[4:2,256:8]", [2] * 3 + [0] * 5 + [8] + [0] * 7),
        ("[65536:8]", [8] * 16),
        ("[4:2,>:8,64:4]", [2] * 3 + [8] * 3 + [4] + [8] * 9),
    ],
)
def test_roundup_power2_divisions_are_read_like_pytorch(value, divisions):
    parsed = AllocatorSettings.parse(f"roundup_power2_divisions:{value}")
    assert parsed.roundup_power2_divisions == tuple(divisions)


def test_settings_are_read():
    assert AllocatorSettings.parse("") == AllocatorSettings()
    text = " max_split_size_mb:128 , expandable_segments:True,backend:native,pinned_num_register_threads:8,"
    assert AllocatorSettings.parse(text) == AllocatorSettings(expandable_segments=True, max_split_size_bytes=128 * MIB)
    assert AllocatorSettings.parse("large_segment_size_mb:64").max_non_split_rounding_bytes == 64 * MIB


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_split_size:128", ["max_split_size", "128", "max_split_size_mb"]),
        ("max_split_size_mb=128", ["max_split_size_mb=128"]),
        ("max_split_size_mb:big", ["max_split_size_mb", "big", "MiB"]),
        ("max_split_size_mb", ["max_split_size_mb", "MiB"]),
        ("max_split_size_mb:10", ["max_split_size_mb", "10", "20"]),
        ("large_segment_size_mb:64,max_split_size_mb:32", ["max_split_size_mb", "32"]),
        ("large_segment_size_mb:10", ["large_segment_size_mb", "10", "above 10"]),
        ("expandable_segments:true", ["expandable_segments", "true", "True"]),
        ("garbage_collection_threshold:1.0", ["garbage_collection_threshold", "1.0", "0.8"]),
        ("per_process_memory_fraction:2", ["per_process_memory_fraction", "2", "0.9"]),
        ("roundup_power2_divisions:[256:3]", ["roundup_power2_divisions", "[256:3]", "power of 2"]),
        ("roundup_power2_divisions:[256", ["roundup_power2_divisions", "[256"]),
        ("backend:cudaMallocAsync", ["backend", "cudaMallocAsync", "native"]),
    ],
)
def test_wrong_settings_name_option_value_and_fix(text, words):
    with pytest.raises(ValueError) as caught:
        AllocatorSettings.parse(text)
    for word in words:
        assert word in str(caught.value)


def test_sizes_are_whole_numbers():
    run = timeline([0, 1, ~0], [3 * GIB + 1, 5])
    replayed = replay(run)
    assert isinstance(replayed.peak_allocated_bytes, int)
    assert isinstance(replayed.peak_reserved_bytes, int)
    assert isinstance(minimum_device_bytes(run), int)
