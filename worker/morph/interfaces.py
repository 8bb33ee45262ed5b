"""What the morph manager needs of groups and of models that come and go.

`worker.parallel` and `worker.deploy` implement these; they stand above this package.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any, Protocol

from bus.messages import Deploy, Morph, Retire, Transform
from worker.morph.run import Run
from worker.morph.target import Target

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


class Deployments(Protocol):
    """Loads and unloads models, in the engine's thread, between steps."""

    def attach(
        self,
        add: Callable[[Target], None],
        drop: Callable[[str], None],
        wake: Callable[[], None],
        is_busy: Callable[[], bool],
        begin: Callable[[Callable[[int], Morph]], None],
    ) -> None:
        """Connect to the manager.

        add, drop: called for each instance that comes or goes. wake: something was loaded, in another
        thread. is_busy: returns whether the engine has steps to run. begin: begins a morph of the worker's
        own, for its epoch.
        """

    def deploy(self, command: Deploy, peers: Peers) -> Run:
        """Begin to load a model. peers: how to reach the workers of each stage. Raises NotApplied."""

    def retire(self, command: Retire) -> Run: ...

    def share(self, but: Container[str]) -> bool:
        """Move some KV pages to an instance that misses them; return False if none had to move.

        but: instances whose KV is being resized by order.
        """

    def close(self) -> None:
        """Stop; no step may follow."""
