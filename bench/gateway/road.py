"""Throughput and latency of gateway and bus, with a worker that does no work (the road of a token).

Gateway, Redis, the idle worker and the load client share the machine's cores. The card shows the tokens per
second that reach the clients' sockets at rising loads, the CPU time of each part per token, and, at half the
bar, the time from a token's birth (in the worker, before it is encoded) to the client's socket. The baseline
is a bare Starlette SSE app on the same server that sends chunks of the same size, in the same run.

    python -m bench.gateway road [--streams 256] [--seconds 6] [--loads 10000,20000,30000]
"""

from __future__ import annotations

import argparse
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.common.results import DEMO, conclude, parser, say
from bench.common.service import Service, wait_for
from bench.gateway.road_client import Stream, run_streams
from instar.replay.statistics import percentile

BAR_TOKENS_PER_S, BAR_P99_MS = 20_000, 20.0
WARM_S = 1.0  # at the beginning of a side and of each load, when streams open; it does not count


@dataclass(frozen=True)
class RoadLoad:
    """The outcome of one load; `cpu_us` is per token, by part."""

    offered: float
    received: float
    lost: int
    streams: list[Stream]
    cpu_us: dict[str, float]


class Road(Service):
    """Redis, a worker that does no work, and a gateway: no monitor and no controller."""

    def __init__(self, model: Path) -> None:
        settings = {"GATEWAY__MAX_QUEUE": "4096", "GATEWAY__MAX_INFLIGHT": "4096", "LOG__LEVEL": "warning"}
        super().__init__(model=model, settings=settings | {"GATEWAY__MAX_N_TOKENS": str(1 << 20)})

    @property
    def log(self) -> Path:
        """The file that the maker of the tokens writes when it ends."""
        return self.folder / "births.json"

    def start(self) -> None:
        self.start_redis()
        self.redis_url = self.own_redis_url
        self.add("worker", "bench.gateway.road_worker", BENCH_MODEL=str(self.model), BENCH_LOG=str(self.log))
        self.add_gateway(0)
        wait_for("the gateway", self.is_ready)

    def is_ready(self) -> bool:
        with suppress(httpx.HTTPError):
            return self.get("/ready").status_code == 200
        return False

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU seconds of each part so far; this process is the client."""
        pids = {name.rstrip("0"): process.pid for name, process in self.processes.items()} | {
            "client": os.getpid()
        }
        times = {name: psutil.Process(pid).cpu_times() for name, pid in pids.items()}
        return {name: spent.user + spent.system for name, spent in times.items()}

    def finish(self) -> dict[str, Any]:
        """End all processes and return the log of births."""
        for process in reversed(list(self.processes.values())):
            process.terminate()
        found: dict[str, Any] = json.loads(self.log.read_text())
        return found


class Bare(Road):
    """A bare Starlette app in place of the service."""

    def start(self) -> None:
        port = str(self.gateway_ports[0])
        self.add("server", "bench.gateway.road_baseline", BENCH_PORT=port, BENCH_LOG=str(self.log))
        wait_for("the bare app", self.is_ready)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--streams", type=int, default=256)
    options.add_argument("--seconds", type=float, default=6.0, help="of each load")
    options.add_argument("--loads", default="10000,20000,30000,40000", help="tokens per second offered")
    options.add_argument("--model", type=Path, default=DEMO, help="whose tokenizer to use")
    args = options.parse_args()
    loads = [int(load) for load in args.loads.split(",")]
    say(f"the road: {args.streams} streams, {os.cpu_count()} cores for all parts together")
    ours = measure("instar", Road(args.model), args, loads)
    bare = measure("bare", Bare(args.model), args, loads)
    result = summary(args.streams, ours, bare)
    print_card(result)
    conclude(result, is_kept=True)
    return 0 if result["passed"] else 1


def measure(name: str, side: Road, args: argparse.Namespace, loads: list[int]) -> dict[str, Any]:
    """Put all loads on one side, and return its rates, its CPU time and the latency at the lowest load."""
    with side:
        port = side.gateway_ports[0]
        run_streams(port, args.streams, max(1, loads[0] // args.streams), WARM_S)
        found = [run_load(side, args.streams, load, args.seconds) for load in loads]
        log = side.finish()
    for load in found:
        parts = ", ".join(f"{part} {us:.1f}" for part, us in load.cpu_us.items())
        rates = f"offered {load.offered:8,.0f}/s  received {load.received:8,.0f}/s"
        say(f"  {name:7} {rates}  CPU us/token: {parts}")
    latencies = sorted(latencies_ms(found[0].streams, log))
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
            "p50": percentile(latencies, 50),
            "p99": percentile(latencies, 99),
            "max": max(latencies),
        },
    }


def run_load(side: Road, num_streams: int, offered: int, seconds: float) -> RoadLoad:
    """Put one load on a side. `received` counts between the warm-up and the last second, when streams end."""
    pace = max(1, round(offered / num_streams))
    before = side.cpu_seconds()
    streams = run_streams(side.gateway_ports[0], num_streams, pace, seconds)
    used = {part: after - before[part] for part, after in side.cpu_seconds().items()}
    num_tokens = sum(stream.num_events - 1 for stream in streams)  # [DONE] is the last event
    wanted = num_streams * max(1, round(pace * seconds))
    return RoadLoad(
        offered=float(pace * num_streams),
        received=steady_rate(streams),
        lost=wanted - num_tokens,
        streams=streams,
        cpu_us={part: 1e6 * used[part] / num_tokens for part in used},
    )


def steady_rate(streams: list[Stream]) -> float:
    """Return the tokens per second at the sockets while all streams ran."""
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
    """Return the time from birth to the socket of every token after its stream's first second."""
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
