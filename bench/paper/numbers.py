"""The tables of docs/evaluation.md, as Markdown: the paper's numbers beside those of a result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.paper.service import (
    DEFAULT,
    FULL,
    INT4,
    MODES,
    PLAN,
    PLAN_ANY,
    PYRAMID,
    STATIC_2,
    STATIC_4,
)
from bench.paper.tables import Result, by_load_and_way, listed, merged, names_of, number, spread, table

# --------------------------------------------------------------------------- premises


def premises(result: Result) -> str:
    rows = [[one["what"], one["told"], "yes" if one["holds"] else "**no**"] for one in result["premises"]]
    pilot = "**A pilot of some minutes: these numbers mean nothing.**\n\n" if result["quick"] else ""
    return pilot + table(["premise", "measured", "holds"], rows)


def setup(result: Result) -> str:
    of, plan = result["settings"], result["offline"]
    rows = [
        [
            "model",
            "Vicuna 7B, Llama 2 7B, Llama 3 8B (32 layers), CodeLlama 34B (48), FP16",
            f"{_model(of)}, {of['num_layers']} layers, float32",
        ],
        [
            "device",
            "L4, 24 GB; A100, 80 GB for 34B",
            f"two CPU cores; memory for {of['kv_blocks']['full']} KV blocks beside full weights",
        ],
        [
            "loads",
            "72 s of the Azure and BurstGPT traces, rates 1.75 and 4.75 times lower",
            f"72 s of two Azure traces and a Gamma burst, {_speed(of['speed'])}, thinned (below)",
        ],
        [
            "prompt, output",
            "512 and 256, or 1,024 and 512 tokens",
            f"{of['prompt_tokens']} and {of['output_tokens']} tokens",
        ],
        [
            "text",
            "GovReport, Multi-News, QMSum, DuReader",
            "Python sources held out of the training",
        ],
        [
            "quality",
            "F1 and ROUGE-L against human references",
            "F1 and ROUGE-L against full precision's continuations, and against the text that follows; "
            f"perplexity of {plan['scored_tokens']:,} tokens",
        ],
        ["quantisation", "INT4 by AWQ", "the same; INT8 by rounding and INT3 by AWQ in one plan"],
        ["limit of TTFT", "2 s", f"{of['ttft_limit_s']:g} s"],
    ]
    return table(["", "the paper", "here"], rows)


def _model(of: Result) -> str:
    size = of.get("size", "demo")
    return "models/demo" if size == "demo" else f"random weights, {size} parameters"


def _speed(speed: float) -> str:
    return "at their own speed" if speed == 1 else f"sent {speed:g} times faster than recorded"


def loads(result: Result) -> str:
    rows = [
        [
            one["name"],
            one["source"],
            f"{one['requests']} of {one['thinned_from']} in {one['seconds']:.0f} s",
            f"{number(one['mean_of_full'])}, {number(one['burst_of_full'])}",
        ]
        for one in result["loads"]
    ]
    rates = result["settings"]["capacity_requests_per_s"]
    of = result["settings"]
    text = (
        f"Before the runs, full precision served {number(rates[FULL])} requests per second, and all layers "
        f"in INT4 {number(rates[INT4])}. Each window is thinned until its busiest {of['busiest_s']:g} s "
        f"have at most {of['burst_share_of_int4']:g} times the INT4 rate, or "
        f"{of['least_overload_of_full']:g} times the rate of full precision where that is more.\n\n"
    )
    head = [
        "load",
        "source",
        "requests",
        f"times full precision's rate: mean, busiest {result['settings']['busiest_s']:g} s",
    ]
    return text + table(head, rows)


# --------------------------------------------------------------------------- the figures


def figure4(result: Result) -> str:
    by, (load_names, ways) = by_load_and_way(result), names_of(result)
    parts = []
    for load in load_names:
        full = by[load, FULL]["quality"]["perplexity"]
        rows = []
        for way in ways:
            one = by[load, way]
            quality = one["quality"]
            ours, text = quality["against_full"], quality["against_text"]
            rows.append(
                [
                    way,
                    _p95(one),
                    _over(one),
                    f"{ours['f1']:.1f} ± {ours['f1_error']:.1f}",
                    f"{ours['rouge_l']:.1f} ± {ours['rouge_l_error']:.1f}",
                    f"{text['f1']:.1f} ± {text['f1_error']:.1f}",
                    _rise(quality, full),
                ]
            )
        head = [load, "P95 TTFT, s", "over 2 s", "F1", "ROUGE-L", "F1 against the text", "perplexity, %"]
        parts.append(table(head, rows))
    modes = (
        "predicted by the profile of halves"
        if "size" in result["settings"]
        else "the mean over the numbers of swapped layers, weighted by the tokens that were decoded with each"
    )
    return "\n\n".join([*parts, f"The perplexity of the modes is {modes}."])


def _p95(one: Result) -> str:
    return spread([each["ttft_s"]["p95"] for each in one["repeats"]], _seconds)


def _over(one: Result) -> str:
    return f"{spread([each['violations'] for each in one['repeats']], _whole)} of {one['requests']}"


def _seconds(value: float | None) -> str:
    return f"{value:.2f}"


def _whole(value: float | None) -> str:
    return f"{value:g}"


def _rise(quality: Result, full: float) -> str:
    """Write how far the perplexity is above that of full precision, and the error if it was measured."""
    rise, error = 100 * (quality["perplexity"] / full - 1), quality["nats_error"]
    return f"{rise:+.2f}" if error is None else f"{rise:+.2f} ± {100 * error:.2f}"


def plans(result: Result) -> str:
    offline = result["offline"]
    rows = [[name, one["in_words"], number(one["mean_bits"])] for name, one in offline["plans"].items()]
    kept = offline["pyramid"]
    text = (
        f"PyramidKV keeps {', '.join(map(str, kept['kept_of_prompt']))} tokens of a prompt of "
        f"{result['settings']['prompt_tokens']}, from the first layer to the last. A request then needs "
        f"{100 * kept['memory_share']:.0f} % of its memory. PyramidKV therefore gets "
        f"{result['settings']['kv_blocks']['pyramid']} KV blocks instead of "
        f"{result['settings']['kv_blocks']['full']}."
    )
    return table(["plan", "layers below full", "mean bits"], rows) + "\n\n" + text


def static(result: Result) -> str:
    """Return the paper's Table 5."""
    ways = result["headlines"]["ways"]
    by, (load_names, _) = by_load_and_way(result), names_of(result)
    paper = {
        INT4: ("32 layers", 1.62, 0.0, 23.66),
        STATIC_2: ("16 layers", 1.74, 0.0, 23.93),
        STATIC_4: ("8 layers", 2.61, 4.2, 24.16),
        FULL: ("0 layers", 5.65, 12.7, 25.19),
        DEFAULT: ("MorphServe", 1.77, 0.0, 24.63),
    }
    rows = []
    for way, (name, p95, over, f1) in paper.items():
        found = ways[way]
        share = 100 * found["violations"] / found["requests"]
        rows.append(
            [
                f"{way} ({name})",
                f"{p95} s, {over} %, {f1}",
                listed([by[load, way]["ttft_s"]["p95"] for load in load_names], " s"),
                f"{share:.1f} %",
                listed([by[load, way]["quality"]["against_full"]["f1"] for load in load_names]),
            ]
        )
    head = ["", "the paper: P95 TTFT, over 2 s, F1", "P95 TTFT here", "over 2 s", "F1 against full precision"]
    return table(head, rows)


