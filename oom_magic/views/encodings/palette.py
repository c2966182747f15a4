"""One colour per hue, for light and for dark pages.

The categories keep torch.profiler's colours (parameter green, gradient blue, optimizer state gold,
activation red, temporary purple), moved to the Okabe-Ito set, which colour-blind readers can tell apart.
"""

from __future__ import annotations

LIGHT = {
    "parameter": "#009e73",
    "gradient": "#0072b2",
    "optimizer_state": "#e69f00",
    "activation": "#d55e00",
    "input": "#37404d",
    "temporary": "#9a7bd0",
    "workspace": "#56b4e9",
    "before": "#87929f",
    "cached": "#c3cbd5",
    "outside": "#a58b6f",
    "other": "#6d5a46",
    "free": "transparent",
    "fg": "#1b1f24",
    "quiet": "#5b636d",
    "line": "#d8dce1",
    "well": "#eef0f2",
    "code": "#f6f7f8",
    "paper": "#ffffff",
    "good": "#0b6e4f",
    "warning": "#8a5a00",
    "bad": "#b3261e",
}
DARK = {
    "parameter": "#2fc79b",
    "gradient": "#5aa9e6",
    "optimizer_state": "#f3b83b",
    "activation": "#f0783c",
    "input": "#dfe4ea",
    "temporary": "#a98de0",
    "workspace": "#8fd3fa",
    "before": "#7f8b99",
    "cached": "#5a6470",
    "outside": "#b59b7f",
    "other": "#8d7861",
    "free": "transparent",
    "fg": "#e8eaed",
    "quiet": "#a3abb5",
    "line": "#454b54",
    "well": "#2b3036",
    "code": "#22262b",
    "paper": "#111418",
    "good": "#5fd0a5",
    "warning": "#f0b849",
    "bad": "#ff8a80",
}
# Where Jupyter's theme has its own colour, it wins.
JUPYTER = {
    "fg": "--jp-content-font-color0",
    "quiet": "--jp-content-font-color2",
    "line": "--jp-border-color2",
    "well": "--jp-layout-color2",
    "code": "--jp-cell-editor-background",
    "paper": "--jp-layout-color0",
}


def css_variables(colours: dict[str, str]) -> str:
    """The colours as declarations of ``--oom-...`` variables."""
    return ";".join(
        f"--oom-{hue}:var({JUPYTER[hue]},{colour})" if hue in JUPYTER else f"--oom-{hue}:{colour}"
        for hue, colour in colours.items()
    )
