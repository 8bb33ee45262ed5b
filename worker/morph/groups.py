"""What morphs ask of a worker that may be in a group with others; `worker.parallel` has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from bus.messages import Transform
from worker.morph.run import Run

Peers = Mapping[str, Any]  # by worker, what a group must know to reach it


class Groups(Protocol):
    """Verbs of the engine's thread, between steps."""

    @property
    def is_in_group(self) -> bool:
        """Return whether this worker runs its steps with others."""

    @property
    def in_the_way(self) -> str:
        """Why no morph may begin here now; empty: it may."""

    @property
    def leader(self) -> str:
        """Of the group that this worker is in and another one leads; empty: it has its own say."""

    def attach(self, why_not: Callable[[], str], let_part: Callable[[], None]) -> None:
        """why_not: asked before this worker joins others. let_part: a member of the group that this worker
        leads is about to leave."""

    def transform(self, command: Transform, peers: Peers) -> Run: ...

    def parting(self, epoch: int) -> tuple[Transform, Peers]:
        """The order to part, of the group that this worker leads."""
