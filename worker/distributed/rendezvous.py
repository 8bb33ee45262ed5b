"""Communicators of groups that exist or may form: made beside the steps, and kept, since that takes time."""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore

from worker.distributed.communicator import Communicator, PeerLost, connect
from worker.distributed.messages import GroupMessage, Peer, RendezvousAhead
from worker.distributed.transport import Endpoint, Link

MAX_KEPT = 16  # some of them of members that have died since

# Called in a thread of its own with the rendezvous and what it made, which is the callee's, or why it failed.
OnDone = Callable[[str, Communicator | str], None]


def members_key(members: Iterable[str], peers: Mapping[str, Peer]) -> str:
    """Return a key for these members, in this order and with these epochs."""
    return " ".join(f"{name}.{peers[name].epoch}" for name in members)


def new_rendezvous() -> str:
    """Return an id for a rendezvous, greater than those made before."""
    return f"{time.time_ns():020d} {uuid.uuid4().hex[:8]}"


def meet(
    store: str, rendezvous: str, rank: int, size: int, *, timeout_s: float, host: str, device: str
) -> Communicator:
    """Meet the other ranks of a rendezvous at `store` (host:port). Raises PeerLost and RuntimeError."""
    at, _, port = store.rpartition(":")
    reached = TCPStore(at, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
    return connect(
        PrefixStore(rendezvous, reached), rank, size, timeout_s=timeout_s, host=host, device=device
    )


def open_store(host: str, timeout_s: float) -> TCPStore:
    """Return a store in which ranks can meet, that listens at this address alone.

    A TCPStore that binds by itself listens on every address of the machine (pytorch#173909). Raises OSError,
    and RuntimeError of torch.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as listener:
        listener.bind(address)
        return TCPStore(
            host,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=os.dup(listener.fileno()),  # the store's, which closes it also if it fails
        )


class CommunicatorPool:
    """Makes communicators and keeps one for each set of members. The engine's thread makes the calls.

    The same members may meet twice at a time, and all keep the communicator of the later rendezvous. Where
    one of the two failed for some members, theirs do not fit together: so they tell each other which it is.
    """

    def __init__(self, host: str, device: str, timeout_s: float, on_done: OnDone) -> None:
        self._host, self._device, self._timeout_s, self._on_done = host, device, timeout_s, on_done
        self._kept: dict[str, tuple[str, Communicator]] = {}  # rendezvous and communicator, by key
        self._store: TCPStore | None = None

    @property
    def store(self) -> str:
        """The host:port where groups that this worker coordinates meet; listens from the first call on."""
        if self._store is None:
            self._store = open_store(self._host, self._timeout_s)
        return f"{self._host}:{self._store.port}"

    def start(self, rendezvous: str, store: str, rank: int, size: int) -> None:
        """Meet the other ranks in `store`, in another thread, which calls `on_done` at the end."""
        threading.Thread(
            target=self._meet, args=(rendezvous, store, rank, size), name="rendezvous", daemon=True
        ).start()

    def keep(self, key: str, rendezvous: str, communicator: Communicator) -> None:
        """Keep a communicator for `take`: the latest of each key, and of all keys the MAX_KEPT latest."""
        after = (rendezvous, communicator)
        if before := self._kept.pop(key, None):
            before, after = sorted((before, after), key=lambda kept: kept[0])
            before[1].close()
        self._kept[key] = after
        if len(self._kept) > MAX_KEPT:
            self._kept.pop(next(iter(self._kept)))[1].close()

    def kept(self, key: str) -> str:
        """Return the rendezvous whose communicator is kept for these members, or ""."""
        return self._kept[key][0] if key in self._kept else ""

    def take(self, key: str, rendezvous: str) -> Communicator:
        """Hand over a kept communicator. Raises KeyError if that of this rendezvous is not kept."""
        if self.kept(key) != rendezvous:
            raise KeyError(f"no communicator of {key} is kept from this rendezvous")
        return self._kept.pop(key)[1]

    def forget(self, key: str) -> None:
        """Close what is kept for these members."""
        if kept := self._kept.pop(key, None):
            kept[1].close()

    def close(self) -> None:
        """Close all communicators and listen no more: ranks that still wait in the store fail."""
        for _, communicator in self._kept.values():
            communicator.close()
        self._kept.clear()
        self._store = None

    def _meet(self, rendezvous: str, store: str, rank: int, size: int) -> None:
        try:
            group = meet(
                store, rendezvous, rank, size, timeout_s=self._timeout_s, host=self._host, device=self._device
            )
        except (PeerLost, RuntimeError, ValueError) as error:
            self._on_done(rendezvous, str(error).splitlines()[0])
        else:
            self._on_done(rendezvous, group)


class AheadRendezvous:
    """Makes communicators of groups that may form later; `CommunicatorPool` keeps them."""

    def __init__(self, worker: str, links: Endpoint[GroupMessage], pool: CommunicatorPool) -> None:
        self._worker, self._links, self._pool = worker, links, pool
        self._keys: dict[str, str] = {}  # keys by rendezvous in progress
        self._opened: dict[str, list[Link]] = {}  # links over which others were asked, by rendezvous

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

    def end(self, rendezvous: str, made: Communicator | str) -> bool:
        """Keep what a rendezvous made, unless it failed. Returns False if it is not of these."""
        for link in self._opened.pop(rendezvous, []):
            link.close()
        key = self._keys.pop(rendezvous, "")
        if key and not isinstance(made, str):
            self._pool.keep(key, rendezvous, made)
        return bool(key)
