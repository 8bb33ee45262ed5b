"""The properties of a GPU that kernels are sized by."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class Properties:
    """The multiprocessors of a GPU, and its compute capability times ten: 90 for 9.0."""

    processors: int
    arch: int


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
