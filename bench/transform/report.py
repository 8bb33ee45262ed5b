"""The numbers, bars and card of `bench.transform costs`, from what the ranks measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bench.common.results import Bar, bar, say, say_bars
from bench.transform.group import Change, GroupStep
from bench.transform.ranks import Timed
from bench.transform.rows import PEERS, chosen
from bench.transform.weights import PADDED_DEGREES, Case, median_ratio
from bench.transform.weights import Took as Freed
from bench.transform.whole import OURS, THROUGH_HOST, WAITING

MEMORY_BAR, TIME_BAR, PADDING_BAR, WHOLE_BAR = 0.9, 2.5, 0.01, 30.0
MIB = 1 << 20


def kv_found(ranks: Sequence[dict[str, Any]], cache_bytes: int) -> dict[str, Any]:
    found: dict[str, Any] = {"cache_mib_per_layer": cache_bytes / MIB, "ways": {}}
    for way in ranks[0]["took"]:
        took = [rank["took"][way] for rank in ranks]
        found["ways"][way] = {
            "ms": _slowest(took, lambda one: one.time.seconds),
            "cpu_ms": _summed(took, lambda one: one.time.cpu_seconds),
            "extra_mib": round(max(one.extra_bytes for rank in took for one in rank) / MIB, 3),
            "sent_mib": round(max(one.bytes for rank in took for one in rank) / MIB, 2),
        }
    found["ms_by_stage_mib"] = {
        size / MIB: _slowest([rank["sweep"][size] for rank in ranks], lambda time: time.seconds)
        for size in ranks[0]["sweep"]
    }
    return found


def shards_found(took: Mapping[str, Sequence[Freed]]) -> dict[str, Any]:
    return {
        way: {
            "ms_per_layer": round(1e3 * statistics.median(one.seconds for one in each), 3),
            "pages_per_layer": round(statistics.fmean(one.pages for one in each), 1),
        }
        for way, each in took.items()
    }


def rows_found(ranks: Sequence[dict[str, list[Timed]]], missing: int, whole: int) -> dict[str, Any]:
    """Summarise the ways to get rows; `missing` and `whole` are bytes of a layer."""
    ms = {
        way: {
            "ms_per_layer": _slowest([rank[way] for rank in ranks], lambda time: time.seconds),
            "cpu_ms_per_layer": _summed([rank[way] for rank in ranks], lambda time: time.cpu_seconds),
        }
        for way in ranks[0]
    }
    seconds = {way: one["ms_per_layer"] / 1e3 for way, one in ms.items()}
    return {
        "missing_mib_per_layer": round(missing / MIB, 2),
        "ways": ms,
        "chosen": {
            f"{PEERS if choice.is_from_peers else way}, not {way if choice.is_from_peers else PEERS}": (
                choice.numbers()
            )
            for way, choice in chosen(missing, whole, 1, seconds).items()
        },
    }


def products_found(cases: Iterable[Case]) -> list[dict[str, Any]]:
    return [
        {
            "layer": case.name,
            "tokens": case.tokens,
            "padding": round(case.padding, 4),
            "ms": {way: round(1e3 * statistics.median(each), 3) for way, each in case.seconds.items()},
            "longer": {
                f"TP{tp}": round(median_ratio(case.seconds, f"TP{tp}", f"TP{tp}, no padding") - 1, 4)
                for tp in PADDED_DEGREES
            },
        }
        for case in cases
    ]


def whole_found(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    first = ranks[0][OURS][0]
    found: dict[str, Any] = {
        "weights_mib": round(first.weight_bytes / MIB, 1),
        "live_kv_mib": round(first.kv_bytes / MIB, 1),
        "ways": {},
    }
    for way in ranks[0]:
        took = [rank[way] for rank in ranks]
        found["ways"][way] = {
            "ms": _slowest(took, lambda one: one.time.seconds),
            "cpu_ms": _summed(took, lambda one: one.time.cpu_seconds),
            "of_this_weights_ms": _slowest(took, lambda one: one.weights_seconds),
            "most_to_one_step_ms": _slowest(took, lambda one: one.longest_layer),
        }
    return found


def steps_found(changes: Sequence[Change], calm: Sequence[GroupStep]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "calm_ms": {
            f"TP{tp}": round(1e3 * statistics.median(step.seconds for step in calm if step.tp == tp), 2)
            for tp in (1, 4)
        },
        "changes": [],
    }
    for layers, tp in sorted({(change.layers_per_step, change.tp) for change in changes}):
        alike = [change for change in changes if (change.layers_per_step, change.tp) == (layers, tp)]
        longest = [max(step.seconds for step in change.steps[1:]) for change in alike if change.steps[1:]]
        found["changes"].append(
            {
                "layers_per_step": layers,
                "to": f"TP{tp}",
                "steps": statistics.median(len(change.steps) for change in alike),
                "median_step_ms": round(
                    1e3 * statistics.median(step.seconds for change in alike for step in change.steps), 2
                ),
                "longest_step_ms": round(1e3 * statistics.median(longest), 2) if longest else None,
                "added_ms": round(1e3 * statistics.median(change.moving_seconds for change in alike), 2),
                "exchanged_mib": round(
                    statistics.median(change.bytes_exchanged for change in alike) / MIB, 2
                ),
            }
        )
    return found


def bars(found: dict[str, Any]) -> dict[str, Bar]:
    ours, theirs = found["kv"]["ways"]["in place"], found["kv"]["ways"]["migrate and trim"]
    whole = found["whole"]["ways"]
    longer = [[case["longer"][f"TP{tp}"] for case in found["padding"]] for tp in PADDED_DEGREES]
    padding = max(map(statistics.median, longer))
    one_step = whole[THROUGH_HOST]["most_to_one_step_ms"] / whole[OURS]["most_to_one_step_ms"]
    in_all = whole[THROUGH_HOST]["ms"] / whole[OURS]["ms"]
    saved = 1 - ours["extra_mib"] / theirs["extra_mib"]
    faster = theirs["ms"] / found["kv"]["ways"]["in place, through sockets"]["ms"]
    stage = found["stage_bytes"] / MIB
    return {
        "KV: less memory than migrate and trim": bar(MEMORY_BAR, saved, saved >= MEMORY_BAR),
        "KV: times less time than migrate and trim, both through sockets": bar(
            TIME_BAR, faster, faster >= TIME_BAR
        ),
        "KV: MiB besides the cache, within a stage": bar(
            stage, ours["extra_mib"], ours["extra_mib"] <= stage
        ),
        "padding: FFN longer, median, at the degree where it costs most": bar(
            PADDING_BAR, padding, padding < PADDING_BAR
        ),
        "whole: times cheaper for the step that pays most than through host memory": bar(
            WHOLE_BAR, one_step, one_step >= WHOLE_BAR
        ),
        "whole: times cheaper in all than through host memory": bar(WHOLE_BAR, in_all, in_all >= WHOLE_BAR),
    }


def say_card(found: dict[str, Any]) -> None:
    kv = found["kv"]
    say(f"KV of {kv['cache_mib_per_layer']:g} MiB a layer and rank, 90 % in use, 4 x TP1 to TP4:")
    for way, one in kv["ways"].items():
        say(
            f"  {way:<30} {one['ms']:8.1f} ms ({one['cpu_ms']:.0f} of CPU)   "
            f"{one['extra_mib']:7.2f} MiB besides the cache"
        )
    by_stage = ", ".join(f"{size:g} MiB {ms:.0f} ms" for size, ms in kv["ms_by_stage_mib"].items())
    say(f"  in place, by what a stage may take: {by_stage}")
    say("FFN of a layer, one rank, TP1 to TP4:")
    for way, one in found["weights"].items():
        say(f"  {way:<30} {one['ms_per_layer']:8.2f} ms   {one['pages_per_layer']:g} pages freed")
    rows = found["rows"]
    say(f"FFN rows of a layer, TP4 to TP1, {rows['missing_mib_per_layer']:g} MiB missing on each of 4 ranks:")
    for way, one in rows["ways"].items():
        say(f"  {way:<30} {one['ms_per_layer']:8.2f} ms ({one['cpu_ms_per_layer']:.0f} of CPU)")
    for choice in rows["chosen"]:
        say(f"  a group whose steps take no time takes them {choice}")
    say("FFN time that padding adds:")
    for case in found["padding"]:
        say(
            f"  {case['layer']:<36} {case['tokens']:3} tokens, padding {case['padding']:5.1%}: "
            + ", ".join(f"{tp} {longer:+.1%}" for tp, longer in case["longer"].items())
        )
    _say_whole(found["whole"])
    _say_steps(found["steps"])
    say_bars(found["bars"])


def _say_whole(whole: dict[str, Any]) -> None:
    ours = whole["ways"][OURS]
    say(f"all layers, {whole['weights_mib']:g} MiB of weights, {whole['live_kv_mib']:g} MiB of KV a rank:")
    for way in (OURS, THROUGH_HOST, WAITING):
        one = whole["ways"][way]
        say(
            f"  {way:<46} {one['ms']:8.1f} ms in all ({one['ms'] / ours['ms']:.1f} times ours, "
            f"{one['cpu_ms'] / ours['cpu_ms']:.1f} in CPU time), "
            f"{one['most_to_one_step_ms']:8.1f} ms for one step "
            f"({one['most_to_one_step_ms'] / ours['most_to_one_step_ms']:.1f} times)"
        )


def _say_steps(steps: dict[str, Any]) -> None:
    calm = ", ".join(f"{tp} {ms:.0f} ms" for tp, ms in steps["calm_ms"].items())
    say(f"steps of 4 engines that decode; without a change: {calm}")
    for one in steps["changes"]:
        say(
            f"  to {one['to']}, {one['layers_per_step']:2} layers a step: {one['steps']:3g} steps, median "
            f"{one['median_step_ms']:.0f} ms, longest {one['longest_step_ms'] or 0:.0f} ms, "
            f"added between steps {one['added_ms']:.0f} ms in all"
        )


def _slowest(ranks: Sequence[Sequence[Any]], seconds: Callable[[Any], float]) -> float:
    """Return the milliseconds of the slowest rank, in the median over the rounds."""
    return round(1e3 * statistics.median(max(map(seconds, each)) for each in zip(*ranks, strict=True)), 3)


def _summed(ranks: Sequence[Sequence[Any]], seconds: Callable[[Any], float]) -> float:
    """Return the milliseconds of all ranks together, in the median over the rounds."""
    return round(1e3 * statistics.median(sum(map(seconds, each)) for each in zip(*ranks, strict=True)), 3)
