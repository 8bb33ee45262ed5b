"""A load client cheap enough to share two cores with what it measures: raw sockets, one epoll loop.

It parses nothing: an event ends in an empty line, so counting those counts tokens. For each read it keeps the
events so far and the time; the maker of the tokens knows when each was born.
"""

from __future__ import annotations

import gc
import json
import re
import select
import socket
import time
from dataclasses import dataclass, field
from typing import Final

HEAD: Final = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
)
# Between two looks at the sockets. It counts as lateness, but a client that wakes up for each token would use
# more of the cores than what it measures.
NAP_S: Final = 0.0005
READ_BYTES: Final = 16384  # more than malloc serves without asking the kernel each time costs 10 us a read
_ID: Final = re.compile(rb'"id":"(cmpl-[0-9a-f]+)"')


@dataclass(slots=True)
class Stream:
    sock: socket.socket
    request_id: str = ""
    num_events: int = 0
    carry: bytes = b""
    is_done: bool = False
    reads: list[tuple[int, int]] = field(default_factory=list)  # (events so far, time_ns)


def run_streams(port: int, num_streams: int, tokens_per_s: float, seconds: float) -> list[Stream]:
    """Open all streams and read them to their ends; each gets `tokens_per_s` for `seconds`."""
    max_tokens = max(1, round(tokens_per_s * seconds))
    body = json.dumps(
        {
            "model": "road",
            "prompt": "def f(x):",
            "stream": True,
            "max_tokens": max_tokens,
            "seed": round(tokens_per_s),
        }
    ).encode()
    poll = select.epoll()
    streams: dict[int, Stream] = {}
    for _ in range(num_streams):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(HEAD % len(body) + body)
        sock.setblocking(False)
        streams[sock.fileno()] = Stream(sock)
        poll.register(sock.fileno(), select.EPOLLIN)
    gc.disable()
    _read_all(poll, streams, deadline=time.monotonic() + 4 * seconds + 20)
    gc.enable()
    for stream in streams.values():
        stream.sock.close()
    return list(streams.values())


def _read_all(poll: select.epoll, streams: dict[int, Stream], deadline: float) -> None:
    num_open = len(streams)
    while num_open:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{num_open} of {len(streams)} streams have not ended")
        time.sleep(NAP_S)
        for fileno, _ in poll.poll(1.0):
            stream = streams[fileno]
            data = stream.sock.recv(READ_BYTES)
            now = time.time_ns()
            stream.num_events += (stream.carry + data).count(b"\n\n")
            stream.carry = b"\n" if data.endswith(b"\n") and not data.endswith(b"\n\n") else b""
            stream.reads.append((stream.num_events, now))
            if not stream.request_id and (found := _ID.search(data)):
                stream.request_id = found[1].decode() + "-0"
            if not data or b"[DONE]" in data:
                stream.is_done = True
                poll.unregister(fileno)
                num_open -= 1
