"""Hostile sockets: the time to first token of others, with and without thousands that misuse theirs.

    python -m bench.hostile [--sockets 4000] [--seconds 60] [--rate 2]

Starts the real service with one worker and the demo model. Bystanders send short requests at random times in
an open loop, each over a connection of its own. Spells without and with the attack take turns, so that both
are measured in the same minutes. In an attack each of five kinds has a fifth of the sockets, and one that is
closed is opened again after half a second:

- slow heads: a byte of a request's head every second;
- huge heads: header fields without an end, 8 KiB every tenth of a second;
- never reading: many requests for a large answer, of which not a byte is taken;
- half open: a whole head, and none of the body that it announces;
- malformed: bytes that are not HTTP.

Bars: P95 under attack at most 1.5 times that without; every request of a bystander served; and the gateway's
descriptors and memory back afterwards. A table, and one JSON line, kept in bench/results/hostile.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
import resource
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import psutil

from bench.common.results import bar, conclude, digits, parser, quantile, say, say_bars
from bench.common.service import Service

BAR: Final = 1.5
MORE_DESCRIPTORS, MORE_MB = 32, 64.0  # of the gateway afterwards, at most
SPELLS: Final = 3  # with the attack, each after one without
REOPEN_S: Final = 0.5
REST_S: Final = 45.0  # for the gateway to give up what is left: above all of its timeouts
SPARE_DESCRIPTORS: Final = 512
BODY: Final = {"model": "demo", "prompt": "The fox", "max_tokens": 8, "temperature": 0, "stream": True}
SETTINGS: Final = {"WORKER__DTYPE": "float32", "WORKER__LEASE_S": "10", "LOG__LEVEL": "error"}

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Target:
    """The address of a gateway, and what its attackers have done."""

    host: str
    port: int
    done: Counter[str] = field(default_factory=Counter)  # connections by kind, and those that failed

    async def open(self) -> Streams:
        return await asyncio.open_connection(self.host, self.port, limit=2**16)


async def slow_head(streams: Streams) -> None:
    """Send a byte of a head every second."""
    reader, writer = streams
    for byte in b"GET /health HTTP/1.1\r\nhost: x\r\nx-slow: " + b"a" * 600:
        writer.write(bytes([byte]))
        await writer.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                if not await reader.read(1024):
                    return


async def huge_head(streams: Streams) -> None:
    """Send header fields until the gateway closes."""
    _, writer = streams
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n")
    while True:
        writer.write(b"x-much: " + b"a" * 8000 + b"\r\n")
        await writer.drain()
        await asyncio.sleep(0.1)


async def never_reading(streams: Streams) -> None:
    """Ask for many large answers and take nothing of them."""
    reader, writer = streams
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 64)
    await writer.drain()
    while not writer.transport.is_closing():
        await asyncio.sleep(1.0)
        writer.write(b"\r\n")  # fails once the gateway has cut the connection
        await writer.drain()


async def half_open(streams: Streams) -> None:
    """Announce a body and send none."""
    reader, writer = streams
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
    writer.write(b"content-length: 1000\r\n\r\n")
    await writer.drain()
    while await reader.read(65536):
        pass


async def malformed(streams: Streams) -> None:
    """Send what is not HTTP."""
    reader, writer = streams
    writer.write(random.randbytes(200) + b"\r\n\r\n")
    await writer.drain()
    while await reader.read(65536):
        pass


KINDS: Final[tuple[Callable[[Streams], Awaitable[None]], ...]] = (
    slow_head,
    huge_head,
    never_reading,
    half_open,
    malformed,
)


async def attack(target: Target, num_sockets: int, seconds: float) -> None:
    """Keep so many hostile sockets open for so long."""
    end = time.monotonic() + seconds
    async with asyncio.TaskGroup() as tasks:
        for number in range(num_sockets):
            tasks.create_task(_keep(target, KINDS[number % len(KINDS)], end))
            if number % 100 == 99:
                await asyncio.sleep(0.02)


async def _keep(target: Target, kind: Callable[[Streams], Awaitable[None]], end: float) -> None:
    while (left := end - time.monotonic()) > 0:
        writer = None
        try:
            async with asyncio.timeout(left):
                streams = await target.open()
                writer = streams[1]
                target.done[kind.__name__] += 1
                await kind(streams)
        except TimeoutError:
            pass
        except OSError:
            target.done["cut off"] += 1
        finally:
            if writer is not None:
                writer.transport.abort()
        await asyncio.sleep(min(REOPEN_S, max(0.0, end - time.monotonic())))


@dataclass
class Bystanders:
    """Well-behaved clients: their times to first token in seconds, and what went wrong."""

    host: str
    port: int
    ttft_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    async def play(self, rate: float, seconds: float, rng: random.Random) -> None:
        """Send requests at random times, `rate` of them a second."""
        end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            while time.monotonic() < end:
                tasks.create_task(self.one())
                await asyncio.sleep(rng.expovariate(rate))

    async def one(self) -> None:
        """Send one request and note its time, or its problem."""
        began, received = time.monotonic(), b""
        body = json.dumps(BODY).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        head += f"content-length: {len(body)}"
        try:
            async with asyncio.timeout(60):
                reader, writer = await asyncio.open_connection(self.host, self.port)
                try:
                    writer.write(head.encode() + b"\r\n\r\n" + body)
                    first = 0.0
                    while piece := await reader.read(65536):
                        received += piece
                        if not first and b"data: " in received:
                            first = time.monotonic()
                finally:
                    writer.close()
        except (OSError, TimeoutError) as error:
            self.problems.append(f"{type(error).__name__}: {error}")
            return
        if (
            received.startswith(b"HTTP/1.1 200")
            and b"data: [DONE]" in received
            and b'"error"' not in received
        ):
            self.ttft_s.append(first - began)
        else:
            self.problems.append(received[:200].decode(errors="replace"))


def _attack_in_a_process(port: int, num_sockets: int, seconds: float, results: Any) -> None:
    """Attack from a process of its own, so that its work is not in the bystanders' times."""
    target = Target("127.0.0.1", port)
    asyncio.run(attack(target, num_sockets, seconds))
    results.put(dict(target.done))


