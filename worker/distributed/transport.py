"""Connections between workers, beside Redis: a step of a group or a pipeline cannot wait for the bus.

Each worker has one `Transport`: one listener, whose address and key its card shows. A link carries frames, in
order, in both directions::

    uint32 bytes of the head | uint64 bytes of the payload | head: a message as msgpack | payload: one tensor

A frame without a head is a ping: both ends send one every second, and an end that receives nothing for the
timeout, from a stopped process for example, counts as lost. A tensor is copied once at either end: the sender
hands its memory to the system, the receiver reads it into the buffer that it passes on.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import answer_challenge, deliver_challenge
from typing import Any, Generic, TypeVar

import torch

from worker.distributed.messages import Message, decode, encode
from worker.distributed.secure import ClusterTLS, SecureSocket, told

log = logging.getLogger(__name__)

PING_S = 1.0
HANDSHAKE_S = 10.0  # time to show the key; compilers stop a process for seconds
MAX_HANDSHAKES = 32  # at a time; each holds a descriptor and a thread
KEY_BYTES = 32
MAX_HEAD_BYTES = 1 << 26

_SIZES = struct.Struct("<IQ")
_PING = _SIZES.pack(0, 0)
_TIMEVAL = struct.Struct("@ll")  # SO_RCVTIMEO: seconds, microseconds


@dataclass(frozen=True, slots=True)
class Payload:
    """A contiguous tensor in host memory. `ready`: the device has written it when this event is over."""

    tensor: torch.Tensor
    ready: torch.cuda.Event | None = None

    def bytes(self) -> memoryview:
        """Wait for the device and return the tensor's memory."""
        if self.ready:
            self.ready.synchronize()
        return memoryview(self.tensor.view(torch.uint8).flatten().numpy())


def to_host(tensor: torch.Tensor) -> Payload:
    """Return a payload of `tensor`, not written to any more; call it in the thread that made the tensor."""
    if tensor.device.type == "cpu":
        return Payload(tensor.contiguous())
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return Payload(host, ready)


Wire = socket.socket | SecureSocket
OnMessage = Callable[["Link", Message, torch.Tensor], None]  # in a thread of the link; payload: uint8 [n]
OnLost = Callable[["Link", str], None]  # called once in a thread of the link; not after `close`


