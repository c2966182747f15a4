"""The sliders as a user has them: dragged in JupyterLab, numbers read from the page, held against dry runs."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import oom_magic as om
from oom_magic.units import format_bytes

_DEADLINE_SECONDS = 60
_WATCH = """() => {
  window.delays = []; window.moved = 0;
  new MutationObserver(() => { if (window.moved) { const since = window.moved; window.moved = 0;
    requestAnimationFrame(() => window.delays.push(performance.now() - since)); } })
    .observe(document.querySelector('.oom-live .oom-picture'), {childList: true, subtree: true});
  document.addEventListener('keydown', () => { window.moved = performance.now(); }, true);
}"""


def picture(page: Any) -> str:
    """The words of the live picture, on one line."""
    return " ".join(page.locator(".oom-live .oom-picture").inner_text().split())


def settle(page: Any) -> str:
    """The picture once the allocator was replayed and nothing changes any more."""
    end = time.monotonic() + _DEADLINE_SECONDS
    text, before = picture(page), ""
    while (text != before or "≥" in text or "≈" in text) and time.monotonic() < end:
        time.sleep(0.5)
        before, text = text, picture(page)
    return text


def values(page: Any) -> dict[str, Any]:
    """What the sliders stand at."""
    batch_size, seq_len = (int(field.input_value()) for field in page.locator(".oom-number input").all())
    return {"batch_size": batch_size, "seq_len": seq_len, "kind": selected(page, "kind").input_value()}


def selected(page: Any, name: str) -> Any:
    """A drop-down by its label."""
    return page.locator(".oom-live .widget-dropdown").filter(has_text=re.compile(f"^{name}")).locator("select")


def handle(page: Any, number: int) -> Any:
    """The handle of a slider."""
    return page.locator(".oom-live .noUi-handle").nth(number)


def drag(page: Any, number: int, share: float) -> None:
    """Drag a slider to a share of its length, in many small moves."""
    track = page.locator(".oom-live .noUi-base").nth(number).bounding_box()
    start = handle(page, number).bounding_box()
    x, y = start["x"] + start["width"] / 2, start["y"] + start["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(track["x"] + track["width"] * share, y, steps=30)
    page.mouse.up()


def assert_page_is_true(page: Any, train: Callable[..., None]) -> None:
    """The page shows what a dry run finds."""
    text = settle(page)
    report = om.dry_run(train, **values(page), memory="2GiB")
    if report.out_of_memory is not None:
        assert "Does not fit" in text
        return
    assert f"peak allocated {format_bytes(report.peak_allocated_bytes)}" in text
    assert f"peak reserved {format_bytes(report.peak_reserved_bytes)}" in text
    assert report.verdict.lower() in text.lower()


@pytest.mark.parametrize(("number", "share"), [(0, 0.3), (1, 0.6), (0, 0.1), (1, 1.0), (0, 1.0), (1, 0.2)])
def test_dragged_sliders_show_what_a_dry_run_finds(
    page: Any, train: Callable[..., None], number: int, share: float
) -> None:
    before = values(page)
    drag(page, number, share)
    settle(page)
    assert values(page) != before
    assert_page_is_true(page, train)


def test_keys_move_a_slider(page: Any, train: Callable[..., None]) -> None:
    before = values(page)
    handle(page, 0).focus()
    page.keyboard.press("ArrowLeft")
    settle(page)
    assert values(page)["batch_size"] == before["batch_size"] - 1
    assert_page_is_true(page, train)


def test_a_value_between_the_stops_is_typed(page: Any, train: Callable[..., None]) -> None:
    field = page.get_by_role("spinbutton", name="seq_len", exact=True)
    field.fill("1100")
    field.press("Enter")
    settle(page)
    assert values(page)["seq_len"] == 1088  # steps of 64
    assert_page_is_true(page, train)


def test_a_click_on_the_map_moves_both(page: Any, train: Callable[..., None]) -> None:
    page.locator(".oom-map button", has_text="batch_size 8, seq_len 512").click()
    settle(page)
    assert values(page) == {"batch_size": 8, "seq_len": 512, "kind": "plain"}
    assert_page_is_true(page, train)


def test_an_error_is_shown_and_the_sliders_stay_usable(page: Any, train: Callable[..., None]) -> None:
    selected(page, "kind").select_option("broken")
    page.wait_for_selector(".oom-live .oom-picture .bad >> text=no such <i>kind</i>", timeout=120_000)
    assert "Cell In[1]:10" in picture(page)
    assert page.locator(".oom-live .jp-RenderedText[data-mime-type*=error]").count() == 0
    selected(page, "kind").select_option("wide")
    page.wait_for_selector(".oom-live .oom-picture dl", timeout=300_000)
    assert_page_is_true(page, train)
    selected(page, "kind").select_option("plain")
    page.wait_for_selector(".oom-live .oom-picture dl")
    assert_page_is_true(page, train)


def test_screen_readers_are_told_names_and_values(page: Any) -> None:
    settle(page)
    for name in ("batch_size", "seq_len"):
        slider = page.get_by_role("slider", name=name, exact=True)
        slider.focus()
        page.keyboard.press("ArrowRight")
        settle(page)
        assert slider.get_attribute("aria-valuetext") == str(values(page)[name])
    for name in ("GPU", "kind"):
        assert page.get_by_role("combobox", name=name, exact=True).count() == 1


def test_code_is_shown_with_keys(page: Any) -> None:
    code = page.locator(".oom-more pre")
    assert not code.first.is_visible()
    page.get_by_role("button", name="Code to paste").focus()
    page.keyboard.press("Space")
    code.first.wait_for(state="visible")
    assert code.first.inner_text().startswith("train(batch_size=")
    page.keyboard.press("Space")
    code.first.wait_for(state="hidden")


def test_nothing_on_the_page_is_without_a_name(page: Any) -> None:
    assert page.locator(".oom-live button:not([title])").count() == 0
    assert page.locator(".oom-live figure:not([aria-label])").count() == 0
    assert page.locator(".oom-live select").count() == page.locator(".oom-live .widget-dropdown label").count()


def test_delay_from_key_to_changed_picture(page: Any, record_property: Callable[[str, object], None]) -> None:
    """Reported, not judged: machines differ. The goal is 100 ms on two cores."""
    page.evaluate(_WATCH)
    handle(page, 0).focus()
    for key in ["ArrowRight"] * 12 + ["ArrowLeft"] * 12:
        page.keyboard.press(key)
        time.sleep(0.3)
    delays = page.evaluate("window.delays")
    assert len(delays) > 12
    median, worst = statistics.median(delays), max(delays)
    record_property("delay_ms", {"median": median, "worst": worst})
    print(f"\nkey to changed picture: median {median:.0f} ms, worst {worst:.0f} ms over {len(delays)} moves")


_OVERFLOWING = """() => [...document.querySelectorAll('.oom-live, .oom-live .oom-controls, .oom-live .oom-picture,'
    + ' .oom-live .oom-map-box, .oom-live .oom-chart')]
  .filter(box => box.clientWidth && box.scrollWidth > box.clientWidth + 1 && getComputedStyle(box).overflowX != 'visible')
  .map(box => `${box.className}: ${box.scrollWidth} in ${box.clientWidth}`)"""
_OVERLAPPING = """() => {
  const shown = [...document.querySelectorAll('.oom-live .oom-map-heading .columns span, .oom-live .oom-map-heading b,'
    + ' .oom-live .oom-map-heading small, .oom-live dl > div, .oom-live .oom-controls .widget-label')]
    .map(one => [one.innerText, one.getBoundingClientRect()]).filter(([text, box]) => text && box.width);
  const hits = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  return shown.flatMap(([text, a], at) => shown.slice(at + 1).filter(([_, b]) => hits(a, b))
    .map(([other, _]) => `${text} on ${other}`));
}"""
_FAINT = """() => {
  const channels = colour => colour.match(/[\\d.]+/g).slice(0, 3).map(Number).map(one => one / 255)
    .map(one => one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
  const light = colour => { const [r, g, b] = channels(colour); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = light(getComputedStyle(document.querySelector('.jp-Notebook')).backgroundColor);
  return [...document.querySelectorAll('.oom-live .oom-picture dt, .oom-live .oom-picture dd, .oom-live .oom-chart text')]
    .filter(one => one.textContent.trim())
    .map(one => { const style = getComputedStyle(one); const own = light(one.tagName == 'text' ? style.fill : style.color);
      return [one.textContent, (Math.max(own, ground) + 0.05) / (Math.min(own, ground) + 0.05)]; })
    .filter(([_, contrast]) => contrast < 4.5).map(([text, contrast]) => `${text}: ${contrast.toFixed(1)}`);
}"""


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
@pytest.mark.parametrize("width", [1280, 900])
def test_nothing_overflows_overlaps_or_is_faint(page: Any, width: int, theme: str, tmp_path: Path) -> None:
    page.set_viewport_size({"width": width, "height": 1400})
    page.evaluate("theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})", theme)
    page.wait_for_selector(f'body[data-jp-theme-light="{str(theme.endswith("Light")).lower()}"]', state="attached")
    settle(page)
    page.locator(".oom-live").first.scroll_into_view_if_needed()
    page.screenshot(path=tmp_path / f"{width}.png")
    assert page.evaluate(_OVERFLOWING) == []
    assert page.evaluate(_OVERLAPPING) == []
    assert page.evaluate(_FAINT) == []
