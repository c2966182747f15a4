"""Text and HTML of a description: same rows, 80 columns, everything escaped."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oom_magic.__main__ import FITS, NOT_KNOWN, exit_code
from oom_magic.inputs import parse_bytes
from oom_magic.language import render, using_language
from oom_magic.memory.categories import CATEGORIES, Category
from oom_magic.memory.comparison import Comparison
from oom_magic.memory.report import Assumption
from oom_magic.memory.timeline import SourceLine
from oom_magic.units import GIB, MIB
from oom_magic.views import to_fallback, to_html, to_text
from oom_magic.views.blocks import Code, Description, Details, Fact, Facts, Part, Parts, Picture, Sentence, Table
from oom_magic.views.html import DARK, LIGHT
from oom_magic.views.text import display_width, wrap
from oom_magic.views.words import COMMENTS, code_in
from tests.support.pages import Page, assert_text_and_html_agree, words
from tests.support.samples import failed, measured, predicted

RESULTS = {
    "predicted": predicted,
    "measured": measured,
    "failed": failed,
    "comparison": lambda: Comparison(predicted(), measured()),
}
TEXT = st.text(max_size=30)
BYTES = st.integers(0, 2**40)
TONES = st.sampled_from(["plain", "strong", "quiet", "good", "warning", "bad"])
BLOCKS = st.recursive(
    st.one_of(
        st.builds(Sentence, TEXT, TONES),
        st.builds(Facts, st.lists(st.builds(Fact, TEXT, BYTES, TEXT), min_size=1, max_size=3).map(tuple)),
        st.builds(Parts, TEXT, st.lists(st.builds(Part, TEXT, BYTES, TEXT), min_size=1).map(tuple), TEXT, BYTES),
        st.builds(Table, st.tuples(TEXT, TEXT), st.lists(st.tuples(TEXT, BYTES), min_size=1).map(tuple), TEXT),
        st.builds(Code, TEXT),
    ),
    lambda inner: st.builds(Details, TEXT, st.lists(inner, max_size=3).map(tuple)),
    max_leaves=6,
)
DESCRIPTIONS = st.builds(Description, TEXT, st.lists(BLOCKS, max_size=4).map(tuple))


@pytest.mark.parametrize("name", RESULTS)
def test_text_and_html_of_every_result_agree(name: str) -> None:
    assert_text_and_html_agree(RESULTS[name]().describe())


def test_an_assumption_about_many_lines_is_said_once() -> None:
    """A library of scripted functions had a report of 374 lines, of which all but a few were one sentence."""
    lines = [SourceLine("maths/scripted.py", number) for number in range(1, 81)]
    report = predicted(assumptions=tuple(Assumption("torch.jit.script: as written", line) for line in lines))
    text = " ".join(to_text(report.describe()).split())
    assert "(1) torch.jit.script: as written (maths/scripted.py:1, maths/scripted.py:2, maths/scripted.py:3, …)" in text


@pytest.mark.parametrize("name", RESULTS)
def test_golden(name: str, golden) -> None:
    description = RESULTS[name]().describe()
    golden(f"{name}.txt", to_text(description))
    golden(f"{name}.html", to_html(description))
    assert max(map(display_width, to_text(description).splitlines())) <= 80


@pytest.mark.parametrize("name", ["predicted", "failed"])
def test_golden_in_chinese(name: str, golden) -> None:
    with using_language("zh"):
        description = RESULTS[name]().describe()
    golden(f"{name}_zh.txt", to_text(description))
    assert max(map(display_width, to_text(description).splitlines())) <= 80
    assert_text_and_html_agree(description)


@pytest.mark.parametrize("name", ["predicted", "measured", "failed"])
def test_rows_of_golden_tables_sum_to_their_totals(name: str) -> None:
    """Every table that ends in a total under a rule is added up again, as printed."""
    lines = to_text(RESULTS[name]().describe()).splitlines()
    num_tables = 0
    for at, line in enumerate(lines):
        if not re.match(r" *(allocated|sum|capacity) ", line):
            continue
        num_tables += 1
        above = at - 2
        sizes: list[int] = []
        while lines[above].strip() and "──" not in lines[above]:
            sizes += _first_size(lines[above])
            above -= 1
        (total,) = _first_size(line)
        assert abs(sum(sizes) - total) <= 0.005 * GIB * (len(sizes) + 1)
    assert num_tables == 4


def _first_size(line: str) -> list[int]:
    sizes = re.findall(r"\d+(?:\.\d+)? (?:[KMG]iB|bytes)", line)
    return [0 if size == "0 bytes" else parse_bytes(size) for size in sizes[:1]]


@given(DESCRIPTIONS)
def test_any_description_agrees_and_fits_80_columns(description: Description) -> None:
    assert_text_and_html_agree(_without_bars(description))
    text = to_text(description)
    if "Code(" not in repr(description.blocks):
        assert all(display_width(line) <= 80 for line in text.splitlines())


def _without_bars(description: Description) -> Description:
    """Descriptions whose own words are made of bar characters cannot be compared without bars."""
    table = str.maketrans(dict.fromkeys("─▏▎▍▌▋▊▉█", "#"))

    def clean(value):
        if isinstance(value, str):
            return value.translate(table)
        if isinstance(value, tuple):
            return tuple(map(clean, value))
        if hasattr(value, "__dataclass_fields__"):
            return type(value)(*(clean(getattr(value, name)) for name in value.__dataclass_fields__))
        return value

    return clean(description)


@given(TEXT.map(lambda text: f"<script>{text}</script><img src=x onerror='{text}'>\"&"))
def test_user_text_adds_no_tags(text: str) -> None:
    def tags(word: str) -> list[str]:
        blocks = (
            Sentence(word), Facts((Fact(word, word, word),)), Parts(word, (Part(word, 1, word),), word),
            Table((word, word), ((word, 1),), word), Code(word), Details(word, (Sentence(word),)),
            Picture(word, "<svg></svg>"),
        )  # fmt: skip
        return Page(to_html(Description(word, blocks))).tags

    assert tags(text) == tags("x")


def test_wide_characters_take_two_columns() -> None:
    assert display_width("显存ab") == 6
    assert display_width("e\u0301") == 1
    table = Table(("名称", "bytes"), (("权重", 5), ("ab", 5)))
    lines = to_text(Description("t", (table,))).splitlines()
    assert len({display_width(line) for line in lines if "bytes" in line}) == 1


@given(st.text(alphabet="ab 显存,。、/_-()", max_size=200), st.integers(4, 40))
@example("__、、", 4)
def test_wrapping_loses_nothing_and_keeps_the_width(text: str, width: int) -> None:
    lines = wrap(text, width)
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert all(display_width(line) <= width for line in lines)


@pytest.mark.parametrize("text", ["启用可扩展段（expandable_segments），减少碎片。", "换成（configuration），再试。"])
@pytest.mark.parametrize("width", [20, 22, 24, 25, 26])
def test_no_line_begins_with_a_full_width_stop(text: str, width: int) -> None:
    lines = wrap(text, width)
    assert "".join(lines) == text and all(display_width(line) <= width for line in lines)
    assert not [line for line in lines if line[:1] in "，。、）"]


def test_comments_of_code_are_translated_as_they_are_written() -> None:
    """``in {name}:`` is also how other comments begin and end."""
    for sentence in COMMENTS.values():
        if "{" not in str(sentence):
            assert code_in("zh", f"x = 1  # {sentence}") == f"x = 1  # {render(sentence, 'zh', {})}"


def test_a_row_that_is_in_no_picture_has_no_swatch() -> None:
    table = Table(("", "now"), (("weights", 5), ("reserved", 6)), hues=("parameter", ""))
    rows = to_html(Description("t", (table,))).split("<tr>")
    assert ["swatch" in row for row in rows if "<td" in row] == [True, False]


def test_control_characters_and_colours_do_not_get_through() -> None:
    html = to_html(Description("\x1b[31mred\x1b[0m \x00\u202e", (Code("a\tb\x07\nc"),)))
    assert "\x1b" not in html and "\x00" not in html and "\u202e" not in html and "\x07" not in html
    assert "red \ufffd\ufffd" in html and "a   b\ufffd\nc" in html


def test_pictures_are_left_out_of_text() -> None:
    description = Description("t", (Picture("alt", "<svg><text>drawn</text></svg>"),))
    assert words(to_text(description)) == ["t"]
    assert "<text>drawn" in to_html(description)


def test_page_is_self_contained() -> None:
    html = predicted()._repr_mimebundle_()["text/html"]
    assert "<script" not in html and "http" not in html and "@import" not in html and "url(" not in html


def test_light_and_dark_have_the_same_hues() -> None:
    assert LIGHT.keys() == DARK.keys()
    html = to_html(Description("t"))
    for theme in ('data-jp-theme-light="false"', "vscode-dark", 'theme="dark"', "prefers-color-scheme:dark"):
        assert theme in html


@pytest.mark.parametrize("colours", [LIGHT, DARK])
def test_neighbours_in_the_stack_differ_for_colour_blind_readers(colours: dict[str, str]) -> None:
    """Red and green seen as one (Viénot's simulation), neighbours differ in yellow or in blue."""
    stack = ["workspace", "parameter", "optimizer_state", "gradient", "activation", "input", "temporary"]
    for below, above in pairwise(stack):
        assert _distance(colours[below], colours[above]) > 0.25, (below, above)


def _distance(first: str, second: str) -> float:
    def seen(colour: str) -> tuple[float, float]:
        red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
        yellow = 0.3 * red + 0.7 * green
        return yellow, blue

    return max(abs(a - b) for a, b in zip(seen(first), seen(second), strict=True))


def test_short_repr_in_lists() -> None:
    name = "GPU memory predicted for NVIDIA GeForce RTX 3060 (11.76 GiB)"
    assert repr([predicted()]) == f"[<MemoryReport: {name}>]"


def test_the_text_of_a_notebook_that_is_not_trusted_says_how_to_see_more(monkeypatch):
    description = Description("Title", ())
    assert to_fallback(description) == to_text(description)
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=object()))
    assert to_fallback(description).endswith("Run All shows the pictures and sliders.")


@pytest.mark.parametrize(
    ("capacity", "verdict", "says"),
    [
        (12044, "safe", "✓ Safe: up to 65.8 % of the card"),
        (9000, "tight", "▲ Tight: up to 88."),
        (8500, "danger", "✗ Danger: up to 93."),
        (7000, "out of memory", "✗ May not fit: up to 113.3 % of the card is needed"),
    ],
)
def test_the_verdict_is_on_what_stays_until_python_collects(capacity: int, verdict: str, says: str) -> None:
    activations = np.flatnonzero(predicted().timeline.category == CATEGORIES.index(Category.ACTIVATION))
    report = predicted(freed_late=tuple(activations[:16].tolist()))
    report = replace(report, device=replace(report.device, total_bytes=capacity * MIB))
    assert (report.verdict, report.verdict_until_collected) == ("safe", verdict)
    assert exit_code(report) == (NOT_KNOWN if verdict == "out of memory" else FITS)
    assert says in str(report) and "% if it runs at once" in " ".join(str(report).split())
    assert_text_and_html_agree(report.describe())
