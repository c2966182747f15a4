"""Trainers, accelerate and data loaders: they train on the pretend GPU in one process and send no reports.

Worker processes of a data loader have no pretend GPU, and only their batches matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader, dataloader

from oom_magic.language import _
from oom_magic.predict.instrumentation.loops import LIKE_STEPS, LOOPS
from oom_magic.predict.isolation.files.saving import skipped
from oom_magic.predict.isolation.patching import Patches, patched
from oom_magic.predict.libraries.adapters import Adapter, Run
from oom_magic.predict.operators.known_values.values import UNKNOWN_NUMBER

_CUDA = torch.device("cuda", 0)


@contextmanager
def _accelerate_state(module: ModuleType, run: Run) -> Iterator[None]:
    """Set the device in accelerate's singletons to the pretend GPU, inside the dry run.

    What a run leaves in them belongs to objects that later runs of the session use, as a Trainer of an earlier cell:
    it is there again in those, unless the user's own code has changed the singletons since.
    """
    stores = {
        name: getattr(module, name)._shared_state for name in ("PartialState", "AcceleratorState", "GradientState")
    }
    before = {name: dict(store) for name, store in stores.items()}
    run.gpu.states_before = left = run.gpu.states_left
    for name, store in stores.items():
        if run.gpu.job is not None:
            store.clear()  # a process of a job finds out again which one it is
        elif name in left and left[name][0] == store:
            store.clear()
            store.update(left[name][1])
        elif "device" in store and not store.get("_cpu"):  # ``Accelerator(cpu=True)``
            store["device"] = _CUDA
    try:
        yield
    finally:
        if run.gpu.job is None:
            run.gpu.states_left = {name: (before[name], dict(store)) for name, store in stores.items()}
        for name, store in stores.items():
            store.clear()
            store.update(before[name])


def _notebook_launcher(module: ModuleType, run: Run) -> Patches:
    """``notebook_launcher`` without its error after an import of bitsandbytes, which rehearsals import, too."""
    find = module.are_libraries_initialized

    def are_libraries_initialized(*names: str) -> list[str]:
        found = find(*names)
        for name in found:
            text = _("notebook_launcher cannot start processes on a GPU after {name} has been imported", name=name)
            run.assume(text)
        return []

    return [(module, {"are_libraries_initialized": are_libraries_initialized})]


def _training_arguments(module: ModuleType, run: Run) -> Patches:
    """Give arguments that were made before the dry run a GPU."""
    owner = module.TrainingArguments
    original = owner.__dict__["device"].fget

    def device(arguments: Any) -> torch.device:
        original(arguments)  # sets up what else the arguments know of devices
        is_cpu = getattr(arguments, "use_cpu", False) or getattr(arguments, "no_cuda", False)
        own = torch.device("cuda", 0 if run.gpu.job is None else run.gpu.job.rank)
        return torch.device("cpu") if is_cpu else own

    counts: dict[int, int] = {}  # what Trainer sets for a model that already is on several cards

    def visible(arguments: Any) -> int:
        """One of a process group has one; else Trainer takes all that are visible (``_setup_devices``)."""
        state = getattr(arguments, "distributed_state", None)
        is_alone = state is None or str(state.distributed_type).endswith("NO")
        return counts.get(id(arguments), torch.cuda.device_count() if is_alone else 1)

    def set_visible(arguments: Any, number: int) -> None:
        counts[id(arguments)] = number

    def num_gpus(arguments: Any) -> int:
        return visible(arguments) if device(arguments).type == "cuda" else 0

    changes = {
        "device": property(device),
        "n_gpu": property(num_gpus),
        "_n_gpu": property(visible, set_visible),
    }
    return [(owner, changes)]


def _trainer(module: ModuleType, run: Run) -> Patches:
    """Hugging Face's Trainer without uploads and reports."""
    writes = ("create_model_card", "push_to_hub", "init_hf_repo")
    known = [name for name in writes if hasattr(module.Trainer, name)]
    changes = {name: skipped(f"Trainer.{name.strip('_')}", run) for name in known}
    return [(module.Trainer, changes), (module, {"get_reporting_integration_callbacks": lambda report_to: []})]


