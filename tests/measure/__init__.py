"""Measuring a device, and who holds its memory."""
