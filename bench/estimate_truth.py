"""What `bench.estimate` holds its estimates against: the whole model in every precision, really run."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch

from bus.deployments import Intent
from bus.messages import Precision, SamplingParams
from worker.core import Limits, Request
from worker.engine.build import Shape
from worker.engine.instance import Instance
from worker.fingerprint.activations import peak_memory
from worker.fingerprint.cut import CutPlan, Fingerprint, load_cut
from worker.memory import KVCache, PagePool
from worker.morph.host_images import at_once

Case = tuple[Precision, Intent]


@dataclass(frozen=True, slots=True)
class Found:
    """Of one precision and one intent's requests."""

    latency_s: float  # the median of all runs
    memory_bytes: int
    num_runs: int


class Truth:
    """`steps` runs one step at a time, round after round, for ever; `found` is what it found so far."""

    def __init__(
        self,
        plan: CutPlan,
        pool: PagePool,
        intents: Sequence[Intent],
        *,
        shape: Shape,
        clock: Callable[[], float],
    ) -> None:
        """plan: of all layers."""
        self._plan, self._pool, self._intents, self._clock = plan, pool, intents, clock
        self.fingerprint: Fingerprint = at_once(load_cut(plan, pool))
        for precision in plan.precisions:
            at_once(self.fingerprint.quantise(precision))
        self._block_tokens = shape.block_tokens
        self._cache = self._make_cache()
        self._instance = Instance(
            "truth",
            self.fingerprint.model,
            self._cache,
            Limits(
                max_num_seqs=max(one.batch_size for one in intents),
                max_num_batched_tokens=shape.max_num_batched_tokens,
                max_model_len=max(one.prompt_tokens + one.output_tokens for one in intents),
                block_tokens=shape.block_tokens,
            ),
            vocab_size=plan.config.vocab_size,
            device=torch.device("cpu"),
        )
        self.seconds = 0.0
        self.num_rounds = 0
        self._steps: dict[Case, list[list[float]]] = defaultdict(list)
        self._activations: dict[Precision, int] = {}
        self._num_requests = 0

    @property
    def cases(self) -> list[Case]:
        return [(precision, intent) for intent in self._intents for precision in self._plan.all_precisions]

    def steps(self) -> Generator[None, None, None]:
        for precision in self._plan.all_precisions:
            yield from self._measure_activations(precision)
        while True:
            for case in self.cases:
                run: list[float] = []
                yield from self._run(case, run)
                self._steps[case].append(run)
            self.num_rounds += 1

    def found(self) -> dict[Case, Found]:
        return {
            case: Found(
                statistics.median(map(sum, runs)),
                self._memory(case),
                len(runs),
            )
            for case, runs in self._steps.items()
        }

    def release(self) -> None:
        self._cache.release()
        self.fingerprint.release()

    # ----------------------------------------------------------------------------- its parts

    def _make_cache(self) -> KVCache:
        config = self._plan.config
        blocks = max(self._blocks(one) + one.batch_size for one in self._intents)
        cache = KVCache(
            self._pool,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_tokens=self._block_tokens,
            dtype=self._plan.model.dtype,
            max_blocks=blocks,
            owner="truth",
        )
        cache.grow(cache.pages_for(blocks))
        return cache

    def _blocks(self, intent: Intent) -> int:
        return intent.batch_size * -(-(intent.prompt_tokens + intent.output_tokens) // self._block_tokens)

    def _memory(self, case: Case) -> int:
        """Pages of weights and of the KV that these requests have at their end, and a step's activations."""
        precision, intent = case
        layers = self._plan.config.num_layers
        kv = layers * self._cache.pages_for(self._blocks(intent)) * self._pool.page_bytes
        return self._plan.weight_bytes(layers, precision) + kv + self._activations[precision]

    def _measure_activations(self, precision: Precision) -> Generator[None, None, None]:
        """Of a step that is full: the requests of others can fill it, whatever one's own are. It warms up,
        too."""
        largest = max(self._intents, key=lambda one: one.prompt_tokens * one.batch_size)
        self._submit((precision, largest), 2)
        most = 0
        while self._instance.has_work:
            with peak_memory(self._instance.device) as peak:
                self._instance.step()
            most = max(most, peak.nbytes)
            yield
        self._activations[precision] = most

    def _run(self, case: Case, seconds: list[float]) -> Generator[None, None, None]:
        self._submit(case, case[1].output_tokens)
        while self._instance.has_work:
            began = self._clock()
            self._instance.step()
            took = self._clock() - began
            seconds.append(took)
            self.seconds += took
            yield

    def _submit(self, case: Case, output_tokens: int) -> None:
        precision, intent = case
        self.fingerprint.use(self._plan.config.num_layers, precision)
        self._instance.reshaped()
        for _ in range(intent.batch_size):
            self._num_requests += 1
            prompt = [(self._num_requests * 17 + 5 * i) % 4000 for i in range(intent.prompt_tokens)]
            sampling = SamplingParams(max_tokens=output_tokens, seed=0, temperature=0.0)
            request = Request(id=str(self._num_requests), prompt_token_ids=prompt, sampling=sampling)
            self._instance.submit(request)
