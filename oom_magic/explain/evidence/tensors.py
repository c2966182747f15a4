"""The requested tensor: shapes whose size explains the requested bytes of a message."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from oom_magic.explain.messages.failure import Failure, rounding_bytes
from oom_magic.predict.setups.models import list_models
from oom_magic.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from oom_magic.predict.setups.setup import TrainingSetup

Dims = Mapping[str, int | str]
# Lines of code of models that have neither tokens nor heads.
NO_LANGUAGE_MODEL = re.compile(r"\bconv(?:_?transpose)?[123]d\b|_conv_forward|\b(?:unet|vae|resnet)\w*\b", re.I)

_NAMES = {
    "heads": "num_attention_heads",
    "hidden": "hidden_size",
    "vocab": "vocab_size",
    "intermediate": "intermediate_size",
}
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def dims_of_setup(setup: Dims | TrainingSetup) -> Dims:
    """The dimensions of a run; a mapping is returned as it is."""
    if isinstance(setup, Mapping):
        return setup
    sizes = {"batch": setup.microbatch_size, "seq": setup.seq_len}
    dtype = _DTYPES[setup.precision.removeprefix("amp-")]
    return {**_renamed(setup.source.dims), **sizes, "dtype": dtype}


@cache
def preset_dims() -> Mapping[str, Dims]:
    """The dimensions of every model preset by its names; no library is loaded for it."""
    known: dict[str, Dims] = {}
    for preset in list_models():
        for name in (preset.name, preset.hub_id.split("/")[-1]):
            known.setdefault(name.lower(), _renamed(preset.dims()))
    return known


def _renamed(dims: Mapping[str, Any]) -> dict[str, int | str]:
    return {ours: dims[theirs] for ours, theirs in _NAMES.items() if theirs in dims}


_MOST_CANDIDATES = 5
# The caching allocator asks the driver for 2 MiB or 20 MiB when any small tensor needs room, and rounds
# larger requests up to a multiple of 2 MiB (128 KiB before PyTorch 1.4).
_NAMELESS_BYTES = (2 * MIB, 20 * MIB)
_SEGMENT_BYTES = 2 * MIB
_OLD_SEGMENT_BYTES = MIB // 8
_EXACT_FORMATS = (
    "cuda_malloc_async", "mps", "mps_invalid_buffer", "cpu_allocator", "numpy", "jax", "notebook_host",
)  # fmt: skip

_ITEM_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2,
    "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
_MAX_COUNT = 2**22
_LARGEST_BATCH = 1024  # of sequences: above it, other dimensions than these were guessed
_GUESS_DISCOUNT = 0.7
_LEAST_FIT = 0.4  # of a tensor at a length that nobody named
_COMMON_VALUES: dict[str, tuple[int, ...]] = {
    "seq": (*(2**n for n in range(5, 18)), *(3 * 2**n for n in range(6, 13)), 50, 77, 197, 577),
    "vocab": (
        151936, 152064, 128256, 32000, 50257, 50304, 30522, 50265, 32128, 250002, 256000, 262144, 129280,
        102400, 100352, 65024, 49152, 21128,
    ),
    "heads": (8, 12, 16, 24, 32, 40, 64),
}  # fmt: skip


@dataclass(frozen=True)
class _Shape:
    """A kind of tensor as the dimensions it is made of; ``prior`` ranks kinds that fit equally well."""

    name: str
    factors: tuple[str, ...]
    prior: float
    is_float32: bool = False
    needs_model: bool = True
    multiple: int = 1


_SHAPES = (
    _Shape("attention_scores", ("batch", "heads", "seq", "seq"), 1.0, needs_model=False),
    _Shape("logits", ("batch", "seq", "vocab"), 1.0, is_float32=True, needs_model=False),
    _Shape("mlp_activation", ("batch", "seq", "intermediate"), 0.8),
    _Shape("hidden_states", ("batch", "seq", "hidden"), 0.7),
    _Shape("qkv", ("batch", "seq", "hidden"), 0.5, multiple=3),
    _Shape("embedding_weight", ("vocab", "hidden"), 0.8),
    _Shape("mlp_weight", ("hidden", "intermediate"), 0.7),
    _Shape("mlp_weight", ("hidden", "intermediate"), 0.5, multiple=2),
    _Shape("attention_weight", ("hidden", "hidden"), 0.6),
    _Shape("all_parameters", ("parameters",), 0.6),
)
_BATCH_IN_TEXT = re.compile(
    r"(?<!eval_)(?<!total )(?<!global_)batch[ _-]?size(?:_per_gpu| per device)?['\"`]?(?:: ?int)?\s{0,3}"
    r"[=: ]\s{0,3}(\d{1,5})\b",
    re.I,
)
_SEQ_IN_TEXT = re.compile(
    r"(?<!output_)(?:max_?(?:seq_?)?len(?:gth)?|cutoff_len|seq(?:uence)?[ _-]?len(?:gth)?|block_size)['\"`]?"
    r"(?:: ?int)?\s{0,3}[=: ]\s{0,3}(\d{1,7})\b",
    re.I,
)
# What a setting was when the run failed, behind the value that its author proposes or has set since.
_WAS = re.compile(r"[^\d\n]{0,12}?(?:从|由|原来?[是为]|\bfrom|\bwas|\binstead of) ?(\d{1,7})\b", re.I)
_MODEL_SETTING = re.compile(
    r"(?<![\w-])(?:--)?(?:base_?)?model(?:[_-]?name)?(?:[_-]or[_-]path|[_-]path|[_-]id)?['\"]?"
    r"(?:\s{0,2}[=:]\s{0,2}| )['\"]?([\w./-]*\d[\w./-]*)"
)


@dataclass(frozen=True)
class TensorCandidate:
    """A tensor of the requested size: its kind, its shape in words, its bytes.

    ``fit`` (0 to 1) ranks: near 1 where every dimension is known, low where several are assumed.
    ``expression`` is the failing code with the shapes of its tensors, where a live exception shows them.
    """

    name: str
    formula: str
    num_bytes: int
    fit: float
    expression: str = ""


@dataclass(frozen=True)
class TensorAnswer:
    """Candidates, best first; where there are none ``note`` says why (a key of the catalogue)."""

    candidates: tuple[TensorCandidate, ...] = ()
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return asdict(self)


def name_tensor(failure: Failure, dims: Mapping[str, int | str] | None = None) -> TensorAnswer:
    """The tensors that explain a failure's request, from what is known of the model.

    ``dims`` may hold batch, seq, heads, hidden, vocab, intermediate, parameters (counts) and dtype. Missing ones are
    assumed to have common values, which lowers the rank of the result.
    """
    if failure.shape is not None:
        return TensorAnswer((_stated_tensor(failure),))
    window = requested_window(failure)
    if window is None:
        return TensorAnswer(note="tensor_not_printed")
    if failure.requested_bytes in _NAMELESS_BYTES and failure.format not in _EXACT_FORMATS:
        return TensorAnswer(note="tensor_nameless")
    known = dict(dims or {})
    best: dict[str, TensorCandidate] = {}
    for solution in sorted(_solutions(window, known), key=lambda one: -one.fit):
        candidate = solution.candidate()
        best.setdefault(candidate.formula, candidate)
        if len(best) == _MOST_CANDIDATES:
            break
    if not best:
        return TensorAnswer(note="tensor_none_fits" if known else "tensor_unknown_model")
    return TensorAnswer(tuple(best.values()))


def at_another_length(failure: Failure, dims: Mapping[str, int | str]) -> TensorAnswer:
    """The tensors if the length is less than the one in the text, which often is a limit and not the batch's."""
    others = {name: size for name, size in dims.items() if name != "seq"}
    elsewhere = name_tensor(failure, {**others, "longest": dims["seq"]})
    fitting = tuple(one for one in elsewhere.candidates if "seq" in one.formula and one.fit >= _LEAST_FIT)
    return TensorAnswer(fitting, "tensor_other_length" if fitting else "tensor_unknown_model")


