"""Decode steps as CUDA graphs beside the same steps call by call: tokens, time, launches, flips of halves.

    python -m bench.gpu graphs [--device cpu]

The ways: call by call; by a graph for each half of a layer; by these, one step launched before the tokens of
the one before are known ("ahead"); and ahead by one graph for the whole step, as workers serve.

Tokens are those of a small random model, served in all ways: greedily, with a half of a layer replaced, with
the half back, with draws, and with its KV cache in 8 bits. Times and launches are those of Llama 3 8B's
shape, in turns on the same sequences of one engine; prompts come beside 32 decodes. A flip replaces the FFN
of a layer between two steps, by one that no graph has read yet or by one that a graph knows. `--device cpu`
takes a tiny model and keeps calls in place of graphs.

Of each step it tells where its time goes. The host's part is its duration less the wait for tokens; while
there is a wait, the device takes the time. The device's part is, by events in its stream, the span from the
begin of a step's launches to their end, and what lies between two steps; and by the profiler, which slows
both, the time in kernels and the gaps between them.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import kernels  # noqa: F401 before torch: it settles how torch's threads wait

# isort: split
import torch

from bench.common.engines import INSTANCE, EngineShape, close, run_prompts, timed
from bench.gpu.card import bandwidth
from bench.gpu.common import Found, device_clock, event_seconds, run_alone
from bench.gpu.decode import CPU, GPU, TINY, Sizes, bytes_of_a_step, random_engine
from bench.gpu.step_times import StepTimes, clocks, gaps
from bus.messages import SamplingParams
from worker.engine.core import EngineCore
from worker.engine.engine import Engine
from worker.engine.recorded_batches import RecordedBatches
from worker.engine.sequence import own_request
from worker.model import Model
from worker.model.layer import FeedForward
from worker.model.linear import TransposedLinear
from worker.model.step_parts import Run

SMALL = TINY | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64}
TOKENS = replace(
    CPU, config=SMALL, shape=EngineShape(max_num_seqs=6, max_num_batched_tokens=64), budget_mib=256
)
DECODES = ((1, 512), (8, 512), (64, 512), (256, 256))  # sequences, tokens of context
LENGTHS = (3, 70, 1, 40, 17)
NUM_OUT = 40
PROMPTS = (20, 100, 300, 500)  # tokens
FLIPS = 12
PROFILED = 8  # steps
PROFILES = ((64, 512, 0.8), (64, 2048, 0.0))  # sequences, context, temperature
WAYS = ("call by call", "graphs", "ahead", "whole step")
WARM_STEPS = 8  # of which as many as these are steps by halves, before they are joined
STEADY_STEPS = 4
LAUNCHES = (
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cudaGraphLaunch",
    "cuGraphLaunch",
)
COPIES = ("cudaMemcpyAsync", "cudaMemsetAsync")
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")


def measure(device: torch.device, found: Found) -> None:
    sizes = GPU if device.type == "cuda" else CPU
    for kv_dtype in ("full", "int8"):
        compare_tokens(device, kv_dtype, found)
    reads = bandwidth(device)
    engine = random_engine(device, sizes)
    recorded = recordings(engine, device)
    found.put(
        parts=recorded.num_recorded,
        record_s=recorded.record_s,
        record_mib=recorded.record_bytes / 2**20,
    )
    for num_seqs, context in DECODES if device.type == "cuda" else sizes.decodes:
        steps_of(engine, num_seqs, num_seqs + len(WAYS) * (sizes.steps + 4 * PROFILED) + 64, context)
        for way in WAYS:
            use(engine, recorded, way)
            row = {"sequences": num_seqs, "context": context, "way": way}
            found.add("decode", row | decode_row(engine, sizes, reads, device))
        for way in WAYS[2:]:
            use(engine, recorded, way)
            found.add("kernels", row | {"way": way, "temperature": 0.0} | kernels_of_a_step(engine, device))
        if device.type == "cuda":
            found.add("halves", {"sequences": num_seqs, "context": context} | halves_ms(engine, recorded))
        end(engine, num_seqs)
    found.put(joined=recorded.num_joined, join_s=recorded.join_s, join_mib=recorded.join_bytes / 2**20)
    for tokens in PROMPTS if device.type == "cuda" else PROMPTS[:1]:
        for way in WAYS[:3:2]:
            use(engine, recorded, way)
            ms = first_token_ms(engine, tokens, 32 if device.type == "cuda" else 2)
            found.add("prompts", {"tokens": tokens, "way": way, "ms": ms})
    use(engine, recorded, "graphs")
    found.put(flips=flips(engine, device, sizes.steps))
    steps_of(engine, 2, 64 + 8 * (WARM_STEPS + PROFILED))
    for way in WAYS:
        use(engine, recorded, way)
        found.add("launches", launches_of_a_step(profiled(engine, device)) | {"way": way})
    end(engine, 2)
    for num_seqs, context, temperature in PROFILES if device.type == "cuda" else ():
        steps_of(engine, num_seqs, 64 + 2 * num_seqs, context, temperature)
        row = {"sequences": num_seqs, "context": context, "temperature": temperature, "way": WAYS[-1]}
        found.add("kernels", row | kernels_of_a_step(engine, device))
        end(engine, num_seqs)
    close(engine)


def recordings(engine: Engine, device: torch.device) -> RecordedBatches:
    """Return the engine's recordings; on a CPU, which has none, some that keep the calls."""
    instance = instance_of(engine)
    recorded = instance.local_executor.recorded
    if not recorded:
        assert device.type == "cpu", "a GPU records decodes"
        recorded = RecordedBatches(
            model_of(engine), instance.kv, instance.limits, device, lambda run: run, in_a_row
        )
        for _ in recorded.record():
            pass
    recorded.steady_steps = STEADY_STEPS
    return recorded


