"""Swaps under load on a GPU: their time beside the copy's floor, what steps feel, and that tokens are exact.

    python -m bench.gpu swaps [--device cpu]

A worker's engine and morph executor in one process, on the layers of Llama 3 8B's shape with random weights.
The floor is the time to copy a layer's bytes from pinned host memory. A swap is held against it until the
layer runs in its new precision; until the pages that it frees are KV blocks is told beside it. Steps beside
swaps of one layer to INT4 and back are compared with steps without, in turns. Tokens: a prompt alone gives
the same ones after a swap under load as after the same swap of an idle engine, and the first ones again
when the layer is back. A prompt whose first blocks the prefix cache has is computed from there on, by
kernels that round otherwise. So it is compared with a run that had them too, and once more with the cache
left out of all runs.
`--device cpu` takes a tiny model.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import kernels  # noqa: F401 before torch: it settles how torch's threads wait

# isort: split
import torch

from bench.common.engines import greedy
from bench.common.results import say
from bench.gpu.boundary import timed_boundaries
from bench.gpu.common import Found, device_clock, profiled, run_alone
from bench.gpu.decode import LLAMA_8B, TINY
from bench.morph.cost import SEQUENCES, WAYS, MorphLoop
from bench.morph.cost_report import Part
from bus.messages import PARTS
from bus.morphs import MorphReport
from bus.settings import WorkerSettings
from worker.memory.prefix_index import PrefixIndex
from worker.service.start_up import load
from worker.shape import variants as variants_module
from worker.shape.host_store import HostStore, Put

PROMPT = [(17 * i + 3) % 199 for i in range(40)]
NUM_OUT = 24


@dataclass(frozen=True, slots=True)
class Sizes:
    config: Mapping[str, Any]
    dtype: str
    layer: int  # layer that is swapped
    swaps: int  # beside steps, and as many while idle
    memory_mb: int
    max_tokens: int  # of each sequence beside swaps


GPU = Sizes(
    config=LLAMA_8B | {"vocab_size": 32000},
    dtype="bfloat16",
    layer=5,
    swaps=10,
    memory_mb=32_768,
    max_tokens=8000,
)
CPU = Sizes(
    config=TINY | {"max_position_embeddings": 2048, "vocab_size": 4096},
    dtype="float32",
    layer=1,
    swaps=2,
    memory_mb=64,
    max_tokens=1900,
)


def measure(device: torch.device, found: Found) -> None:
    sizes = GPU if device.type == "cuda" else CPU
    with tempfile.TemporaryDirectory(prefix="instar-bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(sizes.config)))
        settings = WorkerSettings(
            models=[f"bench={folder}"],
            device=str(device),
            dtype=sizes.dtype,
            load_format="dummy",
            memory_mb=sizes.memory_mb,
            max_tp=1,
            variants=["int4"],
        )
        with timed_images(device) as seconds:
            loaded = load(settings, "w0", say)
        try:
            loop = MorphLoop(loaded, [sizes.layer], sizes.max_tokens)
            found.put(images={"mb": loop.variants.store.nbytes / 1e6} | dict(seconds))
            _idle(loop, device, sizes, found)
            _tokens(loop, sizes, found)
            _beside(loop, sizes, found)
        finally:
            loaded.morphs.close()
    loaded.pool.check_integrity()


@contextmanager
def timed_images(device: torch.device) -> Iterator[dict[str, float]]:
    """Count the seconds of making host images meanwhile, by what is done; each part waits for the GPU."""
    seconds, clock = defaultdict[str, float](float), device_clock(device)

    def timed(what: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            began = clock()
            try:
                return work(*args, **more)
            finally:
                seconds[what] += clock() - began

        return call

    make_putter = HostStore._putter

    def putter(self: HostStore[Any], fd: int) -> Put[Any]:
        return timed("stored_s", make_putter(self, fd))

    opened = variants_module.LayerVariants.open
    with ExitStack() as undo:
        for what, where, name in (
            ("read_s", variants_module, "lay_out"),
            ("rounded_s", variants_module, "write_half"),
            ("summed_s", variants_module, "row_sums"),
            ("checked_s", variants_module, "expected_outputs"),
            ("pinned_s", HostStore, "_pin"),
        ):
            undo.enter_context(mock.patch.object(where, name, timed(what, getattr(where, name))))
        undo.enter_context(mock.patch.object(HostStore, "_putter", putter))
        undo.enter_context(mock.patch.object(variants_module.LayerVariants, "open", timed("all_s", opened)))
        yield seconds


def _idle(loop: MorphLoop, device: torch.device, sizes: Sizes, found: Found) -> None:
    """Swap an idle engine, after one swap each way that finds all pages made and all products checked."""
    for precision in 2 * WAYS:
        loop.swap(precision, [sizes.layer])
    for _ in range(max(1, sizes.swaps // 4)):
        for precision in WAYS:
            images = [loop.variants.image(sizes.layer, part, precision) for part in PARTS]
            floor = _floor_s(images, device)
            told = loop.swap(precision, [sizes.layer])
            found.add("idle", _row(told) | {"floor_ms": 1e3 * floor, "to": precision})
    for precision in 2 * WAYS:
        with timed_boundaries(loop.backend) as boundaries:
            loop.swap(precision, [sizes.layer])
        found.add("boundaries", boundaries.row() | {"to": precision})
    with profiled(found, "swaps"):
        for precision in WAYS:
            loop.swap(precision, [sizes.layer])
    variants = loop.variants
    for part in PARTS:  # the copying thread's work, in this one
        with profiled(found, f"mapping and copying {part}"):
            variants.map(sizes.layer, part, "int4")
            variants.copy_job(sizes.layer, part, "int4")(lambda: None)
            variants.unmap(sizes.layer, part, "int4")


def _floor_s(images: list[torch.Tensor], device: torch.device) -> float:
    """Return the seconds of copying the images to memory of the device that torch has already."""
    targets = [torch.empty(image.shape, dtype=image.dtype, device=device) for image in images]
    clock, best = device_clock(device), float("inf")
    for _ in range(3):
        began = clock()
        for target, image in zip(targets, images, strict=True):
            target.copy_(image, non_blocking=True)
        best = min(best, clock() - began)
    return best


def _row(told: MorphReport) -> dict[str, float]:
    numbers = told.numbers
    return {
        "ms": 1e3 * float(numbers["swap_seconds"]),
        "whole_ms": 1e3 * float(numbers["seconds"]),
        "mb": float(numbers["bytes_copied"]) / 1e6,
        "copying_ms": 1e3 * float(numbers["copy_seconds"]),
        "engine_ms": 1e3 * float(numbers["boundary_seconds"]),
    }


def _tokens(loop: MorphLoop, sizes: Sizes, found: Found) -> None:
    """Compare a prompt's tokens before and after swaps, of an idle engine and under load."""
    _alone(loop)  # from now on the prefix cache has the prompt
    full = _both(loop)
    loop.swap("int4", [sizes.layer])
    swapped = _both(loop)
    loop.swap("full", [sizes.layer])
    again = _both(loop)
    with_load = []
    for precision in WAYS:
        loop.beside([(precision, [sizes.layer])])
        _end_load(loop)
        with_load.append(_both(loop))
    found.put(
        tokens_differ_in_int4=swapped[WITHOUT] != full[WITHOUT],
        tokens_differ_by_cache=full[WITHOUT] != full[CACHED],
    )
    for what, made, expected in (
        ("back in full precision", again, full),
        ("in INT4 after a swap under load", with_load[0], swapped),
        ("back in full precision after a swap under load", with_load[1], full),
    ):
        for how in (CACHED, WITHOUT):
            if made[how] != expected[how]:
                found.problem(f"tokens {how} {what}: {made[how]} instead of {expected[how]}")


