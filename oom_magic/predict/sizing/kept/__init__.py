"""Sizes that were found before, on disk, and what they are known by."""
