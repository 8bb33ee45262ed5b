"""Connections between workers: no worker waits for one that is stopped, gone or a stranger."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from multiprocessing.connection import Client
from pathlib import Path

import pytest
import torch

from bench.common.service import wait_for
from bus.tls import TLSProblem
from tests.support.certificates import Authority, authority
from worker.distributed import transport
from worker.distributed.messages import Echo, GroupEnded, GroupMessage, ProbeFailed, ProbeMessage
from worker.distributed.secure import ClusterTLS
from worker.distributed.transport import Link, Transport, to_host

__all__ = ["authority"]


class End:
    """One worker's transport, and what came to it."""

    def __init__(self, tls: ClusterTLS | None = None) -> None:
        self.heard: list[tuple[Link, GroupMessage]] = []
        self.lost: list[str] = []
        self.transport = Transport("127.0.0.1", 2.0, tls=tls)
        self.links = self.transport.endpoint(
            GroupMessage,
            lambda link, message, payload: self.heard.append((link, message)),
            lambda link, reason: self.lost.append(reason),
        )

    def close(self) -> None:
        self.transport.close()


@pytest.fixture(params=["plain", "tls"])
def pair(request: pytest.FixtureRequest, authority: Authority) -> Iterator[tuple[End, End]]:
    made = [member(authority, name) if request.param == "tls" else None for name in ("w0", "w1")]
    with closing(End(made[0])) as one, closing(End(made[1])) as other:
        yield one, other


@pytest.fixture
def plain_pair() -> Iterator[tuple[End, End]]:
    with closing(End()) as one, closing(End()) as other:
        yield one, other


def member(authority: Authority, name: str, ca: str = "") -> ClusterTLS:
    pair = authority.sign(name)
    return ClusterTLS(pair.cert, pair.key, ca or authority.ca)


def test_what_is_sent_before_a_link_is_open_comes_in_order(pair: tuple[End, End]) -> None:
    one, other = pair
    link = one.links.connect(other.transport.address, other.transport.key)
    sent = [GroupEnded(group=str(i), reason="") for i in range(50)]
    for message in sent:
        link.send(message)
    wait_for("all of it", lambda: len(other.heard) == 50, 10)
    assert [message for _, message in other.heard] == sent
    other.heard[0][0].send(GroupEnded(group="back", reason=""))
    wait_for("an answer", lambda: one.heard, 10)


def test_a_stopped_worker_is_not_waited_for(pair: tuple[End, End]) -> None:
    """The peer's system takes the connection, and then nothing comes."""
    one, _ = pair
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        began = time.monotonic()
        link = one.links.connect(f"127.0.0.1:{stopped.getsockname()[1]}", b"key")
        link.send(GroupEnded(group="g", reason=""))
        link.close()
        assert time.monotonic() - began < 1.0
    time.sleep(0.2)
    assert one.lost == []  # it was closed here


def test_where_nobody_listens_the_link_is_lost(pair: tuple[End, End]) -> None:
    one, other = pair
    address = other.transport.address
    other.close()
    one.links.connect(address, other.transport.key)
    wait_for("the loss", lambda: one.lost, 10)


def test_a_wrong_key_opens_nothing(pair: tuple[End, End]) -> None:
    one, other = pair
    one.links.connect(other.transport.address, b"guessed").send(GroupEnded(group="g", reason=""))
    wait_for("the loss", lambda: one.lost, 10)
    assert other.heard == []


def test_strangers_keep_nobody_out(pair: tuple[End, End]) -> None:
    """One is silent, one talks nonsense."""
    one, other = pair
    host, _, port = other.transport.address.rpartition(":")
    with socket.create_connection((host, int(port))), Client((host, int(port))) as talker:
        talker.send_bytes(b"GET / HTTP/1.1")
        one.links.connect(other.transport.address, other.transport.key).send(GroupEnded(group="g", reason=""))
        wait_for("the message", lambda: other.heard, 10)


def test_a_process_that_is_silent_too_long_is_lost(plain_pair: tuple[End, End]) -> None:
    one, _ = plain_pair
    host, _, port = one.transport.address.rpartition(":")
    with Client((host, int(port)), authkey=one.transport.key):
        wait_for("the loss", lambda: one.lost, 10)
    assert one.lost == ["TimeoutError: nothing was heard for 2 s"]


