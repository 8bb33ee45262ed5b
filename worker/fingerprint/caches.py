"""Caches that a few layers would stay in, and a whole model does not.

Two layers of a small model, or of one in few bits, are still in the device's caches when the next step reads
them; those of the whole model are not, since the others pass through in between. So as many layers are loaded
as the caches hold, and steps of one layer or of two take the next ones in turn: each reads what was read
longest ago, as in the whole model. Layers of large models are larger than any cache: then it is two of them.
"""

from __future__ import annotations

from pathlib import Path

import torch

CPU_SHARE_BYTES = 64 << 20  # of a last-level cache that many cores have in common: more than is left to two
_LAST_LEVEL = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_SIZES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def cache_bytes(device: torch.device) -> int:
    """What the device's last level keeps of what it read."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return min(CPU_SHARE_BYTES, _size(_LAST_LEVEL))


def _size(path: Path) -> int:
    try:
        text = path.read_text().strip()
        return int(text[:-1]) * _SIZES[text[-1]]
    except (OSError, ValueError, KeyError, IndexError):
        return CPU_SHARE_BYTES
