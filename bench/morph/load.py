"""Open-loop load of streamed completions: seeded arrivals, exact lengths, one thread of raw sockets.

A request is sent when it is due, whatever became of those before it, so its time to the first token counts
the queue it found. The client shares the cores with what it measures and parses next to nothing: of each
read it looks for the first token, the end, and the spans of precision in the last chunk.
"""

from __future__ import annotations

import gc
import json
import random
import re
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Phase = Literal["calm", "burst", "calm again"]

PROMPT_TOKENS: Final = (32, 96)
OUTPUT_TOKENS: Final = (192, 384)
MEAN_OUTPUT_TOKENS: Final = sum(OUTPUT_TOKENS) / 2
VOCABULARY: Final = range(16, 4096)  # of models/demo, without its special tokens

HEAD: Final = (
    "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"
)
TOKEN: Final = b'"choices":'  # within a chunk's text the quotes would be escaped
END: Final = b"[DONE]"
KEPT_BYTES: Final = 8192  # of a stream's end: the last chunk, with its spans of precision
READ_BYTES: Final = 65536
NAP_S: Final = 0.002  # between two looks at the sockets; the error of a time measured here
_SPANS: Final = re.compile(rb'"precision":(\[.*?\])')


@dataclass(frozen=True, slots=True)
class Arrival:
    """`at_s` after the beginning."""

    at_s: float
    prompt: list[int]
    num_out: int
    phase: Phase = "burst"

    def bytes(self) -> bytes:
        body = {
            "model": "demo",
            "prompt": self.prompt,
            "max_tokens": self.num_out,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0,
            "return_precision": True,
        }
        data = json.dumps(body).encode()
        return HEAD.format(len(data)).encode() + data


@dataclass(frozen=True, slots=True)
class Script:
    """Seconds of each phase, requests per second when it is calm and in the burst."""

    calm_s: float
    burst_s: float
    calm_again_s: float
    calm_rate: float
    burst_rate: float

    @property
    def burst_ends_s(self) -> float:
        return self.calm_s + self.burst_s

    @property
    def seconds(self) -> float:
        return self.burst_ends_s + self.calm_again_s

    def arrivals(self, seed: int) -> list[Arrival]:
        """At random in each phase, as of a Poisson process, but so many as the rate says: with some dozens of
        requests the number itself would decide how hard a burst is. The same seed, the same requests."""
        rng = random.Random(seed)
        phases: list[tuple[Phase, float, float, float]] = [
            ("calm", 0.0, self.calm_s, self.calm_rate),
            ("burst", self.calm_s, self.burst_ends_s, self.burst_rate),
            ("calm again", self.burst_ends_s, self.seconds, self.calm_rate),
        ]
        found = []
        for phase, begins_s, ends_s, rate in phases:
            count = round(rate * (ends_s - begins_s))
            times = sorted(rng.uniform(begins_s, ends_s) for _ in range(count))
            found += [make_request(rng, at_s, phase) for at_s in times]
        return found


def make_request(rng: random.Random, at_s: float, phase: Phase = "burst") -> Arrival:
    prompt = rng.choices(VOCABULARY, k=rng.randint(*PROMPT_TOKENS))
    return Arrival(at_s, prompt, rng.randint(*OUTPUT_TOKENS), phase)


