"""MorphServe's evaluation (its section 5) at this size, on one engine; docs/evaluation.md describes it.

    python -m bench.paper [--traces DIR] [--size demo] [--minutes N] [--quick]   (make bench-paper TRACES=DIR)

models/demo in float32, by one real service, with little more memory for its KV cache than a third of its
weights. First, offline, what each way of serving costs in quality. Then, in three repeats, the loads and the
ladder. The loads are two windows of the Azure traces, at their own speed, and a synthetic burst, thinned to
what this machine could do in the first session; each is sent to every way in turn. On the ladder of steady
rates a way climbs until its P95 TTFT exceeds the limit. Before each run the service is idle, its layers went
back to full precision, and it rests for COOL_S. Models of another --size have random weights: their latency
is measured alone, with the ways that need no knowledge of quality.

Every run is kept in --runs when it ends, also for `instar bench plot`, and the same command goes on with
what is missing. Once every load was sent to every way, it writes bench/results/paper.json (paper-SIZE.json of
other sizes), the figures beside it, and the pages. With --quick it begins anew, and writes only what --out
names.
"""

from __future__ import annotations

import json
import pickle
import sys
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from bench.common.results import DEMO, RESULTS, digits, parser, say
from bench.morph.service import Way
from bench.paper.campaign import Campaign, Clock
from bench.paper.evaluation import QUICK, Evaluation, Size
from bench.paper.kept import Kept
from bench.paper.ladder import rates_of
from bench.paper.loads import (
    BUSIEST_S,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    WINDOWS,
    Load,
    all_loads,
    find_trace,
)
from bench.paper.pyramid import memory_share
from bench.paper.quality import Offline, measure
from bench.paper.reflex import LossTable, loss_table
from bench.paper.report import headlines, load_numbers, offline_numbers, premises
from bench.paper.run import SLO
from bench.paper.service import FULL, PLAN, PLAN_ANY, roomy, ways
from bench.paper.windows import BUDGETS, NUM_PROMPTS, random_prompts, service_of
from instar.errors import CommandError
from worker.shape.layer_order import load_order

PLANS: Final = {PLAN: ("full", "int4"), PLAN_ANY: ("full", "int8", "int4", "int3")}
BURST_SHARE: Final = 0.85  # of what all layers in INT4 can do
LEAST_OVERLOAD: Final = 1.25  # of full precision, by the burst


def evaluate(args: Namespace, folder: Path, size: Size) -> dict[str, Any]:
    """Run what is missing of the evaluation and return its result so far. Raises CommandError."""
    traces: Path | None = args.traces
    for window in WINDOWS if traces else ():
        find_trace(traces or Path(), window)  # said now rather than after minutes
    plan = {
        "size": args.size,
        "speed": size.speed,
        "rung_s": size.rung_s,
        "rungs": size.rungs,
        "loads": [*(f"{one.name}, {one.start_s:g} s" for one in WINDOWS if traces), "Gamma burst"],
    }
    if size.is_quick:
        (folder / "runs.json").unlink(missing_ok=True)
    kept = Kept(folder / "runs.json", plan, redo_disturbed=args.redo_disturbed)
    clock = Clock(args.minutes)
    with ExitStack() as stack:
        offline = offline_of(folder, size, clock) if args.size == "demo" else None
        service = stack.enter_context(service_of(args.size))
        prompts = offline.prompts if offline else random_prompts(NUM_PROMPTS)
        campaign = Campaign(service, prompts, kept, folder, clock)
        every = ways(service.num_layers, offline.plans if offline else {})
        wide = None
        if offline:
            if service.order != load_order(DEMO, "profile")[0]:
                raise AssertionError(f"the service swaps in the order {service.order}, not in the profile's")
            share = memory_share(offline.kept, PROMPT_TOKENS, OUTPUT_TOKENS)
            wide = stack.enter_context(roomy(service, share))
        else:
            every = [way for way in every if not way.is_roomy]
        blocks = {"full": service.blocks_at_full, "pyramid": wide.blocks_at_full if wide else None}
        clock.say(f"KV blocks at full precision: {service.blocks_at_full}; layers go {service.order}")
        campaign.calibrate()
        loads = loads_of(campaign, traces, size)
        losses = loss_table(service.model, service.num_layers)
        found = Evaluation(campaign, every, losses, size, offline, wide)
        is_done = found.do(loads, args.parts.split(","), args.repeats)
        settings = settings_of(campaign, size, losses) | {"size": args.size, "kv_blocks": blocks}
    result = result_of(kept, loads, every, settings)
    return result | {
        "quick": size.is_quick,
        "offline": offline_numbers(offline, settings["order"]) if offline else None,
        "is_done": is_done,
    }


def offline_of(folder: Path, size: Size, clock: Clock) -> Offline:
    """Return the offline quality, measured in the first session and kept beside its runs."""
    path = folder / "offline.pickle"
    if path.exists():
        found: Offline = pickle.loads(path.read_bytes())
        return found
    clock.say("quality, offline: sensitivity of layers, perplexity, continuations; three minutes")
    found = measure(load_order(DEMO, "profile")[0], PLANS, is_quick=size.is_quick)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(found))
    return found


