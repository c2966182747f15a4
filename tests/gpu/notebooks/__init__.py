"""Notebooks that run out of memory, by name: each module adds its own to ``NOTEBOOKS``; those for physical GPUs stand apart."""

from tests.gpu.notebooks import (
    compiled_notebooks,
    course_notebooks,
    failing_notebooks,
    further_notebooks,
    habit_notebooks,
    hidden_notebooks,
    library_notebooks,
    longer_notebooks,
    recomputed_notebooks,
    seldom_notebooks,
    settings_notebooks,
    summing_notebooks,
    unlike_notebooks,
    waiting_notebooks,
)
from tests.gpu.notebooks.failing_notebooks import NOTEBOOKS

__all__ = [
    "NOTEBOOKS",
    "compiled_notebooks",
    "course_notebooks",
    "failing_notebooks",
    "further_notebooks",
    "habit_notebooks",
    "hidden_notebooks",
    "library_notebooks",
    "longer_notebooks",
    "recomputed_notebooks",
    "seldom_notebooks",
    "settings_notebooks",
    "summing_notebooks",
    "unlike_notebooks",
    "waiting_notebooks",
]
