"""One connection between two stages, for steps and the tensors that go with them.

It is opened as `worker.parallel.links` does, by the key of the card; then the socket is used alone, since a
tensor should be copied once at either end and no more: the sender's thread hands the tensor's own memory to
the system, the reader's has it written straight into a buffer, pinned where it goes on to a GPU. Only these
threads ever wait for the other end, so that no engine does.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from queue import Empty, SimpleQueue

import torch

from worker.distributed.messages import Message, PipelineMessage, ProbeMessage, decode, encode
from worker.parallel.links import PING_S, Opening

_SIZES = struct.Struct("<IQ")  # bytes of the head, 0: a sign of life; bytes of the tensor behind it
MAX_HEAD_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class Payload:
    """A contiguous tensor in host memory; `ready`: when the device has written it there."""

    tensor: torch.Tensor
    ready: torch.cuda.Event | None = None

    def bytes(self) -> memoryview:
        if self.ready:
            self.ready.synchronize()
        return memoryview(self.tensor.view(torch.uint8).flatten().numpy())


def to_host(tensor: torch.Tensor) -> Payload:
    """In the thread that made it; nobody may write to it afterwards. On a GPU the copy runs beside what comes
    next."""
    if tensor.device.type == "cpu":
        return Payload(tensor.contiguous())
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return Payload(host, ready)


Received = PipelineMessage | ProbeMessage
OnFrame = Callable[["Hop", Received, torch.Tensor], None]  # in a thread of the hop; uint8 [n] behind the head
OnLost = Callable[["Hop", str], None]  # once, in a thread of the hop; not after `close`


class Hop:
    """Frames in order. It opens in a thread of its own; what is sent meanwhile goes out then. Whoever is not
    heard for `timeout_s` counts as gone."""

    def __init__(
        self,
        open_: Opening,
        timeout_s: float,
        on_frame: OnFrame,
        on_lost: OnLost,
        *,
        is_pinned: bool,
        on_beat: Callable[[], None] = lambda: None,
    ) -> None:
        """is_pinned: what comes goes on to a GPU. on_beat: once a second while nothing is sent, in a thread
        of the hop."""
        self._open, self._timeout_s, self.is_pinned, self._on_beat = open_, timeout_s, is_pinned, on_beat
        self._on_frame, self._on_lost = on_frame, on_lost
        self._outbox: SimpleQueue[tuple[Message, Payload | None] | None] = SimpleQueue()
        self._socket: socket.socket | None = None
        self._ending = threading.Lock()
        self.is_closed = False
        threading.Thread(target=self._live, name="hop-reader", daemon=True).start()

    def send(self, message: Message, payload: Payload | None = None) -> None:
        """Returns at once and never raises: a connection that cannot take it is found lost."""
        self._outbox.put((message, payload))

    def close(self) -> None:
        """When what was sent is out; nothing is told of it any more. Repeating it is harmless."""
        with self._ending:
            self.is_closed = True
        self._outbox.put(None)

    def _hang_up(self) -> None:
        """Wakes both threads, wherever they wait."""
        with suppress(OSError):
            if self._socket:
                self._socket.shutdown(socket.SHUT_RDWR)

    def _lose(self, error: Exception) -> None:
        with self._ending:
            was_closed, self.is_closed = self.is_closed, True
        self._outbox.put(None)
        self._hang_up()
        if not was_closed:
            self._on_lost(self, f"{type(error).__name__}: {error}".rstrip(": "))

    # ----------------------------------------------------------------------------- the threads

    def _live(self) -> None:
        try:
            connection = self._open()
            with connection:
                self._socket = socket.socket(fileno=socket.dup(connection.fileno()))
            with self._socket as opened:
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                opened.settimeout(self._timeout_s)
                sending = threading.Thread(target=self._send_all, name="hop-sender", daemon=True)
                sending.start()
                try:
                    self._read_all(opened)
                finally:
                    self._outbox.put(None)
                    sending.join(self._timeout_s)
        except (OSError, EOFError, ValueError, AuthenticationError) as error:
            self._lose(error)

    def _send_all(self) -> None:
        assert self._socket
        opened = self._socket
        try:
            while True:
                try:
                    entry = self._outbox.get(timeout=PING_S)
                except Empty:
                    opened.sendall(_SIZES.pack(0, 0))
                    self._on_beat()
                    continue
                if entry is None:
                    break
                _send(opened, *entry)
            with suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            self._lose(error)

    def _read_all(self, opened: socket.socket) -> None:
        sizes = bytearray(_SIZES.size)
        while not self.is_closed:
            _read(opened, memoryview(sizes))
            num_head, num_behind = _SIZES.unpack(sizes)
            if num_head > MAX_HEAD_BYTES:
                raise ValueError(f"a head of {num_head} bytes; at most {MAX_HEAD_BYTES} are sent")
            if num_head == 0:
                continue
            head = memoryview(bytearray(num_head))
            _read(opened, head)
            behind = torch.empty(num_behind, dtype=torch.uint8, pin_memory=self.is_pinned)
            if num_behind:
                _read(opened, memoryview(behind.numpy()))
            message = decode(head)
            if not self.is_closed and isinstance(message, Received):
                self._on_frame(self, message, behind)


def _send(opened: socket.socket, message: Message, payload: Payload | None) -> None:
    head = encode(message)
    if payload is None or not payload.tensor.numel():
        opened.sendall(_SIZES.pack(len(head), 0) + head)
        return
    behind = payload.bytes()
    start = _SIZES.pack(len(head), len(behind)) + head
    sent = opened.sendmsg([start, behind])
    if sent < len(start):
        opened.sendall(start[sent:])
    opened.sendall(behind[max(0, sent - len(start)) :])


def _read(opened: socket.socket, into: memoryview) -> None:
    """All of it. Raises EOFError when the other end is gone, TimeoutError when it is silent."""
    at = 0
    while at < len(into):
        num = opened.recv_into(into[at:])
        if num == 0:
            raise EOFError("the other end has closed")
        at += num
