"""Measurements of a device's memory: the peak of a step, and the size of its caches."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Peak:
    """The result of `peak_memory`, valid after its block."""

    nbytes = 0


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measure the most memory that tensors made in the block hold at once.

    CUDA counts by its allocator, a CPU by what operators return: memory inside an operator and numpy's arrays
    are not seen.
    """
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.nbytes = torch.cuda.max_memory_allocated(device) - before
        return
    with _Allocations() as seen:
        yield peak
    peak.nbytes = seen.most


class _Allocations(TorchDispatchMode):  # type: ignore[misc]  # torch has no types here
    """Counts the storages that operators make, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._live: dict[int, int] = {}  # nbytes of each storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for storage in _storages(made):
            key = storage._cdata
            if key not in given and key not in self._live:
                self._live[key] = storage.nbytes()
                weakref.finalize(storage, self._live.pop, key)
        self.most = max(self.most, sum(self._live.values()))
        return made


def _storages(values: object) -> Iterator[torch.UntypedStorage]:
    return (each.untyped_storage() for each in tree_iter(values) if isinstance(each, torch.Tensor))


CPU_SHARE_BYTES = 64 << 20  # the most of a shared last-level cache that two cores keep
_LAST_LEVEL = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_SIZES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def cache_bytes(device: torch.device) -> int:
    """Return the size of the device's last-level cache."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    try:
        text = _LAST_LEVEL.read_text().strip()
        return min(CPU_SHARE_BYTES, int(text[:-1]) * _SIZES[text[-1]])
    except (OSError, ValueError, KeyError, IndexError):
        return CPU_SHARE_BYTES
