"""The dry run beside the truth: ``python tests/truth/agreement.py [PATTERN] [--trackers]`` prints the table of all cases.

Truth is what PyTorch's own CUDA build counted (tests/data/truth_transformers.json and, where the folder is there,
../shared/truth/dev.json). ``--trackers`` runs ``torch.distributed._tools.mem_tracker.MemTracker`` on the same cases.
``python tests/truth/agreement.py --record FILE...`` makes tests/data/truth_transformers.json of results of truth.py. The stub
reads what a GPU computed as zeros; "switch" was recorded with routers that choose as ``operators/known_values/choices.py`` says.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from oom_magic.memory.report import MemoryReport
from oom_magic.predict.session import DrySession
from oom_magic.units import MIB
from tests.programs.training_cases import Case, Trainer
from tests.support.folders import DATA, SHARED

RECORDED = DATA / "truth_transformers.json"
SHARED_FILE = SHARED / "truth" / "dev.json"
GPUS = {
    "a100-80gb": "A100 80GB", "h100-80gb": "H100", "h200": "H200", "b200": "B200", "rtx3060": "RTX 3060",
    "rtx3090": "RTX 3090", "rtx4090": "RTX 4090", "rtx5090": "RTX 5090", "t4": "T4",
}  # fmt: skip
_CONTEXT_MIB = 300  # of the stub, where a case does not say


@dataclass(frozen=True)
class Truth:
    """One case and what PyTorch counted. ``steps``: peaks of each step, in bytes."""

    name: str
    case: Case
    versions: dict[str, str]
    steps: list[dict[str, int]]
    smallest_mib: int | None = None
    oom: dict[str, Any] | None = None

    @classmethod
    def of(cls, result: dict[str, Any]) -> Truth:
        """From a result of truth.py."""
        names = ("step", "peak_allocated", "peak_reserved")
        steps = [{name: step[name] for name in names if name in step} for step in result["steps"]]
        versions = {name: version.split("+")[0] for name, version in result["versions"].items()}
        return cls(result["name"], result["case"], versions, steps, result.get("smallest_mib"), result.get("oom"))

    def peak(self, name: str) -> int:
        """The highest ``peak_allocated`` or ``peak_reserved`` of all steps."""
        return max(step[name] for step in self.steps)


@dataclass(frozen=True)
class Prediction:
    """What the dry run counted, step by step; ``stage`` is where it was when it ended."""

    steps: list[dict[str, int]]
    report: MemoryReport
    stage: str
    seconds: float

    def peak(self, name: str) -> int:
        """As ``Truth.peak``; after a failure the report's."""
        steps = [step[name] for step in self.steps if name in step]
        return max([*steps, getattr(self.report, f"{name}_bytes")] if self.report.out_of_memory else steps)


def truths() -> list[Truth]:
    """All recorded cases."""
    results = [json.loads(path.read_text()) for path in (RECORDED, SHARED_FILE) if path.exists()]
    return [Truth.of(result) for found in results for result in found if "error" not in result]


def installed_versions(truth: Truth) -> dict[str, str]:
    """The versions here of the libraries that a case used."""
    used = [name for name in truth.versions if name != "peft" or truth.case.get("lora")]
    return {name: importlib.metadata.version(name).split("+")[0] for name in used}


def is_comparable(truth: Truth) -> bool:
    """Whether the libraries here are those of the recording."""
    return all(truth.versions[name] == version for name, version in installed_versions(truth).items())


