"""The magics in a bare shell: values, errors, options, what is shown and in which order."""

from __future__ import annotations

import gc
import json
import re
import sys
import traceback
import weakref

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

import oom_magic
from oom_magic.memory.report import MemoryReport
from oom_magic.notebook.options import with_cards_quoted

HINT = "%oom_explain says which tensor did not fit, why, and what to change (--off: no more hints)."
MODEL = """%%gpumem --no-plot
import torch
model = torch.nn.Linear(1024, 1024, device="cuda")
def forward(rows):
    return model(torch.zeros(rows, 1024, device="cuda"))
"""


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells are dry runs here, also on a machine with a GPU."""
    monkeypatch.setattr("oom_magic.notebook.magics.has_gpu", lambda: False)


def run(shell: InteractiveShell, cell: str):
    return shell.run_cell(cell, store_history=True)


def shown(shell: InteractiveShell) -> list[str]:
    return [output["data"]["text/plain"] for output in shell.display_pub.outputs if "text/html" in output["data"]]


def test_value_of_the_cell_is_kept_and_can_be_silenced(shell) -> None:
    assert run(shell, "%%gpumem --no-plot\nx = 20\nx + 1").result == 21
    assert run(shell, "%%gpumem --no-plot\n20 + 1;").result is None
    assert run(shell, "%gpumem --no-plot 20 + 1").result == 21
    assert run(shell, "%%gpumem --no-plot\nx = 3").result is None


@pytest.mark.parametrize("text", ["I don't know (why", 'a """ b', "PS C:\\train> python train.py", "x = 1;"])
def test_what_is_pasted_need_be_no_python(shell, text) -> None:
    result = run(shell, f"%%oom_explain --fast\nCUDA out of memory. Tried to allocate 1.50 GiB.\n{text}")
    assert result.success and "1.50 GiB" in str(result.result)


def test_line_form_keeps_the_statement_as_written(shell) -> None:
    assert run(shell, "%gpumem --no-plot --gpu 'A100 80GB' len('a  \"b')").result == 5
    assert "A100" in shown(shell)[-1]


def test_shell_commands_and_magics_work_inside(shell) -> None:
    """A program is answered without being run, as all that leaves the process; magics are executed."""
    assert run(shell, "%%gpumem --no-plot -o report\nx = !echo one\n%time y = len(x) + 1\ny").result == 1
    assert any("echo one" in one.text for one in shell.user_ns["report"].assumptions)


def test_report_says_that_nothing_was_run(shell) -> None:
    run(shell, MODEL)
    (text,) = shown(shell)
    assert "nothing ran for real" in text and "RTX 3060" in text


@pytest.mark.slow
def test_steps_of_a_dry_run_are_chosen(shell, capsys) -> None:
    loop = "w = torch.ones(3, device='cuda', requires_grad=True)\nopt = torch.optim.SGD([w], 0.1)\nn = 0\n"
    loop += "for _ in range(5):\n    w.sum().backward()\n    opt.step()\n    n += 1\n'end'"
    for steps, result in (("2", None), ("all", "end")):
        assert run(shell, f"%%gpumem --dry-run --no-plot --steps {steps}\nimport torch\n{loop}").result == result
    partial, whole = (" ".join(page.split()) for page in shown(shell))
    assert "after 2 optimizer steps" in partial and "is not counted" not in whole
    run(shell, "%%gpumem --steps none\n1")
    assert "'none' is not a number of optimizer steps" in capsys.readouterr().err


def test_dry_names_stay_for_dry_cells_and_never_reach_the_users(shell) -> None:
    shell.user_ns["rows"] = 8
    run(shell, MODEL)
    assert run(shell, "%%gpumem --no-plot\nrows = 16\nforward(rows).shape[0]").result == 16
    assert run(shell, "%gpumem --no-plot rows").result == 16
    assert shell.user_ns["rows"] == 8
    assert "model" not in shell.user_ns and "forward" not in shell.user_ns
    assert run(shell, "torch.__name__").result == "torch"  # an import pretends nothing
    run(shell, "rows = 32")
    assert run(shell, "%gpumem --no-plot forward(rows).shape[0]").result == 32


def test_a_dry_name_in_a_real_cell_is_explained(shell, capsys) -> None:
    run(shell, "%%gpumem --no-plot\nbatch = 3")
    run(shell, "batch")
    assert "batch was assigned in a dry run" in capsys.readouterr().out


