"""The sliders without a browser: controls, numbers, errors, what is saved."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import re
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from torch import nn

import oom_magic as om
from oom_magic.notebook.sliders.controller import Sliders
from oom_magic.notebook.sliders.fit_map import FitMap, Grid
from oom_magic.notebook.sliders.source import Estimator
from oom_magic.notebook.sliders.view import Estimate
from oom_magic.predict.session import DrySession
from oom_magic.units import MIB, format_bytes
from tests.support.widgets import at_rest, code, part, picture, status

VIEW = "application/vnd.jupyter.widget-view+json"
AXES = {"batch_size": np.arange(1, 17), "seq_len": np.arange(64, 513, 64)}
CARDS = ["A100 40GB", "A100 80GB", "RTX 3060"]
RANGES = {"batch_size": (1, 16), "seq_len": (64, 512, 64), "kind": ["plain", "<b>wide</b>", "broken"]}


def train(batch_size: int = 4, seq_len: int = 128, kind: str = "plain") -> None:
    layer = nn.Linear(64, 64 if kind == "plain" else 256).to("cuda")
    for _ in range(2):
        rows = torch.randn(batch_size, seq_len, 64, device="cuda")
        if kind == "broken":
            raise ValueError("no such <i>kind</i>")
        layer(rows).relu().mul(2)


def tiny() -> nn.Module:
    return nn.Sequential(nn.Embedding(500, 64), nn.Linear(64, 500))


@pytest.fixture(scope="module")
def panel() -> Sliders:
    return om.sliders(train, gpu=CARDS, **RANGES)


@pytest.fixture(autouse=True)
def _back_to_the_start(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "panel" in request.fixturenames:
        panel = request.getfixturevalue("panel")
        panel.controls["kind"].value, panel.controls["gpu"].value = "plain", panel.controls["gpu"].options[0][1]
        panel.controls["batch_size"].value, panel.controls["seq_len"].value = 4, 128


@pytest.fixture
def dry_runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Filled with the name of the thread of each dry run from here on."""
    found: list[str] = []
    usual = DrySession.run

    def run(*args: Any, **kwargs: Any) -> Any:
        found.append(threading.current_thread().name)
        return usual(*args, **kwargs)

    monkeypatch.setattr(DrySession, "run", run)
    return found


def shown(panel: Sliders) -> str:
    """The words of the live picture."""
    return re.sub(r"<[^>]*>", " ", picture(panel).value)


def test_starts_at_the_functions_own_defaults(panel: Sliders) -> None:
    assert panel.values == {"batch_size": 4, "seq_len": 128, "kind": "plain"}
    assert panel.setup is None


def test_report_follows_the_sliders_and_is_that_of_a_dry_run(panel: Sliders) -> None:
    panel.controls["batch_size"].value = 13
    panel.controls["seq_len"].value = 448
    assert panel.values == {"batch_size": 13, "seq_len": 448, "kind": "plain"}
    true = om.dry_run(train, **panel.values, gpu=CARDS[0])
    assert panel.report.peak_allocated_bytes == true.peak_allocated_bytes
    assert panel.report.peak_reserved_bytes == true.peak_reserved_bytes
    assert panel.report.breakdown == true.breakdown


def test_a_move_changes_the_picture_in_place(panel: Sliders) -> None:
    children, before = panel.children, picture(panel).value
    panel.controls["batch_size"].value = 9
    assert panel.children is children
    assert picture(panel).value != before
    quick = re.search(r"peak allocated +([\d.]+) MiB", shown(panel))
    assert quick is not None
    assert float(quick[1]) * MIB == pytest.approx(panel.report.peak_allocated_bytes, rel=1e-3)


def test_text_and_html_show_the_same_numbers(panel: Sliders) -> None:
    bundle = panel._repr_mimebundle_()
    assert set(bundle) == {VIEW, "text/plain", "text/html"}
    for number in (panel.report.peak_allocated_bytes, panel.report.peak_reserved_bytes):
        assert format_bytes(number) in bundle["text/plain"]
        assert format_bytes(number) in bundle["text/html"]
    assert "train(batch_size=4, seq_len=128, kind='plain')" in bundle["text/plain"]
    assert max(map(len, bundle["text/plain"].splitlines())) <= 80


