"""Whose file it is, and how lines are named."""

from __future__ import annotations

import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

import oom_magic
from oom_magic.user_code import is_cell, is_own_file, is_users_file

TORCH = Path(find_spec("torch").origin).parent  # type: ignore[union-attr,arg-type]
PACKAGE = Path(oom_magic.__file__).parent


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("/tmp/ipykernel_42/99.py", True),
        ("<ipython-input-3-abc>", True),
        ("/home/me/train.py", True),
        ("/home/me/oom_magic/train.py", True),
        (f"{PACKAGE}_demo.py", True),
        ("/cache/qd/cqdjimmeeoqjcscuwszgvcwjtpjglf74537yei6w32ypo4neqvzt.py", False),  # Inductor's
        ("<frozen runpy>", False),
        ("<string>", False),
        (f"{TORCH}/nn/functional.py", False),
        (f"{sysconfig.get_path('stdlib')}/contextlib.py", False),
        (f"{PACKAGE}/notebook/magics.py", False),
    ],
)
def test_whose_file_it_is(file: str, expected: bool) -> None:
    assert is_users_file(file) is expected


def test_which_code_was_typed_into_a_cell() -> None:
    assert is_cell("/tmp/ipykernel_42/99.py") and is_cell("<ipython-input-3-abc>")
    assert not is_cell("/home/me/ipykernel_notes/train.py")


def test_a_users_file_named_like_the_package_is_the_users() -> None:
    assert is_own_file(f"{PACKAGE}/session.py")
    assert not is_own_file(f"{PACKAGE}_demo.py")
    assert not is_own_file("/home/me/oom_magic/train.py")


def test_packages_in_a_folder_of_ones_own_are_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``pip install --target`` beside scripts, as on a drive: pandas' frames kept what a dry run wrote to them."""
    (tmp_path / "frames-1.0.dist-info").mkdir()
    (tmp_path / "frames-1.0.dist-info" / "METADATA").write_text("Name: frames\nVersion: 1.0\n")
    (tmp_path / "frames-1.0.dist-info" / "RECORD").write_text("frames/__init__.py,,\n../../bin/frames,,\n")
    (tmp_path / "frames").mkdir()
    (tmp_path / "frames" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_users_file(str(tmp_path / "frames" / "__init__.py"))
    assert is_users_file(str(tmp_path / "mine.py")) and is_users_file(str(tmp_path.parent / "other.py"))