@pytest.mark.slow
def test_a_name_that_a_dry_run_never_came_to_is_explained(shell, capsys) -> None:
    train = "def train():\n    for _ in range(9):\n        w.sum().backward()\n        opt.step()\n    return 7\n"
    setup = "import torch\nw = torch.ones(3, device='cuda', requires_grad=True)\nopt = torch.optim.SGD([w], 0.1)\n"
    run(shell, f"%%gpumem --dry-run --no-plot --steps 3\n{setup}{train}curve = train()")
    run(shell, "%%gpumem --dry-run --no-plot\ncurve")
    assert "curve is assigned after the point where the dry run of its cell stopped" in capsys.readouterr().out
    run(shell, "%%gpumem --dry-run --no-plot --steps all\ncurve = train()")
    assert run(shell, "%gpumem --dry-run --no-plot curve").result == 7
    run(shell, "nothing")
    assert "nothing would be" not in capsys.readouterr().out


def test_functions_of_dry_cells_see_later_names(shell) -> None:
    run(shell, "%%gpumem --no-plot\ndef read(): return later")
    assert run(shell, "%%gpumem --no-plot\nlater = 5\nread()").result == 5


@pytest.mark.parametrize("drop", ["del model", "model = None", "model = torch.zeros(1, device='cuda')"])
def test_an_object_of_another_cell_that_a_dry_cell_drops_is_freed(shell, drop: str) -> None:
    """What followed ``del model`` was put on top of the model: the user's own name still led to it."""
    run(shell, "import torch\nmodel = torch.nn.Linear(1024, 1024, bias=False)")
    run(shell, f"%%gpumem --no-plot -o report\nmodel.cuda()\n{drop}\nother = torch.zeros(2**20, device='cuda')")
    assert shell.user_ns["report"].peak_allocated_bytes in (2**22, 2**22 + 512)
    assert not shell.user_ns["model"].weight.is_meta


def test_users_objects_are_not_kept_alive(shell) -> None:
    shell.run_cell("class Thing: pass\nthing = Thing()")
    alive = weakref.ref(shell.user_ns["thing"])
    run(shell, "%gpumem --no-plot 1")
    del shell.user_ns["thing"]
    gc.collect()
    assert alive() is None


def test_simulated_failure_shows_report_then_the_error_once(shell, capsys) -> None:
    run(shell, MODEL)
    capsys.readouterr()
    result = run(shell, "%%gpumem --no-plot\n\nforward(10**8)\nafter = 1")
    assert type(result.error_in_exec).__name__ == "OutOfMemoryError"
    assert not result.success
    assert shown(shell)[-1].splitlines()[2].startswith("✗ Out of memory")
    out = capsys.readouterr().out
    assert out.count("OutOfMemoryError: CUDA out of memory. Tried to allocate") == 1
    assert out.count(HINT) == 1
    assert "line 3" in out and "oom_magic/predict" not in out
    assert run(shell, "%gpumem --no-plot forward(8).shape[0]").result == 8


def test_users_exception_passes_once_after_the_report(shell, capsys) -> None:
    result = run(shell, "%%gpumem --no-plot\nimport torch\nx = torch.ones(4, device='cuda')\n1 / 0")
    assert isinstance(result.error_in_exec, ZeroDivisionError)
    (report,) = shown(shell)
    assert "▲ The run ended with ZeroDivisionError: division by zero." in report
    assert "How much the rest would need" in " ".join(report.split())  # a part of a run is never called safe
    assert "Safe" not in report and "minimum memory" not in report
    out = capsys.readouterr().out
    assert out.count("ZeroDivisionError: division by zero") == 1
    assert "line 4" in out and HINT not in out


def test_interrupt_passes(shell) -> None:
    assert isinstance(run(shell, "%%gpumem --no-plot\nraise KeyboardInterrupt").error_in_exec, KeyboardInterrupt)


def test_syntax_error_shows_the_users_line(shell, capsys) -> None:
    result = run(shell, "%%gpumem --no-plot\nx = 1\ny = = 2")
    assert isinstance(result.error_in_exec, SyntaxError) and result.error_in_exec.lineno == 3
    assert "y = = 2" in capsys.readouterr().out
    assert shown(shell) == []


def test_await_in_a_measured_cell_is_refused_with_a_sentence(shell, monkeypatch) -> None:
    monkeypatch.setattr("oom_magic.notebook.magics.has_gpu", lambda: True)
    error = run(shell, "%%gpumem\nimport asyncio\nawait asyncio.sleep(0)").error_in_exec
    assert isinstance(error, UsageError) and "cannot use await" in str(error)


