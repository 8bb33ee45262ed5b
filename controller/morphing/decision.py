"""A change of the degree of tensor parallelism, as it was decided."""

from __future__ import annotations

from dataclasses import dataclass

from bus.messages import Number
from bus.morphs import Cause, Transform
from controller.morphing.track import Lever

WAIT_S = 1.0  # wait for pages before `deferred`: a running step may free some


@dataclass(frozen=True, slots=True, kw_only=True)
class MorphDecision:
    """One transform, its reason and the numbers behind it. `worker` leads `instance`."""

    instance: str
    worker: str
    epoch: int
    lever: Lever
    reason: str
    cause: Cause  # the reason in a word
    numbers: dict[str, Number]
    tp: int
    epochs: dict[str, int]  # epochs by worker, in shard order at the higher degree
    instances: tuple[str, ...]  # all that it changes

    def command(self, morph_id: str) -> Transform:
        """Return the command for the worker."""
        return Transform(
            id=morph_id,
            epoch=self.epoch,
            instance=self.instance,
            workers=list(self.epochs),
            epochs=self.epochs,
            tp=self.tp,
            wait_s=WAIT_S,
        )
