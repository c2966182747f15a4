"""What the user's objects hold besides tensors: a dry run leaves it as it was."""
