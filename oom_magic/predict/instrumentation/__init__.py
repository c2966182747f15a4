"""Following the user's code without changing it: where it is, and what its tensors are for."""
