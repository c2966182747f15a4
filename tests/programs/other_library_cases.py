"""Training code for "cuda" as users of other libraries write it: the extra ``libraries``.

test_other_libraries.py rehearses it, data/record_other_libraries.py measures it. Each case gets an empty folder; how often
it steps does not depend on values that only a GPU knows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

STEPS = 4


def steps(optimizer: torch.optim.Optimizer, loss_of: Callable[[], torch.Tensor]) -> None:
    """Four steps of a plain loop."""
    for _ in range(STEPS):
        loss_of().backward()
        optimizer.step()
        optimizer.zero_grad()


def timm_vision_transformer(folder: Path) -> None:
    import timm
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2

    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, drop_path_rate=0.1).cuda()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    mixup, criterion, scaler = Mixup(mixup_alpha=0.2, num_classes=10), SoftTargetCrossEntropy(), torch.amp.GradScaler()
    for _ in range(STEPS):
        images, targets = mixup(torch.rand(16, 3, 224, 224, device="cuda"), torch.randint(0, 10, (16,), device="cuda"))
        with torch.autocast("cuda", torch.float16):
            loss = criterion(model(images), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def timm_convolutions(folder: Path) -> None:
    import timm
    from timm.utils import ModelEmaV3

    model = timm.create_model("convnext_atto", num_classes=10).cuda().to(memory_format=torch.channels_last)
    average = ModelEmaV3(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        images = torch.rand(8, 3, 160, 160, device="cuda").to(memory_format=torch.channels_last)
        F.cross_entropy(model(images), torch.randint(0, 10, (8,), device="cuda")).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update(model)


def diffusers_unet(folder: Path) -> None:
    from diffusers import DDPMScheduler, UNet2DModel
    from diffusers.training_utils import EMAModel

    model = UNet2DModel(
        sample_size=32, block_out_channels=(64, 128), layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).cuda()  # fmt: skip
    average = EMAModel(model.parameters())
    scheduler = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        clean = torch.rand(8, 3, 32, 32).to("cuda")
        noise = torch.randn_like(clean)
        times = torch.randint(0, 1000, (8,), device="cuda").long()
        loss = F.mse_loss(model(scheduler.add_noise(clean, noise, times), times, return_dict=False)[0], noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.step(model.parameters())


def diffusers_conditional(folder: Path) -> None:
    from diffusers import AutoencoderKL, UNet2DConditionModel

    encoder = AutoencoderKL(block_out_channels=(32, 64), down_block_types=("DownEncoderBlock2D",) * 2,
                            up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4).cuda().half()  # fmt: skip
    encoder.requires_grad_(False)
    model = UNet2DConditionModel(
        sample_size=16, block_out_channels=(64, 128), layers_per_block=1, cross_attention_dim=64, attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ).cuda()  # fmt: skip
    model.enable_gradient_checkpointing()
    optimizer = torch.optim.AdamW(model.parameters())

    def loss_of() -> torch.Tensor:
        with torch.no_grad():
            latents = encoder.encode(torch.rand(4, 3, 32, 32, device="cuda").half()).latent_dist.sample()
        with torch.autocast("cuda", torch.float16):
            text = torch.rand(4, 77, 64, device="cuda")
            found = model(latents, torch.randint(0, 1000, (4,), device="cuda"), encoder_hidden_states=text).sample
        return F.mse_loss(found.float(), torch.randn_like(latents).float())

    steps(optimizer, loss_of)


def torchvision_resnet(folder: Path) -> None:
    from torchvision.models import resnet18

    model = resnet18(num_classes=10).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    steps(optimizer, lambda: F.cross_entropy(model(torch.rand(8, 3, 128, 128, device="cuda")),
                                             torch.randint(0, 10, (8,), device="cuda")))  # fmt: skip


def torchvision_operators(folder: Path) -> None:
    from torchvision.ops import RoIAlign, StochasticDepth, deform_conv2d, roi_pool, sigmoid_focal_loss

    trunk = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), StochasticDepth(0.2, "row")).cuda()
    offsets, weight = nn.Conv2d(32, 18, 3, padding=1).cuda(), nn.Parameter(torch.rand(32, 32, 3, 3, device="cuda"))
    optimizer = torch.optim.AdamW([*trunk.parameters(), *offsets.parameters(), weight])
    align = RoIAlign(7, 1.0, sampling_ratio=2)
    boxes = [torch.tensor([[0.0, 0.0, 20.0, 20.0], [8.0, 8.0, 30.0, 40.0]], device="cuda") for _ in range(4)]

    def loss_of() -> torch.Tensor:
        features = trunk(torch.rand(4, 3, 64, 64, device="cuda"))
        features = deform_conv2d(features, offsets(features), weight, padding=(1, 1))
        regions = align(features, boxes) + roi_pool(features, boxes, 7)
        return sigmoid_focal_loss(regions, torch.ones_like(regions), reduction="mean")

    steps(optimizer, loss_of)


def torchmetrics_in_a_loop(folder: Path) -> None:
    from torchmetrics import MeanMetric, MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 20)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    metrics = MetricCollection([MulticlassAccuracy(20, validate_args=False),
                                MulticlassConfusionMatrix(20, validate_args=False)]).to("cuda")  # fmt: skip
    mean = MeanMetric().to("cuda")
    for _ in range(STEPS):
        inputs, targets = torch.rand(512, 256, device="cuda"), torch.randint(0, 20, (512,), device="cuda")
        scores = model(inputs)
        loss = F.cross_entropy(scores, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        metrics.update(scores.detach(), targets)
        mean.update(loss.detach())
    metrics.compute(), mean.compute()


def lightning_trainer(folder: Path) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = F.mse_loss(self.net(batch[0]), batch[0])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("validation", F.mse_loss(self.net(batch[0]), batch[0]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    data = DataLoader(TensorDataset(torch.rand(64 * STEPS, 512)), batch_size=64)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="gpu", devices=1, precision="bf16-mixed", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(Module(), data, data)


def graph_networks(folder: Path) -> None:
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import GATv2Conv, GCNConv, global_mean_pool

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (
                GCNConv(64, 128, add_self_loops=False),
                GATv2Conv(128, 32, heads=4, add_self_loops=False),
            )
            self.head = nn.Linear(128, 5)

        def forward(self, x: torch.Tensor, edges: torch.Tensor, batch: torch.Tensor, count: int) -> torch.Tensor:
            hidden = F.dropout(self.first(x, edges).relu(), 0.5)
            return self.head(global_mean_pool(self.second(hidden, edges).relu(), batch, size=count))

    generator = torch.Generator().manual_seed(0)
    graphs = [Data(torch.rand(200, 64), torch.randint(0, 200, (2, 1000), generator=generator)) for _ in range(8)]
    model = Net().cuda()
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=5e-4)
    for _ in range(STEPS):
        batch = Batch.from_data_list(graphs).to("cuda")
        scores = model(batch.x, batch.edge_index, batch.batch, 8)
        F.cross_entropy(scores, torch.randint(0, 5, (8,), device="cuda")).backward()
        optimizer.step()
        optimizer.zero_grad()


def opacus_private(folder: Path) -> None:
    from opacus import PrivacyEngine

    model = nn.Sequential(nn.Conv2d(1, 16, 5, 2), nn.ReLU(), nn.GroupNorm(4, 16), nn.Flatten(), nn.Linear(2304, 10))
    model = model.cuda()
    data = DataLoader(TensorDataset(torch.rand(32 * STEPS, 1, 28, 28), torch.zeros(32 * STEPS, dtype=torch.long)), 32)
    model, optimizer, data = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=data, noise_multiplier=1.0,
        max_grad_norm=1.0, poisson_sampling=False,
    )  # fmt: skip
    for images, targets in data:
        optimizer.zero_grad()
        F.cross_entropy(model(images.cuda()), targets.cuda()).backward()
        optimizer.step()


def schedule_free(folder: Path) -> None:
    import schedulefree

    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).cuda()
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), warmup_steps=2)
    optimizer.train()
    steps(optimizer, lambda: model(torch.rand(64, 512, device="cuda")).pow(2).mean())
    optimizer.eval()


def muon(folder: Path) -> None:
    model = nn.Sequential(nn.Linear(512, 1024, bias=False), nn.ReLU(), nn.Linear(1024, 256, bias=False)).cuda()
    optimizer = torch.optim.Muon(model.parameters(), lr=1e-3)
    steps(optimizer, lambda: model(torch.rand(64, 512, device="cuda")).pow(2).mean())


def other_optimizers(folder: Path) -> None:
    from pytorch_optimizer import Lion, ScheduleFreeAdamW, create_optimizer

    model = nn.Sequential(nn.Linear(512, 1024), nn.LayerNorm(1024), nn.Linear(1024, 512), nn.Linear(512, 64)).cuda()
    optimizers = [Lion(model[0].parameters()), ScheduleFreeAdamW(model[1].parameters()),
                  create_optimizer(model[2], "adafactor"), create_optimizer(model[3], "came")]  # fmt: skip
    for _ in range(STEPS):
        model(torch.rand(64, 512, device="cuda")).pow(2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def x_transformers_decoder(folder: Path) -> None:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=256, depth=2, heads=4, rotary_pos_emb=True, ff_glu=True, attn_flash=True, use_rmsnorm=True)
    model = AutoregressiveWrapper(TransformerWrapper(num_tokens=2048, max_seq_len=256, attn_layers=layers)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    steps(optimizer, lambda: model(torch.randint(0, 2048, (4, 257), device="cuda")))


def x_transformers_encoder(folder: Path) -> None:
    from x_transformers import Encoder, ViTransformerWrapper

    model = ViTransformerWrapper(
        image_size=64, patch_size=8, num_classes=10, attn_layers=Encoder(dim=192, depth=2, heads=3, attn_qk_norm=True)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    steps(optimizer, lambda: F.cross_entropy(model(torch.rand(16, 3, 64, 64, device="cuda")),
                                             torch.randint(0, 10, (16,), device="cuda")))  # fmt: skip


def policy_gradient(folder: Path) -> None:
    import gymnasium

    environment = gymnasium.make("CartPole-v1")
    policy = nn.Sequential(nn.Linear(4, 128), nn.Tanh(), nn.Linear(128, 2)).cuda()
    optimizer = torch.optim.Adam(policy.parameters())
    for _ in range(STEPS):
        observation, _ = environment.reset(seed=0)
        terms = []
        for _ in range(8):
            choice = torch.distributions.Categorical(
                logits=policy(torch.as_tensor(observation).cuda()), validate_args=False
            )
            action = choice.sample()
            observation, reward, *_ = environment.step(int(action.item()) % 2)
            terms.append(choice.log_prob(action) * reward)
        (-torch.stack(terms).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()


def tokenizer() -> Any:
    """512 words and the marks that trainers ask for."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(509))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def small_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256, pad_token_id=0, eos_token_id=1,
    ))  # fmt: skip


