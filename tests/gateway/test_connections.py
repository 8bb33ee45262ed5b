"""Clients that misuse their connections harm nobody else, and hold no place without end."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from bus.settings import RedisSettings
from gateway.http.connection import ClientSocket, Protocol
from gateway.http.paced import PIECE, PacedResponse
from gateway.http.sse import EventStream
from tests.support.gateway_harness import ANSWER, BODY, running

pytest_plugins = ["tests.support.gateway_fixtures"]


def head_of_post(num_bytes: int) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % num_bytes


async def test_a_slow_reader_is_cut_off_and_the_others_do_not_notice(
    redis_settings: RedisSettings, folder: Path
) -> None:
    async with running(redis_settings, folder, stream_buffer_tokens=16) as gate:
        gate.worker.max_model_len = 1_000_000
        await gate.bus.update_card(gate.worker.card())
        await gate.bus.event("worker_joined", "w0", "longer")
        tokens = gate.ids("fox") * 20_000
        gate.worker.tokens_per_step = 50
        gate.worker.reply = lambda submit: tokens if submit.sampling.logprobs else gate.ids(ANSWER)
        slow = socket.create_connection(("127.0.0.1", gate.settings.gateway.port))
        body = json.dumps(BODY | {"max_tokens": 20_000, "stream": True, "logprobs": 20}).encode()
        while (await gate.state())["instances"][0]["max_model_len"] < 1000:
            await asyncio.sleep(0.02)
        await asyncio.to_thread(slow.sendall, head_of_post(len(body)) + body)
        await gate.until("the slow stream", lambda: gate.worker.num_running == 1)
        async with gate.client() as client:
            while not gate.worker.cancelled:
                start = time.perf_counter()
                answer = await client.completions.create(**BODY)
                assert answer.choices[0].text == ANSWER
                assert time.perf_counter() - start < 2.0
        slow.setblocking(True)
        slow.settimeout(5)
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            piece = await asyncio.to_thread(slow.recv, 1 << 20)
            assert piece, "the stream was closed without an end"
            received = (received + piece)[-4000:]
        slow.close()
        assert b'"code":"slow_reader"' in received and b"data: [DONE]" in received
        await gate.settled()


async def test_connections_that_send_nothing_are_closed_and_make_room(
    redis_settings: RedisSettings, folder: Path
) -> None:
    async with (
        running(redis_settings, folder, header_timeout_s=1.0, max_connections=50) as gate,
        AsyncExitStack() as sockets,
    ):
        idle = [await sockets.enter_async_context(gate.connection()) for _ in range(120)]
        idle[-1][1].write(b"POST /v1/completions HTTP/1.1\r\nhost:")
        async with gate.client() as client:
            assert (await client.completions.create(**BODY)).choices[0].text == ANSWER
        start = time.monotonic()
        reads = asyncio.gather(*(reader.read() for reader, _ in idle), return_exceptions=True)
        await asyncio.wait_for(reads, 5)
        assert time.monotonic() - start < 3


async def test_when_all_connections_work_a_further_one_is_refused(
    redis_settings: RedisSettings, folder: Path
) -> None:
    async with running(redis_settings, folder, max_connections=3) as gate, gate.http() as http:
        gate.worker.gate.clear()
        tasks = [asyncio.create_task(http.post("/v1/completions", json=BODY)) for _ in range(3)]
        await gate.until("all", lambda: gate.worker.num_running == 3)
        async with gate.connection() as (reader, _):
            assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 503")
        gate.worker.gate.set()
        await asyncio.gather(*tasks)


async def test_a_body_that_does_not_come_is_given_up(redis_settings: RedisSettings, folder: Path) -> None:
    async with running(redis_settings, folder, header_timeout_s=0.3) as gate:
        async with gate.connection() as (reader, writer):
            writer.write(head_of_post(100) + b"{")
            answer = await asyncio.wait_for(reader.read(), 5)
        assert answer.startswith(b"HTTP/1.1 408") and b"body_timeout" in answer
        await gate.settled()


async def test_a_body_that_drips_is_given_up_too(redis_settings: RedisSettings, folder: Path) -> None:
    async with running(redis_settings, folder, header_timeout_s=0.4) as gate:
        async with gate.connection() as (reader, writer):
            writer.write(head_of_post(100) + b"{")
            answer = asyncio.create_task(reader.read())
            for _ in range(12):
                await asyncio.sleep(0.1)
                writer.write(b" ")
            assert answer.done() and (await answer).startswith(b"HTTP/1.1 408")
        await gate.settled()


async def test_a_request_in_the_pipeline_is_not_timed_by_the_answer_before_it(
    redis_settings: RedisSettings, folder: Path
) -> None:
    header_timeout_s = 0.4
    async with running(redis_settings, folder, header_timeout_s=header_timeout_s) as gate:
        gate.worker.gate.clear()
        async with gate.connection() as (reader, writer):
            body = json.dumps(BODY).encode()
            first = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
            writer.write(first + head_of_post(len(body)) + body[:5])  # at once, or it is no pipeline
            assert b"200" in await asyncio.wait_for(reader.readuntil(b'"ok"}'), 5)
            writer.write(body[5:])
            await gate.until("the second request", lambda: gate.worker.num_running == 1)
            await asyncio.sleep(2 * header_timeout_s)
            gate.worker.gate.set()
            status = await asyncio.wait_for(reader.readline(), 5)
            assert status.startswith(b"HTTP/1.1 200"), f"cut off by the first answer: {status!r}"


async def test_requests_sent_ahead_wait_as_bytes_and_are_answered_in_their_order(
    redis_settings: RedisSettings, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed_ahead = [0]
    parse = Protocol._parse

    def watched(self: Protocol, data: bytes) -> None:
        parse(self, data)
        parsed_ahead.append(len(self.pipeline))

    monkeypatch.setattr(Protocol, "_parse", watched)
    paths = [f"/no/{number}" for number in range(500)]
    async with running(redis_settings, folder) as gate, gate.connection() as (reader, writer):
        writer.write(b"".join(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path.encode() for path in paths))
        for path in paths:
            async with asyncio.timeout(10):
                assert (await reader.readline()).startswith(b"HTTP/1.1 404")
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
                body = await reader.readexactly(int(length.partition(b":")[2]))
            assert path in json.loads(body)["error"]["message"]
    assert 0 < max(parsed_ahead) < 32, "512 bytes hold no more heads"


async def test_a_long_answer_waits_in_pieces_for_its_reader() -> None:
    taken, gate = list[bytes](), asyncio.Semaphore(2)

    async def send(message: Any) -> None:
        await gate.acquire()
        taken.append(message.get("body", b""))

    body = bytes(range(256)) * 1000
    answer = asyncio.create_task(PacedResponse(body)({"type": "http"}, AsyncMock(), send))
    await asyncio.sleep(0)
    assert len(taken) == 2 and len(taken[1]) == PIECE and not answer.done()
    for _ in range(20):
        gate.release()
    await asyncio.wait_for(answer, 1)
    assert b"".join(taken) == body


async def test_the_rest_of_a_stream_is_waited_for_until_the_socket_took_it_or_the_client_left() -> None:
    transport = Mock()
    for leaves in (True, False):
        link = ClientSocket(transport)
        stream = EventStream(link, 100, 1)
        stream.open()
        link.is_paused = True
        stream.push(b"x")
        drained = asyncio.create_task(stream.drained(5))
        await asyncio.sleep(0)
        assert not drained.done()
        link.is_lost, link.is_paused = leaves, leaves
        (stream.on_lost if leaves else link.on_writable)()
        assert await asyncio.wait_for(drained, 1) is not leaves
    link.is_paused = True  # all is written, the socket's buffer is full
    assert await stream.drained(0.01) is False


async def test_a_head_without_an_end_is_refused(redis_settings: RedisSettings, folder: Path) -> None:
    async with running(redis_settings, folder) as gate:
        for begin in (b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: ", b"GET /health?", b"GET / HTTP/1.1\r\n"):
            async with gate.connection() as (reader, writer):
                writer.write(begin)
                piece = b"x" * 4096 if begin[-4:] != b"1.1\r\n" else b"x: y\r\n" * 600
                answer = asyncio.create_task(reader.read())
                sent = 0
                while not answer.done() and sent < 4 << 20:
                    writer.write(piece)
                    sent += len(piece)
                    await asyncio.sleep(0.001)
                assert (await answer).startswith(b"HTTP/1.1 431"), begin
                assert sent < 1 << 20
        async with gate.http() as http:  # a long head with an end is answered
            assert (await http.get("/health", headers={"x-long": "x" * 40_000})).status_code == 200


async def test_a_head_behind_a_refused_body_has_its_limit_too(
    redis_settings: RedisSettings, folder: Path
) -> None:
    async with (
        running(redis_settings, folder, api_keys=["first-key"]) as gate,
        gate.connection() as (reader, writer),
    ):
        writer.write(head_of_post(100) + b"{" * 50)
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), 5)
        assert answer.startswith(b"HTTP/1.1 401")
        writer.write(b"{" * 50)
        await asyncio.sleep(0.1)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: ")
        rest = asyncio.create_task(reader.read())
        sent = 0
        while not rest.done() and sent < 4 << 20:
            writer.write(b"x" * 4096)
            sent += 4096
            await asyncio.sleep(0.001)
        assert b"HTTP/1.1 431" in await rest and sent < 1 << 20


async def test_trailers_are_dropped(redis_settings: RedisSettings, folder: Path) -> None:
    async with running(redis_settings, folder) as gate, gate.connection() as (reader, writer):
        body = json.dumps(BODY).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        trailers = b"".join(b"x-%d: %b\r\n" % (i, b"y" * 1000) for i in range(100))
        writer.write(head + b"%x\r\n%b\r\n0\r\n" % (len(body), body) + trailers + b"\r\n")
        assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 200")
        assert ANSWER.encode() in await asyncio.wait_for(reader.readuntil(b'"usage"'), 5)


async def test_who_stops_reading_when_little_is_left_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Protocol, "write_timeout_s", 0.05)
    transport = Mock()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        transport.get_extra_info.return_value = ours
        one = Protocol.__new__(Protocol)  # of uvicorn's state these methods need nothing else
        one.loop, one.flow, one.transport = asyncio.get_running_loop(), Mock(), transport
        one.socket, one._write_timer = ClientSocket(transport), None
        transport.get_write_buffer_size.return_value = 100_000
        one.pause_writing()
        transport.get_write_buffer_size.return_value = 10_000  # asyncio resumes before all is gone
        one.resume_writing()
        await asyncio.sleep(0.3)
        assert transport.abort.called


async def test_who_reads_no_answer_is_cut_off_and_who_reads_slowly_is_not(
    redis_settings: RedisSettings, folder: Path
) -> None:
    many = 2000  # answers: more than the buffers of a socket hold
    get = b"GET /dashboard/orders.js HTTP/1.1\r\nhost: localhost\r\n\r\n" * many
    async with running(redis_settings, folder, write_timeout_s=0.5) as gate:
        async with gate.http() as http:
            whole = many * len((await http.get("/dashboard/orders.js")).content)
        host, port = "127.0.0.1", gate.settings.gateway.port
        reads_nothing, reads_slowly = (_with_small_buffer(host, port) for _ in range(2))
        sends = [asyncio.to_thread(each.sendall, get) for each in (reads_nothing, reads_slowly)]
        sending = asyncio.gather(*sends, return_exceptions=True)
        received = 0
        until = time.monotonic() + 20.0
        while not _is_gone(reads_nothing):
            assert time.monotonic() < until, "nobody was cut off"
            received += len(await asyncio.to_thread(reads_slowly.recv, 1 << 15))
            await asyncio.sleep(0.05)
        assert await asyncio.to_thread(_rest_of, reads_nothing) < whole / 2
        assert await asyncio.to_thread(_rest_of, reads_slowly, whole) >= whole, f"cut off after {received}"
        reads_slowly.close()
        reads_nothing.close()
        await sending
        await gate.settled()


def _with_small_buffer(host: str, port: int) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)
    client.connect((host, port))
    return client


def _is_gone(server: socket.socket) -> bool:
    """Return True if the other side of a connection takes nothing more."""
    try:
        server.send(b"x", socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return False


def _rest_of(client: socket.socket, enough: int | None = None) -> int:
    """Return the bytes that come until the connection ends, or until there are enough."""
    client.settimeout(10)
    total = 0
    try:
        while (enough is None or total < enough) and (piece := client.recv(1 << 20)):
            total += len(piece)
    except ConnectionResetError:
        pass
    return total
