"""Reproducible noise: a random number is a hash of a key and a token id, the same on every device."""

from __future__ import annotations

import torch


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
    """Return standard Gumbel noise: argmax(log p + noise) is a draw from p (Maddison et al. 2014).

    A rounding difference between two devices flips a draw only where two tokens are all but tied; inverting
    the cumulative sum would flip it wherever that sum moved.
    """
    return uniform(keys, token_ids).log_().neg_().log_().neg_()
