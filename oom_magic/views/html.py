"""A description as self-contained HTML: no script, nothing fetched, colours of the notebook's theme.

The text comes first; the style sheet swaps it for the rich part, so a page that strips styles (an
untrusted notebook, a code host's preview) still shows everything.
The categories have torch.profiler's colours (parameter green, gradient blue, optimizer state gold, activation red,
temporary purple), moved to the Okabe-Ito set, which colour-blind readers can tell apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from html import escape
from pathlib import Path

from oom_magic.units import format_bytes
from oom_magic.views.blocks import (
    Bars,
    Block,
    Cell,
    Code,
    Description,
    Details,
    Facts,
    Part,
    Parts,
    Picture,
    Sentence,
    Table,
)
from oom_magic.views.text import (
    SIGNS,
    bars_table,
    facts_table,
    numeric_columns,
    parts_table,
    shown,
    shown_code,
    texts,
    to_text,
)

LIGHT = {
    "parameter": "#009e73",
    "gradient": "#0072b2",
    "optimizer_state": "#e69f00",
    "activation": "#d55e00",
    "input": "#37404d",
    "temporary": "#9a7bd0",
    "workspace": "#56b4e9",
    "before": "#87929f",
    "cached": "#c3cbd5",
    "outside": "#a58b6f",
    "other": "#6d5a46",
    "free": "transparent",
    "fg": "#1b1f24",
    "quiet": "#5b636d",
    "line": "#d8dce1",
    "well": "#eef0f2",
    "code": "#f6f7f8",
    "paper": "#ffffff",
    "good": "#0b6e4f",
    "warning": "#8a5a00",
    "bad": "#b3261e",
}
DARK = {
    "parameter": "#2fc79b",
    "gradient": "#5aa9e6",
    "optimizer_state": "#f3b83b",
    "activation": "#f0783c",
    "input": "#dfe4ea",
    "temporary": "#a98de0",
    "workspace": "#8fd3fa",
    "before": "#7f8b99",
    "cached": "#5a6470",
    "outside": "#b59b7f",
    "other": "#8d7861",
    "free": "transparent",
    "fg": "#e8eaed",
    "quiet": "#a3abb5",
    "line": "#454b54",
    "well": "#2b3036",
    "code": "#22262b",
    "paper": "#111418",
    "good": "#5fd0a5",
    "warning": "#f0b849",
    "bad": "#ff8a80",
}
# Where the page has a theme with colours of its own, they win. Without a theme of Jupyter its variables are those that
# ipywidgets brings along, which are for white pages: VS Code's and Colab's are not.
_THEMES = {
    "body[data-jp-theme-light]": {
        "fg": "--jp-content-font-color0",
        "quiet": "--jp-content-font-color2",
        "line": "--jp-border-color2",
        "well": "--jp-layout-color2",
        "code": "--jp-cell-editor-background",
        "paper": "--jp-layout-color0",
    },
    'body[class*="vscode-"]': {
        "fg": "--vscode-editor-foreground",
        "quiet": "--vscode-descriptionForeground",
        "line": "--vscode-panel-border",
        "well": "--vscode-textCodeBlock-background",
        "code": "--vscode-textCodeBlock-background",
        "paper": "--vscode-editor-background",
    },
}
_SHORT = 28  # characters that a cell keeps on one line
_OURS = ":is(.oom,.oom-live)"
# JupyterLab and nbconvert, VS Code (both classes in its light theme of high contrast), Colab and others; then a bare
# page that follows the system.
_DARK = (
    ':where(body[data-jp-theme-light="false"],body.vscode-dark,body.vscode-high-contrast:not(.vscode-high-contrast-light),'
    'html[theme="dark"],html[data-theme="dark"],body[data-theme="dark"])'
)
_SYSTEM_DARK = (
    ':where(html:not([theme]):not([data-theme]) body:not([data-jp-theme-light]):not([data-theme])'
    ':not([class*="vscode"]))'
)  # fmt: skip


def _colours(page: str, values: Mapping[str, str]) -> str:
    """The rule that gives the colours on a page their values."""
    return f"{page} {_OURS}{{{';'.join(f'--oom-{hue}:{value}' for hue, value in values.items())}}}"


def to_html(description: Description) -> str:
    """The description as a fragment of HTML, to be shown by a notebook or put into a page."""
    return (
        f"<div>{style_element()}"
        f'<pre class="oom-text">{escape(to_text(description))}</pre>'
        f'<div class="oom" style="display:none"><h4>{_text(description.title)}</h4>'
        f"{_blocks(description.blocks)}</div></div>"
    )


def to_fragment(blocks: Sequence[Block]) -> str:
    """Blocks alone, for a page that has the ``style_element`` already and where styles are never stripped."""
    return f'<div class="oom">{_blocks(blocks)}</div>'


@cache
def style_element() -> str:
    """The style sheet, with the colours of light and dark themes."""
    themes = "".join(
        _colours(page, {hue: f"var({name})" for hue, name in names.items()}) for page, names in _THEMES.items()
    )
    return (
        f"<style>{_colours('', LIGHT)}{_colours(_DARK, DARK)}"
        f"@media (prefers-color-scheme:dark){{{_colours(_SYSTEM_DARK, DARK)}}}{themes}\n"
        f"{Path(__file__).with_name('style.css').read_text(encoding='utf-8')}</style>"
    )


def _blocks(blocks: Sequence[Block]) -> str:
    return "".join(map(_block, blocks))


def _text(text: str) -> str:
    return escape(shown(text))


def _block(block: Block) -> str:
    match block:
        case Sentence():
            sign = f"<b>{SIGNS[block.tone]}</b>" if block.tone in SIGNS else ""
            return f'<p class="{block.tone}">{sign}{_text(block.text)}</p>'
        case Facts():
            return f"<dl>{''.join(map(_fact, facts_table(block).rows))}</dl>"
        case Parts():
            return _parts(block)
        case Table():
            return _table(block)
        case Bars():
            return _bars(block)
        case Code():
            return f"<pre><code>{escape(shown_code(block.text))}</code></pre>"
        case Picture():
            return f'<figure role="img" aria-label="{_text(block.alt)}">{block.svg}</figure>'
        case Details():
            inner = _blocks(block.blocks)
            return f"<details><summary>{_text(block.title)}</summary><div>{inner}</div></details>"


def _fact(row: tuple[Cell, ...]) -> str:
    label, value, note = map(escape, texts(row))
    return f"<div><dt>{label}</dt><dd>{value}{f'<small>{note}</small>' if note else ''}</dd></div>"


def _parts(parts: Parts) -> str:
    scale = max(parts.whole_bytes, parts.total_bytes)
    marks = _marks(parts.marks, parts.whole_bytes / scale)
    title = f"<h5>{_text(parts.title)}</h5>" if parts.title else ""
    rows = _table(replace(parts_table(parts), title="", shares=()))
    return f"{title}{_stack(parts.parts, scale, marks)}{rows}"


def _marks(marks: Sequence[float], share: float) -> str:
    """Lines across a bar, ``share`` of which is what they are shares of."""
    return "".join(f'<s style="left:{100 * mark * share:.2f}%"></s>' for mark in marks)


def _stack(parts: Sequence[Part], scale_bytes: int, marks: str = "") -> str:
    """Parts side by side; a full width stands for ``scale_bytes``."""
    pieces = ""
    for part in parts:
        hue, percent = _hue(part.hue), 100 * max(part.num_bytes, 0) / scale_bytes
        about = f"{_text(part.label)}: {format_bytes(part.num_bytes)}"
        pieces += f'<i class="hue-{hue}" title="{about}" style="width:{percent:.3f}%;{_colour(hue)}"></i>'
    return f'<div class="stack" aria-hidden="true">{pieces}{marks}</div>'


def _hue(hue: str) -> str:
    return re.sub(r"\W", "", hue)


def _colour(hue: str) -> str:
    return f"background-color:var(--oom-{hue})"


def _bars(bars: Bars) -> str:
    table = bars_table(bars)
    marks = _marks(bars.marks, bars.capacity_bytes / bars.scale_bytes)
    stacks = [f'<td class="stacks">{_stack(bar.parts, bars.scale_bytes, marks)}</td>' for bar in bars.bars]
    note = f'<p class="quiet" aria-hidden="true">{_text(bars.marks_note)}</p>' if bars.marks_note else ""
    return _table(replace(table, shares=()), stacks) + note


def _table(table: Table, ends: Sequence[str] = ()) -> str:
    """A table; ``ends`` are cells to put after each row's own, by default a bar where it has ``shares``."""
    numeric = numeric_columns(table)
    title = f"<h5>{_text(table.title)}</h5>" if table.title else ""
    ends = ends or [_bar(share) for share in table.shares]
    heading = ""
    if table.columns:
        cells = _cells("th", table.columns, numeric)
        heading = f"<thead><tr>{''.join(cells)}{'<th></th>' if ends else ''}</tr></thead>"
    rows = ""
    for position, row in enumerate(table.rows):
        cells = _cells("td", row, numeric)
        if table.hues and (hue := _hue(table.hues[position])):
            swatch = f'<i class="swatch hue-{hue}" style="{_colour(hue)}"></i>'
            cells[0] = cells[0].replace(">", f">{swatch}", 1)
        rows += f"<tr>{''.join(cells)}{ends[position] if ends else ''}</tr>"
    if table.total:
        rows += f'<tr class="total">{"".join(_cells("td", table.total, numeric))}</tr>'
    return f'{title}<div class="scroll"><table>{heading}<tbody>{rows}</tbody></table></div>'


def _bar(share: float) -> str:
    percent = 100 * min(max(share, 0.0), 1.0)
    return f'<td class="bar"><i style="width:{percent:.1f}%"></i></td>'


def _cells(tag: str, row: tuple[Cell, ...], numeric: Sequence[bool]) -> list[str]:
    cells = []
    for text, is_number in zip(texts(row), numeric, strict=True):
        kind = "number" if is_number else "short" if len(text) <= _SHORT else "words"
        cells.append(f'<{tag} class="{kind}">{escape(text)}</{tag}>')
    return cells
