"""%oom_explain in a shell: the last failure, files and pastes, options, first words before prices."""

from __future__ import annotations

import ast
import gc
import re
import sys
import weakref
from traceback import walk_tb
from types import SimpleNamespace

import pytest
import torch

from oom_magic.explain import advice
from oom_magic.explain.diagnosis import Diagnosis
from oom_magic.explain.evidence.causes import Cause
from oom_magic.explain.remedies import evaluation as pricing
from oom_magic.explain.remedies.cell_rehearsal import CellRehearsal
from oom_magic.explain.sentences.catalogue import render_evidence
from oom_magic.notebook.cells import explanations
from oom_magic.predict.instrumentation import stop_rule
from oom_magic.units import MIB
from tests.support.failing_cells import CARD, FAILING, MODEL, fail, run, surroundings  # noqa: F401 - a fixture
from tests.support.versions import bitsandbytes_or_skip

pytestmark = pytest.mark.usefixtures("surroundings")
MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 192.00 MiB. GPU 0 has a total capacity of"
    " 9.77 GiB of which 53.81 MiB is free. Of the allocated memory 8.10 GiB is allocated by PyTorch, and 180.00"
    " MiB is reserved by PyTorch but unallocated."
)


def test_pasted_text_and_files(shell, tmp_path):
    (tmp_path / "train.log").write_text(MESSAGE)
    pasted = run(shell, f"%%oom_explain\n{MESSAGE}")
    read = run(shell, f"%oom_explain '{tmp_path / 'train.log'}'")
    assert isinstance(pasted, Diagnosis) and pasted.failures == read.failures
    assert pasted.lang == "en" and "What happened" in str(pasted)
    assert run(shell, f"%oom_explain {tmp_path / 'train.log'} --fast --lang zh").lang == "zh"  # as options of commands


def test_what_a_variable_holds_is_explained_by_its_name(shell):
    raising = f"try:\n    raise MemoryError({MESSAGE!r})\nexcept MemoryError as caught:\n    error = caught"
    run(shell, raising)
    from_exception = run(shell, "%oom_explain error --fast")
    run(shell, f"text = {MESSAGE!r}\nnumber = 3")
    from_text = run(shell, "%oom_explain text")
    assert from_text.main_failure == run(shell, f"%%oom_explain\n{MESSAGE}").main_failure
    assert from_exception.main_failure.requested_bytes == from_text.main_failure.requested_bytes == 192 * MIB
    error = shell.run_cell("%oom_explain number").error_in_exec
    assert str(error).startswith("%oom_explain: 'number' is neither a file nor a variable that holds a text")


def test_language_stays(shell):
    assert run(shell, f"%%oom_explain --lang zh\n{MESSAGE}").lang == "zh"
    assert run(shell, f"%%oom_explain\n{MESSAGE}").lang == "zh"
    assert run(shell, f"%%oom_explain --lang en\n{MESSAGE}").lang == "en"


