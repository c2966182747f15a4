"""What an object holds, and no name or attribute of Python's shows, is after a dry run what it was before it."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import csv
import ctypes
import decimal
import functools
import gc
import io
import logging
import pickle
import queue
import random
import select
import sqlite3
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import ipywidgets
import numpy as np
import pytest
import torch

import oom_magic as om
from oom_magic.predict.session import DrySession

Case = tuple[Any, Callable[[], Any], Callable[[Any], Any]]  # an object, what it shows, and what a run does to it


def test_what_objects_hold_inside_is_as_before() -> None:
    inner, lock, semaphore, event = {"a": [1]}, threading.Lock(), threading.Semaphore(2), threading.Event()
    simple: queue.SimpleQueue[int] = queue.SimpleQueue()
    simple.put(1)
    read = io.BufferedReader(io.BytesIO(b"0123456789"))  # type: ignore[arg-type]
    read.read(2)
    element, context, number = ElementTree.fromstring("<a b='1'><c/></a>"), decimal.Context(prec=5), ctypes.c_int(5)
    module, tensor, layer = types.ModuleType("made"), torch.ones(2), torch.nn.Linear(1, 1)
    module.x, tensor.seen, layer.seen = [1], [1], {"a": [1]}  # type: ignore[attr-defined]
    bits, seeds, storage = np.random.PCG64(1), np.random.SeedSequence(1), torch.ones(2).untyped_storage()
    called, fields, graph = functools.partial(mixed, kept=[5]), np.zeros(2, [("a", "i4")]), traced()
    polled, epolled, database = select.poll(), select.epoll(), sqlite3.connect(":memory:")
    polled.register(0)
    closed = sqlite3.connect(":memory:")
    closed.close()
    spawning = np.random.default_rng(1)
    shaped, error = np.ones(4), ValueError("before")
    chain = collections.ChainMap({"a": 1}, {"b": [2]})
    appended = [1].append
    data = io.BytesIO(pickle.dumps([1]))
    pickler, unpickler = pickle.Pickler(io.BytesIO()), pickle.Unpickler(data)
    adapter = logging.LoggerAdapter(logging.getLogger("users"), {"a": 1})
    alock, aqueue, asemaphore, aevent = asyncio.Lock(), asyncio.Queue[int](), asyncio.Semaphore(1), asyncio.Event()
    layer.numbers, shown, sent = iter([1, 2]), ipywidgets.IntSlider(1), list[Any]()  # type: ignore[assignment]
    shown.send_state = lambda key=None: sent.append((shown.value, key))
    counted, finalizer, owned, numbers = Counted(1), weakref.finalize(layer, print), threading.RLock(), np.arange(4)
    owned.acquire(), owned.acquire()
    walked, flat, rows = np.nditer(numbers), numbers.flat, csv.reader(iter(["a,b", "c,d"]))
    cases: list[Case] = [
        (counted, lambda: counted.number, lambda one: setattr(one, "number", 2)),
        (finalizer, lambda: finalizer.atexit, lambda one: setattr(one, "atexit", False)),
        (owned, lambda: repr(owned).partition(" at ")[0], lambda one: (one.release(), one.release())),
        (walked, lambda: walked.iterindex, next),
        (flat, lambda: flat.index, lambda one: one is not flat and next(one)),
        (rows, lambda: rows.line_num, next),
        (lock, lock.locked, lambda one: one.acquire()),
        (semaphore, lambda: semaphore._value, lambda one: one.acquire()),
        (event, event.is_set, lambda one: one.set()),
        (simple, simple.qsize, lambda one: one.put(2)),
        (read, lambda: (read.tell(), read.peek()), lambda one: one.read()),
        (element, lambda: ElementTree.tostring(element), lambda one: (one.set("b", "2"), one.clear())),
        (context, lambda: str(context), lambda one: setattr(one, "prec", 9)),
        (number, lambda: number.value, lambda one: setattr(one, "value", 6)),
        (types.MappingProxyType(inner), lambda: str(inner), lambda one: one["a"].append(2)),
        (module, lambda: str(module.x), lambda one: one.x.append(2)),
        (tensor, lambda: str(tensor.seen), lambda one: one.seen.append(2)),  # type: ignore[attr-defined]
        (layer, lambda: str(layer.seen), lambda one: one.seen["a"].append(next(one.numbers))),
        (bits, lambda: str(bits.state), lambda one: one.random_raw()),
        (seeds, lambda: seeds.n_children_spawned, lambda one: one.spawn(2)),
        (spawning, lambda: num_spawned(spawning), lambda one: (one.spawn(2), one.random())),
        (storage, storage.tolist, lambda one: one.fill_(0)),
        (called, lambda: str((called.args, called.keywords)), lambda one: one.keywords["kept"].append(6)),
        (shaped, lambda: shaped.shape, lambda one: setattr(one, "shape", (2, 2))),
        (error, lambda: error.args, lambda one: setattr(one, "args", ())),
        (chain, lambda: str(chain), lambda one: (one["b"].append(3), one.maps.append({}), one.update(c=1))),
        (appended, lambda: str(appended.__self__), lambda one: one(2)),
        (fields, lambda: fields.dtype.names, lambda one: setattr(one.dtype, "names", ("b",))),
        (polled, lambda: is_polled(polled), lambda one: one.unregister(0)),
        (epolled, lambda: epolled.closed, lambda one: one.close()),
        (database, lambda: database.in_transaction, begin),
        (closed, lambda: str(type(closed)), id),
        (pickler, lambda: len(pickler.memo.copy()), lambda one: one.dump([2])),
        (unpickler, lambda: (data.tell(), unpickler.memo.copy()), lambda one: one.load()),
        (adapter, lambda: adapter.extra["a"], lambda one: one.extra.update(a=2)),  # type: ignore[index]
        (alock, alock.locked, lambda one: setattr(one, "_locked", True)),
        (aqueue, aqueue.qsize, lambda one: one.put_nowait(2)),
        (asemaphore, asemaphore.locked, lambda one: setattr(one, "_value", 0)),
        (aevent, aevent.is_set, lambda one: one.set()),
        (graph, lambda: (graph.code, len(graph.graph.nodes), graph(torch.ones(1)).item()), rewrite),
        (mixed, lambda: str(mixed.__kwdefaults__), lambda one: one.__kwdefaults__.update(kept=0)),
        (
            shown,
            lambda: (shown.value, hasattr(shown, "mine")),
            lambda one: setattr(one, "mine", setattr(one, "value", 2)),
        ),
    ]
    if sys.version_info < (3, 14):  # since then a dictionary of annotations is made when it is asked for
        cases.append(
            (annotated, lambda: str(annotated.__annotations__), lambda one: one.__annotations__.update(more=int))
        )
    with contextlib.suppress(ImportError):
        cases += pandas_cases()
    with contextlib.suppress(ImportError):
        cases += polars_cases()
    with contextlib.suppress(ImportError):
        cases += tokenizer_cases()
    with contextlib.suppress(ImportError):
        cases += image_cases()
    names = {"objects": [one for one, _show, _change in cases]}

    def run() -> None:
        for at, (_one, _show, change) in enumerate(cases):
            change(names["objects"][at])  # type: ignore[index]

    before = [show() for _one, show, _change in cases]
    DrySession(has_bar=False, is_lasting=False).run(run, [names])
    assert [show() for _one, show, _change in cases] == before
    assert next(layer.numbers) == 1 and sent[-1] == (1, {"value"})  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_stays_real_is_neither_written_nor_gone_backward_through() -> None:
    """PyTorch watches a tensor whose gradient is retained."""
    model = torch.nn.Linear(3, 3)
    retained = model(torch.ones(2, 3))
    retained.retain_grad()
    sparse, nested = torch.eye(3).to_sparse(), torch.nested.nested_tensor([torch.ones(2)])
    names = {"retained": retained, "sparse": sparse, "nested": nested, "model": model}
    for run in (
        lambda: retained.sum().backward(),
        lambda: retained.backward(torch.ones_like(retained)),
        lambda: sparse.zero_(),
        lambda: nested.zero_(),
        lambda: torch.add(torch.ones(2, 3), 1, out=retained.data),
    ):
        with pytest.raises(RuntimeError, match="is the real tensor"):
            DrySession(has_bar=False, is_lasting=False).run(run, [names])
        assert model.weight.grad is None and retained.grad is None
    gc.collect()  # errors hold what other tests would be told of
    assert sparse.to_dense().equal(torch.eye(3)) and nested.unbind()[0].equal(torch.ones(2))
    retained.sum().backward()
    assert retained.grad.equal(torch.ones(2, 3)) and model.bias.grad.tolist() == [2, 2, 2]


def nest(one: Any) -> None:
    one.at[0, "b"].append(2)
    one.flags.allows_duplicate_labels = False


def polars_cases() -> list[Case]:
    import polars

    table, column = polars.DataFrame({"a": [1, 2]}), polars.Series("b", [1, 2])
    return [
        (table, table.rows, lambda one: (one.insert_column(0, polars.Series("c", [3, 4])), one.extend(one.clone()))),
        (column, column.to_list, lambda one: (one.append(one.clone()), one.__setitem__(0, 5))),
    ]


def pandas_cases() -> list[Case]:
    import pandas

    table, kinds = pandas.DataFrame({"a": [1]}), pandas.Categorical(["a", "b"])
    nested, row = pandas.DataFrame({"a": [1], "b": [[1]]}), pandas.Series([[1]], name="row")
    return [
        (nested, lambda: (str(nested), nested.flags.allows_duplicate_labels), nest),
        (row, lambda: (str(row), row.name), lambda one: (one[0].append(2), setattr(one, "name", "other"))),
        (table, lambda: str(table.attrs), lambda one: one.attrs.update(a=1)),
        (kinds, kinds.tolist, lambda one: one.__setitem__(0, "b")),
    ]


def tokenizer_cases() -> list[Case]:
    from tokenizers import Tokenizer, models, normalizers

    words = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    words.add_special_tokens(["<s>"])

    def change(one: Any) -> None:
        one.add_tokens(["b"]), one.enable_padding(length=9), one.enable_truncation(1)
        one.normalizer = normalizers.Lowercase()

    return [(words, lambda: (words.to_str(), words.encode("A").ids, words.get_vocab_size()), change)]


def image_cases() -> list[Case]:
    from PIL import Image, ImageDraw

    image, other = Image.new("RGB", (4, 4)), Image.new("L", (2, 2))
    draw = ImageDraw.Draw(other)
    return [
        (
            image,
            lambda: (image.tobytes(), dict(image.info)),
            lambda one: (one.putpixel((0, 0), 9), one.info.update(a=1)),
        ),
        (draw, other.tobytes, lambda one: one.line((0, 0, 1, 1), fill=9)),
    ]


def is_polled(poll: Any) -> bool:
    """Whether it waits for file 0."""
    try:
        poll.modify(0, select.POLLIN)
    except OSError:
        return False
    return True


def begin(database: sqlite3.Connection) -> None:
    database.execute("begin")
    database.execute("create table a (b)")
    database.execute("insert into a values (1)")


def num_spawned(generator: np.random.Generator) -> Any:
    """What random numbers come next, of it and its children."""
    return str(generator.bit_generator.state), generator.bit_generator.seed_seq.n_children_spawned  # type: ignore[attr-defined]


def traced() -> torch.fx.GraphModule:
    return torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()))


def rewrite(graph: torch.fx.GraphModule) -> None:
    first, relu, tanh, last = graph.graph.nodes
    relu.replace_all_uses_with(first)
    graph.graph.erase_node(relu)
    tanh.target = "0"
    with graph.graph.inserting_after(tanh):
        last.args = (graph.graph.call_function(torch.neg, (tanh,)),)
    graph.recompile()
    assert graph(torch.ones(1)) == -1


def mixed(*, kept: int = 1) -> int:
    return kept


def test_iterators_are_as_before_wherever_they_are_held() -> None:
    class Slotted:
        __slots__ = ("one",)

        def __init__(self) -> None:
            self.one = iter("abc")

    def taking(one: Any) -> Callable[[], Any]:
        return lambda: next(one)

    Held = collections.namedtuple("Held", "one")
    names: dict[str, Any] = {
        "pair": (iter("abc"), [iter("abc")], (iter("abc"),)),
        "named": Held(iter("abc")),
        "queue": collections.deque([iter("abc")]),
        "slotted": Slotted(),
        "bound": functools.partial(next, iter("abc")),
        "closed": taking(iter("abc")),
        "deep": {"inside": [(number for number in range(3))]},
        "awaited": {"future": asyncio.new_event_loop().create_future()},
    }

    def take() -> list[Any]:
        first, (second,), (third,) = names["pair"]
        held = [first, second, third, names["named"].one, names["queue"][0], names["slotted"].one]
        return [*map(next, held), names["bound"](), names["closed"]()]

    def run() -> None:
        take()
        next(names["deep"]["inside"][0])
        names["awaited"]["future"].cancel()

    before = sys.getrefcount(names["pair"][0])
    report = DrySession(has_bar=False, is_lasting=False).run(run, [names])
    after = sys.getrefcount(names["pair"][0])
    assert after == before
    assert take() == ["a"] * 8
    said = [one.text for one in report.assumptions if "of yours" in one.text]
    assert "coroutine or future" in said[0]
    if sys.version_info >= (3, 11):  # a generator that has not begun is begun anew for the run
        assert len(said) == 1 and [*names["deep"]["inside"][0]] == [0, 1, 2]
    else:
        assert len(said) == 2 and "<genexpr>" in said[1]
    names["awaited"]["future"].get_loop().close()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="a generator does not refer to its function")
def test_async_generators_give_the_run_items_of_new_ones() -> None:
    async def counting(start: int) -> Any:
        for number in range(start, 9):
            yield number

    async def growing(number: int) -> Any:
        while True:
            number += 1
            yield number

    @contextlib.asynccontextmanager
    async def entered() -> Any:
        yield

    async def taken(items: Any) -> list[int]:
        return [one async for one in items]

    async def both() -> tuple[list[str], list[Any]]:
        fresh, begun, other, context = counting(6), counting(5), growing(1), entered()
        await anext(begun), await anext(other), await context.__aenter__()

        async def run() -> None:
            assert (await taken(fresh), await taken(begun)) == ([6, 7, 8], [5, 6, 7, 8])
            with pytest.raises(RuntimeError, match="make a list of it"):
                await anext(other)
            with pytest.raises(RuntimeError, match="make a list of it"):
                await context.__aexit__(None, None, None)

        report = om.dry_run(run)
        await context.__aexit__(None, None, None)
        said = [one.text for one in report.assumptions if "begins anew" in one.text]
        return said, [await taken(fresh), await taken(begun), await anext(other)]

    (said,), rest = asyncio.run(both())
    assert rest == [[6, 7, 8], [6, 7, 8], 3] and "counting" in said


class Counted(random.Random):
    """A generator of random numbers with an attribute of the user's."""

    number = 0


