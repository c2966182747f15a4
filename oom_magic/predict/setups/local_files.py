"""What is on this machine of a model's configuration, which goes before a preset's."""

from __future__ import annotations

from pathlib import Path


def local_configurations(hub_id: str | None) -> list[tuple[str, int, int]]:
    """Path, size and time of each file that decides which configuration a dry run finds.

    That is a folder of the same name, else what the Hugging Face cache holds, of the revision that it names.
    """
    if hub_id is None:
        return []
    files = [Path(hub_id, "config.json").absolute()]
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        pass
    else:
        own = Path(HF_HUB_CACHE, f"models--{hub_id.replace('/', '--')}")
        files += [*own.glob("snapshots/*/config.json"), *own.glob("refs/*")]
    stats = [(str(file), file.stat()) for file in sorted(files) if file.is_file()]
    return [(name, about.st_size, about.st_mtime_ns) for name, about in stats]
