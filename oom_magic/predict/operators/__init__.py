"""CUDA's operators in place of the CPU's: which kernel runs, of what it is composed, what values are known."""