def figure5(result: Result) -> str:
    by, (load_names, _) = by_load_and_way(result), names_of(result)
    rows = [
        [
            load if way == FULL else "",
            way,
            f"{one['kv_blocks_before']:g}, {number(one['kv_blocks_mean'])}, {one['kv_blocks_peak']:g}",
            f"{one['kv_used_peak']:g}",
            f"{100 * one['kv_usage_mean']:.0f} %",
            f"{100 * one['share_of_time_waiting']:.0f} %",
            f"{one['preemptions']:g}",
        ]
        for load in load_names
        for way in (FULL, INT4, PYRAMID, *MODES)
        if (load, way) in by
        for one in [by[load, way]]
    ]
    head = [
        "",
        "",
        "KV blocks: before, mean, maximum",
        "most blocks in use",
        "mean use",
        "time with a queue",
        "preempted",
    ]
    return table(head, rows)


def figure6(result: Result) -> str:
    if not result["ladder"]:
        return "No ladder was climbed yet."
    ladder = merged(result["ladder"], "rate", "way")
    ways = list(dict.fromkeys(one["way"] for one in ladder))
    by = {(one["rate"], one["way"]): one for one in ladder}
    rows = []
    for rate in sorted({one["rate"] for one in ladder}):
        cells = [by.get((rate, way)) for way in ways]
        rows.append([number(rate), *map(_rung, cells)])
    highest = result["headlines"]["highest_rate_within_slo"]
    rows.append(["P95 crosses 2 s at", *(_crossing_text(highest.get(way), ladder) for way in ways)])
    if times := result["headlines"].get("times_rate"):
        rows.append(["times full precision's rate", *(spread(times.get(way, [])) for way in ways)])
    return table(["requests/s", *(f"{way}: P95 TTFT, tokens/s" for way in ways)], rows)


