"""Files, databases, programs and connections: a dry run has no effect on them."""
