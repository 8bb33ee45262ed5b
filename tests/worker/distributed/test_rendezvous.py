"""Where groups meet."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from worker.distributed.rendezvous import open_store


def test_a_store_listens_at_its_own_address_alone() -> None:
    store = open_store("127.0.0.1", 5.0)
    other = TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=5))
    other.set("from", "there")
    assert store.get("from") == b"there"
    with pytest.raises(ConnectionRefusedError):  # as other addresses of the machine would be
        socket.create_connection(("127.0.0.2", store.port), timeout=5)


def test_a_store_ends_with_its_last_user() -> None:
    store = open_store("127.0.0.1", 5.0)
    port = store.port
    del store
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError, match="assign"):
        open_store("192.0.2.1", 5.0)
