"""MorphServe's evaluation (its section 5) at this size, on one engine; docs/evaluation.md describes it.

    python -m bench.paper [--traces DIR] [--quick] [--out DIR]        (make bench-paper TRACES=DIR)

models/demo in float32, by one real service, with little more memory for its KV cache than a third of its
weights. First, offline, what each way of serving costs in quality. Then the loads: two windows of the Azure
traces and a synthetic burst, thinned to what this machine can do now, each sent to every way in turn; then a
ladder of steady rates. Between runs all layers go back to full precision.

Writes bench/results/paper.json, which has every number, the figures beside it, and docs/evaluation.md. With
--quick writes only what --out names. Every run is kept in --runs too, for `instar bench plot`.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from bench.common.results import DEMO, RESULTS, digits, parser, say
from bench.morph.service import MorphService
from bench.paper.evaluation import BETWEEN_S, LADDER_WAYS, QUICK, Clock, Evaluation, Size
from bench.paper.loads import (
    BUSIEST_S,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    WINDOWS,
    all_loads,
    find_trace,
)
from bench.paper.pyramid import memory_share
from bench.paper.quality import measure
from bench.paper.report import headlines, load_numbers, offline_numbers, premises
from bench.paper.run import SLO
from bench.paper.service import FULL, INT4, PLAN, PLAN_ANY, roomy, ways
from instar.errors import CommandError
from worker.shape.layer_order import load_order

RUNS: Final = Path("build/paper")
PLANS: Final = {PLAN: ("full", "int4"), PLAN_ANY: ("full", "int8", "int4", "int3")}
BURST_SHARE: Final = 0.85  # of what all layers in INT4 can do
LEAST_OVERLOAD: Final = 1.25  # of full precision, by the burst
LADDER_FROM, LADDER_TO = 0.7, 1.15  # of what full precision can do, and of what all layers in INT4 can


def ladder_rates(full: float, int4: float, steps: int) -> list[float]:
    """Return requests per second, each the same factor above the one before."""
    low, high = LADDER_FROM * full, LADDER_TO * max(full, int4)
    return [low * (high / low) ** (i / max(1, steps - 1)) for i in range(steps)]


def expected_s(size: Size, num_loads: int) -> float:
    num_ways = len(ways(8, dict.fromkeys(PLANS, ())))
    loads_s = num_loads * num_ways * (72.0 / size.speed + BETWEEN_S)
    return (
        size.offline_s + 40.0 + loads_s + size.ladder_steps * len(LADDER_WAYS) * (size.ladder_s + BETWEEN_S)
    )


def evaluate(traces: Path | None, runs_folder: Path, size: Size) -> dict[str, Any]:
    """Run the whole evaluation and return its result. Raises CommandError if it cannot run."""
    for window in WINDOWS if traces else ():
        find_trace(traces or Path(), window)  # said now rather than after minutes
    clock = Clock(expected_s(size, 1 + (len(WINDOWS) if traces else 0)))
    clock.say("quality, offline: sensitivity of layers, perplexity, continuations")
    order = load_order(DEMO, "profile")[0]
    offline = measure(order, PLANS, is_quick=size.is_quick)
    share = memory_share(offline.kept, PROMPT_TOKENS, OUTPUT_TOKENS)
    clock.say("starting two services, the second with PyramidKV's memory", size.offline_s)
    with ExitStack() as stack:
        service = stack.enter_context(MorphService())
        wide = stack.enter_context(roomy(service, share))
        if service.order != order:
            raise AssertionError(f"the service swaps in the order {service.order}, measured is {order}")
        clock.say(
            f"{service.blocks_at_full} KV blocks at full precision, {wide.blocks_at_full} for PyramidKV; "
            f"layers go {order}"
        )
        found = Evaluation(service, wide, offline, size, clock, runs_folder)
        capacity = found.calibrate()
        full, int4 = capacity[FULL], capacity[INT4]
        burst = max(BURST_SHARE * int4, LEAST_OVERLOAD * full) * size.burst
        loads = all_loads(traces, size.speed, burst, clock.say)
        for load in loads:
            clock.say(
                f"{load.name}: {len(load.times)} of {load.of} requests in {load.seconds:.0f} s; its busiest "
                f"{BUSIEST_S:g} s ask for {load.burst_rate / full:.2f} of full precision, the mean for "
                f"{load.mean_rate / full:.2f}",
                20.0 / len(loads),
            )
        found.replay(loads)
        found.climb(ladder_rates(full, int4, size.ladder_steps))
        blocks = {"full": service.blocks_at_full, "pyramid": wide.blocks_at_full}
    return {
        "bench": "paper",
        "quick": size.is_quick,
        "seconds": round(clock.seconds),
        "settings": {
            "speed": size.speed,
            "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": OUTPUT_TOKENS,
            "busiest_s": BUSIEST_S,
            "ttft_limit_s": SLO.ttft_s,
            "order": order,
            "num_layers": len(order),
            "kv_blocks": blocks,
            "capacity_requests_per_s": {name: digits(rate) for name, rate in capacity.items()},
            "ladder_s": size.ladder_s,
            "burst_share_of_int4": BURST_SHARE,
            "least_overload_of_full": LEAST_OVERLOAD,
        },
        "loads": [load_numbers(load, full) for load in loads],
        "offline": offline_numbers(offline, order),
        "runs": found.rows,
        "ladder": found.ladder,
        "headlines": headlines(found.rows, found.ladder),
        "premises": premises(found.rows),
    }


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--traces", type=Path, help="folder with the two Azure traces of 2023")
    options.add_argument(
        "--quick", action="store_true", help="a pilot of some minutes; its numbers say nothing"
    )
    options.add_argument("--out", type=Path, help="folder for paper.json and the figures [bench/results]")
    options.add_argument("--runs", type=Path, default=RUNS, help=f"folder for every run [{RUNS}]")
    args = options.parse_args()
    try:
        result = evaluate(args.traces, args.runs, QUICK if args.quick else Size())
    except CommandError as problem:
        sys.stderr.write(f"bench.paper: {problem}\n")
        return 2
    from bench.paper.page import card

    say(card(result))
    out = args.out or (None if args.quick else RESULTS)
    if out is not None:
        keep(result, out, is_page_due=out == RESULTS)
    failed = [one for one in result["premises"] if not one["holds"]]
    say(json.dumps({"bench": "paper", "seconds": result["seconds"], "failed": failed}))
    return 1 if failed else 0


def keep(result: dict[str, Any], out: Path, *, is_page_due: bool) -> None:
    from bench.paper.page import PAGE, regenerated
    from bench.paper.plot import draw_all

    out.mkdir(parents=True, exist_ok=True)
    (out / "paper.json").write_text(json.dumps(result, separators=(",", ":")) + "\n")
    written = [out / "paper.json", *draw_all(result, out)]
    if is_page_due:
        PAGE.write_text(regenerated(PAGE.read_text(), result))
        written.append(PAGE)
    say("wrote " + ", ".join(str(path) for path in written))
