"""What an intent allows and prefers (iServe §4.1, §6). Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import get_args

from bus.deployments import CostModel, Estimate, Intent, Objective
from bus.messages import Number
from bus.precisions import PRECISIONS

FIXABLE = ("tp", "pp", "precision")
DEFAULT_MAX_LOSS = 0.01  # of perplexity, where an intent limits no loss and fixes no precision
COST_UNITS: dict[CostModel, str] = {"memory_seconds": "byte seconds", "memory": "bytes", "gpu_hours": "h"}


class IntentError(ValueError):
    """The intent is unknown or contradictory. Says which field, its value, and what is allowed."""


class UnmetError(Exception):
    """No configuration of this model meets the intent, on any number of devices. `best`: the one that comes
    nearest; None where nothing is known of the model."""

    def __init__(self, reason: str, best: Estimate | None) -> None:
        super().__init__(reason)
        self.best = best


def validate(intent: Intent) -> None:
    """IntentError names all that is wrong with it."""
    if problems := list(_problems(intent)):
        raise IntentError("; ".join(problems))


def _problems(intent: Intent) -> Iterator[str]:
    if intent.minimise not in get_args(Objective):
        yield f"minimise is {intent.minimise!r}: it may be {', '.join(get_args(Objective))}"
    if intent.cost not in get_args(CostModel):
        yield f"cost is {intent.cost!r}: it may be {', '.join(get_args(CostModel))}"
    for name in ("max_latency_s", "max_cost"):
        value = getattr(intent, name)
        if value is not None and not (_is_number(value) and value > 0):
            yield f"{name} is {value!r}: it must be above 0"
    if intent.max_loss is not None and not (_is_number(intent.max_loss) and intent.max_loss >= 0):
        yield f"max_loss is {intent.max_loss!r}: it must be 0 or more (0.01 is one per cent of perplexity)"
    for name in ("prompt_tokens", "output_tokens", "batch_size"):
        value = getattr(intent, name)
        if not _is_count(value):
            yield f"{name} is {value!r}: it must be a whole number, 1 or more"
    yield from _unfixable(intent)
    if intent.max_latency_s is not None and intent.max_cost is not None:
        yield (
            f"max_latency_s is {intent.max_latency_s!r} and max_cost is {intent.max_cost!r}: only one of "
            "them, the other quantity is minimised"
        )
    elif intent.max_latency_s is not None and intent.minimise != "cost":
        yield (
            f"minimise is {intent.minimise!r} beside max_latency_s: a limit of latency minimises the cost; "
            "leave minimise out, and choose what cost is by cost"
        )
    elif intent.max_cost is not None and intent.minimise not in ("cost", "latency"):
        yield (
            f"minimise is {intent.minimise!r} beside max_cost: a limit of cost minimises the latency; "
            "leave minimise out"
        )


def _unfixable(intent: Intent) -> Iterator[str]:
    for name in ("tp", "pp"):
        value = getattr(intent, name)
        if value is not None and not _is_count(value):
            yield f"{name} is {value!r}: it must be a whole number, 1 or more"
    if intent.precision is not None and intent.precision not in PRECISIONS:
        yield f"precision is {intent.precision!r}: it may be {', '.join(PRECISIONS)}"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def objective(intent: Intent) -> Objective:
    """What is minimised in the end."""
    if intent.max_latency_s is not None:
        return "cost"
    return "latency" if intent.max_cost is not None else intent.minimise


def loss_limit(intent: Intent) -> float | None:
    """Return the largest allowed loss; None if the intent fixes the precision and limits no loss.

    A precision whose loss is unknown is allowed only where there is no limit.
    """
    if intent.max_loss is None:
        return None if intent.precision is not None else DEFAULT_MAX_LOSS
    return intent.max_loss


def goal(intent: Intent) -> str:
    """In words: "least cost, latency at most 0.5 s"."""
    words = [f"least {objective(intent).replace('gpu_hours', 'GPU-hours')}"]
    if intent.max_latency_s is not None:
        words.append(f"latency at most {intent.max_latency_s:g} s")
    if intent.max_cost is not None:
        words.append(f"cost at most {intent.max_cost:g} {COST_UNITS[intent.cost]}")
    if intent.max_loss is not None:
        words.append(f"loss at most {intent.max_loss:.2%}")
    words += [f"{name} {value}" for name in FIXABLE if (value := getattr(intent, name)) is not None]
    return ", ".join(words)


def judge(estimates: Iterable[Estimate], intent: Intent) -> list[Estimate]:
    """All of them, best first; what the intent rules out comes last, with the reason in `refusal`."""
    judged = [replace(one, refusal=one.refusal or ruled_out(one, intent)) for one in estimates]
    return sorted(judged, key=lambda one: (bool(one.refusal), *preference(one, intent)))


def rank(estimates: Iterable[Estimate], intent: Intent) -> list[Estimate]:
    """Those that the intent allows, best first. IntentError; UnmetError with the best there is."""
    validate(intent)
    judged = judge(estimates, intent)
    if allowed := [one for one in judged if not one.refusal]:
        return allowed
    best = nearest(judged, intent)
    if best is None:
        raise UnmetError("nothing was measured of this model", None)
    nearest_is = f"the nearest is {name_of(best)}: {best.refusal}"
    raise UnmetError(f"no configuration meets the intent; {nearest_is}", best)


def ruled_out(estimate: Estimate, intent: Intent) -> str:
    """Why the intent does not allow it, with the numbers; "": it does."""
    if others := _not_as_fixed(estimate, intent):
        return f"the intent fixes {', '.join(others)}"
    limit = loss_limit(intent)
    if limit is not None and estimate.loss is None:
        lost = estimate.configuration.precision
        return (
            f"what {lost} loses is not known: run `instar profile --precision {lost}` on the model's "
            f"folder and register it again, or fix precision {lost}"
        )
    if limit is not None and estimate.loss is not None and estimate.loss.value > limit:
        whose = "max_loss" if intent.max_loss is not None else "the default max_loss"
        return f"loses {estimate.loss.value:.2%} of perplexity, above {whose} {limit:.2%}"
    if intent.max_latency_s is not None and estimate.latency_s.value > intent.max_latency_s:
        return f"takes {estimate.latency_s.value:.4g} s, above max_latency_s {intent.max_latency_s:g}"
    if intent.max_cost is not None and estimate.cost.value > intent.max_cost:
        unit = COST_UNITS[intent.cost]
        return f"costs {estimate.cost.value:.4g} {unit}, above max_cost {intent.max_cost:g}"
    return ""


def _not_as_fixed(estimate: Estimate, intent: Intent) -> list[str]:
    """What is fixed otherwise than it has it."""
    fixed = {name: value for name in FIXABLE if (value := getattr(intent, name)) is not None}
    return [f"{name} {fixed[name]}" for name in fixed if getattr(estimate.configuration, name) != fixed[name]]


def nearest(estimates: Iterable[Estimate], intent: Intent) -> Estimate | None:
    """Of those that miss it: what is fixed first, then quality, then the quantity that has the limit."""

    def miss(one: Estimate) -> tuple[float, ...]:
        floor = loss_limit(intent) is not None and bool(ruled_out(one, _without_all_but_loss(intent)))
        limited = one.cost.value if intent.max_cost is not None else one.latency_s.value
        loss = one.loss.value if one.loss else math.inf
        return (len(_not_as_fixed(one, intent)), loss if floor else -1.0, limited)

    return min(estimates, key=lambda one: (*miss(one), *preference(one, intent)), default=None)


def _without_all_but_loss(intent: Intent) -> Intent:
    """The same without limits of latency and cost, and with nothing fixed."""
    return replace(intent, max_latency_s=None, max_cost=None, tp=None, pp=None, precision=None)


def name_of(estimate: Estimate) -> str:
    one = estimate.configuration
    return f"tp{one.tp} pp{one.pp} {one.precision}"


def preference(one: Estimate, intent: Intent) -> tuple[float, ...]:
    """What to sort by. Ties go to fewer devices, fewer stages, more bits, whatever came in first. Behind all
    others comes what is faster by mere assumption: a device may be no faster for having company."""
    shape = one.configuration
    ties = (shape.num_devices, shape.pp, PRECISIONS.index(shape.precision))
    value = minimised(one, intent)
    return (is_guess(one), value, one.latency_s.value, one.memory_bytes.value, *ties)


def minimised(one: Estimate, intent: Intent) -> float:
    """The value of what the intent minimises."""
    values = {
        "latency": one.latency_s,
        "cost": one.cost,
        "memory": one.memory_bytes,
        "gpu_hours": one.gpu_hours,
    }
    return values[objective(intent)].value


def is_guess(one: Estimate) -> bool:
    """A group whose speed nobody measured, in any precision."""
    return one.configuration.tp > 1 and one.latency_s.basis == "assumed"


MARGIN = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Of `now` and `then`, in the unit of what is minimised."""

    minimised: Objective
    now: float
    then: float
    words: str
    is_guess: bool = False  # that it would be so

    @property
    def is_better(self) -> bool:
        return self.then <= (1 - MARGIN) * self.now and not self.is_guess

    @property
    def is_no_worse(self) -> bool:
        return self.then <= self.now and not self.is_guess

    @property
    def numbers(self) -> dict[str, Number]:
        """Of the event that tells of the change."""
        return {f"{self.minimised}_now": self.now, f"{self.minimised}_then": self.then}


def compare(now: Estimate, then: Estimate, intent: Intent) -> Comparison:
    """`now`: of the configuration that serves."""
    what = objective(intent)
    before, after = minimised(now, intent), minimised(then, intent)
    units = {"latency": "s", "memory": "bytes", "gpu_hours": "h", "cost": COST_UNITS[intent.cost]}
    unit = units[what]
    return Comparison(
        minimised=what,
        now=before,
        then=after,
        words=f"{what} is {before:.4g} {unit} as {name_of(now)} and {after:.4g} as {name_of(then)}",
        is_guess=is_guess(then) and not is_guess(now),
    )