@dataclass(slots=True)
class Stream:
    """One request on its way. Times are time.time(); `last_s` is that of the last token so far."""

    arrival: Arrival
    due_s: float
    sock: socket.socket
    first_s: float = 0.0
    last_s: float = 0.0
    longest_pause_s: float = 0.0
    num_chunks: int = 0
    tail: bytes = field(default=b"", repr=False)

    @property
    def ttft_s(self) -> float:
        """From when it was due."""
        return self.first_s - self.due_s

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first."""
        return (self.last_s - self.first_s) / (self.arrival.num_out - 1)

    def take(self, data: bytes, now_s: float) -> bool:
        """What a read brought. True at the stream's end; RuntimeError where it ended with anything but its
        last token."""
        carried = self.tail[-len(TOKEN) + 1 :]
        num_chunks = (carried + data).count(TOKEN)
        self.tail = (self.tail + data)[-KEPT_BYTES:]
        if num_chunks:
            if self.first_s:
                self.longest_pause_s = max(self.longest_pause_s, now_s - self.last_s)
            else:
                self.first_s = now_s
            self.last_s = now_s
            self.num_chunks += num_chunks
        if data and END not in self.tail[-len(data) - len(END) :]:
            return False
        if END not in self.tail or b'"finish_reason":"length"' not in self.tail:
            raise RuntimeError(f"a request was not served to its end: ...{self.tail[-600:]!r}")
        return True

    def spans(self) -> list[dict[str, Any]]:
        """Of its tokens, with the layers below full in which they were made."""
        found = _SPANS.search(self.tail)
        if not found:
            raise RuntimeError(f"the answer does not tell its precision: ...{self.tail[-600:]!r}")
        spans: list[dict[str, Any]] = json.loads(found[1])
        return spans


def replay(port: int, arrivals: Sequence[Arrival], patience_s: float = 120.0) -> tuple[float, list[Stream]]:
    """Sends them when they are due and reads all to their ends. Returns when it began, too. TimeoutError
    `patience_s` after the last was due."""
    poll = select.epoll()
    open_streams: dict[int, Stream] = {}
    ended: list[Stream] = []
    pending = [(arrival, arrival.bytes()) for arrival in reversed(arrivals)]
    began_s = time.time()
    deadline = began_s + arrivals[-1].at_s + patience_s
    gc.disable()
    try:
        while pending or open_streams:
            now_s = time.time()
            if now_s > deadline:
                raise TimeoutError(f"{len(open_streams)} of {len(arrivals)} requests have not ended")
            while pending and pending[-1][0].at_s <= now_s - began_s:
                arrival, request = pending.pop()
                stream = _send(port, arrival, request, began_s + arrival.at_s)
                open_streams[stream.sock.fileno()] = stream
                poll.register(stream.sock, select.EPOLLIN)
            for fileno in _read(poll, open_streams):
                ended.append(open_streams.pop(fileno))
            time.sleep(NAP_S)
    finally:
        gc.enable()
        for stream in (*open_streams.values(), *ended):
            stream.sock.close()
        poll.close()
    return began_s, ended


def _send(port: int, arrival: Arrival, request: bytes, due_s: float) -> Stream:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(request)
    sock.setblocking(False)
    return Stream(arrival, due_s, sock)


def _read(poll: select.epoll, streams: dict[int, Stream]) -> list[int]:
    """Reads what is there; returns the file numbers of the streams that ended."""
    ended = []
    for fileno, _ in poll.poll(0):
        stream = streams[fileno]
        if stream.take(stream.sock.recv(READ_BYTES), time.time()):
            poll.unregister(fileno)
            ended.append(fileno)
    return ended


def saturate(port: int, seconds: float, num_at_once: int, seed: int = 0) -> float:
    """Output tokens per second with so many requests always there: what the service can do, for scripts
    that must ask for more than one shape has and less than another."""
    rng = random.Random(seed)
    poll = select.epoll()
    streams: dict[int, Stream] = {}
    chunks: list[tuple[float, int]] = []
    ends_s = time.time() + seconds

    def one_more() -> None:
        arrival = make_request(rng, 0.0)
        stream = _send(port, arrival, arrival.bytes(), time.time())
        streams[stream.sock.fileno()] = stream
        poll.register(stream.sock, select.EPOLLIN)

    for _ in range(num_at_once):
        one_more()
    while time.time() < ends_s:
        before = sum(stream.num_chunks for stream in streams.values())
        ended = _read(poll, streams)
        chunks.append((time.time(), sum(stream.num_chunks for stream in streams.values()) - before))
        for fileno in ended:
            streams.pop(fileno).sock.close()
            one_more()
        time.sleep(NAP_S)
    for stream in streams.values():
        stream.sock.close()  # the service cancels what runs
    settled_s = ends_s - seconds * 2 / 3  # the beginning is prefills and an empty cache
    return sum(num for at_s, num in chunks if at_s > settled_s) / (ends_s - settled_s)
