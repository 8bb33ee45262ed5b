"""The road: gateway and bus with a worker that does no work. How many tokens, and how late?

Gateway, Redis, the idle worker and the load client share the machine's cores. Printed are the tokens per
second that reach the clients' sockets at rising loads, the CPU time each part takes per token, and, at half
the bar, the time from a token's birth (in the worker, before it is encoded) to the client's socket. The
baseline is a bare Starlette SSE app on the same server, sending chunks of the same size, in the same run.

    python -m bench.gateway road [--streams 256] [--seconds 6] [--loads 10000,20000,30000]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from bench.common.results import RESULTS, ROOT
from bench.gateway.road_client import Stream, run_streams
from instar.serve.redis_server import free_port, plan_redis, wait_until_listening

RESULT: Final = RESULTS / "road.json"
BAR_TOKENS_PER_S, BAR_P99_MS = 20_000, 20.0
WARM_S = 1.0  # at the beginning of a side and of each load: streams open, nothing is counted


@dataclass(frozen=True)
class Load:
    """One load's outcome; `cpu_us` per token and part."""

    offered: float
    received: float
    lost: int
    streams: list[Stream]
    cpu_us: dict[str, float]


@dataclass
class Side:
    """A server under load: its processes by name, its port, and the log it writes at exit."""

    port: int
    processes: dict[str, subprocess.Popen[bytes]]
    log: Path

    def stop(self) -> dict[str, Any]:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait(20)
        found: dict[str, Any] = json.loads(self.log.read_text())
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each load")
    parser.add_argument("--loads", default="10000,20000,30000,40000", help="tokens per second offered")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "demo", help="whose tokenizer to use")
    args = parser.parse_args()
    loads = [int(load) for load in args.loads.split(",")]
    say(f"the road: {args.streams} streams, {os.cpu_count()} cores for all parts together")
    ours = measure("instar", args, loads)
    bare = measure("bare", args, loads)
    result = summary(args.streams, ours, bare)
    print_card(result)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(result) + "\n")
    say(json.dumps(result))
    return 0 if result["passed"] else 1


