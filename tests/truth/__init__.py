"""Dry runs beside the truth: what PyTorch's CUDA build counted, and what others measured on their cards."""
