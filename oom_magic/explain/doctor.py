"""``doctor``: the system check and, for given models, the training setup to use on this card."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oom_magic.language import _
from oom_magic.measure.system_check import SystemCheck, check_system
from oom_magic.one_line_errors import OneLineErrors
from oom_magic.predict.setups.gpus import DEFAULT_GPU, GPU, closest_gpu, find_gpu
from oom_magic.predict.setups.hardware import Hardware

if TYPE_CHECKING:
    from oom_magic.memory.report import MemoryReport
    from oom_magic.predict.setups.setup import TrainingSetup
    from oom_magic.predict.sizing.sizes import Sizes

TYPICAL_MODELS = ("bert-base-uncased", "llama-3.2-1b", "qwen2.5-7b")
GLOBAL_BATCH_SIZE = 16
_LENGTHS = (1024, 512, 256, 128)
_METHODS = ("full", "lora", "qlora")
_MICROBATCHES = (1, 2, 4, 8, 16)
_ENOUGH = 4  # from this many sequences at once, recomputing activations is not worth its time
_LEAST_BYTES = {"full": 16, "lora": 2}  # per parameter: float32 weight, gradient and Adam's two moments; 16 bits
_STEPS = 2  # the first makes the optimizer's state, the second is like all others

_Found = tuple["TrainingSetup", "MemoryReport"]


@dataclass(frozen=True)
class Recommendation:
    """A setup that fits with room to spare (None: none was found), its peak in bytes, and how many runs it took."""

    model: str
    setup: TrainingSetup | None
    peak_reserved_bytes: int
    num_dry_runs: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        setup = None if self.setup is None else self.setup.to_dict()
        return {
            "model": self.model,
            "setup": setup,
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "num_dry_runs": self.num_dry_runs,
        }


def recommend(model: str, gpu: str, memory: int | str | None = None) -> Recommendation:
    """The largest comfortable setup of a model: below 85 % of the card, for a global batch of 16 sequences.

    First long sequences are kept, then full training before LoRA before QLoRA, then activations rather than
    recomputing them, then large microbatches. Shows a progress bar; what was found once is kept on disk.
    """
    from oom_magic.predict.setups.setup import TrainingSetup
    from oom_magic.predict.sizing.store import stored

    identity = TrainingSetup(model, gpu=gpu, memory=memory).identity
    if identity is None:
        return _recommended(model, gpu, memory)
    return stored(lambda: ("recommended", identity), lambda: _recommended(model, gpu, memory))


def _recommended(model: str, gpu: str, memory: int | str | None) -> Recommendation:
    from oom_magic.predict.progress_bar import ProgressBar

    shown = "{desc}: {n_fmt} tried{postfix} [{elapsed}]"
    description = _("setups of {model}", model=model)
    with contextlib.ExitStack() as stack, ProgressBar(desc=description, bar_format=shown, leave=False) as bar:
        search = _Search(model, gpu, memory, bar, stack)
        setup, report = search.best()
    peak = 0 if report is None else report.peak_reserved_bytes
    return Recommendation(model, setup, peak, search.num_runs)


class _Search:
    """Dry runs of one model on one card, each made once; they stay open until ``stack`` is closed."""

    def __init__(self, model: str, gpu: str, memory: int | str | None, bar: Any, stack: contextlib.ExitStack) -> None:
        from oom_magic.predict.setups.model_source import resolve_model
        from oom_magic.predict.setups.models import list_models

        self.num_runs = 0
        self._model = model
        self._source = resolve_model(model)
        self._num_parameters = {one.name: one.num_parameters for one in list_models()}.get(self._source.label, 0)
        hardware = Hardware.of(gpu, memory)
        self._card, self._total_bytes = hardware.gpu, hardware.total_bytes
        self._memory = memory
        self._bar = bar
        self._stack = stack
        self._known: dict[tuple[int, str, int, bool], _Found | None] = {}
        self._known_sizes: dict[tuple[str, bool], Sizes] = {}

    def best(self) -> tuple[TrainingSetup | None, MemoryReport | None]:
        """The best setup that fits comfortably, and its report; (None, None) if none does."""
        for length in self._lengths():
            for method in _METHODS:
                if self._safe(length, method, 1, True) is not None:
                    found = self._largest(length, method)
                    accumulation = GLOBAL_BATCH_SIZE // found[0].microbatch_size
                    return found[0].replace(gradient_accumulation_steps=accumulation), found[1]
        return None, None

    def _lengths(self) -> Sequence[int]:
        longest = self._source.max_seq_len or _LENGTHS[0]
        return [length for length in _LENGTHS if length <= longest] or [longest]

    def _largest(self, length: int, method: str) -> _Found:
        """The largest microbatch; activations are recomputed only if the microbatch is small otherwise.

        What fits without recomputing fits with it, too, so few runs without it are needed.
        """
        is_tight = length < self._lengths()[0]  # one sequence of twice as many tokens did not fit
        enough = _MICROBATCHES.index(_ENOUGH)
        if not is_tight and self._safe(length, method, _ENOUGH, False) is not None:
            return self._bisect(length, method, False, enough, len(_MICROBATCHES))
        found = self._bisect(length, method, True, 0, len(_MICROBATCHES), 1 if is_tight else enough)
        most = _MICROBATCHES.index(found[0].microbatch_size)
        least = min(most, enough)
        if self._safe(length, method, _MICROBATCHES[least], False) is None:
            return found
        return self._bisect(length, method, False, least, most + 1)

    def _bisect(
        self, length: int, method: str, checkpointing: bool, fits: int, fails: int, first: int | None = None
    ) -> _Found:
        """The largest microbatch that fits, between two positions in ``_MICROBATCHES``; ``first`` is tried first."""
        found = self._safe(length, method, _MICROBATCHES[fits], checkpointing)
        assert found is not None
        while fails - fits > 1:
            middle, first = first or (fits + fails) // 2, None
            tried = self._safe(length, method, _MICROBATCHES[middle], checkpointing)
            fits, fails, found = (fits, middle, found) if tried is None else (middle, fails, tried)
        return found

    def _safe(self, length: int, method: str, microbatch: int, checkpointing: bool) -> _Found | None:
        """The setup and its report, if the verdict on the run is "safe"; else None."""
        key = (length, method, microbatch, checkpointing)
        if key not in self._known:
            self._known[key] = self._tried(*key)
        return self._known[key]

    def _tried(self, length: int, method: str, microbatch: int, checkpointing: bool) -> _Found | None:
        try:
            setup = self._setup(method, checkpointing).replace(microbatch_size=microbatch, seq_len=length)
        except ValueError:  # such as QLoRA of a model that is given by a configuration
            return None
        if self._num_parameters * _LEAST_BYTES.get(method, 0) > self._total_bytes:
            return None
        self._bar.set_postfix_str(f"{method}, {microbatch} x {length} tokens")
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            sizes = self._sizes(method, checkpointing)
            is_least = microbatch == 1 and checkpointing  # a shorter sequence is tried next, if this does not fit
            shorter = [other for other in self._lengths() if other < length and is_least][:1]
            sizes.expect({"microbatch_size": microbatch, "seq_len": at} for at in (length, *shorter))
            report = sizes.report_of_run(microbatch_size=microbatch, seq_len=length)
        self.num_runs += 1
        self._bar.update()
        return (setup, report) if report.verdict == "safe" else None

    def _setup(self, method: str, checkpointing: bool) -> TrainingSetup:
        from oom_magic.predict.setups.setup import TrainingSetup

        return TrainingSetup(
            self._model,
            method=method,
            gradient_accumulation_steps=2,  # gradients are there in the second forward, as in all that follow
            seq_len=self._lengths()[-1],
            precision="amp-bf16" if self._card.capability >= (8, 0) else "amp-fp16",
            activation_checkpointing=checkpointing,
            gpu=self._card.name,
            memory=self._memory,
        )

    def _sizes(self, method: str, checkpointing: bool) -> Sizes:
        """The sizes for one method; all of them share what was learned about the model's layers."""
        key = method, checkpointing
        if key not in self._known_sizes:
            lengths = sorted(self._lengths())
            found = self._setup(*key).untraced_sizes(
                stop_after_steps=_STEPS,
                microbatch_size=(_MICROBATCHES[0], _MICROBATCHES[-1]),
                seq_len=(lengths[0], lengths[-1]) if len(lengths) > 1 else lengths[0],
            )
            self._stack.enter_context(found.runs.in_parallel(has_bar=False))
            self._known_sizes[key] = found
        return self._known_sizes[key]


