"""Clients of all gateways: requests of several kinds in closed loops, and what became of each."""

from __future__ import annotations

import asyncio
import math
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import httpx

PATIENCE_S: Final = 120.0  # a request that is not served after so long is lost
AGAIN_S: Final = 0.5  # before a request is sent again
USAGE: Final = re.compile(rb'"completion_tokens":\s*(\d+)')
COMMON: Final[dict[str, Any]] = {"model": "demo", "temperature": 0, "ignore_eos": True}
PROMPT: Final = "def read_lines(path):\n    "
STREAMED: Final = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Kind:
    """A kind of request. `tokens`: of a whole answer, all choices together; 0: any number."""

    name: str
    body: dict[str, Any]
    weight: int
    path: str = "/v1/completions"
    tokens: int = 0
    status: int = 200
    leaves_after: int = 0  # events of its stream, after which the client is gone; 0: it stays


KINDS: Final = (
    Kind("completion", {"prompt": PROMPT, "max_tokens": 12}, 4, tokens=12),
    Kind("choices", {"prompt": PROMPT, "max_tokens": 8, "n": 2, "logprobs": 2}, 1, tokens=16),
    Kind("stream", {"prompt": PROMPT, "max_tokens": 48, **STREAMED}, 3, tokens=48),
    Kind("long stream", {"prompt": 20 * PROMPT, "max_tokens": 200, **STREAMED}, 1, tokens=200),
    Kind(
        "chat",
        {"messages": [{"role": "user", "content": "Write a loop."}], "max_tokens": 24, **STREAMED},
        2,
        "/v1/chat/completions",
        tokens=24,
    ),
    Kind(
        "guided", {"prompt": PROMPT, "max_tokens": 8, "guided_choice": ["yes", "no"], "ignore_eos": False}, 1
    ),
    Kind("left", {"prompt": PROMPT, "max_tokens": 400, **STREAMED}, 1, leaves_after=3),
    Kind("refused", {"prompt": PROMPT, "n": 0}, 1, status=400),
)


class _LostError(Exception):
    """A request that was accepted and did not get its answer."""


class _RefusedError(Exception):
    """A refusal that passes (429, 503): the request is sent again."""


class Traffic:
    """Clients in a thread of their own, for as long as the context.

    served: by kind. refused: answers of 429 and 503. repeated: requests that a gateway took with it as it was
    killed, which no gateway can finish (docs/faults.md), and connections that it refused afterwards; both are
    sent again elsewhere. lost: every other request without its answer, in words.
    """

    def __init__(self, urls: Sequence[str], num_clients: int, seed: int = 1) -> None:
        self.served, self.lost = Counter[str](), list[str]()
        self.refused = self.repeated = 0
        self._num_clients, self._seed = num_clients, seed
        self._up = list(urls)
        self._killed_s: dict[str, float] = {}  # when a gateway was killed last; infinite while it is
        self._ending = threading.Event()
        self._problem: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(2 * PATIENCE_S)
        if self._problem is not None:
            raise self._problem
        if self._thread.is_alive():
            raise RuntimeError("a client still waits for its answer")

    # ---------------------------------------------------------------- what happens to gateways

    def leaves(self, url: str) -> None:
        """Send no new requests to this gateway."""
        self._up.remove(url)

    def dies(self, url: str) -> None:
        """Expect that its connections break, from now on."""
        self._killed_s[url] = math.inf

    def is_dead(self, url: str) -> None:
        """Expect it no more, of requests that are sent from now on."""
        self._killed_s[url] = time.monotonic()

    def joins(self, url: str) -> None:
        self._up.append(url)

    def excuses(self, error: httpx.TransportError, url: str, sent_s: float) -> bool:
        """Return True if a request that was sent at `sent_s` failed by the death of its gateway."""
        is_refused = isinstance(error, httpx.ConnectError) and url not in self._up
        return is_refused or self._killed_s.get(url, -math.inf) >= sent_s

    # ---------------------------------------------------------------- the clients

    def _run(self) -> None:
        try:
            asyncio.run(self._all())
        except BaseException as problem:  # noqa: BLE001 the context raises it
            self._problem = problem

    async def _all(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._num_clients):
                tasks.create_task(self._client(random.Random(f"{self._seed} {number}")))

    async def _client(self, rng: random.Random) -> None:
        fresh = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=PATIENCE_S, limits=fresh) as http:
            while not self._ending.is_set():
                (kind,) = rng.choices(KINDS, [one.weight for one in KINDS])
                await self._one(http, kind, rng)

    async def _one(self, http: httpx.AsyncClient, kind: Kind, rng: random.Random) -> None:
        began_s = time.monotonic()
        while time.monotonic() < began_s + PATIENCE_S:
            if up := list(self._up):
                url, sent_s = rng.choice(up), time.monotonic()
                try:
                    await _send(http, url, kind)
                except _RefusedError:
                    self.refused += 1
                except httpx.TransportError as error:
                    if not self.excuses(error, url, sent_s):
                        self._lose(kind, f"{type(error).__name__}: {error}")
                        return
                    self.repeated += 1
                except _LostError as problem:
                    self._lose(kind, str(problem))
                    return
                else:
                    self.served[kind.name] += 1
                    return
            await asyncio.sleep(AGAIN_S)
        self._lose(kind, f"not served within {PATIENCE_S:g} s")

    def _lose(self, kind: Kind, why: str) -> None:
        self.lost.append(f"{time.strftime('%H:%M:%S')} {kind.name}: {why}")


async def _send(http: httpx.AsyncClient, url: str, kind: Kind) -> None:
    """Send a request and read its answer. Raises _RefusedError, _LostError and httpx.TransportError."""
    received = b""
    async with http.stream("POST", url + kind.path, json=COMMON | kind.body) as answer:
        async for piece in answer.aiter_bytes():
            received += piece
            if kind.leaves_after and received.count(b"data: ") >= kind.leaves_after:
                return
    if answer.status_code in (429, 503):
        raise _RefusedError
    if problem := problem_of(kind, answer.status_code, received):
        raise _LostError(problem)


def problem_of(kind: Kind, status: int, received: bytes) -> str:
    """Return what an answer lacks, "" for a whole one."""
    if status != kind.status:
        return f"{status} {received[:300]!r}"
    if status != 200:
        return ""
    if kind.body.get("stream") and (b"data: [DONE]" not in received or b'"error"' in received):
        return f"a stream without its end: ...{received[-300:]!r}"
    usage = USAGE.findall(received)
    if kind.tokens and (not usage or int(usage[-1]) != kind.tokens):
        return f"{usage[-1:]} of {kind.tokens} tokens: ...{received[-300:]!r}"
    return ""
