"""`PUT /admin/policy`: the body, its validation, and the next revision of the policy."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated, Final

from pydantic import Field as Limits

from bus.client import Bus
from bus.policy import FIELDS, Policy
from gateway.errors import ApiError, invalid
from gateway.openai.fields import Body, between
from gateway.operations.bodies import body_type

TRIES = 5  # against writers elsewhere


# Fields that are left out keep their value. `revision`: of the policy that the writer has seen; left out, the
# change applies to whichever is stored.
_REVISION: Final = Annotated[int, between(0, 2**63 - 1)] | None
PolicyBody = body_type(
    "PolicyBody",
    FIELDS,
    revision=(_REVISION, Limits(None, description="the revision that the writer has seen")),
)


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
    old, new = ({**asdict(one), **_unset(one)} for one in (before, after))
    del new["revision"]
    changes = [f"{name} {old[name]} -> {value}" for name, value in new.items() if value != old[name]]
    return ", ".join(changes) or "nothing"


def _unset(policy: Policy) -> dict[str, str]:
    """Return the words of the fields without a value."""
    return {one.name: one.unset for one in FIELDS if getattr(policy, one.name) is None}


def _moved_on(message: str) -> ApiError:
    return ApiError(409, f"{message}; read it again", param="revision", code="revision_conflict")
