"""Libraries for training inside a dry run: one file for each kind of operation.

A library that is not imported costs nothing: a module is changed once it is imported, before the dry run or during it,
and restored when the run ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from oom_magic.predict.distributed import launchers, process_groups
from oom_magic.predict.fake_cuda.fake_gpu import FakeGPU
from oom_magic.predict.isolation.files import saving
from oom_magic.predict.isolation.files.effects import Isolation
from oom_magic.predict.libraries import (
    attention,
    bitsandbytes_ops,
    function_transforms,
    hugging_face,
    torchvision_ops,
    trainers,
    triton_kernels,
    written_files,
)
from oom_magic.predict.libraries.adapters import Run, adapted

_KINDS = (
    hugging_face,
    bitsandbytes_ops,
    torchvision_ops,
    trainers,
    triton_kernels,
    written_files,
    saving,
    attention,
    function_transforms,
    process_groups,
    launchers,
)


@contextmanager
def libraries_followed(
    gpu: FakeGPU, assume: Callable[[str], None], isolation: Isolation, note_calls_left: Callable[[int], None]
) -> Iterator[None]:
    """In the block, libraries use the pretend GPU."""
    run = Run(gpu, assume, isolation, note_calls_left)
    with bitsandbytes_ops.complaints_muted(), adapted([kind.ADAPTERS for kind in _KINDS], run):
        yield
