"""What text and HTML share: which characters are shown, which columns are numbers, how blocks become rows."""

from __future__ import annotations

import re

from oom_magic.views.blocks import Bars, Cell, Facts, Parts, Table, cell_text

SIGNS = {"good": "✓ ", "warning": "▲ ", "bad": "✗ "}

_ESCAPE_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_NUMBER = re.compile(r"[-+×~<≈]?\s?\d[\d,.]*\s?(%|[KMGT]iB|bytes|×|x|s|ms)?")


def shown(text: str) -> str:
    """``text`` without colour codes, runs of white space as one space, unprintable characters as ``�``."""
    return " ".join("".join(map(_shown_character, _ESCAPE_SEQUENCE.sub("", text))).split())


def shown_code(text: str) -> str:
    """Like ``shown``, line by line, keeping white space."""
    lines = _ESCAPE_SEQUENCE.sub("", text).expandtabs(4).split("\n")
    return "\n".join("".join(map(_shown_character, line)).rstrip() for line in lines)


def _shown_character(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character.isspace() else "\ufffd"


def numeric_columns(table: Table) -> list[bool]:
    """For each column: does it hold only byte counts and numbers (or nothing)?"""
    rows = [*table.rows, table.total] if table.total else list(table.rows)
    return [all(_is_number(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []


def _is_number(cell: Cell) -> bool:
    return isinstance(cell, int) or not cell.strip() or _NUMBER.fullmatch(cell.strip()) is not None


def texts(row: tuple[Cell, ...]) -> list[str]:
    """The cells of a row as shown."""
    return [shown(cell_text(cell)) for cell in row]


def parts_table(parts: Parts) -> Table:
    """A row for each part and one for the sum."""
    total = parts.total_bytes
    return Table(
        columns=(),
        rows=tuple((part.label, part.num_bytes, parts.share(part.num_bytes)) for part in parts.parts),
        shares=tuple(part.num_bytes / parts.whole_bytes for part in parts.parts),
        total=(parts.total_label, total, parts.share(total)),
        title=parts.title,
        hues=tuple(part.hue for part in parts.parts),
    )


def bars_table(bars: Bars) -> Table:
    """A row for each bar."""
    return Table(
        columns=(),
        rows=tuple((bar.label, bar.total_bytes, bar.note) for bar in bars.bars),
        shares=tuple(bar.total_bytes / bars.scale_bytes for bar in bars.bars),
        title=bars.title,
    )


def facts_table(facts: Facts) -> Table:
    """A row for each fact."""
    return Table(columns=(), rows=tuple((fact.label, fact.value, fact.note) for fact in facts.facts))