def saved(html: str) -> tuple[dict[str, list[int]], dict[tuple[int, ...], str]]:
    """The stops of each dial that a page's script makes, and the words of its picture at each combination."""
    packed = re.search(r'firstElementChild, "([^"]+)"\)', html)
    assert packed is not None
    told = json.loads(zlib.decompress(base64.b64decode(packed[1])))
    stops = {dial["name"]: dial["stops"] for dial in told["dials"]}
    pictures = [re.sub(r"<[^>]*>", " ", picture) for picture in told["pictures"]]
    return stops, dict(zip(itertools.product(*stops.values()), pictures, strict=True))


def test_sliders_of_a_page_without_a_kernel_say_what_the_sizes_are(panel: Sliders) -> None:
    panel.controls["batch_size"].value, panel.controls["seq_len"].value = 11, 448
    html = panel._repr_mimebundle_()["text/html"]
    stops, pictures = saved(html)
    assert list(stops) == ["batch_size", "seq_len"] and (11, 448) in pictures
    assert all({axis[0], axis[-1]} <= set(stops[name]) for name, axis in AXES.items())
    sizes = om.size(train, gpu=CARDS[0], **{**RANGES, "kind": "plain"})
    for (batch_size, seq_len), words in pictures.items():
        peak = sizes.peak_allocated_bytes(batch_size=batch_size, seq_len=seq_len)
        assert re.search(rf"peak allocated +{format_bytes(peak)}", words)
    assert "src=" not in html and "http" not in html
    assert len(html) < 200_000


def test_a_failure_is_saved_without_sliders(panel: Sliders) -> None:
    panel.controls["kind"].value = "broken"
    assert "oom-dials" not in panel._repr_mimebundle_()["text/html"]


def test_repr_is_short(panel: Sliders) -> None:
    assert repr(panel) == "<Sliders of train(): batch_size=4, seq_len=128, kind='plain'>"


def test_an_error_in_the_function_is_shown_with_its_line(panel: Sliders) -> None:
    panel.controls["kind"].value = "broken"
    assert "ValueError: no such" in shown(panel)
    assert "test_sliders.py:" in shown(panel)
    assert "raise ValueError" in shown(panel)
    assert "<i>kind" not in picture(panel).value
    with pytest.raises(RuntimeError, match="no such"):
        _ = panel.report
    panel.controls["batch_size"].value = 7
    panel.controls["kind"].value = "plain"
    assert panel.report.peak_allocated_bytes == om.dry_run(train, 7, 128, gpu=CARDS[0]).peak_allocated_bytes


@pytest.mark.slow
def test_names_are_escaped(panel: Sliders) -> None:
    panel.controls["kind"].value = "<b>wide</b>"
    bundle = panel._repr_mimebundle_()
    assert "<b>wide" not in bundle["text/html"]
    assert "<b>wide" not in code(panel).value
    assert "<b>wide</b>" in bundle["text/plain"]


def test_a_click_on_the_map_goes_there(panel: Sliders) -> None:
    grid, buttons = Grid.of(AXES), part(panel, "oom-map")
    assert grid is not None
    cell = len(grid.columns) + 2
    buttons.value = cell
    assert {name: panel.values[name] for name in grid.names} == grid.values(cell)
    assert buttons.value is None
    buttons.value = 0
    assert panel.values["batch_size"] == grid.rows[0]


def test_the_map_has_its_columns_before_its_numbers() -> None:
    grid = Grid.of(AXES)
    assert grid is not None
    assert f"--columns:{len(grid.columns)}}}" in FitMap(grid, lambda values: None).widget.children[-1].value


def test_the_cursor_of_the_map_strikes_no_number(panel: Sliders) -> None:
    grid, style = Grid.of(AXES), part(panel, "oom-map-box").children[-1]
    assert grid is not None
    rows, columns = set(), set()
    for batch_size in (1, 3, 4, 16):
        panel.controls["batch_size"].value, panel.controls["seq_len"].value = batch_size, 32 * batch_size + 64
        place = dict(re.findall(r"(left|width|top|height):([\d.]+)", style.value.rpartition("::before")[2]))
        left, width = (float(place[name]) * len(grid.columns) / 100 for name in ("left", "width"))
        top, height = (int(place[name]) / 24 for name in ("top", "height"))
        assert left == pytest.approx(round(left), abs=0.01) and width == pytest.approx(round(width), abs=0.01)
        assert (
            {top % 1, height % 1} == {0} and top + height <= len(grid.rows) and left + width <= len(grid.columns) + 0.01
        )
        rows.add(height)
        columns.add(round(width))
    assert rows == columns == {1, 2}  # on a mark, or around the two that it is between


