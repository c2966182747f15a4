"""``torch.compile`` in a dry run: Dynamo, AOTAutograd and Inductor really compile, and their code runs on the GPU.

The "GPU" is the pretend one: generated code allocates, frees and calls as it would on a real one, but its Triton
kernels do nothing.
"""
