"""Runs beside each other, and a calculation beside a run."""

from __future__ import annotations

import pytest

from oom_magic.memory.comparison import compare, ratios
from oom_magic.notebook.figures import plot
from oom_magic.units import MIB
from oom_magic.views import to_text
from oom_magic.views.text import display_width
from tests.support.pages import assert_text_and_html_agree
from tests.support.samples import failed, predicted


@pytest.mark.parametrize("number", [1, 5, 7])
def test_any_number_of_runs_fits_80_columns(number):
    result = compare({f"batch {2**power}": predicted() for power in range(number)})
    assert_text_and_html_agree(result.describe())
    text = to_text(result.describe())
    assert max(map(display_width, text.splitlines())) <= 80
    assert all(f"batch {2**power}" in text for power in range(number))


def test_runs_beside_each_other(golden):
    result = compare({"batch 4": predicted(), "batch 16": failed()})
    golden("side_by_side.txt", str(result))
    golden("side_by_side.html", result._repr_mimebundle_()["text/html"])
    assert result.to_dict()["batch 16"]["out_of_memory"]


def test_no_run_is_refused():
    with pytest.raises(ValueError, match="got no report"):
        compare({})


def test_runs_come_alone_listed_or_one_after_another():
    one, other = predicted(), failed()
    alone, listed, given = compare(one), compare([one, other]), compare(one, other)
    assert list(alone.reports) == ["run 1"] and list(listed.reports) == list(given.reports) == ["run 1", "run 2"]


@pytest.mark.parametrize("what", [3, "x", [3], {"now": 3}, None])
@pytest.mark.parametrize("function", [compare, plot])
def test_what_is_no_run_is_named(function, what):
    with pytest.raises(TypeError, match=f"{function.__name__}.. takes reports .* not (int|str|NoneType)"):
        function(what)


def test_a_note_stands_beside_its_run():
    assert "4.05 GiB  theirs: 9 GB" in str(compare({"now": predicted()}, notes={"now": "theirs: 9 GB"}))
    with pytest.raises(KeyError, match="'then' has a note but no report; reports are: now"):
        compare({"now": predicted()}, notes={"then": "9 GB"})


def test_a_ratio_is_by_hand_over_in_the_run():
    report = predicted()
    held = report.breakdown["activation"]
    result = ratios({"activation": held // 2, "gradient": 5}, report.breakdown)
    assert result["activation"] == pytest.approx(0.5)
    assert result.to_dict()["activation"]["in_run"] == held
    assert "0.500" in str(result)
    assert ratios({8: 6}, {8: 3})["8"] == 2
    assert_text_and_html_agree(result.describe())


def test_a_name_that_the_run_does_not_have_is_named():
    with pytest.raises(KeyError, match=r"'heads' is not in the run, which has: parameter"):
        ratios({"heads": 1}, predicted().breakdown)


def test_highest_is_at_least_what_the_peak_has():
    report = predicted()
    assert all(report.highest[part] >= size for part, size in report.breakdown.items())
    assert report.highest["gradient"] >= (12 * 27 + 147) * MIB > report.breakdown["gradient"]


def test_operators_of_a_module_sum_to_what_it_holds():
    report = predicted()
    assert report.operators().total_bytes == report.peak_allocated_bytes
    assert report.operators("h.3").total_bytes == report.modules["transformer.h.3"]
    assert report.operators("h.33") == {}


def test_repeated_blocks_fold_into_one():
    modules = predicted().modules
    folded = modules.folded()
    assert folded.total_bytes == modules.total_bytes
    assert folded["transformer.h.*"] == sum(size for name, size in modules.items() if ".h." in name)


def test_runs_without_names_are_numbered():
    one, other = predicted(), failed()
    assert list(compare(one).reports) == ["run 1"]
    assert list(compare([one, other]).reports) == ["run 1", "run 2"]


def test_tables_for_pandas():
    pytest.importorskip("pandas")
    run = predicted()
    (row,) = compare({"now": run}).to_dataframe().to_dict("records")
    assert row["run"] == "now" and row["peak_reserved_bytes"] == run.peak_reserved_bytes
    assert sum(row[name] for name in run.breakdown) == row["peak_allocated_bytes"] == run.peak_allocated_bytes
    table = ratios({"parameter": MIB}, run.highest).to_dataframe().set_index("name")
    assert table.loc["parameter", "ratio"] == MIB / run.highest["parameter"]