def test_another_card_of_the_same_kind_needs_no_dry_run(panel: Sliders, dry_runs: list[str]) -> None:
    panel.controls["gpu"].value = panel.controls["gpu"].options[1][1]
    assert not dry_runs
    assert panel.report.device.total_bytes == om.dry_run(train, gpu="A100 80GB").device_total_bytes


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    panel = om.sliders(train, memory="500MiB", batch_size=(1, 64), seq_len=4096, kind="plain")
    found = re.search(r"largest batch_size that fits +(\d+) ", str(panel))
    assert found is not None
    largest = int(found[1])
    assert 0 < largest < 64
    options = {"seq_len": 4096, "kind": "plain", "memory": "500MiB"}
    assert om.dry_run(train, batch_size=largest, **options).out_of_memory is None
    assert om.dry_run(train, batch_size=largest + 1, **options).out_of_memory is not None
    panel.controls["batch_size"].value = 64
    assert panel.report.out_of_memory is not None
    assert "Does not fit" in str(panel)


def test_the_latest_move_wins(panel: Sliders, monkeypatch: pytest.MonkeyPatch) -> None:
    refined: list[int] = []
    exact = Estimator.exact

    def noted(estimator: Estimator, *args: Any) -> Estimate:
        refined.append(args[1]["batch_size"])
        return exact(estimator, *args)

    monkeypatch.setattr(Estimator, "exact", noted)

    async def drag() -> None:
        for batch_size in range(1, 15):
            panel.controls["batch_size"].value = batch_size
            await asyncio.sleep(0)
        await at_rest()

    asyncio.run(drag())
    assert set(refined) == {14}
    assert format_bytes(panel.report.peak_reserved_bytes) in shown(panel)


def test_what_goes_wrong_when_the_hand_rests_is_shown(panel: Sliders, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the allocator is <b>lost</b>")

    monkeypatch.setattr(Estimator, "exact", fail)

    async def rest() -> None:
        panel.controls["batch_size"].value = 5
        await at_rest()

    asyncio.run(rest())
    assert "the allocator is &lt;b&gt;lost" in picture(panel).value
    monkeypatch.undo()
    panel.controls["batch_size"].value = 6
    assert "lost" not in shown(panel)


def test_a_setup() -> None:
    setup = om.TrainingSetup(tiny, microbatch_size=2, seq_len=32, precision="fp32", gradient_accumulation_steps=3)
    panel = om.sliders(setup, microbatch_size=(1, 8))
    panel.controls["microbatch_size"].value = 5
    assert panel.setup == setup.replace(microbatch_size=5)
    assert panel.report.peak_allocated_bytes == panel.setup.dry_run().peak_allocated_bytes
    text = str(panel)
    assert panel.setup.code().splitlines()[0] in text
    assert re.search(r"global batch +15 +5 x 3 accumulation steps", text)
    assert re.search(r"tokens per step +480", text)


def test_bad_input_of_a_setup() -> None:
    setup = om.TrainingSetup("gpt2", method="lora")
    with pytest.raises(ValueError, match=r"rank reaches 4096.*larger than the layer"):
        om.sliders(setup, rank=(4, 4096))
    with pytest.raises(TypeError, match="Did you mean 'microbatch_size'"):
        om.sliders(setup, batch_size=(1, 8))
    with pytest.raises(TypeError, match="needs a function or a TrainingSetup"):
        om.sliders("gpt2")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "needs a preset or a function"),
        ("trian", "Did you mean 'train'?"),
        ("number", "is int, not a function"),
        ("--model gtp2", "Did you mean gpt2"),
        ("--model gpt2 --method lroa", "Did you mean lora"),
        ("--model gpt2 --gpu RTX3061", "RTX 3060"),
        ("--model gpt2 --rank many --method lora", "--rank: 'many'"),
        ("--model gpt2 --rank 64:4", "reversed"),
        ("--model gpt2 --seq 4096", "1024 positions"),
        ("--model gpt2 --memory 12", "12GiB"),
        ("--model gpt2 train", "not both"),
        ("--modle gpt2", "--model"),
    ],
)
def test_the_magic_says_what_is_allowed(shell: InteractiveShell, line: str, message: str) -> None:
    shell.user_ns.update(train=train, number=3)
    with pytest.raises(UsageError, match=message):
        shell.run_line_magic("oom_sliders", line)


