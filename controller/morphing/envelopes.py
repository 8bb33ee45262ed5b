"""The envelope of each instance, and when its worker must get it again. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

from bus.client import LiveWorker
from bus.messages import Demand, InstanceCard, WorkerCard
from bus.policy import NEWS_S, Envelope, Policy
from bus.precisions import LOWEST, PRECISIONS, Precision, is_below
from bus.schema import FIRST
from controller.morphing.resting import Rest, Rests, rest_of

RENEW_SHARE = 4  # an envelope is sent again after this part of the time that it is valid for

FLOOR_S = 2.0  # a floor that no gateway has repeated for so long is over; they report twice a second

Granted = Mapping[str, tuple[Envelope, float]]  # the last envelope and its time, by instance
ToWorker = tuple[str, Envelope]
Floors = Mapping[tuple[str, str], tuple[Precision, float]]  # waiting floor and time, by gateway and model


def hear_floor(floors: Floors, demand: Demand, at_s: float) -> Floors:
    """Note the precision that requests wait for at a gateway."""
    key = demand.gateway, demand.model
    left = {name: one for name, one in floors.items() if at_s < one[1] + FLOOR_S and name != key}
    return left | {key: (demand.floor, at_s)} if demand.floor else left


def raised(
    floors: Floors,
    workers: Iterable[LiveWorker],
    at_s: float,
    loads: Mapping[str, float],
    before: Container[str] = (),
) -> dict[str, Precision]:
    """Return by instance the floor that its layers should go back to: one instance of each model.

    loads: by instance, the requests that run and wait; the least loaded is raised. before: the instances that
    are raised now and stay so.
    """
    found: dict[str, Precision] = {}
    for (_, model), (floor, heard_s) in floors.items():
        names = (
            one.id
            for live in workers
            for one in live.card.instances
            if one.model == model and _leads(live.card, one)
        )
        name = min(names, key=lambda one: (one not in before, loads.get(one, 0.0), one), default="")
        if name and at_s < heard_s + FLOOR_S:
            found[name] = min(floor, found.get(name, LOWEST), key=PRECISIONS.index)
    return found


def envelopes(
    workers: Iterable[LiveWorker],
    policy: Policy,
    rests: Rests,
    floors: Mapping[str, Precision] | None = None,
    expected: Mapping[str, int] | None = None,
    moved: Mapping[str, int] | None = None,
    held: Container[str] = (),
) -> dict[str, ToWorker]:
    """Return by instance its leading worker and what its reflex may do; without ids.

    floors: by instance, the precision that a request waits for. expected: the KV blocks by forecast. moved:
    those of prompts that are being moved elsewhere. held: instances that keep their layers, since they are to
    become one group.
    The leader of a group or a pipeline gets it. Deployments whose shape at rest is not known get none, and
    workers of release 0.1, which know no envelopes.
    """
    found: dict[str, ToWorker] = {}
    for card in (
        live.card for live in workers if live.card.state == "serving" and live.card.reads != (FIRST,)
    ):
        for instance in card.instances:
            rest = rest_of(instance, rests)
            if rest and _leads(card, instance):
                envelope = _envelope(card.epoch, instance, policy, rest)
                if instance.id in held:
                    envelope = replace(envelope, policy=replace(envelope.policy, mode="manual"))
                found[instance.id] = (
                    card.id,
                    replace(
                        envelope,
                        floor=(floors or {}).get(instance.id, ""),
                        expected_blocks=(expected or {}).get(instance.id, 0),
                        moved_blocks=(moved or {}).get(instance.id, 0),
                    ),
                )
    return found


def due(granted: Granted, wanted: Mapping[str, ToWorker], at_s: float) -> list[ToWorker]:
    """Return the envelopes to send now, each with its worker: what has changed, and what is due again."""
    sending = []
    for instance, (worker, envelope) in wanted.items():
        before, sent_s = granted.get(instance, (None, 0.0))
        is_same = before is not None and replace(before, id="") == envelope
        valid_s = NEWS_S if envelope.floor or envelope.expected_blocks else envelope.valid_s
        if not is_same or at_s >= sent_s + valid_s / RENEW_SHARE:
            sending.append((worker, replace(envelope, id=f"envelope-{uuid.uuid4().hex[:12]}")))
    return sending


def _leads(card: WorkerCard, instance: InstanceCard) -> bool:
    """Return True if this worker's reflex acts for the instance."""
    return instance.workers[:1] in ([], [card.id])


def _envelope(epoch: int, card: InstanceCard, policy: Policy, rest: Rest) -> Envelope:
    in_force = policy.in_force() or policy
    if rest.loss_left is not None:
        in_force = replace(in_force, loss_budget=min(in_force.most_loss, rest.loss_left))
    return Envelope(
        id="",
        epoch=epoch,
        instance=card.id,
        policy=in_force,
        resting=rest.precision,
        precisions=_allowed(card, rest, policy.precision),
        kv_precisions=["int8"] if card.kv_loss is not None and not is_below("int8", rest.coarsest) else [],
        slowdowns=dict(rest.slowdowns),
    )


def _allowed(card: InstanceCard, rest: Rest, wished: Precision) -> list[Precision]:
    """Return the precisions below rest that layers may have: down to the wished and the coarsest one."""
    last = min(PRECISIONS.index(wished), PRECISIONS.index(rest.coarsest))
    below = PRECISIONS[PRECISIONS.index(rest.precision) + 1 : last + 1]
    return [precision for precision in below if precision in card.variants]
