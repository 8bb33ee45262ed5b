"""The truth that `bench.estimate` compares with: the whole model, run in every precision and one shape.

The shape is one device (`OneDevice` here), a group (`bench.estimate.group`) or stages
(`bench.estimate.stages`).
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from bench.common.engines import EngineShape, greedy
from bench.common.loading import load_fingerprint
from bus.deployments import Configuration, Intent
from bus.precisions import Precision
from worker.engine.core import EngineCore
from worker.engine.recorded_batches import recorded_batches
from worker.engine.sequence import Limits
from worker.memory import KVCache, PagePool
from worker.profiler.device_memory import peak_memory
from worker.profiler.fingerprint import CutPlan, Fingerprint

Case = tuple[Configuration, Intent]
Prompts = Sequence[list[int]]
Running = Generator[None, None, float]  # yields between two steps, where others may have a turn; seconds


@dataclass(frozen=True, slots=True)
class Found:
    """The truth of one configuration and one intent's requests."""

    latency_s: float  # the median of all runs
    memory_bytes: int  # sum of all devices
    num_runs: int


class Devices(Protocol):
    """A whole model on the devices of one shape."""

    @property
    def shape(self) -> Configuration:
        """The degree and the number of stages."""

    def use(self, precision: Precision) -> None:
        """Change the precision, between two runs."""

    def run(self, prompts: Prompts, output_tokens: int) -> Running:
        """Run requests from their submission to the last token."""

    def activation_bytes(self, prompts: Prompts) -> Generator[None, None, int]:
        """Return the activation bytes that a step had at most, summed over the devices."""

    def weight_bytes(self, precision: Precision) -> int:
        """Return the bytes of whole pages on all devices, in the precision that is in use."""

    def kv_bytes(self, num_blocks: int) -> int:
        """Return the bytes of whole pages on all devices."""


class Truth:
    """Measures all cases: `steps` runs them, round after round without end; `found` returns what is known."""

    def __init__(
        self,
        devices: Devices,
        precisions: Sequence[Precision],
        intents: Sequence[Intent],
        *,
        fullest: Intent,
        block_tokens: int,
    ) -> None:
        """Measure the devices in every precision and intent; `fullest` are requests that fill a step."""
        self.devices, self.precisions, self.intents = devices, precisions, intents
        self._fullest, self._block_tokens = fullest, block_tokens
        self.seconds = 0.0
        self.num_rounds = 0
        self._seconds: dict[Case, list[float]] = defaultdict(list)
        self._memory: dict[Case, int] = {}
        self._num_requests = 0

    def steps(self) -> Generator[None, None, None]:
        """Run all cases, round after round. The first round measures memory too, which warms up."""
        while True:
            for precision in self.precisions:
                configuration = replace(self.devices.shape, precision=precision)
                self.devices.use(precision)
                if self.num_rounds == 0:
                    yield from self._measure_memory(configuration)
                for intent in self.intents:
                    took = yield from self.devices.run(self._prompts(intent), intent.output_tokens)
                    self._seconds[configuration, intent].append(took)
                    self.seconds += took
            self.num_rounds += 1

    def found(self) -> dict[Case, Found]:
        return {
            case: Found(statistics.median(seconds), self._memory[case], len(seconds))
            for case, seconds in self._seconds.items()
        }

    def _measure_memory(self, configuration: Configuration) -> Generator[None, None, None]:
        """Measure pages of weights and of the requests' KV at their end, and the activations of a full step.

        A step can be full whatever the requests are: others fill it.
        """
        activations = yield from self.devices.activation_bytes(self._prompts(self._fullest))
        weights = self.devices.weight_bytes(configuration.precision)
        for intent in self.intents:
            kv = self.devices.kv_bytes(self._blocks(intent))
            self._memory[configuration, intent] = weights + kv + activations

    def _blocks(self, intent: Intent) -> int:
        return intent.batch_size * -(-(intent.prompt_tokens + intent.output_tokens) // self._block_tokens)

    def _prompts(self, intent: Intent) -> Prompts:
        self._num_requests += intent.batch_size
        firsts = range(self._num_requests, self._num_requests + intent.batch_size)
        return [[(first * 17 + 5 * i) % 4000 for i in range(intent.prompt_tokens)] for first in firsts]


class OneDevice:
    """A whole model in this process. Only its own steps count."""

    shape = Configuration()

    def __init__(
        self,
        plan: CutPlan,
        pool: PagePool,
        intents: Sequence[Intent],
        *,
        shape: EngineShape,
        clock: Callable[[], float],
    ) -> None:
        """Load the model; `plan` has all its layers, and `intents` are the requests to run."""
        self._plan, self._pool, self._clock = plan, pool, clock
        self._num_layers = plan.config.num_layers
        self._fingerprint: Fingerprint = load_fingerprint(plan, pool)
        limits = limits_for(intents, shape)
        blocks = limits.max_num_seqs * (1 + -(-limits.max_model_len // limits.block_tokens))
        self._cache = self._make_cache(blocks, limits.block_tokens)
        self._instance = EngineCore(
            "truth",
            self._fingerprint.model,
            self._cache,
            limits,
            vocab_size=plan.config.vocab_size,
            device=pool.backend.device,
        )
        self._instance.local_executor.recorded = recorded_batches(
            self._fingerprint.model, self._cache, limits, pool.backend.device
        )
        self._num_requests = 0

    def use(self, precision: Precision) -> None:
        self._fingerprint.use(self._num_layers, precision)
        self._instance.reshaped()

    def run(self, prompts: Prompts, output_tokens: int) -> Running:
        self._submit(prompts, output_tokens)
        seconds = 0.0
        while self._instance.has_work:
            began = self._clock()
            self._instance.step()
            seconds += self._clock() - began
            yield
        return seconds

    def activation_bytes(self, prompts: Prompts) -> Generator[None, None, int]:
        self._submit(prompts, 2)
        most = 0
        while self._instance.has_work:
            with peak_memory(self._instance.device) as peak:
                self._instance.step()
            most = max(most, peak.nbytes)
            yield
        return most

    def weight_bytes(self, precision: Precision) -> int:
        return self._plan.weight_bytes(self._num_layers, precision)

    def kv_bytes(self, num_blocks: int) -> int:
        return self._num_layers * self._cache.pages_for(num_blocks) * self._pool.page_bytes

    def release(self) -> None:
        self._cache.release()
        self._fingerprint.release()

    def _make_cache(self, blocks: int, block_tokens: int) -> KVCache:
        config = self._plan.config
        cache = KVCache(
            self._pool,
            num_layers=self._num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_tokens=block_tokens,
            dtype=self._plan.model.dtype,
            max_blocks=blocks,
            owner="truth",
        )
        cache.grow(cache.pages_for(blocks))
        return cache

    def _submit(self, prompts: Prompts, output_tokens: int) -> None:
        for prompt in prompts:
            self._num_requests += 1
            self._instance.submit(greedy(str(self._num_requests), prompt, output_tokens))


def limits_for(intents: Sequence[Intent], shape: EngineShape) -> Limits:
    """Return the limits of an instance that serves these requests alone."""
    return Limits(
        max_num_seqs=max(one.batch_size for one in intents),
        max_num_batched_tokens=shape.max_num_batched_tokens,
        max_model_len=max(one.prompt_tokens + one.output_tokens for one in intents),
        block_tokens=shape.block_tokens,
    )
