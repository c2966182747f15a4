"""How long ``%load_ext oom_magic`` takes beyond IPython's own start: ``python tests/benchmarks/bench_loading.py``."""

from __future__ import annotations

import statistics
import subprocess
import sys

CODE = """
import time
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
start = time.perf_counter()
shell.run_line_magic("load_ext", "oom_magic")
print(time.perf_counter() - start)
"""


def main() -> None:
    """Print the median of nine fresh interpreters, in milliseconds."""
    runs = [
        float(subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stdout)
        for _ in range(9)
    ]
    print(f"%load_ext oom_magic: {statistics.median(runs) * 1000:.0f} ms (median of {len(runs)}; goal 100)")


if __name__ == "__main__":
    main()
