"""The catalogue of GPUs: spellings, and totals held against what PyTorch prints."""

import pytest
import torch

from oom_magic import dry_run
from oom_magic.predict.setups.gpus import DEFAULT_GPU, closest_gpu, context_range, find_gpu, list_gpus, read_table
from oom_magic.predict.setups.setup import TrainingSetup
from oom_magic.units import GIB, MIB


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("rtx3060", "NVIDIA GeForce RTX 3060"),
        ("RTX 3060", "NVIDIA GeForce RTX 3060"),
        ("NVIDIA GeForce RTX 3060", "NVIDIA GeForce RTX 3060"),
        ("RTX 3060 12GB", "NVIDIA GeForce RTX 3060"),
        ("3060", "NVIDIA GeForce RTX 3060"),
        ("rtx 4080 super", "NVIDIA GeForce RTX 4080 SUPER"),
        ("rtx-3080-laptop", "NVIDIA GeForce RTX 3080 Laptop GPU"),
        ("a100-80gb", "NVIDIA A100-SXM4-80GB"),
        ("A100 80GB", "NVIDIA A100-SXM4-80GB"),
        ("A100", "NVIDIA A100-SXM4-40GB"),
        ("Tesla T4", "Tesla T4"),
        ("t4", "Tesla T4"),
        ("V100-32GB", "Tesla V100-SXM2-32GB"),
        ("H100", "NVIDIA H100 80GB HBM3"),
        ("RTX 6000 Ada", "NVIDIA RTX 6000 Ada Generation"),
        ("RTX PRO 6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
        ("A6000", "NVIDIA RTX A6000"),
        ("1080 Ti", "NVIDIA GeForce GTX 1080 Ti"),
        ("Kaggle P100", "Tesla P100-PCIE-16GB"),
        ("GH200", "NVIDIA GH200 480GB"),
        ("a100_80g", "NVIDIA A100-SXM4-80GB"),
        ("A100 PCIe", "NVIDIA A100-PCIE-40GB"),
        ("1060", "NVIDIA GeForce GTX 1060 6GB"),
        ("3050 ti", "NVIDIA GeForce RTX 3050 Ti Laptop GPU"),
        ("2060 12GB", "NVIDIA GeForce RTX 2060 12GB"),
        ("RTX 3060 8GB", "NVIDIA GeForce RTX 3060 8GB"),
        ("Kaggle T4 x2", "Tesla T4"),
        ("RTX PRO 6000 Blackwell", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
        ("H100 SXM5", "NVIDIA H100 80GB HBM3"),
    ],
)
def test_spellings(spelling, name):
    assert find_gpu(spelling).name == name


@pytest.mark.parametrize(
    ("name", "total_gib", "capability", "num_multiprocessors"),
    [
        ("RTX 3060", 11.76, (8, 6), 28),
        ("RTX 3080", 9.77, (8, 6), 68),
        ("RTX 3090", 23.69, (8, 6), 82),
        ("RTX 4090", 23.64, (8, 9), 128),
        ("T4", 14.56, (7, 5), 40),
        ("P100", 15.89, (6, 0), 56),
        ("A100 80GB", 79.14, (8, 0), 108),
        ("H100", 79.18, (9, 0), 132),
        ("B200", 178.36, (10, 0), 148),
    ],
)
def test_what_cuda_reports(name, total_gib, capability, num_multiprocessors):
    card = find_gpu(name)
    assert round(card.total_bytes / GIB, 2) == total_gib
    assert (card.capability, card.num_multiprocessors) == (capability, num_multiprocessors)
    assert card.is_read


@pytest.mark.parametrize("card", list_gpus(), ids=lambda card: card.name)
def test_entry_is_plausible(card):
    assert find_gpu(card.name) is card
    assert 2 * GIB < card.total_bytes < 300 * GIB
    assert 0.1 * GIB < card.context_bytes < 0.6 * GIB
    assert 5 < card.num_multiprocessors <= 188


def test_unknown_card_offers_the_closest():
    with pytest.raises(ValueError, match=r"'RTX 3065' is not in the catalogue.* Did you mean .*RTX 3060"):
        find_gpu("RTX 3065")
    with pytest.raises(ValueError, match=r"Did you mean NVIDIA GeForce RTX 4090,"):
        find_gpu("4090 Ti")
    with pytest.raises(ValueError, match=r"'5' is not in the catalogue"):
        TrainingSetup("gpt2", gpu=5)


def test_nothing_close():
    with pytest.raises(ValueError, match="For another card give its memory"):
        find_gpu("")


@pytest.mark.parametrize(
    ("name", "capability", "closest"),
    [
        ("NVIDIA RTX A2000", (8, 6), "NVIDIA RTX A2000"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", (8, 0), "NVIDIA A100-SXM4-80GB"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", (9, 0), "NVIDIA H100 80GB HBM3"),
        ("NVIDIA GB10", (12, 1), (12, 0)),
        ("Tesla K80", (3, 7), (6, 0)),
    ],
)
def test_a_card_that_is_not_known_is_taken_for_one_of_its_generation(name, capability, closest):
    card = closest_gpu(name, capability)
    assert closest in (card.name, card.capability)


def test_default_is_the_plain_12_gb_card():
    assert find_gpu(DEFAULT_GPU).name == "NVIDIA GeForce RTX 3060"


def test_what_cuda_takes_is_a_range_with_sources():
    """Never one number: readings of cards of the generation, or of all where fewer than two were read."""
    readings = read_table("contexts.toml")["reading"]
    assert all(reading["source"] and reading["mib"] for reading in readings)
    card = find_gpu("RTX 5090")
    assert card.context_range == (189 * MIB, 722 * MIB)
    assert all(least <= one.context_bytes <= most for one in list_gpus() for least, most in [one.context_range])
    assert context_range((9, 0), 450 * MIB, {})[1] > 450 * MIB  # no reading of its own
    eager = context_range((7, 0), 300 * MIB, {"CUDA_MODULE_LOADING": "EAGER"})
    assert eager == (1006 * MIB, 1343 * MIB)


def test_the_verdict_says_when_it_depends_on_what_cuda_takes():
    report = dry_run(lambda: torch.zeros(int(0.835 * 32102) * MIB, dtype=torch.uint8, device="cuda"), gpu="RTX 5090")
    assert report.verdict == "safe"
    assert report.most_used_fraction > 0.85
    text = " ".join(str(report).split())
    assert "189.00 MiB to 722.00 MiB outside PyTorch" in text
    assert "with the largest seen on such cards, 722.00 MiB" in text
    assert type(report).from_dict(report.to_dict()).most_used_fraction == report.most_used_fraction
