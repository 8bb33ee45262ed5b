"""The planner against each lever alone, on mixes of bursts and long requests: simulated, nothing is measured.

    python -m bench.planner [--first SEED] [--mixes N] [--keep FILE]

With --keep each mix is added to a file of JSON lines when it is done, and those in it are not run again; so
several processes can share the work. The file is of one version of the code: remove it after a change.

Four workers of the demo model by the calibration of `instar simulate`, with groups of two and four: their KV
cache is that of their workers and of the FFN pages that each gives up, their speeds those of Gyges, Table 1.

Each mix has a seed: 20 s of a base load and one to three bursts of 30 to 120 requests, of unequal length. One
of its one to three long requests comes within a burst. No worker can hold a long one, with all layers in int8
either. Seeds below 100 are for trying things, the bars are for others.

A policy with one lever can do nothing else: `queue` only waits, `swap` has the reflex (resize and swap),
`move` moves queued requests, `merge` makes and parts groups. The planner has all. What is compared is the
time that requests wait for their first token, in request-seconds, up to 60 s for each (which a request that
is never served has). `priced` adds the loss of the tokens made in fewer bits, by the planner's own rate of
exchange. Lower is better.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.common.plots import picture
from bench.common.results import RESULTS, bar, conclude, parser, say, say_bars
from bus.policy import Policy
from instar.replay.schemas import Arrival
from instar.simulate import calibration as calibrations
from instar.simulate.calibration import Degree, EngineCalibration
from instar.simulate.grouped import GroupedCluster

WORKERS: Final = 4
SECONDS, DRAIN_S = 20.0, 60.0
WORST_S: Final = 60.0  # wait of a request that is never served
POLICIES: Final = ("queue", "swap", "move", "merge", "planner")
SINGLES: Final = POLICIES[:-1]
JUDGED: Final = 100  # the first seed that nothing was tried on
EQUAL: Final = 1.02  # times the best single lever's cost: ties within the noise of one request
SPEEDS: Final = {2: 670 / 448, 4: 767 / 448}
LONGEST: Final = 4096
SHORT: Final = (32, 512)  # tokens of prompts
LONG: Final = (2900, 3800)


def calibration() -> EngineCalibration:
    """Return the demo model's, with groups."""
    found = calibrations.load(None)
    memory = found.memory
    ffn = memory.layer_pages["full"] - memory.attention_pages["full"]
    degrees = {}
    for tp, speed in SPEEDS.items():
        pages = tp * (memory.kv_pages + ffn * (tp - 1) / tp * found.num_layers)
        blocks = int(pages * memory.kv_blocks / memory.kv_pages)
        degrees[tp] = Degree(speed=speed, kv_tokens=blocks * found.limits.block_tokens)
    limits = msgspec.structs.replace(found.limits, max_model_len=LONGEST)
    transform = msgspec.structs.replace(found.transform, degrees=degrees)
    return msgspec.structs.replace(found, limits=limits, transform=transform)


def mix(seed: int) -> list[Arrival]:
    """Return a base load, bursts, and long requests of which one comes within a burst."""
    rng, found = random.Random(seed), list[Arrival]()

    def short(at_s: float) -> Arrival:
        return Arrival(at_s, round(math.exp(rng.uniform(*map(math.log, SHORT)))), rng.randint(16, 120))

    def long(at_s: float) -> Arrival:
        return Arrival(at_s, rng.randint(*LONG), rng.randint(16, 200))

    rate, at_s = rng.uniform(0.5, 4.0), 0.0
    while (at_s := at_s + rng.expovariate(rate)) < SECONDS:
        found.append(short(at_s))
    bursts = [(rng.uniform(0, SECONDS - 3), rng.uniform(0.5, 3.0)) for _ in range(rng.randint(1, 3))]
    for begins_s, lasts_s in bursts:
        found += [short(begins_s + rng.uniform(0, lasts_s)) for _ in range(rng.randint(30, 120))]
    begins_s, lasts_s = rng.choice(bursts)
    first_s = begins_s + rng.uniform(0, lasts_s)
    found.append(long(first_s))
    for _ in range(rng.randint(0, 2)):  # another one at about the same time, or at any
        is_near = rng.random() < 0.5
        found.append(long(first_s + rng.uniform(0, 2) if is_near else rng.uniform(0, SECONDS)))
    return sorted(found, key=lambda one: one.at_s)


