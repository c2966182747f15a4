"""How large the workspaces of matrix products are: by card, version of PyTorch and environment."""

from __future__ import annotations

import pytest

from oom_magic.memory.workspaces import Workspaces

SMALL, LARGE, LT = 8320 * 1024, 2**25, 2**20


@pytest.mark.parametrize(
    ("version", "capability", "expected"),
    [
        ("2.13.0", (8, 6), SMALL),
        ("2.6.0", (9, 0), LARGE),
        ("2.6.0", (10, 0), SMALL),
        ("2.13.0+cu130", (10, 0), LARGE),
        ("2.13.0", (12, 0), LARGE),
        ("2.13.0", (11, 0), SMALL),
        ("2.15.0", (11, 0), LARGE),
    ],
)
def test_the_default_is_by_generation_and_version(version, capability, expected, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert Workspaces.here(version).cublas_bytes(capability) == expected


@pytest.mark.parametrize(
    ("setting", "expected"), [(":4096:8", LARGE), (":16:8:4096:2", SMALL), (":16:8", 2**17), ("nonsense", SMALL)]
)
def test_the_environment_decides(setting, expected, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", setting)
    assert Workspaces.here("2.13.0").cublas_bytes((8, 6)) == expected


@pytest.mark.parametrize(
    ("version", "wish", "unified"),
    [((2, 7), "1", False), ((2, 11), "", False), ((2, 11), "1", True), ((2, 13), "", True), ((2, 13), "0", False)],
)
def test_cublas_lt_shares_by_version_and_wish(version, wish, unified):
    environment = {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": wish, "CUBLASLT_WORKSPACE_SIZE": "4096"}
    workspaces = Workspaces(version, environment)
    assert workspaces.is_unified is unified
    assert workspaces.cublas_lt_bytes() == 4 * LT
    kept = {SMALL} if unified or version < (2, 9) else {SMALL, 4 * LT}
    assert workspaces.kept_bytes((8, 0)) == kept


def test_nothing_stays_in_the_newest():
    assert Workspaces((2, 15), {}).kept_bytes((9, 0)) == frozenset()
