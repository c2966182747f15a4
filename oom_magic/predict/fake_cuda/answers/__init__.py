"""What PyTorch's modules for CUDA answer: counters and statistics, devices, types from before dtypes."""
