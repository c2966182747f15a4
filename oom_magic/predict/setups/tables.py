"""The tables of cards and models beside this file, which are data and no code."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@cache
def read_table(name: str) -> dict[str, Any]:
    """The TOML file of this name as plain data, read once: it is not to be changed."""
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
