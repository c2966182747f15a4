"""Following the user's code from outside: where it is, what its tensors are for, and leaving all of it as it was."""
