"""Which function describes which class of results."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from oom_magic.views.blocks import Description


@singledispatch
def describe_registered(result: Any) -> Description:
    """The Description of a result whose view is loaded. Raises TypeError for a class without one."""
    raise TypeError(f"no view is registered for {type(result).__name__}; add one in oom_magic/views.")


register = describe_registered.register


@register
def _(description: Description) -> Description:
    return description
