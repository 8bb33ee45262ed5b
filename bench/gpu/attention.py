"""FlashInfer's attention beside the own kernels on a GPU: each held against plain torch, then timed in turns.

    python -m bench.gpu attention [--device cpu]

The shape is an 8B model's in bfloat16, and the blocks of a sequence lie in any order. FlashInfer reads the
cache as it is, through views of keys and values. Its kernels are compiled by nvcc at their first use unless
the kit has them (`python -m bench.gpu.kit --with flashinfer`): each way is tried first in a process of its
own, which ends after READY_S with whatever it compiles. Each case is recorded as a CUDA graph, in which every
call of a decode reads the next of several copies of the cache, so that none is in the second-level cache; the
graphs are replayed in turns. `plan_us` is what FlashInfer's planning takes on the host, once for all layers
of a step. `--device cpu` runs two small cases with the CPU's kernels, without FlashInfer.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import kernels  # before torch: it settles how torch's threads wait

# isort: split
import torch

from bench.gpu.attention_cases import HEAD_DIM, HEADS, KV_HEADS, attended, attention_of
from bench.gpu.card import bandwidth, peak
from bench.gpu.common import Found, recorded, replay_seconds, run_alone
from kernels import AttentionPlan

LIMIT_S = 75.0  # for all; cases that are left are not measured
READY_S = 60.0  # for compiling
ROUNDS = 5
PLANS = 20
LEAST_CALLS = 8
COLD_BYTES = 120 << 20  # more than second-level caches hold
WORKSPACE_BYTES = 256 << 20  # of FlashInfer, for the parts of split contexts
ERROR = 1e-2  # of a result's norm: roundings of bfloat16 are 2^-9 each
OWN = "own"
DECODE_WAYS = ("decode", "decode by fa2")  # without tensor cores, and with them
CHUNK_WAYS = ("fa2", "fa3")

Attend = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (queries, cache) -> result


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences of one length: new tokens, and tokens of the context with them."""

    seqs: int
    length: int
    context: int

    @property
    def ways(self) -> tuple[str, ...]:
        return DECODE_WAYS if self.length == 1 else CHUNK_WAYS


GPU = (
    *(Case(seqs, 1, context) for seqs, context in ((1, 512), (8, 512), (64, 512), (64, 2048), (256, 256))),
    *(Case(1, length, context) for length, context in ((512, 512), (2048, 2048), (8000, 8000), (512, 4608))),
)
CPU = (Case(2, 1, 40), Case(1, 20, 33))


def measure(device: torch.device, found: Found) -> None:
    is_gpu = device.type == "cuda"
    deadline = time.monotonic() + LIMIT_S
    ways = ready_ways(device, found)
    reads, computes = bandwidth(device), peak(device)
    found.put(bandwidth_gb_s=round(reads / 1e9), peak_tflop_s=round(computes / 1e12))
    for case in GPU if is_gpu else CPU:
        if time.monotonic() > deadline:
            found.put(ended=f"after {LIMIT_S:.0f} s, with cases left out")
            break
        for row in rows(device, case, ways, reads, computes):
            if row["error"] > ERROR or not row["is_steady"]:
                found.problem(f"{row}")
            found.add("rows", row)


# --------------------------------------------------------------------------- which ways there are


def ready_ways(device: torch.device, found: Found) -> tuple[str, ...]:
    """Return the ways of FlashInfer that ran once in a process of their own; record why others did not."""
    if device.type != "cuda":
        found.put(without="FlashInfer runs on GPUs")
        return ()
    if importlib.util.find_spec("flashinfer") is None:
        found.put(without="flashinfer is not installed: pack the kit with --with flashinfer")
        return ()
    is_hopper = torch.cuda.get_device_capability(device)[0] == 9  # fa3 has code for no other
    tried = try_ways((DECODE_WAYS[0], *CHUNK_WAYS[: 1 + is_hopper]), READY_S)
    found.put(tried=tried)
    ready = {way for way, told in tried.items() if "problem" not in told}
    return (*ready, *(DECODE_WAYS[1:] if "fa2" in ready else ()))  # of the same module


def try_ways(
    ways: Sequence[str], limit_s: float, attempt: Callable[[str, Connection], None] | None = None
) -> dict[str, dict[str, Any]]:
    """Run each way once, all beside each other; return `import_s` and `first_call_s`, or the `problem`.

    attempt: runs one in its process and sends what is returned here; None: attends by FlashInfer.
    """
    spawn = multiprocessing.get_context("spawn")
    deadline, children = time.monotonic() + limit_s, {}
    for way in ways:
        answer, told = spawn.Pipe(duplex=False)
        child = spawn.Process(target=attempt or _try, args=(way, told))
        child.start()
        told.close()
        children[way] = child, answer
    results: dict[str, dict[str, Any]] = {}
    for way, (child, answer) in children.items():
        try:
            if answer.poll(max(0.0, deadline - time.monotonic())):
                results[way] = answer.recv()
            else:
                results[way] = {"problem": f"not ready within {limit_s:.0f} s: nvcc was still compiling it"}
                _end(child.pid)
        except EOFError:
            child.join()
            results[way] = {"problem": f"its process ended with {child.exitcode}"}
        child.join()
    return results


