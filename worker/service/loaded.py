"""What loading hands to the service; plain, so that tests serve a toy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bus.messages import InstanceCard, PageCounts
from bus.settings import WorkerSettings

if TYPE_CHECKING:  # the engine brings torch; who only wants to catch CannotServe need not wait for it
    from worker.deploy.site import Site
    from worker.distributed.transport import Transport
    from worker.engine.engine import Engine
    from worker.morph.manager import MorphManager
    from worker.parallel.grouping import Grouping


class CannotServe(Exception):
    """These settings or this model folder will never work; one line says what to change."""


@dataclass(frozen=True, slots=True)
class Loaded:
    engine: Engine
    cards: list[InstanceCard]
    pages: Callable[[], PageCounts]
    device: str
    page_bytes: int
    morphs: MorphManager
    grouping: Grouping | None = None  # None: it joins no group
    site: Site | None = None  # None: no model comes or goes
    transport: Transport | None = None  # None: no other worker reaches it


Progress = Callable[[str], None]  # called in the loading thread, as often as the loader likes
Loader = Callable[[WorkerSettings, str, Progress], Loaded]  # settings, worker id; raises CannotServe