class Link:
    """One connection to another worker. It opens in a thread of its own; frames sent meanwhile wait."""

    def __init__(
        self,
        open_: Callable[[], Wire],
        on_message: OnMessage,
        on_lost: OnLost,
        *,
        timeout_s: float,
        is_pinned: bool = False,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        """open_: connects with the handshake, or raises OSError. is_pinned: payloads go on to a GPU.

        on_idle: called every second while no frame waits, in a thread of the link.
        """
        self._open, self._on_message, self._on_lost = open_, on_message, on_lost
        self._timeout_s, self._is_pinned, self._on_idle = timeout_s, is_pinned, on_idle
        self._changed = threading.Condition()  # guards the fields below
        self._waiting: deque[tuple[bytes, Payload | None]] = deque()
        self._is_sending = True  # the sender thread is in the middle of a frame, or the link is not open yet
        self._socket: Wire | None = None
        self.is_closed = False
        threading.Thread(target=self._live, name="link-receiver", daemon=True).start()

    def send(self, message: Message, payload: Payload | None = None) -> None:
        """Send and return at once; a connection that cannot take the frame is found lost by its receiver.

        A message without payload is written in the caller's thread while no frame waits, since waking another
        thread takes longer than a step of a small group.
        """
        head = encode(message)
        frame = _SIZES.pack(len(head), payload.tensor.nbytes if payload else 0) + head
        with self._changed:
            if self.is_closed:
                return
            rest: bytes | None = frame
            if payload is None and not self._is_sending and not self._waiting:
                rest = self._write_now(frame)
            if rest is not None:
                self._waiting.append((rest, payload))
                self._changed.notify()

    def close(self) -> None:
        """Close once all waiting frames are sent; received ones are dropped, and no loss is reported."""
        with self._changed:
            self.is_closed = True
            self._changed.notify()

    def _write_now(self, frame: bytes) -> bytes | None:
        """Write what the system takes without waiting. Returns the rest, None: nothing is left to write.

        The rest is empty where a socket with TLS holds it itself.
        """
        assert self._socket
        try:
            rest = frame[self._socket.send(frame, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return frame
        except OSError:
            return None
        return rest if rest or (isinstance(self._socket, SecureSocket) and self._socket.has_unsent) else None

    def _lose(self, error: Exception) -> None:
        with self._changed:
            was_closed, self.is_closed = self.is_closed, True
            self._waiting.clear()
            self._changed.notify()
        if self._socket:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes both threads
        if not was_closed:
            self._on_lost(self, f"{type(error).__name__}: {error}".rstrip(": "))

    # ----------------------------------------------------------------------------- the receiver's thread

    def _live(self) -> None:
        try:
            opened = self._open()
        except (OSError, EOFError, ValueError, AuthenticationError) as error:
            self._lose(error)
            return
        with opened:
            # Not Python's timeouts: with those each call polls first.
            limit = _TIMEVAL.pack(int(self._timeout_s), int(self._timeout_s % 1 * 1e6))
            opened.setblocking(True)
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket = opened
            sender = threading.Thread(target=self._send_all, name="link-sender", daemon=True)
            sender.start()
            try:
                self._receive_all(opened)
            except BlockingIOError:
                self._lose(TimeoutError(f"nothing was heard for {self._timeout_s:g} s"))
            except (OSError, EOFError, ValueError) as error:
                self._lose(error)
            sender.join()

    def _receive_all(self, opened: Wire) -> None:
        """Read frames until the other end closes. Raises EOFError then."""
        sizes = bytearray(_SIZES.size)
        while True:
            _read(opened, memoryview(sizes))
            head_bytes, payload_bytes = _SIZES.unpack(sizes)
            if head_bytes > MAX_HEAD_BYTES:
                raise ValueError(f"a head of {head_bytes} bytes; at most {MAX_HEAD_BYTES} are sent")
            if head_bytes == 0:
                continue
            head = memoryview(bytearray(head_bytes))
            _read(opened, head)
            payload = torch.empty(payload_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)
            if payload_bytes:
                _read(opened, memoryview(payload.numpy()))
            if not self.is_closed:
                self._on_message(self, decode(head), payload)

    # ----------------------------------------------------------------------------- the sender's thread

    def _send_all(self) -> None:
        assert self._socket
        try:
            while (entry := self._next()) is not None:
                _write(self._socket, *entry)
                if entry[0] is _PING:
                    self._on_idle()
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            self._lose(TimeoutError(f"nothing could be sent for {self._timeout_s:g} s"))
        except OSError as error:
            self._lose(error)

    def _next(self) -> tuple[bytes, Payload | None] | None:
        """Return the next frame, a ping after a second without one, or None at the end."""
        with self._changed:
            self._is_sending = False
            is_woken = True
            while not self._waiting and not self.is_closed and is_woken:
                is_woken = self._changed.wait(PING_S)
            if self._waiting:
                self._is_sending = True
                return self._waiting.popleft()
            if self.is_closed:
                return None
            self._is_sending = True
            return _PING, None


def _write(opened: Wire, frame: bytes, payload: Payload | None) -> None:
    if payload is None or not payload.tensor.numel():
        opened.sendall(frame)
        return
    data = payload.bytes()
    sent = opened.sendmsg([frame, data])
    if sent < len(frame):
        opened.sendall(frame[sent:])
    opened.sendall(data[max(0, sent - len(frame)) :])


def _read(opened: Wire, into: memoryview) -> None:
    """Fill `into`. Raises EOFError where the other end has closed, BlockingIOError after the timeout."""
    at = 0
    while at < len(into):
        num = opened.recv_into(into[at:])
        if num == 0:
            raise EOFError("the other end has closed")
        at += num


# ------------------------------------------------------------------------------------- opening a connection


class _Handshake:
    """A socket for the challenge functions of `multiprocessing.connection`, with one deadline for all."""

    def __init__(self, opened: Wire, within_s: float) -> None:
        self._opened, self._ends_at = opened, time.monotonic() + within_s

    def send_bytes(self, data: bytes) -> None:
        self._limit()
        self._opened.sendall(len(data).to_bytes(4, "big") + data)

    def recv_bytes(self, maxlength: int) -> bytes:
        length = int.from_bytes(self._read(4), "big")
        if length > maxlength:
            raise OSError(f"a message of {length} bytes; a handshake has at most {maxlength}")
        return self._read(length)

    def _read(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            self._limit()
            if not (more := self._opened.recv(length - len(data))):
                raise EOFError("the other end has closed")
            data += more
        return data

    def _limit(self) -> None:
        self._opened.settimeout(max(0.001, self._ends_at - time.monotonic()))


def connect(
    address: str,
    key: bytes,
    on_message: OnMessage,
    on_lost: OnLost,
    *,
    timeout_s: float,
    is_pinned: bool = False,
    on_idle: Callable[[], None] = lambda: None,
    tls: ClusterTLS | None = None,
) -> Link:
    """Return a link to the listener at `address` (host:port) at once; it is lost if that fails.

    tls: the certificate to show, where links are encrypted; None: they are not.
    """
    host, _, port = address.rpartition(":")

    def dial() -> Wire:
        raw = socket.create_connection((host, int(port)), timeout_s)
        opened: Wire = raw
        try:
            if tls:
                opened = SecureSocket(raw, tls.dialling, is_dialling=True, within_s=timeout_s)
            handshake: Any = _Handshake(opened, timeout_s)
            answer_challenge(handshake, key)
            deliver_challenge(handshake, key)
        except BaseException as error:
            opened.close()
            if isinstance(error, ssl.SSLError):
                raise ConnectionRefusedError(f"{address}: {told(error)}") from error
            if isinstance(error, AssertionError):
                raise ConnectionRefusedError(f"{address} speaks another protocol") from error
            raise
        return opened

    return Link(dial, on_message, on_lost, timeout_s=timeout_s, is_pinned=is_pinned, on_idle=on_idle)


class _Listener:
    """Accepts connections that show the key.

    A connection without it is closed after HANDSHAKE_S, or earlier, the oldest first, beyond MAX_HANDSHAKES.
    """

    def __init__(
        self, host: str, on_accepted: Callable[[Callable[[], Wire]], object], tls: ClusterTLS | None
    ) -> None:
        """on_accepted: called with a function that completes the handshake. Raises OSError."""
        self.key = os.urandom(KEY_BYTES)
        self._on_accepted, self._tls = on_accepted, tls
        self._socket = socket.create_server((host, 0))
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._lock = threading.Lock()
        self._unproven: deque[socket.socket] = deque()
        self._is_closed = False
        threading.Thread(target=self._accept, name="listener", daemon=True).start()

    def close(self) -> None:
        self._is_closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._socket.close()
        with self._lock:
            for opened in self._unproven:
                _hang_up(opened)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                opened, _ = self._socket.accept()
            except OSError as error:
                if not self._is_closed:
                    log.warning("no connection could be accepted at %s: %s", self.address, error)
                    time.sleep(0.1)
                continue
            with self._lock:
                if len(self._unproven) >= MAX_HANDSHAKES:
                    _hang_up(self._unproven.popleft())
                self._unproven.append(opened)
            self._on_accepted(lambda opened=opened: self._check_key(opened))  # type: ignore[misc]

    def _check_key(self, opened: socket.socket) -> Wire:
        wire: Wire = opened
        try:
            if self._tls:
                wire = SecureSocket(opened, self._tls.listening, is_dialling=False, within_s=HANDSHAKE_S)
            handshake: Any = _Handshake(wire, HANDSHAKE_S)
            deliver_challenge(handshake, self.key)
            answer_challenge(handshake, self.key)
        except ssl.SSLError as error:
            who = opened.getpeername()[0]
            opened.close()
            log.warning("a connection from %s to %s was refused: %s", who, self.address, told(error))
            raise ConnectionRefusedError(told(error)) from error
        except (OSError, EOFError, AuthenticationError, AssertionError) as error:
            opened.close()
            log.warning("a connection to %s did not show the key: %s", self.address, error or type(error))
            raise ConnectionRefusedError(f"it did not show the key of {self.address}") from error
        finally:
            with self._lock, suppress(ValueError):  # dropped meanwhile
                self._unproven.remove(opened)
        return wire


def _hang_up(opened: socket.socket) -> None:
    with suppress(OSError):
        opened.shutdown(socket.SHUT_RDWR)


# ------------------------------------------------------------------------------------- one worker's

M = TypeVar("M")


class Endpoint(Generic[M]):
    """The part of a transport for one kind of messages, with the links that it opened or first heard of."""

    def __init__(
        self,
        transport: Transport,
        kind: type[M],
        on_message: Callable[[Link, M, torch.Tensor], None],
        on_lost: OnLost,
    ) -> None:
        self._transport, self.kind, self._on_message, self._on_lost = transport, kind, on_message, on_lost
        self._lock = threading.Lock()
        self._links: set[Link] = set()
        self._is_closed = False

    def connect(self, address: str, key: bytes) -> Link:
        """Return a link to another worker, at once. It is lost if no worker listens, or the key is wrong."""
        at = self._transport
        link = connect(
            address,
            key,
            self.take,
            self.lose,
            timeout_s=at.timeout_s,
            is_pinned=at.is_pinned,
            tls=at.tls,
        )
        self._own(link)
        return link

    def close(self) -> None:
        """Take no more messages, and close the links."""
        self._transport.remove(self)
        with self._lock:
            self._is_closed = True
            links, self._links = self._links, set()
        for link in links:
            link.close()

    def take(self, link: Link, message: Message, payload: torch.Tensor) -> None:
        """Pass a received message on."""
        self._own(link)
        if isinstance(message, self.kind) and not self._is_closed:
            self._on_message(link, message, payload)

    def lose(self, link: Link, reason: str) -> None:
        """Report the loss of a link, which may be one that no message has come over."""
        with self._lock:
            self._links.discard(link)
        if not self._is_closed:
            self._on_lost(link, reason)

    def _own(self, link: Link) -> None:
        with self._lock:
            if self._is_closed:
                link.close()
            elif link not in self._links:
                self._links = {each for each in self._links if not each.is_closed} | {link}


class Transport:
    """One worker's listener and its links. Workers connect with the `address` and `key` of its card."""

    def __init__(
        self, host: str, timeout_s: float, *, is_pinned: bool = False, tls: ClusterTLS | None = None
    ) -> None:
        """Listen for other workers. Raises OSError.

        timeout_s: a link that is silent for so long is lost. is_pinned: payloads go on to a GPU. tls: links
        are encrypted, and only workers with a certificate of the same authority get one.
        """
        self.host, self.timeout_s, self.is_pinned, self.tls = host, timeout_s, is_pinned, tls
        self._lock = threading.Lock()
        self._endpoints: list[Endpoint[Any]] = []
        self._accepted: set[Link] = set()
        self._listener = _Listener(host, self._accept, tls)
        self.address, self.key = self._listener.address, self._listener.key

    def endpoint(
        self, kind: type[M], on_message: Callable[[Link, M, torch.Tensor], None], on_lost: OnLost
    ) -> Endpoint[M]:
        """Return an endpoint that takes all messages of `kind` from accepted links, until it is closed."""
        endpoint = Endpoint(self, kind, on_message, on_lost)
        with self._lock:
            self._endpoints = [*self._endpoints, endpoint]
        return endpoint

    def remove(self, endpoint: Endpoint[Any]) -> None:
        """Pass no more messages to `endpoint`."""
        with self._lock:
            self._endpoints = [each for each in self._endpoints if each is not endpoint]

    def close(self) -> None:
        """Listen no more and close all links."""
        self._listener.close()
        for endpoint in self._endpoints:
            endpoint.close()
        with self._lock:
            for link in self._accepted:
                link.close()

    def _accept(self, open_: Callable[[], Wire]) -> None:
        link = Link(open_, self._take, self._lose, timeout_s=self.timeout_s, is_pinned=self.is_pinned)
        with self._lock:
            self._accepted = {each for each in self._accepted if not each.is_closed} | {link}

    def _take(self, link: Link, message: Message, payload: torch.Tensor) -> None:
        for endpoint in self._endpoints:
            if isinstance(message, endpoint.kind):
                endpoint.take(link, message, payload)
                return
        log.debug("%s was received and this worker takes none; closing the link", type(message).__name__)
        link.close()

    def _lose(self, link: Link, reason: str) -> None:
        for endpoint in self._endpoints:
            endpoint.lose(link, reason)
