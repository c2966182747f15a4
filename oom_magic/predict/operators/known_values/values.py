"""True values for tensors on the pretend GPU, as far as they are known.

Host code branches on masks, lengths and counts (``mask.all()``, ``.item()``, boolean indexing). A tensor that is made
of one constant, and a small one whose inputs are known, therefore carries its values (``Shadow``), on which every
operator is repeated. Unknown values are read as a documented default, and the report says where.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from oom_magic.language import _
from oom_magic.predict.fake_cuda.places import FakeDevice, map_tensors, tensors_in, tensors_written
from oom_magic.predict.operators.known_values.branches import CHOOSING, answer_that_goes_on, spread_choices
from oom_magic.predict.operators.known_values.shadows import Shadow, covers

aten = torch.ops.aten

SHADOW_ELEMENTS = 1 << 24  # of an integer or boolean tensor
SHADOW_FLOAT_ELEMENTS = 1 << 16
UNKNOWN_NUMBER = 1.0  # what an unknown number is read as: a divisor and a logarithm's argument


class Values:
    """The shadows, by storage."""

    def __init__(self, gpu: FakeDevice, assume: Callable[[str], None], has_read: Callable[[], None]) -> None:
        self._gpu = gpu
        self.assume = assume
        self._has_read = has_read  # called for each read of an unknown value
        self._shadows: dict[int, Shadow] = {}
        self._passed: set[int] = set()  # storages with the result of a check on unknown values
        self._answered: dict[tuple[str, int], bool] = {}  # by line of a loop: what its condition was read as last

    def assume_uncounted(self, func: OpOverload) -> None:
        """Note that what an operator's kernel takes beyond its results is not known."""
        self.assume(
            _("{name}: its results are counted, but not what its kernel allocates internally", name=func.name())
        )

    def assume_as_long(self, func: OpOverload) -> None:
        """Note that an operator's result, whose size depends on values, is taken to be as long as its first tensor."""
        text = _(
            "{name}: the size of its result depends on values; assumed to be that of its first tensor", name=func.name()
        )
        self.assume(text)

    def forget(self, key: int) -> None:
        """A storage died."""
        self._shadows.pop(key, None)
        self._passed.discard(key)

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The true values of a tensor (itself when it is real); None when they are not all known."""
        if not tensor.is_meta:
            return tensor
        shadow = self._shadow(tensor)
        return shadow.values(tensor) if shadow is not None and shadow.is_known(tensor) else None

    def put(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Let a fake tensor have these values."""
        if covers(tensor) and value.numel() and not any(value.stride()):
            self._put_constant(tensor, value.detach().flatten()[0].to(tensor.dtype))
        elif is_small(tensor):
            self._own(tensor).write(tensor, value)
            if covers(tensor):
                self._own(tensor).assumption = ""
        else:
            self._forget(tensor)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """``target`` now holds what ``source`` holds."""
        if not target.is_meta:
            target.copy_(self.read(source))
            return
        shadow = self._shadow(source) if source.is_meta else None
        value = self.get(source)
        if value is not None and value.size() == target.size():
            self.put(target, value)
            self._note(target, self.assumption_about([source]))
        elif shadow is not None and is_small(target) and is_small(source) and source.size() == target.size():
            self._own(target).write(target, shadow.values(source), shadow.known_mask(source))
        else:
            self._forget(target)

    def repeat(self, source: torch.Tensor, target: torch.Tensor, times: int) -> None:
        """``target`` now holds what ``source`` holds so many times, as far as that is known."""
        shadow = self._shadow(source) if source.is_meta and is_small(source) and is_small(target) else None
        if shadow is None:
            self._forget(target)
            return
        parts = (shadow.values(source), shadow.known_mask(source))
        self._own(target).write(target, *(part.reshape(-1).repeat(times).view(target.shape) for part in parts))

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values that host code reads, as a real tensor of the same shape that takes no memory of the run."""
        shadow = self._shadow(tensor) if tensor.is_meta else None
        value = self.get(tensor)
        if value is not None:
            assumption = self.assumption_about([tensor])
            if assumption:
                self.assume(assumption)
            return value
        self._has_read()
        default, shown = self._default(tensor)
        self.assume(_("a value computed on the pretend GPU is read; assumed: {shown}", shown=shown))
        if shadow is not None:
            return torch.where(shadow.known_mask(tensor), shadow.values(tensor), default)
        return default

    def _default(self, tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
        """The default for an unknown value, and the sentence for it."""
        if tensor.dtype is not torch.bool:
            number = torch.full((), UNKNOWN_NUMBER, dtype=tensor.dtype, device="cpu")
            return number.expand(tensor.shape), str(UNKNOWN_NUMBER)
        if tensor.numel() > 1 and not self._has_passed(tensor):
            mask = torch.zeros(tensor.numel(), dtype=torch.bool, device="cpu")
            mask[::2] = True
            return mask.view(tensor.shape), _("every other element True")
        answer = answer_that_goes_on(sys._getframe(2), self._answered)
        if answer is None:
            answer = self._has_passed(tensor)
        return torch.full((), answer, dtype=torch.bool, device="cpu").expand(tensor.shape), str(answer)

    def follow_creation(self, func: OpOverload, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Shadow what a factory made: ``zeros``, ``arange``, ``full``, ``randint``, ..."""
        if not isinstance(out, torch.Tensor) or is_empty(func) or (is_random(func) and out.is_floating_point()):
            return
        constant = _constant_made(func, args, kwargs)
        if constant is not None:
            self._put_constant(out, torch.full((), constant, dtype=out.dtype, device="cpu"))
        elif is_small(out):
            options = {**kwargs, "device": torch.device("cpu")}
            for name in {"pin_memory", "generator"} & options.keys():  # a real one draws on its own device only
                options[name] = None
            self.put(out, func(*args, **options))

    def follow(
        self, func: OpOverload, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor], out: Any
    ) -> None:
        """Repeat an operator that just ran on the shadows, or forget what it overwrote."""
        if _needs_known_values(func) and not all(map(self._is_known, tensors)):
            return
        finite = _answer_if_finite(func, args)
        if finite is not None and not self._is_known(args[0]):
            self._put_constant(out, torch.full((), finite, dtype=torch.bool, device="cpu"))
            self._note(out, _("a check of values computed on the pretend GPU is read; they were assumed to be finite"))
            return
        if func in _CHECKS or (func in _CONJUNCTIONS and all(map(self._has_passed, tensors))):
            self._passed.add(out.untyped_storage()._cdata)
        constant = _constant_made(func, args, kwargs)
        if constant is not None:
            self._put_constant(out, torch.full((), constant, dtype=out.dtype, device="cpu"))
        elif self._shadows or func in _FILLS or func in _WRITES or func in CHOOSING:
            if func._schema.is_mutable:
                self._follow_in_place(func, args, kwargs, tensors)
            else:
                self._follow_functional(func, args, kwargs, tensors, out)

    def _follow_functional(
        self, func: OpOverload, args: Any, kwargs: Any, tensors: list[torch.Tensor], out: Any
    ) -> None:
        if _is_arbitrary(func):
            return
        if not all(map(self._is_known, tensors)):
            if func in _MOVES:
                self._move_parts(func, args, kwargs, tensors, out)
            else:
                self._choose(func, args, out)
            return
        made = tensors_in((out,), {})
        assumption = self.assumption_about(tensors)
        if self._are_constant(func, tensors):
            values = tensors_in((self._repeat(func, args, kwargs, self._element),), {})
            for tensor, value in zip(made, values, strict=False):
                self._put_constant(tensor, value.flatten()[0].to(tensor.dtype))
                self._note(tensor, assumption)
        elif all(map(is_small, made)) and all(map(is_small, tensors)):
            values = tensors_in((self._repeat(func, args, kwargs, self.get),), {})
            for tensor, value in zip(made, values, strict=False):
                if tensor.shape == value.shape:  # outputs that a kernel keeps for its backward often differ on the CPU
                    self.put(tensor, value)
                    self._note(tensor, assumption)

    def _choose(self, func: OpOverload, args: Any, out: Any) -> None:
        chosen = spread_choices(func, args, out)
        if chosen is not None and chosen[0].numel() and is_small(chosen[0]):
            self.put(*chosen)
            self._note(
                chosen[0],
                _(
                    "what argmax, topk or multinomial chooses among values computed on the pretend GPU is read; all"
                    " outcomes were assumed to be equally frequent"
                ),
            )

    def assumption_about(self, tensors: list[torch.Tensor]) -> str:
        """The assumption about the values of these tensors, or an empty text."""
        shadows = (self._shadow(tensor) for tensor in tensors if tensor.is_meta)
        return next((shadow.assumption for shadow in shadows if shadow is not None and shadow.assumption), "")

    def _note(self, tensor: torch.Tensor, assumption: str) -> None:
        shadow = self._shadows.get(_key(tensor)) if assumption else None
        if shadow is not None:
            shadow.assumption = assumption

    def _has_passed(self, tensor: torch.Tensor) -> bool:
        return tensor.is_meta and _key(tensor) in self._passed

    def _shadow(self, tensor: torch.Tensor) -> Shadow | None:
        shadow = self._shadows.get(_key(tensor)) if tensor.is_meta else None
        if shadow is None or shadow.constant is None or shadow.constant.dtype is tensor.dtype or is_small(tensor):
            return shadow
        return None  # a large constant, seen as another type

    def _own(self, tensor: torch.Tensor) -> Shadow:
        """The shadow of a tensor's storage; a new one knows nothing."""
        return self._shadows.setdefault(_key(tensor), Shadow(tensor.untyped_storage().nbytes()))

    def _put_constant(self, tensor: torch.Tensor, element: torch.Tensor) -> None:
        if covers(tensor):
            num_bytes = tensor.untyped_storage().nbytes()
            self._shadows[_key(tensor)] = Shadow(num_bytes, element)
        elif is_small(tensor):
            self._own(tensor).write(tensor, element)
        else:
            self._forget(tensor)

    def _forget(self, tensor: torch.Tensor) -> None:
        """Something unknown was written into a tensor, which may be a view."""
        shadow = self._shadows.get(_key(tensor))
        if shadow is None:
            return
        if covers(tensor) or not is_small(tensor):
            del self._shadows[_key(tensor)]
        else:
            shadow.forget(tensor)

    def _is_known(self, tensor: torch.Tensor) -> bool:
        if not tensor.is_meta:
            return True
        shadow = self._shadow(tensor)
        return shadow is not None and shadow.is_known(tensor)

    def _is_unknown(self, tensor: torch.Tensor) -> bool:
        return tensor.is_meta and self._shadow(tensor) is None

    def _are_constant(self, func: OpOverload, tensors: list[torch.Tensor]) -> bool:
        """Whether an operator maps constants to a constant: an elementwise one, one such as ``min`` or ``any``, or one
        that joins equal ones."""
        if torch.Tag.pointwise not in func.tags and func not in _AS_THEIR_ELEMENTS and func not in _JOINS:
            return False
        are_constant = all(
            tensor.numel() == 1 if not tensor.is_meta else self._shadows[_key(tensor)].constant is not None
            for tensor in tensors
        )
        if not are_constant or func not in _JOINS:
            return are_constant
        return len({element.item() for element in map(self._element, tensors) if element is not None}) == 1

    def _element(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """One element of a constant, with as many dimensions as it has."""
        shadow = self._shadows[_key(tensor)] if tensor.is_meta else None
        if shadow is None or shadow.constant is None:
            return tensor
        return shadow.constant.reshape([1] * tensor.dim()).clone()

    def _repeat(self, func: OpOverload, args: Any, kwargs: dict[str, Any], get: Callable[[torch.Tensor], Any]) -> Any:
        """An operator on values; nothing where the CPU has no kernel for these types."""
        options = {key: map_tensors(value, get) for key, value in kwargs.items()}
        if options.get("device") is not None:
            options["device"] = torch.device("cpu")
        try:
            return func(*map_tensors(args, get), **options)
        except (RuntimeError, NotImplementedError, IndexError):
            return ()

    def _move_parts(
        self, func: OpOverload, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor], out: torch.Tensor
    ) -> None:
        """An operator that moves elements and computes nothing, on values of which a part is known."""
        if all(map(self._is_unknown, tensors)) or not all(map(is_small, (out, *tensors))):
            return
        values = self._repeat(func, args, kwargs, self._some_values)
        known = self._repeat(func, args, kwargs, self._some_marks)
        parts = [part for part in (values, known) if isinstance(part, torch.Tensor)]
        if len(parts) == 2 and all(part.shape == out.shape for part in parts):  # else its size was supposed
            self._own(out).write(out, *parts)

    def _some_values(self, tensor: torch.Tensor) -> torch.Tensor:
        shadow = self._shadow(tensor)
        if shadow is not None:
            return shadow.values(tensor)
        return tensor if not tensor.is_meta else torch.zeros((), dtype=tensor.dtype, device="cpu").expand(tensor.shape)

    def _some_marks(self, tensor: torch.Tensor) -> torch.Tensor:
        shadow = self._shadow(tensor)
        if shadow is not None:
            return shadow.known_mask(tensor)
        return torch.full((), not tensor.is_meta, dtype=torch.bool, device="cpu").expand(tensor.shape)

    def _follow_in_place(
        self, func: OpOverload, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> None:
        targets = tensors_written(func, args, kwargs)
        if func in _RESIZES:
            self._resize(targets[0])
            return
        only_written = {id(tensor) for tensor in (targets if func in _OVERWRITES else tensors_in((), kwargs))}
        only_written &= {id(tensor) for tensor in targets}
        read = [tensor for tensor in tensors if id(tensor) not in only_written]
        if _is_arbitrary(func) or not all(map(self._is_known, read)):
            if not self._write_parts(func, args, kwargs, targets):
                for target in targets:
                    self._forget(target)
                self._choose(func, args, targets[0] if len(targets) == 1 else targets)
            return
        assumption = self.assumption_about(read)
        if func in _FILLS:
            value = args[1] if len(args) > 1 else 0
            self._put_constant(targets[0], torch.full((), value, dtype=targets[0].dtype, device="cpu"))
        elif all(map(covers, targets)) and targets and self._are_constant(func, read) and not only_written:
            self._repeat(func, args, kwargs, lambda tensor: self._element_in_place(tensor))
        elif all(map(is_small, tensors)):
            for target in targets:
                self._own(target).expand()
            self._repeat(func, args, kwargs, self._some_values)
            for target in targets:
                self._own(target).write(target, self._some_values(target))
        else:
            for target in targets:
                self._forget(target)
        for target in targets:
            self._note(target, assumption)

    def _resize(self, tensor: torch.Tensor) -> None:
        shadow, num_bytes = self._shadows.get(_key(tensor)), tensor.untyped_storage().nbytes()
        if shadow is not None and shadow.num_bytes < num_bytes:
            if is_small(tensor):
                shadow.grow(num_bytes)
            else:
                self._forget(tensor)

    def _element_in_place(self, tensor: torch.Tensor) -> torch.Tensor | None:
        shadow = self._shadows[_key(tensor)] if tensor.is_meta else None
        if shadow is None or shadow.constant is None:
            return tensor
        shadow.constant = shadow.constant.clone()
        return shadow.constant.view([1] * tensor.dim())

    def _write_parts(self, func: OpOverload, args: Any, kwargs: dict[str, Any], targets: list[torch.Tensor]) -> bool:
        """A write to known places of a tensor, of values that may be unknown; False where it cannot be followed."""
        target: Any = args[0] if args else None
        accumulates = any(flag is True for flag in (*args[3:], *kwargs.values()))
        if func not in _WRITES or accumulates or not is_small(target):
            return False
        places = tensors_in(args[1:-1], {})
        if not all(map(self._is_known, places)):
            return False
        source = args[-1] if isinstance(args[-1], torch.Tensor) else None
        values = [self._some_values(target).clone(), *map_tensors(tuple(args[1:]), self._some_values)]
        mark = True if source is None else self._some_marks(source)
        marks = [self._some_marks(target).clone(), *map_tensors(tuple(args[1:-1]), self._some_values), mark]
        try:
            func(*values)
            func(*marks)
        except (RuntimeError, NotImplementedError, IndexError):
            return False
        self._own(target).write(target, values[0], marks[0])
        return True


_CHECKS = {aten.all.default, aten.all.dim, aten._is_all_true.default}
_CONJUNCTIONS = {aten.bitwise_and.Tensor, aten.logical_and.default, aten.mul.Tensor}
_FILLS = {aten.fill_.Scalar, aten.zero_.default}
_OVERWRITES = {*_FILLS, aten.fill_.Tensor}
_RESIZES = {aten.resize_.default, aten.resize_as_.default}
# Operators whose result on a constant is the same constant.
_AS_THEIR_ELEMENTS = {
    aten.all.default, aten.all.dim, aten.any.default, aten.any.dim, aten.amax.default, aten.amin.default,
    aten.max.default, aten.min.default, aten.clone.default, aten._to_copy.default,
}  # fmt: skip
_JOINS = {aten.cat.default, aten.stack.default}
# Operators that move elements and compute nothing: what is known of their inputs is known of their results.
_MOVES = {
    aten.clone.default, aten._to_copy.default, aten.cat.default, aten.stack.default, aten.index.Tensor,
    aten.index_select.default, aten.repeat.default, aten.flip.default, aten.roll.default, aten.gather.default,
    aten._reshape_copy.default, aten.constant_pad_nd.default,
}  # fmt: skip
# Operators that write their last argument into places of the first that the others name.
_WRITES = {
    aten.index_put_.default, aten._index_put_impl_.default, aten.masked_fill_.Scalar, aten.masked_fill_.Tensor,
    aten.scatter_.src, aten.scatter_.value, aten.index_fill_.int_Scalar, aten.index_copy_.default,
}  # fmt: skip
_PARTS_OF_FINITE = {
    aten.eq.Tensor, aten.ne.Tensor, aten.eq.Scalar, aten.ne.Scalar, aten.isnan.default, aten.isinf.default
}  # fmt: skip
_CONSTANTS = {"zeros": 0, "new_zeros": 0, "zeros_like": 0, "ones": 1, "new_ones": 1, "ones_like": 1}
_FILLED = {"full": 1, "full_like": 1, "new_full": 2}  # with which argument


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _constant_made(func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    """The number that a factory fills with; None if it does something else."""
    name = func.overloadpacket.__name__
    is_maker = name in _CONSTANTS or name in _FILLED
    if not is_maker or func.namespace != "aten" or func._schema.is_mutable:
        return None
    if name in _FILLED:
        position = _FILLED[name]
        return args[position] if len(args) > position else kwargs.get("fill_value")
    return _CONSTANTS.get(name)


def _answer_if_finite(func: OpOverload, args: Any) -> bool | None:
    """The answer of operators that ``isfinite``, ``isnan`` and ``isinf`` are made of, for finite numbers; None for
    other operators."""
    if func not in _PARTS_OF_FINITE:
        return None
    if func in (aten.eq.Tensor, aten.ne.Tensor) and args[0] is args[1] and args[0].is_floating_point():
        return func is aten.eq.Tensor
    if func in (aten.eq.Scalar, aten.ne.Scalar) and args[1] in (float("inf"), float("-inf")):
        return func is aten.ne.Scalar
    return False if func in (aten.isnan.default, aten.isinf.default) else None


def is_small(tensor: torch.Tensor) -> bool:
    """Whether a tensor of this shape and type carries true values."""
    is_float = tensor.is_floating_point() or tensor.is_complex()
    limit = SHADOW_FLOAT_ELEMENTS if is_float else SHADOW_ELEMENTS
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() <= limit * tensor.element_size()


@cache
def is_empty(func: OpOverload) -> bool:
    """Whether an operator leaves its output as it finds it (``empty``, ``new_empty_strided``, ...)."""
    return "empty" in func.name()


@cache
def _is_arbitrary(func: OpOverload) -> bool:
    """Whether nobody knows what an operator writes."""
    return is_random(func) or is_empty(func)


@cache
def _needs_known_values(func: OpOverload) -> bool:
    """Whether nothing is known of an operator's results unless all is known of its arguments."""
    if func._schema.is_mutable or func.overloadpacket.__name__ in {*_CONSTANTS, *_FILLED}:
        return False
    return func not in {*_PARTS_OF_FINITE, *_CHECKS, *_CONJUNCTIONS, *_FILLS, *_WRITES, *_MOVES, *CHOOSING}


@cache
def is_random(func: OpOverload) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags
