"""What a swap costs the steps beside it, and how long it takes, on the CPU in float32.

    python -m bench.morph_cost [--quick] [--threads 2]

The engine and the morph executor of a worker with its default share of time for morphs, in one process, on a
100M-parameter model with random weights. Eight sequences decode all the time.

Steps: some while a layer is swapped to INT4, as many without, some while it is swapped back, as many without,
and so on. Those with a swap are compared with the mean of those around them: a longer context and the layer's
own change of speed then cancel. A step's time includes what morphs do before it. Bar: under 5 % longer.
Beside it stands what does not depend on who else is on the machine: the share of a swap's time that it spent
copying or in the engine's thread, which is the most that it can have taken from the steps.

Time: from the command to its end, against that of one thread that copies as many bytes, in this run: into
pages that are there, and the way that swaps copy into fresh pages, which the system has to find first. Idle,
and beside the steps, where a swap has only its share of the time. Bar: under 1.5 times the first.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kernels  # noqa: F401 before torch: it settles how torch's threads wait

# isort: split
import torch

from bench.dummy_model import saved_model
from bench.offline import say, silence
from bus.messages import MorphReport, Precision, SamplingParams, Swap
from bus.settings import WorkerSettings
from worker.core import Request
from worker.engine.build import make_pool
from worker.memory import VirtualRange
from worker.morph.variants import LayerVariants
from worker.service.loaded import Loaded
from worker.service.loading import load

SIZE = "100M"
LAYER = 5
SEQUENCES, PROMPT_TOKENS = 8, 64
STEPS = 24  # of a part with no swap, at least
STEP_BAR, TIME_BAR = 0.05, 1.5
WAYS: tuple[Precision, Precision] = ("int4", "full")
RESULT = Path(__file__).with_name("results") / "morph_cost.json"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="4 swaps each way instead of 16")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    silence()
    num_swaps = 4 if args.quick else 16
    with serving(args.threads) as morphs:
        floors = morphs.floors()
        for name, rate in floors.items():
            say(f"one thread copies {rate / 1e9:5.2f} GB/s {name}")
        idle = [morphs.swap_idle(way) for _ in range(num_swaps) for way in WAYS]
        say("swaps beside steps")
        parts = morphs.alternate(2 * num_swaps)
    result = report(floors, idle, parts) | {"quick": args.quick, "threads": args.threads}
    RESULT.parent.mkdir(exist_ok=True)
    if not args.quick:
        RESULT.write_text(json.dumps(result) + "\n")
    say(json.dumps(result))
    return 0 if all(bar["is_met"] for bar in result["bars"].values()) else 1


# ------------------------------------------------------------------------------------- the engine


@contextmanager
def serving(threads: int) -> Iterator[Morphs]:
    """A worker's engine and executor on the dummy model, with eight sequences that do not end."""
    with saved_model(SIZE) as folder:
        settings = WorkerSettings(
            models=[f"bench={folder}"],
            device="cpu",
            dtype="float32",
            memory_mb=768,
            max_tp=1,
            threads=threads,
            variants=["int4"],
        )
        loaded = load(settings, "w0", lambda text: None)
        try:
            yield Morphs(loaded)
        finally:
            loaded.morphs.close()
            for target in loaded.morphs.targets.values():
                if isinstance(target.variants, LayerVariants):
                    target.variants.release()


