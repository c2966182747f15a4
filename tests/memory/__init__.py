"""The allocator, and records of memory."""
