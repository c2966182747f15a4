"""%oom_explain names what holds memory: lists that grow in a loop, and models that were loaded twice."""

from __future__ import annotations

import pytest

from oom_magic.explain.evidence.causes import Cause
from oom_magic.explain.remedies import evaluation as pricing
from tests.support.failing_cells import CARD, FAILING, MODEL, fail, run, surroundings  # noqa: F401 - a fixture
from tests.support.versions import needs_what_graphs_saved

pytestmark = pytest.mark.usefixtures("surroundings")


_TRIAL = """\
net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(16))).cuda()
optimizer = torch.optim.Adam(net.parameters())
for step in range(2):
    net(torch.ones(64, 1024, device="cuda")).sum().backward()
    optimizer.step(); optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("kept", "added", "read", "code"),
    [
        ("{}", 'trials["{}"] = net, optimizer', "", "del net, optimizer\ntrials.clear()\n%oom_free"),
        ("[]", "trials.append((net, optimizer))", "", "del net, optimizer\ntrials.clear()\n%oom_free"),
        ("[]", "trials.append((net, optimizer))", "print(len(trials))\n", None),
    ],
)
def test_models_that_earlier_cells_put_into_a_container_are_in_the_way(shell, kept, added, read, code):
    shell.run_cell("import torch")
    for name, head in (("first", f"trials = {kept}\n"), ("second", ""), ("third", "")):
        shell.run_cell(f"%%gpumem --dry-run --no-plot --memory 920MiB\n{head}{read}{_TRIAL}{added.format(name)}")
    diagnosis = run(shell, "%oom_explain")
    dropped = [one for one in diagnosis.remedies if one.key == "drop_copy"]
    assert [one.code for one in dropped] == ([] if code is None else [code])
    if code is not None:
        assert diagnosis.remedies[0] == dropped[0] and diagnosis.cause == Cause.LEAK_OR_RETAINED_REFERENCE


@pytest.mark.sampled(1)
@pytest.mark.parametrize("magic", ["", "%%time"])
@needs_what_graphs_saved
def test_a_list_that_keeps_graphs_is_named_and_mended(shell, magic):
    shell.run_cell("import torch\nnet = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.GELU())")
    lines = [magic, "net.cuda()", "losses = []", "for _ in range(100):",
             "    loss = net(torch.zeros(4096, 1024, device='cuda')).sum()", "    losses.append(loss)"]  # fmt: skip
    shell.run_cell("\n".join(["%%gpumem --dry-run --no-plot --memory 1GiB", *lines]))
    diagnosis = run(shell, "%oom_explain")
    assert diagnosis.cause == Cause.LEAK_OR_RETAINED_REFERENCE
    assert diagnosis.evidence[0].values["name"] == "losses" and "losses grows in the loop" in str(diagnosis)
    best = diagnosis.remedies[0]
    assert (best.key, best.fits) == ("detach", True)
    assert best.code.startswith("%oom_free --names loss losses\n\nlosses.append(loss.item())")


_KEPT = "class Log:\n    def __init__(self): self.seen = []\nseen, log, kept = [], Log(), {'all': []}"


@pytest.mark.parametrize(
    ("earlier", "name", "released"),
    [
        (_KEPT, "seen", "%oom_free --names x"),
        (_KEPT, "log.seen", "%oom_free --names x"),
        (_KEPT, "kept['all']", "%oom_free --names x"),
        (f"{CARD}{_KEPT}", "seen", "seen.clear()\n%oom_free"),
        (f"{CARD}{_KEPT}\nfirst = torch.zeros(1, device='cuda')", "kept['all']", "kept['all'].clear()\n%oom_free"),
    ],
)
def test_what_an_earlier_cell_made_and_a_dry_one_fills_is_named(shell, earlier, name, released):
    """Where the earlier cell was real, the dry run has put its objects back before anyone asks."""
    filling = f"for _ in range(100):\n    x = torch.zeros(2**22, device='cuda')\n    {name}.append(x)"
    for cell in ("import torch", earlier, f"{CARD}{filling}"):
        shell.run_cell(cell)
    diagnosis = run(shell, "%oom_explain")
    assert diagnosis.cause == Cause.LEAK_OR_RETAINED_REFERENCE and diagnosis.growth.name == name
    best = diagnosis.remedies[0]
    assert (best.key, best.fits) == ("keep_on_host", True)
    assert best.code.startswith(f"{released}\n\n{name}.append(x.cpu())")


@pytest.mark.slow
def test_lists_that_are_compared_later_go_to_the_host_together(shell):
    shell.run_cell("import torch")
    lines = ["%%gpumem --dry-run --no-plot --memory 1GiB", "found, wanted = [], []", "for _ in range(100):",
             "    found.append(torch.zeros(2**22, device='cuda'))", "    wanted.append(torch.zeros(2**21, device='cuda'))",
             "rows = torch.cat(found)[:100 * 2**21] == torch.cat(wanted)"]  # fmt: skip
    shell.run_cell("\n".join(lines))
    best = run(shell, "%oom_explain").remedies[0]
    assert (best.key, best.fits) == ("keep_on_host", True)
    fixed = [
        f"{name}.append(torch.zeros(2**{size}, device='cuda').cpu())" for name, size in (("found", 22), ("wanted", 21))
    ]
    assert [line for line in best.code.replace(" ** ", "**").splitlines() if line[:1] not in ("", "#", "%")] == fixed


@pytest.mark.slow
def test_a_buffer_that_is_filled_is_no_leak(shell):
    setup = f"{CARD}import torch\nnet = torch.nn.Linear(1024, 1024).cuda()\nbuffer = torch.zeros(16, 8192, 1024, device='cuda')"
    shell.run_cell(setup)
    shell.run_cell(
        f"{CARD}for step in range(16):\n    buffer[step] = torch.randn(8192, 1024, device='cuda')\n"
        "    net(buffer.flatten(0, 1)).square().sum().backward()\n"
    )
    assert run(shell, "%oom_explain").cause is not Cause.LEAK_OR_RETAINED_REFERENCE


@needs_what_graphs_saved
def test_what_keeps_the_graphs_of_a_model_that_evaluates_is_made_without_them(shell):
    """A sampler's picture is made from the one before: that line has no other form, but needs no graph."""
    shell.run_cell("import torch\nnet = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.GELU()).eval()")
    lines = ["net.cuda()", "x = torch.zeros(4096, 1024, device='cuda')", "for step in range(100):",
             "    x = x - 0.1 * net(x)", "    x = x + torch.randn_like(x)"]  # fmt: skip
    shell.run_cell("\n".join(["%%gpumem --dry-run --no-plot --memory 1GiB", *lines]))
    best = run(shell, "%oom_explain").remedies[0]
    assert (best.key, best.verdict) == ("no_grad", "safe") and "with torch.no_grad():" in best.code


