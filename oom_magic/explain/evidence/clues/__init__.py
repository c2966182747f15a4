"""Clues in a pasted text, before they are judged."""