CACHED, WITHOUT = "with the prefix cache", "without a prefix cache"


def _both(loop: MorphLoop) -> dict[str, list[int]]:
    """Return the prompt's tokens with its first blocks from the prefix cache, and with none."""
    with mock.patch.object(PrefixIndex, "find", lambda *_: []):
        without = _alone(loop)
    return {CACHED: _alone(loop), WITHOUT: without}


def _alone(loop: MorphLoop) -> list[int]:
    engine = loop.loaded.engine
    engine.submit(loop.instance_id, greedy("alone", PROMPT, NUM_OUT))
    tokens: list[int] = []
    while engine.has_work:
        for result in engine.step():
            for output in result.outputs:
                tokens += output.delta.token_ids
    return tokens


def _end_load(loop: MorphLoop) -> None:
    engine = loop.loaded.engine
    engine.cancel([str(i) for i in range(SEQUENCES)])
    while engine.has_work:
        engine.step()


def _beside(loop: MorphLoop, sizes: Sizes, found: Found) -> None:
    engine, morphs, alone_s = loop.loaded.engine, loop.loaded.morphs, list[float]()
    step = engine.step

    def timed_step() -> Any:
        is_morphing, began = morphs.num_running > 0, time.perf_counter()
        results = step()
        if is_morphing:
            alone_s.append(time.perf_counter() - began)
        return results

    with timed_boundaries(loop.backend) as boundaries, mock.patch.object(engine, "step", timed_step):
        parts = loop.alternate(sizes.swaps)
    _end_load(loop)
    alone_s.sort()
    without_boundaries = {
        "beside_alone_p99_ms": 1e3 * alone_s[int(0.99 * (len(alone_s) - 1))],
        "beside_alone_longest_ms": 1e3 * alone_s[-1],
    }
    found.put(steps=steps_row(parts) | without_boundaries)
    found.add("boundaries", boundaries.row() | {"to": "all swaps beside steps"})
    found.add("beside", *(_row(part.swap) for part in parts if part.swap))


