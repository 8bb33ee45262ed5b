"""The parts of sampling: filters, reproducible noise, and log-probabilities.

A random number is a hash of (seed, output position, token id), on every device. Log-probabilities
are those of the model itself, before temperature, penalties, bias and filters, as vLLM's.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from bus.messages import TokenLogprobs

# Most likely tokens looked at before sorting the whole vocabulary: enough for nearly every top_p in use.
WINDOW = 256


U64 = np.uint64


def splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return one output of SplitMix64 (Steele, Lea and Flood, OOPSLA '14) for each state x, modulo 2^64."""
    with np.errstate(over="ignore"):
        z = x + U64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> U64(30))) * U64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> U64(27))) * U64(0x94D049BB133111EB)
    return z ^ (z >> U64(31))


def keys(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Return the key of each (seed, output position), int32 [R, 2]."""
    mixed = splitmix64(seeds ^ splitmix64(positions.astype(U64)))
    return mixed.view(np.int32).reshape(-1, 2)


def token_logprobs(
    logits: torch.Tensor, token_ids: npt.NDArray[np.int64], num_top: npt.NDArray[np.int64]
) -> list[TokenLogprobs]:
    """Return the log-probabilities of a token [N] and num_top [N] others per row of logits float32 [N, V]."""
    logprobs = logits.log_softmax(dim=-1)
    targets = torch.from_numpy(token_ids).to(logits.device).unsqueeze(1)
    chosen = logprobs.gather(1, targets).squeeze(1).tolist()
    width = min(int(num_top.max()), logits.shape[1])
    values, ids = logprobs.topk(width, dim=-1)
    return [
        TokenLogprobs(token_id=token, logprob=logprob, top_ids=top_ids[:n], top_logprobs=top[:n])
        for token, logprob, top_ids, top, n in zip(
            token_ids.tolist(), chosen, ids.tolist(), values.tolist(), num_top.tolist(), strict=True
        )
    ]
