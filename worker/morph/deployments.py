"""What the morph manager needs of models that come and go; `worker.deploy` implements it."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Protocol

from bus.messages import Deploy, Morph, Retire
from worker.morph.groups import Peers
from worker.morph.run import Run
from worker.morph.target import Target


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
