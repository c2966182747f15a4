"""What a dry cell made and a later one drops, through whatever holds it, is free then, as on a card."""

from __future__ import annotations

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
    "recurrent": (f"class Box: pass\nbox = Box()\n{_LSTM}", "box.lstm = None", [8, 0]),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CELLS)
def test_what_an_earlier_dry_cell_made_is_freed_when_it_is_dropped(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """The record of what is to be put back kept it to the end of the cell: too much for what follows, without a word."""
    monkeypatch.setattr("oom_magic.notebook.magics.has_gpu", lambda: False)
    shell.run_cell("import torch")
    first, second, expected = CELLS[name]
    look = "for _ in range(40): torch.zeros(1, device='cuda')\nprint('MiB', torch.cuda.memory_allocated() >> 20)"
    for cell in (first, second):
        assert shell.run_cell(f"%%gpumem --no-plot --gpu A100\n{cell}\n{look}").success
    found = [int(line.split()[1]) for line in capsys.readouterr().out.splitlines() if line.startswith("MiB")]
    assert found == expected