def words(count: int, start: int = 0) -> str:
    return " ".join(f"w{(start + index) % 509}" for index in range(count))


def trainer_options(folder: Path) -> dict[str, Any]:
    return {"output_dir": str(folder / "run"), "max_steps": STEPS, "per_device_train_batch_size": 4, "report_to": "none",
            "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "bf16": True}  # fmt: skip


def trl_sft(folder: Path) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_dict({"text": [words(60, row) for row in range(16)]})
    arguments = SFTConfig(max_length=64, packing=False, **trainer_options(folder))
    SFTTrainer(small_llama(), arguments, train_dataset=data, processing_class=tokenizer()).train()


def trl_sft_lora(folder: Path) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_dict({"prompt": [words(20, row) for row in range(16)],
                              "completion": [" " + words(30, row) for row in range(16)]})  # fmt: skip
    arguments = SFTConfig(max_length=64, gradient_checkpointing=True, **trainer_options(folder))
    SFTTrainer(small_llama(), arguments, train_dataset=data, processing_class=tokenizer(),
               peft_config=LoraConfig(r=4, target_modules="all-linear")).train()  # fmt: skip


def trl_dpo(folder: Path) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    rows = range(16)
    data = Dataset.from_dict({"prompt": [words(20, row) for row in rows], "chosen": [" " + words(20, row) for row in rows],
                              "rejected": [" " + words(30, row) for row in rows]})  # fmt: skip
    arguments = DPOConfig(max_length=64, **trainer_options(folder))
    DPOTrainer(small_llama(), small_llama(), args=arguments, train_dataset=data, processing_class=tokenizer()).train()


def text_rewards(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(completion) % 7) for completion in completions]