def _end(pid: int | None) -> None:
    """End a process and what it has started, or the process alone where it leads no group yet."""
    assert pid is not None
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)


def _try(way: str, told: Connection) -> None:
    """Attend once, on the GPU."""
    os.setsid()  # compilers join its group
    try:
        began = time.monotonic()
        importlib.import_module("flashinfer")
        imported = time.monotonic()
        length = 1 if way in DECODE_WAYS else 32
        plans, q, kv = attention_of(torch.device("cuda", 0), ((length, 64),), 1)
        FlashInfer(way, plans[0], q, kv)(q, kv)
        torch.cuda.synchronize()
        first_call_s = time.monotonic() - imported
        told.send({"import_s": round(imported - began, 1), "first_call_s": round(first_call_s, 1)})
    except Exception as problem:  # noqa: BLE001 whatever a compiler or an unknown version refuses
        told.send({"problem": f"{type(problem).__name__}: {str(problem)[-300:]}"})


# --------------------------------------------------------------------------- FlashInfer


@dataclass(frozen=True, slots=True)
class Pages:
    """The blocks of a step's sequences as FlashInfer takes them; all int32, on the host but for `indices`.

    qo_indptr: [S + 1], queries [qo_indptr[s], qo_indptr[s + 1]) belong to sequence s.
    indptr: [S + 1], indices[indptr[s] : indptr[s + 1]] are its blocks.
    last_page_len: [S], tokens in its last block.
    """

    qo_indptr: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor


def pages_of(plan: AttentionPlan, block_tokens: int) -> Pages:
    lens, table = plan.context_lens.cpu(), plan.block_table.cpu()
    counts = (lens + block_tokens - 1) // block_tokens
    zero = torch.zeros(1, dtype=torch.int32)
    indices = torch.cat([row[:count] for row, count in zip(table, counts.tolist(), strict=True)])
    return Pages(
        qo_indptr=plan.cu_seqlens_q.cpu(),
        indptr=torch.cat([zero, counts.cumsum(0, dtype=torch.int32)]),
        indices=indices.to(plan.block_table.device),
        last_page_len=lens - (counts - 1) * block_tokens,
    )


class FlashInfer:
    """One of FlashInfer's wrappers, planned for the sequences of a step: decodes as graphs need them."""

    def __init__(self, way: str, plan: AttentionPlan, q: torch.Tensor, kv: torch.Tensor) -> None:
        """Plan for queries [T, H, D] and a cache [blocks, Hkv, 2, block_tokens, D] of these sizes."""
        flashinfer: Any = importlib.import_module("flashinfer")
        self._is_decode = way in DECODE_WAYS
        self._pages = pages_of(plan, kv.shape[3])
        self._sizes = q.shape[1], kv.shape[1], q.shape[2], kv.shape[3]
        self._dtypes = {"q_data_type": q.dtype, "kv_data_type": kv.dtype, "sm_scale": q.shape[2] ** -0.5}
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
        if self._is_decode:
            self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                "HND",
                use_cuda_graph=True,
                use_tensor_cores=way != DECODE_WAYS[0],
                paged_kv_indptr_buffer=self._pages.indptr.to(q.device),
                paged_kv_indices_buffer=self._pages.indices.clone(),
                paged_kv_last_page_len_buffer=self._pages.last_page_len.to(q.device),
                backend="fa2",
            )
        else:
            self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend=way)
        self.plan()

    def plan(self) -> None:
        pages = self._pages
        blocks = pages.indptr, pages.indices, pages.last_page_len
        if self._is_decode:
            self._wrapper.plan(*blocks, *self._sizes, **self._dtypes)
        else:
            self._wrapper.plan(pages.qo_indptr, *blocks, *self._sizes, causal=True, **self._dtypes)

    def __call__(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q)
        self._wrapper.run(q, (kv[:, :, 0], kv[:, :, 1]), out=out)
        return out


# --------------------------------------------------------------------------- measuring