def loads_of(campaign: Campaign, traces: Path | None, size: Size) -> list[Load]:
    """Return the loads, thinned by the rates of the first session."""
    full, int4 = campaign.rates
    burst = max(BURST_SHARE * int4, LEAST_OVERLOAD * full) * size.burst
    loads = all_loads(traces, size.speed, burst, campaign.clock.say)
    for load in loads:
        campaign.clock.say(
            f"{load.name}: {len(load.times)} of {load.of} requests in {load.seconds:.0f} s; its busiest "
            f"{BUSIEST_S:g} s ask for {load.burst_rate / full:.2f} of full precision, the mean for "
            f"{load.mean_rate / full:.2f}"
        )
    return loads


def settings_of(campaign: Campaign, size: Size, losses: LossTable) -> dict[str, Any]:
    service = campaign.service
    return {
        "speed": size.speed,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "busiest_s": BUSIEST_S,
        "ttft_limit_s": SLO.ttft_s,
        "order": service.order,
        "num_layers": service.num_layers,
        "ladder_s": size.rung_s,
        "ladder_rates": [digits(rate) for rate in rates_of(*campaign.rates, size.rungs)],
        "burst_share_of_int4": BURST_SHARE,
        "least_overload_of_full": LEAST_OVERLOAD,
        "losses_by": losses.source,
    }


def result_of(kept: Kept, loads: list[Load], every: list[Way], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the result of the runs so far. Pure."""
    rates, rows, ladder = kept.found["requests_per_s"], kept.of("loads"), kept.of("ladder")
    missing = [
        f"{load.name}, {way.name}"
        for load in loads
        for way in every
        if not any((one["load"], one["way"]) == (load.name, way.name) for one in rows)
    ]
    names = [load.name for load in loads], [way.name for way in every]
    rows.sort(key=lambda one: (names[0].index(one["load"]), names[1].index(one["way"]), one["repeat"]))
    known = {} if missing else {"headlines": headlines(rows, ladder, max(settings["ladder_rates"]))}
    return known | {
        "bench": "paper",
        "sessions": kept.found["sessions"],
        "settings": settings | {"capacity_requests_per_s": {name: digits(rates[name]) for name in rates}},
        "loads": [load_numbers(load, rates[FULL]) for load in loads],
        "runs": rows,
        "ladder": ladder,
        "premises": premises(rows, kept.found["sessions"]) if rows else [],
        "missing": missing,
    }


def options() -> Namespace:
    found = parser(__doc__)
    found.add_argument("--traces", type=Path, help="folder with the two Azure traces of 2023")
    found.add_argument("--size", default="demo", choices=sorted(BUDGETS), help="of the model [demo]")
    found.add_argument("--repeats", type=int, default=0, help="of each run [3]")
    found.add_argument("--parts", default="loads,ladder", help="loads or ladder alone [loads,ladder]")
    found.add_argument("--minutes", type=float, default=0.0, help="no run begins after these [no end]")
    found.add_argument(
        "--redo-disturbed", action="store_true", help="repeat runs during which others took the machine"
    )
    found.add_argument("--quick", action="store_true", help="a pilot of minutes; its numbers say nothing")
    found.add_argument("--out", type=Path, help="folder for the JSON and the figures [bench/results]")
    found.add_argument("--runs", type=Path, help="folder for every run [build/paper-SIZE]")
    return found.parse_args()


def main() -> int:
    args = options()
    size = QUICK if args.quick else Size()
    name = f"paper-{args.size}{'-quick' if args.quick else ''}"
    try:
        result = evaluate(args, args.runs or Path("build") / name, size)
    except CommandError as problem:
        sys.stderr.write(f"bench.paper: {problem}\n")
        return 2
    is_done, missing = result.pop("is_done"), result.pop("missing")
    if missing:
        say(f"nothing is written yet: {len(missing)} loads and ways have no run, first {missing[0]}")
        return 1
    from bench.paper.page import card

    say(card(result))
    out = args.out or (None if args.quick else RESULTS)
    if out is not None:
        keep(result, out, "paper" if args.size == "demo" else f"paper-{args.size}")
    failed = [one for one in result["premises"] if not one["holds"]]
    say(json.dumps({"bench": "paper", "is_done": is_done, "failed": failed}))
    return 0 if is_done and not failed else 1


def keep(result: dict[str, Any], out: Path, name: str) -> None:
    """Write the JSON, and of the demo model the figures and the pages."""
    from bench.paper.page import write_pages
    from bench.paper.plot import draw_all

    out.mkdir(parents=True, exist_ok=True)
    written = [out / f"{name}.json"]
    written[0].write_text(json.dumps(result, separators=(",", ":")) + "\n")
    if result["offline"]:
        written += draw_all(result, out)
    say("wrote " + ", ".join(str(path) for path in written))
    if out == RESULTS:
        write_pages()