def steps_row(parts: list[Part]) -> dict[str, float]:
    """Return milliseconds of steps with and without a swap beside them."""
    row: dict[str, float] = {}
    for name, chosen in (("without", parts[0::2]), ("beside", parts[1::2])):
        seconds = sorted(second for part in chosen for second in part.seconds)
        row |= {
            f"{name}_steps": len(seconds),
            f"{name}_median_ms": 1e3 * statistics.median(seconds),
            f"{name}_p99_ms": 1e3 * seconds[int(0.99 * (len(seconds) - 1))],
            f"{name}_longest_ms": 1e3 * seconds[-1],
        }
    return row


def boundary_text(row: dict[str, Any]) -> str:
    parts = sorted((name for name in row if name.endswith("_ms")), key=lambda name: -row[name])
    return ", ".join(f"{name[:-3]} {row[name]:.2f}" for name in parts if row[name] >= 0.005)


def lines(found: dict[str, Any]) -> Iterator[str]:
    if images := found.get("images"):
        parts = ", ".join(f"{name[:-2]} {images[name]:.2f}" for name in images if name not in ("mb", "all_s"))
        yield (
            f"host images: {images['mb']:.0f} MB in {images['all_s']:.2f} s,"
            f" {images['mb'] / 1e3 / images['all_s']:.2f} GB/s ({parts} s)"
        )
    for to in ("int4", "full"):
        if rows := [row for row in found.get("idle", []) if row["to"] == to]:
            keys = ("ms", "whole_ms", "copying_ms", "floor_ms")
            ms, whole, copying, floor = (statistics.median(row[key] for row in rows) for key in keys)
            yield (
                f"swap to {to}, idle: {rows[0]['mb']:.0f} MB in {ms:.1f} ms, copying {copying:.1f}, copy's"
                f" floor {floor:.1f} ms, ratio {ms / floor:.2f} (bar 1.5); with the KV blocks {whole:.1f} ms"
            )
        for row in [row for row in found.get("boundaries", []) if row["to"] == to][-1:]:
            yield f"  ms in the engine's thread: {boundary_text(row)}"
    if row := found.get("steps"):
        yield (
            f"steps beside swaps: median {row['beside_median_ms']:.2f} ms, P99 {row['beside_p99_ms']:.2f},"
            f" longest {row['beside_longest_ms']:.2f}; without {row['without_median_ms']:.2f},"
            f" {row['without_p99_ms']:.2f}, {row['without_longest_ms']:.2f}"
        )
        yield (
            f"  of the steps beside swaps, without their boundaries: P99 {row['beside_alone_p99_ms']:.2f} ms,"
            f" longest {row['beside_alone_longest_ms']:.2f}"
        )
        for each in [each for each in found["boundaries"] if each["to"] == "all swaps beside steps"]:
            yield f"  their boundaries, ms: {boundary_text(each)}"
    if beside := found.get("beside"):
        ms, whole = (statistics.median(row[key] for row in beside) for key in ("ms", "whole_ms"))
        yield f"a swap beside steps: {ms:.1f} ms, with the KV blocks {whole:.1f} ms"


def main() -> int:
    return run_alone(__doc__, "swaps", measure, lines)
