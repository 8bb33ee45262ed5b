"""Stages of one model in processes, with real sockets between them, as workers have.

The first stage is the caller's: `lead` makes it the leader of `StageProcesses`. Layers lie in memory in every
precision that is needed, side by side, and `use` chooses those of the next step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import kernels  # before torch: it settles how torch's threads wait

# isort: split
import psutil
import torch

from bench.common.engines import CPU, EngineShape, fill_cache, silence
from bench.common.loading import LoadFormat, load_model
from bench.common.processes import END, Children
from bus.messages import PARTS
from bus.precisions import BITS, Precision
from worker.distributed.messages import Peer
from worker.distributed.transport import Transport
from worker.engine.build import MIB, compile_kernels, make_cache, make_pool
from worker.engine.core import EngineCore
from worker.model.layer import Attention, FeedForward, Layer
from worker.model.shard import Shard
from worker.model.weights import tensors_of
from worker.morph.variants import NoVariants
from worker.pipeline.build import stage_target, start_leading
from worker.pipeline.pipeline import RemoteStage
from worker.pipeline.stage_host import StageHost
from worker.pipeline.stage_runner import LoadedStage
from worker.profiler.device_memory import peak_memory
from worker.profiler.fingerprint import CutPlan
from worker.profiler.links import ProbeResponder
from worker.shape.host_images import write_half
from worker.shape.ranges import VariantRanges

PIPELINE, TIMEOUT_S, START_S = "bench@w0", 60.0, 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """The stages of a model: stage i has layers [bounds[i], bounds[i + 1]), in full and in `precisions`."""

    folder: Path
    bounds: Sequence[int]
    shape: EngineShape
    budget_mib: int
    precisions: Sequence[Precision] = ()
    load_format: LoadFormat = "safetensors"
    max_tp: int = 1
    threads: int = 1

    @property
    def parts(self) -> list[tuple[int, int]]:
        return list(pairwise(self.bounds))


class LocalStage:
    """One stage, in this process."""

    def __init__(self, staging: Staging, number: int) -> None:
        self.pool = make_pool(CPU, staging.budget_mib * MIB)
        self.model = load_model(
            staging.folder,
            self.pool,
            dtype=torch.float32,
            load_format=staging.load_format,
            max_tp=staging.max_tp,
            layers=staging.parts[number],
        )
        self.limits = staging.shape.limits(self.model)
        bits = [BITS[precision] for precision in staging.precisions]
        compile_kernels(self.model, self.limits, self.pool.backend.device, bits=bits)
        self._plan = CutPlan(
            self.model.config,
            ["full", *staging.precisions],
            dtype=torch.float32,
            page_bytes=self.pool.page_bytes,
            max_tp=staging.max_tp,
            load_format=staging.load_format,
            depths=[self.model.config.num_layers],
        )
        self._ranges = VariantRanges(self.model, self.pool, self._plan.quantized)
        self._layers: dict[Precision, list[Layer]] = {"full": list(self.model.layers)}
        for precision in staging.precisions:
            self._layers[precision] = [self._make(i, precision) for i in range(len(self.model.layers))]
        self.cache = make_cache(self.pool, self.model, self.limits, "bench")
        fill_cache(self.pool, self.cache, self.model, self.limits)
        self._is_watched, self._peak_bytes = False, 0

    def _make(self, index: int, precision: Precision) -> Layer:
        weights = self.model.weights[index]
        for part in PARTS:
            memory = self._ranges.memory((index, part, precision))
            memory.map(0, memory.num_pages)
            tensors = tensors_of(memory, self._plan.quantized[part, precision])
            full = weights.attention if part == "attention" else weights.feed_forward
            write_half(self._plan.config, tensors, self._plan.matrices[precision], index, full.tensors)
        attention, feed_forward = (self._ranges.half((index, part, precision), Shard()) for part in PARTS)
        assert isinstance(attention, Attention) and isinstance(feed_forward, FeedForward)
        return Layer(attention, feed_forward, Shard())

    def use(self, precision: Precision) -> None:
        """Run the layers in this precision from the next step on."""
        self.model.layers[:] = self._layers[precision]

    def weight_bytes(self, precision: Precision) -> int:
        """Return the bytes of whole pages in this precision, with the stage's embedding and head if any."""
        return self._plan.weight_bytes(len(self.model.layers), precision)

    def kv_bytes(self, num_blocks: int) -> int:
        """Return the bytes of whole pages of so many blocks in its layers."""
        return self.cache.num_layers * self.cache.pages_for(num_blocks) * self.pool.page_bytes

    def watch(self) -> None:
        """Begin to measure activations in `watched`."""
        self._is_watched, self._peak_bytes = True, 0

    def peak_bytes(self) -> int:
        """Return the most activation bytes of a step since `watch`, and stop measuring."""
        self._is_watched = False
        return self._peak_bytes

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Measure the activations of a step, if `watch` was called."""
        if not self._is_watched:
            yield
            return
        with peak_memory(self.pool.backend.device) as peak:
            yield
        self._peak_bytes = max(self._peak_bytes, peak.nbytes)

    def release(self) -> None:
        self.cache.release()
        self._ranges.release()
        self.model.release()
        self.pool.close()


def lead(stage: LocalStage, behind: Sequence[RemoteStage], woken: threading.Event) -> EngineCore:
    """Make the first stage the leader; `woken` is set when `can_step` may have changed."""
    steps = start_leading(
        PIPELINE,
        "w0",
        stage.model,
        stage.cache,
        stage.limits,
        behind,
        timeout_s=TIMEOUT_S,
        wake=woken.set,
    )
    while True:
        try:
            next(steps)
            time.sleep(0.01)
        except StopIteration as end:
            led: EngineCore = end.value
            return led


class StageProcesses(Children):
    """The stages after the leader's, each in a process; a context that ends them."""

    def __init__(self, staging: Staging) -> None:
        self._parts = staging.parts[1:]
        numbers = range(1, 1 + len(self._parts))
        super().__init__(_follow, [(staging, number) for number in numbers], timeout_s=TIMEOUT_S)
        self._measured = [psutil.Process(), *(psutil.Process(one.pid) for one in self.processes)]

    def wait(self) -> list[RemoteStage]:
        """Wait until all are loaded; return what their leader must know."""
        return [
            RemoteStage(first, end, [Peer(f"w{number}", 1, address, key)])
            for number, ((address, key), (first, end)) in enumerate(
                zip(self.ready(START_S), self._parts, strict=True), 1
            )
        ]

    def cpu_seconds(self) -> list[float]:
        """Return the CPU seconds of each process, this one first."""
        return [times.user + times.system for times in (one.cpu_times() for one in self._measured)]


