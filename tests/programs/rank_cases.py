"""Training in several processes as users write it: one function a kind, run in each rank of a job.

A case is a dict: kind, model, batch, seq, processes, and what the kind takes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Case = dict[str, Any]

_MODELS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "gpt2-4": ("GPT2Config", "GPT2LMHeadModel", {"n_layer": 4}, "GPT2Block"),
    "llama-512": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8},
        "LlamaDecoderLayer",
    ),
    "llama-1024": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16,
            "num_key_value_heads": 4,
        },
        "LlamaDecoderLayer",
    ),
    "qwen2-896": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {
            "hidden_size": 896, "intermediate_size": 2432, "num_hidden_layers": 6, "num_attention_heads": 14,
            "num_key_value_heads": 2, "vocab_size": 50000, "tie_word_embeddings": True,
        },
        "Qwen2DecoderLayer",
    ),
    "bert-6": ("BertConfig", "BertForMaskedLM", {"num_hidden_layers": 6}, "BertLayer"),
    "opt-5": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            "hidden_size": 512, "word_embed_proj_dim": 512, "ffn_dim": 2048, "num_hidden_layers": 5,
            "num_attention_heads": 8, "vocab_size": 20000,
        },
        "OPTDecoderLayer",
    ),
}  # fmt: skip


def train(case: Case) -> tuple[int, int]:
    """Three optimizer steps in this process; the peaks, allocated and reserved, in bytes."""
    _KINDS[case["kind"]](case)
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def _build(case: Case) -> tuple[nn.Module, list[nn.Module]]:
    import transformers

    config, kind, sizes, block = _MODELS[case["model"]]
    sizes = {"vocab_size": 32000, **sizes} if "llama" in case["model"] else sizes
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
    if case.get("weights") == "bf16":
        model = model.to(torch.bfloat16)
    if case.get("checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    return model, [module for module in model.modules() if type(module).__name__ == block]


def _batch(case: Case) -> dict[str, torch.Tensor]:
    x = torch.randint(0, 1000, (case["batch"], case["seq"]), device="cuda")
    return {"input_ids": x, "labels": x}


def _loop(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    num_micro = case.get("accumulate", 1)
    num_recorded = (
        1 if case.get("ddp", {}).get("static_graph") else 0
    )  # steps in which DDP notes the order of gradients
    for step in range(3):
        for micro in range(num_micro):
            is_reduced = micro == num_micro - 1 or step < num_recorded
            with model.no_sync() if not is_reduced and hasattr(model, "no_sync") else nullcontext():
                with torch.autocast("cuda", torch.bfloat16, enabled=bool(case.get("amp"))):
                    loss = model(**_batch(case)).loss
                loss.backward()
        if case.get("clip"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, **options)


def _ddp(case: Case) -> None:
    dist.init_process_group("nccl")
    model, _ = _build(case)
    if case.get("lora"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    model = nn.parallel.DistributedDataParallel(model.cuda(), device_ids=[0], **case.get("ddp", {}))
    if case.get("hook"):
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        if case["hook"] == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            model.register_comm_hook(None, getattr(default_hooks, f"{case['hook']}_hook"))
    if not case.get("zero1"):
        _loop(case, model, _adamw(model))
        return
    from torch.distributed.optim import ZeroRedundancyOptimizer

    _loop(case, model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4))


def _fsdp2(case: Case) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    dist.init_process_group("nccl")
    with torch.device("meta" if case.get("from_meta") else "cpu"):
        model, blocks = _build(case)
    reduce_dtype = torch.float32 if case.get("reduce_fp32") else None
    options: Case = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)}
    if case.get("mesh"):
        from torch.distributed.device_mesh import init_device_mesh

        options["mesh"] = init_device_mesh("cuda", tuple(case["mesh"]), mesh_dim_names=("replicate", "shard"))
    if case.get("offload"):
        options["offload_policy"] = CPUOffloadPolicy()
    elif not case.get("from_meta"):
        model = model.cuda()
    for block in blocks:
        fully_shard(block, reshard_after_forward=case.get("reshard", True), **options)
    fully_shard(model, **options)
    if case.get("from_meta"):
        model.to_empty(device="cuda")
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -0.02, 0.02)
    _loop(case, model, _adamw(model))


def _fsdp1(case: Case) -> None:
    from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    dist.init_process_group("nccl")
    model, blocks = _build(case)
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(block) for block in blocks}),
        device_id=0,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        sharding_strategy=ShardingStrategy[case.get("strategy", "FULL_SHARD")],
        cpu_offload=CPUOffload(offload_params=bool(case.get("offload"))),
        use_orig_params=case.get("orig", True),
    )
    _loop(case, model, _adamw(model))


def _tensor_parallel(case: Case) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist.init_process_group("nccl")
    world, ways = int(os.environ["WORLD_SIZE"]), case["tp"]
    mesh = init_device_mesh("cuda", (world // ways, ways), mesh_dim_names=("dp", "tp"))
    model, blocks = _build(case)
    model = model.cuda()
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for block in blocks:
        parallelize_module(block, mesh["tp"], plan)
        if world > ways:
            fully_shard(block, mesh=mesh["dp"])
    if world > ways:
        fully_shard(model, mesh=mesh["dp"])
    _loop(case, model, _adamw(model, foreach=False))


def _deepspeed(case: Case) -> None:
    import deepspeed

    model, _ = _build(case)
    config = {
        "train_micro_batch_size_per_gpu": case["batch"],
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": case["stage"]},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(3):
        loss = engine(**_batch(case)).loss
        engine.backward(loss)
        engine.step()


def _normalized_together(case: Case) -> None:
    """SyncBatchNorm, with and without weights, of images and of features, in one memory format."""
    dist.init_process_group("nccl")
    layout = getattr(torch, case["layout"])
    layers: list[nn.Module] = []
    for width, wide, affine in ((3, 64, True), (64, 128, False)):
        layers += [nn.Conv2d(width, wide, 3, padding=1, bias=False), nn.BatchNorm2d(wide, affine=affine), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 1000), nn.BatchNorm1d(1000)]
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(*layers, *head)).cuda().to(memory_format=layout)
    model = nn.parallel.DistributedDataParallel(model, device_ids=[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        x = torch.randn(case["batch"], 3, 96, 96, device="cuda").to(memory_format=layout)
        with torch.autocast("cuda", torch.bfloat16, enabled=bool(case.get("amp"))):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _context_parallel(case: Case) -> None:
    """Tokens, labels and positions are shared out along the sequence."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import cross_entropy, scaled_dot_product_attention

    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("cp",))
    width, heads, shape = case["width"], case["heads"], (case["batch"], case["seq"])
    embed, qkv, out, head = layers = nn.ModuleList(
        [nn.Embedding(8000, width), nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, 8000)]
    )
    layers.bfloat16().cuda()
    positions = torch.arange(case["seq"], device="cuda")[None]
    optimizer = torch.optim.AdamW(layers.parameters())
    for _ in range(3):
        x, y = (torch.randint(0, 8000, shape, device="cuda") for _ in range(2))
        shared_out = context_parallel(
            mesh, buffers=[x, y, positions], buffer_seq_dims=[1, 1, 1], no_restore_buffers={x, y}
        )
        with shared_out, sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
            h = embed(x)
            q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in qkv(h).chunk(3, -1))
            a = scaled_dot_product_attention(q, k, v, is_causal=True)
            logits = head(out(a.transpose(1, 2).flatten(2)) + h)
            loss = cross_entropy(logits.flatten(0, 1), y.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _expert_parallel(case: Case) -> None:
    """Experts are shared out over the processes; equally many tokens go to each."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    dist.init_process_group("nccl")
    world, width = dist.get_world_size(), case["width"]
    dense = nn.parallel.DistributedDataParallel(nn.Linear(width, width).cuda())
    experts = nn.ModuleList(
        nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
        for _ in range(case["experts"] // world)
    ).cuda()
    optimizer = torch.optim.AdamW([*dense.parameters(), *experts.parameters()])
    splits = [case["batch"] // world] * world
    for _ in range(3):
        x = torch.randn(case["batch"], width, device="cuda")
        h = dense(x)
        got = all_to_all_single_autograd(h, splits, splits, dist.group.WORLD)
        made = torch.cat([expert(part) for expert, part in zip(experts, got.chunk(len(experts)), strict=True)])
        back = all_to_all_single_autograd(made, splits, splits, dist.group.WORLD)
        (h + back).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _pipeline(case: Case) -> None:
    """A stage of equal blocks; the first has the batch, the last the loss."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    dist.init_process_group("nccl")
    rank, world, width = dist.get_rank(), dist.get_world_size(), case["width"]
    device = torch.device("cuda", torch.cuda.current_device())
    module = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)]).to(device)
    told: Case = {}
    if case.get("told"):
        x = torch.empty(case["batch"] // 8, width, device="meta", requires_grad=True)
        told = {"input_args": (x,), "output_args": (x,)}
    stage = PipelineStage(module, rank, world, device, **told)
    schedule = ScheduleGPipe(stage, n_microbatches=8, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(module.parameters())
    for _ in range(3):
        x, y = (torch.randn(case["batch"], width, device=device) for _ in range(2))
        schedule.step(*([x] if rank == 0 else []), **({"target": y} if rank == world - 1 else {}))
        optimizer.step()
        optimizer.zero_grad()


_KINDS: dict[str, Callable[[Case], None]] = {
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "fsdp1": _fsdp1,
    "tp": _tensor_parallel,
    "deepspeed": _deepspeed,
    "syncbn": _normalized_together,
    "cp": _context_parallel,
    "ep": _expert_parallel,
    "pipeline": _pipeline,
}
