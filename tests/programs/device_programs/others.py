"""Other layers, operators and libraries."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.programs.device_programs.table import BF16, CUDA, FP16, OnStep, program, tokens, train


def recurrent(on_step: OnStep, kind: str, amp: torch.dtype | None, **how: Any) -> None:
    model = getattr(nn, kind)(512, 1024, num_layers=3, batch_first=True, **how).to(CUDA)
    x = torch.randn(32, 200, 512, device=CUDA)
    train(model, on_step, lambda: model(x)[0].float().pow(2).mean(), amp)


program(recurrent, "lstm", kind="LSTM", amp=None)
program(recurrent, "lstm both ways with dropout", kind="LSTM", amp=None, bidirectional=True, dropout=0.2)
program(recurrent, "gru float16", kind="GRU", amp=FP16)
program(recurrent, "rnn", kind="RNN", amp=None)


@program
def transformer(on_step: OnStep) -> None:
    """nn.Transformer with masks."""
    model = nn.Transformer(512, 8, 6, 6, 2048, batch_first=True).to(CUDA)
    hidden = torch.arange(256, device=CUDA)[None] >= torch.randint(100, 256, (16, 1), device=CUDA)
    ahead = nn.Transformer.generate_square_subsequent_mask(256, device=CUDA)

    def loss() -> torch.Tensor:
        x = torch.randn(16, 256, 512, device=CUDA)
        found: torch.Tensor = model(x, x, tgt_mask=ahead, src_key_padding_mask=hidden, tgt_is_causal=True)
        return found.pow(2).mean()

    train(model, on_step, loss)


@program
def evaluated(on_step: OnStep) -> None:
    """A validation after each epoch, under inference_mode and autocast."""
    layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True)
    model = nn.TransformerEncoder(layer, 6).to(CUDA)
    x = torch.randn(64, 256, 768, device=CUDA)
    train(model, on_step, lambda: model(x[:16]).float().pow(2).mean(), BF16)
    model.eval()
    with torch.inference_mode(), torch.autocast(CUDA, BF16):
        model(x)
    on_step()


@program
def sparse_rows(on_step: OnStep) -> None:
    """Embedding with sparse gradients, and SparseAdam."""
    model = nn.EmbeddingBag(500_000, 128, sparse=True).to(CUDA)
    made = torch.optim.SparseAdam(model.parameters())
    train(model, on_step, lambda: model(tokens(500_000, 4096, 16)).pow(2).mean(), optimizer=made)


@program
def sparse_products(on_step: OnStep) -> None:
    """A graph convolution by torch.sparse.mm."""
    weight = nn.Linear(256, 256).to(CUDA)
    places = torch.randint(0, 20_000, (2, 400_000), device=CUDA)
    matrix = torch.sparse_coo_tensor(places, torch.ones(400_000, device=CUDA), (20_000, 20_000)).coalesce()
    x = torch.randn(20_000, 256, device=CUDA)
    train(weight, on_step, lambda: torch.sparse.mm(matrix, F.relu(weight(torch.sparse.mm(matrix, x)))).pow(2).mean())


@program
def masked(on_step: OnStep) -> None:
    """Rows are chosen by a mask of random values."""
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).to(CUDA)

    def loss() -> torch.Tensor:
        x = torch.randn(32_768, 512, device=CUDA)
        chosen = x[torch.rand(32_768, device=CUDA) < 0.15]
        return model(chosen).pow(2).mean()

    train(model, on_step, loss)


@program
def penalized(on_step: OnStep) -> None:
    """WGAN-GP's gradient penalty: a double backward."""
    judge = nn.Sequential(nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(64, 128, 4, 2, 1), nn.LeakyReLU(0.2),
                          nn.Flatten(), nn.Linear(128 * 16 * 16, 1)).to(CUDA)  # fmt: skip

    def loss() -> torch.Tensor:
        x = torch.randn(64, 3, 64, 64, device=CUDA, requires_grad=True)
        score = judge(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.mean() + 10 * (slope.flatten(1).norm(dim=1) - 1).pow(2).mean()

    train(judge, on_step, loss)


@program
def prefetched(on_step: OnStep) -> None:
    """The next batch is copied on a stream of its own."""
    model = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096)).to(CUDA)
    stream = torch.cuda.Stream()
    batches = [torch.randn(4096, 4096).pin_memory() for _ in range(2)]
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.cuda.stream(stream):
        coming = batches[0].to(CUDA, non_blocking=True)
    for number in range(4):
        torch.cuda.current_stream().wait_stream(stream)
        x = coming
        x.record_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            coming = batches[number % 2].to(CUDA, non_blocking=True)
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        on_step()