def in_a_row(calls: Sequence[Run]) -> Run:
    """Return what runs calls one after the other."""

    def run() -> None:
        for call in calls:
            call()

    return run


def instance_of(engine: Engine) -> EngineCore:
    return engine.instances[INSTANCE]


def model_of(engine: Engine) -> Model:
    model = instance_of(engine).model
    assert isinstance(model, Model)
    return model


def use(engine: Engine, recorded: RecordedBatches, way: str) -> None:
    """Run the next decodes in one of WAYS."""
    instance = instance_of(engine)
    instance.settle()
    executor = instance.local_executor
    executor.recorded = None if way == "call by call" else recorded
    executor.run_ahead(instance.launch_choice if way in WAYS[2:] else None)
    recorded.may_join = way == WAYS[-1]


def compare_tokens(device: torch.device, kv_dtype: Any, found: Found) -> None:
    """Serve the same prompts in all ways, as halves come and go."""
    prompts = [[(7 * n + 3 * i) % 200 for i in range(n)] for n in LENGTHS]
    served = []
    for way in WAYS:
        engine = random_engine(
            device, replace(TOKENS, shape=replace(TOKENS.shape, kv_dtype=kv_dtype), dtype=torch.float32)
        )
        recorded = recordings(engine, device)
        use(engine, recorded, way)
        model, made = model_of(engine), []
        first = model.layers[1].feed_forward
        for half in (first, changed(first, -3.0), copy(first)):
            model.install(1, half)
            made.append(run_prompts(engine, prompts, NUM_OUT)[1])
        made.append(drawn(engine, prompts))
        if way != "call by call" and not recorded.num_steps:
            found.problem(f"KV in {kv_dtype}, {way}: no step ran by recordings")
        if way == WAYS[-1] and recorded.num_joined < 2:  # one is joined at the start
            found.problem(f"KV in {kv_dtype}, {way}: no step was joined")
        served.append(made)
        close(engine)
    plain, *others = served
    for way, made in zip(WAYS[1:], others, strict=True):
        for what, tokens, wanted in zip(
            ("as it is", "with another half", "with its half back", "that draws"), made, plain, strict=True
        ):
            if tokens != wanted:
                found.problem(
                    f"tokens of a model {what}, KV in {kv_dtype}, {way}: {tokens} instead of {wanted}"
                )
    if plain[0] == plain[1]:
        found.problem("another half changes no token: the comparison shows nothing")


def drawn(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Return the tokens of requests that draw: from all, by top_p, by top_k, and beside greedy ones."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.8},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.0},
        {"temperature": 1.5, "top_k": 5, "min_p": 0.05},
        {"temperature": 0.7, "presence_penalty": 0.5},
    ]
    outputs: dict[str, list[int]] = {f"d{i}": [] for i in range(len(prompts))}
    for i, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True)):
        sampling = SamplingParams(**{"max_tokens": NUM_OUT, "seed": i, **kind})
        engine.submit(INSTANCE, own_request(f"d{i}", prompt, sampling))
    while engine.has_work:
        for result in engine.step():
            for output in result.outputs:
                outputs[output.request.request_id] += output.delta.token_ids
    return list(outputs.values())


def changed(half: object, factor: float) -> FeedForward:
    """Return an FFN with other memory for the weights of `down`, times a factor."""
    assert isinstance(half, FeedForward)
    other = copy(half)
    assert isinstance(other.down, TransposedLinear)
    other.down = TransposedLinear(other.down.weight * factor, other.down.bias)
    return other


