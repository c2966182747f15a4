"""The values of tensors on the pretend GPU, as far as they are known."""
