"""Who uses this package with a type checker sees its types: ``py.typed`` is there and the public names are typed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
from pathlib import Path

import oom_magic as om

def train(batch_size: int) -> None: ...

report: om.MemoryReport = om.dry_run(train, 4, gpu="RTX 3060")
peak: int = report.peak_allocated_bytes
least: int | None = report.minimum_device_bytes
setup = om.TrainingSetup("gpt2", microbatch_size=2).replace(seq_len=128)
sizes: om.Sizes = setup.sizes(seq_len=(128, 512))
diagnosis: om.Diagnosis = om.explain("CUDA out of memory")
shown: str = str(om.compare({"now": report}))
written: str = report.to_json()
report.to_json(Path("report.json"))
reveal_type(om.plot(report))
"""
WRONG = """
peak: str = report.peak_allocated_bytes
om.dry_run(train, gpu=5)
"""


def checked(tmp_path: Path, program: str) -> str:
    file = tmp_path / "consumer.py"
    file.write_text(program)
    options = ["--strict", "--no-error-summary", "--follow-imports=silent", f"--cache-dir={tmp_path}"]
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*,transformers.*,matplotlib.*]\nfollow_imports = skip\n")
    run = subprocess.run(
        [sys.executable, "-m", "mypy", f"--config-file={tmp_path / 'mypy.ini'}", *options, str(file)],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert not run.stderr, run.stderr
    return run.stdout


@pytest.mark.slow
def test_a_typed_program_is_checked(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    found = checked(tmp_path, PROGRAM + WRONG).splitlines()
    assert [line.split(": ")[1] for line in found] == ["note", "error", "error"], found
    assert "oom_magic.notebook.figures.Plot" in found[0]