def requested_window(failure: Failure) -> tuple[int, int] | None:
    """Least and largest size in bytes of the tensor behind a request, or None where none is printed."""
    requested = failure.requested_bytes
    if not requested:
        return None
    rounding = rounding_bytes(requested)
    if failure.format in _EXACT_FORMATS:
        return requested - rounding, requested + rounding
    if requested < GIB and requested % _SEGMENT_BYTES == 0:
        return requested - _SEGMENT_BYTES + 1, requested
    if requested < GIB:
        return requested - rounding - _OLD_SEGMENT_BYTES, requested + rounding
    return requested - rounding - _SEGMENT_BYTES, requested + rounding


def run_in_text(text: str, models: Mapping[str, Dims]) -> dict[str, int | str]:
    """What a text names of a run: ``model`` (a known one), ``batch`` and ``seq``."""
    head = text[:200_000]
    settings = _MODEL_SETTING.findall(head)  # of several names, that of the model counts
    lowered = "\n".join(settings or [head]).lower()
    named = max((name for name in models if _is_named(name.lower(), lowered)), key=len, default=None)
    run: dict[str, int | str] = {} if named is None else {"model": named}
    for name, pattern in (("batch", _BATCH_IN_TEXT), ("seq", _SEQ_IN_TEXT)):
        match = pattern.search(head)
        if match and int(match.group(1)):  # "batch_size=0" leaves it open
            run[name] = int((_WAS.match(head, match.end()) or match).group(1))
    return run


