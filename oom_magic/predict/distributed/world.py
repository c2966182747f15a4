"""The process groups that ``torch.distributed`` knows, set aside and restored."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

_TABLES = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag")


@dataclass(frozen=True)
class World:
    """All process groups that exist at a moment, to be set aside and restored."""

    default: Any
    count: int
    tables: dict[str, dict[Any, Any]]

    @classmethod
    def current(cls, module: ModuleType) -> World:
        """That of ``torch.distributed.distributed_c10d``."""
        tables = {name: dict(getattr(module, name)) for name in _TABLES}
        return cls(module._world.default_pg, module._world.group_count, tables)

    def enter(self, module: ModuleType) -> None:
        """Make these the existing groups."""
        for name in list(module._pg_names.values()):
            module._unregister_process_group(name)
        for name, contents in self.tables.items():
            table = getattr(module, name)
            table.clear()
            table.update(contents)
        for group, name in self.tables["_pg_names"].items():
            module._register_process_group(name, group)
        module._update_default_pg(self.default)
        module._world.group_count = self.count


NOBODY = World(None, 0, {name: {} for name in _TABLES})
