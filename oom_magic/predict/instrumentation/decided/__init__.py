"""What code decided for the CPU for want of a GPU, decided again inside a dry run."""