def test_options_describe_the_run(shell):
    line = "--fast --model roberta-base --batch 4 --seq 1024 --precision fp32 --attention eager"
    diagnosis = run(shell, f"%%oom_explain {line}\n{MESSAGE}")
    assert diagnosis.cause == Cause.ATTENTION_SCORES
    text = " ".join(str(diagnosis).split())
    assert "Assumed run" in text and "RTX 3080 (9.77 GiB)" in text and "batch 4 x 1024" in text
    assert "--fast was given" in text and "describe the run" not in text


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--batch 4", "--model"),
        ("--model robert-base", "Did you mean"),
        ("--model gpt2 --precision fp17", "fp17"),
        ("--model gpt2 --gpu 'RTX 3061'", "RTX 3060"),
        ("--lang fr", "--lang"),
    ],
)
def test_wrong_options_say_what_is_allowed(shell, line, says):
    error = shell.run_cell(f"%%oom_explain {line}\n{MESSAGE}").error_in_exec
    assert type(error).__name__ == "UsageError" and says in str(error)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("%%oom_explain --lang zh --batch 4", "--model"),
        ("%%oom_explain --lang zh --model robert-base", "roberta-base"),
        ("%%oom_explain --lang zh --model gpt2 --precision fp17", "fp16"),
        ("%%oom_explain --lang zh --model gpt2 --gpu 'RTX 3061'", "RTX 3060"),
        ("%%oom_explain --lang zh --model gpt2 --memory 12", "'12GiB'"),
        ("%oom_explain --lang zh nothing.log", "'nothing.log'"),
    ],
)
def test_wrong_options_are_refused_in_chinese(shell, line, says):
    said = str(shell.run_cell(f"{line}\n{MESSAGE if line.startswith('%%') else ''}").error_in_exec)
    assert says in said and re.search("[\u4e00-\u9fff]{3}", said)
    assert not re.search(r"(?:[a-z]{2,}[ ,]+){3,}[a-z]+", said)


@pytest.mark.slow
def test_a_described_run_is_priced(shell, monkeypatch, capsys):
    monkeypatch.setattr(pricing, "remedy_specs", lambda _: [])  # only sizes: fewer dry runs
    line = "--model distilgpt2 --batch 16 --seq 128 --gpu 'RTX 3060' --memory 2.5GiB"
    diagnosis = run(shell, f"%%oom_explain {line}\n{MESSAGE}")
    smaller = next(remedy for remedy in diagnosis.remedies if remedy.key == "smaller_batch")
    assert smaller.fits and smaller.needed_bytes < 3 * 2**30  # of the card described, not the message's
    first, _, whole = capsys.readouterr().out.partition("What happened:")
    assert "Why:" in first and "Microbatch" not in first and "Microbatch" in whole


def test_the_last_dry_failure_is_explained_at_once(shell):
    fail(shell)
    diagnosis = run(shell, "%oom_explain --fast")
    assert diagnosis.tensors[0].formula == "16 x 4096 x 1024 x float32 = 256.00 MiB"
    assert diagnosis.tensors[0].expression.startswith("F.linear(input[16, 4096, 1024], ")
    assert diagnosis.place.startswith("Cell In[")
    assert {held.kind for held in diagnosis.holders} == {"category", "line", "name", "own_frames"}
    words = {one.what.key: render_evidence(one.what, "zh") for one in diagnosis.holders if one.what is not None}
    assert words["held_as_module"] == "模块 Sequential" and words["held_by_error"].endswith("处的 OutOfMemoryError")


@pytest.mark.slow
def test_under_a_limit_the_card_is_the_limit(shell):
    """What is outside PyTorch does not count towards it, and nothing is bought."""
    on_a_larger = [cell.replace("1GiB", "8GiB") for cell in (MODEL, FAILING)]
    run(shell, f"{on_a_larger[0]}torch.cuda.set_per_process_memory_fraction(0.125)")
    failed = shell.run_cell(on_a_larger[1], store_history=True).error_in_exec
    assert "1024.00 MiB allowed" in str(failed) or "1.00 GiB allowed" in str(failed)
    diagnosis = run(shell, "%oom_explain")
    assert diagnosis.cause == "memory_fraction_limit"
    assert diagnosis.as_is.usable_bytes == diagnosis.as_is.total_bytes == 2**30
    by_key = {one.key: one for one in diagnosis.remedies}
    assert diagnosis.remedies[0].key == "raise_limit" and by_key["raise_limit"].verdict == "safe"
    assert by_key["smaller_batch"].values["after"] == 4 and by_key["smaller_batch"].verdict == "safe"
    assert "larger_card" not in by_key


WIDE = (
    CARD.replace("1GiB", "1.5GiB") + "import torch\n"
    "model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(4))).cuda()\n"
    "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
    "for _ in range(2):\n    loss = model(torch.randn(8, 4096, device='cuda')).sum()\n    loss.backward()\n"
    "    optimizer.step()\n    optimizer.zero_grad()\n"
)


