"""The parts of `make gpu`, in the order in which they run; each is a module of this package with a `main`."""

from __future__ import annotations

from dataclasses import dataclass

FOLDER = "INSTAR_BENCH_GPU_FOLDER"  # environment: where parts write their JSON; set by `bench.gpu all`


@dataclass(frozen=True, slots=True)
class Part:
    """A part: a process of its own with its own limit, or `shards` of them at once.

    is_alone: nothing else runs beside it, since it measures time.
    """

    name: str
    limit_s: float
    shards: int = 1
    is_alone: bool = True


PARTS = (
    Part("card", 60),
    Part("kernels", 150, shards=10, is_alone=False),
    Part("engine", 150, shards=4, is_alone=False),
    Part("memory", 100, is_alone=False),
    Part("nvml", 30),
    Part("decode", 150),
    Part("graphs", 150),
    Part("model", 30),
    Part("swaps", 150),
    Part("service", 120),
    Part("peers", 100),
    Part("products", 60),
    Part("few", 60),
    Part("sweep", 90),
    Part("attention", 90),
    Part("humming", 120),
    Part("transform", 150),
    Part("fingerprint", 150),
)
NAMES = tuple(part.name for part in PARTS)
