"""What ../shared/fakecuda's cuDNN answers for recurrent layers: estimates of its own, as a real one is not documented.

Truth that was recorded over it is compared with these in place of what an H200 answered (tests/data/device_h200.json).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from oom_magic.predict.kernels import recurrent

_GATES = {recurrent.RELU: 1, recurrent.TANH: 1, recurrent.LSTM: 4, recurrent.GRU: 3}


def answer_as_the_stub(patch: pytest.MonkeyPatch) -> None:
    """Gates and hidden state of each step; random numbers of 16 bytes a thread."""
    patch.setattr(recurrent, "STATE_BYTES", 16)
    patch.setattr(recurrent, "workspace_bytes", lambda call: call.step_bytes * (_GATES[call.mode] + 1))
    patch.setattr(recurrent, "reserve_bytes", lambda call: call.step_bytes * call.num_layers * (_GATES[call.mode] + 2))


@pytest.fixture(scope="module")
def stub_of_cudnn() -> Iterator[None]:
    """For the tests of a file."""
    with pytest.MonkeyPatch.context() as patch:
        answer_as_the_stub(patch)
        yield
