"""Our scheduler of shapes against others, on eight simulated GPUs: no GPU is used, no time is measured.

    python -m bench.scheduler [--quick]

The model is `instar.simulate`: the service's own scheduler, dispatcher and choice of groups. The papers'
setting (Gyges §6.2.4): 60 short requests of 1K a minute, at random; one long one of 50K a minute; 8 instances
of one GPU at first. What work costs is stated in `bench.scheduler.costs`. How long answers are, the papers do
not say: a short one is 118 tokens (10.3 % of the whole, §5), a long one 4096, so that it runs for a minute
and the next one overlaps it, as in their Figure 13; other lengths are swept.

Throughput is tokens got through, prompts and outputs, after a warm-up. Two more numbers, since what arrives
bounds it and a queue hides in it: what comes within the limits of §3.1 (short: TTFT under 10 s, TPOT under
100 ms), and how many short requests a minute can come before their P95 leaves these limits.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.common.results import RESULTS, conclude, parser, quantile, say
from bench.scheduler import costs
from bench.scheduler.policies import Modelled, least_load_first, modelled, round_robin
from instar.replay.outcomes import RequestOutcome
from instar.replay.schemas import Arrival
from instar.simulate.cluster import TOO_LONG
from instar.simulate.dispatcher import Dispatcher, tokens_of

BAR = 1.26
TTFT_LIMIT_S, TPOT_LIMIT_S = 10.0, 0.1
WARM_UP_S = 300.0

Setup = tuple[Callable[[], Dispatcher | None], tuple[int, ...]]
OURS, ROUND_ROBIN, LEAST_LOAD = "transformation-aware", "round-robin", "least-load-first"
SETUPS: dict[str, Setup] = {
    OURS: (lambda: None, (1,) * 8),
    ROUND_ROBIN: (round_robin, (1,) * 8),
    LEAST_LOAD: (least_load_first, (1,) * 8),
    "static 8 x TP1": (lambda: None, (1,) * 8),
    "static TP4 + 4 x TP1": (lambda: None, (4, 1, 1, 1, 1)),
    "static 2 x TP4": (lambda: None, (4, 4)),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds, and tokens per second, of requests that came after the warm-up.

    A request without a first token at the end counts with the time it has waited.
    """

    tokens_per_s: float
    goodput: float  # tokens a second of short requests within the limits, and of long ones that ended
    short_ttft_p95: float
    long_ttft_p95: float | None
    short_tpot_p95: float
    long_tpot_p95: float | None
    num_up: int
    num_down: int
    num_refused: int
    num_ended: int
    num_requests: int


def arrivals(
    seed: int,
    seconds: float,
    *,
    short_per_min: float = 60,
    long_output: int = costs.LONG_OUTPUT,
    long_every_s: int = 60,
) -> list[Arrival]:
    rng = random.Random(seed)
    requests: list[Arrival] = []
    at_s = 0.0
    while (at_s := at_s + rng.expovariate(short_per_min / 60)) < seconds:
        requests.append(Arrival(at_s, costs.SHORT_PROMPT, costs.SHORT_OUTPUT))
    for at_s in range(30, int(seconds), long_every_s):
        requests.append(Arrival(float(at_s), costs.LONG_PROMPT, long_output))
    return requests


def model(
    name: str, seed: int, seconds: float, shapes: tuple[int, ...] = (), **load: Any
) -> tuple[Outcome, Modelled]:
    make, usual_shapes = SETUPS[name]
    requests = arrivals(seed, seconds, **load)
    run = modelled(make(), requests, seconds, shapes or usual_shapes, is_static=name.startswith("static"))
    return outcome_of(run), run


