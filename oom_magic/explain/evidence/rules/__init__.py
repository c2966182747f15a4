"""What speaks for which cause: a file for each place where it is found."""