def steps_of(
    engine: Engine, num_seqs: int, num_out: int, context: int = 12, temperature: float = 0.0
) -> None:
    """Begin some sequences and run their prefills."""
    sampling = SamplingParams(max_tokens=num_out, seed=0, temperature=temperature)
    for s in range(num_seqs):
        engine.submit(INSTANCE, own_request(f"s{s}", [(31 * i + s) % 199 for i in range(context)], sampling))
    scheduler = instance_of(engine).scheduler
    while scheduler.waiting or not all(seq.num_output for seq in scheduler.running):
        engine.step()


def end(engine: Engine, num_seqs: int) -> None:
    engine.cancel([f"s{s}" for s in range(num_seqs)])
    while engine.has_work:
        engine.step()


def flips(engine: Engine, device: torch.device, steps: int) -> dict[str, float]:
    """Time steps without a flip, those behind one to a half that is new, and to one that is known."""
    model, clock = model_of(engine), device_clock(device)
    first = model.layers[1].feed_forward
    steps_of(engine, 2, 4 * (steps + 8 * FLIPS))
    plain = [timed(engine.step, clock) for _ in range(steps)]
    behind: dict[str, list[float]] = {"new": [], "known": []}
    for _ in range(FLIPS):
        for half, kind in ((changed(first, 1.0), "new"), (first, "known")):
            model.install(1, half)
            behind[kind].append(timed(engine.step, clock))
            for _ in range(3):
                engine.step()
    end(engine, 2)
    times = {"without": plain, **behind}
    return {
        f"{name}_{what}_ms": 1e3 * of(values)
        for name, values in times.items()
        for what, of in (("median", statistics.median), ("longest", max))
    }


def first_token_ms(engine: Engine, tokens: int, num_seqs: int) -> float:
    """Return the time from a prompt's arrival to its first token beside decodes, the median of nine."""
    steps_of(engine, num_seqs, 400)
    sampling, taken = SamplingParams(max_tokens=1, seed=0, temperature=0.0), []
    for turn in range(9):
        name, prompt = f"p{turn}", [(i * 31 + 7 * turn + tokens) % 199 for i in range(tokens)]
        engine.submit(INSTANCE, own_request(name, prompt, sampling))
        began, has_come = time.perf_counter(), False
        while not has_come:
            outputs = [output for result in engine.step() for output in result.outputs]
            has_come = any(one.request.request_id == name and one.delta.token_ids for one in outputs)
        taken.append(1e3 * (time.perf_counter() - began))
        for _ in range(3):
            engine.step()
    end(engine, num_seqs)
    return statistics.median(taken)


def decode_row(engine: Engine, sizes: Sizes, reads: float, device: torch.device) -> dict[str, float]:
    """Time steps of the sequences that run, all of which decode."""
    instance = instance_of(engine)
    for _ in range(WARM_STEPS):
        engine.step()
    running = instance.scheduler.running
    num_seqs, context = len(running), statistics.mean(len(seq.token_ids) for seq in running)
    with StepTimes(instance, device) as times:

        def run_steps() -> None:
            for _ in range(sizes.steps):
                times.began = time.perf_counter()
                engine.step()

        seconds = timed(run_steps, device_clock(device)) / sizes.steps
    for _ in range(4):
        engine.step()
    told = clocks(device)  # in the middle of a step, where one is ahead
    assert len(running) == num_seqs, "a sequence has ended"
    floor = bytes_of_a_step(sizes, num_seqs, context + sizes.steps / 2) / reads
    wait_ms = 1e3 * times.wait_s / sizes.steps
    return {
        "step_ms": seconds * 1e3,
        "floor_ms": floor * 1e3,
        "ratio": seconds / floor,
        "tokens_per_second": num_seqs / seconds,
        "host_ms": seconds * 1e3 - wait_ms,
        "launched_ms": 1e3 * times.launched_s / sizes.steps,
        "wait_ms": wait_ms,
        **times.on_device(),
        **told,
    }


def profiled(engine: Engine, device: torch.device) -> Any:
    """Return the profiler's record of PROFILED steps that decode; None on a CPU."""
    for _ in range(WARM_STEPS):
        engine.step()
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
        for _ in range(PROFILED):
            engine.step()
        torch.cuda.synchronize(device)
    return profile