@pytest.mark.slow
def test_sliders_of_several_cards(shell: InteractiveShell) -> None:
    def halves(rows: int = 512) -> None:
        torch.ones(rows, 1024, device="cuda:0").mul(2)
        torch.ones(rows, 4096, device="cuda:1").mul(2)

    def rank(rows: int = 512) -> None:
        torch.distributed.init_process_group("nccl")
        x = torch.ones(rows, 1024, device="cuda")
        torch.distributed.all_gather_into_tensor(torch.empty(rows * 8, 1024, device="cuda"), x)

    panel = om.sliders(halves, gpu="2x T4", card=1, rows=(256, 1024))
    report = om.dry_run(halves, 512, gpu="T4", num_gpus=2).cards[1]
    assert panel.report.peak_reserved_bytes == report.peak_reserved_bytes
    assert "halves(), cuda:1 of 2" in repr(panel._repr_mimebundle_()["text/plain"])
    shell.user_ns["rank"] = rank
    panel = shell.run_line_magic("oom_sliders", "--gpu H100 --num-processes 8 rank")
    assert panel.report.peak_allocated_bytes == om.dry_run(rank, gpu="H100", num_processes=8).peak_allocated_bytes
    panel = om.sliders(om.TrainingSetup(tiny, microbatch_size=4, precision="fp32"), num_gpus=2, microbatch_size=(4, 8))
    assert panel.setup is not None and panel.report.cards[0].device.index == 0
    assert panel.report.peak_allocated_bytes == panel.setup.dry_run().cards[0].peak_allocated_bytes


@pytest.mark.slow
def test_the_magic_opens_the_sliders_of_a_function(shell: InteractiveShell) -> None:
    def small(batch_size: int = 2) -> None:
        torch.nn.Linear(8, 8).to("cuda")(torch.zeros(batch_size, 8, device="cuda"))

    shell.user_ns["small"] = small
    panel = shell.run_line_magic("oom_sliders", "--gpu T4 small")
    assert panel.values == {"batch_size": 2} and panel.card.device.name == "Tesla T4"
    panel._ipython_display_()
    (output,) = shell.display_pub.outputs
    assert "GPU memory of small() on Tesla T4" in output["data"]["text/plain"]


def attend(batch_size: int = 2, width: int = 32) -> None:
    layer = nn.MultiheadAttention(width, 4).cuda()
    rows = torch.randn(8, batch_size, width, device="cuda")
    layer(rows, rows, rows)[0].sum().backward()


def attend_wide(batch_size: int = 8) -> None:
    layer = nn.MultiheadAttention(510, 6, batch_first=True).to("cuda")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(4):
        rows = torch.randn(batch_size, 32, 510, device="cuda")
        layer(rows, rows, rows)[0].sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
def test_the_map_says_of_the_present_setting_what_its_report_says() -> None:
    panel = om.sliders(attend_wide, gpu="T4", batch_size=(1, 64))
    sizes = om.size(attend_wide, gpu="T4", batch_size=(1, 64))
    peak, about = panel.report.peak_allocated_bytes, int(sizes.map(batch_size=[8])[0])
    assert f"{about / MIB:.1f}" != f"{peak / MIB:.1f}"  # maps are of sums of sizes, which are close only
    said = re.findall(r"[✓▲✗] ([\d.]+)", str(panel).split("What fits")[1])
    assert said[3] == f"{peak / MIB:.1f}"
    _, pictures = saved(panel._repr_mimebundle_()["text/html"])
    assert re.findall(r"[✓▲✗] ([\d.]+)", pictures[8,])[3] == said[3]


def test_an_argument_that_cannot_vary_is_left_out_and_said() -> None:
    panel = om.sliders(attend, gpu="T4")
    assert set(panel.controls) == {"gpu", "batch_size"}
    assert "width stays 32: the function fails with 33: embed_dim must be divisible by num_heads" in shown(panel)


def with_heads(batch_size: int = 2, heads: int = 5) -> None:
    layer = nn.MultiheadAttention(60, heads).cuda()
    rows = torch.randn(8, batch_size, 60, device="cuda")
    layer(rows, rows, rows)[0].sum().backward()


@pytest.mark.slow
def test_a_divisor_is_left_out_though_its_neighbour_divides_too() -> None:
    panel = om.sliders(with_heads, gpu="T4")
    assert set(panel.controls) == {"gpu", "batch_size"}
    assert "heads stays 5: the function fails with 7" in shown(panel)