def measure(name: str, args: argparse.Namespace, loads: list[int]) -> dict[str, Any]:
    """All loads against one server, and the latency at the lowest."""
    with tempfile.TemporaryDirectory(prefix="road-") as folder, ExitStack() as stack:
        start = instar_side if name == "instar" else bare_side
        side = stack.enter_context(start(Path(folder), args.model))
        run_streams(side.port, args.streams, max(1, loads[0] // args.streams), WARM_S)
        found = [run_load(side, args.streams, load, args.seconds) for load in loads]
        log = side.stop()
    for load in found:
        parts = ", ".join(f"{part} {us:.1f}" for part, us in load.cpu_us.items())
        rates = f"offered {load.offered:8,.0f}/s  received {load.received:8,.0f}/s"
        say(f"  {name:7} {rates}  CPU us/token: {parts}")
    latencies = latencies_ms(found[0].streams, log)
    return {
        "loads": [
            {
                "offered": load.offered,
                "received": load.received,
                "lost": load.lost,
                "cpu_us_per_token": load.cpu_us,
            }
            for load in found
        ],
        "latency_ms": {
            "at": found[0].offered,
            "p50": percentile(latencies, 0.5),
            "p99": percentile(latencies, 0.99),
            "max": max(latencies),
        },
    }


def run_load(side: Side, num_streams: int, offered: int, seconds: float) -> Load:
    """`received` counts between the warm-up and the last second, in which streams end."""
    pace = max(1, round(offered / num_streams))
    before = cpu_seconds(side)
    streams = run_streams(side.port, num_streams, pace, seconds)
    used = {part: after - before[part] for part, after in cpu_seconds(side).items()}
    num_tokens = sum(stream.num_events - 1 for stream in streams)  # [DONE] is the last event
    wanted = num_streams * max(1, round(pace * seconds))
    return Load(
        offered=float(pace * num_streams),
        received=steady_rate(streams),
        lost=wanted - num_tokens,
        streams=streams,
        cpu_us={part: 1e6 * used[part] / num_tokens for part in used},
    )


def steady_rate(streams: list[Stream]) -> float:
    """Tokens per second at the sockets while all streams ran."""
    begin = max(stream.reads[0][1] for stream in streams) + WARM_S * 1e9
    end = min(stream.reads[-1][1] for stream in streams) - 0.2e9
    if end <= begin:
        raise ValueError("the load was too short to measure; raise --seconds")
    total = 0
    for stream in streams:
        total += _events_until(stream, end) - _events_until(stream, begin)
    return total / (end - begin) * 1e9


def _events_until(stream: Stream, moment: float) -> int:
    count = 0
    for num_events, at in stream.reads:
        if at > moment:
            break
        count = num_events
    return count


def latencies_ms(streams: list[Stream], log: dict[str, Any]) -> list[float]:
    """Of every token after its stream's first second: read at the socket minus birth."""
    births, first_steps = log["births_ns"], log["first_steps"]
    found: list[float] = []
    for stream in streams:
        first, before = first_steps[stream.request_id], 0
        warm = stream.reads[0][1] + WARM_S * 1e9
        for num_events, at in stream.reads:
            last = min(num_events, stream.num_events - 1)
            if at > warm:
                found += [(at - births[first + token]) / 1e6 for token in range(before, last)]
            before = last
    return found


def percentile(values: list[float], share: float) -> float:
    return statistics.quantiles(values, n=1000, method="inclusive")[round(share * 1000) - 1]


def cpu_seconds(side: Side) -> dict[str, float]:
    parts = {name: psutil.Process(process.pid) for name, process in side.processes.items()}
    parts["client"] = psutil.Process()
    times = {name: part.cpu_times() for name, part in parts.items()}
    return {name: spent.user + spent.system for name, spent in times.items()}


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


# --------------------------------------------------------------------------- the two sides


@contextmanager
def instar_side(folder: Path, model: Path) -> Iterator[Side]:
    redis = plan_redis(maxmemory_mb=256)
    port, log = free_port(), folder / "worker.json"
    env = os.environ | {
        "INSTAR_CONFIG": str(_empty(folder)),
        "INSTAR_REDIS__URL": f"redis://:{redis.password}@127.0.0.1:{redis.port}/0",
        "INSTAR_GATEWAY__PORT": str(port),
        "INSTAR_GATEWAY__MAX_QUEUE": "4096",
        "INSTAR_GATEWAY__MAX_INFLIGHT": "4096",
        "INSTAR_GATEWAY__MAX_N_TOKENS": str(1 << 20),
        "INSTAR_LOG__LEVEL": "warning",
    }
    with running(folder, env) as start:
        start("redis", *redis.argv, stdin=redis.config)
        wait_until_listening(redis.port, 10)
        start("worker", sys.executable, "-m", "bench.gateway.road_worker", str(model), str(log))
        processes = start("gateway", sys.executable, "-m", "gateway")
        wait_ready(port)
        yield Side(port, processes, log)


@contextmanager
def bare_side(folder: Path, _: Path) -> Iterator[Side]:
    port, log = free_port(), folder / "bare.json"
    with running(folder, dict(os.environ)) as start:
        processes = start("server", sys.executable, "-m", "bench.gateway.road_baseline", str(port), str(log))
        wait_ready(port)
        yield Side(port, processes, log)


@contextmanager
def running(folder: Path, env: dict[str, str]) -> Iterator[Any]:
    """Starts processes by name; ends what is left of them."""
    processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(name: str, *argv: str, stdin: bytes = b"") -> dict[str, subprocess.Popen[bytes]]:
        with (folder / f"{name}.log").open("wb") as out:
            process = subprocess.Popen(argv, env=env, cwd=ROOT, stdin=subprocess.PIPE, stdout=out, stderr=out)
        assert process.stdin is not None
        process.stdin.write(stdin)
        process.stdin.close()
        processes[name] = process
        return processes

    try:
        yield start
    except BaseException:
        for name in processes:
            say(f"--- {name}\n{(folder / f'{name}.log').read_text(errors='replace')[-2000:]}")
        raise
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def wait_ready(port: int, within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise TimeoutError(f"nothing was ready on port {port} within {within_s} s")


def _empty(folder: Path) -> Path:
    file = folder / "instar.toml"
    file.touch()
    return file


# --------------------------------------------------------------------------- the card


def summary(num_streams: int, ours: dict[str, Any], bare: dict[str, Any]) -> dict[str, Any]:
    best, bare_best = (max(load["received"] for load in side["loads"]) for side in (ours, bare))
    p99 = ours["latency_ms"]["p99"]
    lost = sum(load["lost"] for load in ours["loads"])
    return {
        "bench": "road",
        "streams": num_streams,
        "cores": os.cpu_count(),
        "tokens_per_s": best,
        "bare_tokens_per_s": bare_best,
        "ratio": best / bare_best,
        "latency_ms": ours["latency_ms"],
        "bare_latency_ms": bare["latency_ms"],
        "lost": lost,
        "loads": ours["loads"],
        "bare_loads": bare["loads"],
        "bar": {"tokens_per_s": BAR_TOKENS_PER_S, "p99_ms": BAR_P99_MS},
        "passed": best >= BAR_TOKENS_PER_S and p99 < BAR_P99_MS and lost == 0,
    }


def print_card(result: dict[str, Any]) -> None:
    say(f"  tokens per second   {result['tokens_per_s']:10,.0f}   bar {BAR_TOKENS_PER_S:,}")
    say(f"  bare Starlette SSE  {result['bare_tokens_per_s']:10,.0f}   ratio {result['ratio']:.2f}")
    for name, key in (("birth to socket", "latency_ms"), ("bare", "bare_latency_ms")):
        late = result[key]
        say(f"  {name:15} at {late['at']:,.0f}/s: median {late['p50']:.1f} ms, P99 {late['p99']:.1f} ms")
    say(f"  tokens lost {result['lost']}; {'passed' if result['passed'] else 'NOT passed'}")
