"""Whether a worker may join groups: with its only model it may. Models come and go, so that changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bus.messages import InstanceCard
from worker.deploy.site import Resident, Site
from worker.model.layout import degrees
from worker.morph.manager import MorphManager
from worker.parallel.grouping import Grouping
from worker.parallel.morphs import GroupMorphs
from worker.service.engine_thread import EngineThread
from worker.service.load_morphs import grouping_for

OnRegrouped = Callable[[tuple[str, ...], str], None]
OnCards = Callable[[list[InstanceCard]], None]


class Regrouping:
    """`look` in the engine's thread, whenever a model came or has gone."""

    def __init__(
        self,
        site: Site,
        thread: EngineThread,
        morphs: MorphManager,
        *,
        on_regrouped: OnRegrouped,
        on_cards: OnCards,
    ) -> None:
        self._site, self._thread, self._morphs = site, thread, morphs
        self._on_regrouped, self._on_cards = on_regrouped, on_cards

    def look(self) -> None:
        only = self._only()
        before = self._thread.grouping
        if before and only and before.place.target is only.target:
            return
        if before:
            before.close()
        grouping = self._make(only) if only else None
        if before or grouping:
            self._use(grouping)
        residents = self._site.residents
        for name, resident in residents.items():
            card = _card_in(resident, grouping if resident is only else None, self._site.settings.max_tp)
            residents[name] = replace(resident, card=card)
        self._on_cards([resident.card for resident in residents.values()])

    def _only(self) -> Resident | None:
        """Its only model, all of which is here. A worker in a stage of several ranks joins no other group:
        two that wait for each other's sums crosswise would wait for ever."""
        site = self._site
        if site.stages and site.stages.has_ranks:
            return None
        residents = list(site.residents.values())
        return residents[0] if len(residents) == 1 and residents[0].card.pp == 1 else None

    def _make(self, only: Resident) -> Grouping | None:
        site = self._site
        return grouping_for(
            only.card.model, only.target, only.model, site.pool, site.settings, site.worker, site.transport
        )

    def _use(self, grouping: Grouping | None) -> None:
        if grouping:
            grouping.on_regrouped = self._on_regrouped
        self._thread.use_grouping(grouping)
        layers_per_step = self._site.settings.layers_per_step
        self._morphs.join_groups(GroupMorphs(grouping, layers_per_step=layers_per_step) if grouping else None)


def _card_in(resident: Resident, grouping: Grouping | None, max_tp: int) -> InstanceCard:
    possible = degrees(resident.model.config, max_tp) if grouping else [1]
    tokens = {tp: grouping.place.tokens_at(tp) for tp in possible} if grouping else {}
    return replace(resident.card, degrees=possible, tokens_at=tokens)
