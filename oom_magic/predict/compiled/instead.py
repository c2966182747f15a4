"""Where compiled code cannot be followed to its end, the run is made again with the code as it was written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

from oom_magic.errors import describe_error
from oom_magic.language import _
from oom_magic.memory.report import Assumption, MemoryReport
from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU


class _Run(Protocol):
    fake_gpu: FakeGPU
    report: MemoryReport | None


R = TypeVar("R", bound=_Run)


class CudaGraphsError(NotImplementedError):
    """Compiled code that replays CUDA graphs: neither it nor the eager code bounds what their pools take."""


def run_or_as_written(session: R, run: Callable[[], object], again: Callable[[], R]) -> R:
    """``session`` once ``run`` has ended; where that failed with compiled code, the session that ``again`` gives.

    ``again`` runs the same as eager code. Where that fails, too, the error is the code's own and is raised, as is one
    of Dynamo's that the user asked for (``fullgraph=True``), and the refusal of CUDA graphs. The other session's
    figures are upper bounds, and say so.
    """
    try:
        run()
        return session
    except Exception as error:
        if not session.fake_gpu.has_compiled or isinstance(error, CudaGraphsError) or _is_asked_for(error):
            raise
        failed = error
    try:
        other = again()
    except Exception:
        raise failed from None
    text = _(
        "torch.compile: what it makes could not be run here ({error}); followed as eager code, an upper bound",
        error=describe_error(failed)[:200],
    )
    if other.report is not None:
        other.report = replace(other.report, assumptions=(*other.report.assumptions, Assumption(text, None, True)))
    return other


def _is_asked_for(error: Exception) -> bool:
    exceptions = sys.modules.get("torch._dynamo.exc")
    return exceptions is not None and isinstance(error, (exceptions.Unsupported, exceptions.UserError))
