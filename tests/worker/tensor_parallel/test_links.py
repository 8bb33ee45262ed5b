"""Connections between the workers of a group: nobody waits for one that is stopped, gone or a stranger."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Client

import pytest

from bench.common.service import wait_for
from worker.distributed.messages import GroupEnded, GroupMessage
from worker.parallel.links import Link, Links


class End:
    """One worker's links, and what came to them."""

    def __init__(self) -> None:
        self.heard: list[tuple[Link, GroupMessage]] = []
        self.lost: list[str] = []
        self.links = Links(
            "127.0.0.1",
            2.0,
            lambda link, message: self.heard.append((link, message)),
            lambda link, reason: self.lost.append(reason),
        )

    def close(self) -> None:
        self.links.close()


@pytest.fixture
def pair() -> Iterator[tuple[End, End]]:
    with closing(End()) as one, closing(End()) as other:
        yield one, other


def test_what_is_sent_before_a_link_is_open_comes_in_order(pair: tuple[End, End]) -> None:
    one, other = pair
    link = one.links.connect(other.links.address, other.links.key)
    sent = [GroupEnded(group=str(i), reason="") for i in range(50)]
    for message in sent:
        link.send(message)
    wait_for("all of it", lambda: len(other.heard) == 50, 10)
    assert [message for _, message in other.heard] == sent
    other.heard[0][0].send(GroupEnded(group="back", reason=""))
    wait_for("an answer", lambda: one.heard, 10)


def test_a_stopped_worker_is_not_waited_for(pair: tuple[End, End]) -> None:
    """Its system takes the connection, and then nothing comes."""
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
    address = other.links.address
    other.close()
    one.links.connect(address, other.links.key)
    wait_for("the loss", lambda: one.lost, 10)


def test_a_wrong_key_opens_nothing(pair: tuple[End, End]) -> None:
    one, other = pair
    one.links.connect(other.links.address, b"guessed").send(GroupEnded(group="g", reason=""))
    wait_for("the loss", lambda: one.lost, 10)
    assert other.heard == []


def test_strangers_keep_nobody_out(pair: tuple[End, End]) -> None:
    """One is silent, one talks nonsense."""
    one, other = pair
    host, _, port = other.links.address.rpartition(":")
    with socket.create_connection((host, int(port))), Client((host, int(port))) as talker:
        talker.send_bytes(b"GET / HTTP/1.1")
        one.links.connect(other.links.address, other.links.key).send(GroupEnded(group="g", reason=""))
        wait_for("the message", lambda: other.heard, 10)


def test_a_process_that_is_silent_too_long_is_lost(pair: tuple[End, End]) -> None:
    one, _ = pair
    host, _, port = one.links.address.rpartition(":")
    with Client((host, int(port)), authkey=one.links.key):
        wait_for("the loss", lambda: one.lost, 10)
    assert one.lost == ["TimeoutError: nothing was heard for 2 s"]
