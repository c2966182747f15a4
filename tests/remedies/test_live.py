"""Live exceptions: the tensor that asked is read from the failing frames, and nothing of them is kept."""

from __future__ import annotations

import gc
import json
import traceback
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from oom_magic.explain.evidence.causes import Cause, Confidence
from oom_magic.explain.explainer import explain
from oom_magic.explain.live.frames import inspect_failure
from oom_magic.explain.live.holders import data_sets_on_device
from oom_magic.explain.messages.failure import Failure
from oom_magic.explain.remedies.from_text.kind_of_run import style_of
from oom_magic.measure.holders.inventory import MemoryHolder
from oom_magic.measure.holders.release import Released
from oom_magic.notebook.cells.hints import is_out_of_memory
from oom_magic.predict.session import DrySession
from oom_magic.predict.shape_inference import infer, is_followed
from oom_magic.units import format_bytes

VOCAB = 50_000


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)

    def forward(self, x):
        batch, seq, hidden = x.shape
        q, k, v = (y.view(batch, seq, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / 8
        return (F.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(batch, seq, hidden)


class Model(nn.Module):
    def __init__(self, hidden: int = 512) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, hidden)
        self.attention = Attention(hidden, 8)
        self.head = nn.Linear(hidden, VOCAB, bias=False)

    def forward(self, ids):
        return self.head(self.attention(self.embed(ids)))


def train(batch: int, seq: int) -> None:
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 1000, (batch, seq), device="cuda")
    for _ in range(2):
        logits = model(ids)
        loss = F.cross_entropy(logits.float().view(-1, VOCAB), ids.view(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def failed(batch: int, seq: int, memory: str) -> tuple[BaseException, DrySession]:
    session = DrySession("RTX 3060", memory, has_bar=False)
    session.run(lambda: train(batch, seq))
    error, session.exception = session.exception, None  # it would keep the frames
    assert error is not None
    return error, session


CASES = [
    (8, 512, "2GiB", "probabilities", "4096 x 50000 x float32", "F.cross_entropy(logits[8, 512, 50000]", Cause.LOGITS_OR_LOSS),
    (8, 512, "1.3GiB", "logits", "8 x 512 x 50000 x float32", "F.linear(input[8, 512, 512], self.head.weight", Cause.LOGITS_OR_LOSS),
    (4, 2048, "1GiB", "attention_scores", "4 x 8 x 2048 x 2048 x float32", "q[4, 8, 2048, 64] @ k[", Cause.ATTENTION_SCORES),
    (1, 16, "0.9GiB", "optimizer_state", "50000 x 512 x float32", "torch.zeros_like(model.embed.weight", Cause.OPTIMIZER_STATE),
    (1, 64, "0.53GiB", "parameter", "50000 x 512 x float32", "t[50000, 512].cuda(device)", Cause.WEIGHTS_TOO_BIG),
    (1, 8, "0.7GiB", "gradient", "model.embed.weight: 50000 x 512", "loss.backward()", None),
]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("batch", "seq", "memory", "name", "formula", "expression", "cause"), CASES)
def test_the_tensor_of_a_dry_run(batch, seq, memory, name, formula, expression, cause):
    error, session = failed(batch, seq, memory)
    for report in (None, session.report):
        diagnosis = explain(error, report=report)
        best = diagnosis.tensors[0]
        assert best.name == name
        assert best.formula.startswith(formula)
        assert best.expression.replace("self.head", "model.head").startswith(
            expression.replace("self.head", "model.head")
        )
        assert best.num_bytes == session.report.out_of_memory.tensor_bytes
        assert cause is None or diagnosis.cause == cause
        assert diagnosis.place.startswith("test_live.py:")
        assert str(diagnosis)
        json.dumps(diagnosis.to_dict())


def test_the_report_says_what_frames_do_not():
    error, session = failed(8, 512, "2.8GiB")
    diagnosis = explain(error, report=session.report)
    assert diagnosis.tensors[0].name == "logits_gradient"
    assert diagnosis.tensors[0].formula == "8 x 512 x 50000 x float32 = 781.25 MiB"
    assert diagnosis.tensors[0].num_bytes == session.report.out_of_memory.tensor_bytes
    assert (diagnosis.phase, diagnosis.cause) == ("backward", Cause.LOGITS_OR_LOSS)
    assert {one.kind for one in diagnosis.holders} == {"category", "line"}


def stack() -> None:
    x = torch.randn(2**16, 1024, device="cuda")
    for layer in [nn.Linear(1024, 1024, device="cuda") for _ in range(8)]:
        x = torch.relu(layer(x))


def test_a_forward_whose_results_are_kept_for_a_backward_is_of_training():
    session = DrySession("RTX 3060", "1.5GiB", has_bar=False)
    session.run(stack)
    assert "The activations of a step do not fit" in " ".join(
        str(explain(session.exception, report=session.report)).split()
    )
    session.exception = None  # it would keep the frames


def test_a_report_of_another_failure_is_not_believed():
    _, session = failed(8, 512, "2GiB")
    other, _ = failed(1, 16, "0.9GiB")
    assert explain(other, report=session.report).tensors[0].name == "optimizer_state"


def message(num_bytes: int) -> str:
    return f"CUDA out of memory. Tried to allocate {format_bytes(num_bytes)}."


def raises_with(size: int):
    """A function of torch's that is followed, but fails when called for real."""
    raise torch.OutOfMemoryError(message(size))


def embed_and_fail(ids, weight, size):
    rows = F.embedding(ids, weight)
    return torch.cat([rows, rows], dim=-1) if size < 0 else raises_with(size)


def test_copies_of_tensors_in_sight_on_real_tensors():
    states = torch.zeros(64, 512, 512, dtype=torch.bfloat16)
    try:
        embed_and_fail(torch.zeros(2, 4, dtype=torch.long), states[0], 2 * states.nbytes)
    except RuntimeError as error:
        diagnosis = explain(error)
    assert diagnosis.tensors[0].name == "copy"
    assert "states: 64 x 512 x 512 x float32 = 64.00 MiB" in diagnosis.tensors[0].formula


def test_nothing_of_the_frames_is_kept():
    error, session = failed(8, 512, "2GiB")
    frame = error.__traceback__
    while "logits" not in frame.tb_frame.f_locals:
        frame = frame.tb_next
    alive = weakref.ref(frame.tb_frame.f_locals["logits"])
    diagnosis = explain(error, report=session.report)
    traceback = error.__traceback__
    assert explain(error).tensors == diagnosis.tensors and error.__traceback__ is traceback
    del error, frame, traceback, session
    gc.collect()
    assert alive() is None
    assert diagnosis.tensors


def test_the_users_code_is_not_run():
    class Sly:
        touched = 0

        def __getattr__(self, name):
            Sly.touched += 1
            raise AttributeError(name)

        @property
        def size(self):
            Sly.touched += 1

    def fail(sly):
        return F.relu(sly.size * 2)

    def fail_by_name(sly):
        return F.relu(sly.weight)

    for function in (fail, fail_by_name):
        with pytest.raises((TypeError, AttributeError)) as caught:
            function(Sly())
        before = Sly.touched
        assert before and inspect_failure(caught.value) is not None
        assert Sly.touched == before


def test_an_error_that_wraps_another_leads_to_its_origin():
    def inner():
        logits = torch.empty(2, 128, 32_000)
        raise torch.OutOfMemoryError(message(logits.nbytes))

    try:
        try:
            inner()
        except RuntimeError as error:
            raise RuntimeError(f"training failed: {error}") from error
    except RuntimeError as outer:
        live = inspect_failure(outer)
    assert "logits" in {one.name for one in live.tensors}


def test_an_error_that_cannot_be_printed_or_compared_leads_to_its_origin():
    class HostileError(Exception):
        __hash__ = None

        def __str__(self):
            raise TypeError("no words")

        __repr__ = __eq__ = __str__

    def fails():
        logits = torch.empty(2, 128, 32_000)
        try:
            raises_with(logits.nbytes)
        except torch.OutOfMemoryError as error:
            raise HostileError from error

    with pytest.raises(HostileError) as caught:
        fails()
    assert is_out_of_memory(caught.value)
    assert "logits" in {one.name for one in inspect_failure(caught.value).tensors}


@pytest.mark.parametrize("rows", ["24576", "s77"])
def test_compiled_code_names_the_tensor_and_the_line_is_the_users(tmp_path, rows):
    """Inductor's file is none of the user's; sizes that change have names there, whose values its frame has."""
    code = f"def call(s77):\n    buf85 = empty_strided_cuda(({rows}, 4096), (4096, 1), torch.float32)\n"
    file = tmp_path / "qd" / "cqdjimmeeoqjcscuwszgvcwjtpjglf74537yei6w32ypo4neqvzt.py"
    file.parent.mkdir()
    file.write_text(code)

    def _empty_strided_cuda(size, stride, dtype):
        raise torch.OutOfMemoryError(message(402_653_184))

    names = {"torch": torch, "empty_strided_cuda": _empty_strided_cuda}
    exec(compile(code, str(file), "exec"), names)

    def model(ids):
        return names["call"](24576)

    try:
        model(torch.zeros(48, 512))
    except torch.OutOfMemoryError as error:
        diagnosis = explain(error)
        written = "".join(traceback.format_exception(error))
    assert diagnosis.place.startswith("test_live.py:") and "24576 x 4096 x float32" in diagnosis.tensors[0].formula
    assert "input_named" not in {one.key for one in diagnosis.evidence}
    assert rows == "s77" or "24576 x 4096 x float32" in explain(written).tensors[0].formula


@pytest.mark.parametrize(
    ("function", "followed"),
    [(F.linear, True), (torch.matmul, True), (torch.zeros(2).float, True), (torch.softmax, True), (torch._C._nn.gelu, True),
     (torch.save, False), (torch.zeros(2).item, False), (torch.zeros(2).backward, False), (print, False), (train, False),
     (torch.manual_seed, False), (nn.Linear, False)],
)  # fmt: skip
def test_only_computations_of_torch_are_followed(function, followed):
    assert is_followed(function) is followed


def test_a_call_is_followed_without_memory_or_randomness():
    state = torch.get_rng_state()
    result, made = infer(F.dropout, [torch.empty(2**20, 2**20, device="meta"), 0.5], {"training": True})
    assert result.device.type == "meta" and made
    assert torch.equal(torch.get_rng_state(), state)


def test_locals_that_the_user_holds_are_left():
    def fail():
        rows = torch.zeros(4)
        held = locals()
        try:
            raise torch.OutOfMemoryError(message(rows.nbytes + 2**30))
        except RuntimeError as error:
            inspect_failure(error)
        return held

    assert "rows" in fail()


def grows_a_cache():
    keys = torch.zeros(8, 8, 1024, 64, device="cuda")
    key_cache = keys
    while True:
        key_cache = torch.cat([key_cache, keys], dim=2)


def begins_a_cache():
    key_cache, keys = torch.zeros(0, device="cuda"), torch.zeros(8, 8, 16384, 64, device="cuda")
    return torch.cat([key_cache, keys], dim=-2)


def attends_with_options():
    q, k = torch.zeros(4, 16, 1024, 64, device="cuda"), torch.zeros(4, 2, 1024, 64, device="cuda")
    options = {"enable_gqa": True}  # in float32 no fused kernel shares heads
    return F.scaled_dot_product_attention(q, k, k, **options)


def attends_in_one_head():
    q = torch.zeros(16, 2048, 64, device="cuda")
    return (q @ q.transpose(1, 2)).softmax(-1) @ q


def mixes_pictures():
    real, share = torch.rand(256, 16, 128, 128, device="cuda"), torch.rand(256, 1, 1, 1, device="cuda")
    return share * real


@pytest.mark.parametrize(
    ("function", "name", "cause"),
    [
        (grows_a_cache, "kv_cache", Cause.ACTIVATIONS),
        (begins_a_cache, "concatenation", Cause.ACTIVATIONS),
        (attends_with_options, "attention_scores", Cause.ATTENTION_SCORES),
        (attends_in_one_head, "attention_scores", Cause.ATTENTION_SCORES),
        (mixes_pictures, "result", Cause.ACTIVATIONS),
    ],
)
def test_caches_and_scores_inside_a_call_are_named(function, name, cause):
    session = DrySession("RTX 3060", "0.75GiB", has_bar=False)
    session.run(function)
    diagnosis = explain(session.exception, report=session.report)
    assert diagnosis.tensors[0].name == name
    assert diagnosis.cause == cause


def contrasts_all_pairs():
    logits = torch.zeros(8192, 8192, device="cuda")
    mask = torch.ones_like(logits)
    log_prob = logits - torch.log(logits.exp().sum(1, keepdim=True))
    return -((mask * log_prob).sum(1) / mask.sum(1)).mean()


def weighs_by_sums():
    query, keys = torch.zeros(320, 1, 1024, device="cuda"), torch.zeros(320, 256, 1024, device="cuda")
    attends = nn.Linear(1024, 1024, device="cuda")
    return F.softmax(torch.tanh(query + attends(keys)).sum(-1).unsqueeze(1), -1)


def copies_what_it_scores():
    q = torch.zeros(96, 128, 8, 512, device="cuda").transpose(1, 2)
    k = torch.zeros_like(q)
    attention_scores = q @ k.transpose(-2, -1)  # which are a quarter of the copy that is made of the keys
    return attention_scores.softmax(-1)


@pytest.mark.parametrize("function", [contrasts_all_pairs, weighs_by_sums, copies_what_it_scores])
def test_what_a_line_of_code_is_about_is_no_tensor_where_another_is_seen(function):
    session = DrySession("RTX 3060", "1GiB", has_bar=False)
    session.run(function)
    for report in (None, session.report):
        diagnosis = explain(session.exception, report=report)
        assert diagnosis.tensors[0].name in ("result", "copy")
        assert diagnosis.cause is Cause.ACTIVATIONS or (report is None and diagnosis.confidence is Confidence.OPEN)
        assert not {"told_scores_all", "tensor_attention_scores"} & {one.key for one in diagnosis.evidence}
    session.exception = None  # it would keep the frames


def test_an_error_that_is_not_about_memory_is_given_no_cause():
    def evaluate():
        raise ValueError("operands could not be broadcast together with shapes (64,512) (32,512)")

    with pytest.raises(ValueError, match="operands") as caught:
        evaluate()
    diagnosis = explain(caught.value, lang="en")
    assert diagnosis.cause is Cause.UNKNOWN and not diagnosis.possible and not diagnosis.remedies
    assert "Why:" not in str(diagnosis) and "evaluation" not in str(diagnosis)


def test_a_data_set_that_fills_the_device_is_named():
    held = {"rows": (TensorDataset(torch.zeros(2)), 6), "few": (TensorDataset(torch.zeros(2)), 1), "net": (Model(8), 7)}
    holders = tuple(MemoryHolder(name, "", size * 2**30) for name, (_, size) in held.items())
    names = {name: value for name, (value, _) in held.items()}
    failure = Failure("cuda_v2.2+", "cuda", allocated_bytes=14 * 2**30, reserved_bytes=14 * 2**30)
    (found,) = data_sets_on_device(Released((), (), holders), names, failure)
    assert found.values == {"name": "rows", "held_bytes": 6 * 2**30}


OWN_TRAINER = """
class Trainer:
    def fit(self):
        raise MemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
Trainer().fit()
"""


def test_a_trainer_of_the_users_own_is_none_of_transformers(tmp_path):
    source = tmp_path / "own.py"
    source.write_text(OWN_TRAINER)
    with pytest.raises(MemoryError) as raised:
        exec(compile(source.read_text(), str(source), "exec"), {"__name__": "own"})
    assert style_of(explain(raised.value)) == "plain"
