"""CUDA's operators in place of the CPU's: which kernel runs, which operators it is composed of, and which values are
known."""
