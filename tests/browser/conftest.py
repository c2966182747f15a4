"""JupyterLab on a free port and a headless Chromium, for the tests of what a user sees and drags."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = "sliders.ipynb"
CELLS = (
    """
import torch
from torch import nn
import oom_magic as om

def train(batch_size=4, seq_len=128, kind="plain"):
    layer = nn.Linear(64, 64 if kind == "plain" else 256).to("cuda")
    for _ in range(2):
        rows = torch.randn(batch_size, seq_len, 64, device="cuda")
        if kind == "broken":
            raise ValueError("no such <i>kind</i>")
        layer(rows).relu().mul(2)
""",
    """
panel = om.sliders(train, memory="2GiB", batch_size=(1, 64), seq_len=(64, 4096, 64), kind=["plain", "wide", "broken"])
panel
""",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--require-browser"):
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs JupyterLab and Chromium: --require-browser runs it"))


@pytest.fixture(scope="module")
def notebook() -> Any:
    """What the tests drag sliders in, not yet run."""
    import nbformat  # compiles many grammars, which not every run of any test shall wait for

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in CELLS])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    return notebook


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, notebook: Any) -> Iterator[str]:
    """The address of a JupyterLab whose folder holds the notebook."""
    import nbformat

    folder = tmp_path_factory.mktemp("lab")
    nbformat.write(notebook, folder / NOTEBOOK)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = {f"JUPYTER_{kind}_DIR": str(folder / kind) for kind in ("CONFIG", "DATA", "RUNTIME")}
    options = ["--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}", f"--notebook-dir={folder}"]
    options += ["--IdentityProvider.token=", "--expose-app-in-browser", "--LabApp.news_url=None", "--LabApp.check_for_updates_class="
                "jupyterlab.NeverCheckForUpdate"]  # fmt: skip
    with (folder / "log.txt").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options], cwd=folder, env={**os.environ, **places},
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            _wait_for(f"http://127.0.0.1:{port}/api/status", server)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(20)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium. Playwright leaves its event loop set while it runs: not beyond a module, others have theirs."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    assert chromium, "there is no chromium on the path; apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page(lab: str, browser: Any) -> Any:
    """The notebook, run, with the panel shown."""
    page = browser.new_page(viewport={"width": 1300, "height": 1400})
    page.goto(f"{lab}/doc/tree/{NOTEBOOK}")
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=120_000)
    page.wait_for_selector("text=Python 3 (ipykernel) | Idle", timeout=120_000)
    page.locator(".jp-Cell").first.click()
    for _ in CELLS:
        page.keyboard.press("Shift+Enter")
    page.wait_for_selector(".oom-live .oom dl", timeout=300_000)
    return page


@pytest.fixture(scope="module")
def train() -> Callable[..., None]:
    """The notebook's function."""
    namespace: dict[str, Any] = {}
    exec(CELLS[0], namespace)
    return namespace["train"]  # type: ignore[no-any-return]


def _wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(240):
        assert server.poll() is None, "JupyterLab did not start"
        try:
            urllib.request.urlopen(address, timeout=2).close()
            return
        except OSError:
            time.sleep(0.5)
    raise TimeoutError(address)
