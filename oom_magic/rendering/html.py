"""A description as self-contained HTML: no script, nothing fetched, colours of the notebook's theme.

The text comes first; the style sheet swaps it for the rich part, so a page that strips styles (an
untrusted notebook, a code host's preview) still shows everything.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from html import escape
from pathlib import Path

from oom_magic.description import (
    Block,
    Cell,
    Code,
    Description,
    Details,
    Facts,
    Parts,
    Picture,
    Sentence,
    Table,
)
from oom_magic.rendering.layout import (
    SIGNS,
    facts_table,
    numeric_columns,
    parts_table,
    shown,
    shown_code,
    texts,
)
from oom_magic.rendering.palette import DARK, LIGHT, css_variables
from oom_magic.rendering.text import to_text

_SHORT = 28  # characters that a cell keeps on one line
# JupyterLab and nbconvert, VS Code, Colab and others; then a bare page that follows the system.
_DARK = (
    'body[data-jp-theme-light="false"] .oom,body.vscode-dark .oom,body.vscode-high-contrast .oom,'
    'html[theme="dark"] .oom,html[data-theme="dark"] .oom,body[data-theme="dark"] .oom'
)
_SYSTEM_DARK = (
    'html:not([theme]):not([data-theme]) body:not([data-jp-theme-light]):not([data-theme])'
    ':not([class*="vscode"]) .oom'
)  # fmt: skip


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
    dark = css_variables(DARK)
    return (
        f"<style>.oom{{{css_variables(LIGHT)}}}{_DARK}{{{dark}}}"
        f"@media (prefers-color-scheme:dark){{{_SYSTEM_DARK}{{{dark}}}}}\n"
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
    scale = 100 / max(parts.whole_bytes, parts.total_bytes)
    hues = [re.sub(r"\W", "", part.hue) for part in parts.parts]
    stack = "".join(
        f'<i class="hue-{hue}" style="width:{max(part.num_bytes, 0) * scale:.3f}%;{_colour(hue)}"></i>'
        for part, hue in zip(parts.parts, hues, strict=True)
    )
    stack += "".join(f'<s style="left:{mark * parts.whole_bytes * scale:.2f}%"></s>' for mark in parts.marks)
    title = f"<h5>{_text(parts.title)}</h5>" if parts.title else ""
    rows = _table(replace(parts_table(parts), title=""), hues)
    return f'{title}<div class="stack" aria-hidden="true">{stack}</div>{rows}'


def _colour(hue: str) -> str:
    return f"background-color:var(--oom-{hue})"


def _table(table: Table, hues: Sequence[str] = ()) -> str:
    numeric = numeric_columns(table)
    title = f"<h5>{_text(table.title)}</h5>" if table.title else ""
    heading = ""
    if table.columns:
        cells = _cells("th", table.columns, numeric)
        heading = f"<thead><tr>{''.join(cells)}{'<th></th>' if table.shares else ''}</tr></thead>"
    rows = ""
    for position, row in enumerate(table.rows):
        cells = _cells("td", row, numeric)
        if hues:
            swatch = f'<i class="swatch hue-{hues[position]}" style="{_colour(hues[position])}"></i>'
            cells[0] = cells[0].replace(">", f">{swatch}", 1)
        elif table.shares:
            percent = 100 * min(max(table.shares[position], 0.0), 1.0)
            cells.append(f'<td class="bar"><i style="width:{percent:.1f}%"></i></td>')
        rows += f"<tr>{''.join(cells)}</tr>"
    if table.total:
        rows += f'<tr class="total">{"".join(_cells("td", table.total, numeric))}</tr>'
    return f'{title}<div class="scroll"><table>{heading}<tbody>{rows}</tbody></table></div>'


def _cells(tag: str, row: tuple[Cell, ...], numeric: Sequence[bool]) -> list[str]:
    cells = []
    for text, is_number in zip(texts(row), numeric, strict=True):
        kind = "number" if is_number else "short" if len(text) <= _SHORT else "words"
        cells.append(f'<{tag} class="{kind}">{escape(text)}</{tag}>')
    return cells
