"""Random numbers without a generator: each is a hash of (seed, output position, token id).

So a draw does not depend on what else is in the batch, on the device, or on how often a request was moved:
every worker that continues it at output position i draws the same.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

U64 = np.uint64


def splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return one output of SplitMix64 for each state x, modulo 2^64.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA '14.
    """
    with np.errstate(over="ignore"):
        z = x + U64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> U64(30))) * U64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> U64(27))) * U64(0x94D049BB133111EB)
    return z ^ (z >> U64(31))


def keys(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Return the key of each (seed, output position), int32 [R, 2]."""
    mixed = splitmix64(seeds ^ splitmix64(positions.astype(U64)))
    return mixed.view(np.int32).reshape(-1, 2)


def _mix(x: torch.Tensor, shift: int, multiplier: int) -> torch.Tensor:
    # torch's >> keeps the sign on int32; the mask makes it a logical shift.
    x ^= (x >> shift) & ((1 << (32 - shift)) - 1)
    return x.mul_(multiplier)


def uniform(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return float32 in (0, 1) for int32 keys [R, 2] and int32 token_ids [V] or [R, K]: [R, V] or [R, K].

    Two rounds of the 32-bit mixer "lowbias32" (multipliers 0x7feb352d, 0x846ca68b), one half of the key
    before each; int32 arithmetic wraps the same way on every device.
    """
    x = token_ids * -1640531527 + keys[:, :1]  # 0x9E3779B9 as int32: neighbouring ids start far apart
    x = _mix(x, 16, 0x7FEB352D)
    x = _mix(x, 15, -2073254261)  # 0x846CA68B
    x ^= keys[:, 1:]
    x = _mix(x, 16, 0x7FEB352D)
    x = _mix(x, 15, -2073254261)
    # 23 bits and a half: exact in float32, so neither 0 nor 1 can come out.
    bits = (x >> 9) & ((1 << 23) - 1)
    return bits.to(torch.float32).add_(0.5).mul_(2.0**-23)


def gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise (Gumbel 1954; Maddison et al. 2014).

    argmax(log p + noise) is a draw from p. Chosen over inverting the cumulative sum because a rounding
    difference between two devices or batch shapes flips a draw only where two tokens are all but tied, not
    wherever a sum over the vocabulary moved.
    """
    return uniform(keys, token_ids).log_().neg_().log_().neg_()
