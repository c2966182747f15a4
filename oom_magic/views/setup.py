"""How a TrainingSetup looks: its settings in a line."""

from __future__ import annotations

from oom_magic.predict.setups.setup import TrainingSetup
from oom_magic.views.blocks import Description
from oom_magic.views.registry import register


@register
def describe_setup(setup: TrainingSetup) -> Description:
    """The settings in one line."""
    return Description(setup.summary)
