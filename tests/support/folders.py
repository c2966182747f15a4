"""Where the tests find what they read."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent  # the project
DATA = TESTS / "data"  # recorded truth
SHARED = ROOT.parent / "shared"  # more of it, where there is any; what needs it is skipped elsewhere
