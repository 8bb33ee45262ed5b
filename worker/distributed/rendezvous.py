"""Communicators of groups that exist or may form: made beside the steps, kept, dropped when a member dies.

Making a communicator takes tens of milliseconds and needs every member; a transform that finds it made saves
that time.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from worker.distributed.communicator import Communicator, PeerLost, connect
from worker.distributed.messages import GroupMessage, Peer, RendezvousAhead
from worker.distributed.transport import Endpoint, Link

MAX_KEPT = 16  # some of them of members that have died since

OnDone = Callable[[str, str], None]  # rendezvous, why it failed ("": it succeeded); in a thread of its own


def members_key(members: Iterable[str], peers: Mapping[str, Peer]) -> str:
    """Return a key for these members, in this order and with these epochs."""
    return " ".join(f"{name}.{peers[name].epoch}" for name in members)


def new_rendezvous() -> str:
    """Return an id for a rendezvous, greater than those made before."""
    return f"{time.time_ns():020d} {uuid.uuid4().hex[:8]}"


@dataclass(frozen=True, slots=True)
class KeptCommunicator:
    rendezvous: str
    communicator: Communicator


class CommunicatorPool:
    """Makes communicators and keeps one for each set of members.

    The same members may meet twice at a time, ahead and for a transform: whichever ends first on one of them,
    all keep the communicator of the later rendezvous. If one of the two failed for some members, they have
    kept those of different rendezvous, which do not fit together: therefore members tell each other which.
    The engine's thread makes the calls.
    """

    def __init__(self, host: str, device: str, timeout_s: float, on_done: OnDone) -> None:
        self._host, self._device, self._timeout_s, self._on_done = host, device, timeout_s, on_done
        self._made: dict[str, Communicator] = {}  # by rendezvous, until it is taken
        self._kept: dict[str, KeptCommunicator] = {}
        self._lock = threading.Lock()
        self._store: TCPStore | None = None

    @property
    def store(self) -> str:
        """Where groups that this worker coordinates meet (host:port); listens from the first call on."""
        if self._store is None:
            self._store = TCPStore(
                self._host, 0, is_master=True, wait_for_workers=False, timeout=self._timeout
            )
        return f"{self._host}:{self._store.port}"

    def start(self, rendezvous: str, store: str, rank: int, size: int) -> None:
        """Meet the other ranks in `store`, in another thread, which calls `on_done` at the end."""
        threading.Thread(
            target=self._meet, args=(rendezvous, store, rank, size), name="rendezvous", daemon=True
        ).start()

    def take_made(self, rendezvous: str) -> Communicator:
        """Return the communicator and hand it over to the caller. Raises KeyError if it is not made."""
        with self._lock:
            return self._made.pop(rendezvous)

    def drop(self, rendezvous: str) -> None:
        """Close the communicator of a rendezvous that was given up, if it is made."""
        with self._lock:
            made = self._made.pop(rendezvous, None)
        if made:
            made.close()

    def keep(self, key: str, rendezvous: str, communicator: Communicator) -> None:
        """Keep a communicator for `take`.

        Of one key that of the latest rendezvous stays; of all keys the MAX_KEPT latest.
        """
        before = self._kept.pop(key, None)
        after = KeptCommunicator(rendezvous, communicator)
        if before and before.rendezvous > rendezvous:
            before, after = after, before
        if before:
            before.communicator.close()
        self._kept[key] = after
        while len(self._kept) > MAX_KEPT:
            self._kept.pop(next(iter(self._kept))).communicator.close()

    def kept(self, key: str) -> str:
        """Return the rendezvous whose communicator is kept for these members, or ""."""
        kept = self._kept.get(key)
        return kept.rendezvous if kept else ""

    def take(self, key: str, rendezvous: str) -> Communicator:
        """Return a kept communicator and hand it over.

        Raises KeyError if that of this rendezvous is not kept.
        """
        if self.kept(key) != rendezvous:
            raise KeyError(f"no communicator of {key} is kept from this rendezvous")
        return self._kept.pop(key).communicator

    def forget(self, key: str) -> None:
        """Close what is kept for these members."""
        if kept := self._kept.pop(key, None):
            kept.communicator.close()

    def close(self) -> None:
        """Close all communicators and listen no more: ranks that still wait in the store fail."""
        with self._lock:
            made, self._made = list(self._made.values()), {}
        kept, self._kept = [each.communicator for each in self._kept.values()], {}
        for communicator in [*made, *kept]:
            communicator.close()
        self._store = None

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout_s)

    def _meet(self, rendezvous: str, store: str, rank: int, size: int) -> None:
        try:
            group = connect(
                PrefixStore(rendezvous, self._reach(store)),
                rank,
                size,
                timeout_s=self._timeout_s,
                host=self._host,
                device=self._device,
            )
        except (PeerLost, RuntimeError, ValueError) as error:
            self._on_done(rendezvous, str(error).splitlines()[0])
            return
        with self._lock:
            self._made[rendezvous] = group
        self._on_done(rendezvous, "")

    def _reach(self, store: str) -> Store:
        host, _, port = store.rpartition(":")
        return TCPStore(host, int(port), is_master=False, timeout=self._timeout)


class AheadRendezvous:
    """Makes communicators of groups that may form later; `CommunicatorPool` keeps them."""

    def __init__(self, worker: str, links: Endpoint[GroupMessage], pool: CommunicatorPool) -> None:
        self._worker, self._links, self._pool = worker, links, pool
        self._keys: dict[str, str] = {}  # by rendezvous under way
        self._opened: dict[str, list[Link]] = {}  # by rendezvous: the links over which others were asked

    def call(self, members: Sequence[str], peers: Mapping[str, Peer]) -> None:
        """Ask the members, this worker first, unless their communicator is kept or under way."""
        key = members_key(members, peers)
        if self._pool.kept(key) or key in self._keys.values():
            return
        order = RendezvousAhead(
            group="",
            rendezvous=new_rendezvous(),
            members=list(members),
            peers={name: peers[name] for name in members},
            store=self._pool.store,
        )
        others = [peers[name] for name in members if name != self._worker]
        links = [self._links.connect(peer.address, peer.key) for peer in others]
        for link in links:
            link.send(order)
        self._opened[order.rendezvous] = links
        self.join(order)

    def join(self, order: RendezvousAhead) -> None:
        """Meet the other members."""
        self._keys[order.rendezvous] = members_key(order.members, order.peers)
        rank = order.members.index(self._worker)
        self._pool.start(order.rendezvous, order.store, rank, len(order.members))

    def end(self, rendezvous: str, reason: str) -> bool:
        """Keep what a rendezvous made, unless it failed (`reason`).

        Returns False for one that is not of these.
        """
        for link in self._opened.pop(rendezvous, []):
            link.close()
        key = self._keys.pop(rendezvous, "")
        if key and not reason:
            self._pool.keep(key, rendezvous, self._pool.take_made(rendezvous))
        return bool(key)
