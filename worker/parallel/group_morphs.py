"""The morphs of a group, as the morph manager of its leading worker runs them (`worker.morph.interfaces`)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

from bus.messages import Transform
from worker.morph.interfaces import Peers
from worker.morph.run import Clock
from worker.parallel.executor import TensorParallelExecutor
from worker.parallel.grouping import Grouping
from worker.parallel.transform import TransformRun


class GroupMorphs:
    """Transforms over the group of one worker."""

    def __init__(
        self, grouping: Grouping, *, layers_per_step: int = 1, clock: Clock = time.monotonic
    ) -> None:
        self._grouping, self._layers_per_step, self._clock = grouping, layers_per_step, clock

    @property
    def is_in_group(self) -> bool:
        return self._grouping.executor is not None

    @property
    def in_the_way(self) -> str:
        return self._grouping.busy_with

    @property
    def leader(self) -> str:
        executor = self._grouping.executor
        return executor.formation.members[0] if executor and executor.coordinator is None else ""

    def attach(self, why_not: Callable[[], str], let_part: Callable[[], None]) -> None:
        self._grouping.why_not, self._grouping.on_split_requested = why_not, let_part

    def transform(self, command: Transform, peers: Peers) -> TransformRun:
        return TransformRun(
            command, self._grouping, peers, layers_per_step=self._layers_per_step, clock=self._clock
        )

    def parting(self, epoch: int) -> tuple[Transform, Peers]:
        command = Transform(
            id=f"parting-{uuid.uuid4().hex[:8]}",
            epoch=epoch,
            instance=self._grouping.local.instance.id,
            workers=list(self._party.formation.members),
            epochs={},
            tp=1,
        )
        return command, self._grouping.peers

    @property
    def _party(self) -> TensorParallelExecutor:
        executor = self._grouping.executor
        assert executor is not None
        return executor