def trl_grpo(folder: Path) -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    data = Dataset.from_dict({"prompt": [words(12, row) for row in range(16)]})
    arguments = GRPOConfig(max_completion_length=24, num_generations=4, **trainer_options(folder))
    GRPOTrainer(small_llama(), text_rewards, arguments, train_dataset=data, processing_class=tokenizer()).train()


def trl_grpo_reference(folder: Path) -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    small_llama().save_pretrained(folder / "llama")
    tokenizer().save_pretrained(folder / "llama")
    data = Dataset.from_dict({"prompt": [words(12, row) for row in range(16)]})
    arguments = GRPOConfig(max_completion_length=24, num_generations=4, beta=0.04, num_iterations=2,
                           gradient_accumulation_steps=2, **trainer_options(folder))  # fmt: skip
    GRPOTrainer(str(folder / "llama"), text_rewards, arguments, train_dataset=data).train()


def trl_rloo(folder: Path) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from trl import RLOOConfig, RLOOTrainer

    data = Dataset.from_dict({"prompt": [words(12, row) for row in range(16)]})
    arguments = RLOOConfig(max_completion_length=24, num_generations=4, **trainer_options(folder))
    RLOOTrainer(small_llama(), text_rewards, arguments, train_dataset=data, processing_class=tokenizer(),
                peft_config=LoraConfig(r=4, target_modules="all-linear")).train()  # fmt: skip


