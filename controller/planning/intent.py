"""The configurations that an intent allows and prefers (iServe §4.1, §6). Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from bus.deployments import FIXABLE, INTENT_FIELDS, CostModel, Estimate, Intent, Objective
from bus.fields import Field
from bus.messages import Number
from bus.precisions import BITS, KV_PRECISIONS, PRECISIONS

DEFAULT_MAX_LOSS = 0.01  # share of perplexity, if an intent fixes neither loss nor precision
MARGIN = 0.1  # least gain of a change: estimates are wrong by some per cent
COST_UNITS: dict[CostModel, str] = {"memory_seconds": "byte seconds", "memory": "bytes", "gpu_hours": "h"}


class IntentError(ValueError):
    """The intent is unknown or contradictory. The message names field, value and what is allowed."""


class UnmetError(Exception):
    """No configuration meets the intent, on any number of devices. `best` comes nearest, if any is known."""

    def __init__(self, reason: str, best: Estimate | None) -> None:
        super().__init__(reason)
        self.best = best


def validate(intent: Intent) -> None:
    """Raise IntentError with all that is wrong."""
    if problems := list(_problems(intent)):
        raise IntentError("; ".join(problems))


def _problems(intent: Intent) -> Iterator[str]:
    for one in INTENT_FIELDS:
        value = getattr(intent, one.name)
        if (value is not None or one.default is not None) and not _is_allowed(value, one):
            yield f"{one.name} is {value!r}: {_allowed(one)}"
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


def _is_allowed(value: object, one: Field) -> bool:
    """Return True if a value is of the type of its field and not below its minimum."""
    if names := _names(one):
        return value in names
    kind = int if one.type == "integer" else (int, float)
    if not isinstance(value, kind) or isinstance(value, bool) or not math.isfinite(value):
        return False
    return value > one.minimum or (value == one.minimum and not one.above_minimum)


def _allowed(one: Field) -> str:
    if names := _names(one):
        return f"it may be {', '.join(names)}"
    if one.type == "integer":
        return f"it must be a whole number, {one.minimum} or more"
    if one.above_minimum:
        return f"it must be above {one.minimum}"
    return f"it must be {one.minimum} or more (0.01 is one per cent of perplexity)"


def _names(one: Field) -> Collection[str]:
    return PRECISIONS if one.type == "precision" else one.choices


def objective(intent: Intent) -> Objective:
    """Return what is minimised: cost below a limit of latency, latency below one of cost."""
    if intent.max_latency_s is not None:
        return "cost"
    return "latency" if intent.max_cost is not None else intent.minimise


def loss_limit(intent: Intent) -> float | None:
    """Return the largest allowed loss; None: no limit, since the intent fixes the precision."""
    if intent.max_loss is None:
        return None if intent.precision is not None else DEFAULT_MAX_LOSS
    return intent.max_loss


def goal(intent: Intent) -> str:
    """Return the intent in words: "least cost, latency at most 0.5 s"."""
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
    """Return all of them, best first, with the reason in `refusal` for those that are ruled out."""
    judged = [replace(one, refusal=one.refusal or ruled_out(one, intent)) for one in estimates]
    return sorted(judged, key=lambda one: (bool(one.refusal), *preference(one, intent)))


def rank(estimates: Iterable[Estimate], intent: Intent, num_devices: float = math.inf) -> list[Estimate]:
    """Return those that the intent allows, best first. Raises IntentError and UnmetError.

    `num_devices`: those that there are, for the nearest configuration of UnmetError.
    """
    validate(intent)
    judged = judge(estimates, intent)
    if allowed := [one for one in judged if not one.refusal]:
        return allowed
    best = nearest(judged, intent, num_devices)
    if best is None:
        raise UnmetError("nothing was measured of this model", None)
    nearest_is = f"the nearest is {name_of(best)}: {best.refusal}"
    raise UnmetError(f"no configuration meets the intent; {nearest_is}", best)


def ruled_out(estimate: Estimate, intent: Intent) -> str:
    """Return why the intent does not allow it, with the numbers; "": it does."""
    if others := _not_as_fixed(estimate, intent):
        return f"the intent fixes {', '.join(others)}"
    if why := _too_lossy(estimate, intent):
        return why
    if intent.max_latency_s is not None and estimate.latency_s.value > intent.max_latency_s:
        return f"takes {estimate.latency_s.value:.4g} s, above max_latency_s {intent.max_latency_s:g}"
    if intent.max_cost is not None and estimate.cost.value > intent.max_cost:
        unit = COST_UNITS[intent.cost]
        return f"costs {estimate.cost.value:.4g} {unit}, above max_cost {intent.max_cost:g}"
    return ""


def _too_lossy(estimate: Estimate, intent: Intent) -> str:
    limit, shape = loss_limit(intent), estimate.configuration
    if limit is None:
        if shape.kv_dtype == "full" or intent.kv_dtype is not None:
            return ""
        return "the intent fixes the precision: fix kv_dtype int8 as well, or give max_loss"
    if estimate.loss is None:
        lost = shape.precision
        if shape.kv_dtype != "full":
            return (
                f"what {lost} and a KV cache in {shape.kv_dtype} lose is not known: run `instar profile` on "
                "the model's folder and register it again, or fix precision and kv_dtype"
            )
        return (
            f"what {lost} loses is not known: run `instar profile --precision {lost}` on the model's "
            f"folder and register it again, or fix precision {lost}"
        )
    if estimate.loss.value <= limit:
        return ""
    whose = "max_loss" if intent.max_loss is not None else "the default max_loss"
    # Layers in full precision lose nothing: then it is the KV cache, by the settings of the workers.
    by = " by its KV cache (worker.kv_dtype)" if shape.precision == shape.kv_dtype == "full" else ""
    return f"loses {estimate.loss.value:.2%} of perplexity{by}, above {whose} {limit:.2%}"


def _not_as_fixed(estimate: Estimate, intent: Intent) -> list[str]:
    fixed = {name: value for name in FIXABLE if (value := getattr(intent, name)) is not None}
    return [f"{name} {fixed[name]}" for name in fixed if getattr(estimate.configuration, name) != fixed[name]]


def nearest(estimates: Iterable[Estimate], intent: Intent, num_devices: float) -> Estimate | None:
    """Return the one that misses least: what is fixed first, then devices, loss and the limited quantity."""

    def miss(one: Estimate) -> tuple[float, ...]:
        limited = one.cost.value if intent.max_cost is not None else one.latency_s.value
        loss = one.loss.value if one.loss else math.inf
        missing = max(0.0, one.configuration.num_devices - num_devices)
        return (len(_not_as_fixed(one, intent)), missing, loss if _too_lossy(one, intent) else -1.0, limited)

    return min(estimates, key=lambda one: (*miss(one), *preference(one, intent)), default=None)


def name_of(estimate: Estimate) -> str:
    """Return `tp2 pp1 int4`, or `tp2 pp1 int4 kv8`."""
    one = estimate.configuration
    kv = "" if one.kv_dtype == "full" else f" kv{BITS[one.kv_dtype]}"
    return f"tp{one.tp} pp{one.pp} {one.precision}{kv}"


def preference(one: Estimate, intent: Intent) -> tuple[float, ...]:
    """Return the sort key: assumed speed last, what is minimised, fewer devices and stages, more bits.

    For a latency that was measured with KV in full precision alone, that goes first.
    """
    shape = one.configuration
    ties = (shape.num_devices, shape.pp, PRECISIONS.index(shape.precision))
    latency = one.latency_s.value, KV_PRECISIONS.index(shape.kv_dtype)
    return (is_guess(one), minimised(one, intent), *latency, one.memory_bytes.value, *ties)


def minimised(one: Estimate, intent: Intent) -> float:
    """Return the value of what the intent minimises."""
    quantities = {"latency": one.latency_s, "memory": one.memory_bytes, "gpu_hours": one.gpu_hours}
    return quantities.get(objective(intent), one.cost).value


def is_guess(one: Estimate) -> bool:
    """Return True for a group whose speed was not measured in any precision."""
    return one.configuration.tp > 1 and one.latency_s.basis == "assumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The minimised quantity as it is `now` and as it would be `then`, both estimated from one profile."""

    minimised: Objective
    now: float
    then: float
    words: str
    is_guess: bool = False  # `then` is, and `now` is not

    @property
    def is_better(self) -> bool:
        """True if a change is worth it for its own sake."""
        return self.then <= (1 - MARGIN) * self.now and not self.is_guess

    @property
    def is_no_worse(self) -> bool:
        """True if a change for another deployment's sake costs this one nothing."""
        return self.then <= self.now and not self.is_guess

    @property
    def numbers(self) -> dict[str, Number]:
        """The numbers of the event of the change."""
        return {f"{self.minimised}_now": self.now, f"{self.minimised}_then": self.then}


def compare(now: Estimate, then: Estimate, intent: Intent) -> Comparison:
    """Compare another configuration with the one that serves."""
    what = objective(intent)
    before, after = minimised(now, intent), minimised(then, intent)
    unit = {"latency": "s", "memory": "bytes", "gpu_hours": "h", "cost": COST_UNITS[intent.cost]}[what]
    return Comparison(
        minimised=what,
        now=before,
        then=after,
        words=f"{what} is {before:.4g} {unit} as {name_of(now)} and {after:.4g} as {name_of(then)}",
        is_guess=is_guess(then) and not is_guess(now),
    )
