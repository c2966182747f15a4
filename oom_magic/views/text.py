"""A description as plain text of a given width (80 columns unless told)."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence

from oom_magic.views.blocks import (
    Bars,
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
    cell_text,
)

SIGNS = {"good": "✓ ", "warning": "▲ ", "bad": "✗ "}

_ESCAPE_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_NUMBER = re.compile(r"[-+×~<≈]?\s?\d[\d,.]*\s?(%|[KMGT]iB|bytes|×|x|s|ms)?")
_GAP = "  "
_BAR_WIDTHS = range(8, 25)
_NARROWEST = 12  # of a column of words, before it is wrapped further
_WIDE = re.compile("[\u2e80-\uffef]")  # Chinese, its signs and full-width forms
_CUT_AFTER = "/\\._-(,=:"
_EIGHTHS = " ▏▎▍▌▋▊▉█"


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
    """For each column, whether its cells are byte counts, numbers or empty."""
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


def to_text(description: Description, width: int = 80) -> str:
    """The description as text; no line is wider than ``width`` unless it is code."""
    title = wrap(shown(description.title), width)
    lines = [*title, "─" * min(max(map(display_width, title)), width)]
    lines += _blocks_lines(description.blocks, width)
    return "\n".join(line.rstrip() for line in lines)


def display_width(text: str) -> int:
    """Columns that ``text`` takes in a terminal: wide (CJK) characters two, combining marks none."""
    return len(text) if text.isascii() else sum(_character_width(character) for character in text)


def wrap(text: str, width: int = 80) -> list[str]:
    """Lines of at most ``width`` columns, broken at spaces, between wide characters, or inside words."""
    lines, used = [""], 0
    for word in text.split():
        gap = " " if lines[-1] else ""
        for piece in _pieces(word, width):
            size = display_width(piece)
            if used and used + len(gap) + size > width:
                lines.append(piece)
                used = size
            else:
                lines[-1] += gap + piece
                used += len(gap) + size
            gap = ""
    return lines


def _character_width(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if _is_wide(character) else 1


def _pieces(word: str, width: int) -> Iterator[str]:
    """Parts of a word between which a line may end: wide characters, and pieces of a word wider than a line."""
    if word.isascii() and len(word) <= width:
        yield word
        return
    piece, is_long = "", max(map(display_width, _WIDE.split(word))) > width
    for character in word:
        before = piece[-1:]
        between = _is_ideograph(character) or (_is_wide(before) and character.isalnum())
        between = between and not (before and unicodedata.category(before) == "Ps")  # no line ends with a bracket
        between = between or (_is_ideograph(before) and unicodedata.category(character) == "Ps")
        cut = is_long and before in _CUT_AFTER and character not in _CUT_AFTER
        if piece and (between or cut):
            yield piece
            piece = ""
        while piece and display_width(piece + character) > width:
            end = _last_cut(piece, character)
            yield piece[:end]
            piece = piece[end:]
        piece += character
    if piece:
        yield piece


def _last_cut(piece: str, following: str) -> int:
    """Where a piece that is too wide with what follows ends: before a closing sign, a line later than a word would."""
    if not unicodedata.category(following).startswith("P") or not _is_wide(following):
        return len(piece)
    end = max((at + 1 for at, character in enumerate(piece[:-1]) if character in _CUT_AFTER), default=len(piece) - 1)
    while end > 1 and _is_wide(piece[end]) and unicodedata.category(piece[end]).startswith("P"):
        end -= 1
    return max(end, 1)


def _is_wide(character: str) -> bool:
    return bool(character) and unicodedata.east_asian_width(character) in "WF"


def _is_ideograph(character: str) -> bool:
    return _is_wide(character) and not unicodedata.category(character).startswith("P")


def _blocks_lines(blocks: Sequence[Block], width: int) -> list[str]:
    """The lines of some blocks; an empty one between them, but for sentences that follow each other."""
    lines: list[str] = []
    follows = True
    for block in blocks:
        made = _block_lines(block, width)
        is_sentence = isinstance(block, Sentence)
        if lines and made and not (is_sentence and follows):
            lines.append("")
        lines += made
        follows = is_sentence
    return lines


def _block_lines(block: Block, width: int) -> list[str]:
    match block:
        case Sentence():
            return wrap(SIGNS.get(block.tone, "") + shown(block.text), width)
        case Facts():
            return _table_lines(facts_table(block), width)
        case Parts():
            return _table_lines(parts_table(block), width)
        case Table():
            return _table_lines(block, width)
        case Bars():
            return _table_lines(bars_table(block), width)
        case Code():
            return [f"    {line}" for line in shown_code(block.text).split("\n")]
        case Picture():
            return []
        case Details():
            inner = _blocks_lines(block.blocks, width - 2)
            return [*wrap(shown(block.title), width), *(f"  {line}" for line in inner)]


def _table_lines(table: Table, width: int) -> list[str]:
    numeric = numeric_columns(table)
    heading = [texts(table.columns)] if table.columns else []
    rows = [texts(row) for row in table.rows]
    total = [texts(table.total)] if table.total else []
    widths, bar = _column_widths(heading, [*rows, *total], numeric, width, bool(table.shares))
    lines = wrap(shown(table.title), width) if table.title else []
    if heading and not table.shares and not numeric[0] and _is_squeezed(widths[0], [*heading, *rows, *total]):
        return lines + _led_lines(heading, rows, total, numeric, width)
    for cells in heading:
        lines += _row_lines(cells, widths, numeric)
    if heading:
        lines.append(_rule(widths, width))
    for position, cells in enumerate(rows):
        made = _row_lines(cells, widths, numeric)
        if bar:
            made[0] += _GAP + _bar(table.shares[position], bar)
        lines += made
    for cells in total:
        lines.append(_rule(widths, width))
        lines += _row_lines(cells, widths, numeric)
    return lines


def _is_squeezed(width: int, rows: list[list[str]]) -> bool:
    """Whether the first column is at its narrowest and most of its cells would wrap over many lines."""
    return width <= _NARROWEST < _natural_widths(rows)[0]


def _led_lines(
    heading: list[list[str]], rows: list[list[str]], total: list[list[str]], numeric: list[bool], width: int
) -> list[str]:
    """A table whose first column has lines of its own, above the other columns."""
    columns, values = ([cells[1:] for cells in part] for part in (heading, [*rows, *total]))
    widths, _unused = _column_widths(columns, values, numeric[1:], width - len(_GAP), has_bar=False)

    def led(part: list[list[str]]) -> Iterator[str]:
        for first, *rest in part:
            yield from wrap(first, width)
            if any(rest):
                yield from (_GAP + line for line in _row_lines(rest, widths, numeric[1:]))

    rule = _rule([0, *widths], width)
    return [*led(heading), rule, *led(rows), *([rule, *led(total)] if total else [])]


def _rule(widths: Sequence[int], width: int) -> str:
    """Under headings and above totals: as long as a row."""
    return "─" * min(sum(widths) + len(_GAP) * (len(widths) - 1), width)


def _column_widths(
    heading: list[list[str]], rows: list[list[str]], numeric: list[bool], width: int, has_bar: bool
) -> tuple[list[int], int]:
    """The width of each column and of the bar (0: none); if room is short, headings of numbers wrap, then words."""
    widths = _natural_widths([*heading, *rows])
    bar = _BAR_WIDTHS[0] if has_bar else 0
    room = width - len(_GAP) * (len(widths) - 1) - (bar + len(_GAP) if bar else 0)
    if sum(widths) > room and heading:
        words = [[max(cell.split(), key=display_width, default="") for cell in cells] for cells in heading]
        narrow = _natural_widths([*words, *rows])
        widths = [narrow[at] if number else widths[at] for at, number in enumerate(numeric)]
    flexible = [column for column, is_number in enumerate(numeric) if not is_number]
    while sum(widths) > room and flexible:
        widest = max(flexible, key=lambda column: widths[column])
        if widths[widest] <= _NARROWEST:
            break
        widths[widest] -= 1
    if bar:
        bar = min(max(bar + room - sum(widths), bar), _BAR_WIDTHS[-1])
    return widths, bar


def _natural_widths(rows: list[list[str]]) -> list[int]:
    return [max(map(display_width, column)) for column in zip(*rows, strict=True)]


def _row_lines(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> list[str]:
    columns = [wrap(cell, width) for cell, width in zip(cells, widths, strict=True)]
    lines = []
    for number in range(max(map(len, columns))):
        padded = []
        for column, width, is_number in zip(columns, widths, numeric, strict=True):
            text = column[number] if number < len(column) else ""
            space = " " * (width - display_width(text))
            padded.append(space + text if is_number else text + space)
        lines.append(_GAP.join(padded))
    return lines


def _bar(share: float, width: int) -> str:
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    if share > 0:
        eighths = max(eighths, 1)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
