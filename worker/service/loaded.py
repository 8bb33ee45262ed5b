"""What loading hands to the service; plain, so that tests serve a toy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bus.messages import InstanceCard, PageCounts
from bus.settings import WorkerSettings

if TYPE_CHECKING:  # the engine brings torch; who only wants to catch CannotServe need not wait for it
    from worker.deploy.site import Site
    from worker.distributed.transport import Transport
    from worker.engine.engine import Engine
    from worker.morph.manager import MorphManager
    from worker.parallel.grouping import Grouping
    from worker.service.regroup import Regrouping


class CannotServe(Exception):
    """These settings or this model folder will never work; one line says what to change."""


@dataclass(frozen=True, slots=True)
class Loaded:
    engine: Engine
    pages: Callable[[], PageCounts]
    device: str
    page_bytes: int
    morphs: MorphManager
    site: Site | None = None  # None: no model comes or goes
    regrouping: Regrouping | None = None
    own_cards: list[InstanceCard] = field(default_factory=list)  # of a toy without a site

    @property
    def cards(self) -> list[InstanceCard]:
        return [one.card for one in self.site.residents.values()] if self.site else self.own_cards

    @property
    def grouping(self) -> Grouping | None:
        """How the worker joins groups; None if it joins none."""
        return self.regrouping.grouping if self.regrouping else None

    @property
    def transport(self) -> Transport | None:
        """Where other workers reach this one; None if they do not."""
        return self.site.transport if self.site else None


Progress = Callable[[str], None]  # called in the loading thread, as often as the loader likes
Loader = Callable[[WorkerSettings, str, Progress], Loaded]  # settings, worker id; raises CannotServe
