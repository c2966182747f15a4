"""What somebody else's error is kept in: a log, a saved notebook, standard input, each read as text."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oom_magic.language import _

_MAX_BYTES = 4 * 2**20  # the end of a log holds the failure; more is not read
_MAX_PATH_LENGTH = 1024


def is_path(text: str) -> bool:
    """Whether a text is the name of an existing file rather than a message."""
    if not text.strip() or len(text) > _MAX_PATH_LENGTH or "\n" in text:
        return False
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def read_text(path: Path) -> str:
    """The code and the outputs of a saved notebook, or the end of any other file, decoded leniently.

    OSError where it cannot be read.
    """
    if path.suffix == ".ipynb":
        try:
            return "\n".join(_lines_until_failed(json.loads(path.read_bytes())["cells"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            pass  # not a notebook, or one cut short: whatever it holds, as it stands
    with path.open("rb") as file:
        if file.seekable():  # a pipe, such as the shell's <(command), cannot seek
            size = file.seek(0, 2)
            file.seek(max(0, size - _MAX_BYTES))
        return _decoded(file.read())


def read_standard_input() -> str:
    """The end of what is piped in, decoded leniently. OSError where standard input is closed."""
    if sys.stdin is None:
        raise OSError(_("standard input is closed"))
    return _decoded(sys.stdin.buffer.read())


def _decoded(read: bytes) -> str:
    return read[-_MAX_BYTES:].decode("utf-8", errors="replace")


def _lines_until_failed(cells: list[dict[str, Any]]) -> Iterator[str]:
    """Each cell's code, and what it printed and raised, up to the last one that raised something.

    What cells display (tables, pictures, reports) is left out: nobody's program said it. A notebook's texts are strings
    or lists of lines (nbformat, "multiline_string").
    """
    codes = [cell for cell in cells if cell["cell_type"] == "code"]
    failed = [number for number, cell in enumerate(codes) if any(map(_is_error, cell["outputs"]))]
    for cell in codes[: failed[-1] + 1 if failed else None]:
        yield "".join(cell["source"])
        for output in cell["outputs"]:
            if _is_error(output):
                yield "\n".join(output["traceback"])
            elif output["output_type"] == "stream":
                yield "".join(output["text"])


def _is_error(output: dict[str, Any]) -> bool:
    return bool(output["output_type"] == "error")
