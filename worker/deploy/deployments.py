"""Models that come and go, as the manager of morphs runs them, and the KV pages that they share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container
from functools import partial

from bus.messages import Deploy, Morph, Retire
from worker.deploy.kv_sharing import Move, next_move
from worker.deploy.load import LoadRun
from worker.deploy.model_host import PAGES_AT_ONCE, ModelHost, holder_of
from worker.deploy.stage_load import PipelineLoadRun, StageLoadRun
from worker.deploy.unload import UnloadRun
from worker.morph.interfaces import Peers
from worker.morph.run import Clock
from worker.morph.target import Target
from worker.pipeline.split import leader_of
from worker.shape.copier import Copier

# A model that lacked blocks this recently keeps its fair share: pages would otherwise move with every gap
# between requests.
KEEN_S = 1.0


class KVSharing:
    """Moves KV pages between models. Owned by the engine's thread."""

    def __init__(self, host: ModelHost, clock: Clock = time.monotonic) -> None:
        self._host, self._clock = host, clock
        self._wanted_at: dict[str, float] = {}
        self.num_moves = 0

    def move_some(self, but: Container[str]) -> bool:
        """Move some pages if a model misses blocks and others can give.

        Returns whether it did. but: instances whose KV is being resized by order.
        """
        models = self._host.models
        if len(models) < 2:
            return False
        now = self._clock()
        for name, one in models.items():
            if one.target.instance.scheduler.num_blocks_wanted:
                self._wanted_at[name] = now
        if now not in self._wanted_at.values():
            return False
        holders = [
            holder_of(one, is_keen=now - self._wanted_at.get(name, -KEEN_S) < KEEN_S)
            for name, one in models.items()
            if name not in but
        ]
        move = next_move(holders, self._host.num_spare_pages)
        if move is None:
            return False
        self._do(move)
        return True

    def forget(self, instance: str) -> None:
        self._wanted_at.pop(instance, None)

    def _do(self, move: Move) -> None:
        """Move a few pages of each layer.

        Pages that do not make one for each layer of the borrower are free until the next move.
        """
        models = self._host.models
        if move.lender:
            lender = models[move.lender].target.resizer
            lender.lend(min(move.pages // lender.num_layers, PAGES_AT_ONCE))
        borrower = models[move.borrower].target.resizer
        pages = min(move.pages // borrower.num_layers, borrower.growable(), PAGES_AT_ONCE)
        if pages > 0:
            borrower.borrow(pages)
            self.num_moves += 1


# Of the time, while the engine is busy: on a CPU loading takes cores and memory from the steps. A swap, which
# is a matter of some layers, takes less; at its share a load would take minutes.
LOAD_SHARE = 0.25


# For requests to end before a stage elsewhere leaves; that worker does not wait longer than it may itself.
GOING_WAIT_S = 30.0

log = logging.getLogger(__name__)


class ModelDeployments:
    """Loads and unloads over one host."""

    def __init__(self, host: ModelHost, *, clock: Clock = time.monotonic) -> None:
        self.host, self._clock = host, clock
        self._wake: Callable[[], None] = lambda: None
        self._is_busy: Callable[[], bool] = lambda: False
        self._copier = Copier(lambda: self._wake(), lambda: LOAD_SHARE if self._is_busy() else 1.0)
        self.shares = KVSharing(host, clock)

    def attach(
        self,
        add: Callable[[Target], None],
        drop: Callable[[str], None],
        wake: Callable[[], None],
        is_busy: Callable[[], bool],
        begin: Callable[[Callable[[int], Morph]], None],
    ) -> None:
        host = self.host
        host.add_target, host.drop_target = add, drop
        self._wake, self._is_busy = wake, is_busy

        def retire(instance: str, reason: str, wait_s: float) -> None:
            log.info("%s is retired: %s", instance, reason)
            name = f"lost-{instance}-{time.time_ns()}"
            begin(lambda epoch: Retire(id=name, epoch=epoch, instance=instance, wait_s=wait_s))

        host.on_lost = partial(retire, wait_s=0.0)
        host.on_going = partial(retire, wait_s=GOING_WAIT_S)

    def deploy(self, command: Deploy, peers: Peers) -> LoadRun:
        copier, clock = self._copier, self._clock
        if len(command.stages) < 2:
            return LoadRun(command, self.host, copier, clock=clock)
        if self.host.worker != leader_of(command):
            return StageLoadRun(command, self.host, copier, clock=clock)
        return PipelineLoadRun(command, self.host, copier, peers, clock=clock)

    def retire(self, command: Retire) -> UnloadRun:
        self.shares.forget(command.instance)
        return UnloadRun(command, self.host, clock=self._clock)

    def share(self, but: Container[str]) -> bool:
        return self.shares.move_some(but)

    def close(self) -> None:
        self._copier.close()
