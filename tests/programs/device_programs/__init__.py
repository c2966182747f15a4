"""Training at sizes that users train at, for what a physical GPU held (data/record_device.py).

``PROGRAMS[name](on_step)`` runs a few steps and calls ``on_step()`` after each. Weights and data are random.
"""

from tests.programs.device_programs import architectures, by_values, language, methods, others, pictures  # noqa: F401  (they fill the table)
from tests.programs.device_programs.table import PROGRAMS

__all__ = ["PROGRAMS"]
