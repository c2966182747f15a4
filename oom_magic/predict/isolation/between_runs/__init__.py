"""What a run leaves for the next run of its session."""