def rows(
    device: torch.device, case: Case, ways: Sequence[str], reads: float, computes: float
) -> list[dict[str, Any]]:
    """Return a row of the own kernels and of each way: error, microseconds, and the floor beside them."""
    cached = 4 * case.seqs * KV_HEADS * HEAD_DIM * case.context
    (plan,), q, kv = attention_of(device, ((case.length, case.context),) * case.seqs, 1)
    copies = min(64, -(-COLD_BYTES // cached)) if device.type == "cuda" and case.length == 1 else 1
    caches = [kv, *(torch.randn_like(kv) for _ in range(copies - 1))]
    expected = attended(q, kv, plan, case.length, case.context)
    pairs = case.length * (case.context - (case.length - 1) / 2)  # of a query and a key that it sees
    operations = 4 * case.seqs * pairs * HEADS * HEAD_DIM
    common = {
        "seqs": case.seqs,
        "length": case.length,
        "context": case.context,
        "gflop": operations / 1e9,
        "floor_us": round(1e6 * max(cached / reads, operations / computes), 1),
    }
    attends: dict[str, Attend] = {}
    made: dict[str, dict[str, Any]] = {}
    for way in (OWN, *(way for way in case.ways if way in ways)):
        try:
            attend = partial(_own, plan) if way == OWN else FlashInfer(way, plan, q, kv)
            planning = {"plan_us": _plan_us(device, attend)} if isinstance(attend, FlashInfer) else {}
            made[way] = common | {"way": way} | planning | judged(attend, q, kv, expected)
            attends[way] = attend
        except RuntimeError as problem:
            if "illegal memory access" in str(problem):
                raise  # it poisons every later call of this process
            made[way] = common | {"way": way, "error": 1e9, "is_steady": True, "problem": str(problem)[-200:]}
    for way, us in _interleaved_us(device, attends, q, caches).items():
        made[way]["us"] = us
    return list(made.values())


def _own(plan: AttentionPlan, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return kernels.paged_attention(q, kv, plan, q.shape[2] ** -0.5)


def judged(attend: Attend, q: torch.Tensor, kv: torch.Tensor, expected: torch.Tensor) -> dict[str, Any]:
    """Return the error of a result against what is expected, and if the result repeats itself."""
    result = attend(q, kv)
    error = float((result.float() - expected).norm() / expected.norm())
    is_steady = torch.equal(result, attend(q, kv))
    return {"error": round(error, 5) if error == error else 1e9, "is_steady": is_steady}  # NaN


def _plan_us(device: torch.device, flash: FlashInfer) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return _us_of(flash.plan, PLANS)


def _us_of(call: Callable[[], object], calls: int) -> float:
    """Return the microseconds of a call on the host."""
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return round(1e6 * (time.perf_counter() - began) / calls, 2)


def _interleaved_us(
    device: torch.device, attends: dict[str, Attend], q: torch.Tensor, caches: list[torch.Tensor]
) -> dict[str, float]:
    """Return the microseconds of a call of each, in the best of ROUNDS replays in turns."""
    if device.type != "cuda":
        return {way: _us_of(partial(attend, q, caches[0]), 1) for way, attend in attends.items()}
    turns = caches * -(-LEAST_CALLS // len(caches))
    graphs = {way: recorded([partial(attend, q, kv) for kv in turns]) for way, attend in attends.items()}
    best: dict[str, float] = defaultdict(lambda: float("inf"))
    for _ in range(ROUNDS):
        for way, graph in graphs.items():
            best[way] = min(best[way], 1e6 * replay_seconds(graph) / len(turns))
    return {way: round(us, 2) for way, us in best.items()}


# --------------------------------------------------------------------------- the card


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield what each way's first call took or why it did not run, then a line for each case."""
    if without := found.get("without"):
        yield f"attention: {without}"
    for way, told in found.get("tried", {}).items():
        if problem := told.get("problem"):
            yield f"attention: {way} did not run: {problem}"
        else:
            yield f"attention: {way} imported in {told['import_s']} s, first call {told['first_call_s']} s"
    cases: dict[tuple[int, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in found.get("rows", []):
        cases[row["seqs"], row["length"], row["context"]].append(row)
    for (seqs, length, context), case in cases.items():
        first = case[0]
        yield (
            f"attention {seqs} x {length} of {context}, floor {first['floor_us']} us: "
            + "; ".join(_told(row) for row in case)
        )
    if ended := found.get("ended"):
        yield f"attention: {ended}"


def _told(row: dict[str, Any]) -> str:
    if "problem" in row:
        return f"{row['way']} failed: {row['problem']}"
    rate = f", {row['gflop'] / row['us'] * 1e-3:.0f} TFLOP/s" if row["length"] > 1 else ""
    plan = f", plan {row['plan_us']:.0f} us" if "plan_us" in row else ""
    return f"{row['way']} {row['us']:.1f} us{rate}{plan}"


def main() -> int:
    return run_alone(__doc__, "attention", measure, lines)
