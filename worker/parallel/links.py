"""Connections between the workers of a host, beside Redis: a step of a group cannot wait for the bus.

Each is a stream of frames (multiprocessing.connection, which checks the key, too) with a thread that reads
it. Both ends send a sign of life every second; whoever hears nothing for longer than the group's timeout, a
stopped process for example, counts as gone.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge

from worker.distributed.messages import GroupMessage, Message, decode, encode

log = logging.getLogger(__name__)

PING_S = 1.0
_PING = b""
KEY_BYTES = 32

Opening = Callable[[], Connection]  # in a thread of the link; raises OSError, EOFError, AuthenticationError
OnMessage = Callable[["Link", GroupMessage], None]  # in a thread of the link
OnLost = Callable[["Link", str], None]  # once, in a thread of the link; not after `close`


class Link:
    """One connection to one other worker. It opens in a thread of its own, since the other may be stopped or
    gone and nobody's steps wait for that; what is sent meanwhile goes out then."""

    def __init__(self, open_: Opening, timeout_s: float, on_message: OnMessage, on_lost: OnLost) -> None:
        self._open, self._timeout_s = open_, timeout_s
        self._on_message, self._on_lost = on_message, on_lost
        self._connection: Connection | None = None
        self._waiting: list[bytes] = []
        self._sending = threading.Lock()
        self._is_closed = False
        threading.Thread(target=self._live, name="group-link", daemon=True).start()

    def send(self, message: Message) -> None:
        """Never raises: a connection that cannot take it is found lost by its reader."""
        self._write(encode(message))

    def close(self) -> None:
        """Nothing is told of it any more. Repeating it is harmless."""
        self._is_closed = True
        with suppress(OSError):
            if self._connection:
                self._connection.close()

    def _write(self, frame: bytes) -> None:
        with suppress(OSError, ValueError), self._sending:
            if self._connection:
                self._connection.send_bytes(frame)
            else:
                self._waiting.append(frame)

    def _live(self) -> None:
        try:
            connection = self._open()
            with self._sending:
                for frame in self._waiting:
                    connection.send_bytes(frame)
                self._connection, self._waiting = connection, []
            if self._is_closed:  # meanwhile
                connection.close()
            self._read(connection)
        except (OSError, EOFError, ValueError, TypeError, AuthenticationError) as error:
            # TypeError: it was closed in the middle of a frame, and reads on from no handle.
            if not self._is_closed:
                self.close()
                self._on_lost(self, f"{type(error).__name__}: {error}".rstrip(": "))

    def _read(self, connection: Connection) -> None:
        heard_at = pinged_at = time.monotonic()
        while not self._is_closed:
            if connection.poll(PING_S):
                frame = connection.recv_bytes()
                heard_at = time.monotonic()
                if frame != _PING and isinstance(message := decode(frame), GroupMessage):
                    self._on_message(self, message)
            if time.monotonic() - heard_at > self._timeout_s:
                raise TimeoutError(f"nothing was heard for {self._timeout_s:g} s")
            if time.monotonic() - pinged_at >= PING_S:
                pinged_at = time.monotonic()
                self._write(_PING)


class Door:
    """Listens. `address` and `key` are for the card: who can read it may come, and each must show the key."""

    def __init__(self, host: str, on_knock: Callable[[Opening], object]) -> None:
        """on_knock: in a thread of the door, with what opens the connection; the key is asked for then.
        Raises OSError where the host cannot be listened on."""
        self.key = os.urandom(KEY_BYTES)
        self._on_knock = on_knock
        self._listener = Listener((host, 0))
        port: int = self._listener.address[1]
        self.address = f"{host}:{port}"
        self._is_closed = False
        threading.Thread(target=self._accept, name="door", daemon=True).start()

    def close(self) -> None:
        self._is_closed = True
        with suppress(OSError):
            self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection = self._listener.accept()
                if self._is_closed:  # closing does not wake who waits in accept
                    connection.close()
                    return
                self._on_knock(lambda connection=connection: self._greet(connection))  # type: ignore[misc]
            except OSError as error:
                if not self._is_closed:
                    log.warning("a connection to %s failed: %s", self.address, error)
                    time.sleep(0.1)

    def _greet(self, connection: Connection) -> Connection:
        """Each must show that it has the key."""
        try:
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
        except (AuthenticationError, AssertionError) as error:
            connection.close()
            log.warning("somebody came to %s without its key: %s", self.address, error)
            raise ConnectionRefusedError(f"it did not show the key of {self.address}") from error
        return connection


def knock(address: str, key: bytes) -> Opening:
    """At another's door, when it is called."""
    host, _, port = address.rpartition(":")
    return lambda: Client((host, int(port)), authkey=key)


class Links:
    """Listens, and connects to others."""

    def __init__(self, host: str, timeout_s: float, on_message: OnMessage, on_lost: OnLost) -> None:
        """Raises OSError where the host cannot be listened on."""
        self._timeout_s, self._on_message, self._on_lost = timeout_s, on_message, on_lost
        self._links: list[Link] = []
        self._door = Door(host, self._add)

    @property
    def address(self) -> str:
        return self._door.address

    @property
    def key(self) -> bytes:
        return self._door.key

    def connect(self, address: str, key: bytes) -> Link:
        """Returns at once; `on_lost` tells where nobody listens or the key is not right."""
        return self._add(knock(address, key))

    def close(self) -> None:
        self._door.close()
        for link in self._links:
            link.close()

    def _add(self, open_: Opening) -> Link:
        self._links = [link for link in self._links if not link._is_closed]
        link = Link(open_, self._timeout_s, self._on_message, self._on_lost)
        self._links.append(link)
        return link