def _rung(one: Result | None) -> str:
    """Write a rung; a way does not climb beyond the rung where its P95 exceeds the limit."""
    return f"{one['ttft_s']['p95']:.2f} s, {one['tokens_per_s']:.0f}" if one and one["ttft_s"] else "-"


def _crossing_text(rate: float | None, ladder: Sequence[dict[str, Any]]) -> str:
    asked = [one["rate"] for one in ladder]
    if rate is None:
        return f"below {number(min(asked))}"
    return f"above {number(rate)}" if rate >= max(asked) else number(rate)


def figure7(result: Result) -> str:
    by, (load_names, _) = by_load_and_way(result), names_of(result)
    ways = result["headlines"]["ways"]
    rows = []
    for way in (FULL, INT4, PLAN, PLAN_ANY, *MODES):
        if way not in ways:
            continue
        found = ways[way]
        tpot = [by[load, way]["tpot_s"] for load in load_names]
        rows.append(
            [
                way,
                ", ".join(f"{1e3 * one['mean']:.1f}" for one in tpot),
                ", ".join(f"{1e3 * one['p99']:.1f}" for one in tpot),
                listed(found["times_lower_tpot_mean"]),
                listed(found["times_lower_tpot_p95"]),
                listed(found["times_lower_tpot_p99"]),
            ]
        )
    paper = ["the paper: default mode", "", "", "about 1", "up to 1.06", "up to 1.23"]
    others = ["the paper: performance, accuracy mode", "", "", "1.11 to 1.17, down to 1/1.06", "", ""]
    head = ["", "mean TPOT, ms", "P99, ms", "mean: times lower", "P95", "P99"]
    return table(head, [*rows, paper, others])


# --------------------------------------------------------------------------- a larger model


def larger(result: Result) -> str:
    """Return the loads and latencies of a model of random weights, whose texts have no quality."""
    by, (load_names, ways) = by_load_and_way(result), names_of(result)
    rows = []
    for way in ways:
        found = [by[load, way] for load in load_names if (load, way) in by]
        rows.append(
            [
                way,
                ", ".join(f"{_p95(one)} s" for one in found),
                ", ".join(map(_over, found)),
                ", ".join(f"{one['kv_blocks_peak']:g}" for one in found),
                ", ".join(f"{one['preemptions']:g}" for one in found),
            ]
        )
    of = result["settings"]
    text = (
        f"The model has {_model(of)}, {of['num_layers']} layers, and {of['kv_blocks']['full']} KV blocks at "
        f"full precision. Its losses are {of['losses_by']}. Lists are in the order of the loads: "
        f"{', '.join(load_names)}."
    )
    head = ["", "P95 TTFT", "over 2 s", "most KV blocks", "preempted"]
    return "\n\n".join([text, loads(result), premises(result), table(head, rows), figure6(result)])
