"""The KV cache in 8 bits: the layout of its bytes, and its conversion in plain torch.

A cache of codes is int8 [B, Hkv, 2, bt, D + SCALE_BYTES]. The bytes of one block's keys or values of one head
are codes [bt, D], then scales bfloat16 [bt]: each token has a scale in each head, for its key and for its
value. A code times its scale is the number that was stored.

So codes lie on whole cache lines, and a block is its heads one after the other, as in any cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bus.precisions import KVPrecision

SCALE_BYTES = 2
LARGEST = 127.0  # the largest code; -128 is not used


def cache_format(precision: KVPrecision, head_dim: int, dtype: torch.dtype) -> tuple[torch.dtype, int]:
    """Return the dtype of a cache and the elements of a token in it, for a model of `dtype`."""
    return (dtype, head_dim) if precision == "full" else (torch.int8, head_dim + SCALE_BYTES)


def is_codes(kv: Tensor) -> bool:
    """Return True if a cache holds codes."""
    return kv.dtype is torch.int8


def parts_of(kv: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of a cache of codes: int8 [B, Hkv, 2, bt, D] and bfloat16 [B, Hkv, 2, bt]."""
    block_tokens, head_dim = kv.shape[3], kv.shape[4] - SCALE_BYTES
    halves = kv.view(*kv.shape[:3], -1)
    codes = halves[..., : block_tokens * head_dim].unflatten(-1, (block_tokens, head_dim))
    return codes, halves[..., block_tokens * head_dim :].view(torch.bfloat16)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes of x [..., D] and bfloat16 scales [...].

    The codes belong to the rounded scale, so rounding it adds no error.
    """
    x32 = x.float()
    scales = (x32.abs().amax(-1) / LARGEST).to(torch.bfloat16)
    divisors = torch.where(scales > 0, scales.float(), 1.0)
    codes = (x32 / divisors[..., None]).round().clamp(-LARGEST, LARGEST)
    return codes.to(torch.int8), scales


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 numbers [..., D] that codes and their scales [...] stand for."""
    return codes.float() * scales.float()[..., None]


def store(k: Tensor, v: Tensor, kv: Tensor, slot_mapping: Tensor) -> None:
    """Do what `store_kv` does, into a cache of codes. Every token has a slot."""
    blocks, offsets = slot_mapping // kv.shape[3], slot_mapping % kv.shape[3]
    for part, x in enumerate((k, v)):
        for stored, made in zip(parts_of(kv), quantize(x), strict=True):
            stored[:, :, part][blocks, :, offsets] = made
