"""The morph policy as operators write it: any of its fields, checked one by one and then together."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated, Literal

from bus.client import Bus
from bus.messages import Mode, Policy
from gateway.errors import ApiError, invalid
from gateway.openai.params import MAX_COUNT, Body, between

TRIES = 5  # against writers elsewhere

HIGHEST_DELAY_S = 3600.0
LONGEST_COOLDOWN_S = 86_400.0
MOST_WINDOWS = 1000


class PolicyBody(Body):
    """Fields that are left out keep their value. `revision`: of the policy that this is to change; left out,
    of whichever is there."""

    revision: Annotated[int, between(0, 2**63 - 1)] | None = None
    mode: Mode | None = None
    kv_usage_high: Annotated[float, between(0, 1, above=True)] | None = None
    kv_usage_low: Annotated[float, between(0, 1)] | None = None
    queue_delay_high_s: Annotated[float, between(0, HIGHEST_DELAY_S, above=True)] | None = None
    queue_delay_low_s: Annotated[float, between(0, HIGHEST_DELAY_S)] | None = None
    windows: Annotated[int, between(1, MOST_WINDOWS)] | None = None
    cooldown_s: Annotated[float, between(0, LONGEST_COOLDOWN_S)] | None = None
    step_layers: Annotated[int, between(0, MAX_COUNT)] | None = None
    max_layers: Annotated[int, between(0, MAX_COUNT)] | None = None
    precision: Literal["int8", "int4", "int3"] | None = None
    max_tp: Annotated[int, between(0, MAX_COUNT)] | None = None
    long_patience_s: Annotated[float, between(0, HIGHEST_DELAY_S)] | None = None
    scale_down_free: Annotated[float, between(0, 1)] | None = None


def changed(before: Policy, body: PolicyBody) -> Policy:
    """The next revision. Raises ApiError: 409 where `before` is not the revision that was meant, 400 where
    thresholds are out of order or nothing was given."""
    given = body.model_dump(exclude_none=True)
    revision = given.pop("revision", before.revision)
    if revision != before.revision:
        raise _moved_on(f"revision is {revision}; the policy is at {before.revision}")
    if not given:
        raise invalid(f"the body changes nothing; there are: {', '.join(PolicyBody.model_fields)}", None)
    after = replace(before, **given, revision=before.revision + 1)
    for low, high in (("kv_usage_low", "kv_usage_high"), ("queue_delay_low_s", "queue_delay_high_s")):
        lower, upper = getattr(after, low), getattr(after, high)
        if lower >= upper:
            raise invalid(
                f"{low} = {lower:g} must be below {high} = {upper:g}: between them nothing is done",
                low if low in given else high,
            )
    return after


async def write(bus: Bus, body: PolicyBody) -> tuple[Policy, Policy]:
    """(before, after). Raises ApiError 400 and 409, BusUnavailable, BusFull."""
    for _ in range(TRIES):
        before = await bus.read_policy()
        after = changed(before, body)
        if await bus.write_policy(after):
            return before, after
    raise _moved_on(f"others wrote the policy {TRIES} times meanwhile")


def differences(before: Policy, after: Policy) -> str:
    """`mode default -> manual, windows 3 -> 5`, for the audit."""
    old, new = asdict(before), asdict(after)
    changes = [f"{name} {old[name]} -> {new[name]}" for name in new if new[name] != old[name]]
    return ", ".join(change for change in changes if not change.startswith("revision ")) or "nothing"


def _moved_on(message: str) -> ApiError:
    return ApiError(409, f"{message}; read it again", param="revision", code="revision_conflict")
