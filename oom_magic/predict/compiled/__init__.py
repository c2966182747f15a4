"""``torch.compile`` in a dry run: Dynamo, AOTAutograd and Inductor really compile, and their code runs on the GPU.

The "GPU" is the pretend one: generated code allocates, frees and calls as it would on a real one, but its Triton
kernels do nothing.
"""


class CudaGraphsError(NotImplementedError):
    """Compiled code that replays CUDA graphs: neither the compiled nor the eager code tells how much their pools
    take."""
