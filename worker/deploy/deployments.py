"""Models that come and go, as the executor of morphs runs them (`worker.morph.deployments`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container
from functools import partial

from bus.messages import Deploy, Morph, Retire
from worker.deploy.arrival import ArrivalRun, CardOf
from worker.deploy.departure import DepartureRun
from worker.deploy.shares import Shares
from worker.deploy.site import Site
from worker.morph.groups import Peers
from worker.morph.run import Clock
from worker.morph.target import Target
from worker.pipeline.arrivals import FollowerArrival, LeaderArrival
from worker.pipeline.split import leader_of
from worker.shape.copier import Copier

# Of the time, while the engine is busy: on a CPU loading takes cores and memory from the steps. A swap, which
# is a matter of some layers, takes less; at its share a load would take minutes.
LOAD_SHARE = 0.25


# For requests to end before a stage elsewhere leaves; that worker does not wait longer than it may itself.
GOING_WAIT_S = 30.0

log = logging.getLogger(__name__)


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
        begin: Callable[[Callable[[int], Morph]], None],
    ) -> None:
        site = self.site
        site.add_target, site.drop_target = add, drop
        self._wake, self._is_busy = wake, is_busy

        def retire(instance: str, reason: str, wait_s: float) -> None:
            log.info("%s is retired: %s", instance, reason)
            name = f"lost-{instance}-{time.time_ns()}"
            begin(lambda epoch: Retire(id=name, epoch=epoch, instance=instance, wait_s=wait_s))

        site.on_lost = partial(retire, wait_s=0.0)
        site.on_going = partial(retire, wait_s=GOING_WAIT_S)

    def deploy(self, command: Deploy, peers: Peers) -> ArrivalRun:
        loader, card_of, clock = self._loader, self._card_of, self._clock
        if len(command.stages) < 2:
            return ArrivalRun(command, self.site, loader, card_of, clock=clock)
        if self.site.worker != leader_of(command):
            return FollowerArrival(command, self.site, loader, card_of, clock=clock)
        return LeaderArrival(command, self.site, loader, card_of, peers, clock=clock)

    def retire(self, command: Retire) -> DepartureRun:
        self.shares.forget(command.instance)
        return DepartureRun(command, self.site, clock=self._clock)

    def share(self, but: Container[str]) -> bool:
        return self.shares.move_some(but)

    def close(self) -> None:
        self._loader.close()
