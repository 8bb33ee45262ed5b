"""Connections between workers: no worker waits for one that is stopped, gone or a stranger."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from multiprocessing.connection import Client

import pytest
import torch

from bench.common.service import wait_for
from worker.distributed import transport
from worker.distributed.messages import Echo, GroupEnded, GroupMessage, ProbeFailed, ProbeMessage
from worker.distributed.transport import Link, Transport, to_host


class End:
    """One worker's transport, and what came to it."""

    def __init__(self) -> None:
        self.heard: list[tuple[Link, GroupMessage]] = []
        self.lost: list[str] = []
        self.transport = Transport("127.0.0.1", 2.0)
        self.links = self.transport.endpoint(
            GroupMessage,
            lambda link, message, payload: self.heard.append((link, message)),
            lambda link, reason: self.lost.append(reason),
        )

    def close(self) -> None:
        self.transport.close()


@pytest.fixture
def pair() -> Iterator[tuple[End, End]]:
    with closing(End()) as one, closing(End()) as other:
        yield one, other


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


def test_a_process_that_is_silent_too_long_is_lost(pair: tuple[End, End]) -> None:
    one, _ = pair
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
