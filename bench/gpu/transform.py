"""Changes of tensor parallelism where several workers share one GPU, for `bench.gpu`.

    python -m bench.gpu transform [--device cpu]

pages      mapping and unmapping those of one layer's FFN, as TP1 to TP4 unmaps them
attention  the kernel at every degree, over the pages of a cache, against its oracle
exchange   keys and values between ranks, a process each: gloo by way of host memory
workers    four of them decode while they go from TP1 over TP2 to TP4 and back, against a transformers model
NCCL       the exchange again with a GPU for each rank, where there are two

`--device cpu` does the same with small numbers on a machine without a GPU; nothing is written.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import kernels  # before torch: it settles how torch's threads wait

# isort: split
import torch

from bench.common.engines import timed
from bench.gpu import transform_workers as gpu_transform_workers
from bench.gpu.common import Found, device_clock, run_alone
from bench.gpu.transform_workers import Workers
from bench.kernels.checks import AttentionCase, assert_close, plan_of, plan_on
from bench.transform import kv as transform_kv
from bench.transform.ranks import run_ranks
from worker.distributed.communicator import Communicator
from worker.engine.build import make_pool
from worker.memory import KVCache, PagePool, VirtualRange

MIB = 1 << 20
DEGREES = (1, 2, 4)
CALLS, ROUNDS = 20, 5


@dataclass(frozen=True, slots=True)
class TransformSizes:
    page_bytes: int
    layer_pages: int  # pages of the FFN of a layer
    attention: AttentionCase  # at TP1
    kv: transform_kv.Sizes
    stage_bytes: int
    workers: Workers


GPU = TransformSizes(
    page_bytes=2 * MIB,
    layer_pages=168,  # pages of an 8B model in bfloat16
    attention=AttentionCase(
        "of an 8B model", ((1, 2048),) * 15 + ((300, 1000),), num_heads=32, num_kv_heads=8, head_dim=128
    ),
    kv=transform_kv.Sizes(blocks=2048, heads=8, block_tokens=16, head_dim=128),
    stage_bytes=32 * MIB,
    workers=Workers(
        model={
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 6,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "vocab_size": 4096,
        },
        megabytes=2048,
        page_kib=2048,
        prompt_tokens=200,
        max_tokens=2800,
        sequences=4,
    ),
)
CPU = TransformSizes(
    page_bytes=64 * 1024,
    layer_pages=8,
    attention=AttentionCase("small", ((1, 40), (5, 20)), num_heads=8, num_kv_heads=4, head_dim=32),
    kv=transform_kv.Sizes(blocks=40, heads=4, block_tokens=4, head_dim=16),
    stage_bytes=64 * 1024,
    workers=Workers(
        model={
            "hidden_size": 64,
            "intermediate_size": 172,
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 211,
        },
        megabytes=6,
        page_kib=4,
        prompt_tokens=20,
        max_tokens=800,
        sequences=2,
    ),
)


def measure(device: torch.device, found: Found) -> None:
    """Put the rows of each part into `found`."""
    sizes = GPU if device.type == "cuda" else CPU
    problems: list[str] = []
    found.add("pages", *page_rows(device, sizes))
    found.add("attention", *attention_rows(device, sizes, problems))
    for problem in problems:
        found.problem(problem)
    found.add("exchange", *(exchange_row(ranks, sizes, [str(device)] * ranks) for ranks in DEGREES[1:]))
    found.put(nccl=nccl_row(device, sizes))
    for dtype in ("float32", "bfloat16"):
        row = gpu_transform_workers.measure(sizes.workers, str(device), dtype)
        for problem in row.pop("problems"):
            found.problem(f"workers in {dtype}: {problem}")
        found.add("workers", row)


# --------------------------------------------------------------------------- pages


def page_rows(device: torch.device, sizes: TransformSizes) -> Iterator[dict[str, Any]]:
    """Yield microseconds a page, for one page and for those that a layer frees from TP1 to TP4.

    A page is mapped for the first time (the driver makes it), again, again without zeros (for what a copy
    fills), and unmapped.
    """
    layer = sizes.layer_pages * 3 // 4
    for pages in (1, layer):
        # A pool of its own: a page is made once.
        pool = make_pool(device, 2 * layer * sizes.page_bytes, sizes.page_bytes)
        space = pool.reserve(pages * sizes.page_bytes, kind="weights", owner="bench")
        best = mapping_seconds(device, pool, space, pages)
        space.release()
        pool.close()
        yield {"pages": pages} | {f"{name}_us": 1e6 * seconds / pages for name, seconds in best.items()}


def mapping_seconds(
    device: torch.device, pool: PagePool, space: VirtualRange, pages: int
) -> dict[str, float]:
    """Return the best seconds of mapping and unmapping all of them, by what is done."""
    clock = device_clock(device)

    def unmap() -> None:
        space.unmap(0, pages)
        pool.reclaim(pool.num_pages)

    def turn(*, zeroed: bool) -> tuple[float, float]:
        mapping = timed(lambda: space.map(0, pages, zeroed=zeroed), clock)
        return mapping, timed(unmap, clock)

    made, _ = turn(zeroed=True)
    zeroed = [turn(zeroed=True) for _ in range(ROUNDS)]
    unzeroed = [turn(zeroed=False) for _ in range(ROUNDS)]
    return {
        "made": made,
        "map": min(mapping for mapping, _ in zeroed),
        "map_unzeroed": min(mapping for mapping, _ in unzeroed),
        "unmap": min(unmapping for _, unmapping in zeroed + unzeroed),
    }


# --------------------------------------------------------------------------- attention


def attention_rows(
    device: torch.device, sizes: TransformSizes, problems: list[str]
) -> Iterator[dict[str, Any]]:
    """Yield microseconds of a call at each degree: a rank's heads of the tokens of as many sequences."""
    for dtype in (torch.float32, torch.bfloat16):
        for degree in DEGREES:
            try:
                yield {
                    "dtype": str(dtype)[6:],
                    "degree": degree,
                    "us": _attention(device, sizes, dtype, degree),
                }
            except AssertionError as problem:
                problems.append(f"attention at degree {degree} in {dtype}: {problem}")


