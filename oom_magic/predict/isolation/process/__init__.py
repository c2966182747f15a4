"""What is global to the process: a dry run leaves it as it was."""
