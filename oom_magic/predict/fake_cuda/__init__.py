"""The pretend GPU: tensors without data, CUDA's operators in place of the CPU's, and torch.cuda's functions."""

from oom_magic.predict import torch_private

torch_private.check()  # before the files import these names: one that is missing is named in a sentence
