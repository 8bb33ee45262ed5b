"""The numbers of bench/results/paper.json, from runs and offline quality."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any, Final

from bench.common.results import digits
from bench.morph.report import mixed_perplexity
from bench.morph.service import Way
from bench.paper.ladder import highest_rates, middle, times_full
from bench.paper.loads import OUTPUT_TOKENS, PROMPT_TOKENS, Load
from bench.paper.plan import BITS, Plan, bits_of, in_words
from bench.paper.pyramid import memory_share
from bench.paper.quality import LOW, Offline, likeness
from bench.paper.run import SLO, PaperRun
from bench.paper.service import FULL, PERFORMANCE, PYRAMID
from bench.paper.tables import merged
from bench.quality.perplexity import difference, perplexity, swapped

SESSIONS_DIFFER: Final = 0.15  # of the rate of full precision
SATURATED: Final = 0.9  # of the KV blocks in use: what is left is less than a request needs


# --------------------------------------------------------------------------- one run


def row(run: PaperRun) -> dict[str, Any]:
    """Return the numbers of a run, and the series that the figures draw."""
    found = run.file.summary
    return {
        "load": run.load,
        "way": run.way,
        "requests": found["requests"],
        "served": found["served"],
        "seconds": found["seconds"],
        "ttft_s": found["ttft_s"],
        "tpot_s": found["tpot_s"],
        "queue_s": found["queue_s"],
        "violations": found["violations"]["ttft"]["count"],
        "output_tokens_per_s": found["throughput"]["output_tokens_per_s"],
        "errors": found["errors"],
        "lateness_p99_s": found["lateness_s"]["p99"],
        "tokens_by_layers_below_full": found["tokens_by_layers_below_full"],
        "others_cores": round(run.others_cores, 2),
        "arrivals_sha256": run.file.about["arrivals_sha256"],
        "series": series(run),
        "morphs": [
            {
                "kind": one["kind"],
                "state": one["state"],
                "at_s": round(one["started"] - run.file.about["began_at"], 2),
            }
            for one in run.file.observed["morphs"]
        ],
    } | kv_numbers(run)


def series(run: PaperRun) -> dict[str, Any]:
    samples = [one for one in run.samples if one["at_s"] >= 0]
    served = [one for one in run.file.outcomes if one.is_served]
    return {
        "due_s": [round(one.due_s, 3) for one in served],
        "ttft_s": [digits(one.ttft_s) for one in served],
        "tpot_s": [digits(one.tpot_s) for one in served],
        "at_s": [round(one["at_s"], 2) for one in samples],
        **{
            name: [one[name] for one in samples]
            for name in ("kv_blocks", "kv_used", "waiting", "layers_below_full")
        },
    }


def kv_numbers(run: PaperRun) -> dict[str, Any]:
    """Return numbers of the KV cache while requests were due.

    Use is relative to the blocks at that moment.
    """
    ends_s = max(one.due_s for one in run.file.outcomes)
    samples = [one for one in run.samples if 0 <= one["at_s"] <= ends_s] or run.samples
    usage = [one["kv_used"] / one["kv_blocks"] for one in samples]
    waiting = [one for one in samples if one["waiting"]]
    return {
        "kv_blocks_before": run.blocks_before,
        "kv_blocks_peak": max(one["kv_blocks"] for one in samples),
        "kv_blocks_mean": digits(fmean(one["kv_blocks"] for one in samples)),
        "kv_used_peak": max(one["kv_used"] for one in samples),
        "kv_usage_mean": digits(fmean(usage)),
        "share_of_time_waiting": digits(len(waiting) / len(samples)),
        "preemptions": run.samples[-1]["preemptions"] - run.samples[0]["preemptions"],
    }


# --------------------------------------------------------------------------- quality


def quality(
    run: PaperRun, way: Way, offline: Offline, order: Sequence[int], predicted_loss: float
) -> dict[str, Any]:
    """Return the quality of what a run served.

    For PyramidKV, which the engine does not run, the offline one. The perplexity of a mode, which swaps
    halves to several precisions, is that of full precision with the loss that the profile predicts.
    """
    error: float | None
    texts = run.texts
    if way.name == PYRAMID:
        texts = {number: offline.pyramid_texts[number % len(offline.pyramid_texts)] for number in run.texts}
        above, error = difference(offline.pyramid_losses, offline.losses[swapped(order, 0, LOW)])
        found = perplexity(offline.pyramid_losses)
    elif way.mode != "manual":
        above, error = math.log1p(predicted_loss), None
        found = offline.perplexity_of(swapped(order, 0, LOW)) * (1 + predicted_loss)
    else:
        found, above, error = _of_mix(run, way, offline, order)
    return {
        "perplexity": round(found, 5),
        "nats_above_full": round(above, 6),
        "nats_error": None if error is None else round(error, 6),
        "against_full": likeness(texts, offline.references),
        "against_text": likeness(texts, offline.truths),
    }


def _of_mix(run: PaperRun, way: Way, offline: Offline, order: Sequence[int]) -> tuple[float, float, float]:
    """Return perplexity, and nats above full with their error; every shape is weighted with its tokens."""
    full: Plan = ("full",) * len(order)
    if way.plan:
        return (offline.perplexity_of(way.plan), *difference(offline.losses[way.plan], offline.losses[full]))
    tokens = Counter({int(k): count for k, count in run.file.summary["tokens_by_layers_below_full"].items()})
    shapes = [swapped(order, k, LOW) for k in range(len(order) + 1)]
    mixed = [
        sum(tokens[k] * offline.losses[shape][i] for k, shape in enumerate(shapes)) / tokens.total()
        for i in range(len(offline.windows))
    ]
    found = mixed_perplexity(tokens, [offline.perplexity_of(shape) for shape in shapes])
    return (found, *difference(mixed, offline.losses[full]))


def offline_numbers(offline: Offline, order: Sequence[int]) -> dict[str, Any]:
    shapes = [swapped(order, k, LOW) for k in range(len(order) + 1)]
    return {
        "windows": list(offline.windows.shape),
        "scored_tokens": len(offline.windows) * OUTPUT_TOKENS,
        "perplexity_by_layers": [round(offline.perplexity_of(shape), 5) for shape in shapes],
        "sensitivities": [{name: round(v, 6) for name, v in of.items()} for of in offline.sensitivities],
        "bits": BITS,
        "plans": {
            name: {
                "layers": list(chosen),
                "in_words": in_words(chosen),
                "mean_bits": round(bits_of(chosen), 3),
            }
            for name, chosen in offline.plans.items()
        },
        "pyramid": {
            "kept_of_prompt": offline.kept,
            "memory_share": round(memory_share(offline.kept, PROMPT_TOKENS, OUTPUT_TOKENS), 4),
            "perplexity": round(perplexity(offline.pyramid_losses), 5),
        },
    }


def load_numbers(load: Load, full_rate: float) -> dict[str, Any]:
    return {
        "name": load.name,
        "source": load.source,
        "seconds": load.seconds,
        "requests": len(load.times),
        "thinned_from": load.of,
        "mean_rate": digits(load.mean_rate),
        "burst_rate": digits(load.burst_rate),
        "burst_of_full": digits(load.burst_rate / full_rate),
        "mean_of_full": digits(load.mean_rate / full_rate),
    }


# --------------------------------------------------------------------------- what it comes to


def headlines(rows: Sequence[dict[str, Any]], ladder: Sequence[dict[str, Any]], top: float) -> dict[str, Any]:
    """Return the paper's headline numbers of our runs, of the medians of repeats.

    Ratios are to full precision on the same load. top: the highest rate of the ladder.
    """
    by = {(one["load"], one["way"]): one for one in merged(rows, "load", "way")}
    climbs = highest_rates(ladder, top)
    loads = list(dict.fromkeys(one["load"] for one in rows))
    found = {}
    for way in dict.fromkeys(one["way"] for one in rows):
        pairs = [(by[load, FULL], by[load, way]) for load in loads if (load, way) in by]
        found[way] = {
            "violations": sum(ours["violations"] for _, ours in pairs),
            "requests": sum(ours["requests"] for _, ours in pairs),
            "fewer_violations": _fewer(pairs),
            "times_lower_ttft_p95": _ratios(pairs, "ttft_s", "p95"),
            "times_lower_queue": _ratios(pairs, "queue_s", "mean"),
            "times_lower_tpot_mean": _ratios(pairs, "tpot_s", "mean"),
            "times_lower_tpot_p95": _ratios(pairs, "tpot_s", "p95"),
            "times_lower_tpot_p99": _ratios(pairs, "tpot_s", "p99"),
            "times_kv_peak": [
                digits(ours["kv_blocks_peak"] / full["kv_blocks_before"]) for full, ours in pairs
            ],
            "loss_percent": _losses(pairs),
        }
    return {
        "loads": loads,
        "ways": found,
        "highest_rate_within_slo": {way: digits(middle(list(of.values()))) for way, of in climbs.items()},
        "times_rate": {way: list(map(digits, times_full(climbs, way, FULL))) for way in climbs},
    }


def _ratios(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]], what: str, column: str) -> list[Any]:
    return [digits(full[what][column] / ours[what][column]) for full, ours in pairs]


def _fewer(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> float | None:
    full = sum(one["violations"] for one, _ in pairs)
    return digits(1 - sum(ours["violations"] for _, ours in pairs) / full) if full else None


def _losses(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, list[Any]]:
    """Return per cent lost of what full precision has in the same load; nothing if quality is unknown."""
    if "quality" not in pairs[0][0]:
        return {}

    def lost(full: float, ours: float) -> float | None:
        return digits(100 * (1 - ours / full)) if full else None

    found: dict[str, list[Any]] = {}
    for against in ("against_full", "against_text"):
        for what in ("f1", "rouge_l"):
            found[f"{what}_{against}"] = [
                lost(full["quality"][against][what], ours["quality"][against][what]) for full, ours in pairs
            ]
    found["perplexity"] = [
        digits(100 * (ours["quality"]["perplexity"] / full["quality"]["perplexity"] - 1))
        for full, ours in pairs
    ]
    return found


def premises(rows: Sequence[dict[str, Any]], sessions: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """Return what must be true for the runs to mean anything, and whether it was.

    sessions: with the "full_requests_per_s" that full precision served at the beginning of each.
    """
    found = []
    for one in merged(rows, "load", "way"):
        if one["way"] == FULL:
            share = one["kv_used_peak"] / one["kv_blocks_before"]
            holds = share >= SATURATED and one["share_of_time_waiting"] > 0
            was = f"KV use up to {share:.0%}, requests wait {one['share_of_time_waiting']:.0%} of the time"
            found.append(_premise(f"full precision saturates: {one['load']}", was, holds))
        if one["way"] == PERFORMANCE:
            p95 = one["ttft_s"]["p95"]
            was = f"P95 TTFT {p95:.2f} s"
            found.append(_premise(f"performance mode holds the load: {one['load']}", was, p95 <= SLO.ttft_s))
    late = max(one["lateness_p99_s"] for one in rows)
    others = max(one["others_cores"] for one in rows)
    busy = sum(one["others_cores"] > 0.3 for one in rows)
    unserved = sum(one["requests"] - one["served"] for one in rows)
    rates = [one["full_requests_per_s"] for one in sessions]
    if len(rates) > 1:
        was = f"full precision served {min(rates):.3g} to {max(rates):.3g} requests/s at first"
        same = max(rates) <= (1 + SESSIONS_DIFFER) * min(rates)
        found.append(_premise(f"the machine was as fast in all {len(rates)} sessions", was, same))
    return [
        *found,
        _premise("requests were sent when due", f"P99 lateness at most {1e3 * late:.1f} ms", late <= 0.005),
        _premise(
            "the machine was quiet", f"others took at most {others:.2f} cores{_in(busy, rows)}", not busy
        ),
        _premise("every request was served", f"{unserved} were not", unserved == 0),
    ]


def _in(num: int, rows: Sequence[dict[str, Any]]) -> str:
    return f", more than 0.3 in {num} of {len(rows)} runs" if num and "repeat" in rows[0] else ""


def _premise(what: str, was: str, holds: bool) -> dict[str, Any]:
    return {"what": what, "told": was, "holds": holds}
