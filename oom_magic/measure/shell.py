"""The IPython shell that runs us, if one does. Nothing is imported to find out."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from typing import Any


def running_shell() -> Any:
    """The ``InteractiveShell`` of this process, or None outside of IPython."""
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()


def users_names(depth: int) -> MutableMapping[str, Any]:
    """The notebook's variables or, outside of one, the globals of the function ``depth`` calls above."""
    shell = running_shell()
    names: MutableMapping[str, Any] = sys._getframe(depth + 1).f_globals if shell is None else shell.user_ns
    return names
