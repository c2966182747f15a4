"""What a real GPU did: torch's counters and memory history, the driver, and who still holds memory."""
