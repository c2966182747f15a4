"""A notebook exported to HTML, opened as a file: its sliders move, and say what ``om.size`` says."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

import oom_magic as om
from oom_magic.units import format_bytes


@pytest.fixture(scope="module", params=["with the widgets' state", "without"])
def exported(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    browser: Any,
    notebook: Any,
) -> Any:
    """The page, scripts on. There is no network: nothing may be fetched."""
    from nbclient import NotebookClient
    from nbconvert import HTMLExporter

    notebook = deepcopy(notebook)
    NotebookClient(notebook, timeout=300, store_widget_state=request.param != "without").execute()
    html, _ = HTMLExporter().from_notebook_node(notebook)
    file = tmp_path_factory.mktemp("export") / "sliders.html"
    file.write_text(html, encoding="utf-8")
    page = browser.new_page()
    page.route(lambda address: not address.startswith("file:"), lambda route: route.abort())
    page.goto(file.as_uri(), wait_until="domcontentloaded")
    page.wait_for_selector(".oom-dials input")
    return page


def test_keys_move_the_sliders_of_an_exported_page(exported: Any, train: Callable[..., None]) -> None:
    batch_size, seq_len = (exported.get_by_role("slider", name=name) for name in ("batch_size", "seq_len"))
    picture = exported.locator(".oom-dials + div")
    assert not picture.is_visible() and exported.locator("figure svg").is_visible()
    batch_size.focus()
    for _ in range(4):
        exported.keyboard.press("ArrowRight")
    seq_len.focus()
    exported.keyboard.press("End")
    at = {"batch_size": int(batch_size.get_attribute("aria-valuetext").split(".")[0]), "seq_len": 4096}
    sizes = om.size(train, memory="2GiB", batch_size=(1, 64), seq_len=(64, 4096, 64), kind="plain")
    words = " ".join(picture.inner_text().split())
    assert f"peak allocated {format_bytes(sizes.peak_allocated_bytes(**at))}" in words
    assert "Safe" in words and "Safe" in seq_len.get_attribute("aria-valuetext")
    exported.get_by_role("button", name="Back to what was set").click()
    assert exported.locator("figure svg").is_visible() and not picture.is_visible()


def test_no_dead_widgets(exported: Any) -> None:
    assert exported.locator(".oom-live:visible").count() == 0
    assert exported.get_by_role("slider").count() == 2