def pasted_peak(shell, cell):
    """The peak of a cell in a fresh session: a dry run on another card."""
    cell = re.sub(r"%%gpumem .*", "%%gpumem --no-plot -o pasted --gpu 'RTX 3080'", cell)
    run(shell, "%gpumem --gpu 'RTX 4090' pass")
    assert shell.run_cell(cell, store_history=True).success
    return shell.user_ns["pasted"].peak_allocated_bytes


@pytest.mark.slow
def test_code_to_paste_takes_what_was_promised(shell):
    """Word for word in the place of the statements that it changes."""
    failed = shell.run_cell(WIDE, store_history=True)
    assert type(failed.error_in_exec).__name__ == "OutOfMemoryError"
    remedies = {one.key: one for one in run(shell, "%oom_explain").remedies}
    optimizer = WIDE.splitlines()[-6]
    assert optimizer.startswith("optimizer = ")
    for key in ("foreach", "sgd"):
        _, code = remedies[key].code.split("# in the cell that failed:\n")  # what is run once before it stands apart
        assert pasted_peak(shell, WIDE.replace(optimizer, code)) == remedies[key].peak_allocated_bytes


def test_accumulation_takes_what_was_promised(shell, monkeypatch):
    """Gradients are there in the second of the smaller batches; the rehearsal has to have seen that."""
    monkeypatch.setattr(pricing, "remedy_specs", lambda _: [])
    cell = WIDE.replace("randn(8,", "randn(batch_size,").replace("for _ in range(2)", "for _ in range(4)")
    cell = cell.replace("\nfor _", "\nbatch_size = 16384\nfor _").replace(
        "'RTX 3060' --memory 1.5GiB", "'RTX 3060' --memory 2.6GiB"
    )
    failed = shell.run_cell(cell, store_history=True)
    assert type(failed.error_in_exec).__name__ == "OutOfMemoryError"
    (smaller,) = [one for one in run(shell, "%oom_explain").remedies if one.key == "smaller_batch"]
    assert smaller.fits
    peak = smaller.values["accumulated_peak_bytes"]
    release, place, changes = smaller.code.partition("\n\n# in the cell that failed:\n")
    assert place and release.startswith("%oom_free --names ")
    assert pasted_peak(shell, cell[: cell.index("batch_size = ")] + changes) == peak
    assert pasted_peak(shell, cell.replace("16384", str(smaller.values["after"]))) == smaller.peak_allocated_bytes


def test_the_failed_cell_is_rehearsed(shell, monkeypatch):
    monkeypatch.setattr(pricing, "remedy_specs", lambda _: [])
    fail(shell)
    diagnosis = run(shell, "%oom_explain")
    keys = {remedy.key: remedy for remedy in diagnosis.remedies}
    assert keys["smaller_batch"].fits
    assert keys["smaller_batch"].values["after"] < 16
    assert "batch_size" in keys["smaller_batch"].code
    assert "range(accumulation)" in keys["smaller_batch"].code
    assert "batch_size" not in shell.user_ns


EVALUATING = """%%gpumem --dry-run --no-plot --memory 1400MiB --steps all
import torch
from torch import nn
net = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).cuda()
optimizer = torch.optim.SGD(net.parameters())
for _ in range(3):
    net(torch.rand(1024, 1024, device="cuda")).sum().backward()
    optimizer.step()
def evaluate():
    return [net(torch.rand(8192, 1024, device="cuda")).sum() for _ in range(8)]
losses = evaluate()
"""


@pytest.mark.slow
def test_an_evaluation_after_the_training_is_rehearsed_with_it(shell):
    shell.run_cell(EVALUATING)
    diagnosis = run(shell, "%oom_explain")
    (remedy,) = (one for one in diagnosis.remedies if one.key == "no_grad")
    assert diagnosis.remedies[0] is remedy and remedy.fits
    assert remedy.peak_allocated_bytes < 200 * MIB
    torch.autocast_increment_nesting()  # an open block more or less than before keeps or drops what later ones cast
    assert torch.autocast_decrement_nesting() == 0


