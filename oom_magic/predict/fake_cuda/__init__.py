"""The pretend GPU: tensors without data, CUDA's operators in place of the CPU's, and torch.cuda's functions."""