class Morphs:
    """The worker's loop by hand: morphs between steps, one layer swapped there and back."""

    def __init__(self, loaded: Loaded) -> None:
        self._engine, self._executor = loaded.engine, loaded.morphs
        self._wakened = threading.Event()
        self._executor.wake = self._wakened.set
        (self._target,) = self._executor.targets.values()
        self._ids = itertools.count()

    def floors(self) -> dict[str, float]:
        """Bytes per second of copying one half's image, full precision, with one thread; best of several."""
        variants: Any = self._target.variants
        image: torch.Tensor = variants._store.image((LAYER, "ffn", "full", "weights"))
        page_bytes = self._target.resizer.cache.pool.page_bytes
        pool = make_pool(torch.device("cpu"), image.numel() + page_bytes, page_bytes)
        target = pool.reserve(image.numel(), kind="weights", owner="the floor")
        try:
            return {
                "into pages that are there": _best(image, lambda: _copy_into_resident(image, target)),
                "into fresh pages": _best(image, lambda: _copy_into_fresh(image, target)),
            }
        finally:
            target.release()
            pool.close()

    def swap_idle(self, precision: Precision) -> MorphReport:
        """While nothing runs."""
        self._begin(precision)
        while True:
            self._wakened.clear()
            if end := self._advance(is_busy=False):
                return end
            self._wakened.wait(self._executor.patience_s)

    def alternate(self, num_swaps: int) -> list[tuple[list[float], MorphReport | None]]:
        """Seconds of each step of each part: without, with a swap, without, ... The report is the swap's."""
        for i in range(SEQUENCES):
            prompt = [(i + 37 * j) % 8000 for j in range(PROMPT_TOKENS)]
            sampling = SamplingParams(max_tokens=1900, seed=0, temperature=0.0)
            request = Request(id=str(i), prompt_token_ids=prompt, sampling=sampling)
            self._engine.submit(self._target.instance.id, request)
        for _ in range(STEPS):
            self._engine.step()
        parts: list[tuple[list[float], MorphReport | None]] = [self._without(STEPS)]
        for number in range(num_swaps):
            parts.append(self._with(WAYS[number % 2]))
            parts.append(self._without(max(STEPS, len(parts[-1][0]))))
            say(f"{number + 1} of {num_swaps} swaps")
        return parts

    def _without(self, num_steps: int) -> tuple[list[float], None]:
        return [self._timed_step()[0] for _ in range(num_steps)], None

    def _with(self, precision: Precision) -> tuple[list[float], MorphReport]:
        self._begin(precision)
        seconds = []
        while True:
            took, end = self._timed_step()
            seconds.append(took)
            if end:
                return seconds, end

    def _timed_step(self) -> tuple[float, MorphReport | None]:
        began = time.perf_counter()
        end = self._advance(is_busy=True)
        results = self._engine.step()
        took = time.perf_counter() - began
        if len(results[0].outputs) != SEQUENCES:
            raise RuntimeError("a sequence has ended; ask for fewer swaps")
        return took, end

    def _begin(self, precision: Precision) -> None:
        self._executor.begin(
            Swap(
                id=f"swap {next(self._ids)}",
                epoch=0,
                instance=self._target.instance.id,
                precision=precision,
                layers=[LAYER],
                wait_s=10.0,
            )
        )

    def _advance(self, *, is_busy: bool) -> MorphReport | None:
        """Raises RuntimeError for a swap that was not applied."""
        ended = [report for report in self._executor.advance(is_busy) if report.state != "running"]
        if ended and ended[0].state != "applied":
            raise RuntimeError(f"{ended[0].id} {ended[0].state}: {ended[0].reason}")
        return ended[0] if ended else None


# ------------------------------------------------------------------------------------- the floor


def _best(image: torch.Tensor, copy: Callable[[], float]) -> float:
    return float(image.numel() / min(copy() for _ in range(9)))


def _copy_into_resident(image: torch.Tensor, target: VirtualRange) -> float:
    if not target.num_mapped:
        target.map(0, target.num_pages)
        target.tensor(torch.uint8, image.shape).fill_(1)
    address = target.tensor(torch.uint8, image.shape).data_ptr()
    began = time.perf_counter()
    ctypes.memmove(address, image.data_ptr(), image.numel())
    return time.perf_counter() - began


def _copy_into_fresh(image: torch.Tensor, target: VirtualRange) -> float:
    target.unmap(0, target.num_mapped)
    target.map(0, target.num_pages)
    began = time.perf_counter()
    target.write(0, image)
    return time.perf_counter() - began


# ------------------------------------------------------------------------------------- the numbers


