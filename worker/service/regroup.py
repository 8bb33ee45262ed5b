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
from worker.service.load_morphs import grouping_for

OnRegrouped = Callable[[tuple[str, ...], str], None]
OnCards = Callable[[list[InstanceCard]], None]


class Regrouping:
    """`look` in the engine's thread, or before that starts, whenever a model came or has gone."""

    def __init__(self, site: Site, morphs: MorphManager) -> None:
        self._site, self._morphs = site, morphs
        self.grouping: Grouping | None = None  # None: this worker joins no group
        self.use: Callable[[Grouping | None], None] = lambda grouping: None
        self.on_regrouped: OnRegrouped = lambda members, why: None
        self.on_cards: OnCards = lambda cards: None

    def look(self) -> None:
        """Let the worker join groups if it has one model alone, and none otherwise."""
        only = self._only()
        before = self.grouping
        if before and only and before.place.target is only.target:
            return
        if before:
            before.close()
        self.grouping = grouping = self._make(only) if only else None
        if before or grouping:
            self._use(grouping)
        residents = self._site.residents
        for name, resident in residents.items():
            card = _card_in(resident, grouping if resident is only else None, self._site.settings.max_tp)
            residents[name] = replace(resident, card=card)
        self.on_cards([resident.card for resident in residents.values()])

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
            grouping.on_regrouped = lambda members, why: self.on_regrouped(members, why)
        self.use(grouping)
        layers_per_step = self._site.settings.layers_per_step
        self._morphs.join_groups(GroupMorphs(grouping, layers_per_step=layers_per_step) if grouping else None)


def _card_in(resident: Resident, grouping: Grouping | None, max_tp: int) -> InstanceCard:
    possible = degrees(resident.model.config, max_tp) if grouping else [1]
    tokens = {tp: grouping.place.tokens_at(tp) for tp in possible} if grouping else {}
    return replace(resident.card, degrees=possible, tokens_at=tokens)
