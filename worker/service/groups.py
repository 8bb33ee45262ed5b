"""The groups that the worker may join with its only model; models come and go while it runs."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from bus.client import Bus, BusUnavailable
from bus.groups import natural
from bus.messages import InstanceCard, WorkerCard
from bus.morphs import Deploy, Morph, Retire, Transform
from worker.deploy.model_host import HostedModel, ModelHost, max_blocks
from worker.distributed.messages import Peer
from worker.model.layout import degrees
from worker.morph.manager import MorphManager
from worker.morph.reshard import make_resharder
from worker.morph.run import Peers
from worker.parallel.grouping import Grouping
from worker.parallel.local_instance import LocalInstance
from worker.parallel.transform import TransformRun
from worker.service.engine_thread import EngineThread
from worker.shape.copier import Copier

# Bytes of one stage of an exchange: as many as keep the cost of its calls small.
CPU_STAGE_BYTES, CUDA_STAGE_BYTES = 1 << 23, 1 << 25


def grouping_of(host: ModelHost, only: HostedModel) -> Grouping | None:
    """Return how the worker's only model joins groups; None if it cannot."""
    assert host.transport
    if len(degrees(only.model.config, host.settings.max_tp)) < 2:
        return None
    device = host.pool.backend.device
    local = LocalInstance(
        name=only.card.model,
        target=only.target,
        model=only.model,
        weights=make_resharder(only.model, host.pool, only.target.variants),
        copier=Copier(lambda: grouping.post(lambda: None)),
        stage_bytes=CPU_STAGE_BYTES if device.type == "cpu" else CUDA_STAGE_BYTES,
    )
    return (grouping := Grouping(host.worker, local, host.transport, device=str(device)))


class GroupMembership:
    """The groups of one worker.

    Call `update` in the engine's thread when a model came or has gone, or its KV cache was converted.
    """

    def __init__(self, host: ModelHost) -> None:
        self._host = host
        self.grouping: Grouping | None = None  # None: this worker joins no group
        self.use: Callable[[Grouping | None], None] = lambda grouping: None
        self.on_regrouped: Callable[[tuple[str, ...], str], None] = lambda members, why: None
        self.on_cards: Callable[[list[InstanceCard]], None] = lambda cards: None

    def update(self) -> None:
        """Let the worker join groups if others reach it and it has one model alone, and none otherwise.

        Then make the cards anew, which say what it could hold.
        """
        if self._host.transport:
            self._regroup()
        models, grouping = self._host.models, self.grouping
        for name, one in models.items():
            possible = degrees(one.model.config, self._host.settings.max_tp) if grouping else [1]
            tokens = {tp: grouping.local.tokens_at(tp) for tp in possible} if grouping else {}
            most = max_blocks(one.target, max(possible))
            card = replace(one.card, degrees=possible, tokens_at=tokens, max_blocks=most)
            models[name] = replace(one, card=card)
        self.on_cards(self._host.cards)

    def _regroup(self) -> None:
        only = self._only()
        before = self.grouping
        if before and only and before.local.target is only.target:
            return
        if before:
            before.close()
        self.grouping = grouping = grouping_of(self._host, only) if only else None
        if grouping:
            grouping.on_regrouped = lambda members, why: self.on_regrouped(members, why)
        if before or grouping:
            self.use(grouping)
            use_grouping(self._host.morphs, grouping, layers_per_step=self._host.settings.layers_per_step)

    def _only(self) -> HostedModel | None:
        """Return the only model, all of whose layers are here, or None."""
        host = self._host
        if host.stages and host.stages.has_ranks:  # two groups would wait for each other crosswise
            return None
        models = list(host.models.values())
        return models[0] if len(models) == 1 and not models[0].card.is_divided else None


FIRST_LOOK_S, LOOK_S = 2.0, 15.0  # others may still load


async def meet_neighbours(bus: Bus, own: Callable[[], WorkerCard], thread: EngineThread) -> None:
    """Prepare the communicators of groups that this worker, of the card `own()`, would lead."""
    pause_s = FIRST_LOOK_S
    while True:
        await asyncio.sleep(pause_s)
        card = own()
        if not card.link or len(card.instances) != 1:
            continue
        pause_s = LOOK_S
        with suppress(BusUnavailable):
            live = [member.card for member in await bus.members() if member.card and member.lease_epoch]
            cards = {
                each.id: each
                for each in live
                if each.host == card.host and each.link and each.state == "serving"
            }
            for members in led_groups(card, cards.values()):
                thread.prepare_communicator(members, {name: as_peer(cards[name]) for name in members})


def as_peer(card: WorkerCard) -> Peer:
    return Peer(card.id, card.epoch, card.link, card.link_key)


def led_groups(own: WorkerCard, cards: Iterable[WorkerCard]) -> Iterator[tuple[str, ...]]:
    """Yield the groups that `own` would lead: the first two of its model's workers, the next two ..."""
    [instance] = own.instances
    alike = [
        card.id
        for card in cards
        if [(each.model, each.degrees) for each in card.instances] == [(instance.model, instance.degrees)]
    ]
    names = sorted(alike, key=natural)
    for degree in instance.degrees:
        first = names.index(own.id) if own.id in names else -1
        if degree > 1 and first % degree == 0 and first + degree <= len(names):
            yield tuple(names[first : first + degree])


def use_grouping(morphs: MorphManager, grouping: Grouping | None, *, layers_per_step: int = 1) -> None:
    """Let `morphs` run transforms over `grouping`; None: this worker joins no group from here on."""
    if grouping is None:
        morphs.starters.pop(Transform, None)
        morphs.obstacle = lambda kind: ""
        return

    def obstacle(kind: type[Morph]) -> str:
        executor = grouping.executor
        if grouping.busy_with or not executor:
            return grouping.busy_with
        if not executor.coordinator:
            return f"it is in a group that {executor.formation.members[0]} leads; order it there"
        return "it is in a group; let the group part first" if kind in (Deploy, Retire) else ""

    def transform(command: Transform, peers: Peers) -> TransformRun:
        return TransformRun(command, grouping, peers, layers_per_step=layers_per_step)

    def split() -> None:
        assert grouping.executor
        if not morphs.num_running:
            command = Transform(
                id=f"split-{uuid.uuid4().hex[:8]}",
                epoch=morphs.epoch,
                instance=grouping.local.instance.id,
                workers=list(grouping.executor.formation.members),
                epochs={},
                tp=1,
            )
            morphs.begin(command, grouping.peers, reason="a member of the group is about to leave")

    morphs.starters[Transform] = transform
    morphs.obstacle = obstacle
    grouping.why_not = lambda: "a morph is running there" if morphs.num_running else ""
    grouping.on_split_requested = split
