"""The sizes of a run: how large they are, what sets them in the user's code, and the largest that fits."""
