"""The picture on README's first screen: what ``%%gpumem`` shows under README's own cell.

``pytest tests/browser/test_picture.py --require-browser --update-golden`` takes it anew. The numbers that it shows are
kept in the file as text, which tests/project/test_readme.py compares.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, PngImagePlugin

from tests.support.folders import ROOT

PICTURE = ROOT / "notebooks" / "images" / "gpumem.png"
_HEIGHT = 724  # verdict, figures, timeline and what is there at the peak


def test_the_picture_can_be_taken(browser: Any, shell: Any, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    define, cell = re.findall(r"<!-- run -->\n```python\n(.*?)```", readme, re.DOTALL)[1:3]
    shell.run_cell(define)
    shell.run_cell(cell)
    data = next(output["data"] for output in shell.display_pub.outputs if "text/html" in output.get("data", {}))
    page = browser.new_page(viewport={"width": 980, "height": _HEIGHT}, device_scale_factor=1.5)
    page.set_content(f'<body style="margin:12px; background:white">{data["text/html"]}</body>')
    taken = tmp_path / "gpumem.png"
    page.screenshot(path=str(taken))
    assert taken.stat().st_size > 20_000
    if request.config.getoption("--update-golden"):
        said = PngImagePlugin.PngInfo()
        said.add_text("oom_magic", data["text/plain"].encode("ascii", "ignore").decode())
        Image.open(taken).convert("P", palette=Image.Palette.ADAPTIVE, colors=128).save(PICTURE, pnginfo=said)
