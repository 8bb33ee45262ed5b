"""Models that come and go, as the executor of morphs runs them (`worker.morph.deployments`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Container

from bus.messages import Deploy, Retire
from worker.deploy.arrival import ArrivalRun, CardOf
from worker.deploy.departure import DepartureRun
from worker.deploy.shares import Shares
from worker.deploy.site import Site
from worker.morph.copier import Copier
from worker.morph.run import Clock
from worker.morph.target import Target

# Of the time, while the engine is busy: on a CPU loading takes cores and memory from the steps. A swap, which
# is a matter of some layers, takes less; at its share a load would take minutes.
LOAD_SHARE = 0.25


class SiteDeployments:
    """Over one site. card_of: what is shown of a model that came."""

    def __init__(self, site: Site, card_of: CardOf, *, clock: Clock = time.monotonic) -> None:
        self.site, self._card_of, self._clock = site, card_of, clock
        self._wake: Callable[[], None] = lambda: None
        self._is_busy: Callable[[], bool] = lambda: False
        self._loader = Copier(lambda: self._wake(), lambda: LOAD_SHARE if self._is_busy() else 1.0)
        self.shares = Shares(site, clock)

    def attach(
        self,
        add: Callable[[Target], None],
        drop: Callable[[str], None],
        wake: Callable[[], None],
        is_busy: Callable[[], bool],
    ) -> None:
        self.site.add_target, self.site.drop_target = add, drop
        self._wake, self._is_busy = wake, is_busy

    def deploy(self, command: Deploy) -> ArrivalRun:
        return ArrivalRun(command, self.site, self._loader, self._card_of, clock=self._clock)

    def retire(self, command: Retire) -> DepartureRun:
        self.shares.forget(command.instance)
        return DepartureRun(command, self.site, clock=self._clock)

    def share(self, but: Container[str]) -> bool:
        return self.shares.move_some(but)

    def close(self) -> None:
        self._loader.close()
