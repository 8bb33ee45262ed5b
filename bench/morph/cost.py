"""The cost of a swap for the steps beside it, and its time, on the CPU in float32.

    python -m bench.morph cost [--quick] [--threads 2]

The engine and the morph executor of a worker with its default share of time for morphs, in one process, on
models with random weights: one of 100M parameters, whose layers are small, and four layers as wide as those
of a model of 1B to 2B, where what a swap costs whatever its size counts for less. Eight sequences decode.

Steps: some while a layer is swapped to INT4, as many without, some while it is swapped back, as many without,
and so on. Those with a swap are compared with the mean of those around them: a longer context and the layer's
own change of speed then cancel. A step's time includes what morphs do before it. Bar: under 5 % longer.

Time, idle: from the command to its end, against that of one thread that copies as many bytes, measured right
before each swap. Two floors: into pages that are mapped and have been touched, the most that this machine's
memory can do; and the way that swaps copy, into pages that have memory and were just mapped. Bar: under 1.5
times the second, as swaps on a GPU are held against the bus and not against the device's memory.

Time, beside steps: a swap has only its share of the time there (on a CPU it takes the cores and the memory
that steps want), so what is held against the floor is the time that it worked.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import kernels  # noqa: F401 before torch: it settles how torch's threads wait
from bench.common.results import conclude, parser, say

# isort: split
import torch

from bench.common.dummy_model import saved_model
from bench.common.engines import greedy, silence
from bench.morph.cost_report import Part, Swapped, report, say_card
from bench.morph.floor import Floor, leave_caches
from bus.messages import PARTS
from bus.morphs import MorphReport, Swap
from bus.precisions import Precision
from bus.settings import WorkerSettings
from worker.deploy.model_host import ModelHost
from worker.memory.backend import Backend
from worker.service.start_up import load
from worker.shape.variants import LayerVariants

SEQUENCES, PROMPT_TOKENS = 8, 64
STEPS = 24  # least steps of a part without a swap
WAYS: tuple[Precision, Precision] = ("int4", "full")


@dataclass(frozen=True)
class CostCase:
    name: str  # dummy model
    layer: int  # layer that is swapped
    budget_mb: int
    swaps: int  # each way


SIZES = (CostCase("100M", 5, 768, 16), CostCase("wide", 2, 1280, 8))


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="4 swaps each way, of the small model alone")
    options.add_argument("--threads", type=int, default=2)
    args = options.parse_args()
    silence()
    found = {}
    for size in SIZES[:1] if args.quick else SIZES:
        say(f"--- {size.name}")
        found[size.name] = measure(size, args.threads, 4 if args.quick else size.swaps)
        say_card(found[size.name])
    result = {"bench": "morph_cost", "models": found, "quick": args.quick, "threads": args.threads}
    bars = {f"{name}: {what}": bar for name, one in found.items() for what, bar in one["bars"].items()}
    return conclude(result, is_kept=not args.quick, bars=bars)


def measure(size: CostCase, threads: int, num_swaps: int) -> dict[str, Any]:
    with serving(size, threads) as morphs:
        for way in 2 * WAYS:
            morphs.swap_idle(way)  # afterwards all pages have memory, and products were checked
        idle = [morphs.swap_idle(way) for _ in range(num_swaps) for way in WAYS]
        return report(idle, morphs.alternate(2 * num_swaps))


# ------------------------------------------------------------------------------------- the engine


@contextmanager
def serving(size: CostCase, threads: int, **changes: Any) -> Iterator[MorphLoop]:
    """Load a worker's engine and morph executor on the dummy model, with eight sequences that do not end."""
    with saved_model(size.name) as folder:
        settings = WorkerSettings(
            models=[f"bench={folder}"],
            device="cpu",
            dtype="float32",
            memory_mb=size.budget_mb,
            max_tp=1,
            threads=threads,
            variants=["int4"],
            **changes,
        )
        loaded = load(settings, "w0", lambda text: None)
        try:
            yield MorphLoop(loaded, [size.layer])
        finally:
            loaded.morphs.close()


