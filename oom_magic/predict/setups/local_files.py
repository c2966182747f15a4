"""What the local Hugging Face cache has of a model, which goes before a preset's configuration."""

from __future__ import annotations

import os
from pathlib import Path


def local_configurations(hub_id: str | None) -> list[tuple[str, int, int]]:
    """The cached ``config.json`` of a model: path, size and time of each."""
    if hub_id is None:
        return []
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()
    files = sorted(hub.glob(f"models--{hub_id.replace('/', '--')}/snapshots/*/config.json"))
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