@pytest.mark.parametrize(
    "cell", ["%%gpumem --no-plot\n\n", "%%gpumem --no-plot\n\n  \n", "%%gpumem --no-plot\n# nothing"]
)
def test_empty_cells(shell, cell: str) -> None:
    result = run(shell, cell)
    assert result.error_in_exec is None and result.result is None


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--memory 12", "did you mean '12GiB'"),
        ("--memory -1GiB", "not a positive size"),
        ("--gpu 'RTX 3061'", "Did you mean NVIDIA GeForce RTX 3060"),
        ("--device one", "invalid int"),
        ("--colour red", "--no-plot"),
        ("--top 0", "use 1 or more"),
        ("-o 2x", "not a valid variable name"),
        ("--json none/report.json", "'none/report.json' cannot be written: No such file"),
    ],
)
def test_bad_options_say_what_is_allowed(shell, line: str, says: str) -> None:
    error = run(shell, f"%%gpumem {line}\n1").error_in_exec
    assert isinstance(error, UsageError) and says in str(error)
    assert shown(shell) == []


def test_statement_in_a_cells_first_line_is_refused(shell) -> None:
    assert "into the cell" in str(run(shell, "%%gpumem f(x)\n1").error_in_exec)
    assert "needs a statement" in str(run(shell, "%gpumem").error_in_exec)


def test_card_chosen_once_for_the_notebook(shell) -> None:
    run(shell, '%gpumem --gpu "A100 80GB" --memory 40GiB')
    run(shell, "%gpumem --no-plot 1")
    assert "A100" in shown(shell)[-1] and "40.00 GiB" in shown(shell)[-1]


def test_report_is_bound_and_written(shell, tmp_path) -> None:
    file = tmp_path / "report.json"
    run(
        shell,
        f"%%gpumem --no-plot -o report --json '{file}'\nimport torch\ntorch.ones(2**20, device='cuda').sum()",
    )
    report = shell.user_ns["report"]
    assert isinstance(report, MemoryReport)
    plain = json.loads(file.read_text())
    assert plain["peak_allocated_bytes"] == report.peak_allocated_bytes
    assert MemoryReport.from_dict(plain).breakdown == report.breakdown


def test_picture_is_shown_unless_unwanted(shell) -> None:
    cell = "\nimport torch\nx = torch.ones(2**20, device='cuda')"
    run(shell, f"%%gpumem{cell}")
    run(shell, f"%%gpumem --no-plot{cell}")
    pictures = ["<svg" in output["data"]["text/html"] for output in shell.display_pub.outputs]
    assert pictures == [True, False]


def test_hint_under_any_out_of_memory_error_until_switched_off(shell, capsys) -> None:
    cell = "raise RuntimeError('CUDA error: out of memory')"
    run(shell, cell)
    assert capsys.readouterr().out.count(HINT) == 1
    run(shell, "try:\n    raise MemoryError('x') from RuntimeError('CUDA out of memory')\nfinally: pass")
    assert capsys.readouterr().out.count(HINT) == 1
    run(shell, "raise ValueError('no')")
    assert HINT not in capsys.readouterr().out
    run(shell, "%oom_explain --off")
    run(shell, cell)
    assert HINT not in capsys.readouterr().out


def test_unloading_takes_everything_away_and_reloading_adds_nothing_twice(shell, capsys) -> None:
    events = shell.events.callbacks["post_run_cell"]
    before = len(events)
    shell.run_line_magic("reload_ext", "oom_magic")
    assert len(events) == before
    run(shell, "raise RuntimeError('CUDA out of memory')")
    assert capsys.readouterr().out.count(HINT) == 1
    shell.run_line_magic("unload_ext", "oom_magic")
    assert len(events) == before - 2
    assert not [call for call in shell.events.callbacks["pre_run_cell"] if "oom_magic" in call.__module__]
    for kind in ("line", "cell"):
        assert not [name for name in shell.magics_manager.magics[kind] if "oom" in name or "gpumem" in name]


def test_missing_file_and_empty_paste_are_usage_errors(shell) -> None:
    assert "'none.log' is neither a file nor a variable" in str(run(shell, "%oom_explain none.log").error_in_exec)
    assert "paste" in str(run(shell, "%%oom_explain\n ").error_in_exec)
    assert "No error" in str(run(shell, "%oom_explain").error_in_exec)  # a mistyped magic is nothing to explain


