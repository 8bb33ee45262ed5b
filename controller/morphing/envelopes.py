"""What each instance may do by itself, and when its worker must hear it again. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import replace

from bus.client import LiveWorker
from bus.messages import InstanceCard
from bus.policy import Envelope, Policy
from bus.precisions import PRECISIONS, Precision
from controller.morphing.resting import Rest, Rests, rest_of

RENEW_SHARE = 4  # an envelope is sent again after this part of the time that it is valid for

Granted = Mapping[str, tuple[Envelope, float]]  # by instance: the last envelope, and when it was sent
ToWorker = tuple[str, Envelope]


def envelopes(workers: Iterable[LiveWorker], policy: Policy, rests: Rests) -> dict[str, ToWorker]:
    """Return by instance its leading worker and what its reflex may do; without ids.

    Pipelines do not swap and get none, nor do deployments whose shape at rest is not known.
    """
    found: dict[str, ToWorker] = {}
    for card in (live.card for live in workers if live.card.state == "serving"):
        for instance in card.instances:
            rest = rest_of(instance, rests)
            leads = instance.workers[:1] in ([], [card.id]) and instance.pp == 1
            if rest and leads:
                found[instance.id] = card.id, _envelope(card.epoch, instance, policy, rest)
    return found


def due(granted: Granted, wanted: Mapping[str, ToWorker], at_s: float) -> list[ToWorker]:
    """Return the envelopes to send now, each with its worker: what has changed, and what is due again."""
    sending = []
    for instance, (worker, envelope) in wanted.items():
        before, sent_s = granted.get(instance, (None, 0.0))
        is_same = before is not None and replace(before, id="") == envelope
        if not is_same or at_s >= sent_s + envelope.valid_s / RENEW_SHARE:
            sending.append((worker, replace(envelope, id=f"envelope-{uuid.uuid4().hex[:12]}")))
    return sending


def _envelope(epoch: int, card: InstanceCard, policy: Policy, rest: Rest) -> Envelope:
    in_force = policy.in_force() or policy
    return Envelope(
        id="",
        epoch=epoch,
        instance=card.id,
        policy=in_force,
        resting=rest.precision,
        precisions=_allowed(card, rest, policy.precision),
    )


def _allowed(card: InstanceCard, rest: Rest, wished: Precision) -> list[Precision]:
    """Return the precisions below rest that layers may have: down to the wished and the coarsest one."""
    last = min(PRECISIONS.index(wished), PRECISIONS.index(rest.coarsest))
    below = PRECISIONS[PRECISIONS.index(rest.precision) + 1 : last + 1]
    return [precision for precision in below if precision in card.variants]