class MorphLoop:
    """The worker's loop by hand: morphs between steps, layers swapped to INT4 and back."""

    def __init__(self, loaded: ModelHost, layers: list[int], max_tokens: int = 1900) -> None:
        """Swap `layers`; each sequence beside swaps has `max_tokens`, which must last for all steps."""
        self.loaded, self._layers, self._max_tokens = loaded, layers, max_tokens
        self._engine, self._executor = loaded.engine, loaded.morphs
        self._wakened = threading.Event()
        self._executor.wake = self._wakened.set
        (self._target,) = self._executor.targets.values()
        self._ids = itertools.count()

    def swap_idle(self, precision: Precision) -> Swapped:
        """Measure the floors and then swap, while nothing runs."""
        floor = Floor(self._images(precision), self._target.resizer.cache.pool.page_bytes)
        try:
            resident_s, mapped_s = floor.resident_s(), floor.mapped_s()
            leave_caches()
            return Swapped(self.swap(precision, self._layers), resident_s, mapped_s)
        finally:
            floor.close()

    def alternate(self, num_swaps: int) -> list[Part]:
        """Run steps without a swap, with one, without, ..."""
        return self.beside((WAYS[number % 2], self._layers) for number in range(num_swaps))

    def beside(self, swaps: Iterable[tuple[Precision, list[int]]]) -> list[Part]:
        """Run steps without a swap, with the first of these, without, ..."""
        for i in range(SEQUENCES):
            prompt = [(i + 37 * j) % 4000 for j in range(PROMPT_TOKENS)]
            self._engine.submit(self._target.instance.id, greedy(str(i), prompt, self._max_tokens))
        for _ in range(STEPS):
            self._engine.step()
        parts = [self._without(STEPS)]
        for number, (precision, layers) in enumerate(swaps):
            parts.append(self._with(precision, layers))
            parts.append(self._without(max(STEPS, len(parts[-1].seconds))))
            say(f"{number + 1} swaps beside steps")
        return parts

    @property
    def instance_id(self) -> str:
        return self._target.instance.id

    @property
    def backend(self) -> Backend:
        return self._target.resizer.cache.pool.backend

    @property
    def variants(self) -> LayerVariants:
        variants = self._target.variants
        assert isinstance(variants, LayerVariants)
        return variants

    def _images(self, precision: Precision) -> list[torch.Tensor]:
        return [self.variants.image(layer, part, precision) for layer in self._layers for part in PARTS]

    def swap(self, precision: Precision, layers: list[int]) -> MorphReport:
        """Swap while nothing runs."""
        self._begin(precision, layers)
        while True:
            self._wakened.clear()
            if end := self._advance(is_busy=False):
                return end
            self._wakened.wait(self._executor.patience_s)

    def _without(self, num_steps: int) -> Part:
        return Part([self._timed_step()[0] for _ in range(num_steps)], None)

    def _with(self, precision: Precision, layers: list[int]) -> Part:
        self._begin(precision, layers)
        seconds = []
        while True:
            took, end = self._timed_step()
            seconds.append(took)
            if end:
                return Part(seconds, end)

    def _timed_step(self) -> tuple[float, MorphReport | None]:
        began = time.perf_counter()
        end = self._advance(is_busy=True)
        results = self._engine.step()
        took = time.perf_counter() - began
        if not results or len(results[0].outputs) != SEQUENCES:
            raise RuntimeError("a sequence has ended; ask for fewer swaps")
        return took, end

    def _begin(self, precision: Precision, layers: list[int]) -> None:
        self._executor.begin(
            Swap(
                id=f"swap {next(self._ids)}",
                epoch=0,
                instance=self._target.instance.id,
                precision=precision,
                layers=layers,
                wait_s=10.0,
            )
        )

    def _advance(self, *, is_busy: bool) -> MorphReport | None:
        """Advance the swap and return its report if it ended. Raises RuntimeError if it was not applied."""
        ended = [report for report in self._executor.advance(is_busy) if report.state != "running"]
        if ended and ended[0].state != "applied":
            raise RuntimeError(f"{ended[0].id} {ended[0].state}: {ended[0].reason}")
        return ended[0] if ended else None
