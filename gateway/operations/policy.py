"""`PUT /admin/policy`: the body, its validation, and the next revision of the policy."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, create_model

from bus.client import Bus
from bus.policy import FIELDS, Policy, PolicyField
from gateway.errors import ApiError, invalid
from gateway.openai.params import PERCENT, Body, between

TRIES = 5  # against writers elsewhere


def _type_of(declared: PolicyField) -> Any:
    if declared.choices:
        return Literal[tuple(declared.choices)]
    low, high = declared.minimum or 0, declared.maximum or 0
    kind = int if declared.type == "integer" else float
    limits = between(low, high, above=declared.above_minimum)
    return Annotated[kind, limits, PERCENT] if declared.unit == "share" else Annotated[kind, limits]


def _or_none(kind: Any, unset: str) -> Any:
    """Return a type that is also None, for which a body has the word `unset`."""
    if not unset:
        return kind | None
    return Annotated[kind | None, BeforeValidator(lambda value: None if value == unset else value)]


# Fields that are left out keep their value. `revision`: of the policy that the writer has seen; left out, the
# change applies to whichever is stored.
_TYPES: dict[str, Any] = {"revision": Annotated[int, between(0, 2**63 - 1)]}
_TYPES |= {declared.name: _type_of(declared) for declared in FIELDS}
_UNSET = {declared.name: declared.unset for declared in FIELDS if declared.unset}
_OPTIONAL: dict[str, Any] = {
    name: (_or_none(kind, _UNSET.get(name, "")), None) for name, kind in _TYPES.items()
}
PolicyBody = create_model("PolicyBody", __base__=Body, **_OPTIONAL)


def changed(before: Policy, body: Body) -> Policy:
    """Return the next revision. Raises ApiError: 409 for an old revision, 400 for values out of order."""
    given = body.model_dump(exclude_unset=True)  # a null in the JSON counts as left out
    revision = given.pop("revision", before.revision)
    if revision != before.revision:
        raise _moved_on(f"revision is {revision}; the policy is at {before.revision}")
    if not given:
        raise invalid(f"the body changes nothing; there are: {', '.join(PolicyBody.model_fields)}", None)
    after = replace(before, **given, revision=before.revision + 1)
    for low, high in ((one.name, one.below) for one in FIELDS if one.below):
        lower, upper = getattr(after, low), getattr(after, high)
        if lower >= upper:
            message = f"{low} = {lower:g} must be below {high} = {upper:g}: between them nothing is done"
            raise invalid(message, low if low in given else high)
    return after


async def write(bus: Bus, body: Body) -> tuple[Policy, Policy]:
    """Store the changed policy; return (before, after). Raises ApiError 400, 409, BusUnavailable, BusFull."""
    for _ in range(TRIES):
        before = await bus.read_policy()
        after = changed(before, body)
        if await bus.write_policy(after):
            return before, after
    raise _moved_on(f"others wrote the policy {TRIES} times meanwhile")


def differences(before: Policy, after: Policy) -> str:
    """Return `mode default -> manual, windows 3 -> 5`, for the audit."""
    old, new = asdict(before), asdict(after)
    del new["revision"]
    changes = [f"{name} {old[name]} -> {value}" for name, value in new.items() if value != old[name]]
    return ", ".join(changes) or "nothing"


def _moved_on(message: str) -> ApiError:
    return ApiError(409, f"{message}; read it again", param="revision", code="revision_conflict")
