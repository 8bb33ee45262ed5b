"""The declaration of kernels, and the choice of an implementation by the device of the first tensor.

Backends: "reference" is plain torch on any device, "cpu" numba and MKL, "cuda" Triton, which under
TRITON_INTERPRET=1 runs on CPU tensors too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

Examples = Callable[[Any], Iterable[tuple[Any, ...]]]

BACKENDS = ("reference", "cpu", "cuda")

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


def backend_of(tensor: Any) -> str:
    """Return the forced backend, else the tensor's device type."""
    return _forced.get() or tensor.device.type


class KernelCall(Generic[P, R]):
    """The public call of a kernel; its first argument is a tensor. `reference` is its plain torch.

    `examples(sizes)` are some arguments for it (`kernels.examples.Sizes`).
    """

    def __init__(self, reference: Callable[P, R], examples: Examples, modules: dict[str, str]) -> None:
        update_wrapper(self, reference)
        self.reference = reference
        self.examples = examples
        self._modules = modules
        self._found: dict[str, Callable[P, R]] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._on(backend_of(args[0]))(*args, **kwargs)

    def _on(self, backend: str) -> Callable[P, R]:
        if backend not in self._found:
            module = self._modules.get(backend)
            owner = importlib.import_module(module) if module else None
            self._found[backend] = getattr(owner, self.reference.__name__) if owner else self.reference
        return self._found[backend]


KERNELS: list[KernelCall[Any, Any]] = []  # every kernel, as declared


def kernel(examples: Examples, **modules: str) -> Callable[[Callable[P, R]], KernelCall[P, R]]:
    """Declare a kernel by its plain torch function.

    examples: what compiles all that the kernel has; it is run before serving, and compared with plain torch.
    modules: for each backend that has an own implementation, the module with a function of the same name. It
    is imported at its first call, so a machine without a GPU never imports Triton.
    """

    def declare(reference: Callable[P, R]) -> KernelCall[P, R]:
        KERNELS.append(KernelCall(reference, examples, modules))
        return KERNELS[-1]

    return declare
