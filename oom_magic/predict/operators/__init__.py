"""CUDA's operators in place of the CPU's: which kernel runs, which operators it is composed of, and which values are
known."""

from oom_magic.predict import torch_private

torch_private.check()  # before the files import these names: one that is missing is named in a sentence
