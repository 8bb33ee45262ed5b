"""Gain and cost of morphs, in a burst against a budget that full precision saturates.

    python -m bench.morph burst [--quick] [--rounds 3]        (make bench-morph)

One real service (gateway, Redis, monitor, controller, one worker) serves models/demo in float32 with little
more memory for its KV cache than a third of its weights. The script is calm, burst, calm again; requests are
sent when they are due, whatever became of those before. Every way of serving gets the same arrivals; the
order of the ways turns with every round, and between runs all layers go back to full precision.

The burst asks for more than the service can do at full precision and for less than it can with half of its
layers in INT4. Both are measured before each round, since they depend on the machine. The policy is the
default one except for its mode. TTFT counts from when a request was due. The perplexity of a way weights that
of every number of swapped layers, on text held out of the training, with the tokens that were decoded so.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Final

from bench.common.load import play_to_end, saturate
from bench.common.results import RESULTS, conclude, parser, say
from bench.common.service import OtherPrograms
from bench.morph.load import MEAN_OUTPUT_TOKENS, Script, saturating
from bench.morph.report import DEFAULT, FULL, INT4, TTFT_LIMIT_S, MorphRun, bars, card, summary
from bench.morph.service import PRECISION, MorphService, Way

NUM_SATURATING: Final = 192  # requests at once, more than end while the service is saturated
CALM_SHARE: Final = 0.3  # share of what full precision can do
BURST_SHARE: Final = 0.8  # share of what the default mode's most swapped shape can do
MIN_OVERLOAD: Final = 1.25  # overload of full precision by the burst; below it little is to be seen


def ways(num_layers: int) -> list[Way]:
    return [
        Way(FULL),
        Way(INT4, below=num_layers),
        Way("static 1/4", below=num_layers // 4),
        Way("static 1/2", below=num_layers // 2),
        Way("mode accuracy", mode="accuracy"),
        Way(DEFAULT, mode="default"),
        Way("mode performance", mode="performance"),
    ]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="one short round; nothing is written")
    options.add_argument("--rounds", type=int, default=3)
    args = options.parse_args()
    began = time.monotonic()
    num_rounds = 1 if args.quick else args.rounds
    with MorphService() as service:
        say(
            f"{service.id}: {service.blocks_at_full} KV blocks at full precision, "
            f"layers go {service.order_name}: {service.order}"
        )
        runs, scripts = run_all(service, num_rounds, is_quick=args.quick)
    perplexities = perplexities_of(service.order, is_quick=args.quick)
    found = summary(runs, perplexities)
    judged = bars(found)
    result = {
        "bench": "morph",
        "quick": args.quick,
        "seconds": round(time.monotonic() - began),
        "ttft_limit_s": TTFT_LIMIT_S,
        "scripts": [asdict(script) for script in scripts],
        "kv_blocks_at_full": service.blocks_at_full,
        "order": service.order,
        "order_name": service.order_name,
        "perplexity_by_layers": [round(value, 5) for value in perplexities],
        "bars": judged,
        "configurations": found,
    }
    say(card(found, judged))
    if not args.quick:
        from bench.morph.plot import draw

        draw(runs, found, RESULTS / "morph.png")
    return conclude(result, is_kept=not args.quick, bars=judged, runs=[run.as_json() for run in runs])


def calibrate(service: MorphService, *, is_quick: bool) -> Script:
    """Measure what the machine can do now in two shapes; return a script whose burst lies between them."""
    capacity = []
    for name, below in ((FULL, 0), ("half int4", service.num_layers // 2)):
        service.use(Way(name, below=below))
        capacity.append(saturate(service.url(), saturating(NUM_SATURATING), 5.0 if is_quick else 8.0))
    full, half = capacity
    burst = max(BURST_SHARE * half, MIN_OVERLOAD * full)
    calm_s, burst_s, calm_again_s = (2.0, 10.0, 2.0) if is_quick else (3.0, 18.0, 4.0)
    say(
        f"tokens/s: full precision can do {full:.0f}, half int4 {half:.0f}; the burst asks for {burst:.0f}: "
        f"{burst / full:.2f} and {burst / half:.2f} of them"
    )
    return Script(
        calm_s=calm_s,
        burst_s=burst_s,
        calm_again_s=calm_again_s,
        calm_rate=round(CALM_SHARE * full / MEAN_OUTPUT_TOKENS, 3),
        burst_rate=round(burst / MEAN_OUTPUT_TOKENS, 3),
    )


def run_all(service: MorphService, num_rounds: int, *, is_quick: bool) -> tuple[list[MorphRun], list[Script]]:
    """Run all rounds, each beginning with another way, and return the runs and each round's script."""
    order = ways(service.num_layers)
    runs: list[MorphRun] = []
    scripts: list[Script] = []
    for number in range(num_rounds):
        scripts.append(calibrate(service, is_quick=is_quick))
        first = number * len(order) // num_rounds
        for way in order[first:] + order[:first]:
            runs.append(run_one(service, scripts[-1], way, number))
            say(f"{len(runs):>2} of {num_rounds * len(order)}  {in_a_line(runs[-1])}")
    names = [way.name for way in order]
    return sorted(runs, key=lambda run: (names.index(run.configuration), run.round)), scripts


def run_one(service: MorphService, script: Script, way: Way, number: int) -> MorphRun:
    blocks_before = service.use(way)
    ordered_s, others = time.time(), OtherPrograms(service)
    run = play_to_end(service.url(), script.arrivals(seed=number)).run
    return MorphRun(
        configuration=way.name,
        round=number,
        outcomes=run.outcomes,
        samples=service.samples(run.began_at),
        morphs=service.morphs(ordered_s),
        began_s=run.began_at,
        burst_s=script.calm_s,
        burst_ends_s=script.burst_ends_s,
        blocks_before=blocks_before,
        others_cores=others.cores(),
    )


def in_a_line(run: MorphRun) -> str:
    one = run.as_json()
    morphs = [f"{morph['kind']} at {morph['at_s']:.1f} s {morph['state']}" for morph in one["morphs"]]
    return (
        f"{run.configuration:<17} P95 TTFT {one['ttft_p95_s']:6.2f} s, {run.violations:>2} of "
        f"{len(run.outcomes)} over {TTFT_LIMIT_S:g} s, TPOT {one['tpot_p50_ms']:.1f} ms, others "
        f"{run.others_cores:.1f} cores  {', '.join(morphs)}"
    )


def perplexities_of(order: list[int], *, is_quick: bool) -> list[float]:
    """Return the perplexity with 0, 1, ... all layers swapped."""
    from bench.quality.measure import perplexities  # imports torch, which the service need not wait for

    say("perplexity of every number of swapped layers")
    return perplexities(order, PRECISION, num_windows=8 if is_quick else 96)
