"""The cost of the dashboard for the gateway: CPU with 0, 1 and 8 viewers, idle and under load.

Starts `instar serve` as a user would, and reads the gateway's CPU time from the scheduler. In each round
every number of viewers has its turn, and their cost is the difference to no viewer in the same round, so that
other programs do not count; the median of the rounds is shown. Viewers read /admin/live as the page does. The
load is an open loop of streams per second, whatever becomes of them.

Bar: under 1 % of a core with one viewer. A card, and one JSON line, which is kept in
bench/results/dashboard.json.

    python -m bench.gateway dashboard [--rounds 5] [--seconds 6] [--rate 4] [--tokens 32] [--workers 2]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.common.results import conclude, parser, say
from bench.gateway.idle import serving, spent_s, tree

BAR_PERCENT = 1.0
VIEWERS = (0, 1, 8)
SETTLE_S = 1.5


def main() -> int:
    args = _arguments()
    with serving("--workers", str(args.workers), LOG__LEVEL="warning") as (pid, url):
        gateway = next(p.pid for name, p in tree(pid).items() if name.startswith("gateway"))
        found = asyncio.run(measure(url, gateway, args))
    return report(found, args)


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5, help="turns of every number of viewers [5]")
    options.add_argument("--seconds", type=float, default=6.0, help="of each turn [6]")
    options.add_argument("--rate", type=float, default=4.0, help="streams a second of the load [4]")
    options.add_argument("--tokens", type=int, default=32, help="of each stream [32]")
    options.add_argument("--workers", type=int, default=2, help="worker processes [2]")
    return options.parse_args()


@dataclass
class Turns:
    """Per cent of a core in each round, by number of viewers, and the bytes that a viewer got meanwhile."""

    percent: dict[int, list[float]] = field(default_factory=lambda: {num: [] for num in VIEWERS})
    bytes_per_s: list[float] = field(default_factory=list)

    def cost(self, num_viewers: int) -> float:
        """Return the median of the difference to no viewer in the same round."""
        pairs = zip(self.percent[num_viewers], self.percent[0], strict=True)
        return statistics.median(with_them - without for with_them, without in pairs)

    def as_json(self) -> dict[str, Any]:
        return {
            "percent_of_a_core": {
                str(num): round(statistics.median(values), 3) for num, values in self.percent.items()
            },
            "cost_percent": {str(num): round(self.cost(num), 3) for num in VIEWERS[1:]},
            "rounds": {str(num): [round(one, 3) for one in values] for num, values in self.percent.items()},
            "bytes_per_s_of_a_viewer": round(statistics.median(self.bytes_per_s)),
        }


async def measure(url: str, gateway: int, args: argparse.Namespace) -> dict[str, Turns]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as http:
        idle = await _turns(http, gateway, args)
        async with _load(http, args):
            return {"idle": idle, "load": await _turns(http, gateway, args)}


async def _turns(http: httpx.AsyncClient, gateway: int, args: argparse.Namespace) -> Turns:
    turns = Turns()
    for number in range(args.rounds):
        order = VIEWERS if number % 2 == 0 else VIEWERS[::-1]
        for num_viewers in order:
            async with _watching(http, num_viewers) as got:
                await asyncio.sleep(SETTLE_S)
                before, bytes_before = spent_s(gateway), sum(got)
                await asyncio.sleep(args.seconds)
                turns.percent[num_viewers].append((spent_s(gateway) - before) / args.seconds * 100)
                if num_viewers:
                    turns.bytes_per_s.append((sum(got) - bytes_before) / num_viewers / args.seconds)
    return turns


@contextlib.asynccontextmanager
async def _watching(http: httpx.AsyncClient, num_viewers: int) -> AsyncIterator[list[int]]:
    """Let viewers read the feed; yield the bytes that each got so far."""
    got = [0] * num_viewers

    async def watch(viewer: int) -> None:
        async with http.stream("GET", "/admin/live") as answer:
            answer.raise_for_status()
            async for data in answer.aiter_raw():
                got[viewer] += len(data)
        raise RuntimeError("the gateway ended the feed")

    async with asyncio.TaskGroup() as tasks:
        watching = [tasks.create_task(watch(viewer)) for viewer in range(num_viewers)]
        yield got
        for task in watching:
            task.cancel()


@contextlib.asynccontextmanager
async def _load(http: httpx.AsyncClient, args: argparse.Namespace) -> AsyncIterator[None]:
    model = (await http.get("/v1/models")).json()["data"][0]["id"]
    body = {"model": model, "prompt": "def ", "max_tokens": args.tokens, "ignore_eos": True, "stream": True}

    async def ask() -> None:
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            async for _ in answer.aiter_raw():
                pass

    async def ask_on(tasks: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += 1 / args.rate
            await asyncio.sleep(max(0.0, due - loop.time()))
            tasks.create_task(ask())

    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(ask_on(tasks))
        yield
        asking.cancel()


def report(found: dict[str, Turns], args: argparse.Namespace) -> int:
    lines = [f"{'':8}{'viewers':>8}{'gateway':>18}{'more than with none':>22}"]
    for phase, turns in found.items():
        for num in VIEWERS:
            percent = statistics.median(turns.percent[num])
            more = f"{turns.cost(num):+.2f} %" if num else ""
            lines.append(f"{phase:8}{num:8}{percent:12.2f} % core{more:>22}")
        got = statistics.median(turns.bytes_per_s) / 1000
        lines.append(f"{'':8}a viewer gets {got:.1f} kB a second")
    worst = max(turns.cost(1) for turns in found.values())
    is_met = worst < BAR_PERCENT
    lines.append(f"one viewer: {worst:.2f} % of a core at worst (bar: under {BAR_PERCENT:g} %)")
    result = {
        "bench": "dashboard",
        "cost_percent_of_one_viewer": round(worst, 3),
        "bar": BAR_PERCENT,
        "is_met": is_met,
        "phases": {phase: turns.as_json() for phase, turns in found.items()},
        "load": {"streams_per_s": args.rate, "tokens": args.tokens, "workers": args.workers},
        "seconds": args.seconds,
    }
    say("\n".join(lines))
    return conclude(result, is_kept=True)
