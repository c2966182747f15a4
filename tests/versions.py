"""For which version of PyTorch a number holds that a test states."""

from __future__ import annotations

import pytest
import torch


def recorded_with(version: str) -> pytest.MarkDecorator:
    """Skip a test whose numbers were recorded with another PyTorch than the one here: kernels keep other workspaces."""
    return pytest.mark.skipif(
        not torch.__version__.startswith(version), reason=f"recorded with torch {version}, this is {torch.__version__}"
    )