def test_what_a_forward_collects_for_itself_is_no_leak(shell):
    shell.run_cell("import torch")
    lines = ["%%gpumem --dry-run --no-plot --memory 1GiB", "class Skipping(torch.nn.Module):", "    def __init__(self):",
             "        super().__init__()", "        self.blocks = torch.nn.ModuleList(torch.nn.Linear(1024, 1024) for _ in range(64))",
             "    def forward(self, x):", "        skips = []", "        for block in self.blocks:",
             "            x = torch.relu(block(x))", "            skips.append(x)", "        return x + sum(skips)",
             "model = Skipping().cuda()", "model(torch.zeros(8192, 1024, device='cuda')).sum().backward()"]  # fmt: skip
    shell.run_cell("\n".join(lines))
    diagnosis = run(shell, "%oom_explain --fast")
    assert diagnosis.cause == Cause.ACTIVATIONS and diagnosis.growth is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "turn"),
    [
        ("    def __call__(self, loss): self.log(loss)\nkeep = Keeper()", "keep(net(x).sum())"),
        ("keeper = Keeper()\ndef keep(module, inputs, output):\n    keeper.log(output)\n"
         "handle = net.register_forward_hook(keep)", "net(x)"),
    ],
)  # fmt: skip
@needs_what_graphs_saved
def test_a_list_that_grows_in_a_function_is_found_through_calls_and_hooks(shell, made, turn):
    shell.run_cell("import torch")
    lines = ["net = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.GELU()).cuda()",
             "class Keeper:", "    def __init__(self): self.seen = []",
             "    def log(self, one):", "        self.seen.append(one)", made,
             "for _ in range(100):", "    x = torch.zeros(4096, 1024, device='cuda')", f"    {turn}"]  # fmt: skip
    shell.run_cell("\n".join(["%%gpumem --dry-run --no-plot --memory 1GiB", *lines]))
    diagnosis = run(shell, "%oom_explain")
    assert diagnosis.cause == Cause.LEAK_OR_RETAINED_REFERENCE
    assert (diagnosis.evidence[0].values["name"], diagnosis.remedies[0].key) == ("self.seen", "detach")