@pytest.mark.slow
@pytest.mark.parametrize(("in_function", "rows"), [(True, 64), (False, 16384), (True, 16384)])
def test_an_evaluation_that_would_fail_next_is_made_smaller_too(shell, in_function, rows):
    train = f"""
    for step in range(6):
        net(torch.randn(batch_size, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for step in range(6):
            rows = torch.randn({rows}, 1024, device="cuda")
            net(rows)
"""
    body = f"def fit(batch_size):{train}\nfit(16384)" if in_function else f"batch_size = 16384\nif True:{train}"
    make = "import torch\nfrom torch import nn\nnet = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]).cuda()"
    code = f"{make}\noptimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n{body}"
    shell.run_cell(f"%%gpumem --dry-run --no-plot --memory 600MiB\n{code}")
    diagnosis = run(shell, "%oom_explain")
    smaller = diagnosis.remedies[0]
    after = smaller.values.get("evaluation_after")
    assert (smaller.key, smaller.fits, after is not None) == ("smaller_batch", True, rows > 64)
    assert "accumulation = " in smaller.code and f"torch.randn({after or rows}, 1024" in smaller.code
    if after:
        assert "later_takes_more" in {one.key for one in diagnosis.evidence}
        assert f"evaluation in batches of {after} instead of 16384" in " ".join(str(diagnosis).split())


@pytest.mark.slow
def test_a_rehearsal_that_ends_before_the_failure_says_so(shell, monkeypatch):
    monkeypatch.setattr(CellRehearsal, "may_evaluate", False)  # else what follows the steps is followed
    monkeypatch.setattr(stop_rule, "MOST_STEPS", 2)
    monkeypatch.setattr(stop_rule, "MOST_SECONDS", 0)
    shell.run_cell(EVALUATING)
    diagnosis = run(shell, "%oom_explain")
    assert "first_steps_fit" in {evidence.key for evidence in diagnosis.evidence}
    assert all(remedy.fits is None for remedy in diagnosis.remedies)


@pytest.mark.slow
def test_a_cell_that_only_loads_is_rehearsed_with_the_loading_changed(shell):
    bitsandbytes_or_skip()
    load = 'net = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B", dtype=torch.float32).to("cuda")'
    shell.run_cell("import torch\nfrom transformers import AutoModelForCausalLM")
    shell.run_cell(f"%%gpumem --dry-run --no-plot --memory 1.8GiB\n{load}")
    diagnosis = run(shell, "%oom_explain")
    assert (diagnosis.cause, diagnosis.remedies[0].key) == (Cause.WEIGHTS_TOO_BIG, "loaded_half")
    remedies = {one.key: one for one in diagnosis.remedies}
    peaks = [remedies[f"loaded_{how}"].peak_allocated_bytes for how in ("half", "8bit", "4bit")]
    assert peaks == sorted(peaks, reverse=True) and all(remedies[f"loaded_{how}"].fits for how in ("half", "4bit"))
    loaded = "".join(remedies["loaded_4bit"].code.split())  # its lines are 80 columns wide
    assert loaded.count('net=AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B",q') == 1
    assert remedies["offload"].fits and 'float32,device_map="auto"' in "".join(remedies["offload"].code.split())
    assert not {"half_weights", "qlora", "smaller_batch"} & set(remedies)


@pytest.mark.slow
def test_debugging_still_works(shell):
    fail(shell)
    error, trace = sys.last_value, sys.last_traceback
    run(shell, "%oom_explain --fast")
    assert sys.last_value is error and sys.last_traceback is trace
    frames = [frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__)]
    assert "<module>" in frames and frames[-1] == "forward"


