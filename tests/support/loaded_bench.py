"""A worker's service with real, tiny models on a real Redis, and what it says of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.worker_bench import Bench
from worker.deploy.model_host import ModelHost
from worker.service.start_up import load

# What it tells, and how often: sooner than in service.
QUICK = {"telemetry_s": 0.05, "idle_telemetry_s": 0.2}


@dataclass
class LoadedBench(Bench):
    """A worker of the model `first` in `folder`. `kind`: of the events that `hear` gets."""

    folder: Path = Path()
    loaded: ModelHost | None = None
    kind: type[Any] = object

    def __post_init__(self) -> None:
        pass

    def load(self, settings: Any, worker: str, progress: Callable[[str], None]) -> ModelHost:
        self.loaded = load(settings, worker, progress)
        return self.loaded

    def hear(self, message: Any) -> None:
        raise NotImplementedError

    async def listen(self) -> None:
        await asyncio.gather(super().listen(), self._listen_to_events())

    async def _listen_to_events(self) -> None:
        async with self.bus.reader(self.bus.names.events, self.kind, start="0") as reader:
            async for batch in reader:
                for _, message in batch:
                    self.hear(message)
