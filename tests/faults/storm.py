"""A storm: several who each do one thing again and again, all at once, until it is over.

Everything that is random comes from one seed for each of them. What must hold meanwhile is checked meanwhile.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

Job = Callable[[random.Random], None]


@dataclass
class Storm:
    """Rages until it is left; then everybody's problems are raised, with what was `told`."""

    seed: int = field(default=1, kw_only=True)
    patience_s: float = field(default=100.0, kw_only=True)  # for those who wait for an answer in the end

    def jobs(self) -> list[Job]:
        """Do one job of each kind, again and again."""
        raise NotImplementedError

    def told(self) -> str:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._ending, self._problems = threading.Event(), list[BaseException]()
        self._threads = [
            threading.Thread(target=self._loop, args=(job, number), daemon=True)
            for number, job in enumerate(self.jobs())
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(self.patience_s)
            assert not thread.is_alive(), "somebody still waits for an answer"
        for problem in self._problems:
            raise AssertionError(f"{problem}\n{self.told()}") from problem

    def rage(self, seconds: float) -> None:
        """Returns early where something went wrong."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._problems:
            time.sleep(0.1)

    @property
    def is_ending(self) -> bool:
        return self._ending.is_set()

    def pause(self, seconds: float) -> None:
        """Shorter when it ends."""
        self._ending.wait(seconds)

    def _loop(self, once: Job, number: int) -> None:
        rng = random.Random(f"{self.seed} {once.__name__} {number}")
        try:
            while not self.is_ending:
                once(rng)
        except BaseException as problem:  # noqa: BLE001 raised by the test's own thread
            self._problems.append(problem)
