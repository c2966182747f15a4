"""What a pasted text tells, before anyone judges it."""
