"""Small made-up runs: the record of a few training steps, without torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from oom_magic.memory.categories import CATEGORIES, Category
from oom_magic.memory.report import Assumption, Device, MemoryReport, NamedHolder, OutOfMemory
from oom_magic.memory.timeline import PHASES, Mark, MarkKind, Phase, SourceLine, Timeline
from oom_magic.units import GIB, MIB

RTX_3060 = Device("NVIDIA GeForce RTX 3060", 12044 * MIB, context_bytes=380 * MIB, capability=(8, 6))

CODE = {
    3: "model = GPT2LMHeadModel(config).cuda()",
    4: "optimizer = torch.optim.AdamW(model.parameters())",
    8: "loss = model(input_ids=batch, labels=batch).loss",
    9: "loss.backward()",
    10: "optimizer.step()",
}


@dataclass
class Recorder:
    """Builds a Timeline event by event."""

    order: list[int] = field(default_factory=list)
    rows: list[tuple[int, ...]] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    lines: list[SourceLine] = field(default_factory=lambda: [SourceLine("", 0)])
    modules: list[str] = field(default_factory=lambda: [""])
    step: int = 0

    def allocate(
        self, num_bytes: int, category: Category, line: int = 0, phase: Phase = Phase.OTHER, module: str = ""
    ) -> int:
        """Add an allocation; returns its number."""
        at = self._position(self.lines, SourceLine("Cell In[3]", line, CODE[line])) if line else 0
        within = self._position(self.modules, module)
        kind, part = CATEGORIES.index(category), PHASES.index(phase)
        self.rows.append((num_bytes, kind, part, self.step, 0, at, within, 0))
        self.order.append(len(self.rows) - 1)
        return len(self.rows) - 1

    def free(self, *allocations: int) -> None:
        """Add frees."""
        self.order.extend(~allocation for allocation in allocations)

    def end_step(self) -> None:
        """Mark the end of an optimizer step."""
        self.marks.append(Mark(len(self.order), MarkKind.STEP_END))

    def timeline(self) -> Timeline:
        """What was recorded."""
        columns = np.array(self.rows, dtype=np.int64).reshape(-1, 8).T
        return Timeline(
            np.array(self.order, dtype=np.int64), *columns,
            lines=tuple(self.lines), modules=tuple(self.modules), marks=tuple(self.marks),
        )  # fmt: skip

    @staticmethod
    def _position(table: list, item: object) -> int:
        if item not in table:
            table.append(item)
        return table.index(item)


def training_timeline(num_steps: int = 3, num_layers: int = 12, scale: int = 1) -> Timeline:
    """A model of ``num_layers`` blocks trained with AdamW; activations are ``scale`` times as large."""
    recorder = Recorder()
    names = [f"transformer.h.{layer}" for layer in range(num_layers)] + ["lm_head"]
    sizes = [27 * MIB] * num_layers + [147 * MIB]
    layers = list(zip(names, sizes, strict=True))
    for name, size in layers:
        recorder.allocate(size, Category.PARAMETER, 3, module=name)
    recorder.allocate(8 * MIB, Category.WORKSPACE)
    states: list[int] = []
    for recorder.step in range(1, num_steps + 1):
        recorder.allocate(32 * 1024, Category.INPUT, 8)
        saved = []
        for name, _ in layers:
            temporary = recorder.allocate(48 * MIB * scale, Category.TEMPORARY, 8, Phase.FORWARD, name)
            saved.append(recorder.allocate(190 * MIB * scale, Category.ACTIVATION, 8, Phase.FORWARD, name))
            recorder.free(temporary)
        gradients = []
        for (name, size), activation in zip(reversed(layers), reversed(saved), strict=True):
            gradients.append(recorder.allocate(size, Category.GRADIENT, 9, Phase.BACKWARD, name))
            temporary = recorder.allocate(96 * MIB * scale, Category.TEMPORARY, 9, Phase.BACKWARD, name)
            recorder.free(temporary, activation)
        if not states:
            states = [
                recorder.allocate(size, Category.OPTIMIZER_STATE, 10, Phase.OPTIMIZER, name)
                for name, size in layers for _ in range(2)
            ]  # fmt: skip
        recorder.free(*gradients)
        recorder.end_step()
    return recorder.timeline()


def predicted(**known: object) -> MemoryReport:
    """A run that fits."""
    known = {
        "assumptions": (
            Assumption("loss.item() was taken to be 1.0", SourceLine("Cell In[3]", 11, "print(loss.item())")),
            Assumption("Attention runs with the memory-efficient kernel."),
        ),
        "holders": (NamedHolder("model", 471 * MIB), NamedHolder("optimizer", 942 * MIB)),
        "torch_version": "2.13.0",
        **known,
    }
    return MemoryReport.from_timeline(training_timeline(), RTX_3060, **known)


def measured() -> MemoryReport:
    """The same run on a real card that others use too."""
    device = Device("NVIDIA GeForce RTX 3060", 12044 * MIB, 380 * MIB, other_bytes=3 * GIB)
    return MemoryReport.from_timeline(training_timeline(), device, source="measured", torch_version="2.13.0")


def failed() -> MemoryReport:
    """A run that does not fit."""
    message = (
        "CUDA out of memory. Tried to allocate 1.30 GiB. GPU 0 has a total capacity of 11.76 GiB of which "
        "1.02 GiB is free."
    )
    failure = OutOfMemory(
        message, 1330 * MIB, 1330 * MIB, 1, Phase.FORWARD, "aten::addmm",
        SourceLine("Cell In[3]", 8, CODE[8]), "transformer.h.7", Category.ACTIVATION,
    )  # fmt: skip
    return predicted(out_of_memory=failure, error=f"OutOfMemoryError: {message}")
