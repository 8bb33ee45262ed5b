"""MorphServe's headline numbers (section 5.1) beside those of a result, and whether they were reached."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from bench.paper.ladder import middle
from bench.paper.service import ACCURACY, DEFAULT, FULL, INT4, PERFORMANCE, PLAN, PYRAMID
from bench.paper.tables import Result, by_load_and_way, judged, listed, names_of, table


def headline(result: Result) -> str:
    ways = result["headlines"]["ways"]
    rates = result["headlines"]["highest_rate_within_slo"]
    full, default = ways[FULL], ways[DEFAULT]
    by, (load_names, _) = by_load_and_way(result), names_of(result)

    def lower(way: str, other: str = FULL) -> list[float | None]:
        pairs = zip(ways[way]["times_lower_ttft_p95"], ways[other]["times_lower_ttft_p95"], strict=True)
        return [ours / theirs for ours, theirs in pairs]

    def lost(way: str, what: str = "against_full") -> list[float | None]:
        found = ways[way]["loss_percent"]
        return [*found[f"f1_{what}"], *found[f"rouge_l_{what}"]]

    def faster(way: str) -> list[float | None]:
        if "times_rate" in result["headlines"]:
            return [middle(result["headlines"]["times_rate"].get(way, []))]
        return [rates[way] / rates[FULL] if rates[way] and rates[FULL] else None]

    fewer = default["fewer_violations"]
    kv = [100 * (value - 1) for value in default["times_kv_peak"]]
    used = [
        100 * (by[load, DEFAULT]["kv_usage_mean"] / by[load, INT4]["kv_usage_mean"] - 1)
        for load in load_names
    ]
    saved = [
        100 * (1 - ours / theirs) if theirs > 0 else None
        for ours, theirs in zip(
            ways[ACCURACY]["loss_percent"]["f1_against_full"],
            ways[PLAN]["loss_percent"]["f1_against_full"],
            strict=True,
        )
    ]
    rows = [
        [
            "requests over 2 s TTFT, default mode",
            "-92.45 %",
            f"{'-' if fewer is None else f'{-100 * fewer:+.1f} %'} ({full['violations']:g} to "
            f"{default['violations']:g} of {full['requests']})",
            judged([fewer], lambda x: x >= 0.9245),
        ],
        *(
            [
                f"P95 TTFT, {way}, times lower",
                f"{low} to {high}",
                listed(lower(way)),
                judged(lower(way), lambda x, low=low: x >= low),  # type: ignore[misc]
            ]
            for way, low, high in ((ACCURACY, 2.2, 3.9), (DEFAULT, 2.9, 15.7), (PERFORMANCE, 3.4, 19.5))
        ),
        *(
            [
                f"rate within 2 s, {way}, times higher",
                paper,
                listed(faster(way)),
                judged(faster(way), lambda x: x >= 1.6),
            ]
            for way, paper in ((DEFAULT, "1.6 to 1.83"), (PERFORMANCE, "(not reported separately)"))
        ),
        *(
            [
                f"F1, ROUGE-L lost against full precision, {way}",
                f"{low} to {high} %",
                listed(lost(way), " %"),
                judged(lost(way), lambda x, high=high: x <= high) if way != INT4 else "",  # type: ignore[misc]
            ]
            for way, low, high in ((ACCURACY, 0.11, 2.18), (DEFAULT, 0.51, 3.82), (INT4, 2.34, 9.47))
        ),
        *(
            [
                f"F1, ROUGE-L lost against the following text, {way}",
                "as above",
                listed(lost(way, "against_text"), " %"),
                judged(lost(way, "against_text"), lambda x, high=high: x <= high) if way != INT4 else "",  # type: ignore[misc]
            ]
            for way, high in ((ACCURACY, 2.18), (DEFAULT, 3.82), (INT4, 9.47))
        ),
        [
            f"share of the {PLAN}'s loss of F1 that accuracy mode avoids",
            "41.3 %, up to 82.3 %",
            listed(saved, " %"),
            judged(saved, lambda x: x >= 41.3),
        ],
        [
            "KV blocks more than full precision, default mode",
            "up to +32.97 %",
            listed(kv, " %"),
            judged([max(kv)], lambda x: x >= 32.97),
        ],
        [
            "KV use higher than static INT4, default mode",
            "+29.29 %",
            listed(used, " %"),
            judged(used, lambda x: x >= 29.29),
        ],
        [
            "time in the queue, default mode, times shorter",
            "up to 3.8",
            listed(default["times_lower_queue"]),
            judged([max(default["times_lower_queue"])], lambda x: x >= 3.8),
        ],
        [
            "P95 TTFT against PyramidKV, accuracy mode, times lower",
            "1.73, up to 2.4",
            listed(lower(ACCURACY, PYRAMID)),
            judged([fmean(lower(ACCURACY, PYRAMID))], lambda x: x >= 1.73),  # type: ignore[arg-type]
        ],
        [
            "P95 TTFT against PyramidKV, performance mode, times lower",
            "4.25, up to 8.68",
            listed(lower(PERFORMANCE, PYRAMID)),
            judged([fmean(lower(PERFORMANCE, PYRAMID))], lambda x: x >= 4.25),  # type: ignore[arg-type]
        ],
    ]
    return table(["", "the paper", f"here: {', '.join(load_names)}", "result"], rows)


def summary(result: Result) -> str:
    """Return what came in a sentence or two."""
    ways, names = result["headlines"]["ways"], result["headlines"]["loads"]
    failed = sum(not one["holds"] for one in result["premises"])
    how = (
        ""
        if "size" in result["settings"]
        else " These runs are older than the rules above: one of each, right after an order by hand."
    )
    return (
        f"In short: in default mode {_fewer(result)}, and P95 TTFT was "
        f"{_listed(ways[DEFAULT]['times_lower_ttft_p95'])} times lower ({', '.join(names)}); the paper has "
        f"2.9 to 15.7. {failed} of {len(result['premises'])} premises did not hold (see below).{how}"
    )


def replayed(result: Result) -> str:
    """Return the same for README.md."""
    ways, names = result["headlines"]["ways"], result["headlines"]["loads"]
    fewer = ways[DEFAULT]["fewer_violations"]
    share = "" if fewer is None else f". MorphServe's paper has -92 % where this is {-100 * fewer:.0f} %"
    return (
        f"{_fewer(result)}; P95 TTFT {_listed(ways[DEFAULT]['times_lower_ttft_p95'])} times lower on "
        f"{len(names)} loads{share}"
    )


def static_weights(result: Result) -> str:
    """Return what all layers in INT4 give and cost, for README.md."""
    over = result["headlines"]["ways"][INT4]["violations"]
    by, (names, _) = by_load_and_way(result), names_of(result)
    f1 = {way: [by[name, way]["quality"]["against_full"]["f1"] for name in names] for way in (INT4, DEFAULT)}
    ranges = {way: f"{min(of):.0f} to {max(of):.0f} %" for way, of in f1.items()}
    return (
        f"with all layers in int4 {over or 'no'} request{'s were' if over > 1 else ' was'} over 2 s, with F1 "
        f"against full precision at {ranges[INT4]}; in default mode F1 was {ranges[DEFAULT]}"
    )


def _fewer(result: Result) -> str:
    full, default = (result["headlines"]["ways"][way] for way in (FULL, DEFAULT))
    return (
        f"{default['violations']:g} of {full['requests']} requests over 2 s TTFT instead of "
        f"{full['violations']:g}"
    )


def _listed(values: Sequence[float]) -> str:
    *first, last = (f"{value:.1f}" for value in values)
    return f"{', '.join(first)} and {last}" if first else last