def halves_ms(engine: Engine, recorded: RecordedBatches) -> dict[str, float]:
    """Return the milliseconds of a step's graphs by kind, run in a row; what runs afterwards is nonsense."""
    instance = instance_of(engine)
    instance.settle()
    calls = recorded.recordings(len(instance.scheduler.running))
    kinds: dict[str, list[Run]] = {}
    for name, call in calls.items():
        kinds.setdefault(name.split()[0], []).append(call)
    return {f"{kind}_ms": 1e3 * event_seconds(in_a_row(chosen)) for kind, chosen in kinds.items()}


def launches_of_a_step(profile: Any) -> dict[str, float]:
    """Return what a decode step asks of the device. The profile's own wait is left out."""
    seen = Counter({event.key: event.count for event in profile.key_averages()} if profile else {})
    seen["cudaDeviceSynchronize"] -= min(1, seen["cudaDeviceSynchronize"])
    groups: dict[str, tuple[str, ...]] = {"launches": LAUNCHES, "copies": COPIES, "waits": WAITS}
    counted = {name: sum(seen[key] for key in keys) / PROFILED for name, keys in groups.items()}
    return counted | {key: seen[key] / PROFILED for keys in groups.values() for key in keys if seen[key]}


def kernels_of_a_step(engine: Engine, device: torch.device) -> dict[str, Any]:
    """Return the milliseconds of a step in kernels, in all and by kernel, and between them."""
    profile = profiled(engine, device)
    events = profile.events() if profile else []
    on_device = [one for one in events if one.device_type == torch.autograd.DeviceType.CUDA]
    if not on_device:
        return {}
    each, times = 1e3 * PROFILED, Counter[str]()
    for event in on_device:
        times[event.name[:70]] += event.time_range.elapsed_us()
    counts = Counter(event.name[:70] for event in on_device)
    return {
        **gaps([(event.time_range.start, event.time_range.end) for event in on_device], PROFILED),
        "kernels": [
            [name, counts[name] / PROFILED, round(us / each, 4)] for name, us in times.most_common(16)
        ],
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    if "parts" in found:
        took = f"{found['record_s']:.1f} s and {found['record_mib']:.0f} MiB"
        yield f"recorded {found['parts']} parts in {took}"
    if found.get("joined"):
        each_ms = 1e3 * found["join_s"] / found["joined"]
        yield f"joined {found['joined']} steps, {each_ms:.1f} ms each, {found['join_mib']:.0f} MiB in all"
    for row in found.get("decode", []):
        yield (
            f"decode {row['sequences']:3d} x {row['context']:5d}, {row['way']:12}: {row['step_ms']:7.2f} ms"
            f" a step, floor {row['floor_ms']:6.2f}, ratio {row['ratio']:.2f}; host {row['host_ms']:.2f},"
            f" last launch after {row['launched_ms']:.2f}, waits for tokens {row['wait_ms']:.2f}{_spans(row)}"
        )
    for row in found.get("kernels", []):
        yield from _kernel_lines(row)
    for row in found.get("halves", []):
        told = ", ".join(f"{name[:-3]} {ms:.2f}" for name, ms in row.items() if name.endswith("_ms"))
        yield f"{row['sequences']} x {row['context']}, graphs of each kind in a row, ms: {told}"
    for row in found.get("prompts", []):
        yield f"first token of {row['tokens']:3d} beside decodes, {row['way']:12}: {row['ms']:6.2f} ms"
    if flips := found.get("flips"):
        yield "steps, ms: " + ", ".join(f"{name[:-3]} {value:.2f}" for name, value in flips.items())
    for row in found.get("launches", []):
        told = ", ".join(f"{value:g} {kind}" for kind, value in row.items() if kind != "way")
        if told:
            yield f"a step, {row['way']}: {told} (bar 70 and 1)"


def _spans(row: dict[str, Any]) -> str:
    if "span_ms" not in row:
        return ""
    at = f", at {row['mhz']:.0f} MHz and {row['watts']:.0f} W" if "mhz" in row else ""
    return f"; device: a step spans {row['span_ms']:.2f}, {row['between_ms']:.2f} between two{at}"


def _kernel_lines(row: dict[str, Any]) -> Iterator[str]:
    if "busy_ms" not in row:
        return
    what = f"{row['sequences']} x {row['context']}, {row['way']}, temperature {row['temperature']:g}"
    yield (
        f"{what}, profiled: in kernels {row['busy_ms']:.2f} ms a step, {row['gaps_ms']:.2f} in"
        f" {row['gaps']:.0f} gaps of {row['gap_us']:.1f} us, idle {row['idle_ms']:.2f}"
    )
    yield "    " + "; ".join(f"{ms:.3f} {name} ({count:g})" for name, count, ms in row["kernels"][:6])


def main() -> int:
    return run_alone(__doc__, "graphs", measure, lines)
