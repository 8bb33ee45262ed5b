"""FFN weights from TP1 to TP4 on one rank: unmapping padded shards, against a partial swap (Gyges §4.2).

Unmapping: the engine's own (`Resharder.narrow`): shards end on pages, so what the other ranks keep is
unmapped. Partial swap: gate, up and down lie one after the other without padding, a shard shares pages with
its neighbours; the rows that stay are copied to the front and the pages after them unmapped. Both end with
the layer's products set to the rows that stayed. No other rank is needed for either.

The cost of padding for the products is measured too: the FFN over padded storage and without take turns, both
in the same memory, since of two equal allocations one was up to 40 % faster than the other. Times are CPU
seconds of the process with one thread, which other programs do not lengthen.
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
from worker.model.layout import RangePlan, pad_ffn
from worker.model.shard import Shard
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
    build_feed_forward(config, {"gate_up": kept[:2], "down": kept[2]})
    took = Took(time.process_time() - began, space.num_pages - held)
    space.release()
    return took


# ------------------------------------------------------------------------------------- the products


@dataclass(frozen=True, slots=True)
class Case:
    """A layer's FFN, laid out for pages of `page_bytes` and degrees up to 4."""

    name: str
    hidden: int
    intermediate: int
    page_bytes: int
    padding: float  # bytes added, as a part
    tokens: int
    seconds: dict[str, list[float]]


# Layers of the papers' models that need padding, a quarter as wide and high, with pages of a quarter as many
# rows: the same shares of padding. And the benchmark's own model on this device.
SHAPES = (
    ("100M, pages of 64 KiB", 768, 2432, 64 << 10),
    ("Llama-2-7B / 4, pages of 256 KiB", 1024, 2752, 256 << 10),
    ("Qwen2.5-32B / 4, pages of 256 KiB", 1280, 6912, 256 << 10),
)
TOKENS = (1, 64)


def measure_products(rounds: int) -> Iterator[Case]:
    """Yield the times with padding and without, at TP1 and on one rank of TP4."""
    for name, hidden, intermediate, page_bytes in SHAPES:
        config = _config(hidden, intermediate)
        size = pad_ffn(config, torch.float32, page_bytes, DEGREE)
        stored, exact = (size.rows, size.row_size), (intermediate, hidden)
        padding = stored[0] * stored[1] / (exact[0] * exact[1]) - 1
        plans = {"": _plan(config, *stored), ", no padding": _plan(config, *exact)}
        memory = torch.randn(plans[""].nbytes // 4) * hidden**-0.5
        ways = {
            f"TP{shard.size}{padded}": build_feed_forward(config, _tensors(memory, plan.at(shard)))
            for shard in (ALONE, Shard(0, DEGREE))
            for padded, plan in plans.items()
        }
        for tokens in TOKENS:
            x = torch.randn(tokens, hidden)
            calls = {name: partial(timed, partial(way, x), time.process_time) for name, way in ways.items()}
            # Which way follows which decides what the caches hold: up to 3 %.
            seconds = take_turns(calls, rounds, warm_up=3, shuffled_by=Random(0))
            yield Case(name, hidden, intermediate, page_bytes, padding, tokens, seconds)


def _plan(config: ModelConfig, rows: int, row_size: int) -> RangePlan:
    plan = RangePlan("FFN")
    hidden = config.hidden_size
    plan.add("gate_up", (2, rows, hidden), torch.float32, row_size=row_size, split=1)
    plan.add("down", (rows, hidden), torch.float32, row_size=row_size, split=0)
    return plan


def _tensors(memory: torch.Tensor, plan: RangePlan) -> dict[str, torch.Tensor]:
    return {
        name: memory.as_strided(param.shape, param.strides, param.offset_bytes // 4)
        for name, param in plan.params.items()
    }


def _config(hidden: int, intermediate: int) -> ModelConfig:
    from bench.transform.padding import PaddingSizes

    return PaddingSizes("bench", hidden, intermediate, 1, 8, 8, hidden // 8, 1).config()


def median_ratio(seconds: dict[str, list[float]], way: str, base: str) -> float:
    """Return the median over the rounds of one way's time by the other's in the same round."""
    return statistics.median(a / b for a, b in zip(seconds[way], seconds[base], strict=True))