def training_arguments(setup: TrainingSetup) -> str:
    """Code for Hugging Face's Trainer: the model as the dry runs made it, then the arguments."""
    from oom_magic.predict.setups.training_code import checkpointing_name, write_model_code

    name = checkpointing_name()
    checkpointing = [f"    {name}=True,", f'    {name}_kwargs={{"use_reentrant": False}},']
    lines = [
        write_model_code(setup),
        "from transformers import TrainingArguments\n",
        "args = TrainingArguments(",
        '    output_dir="out",',
        f"    per_device_train_batch_size={setup.microbatch_size},",
        f"    gradient_accumulation_steps={setup.gradient_accumulation_steps},",
        f"    {setup.precision.removeprefix('amp-')}=True,",
        *(checkpointing if setup.activation_checkpointing else []),
        '    optim="adamw_torch",',
        f")  # sequences of {setup.seq_len} tokens: tokenizer(..., truncation=True, max_length={setup.seq_len})",
    ]
    return "\n".join(lines)


@dataclass(frozen=True, repr=False)
class Checkup(SystemCheck):
    """A system check and, if any were asked for, the recommended setups for ``card``."""

    recommended: tuple[Recommendation, ...] = ()
    card: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, ready for JSON."""
        recommended = [one.to_dict() for one in self.recommended]
        return {**SystemCheck(**_fields(self)).to_dict(), "recommended": recommended, "card": self.card}


def doctor(model: str | Sequence[str] = (), *, gpu: str | None = None, memory: int | str | None = None) -> Checkup:
    """Check the machine, the GPUs, the driver, torch and its settings; works without a GPU, too.

    For each ``model`` (a preset's name or several) the largest comfortable training setup on ``gpu`` (default: the card
    here) is found by dry runs, which takes some seconds each. ``memory`` overrides the card's capacity.
    """
    with OneLineErrors("other"):
        check = check_system()
        models = (model,) if isinstance(model, str) else tuple(model)
        if not models:
            return Checkup(**_fields(check))
        name, card, capacity = _card(check, gpu, memory)
        found = tuple(recommend(one, card.name, capacity) for one in models)
        return Checkup(**_fields(check), recommended=found, card=name)


def _card(check: SystemCheck, gpu: str | None, memory: int | str | None) -> tuple[str, GPU, int | str | None]:
    """The requested card, the one here, or the default: its name, the similar card for dry runs, and its memory."""
    if gpu is None and check.cards:
        device = check.cards[0].device
        return device.name, closest_gpu(device.name, device.capability or (0, 0)), memory or device.total_bytes
    card = find_gpu(gpu or DEFAULT_GPU)
    return card.name, card, memory


def _fields(check: SystemCheck) -> dict[str, Any]:
    return {name: getattr(check, name) for name in SystemCheck.__dataclass_fields__}
