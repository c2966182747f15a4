"""``dry_run``: a function of the user's, executed on a pretend GPU of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from oom_magic.language import _
from oom_magic.memory.report import MemoryReport
from oom_magic.one_line_errors import OneLineErrors
from oom_magic.predict.compiled.calls import run_or_as_written
from oom_magic.predict.cpu_runs import stayed_on_cpu
from oom_magic.predict.instrumentation.decided.decided_names import DecidedNames
from oom_magic.predict.instrumentation.stop_rule import StopAfter
from oom_magic.predict.isolation.process.event_loops import awaited
from oom_magic.predict.session import DrySession
from oom_magic.user_code import is_users_file


def dry_run(
    fn: Callable[..., Any],
    *args: Any,
    gpu: str | None = None,
    memory: str | int | None = None,
    num_gpus: int = 1,
    num_processes: int | None = None,
    rank: int | None = None,
    stop_after_steps: StopAfter = "alike",
    follow_compile: bool = True,
    **kwargs: Any,
) -> MemoryReport:
    """Run ``fn(*args, **kwargs)``, ordinary code written for "cuda", on a pretend GPU, and return its MemoryReport.

    No GPU is needed and no device memory is used. A simulated out-of-memory error ends the run and is in
    ``report.out_of_memory``. Other exceptions of ``fn`` are raised, except those after three like steps. What ``fn``
    changes is afterwards as before: its global variables, its closure, its arguments, its object. A coroutine that it
    returns is run to its end.

    ``gpu``: the name of a card, such as ``"A100 80GB"`` or ``"2x T4"`` (default RTX 3060).
    ``memory``: its capacity, if another: ``"12GiB"``, or bytes.
    ``num_gpus``: how many such cards the process sees. ``report.cards`` has a report for each; the report itself is
    that of the fullest.
    ``num_processes``, ``rank``: the run is that of process ``rank`` of so many with a card each, as ``torchrun`` starts
    it, with RANK, WORLD_SIZE and so on in the environment; the other processes are assumed to do the same. Without
    ``num_processes``, ``rank`` is an argument of ``fn``, such as LoRA's.
    ``stop_after_steps``: the number of optimizer steps after which the run ends; None: where ``fn`` ends. By default a
    loop ends after three like steps, and what follows it is followed for ten seconds of computing, or as long as the
    steps took.
    ``follow_compile``: False runs compiled code as eager code, which is faster; the report is then an upper bound.
    """
    if num_processes is None and rank is not None:
        kwargs["rank"] = rank
    _check_call(fn, args, kwargs)
    namespaces = namespaces_of(fn)
    call, changeable = call_followed(fn, args, kwargs)
    machine = {"num_gpus": num_gpus, "num_processes": num_processes, "rank": rank or 0}

    def run(decided: Sequence[DecidedNames] | None, **options: Any) -> DrySession:
        options = {**machine, "stop_after_steps": stop_after_steps, "follows_compile": follow_compile, **options}
        session = DrySession(gpu, memory, is_lasting=False, **options)
        return run_or_as_written(
            session,
            lambda: session.run(call, changeable, decided),
            lambda: run(decided, **{**options, "follows_compile": False}),
        )

    with OneLineErrors("dry run"):
        session = run(None)
        if namespaces:
            stayed_on_cpu(
                session,
                [_function(fn).__code__],
                {one.name for names in session.decided for one in names.decisions},
                lambda names: DecidedNames.of(namespaces[0], presumed=names),
                lambda decided: run([decided], is_limited=False, has_bar=False),
            )
    assert session.report is not None
    return session.report


def _check_call(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise TypeError, with the fix, if ``fn`` cannot be called with these arguments, or a call of it runs nothing."""
    if not callable(fn):
        kind = type(fn).__name__
        raise TypeError(_("dry_run needs a function, not {kind} {fn!r}; wrap the code in one.", kind=kind, fn=fn))
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise TypeError(
            _(
                "{name} is a generator function: none of it runs before items are taken from what it returns. Pass a"
                " function that takes them.",
                name=fn.__name__,
            )
        )
    try:
        inspect.signature(fn).bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(fn, "__name__", repr(fn))
        text = _("{name}(): {error}; pass its arguments to dry_run too: dry_run({name}, ...).", name=name, error=error)
        raise TypeError(text) from None
    except ValueError:  # a builtin without a signature raises its own error
        return


def call_followed(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[[], Any], list[dict[str, Any]]]:
    """The call of a function, as a dry run makes it, and the variables that it may change.

    Among them is the call itself: it leads to what the function's closure, defaults, arguments and object hold. A
    coroutine that the function returns is run to its end.
    """
    called: dict[str, Any] = {"fn": fn, "args": list(args)}
    by_name = dict(kwargs)

    def call() -> Any:
        return awaited(called["fn"](*called["args"], **by_name))

    return call, [*namespaces_of(fn), called, by_name]


def namespaces_of(fn: Any) -> list[dict[str, Any]]:
    """The global variables of a function of the user's, which it may change."""
    function = _function(fn)
    code = getattr(function, "__code__", None)
    return [function.__globals__] if code is not None and is_users_file(code.co_filename) else []


def _function(fn: Any) -> Any:
    """The function under a partial, a method or a wrapper."""
    function = inspect.unwrap(getattr(fn, "func", fn))
    return getattr(function, "__func__", function)
