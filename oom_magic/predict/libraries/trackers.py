"""Trackers of experiments: a run of the user's that is being tracked gets no figures from a dry run."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from oom_magic.predict.isolation.files.saving import skipped, unwritten
from oom_magic.predict.isolation.files.substitution import substituted
from oom_magic.predict.isolation.patching import all_patched
from oom_magic.predict.libraries.adapters import Adapter, Run
from oom_magic.predict.libraries.written_files import of_new_ones

_OF_A_RUN = (
    "log",
    "finish",
    "save",
    "log_artifact",
    "log_code",
    "alert",
    "define_metric",
    "mark_preempting",
    "restore",
)


@contextmanager
def _wandb(module: ModuleType, run: Run) -> Iterator[None]:
    """Runs that begin are wandb's own disabled ones: its service is a program, which is not started."""
    usual, before = module.init, dict(vars(module))

    @functools.wraps(usual)
    def init(*args: Any, **kwargs: Any) -> Any:
        skipped("wandb.init", run)()
        return usual(*args, **{**kwargs, "mode": "disabled"})

    names = [f"Run.{name}" for name in _OF_A_RUN]
    exchanged = [(usual, init), (module.login, skipped("wandb.login", run))]
    try:
        with substituted(exchanged), all_patched(unwritten(*names)(module.sdk.wandb_run, run)):
            yield
    finally:
        vars(module).update({name: value for name, value in before.items() if vars(module).get(name) is not value})


# TensorBoard's files: one that was open before is written to by a thread of its own.
_of_writers = of_new_ones("FileWriter", "add_event", "flush", "close")
ADAPTERS: dict[str, Adapter] = {
    "wandb": _wandb,
    "torch.utils.tensorboard.writer": _of_writers,
    "tensorboardX.writer": _of_writers,
}