def annotated(number: int) -> None:
    """A function whose annotations are changed."""


class Trainer:
    """What a bound method leads to."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def train(self, sizes: list[int], by_name: dict[str, int]) -> None:
        self.losses.append(0.0)
        sizes.append(1)
        by_name["size"] = 1


def test_what_only_the_function_itself_holds_is_as_before() -> None:
    count, seen, rest = 0, [0], iter("abc")

    def run(given: Any, *more: Any, kept: list[int] = [1], **named: Any) -> None:  # noqa: B006 (it is changed here)
        nonlocal count
        count += 1
        seen.append(count), kept.append(count), named["table"].update(size=1)
        assert (next(rest), next(given), [*more[0]]) == ("a", 1, [2, 3])

    given, more, table, trainer, sizes = iter([1, 2]), iter([2, 3]), {"size": 0}, Trainer(), [0]
    for _ in range(2):
        om.dry_run(run, given, more, table=table)
        om.dry_run(functools.partial(trainer.train, sizes), table)
    assert (count, seen, run.__kwdefaults__, table) == (0, [0], {"kept": [1]}, {"size": 0})
    assert (trainer.losses, sizes, [*rest], [*given], [*more]) == ([], [0], ["a", "b", "c"], [1, 2], [2, 3])
    om.size(trainer_of(trainer), batch_size=(1, 2))
    assert trainer.losses == []


def trainer_of(trainer: Trainer) -> Callable[[int], None]:
    def train(batch_size: int) -> None:
        trainer.losses.append(float(torch.zeros(batch_size, device="cuda").numel()))

    return train
