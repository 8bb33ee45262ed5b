"""Configs of quantised products and of attention on a GPU, each held against its oracle and timed.

    python -m bench.gpu sweep [--device cpu]

All configs compile first, in as many processes as there are cores. Then each is called in a CUDA graph with
the next of several copies of what serving reads from memory, so that none is in the second-level cache. The
configs of a case are timed in turns, with the bfloat16 product among them. First come those in force, for
every number of bits and tokens, then the candidates. The tables in force are `kernels.gpu.product_configs`
and `kernels.gpu.attention_configs`; the card says which other row takes less time. `--device cpu` runs two
small products and two attentions in the interpreter.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import kernels  # before torch: it settles how torch's threads wait

# isort: split
import torch

from bench.common.machine import num_cores
from bench.gpu.attention_cases import HEAD_DIM, HEADS, KV_HEADS, attended, attention_of
from bench.gpu.card import bandwidth
from bench.gpu.common import Found, recorded, replay_seconds, run_alone
from kernels import AttentionPlan, QuantizedWeight
from kernels.gpu.attention_configs import CHUNK_CANDIDATES, DECODE_CANDIDATES, AttentionConfig
from kernels.gpu.product_configs import CANDIDATES, SCRATCH_BYTES, TABLE, ProductConfig, product_config
from kernels.packing import packed_size

LIMIT_S = 60.0  # for all; what is left is not measured
COMPILE_S = 30.0
FEW = 5  # candidates of bits other than 4
GROUP = 64
COLD_BYTES = 120 << 20  # more than second-level caches hold
LEAST_CALLS = 8
ROUNDS = 3
ERROR = 1e-2  # of a result's norm: roundings of bfloat16 are 2^-9 each

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The cases that are measured."""

    shapes: tuple[tuple[int, int], ...]  # inputs and outputs of products
    tokens: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]  # new tokens and context of a sequence
    decodes: tuple[tuple[int, int], ...]  # sequences and context
    most: int | None  # candidates
    scratch_bytes: tuple[int, ...]


# Products of an 8B model: gate_up, down, o, qkv.
GPU = Sizes(
    shapes=((4096, 28672), (14336, 4096), (4096, 4096), (4096, 6144)),
    tokens=(1, 8, 16, 32, 64, 128, 256, 512, 2048),
    chunks=((2048, 2048), (8192, 8192), (512, 4096)),
    decodes=((1, 600), (8, 2100), (64, 600), (64, 2100), (256, 300), (256, 1000)),  # no whole tiles
    most=None,
    scratch_bytes=(32 << 20, 64 << 20, 128 << 20),
)
CPU = Sizes(((256, 64),), (1, 17), ((20, 33),), ((2, 40),), 1, (1 << 20,))


def measure(device: torch.device, found: Found) -> None:
    is_gpu = device.type == "cuda"
    if not is_gpu:
        os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported
    deadline = time.monotonic() + LIMIT_S
    sizes = GPU if is_gpu else CPU
    if is_gpu:
        found.put(compile_failures=compile_all(min(COMPILE_S, LIMIT_S)), compiled_s=_passed(deadline))
    reads = bandwidth(device)
    found.put(bandwidth_gb_s=round(reads / 1e9))
    broken = {name for name, _ in found.values.get("compile_failures", [])}
    work = itertools.chain(
        *(products(device, sizes, bits, reads, broken, is_in_force=True) for bits in (4, 8, 3)),
        *(products(device, sizes, bits, reads, broken) for bits in (4, 8, 3)),
        attentions(device, sizes, reads, broken),
    )
    for rows in work:
        for row in rows:
            if row["error"] > ERROR or not row["is_steady"]:
                found.problem(f"{row}")
        found.add("rows", *rows)
        if time.monotonic() > deadline:
            found.put(ended=f"after {LIMIT_S:.0f} s, with cases left out")
            break


def _passed(deadline: float) -> float:
    return round(LIMIT_S - (deadline - time.monotonic()), 1)


# --------------------------------------------------------------------------- compiling


