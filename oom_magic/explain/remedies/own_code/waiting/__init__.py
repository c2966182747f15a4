"""Data that wait on the device for their batch, left in the host's memory."""