def test_no_tensor_is_kept(shell):
    fail(shell)
    weight = next(
        frame.f_locals["input"] for frame, _ in walk_tb(sys.last_value.__traceback__) if "input" in frame.f_locals
    )
    alive = weakref.ref(weight)
    del weight
    diagnosis = run(shell, "%oom_explain --fast")
    for name in ("last_value", "last_traceback", "last_exc", "last_type"):
        sys.__dict__.pop(name, None)
    shell.run_cell("1/0")  # IPython lets go of the failed cell when another error comes
    gc.collect()
    assert diagnosis.tensors and alive() is None


def test_an_interrupt_keeps_what_was_found(shell, monkeypatch):
    def prices(diagnosis, setup):
        yield diagnosis
        raise KeyboardInterrupt

    monkeypatch.setattr(advice, "advise_setup", prices)
    assert isinstance(run(shell, f"%%oom_explain --model distilgpt2\n{MESSAGE}"), Diagnosis)


@pytest.mark.slow
def test_a_failed_cell_is_kept_as_text(shell):
    fail(shell)
    magics = shell.magics_manager.registry["OOMMagics"]
    cell = magics.failures.failed_cell
    assert cell.source == FAILING and cell.is_dry and cell.is_observed
    shell.run_cell("raise RuntimeError('CUDA out of memory. Tried to allocate 1.00 GiB.')")
    assert not magics.failures.failed_cell.is_observed


@pytest.mark.slow
def test_rehearsals_are_silent(shell, capfd, monkeypatch):
    monkeypatch.setattr(pricing, "remedy_specs", lambda _: [])
    cell = FAILING.replace("\nbatch_size", "\nimport warnings, logging\nfrom tqdm.auto import tqdm\nbatch_size")
    cell = cell.replace(
        "in range(2):", "in tqdm(range(2)):\n    print('noise'); logging.error('noise'); warnings.warn('noise')"
    )
    run(shell, MODEL)
    run(shell, cell)
    capfd.readouterr()
    run(shell, "%oom_explain")
    said = "".join(capfd.readouterr()).replace("'noise'", "")  # the code to paste is the user's own loop
    assert "noise" not in said and "it/s" not in said


CHOOSING_A_DEVICE = (
    CARD + "import torch\ndevice = 'cuda' if torch.cuda.is_available() else 'cpu'\nbatch_size = 64\n"
    "net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).to(device)\n"
    "optimizer = torch.optim.SGD(net.parameters())\n"
    "for _ in range(2):\n"
    "    with torch.autocast(device, dtype=torch.bfloat16):\n"
    "        loss = net(torch.zeros(batch_size, 1024, 1024, device=device)).square().mean()\n"
    "    loss.backward()\n    optimizer.step()\n"
)


@pytest.mark.slow
def test_a_rehearsed_cell_finds_the_gpu_it_asks_for(shell, monkeypatch):
    every = pricing.remedy_specs
    monkeypatch.setattr(pricing, "remedy_specs", lambda it: [one for one in every(it) if one.key == "mixed_precision"])
    shell.run_cell(CHOOSING_A_DEVICE)
    diagnosis = run(shell, "%oom_explain")
    assert "rehearsal_fits" not in {one.key for one in diagnosis.evidence}
    keys = {remedy.key: remedy for remedy in diagnosis.remedies}
    assert keys["smaller_batch"].fits and "mixed_precision" not in keys  # it is there already


def test_running_out_of_the_computers_memory_is_explained_too(shell):
    shell.run_cell("raise RuntimeError('CUDA out of memory. Tried to allocate 1.00 GiB.')")
    shell.run_cell("import torch\nx = torch.empty(2**47, dtype=torch.uint8)")
    diagnosis = run(shell, "%oom_explain")
    assert diagnosis.cause == Cause.HOST_RAM
    assert diagnosis.main_failure.requested_bytes == 2**47
    assert all(remedy.needed_bytes is None for remedy in diagnosis.remedies)


