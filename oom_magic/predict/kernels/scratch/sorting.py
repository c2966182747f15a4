"""What sorts and scans take inside; tiles are those of CUB (cub/device/dispatch/tuning: tuning_radix_sort.cuh,
tuning_scan.cuh, tuning_unique_by_key.cuh), as the CUDA builds of PyTorch 2.13 and 2.15 have.
"""

from __future__ import annotations

from math import ceil

from oom_magic.predict.setups.gpus import GPU

_SCAN_TILE = 896  # items: 128 threads of 7 with 8 bytes (the default policy: 15 with 4 bytes)
# Items of a tile by compute capability; a card has that of the highest one that it reaches.
_UNIQUE_TILE = {(0, 0): 320, (8, 0): 1344, (8, 6): 320, (9, 0): 4864}
_HISTOGRAM = 256 * 8  # bytes: the bins of one pass
_LOOK_BACK = 256 * 4  # bytes of a tile
_PASS_BITS = 8
_NO_VALUE = 1  # bytes: keys only
_BLOCK = 256  # threads
_TOPK_BLOCKS = 65536 // (40 * _BLOCK)  # of a multiprocessor: its registers, and 40 for each thread (TensorTopK.cu)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 256) * 256


def radix_bytes(card: GPU, num_items: int, key_bytes: int, value_bytes: int = _NO_VALUE, num_bits: int = 0) -> int:
    """``DeviceRadixSort`` by ``num_bits`` (0: all) of the keys: bins, states of tiles, a second copy, counters."""
    num_bits = num_bits or 8 * key_bytes
    widest = max(key_bytes, value_bytes, 4)
    if num_items <= 256 * (19 * 4 // widest):  # one thread block (``SingleTilePolicy``: 19 items of 4 bytes a thread)
        return 1
    values = _aligned(num_items * value_bytes) if value_bytes > _NO_VALUE else 0
    copies = _aligned(num_items * key_bytes) + values if num_bits > _PASS_BITS else 0
    if key_bytes < 4:
        return _spine_bytes(card) + copies + 255
    num_tiles = ceil(num_items / _radix_tile(card, key_bytes, value_bytes))
    return ceil(num_bits / _PASS_BITS) * _HISTOGRAM + num_tiles * _LOOK_BACK + copies + 256 + 255


def _radix_tile(card: GPU, key_bytes: int, value_bytes: int) -> int:
    """Items of a tile in a pass (``OnesweepPolicy``: threads of a block, items of 4 bytes of a thread)."""
    widest, is_pairs = max(key_bytes, value_bytes), value_bytes > _NO_VALUE
    if card.capability < (8, 0):
        return 256 * ((46 if key_bytes == value_bytes == 4 else 23) * 4 // widest)
    if card.capability < (9, 0):
        return 384 * ((17 if key_bytes == 4 and is_pairs else 21) * 4 // widest)
    if key_bytes == 4:
        return 384 * ((20 if not is_pairs else 24 if value_bytes >= 8 else 16) * 4 // widest)
    return 384 * ((24 if value_bytes >= 8 else 30) * 4 // widest)


def _spine_bytes(card: GPU) -> int:
    """Keys of 16 bits are counted first: bins of five times as many blocks as the card can run at once.

    Five is CUB's ``subscription_factor``, 128 the bins of 7 bits (``RADIX_BITS``), 5632 the tile in which the bins are
    scanned (``ScanPolicy``: 512 threads of 23 items of 4 bytes, so 11 of 8).
    """
    num_blocks = 5 * card.num_multiprocessors * (card.threads_per_multiprocessor // 256)
    return (num_blocks * 128 + 5632) * 8


def segmented_bytes(_: GPU, num_items: int, key_bytes: int, value_bytes: int) -> int:
    """``DeviceSegmentedRadixSort``: a second copy."""
    return _aligned(num_items * key_bytes) + _aligned(num_items * value_bytes) + 255


def scan_bytes(_: GPU, num_items: int, tile: int = _SCAN_TILE) -> int:
    """A scan: the states of its tiles."""
    return 511 + _aligned((ceil(num_items / tile) + 32) * 16)


def unique_bytes(card: GPU, num_items: int) -> int:
    """``DeviceSelect::UniqueByKey``."""
    return scan_bytes(card, num_items, _UNIQUE_TILE[max(at for at in _UNIQUE_TILE if at <= card.capability)])


def _num_blocks(card: GPU, num_slices: int, length: int) -> int:
    threads = card.num_multiprocessors * _TOPK_BLOCKS * _BLOCK  # get_items_per_thread of TensorTopK.cu
    each = max(4, min(64, ceil(num_slices * length / threads)))
    return num_slices * ceil(length / (each * _BLOCK))


def counts_of_blocks(card: GPU, num_slices: int, length: int, item_bytes: int) -> int:
    """What the blocks of a search for the largest count."""
    return _num_blocks(card, num_slices, length) * item_bytes


def scan_of_blocks(card: GPU, num_slices: int, length: int) -> int:
    """A scan over those counts."""
    return scan_bytes(card, _num_blocks(card, num_slices, length))
