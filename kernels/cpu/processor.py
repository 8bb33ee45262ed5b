"""The instructions that the compiler may use here."""

from __future__ import annotations

from functools import cache

import llvmlite.binding as llvm
from numba import config


@cache
def _features() -> frozenset[str]:
    if config.CPU_FEATURES is not None:  # NUMBA_CPU_FEATURES, such as "+avx2,+fma"
        return frozenset(one[1:] for one in config.CPU_FEATURES.split(",") if one.startswith("+"))
    return frozenset(name for name, there in llvm.get_host_cpu_features().items() if there)


def has_all(*names: str) -> bool:
    """Return True if numba compiles for a processor with all these features, by LLVM's names."""
    return not config.DISABLE_JIT and _features().issuperset(names)