def dims_of_run(run: Mapping[str, int | str], models: Mapping[str, Dims]) -> Dims:
    """The dimensions of a run in a text: those of its model, batch and length."""
    sizes = {name: size for name, size in run.items() if isinstance(size, int)}
    return {**models.get(str(run.get("model")), {}), **sizes}


def _is_named(name: str, lowered: str) -> bool:
    """Whether a text names a model, not as a part of another name."""
    return name in lowered and re.search(rf"(?<![a-z0-9]){re.escape(name)}(?![a-z0-9])", lowered) is not None


_TAKEN = re.compile(r"\bempty_strided_cuda\(\((\d[\d, ]*)\), \([\d, ]*\), torch\.(\w+)\)")


def with_stated_shape(failure: Failure, trace: str) -> Failure:
    """The failure with the shape that was requested, where a line of compiled code in the traceback states it.

    Inductor's code takes memory by shape, strides and type (torch/_inductor/codegen/wrapper.py, make_allocation).
    """
    stated, window = next(iter(_TAKEN.findall(trace)[::-1]), None), requested_window(failure)
    if stated is None or window is None or failure.shape is not None:
        return failure
    shape, dtype = tuple(int(size) for size in stated[0].split(",") if size.strip()), stated[1]
    is_it = window[0] <= math.prod(shape) * _ITEM_BYTES.get(dtype, 0) <= window[1]
    return replace(failure, shape=shape, dtype=dtype) if is_it else failure


def _stated_tensor(failure: Failure) -> TensorCandidate:
    """The tensor whose shape the message itself prints (NumPy, TensorFlow), or its traceback."""
    shape, dtype = failure.shape or (), failure.dtype or "float32"
    num_bytes = failure.requested_bytes or math.prod(shape) * _ITEM_BYTES.get(dtype, 4)
    formula = " x ".join([*map(str, shape), dtype])
    return TensorCandidate("stated", f"{formula} = {format_bytes(num_bytes)}", num_bytes, 1.0)