@pytest.mark.parametrize("name", ["gpumem", "oom_explain", "oom_free", "oom_doctor", "gpumem_watch", "oom_sliders"])
def test_help_has_two_examples(shell, name) -> None:
    text = shell.find_line_magic(name).__doc__
    examples = re.findall(rf"^ +%%?{name}\b", text.partition("Examples::")[2], flags=re.M)
    assert len(examples) == 2


@pytest.mark.parametrize("name", oom_magic.__all__)
def test_every_public_name_is_documented(name) -> None:
    assert len((getattr(oom_magic, name).__doc__ or "").split()) >= 8


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("--gpu RTX 3060 train()", '--gpu "RTX 3060" train()'),
        ("--steps 2 --gpu A100 80GB", '--steps 2 --gpu "A100 80GB"'),
        ("--gpu 2x T4 train(4)", '--gpu "2x T4" train(4)'),
        ("--gpu T4 train(4)", "--gpu T4 train(4)"),
        ("--gpu RTX 3600", '--gpu "RTX 3600"'),
        ('--gpu "RTX 3060" --top 3', '--gpu "RTX 3060" --top 3'),
        ("train(gpu)", "train(gpu)"),
    ],
)
def test_a_card_of_several_words_needs_no_quotes(line, meant):
    assert with_cards_quoted(line) == meant


def test_catalogues_are_listed(shell, capsys):
    shell.run_line_magic("gpumem", "--list-gpus")
    shell.run_line_magic("oom_sliders", "--list-models")
    printed = capsys.readouterr().out
    assert "NVIDIA GeForce RTX 3060" in printed and "qwen2.5-7b" in printed
    shell.run_line_magic("gpumem", "--list-gpus rtx 409")
    shell.run_line_magic("oom_sliders", "--list-models qwen 7b")
    printed = capsys.readouterr().out
    assert "RTX 4090" in printed and "RTX 3060" not in printed and "qwen2.5-7b" in printed and "gpt2" not in printed


def test_a_part_of_an_option_is_no_option(shell):
    with pytest.raises(UsageError, match="--of"):
        shell.run_line_magic("oom_explain", "--of")


@pytest.mark.slow
def test_steps_are_seen_of_an_optimizer_that_another_dry_cell_made(shell):
    """PyTorch's first optimizer of a class puts its hooks there for good (``Optimizer._patch_step_function``)."""
    run(shell, MODEL)
    run(shell, "%%gpumem --no-plot\noptimizer = torch.optim.Rprop(model.parameters())")
    loop = "for _ in range(2):\n    forward(8).sum().backward()\n    optimizer.step()"
    run(shell, f"%%gpumem --no-plot -o report\n{loop}").raise_error()
    assert len(shell.user_ns["report"].steps) == 2


@pytest.mark.slow
def test_a_cell_run_again_takes_what_it_took(shell):
    """What only the names that it binds anew held goes when they are bound, and is not left behind."""
    training = """
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(4)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    loss = model(torch.randn(64, 2048, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    reports = []
    for _ in range(2):
        shell.run_cell(f'%%gpumem --no-plot --gpu "RTX 3060" -o report\n{training}')
        reports.append(shell.user_ns["report"])
    first, again = reports
    assert again.peak_allocated_bytes == first.peak_allocated_bytes
    assert first.kept_bytes > again.kept_bytes == 0
    assert not [name for name in shell.user_ns if "oom_magic" in name and name.startswith("__")]
    shell.run_cell(
        '%%gpumem --no-plot --gpu "RTX 3060" -o report\ndel optimizer\nrows = torch.zeros(2**26, device="cuda")'
    )
    states = 2 * 4 * (2048 * 2048 + 2048) * 4
    peak = shell.user_ns["report"].peak_allocated_bytes
    assert peak == pytest.approx(first.kept_bytes - states + 4 * 2**26, rel=0.001)  # deleted, they go at once, too


@pytest.mark.slow
def test_a_failed_dry_run_takes_nothing_from_the_next(shell):
    """Its error's frames hold activations; the model that it named is there, and the run says what it left out."""
    shell.run_cell(
        "import torch\nlayers = lambda: torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)])"
    )
    build = "%%gpumem --no-plot --memory 4GiB -o report\nmodel = layers().cuda()"
    train = '%%gpumem --no-plot --memory 4GiB -o report\nmodel(torch.ones({}, 1024, device="cuda")).sum().backward(); model.zero_grad()'
    shell.run_cell(build)
    reports = []
    for rows in (1000, 400_000, 1000):
        shell.run_cell(train.format(rows))
        reports.append(shell.user_ns["report"])
    first, failed, again = reports
    assert failed.out_of_memory is not None and failed.breakdown["activation"] > 2**30
    assert again.breakdown["before"] == 0
    assert again.peak_allocated_bytes == pytest.approx(first.peak_allocated_bytes, rel=0.01)
    assert again.peak_reserved_bytes <= first.peak_reserved_bytes
    assert ["error of the last run" in " ".join(one.text for one in report.assumptions) for report in reports] == [
        False, False, True,
    ]  # fmt: skip