def test_a_list_that_grows_in_a_step_that_a_library_calls_is_found(shell):
    """As Lightning's loops call ``validation_step``."""
    names = {}
    loop = "def fit(module):\n    for index in range(100):\n        module.validation_step(index)\n"
    exec(compile(loop, "/usr/lib/python3/site-packages/library/loops.py", "exec"), names)
    shell.user_ns["fit"] = names["fit"]
    lines = ["import torch", "class Module:", "    def __init__(self):",
             "        self.net, self.outputs = torch.nn.Linear(1024, 1024).cuda(), []",
             "    @torch.no_grad()", "    def validation_step(self, index):", "        parts = []",
             "        logits = self.net(torch.zeros(4096, 1024, device='cuda'))", "        parts.append(logits)",
             "        self.outputs.append(torch.cat(parts))", "fit(Module())"]  # fmt: skip
    shell.run_cell("\n".join(["%%gpumem --dry-run --no-plot --memory 1GiB", *lines]))
    diagnosis = run(shell, "%oom_explain")
    assert diagnosis.cause == Cause.LEAK_OR_RETAINED_REFERENCE
    assert (diagnosis.evidence[0].values["name"], diagnosis.remedies[0].key) == ("self.outputs", "keep_on_host")
    assert diagnosis.remedies[0].fits


def test_a_model_loaded_twice_is_noticed(shell):
    run(shell, MODEL.replace("range(4)", "range(60)"))
    run(shell, CARD + "import copy\ntwin = copy.deepcopy(model)\nmore = torch.zeros(80, 2**20, device='cuda')\n")
    diagnosis = run(shell, "%oom_explain --fast")
    assert diagnosis.cause == Cause.LEAK_OR_RETAINED_REFERENCE
    assert "model, twin" in str(diagnosis)


@pytest.mark.slow
def test_an_average_of_the_weights_is_no_model_loaded_twice(shell):
    run(shell, MODEL.replace("range(4)", "range(60)"))
    averaging = "for p, q in zip(average.parameters(), model.parameters()): p.data.lerp_(q.data, 0.1)"
    run(shell, f"{CARD}import copy\naverage = copy.deepcopy(model)\n{averaging}\ntorch.zeros(80, 2**20, device='cuda')")
    diagnosis = run(shell, "%oom_explain --fast")
    assert "same_model_twice" not in {one.key for one in diagnosis.evidence}


@pytest.mark.slow
def test_a_model_loaded_over_an_older_one_is_noticed(shell, monkeypatch):
    monkeypatch.setattr(pricing, "remedy_specs", lambda _: [])
    card = "%%gpumem --no-plot --gpu 'RTX 3060' --memory 1GiB\n"
    shell.run_cell("import torch")
    run(shell, f"{card}old = torch.nn.Linear(12000, 10000).cuda()")
    run(shell, f"{card}new = torch.nn.Linear(12000, 10000).cuda()")
    diagnosis = run(shell, "%oom_explain")
    assert diagnosis.cause == Cause.LEAK_OR_RETAINED_REFERENCE
    assert diagnosis.evidence[0].key == "model_loaded_before"
    best = diagnosis.remedies[0]
    assert (best.key, best.fits, best.code) == ("drop_copy", True, "del old\n%oom_free")
    run(shell, f"{card}new = torch.nn.Linear(12000, 10000).cuda()\nprint(old.weight.shape, new.weight.shape)")
    assert "drop_copy" not in {one.key for one in run(shell, "%oom_explain").remedies}