class _Solution(NamedTuple):
    """A shape with sizes that fit a request; most are never told, so only the best are put into words."""

    fit: float
    num_bytes: int
    shape: _Shape
    given: Mapping[str, int]
    solved: Sequence[str]
    number: int
    dtype: str

    def candidate(self) -> TensorCandidate:
        words = [f"{' x '.join(self.solved)} {self.number}"] if self.solved else []
        words += [f"{name} {self.given[name]}" for name in self.shape.factors if name not in self.solved]
        if self.shape.multiple > 1:
            words.append(str(self.shape.multiple))
        formula = f"{' x '.join([*words, self.dtype])} = {format_bytes(self.num_bytes)}"
        return TensorCandidate(self.shape.name, formula, self.num_bytes, self.fit)


def _solutions(window: tuple[int, int], known: Mapping[str, int | str]) -> Iterator[_Solution]:
    """Every shape, with all assumed dimensions, whose size is in the window."""
    has_model = any(name in known for name in ("hidden", "vocab", "heads", "parameters"))
    longest = int(known.get("longest", _MAX_COUNT))
    for shape in _SHAPES:
        solved = [name for name in ("batch", "seq") if name in shape.factors and name not in known]
        if shape.factors.count("seq") > 1 and "seq" in solved:
            solved.remove("seq")
        missing = [name for name in dict.fromkeys(shape.factors) if name not in known and name not in solved]
        if (has_model and set(missing) - {"seq"}) or (shape.needs_model and not has_model):
            continue
        for values in product(*(_COMMON_VALUES[name] for name in missing)):
            given = {name: int(known[name]) for name in shape.factors if name in known}
            given |= dict(zip(missing, values, strict=True))
            if given.get("seq", 0) > longest:
                continue
            for dtype, prior in _dtypes(shape, known):
                solution = _solve(shape, given, solved, dtype, window, longest)
                if solution is not None:
                    fit = solution.fit * prior * _GUESS_DISCOUNT ** (len(missing) + bool(solved))
                    yield solution._replace(fit=round(fit, 4))


def _dtypes(shape: _Shape, known: Mapping[str, int | str]) -> tuple[tuple[str, float], ...]:
    """Element types worth trying, each with how likely it is."""
    given = str(known.get("dtype", ""))
    if given in _ITEM_BYTES and given != "float32":
        first, second = (0.8, 1.0) if shape.is_float32 else (1.0, 0.8)
        return (given, first), ("float32", second)
    return ("float32", 1.0), ("float16", 0.7)


def _solve(
    shape: _Shape, given: Mapping[str, int], solved: Sequence[str], dtype: str, window: tuple[int, int], longest: int
) -> _Solution | None:
    """The sizes of a shape whose unknown factors (batch, or batch x seq) follow from the window."""
    factors = [name for name in shape.factors if name not in solved]
    unit = math.prod(given[name] for name in factors) * _ITEM_BYTES[dtype] * shape.multiple
    if not unit:
        return None
    count = _roundest(-(-window[0] // unit), window[1] // unit) if solved else 1
    num_bytes = unit * count
    if not count or not window[0] <= num_bytes <= window[1] or (solved == ["seq"] and count > longest):
        return None
    if solved == ["batch"] and count > _LARGEST_BATCH:
        return None
    closeness = 1 - 0.3 * (window[1] - num_bytes) / max(1, window[1] - window[0])
    fit = shape.prior * closeness * _commonness(count)
    return _Solution(fit, num_bytes, shape, given, solved, count, dtype)


def _roundest(least: int, most: int) -> int:
    """The number in a range with the most factors of two; 0 where the range is empty or absurdly large."""
    if most < max(1, least) or most > _MAX_COUNT:
        return 0
    step = 1 << most.bit_length()
    while most // step * step < max(1, least):
        step >>= 1
    return most // step * step


def _commonness(count: int) -> float:
    """How common a batch or token count is: powers of two lead, then small multiples of them."""
    odd_part = count // (count & -count)
    return 1.0 if odd_part == 1 else 0.8 if odd_part <= 5 else 0.5 if odd_part <= 15 else 0.25
