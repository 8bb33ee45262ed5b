"""Clients that leave, flood, dawdle or wait too long; gateways that go: faults 4 to 9 of docs/faults.md."""

from __future__ import annotations

import http.client
import json
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from bench.common.service import Service, wait_for
from tests.faults.conftest import heal
from tests.faults.load import LONG_STREAM, PROMPT, Load, Stream, client, complete, p99

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]
Report = Callable[[dict[str, Any]], None]
MANY_TOKENS = {"prompt": PROMPT, "max_tokens": 100}
SLOW_WORKER = {"WORKER__MAX_NUM_SEQS": "4", "GATEWAY__MAX_QUEUE": "8"}


@dataclass(frozen=True)
class Refusal:
    status: int
    retry_after: str | None
    seconds: float  # from the request sent to the first byte of its answer


@pytest.fixture(scope="module")
def small() -> Iterator[Service]:
    """Room for four at once and a queue of eight, so that it can be filled."""
    with Service(num_workers=1, num_gateways=2, settings=SLOW_WORKER) as service:
        yield service


@pytest.fixture
def service(small: Service) -> Iterator[Service]:
    yield small
    heal(small)


def open_stream(
    service: Service, max_tokens: int, prompt: str = PROMPT, stream: bool = True
) -> socket.socket:
    """A raw connection that has asked for a stream, to be cut or starved at will."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": stream}
    connection = connect(service)
    connection.sendall(request_bytes(body))
    return connection


def connect(service: Service) -> socket.socket:
    return socket.create_connection(("127.0.0.1", service.gateway_ports[0]), timeout=90)


def request_bytes(body: dict[str, Any]) -> bytes:
    """A whole HTTP request for a completion."""
    payload = json.dumps({"model": "demo", "ignore_eos": True} | body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    )
    return head.encode() + payload


def is_idle(service: Service) -> bool:
    """Check that nothing runs, waits or holds a block, and every entry was acknowledged and deleted."""
    state = service.state()
    quiet = all(not i["running"] and not i["waiting"] and not i["kv"]["used"] for i in state["instances"])
    with service.redis as redis:
        backlog = sum(redis.xlen(key) for key in redis.keys("instar:requests:*"))
    return quiet and backlog == 0


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
def test_a_client_that_leaves_while_decoding_frees_its_blocks(service: Service, stream: bool) -> None:
    wait_for("an idle service", lambda: is_idle(service))
    connection = open_stream(service, 1800, stream=stream)
    wait_for("it to run", lambda: service.blocks_used() > 0)
    before = service.state()["instances"][0]
    connection.close()
    left = time.monotonic()
    wait_for("its blocks to be free", lambda: is_idle(service), within_s=5)
    assert time.monotonic() - left < 5, before


@pytest.mark.slow
def test_clients_that_leave_the_queue_and_the_prefill_leave_nothing_behind(service: Service) -> None:
    running = [open_stream(service, 1800) for _ in range(4)]
    wait_for("four to run", lambda: service.state()["instances"][0]["running"] == 4)
    queued = [open_stream(service, 1000, prompt=PROMPT * 60) for _ in range(3)]
    wait_for("three to wait", lambda: service.state()["instances"][0]["waiting"] == 3)
    for connection in queued:
        connection.close()
    wait_for("the queue to empty", lambda: service.state()["instances"][0]["waiting"] == 0, within_s=5)
    for connection in running:
        connection.close()
    wait_for("everything to be free", lambda: is_idle(service), within_s=5)


def test_a_deadline_that_passes_in_the_queue_is_a_504_and_never_runs() -> None:
    settings = SLOW_WORKER | {"WORKER__MAX_NUM_SEQS": "1", "GATEWAY__QUEUE_TIMEOUT_S": "0.7"}
    with Service(num_workers=1, settings=settings) as service:
        running = open_stream(service, 1900)
        wait_for("one to run", lambda: service.state()["instances"][0]["running"] == 1)
        generated = service.metric("instar_request_success_total")
        for stream in (False, True):
            with client(service) as api, pytest.raises(openai.APIStatusError) as refused:
                api.completions.create(model="demo", prompt=PROMPT, max_tokens=5, stream=stream)
            assert refused.value.status_code == 504
            assert refused.value.code == "deadline_exceeded"
        assert service.metric("instar_request_success_total") == generated
        running.close()
        wait_for("everything to be free", lambda: is_idle(service), within_s=5)


def test_a_burst_far_over_capacity_is_bounded_and_refused_quickly(service: Service, report: Report) -> None:
    with Load(service, clients=2) as load:
        load.warm()
        load.mark()
        refusals, served = burst(service, 120)
        load.recover(5)
    with service.explained():
        assert served, "nobody was served"
        assert len(refusals) >= 60, f"only {len(refusals)} of 120 refused by a queue of 8"
        assert all(r.status in (429, 503) and r.retry_after for r in refusals)
        wait_for("an idle service", lambda: is_idle(service))
    row = load.row("7 burst of 120 on a queue of 8")
    report(row | {"refused": len(refusals), "reject_p99_s": p99([r.seconds for r in refusals])})


def burst(service: Service, count: int) -> tuple[list[Refusal], int]:
    """`count` requests at once over connections that stand, as a router's do: refusals, and how many were
    served. Raw sockets: a client library spends more time on a request than the gateway on its refusal."""
    connections = [connect(service) for _ in range(count)]
    payload = request_bytes(MANY_TOKENS)
    sent: dict[socket.socket, float] = {}
    for connection in connections:
        sent[connection] = time.monotonic()
        connection.sendall(payload)
    answered = dict(first_answers(connections))
    refusals, served = [], 0
    for connection in connections:
        with connection:
            reply = http.client.HTTPResponse(connection)
            reply.begin()
            seconds = answered[connection] - sent[connection]
            if reply.status == 200:
                served += 1
            else:
                refusals.append(Refusal(reply.status, reply.getheader("retry-after"), seconds))
    return refusals, served


def first_answers(connections: list[socket.socket]) -> Iterator[tuple[socket.socket, float]]:
    """When each has something to read; nothing is read."""
    with selectors.DefaultSelector() as waiting:
        for connection in connections:
            waiting.register(connection, selectors.EVENT_READ)
        ends = time.monotonic() + 90
        while waiting.get_map() and time.monotonic() < ends:
            ready = waiting.select(1)
            now = time.monotonic()
            for key, _ in ready:
                waiting.unregister(key.fileobj)
                yield key.fileobj, now  # type: ignore[misc]  # what was registered


@pytest.mark.slow
def test_a_reader_of_one_byte_a_second_holds_nobody_up(service: Service, report: Report) -> None:
    with Load(service, clients=2) as load:
        load.warm(20)
        slow = open_stream(service, 1500)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        load.mark()
        for _ in range(3):
            assert slow.recv(1)
            time.sleep(1)
        load.recover(20)
        slow.close()
    assert load.failed == []
    report(load.row("8 slow reader"))
    wait_for("its blocks to be free", lambda: is_idle(service), within_s=10)


def test_a_gateway_asked_to_leave_finishes_its_streams_and_refuses_new_ones(service: Service) -> None:
    stream = Stream(service, LONG_STREAM | {"max_tokens": 400}).start().wait_chunks(3)
    service.processes["gateway0"].signal(signal.SIGTERM)
    time.sleep(0.2)
    try:
        complete(service, max_tokens=2)
    except openai.APIStatusError as refused:
        assert refused.status_code == 503
        assert refused.response.headers["retry-after"]
    except openai.APIConnectionError:
        pass  # it no longer listens, which a router takes for the same
    else:
        raise AssertionError("a leaving gateway took a new request")
    stream.finished()
    assert stream.error is None
    assert stream.finish == {0: "length"}
    assert service.processes["gateway0"].wait(20) == 0


@pytest.mark.slow
def test_of_two_gateways_the_death_of_one_cancels_its_requests_and_spares_the_others(
    service: Service, report: Report
) -> None:
    wait_for("an idle service", lambda: is_idle(service))
    with Load(service, clients=2, gateway=1) as load:
        load.warm()
        orphan = Stream(service, LONG_STREAM | {"max_tokens": 1900}).start().wait_chunks(3)
        load.mark()
        service.processes["gateway0"].kill()
        orphan.finished()
        load.recover(10)
    assert orphan.error is not None, "a dead gateway's stream must not look complete"
    with service.explained():
        assert load.failed == []
        wait_for("the orphan to be cancelled", lambda: service.blocks_used(gateway=1) == 0, within_s=15)
    report(load.row("9 one of two gateways dies"))
