"""The numbers of `bench.morph burst`: of one run, of all runs of a configuration, and the bars."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench.common.results import Bar, bar, bar_lines, digits
from bench.morph.service import Sample
from bus.morphs import MorphReport
from instar.replay.outcomes import RequestOutcome
from instar.replay.statistics import percentile

TTFT_LIMIT_S: Final = 2.0  # MorphServe's (§2.2), and that of the work it compares with
FULL, INT4, DEFAULT = "full precision", "all layers int4", "mode default"
MIN_TTFT_RATIO, MIN_FEWER_VIOLATIONS, MAX_SHARE_OF_LOSS = 2.9, 0.9, 0.5


@dataclass(frozen=True, slots=True)
class MorphRun:
    """One configuration under one script. Seconds count from the beginning of the script."""

    configuration: str
    round: int
    outcomes: list[RequestOutcome]
    samples: list[Sample]
    morphs: list[MorphReport]
    began_s: float
    burst_s: float  # when the burst begins, and when it ends
    burst_ends_s: float
    blocks_before: int
    others_cores: float  # kept busy by other programs

    @property
    def ttfts(self) -> list[float]:
        return sorted(one.ttft_s or 0.0 for one in self.outcomes)

    @property
    def tpots(self) -> list[float]:
        return sorted(one.tpot_s or 0.0 for one in self.outcomes)

    @property
    def tokens_by_layers(self) -> Counter[int]:
        """Output tokens by the number of layers below full precision that made them."""
        tokens: Counter[int] = Counter()
        for one in self.outcomes:
            for num_tokens, below in one.spans:
                tokens[below] += num_tokens
        return tokens

    @property
    def violations(self) -> int:
        return sum(ttft > TTFT_LIMIT_S for ttft in self.ttfts)

    @property
    def first_queued_s(self) -> float | None:
        """The time at which the first request came that found no blocks in the burst.

        What waits at the end of a step was refused a place in it.
        """
        for sample in self.samples:
            came_s = sample.at_s - sample.waited_s - self.began_s
            if sample.waiting and came_s >= self.burst_s:
                return came_s
        return None

    @property
    def first_added_s(self) -> float | None:
        """The time at which there first were more KV blocks than before the run."""
        grown = (one.at_s - self.began_s for one in self.samples if one.kv_blocks > self.blocks_before)
        return next(grown, None)

    @property
    def relief_s(self) -> float | None:
        """Seconds from the burst's first queued request to the first added block.

        None if no block was added, or a block was added before.
        """
        queued, added = self.first_queued_s, self.first_added_s
        return None if queued is None or added is None or added < queued else added - queued

    def as_json(self) -> dict[str, Any]:
        return {
            "configuration": self.configuration,
            "round": self.round,
            "requests": len(self.outcomes),
            "ttft_p50_s": digits(percentile(self.ttfts, 50)),
            "ttft_p95_s": digits(percentile(self.ttfts, 95)),
            "tpot_p50_ms": digits(1e3 * percentile(self.tpots, 50)),
            "tpot_p99_ms": digits(1e3 * percentile(self.tpots, 99)),
            "longest_pause_p99_s": digits(
                percentile(sorted(one.longest_pause_s for one in self.outcomes), 99)
            ),
            "violations": self.violations,
            "tokens_by_layers_below_full": dict(sorted(self.tokens_by_layers.items())),
            "preemptions": self.samples[-1].preemptions - self.samples[0].preemptions,
            "relief_s": digits(self.relief_s),
            "others_cores": round(self.others_cores, 2),
            "morphs": [
                {
                    "kind": morph.kind,
                    "state": morph.state,
                    "at_s": digits(morph.started_ms / 1e3 - self.began_s),
                    "seconds": morph.numbers.get("seconds"),
                    "blocks_after": morph.numbers.get("blocks_after"),
                }
                for morph in self.morphs
            ],
            "over_time": {
                "at_s": [round(one.at_s - self.began_s, 2) for one in self.samples],
                "kv_blocks": [one.kv_blocks for one in self.samples],
                "kv_used": [one.kv_used for one in self.samples],
                "waiting": [one.waiting for one in self.samples],
                "layers_below_full": [one.layers_below_full for one in self.samples],
            },
        }


def summary(runs: Sequence[MorphRun], perplexities: Sequence[float]) -> dict[str, dict[str, Any]]:
    """Return the numbers of each configuration, in the order of its first run.

    Ratios are to full precision in the same round, on the same arrivals; their median counts. perplexities[k]
    is that of k swapped layers.
    """
    names = list(dict.fromkeys(run.configuration for run in runs))
    by_round = {(run.configuration, run.round): run for run in runs}
    found = {}
    for name in names:
        own = [run for run in runs if run.configuration == name]
        tokens = sum((run.tokens_by_layers for run in own), Counter())
        p95 = [percentile(run.ttfts, 95) for run in own]
        of_full = [percentile(by_round[FULL, run.round].ttfts, 95) for run in own]
        ratios = [a / b for a, b in zip(of_full, p95, strict=True)]
        reliefs = [run.relief_s for run in own if run.relief_s is not None]
        found[name] = {
            "ttft_p95_s": digits(statistics.median(p95)),
            "ttft_p95_s_of_rounds": [digits(value) for value in p95],
            "ttft_p50_s": digits(statistics.median(percentile(run.ttfts, 50) for run in own)),
            "times_lower_ttft_p95": digits(statistics.median(ratios)),
            "times_lower_of_rounds": [digits(value) for value in ratios],
            "tpot_p50_ms": digits(statistics.median(1e3 * percentile(run.tpots, 50) for run in own)),
            "tpot_p99_ms": digits(statistics.median(1e3 * percentile(run.tpots, 99) for run in own)),
            "violations": sum(run.violations for run in own),
            "requests": sum(len(run.outcomes) for run in own),
            "others_cores": round(statistics.fmean(run.others_cores for run in own), 2),
            "kv_blocks_peak": max(one.kv_blocks for run in own for one in run.samples),
            "share_of_tokens_swapped": digits(1 - tokens[0] / tokens.total()),
            "mean_layers_below_full": digits(
                sum(layers * count for layers, count in tokens.items()) / tokens.total()
            ),
            "perplexity": round(mixed_perplexity(tokens, perplexities), 5),
            "relief_s": digits(statistics.median(reliefs)) if reliefs else None,
        }
    return found


def mixed_perplexity(tokens: Counter[int], perplexities: Sequence[float]) -> float:
    """Return exp of the mean loss, in which each number of swapped layers is weighted with its tokens."""
    losses = sum(count * math.log(perplexities[layers]) for layers, count in tokens.items())
    return math.exp(losses / tokens.total())


def bars(found: dict[str, dict[str, Any]]) -> dict[str, Bar]:
    """Return what default mode must reach, what it did, and whether that suffices."""
    full, int4, default = found[FULL], found[INT4], found[DEFAULT]
    fewer = 1 - default["violations"] / full["violations"] if full["violations"] else math.nan
    loss = int4["perplexity"] - full["perplexity"]
    share = (default["perplexity"] - full["perplexity"]) / loss if loss > 0 else math.nan
    return {
        "times lower P95 TTFT than full precision": bar(
            f">= {MIN_TTFT_RATIO}",
            default["times_lower_ttft_p95"],
            default["times_lower_ttft_p95"] >= MIN_TTFT_RATIO,
        ),
        f"fewer violations of {TTFT_LIMIT_S:g} s TTFT": bar(
            f">= {MIN_FEWER_VIOLATIONS:.0%}", fewer, fewer >= MIN_FEWER_VIOLATIONS
        ),
        "share of the quality that all-INT4 loses": bar(
            f"< {MAX_SHARE_OF_LOSS:g}", share, share < MAX_SHARE_OF_LOSS
        ),
    }


def card(found: dict[str, dict[str, Any]], judged: dict[str, Bar]) -> str:
    head = (
        f"{'':<17} {'P95 TTFT':>9} {'x lower':>8} {'TPOT P50':>9} {'P99':>7} {'over limit':>11} "
        f"{'KV peak':>8} {'swapped':>8} {'perplexity':>11} {'relief':>7}"
    )
    rows = [
        f"{name:<17} {one['ttft_p95_s']:>7.2f} s {one['times_lower_ttft_p95']:>8.1f} "
        f"{one['tpot_p50_ms']:>6.1f} ms {one['tpot_p99_ms']:>4.0f} ms "
        f"{one['violations']:>5} of {one['requests']:<3}"
        f"{one['kv_blocks_peak']:>7} {one['share_of_tokens_swapped']:>8.0%} {one['perplexity']:>11.4f} "
        + (f"{one['relief_s']:>5.1f} s" if one["relief_s"] is not None else f"{'-':>7}")
        for name, one in found.items()
    ]
    return "\n".join([head, *rows, *bar_lines(judged)])