def test_a_frame_without_source_is_not_given_the_message_as_its_code(shell):
    shell.run_cell("import torch\nx = torch.empty(2**58, dtype=torch.uint8)")
    diagnosis = run(shell, "%oom_explain")
    assert diagnosis.cause == Cause.REQUEST_ALONE_TOO_BIG
    assert "multiplied in RuntimeError" not in str(diagnosis)


@pytest.mark.parametrize(
    ("code", "is_left_out"),
    [
        ("print(f'{loss.item():.2f}', torch.cuda.memory_allocated())", True),
        ("torch.save(model.state_dict(), 'a.pt')", True),
        ("json.dump(log, open('log.json', 'w'))", True),
        ("plt.savefig('loss.png')", True),
        ("print(train())", False),
        ("print(model(x))", False),
        ("model(x).save('a')", False),
        ("train()", False),
    ],
)
def test_what_only_prints_or_writes_is_not_rehearsed(shell, code: str, is_left_out: bool) -> None:
    from oom_magic.notebook.cells.cell_code import code_of

    assert (not code_of(shell, code, {}).tree.body) == is_left_out


@pytest.mark.slow
def test_only_what_was_rehearsed_is_counted(shell, monkeypatch):
    fail(shell)
    shown = []
    handle = SimpleNamespace(update=lambda what, **_: shown.append(what))
    monkeypatch.setattr(explanations, "display", lambda *_, **__: handle)
    monkeypatch.setattr(shell, "kernel", object(), raising=False)
    remedies = run(shell, "%oom_explain").remedies
    rehearsed = [remedy for remedy in remedies if remedy.peak_allocated_bytes is not None]
    assert any(remedy.key == "larger_card" for remedy in remedies)
    assert shown[-1]["text/plain"].startswith(f"{len(rehearsed)} remed")


def test_what_is_printed_or_written_in_the_end_is_still_needed(shell) -> None:
    from oom_magic.notebook.cells.cell_code import code_of

    code = code_of(shell, "new = train()\nprint(old.history, new)\ntorch.save(kept, 'a.pt')\nnew = old", {})
    assert code.read_beside >= {"old", "kept"} and "new" not in code.read_beside


def test_what_only_a_last_print_reads_is_left_by_code_to_paste(shell) -> None:
    from oom_magic.explain.remedies.own_code.rows.statements import computed_in_parts
    from oom_magic.notebook.cells.cell_code import code_of

    cell = "scores = queries @ corpus.T\nprint(queries.shape)\nbest = scores.argmax(1)\n"
    code = code_of(shell, f"{cell}print(best, old, scores.shape)", {})
    changed = computed_in_parts(code.tree, {}, "queries", 4)
    joined = ast.unparse(ast.parse("scores, best = map(torch.cat, zip(*parts))"))  # Python 3.10 puts them in brackets
    assert changed is not None and joined in ast.unparse(changed)
    changed = computed_in_parts(code_of(shell, cell, {}).tree, {}, "queries", 4)
    assert changed is not None and "del scores" in ast.unparse(changed)


def test_code_that_goes_on_where_memory_runs_out_is_named(shell):
    tried = "try:\n    net(torch.zeros(8, 1024))\nexcept torch.OutOfMemoryError:\n    pass\n"
    shell.run_cell(f"{CARD}import torch\nnet = torch.nn.Linear(1024, 1024).cuda()\nnet = net.cpu()\n{tried}"
                   "net.cuda()(torch.zeros(2**21, 1024, device='cuda')).sum().backward()")  # fmt: skip
    text = " ".join(str(run(shell, "%oom_explain")).split())
    assert "where memory runs out (except torch.OutOfMemoryError). So do the rehearsals" in text


