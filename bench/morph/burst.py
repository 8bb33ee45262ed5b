"""A burst against a budget that full precision saturates: what do morphs save, and what do they cost?

    python -m bench.morph burst [--quick] [--rounds 3]        (make bench-morph)

One real service (gateway, Redis, monitor, controller, one worker) serves models/demo in float32 with little
more memory for its KV cache than a third of its weights. The script is calm, burst, calm again; requests come
when they are due, whatever became of those before. Every configuration gets the same arrivals; the order of
configurations turns with every round, and between runs all layers go back to full precision.

The burst asks for more than the service can do at full precision and for less than it can with half of its
layers in INT4; both are measured before each round, since they are the machine's. The policy is the default
one, its mode apart. TTFT counts from when a request was due. The perplexity of a configuration weights that
of every number of swapped layers, on text held out of the training, with the tokens decoded so.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from dataclasses import asdict
from typing import Any, Final

from bench.common.results import RESULTS
from bench.morph.load import MEAN_OUTPUT_TOKENS, Script, replay, saturate
from bench.morph.report import DEFAULT, FULL, INT4, TTFT_LIMIT_S, Run, bars, card, summary
from bench.morph.service import Configuration, MorphService, running

RESULT: Final = RESULTS / "morph.json"
PICTURE: Final = RESULT.with_suffix(".png")
PRECISION: Final = "int4"
SATURATING: Final = 32  # requests at once
CALM_SHARE: Final = 0.3  # of what full precision can do
BURST_SHARE: Final = 0.8  # of what the default mode's most swapped shape can do
LEAST_OVERLOAD: Final = 1.25  # of full precision by the burst; below that there is little to see


def configurations(num_layers: int) -> list[Configuration]:
    return [
        Configuration(FULL),
        Configuration(INT4, below=num_layers),
        Configuration("static 1/4", below=num_layers // 4),
        Configuration("static 1/2", below=num_layers // 2),
        Configuration("mode accuracy", mode="accuracy"),
        Configuration(DEFAULT, mode="default"),
        Configuration("mode performance", mode="performance"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one short round, nothing is written")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # not without ending what was started
    began = time.monotonic()
    num_rounds = 1 if args.quick else args.rounds
    with running() as service:
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
        write(result, runs)
    say(json.dumps(result))
    return 0 if all(bar["is_met"] for bar in judged.values()) else 1


def calibrate(service: MorphService, *, is_quick: bool) -> Script:
    """What the machine can do now, in two shapes, and a burst between the two."""
    shapes = {FULL: 0, "half int4": service.num_layers // 2}
    capacity = {}
    for name, below in shapes.items():
        service.use(Configuration(name, below=below), PRECISION)
        capacity[name] = saturate(service.port, 5.0 if is_quick else 8.0, SATURATING)
    full, half = capacity.values()
    burst = max(BURST_SHARE * half, LEAST_OVERLOAD * full)
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


def run_all(service: MorphService, num_rounds: int, *, is_quick: bool) -> tuple[list[Run], list[Script]]:
    """Round by round, each beginning with another configuration; and each round's script."""
    order = configurations(service.num_layers)
    runs: list[Run] = []
    scripts: list[Script] = []
    for number in range(num_rounds):
        scripts.append(calibrate(service, is_quick=is_quick))
        first = number * len(order) // num_rounds
        for configuration in order[first:] + order[:first]:
            runs.append(run_one(service, scripts[-1], configuration, number))
            say(f"{len(runs):>2} of {num_rounds * len(order)}  {in_a_line(runs[-1])}")
    names = [configuration.name for configuration in order]
    return sorted(runs, key=lambda run: (names.index(run.configuration), run.round)), scripts


def run_one(service: MorphService, script: Script, configuration: Configuration, number: int) -> Run:
    blocks_before = service.use(configuration, PRECISION)
    ordered_s, before = time.time(), service.cpu_seconds()
    began_s, streams = replay(service.port, script.arrivals(seed=number))
    after, took_s = service.cpu_seconds(), time.time() - ordered_s
    return Run(
        configuration=configuration.name,
        round=number,
        streams=streams,
        samples=service.samples(began_s),
        morphs=service.morphs(ordered_s),
        began_s=began_s,
        burst_s=script.calm_s,
        burst_ends_s=script.burst_ends_s,
        blocks_before=blocks_before,
        others_cores=(after.others - before.others) / took_s,
    )


def in_a_line(run: Run) -> str:
    one = run.as_json()
    morphs = [f"{morph['kind']} at {morph['at_s']:.1f} s {morph['state']}" for morph in one["morphs"]]
    return (
        f"{run.configuration:<17} P95 TTFT {one['ttft_p95_s']:6.2f} s, {run.violations:>2} of "
        f"{len(run.streams)} over {TTFT_LIMIT_S:g} s, TPOT {one['tpot_p50_ms']:.1f} ms, others "
        f"{run.others_cores:.1f} cores  {', '.join(morphs)}"
    )


def perplexities_of(order: list[int], *, is_quick: bool) -> list[float]:
    """Of 0, 1, ... all layers swapped."""
    from bench.morph.quality import perplexities  # brings torch, which the service need not wait for

    say("perplexity of every number of swapped layers")
    return perplexities(order, PRECISION, num_windows=8 if is_quick else 96)


def write(result: dict[str, Any], runs: list[Run]) -> None:
    from bench.morph.plot import draw

    whole = result | {"runs": [run.as_json() for run in runs]}
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(whole) + "\n")
    draw(runs, result["configurations"], PICTURE)
    say(f"wrote {RESULT} and {PICTURE}")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
