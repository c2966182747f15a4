"""What a dry run takes from the user's iterators and generators is there again, or said."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import io
import itertools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from oom_magic.predict.session import DrySession


def test_what_is_taken_from_the_users_iterators_is_there_again_or_said() -> None:
    words, seen, files = ["a", "b", "c"], list(range(20)), {one.name for one in Path().iterdir()}
    torch.manual_seed(0)

    def made(items: Any, *numbers: int, by: int, **others: int) -> Any:
        yield next(items), numbers, by, others
        yield from items

    loader = torch.utils.data.DataLoader(seen, batch_size=2, shuffle=True)  # type: ignore[arg-type]
    names: dict[str, Any] = {
        "listed": iter(words),
        "backwards": reversed(words),
        "keys": iter(dict.fromkeys(words)),
        "numbered": enumerate(map(str.upper, iter(words))),
        "pairs": zip(words, seen, strict=False),
        "cycled": itertools.cycle(seen),
        "summed": itertools.accumulate([1, 2]),
        "batches": iter(loader),
        "held": {"inside": [iter(words)]},
        "digest": hashlib.sha256(b"a"),
        "packed": gzip.GzipFile(fileobj=io.BytesIO(), mode="wb"),
        "generator": (number for number in range(9)),
        "begun": (number for number in range(9)),
        "called": made(iter(words), 1, 2, by=3, other=4),
        "found": re.finditer("[a-z]", "abc"),
        "folder": os.scandir(),
        "awaited": asyncio.sleep(0),
        "waiting": asyncio.sleep(0),
    }
    iterators = [names[name] for name in ("listed", "backwards", "keys", "numbered", "pairs", "batches")]
    iterators.append(names["held"]["inside"][0])
    for one in (*iterators, names["begun"]):
        next(one)
    names["packed"].write(b"before")

    def run() -> None:
        for name in (
            "listed",
            "backwards",
            "keys",
            "numbered",
            "pairs",
            "cycled",
            "summed",
            "batches",
            "generator",
            "begun",
        ):
            next(names[name])
        assert list(names["called"]) == [("a", (1, 2), 3, {"other": 4}), "b", "c"]
        for name in ("found", "folder"):
            with names["folder"], pytest.raises(RuntimeError, match="make a list of it"):
                next(names[name])
        asyncio.run(names["awaited"])
        next(names["held"]["inside"][0])
        names["digest"].update(b"b")
        names["packed"].write(b"inside")
        names["packed"].flush()

    report = DrySession(has_bar=False, is_lasting=False).run(run, [names])
    said = [one.text.split("`")[1] for one in report.assumptions if "of yours" in one.text]
    has_copies = sys.version_info < (3, 14)  # since then those of itertools cannot be copied
    gone = [] if sys.version_info >= (3, 11) else ["generator", "begun", "called", "awaited"]
    assert said == [*([] if has_copies else ["cycled", "summed"]), *gone]
    assert (next(names["cycled"]), next(names["summed"])) == ((0, 1) if has_copies else (1, 3))
    names["waiting"].close(), names["awaited"].close()
    assert [one.group() for one in names["found"]] == ["a", "b", "c"] and {one.name for one in names["folder"]} == files
    if not gone:
        assert [*names["generator"]] == [*range(9)] and [*names["called"]][1:] == ["b", "c"]
        assert [*names["begun"]] == [*range(1, 9)]
    for name, one in zip(("listed", "backwards", "keys", "numbered", "pairs", "batches"), iterators, strict=False):
        assert names[name] is one
    rest = [list(itertools.islice(one, 9)) for one in iterators]
    assert rest[:5] == [["b", "c"], ["b", "a"], ["b", "c"], [(1, "B"), (2, "C")], [("b", 1), ("c", 2)]]
    assert len({int(number) for batch in rest[5] for number in batch}) == 18 and rest[6] == ["b", "c"]
    assert names["digest"].hexdigest() == hashlib.sha256(b"a").hexdigest()
    written = names["packed"].fileobj
    names["packed"].close()
    assert gzip.decompress(written.getvalue()) == b"before"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="a generator does not refer to its function")
def test_generators_that_have_begun_give_the_run_items_of_new_ones() -> None:
    made: list[int] = []

    def batches(sizes: Iterator[int], *, seed: int) -> Iterator[Any]:
        kept = []
        for size in sizes:
            kept.append(size)
            made.append(seed)
            yield torch.ones(size, device=device), kept

    def counting(start: int) -> Iterator[int]:
        while True:
            start += 1
            yield start

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        made.append(-1)
        yield
        made.append(-2)

    def growing(own: list[int]) -> Iterator[list[int]]:
        while True:
            own.append(len(own))
            yield list(own)

    device = "cpu"
    names: dict[str, Any] = {
        "growing": growing([]),
        "stream": batches(iter([4, 8, 16]), seed=7), "inside": {"pairs": zip(batches(iter([1, 2]), seed=8), "ab", strict=True)},
        "counting": counting(3), "opened": entered(), "sent": batches(iter([3]), seed=9), "made": made,
    }  # fmt: skip
    _first, kept = next(names["stream"])
    next(names["inside"]["pairs"]), next(names["counting"]), names["opened"].__enter__(), next(names["sent"])
    before = list(made)
    assert next(names["growing"]) == [0]

    def run() -> None:
        assert next(names["growing"]) == [0, 1]
        assert [(len(one), sizes) for one, sizes in names["stream"]] == [(8, [8, 16]), (16, [8, 16])]
        assert [letter for _, letter in names["inside"]["pairs"]] == ["b"]
        for refused in (names["counting"].__next__, lambda: names["opened"].__exit__(None, None, None)):
            with pytest.raises(RuntimeError, match="without taking them from you"):
                refused()
        with pytest.raises(RuntimeError, match="without taking them from you"):
            names["sent"].send(1)

    report = DrySession(has_bar=False, is_lasting=False).run(run, [names])
    assert [one.text.split("`")[1].rpartition(".")[2] for one in report.assumptions] == ["growing", "batches"]
    assert next(names["growing"]) == [0, 1]
    assert made == before and kept == [4] and next(names["counting"]) == 5
    assert [(len(one), sizes) for one, sizes in names["stream"]] == [(8, [4, 8, 16]), (16, [4, 8, 16])]
    names["opened"].__exit__(None, None, None)
    assert made[-1] == -2


@pytest.mark.skipif(not (3, 11) <= sys.version_info < (3, 14), reason="itertools cannot be copied since 3.14")
def test_what_a_chain_goes_through_keeps_its_items() -> None:
    def numbers() -> Iterator[int]:
        yield from (1, 2, 3)

    chains = [
        itertools.chain(numbers(), [7]),
        itertools.chain(iter([1, 2, 3]), zip([7], strict=True)),
        itertools.chain([numbers()]),
    ]
    names = {"chains": chains}
    report = DrySession(has_bar=False, is_lasting=False).run(lambda: [[*one] for one in names["chains"]], [names])
    assert not report.assumptions
    within: list[Any] = [[1]]
    within.append(iter(within))  # has no end
    held = {"endless": itertools.chain.from_iterable(iter(within))}
    report = DrySession(has_bar=False, is_lasting=False).run(lambda: next(held["endless"]), [held])
    assert "`endless` is an iterator of yours" in report.assumptions[0].text
    assert [[*one] for one in chains[:2]] == [[1, 2, 3, 7], [1, 2, 3, (7,)]] and [*next(chains[2])] == [1, 2, 3]
