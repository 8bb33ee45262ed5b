"""Before serving: size the thread pools, compile what will run."""

from __future__ import annotations

import os

import torch


def configure(threads: int = 0) -> int:
    """Give torch's and the kernels' pools `threads` threads (0: as many as this process may use).

    Call it once, before any kernel runs. Returns the number.
    """
    threads = threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    return threads


def warm_up(
    dtype: torch.dtype,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_tokens: int,
    device: str | torch.device = "cpu",
) -> None:
    """Compile every kernel for these shapes, so that no request waits for a compiler."""