def test_a_function_that_fails_elsewhere_in_its_ranges_is_shown_in_words() -> None:
    said = str(om.sliders(with_heads, heads=(1, 20), gpu="T4"))
    assert "heads=7) failed: AssertionError: embed_dim must be divisible" in " ".join(said.split()), said


@pytest.mark.slow
def test_accumulation_has_a_control_and_more_of_it_takes_no_more_memory(dry_runs: list[str]) -> None:
    setup = om.TrainingSetup(tiny, microbatch_size=2, seq_len=32, precision="amp-fp16", max_grad_norm=1.0)
    panel = om.sliders(setup)
    times = panel.controls["gradient_accumulation_steps"]
    for number in (1, 2, 8, 4):
        dry_runs.clear()
        times.value = number
        assert number != 4 or not dry_runs  # as with 2 and with 8
        assert panel.setup.gradient_accumulation_steps == number
        true = panel.setup.dry_run()
        found = panel.report.peak_allocated_bytes, panel.report.peak_reserved_bytes
        assert found == (true.peak_allocated_bytes, true.peak_reserved_bytes)


def test_the_list_of_cards_can_be_searched() -> None:
    panel = om.sliders(rise, batch_size=(1, 64), gpu="T4")
    gpu, chosen = panel.controls["gpu"], panel.card
    gpu.search.value = "rtx 3090"
    names = [name for name, _card in gpu.field.options]
    assert panel.card == chosen and gpu.field.value == chosen
    assert len(names) > 1 and all("3090" in name or card == chosen for name, card in gpu.field.options)
    gpu.field.value = gpu.field.options[-1][1]
    assert "3090" in str(panel.card)
    gpu.search.value = ""
    assert len(gpu.field.options) == len(gpu.options) and "3090" in str(panel.card)


def rise(batch_size: int = 4, seq_len: int = 64) -> None:
    """Another function: nothing is known of it."""
    layer = torch.nn.Linear(16, 32).cuda()
    layer(torch.randn(batch_size, seq_len, 16, device="cuda")).sum().backward()


@pytest.mark.slow
def test_with_a_front_end_one_run_is_shown_and_the_rest_leaves_the_kernel_free(
    monkeypatch: pytest.MonkeyPatch, dry_runs: list[str]
) -> None:
    monkeypatch.setattr("oom_magic.notebook.sliders.controller.has_frontend", lambda: True)
    counts: list[int] = []

    async def stand_by() -> None:
        """The kernel's other work: it comes on between any two dry runs."""
        while True:
            counts.append(len(dry_runs))
            await asyncio.sleep(0)

    async def use() -> None:
        nonlocal panel
        panel = om.sliders(rise, batch_size=(1, 64), seq_len=(64, 1024))
        assert len(dry_runs) == 1 and "tracing more" not in status(panel).value
        assert panel.report.peak_reserved_bytes == om.dry_run(rise).peak_reserved_bytes
        dry_runs.clear()
        other = asyncio.get_running_loop().create_task(stand_by())
        before = asyncio.all_tasks()
        panel.controls["batch_size"].value = 7  # at once: nothing is known there yet
        (moved,) = asyncio.all_tasks() - before
        await asyncio.sleep(0.3)
        before = asyncio.all_tasks()
        panel.controls["batch_size"].value = 9  # what is under way for the last value is let go of
        (left,) = asyncio.all_tasks() - before
        await left
        other.cancel()
        assert moved.cancelled()

    panel: Sliders
    asyncio.run(use())
    steps = np.diff(sorted(set(counts)))
    assert len(steps) > 3 and set(steps) == {1}
    assert "≈" not in shown(panel)
    true = om.dry_run(rise, batch_size=9)
    assert panel.report.peak_reserved_bytes == true.peak_reserved_bytes


@pytest.mark.slow
def test_an_interrupt_of_what_is_done_in_slices_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    async def use() -> None:
        panel = om.sliders(rise, batch_size=(1, 64), gpu=["T4", "RTX 3090"])
        monkeypatch.setattr("oom_magic.predict.session.DrySession.run", interrupted)
        panel.controls["gpu"].value = panel.controls["gpu"].options[1][1]
        await at_rest()
        assert "interrupted at" in shown(panel) and len(shown(panel).strip().splitlines()) == 1
        monkeypatch.undo()
        panel.controls["batch_size"].value = 9
        await at_rest()
        assert "interrupted at" not in shown(panel)
        assert panel.report.peak_reserved_bytes == om.dry_run(rise, batch_size=9, gpu="RTX 3090").peak_reserved_bytes

    asyncio.run(use())