def main() -> int:
    args = _arguments()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    num_sockets = min(args.sockets, most - SPARE_DESCRIPTORS)
    if num_sockets < args.sockets:
        say(f"this machine gives {most} descriptors to a process: {num_sockets} sockets instead")
    with Service(settings=SETTINGS) as service:
        return report(args, num_sockets, *_measure(service, args, num_sockets))


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--sockets", type=int, default=4000, help="hostile ones at once [4000]")
    options.add_argument("--seconds", type=float, default=60.0, help="under attack, in all [60]")
    options.add_argument("--rate", type=float, default=2.0, help="requests a second of bystanders [2]")
    return options.parse_args()


def _measure(
    service: Service, args: argparse.Namespace, num_sockets: int
) -> tuple[dict[str, Bystanders], Counter[str], dict[str, float]]:
    port, gateway = service.gateway_ports[0], psutil.Process(service.processes["gateway0"].pid)
    rng, done = random.Random(0), Counter[str]()
    rounds = {name: Bystanders("127.0.0.1", port) for name in ("alone", "under attack")}
    seconds = args.seconds / SPELLS
    asyncio.run(Bystanders("127.0.0.1", port).play(args.rate, 5.0, rng))  # the first requests are slower
    before = _of_process(gateway)
    context = multiprocessing.get_context("spawn")
    for number in range(SPELLS):
        say(f"spell {number + 1} of {SPELLS}: alone")
        asyncio.run(rounds["alone"].play(args.rate, seconds, rng))
        results = context.Queue()
        attacker = context.Process(
            target=_attack_in_a_process, args=(port, num_sockets, seconds + 5, results)
        )
        attacker.start()
        time.sleep(4.0)  # until it has started and its sockets are open
        say(f"spell {number + 1} of {SPELLS}: under attack, {gateway.num_fds()} descriptors at the gateway")
        asyncio.run(rounds["under attack"].play(args.rate, seconds, rng))
        done.update(results.get(timeout=120))
        attacker.join(30)
        time.sleep(5.0)
    say(f"waiting up to {REST_S:.0f} s for the gateway to close what is left")
    deadline = time.monotonic() + REST_S
    while time.monotonic() < deadline and gateway.num_fds() > before["descriptors"] + MORE_DESCRIPTORS:
        time.sleep(0.5)
    after = _of_process(gateway)
    return rounds, done, {name: after[name] - before[name] for name in before}


def _of_process(process: psutil.Process) -> dict[str, float]:
    return {"descriptors": process.num_fds(), "memory_mb": process.memory_info().rss / 2**20}


def report(
    args: argparse.Namespace,
    num_sockets: int,
    rounds: dict[str, Bystanders],
    done: Counter[str],
    more: dict[str, float],
) -> int:
    say(f"{'':14}{'served':>10}{'failed':>8}{'TTFT P50':>12}{'P95':>12}")
    found: dict[str, dict[str, Any]] = {}
    for name, one in rounds.items():
        p50, p95 = (quantile(one.ttft_s, share) for share in (0.5, 0.95))
        found[name] = {
            "served": len(one.ttft_s),
            "failed": len(one.problems),
            "ttft_p50_s": digits(p50),
            "ttft_p95_s": digits(p95),
        }
        times = (f"{1000 * (value or float('nan')):9.0f} ms" for value in (p50, p95))
        say(f"{name:14}{len(one.ttft_s):>10}{len(one.problems):>8}{''.join(times)}")
        for problem in one.problems[:3]:
            say(f"  {problem!r}")
    alone, attacked = (found[name]["ttft_p95_s"] for name in ("alone", "under attack"))
    ratio = attacked / alone if alone and attacked else None
    num_failed = sum(len(one.problems) for one in rounds.values())
    bars = {
        "ttft_p95_under_attack": bar(BAR, ratio, ratio is not None and ratio <= BAR),
        "requests_lost": bar(0, num_failed, num_failed == 0),
        "descriptors_left": bar(
            MORE_DESCRIPTORS, more["descriptors"], more["descriptors"] <= MORE_DESCRIPTORS
        ),
        "memory_left_mb": bar(MORE_MB, more["memory_mb"], more["memory_mb"] <= MORE_MB),
    }
    say_bars(bars)
    result = {
        "bench": "hostile",
        "sockets": num_sockets,
        "seconds": args.seconds,
        "rate": args.rate,
        "connections": dict(done),
        "rounds": found,
        "ratio": digits(ratio),
        "bars": bars,
    }
    return conclude(result, is_kept=True, bars=bars)


if __name__ == "__main__":
    raise SystemExit(main())