@contextlib.contextmanager
def _environment(case: Case) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in case.get("env", {}).items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def predict(case: Case) -> Prediction:
    """Dry-run a case on its card."""
    card = dict(case.get("gpu", {}))
    trainer = Trainer(case)
    with _environment(case):
        session = DrySession(GPUS[card.get("gpu", "a100-80gb")], stop_after_steps=None, has_bar=False)
        sizes = {"mem_gib": 1024 * MIB, "mem_mib": MIB, "mem_bytes": 1}
        total_bytes = sum(int(card[name] * unit) for name, unit in sizes.items() if name in card)
        if total_bytes:
            outside = card.get("context_mib", _CONTEXT_MIB) * MIB - session.gpu.context_bytes
            session = DrySession(session.gpu.name, total_bytes - outside, stop_after_steps=None, has_bar=False)
        began = time.perf_counter()
        report = session.run(trainer.run)
    return Prediction(trainer.steps, report, trainer.stage, time.perf_counter() - began)


def tracked_peak(case: Case) -> int | None:
    """The peak that PyTorch's MemTracker reports of one iteration; None where it cannot follow the case."""
    trainer = Trainer({**case, "steps": 1, "build": "meta"}, device="cpu")
    tracker = MemTracker()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            trainer.prepare()
            tracker.track_external(*(item for item in (trainer.model, trainer.optimizer) if item is not None))
            with tracker:
                trainer.train()
    except Exception:
        return None
    return max(sizes["Total"] for sizes in tracker.get_tracker_snapshot("peak").values())


def tracked_error(truth: Truth) -> str:
    """MemTracker's error in percent of the first step's peak, as text."""
    tracked = tracked_peak(truth.case)
    return "      none" if tracked is None else f"{100 * (tracked / truth.steps[0]['peak_allocated'] - 1):+10.1f}"


def row(truth: Truth, prediction: Prediction, tracked: str) -> tuple[str, float, float]:
    """A line of the table, and the errors of both peaks in percent."""
    errors = [100 * (prediction.peak(name) / truth.peak(name) - 1) for name in ("peak_allocated", "peak_reserved")]
    smallest = prediction.report.minimum_device_bytes if truth.smallest_mib else None
    least = f"{(smallest or 0) // MIB:7,}{truth.smallest_mib:8,}" if truth.smallest_mib else " " * 15
    text = (
        f"{truth.name:<28}{truth.peak('peak_allocated'):16,}{prediction.peak('peak_allocated'):16,}"
        f"{errors[0]:+9.3f}{errors[1]:+9.3f} {least}{prediction.seconds:7.1f} {tracked}"
    )
    return text, errors[0], errors[1]


def record(paths: list[str]) -> None:
    """Write tests/data/truth_transformers.json: what is needed of these results, one line a case."""
    found = [result for path in paths for result in json.loads(Path(path).read_text()) if "error" not in result]
    lines = [json.dumps(vars(Truth.of(result)), separators=(",", ":")) for result in found]
    RECORDED.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pattern", nargs="?", default="", help="regular expression on case names")
    parser.add_argument("--trackers", action="store_true", help="run MemTracker on the same cases")
    parser.add_argument("--record", nargs="+", metavar="FILE", help="results of truth.py to keep")
    options = parser.parse_args()
    if options.record:
        record(options.record)
        return
    print(f"{'case':<28}{'true allocated':>16}{'predicted':>16}{'error %':>9}{'reserved':>9}"
          f" {'least MiB':>15}{'s':>7}{' MemTracker' if options.trackers else ''}")  # fmt: skip
    errors: list[tuple[float, float]] = []
    for truth in truths():
        if re.search(options.pattern, truth.name):
            tracked = tracked_error(truth) if options.trackers else ""
            text, allocated, reserved = row(truth, predict(truth.case), tracked)
            print(text, flush=True)
            errors.append((abs(allocated), abs(reserved)))
    if not errors:
        parser.error(f"no case's name matches {options.pattern!r}")
    for name, found in zip(("allocated", "reserved"), zip(*errors, strict=True), strict=True):
        print(f"{name}: median {statistics.median(found):.4f} %, worst {max(found):.4f} %, "
              f"equal to the byte {sum(error == 0 for error in found)} of {len(found)}")  # fmt: skip


if __name__ == "__main__":
    main()
