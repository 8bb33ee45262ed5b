"""From the engine's thread to the event loop: which models come and go."""

from __future__ import annotations

import asyncio

from bus.messages import InstanceCard
from worker.deploy.site import Hooks
from worker.service.residents import Residents


class SiteHooks(Hooks):
    def __init__(self, loop: asyncio.AbstractEventLoop, residents: Residents) -> None:
        self._post, self._residents = loop.call_soon_threadsafe, residents

    def coming(self, model: str) -> None:
        self._post(self._residents.coming, model)

    def came(self, card: InstanceCard) -> None:
        self._post(self._residents.came, card)

    def leaves(self, instance: str) -> None:
        self._post(self._residents.leaves, instance)

    def hurry(self, instance: str) -> None:
        self._post(self._residents.hurry, instance)

    def stays(self, instance: str) -> None:
        self._post(self._residents.stays, instance)

    def gone(self, instance: str) -> None:
        self._post(self._residents.gone, instance)
