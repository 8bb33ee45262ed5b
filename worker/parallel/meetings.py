"""Communicators of groups that are or may be: made beside the steps, kept, thrown away with a member's death.

Making one takes tens of milliseconds and needs every member to come; a transformation that finds it made
saves that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from worker.parallel.communicator import Communicator, PeerLost, connect
from worker.parallel.wire import Peer

MAX_KEPT = 16  # of members that have died since, some of them

OnMet = Callable[[str, str], None]  # key, why not ("" : they met); in a thread of its own


def key_of(members: Iterable[str], peers: Mapping[str, Peer]) -> str:
    """The same members in the same order, and none of them another one since."""
    return " ".join(f"{name}.{peers[name].epoch}" for name in members)


class Meetings:
    """By key; every member uses the same one for the same group. Calls are the engine's thread's."""

    def __init__(self, host: str, device: str, timeout_s: float, on_met: OnMet) -> None:
        self._host, self._device, self._timeout_s, self._on_met = host, device, timeout_s, on_met
        self._made: dict[str, Communicator] = {}
        self._lock = threading.Lock()
        self._store: TCPStore | None = None

    @property
    def store(self) -> str:
        """Where groups that this worker leads meet (host:port); begins to listen when first asked for."""
        if self._store is None:
            self._store = TCPStore(
                self._host, 0, is_master=True, wait_for_workers=False, timeout=self._timeout
            )
        return f"{self._host}:{self._store.port}"

    def begin(self, key: str, store: str, rank: int, size: int) -> None:
        """Come to the meeting, in another thread; `on_met` tells."""
        threading.Thread(
            target=self._meet, args=(key, store, rank, size), name="group-meeting", daemon=True
        ).start()

    def take(self, key: str) -> Communicator:
        """Its members have met. KeyError where they have not."""
        with self._lock:
            return self._made.pop(key)

    def keep(self, key: str, communicator: Communicator) -> None:
        """It is whole, and may be of use again; the one that was kept the longest is not any more."""
        with self._lock:
            stale = [self._made.pop(key)] if key in self._made else []
            self._made[key] = communicator
            while len(self._made) > MAX_KEPT:
                stale.append(self._made.pop(next(iter(self._made))))
        for each in stale:
            each.close()

    def drop(self, key: str) -> None:
        """Nobody waits for it any more, whether its members have met or not."""
        with self._lock:
            made = self._made.pop(key, None)
        if made:
            made.close()

    def has(self, key: str) -> bool:
        with self._lock:
            return key in self._made

    def close(self) -> None:
        with self._lock:
            made, self._made = list(self._made.values()), {}
        for communicator in made:
            communicator.close()

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout_s)

    def _meet(self, key: str, store: str, rank: int, size: int) -> None:
        try:
            group = connect(
                PrefixStore(key, self._reach(store)),
                rank,
                size,
                timeout_s=self._timeout_s,
                host=self._host,
                device=self._device,
            )
        except (PeerLost, RuntimeError, ValueError) as error:
            self._on_met(key, str(error).splitlines()[0])
            return
        with self._lock:
            self._made[key] = group
        self._on_met(key, "")

    def _reach(self, store: str) -> Store:
        host, _, port = store.rpartition(":")
        return TCPStore(host, int(port), is_master=False, timeout=self._timeout)