def compile_all(limit_s: float) -> list[tuple[str, str]]:
    """Compile every config in processes of their own; return the names of those that failed, and why."""
    jobs: list[Any] = [(bits, config) for bits in (4, 8, 3) for _, config in TABLE[bits]]
    jobs += [(bits, config) for bits in (4, 8, 3) for config in _configs(bits)]
    jobs += [("chunk", config) for config in CHUNK_CANDIDATES]
    jobs += [("decode", config) for config in DECODE_CANDIDATES]
    workers = max(1, min(14, num_cores() - 1, len(jobs)))
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    futures = {pool.submit(_compile, kind, config): _name(kind, config) for kind, config in jobs}
    deadline, failures = time.monotonic() + limit_s, []
    pending = set(futures)
    while pending and (left := deadline - time.monotonic()) > 0:
        done, pending = wait(pending, left, FIRST_COMPLETED)
        for future in done:
            problem = future.exception()
            if why := str(problem) if problem else future.result():
                failures.append((futures[future], why))
    failures += [(futures[future], "was not compiled in time") for future in pending]
    processes = list(pool._processes.values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes if pending else ():
        process.kill()
    return failures


def _configs(bits: int) -> list[ProductConfig]:
    """Return the candidates that are not in force."""
    few = None if bits == 4 else FEW
    configs = {config for some in CANDIDATES.values() for config in some[:few]}
    return sorted(configs - {config for _, config in TABLE[bits]})


def _name(kind: object, config: object) -> str:
    return f"{kind} {astuple(config)}"  # type: ignore[call-overload]


def _compile(kind: int | str, config: Any) -> str:
    """Run the kernels of a config on a few numbers, to fill the compiler's cache; say what failed."""
    device = torch.device("cuda", 0)
    try:
        if isinstance(kind, int):
            for inputs in (64 * max(2, config.tiles), 2048):  # not split, and split
                x = torch.zeros(1, inputs, dtype=torch.bfloat16, device=device)
                _multiply(x, weight_of(inputs, 64, kind, device), config)
        elif kind == "chunk":
            plan, q, kv = attention_of(device, ((32, 64),), 1)
            _attend(q, kv, plan[0], config, DECODE_CANDIDATES[0])
        else:
            for context in (64, 4096):  # in one split, and in several
                plan, q, kv = attention_of(device, ((1, context),), 1)
                _attend(q, kv, plan[0], CHUNK_CANDIDATES[0], config)
        torch.cuda.synchronize()
    except Exception as problem:  # noqa: BLE001 whatever the compiler refuses
        return f"{type(problem).__name__}: {str(problem)[-300:]}"
    return ""


# --------------------------------------------------------------------------- products


def products(
    device: torch.device,
    sizes: Sizes,
    bits: int,
    reads: float,
    broken: set[str],
    *,
    is_in_force: bool = False,
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each shape and number of tokens: of the config in force, or of all of them."""
    for inputs, outputs in sizes.shapes:
        nbytes = outputs * (packed_size(inputs, bits) + 3 * inputs // GROUP)
        copies = max(4, -(-COLD_BYTES // nbytes)) if device.type == "cuda" else 1
        weights = [weight_of(inputs, outputs, bits, device) for _ in range(copies)]
        full = [
            torch.randn(outputs, inputs, dtype=torch.bfloat16, device=device)
            for _ in range(max(2, copies // 4))
        ]
        exact = kernels.dequantize(weights[0]).t()
        for tokens in sizes.tokens:
            x = torch.randn(tokens, inputs, dtype=torch.bfloat16, device=device)
            expected = x.float() @ exact
            common = {
                "inputs": inputs,
                "outputs": outputs,
                "tokens": tokens,
                "bits": bits,
                "is_in_force": is_in_force,
                "floor_us": _us(nbytes / reads),
            }
            ways = dict([_in_force(bits, tokens)] if is_in_force else _ways(bits, tokens, sizes))
            calls = {
                name: [partial(product, x, weight) for weight in weights]
                for name, product in ways.items()
                if name not in broken
            }
            dense = [partial(kernels.linear.reference, x, one) for one in full]
            dense_us, found = judged_in_turns(device, calls, expected, dense)
            yield [
                common | {"dense_us": dense_us, "config": name} | judgement
                for name, judgement in found.items()
            ]


def _ways(bits: int, tokens: int, sizes: Sizes) -> Iterator[tuple[str, Callable[..., torch.Tensor]]]:
    """Yield the name of each config for so many tokens, and its product."""
    most = next((most for most in sorted(CANDIDATES) if tokens <= most), None)
    few = sizes.most if bits == 4 or sizes.most else FEW
    configs = list(CANDIDATES[most][:few]) if most else []
    for config in configs:
        yield _name(bits, config), partial(_multiply_as, config)
    if tokens >= 256 or not most:
        for nbytes in sizes.scratch_bytes:
            yield _scratch_name(nbytes), partial(_through_scratch, nbytes)
    yield _in_force(bits, tokens)


def _in_force(bits: int, tokens: int) -> tuple[str, Callable[..., torch.Tensor]]:
    """Return the name and the product of what serving takes."""
    if config := product_config(bits, tokens):
        return _name(bits, config), partial(_multiply_as, config)
    return _scratch_name(SCRATCH_BYTES), partial(_through_scratch, SCRATCH_BYTES)


def _scratch_name(nbytes: int) -> str:
    return f"scratch of {nbytes >> 20} MiB"


def _multiply_as(config: ProductConfig, x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    return _multiply(x, weight, config)


def _multiply(x: torch.Tensor, weight: QuantizedWeight, config: ProductConfig) -> torch.Tensor:
    from kernels.gpu import quantized

    tiles = quantized.tiles_of(weight)
    assert tiles is not None
    return quantized.multiply_tiles(x, weight, None, tiles, config)


def _through_scratch(nbytes: int, x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    from kernels.gpu import quantized

    return quantized.through_scratch(x, weight, None, nbytes)


def weight_of(inputs: int, outputs: int, bits: int, device: torch.device) -> QuantizedWeight:
    """Return a random weight of one unit."""
    shape = (1, outputs, packed_size(inputs, bits))
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    scales = ((torch.rand(1, outputs, inputs // GROUP, device=device) + 0.5) / 2**bits).half()
    zeros = torch.randint(0, 2**bits, scales.shape, dtype=torch.uint8, device=device)
    return QuantizedWeight(codes, scales, zeros, bits, GROUP)


# --------------------------------------------------------------------------- attention


def attentions(
    device: torch.device, sizes: Sizes, reads: float, broken: set[str]
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each chunk, then of each decode."""
    for seqs, length, context, kind, configs in (
        *((1, length, context, "chunk", CHUNK_CANDIDATES) for length, context in sizes.chunks),
        *((seqs, 1, context, "decode", DECODE_CANDIDATES) for seqs, context in sizes.decodes),
    ):
        cached = 2 * 2 * seqs * KV_HEADS * HEAD_DIM * context
        copies = 1 + -(-COLD_BYTES // cached) if device.type == "cuda" and kind == "decode" else 1
        plans, q, kv = attention_of(device, ((length, context),) * seqs, min(copies, 64))
        expected = attended(q, kv, plans[0], length, context)
        pairs = length * (context - (length - 1) / 2)  # of a query and a key that it sees
        common = {
            "kind": kind,
            "seqs": seqs,
            "length": length,
            "context": context,
            "floor_us": _us(cached / reads),
            "gflop": 4e-9 * seqs * pairs * HEADS * HEAD_DIM,
        }
        rows = []
        for config in configs[: sizes.most]:
            if _name(kind, config) in broken:
                continue
            two = (config, DECODE_CANDIDATES[0]) if kind == "chunk" else (CHUNK_CANDIDATES[0], config)
            calls = [partial(_attend, q, kv, plan, *two) for plan in plans]
            rows.append(common | {"config": _name(kind, config)} | judged(device, calls, expected))
        yield rows


def _attend(
    q: torch.Tensor, kv: torch.Tensor, plan: AttentionPlan, chunk: AttentionConfig, decode: AttentionConfig
) -> torch.Tensor:
    from kernels.gpu import attention

    return attention.attend(q, kv, plan, HEAD_DIM**-0.5, torch.empty_like(q), chunk, decode)


# --------------------------------------------------------------------------- judging


def judged(device: torch.device, calls: Sequence[Call], expected: torch.Tensor) -> dict[str, Any]:
    """Return the error of the first call against what is expected, if it repeats itself, and the time."""
    return judged_in_turns(device, {"": calls}, expected)[1][""]


def judged_in_turns(
    device: torch.device,
    ways: Mapping[str, Sequence[Call]],
    expected: torch.Tensor,
    dense: Sequence[Call] = (),
) -> tuple[float, dict[str, dict[str, Any]]]:
    """Return the microseconds of `dense`, and of each way what `judged` says; all are timed in turns."""
    found: dict[str, dict[str, Any]] = {}
    for name, calls in ways.items():
        try:
            made = calls[0]()
            error = float((made.float() - expected).norm() / expected.norm())
            found[name] = {
                "error": round(error, 5) if error == error else 1e9,  # NaN
                "is_steady": torch.equal(made, calls[0]()),
            }
        except RuntimeError as problem:
            if "illegal memory access" in str(problem):
                raise
            found[name] = {"error": 1e9, "is_steady": True, "us": 1e9, "problem": str(problem)[-200:]}
    timed = [name for name in found if "us" not in found[name]]
    first, *others = seconds_in_turns(device, [dense, *(ways[name] for name in timed)])
    for name, took in zip(timed, others, strict=True):
        found[name]["us"] = _us(took)
    return _us(first), found


def seconds_in_turns(device: torch.device, ways: Sequence[Sequence[Call]]) -> list[float]:
    """Return the seconds of a call of each way, in the best of ROUNDS replays of a graph; none: 0."""
    if device.type != "cuda":
        return [_seconds_on_cpu(calls) for calls in ways]
    repeated = [list(calls) * (-(-LEAST_CALLS // len(calls)) if calls else 0) for calls in ways]
    graphs = [recorded(calls) if calls else None for calls in repeated]
    best = [float("inf") if graph else 0.0 for graph in graphs]
    for _ in range(ROUNDS):
        for place, graph in enumerate(graphs):
            if graph:
                best[place] = min(best[place], replay_seconds(graph) / len(repeated[place]))
    return best


def _seconds_on_cpu(calls: Sequence[Call]) -> float:
    began = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - began) / max(1, len(calls))


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 2)


# --------------------------------------------------------------------------- the card


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the compiler's failures, then for each case the best config beside the one in force."""
    for name, why in found.get("compile_failures", []):
        yield f"sweep: {name} did not compile: {why.splitlines()[-1][:150]}"
    yield f"sweep: compiled in {found.get('compiled_s')} s; {found.get('ended', 'every case was measured')}"
    rows = found.get("rows", [])
    yield from _serving_lines([row for row in rows if row.get("is_in_force")])
    yield from _product_lines([row for row in rows if "bits" in row and not row["is_in_force"]])
    yield from _attention_lines([row for row in rows if "kind" in row])


def _cases(rows: list[dict[str, Any]]) -> list[tuple[tuple[int, int], list[dict[str, Any]]]]:
    cases = defaultdict(list)
    for row in rows:
        cases[row["bits"], row["tokens"]].append(row)
    return sorted(cases.items(), key=lambda case: (-case[0][0], case[0][1]))


def _serving_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield for each number of bits and tokens how long serving takes, in times of bfloat16."""
    for (bits, tokens), case in _cases(rows):
        took, dense = (sum(row[name] for row in case) for name in ("us", "dense_us"))
        each = ", ".join(
            f"{row['inputs']} x {row['outputs']} {row['us'] / row['dense_us']:.2f}" for row in case
        )
        yield (
            f"int{bits} x {tokens:4d} tokens in force: {took / dense:.2f} of bfloat16 ({took:.1f} us): "
            f"{each}; {case[0]['config']}"
        )


def _product_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for all shapes together: microseconds in sum, and the three fastest of each shape."""
    for (bits, tokens), case in _cases(rows):
        sums: dict[str, float] = defaultdict(float)
        for row in case:
            sums[row["config"]] += row["us"]
        shapes = {(row["inputs"], row["outputs"]): row for row in case}
        dense, floor = (sum(row[name] for row in shapes.values()) for name in ("dense_us", "floor_us"))
        best = sorted(sums, key=lambda name: sums[name])[:3]
        yield (
            f"int{bits} x {tokens:4d} tokens: bfloat16 {dense:.1f} us, floor {floor:.1f}; "
            + ", ".join(f"{name} {sums[name]:.1f}" for name in best)
            + f"; in force {sums[_in_force(bits, tokens)[0]]:.1f}"
        )
        for (inputs, outputs), one in shapes.items():
            own = sorted(
                (row["us"], row["config"])
                for row in case
                if (row["inputs"], row["outputs"]) == (inputs, outputs)
            )
            yield f"  {inputs} x {outputs}: bfloat16 {one['dense_us']:.1f} us; " + ", ".join(
                f"{name} {us:.1f}" for us, name in own[:3]
            )


def _attention_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    cases = defaultdict(list)
    for row in rows:
        cases[row["kind"], row["seqs"], row["length"], row["context"]].append(row)
    for (kind, seqs, length, context), case in cases.items():
        best = min(case, key=lambda row: row["us"])
        rest = " ".join(f"{row['us']:.0f}" for row in case)
        yield (
            f"{kind} {seqs} x {length} of {context}: best {best['config']} {best['us']:.1f} us, "
            f"{best['gflop'] / best['us'] * 1e-3:.0f} TFLOP/s, floor {best['floor_us']:.1f}; all: {rest}"
        )


def main() -> int:
    return run_alone(__doc__, "sweep", measure, lines)