def test_what_the_failed_dry_cell_did_to_objects_of_earlier_ones_is_not_there_in_rehearsals(shell):
    """An optimizer that a trainer makes when it begins was there, with states that were nowhere."""
    making = (
        "import torch\nnet = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(4)]).cuda()\n"
        "class Trainer:\n    optimizer = None\n    num_runs = 0\ntrainer = Trainer()\n"
        "def train(sizes):\n    trainer.num_runs += 1\n    assert trainer.num_runs == 1\n    for batch_size in sizes:\n"
        "        if trainer.optimizer is None:\n"
        "            trainer.optimizer = torch.optim.AdamW(net.parameters(), fused=True)\n"
        "        net(torch.randn(batch_size, 2048, device='cuda')).sum().backward()\n"
        "        trainer.optimizer.step()\n        trainer.optimizer.zero_grad()"
    )
    run(shell, CARD + making)
    assert shell.run_cell(f"{CARD}train([1000, 800_000])").error_in_exec is not None
    remedies = run(shell, "%oom_explain").remedies
    assert remedies[0].key == "smaller_batch" and remedies[0].fits


def test_a_cell_whose_backward_is_in_the_next_is_priced_with_it(shell):
    def explained(cell):
        assert shell.run_cell(f"{CARD}{cell}", store_history=True).error_in_exec is not None
        return run(shell, "%oom_explain")

    *making, _loop, forward, backward, step = FAILING.removeprefix(CARD).strip().splitlines()
    run(shell, MODEL)
    run(shell, CARD + "\n".join(making))
    half = explained(forward.strip())
    whole = explained("\n".join(["for _ in range(2):", forward, backward, step, "    optimizer.zero_grad()"]))
    assert any(one.key == "backward_in_later_cell" for one in half.evidence)
    assert "no_grad" not in [one.key for one in half.remedies]
    assert half.remedies[0].fits
    assert half.as_is.needed_bytes == whole.as_is.needed_bytes


def test_a_reference_before_the_backward_of_what_is_trained_is_no_evaluation(shell):
    run(
        shell,
        CARD + "import torch\nfrom torch import nn\nbatch_size = 2048\npolicy = nn.Linear(512, 64).cuda()\n"
        "reference = nn.Linear(512, 65536).cuda().eval()\noptimizer = torch.optim.SGD(policy.parameters())\n",
    )
    cell = (
        CARD + "for _ in range(3):\n    x = torch.randn(batch_size, 512, device='cuda')\n    new = policy(x).amax(-1)\n"
        "    with torch.no_grad():\n        old = reference(x).softmax(-1).amax(-1)\n"
        "    (new - old).square().mean().backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
    )
    assert shell.run_cell(cell, store_history=True).error_in_exec is not None
    first = run(shell, "%oom_explain").remedies[0]
    assert (first.key, first.fits) == ("smaller_batch", True)
    assert first.values["accumulation"] * first.values["after"] == 2048


def test_a_queue_keeps_as_many_rows_as_it_had_when_the_dry_cell_began(shell):
    """It was told as logits that are too large, for which there was nothing to do: the first steps fit."""
    run(
        shell,
        CARD + "import torch\nfrom torch import nn\nnet = nn.Linear(256, 256).cuda()\n"
        "keys = torch.randn(4096, 256, device='cuda')\noptimizer = torch.optim.SGD(net.parameters())\n",
    )
    cell = (
        CARD.replace("\n", " --steps all\n") + "for _ in range(2000):\n"
        "    q = net(torch.randn(1024, 256, device='cuda'))\n    loss = (q @ keys.t()).logsumexp(1).mean()\n"
        "    loss.backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
        "    keys = torch.cat([keys, q.detach()])\n"
    )
    assert shell.run_cell(cell, store_history=True).error_in_exec is not None
    diagnosis = run(shell, "%oom_explain --fast")
    assert diagnosis.cause is Cause.LEAK_OR_RETAINED_REFERENCE
    assert diagnosis.growth.fixed == "keys = torch.cat([keys, q.detach()])[-4096:]"
