"""Which face of a kernel runs: picked by the device of its first tensor, or forced.

=========  =================  ======================================================
face       module             runs
=========  =================  ======================================================
reference  kernels.reference  plain torch on any device: the oracle
cpu        kernels.cpu        numba and MKL
cuda       kernels.gpu        Triton; on CPU tensors too under TRITON_INTERPRET=1
=========  =================  ======================================================

A face is a module; it is imported at its first use, so a machine without a GPU never imports Triton. An
operation that a face does not define runs on the reference.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch

from kernels import reference

FACES = {"reference": "kernels.reference", "cpu": "kernels.cpu", "cuda": "kernels.gpu"}

# Of one thread: what another one checks must not change what the steps run.
_forced: ContextVar[str | None] = ContextVar("forced face", default=None)


@contextmanager
def use_face(face: str) -> Iterator[None]:
    """Force one face for the calls inside, in this thread. Raises ValueError."""
    if face not in FACES:
        raise ValueError(f"no face {face!r} of the kernels; there are {', '.join(FACES)}")
    before = _forced.set(face)
    try:
        yield
    finally:
        _forced.reset(before)


@cache
def implementation(op: str, face: str) -> Callable[..., Any]:
    """The function behind `op` on `face`; a device that has no face of its own gets the reference."""
    module = importlib.import_module(FACES.get(face, FACES["reference"]))
    found: Callable[..., Any] = getattr(module, op, None) or getattr(reference, op)
    return found


def pick(op: str, tensor: torch.Tensor) -> Callable[..., Any]:
    return implementation(op, _forced.get() or tensor.device.type)
