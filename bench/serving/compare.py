"""Our scheduler of shapes against others: four real workers, short requests and now and then a long one.

    python -m bench.serving [--quick] [--ways ours,round-robin] [--workers 4]      (make bench-serving)

Real processes, real transforms, times by the clock. The setting is that of Gyges §6.2.4, with lengths scaled
to the devices: 60 short requests a minute at random, one long one every minute. A worker is a process whose
page budget holds the weights and 1440 tokens of KV. Two in a group hold 4992, and the long request is 2 %
longer: 3.5 times what a worker holds; four hold two of it. All workers share the cores of this machine, so
nothing is gained by spreading work over more devices; as on GPUs a group gets less done than its workers do
alone, here since they wait for each other.

So the load is measured first: how many tokens a second the workers get through alone, and in a group. Short
requests are made so long (10.3 % of it output, §5) that a minute asks for 1.35 times what a group gets done
(`LOAD`): workers that stay a group fall behind, those that form one only for a long request need not. They
are no longer than fits a worker 2.5 times (3.4 in the paper): a long prompt has about a quarter of a busy
group's steps, and longer ones beside shorter ones are not through before the next comes.

Ways have the same requests at the same moments. The unaware gateways are the service's own with another
choice (`bench.serving.gateway`); groups part by the same rules for all. Static ways never change, and refuse
what they cannot hold. Texts of some requests are compared with those of the same requests alone.

`bench.scheduler` is the same comparison in a model of eight GPUs, without the shared cores.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from bench.common.dummy_model import model_folder
from bench.common.results import RESULTS, conclude, parser, say
from bench.common.service import OtherPrograms
from bench.serving.load import LoadArrival, LoadServed, ServingLoad, arrivals, replay
from bench.serving.report import (
    BAR,
    HEAD,
    LEAST_LOAD,
    OURS,
    ROUND_ROBIN,
    TPOT_LIMIT_S,
    TTFT_LIMIT_S,
    ServingOutcome,
    ServingRun,
    as_json,
    bars,
    card,
    outcome,
    ratios,
    row,
    shapes_of,
)
from bench.serving.service import ServingService, ServingWay
from bench.serving.setup import GROUP, MODELS, calibrate, make_load, oracle

LONG_OUTPUT: Final = 32
MAX_LEN: Final = 16384
SEED: Final = 0


def ways(num_workers: int) -> list[ServingWay]:
    alone = (1,) * num_workers
    num_groups = num_workers // GROUP
    rest = num_workers - GROUP
    mix = (GROUP, *(1,) * rest) if rest else (GROUP // 2, *(1,) * (num_workers - GROUP // 2))
    mixed = f"TP{mix[0]} + {len(mix) - 1} x TP1"
    return [
        ServingWay(OURS, alone),
        ServingWay(ROUND_ROBIN, alone, pick=ROUND_ROBIN),
        ServingWay(LEAST_LOAD, alone, pick=LEAST_LOAD),
        ServingWay(f"static {num_workers} x TP1", alone, is_static=True),
        ServingWay(f"static {num_groups} x TP{GROUP}", (GROUP,) * num_groups, is_static=True),
        ServingWay(f"static {mixed}", mix, is_static=True),
    ]


def main() -> int:
    options = parser(__doc__)
    options.add_argument(
        "--quick", action="store_true", help="a minute of two ways with a small model; nothing is written"
    )
    options.add_argument("--ways", default="", help="parts of their names, with commas; all if left out")
    options.add_argument("--workers", type=int, default=GROUP, help=f"a multiple of {GROUP}")
    options.add_argument("--short-tokens", type=int, default=0, help="of a short request; 0: as measured")
    options.add_argument("--long-output", type=int, default=LONG_OUTPUT)
    options.add_argument("--short-per-minute", type=float, default=60.0)
    args = options.parse_args()
    if args.workers < GROUP or args.workers % GROUP:
        options.error(
            f"--workers is {args.workers}; a long request needs {GROUP}, so it is a multiple of that"
        )
    chosen = chosen_ways(ways(args.workers), args.ways or (f"{OURS},{ROUND_ROBIN}" if args.quick else ""))
    if not chosen:
        options.error(
            f"--ways is {args.ways!r}; there are: {', '.join(way.name for way in ways(args.workers))}"
        )
    began_s = time.monotonic()
    size, budget_mb = MODELS[args.quick]
    with model_folder(size, MAX_LEN) as folder, ServingService(folder, args.workers, budget_mb) as service:
        card = service.card()
        held = {tp: min(card.max_model_len, tokens) for tp, tokens in card.tokens_at.items()}
        load = make_load(held, args.long_output, is_quick=args.quick)
        load = replace(load, short_per_minute=args.short_per_minute)
        load, capacity = calibrate(service, load, args.short_tokens)
        script = arrivals(load, SEED)
        texts = oracle(service, script)
        runs: list[ServingRun] = []
        for way in chosen:
            runs.append(run_one(service, way, load, script, texts))
            say(HEAD + "\n" + row(way.name, outcome(runs[-1], load)))
    return report(runs, load, capacity, args, round(time.monotonic() - began_s))


def chosen_ways(there: Sequence[ServingWay], names: str) -> list[ServingWay]:
    parts = [part.strip() for part in names.replace("ours", OURS).split(",")]
    return [way for way in there if any(part in way.name for part in parts)]


def run_one(
    service: ServingService,
    way: ServingWay,
    load: ServingLoad,
    script: Sequence[LoadArrival],
    texts: Mapping[int, str],
) -> ServingRun:
    say(f"\n{way.name}: {load.seconds:.0f} s")
    service.use(way)
    before, others, began_s = service.given_up(), OtherPrograms(service), time.time()

    def watch(at_s: float, served: Sequence[LoadServed]) -> None:
        say(progress(service, at_s, served))

    served = replay(service.url(), script, load.seconds + load.drain_s, watch)
    others_cores, after = others.cores(), service.given_up()
    reports = service.transforms(began_s)
    compared = [one for one in served if one.is_whole and one.arrival.number in texts]
    return ServingRun(
        way=way.name,
        served=served,
        shapes_at_first=way.shapes,
        shapes=shapes_of(reports, began_s),
        unapplied=[f"{one.state}: {one.reason}" for one in reports if one.state != "applied"],
        recomputed_tokens=after.tokens - before.tokens,
        preemptions=after.preemptions - before.preemptions,
        num_samples=len(compared),
        samples_differ=[one.arrival.number for one in compared if one.text != texts[one.arrival.number]],
        others_cores=others_cores,
    )


def progress(service: ServingService, at_s: float, served: Sequence[LoadServed]) -> str:
    due = [one for one in served if one.arrival.at_s <= at_s and not (one.refused or one.error)]
    begun = [one for one in due if one.token_s]
    tokens = sum(one.tokens_between(at_s - 10.0, at_s) for one in begun) / 10.0
    waiting_long = sum(one.arrival.is_long for one in due) - sum(one.arrival.is_long for one in begun)
    return (
        f"  {at_s:4.0f} s  {tokens:5.0f} tokens/s  shape {service.shapes()}  {len(due)} due, "
        f"{sum(one.is_whole for one in due)} ended, {len(due) - len(begun)} without a token "
        f"({waiting_long} long)"
    )


def report(
    runs: Sequence[ServingRun],
    load: ServingLoad,
    capacity: Mapping[str, float],
    args: argparse.Namespace,
    seconds: int,
) -> int:
    """Print all, write what is no quick run, and return the exit status."""
    outcomes: dict[str, ServingOutcome] = {run.way: outcome(run, load) for run in runs}
    judged = bars(outcomes)
    say("\n" + card(outcomes, judged))
    result: dict[str, Any] = {
        "bench": "serving",
        "what": f"{args.workers} CPU workers, one service, real processes; times by the clock",
        "bar": BAR,
        "seconds": seconds,
        "limits_s": {"ttft": TTFT_LIMIT_S, "tpot": TPOT_LIMIT_S},
        "capacity_tokens_per_s": capacity,
        "load": asdict(load) | {"asked_tokens_per_s": round(load.asked_tokens_per_s, 1)},
        "bars": judged,
        "ratios": ratios(outcomes),
        "outcomes": {name: asdict(one) for name, one in outcomes.items()},
    }
    if not args.quick:
        from bench.serving.plot import draw

        draw(runs, load, RESULTS / "serving.png")
    each = [as_json(run, load) for run in runs]
    return conclude(result, is_kept=not args.quick, bars=judged, runs=each)
