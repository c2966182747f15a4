"""What a dry cell made is there in the next, and free when that drops it, through whatever holds it, as on a card."""

from __future__ import annotations

import sys

import pytest
from IPython.core.interactiveshell import InteractiveShell

_LINEAR = "torch.nn.Linear(1024, 1024, bias=False)"
_BOX = f"class Box: pass\nbox = Box()\nbox.model = {_LINEAR}.cuda()"
_BATCH = "torch.ones(1024, 1024, device='cuda')"
_TRAINED = f"{_BOX}\nbox.opt = torch.optim.SGD(box.model.parameters(), 0.1)\nbox.model({_BATCH}).sum().backward()"
_DEEP = f"model = torch.nn.Sequential(*[torch.nn.Sequential({_LINEAR}, torch.nn.GELU()) for _ in range(2)]).cuda()"
_MIXED = f"import types\nhead = torch.nn.Sequential({_LINEAR}, {_LINEAR}).cuda()"
_METHOD = f"""class Trainer:
    def __init__(self): self.model, self.buffer = {_LINEAR}.cuda(), [torch.zeros(2**20, device='cuda')]
    def free(self):
        del self.model
        self.buffer = []
trainer = Trainer()"""
_ZEROS = "torch.zeros(2**20, device='cuda')"
_GENERATOR = f"""def made():
    x = {_ZEROS}
    while True: yield x.sum()
"""
_SUSPENDED = f"{_GENERATOR}g = made()\nnext(g)"
_FINITE = f"""def made():
    x = {_ZEROS}
    yield 1
    del x
    yield 2
g = made()
next(g)"""
_COROUTINE = f"""import asyncio
async def made():
    x = {_ZEROS}
    await asyncio.sleep(0)
g = made()
g.send(None)"""
_ASYNC = f"""async def made():
    x = {_ZEROS}
    yield 1
g = made()
try: g.__anext__().send(None)
except StopIteration: pass"""
_TRAINING = f"""model = {_LINEAR}.cuda()
def steps(model):
    optimizer = torch.optim.Adam(model.parameters())
    while True:
        model(torch.ones(8, 1024, device='cuda')).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield
g = steps(model)
next(g)"""
_LOADED = f"""loader = torch.utils.data.DataLoader([{_ZEROS} for _ in range(4)], batch_size=2)
batches = iter(loader)
next(batches)"""
_RAISED = f"""def fail(x):
    y = x * 2
    raise ValueError
try: fail({_ZEROS})
except ValueError as error: kept = error"""
_HOOK = f"""layer = torch.nn.Linear(4, 4)
def hook(x): return lambda *given: x
handle = layer.register_forward_hook(hook({_ZEROS}))"""
_WEAK = f"""import weakref
class Key: pass
key = Key()
table = weakref.WeakKeyDictionary()
table[key] = {_ZEROS}"""
_CONTEXT = f"""import contextvars
kept, other = contextvars.ContextVar('kept'), contextvars.ContextVar('other', default=0)
kept.set({_ZEROS})"""
_LSTM = "box.lstm = torch.nn.LSTM(512, 512).cuda()"