def outcome_of(run: Modelled) -> Outcome:
    seconds, outcomes = run.seconds, run.record.outcomes
    seen = [one for one in outcomes if one.due_s >= WARM_UP_S]
    short, long = ([one for one in seen if _is_long(one) == is_long] for is_long in (False, True))
    measured_s = seconds - WARM_UP_S
    before = max(tokens for at_s, tokens, _ in run.rates if at_s <= WARM_UP_S)
    served = [one for one in short if _is_in_time(one)] + [one for one in long if one.is_served]
    refused = [one for one in outcomes if one.error == TOO_LONG]
    return Outcome(
        tokens_per_s=(run.num_tokens - before) / measured_s,
        goodput=sum(map(tokens_of, served)) / measured_s,
        short_ttft_p95=quantile([_ttft(one, seconds) for one in short], 0.95) or 0.0,
        long_ttft_p95=quantile([_ttft(one, seconds) for one in long if one.error != TOO_LONG], 0.95),
        short_tpot_p95=quantile([_tpot(one) for one in short if one.is_served], 0.95) or 0.0,
        long_tpot_p95=quantile([_tpot(one) for one in long if one.is_served], 0.95),
        num_up=run.transforms("scale_up"),
        num_down=run.transforms("scale_down"),
        num_refused=len(refused),
        num_ended=sum(one.is_served for one in seen),
        num_requests=len(seen),
    )


def _is_long(one: RequestOutcome) -> bool:
    return tokens_of(one) > costs.TOKENS_AT[1]


def _ttft(one: RequestOutcome, end_s: float) -> float:
    return (end_s if one.first_s is None else one.first_s) - one.due_s


def _tpot(one: RequestOutcome) -> float:
    return one.tpot_s or 0.0


def _is_in_time(one: RequestOutcome) -> bool:
    return one.is_served and _ttft(one, 0.0) < TTFT_LIMIT_S and _tpot(one) < TPOT_LIMIT_S


# ------------------------------------------------------------------------------------- what is run


def compare(seeds: Sequence[int], seconds: float) -> tuple[dict[str, Any], dict[str, Modelled]]:
    say(
        f"{'':22} tokens/s  in time   TTFT P95 s: short   long   TPOT P95 ms: short   long   up/down  refused"
    )
    found, first = {}, {}
    for name in SETUPS:
        runs = [model(name, seed, seconds) for seed in seeds]
        first[name] = runs[0][1]
        found[name] = mean = _mean([outcome for outcome, _ in runs])
        say(
            f"{name:22} {mean['tokens_per_s']:8.0f} {mean['goodput']:8.0f} {mean['short_ttft_p95']:19.1f} "
            f"{_or_none(mean['long_ttft_p95']):>6} {1000 * mean['short_tpot_p95']:20.0f} "
            f"{_or_none(mean['long_tpot_p95'], 1000):>6} {mean['num_up']:5.0f}/{mean['num_down']:<3.0f} "
            f"{mean['num_refused']:7.0f}"
        )
    return found, first


