"""The pretend GPU: tensors without data, CUDA's operators in place of the CPU's, and what torch.cuda answers."""
