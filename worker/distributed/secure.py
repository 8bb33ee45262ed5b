"""TLS between workers: both ends show a certificate of the cluster's authority, and all bytes are encrypted.

A link reads in one thread and writes in another, which an `ssl.SSLSocket` does not permit. So the TLS machine
works on memory under a lock, and the socket is read and written outside it.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from typing import Final

from bus.settings import WorkerSettings
from bus.tls import TLSProblem, load_authorities, load_certificate, shake_hands

CHUNK_BYTES: Final = 256 * 1024  # encrypted at a time; other threads may read between two


class ClusterTLS:
    """The contexts of a worker that dials, and of one that listens."""

    def __init__(self, certfile: str, keyfile: str, ca_certs: str) -> None:
        """Load the files, and make a handshake of both contexts in memory. Raises TLSProblem."""
        self.dialling = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.dialling.check_hostname = False  # a member is who has a certificate of this authority
        self.listening = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.listening.verify_mode = ssl.CERT_REQUIRED
        self.listening.num_tickets = 0  # nobody resumes
        for context in (self.dialling, self.listening):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            load_certificate(context, certfile, keyfile, setting="worker")
            load_authorities(context, ca_certs, setting="worker")
        try:
            shake_hands(self.listening, self.dialling)
        except ssl.SSLCertVerificationError as error:
            raise TLSProblem(
                f"worker.ssl_certfile {certfile} is no certificate of worker.ssl_ca_certs {ca_certs}: "
                f"{error.verify_message}; sign one by that authority"
            ) from error

    @classmethod
    def of(cls, settings: WorkerSettings) -> ClusterTLS | None:
        """Return that of the settings, None where they name no certificate. Raises TLSProblem."""
        if not settings.ssl_certfile:
            return None
        return cls(settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs)


class SecureSocket:
    """A connected socket with TLS, for one thread that reads and others that write.

    It has the calls of a socket that a link makes. Raises what those raise; BlockingIOError is a timeout.
    """

    def __init__(self, raw: socket.socket, context: ssl.SSLContext, *, is_dialling: bool, within_s: float):
        """Make the handshake. Raises OSError (ssl.SSLError is one), EOFError."""
        self.raw = raw
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._machine = context.wrap_bio(self._incoming, self._outgoing, server_side=not is_dialling)
        self._lock = threading.Lock()  # of the machine and both memories
        self._writing = threading.Lock()  # of the order on the wire; taken before `_lock`
        self._unsent = b""  # encrypted, and not taken by the system yet
        self._buffer = bytearray(CHUNK_BYTES)
        deadline = time.monotonic() + within_s
        while not self._step():
            raw.settimeout(max(0.001, deadline - time.monotonic()))
            if not self._fill():
                raise EOFError("the other end has closed during the handshake of TLS")

    def _step(self) -> bool:
        """Take the handshake one flight further. Returns True at its end."""
        try:
            self._machine.do_handshake()
        except ssl.SSLWantReadError:
            return False
        finally:
            if flight := self._outgoing.read():
                self.raw.sendall(flight)
        return True

    def _fill(self) -> int:
        num = self.raw.recv_into(self._buffer)
        with self._lock:
            if num:
                self._incoming.write(memoryview(self._buffer)[:num])
            else:
                self._incoming.write_eof()
        return num

    def recv_into(self, into: memoryview) -> int:
        """Read what is there into `into`; 0: the other end has closed."""
        while True:
            try:
                with self._lock:
                    return self._machine.read(len(into), into)  # type: ignore[return-value]
            except ssl.SSLWantReadError:
                self._fill()
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return 0

    def recv(self, num: int) -> bytes:
        data = bytearray(num)
        return bytes(data[: self.recv_into(memoryview(data))])

    def sendall(self, data: bytes | memoryview) -> None:
        """Encrypt and write, after what `send` has left."""
        view = memoryview(data)
        with self._writing:
            self._flush()
            for start in range(0, len(view), CHUNK_BYTES):
                self.raw.sendall(self._encrypted(view[start : start + CHUNK_BYTES]))

    def send(self, data: bytes, flags: int) -> int:
        """Encrypt all of `data`, and write what the system takes; `sendall` goes on.

        Raises BlockingIOError, and takes nothing, while an earlier call's bytes wait.
        """
        with self._writing:
            if self._unsent:
                raise BlockingIOError
            sealed = self._encrypted(memoryview(data))
            try:
                self._unsent = sealed[self.raw.send(sealed, flags) :]
            except BlockingIOError:
                self._unsent = sealed
        return len(data)

    @property
    def has_unsent(self) -> bool:
        """True if encrypted bytes wait for `sendall`, also of nothing."""
        return bool(self._unsent)

    def sendmsg(self, parts: list[bytes | memoryview]) -> int:
        for part in parts:
            self.sendall(part)
        return sum(memoryview(part).nbytes for part in parts)

    def settimeout(self, timeout_s: float | None) -> None:
        self.raw.settimeout(timeout_s)

    def setblocking(self, is_blocking: bool) -> None:
        self.raw.setblocking(is_blocking)

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        self.raw.setsockopt(level, option, value)

    def shutdown(self, how: int) -> None:
        self.raw.shutdown(how)

    def close(self) -> None:
        self.raw.close()

    def __enter__(self) -> SecureSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encrypted(self, data: memoryview) -> bytes:
        with self._lock:
            at = 0
            while at < len(data):
                at += self._machine.write(data[at:])
            return self._outgoing.read()

    def _flush(self) -> None:
        if self._unsent:
            self.raw.sendall(self._unsent)
            self._unsent = b""


def told(error: ssl.SSLError) -> str:
    """Return a sentence on a handshake of TLS that failed, and what to do."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not of this cluster ({error.verify_message}); give it one that the "
            "authority of worker.ssl_ca_certs signed"
        )
    if "ALERT" in (error.reason or "") or "CERTIFICATE" in (error.reason or ""):
        return (
            f"it refused this worker's certificate ({error.reason}); have its authority sign "
            "worker.ssl_certfile"
        )
    return f"it does not speak TLS ({error.reason}); set worker.ssl_certfile at all workers or at none"
