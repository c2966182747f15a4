"""Nothing of the user's is touched by a dry run: files, threads, settings, objects."""
