"""Which model is this? A name for a checkpoint that does not change when its files are copied."""

from __future__ import annotations

import hashlib

import torch

from worker.model.config import ModelConfig
from worker.model.layout import plan_model
from worker.model.sources import Checkpoint


def model_fingerprint(config: ModelConfig, checkpoint: Checkpoint) -> str:
    """SHA-256, as hex, of what computes: sizes, rotary frequencies, and the first and last row of every
    tensor. Reads a few MB of a checkpoint of any size. Raises ModelError."""
    digest = hashlib.sha256(repr((config.num_heads, config.num_kv_heads, config.rms_norm_eps)).encode())
    digest.update(repr((config.rope, config.sliding_windows)).encode())
    plan = plan_model(config, config.dtype, page_bytes=4096, max_tp=1)
    sources = sorted((s for part in plan.ranges() for s in part.sources), key=lambda s: s.tensor)
    for source in sources:
        last = source.shape[0] - 1
        rows = [checkpoint.read(source.tensor, slice(at, at + 1)) for at in (0, last)]
        digest.update(f"{source.tensor} {source.shape} {rows[0].dtype}".encode())
        for row in rows:
            digest.update(row.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
