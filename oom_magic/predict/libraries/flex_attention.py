"""``flex_attention``: what it takes is decided in kernels that are generated for each ``score_mod``; it is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from oom_magic.language import _
from oom_magic.predict.isolation.patching import patched
from oom_magic.predict.libraries.adapters import Adapter, Run


@contextmanager
def _refused(module: ModuleType, run: Run) -> Iterator[None]:
    def flex_attention(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            _(
                "flex_attention is not followed in a dry run; use"
                ' torch.nn.functional.scaled_dot_product_attention (attn_implementation="sdpa" in transformers)'
                " for the rehearsal."
            )
        )

    with patched(module, {"flex_attention": flex_attention}):
        yield


ADAPTERS: dict[str, Adapter] = {"torch.nn.attention.flex_attention": _refused}
