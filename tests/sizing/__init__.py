"""Sizes as functions of their arguments: set-ups, cards, models, what is kept on disk."""
