"""Fairness between API keys: the time to first token of a light key, alone and beside 100 times its load.

    python -m bench.fairness [--seconds 40] [--rate 1] [--times 100]

Starts the real service with one worker and the demo model. Requests of both keys come at random, in an open
loop, with prompts of 64 tokens and answers of 32. Three rounds: the light key alone; beside the heavy key;
and both loads with one key, which is the first-come queue that the fair one replaces. The heavy load is above
what the worker can serve, so much of it is refused: that is part of the measurement.

Bar: P95 of the light key beside the heavy one at most 1.3 times that of the light key alone. The baseline is
the third round. A table, and one JSON line, which is kept in bench/results/fairness.json.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from dataclasses import dataclass
from typing import Any, Final

from bench.common.load import MODEL, Recorder
from bench.common.results import bar, conclude, digits, parser, quantile, say, say_bars
from bench.common.service import Service
from instar.replay.outcomes import RequestOutcome
from instar.replay.requests import Dialect, bodies
from instar.replay.schemas import Arrival
from instar.replay.wire import ServerAddress

BAR: Final = 1.3
PROMPT, OUTPUT = 64, 32
LIGHT, HEAVY = "light-key-of-the-bench", "heavy-key-of-the-bench"
WARM_UP_S: Final = 5.0  # requests due before are not counted: the queue fills
DRAIN_S: Final = 10.0
SETTINGS: Final = {
    "GATEWAY__API_KEYS": f'["{LIGHT}", "{HEAVY}"]',
    "WORKER__DTYPE": "float32",
    "LOG__LEVEL": "warning",
}


def main() -> int:
    args = _arguments()
    with Service(settings=SETTINGS) as service:
        url = service.url()
        rounds = {
            "alone": Round(url, args, LIGHT, ""),
            "fair": Round(url, args, LIGHT, HEAVY),
            "one queue": Round(url, args, HEAVY, HEAVY),
        }
        Round(url, args, LIGHT, HEAVY).play(WARM_UP_S)  # the first requests of a service are slower
        for name, one in rounds.items():
            one.play(args.seconds)
            say(f"{name}: {one.as_json()}")
    return report(rounds, args)


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=40.0, help="of each round [40]")
    options.add_argument("--rate", type=float, default=1.0, help="requests a second of the light key [1]")
    options.add_argument("--times", type=float, default=100.0, help="load of the heavy key beside it [100]")
    return options.parse_args()


@dataclass
class Round:
    """One round; `light` and `heavy` are the keys of the two loads, "" for a load that is left out."""

    url: str
    args: argparse.Namespace
    light: str
    heavy: str
    light_run: tuple[RequestOutcome, ...] = ()
    heavy_run: tuple[RequestOutcome, ...] = ()

    def play(self, seconds: float) -> None:
        asyncio.run(self._play(seconds))

    async def _play(self, seconds: float) -> None:
        rate = self.args.rate
        loads = [_recorder(self.url, self.light, rate, seconds, seed=1)]
        if self.heavy:
            loads.append(_recorder(self.url, self.heavy, rate * self.args.times, seconds, seed=2))
        async with asyncio.TaskGroup() as tasks:
            for load in loads:
                tasks.create_task(load.replay())
        runs = [tuple(one for one in load.run.outcomes if one.due_s >= WARM_UP_S) for load in loads]
        self.light_run, self.heavy_run = runs[0], runs[1] if self.heavy else ()

    @property
    def ttft_s(self) -> list[float]:
        """Times to first token of the light load's served requests."""
        return [one.ttft_s for one in self.light_run if one.is_served and one.ttft_s is not None]

    def as_json(self) -> dict[str, Any]:
        return {
            "light_requests": len(self.light_run),
            "light_served": sum(one.is_served for one in self.light_run),
            "ttft_p50_s": digits(quantile(self.ttft_s, 0.5)),
            "ttft_p95_s": digits(quantile(self.ttft_s, 0.95)),
            "heavy_requests": len(self.heavy_run),
            "heavy_served": sum(one.is_served for one in self.heavy_run),
        }


def _recorder(url: str, key: str, rate: float, seconds: float, *, seed: int) -> Recorder:
    rng, arrivals, at_s = random.Random(seed), list[Arrival](), 0.0
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        arrivals.append(Arrival(at_s, PROMPT, OUTPUT))
    prompts = bodies(arrivals, MODEL, Dialect(), seed=seed)
    name = f"fairness-{seed}-{time.time_ns() // 1_000_000}"
    return Recorder(ServerAddress.at(url, key), arrivals, prompts, drain_s=DRAIN_S, name=name)


def report(rounds: dict[str, Round], args: argparse.Namespace) -> int:
    say(f"{'':12}{'light: served':>16}{'TTFT P50':>12}{'P95':>12}{'heavy: served':>18}")
    for name, one in rounds.items():
        found = one.as_json()
        p50, p95 = (1000 * (found[f"ttft_{p}_s"] or float("nan")) for p in ("p50", "p95"))
        served = f"{found['light_served']} of {found['light_requests']}"
        heavy = f"{found['heavy_served']} of {found['heavy_requests']}" if one.heavy else ""
        say(f"{name:12}{served:>16}{p50:9.0f} ms{p95:9.0f} ms{heavy:>18}")
    alone, fair, one_queue = (quantile(one.ttft_s, 0.95) for one in rounds.values())
    ratio = fair / alone if fair and alone else None
    bars = {"ttft_p95_beside_a_heavy_key": bar(BAR, ratio, ratio is not None and ratio <= BAR)}
    say_bars(bars)
    result = {
        "bench": "fairness",
        "ratio": digits(ratio),
        "ratio_of_one_queue": digits(one_queue / alone if one_queue and alone else None),
        "rounds": {name: one.as_json() for name, one in rounds.items()},
        "load": {"rate": args.rate, "times": args.times, "prompt": PROMPT, "output": OUTPUT},
        "seconds": args.seconds,
        "bars": bars,
    }
    return conclude(result, is_kept=True, bars=bars)


if __name__ == "__main__":
    raise SystemExit(main())