# ------------------------------------------------------------------------------------- in a stage's process


def _follow(parent: Connection, staging: Staging, number: int) -> None:
    silence()
    kernels.configure(staging.threads)
    woken = threading.Event()
    transport = Transport("127.0.0.1", TIMEOUT_S)
    ProbeResponder(transport, CPU)
    stages = StageHost(transport)
    stages.wake = woken.set
    with torch.inference_mode():
        stage = LocalStage(staging, number)
        target = stage_target(stage.model, stage.cache, NoVariants(), useful_blocks=0)
        stages.add(LoadedStage(PIPELINE, number, 1, stage.model, target, lambda: None), START_S)
        parent.send((transport.address, transport.key))
        orders = _orders(parent, woken)
        while True:
            while stages.can_step:
                with stage.watched():
                    stages.step()
            with suppress(Empty):
                what, *arguments = orders.get_nowait()
                if what == END:
                    break
                parent.send(getattr(stage, what)(*arguments))
                continue
            woken.wait()
            woken.clear()
        stages.close()
        transport.close()


def _orders(parent: Connection, woken: threading.Event) -> SimpleQueue[tuple[Any, ...]]:
    """Return a queue of the parent's calls, which ends with END."""
    orders: SimpleQueue[tuple[Any, ...]] = SimpleQueue()

    def read() -> None:
        with suppress(EOFError, OSError):
            while True:
                orders.put(parent.recv())
                woken.set()
        orders.put((END,))
        woken.set()

    threading.Thread(target=read, name="orders", daemon=True).start()
    return orders