def test_a_stranger_is_hung_up_on_after_the_deadline(
    pair: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that says nothing, and one that sends a byte now and then."""
    monkeypatch.setattr(transport, "HANDSHAKE_S", 0.5)
    _, other = pair
    host, _, port = other.transport.address.rpartition(":")
    with (
        socket.create_connection((host, int(port))) as silent,
        socket.create_connection((host, int(port))) as slow,
    ):
        began = time.monotonic()
        for stranger in (silent, slow):
            stranger.settimeout(0.1)

        def is_over() -> bool:
            with suppress(OSError):
                slow.send(b"\0")
            return all(_is_closed(each) for each in (silent, slow))

        wait_for("the end of both", is_over, 10)
        assert time.monotonic() - began < 5
    wait_for("the end of their threads", lambda: not other.transport._listener._unproven, 10)


def test_strangers_take_a_bounded_number_of_threads_and_keep_nobody_out(
    pair: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "MAX_HANDSHAKES", 4)
    one, other = pair
    host, _, port = other.transport.address.rpartition(":")
    before = threading.active_count()
    with ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(socket.create_connection((host, int(port))))
        wait_for("the oldest to be dropped", lambda: threading.active_count() <= before + 4, 10)
        one.links.connect(other.transport.address, other.transport.key).send(GroupEnded(group="g", reason=""))
        wait_for("the message", lambda: other.heard, 10)
        assert len(other.transport._listener._unproven) <= 4


def test_a_payload_arrives_whole_and_in_order_with_small_messages() -> None:
    """Small messages are written at once, but never overtake a payload."""
    heard: list[tuple[ProbeMessage, bytes]] = []
    with closing(Transport("127.0.0.1", 5.0)) as listening, closing(Transport("127.0.0.1", 5.0)) as asking:
        listening.endpoint(
            ProbeMessage,
            lambda link, message, payload: heard.append((message, bytes(payload.numpy()))),
            lambda *_: None,
        )
        link = asking.endpoint(ProbeMessage, lambda *_: None, lambda *_: None).connect(
            listening.address, listening.key
        )
        rows = [torch.full((1 << 20,), i, dtype=torch.uint8) for i in range(8)]
        for i, row in enumerate(rows):
            link.send(Echo(), to_host(row))
            link.send(ProbeFailed(reason=str(i)))
        wait_for("all of it", lambda: len(heard) == 16, 20)
    expected = [
        each
        for i, row in enumerate(rows)
        for each in ((Echo(), bytes(row.numpy())), (ProbeFailed(reason=str(i)), b""))
    ]
    assert heard == expected


def test_a_message_of_a_kind_that_nobody_takes_closes_the_link(pair: tuple[End, End]) -> None:
    """A worker that joins no group: whoever asks it hears of a loss, and does not wait."""
    one, other = pair
    other.links.close()
    one.links.connect(other.transport.address, other.transport.key).send(GroupEnded(group="g", reason=""))
    wait_for("the loss", lambda: one.lost, 10)
    assert other.heard == []


def test_what_is_sent_before_a_link_is_closed_arrives(pair: tuple[End, End]) -> None:
    one, other = pair
    link = one.links.connect(other.transport.address, other.transport.key)
    link.send(GroupEnded(group="last", reason=""))
    link.close()
    link.send(GroupEnded(group="too late", reason=""))
    wait_for("the message", lambda: other.heard and other.lost, 10)
    assert [message.group for _, message in other.heard] == ["last"]


def _is_closed(stranger: socket.socket) -> bool:
    """The other end has closed, and said at most what it asks of everybody."""
    with suppress(TimeoutError):
        while stranger.recv(1024):
            pass
        return True
    return False


def test_payloads_of_every_size_come_whole_through_tls(authority: Authority) -> None:
    echoes: list[torch.Tensor] = []
    with (
        closing(Transport("127.0.0.1", 5.0, tls=member(authority, "big0"))) as listening,
        closing(Transport("127.0.0.1", 5.0, tls=member(authority, "big1"))) as asking,
    ):
        listening.endpoint(ProbeMessage, lambda _, __, payload: echoes.append(payload), lambda *_: None)
        link = asking.endpoint(ProbeMessage, lambda *_: None, lambda *_: None).connect(
            listening.address, listening.key
        )
        sent = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in (1, 16384, 300_001, 5_000_000)]
        for tensor in sent:
            link.send(Echo(), to_host(tensor))
        wait_for("all of it", lambda: len(echoes) == len(sent), 20)
        assert all(torch.equal(got, tensor) for got, tensor in zip(echoes, sent, strict=True))


def test_a_worker_of_another_authority_or_without_tls_is_refused_by_name(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Authority(tmp_path / "other", "other")
    with closing(End(member(authority, "inside"))) as inside:
        address, key = inside.transport.address, inside.transport.key
        for tls, why in ((member(other, "outside"), "is not of this cluster"), (None, "")):
            with closing(End(tls)) as outside:
                outside.links.connect(address, key).send(GroupEnded(group="g", reason=""))
                wait_for("the refusal", lambda end=outside: end.lost, 10)  # type: ignore[misc]
                assert why in outside.lost[0] and (not why or address in outside.lost[0])
        wait_for("the log", lambda: len(caplog.records) == 2, 10)
        assert "a connection from 127.0.0.1" in caplog.text and "did not show the key" in caplog.text
        assert inside.heard == []


def test_a_certificate_of_another_authority_is_told_at_start(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path / "another", "another")
    with pytest.raises(TLSProblem, match=r"is no certificate of worker\.ssl_ca_certs"):
        member(authority, "strange", other.ca)
    old = authority.sign("expired", days=-1)
    with pytest.raises(TLSProblem, match="certificate has expired"):
        ClusterTLS(old.cert, old.key, authority.ca)
