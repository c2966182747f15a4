"""What is noted before a dry run and put back after it, besides tensors: settings, and the objects of the user."""
