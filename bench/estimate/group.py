"""A whole model in a group of two ranks, for `bench.estimate`.

Two workers' processes become a group by a Transform and change their precision together by Swaps, as the
service's do.
"""

from __future__ import annotations

import itertools
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import kernels  # noqa: F401 before torch: it settles how torch's threads wait

# isort: split
from bench.common.engines import greedy
from bench.estimate.truth import Prompts, Running
from bench.transform.group import MODEL, WAIT_S, Leader, Worker
from bus.deployments import Configuration
from bus.morphs import Swap
from bus.precisions import Precision
from worker.engine.sequence import Limits
from worker.profiler.device_memory import peak_memory

T = TypeVar("T")
TP = 2


class MeasuredGroup:
    """A whole model whose layers all have degree 2."""

    shape = Configuration(tp=TP)

    def __init__(self, folder: Path, num_layers: int, limits: Limits, **settings: Any) -> None:
        """Form the group; `settings` are those of the workers. Raises RuntimeError if no group is formed."""
        self._num_layers = num_layers
        self._ids = itertools.count()
        self._precision: Precision = "full"
        self._stack = ExitStack()
        try:
            images = self._stack.enter_context(
                tempfile.TemporaryDirectory(prefix="instar-bench-", dir="/dev/shm")
            )
            self._workers = self._stack.enter_context(
                Leader(
                    folder,
                    TP,
                    Rank,
                    sequences=0,
                    max_tp=TP,
                    host_dir=images,
                    max_num_seqs=limits.max_num_seqs,
                    max_model_len=limits.max_model_len,
                    max_num_batched_tokens=limits.max_num_batched_tokens,
                    block_tokens=limits.block_tokens,
                    **settings,
                )
            )
            self._workers.change(TP, num_layers)
        except BaseException:
            self._stack.close()
            raise

    def use(self, precision: Precision) -> None:
        """Swap all layers. Raises RuntimeError if the swap is not applied."""
        if precision == self._precision:
            return
        swap = Swap(
            id=f"swap {next(self._ids)}",
            epoch=1,
            instance=f"{MODEL}@w0",
            precision=precision,
            layers=list(range(self._num_layers)),
            wait_s=WAIT_S / 2,
        )
        report = self._workers.ask(0, "change", swap, {})
        if report.state != "applied":
            raise RuntimeError(f"to {precision}: {report.state}: {report.reason}")
        self._precision = precision

    def run(self, prompts: Prompts, output_tokens: int) -> Running:
        """Give each worker every second prompt, as gateways do."""
        shares = [(prompts[rank::TP], output_tokens) for rank in range(TP)]
        times = self._workers.ask_each("run", shares)
        yield
        return float(max(ended for _, ended in times) - min(began for began, _ in times))

    def activation_bytes(self, prompts: Prompts) -> Generator[None, None, int]:
        self._workers.ask_each("watch")
        yield from self.run(prompts, 2)
        return sum(self._workers.ask_each("peak_bytes"))

    def weight_bytes(self, precision: Precision) -> int:
        """Return the bytes that are mapped now."""
        return sum(self._workers.ask_each("weight_bytes"))

    def kv_bytes(self, num_blocks: int) -> int:
        return sum(self._workers.ask_each("kv_bytes", [(num_blocks,)] * TP))

    def close(self) -> None:
        self._stack.close()


class Rank(Worker):
    """One of the two workers, in its process."""

    def __init__(self, name: str, folder: Path, **options: Any) -> None:
        logging.getLogger("worker.parallel").setLevel(
            logging.ERROR
        )  # a lost peer is reported when one ends first
        self._num_requests = 0
        self._watching = ExitStack()
        super().__init__(name, folder, **options)

    def run(self, prompts: Prompts, output_tokens: int) -> tuple[float, float]:
        """Return when the first request came and when the last ended, by a clock that all processes share.

        Raises RuntimeError if the worker has left the group.
        """
        began, names = time.perf_counter(), []
        for prompt in prompts:
            self._num_requests += 1
            names.append(f"{self.peer.worker} {self._num_requests}")
            self.thread.submit(self._instance.id, greedy(names[-1], prompt, output_tokens))
        self._wait(lambda: all(name in self._ended for name in names), "ends of requests")
        if self._instance.tp != TP:
            raise RuntimeError(f"{self.peer.worker} has left the group")
        return began, max((self._ended.pop(name) for name in names), default=began)

    def watch(self) -> None:
        """Begin to measure activations."""
        self._peak = self._at_boundary(
            lambda: self._watching.enter_context(peak_memory(self._instance.device))
        )

    def peak_bytes(self) -> int:
        """Return the most activation bytes at once since `watch`, and stop measuring."""
        self._at_boundary(self._watching.close)
        return self._peak.nbytes

    def weight_bytes(self) -> int:
        pages = self._at_boundary(lambda: self._loaded.pool.counts().weights)
        return pages * self._loaded.pool.page_bytes

    def kv_bytes(self, num_blocks: int) -> int:
        """Return the bytes of whole pages of so many blocks, of which this rank has its heads."""
        cache, tp = self._grouping.local.cache, self._instance.tp
        pages = cache.pool.pages_for(num_blocks * cache.block_bytes // tp)
        return cache.num_layers * pages * self._loaded.pool.page_bytes

    def _at_boundary(self, verb: Callable[[], T]) -> T:
        """Call `verb` in the engine's thread, between two steps, and return its result."""
        made: list[T] = []
        done = threading.Event()

        def act() -> None:
            made.append(verb())
            done.set()

        self.thread.call(act)
        if not done.wait(WAIT_S):
            raise RuntimeError(f"the engine reached no boundary: {self._death or f'waited {WAIT_S:g} s'}")
        return made[0]
