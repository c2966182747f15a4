"""What could be different about a training run, to be rehearsed: one file for each thing that is changed."""
