"""The state of workers' GPUs, by NVML, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from instar.output.tables import MIB


def gpu_lines(workers: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return what NVML says of the workers' GPUs; nothing of what a GPU does not tell."""
    return [f"{worker['id']}: {gpu_text(gpu)}" for worker in workers if (gpu := worker.get("gpu"))]


def gpu_text(gpu: Mapping[str, Any]) -> str:
    """Return a GPU's state in words."""

    def of(value: str, limit: str, unit: str, scale: float = 1.0) -> str:
        if gpu.get(value) is None:
            return ""
        most = "" if gpu.get(limit) is None else f" of {gpu[limit] * scale:.0f}"
        return f"{gpu[value] * scale:.0f}{most} {unit}"

    slowed = {reason.replace("_", " "): share for reason, share in (gpu.get("throttling") or {}).items()}
    parts = [
        gpu.get("name", ""),
        "" if gpu.get("utilization") is None else f"busy {gpu['utilization']:.0%}",
        "" if gpu.get("memory_utilization") is None else f"memory busy {gpu['memory_utilization']:.0%}",
        of("memory_used_bytes", "memory_total_bytes", "MiB", 1 / MIB),
        of("power_watts", "power_limit_watts", "W"),
        of("temperature_celsius", "", "°C"),
        of("sm_clock_hertz", "sm_clock_max_hertz", "MHz", 1e-6),
        *(f"slowed by {reason} {share:.0%}" for reason, share in slowed.items() if share),
        *(
            f"{count} memory errors {kind}"
            for kind in ("corrected", "uncorrected")
            if (count := gpu.get(f"ecc_{kind}_errors"))
        ),
        *(f"XID {xid}: {count}" for xid, count in (gpu.get("xid_errors") or {}).items()),
    ]
    return ", ".join(filter(None, parts))