def test_a_script_that_runs_out_of_memory_ends_a_dry_cell(shell, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import torch\nx = torch.zeros(2**29, device='cuda')\n")
    shows = shell.showtraceback
    cell = f"%%gpumem --no-plot --memory 1GiB\n%run {script}\nwent_on = True"
    error = shell.run_cell(cell, store_history=True).error_in_exec
    assert type(error).__name__ == "OutOfMemoryError"
    assert shell.showtraceback == shows and "showtraceback" not in vars(shell) and "went_on" not in shell.user_ns
    told = shell.run_line_magic("oom_explain", "")
    assert "2.00 GiB did not fit" in str(told)


def test_the_error_of_a_dry_run_shows_the_users_frames(shell, capsys):
    shell.run_cell(
        "import torch\ndef work(net):\n    return net(torch.ones(2**18, 1024, device='cuda'))", store_history=True
    )
    shell.run_cell("%%gpumem --no-plot --memory 2GiB\nwork(torch.nn.Linear(1024, 1024).cuda())", store_history=True)
    shown = capsys.readouterr().out
    frames = shown[shown.index("Traceback (most recent call last)") :]
    assert "----> 3     return net(" in frames and "----> 2 work(" in frames
    assert "library frames omitted" in frames and "module.py" not in frames and "run_cell_magic" not in frames
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(sys.last_value.__traceback__)]
    assert any(file.endswith("module.py") for file in files)  # for %debug


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("om.dry_run(print, gpu='foo')", "'foo' is not in the catalogue of GPUs"),
        ("om.sliders(lambda rows: None, rows=(5, 1))", "rows=(5, 1) is reversed; write (1, 5)."),
        ("om.size(lambda rows: None, row=(1, 5))", "did you mean 'rows'?"),
        ("om.explain(5)", "5 cannot be explained; pass an exception, a text or a path."),
    ],
)
def test_what_is_refused_is_shown_at_the_users_line(shell, code: str, says: str, capsys) -> None:
    error = run(shell, f"import oom_magic as om\n{code}").error_in_exec
    shown = capsys.readouterr().out
    assert says in str(error) and says in shown and f"----> 2 {code}" in shown
    assert "Ranges" not in shown and "site-packages" not in shown and "one_line_errors" not in shown
    assert len(shown.splitlines()) < 10


def test_a_fault_of_the_users_function_is_shown_whole(shell, capsys) -> None:
    run(shell, "import oom_magic as om\ndef train():\n    raise ValueError('mine')\nom.dry_run(train)")
    assert "----> 3     raise ValueError('mine')" in capsys.readouterr().out


def test_a_cell_that_is_run_again_is_named_by_its_latest_number(shell, monkeypatch) -> None:
    """A kernel names the code of a cell by its text, IPython in a terminal by its number."""
    compiler = pytest.importorskip("ipykernel.compiler")
    monkeypatch.setattr(shell, "compile", compiler.XCachingCompiler())
    for number in (1, 3):
        run(shell, "import torch\ndef train():\n    return torch.ones(1000, device='cuda').sum()")
        run(shell, "%%gpumem --no-plot\ntrain()")
        assert f"Cell In[{number}]:3" in shown(shell)[-1]


def test_what_can_be_freed_is_said_of_what_is_listed(shell) -> None:
    loop = "    for _ in range(20):\n        kept.append(torch.ones(2**28, device='cuda'))"
    run(shell, f"import torch\ndef train():\n    kept = []\n{loop}")
    run(shell, "%%gpumem --no-plot\ntrain()")
    explained = str(run(shell, "%oom_explain --fast").result)
    assert "%oom_free gets back what the failed call keeps alive." in explained and "del a name" not in explained