@program
def captured(on_step: OnStep) -> None:
    """A training step in a CUDA graph, as PyTorch's notes write it."""
    model = nn.Sequential(nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 2048)).to(CUDA)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(1024, 2048, device=CUDA)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            model(x).pow(2).mean().backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        model(x).pow(2).mean().backward()
        optimizer.step()
    for _ in range(2):
        graph.replay()
        on_step()


@program
def lightning(on_step: OnStep) -> None:
    import lightning

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            found: torch.Tensor = self.net(batch[0])
            return found.pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

        def on_train_batch_end(self, *_: Any) -> None:
            on_step()

    data = torch.utils.data.TensorDataset(torch.randn(4 * 2048, 1024))
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(accelerator="gpu", devices=1, precision="bf16-mixed", max_steps=4, **quiet)
    trainer.fit(Net(), torch.utils.data.DataLoader(data, 2048))


@program
def graph_net(on_step: OnStep) -> None:
    """torch_geometric's GCN on one large graph."""
    from torch_geometric.nn import GCNConv

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = GCNConv(128, 256), GCNConv(256, 40)

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.second(F.relu(self.first(x, edges)), edges)
            return found

    model = Net().to(CUDA)
    x, edges = torch.randn(50_000, 128, device=CUDA), torch.randint(0, 50_000, (2, 600_000), device=CUDA)
    train(model, on_step, lambda: F.cross_entropy(model(x, edges), tokens(40, 50_000)))


@program
def gaussian_process(on_step: OnStep) -> None:
    """gpytorch's exact regression: a Cholesky factor."""
    import gpytorch

    class Model(gpytorch.models.ExactGP):
        def __init__(self, x: torch.Tensor, y: torch.Tensor, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: torch.Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    x, y = torch.rand(700, 4, device=CUDA), torch.rand(700, device=CUDA)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().to(CUDA)
    model = Model(x, y, likelihood).to(CUDA).train()
    likelihood.train()
    marginal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    train(model, on_step, lambda: -marginal(model(x), y))


@program
def losses_of_distances(on_step: OnStep) -> None:
    """Contrastive learning: all pairs of a batch."""
    model = nn.Sequential(nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 256)).to(CUDA)

    def loss() -> torch.Tensor:
        a, b = (F.normalize(model(torch.randn(4096, 2048, device=CUDA))) for _ in range(2))
        return F.cross_entropy(a @ b.T / 0.07, torch.arange(4096, device=CUDA)) + torch.cdist(a, b).mean()

    train(model, on_step, loss, BF16)


@program
def linear_algebra(on_step: OnStep) -> None:
    """What cuSOLVER and cuFFT take."""
    x = torch.randn(8, 512, 512, device=CUDA, requires_grad=True)
    matrix = nn.Parameter(torch.randn(8, 512, 512, device=CUDA))

    def loss() -> torch.Tensor:
        positive = matrix @ matrix.mT + 512 * torch.eye(512, device=CUDA)
        solved = torch.cholesky_solve(x, torch.linalg.cholesky(positive))
        return solved.pow(2).mean() + torch.linalg.solve(positive, x).mean() + torch.fft.rfft2(x).abs().mean()

    train(nn.ParameterList([matrix]), on_step, loss, optimizer=torch.optim.SGD([matrix], lr=0.1))
