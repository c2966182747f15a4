"""README in both languages: its code runs, its outputs are what that code shows, its figures are the recorded ones.

``<!-- run -->`` above a block of code has it run, one cell after the other; ``<!-- shows -->`` above a text says that
it is what the code last shown displays, and ``<!-- shows: first 12 lines -->`` that it is cut there. ``--update-golden``
writes these texts anew, and the list of what a dry run replaces under ``<!-- replaced -->``.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from typing import Any

import pytest
from PIL import Image

from oom_magic.explain.remedies import rehearsal
from tests.support.folders import ROOT
from tests.support.versions import recorded_with
from tests.truth import agreement, printed

PAGES = {"en": ROOT / "README.md", "zh": ROOT / ".github" / "README.zh.md"}
BLIND = ROOT / "tests" / "data" / "blind_figures.json"
PICTURE = ROOT / "notebooks" / "images" / "gpumem.png"
_MARKED = re.compile(r"<!-- (run|shows)(?:: first (\d+) lines)? -->\n```(\w+)\n(.*?)```", re.DOTALL)
_TRUTH_ROW = re.compile(r"^\| (\S+) \| ([\d,]+) \| ([\d,]+) \| ([+−]\d\.\d{3}) % \| (.*?) \|", re.MULTILINE)


def displayed(shell: Any, code: str) -> str:
    """What a cell shows last, as text."""
    shell.display_pub.outputs.clear()
    result = shell.run_cell(code, store_history=True).result
    shown = [output["data"]["text/plain"] for output in shell.display_pub.outputs if "data" in output]
    if result is not None:
        shown.append(shell.display_formatter.format(result)[0]["text/plain"])
    return shown[-1] if shown else ""


def rendered(page: str, shell: Any) -> str:
    """A page with the outputs that its code has here."""
    shown = ""

    def block(found: re.Match[str]) -> str:
        nonlocal shown
        kind, most, _, text = found.groups()
        if kind == "run":
            shown = displayed(shell, text)
            return found[0]
        lines = shown.splitlines()
        kept = [*lines[: int(most)], "…"] if most and len(lines) > int(most) else lines
        start, end = found.start(4) - found.start(), found.end(4) - found.start()
        return found[0][:start] + "".join(f"{line.rstrip()}\n" for line in kept) + found[0][end:]

    return _MARKED.sub(block, page)


@recorded_with("2.13.0")
@pytest.mark.slow
@pytest.mark.parametrize("language", PAGES)
def test_outputs_are_what_the_code_shows(
    language: str, shell: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    monkeypatch.setattr(rehearsal, "PATIENCE_SECONDS", 10_000)  # every remedy is priced, however slow the machine
    page = PAGES[language].read_text(encoding="utf-8")
    assert len(_MARKED.findall(page)) == page.count("<!-- run") + page.count("<!-- shows")
    now = rendered(page, shell)
    if request.config.getoption("--update-golden"):
        PAGES[language].write_text(now, encoding="utf-8")
        page = now
    assert page == now


_SHOWS_REPLACED = """
import json, torch, oom_magic
from oom_magic.predict.isolation.patching import patched_names
oom_magic.dry_run(lambda: print(json.dumps(patched_names())))
"""
_OF_COMPILER = ("torch._dynamo", "triton")  # which may be there or not
_ASKS_DEVICE = ("torch.cuda", "torch.accelerator")  # what these answer is too much to list


def listed_replacements() -> str:
    """What is replaced in a dry run of a process that has imported nothing but torch: a line for each owner."""
    run = subprocess.run([sys.executable, "-c", _SHOWS_REPLACED], capture_output=True, text=True, check=True)
    lines = []
    for owner, names in json.loads(run.stdout).items():
        if not names or owner.startswith(_OF_COMPILER):
            continue
        is_counted = ".".join(owner.split(".")[:2]) in _ASKS_DEVICE and len(names) > 3
        lines.append(f"{owner}: {f'{len(names)} that ask the device' if is_counted else ', '.join(names)}\n")
    return "".join(lines)


@recorded_with("2.13.0")
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="C libraries are answered on Linux")
def test_the_list_of_what_is_replaced_comes_from_the_tables(request: pytest.FixtureRequest) -> None:
    now, path = listed_replacements(), PAGES["en"]
    before, begin, rest = path.read_text(encoding="utf-8").partition("<!-- replaced -->\n```text\n")
    shown, end, after = rest.partition("```")
    if request.config.getoption("--update-golden"):
        path.write_text(f"{before}{begin}{now}{end}{after}", encoding="utf-8")
        shown = now
    assert shown == now


@pytest.mark.parametrize("language", PAGES)
def test_links_lead_somewhere(language: str) -> None:
    page = PAGES[language]
    links = re.findall(r"\]\((?!https?:)([^)#]+)|<img src=\"([^\"]+)", page.read_text(encoding="utf-8"))
    for link in ("".join(found) for found in links):
        assert (page.parent / link).exists(), link


def test_both_languages_run_the_same_code() -> None:
    def code(language: str) -> list[str]:
        found = _MARKED.findall(PAGES[language].read_text(encoding="utf-8"))
        return [re.sub(r" *(#.*|--lang \w+)", "", text) for kind, _, _, text in found if kind == "run"]

    assert code("en") == code("zh")


def test_the_picture_is_of_the_run_that_the_text_shows() -> None:
    said = Image.open(PICTURE).info["oom_magic"]  # written by tests/browser/test_picture.py
    page = PAGES["en"].read_text(encoding="utf-8")
    peaks = [re.findall(r"peak \w+ +[\d.]+ GiB", text)[:2] for text in (said, page)]
    assert peaks[0] == peaks[1] != []


def test_the_table_of_runs_holds_the_recorded_truth() -> None:
    if not agreement.SHARED_FILE.exists():
        pytest.skip(f"{agreement.SHARED_FILE} is not here")
    recorded = {truth.name: truth for truth in agreement.truths()}
    rows = _TRUTH_ROW.findall(PAGES["en"].read_text(encoding="utf-8"))
    assert len(rows) == 24
    for name, true, predicted, reserved, least in rows:
        truth = recorded[name]
        # that both are equal, and reserved too, is what test_agreement shows, run by run
        assert true == predicted == f"{truth.peak('peak_allocated'):,}" and reserved == "+0.000"
        if truth.smallest_mib:
            smallest, found = (int(size.replace(",", "")) for size in least.split(" / "))
            assert smallest == truth.smallest_mib and abs(found - smallest) <= 8  # the grain of the bisection


def test_the_table_of_printed_figures_holds_what_was_recorded() -> None:
    rows = re.findall(
        r"^\| .* \| ([\d.]+) \| ([\d.]+) \| ([+−][\d.]+) % \|$", PAGES["en"].read_text("utf-8"), re.MULTILINE
    )
    figures = {**{name: size for name, (_file, _edits, size) in printed.PROGRAMS.items()}, **printed.QLORA}
    assert [(float(true), float(said)) for true, said, _off in rows] == [
        (figure, printed.RECORDED[name]) for name, figure in figures.items()
    ]
    assert [off for *_sizes, off in rows] == [
        f"{printed.RECORDED[name] / figure - 1:+.2%}".replace("-", "−").removesuffix("%")
        for name, figure in figures.items()
    ]


def test_the_rounds_of_reports_add_up_to_the_recorded_ones() -> None:
    figures = [row for name, row in json.loads(BLIND.read_text("utf-8")).items() if name != "about"]
    rows = re.findall(r"^\| rounds (\d+) to (\d+) \| (.*) \|$", PAGES["en"].read_text("utf-8"), re.MULTILINE)
    assert [int(first) for first, _last, _sums in rows] == [1, *(int(last) + 1 for _first, last, _sums in rows[:-1])]
    for first, last, shown in rows:
        rounds = figures[int(first) - 1 : int(last)]
        sums = [
            [sum(row[kind][place] for row in rounds) for place in (0, 1)] for kind in ("recognised", "right", "false")
        ]
        assert shown == " | ".join(f"{hits} of {of}" for hits, of in sums)


def test_what_was_contradicted_adds_up_to_the_sorted_answers() -> None:
    names = [name for name in json.loads(BLIND.read_text("utf-8")) if name != "about"]
    first = names.index("blind_hundredthirteenth")
    rounds = {f"{name}-".replace("_", "-"): 113 + at for at, name in enumerate(names[first:])}
    answers = [json.loads(line) for line in BLIND.with_name("first_answers.jsonl").read_text("utf-8").splitlines()]
    rows = re.findall(r"^\| (\d+) to (\d+) \| (.*) \|$", PAGES["en"].read_text("utf-8"), re.MULTILINE)
    assert len(rows) == 9
    for start, end, shown in rows:
        known = [one for one in answers if int(start) <= rounds[one["id"][:-2]] <= int(end)]
        false = sum(bool({"fact", "cause", "change"} & set(one["contradicted"])) for one in known)
        contradicted = sum(bool(one["contradicted"]) for one in known)
        assert shown == f"{false} of {len(known)} | {contradicted} of {len(known)}"
