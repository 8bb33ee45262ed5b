"""Communicators of groups that are or may be: made beside the steps, kept, thrown away with a member's death.

Making one takes tens of milliseconds and needs every member to come; a transformation that finds it made
saves that.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from worker.distributed.communicator import Communicator, PeerLost, connect
from worker.distributed.messages import Peer

MAX_KEPT = 16  # of members that have died since, some of them

OnMet = Callable[[str, str], None]  # meeting, why not ("" : they met); in a thread of its own


def key_of(members: Iterable[str], peers: Mapping[str, Peer]) -> str:
    """The same members in the same order, and none of them another one since."""
    return " ".join(f"{name}.{peers[name].epoch}" for name in members)


def new_meeting() -> str:
    """A name for it, greater than those before."""
    return f"{time.time_ns():020d} {uuid.uuid4().hex[:8]}"


@dataclass(frozen=True, slots=True)
class Kept:
    meeting: str
    communicator: Communicator


class Meetings:
    """What they make is kept by the members (`key_of`), one for each. The same members may meet twice at the
    same time, ahead and for an order: whichever ends first on one of them, all keep that of the later
    meeting. Where one of them failed for some, they have those of different meetings, which is none: so they
    tell each other which. Calls are the engine's thread's.
    """

    def __init__(self, host: str, device: str, timeout_s: float, on_met: OnMet) -> None:
        self._host, self._device, self._timeout_s, self._on_met = host, device, timeout_s, on_met
        self._made: dict[str, Communicator] = {}  # by meeting, until somebody takes it
        self._kept: dict[str, Kept] = {}
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

    def begin(self, meeting: str, store: str, rank: int, size: int) -> None:
        """Come to it, in another thread; `on_met` tells."""
        threading.Thread(
            target=self._meet, args=(meeting, store, rank, size), name="group-meeting", daemon=True
        ).start()

    def made(self, meeting: str) -> Communicator:
        """Its members have met; from here on it is the caller's. KeyError where they have not."""
        with self._lock:
            return self._made.pop(meeting)

    def drop(self, meeting: str) -> None:
        """Nobody waits for it any more, whether its members have met or not."""
        with self._lock:
            made = self._made.pop(meeting, None)
        if made:
            made.close()

    def keep(self, key: str, meeting: str, communicator: Communicator) -> None:
        """It is whole, and may be of use again. Of one key that of the latest meeting stays; in all, those
        that were kept last."""
        before = self._kept.pop(key, None)
        after = Kept(meeting, communicator)
        if before and before.meeting > meeting:
            before, after = after, before
        if before:
            before.communicator.close()
        self._kept[key] = after
        while len(self._kept) > MAX_KEPT:
            self._kept.pop(next(iter(self._kept))).communicator.close()

    def kept(self, key: str) -> str:
        """Of which meeting; empty: of none."""
        kept = self._kept.get(key)
        return kept.meeting if kept else ""

    def take(self, key: str, meeting: str) -> Communicator:
        """What was kept of this meeting. KeyError where that is not there."""
        if self.kept(key) != meeting:
            raise KeyError(f"nothing is kept of the meeting of {key}")
        return self._kept.pop(key).communicator

    def forget(self, key: str) -> None:
        if kept := self._kept.pop(key, None):
            kept.communicator.close()

    def close(self) -> None:
        with self._lock:
            made, self._made = list(self._made.values()), {}
        kept, self._kept = [each.communicator for each in self._kept.values()], {}
        for communicator in [*made, *kept]:
            communicator.close()
        self._store = None  # listens no more: who still waits in it hears so

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout_s)

    def _meet(self, meeting: str, store: str, rank: int, size: int) -> None:
        try:
            group = connect(
                PrefixStore(meeting, self._reach(store)),
                rank,
                size,
                timeout_s=self._timeout_s,
                host=self._host,
                device=self._device,
            )
        except (PeerLost, RuntimeError, ValueError) as error:
            self._on_met(meeting, str(error).splitlines()[0])
            return
        with self._lock:
            self._made[meeting] = group
        self._on_met(meeting, "")

    def _reach(self, store: str) -> Store:
        host, _, port = store.rpartition(":")
        return TCPStore(host, int(port), is_master=False, timeout=self._timeout)
