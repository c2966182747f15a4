"""Memory as exact functions of a training function's arguments."""
