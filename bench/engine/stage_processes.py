"""Stages of one model as processes of their own, with real sockets between them, as workers have.

The first stage is the caller's: `lead` makes it the leader of `StageProcesses`. Layers lie in memory in every
precision that is wanted, side by side, and `use` chooses those of the next step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import kernels  # before torch: it settles how torch's threads wait

# isort: split
import psutil
import torch

from bench.engine.offline import silence
from bus.messages import PARTS
from bus.precisions import BITS, Precision
from worker.distributed.probe import ProbeResponder
from worker.distributed.transport import Transport
from worker.engine.build import MIB, Shape, compile_kernels, fill_caches, make_cache, make_pool
from worker.engine.core import EngineCore
from worker.model import load_model
from worker.model.layer import Attention, FeedForward, Layer
from worker.model.model import LoadFormat
from worker.model.shard import Shard
from worker.model.weights import tensors_of
from worker.pipeline.build import start_leading
from worker.pipeline.pipeline import RemoteStage
from worker.pipeline.stage_host import StageHost
from worker.pipeline.stage_runner import LoadedStage
from worker.profiler.device_memory import peak_memory
from worker.profiler.fingerprint import CutPlan
from worker.shape.host_images import at_once, writing_half
from worker.shape.ranges import VariantRanges

PIPELINE, TIMEOUT_S, START_S = "bench@w0", 60.0, 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """Stage i has layers [bounds[i], bounds[i + 1]). precisions: besides full."""

    folder: Path
    bounds: Sequence[int]
    shape: Shape
    budget_mib: int
    precisions: Sequence[Precision] = ()
    load_format: LoadFormat = "safetensors"
    max_tp: int = 1
    threads: int = 1

    @property
    def parts(self) -> list[tuple[int, int]]:
        return list(pairwise(self.bounds))


class Stage:
    """One of them, in this process."""

    def __init__(self, staging: Staging, number: int) -> None:
        self.pool = make_pool(torch.device("cpu"), staging.budget_mib * MIB)
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
        fill_caches(self.pool, [(self.cache, self.model, self.limits)])
        self._is_watched, self._peak_bytes = False, 0

    def _make(self, index: int, precision: Precision) -> Layer:
        weights = self.model.weights[index]
        for part in PARTS:
            memory = self._ranges.memory((index, part, precision))
            memory.map(0, memory.num_pages)
            tensors = tensors_of(memory, self._plan.quantized[part, precision])
            full = weights.attention if part == "attention" else weights.feed_forward
            at_once(writing_half(tensors, self._plan.matrices[precision], index, full.tensors))
        attention, feed_forward = (self._ranges.half((index, part, precision), Shard()) for part in PARTS)
        assert isinstance(attention, Attention) and isinstance(feed_forward, FeedForward)
        return Layer(attention, feed_forward, Shard())

    def use(self, precision: Precision) -> None:
        """Between two steps: the next one runs its layers in this precision."""
        self.model.layers[:] = self._layers[precision]

    def weight_bytes(self, precision: Precision) -> int:
        """Whole pages of what it runs in this precision, with embedding and head where it has them."""
        return self._plan.weight_bytes(len(self.model.layers), precision)

    def kv_bytes(self, num_blocks: int) -> int:
        """Whole pages of so many blocks in its layers."""
        return self.cache.num_layers * self.cache.pages_for(num_blocks) * self.pool.page_bytes

    def watch(self) -> None:
        """From here on `watched` looks at activations."""
        self._is_watched, self._peak_bytes = True, 0

    def peak_bytes(self) -> int:
        """The most that a step had at once since `watch`, which ends."""
        self._is_watched = False
        return self._peak_bytes

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A step."""
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


def lead(stage: Stage, behind: Sequence[RemoteStage], woken: threading.Event) -> EngineCore:
    """stage: the first. woken: set when `can_step` may have changed."""
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


class StageProcesses:
    """The stages behind the leader's. `with` ends them."""

    def __init__(self, staging: Staging) -> None:
        self._parts = staging.parts[1:]
        context = get_context("spawn")
        self._lines: list[Connection] = []
        self._started = []
        for number in range(1, 1 + len(self._parts)):
            ours, theirs = context.Pipe()
            process = context.Process(target=_follow, args=(staging, number, theirs), daemon=True)
            process.start()
            theirs.close()  # so that the end of a stage is heard of
            self._lines.append(ours)
            self._started.append(process)
        self._processes = [psutil.Process(), *(psutil.Process(one.pid) for one in self._started)]

    def __enter__(self) -> StageProcesses:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def wait(self) -> list[RemoteStage]:
        """Until all are loaded: what their leader is to know. Raises TimeoutError, and EOFError for one that
        has died."""
        doors = [_answer(line, START_S) for line in self._lines]
        return [
            RemoteStage(f"w{number}", 1, address, key, first, end)
            for number, ((address, key), (first, end)) in enumerate(zip(doors, self._parts, strict=True), 1)
        ]

    def ask(self, what: str, *arguments: Any) -> list[Any]:
        """What that method of each `Stage` returns, between two steps of it."""
        for line in self._lines:
            line.send((what, *arguments))
        return [_answer(line, TIMEOUT_S) for line in self._lines]

    def cpu_seconds(self) -> list[float]:
        """Of each process, this one first."""
        return [times.user + times.system for times in (one.cpu_times() for one in self._processes)]

    def close(self) -> None:
        for line in self._lines:
            with suppress(OSError):
                line.send(("end",))
        for process in self._started:
            process.join(20)
            if process.is_alive():
                process.kill()
        for line in self._lines:
            line.close()


def _answer(line: Connection, within_s: float) -> Any:
    if not line.poll(within_s):
        raise TimeoutError(f"a stage says nothing in {within_s:g} s")
    return line.recv()


# ------------------------------------------------------------------------------------- in a stage's process


def _follow(staging: Staging, number: int, parent: Connection) -> None:
    silence()
    kernels.configure(staging.threads)
    woken = threading.Event()
    transport = Transport("127.0.0.1", TIMEOUT_S)
    ProbeResponder(transport, torch.device("cpu"))
    stages = StageHost(transport)
    stages.wake = woken.set
    with torch.inference_mode():
        stage = Stage(staging, number)
        stages.add(LoadedStage(PIPELINE, number, 1, stage.model, stage.cache, lambda: None), START_S)
        parent.send((transport.address, transport.key))
        orders = _orders(parent, woken)
        while True:
            while stages.can_step:
                with stage.watched():
                    stages.step()
            with suppress(Empty):
                what, *arguments = orders.get_nowait()
                if what == "end":
                    break
                parent.send(getattr(stage, what)(*arguments))
                continue
            woken.wait()
            woken.clear()
        stages.close()
        transport.close()


def _orders(parent: Connection, woken: threading.Event) -> SimpleQueue[tuple[Any, ...]]:
    """What the parent says, "end" as its last word."""
    orders: SimpleQueue[tuple[Any, ...]] = SimpleQueue()

    def read() -> None:
        with suppress(EOFError, OSError):
            while True:
                orders.put(parent.recv())
                woken.set()
        orders.put(("end",))
        woken.set()

    threading.Thread(target=read, name="orders", daemon=True).start()
    return orders
