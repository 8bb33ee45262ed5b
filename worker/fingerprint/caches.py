"""What the layers that a fingerprint lacks would have done to the device's caches.

Two layers of a small model, or of one in few bits, stay in the caches of the cores from step to step; in the
whole model the others pass through them in between. So between two steps of a fingerprint as many bytes are
read as those others have, or as many as the caches have if that is less. A last-level cache that a CPU shares
with the whole host is left as it is: reading all of it takes longer than a step of the whole model (measured
on 30M parameters: four times the cost of the profile, and no better estimates).
"""

from __future__ import annotations

from pathlib import Path

import torch

CPU_CACHE_BYTES = 2 << 20  # of a core whose own tells nothing
_SIZES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class CacheSweep:
    """`sweep(n)` reads n bytes that nothing else uses. One buffer, no larger than the caches."""

    def __init__(self, device: torch.device, most: int) -> None:
        """most: bytes that will be asked for."""
        self.nbytes = min(most, cache_bytes(device))
        self._buffer = torch.ones(-(-self.nbytes // 4), dtype=torch.int32, device=device)

    def sweep(self, nbytes: int) -> None:
        """Returns when they have been read."""
        part = self._buffer[: min(nbytes, self.nbytes) // 4]
        if part.numel():
            int(part.sum())


def cache_bytes(device: torch.device) -> int:
    """Of a GPU's last level; of a CPU's cores, as many as there are threads, their second."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return int(torch.get_num_threads()) * _size(Path("/sys/devices/system/cpu/cpu0/cache/index2/size"))


def _size(path: Path) -> int:
    try:
        text = path.read_text().strip()
        return int(text[:-1]) * _SIZES[text[-1]]
    except (OSError, ValueError, KeyError, IndexError):
        return CPU_CACHE_BYTES
