"""What the morph manager needs of a worker that may be in a group; `worker.parallel` implements it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from bus.messages import Transform
from worker.morph.run import Run

Peers = Mapping[str, Any]  # by worker, what a group must know to reach it


class Groups(Protocol):
    """The group of this worker, in the engine's thread, between steps."""

    @property
    def is_in_group(self) -> bool:
        """True if this worker runs its steps with others."""

    @property
    def in_the_way(self) -> str:
        """Why no morph may begin here now; empty: it may."""

    @property
    def leader(self) -> str:
        """The worker that leads this worker's group; empty if there is no group or this worker leads it."""

    def attach(self, why_not: Callable[[], str], let_part: Callable[[], None]) -> None:
        """Connect to the manager.

        why_not: asked before this worker joins others. let_part: called when a member of the group that
        this worker leads is about to leave.
        """

    def transform(self, command: Transform, peers: Peers) -> Run: ...

    def parting(self, epoch: int) -> tuple[Transform, Peers]:
        """Return the order to split the group that this worker leads."""
