"""Hours of mixed load, morphs, deaths and replacements of every process: what is lost, and what grows.

    python -m bench.soak [--hours 2] [--clients 4]

Starts the real service with two workers, two gateways, the demo model and a Redis that appends to a file.
Clients send requests of eight kinds (bench/soak/traffic.py) in closed loops. Meanwhile instances swap layers,
resize their KV caches, merge and part; and in turn every process is killed, or ended by SIGTERM as for a
replacement, and started again. Each death waits until the one before is mended.

Bars: no request lost; no process that ends by itself, no error in the controller, no KV block kept at the
end; and memory and descriptors of every process flat. Flat is: over the last two thirds of its life, of each
process that lived for ten minutes, the Theil-Sen slope is at most 0.25 MiB of its own memory (RssAnon) a
minute and at most 0.1 descriptors a minute. A line of progress every half minute, and one JSON line, kept in
bench/results/soak.json.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from itertools import cycle
from typing import Any, Final

import httpx

from bench.common.growth import Growth, Life
from bench.common.machine import CPUINFO, num_cores, processor_in
from bench.common.results import Bar, bar, conclude, digits, parser, quantile, say, say_bars
from bench.common.service import Service, wait_for
from bench.soak.traffic import Traffic

JUDGED_S: Final = 600.0  # a shorter life still fills pools and caches
MOST_MIB_PER_MINUTE: Final = 0.25
MOST_DESCRIPTORS_PER_MINUTE: Final = 0.1
# What is done to which process, in this order, about TIMES times in all.
TURNS: Final = (
    *(("kill", "w0"), ("kill", "monitor"), ("kill", "controller"), ("kill", "gateway0"), ("kill", "redis")),
    *(("replace", "w1"), ("replace", "gateway1"), ("replace", "controller"), ("kill", "w1")),
    *(("replace", "monitor"), ("kill", "gateway1"), ("replace", "w0"), ("replace", "gateway0")),
)
TIMES: Final = 3
LEAST_PAUSE_S: Final = 8.0  # between two of them
SAMPLES: Final = 1500  # of each process in the whole run, at most one a second
SAY_EVERY_S: Final = 30.0
DRAINED_S: Final = 90.0  # a process has ended by then after SIGTERM
SETTINGS: Final = {"WORKER__DTYPE": "float32", "GATEWAY__QUEUE_TIMEOUT_S": "120", "LOG__LEVEL": "warning"}


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--hours", type=float, default=2.0, help="[2]")
    options.add_argument("--clients", type=int, default=4, help="that send one request after the other [4]")
    args = options.parse_args()
    with service_to_soak() as service:
        result = measure(service, args.hours * 3600, args.clients)
        if not all(one["is_met"] for one in result["bars"].values()):
            say(service.logs())
    say_bars(result["bars"])
    return conclude(result, is_kept=True, bars=result["bars"])


def service_to_soak() -> Service:
    return Service(num_workers=2, num_gateways=2, settings=dict(SETTINGS), append_only=True)


def measure(service: Service, seconds: float, num_clients: int) -> dict[str, Any]:
    """Soak a service for so long; return the result, with the bars."""
    urls = [service.url(number) for number in range(service.num_gateways)]
    with Traffic(urls, num_clients) as traffic:
        soak = Soak(service, traffic, seconds)
        soak.run()
    wait_for("no request at any gateway", lambda: _inflight(service) == 0, 60)
    blocks = _blocks_kept(service)
    judged = [one for one in soak.growth.lives if one.seconds >= JUDGED_S]
    for line in traffic.lost[:20]:
        say(f"lost: {line}")
    return {
        "bench": "soak",
        "machine": {"processor": processor_in(CPUINFO.read_text()), "cores": num_cores()},
        "seconds": round(seconds),
        "clients": num_clients,
        "served": dict(sorted(traffic.served.items())),
        "refused": traffic.refused,
        "repeated": traffic.repeated,
        "lost": traffic.lost[:100],
        "turns": dict(soak.turns),
        "mended_s": {
            "p50": digits(quantile(soak.mended_s, 0.5)),
            "most": digits(quantile(soak.mended_s, 1.0)),
        },
        "morphs": dict(sorted(soak.morphs.items())),
        "problems": soak.problems,
        "controller_failures": soak.failures,
        "lives": [_told(one) for one in soak.growth.lives],
        "bars": {
            "requests lost": bar(0, len(traffic.lost), not traffic.lost),
            "processes that ended, bad answers": bar(0, len(soak.problems), not soak.problems),
            "errors in the controller": bar(0, len(soak.failures), not soak.failures),
            "KV blocks kept": bar(0, blocks, not blocks),
            **flat(judged),
        },
    }


def flat(lives: list[Life]) -> dict[str, Bar]:
    """Return the bars of memory and descriptors; none where no process lived long enough."""
    if not lives:
        say(f"no process lived for {JUDGED_S:.0f} s: growth is not judged")
        return {}
    mib = max(lives, key=lambda one: one.mib_per_minute)
    fds = max(lives, key=lambda one: one.descriptors_per_minute)
    return {
        f"MiB a minute ({mib.name})": bar(
            MOST_MIB_PER_MINUTE, mib.mib_per_minute, mib.mib_per_minute <= MOST_MIB_PER_MINUTE
        ),
        f"descriptors a minute ({fds.name})": bar(
            MOST_DESCRIPTORS_PER_MINUTE,
            fds.descriptors_per_minute,
            fds.descriptors_per_minute <= MOST_DESCRIPTORS_PER_MINUTE,
        ),
    }


class Soak:
    """The deaths and morphs beside the load. problems: what went wrong, in words."""

    def __init__(self, service: Service, traffic: Traffic, seconds: float) -> None:
        self.turns, self.morphs = Counter[str](), Counter[str]()
        self.mended_s: list[float] = []
        self.problems: list[str] = []
        self.failures: list[dict[str, Any]] = []  # of the controller, which goes on
        self.growth = Growth(service.processes.values())
        self._service, self._traffic, self._seconds = service, traffic, seconds
        self._rng = random.Random(1)

    def run(self) -> None:
        """Sample, morph and harm, in a loop until the time is over."""
        began = time.monotonic()
        pause_s = max(LEAST_PAUSE_S, self._seconds / (TIMES * len(TURNS)))
        sample_s, turns = max(1.0, self._seconds / SAMPLES), cycle(TURNS)
        next_sample = next_morph = next_say = began
        next_turn = began + pause_s
        while (now := time.monotonic()) < began + self._seconds:
            if now >= next_sample:
                next_sample = now + sample_s
                self.growth.sample()
                self._look()
            if now >= next_say:
                next_say = now + SAY_EVERY_S
                self._say(now - began)
            if now >= next_turn:
                self._turn(*next(turns))
                next_turn = time.monotonic() + pause_s
            elif now >= next_morph:
                self._morph()
                next_morph = time.monotonic() + pause_s / 4
            time.sleep(0.1)
        self._say(self._seconds)

    def _say(self, seconds: float) -> None:
        traffic = self._traffic
        say(
            f"{seconds:.0f} of {self._seconds:.0f} s: {traffic.served.total()} served, "
            f"{traffic.refused} refused, {traffic.repeated} repeated, {len(traffic.lost)} lost; "
            f"{self.turns.total()} deaths and replacements, {self.morphs.total()} morphs; "
            f"{self.growth.told()}"
        )
        failure = self._service.state()["controller"]["failure"]
        if failure and failure not in self.failures:
            self.failures.append(failure)

    def _look(self) -> None:
        """Note processes that ended by themselves, and start them again."""
        for process in self._service.processes.values():
            if not process.is_alive:
                self._problem(f"{process.name} ended by itself:\n{process.tail()}")
                process.start()

    def _problem(self, text: str) -> None:
        say(text)
        self.problems.append(text)

    # ---------------------------------------------------------------- deaths

    def _turn(self, how: str, name: str) -> None:
        service, process = self._service, self._service.processes[name]
        url = service.url(int(name.removeprefix("gateway"))) if name.startswith("gateway") else ""
        began = time.monotonic()
        if url:
            self._traffic.leaves(url)
        if how == "kill":
            self._kill(name, url)
        else:
            time.sleep(1.0 if url else 0.0)  # until what was on its way has arrived
            if status := process.terminate(DRAINED_S):
                self._problem(f"{name} ended with status {status} after SIGTERM:\n{process.tail()}")
        process.start()
        if name == "redis":
            wait_for("Redis to answer", service.redis_answers)
        service.wait_ready()
        if url:
            self._traffic.joins(url)
        self.turns[f"{how} {name}"] += 1
        self.mended_s.append(time.monotonic() - began)

    def _kill(self, name: str, url: str) -> None:
        if url:
            self._traffic.dies(url)
        self._service.processes[name].kill()
        if url:
            self._traffic.is_dead(url)

    # ---------------------------------------------------------------- morphs

    def _morph(self) -> None:
        """Order a morph of any instance, and note how it ended."""
        instance = self._rng.choice(self._service.state()["instances"])
        kind, path, body = self._order(instance)
        url = f"{self._service.url()}/admin/instances/{path}?wait=true"
        try:
            answer = httpx.post(url, json=body, timeout=90)
        except httpx.HTTPError as error:
            self._problem(f"{path} {body}: {type(error).__name__} {error}")
            return
        found = answer.json()
        code = found.get("state") or found.get("error", {}).get("code")
        self.morphs[f"{kind}: {code}"] += 1
        if answer.status_code >= 500 and answer.status_code not in (503, 504):
            self._problem(f"{path} {body}: {answer.status_code} {answer.text[:300]}")

    def _order(self, instance: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
        """Return kind, path below /admin/instances, and body of an order."""
        kind, rng = self._rng.choice(("swap", "swap", "resize", "transform")), self._rng
        if kind == "transform":
            workers = sorted(one for one in self._service.processes if one.startswith("w"))
            is_group = len(instance["workers"]) > 1
            return kind, kind, {"workers": workers, "tp": 1 if is_group else len(workers)}
        if kind == "swap":
            body: dict[str, Any] = {
                "precision": rng.choice(("full", "int8", "int4")),
                "count": rng.randint(1, 4),
            }
        else:
            least, blocks = instance["min_blocks"], instance["kv"]["blocks"] or 0
            body = {"blocks": max(least, round(blocks * rng.choice((0.5, 0.8, 1.25, 2.0))))}
        return kind, f"{instance['id']}/{kind}", body


def _inflight(service: Service) -> int:
    return sum(service.state(number)["gateway"]["inflight"] for number in range(service.num_gateways))


def _blocks_kept(service: Service, within_s: float = 30.0) -> float:
    """Return the KV blocks that are in use when nothing runs; workers report them a little later."""
    deadline = time.monotonic() + within_s
    while (blocks := service.blocks_used()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return blocks


def _told(life: Life) -> dict[str, Any]:
    return {
        "name": life.name,
        "seconds": round(life.seconds),
        "mib": [digits(life.own_mib[0]), digits(life.own_mib[-1])],
        "mib_per_minute": digits(life.mib_per_minute),
        "descriptors": [life.descriptors[0], life.descriptors[-1]],
        "descriptors_per_minute": digits(life.descriptors_per_minute),
        "is_judged": life.seconds >= JUDGED_S,
    }