def report(
    floors: dict[str, float],
    idle: list[MorphReport],
    parts: list[tuple[list[float], MorphReport | None]],
) -> dict[str, Any]:
    resident, fresh = floors.values()
    means = [statistics.fmean(seconds) for seconds, _ in parts]
    slower = [means[i] / ((means[i - 1] + means[i + 1]) / 2) - 1 for i in range(1, len(means), 2)]
    control = [means[i] / ((means[i - 2] + means[i + 2]) / 2) - 1 for i in range(2, len(means) - 2, 2)]
    beside = [end for _, end in parts if end]
    found: dict[str, Any] = {
        "bench": "morph_cost",
        "copy_gb_s": {"resident": round(resident / 1e9, 2), "fresh": round(fresh / 1e9, 2)},
        "step_ms_without": round(1e3 * statistics.median(means[0::2]), 2),
        "step_ms_with": round(1e3 * statistics.median(means[1::2]), 2),
        "steps_longer": round(statistics.median(slower), 4),
        "steps_longer_quartiles": [round(value, 4) for value in statistics.quantiles(slower, n=4)[::2]],
        "noise_of_parts_without": round(statistics.median(map(abs, control)), 4) if control else None,
        "swaps": {},
    }
    for where, ends in (("idle", idle), ("beside steps", beside)):
        for way, offset in (("to int4", 0), ("to full", 1)):
            found["swaps"][f"{way}, {where}"] = _swaps(ends[offset::2], resident, fresh)
    found["bars"] = _bars(found)
    _say_card(found)
    return found


def _swaps(ends: list[MorphReport], resident: float, fresh: float) -> dict[str, float]:
    """Medians."""
    copied = float(ends[0].numbers["bytes_copied"])
    seconds = statistics.median(float(end.numbers["seconds"]) for end in ends)
    copying = statistics.median(float(end.numbers["copy_seconds"]) for end in ends)
    engine = statistics.median(float(end.numbers["boundary_seconds"]) for end in ends)
    return {
        "mb": round(copied / 1e6, 2),
        "ms": round(1e3 * seconds, 2),
        "copying_ms": round(1e3 * copying, 2),
        "engine_ms": round(1e3 * engine, 2),  # map, check, install, unmap
        "share_of_time": round((copying + engine) / seconds, 4),
        "times_floor": round(seconds * resident / copied, 2),
        "times_floor_of_fresh_pages": round(seconds * fresh / copied, 2),
    }


def _bars(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    idle = {way: one["times_floor"] for way, one in found["swaps"].items()}
    judged = {
        "steps beside swaps, longer by": {
            "bar": STEP_BAR,
            "value": found["steps_longer"],
            "is_met": found["steps_longer"] < STEP_BAR,
        }
    }
    for way, times in idle.items():
        judged[f"swap {way}, times the copy's floor"] = {
            "bar": TIME_BAR,
            "value": times,
            "is_met": times < TIME_BAR,
        }
    return judged


def _say_card(found: dict[str, Any]) -> None:
    for way, one in found["swaps"].items():
        say(
            f"{way:<22} {one['mb']:5.2f} MB in {one['ms']:7.1f} ms ({one['copying_ms']:4.1f} copying, "
            f"{one['engine_ms']:4.1f} of the engine's time: {one['share_of_time']:.1%}): "
            f"{one['times_floor']:.1f} times the floor, {one['times_floor_of_fresh_pages']:.1f} that of fresh"
        )
    low, high = found["steps_longer_quartiles"]
    say(
        f"a step {found['step_ms_without']} ms, beside a swap {found['step_ms_with']} ms: "
        f"{found['steps_longer']:+.1%} (quartiles {low:+.1%} to {high:+.1%}; parts without a swap differ by "
        f"{found['noise_of_parts_without'] or 0:.1%})"
    )
    for what, bar in found["bars"].items():
        say(f"{what}: {bar['value']} (bar: under {bar['bar']}): {'met' if bar['is_met'] else 'MISSED'}")


if __name__ == "__main__":
    sys.exit(main())
