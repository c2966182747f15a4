"""Small programs for "cuda" with sparse tensors, graphs captured by hand and memory shared with other libraries."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

CUDA = "cuda"


def sparse_gradients() -> None:
    """Rows of an embedding that were used, subtracted where they lie."""
    model = nn.Embedding(50000, 256, sparse=True).to(CUDA)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(torch.randint(0, 50000, (64, 128)).to(CUDA)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def sparse_bags() -> None:
    """Gradients whose parts are contiguous are stored without a copy, of bags and of single rows."""
    bags, head = nn.EmbeddingBag(50000, 64, sparse=True).to(CUDA), nn.Linear(64, 4).to(CUDA)
    optimizer = torch.optim.SGD([*bags.parameters(), *head.parameters()], 0.1)
    rows = nn.Embedding(20000, 64, sparse=True).to(CUDA)
    rows(torch.randint(0, 20000, (64 * 80,)).to(CUDA)).square().sum().backward()
    for _ in range(3):
        tokens, begins = torch.randint(0, 50000, (64 * 80,)).to(CUDA), (torch.arange(64) * 80).to(CUDA)
        head(bags(tokens, begins)).logsumexp(1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def sparse_buffer() -> None:
    """A mask kept sparse, as whisper keeps its alignment heads."""

    class Decoder(nn.Module):
        heads: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(512, 512)
            mask = torch.zeros(6, 8, dtype=torch.bool)
            mask[3:] = True
            self.register_buffer("heads", mask.to_sparse(), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layer(x)
            assert self.heads.is_sparse and self.heads.is_cuda
            return torch.stack([x[:, head] for _, head in self.heads.indices().T.tolist()])

    Decoder().to(CUDA)(torch.randn(64, 512, device=CUDA)).sum().backward()


def captured_training() -> None:
    """Warm-up on a side stream, then a whole step captured and replayed."""
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).to(CUDA)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(512, 1024, device=CUDA)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad()
    with torch.cuda.graph(graph):
        model(x).sum().backward()
        optimizer.step()
    for _ in range(3):
        x.copy_(torch.randn(512, 1024))
        graph.replay()


def captured_inference() -> None:
    """Two graphs that share a pool; what they keep is nobody else's."""
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).to(CUDA)
    x = torch.randn(512, 1024, device=CUDA)
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.no_grad():
        model(x)
        with torch.cuda.graph(first):
            _ = model(x)
        with torch.cuda.graph(second, pool=first.pool()):
            _ = model(x)
    first.replay()
    torch.cuda.empty_cache()
    torch.randn(2048, 2048, device=CUDA)


def shared() -> None:
    """The same memory under another name."""
    x = torch.randn(1024, 1024, device=CUDA)
    y = torch.from_dlpack(x)
    z = from_dlpack(torch.utils.dlpack.to_dlpack(x))
    assert y.data_ptr() == x.data_ptr() == z.data_ptr() and y.is_cuda
    del x
    y + z


SPARSE_AND_GRAPHS: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (sparse_gradients, sparse_bags, sparse_buffer, captured_training, captured_inference, shared)
}
