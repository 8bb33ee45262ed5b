"""A TCP proxy between the services and Redis that can be told to be a bad road."""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import threading
import time
from dataclasses import dataclass

from bench.common.service import free_port


@dataclass
class Harm:
    delay_s: float = 0.0  # every chunk, both ways
    cut_share: float = 0.0  # of the chunks: their connection is closed instead
    swallow_xadd_replies: int = (
        0  # that many XADDs reach Redis and their connection is closed before the reply
    )
    blackhole: bool = False  # nothing passes, nothing is closed


class FaultProxy:
    """Listens on `url`, forwards to 127.0.0.1:`target`; a thread per connection and direction."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._harm = Harm()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._random = random.Random(1)

    def __enter__(self) -> FaultProxy:
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=64)
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.cut()

    def harm(self, **settings: float | bool) -> None:
        """Replaces what is wrong with the road; no arguments: nothing is."""
        self._harm = Harm(**settings)  # type: ignore[arg-type]

    def cut(self) -> None:
        """Closes every connection."""
        with self._lock:
            connections, self._open = self._open, set()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self.target), timeout=5)
        except OSError:
            client.close()
            return
        with self._lock:
            self._open |= {client, server}
        with contextlib.suppress(OSError, ValueError, KeyError), selectors.DefaultSelector() as ready:
            ready.register(client, selectors.EVENT_READ, server)
            ready.register(server, selectors.EVENT_READ, client)
            self._pump(ready, client)
        for end in (client, server):
            with self._lock:
                self._open.discard(end)
            end.close()

    def _pump(self, ready: selectors.BaseSelector, client: socket.socket) -> None:
        doomed = False  # an XADD went through whose reply is not to arrive
        while True:
            for key, _ in ready.select():
                source, sink = key.fileobj, key.data
                assert isinstance(source, socket.socket)
                data = source.recv(1 << 16)
                self._wait_out_blackhole()
                if not data or self._random.random() < self._harm.cut_share or (doomed and sink is client):
                    return
                if self._harm.delay_s:
                    time.sleep(self._harm.delay_s)
                doomed = doomed or (source is client and self._dooms(data))
                sink.sendall(data)

    def _wait_out_blackhole(self) -> None:
        while self._harm.blackhole:
            time.sleep(0.02)

    def _dooms(self, data: bytes) -> bool:
        with self._lock:
            if self._harm.swallow_xadd_replies <= 0 or b"XADD" not in data:
                return False
            self._harm.swallow_xadd_replies -= 1
            return True
