"""A rehearsal shows nothing of what the cell showed already; other threads show what they show."""

from __future__ import annotations

import logging
import threading
import warnings
from typing import Any

import ipywidgets
import matplotlib.pyplot as plt
from IPython.display import clear_output, display
from tqdm.notebook import tqdm

import oom_magic as om
from oom_magic.predict.silence import silenced


def test_what_a_rehearsal_shows_is_not_seen(shell: Any, capsys: Any, monkeypatch: Any) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(type(shell.display_pub), "publish", lambda *args, **kwargs: shown.append(args))
    monkeypatch.setattr(type(shell.display_pub), "clear_output", lambda *args, **kwargs: shown.append("cleared"))
    slider = ipywidgets.IntSlider()
    monkeypatch.setattr(type(slider.comm), "publish_msg", lambda *args, **kwargs: shown.append(args), raising=False)
    go, done = threading.Event(), threading.Event()

    def others() -> None:
        go.wait()
        print("another thread's")
        done.set()

    def run() -> None:
        print("mine")
        logging.getLogger("mine").error("mine")
        warnings.warn("mine", stacklevel=1)
        display("mine")
        for _ in tqdm(range(3)):
            slider.value += 1
        plt.plot([1, 2])
        clear_output()
        go.set()
        done.wait()

    thread = threading.Thread(target=others)
    thread.start()
    before = plt.get_fignums()
    with silenced():
        om.dry_run(run)
    thread.join()
    assert shown == [] and plt.get_fignums() == before
    captured = capsys.readouterr()
    assert captured.out == "another thread's\n" and "mine" not in captured.err
    done.set()  # put back with all that the run's function holds
    om.dry_run(run)
    assert shown and "mine" in capsys.readouterr().out
    plt.close("all")


def test_a_rehearsal_is_announced_and_fast_leaves_it_out(shell: Any, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("oom_magic.notebook.magics.has_gpu", lambda: False)
    cell = "%%gpumem --no-plot --memory 1GiB\nimport torch\nfor _ in range(2):\n    print('mine')\n"
    shell.run_cell(cell + "    torch.ones(2**29, device='cuda')", store_history=True)
    capsys.readouterr()
    shell.run_cell("%oom_explain", store_history=True)
    said = " ".join(capsys.readouterr().out.split())
    assert "will now be run several times" in said and "without side effects" in said and "--fast" in said
    assert "mine" not in said
    shell.run_cell("%oom_explain --fast", store_history=True)
    assert "run several times" not in capsys.readouterr().out
