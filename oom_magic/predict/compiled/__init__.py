"""``torch.compile`` in a dry run: Dynamo, AOTAutograd and Inductor really compile, and their code runs on the GPU.

Here the "GPU" is the pretend one: what Inductor generates allocates, frees and calls as it would; its Triton kernels
do nothing.
"""


class CudaGraphsError(NotImplementedError):
    """Compiled code that replays CUDA graphs: neither it nor the eager code bounds what their pools take."""
