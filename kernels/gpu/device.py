"""The properties of a GPU that kernels are sized by."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import torch

SHARED_KIB = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227, 110: 227}
LEAST_SHARED_KIB = 99  # of other capabilities from 8.6


@dataclass(frozen=True, slots=True)
class Properties:
    """The multiprocessors of a GPU, and its compute capability times ten: 90 for 9.0."""

    processors: int
    arch: int

    @property
    def shared_bytes(self) -> int:
        """Return the shared memory that a program may have (CUDA C++ Programming Guide, capabilities)."""
        return SHARED_KIB.get(self.arch, LEAST_SHARED_KIB) << 10


INTERPRETER = Properties(8, 90)  # few multiprocessors, but enough that splitting is tested
IMAGINED: ContextVar[Properties] = ContextVar("properties of a tensor on no GPU", default=INTERPRETER)


def properties(device: torch.device) -> Properties:
    """Return the GPU's properties; without one those of `IMAGINED`."""
    return _properties_of(device) if device.type == "cuda" else IMAGINED.get()


def num_processors(device: torch.device) -> int:
    return properties(device).processors


@cache
def _properties_of(device: torch.device) -> Properties:
    found = torch.cuda.get_device_properties(device)
    return Properties(int(found.multi_processor_count), 10 * found.major + found.minor)
