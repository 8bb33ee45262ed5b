"""The choice of a kernel's implementation, by the device of its first tensor or forced.

=========  =================  ======================================================
backend    module             runs
=========  =================  ======================================================
reference  kernels.reference  plain torch on any device: the oracle
cpu        kernels.cpu        numba and MKL
cuda       kernels.gpu        Triton; on CPU tensors too under TRITON_INTERPRET=1
=========  =================  ======================================================

A backend is a module that is imported at its first use, so a machine without a GPU never imports Triton. An
operation that a backend does not define runs on the reference.
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

BACKENDS = {"reference": "kernels.reference", "cpu": "kernels.cpu", "cuda": "kernels.gpu"}

# Per thread: a check in another thread must not change what the steps run.
_forced: ContextVar[str | None] = ContextVar("forced backend", default=None)


@contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Force one backend for the calls inside, in this thread. Raises ValueError for an unknown one."""
    if backend not in BACKENDS:
        raise ValueError(f"no backend {backend!r} of the kernels; use one of {', '.join(BACKENDS)}")
    before = _forced.set(backend)
    try:
        yield
    finally:
        _forced.reset(before)


@cache
def implementation(op: str, backend: str) -> Callable[..., Any]:
    """Return the function for `op` on a backend; the reference for a device without one."""
    module = importlib.import_module(BACKENDS.get(backend, BACKENDS["reference"]))
    found: Callable[..., Any] = getattr(module, op, None) or getattr(reference, op)
    return found


def pick(op: str, tensor: torch.Tensor) -> Callable[..., Any]:
    """Return the function for `op` on the forced backend, else on that of the tensor's device."""
    return implementation(op, _forced.get() or tensor.device.type)
