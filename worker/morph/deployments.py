"""What morphs ask of models that come and go; `worker.deploy` has it."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Protocol

from bus.messages import Deploy, Morph, Retire
from worker.morph.groups import Peers
from worker.morph.run import Run
from worker.morph.target import Target


class Deployments(Protocol):
    """Verbs of the engine's thread, between steps."""

    def attach(
        self,
        add: Callable[[Target], None],
        drop: Callable[[str], None],
        wake: Callable[[], None],
        is_busy: Callable[[], bool],
        begin: Callable[[Callable[[int], Morph]], None],
    ) -> None:
        """add, drop: for each instance that comes or goes. wake: something was loaded, in another thread.
        is_busy: whether the engine has steps to run. begin: a morph of the worker's own, for its epoch."""

    def deploy(self, command: Deploy, peers: Peers) -> Run:
        """peers: of several stages, how to reach each. Raises NotApplied."""

    def retire(self, command: Retire) -> Run: ...

    def share(self, but: Container[str]) -> bool:
        """A unit of moving KV pages to an instance that misses them; False: none had to. but: instances whose
        KV is being resized by order."""

    def close(self) -> None:
        """No step may follow."""
