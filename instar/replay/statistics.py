"""The numbers of a run, from the rows of its file alone, as docs/replay.md defines them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from instar.replay.outcomes import RequestOutcome

PERCENTS: Final = (50, 95, 99)
LATE_S: Final = 0.005  # limit of this process's own lateness, at P99


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds to the first token, and per token after it."""

    ttft_s: float
    tpot_s: float

    def is_met(self, outcome: RequestOutcome) -> bool:
        return not (self.misses_ttft(outcome) or self.misses_tpot(outcome))

    def misses_ttft(self, outcome: RequestOutcome) -> bool:
        """Return True also for a failed request."""
        return not outcome.is_served or (outcome.ttft_s or 0.0) > self.ttft_s

    def misses_tpot(self, outcome: RequestOutcome) -> bool:
        """Return True also for a failed request, False for one of a single token."""
        return not outcome.is_served or (outcome.tpot_s or 0.0) > self.tpot_s


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile of sorted values, at least one."""
    place = (len(values) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def distribution(values: Iterable[float | None]) -> dict[str, float] | None:
    """Return count, mean, p50, p95, p99 and max; None without values."""
    found = sorted(value for value in values if value is not None)
    if not found:
        return None
    shown = {f"p{percent}": _round(percentile(found, percent)) for percent in PERCENTS}
    mean = _round(math.fsum(found) / len(found))
    return {"count": len(found), "mean": mean} | shown | {"max": _round(found[-1])}


def summary(outcomes: Sequence[RequestOutcome], slo: Slo, *, has_queue_times: bool) -> dict[str, Any]:
    """Return all numbers of a run. `has_queue_times`: the head of an answer comes when a worker begins."""
    sent = [one for one in outcomes if one.counts]
    served = [one for one in sent if one.is_served]
    good = [one for one in served if slo.is_met(one)]
    seconds = max((one.last_s or one.ended_s or 0.0 for one in sent), default=0.0)
    output = sum(one.num_output for one in sent)
    return {
        "requests": len(sent),
        "served": len(served),
        "short": sum(one.num_output < one.output_asked for one in served),
        "seconds": _round(seconds),
        "ttft_s": distribution(one.ttft_s for one in served),
        "tpot_s": distribution(one.tpot_s for one in served),
        "e2e_s": distribution(one.e2e_s for one in served),
        "queue_s": distribution(one.queue_s for one in served) if has_queue_times else None,
        "violations": {
            "ttft": _share(sum(map(slo.misses_ttft, sent)), len(sent)),
            "tpot": _share(sum(map(slo.misses_tpot, sent)), len(sent)),
            "either": _share(len(sent) - len(good), len(sent)),
        },
        "goodput": _rates(good, seconds),
        "throughput": _rates(served, seconds)
        | {
            "prompt_tokens_per_s": _per(sum(_prompt_tokens(one) for one in served), seconds),
            "output_tokens_per_s": _per(output, seconds),
        },
        "errors": dict(Counter(one.error for one in outcomes if one.error).most_common()),
        "lateness_s": distribution(None if one.sent_s is None else one.sent_s - one.due_s for one in sent),
        "tokens_by_layers_below_full": tokens_by_layers(outcomes),
        "prompt_tokens": {
            "asked": sum(one.prompt_asked for one in served),
            "became": sum(_prompt_tokens(one) for one in served),
        },
    }


def tokens_by_layers(outcomes: Iterable[RequestOutcome]) -> dict[str, int]:
    """Return output tokens by the number of layers below full precision, {} if the server does not report."""
    found = Counter[int]()
    for one in outcomes:
        for tokens, below in one.spans:
            found[below] += tokens
    return {str(below): found[below] for below in sorted(found)}


def share_at_full(tokens: dict[str, int]) -> float:
    """Return the share of tokens, of which there are some, with all layers at full precision."""
    return tokens.get("0", 0) / sum(tokens.values())


def _prompt_tokens(one: RequestOutcome) -> int:
    return one.prompt_asked if one.prompt_tokens is None else one.prompt_tokens


def _rates(outcomes: Sequence[RequestOutcome], seconds: float) -> dict[str, float]:
    tokens = sum(one.num_output for one in outcomes)
    return {"requests_per_s": _per(len(outcomes), seconds), "tokens_per_s": _per(tokens, seconds)}


def _share(count: int, of: int) -> dict[str, float]:
    return {"count": count, "share": _round(count / of) if of else 0.0}


def _per(count: float, seconds: float) -> float:
    return _round(count / seconds) if seconds else 0.0


def _round(value: float) -> float:
    return round(value, 6)
