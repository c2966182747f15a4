"""What a live failure shows beyond its message: frames, tensors, what grew, who holds memory."""
