"""Pages that are not Jupyter's: what a report and the panel of the sliders say there can be read.

The variables and classes are those that VS Code gives its notebooks (with ipywidgets loaded, whose own variables are for
a white page, and the white paper that it puts under widgets) and those of a dark Colab.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import oom_magic as om

IPYWIDGETS = """:root{--jp-content-font-color0:black;--jp-content-font-color1:black;--jp-content-font-color2:#616161;
--jp-border-color2:#e0e0e0;--jp-layout-color0:white;--jp-layout-color1:white;--jp-layout-color2:#eeeeee;
--jp-widgets-color:var(--jp-content-font-color1);--jp-widgets-label-color:var(--jp-widgets-color);
--jp-widgets-input-color:rgba(0,0,0,.8);--jp-widgets-input-background-color:var(--jp-layout-color1)}
.widget-label{color:var(--jp-widgets-label-color)}
.widget-text input{color:var(--jp-widgets-input-color);background:var(--jp-widgets-input-background-color)}
.cell-output-ipywidget-background{background:white!important}"""
DARK = "#1f1f1f", "#cccccc", "#9d9d9d", "#2b2b2b"
LIGHT = "#ffffff", "#292929", "#3b3b3b", "#f2f2f2"
PAGES = {
    "vscode dark": ('<body class="vscode-dark"', DARK),
    "vscode light": ('<body class="vscode-light"', LIGHT),
    "vscode light, high contrast": ('<body class="vscode-high-contrast-light vscode-high-contrast"', LIGHT),
    "colab dark": ('<html theme="dark"><body', DARK),
}
# The least contrast of a text with what is behind it, as WCAG 2 defines it.
CONTRAST = """() => {
  const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
  const behind = element => {
    for (; element; element = element.parentElement) {
      const [r, g, b, a = 1] = numbers(getComputedStyle(element).backgroundColor);
      if (a > .5) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const light = rgb => rgb.slice(0, 3).map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const shown = [...document.querySelectorAll(".oom *, .widget-label, .widget-text input")].filter(
    element => element.checkVisibility() && (element.value || [...element.childNodes].some(
      node => node.nodeType === 3 && node.data.trim())) && !element.closest("svg"));
  return shown.map(element => {
    const pair = [light(numbers(getComputedStyle(element).color)), light(behind(element))].sort((a, b) => b - a);
    return [(pair[0] + .05) / (pair[1] + .05), element.textContent || element.value];
  }).sort((a, b) => a[0] - b[0]);
}"""


@pytest.fixture(scope="module")
def shown(train: Callable[..., None]) -> str:
    """A report, and what the panel has of its own."""
    report = om.dry_run(train, gpu="RTX 3060")
    panel = om.sliders(train, memory="2GiB", batch_size=(1, 8))
    words = "".join(child.value for child in panel.children if hasattr(child, "value"))
    return (
        f'{report._repr_mimebundle_()["text/html"]}<div class="cell-output-ipywidget-background"><div class="oom-live">'
        f'{words}<label class="widget-label">batch_size</label><div class="widget-text"><input value="4"></div></div></div>'
    )


@pytest.mark.parametrize("name", PAGES)
def test_all_that_is_said_can_be_read(name: str, shown: str, browser: Any) -> None:
    head, (paper, text, quiet, code) = PAGES[name]
    theirs = (
        f"--vscode-editor-background:{paper};--vscode-editor-foreground:{text};--vscode-descriptionForeground:{quiet};"
        f"--vscode-panel-border:{code};--vscode-textCodeBlock-background:{code};background:{paper};color:{text}"
    )
    page = browser.new_page(viewport={"width": 1000, "height": 1200})
    page.set_content(f'<!DOCTYPE html>{head} style="{theirs}"><style>{IPYWIDGETS}</style>{shown}')
    found = page.evaluate(CONTRAST)
    assert len(found) > 40
    assert not [one for one in found if one[0] < 4.5]
