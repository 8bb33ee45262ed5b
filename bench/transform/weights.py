"""FFN weights from TP1 to TP4 on one rank: unmapping padded shards, against a partial swap (Gyges §4.2).

Unmapping: the engine's own (`Resharder.narrow`): shards end on pages, so what the other ranks keep is
unmapped. Partial swap: gate, up and down lie one after the other without padding, a shard shares pages with
its neighbours; the rows that stay are copied to the front and the pages after them unmapped. Both end with
the layer's products set to the rows that stayed. No other rank is needed for either.

The cost of padding for the products is measured too, at every degree: the FFN over units with gaps between
them and over whole matrices of as many rows take turns, both in the same memory, since of two equal
allocations one was up to 40 % faster than the other. Times are CPU seconds of the process with one thread,
which other programs do not lengthen.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from random import Random

import torch

from bench.common.dummy_model import saved_model
from bench.common.engines import take_turns, timed
from bench.common.loading import load_model
from worker.memory import CpuBackend, PagePool
from worker.model import Model
from worker.model.config import ModelConfig
from worker.model.layer import build_feed_forward
from worker.model.layout import RangePlan, plan_model
from worker.model.shard import Shard
from worker.model.weights import tensors_in
from worker.morph.reshard import Resharder, make_resharder
from worker.morph.variants import NoVariants

PAGE_BYTES = 64 * 1024
DEGREE = 4
ALONE = Shard()


@dataclass(frozen=True, slots=True)
class Took:
    seconds: float  # seconds of this process
    pages: int  # freed


def measure_shards(size: str, rounds: int) -> dict[str, list[Took]]:
    """Return what every layer took in every round, by way; ranks take turns, and the first round warms up."""
    took: dict[str, list[Took]] = {"unmap padded shards": [], "partial swap": []}
    with saved_model(size) as folder:
        pool = PagePool(CpuBackend(PAGE_BYTES), 3 << 30)
        model = load_model(folder, pool, dtype=torch.float32, max_tp=DEGREE)
        resharder = make_resharder(model, pool, NoVariants())
        for turn in range(rounds + 1):
            shard = Shard(turn % DEGREE, DEGREE)
            for layer in range(len(model.layers)):
                ours = _narrow(resharder, layer, shard)
                _widen(resharder, layer)
                theirs = _swap_partially(pool, model, layer, shard)
                if turn:
                    took["unmap padded shards"].append(ours)
                    took["partial swap"].append(theirs)
    return took


def _narrow(resharder: Resharder, layer: int, shard: Shard) -> Took:
    began = time.process_time()
    pages = resharder.narrow(layer, shard)
    return Took(time.process_time() - began, pages)


def _widen(resharder: Resharder, layer: int) -> None:
    resharder.map(layer, ALONE)
    resharder.fill(layer, ALONE)(lambda: True)
    resharder.widen(layer, ALONE)


def _swap_partially(pool: PagePool, model: Model, layer: int, shard: Shard) -> Took:
    """Swap partially, on a copy of the layer's FFN that is packed without padding."""
    config = model.config
    hidden, intermediate = config.hidden_size, config.intermediate_size
    each = intermediate // shard.size
    space = pool.reserve(3 * intermediate * hidden * 4, kind="weights", owner="bench, partial swap")
    space.map(0, space.num_pages)
    space.tensor(torch.float32, (3 * intermediate, hidden)).fill_(1.0)
    began = time.process_time()
    whole = space.tensor(torch.float32, (3, intermediate, hidden))
    kept = space.tensor(torch.float32, (3, each, hidden))
    for matrix in range(3):  # move to the front, the first matrix first: nothing unread is overwritten
        kept[matrix].copy_(whole[matrix, shard.part(intermediate, "rows")])
    held = pool.pages_for(kept.nbytes)
    space.unmap(held, space.num_pages - held)
    build_feed_forward(config, {"gate_up": kept[None, :2], "down": kept[2:]})
    took = Took(time.process_time() - began, space.num_pages - held)
    space.release()
    return took


# ------------------------------------------------------------------------------------- the products


@dataclass(frozen=True, slots=True)
class Case:
    """A layer's FFN, laid out for pages of `page_bytes` and degrees up to 8."""

    name: str
    hidden: int
    intermediate: int
    page_bytes: int
    padding: float  # bytes added, as a part
    tokens: int
    seconds: dict[str, list[float]]


# Layers of the papers' models that need padding, a quarter as wide and with half the pages: as many rows to a
# page in float32 as theirs in bfloat16. And the benchmark's own model on this device.
SHAPES = (
    ("100M, pages of 64 KiB", 768, 2432, 64 << 10),
    ("Llama-2-7B / 4, pages of 1 MiB", 1024, 11008, 1 << 20),
    ("Qwen2.5-32B / 4, pages of 1 MiB", 1280, 27648, 1 << 20),
)
TOKENS = (1, 16, 64)
PADDED_DEGREES = (1, 2, 4, 8)


def measure_products(rounds: int) -> Iterator[Case]:
    """Yield the times with padding and without, on one rank of each degree."""
    for name, hidden, intermediate, page_bytes in SHAPES:
        config = _config(hidden, intermediate)
        plan = _ffn(config, page_bytes, PADDED_DEGREES[-1])
        padding = plan.padding_bytes / (plan.nbytes - plan.padding_bytes)
        memory = (torch.randn(plan.nbytes // 4) * hidden**-0.5).view(torch.uint8)
        ways = {}
        for tp in PADDED_DEGREES:
            part = _config(hidden, intermediate // tp)
            exact = tensors_in(memory, _ffn(part, page_bytes, 1))
            ways[f"TP{tp}"] = build_feed_forward(config, tensors_in(memory, plan.at(Shard(0, tp))))
            ways[f"TP{tp}, no padding"] = build_feed_forward(part, exact)
        for tokens in TOKENS:
            x = torch.randn(tokens, hidden)
            calls = {name: partial(timed, partial(way, x), time.process_time) for name, way in ways.items()}
            # Which way follows which decides what the caches hold: up to 3 %.
            seconds = take_turns(calls, rounds, warm_up=3, shuffled_by=Random(0))
            yield Case(name, hidden, intermediate, page_bytes, padding, tokens, seconds)


def _ffn(config: ModelConfig, page_bytes: int, max_tp: int) -> RangePlan:
    _, feed_forward = plan_model(config, torch.float32, page_bytes, max_tp).layers[0]
    return feed_forward


def _config(hidden: int, intermediate: int) -> ModelConfig:
    from bench.transform.padding import PaddingSizes

    return PaddingSizes("bench", hidden, intermediate, 1, 8, 8, hidden // 8, 1).config()


def median_ratio(seconds: dict[str, list[float]], way: str, base: str) -> float:
    """Return the median over the rounds of one way's time by the other's in the same round."""
    return statistics.median(a / b for a, b in zip(seconds[way], seconds[base], strict=True))