def _attention(device: torch.device, sizes: TransformSizes, dtype: torch.dtype, degree: int) -> float:
    """Time attention over a cache in pages at the degree.

    Raises AssertionError if it differs from the oracle.
    """
    whole = sizes.attention
    case = replace(whole, num_heads=whole.num_heads // degree, num_kv_heads=whole.num_kv_heads // degree)
    generator = torch.Generator().manual_seed(degree)
    plan, num_blocks = plan_of(case, generator)
    pool, cache = _cache(device, sizes, dtype, -(-num_blocks // degree))
    kv = cache.layers_at(degree)[0]
    there = torch.randn(kv.shape, generator=generator).to(dtype)
    kv.copy_(there)
    tokens = int(plan.cu_seqlens_q[-1])
    q = torch.randn(tokens, case.num_heads, case.head_dim, generator=generator).to(dtype)
    scale = case.head_dim**-0.5
    moved, moved_q, out = (
        plan_on(device, plan),
        q.to(device),
        torch.empty(q.shape, dtype=dtype, device=device),
    )

    def calls(number: int) -> None:
        for _ in range(number):
            kernels.paged_attention(moved_q, kv, moved, scale, out=out)

    calls(1)
    assert_close(out, kernels.paged_attention.reference(q, there, plan, scale))
    seconds = min(timed(lambda: calls(CALLS), device_clock(device)) for _ in range(ROUNDS))
    cache.release()
    pool.close()
    return 1e6 * seconds / CALLS


def _cache(
    device: torch.device, sizes: TransformSizes, dtype: torch.dtype, blocks: int
) -> tuple[PagePool, KVCache]:
    case = sizes.attention
    block_bytes = 2 * case.num_kv_heads * case.block_tokens * case.head_dim * dtype.itemsize
    pages = -(-blocks * block_bytes // sizes.page_bytes)
    pool = make_pool(device, pages * sizes.page_bytes, sizes.page_bytes)
    cache = KVCache(
        pool,
        num_layers=1,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        block_tokens=case.block_tokens,
        dtype=dtype,
        max_blocks=blocks,
        owner="bench",
    )
    cache.grow(pages)
    return pool, cache


# --------------------------------------------------------------------------- exchange


def exchange_row(ranks: int, sizes: TransformSizes, devices: list[str]) -> dict[str, Any]:
    """Exchange one layer at 90 % use, up and down in turn.

    Returns the milliseconds of the slowest rank in the best turn, and the bytes that a rank sends.
    """
    took = run_ranks(ranks, _exchange, sizes, devices, devices=devices)
    turns = [(max(s for s, _ in turn), max(n for _, n in turn)) for turn in zip(*took, strict=True)]
    seconds, nbytes = min(turns)
    return {"ranks": ranks, "bytes": nbytes, "ms": 1e3 * seconds, "gbps": nbytes / seconds / 1e9}


def _exchange(group: Communicator, sizes: TransformSizes, devices: list[str]) -> list[tuple[float, int]]:
    """Return seconds and bytes sent of each turn on one rank.

    Raises RuntimeError if a head is not in its place after a turn.
    """
    blocks, page_bytes = sizes.kv.blocks, sizes.page_bytes
    pool = make_pool(
        torch.device(devices[group.rank]), blocks * sizes.kv.block_bytes + page_bytes, page_bytes
    )
    live = [
        sorted(random.Random(rank).sample(range(blocks), int(0.9 * blocks))) for rank in range(group.size)
    ]
    cache = transform_kv.InPlace(pool, sizes.kv, 1, group, live)
    turns = [cache.exchange(0, sizes.stage_bytes) for _ in range(ROUNDS + 1)]
    cache.release()
    pool.close()
    return [(one.time.seconds, one.bytes) for one in turns[1:]]


def nccl_row(device: torch.device, sizes: TransformSizes) -> dict[str, Any]:
    """Return the exchange with a GPU for each rank, or why it was left out."""
    if device.type != "cuda":
        return {"skipped": "no GPU"}
    gpus = torch.cuda.device_count()
    if gpus < 2:
        return {"skipped": "one GPU, and NCCL takes one rank on each"}
    ranks = 4 if gpus >= 4 else 2
    return exchange_row(ranks, sizes, [f"cuda:{i}" for i in range(ranks)])


# --------------------------------------------------------------------------- the card


def lines(found: dict[str, Any]) -> Iterator[str]:
    for row in found.get("pages", []):
        numbers = ", ".join(
            f"{name} {row[name + '_us']:.1f}" for name in ("made", "map", "map_unzeroed", "unmap")
        )
        yield f"pages, {row['pages']:3d} at once, us a page: {numbers}"
    for row in found.get("attention", []):
        yield f"attention at TP{row['degree']} in {row['dtype']}: {row['us']:8.1f} us"
    for row in found.get("exchange", []):
        yield f"exchange of {row['ranks']} ranks: {row['ms']:.1f} ms, {row['gbps']:.2f} GB/s a rank"
    nccl = found.get("nccl", {"skipped": "not run"})
    yield f"NCCL: {nccl.get('skipped') or str(round(nccl['gbps'], 2)) + ' GB/s a rank'}"
    for row in found.get("workers", []):
        yield from gpu_transform_workers.lines(row)


def main() -> int:
    return run_alone(__doc__, "transform", measure, lines)