def trl_sft_offloaded(folder: Path) -> None:
    """Which tensors TRL moves to the host depends on which of them lie where others were."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_dict({"text": [words(250 - row, row) for row in range(16)]})
    arguments = SFTConfig(
        max_length=256, activation_offloading=True, gradient_checkpointing=False, **trainer_options(folder)
    )
    SFTTrainer(small_llama(), arguments, train_dataset=data, processing_class=tokenizer()).train()


def sentence_pairs(folder: Path) -> None:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
    )
    from sentence_transformers.models import Pooling, Transformer
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    BertModel(config).save_pretrained(folder / "bert")
    tokenizer().save_pretrained(folder / "bert")
    encoder = Transformer(str(folder / "bert"), max_seq_length=64)
    model = SentenceTransformer(modules=[encoder, Pooling(128)], device="cuda")
    data = Dataset.from_dict(
        {"anchor": [words(40, row) for row in range(64)], "positive": [words(50, row) for row in range(64)]}
    )
    arguments = SentenceTransformerTrainingArguments(**{**trainer_options(folder), "per_device_train_batch_size": 16})
    SentenceTransformerTrainer(
        model, arguments, train_dataset=data, loss=losses.MultipleNegativesRankingLoss(model)
    ).train()


# What each takes from elsewhere; TRL computes losses otherwise where triton is. torchvision cannot be imported with a CPU build of torch that has none to match it.
NEEDS: dict[Callable[[Path], None], tuple[str, ...]] = {
    timm_vision_transformer: ("timm", "torchvision"),
    timm_convolutions: ("timm", "torchvision"),
    torchvision_resnet: ("torchvision",),
    torchvision_operators: ("torchvision",),
    diffusers_unet: ("diffusers",),
    diffusers_conditional: ("diffusers",),
    torchmetrics_in_a_loop: ("torchmetrics",),
    lightning_trainer: ("lightning",),
    graph_networks: ("torch-geometric",),
    opacus_private: ("opacus",),
    schedule_free: ("schedulefree",),
    muon: (),
    other_optimizers: ("pytorch-optimizer",),
    x_transformers_decoder: ("x-transformers",),
    x_transformers_encoder: ("x-transformers",),
    policy_gradient: ("gymnasium",),
    trl_sft: ("trl", "transformers", "triton"),
    trl_sft_lora: ("trl", "transformers", "peft", "triton"),
    trl_dpo: ("trl", "transformers", "triton"),
    trl_grpo: ("trl", "transformers", "triton"),
    trl_grpo_reference: ("trl", "transformers", "triton"),
    trl_rloo: ("trl", "transformers", "peft", "triton"),
    trl_sft_offloaded: ("trl", "transformers", "triton"),
    sentence_pairs: ("sentence-transformers", "transformers"),
}
CASES = {case.__name__: case for case in NEEDS}
