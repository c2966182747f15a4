"""A catalogue of GPUs with the memory that CUDA really reports: less than what is printed on the box.

A "12 GB" RTX 3060 has 12,288 MiB; page tables, ECC and firmware leave 11.76 GiB. Totals are those of
``torch.cuda.get_device_properties(0).total_memory``, the "total capacity" of an out-of-memory message, on
Linux. They move by up to 1 % with the driver; under Windows a consumer card reports its whole memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from itertools import takewhile

from oom_magic.errors import InvalidSettingError
from oom_magic.units import MIB

DEFAULT_GPU = "RTX 3060"


@dataclass(frozen=True, slots=True)
class GPU:
    """A card as CUDA describes it. Sizes in bytes.

    ``context_bytes`` is what one training process takes outside PyTorch: CUDA context, kernels, libraries.
    ``is_read``: PyTorch printed this total on such a card; else it is that of a sister card of the same size.
    """

    name: str
    total_bytes: int
    capability: tuple[int, int]
    num_multiprocessors: int
    context_bytes: int
    is_read: bool

    @property
    def threads_per_multiprocessor(self) -> int:
        """How many can be resident (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability")."""
        return _MOST_THREADS.get(self.capability, 2048)


_MOST_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}


# One group per chip generation: compute capability and context in MiB, then a line per card: name as CUDA
# gives it; total in MiB ("~": taken from a sister card); multiprocessors; other names. The first card with
# a name has it.
#
# Totals: device lines that PyTorch programs print (Ultralytics' "CUDA:0 (NVIDIA GeForce RTX 3060,
# 12045MiB)", torch's "_CudaDeviceProperties(...)"), and "total capacity of 79.14 GiB" in messages whose
# reporter names the card. Multiprocessors and capabilities: NVIDIA's architecture whitepapers and
# developer.nvidia.com/cuda-gpus. Contexts: "including non-PyTorch memory" less reserved in messages of
# torch 2.1 and later, no other process there: 0.1 to 0.2 GiB on a T4, 0.2 to 0.6 (median 0.37) on consumer
# cards, 0.4 to 0.5 on A100 and H100.
_CATALOGUE = """
6.0 200
Tesla P100-PCIE-16GB; 16269; 56; P100, Kaggle P100
6.1 200
NVIDIA GeForce GTX 1050 Ti; ~4032; 6
NVIDIA GeForce GTX 1060 3GB; 3011; 9
NVIDIA GeForce GTX 1060 6GB; ~6072; 10; GTX 1060
NVIDIA GeForce GTX 1070; ~8113; 15
NVIDIA GeForce GTX 1070 Ti; ~8113; 19
NVIDIA GeForce GTX 1080; ~8113; 20
NVIDIA GeForce GTX 1080 Ti; 11172; 28
NVIDIA TITAN X (Pascal); ~12188; 28; TITAN X
NVIDIA TITAN Xp; ~12188; 30
Tesla P4; ~7611; 20
Tesla P40; ~22912; 30
7.0 300
Tesla V100-SXM2-16GB; 16160; 80; V100, V100 16GB
Tesla V100-SXM2-32GB; 32494; 80; V100 32GB
Tesla V100-SXM3-32GB; ~32494; 80
Tesla V100-PCIE-16GB; ~16160; 80
Tesla V100-PCIE-32GB; ~32494; 80
Tesla V100S-PCIE-32GB; ~32494; 80; V100S
NVIDIA TITAN V; ~12058; 80
7.5 150
Tesla T4; 14912; 40; Colab T4, Kaggle T4, Kaggle T4 x2, T4 x2, Colab
7.5 300
NVIDIA GeForce GTX 1650; 3904; 14
NVIDIA GeForce GTX 1650 SUPER; ~3904; 20
NVIDIA GeForce GTX 1650 Ti; ~3904; 16
NVIDIA GeForce GTX 1660; ~5914; 22
NVIDIA GeForce GTX 1660 SUPER; ~5914; 22
NVIDIA GeForce GTX 1660 Ti; 5914; 24
NVIDIA GeForce RTX 2060; 5918; 30
NVIDIA GeForce RTX 2060 12GB; ~12044; 34
NVIDIA GeForce RTX 2060 SUPER; ~7972; 34
NVIDIA GeForce RTX 2070; ~7972; 36
NVIDIA GeForce RTX 2070 SUPER; ~7972; 40
NVIDIA GeForce RTX 2080; ~7972; 46
NVIDIA GeForce RTX 2080 SUPER; ~7972; 48
NVIDIA GeForce RTX 2080 Ti; 11012; 68
NVIDIA TITAN RTX; 24212; 72
Quadro RTX 4000; ~7972; 36
Quadro RTX 5000; ~16117; 48
Quadro RTX 6000; ~24212; 72
Quadro RTX 8000; 48593; 72
8.0 450
NVIDIA A30; 24164; 56
NVIDIA A100-SXM4-40GB; 40441; 108; A100, A100 40GB, A100 SXM, A100 SXM4, Colab A100
NVIDIA A100-PCIE-40GB; ~40441; 108; A100 PCIe
NVIDIA A100-SXM4-80GB; 81038; 108; A100 80GB
NVIDIA A100 80GB PCIe; 81154; 108
NVIDIA A800-SXM4-80GB; ~81038; 108; A800, A800 80GB
NVIDIA A800 80GB PCIe; ~81154; 108; A800 PCIe
8.6 380
NVIDIA GeForce RTX 3050; ~7833; 20; RTX 3050 8GB
NVIDIA GeForce RTX 3050 6GB; ~5938; 18
NVIDIA GeForce RTX 3050 Laptop GPU; ~3904; 16
NVIDIA GeForce RTX 3050 Ti Laptop GPU; ~3904; 20; RTX 3050 Ti
NVIDIA GeForce RTX 3060; 12044; 28; RTX 3060 12GB
NVIDIA GeForce RTX 3060 8GB; ~7833; 28
NVIDIA GeForce RTX 3060 Laptop GPU; 5938; 30
NVIDIA GeForce RTX 3060 Ti; 7833; 38
NVIDIA GeForce RTX 3070; 7842; 46
NVIDIA GeForce RTX 3070 Laptop GPU; ~7842; 40
NVIDIA GeForce RTX 3070 Ti; ~7842; 48
NVIDIA GeForce RTX 3070 Ti Laptop GPU; ~7842; 46
NVIDIA GeForce RTX 3080; 10009; 68; RTX 3080 10GB
NVIDIA GeForce RTX 3080 12GB; 12117; 70
NVIDIA GeForce RTX 3080 Laptop GPU; ~16105; 48
NVIDIA GeForce RTX 3080 Laptop GPU 8GB; ~7842; 48
NVIDIA GeForce RTX 3080 Ti; 12054; 80
NVIDIA GeForce RTX 3080 Ti Laptop GPU; ~16105; 58
NVIDIA GeForce RTX 3090; 24260; 82
NVIDIA GeForce RTX 3090 Ti; 24214; 84
NVIDIA RTX A2000; ~5938; 26; RTX A2000 6GB, A2000
NVIDIA RTX A2000 12GB; 12017; 26
NVIDIA RTX A2000 Laptop GPU; ~3904; 20
NVIDIA RTX A4000; 16117; 48; A4000
NVIDIA RTX A4500; ~20050; 56; A4500
NVIDIA RTX A5000; 24248; 64; A5000
NVIDIA RTX A5500; ~24248; 80; A5500
NVIDIA RTX A6000; 48671; 84; A6000
NVIDIA A2; ~14912; 10
NVIDIA A10; ~22588; 72
NVIDIA A10G; 22723; 80
NVIDIA A16; ~14912; 10
NVIDIA A40; ~45416; 84
8.9 380
NVIDIA GeForce RTX 4050 Laptop GPU; ~5890; 20; RTX 4050
NVIDIA GeForce RTX 4060; 7807; 24
NVIDIA GeForce RTX 4060 Laptop GPU; 7806; 24
NVIDIA GeForce RTX 4060 Ti; 7806; 34; RTX 4060 Ti 8GB
NVIDIA GeForce RTX 4060 Ti 16GB; 15944; 34
NVIDIA GeForce RTX 4070; 11994; 46
NVIDIA GeForce RTX 4070 Laptop GPU; ~7806; 36
NVIDIA GeForce RTX 4070 SUPER; 11998; 56
NVIDIA GeForce RTX 4070 Ti; 12007; 60
NVIDIA GeForce RTX 4070 Ti SUPER; ~15944; 66
NVIDIA GeForce RTX 4080; ~15944; 76
NVIDIA GeForce RTX 4080 Laptop GPU; ~11994; 58
NVIDIA GeForce RTX 4080 SUPER; 15944; 80
NVIDIA GeForce RTX 4090; 24210; 128
NVIDIA GeForce RTX 4090 D; 24210; 114
NVIDIA GeForce RTX 4090 Laptop GPU; ~15944; 76
NVIDIA RTX 2000 Ada Generation; ~15944; 22
NVIDIA RTX 4000 Ada Generation; 20010; 48
NVIDIA RTX 4000 SFF Ada Generation; ~20010; 48
NVIDIA RTX 4500 Ada Generation; ~24210; 60
NVIDIA RTX 5000 Ada Generation; ~32109; 100
NVIDIA RTX 5880 Ada Generation; ~48520; 110
NVIDIA RTX 6000 Ada Generation; 48520; 142
NVIDIA L4; 22563; 58; Colab L4
NVIDIA L20; ~45495; 92
NVIDIA L40; ~45495; 142
NVIDIA L40S; 45495; 142
9.0 450
NVIDIA H100 PCIe; ~81079; 114
NVIDIA H100 80GB HBM3; 81079; 132; H100, H100 80GB, H100 SXM, H100 SXM5, Colab H100
NVIDIA H100 NVL; 95320; 132; H100 94GB
NVIDIA H800; ~81079; 132; H800 80GB
NVIDIA H20; ~97280; 78
NVIDIA H200; 143156; 132
NVIDIA H200 NVL; ~143156; 132
NVIDIA GH200 480GB; ~96768; 132; GH200, GH200 96GB
10.0 500
NVIDIA B200; 182642; 148
12.0 450
NVIDIA GeForce RTX 5050; ~7806; 20
NVIDIA GeForce RTX 5060; ~7806; 30
NVIDIA GeForce RTX 5060 Laptop GPU; ~7806; 26
NVIDIA GeForce RTX 5060 Ti; 15848; 36; RTX 5060 Ti 16GB
NVIDIA GeForce RTX 5060 Ti 8GB; ~7806; 36
NVIDIA GeForce RTX 5070; ~11910; 48
NVIDIA GeForce RTX 5070 Laptop GPU; ~7806; 36
NVIDIA GeForce RTX 5070 Ti; ~15840; 70
NVIDIA GeForce RTX 5070 Ti Laptop GPU; ~11910; 46
NVIDIA GeForce RTX 5080; 15840; 84
NVIDIA GeForce RTX 5080 Laptop GPU; ~15840; 60
NVIDIA GeForce RTX 5090; 32102; 170
NVIDIA GeForce RTX 5090 D; ~32102; 170
NVIDIA GeForce RTX 5090 Laptop GPU; ~24080; 82
NVIDIA RTX PRO 2000 Blackwell; ~15848; 34; RTX PRO 2000
NVIDIA RTX PRO 4000 Blackwell; ~24080; 70; RTX PRO 4000
NVIDIA RTX PRO 4500 Blackwell; ~32102; 82; RTX PRO 4500
NVIDIA RTX PRO 5000 Blackwell; ~48520; 110; RTX PRO 5000
NVIDIA RTX PRO 6000 Blackwell Workstation Edition; ~97250; 188; RTX PRO 6000, RTX PRO 6000 Blackwell
NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition; ~97250; 188; RTX PRO 6000 Max-Q, RTX PRO 6000 Blackwell Max-Q
NVIDIA RTX PRO 6000 Blackwell Server Edition; 97250; 188
"""

