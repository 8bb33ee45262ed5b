"""Engines without a service around them, requests for them, and taking turns in measurements."""

from __future__ import annotations

import collections
import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import TypeVar

import kernels  # before torch: it settles how torch's threads wait

# isort: split
import torch

from bench.common.loading import LoadFormat, load_model
from bus.messages import SamplingParams, Submit
from worker.engine.build import (
    MIB,
    compile_kernels,
    instance_of,
    make_cache,
    make_pool,
    served_limits,
    useful_pages,
)
from worker.engine.core import EngineCore
from worker.engine.engine import Engine
from worker.engine.grammars import GrammarCompiler
from worker.engine.sequence import Limits, own_request
from worker.memory import KVCache, PagePool
from worker.model import Model

CPU = torch.device("cpu")
INSTANCE = "bench"

T = TypeVar("T")


def silence() -> None:
    """Turn off the warnings of transformers about a missing GPU and its own defaults."""
    warnings.filterwarnings("ignore")
    for name in ("transformers", "ContinuousBatchingLogger"):
        logging.getLogger(name).setLevel(logging.ERROR)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape(Limits):
    """The limits to serve a model with; `max_model_len` 0: as long as the model's config allows."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int = 0
    block_tokens: int = 16

    def __post_init__(self) -> None:
        """Leave the check to `limits`: a length of 0 is filled in there."""

    def limits(self, model: Model) -> Limits:
        """Raise ModelError for a context longer than the model's config allows."""
        return Limits.of(self, **served_limits(model, self.max_model_len))


def load_engine(
    folder: Path,
    shape: EngineShape,
    budget_mib: int,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    load_format: LoadFormat = "safetensors",
    grammars: Callable[[Path, int, torch.device], GrammarCompiler] | None = None,
) -> Engine:
    """Return an engine that serves the model in a folder as INSTANCE, its weights and KV in `budget_mib`.

    grammars: makes the compiler of grammars from the folder, the size of the vocabulary and the device; None
    where no request has one.
    """
    pool = make_pool(device, budget_mib * MIB)
    model = load_model(folder, pool, dtype=dtype, load_format=load_format)
    limits = shape.limits(model)
    cache = make_cache(pool, model, limits, INSTANCE)
    fill_cache(pool, cache, model, limits)
    engine = Engine(device)
    compiler = grammars(folder, model.config.vocab_size, device) if grammars else None
    engine.add_instance(make_instance(INSTANCE, model, cache, limits, grammars=compiler))
    return engine


def close(engine: Engine) -> None:
    """Give the memory of `load_engine` back now, not when the garbage is collected."""
    instance = engine.remove_instance(INSTANCE)
    instance.close()
    cache = instance.kv
    assert isinstance(cache, KVCache)
    cache.pool.close()


def greedy(name: str, prompt: list[int], num_out: int) -> Submit:
    """Return a request for `num_out` greedy tokens."""
    sampling = SamplingParams(max_tokens=num_out, seed=0, temperature=0.0)
    return own_request(name, prompt, sampling)


def run_prompts(engine: Engine, prompts: Sequence[list[int]], num_out: int) -> tuple[float, list[list[int]]]:
    """Run greedy requests to their ends; return the seconds and the tokens of each prompt."""
    outputs: list[list[int]] = [[] for _ in prompts]
    began = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.submit(INSTANCE, greedy(str(i), prompt, num_out))
    while engine.has_work:
        for result in engine.step():
            for output in result.outputs:
                outputs[int(output.request.request_id)] += output.delta.token_ids
    return time.perf_counter() - began, outputs


def take_turns(
    ways: Mapping[str, Callable[[], T]], rounds: int, warm_up: int = 1, shuffled_by: Random | None = None
) -> dict[str, list[T]]:
    """Call the ways in turn, round after round, and return what each returned.

    What disturbs the machine then disturbs all alike. The results of the first `warm_up` rounds are dropped.
    Shuffle the order if it matters which way follows which, by what they leave in the caches.
    """
    found: dict[str, list[T]] = {name: [] for name in ways}
    order = list(ways)
    for turn in range(warm_up + rounds):
        if shuffled_by:
            shuffled_by.shuffle(order)
        for name in order:
            result = ways[name]()
            if turn >= warm_up:
                found[name].append(result)
    return found


def take_turns_by_layer(
    ways: Mapping[str, Callable[[int], T]], num_layers: int, rounds: int
) -> dict[str, list[T]]:
    """Like `take_turns`, for ways that are called with each layer in a turn."""
    calls = {name: partial(_each_layer, way, num_layers) for name, way in ways.items()}
    return {
        name: [one for turn in turns for one in turn] for name, turns in take_turns(calls, rounds).items()
    }


def _each_layer(way: Callable[[int], T], num_layers: int) -> list[T]:
    return [way(layer) for layer in range(num_layers)]


def timed(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds that a call takes."""
    began = clock()
    run()
    return clock() - began


def best_of(seconds: float, *runs: Callable[[], object]) -> list[float]:
    """Return the shortest seconds of each call; they take turns for `seconds` each."""
    best = [float("inf")] * len(runs)
    for run in runs:
        run()
    end = time.perf_counter() + seconds * len(runs)
    while time.perf_counter() < end:
        for i, run in enumerate(runs):
            best[i] = min(best[i], timed(run))
    return best


def fill_cache(pool: PagePool, cache: KVCache, model: Model, limits: Limits, reserve_pages: int = 0) -> None:
    """Give the pool's free pages, less a reserve for swaps, to the KV cache, as far as they are of use."""
    pages = min(pool.num_free - reserve_pages, useful_pages(cache, model, limits))
    cache.grow(pages // model.config.num_layers)
    assert cache.num_blocks, f"no room for a KV cache: {pages} pages are left of {pool.num_pages}"


def make_instance(
    instance_id: str,
    model: Model,
    cache: KVCache,
    limits: Limits,
    *,
    bits: Sequence[int] = (),
    grammars: GrammarCompiler | None = None,
) -> EngineCore:
    """Return an engine core with compiled kernels.

    bits: of the quantised variants of its layers. grammars: None where no request has one.
    """
    device = cache.pool.backend.device
    compile_kernels(model, limits, device, bits=bits)
    if device.type == "cuda":
        kernels.choose_products(model.products(), instance_id, device)
    instance = instance_of(instance_id, model, cache, limits, grammars)
    if recorded := instance.local_executor.recorded:
        collections.deque(recorded.record(), maxlen=0)
    return instance