def _evaluations(module: ModuleType, run: Run) -> Patches:
    """An evaluation every so many steps runs once after the third step, if the rest of the steps is left out."""
    owner = module.DefaultFlowCallback
    original = owner.on_step_end
    seen: set[int] = set()

    def on_step_end(callback: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control = original(callback, args, state, control, **kwargs)
        if control.should_evaluate:
            seen.add(id(state))
        strategy = getattr(args, "eval_strategy", None) or getattr(args, "evaluation_strategy", None)
        if LOOPS.leave_out and strategy == "steps" and state.global_step >= LIKE_STEPS and id(state) not in seen:
            seen.add(id(state))
            run.assume(
                _(
                    "Trainer evaluates every {steps} steps; the third step stands in for the first of them",
                    steps=state.eval_steps,
                )
            )
            control.should_evaluate = True
        return control

    return [(owner, {"on_step_end": on_step_end})]


def _lightning_validation(module: ModuleType, run: Run) -> Patches:
    """Lightning validates in the last iteration over batches: here in the last one that is followed."""
    owner = module._TrainingEpochLoop
    original = owner._should_check_val_fx

    def _should_check_val_fx(loop: Any, *args: Any, **kwargs: Any) -> bool:
        return original(loop, *args, **kwargs) or (LOOPS.ends_with_turn and loop._should_check_val_epoch())

    return [(owner, {"_should_check_val_fx": _should_check_val_fx})]


def _lightning_loggers(module: ModuleType, run: Run) -> Patches:
    """Lightning without its loggers, which write folders."""

    def configure_logger(connector: Any, logger: Any) -> None:
        connector.trainer.loggers = []

    return [(module._LoggerConnector, {"configure_logger": configure_logger})]


_LOGGERS = "trainer.connectors.logger_connector.logger_connector"


def _one_process(module: ModuleType, run: Run) -> Patches:
    """Batches are made in this process; pinned memory is ordinary host memory."""

    def _get_iterator(loader: DataLoader[Any]) -> Any:
        with patched(loader, {"num_workers": 0, "timeout": 0, "prefetch_factor": None}):
            return dataloader._SingleProcessDataLoaderIter(loader)

    def __iter__(loader: DataLoader[Any]) -> Any:  # noqa: N807
        """Without the user's workers that wait for the next epoch (``persistent_workers``)."""
        return loader._get_iterator()

    def pin_memory(data: Any, device: Any = None) -> Any:
        return data

    return [
        (DataLoader, {"_get_iterator": _get_iterator, "__iter__": __iter__}),
        (torch.utils.data._utils.pin_memory, {"pin_memory": pin_memory}),
    ]


def _lbfgs(_module: ModuleType, run: Run) -> Patches:
    """Iterations that go on: losses are not known, and equal ones would end each step after one iteration."""

    def say() -> None:
        run.assume(
            _(
                "LBFGS: each step makes as many iterations as it may and keeps them in its history; a line search takes"
                " its first trial"
            )
        )

    def change(value: Any) -> Any:
        say()
        return abs(value) or UNKNOWN_NUMBER

    def strong_wolfe(evaluate: Any, x: Any, t: Any, d: Any, _f: Any, g: Any, *_more: Any, **_options: Any) -> Any:
        say()
        _before = g.clone(memory_format=torch.contiguous_format)  # as the usual function holds it
        loss, gradient = evaluate(x, t, d)
        return loss, gradient, t, 1

    return [(_module, {"abs": change, "_strong_wolfe": strong_wolfe})]


ADAPTERS: dict[str, Adapter] = {
    "torch.optim.lbfgs": _lbfgs,
    "accelerate.launchers": _notebook_launcher,
    "accelerate.state": _accelerate_state,
    "transformers.training_args": _training_arguments,
    "transformers.trainer": _trainer,
    "transformers.trainer_callback": _evaluations,
    f"lightning.pytorch.{_LOGGERS}": _lightning_loggers,
    f"pytorch_lightning.{_LOGGERS}": _lightning_loggers,
    "lightning.pytorch.loops.training_epoch_loop": _lightning_validation,
    "pytorch_lightning.loops.training_epoch_loop": _lightning_validation,
    "torch.utils.data.dataloader": _one_process,
}