CELLS = {  # what the first cell makes, the second drops; MiB after each, as PyTorch 2.13.0's CUDA build counts them
    "attribute": (_BOX, "box.model = None", [4, 0]),
    "deleted attribute": (_BOX, "del box.model", [4, 0]),
    "item": (f"models = {{'a': {_LINEAR}.cuda()}}", "models['a'] = None", [4, 0]),
    "deleted item": (f"models = {{'a': {_LINEAR}.cuda()}}", "del models['a']", [4, 0]),
    "popped": (f"models = [{_LINEAR}.cuda()]", "models.pop()", [4, 0]),
    "method": (_METHOD, "trainer.free()", [8, 0]),
    "layer": (_MIXED, "head[1] = torch.nn.Identity()", [8, 4]),
    "in another's place": (_BOX, f"box.model = None\nbox.model = {_LINEAR}.cuda()", [4, 4]),
    "slot": (
        "class Box: __slots__ = ('x',)\nbox = Box()\nbox.x = torch.zeros(2**20, device='cuda')",
        "box.x = 0",
        [4, 0],
    ),
    "one of two": ("some = [torch.zeros(2**20, device='cuda') for _ in range(2)]", "some.pop()", [8, 4]),
    "kept elsewhere": (f"{_BOX}\nkept = box.model.weight", "box.model = None", [4, 4]),
    "views of one": (
        "base = torch.zeros(2**20, device='cuda')\nviews = [base[:2], base[2:]]\ndel base",
        "views.pop()",
        [4, 4],
    ),
    "gradients": (_TRAINED, "box.opt.zero_grad()", [24, 20]),
    "graph": (f"{_BOX}\nbox.loss = box.model({_BATCH}).relu().sum()", "box.loss = None", [20, 12]),
    "graph of a name": (f"{_DEEP}\nout = model({_BATCH})", "del out", [36, 16]),
    "graph of a view": (f"{_DEEP}\nout = model({_BATCH})[:2]", "del out", [36, 16]),
    "generator": (_SUSPENDED, "del g", [4, 0]),
    "generator that is closed": (_SUSPENDED, "g.close()", [4, 0]),
    "generator that goes on": (_FINITE, "next(g)", [4, 0]),
    "generator at its end": (_FINITE, "list(g)", [4, 0]),
    "generator in another's place": (_SUSPENDED, "g = made()\nnext(g)", [4, 4]),
    "generator that has not begun": (f"g = (x.sum() for x in [{_ZEROS}])", "g = None", [4, 0]),
    "generator that trains": (_TRAINING, "del g\nmodel.zero_grad()", [28, 20]),
    "generator in a function": (f"{_SUSPENDED}\ndef stop():\n    global g\n    del g", "stop()", [4, 0]),
    "iterators over one": (
        f"{_GENERATOR}import itertools\ng = itertools.islice(zip(made(), range(9)), 5)\nnext(g)",
        "del g",
        [4, 0],
    ),
    "coroutine": (_COROUTINE, "g.close()", [4, 0]),
    "async generator": (_ASYNC, "del g", [4, 0]),
    "batches": (_LOADED, "del batches, loader", [16, 0]),
    "closure": (f"def outer():\n    x = {_ZEROS}\n    return lambda: x\nf = outer()", "del f", [4, 0]),
    "partial": (f"import functools\nf = functools.partial(torch.add, {_ZEROS})", "f = None", [4, 0]),
    "frames of an error": (_RAISED, "del kept", [8, 0]),
    "hook": (_HOOK, "handle.remove()\ndel handle", [4, 0]),
    "weak key": (_WEAK, "del key", [4, 0]),
    "context variable": (_CONTEXT, "kept.set(0)", [4, 0]),
    "context variable that is kept": (_CONTEXT, "other.set(0)", [4, 4]),
    "recurrent": (f"class Box: pass\nbox = Box()\n{_LSTM}", "box.lstm = None", [8, 0]),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", CELLS)
def test_what_an_earlier_dry_cell_made_is_freed_when_it_is_dropped(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """The record of what is to be put back kept it to the end of the cell: too much for what follows, without a word."""
    monkeypatch.setattr("oom_magic.notebook.magics.has_gpu", lambda: False)
    shell.run_cell("import torch")
    first, second, expected = CELLS[name]
    look = "for _ in range(400): torch.zeros(1, device='cuda')\nprint('MiB', torch.cuda.memory_allocated() >> 20)"
    for cell in (first, f"{look}\n{second}"):
        assert shell.run_cell(f"%%gpumem --no-plot --gpu A100\n{cell}\n{look}").success
    found = [int(line.split()[1]) for line in capsys.readouterr().out.splitlines() if line.startswith("MiB")]
    assert found == [expected[0], *expected]


@pytest.mark.parametrize(
    "cell",
    ["%%time\nmodel = MADE\nLOOK", "%%time\ndel model\nmodel = MADE\nLOOK", "%time model = MADE\nLOOK"],
)
def test_what_a_magic_runs_drops_it_too(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cell: str
) -> None:
    """Under ``%%time`` a cell that was run twice kept the older model and its optimizer."""
    monkeypatch.setattr("oom_magic.notebook.magics.has_gpu", lambda: False)
    shell.run_cell("import torch")
    look = "print('MiB', torch.cuda.memory_allocated() >> 20)"
    cell = cell.replace("MADE", f"{_LINEAR}.cuda()").replace("LOOK", look)
    for one in (f"model = {_LINEAR}.cuda()\n{look}", cell):
        assert shell.run_cell(f"%%gpumem --no-plot --gpu A100\n{one}").success
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("MiB")] == ["MiB 4"] * 2
    assert not shell.ast_transformers


@pytest.mark.skipif(sys.version_info < (3, 11), reason="a generator does not refer to its function")
def test_what_a_generator_of_the_users_holds_at_the_end_of_a_dry_cell_is_said_to_be_free_then(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cell takes items from a copy, which ends with the cell: the user's own shall run none of its code."""
    monkeypatch.setattr("oom_magic.notebook.magics.has_gpu", lambda: False)
    shell.run_cell(f"import torch\n{_GENERATOR}g = made()")
    assert shell.run_cell("%%gpumem --no-plot --gpu A100\nnext(g)").success
    shown = (str(one["data"].get("text/plain", "")) for one in shell.display_pub.outputs)
    said = " ".join(" ".join(shown).split())
    assert "`made` is a generator of yours" in said and "the 4.00 MiB that it holds" in said