def run(name: str, arrivals: Sequence[Arrival]) -> dict[str, Any]:
    """Return what one policy makes of a mix."""
    costs = calibration()
    if name not in ("swap", "planner"):
        pages = {"full": costs.memory.layer_pages["full"]}
        attention = {"full": costs.memory.attention_pages["full"]}
        memory = msgspec.structs.replace(
            costs.memory, layer_pages=pages, attention_pages=attention, spare_pages=0
        )
        costs = msgspec.structs.replace(costs, memory=memory)
    policy = Policy(max_tp=0 if name in ("merge", "planner") else 1)
    moves = name in ("move", "planner")
    cluster = GroupedCluster(costs, WORKERS, policy, moves=moves)
    record = cluster.run(arrivals, DRAIN_S)
    waits = [
        min(WORST_S, one.first_s - one.due_s) if one.first_s is not None else WORST_S
        for one in record.outcomes
    ]
    rules = policy.in_force() or policy
    loss = record.tally.lost_quality / max(1, record.tally.tokens)
    return {
        "cost_s": round(sum(waits), 3),
        "priced_s": round(sum(waits) + loss / rules.most_loss * rules.ttft_slo_s * len(waits), 3),
        "late": sum(wait > rules.ttft_slo_s for wait in waits),
        "loss": round(loss, 6),
        "requests": len(waits),
        "levers": {f"{lever} {state}": count for (lever, state), count in sorted(record.levers.items())},
    }


def compared(seed: int) -> dict[str, Any]:
    """Return what each policy makes of a mix, and the planner's cost against the best single lever's."""
    arrivals = mix(seed)
    found = {name: run(name, arrivals) for name in POLICIES}
    best = min(SINGLES, key=lambda name: found[name]["cost_s"])
    ratio, priced = (
        found["planner"][cost] / max(1e-9, min(found[name][cost] for name in SINGLES))
        for cost in ("cost_s", "priced_s")
    )
    row = {"seed": seed, "best": best, "ratio": round(ratio, 4), "priced_ratio": round(priced, 4)}
    return row | found


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--first", type=int, default=JUDGED, help=f"the first seed [{JUDGED}]")
    options.add_argument("--mixes", type=int, default=200, help="number of seeds from there on [200]")
    options.add_argument("--keep", type=Path, help="file of the mixes that are done")
    asked, began_s = options.parse_args(), time.perf_counter()
    first, count = asked.first, asked.mixes
    kept = asked.keep.read_bytes().splitlines() if asked.keep and asked.keep.exists() else []
    done = {row["seed"]: row for row in map(msgspec.json.decode, kept)}
    rows = []
    for seed in range(first, first + count):
        row = done.get(seed) or compared(seed)
        if asked.keep and seed not in done:
            with asked.keep.open("ab") as file:
                file.write(msgspec.json.encode(row) + b"\n")
        rows.append(row)
        if row["ratio"] > EQUAL or (seed + 1) % 20 == 0:
            each = "  ".join(f"{name} {row[name]['cost_s']:.1f}" for name in POLICIES)
            say(f"mix {seed:3}: {row['ratio']:.2f} of the best single lever ({row['best']})  {each}")
    ratios = [row["ratio"] for row in rows]
    worse = [row["seed"] for row in rows if row["ratio"] > EQUAL]
    better = sum(ratio < 1 / EQUAL for ratio in ratios)
    bars = {
        "mixes in which a single lever is better": bar("0", len(worse), not worse),
        "share of mixes in which the planner is better": bar("over 0.5", better / count, better > count / 2),
    }
    say_bars(bars)
    result = {
        "bench": "planner",
        "model": "four simulated workers of the demo model; nothing is measured",
        "mixes": count,
        "first": first,
        "worse": worse,
        "median_ratio": round(statistics.median(ratios), 4),
        "worst_ratio": max(ratios),
        "worse_priced": sum(row["priced_ratio"] > EQUAL for row in rows),
        "better_priced": sum(row["priced_ratio"] < 1 / EQUAL for row in rows),
        "late": {name: sum(row[name]["late"] for row in rows) for name in POLICIES},
        "cost_s": {name: round(sum(row[name]["cost_s"] for row in rows), 1) for name in POLICIES},
        "priced_s": {name: round(sum(row[name]["priced_s"] for row in rows), 1) for name in POLICIES},
        "loss": {name: round(statistics.fmean(row[name]["loss"] for row in rows), 6) for name in POLICIES},
        "took_s": round(time.perf_counter() - began_s, 1),
    }
    if count >= 200:
        draw(rows, RESULTS / "planner.png")
    return conclude(result, is_kept=count >= 200, bars=bars, rows=rows)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the planner's cost against that of the best single lever, for every mix."""
    with picture(path, 1, 2, figsize=(12, 5)) as (_, (left, right)):
        for name in SINGLES:
            own = [row for row in rows if row["best"] == name]
            if own:
                left.scatter(
                    [row[name]["cost_s"] for row in own],
                    [row["planner"]["cost_s"] for row in own],
                    s=12,
                    label=f"{name} is best ({len(own)})",
                )
        limits = [1.0, max(row[row["best"]]["cost_s"] for row in rows)]
        left.plot(limits, limits, color="grey", linewidth=0.8)
        left.set(xlabel="best single lever, request-seconds", ylabel="planner", xscale="log", yscale="log")
        left.legend(fontsize=8)
        right.plot(sorted(row["ratio"] for row in rows))
        right.axhline(1.0, color="grey", linewidth=0.8)
        right.set(xlabel="mixes, by ratio", ylabel="planner against the best single lever (lower is better)")