_GIGABYTES = re.compile(r"(\d)g\b")
_NOISE = re.compile(r"nvidia|geforce|tesla|quadro|generation|edition|\bgpu\b|[^a-z0-9]")


def find_gpu(name: str) -> GPU:
    """The card meant by ``name``, however it is spelled: "rtx3060", "NVIDIA GeForce RTX 3060", "a100-80gb".

    Raises ValueError with the closest names of the catalogue.
    """
    known = _cards_by_key()
    key = _key(name)
    if key in known:
        return known[key]
    spellings = {spelling: card.name for spelling, card in known.items()}
    close = dict.fromkeys(spellings[match] for match in get_close_matches(key, spellings, n=6, cutoff=0.5))
    raise InvalidSettingError("unknown_card", name=name, offer=list(close)[:3])


def closest_gpu(name: str, capability: tuple[int, int]) -> GPU:
    """The card of this name; else, as for an instance of a divided card (MIG), one of its generation or an older one.

    Its kernels are those of the card here; its memory is not.
    """
    try:
        return find_gpu(name)
    except ValueError:
        older = [card for card in list_gpus() if card.capability <= capability]
        return max(older or list_gpus()[:1], key=lambda card: (card.capability, _num_alike(card.name, name)))


def _num_alike(name: str, other: str) -> int:
    """With how many characters both names begin."""
    pairs = zip(_key(name), _key(other), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@cache
def list_gpus() -> tuple[GPU, ...]:
    """Every card of the catalogue, oldest generation first."""
    cards: list[GPU] = []
    capability, context_bytes = (0, 0), 0
    for line in _CATALOGUE.strip().splitlines():
        fields = [field.strip() for field in line.split(";")]
        if len(fields) == 1:
            number, context_mib = line.split()
            major, minor = number.split(".")
            capability, context_bytes = (int(major), int(minor)), int(context_mib) * MIB
            continue
        total = fields[1]
        total_bytes = int(total.lstrip("~")) * MIB
        is_read = not total.startswith("~")
        cards.append(GPU(fields[0], total_bytes, capability, int(fields[2]), context_bytes, is_read))
    return tuple(cards)


@cache
def _cards_by_key() -> dict[str, GPU]:
    lines = [line for line in _CATALOGUE.strip().splitlines() if ";" in line]
    known: dict[str, GPU] = {}
    for card, line in zip(list_gpus(), lines, strict=True):
        aliases = line.split(";")[3:]
        names = [card.name, *(alias for group in aliases for alias in group.split(","))]
        if "GeForce" in card.name:
            names += [name.split("TX ", 1)[-1] for name in names]
        for name in names:
            known.setdefault(_key(name), card)
    return known


def _key(name: str) -> str:
    return _NOISE.sub("", _GIGABYTES.sub(r"\1gb", name.lower()))
