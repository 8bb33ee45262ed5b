"""Workers of this host that may become a group some day: their communicators are made before that."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from bus.client import Bus, BusUnavailable
from bus.messages import WorkerCard
from worker.distributed.messages import Peer
from worker.service.engine_thread import EngineThread

FIRST_LOOK_S, LOOK_S = 2.0, 15.0  # others may still load


async def meet_neighbours(bus: Bus, own: Callable[[], WorkerCard], thread: EngineThread) -> None:
    """For ever. own: its card of now; while it joins no group there is nothing to do here."""
    pause_s = FIRST_LOOK_S
    while True:
        await asyncio.sleep(pause_s)
        pause_s = LOOK_S
        card = own()
        if not card.link or len(card.instances) != 1:
            continue
        with suppress(BusUnavailable):
            cards = await peers_of(bus, card)
            for members in led_groups(card, cards.values()):
                thread.prepare_communicator(members, {name: as_peer(cards[name]) for name in members})


async def peers_of(bus: Bus, own: WorkerCard) -> dict[str, WorkerCard]:
    """Cards of the live workers of this host that serve and join groups, itself among them."""
    cards = [member.card for member in await bus.members() if member.card and member.lease_epoch]
    there = [card for card in cards if card.host == own.host and card.link and card.state == "serving"]
    return {card.id: card for card in there}


def as_peer(card: WorkerCard) -> Peer:
    return Peer(card.id, card.epoch, card.link, card.link_key)


def led_groups(own: WorkerCard, cards: Iterable[WorkerCard]) -> Iterator[tuple[str, ...]]:
    """Aligned ones: of the host's workers of a model, in the order of their names, the first two, the next
    two, the first four, ... of which this one comes first."""
    [instance] = own.instances
    alike = [
        card.id
        for card in cards
        if [(each.model, each.degrees) for each in card.instances] == [(instance.model, instance.degrees)]
    ]
    names = sorted(alike, key=_by_number)
    for degree in instance.degrees:
        first = names.index(own.id) if own.id in names else -1
        if degree > 1 and first % degree == 0 and first + degree <= len(names):
            yield tuple(names[first : first + degree])


def _by_number(name: str) -> list[tuple[int, str]]:
    """w2 before w10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name) if part]