def sweep(lengths: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    say("\ntokens/s by the length of long answers:")
    rows = []
    for length in lengths:
        outcomes = {
            name: model(name, 0, seconds, long_output=length)[0] for name in (OURS, ROUND_ROBIN, LEAST_LOAD)
        }
        row = {"long_output": length} | {name: round(one.tokens_per_s, 1) for name, one in outcomes.items()}
        rows.append(
            row | {f"{name} short_ttft_p95": round(one.short_ttft_p95, 2) for name, one in outcomes.items()}
        )
        ours, robin, least = (outcomes[name] for name in (OURS, ROUND_ROBIN, LEAST_LOAD))
        say(
            f"  {length:5}  ours {ours.tokens_per_s:6.0f}  {ours.tokens_per_s / robin.tokens_per_s:.2f}x "
            f"round-robin  {ours.tokens_per_s / least.tokens_per_s:.2f}x least-load-first, TTFT P95 of short "
            f"{ours.short_ttft_p95:.1f}, {robin.short_ttft_p95:.1f}, {least.short_ttft_p95:.1f} s"
        )
    return rows


def four_workers(seconds: float) -> list[dict[str, Any]]:
    """Compare where a group needs all workers: it gets less done than comes in, four workers alone more.

    Long answers have 512 tokens, so that a long request ends before the next comes.
    """
    say("\nfour workers, all of which a long request needs: tokens/s, TTFT P95 short, long, up/down:")
    rows = []
    for every_s in (180, 300):
        for name in (OURS, ROUND_ROBIN, LEAST_LOAD):
            one, _ = model(name, 0, seconds, (1,) * 4, long_output=512, long_every_s=every_s)
            rows.append({"long_every_s": every_s, "scheduler": name} | asdict(one))
            say(
                f"  every {every_s} s  {name:22} {one.tokens_per_s:6.0f} {one.short_ttft_p95:7.1f} "
                f"{_or_none(one.long_ttft_p95):>6} s {one.num_up:3}/{one.num_down}"
            )
    return rows


def sustained(name: str, seconds: float, step: int = 5) -> tuple[int, float]:
    """Return the most short requests per minute within the limits at P95, and the tokens per second."""
    low, high, tokens_per_s = 0, 32, 0.0
    while high - low > 1:
        middle = (low + high) // 2
        one, _ = model(name, 0, seconds, short_per_min=middle * step)
        if one.short_ttft_p95 < TTFT_LIMIT_S and one.short_tpot_p95 < TPOT_LIMIT_S:
            low, tokens_per_s = middle, one.tokens_per_s
        else:
            high = middle
    return low * step, tokens_per_s


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="one seed and a quarter of an hour")
    quick = options.parse_args().quick
    seconds, seeds = (900.0, [0]) if quick else (2100.0, [0, 1, 2])
    began_s = time.perf_counter()
    found, clusters = compare(seeds, seconds)
    ours = found[OURS]
    ratios = {
        other: {what: round(ours[what] / found[other][what], 3) for what in ("tokens_per_s", "goodput")}
        for other in SETUPS
        if other != OURS
    }
    say("")
    for other, ratio in ratios.items():
        say(f"  {ratio['tokens_per_s']:.2f}x the throughput of {other}, {ratio['goodput']:.2f}x in time")
    lengths = sweep(
        [512, 2048, costs.LONG_OUTPUT] if quick else [512, 1024, 2048, 3072, 4096, 5120, 5879], seconds
    )
    four = four_workers(min(seconds, 900.0))
    say("\nshort requests a minute within the limits, beside one long one:")
    most = {name: sustained(name, min(seconds, 1200.0)) for name in (OURS, ROUND_ROBIN, LEAST_LOAD)}
    for name, (rate, tokens) in most.items():
        say(f"  {name:22} {rate:4}  ({tokens:.0f} tokens/s, ours {most[OURS][1] / max(tokens, 1):.2f}x)")
    result = {
        "bench": "scheduler",
        "bar": BAR,
        "model": "instar.simulate, 8 GPUs, Qwen2.5-32B on H20 by Table 1 of Gyges; nothing is measured",
        "seconds": seconds,
        "warm_up_s": WARM_UP_S,
        "seeds": len(seeds),
        "short": [costs.SHORT_PROMPT, costs.SHORT_OUTPUT],
        "long": [costs.LONG_PROMPT, costs.LONG_OUTPUT],
        "outcomes": found,
        "ratios": ratios,
        "long_outputs": lengths,
        "four_workers": four,
        "short_per_minute_within_limits": {
            name: {"rate": rate, "tokens_per_s": round(tokens, 1)} for name, (rate, tokens) in most.items()
        },
        "took_s": round(time.perf_counter() - began_s, 1),
    }
    if not quick:
        from bench.scheduler.plot import draw

        draw(clusters, RESULTS / "scheduler.png")
    conclude(result, is_kept=not quick)
    return 0 if min(ratios[name]["tokens_per_s"] for name in (ROUND_ROBIN, LEAST_LOAD)) >= BAR else 1


def _mean(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    rows = [asdict(one) for one in outcomes]
    return {
        key: None
        if any(row[key] is None for row in rows)
        else round(statistics.fmean(row[key] for row in rows), 4)
        for key in rows[0]
    }


def _or_none(value: float | None, factor: float = 1.0) -> str:
    return "-" if value is None else f"{value * factor:.{0 if factor > 1 else 1}f}"
