"""`make test-upgrade`: processes of the release before are replaced one by one, under load."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import openai
import pytest

from bench.common.results import DEMO
from bench.common.service import Service, wait_for
from bus.messages import Event
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

DRAIN_S = 120.0
START_S = 600.0  # kernels of two releases are compiled
PROMPTS = ("def read_lines(path):\n    ", "class Stack:\n    def push(self", "import os\n\n\ndef main(")


@dataclass(frozen=True)
class Case:
    """A request whose text is known. seed 0: greedy."""

    prompt: str
    seed: int
    n: int = 1

    @property
    def body(self) -> dict[str, Any]:
        drawn = {"temperature": 0.8, "seed": self.seed} if self.seed else {"temperature": 0.0}
        more = {"frequency_penalty": 0.5, "extra_body": {"ignore_eos": True}}
        return {"model": "demo", "prompt": self.prompt, "max_tokens": 60, "n": self.n} | drawn | more


CASES = [
    *(Case(prompt, seed) for prompt in PROMPTS for seed in (0, 7)),
    Case(PROMPTS[0], 11, n=3),  # its choices share an entry in schema 2, and have one each in schema 1
]
Texts = dict[int, str]  # by choice


class MixedService(Service):
    """Starts processes of the release in `program`; `replace` goes on with this one."""

    start_s: ClassVar[float] = START_S

    def replace(self, name: str, start: Callable[[], Any]) -> None:
        """End a process, which drains, and start one of this release in its place."""
        status = self.processes[name].terminate(DRAIN_S)
        assert status == 0, f"{name} ended with {status}\n{self.processes[name].tail()}"
        self.program, self.model = ROOT, DEMO
        start()

    def written_in(self) -> int:
        """Return the schema of what is written; a data set of release 0.1 does not name it."""
        found: Any = self.redis.get("instar:schema")
        return int(found or 1)

    def reads(self, gateway: str) -> bytes:
        found: Any = self.redis.get(f"instar:gateway:{gateway}")
        return bytes(found or b"")


def texts_of(service: Service, gateway: int, case: Case) -> Texts:
    """Stream a request. Raises openai's errors, AssertionError for a choice without its end."""
    texts: Texts = {}
    ends: Counter[int] = Counter()
    with openai.OpenAI(
        base_url=service.url(gateway) + "/v1", api_key="none", max_retries=0, timeout=DRAIN_S
    ) as api:
        for chunk in api.completions.create(stream=True, **case.body):
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
                ends[choice.index] += choice.finish_reason == "length"
    assert ends == Counter(range(case.n)), f"ends by choice: {ends}"
    return texts


@dataclass
class Streams:
    """Clients that stream one case after the other, each at one of the gateways that are open to them.

    `open`: what a balancer before the gateways would know: one that is to be replaced gets no new calls.
    """

    service: Service
    wanted: dict[Case, Texts]
    clients: int = 4
    open: set[int] = field(default_factory=lambda: {0, 1})
    num_whole: int = 0
    problems: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._ending = threading.Event()
        threads = [threading.Thread(target=self._loop, args=(seed,)) for seed in range(self.clients)]
        self._threads = threads
        for thread in threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(DRAIN_S + 10)
            assert not thread.is_alive(), "a stream is still open"

    def _loop(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._ending.is_set():
            case, gateway = rng.choice(CASES), rng.choice(sorted(self.open))
            try:
                found = texts_of(self.service, gateway, case)
            except (openai.OpenAIError, AssertionError) as problem:
                self.problems.append(f"{case} at gateway {gateway}: {type(problem).__name__}: {problem}")
                self._ending.wait(0.5)
                continue
            if found == self.wanted[case]:
                self.num_whole += 1
            else:
                self.problems.append(f"{case} at gateway {gateway}: {found}, not {self.wanted[case]}")

    def go_on(self, count: int = 6) -> None:
        """Wait for so many more whole streams. Raises AssertionError for one that is not."""
        until = self.num_whole + count
        wait_for(f"{count} streams", lambda: self.num_whole >= until or self.problems, DRAIN_S)
        assert not self.problems, self.problems[:3]


def test_processes_are_replaced_one_by_one_and_every_stream_is_whole(
    release_before: Path,
) -> None:
    settings = {"WORKER__DTYPE": "float32", "WORKER__LEASE_S": "5", "WORKER__DRAIN_TIMEOUT_S": "90"}
    settings |= {"GATEWAY__DRAIN_TIMEOUT_S": "90", "GATEWAY__QUEUE_TIMEOUT_S": "120"}
    service = MixedService(
        num_workers=2,
        num_gateways=2,
        settings=settings,
        program=release_before,
        model=release_before / "models" / "demo",  # it cannot read the profiles of this release
    )
    with service:
        wanted = {case: texts_of(service, 0, case) for case in CASES}
        assert service.reads("g0") == b"1"
        began_s = time.monotonic()
        with Streams(service, wanted) as streams:
            streams.go_on()
            for name in ("controller", "monitor"):
                service.replace(name, lambda name=name: service.add(name, name))  # type: ignore[misc]
                streams.go_on()
            for index in range(2):
                streams.open.remove(index)
                time.sleep(1.0)  # for calls that are on their way there
                service.replace(f"gateway{index}", lambda index=index: service.add_gateway(index))  # type: ignore[misc]
                service.wait_ready()
                assert service.reads(f"g{index}") == b"1 and 2"
                streams.open.add(index)
                streams.go_on()
            for index in range(2):
                assert service.written_in() == 1  # a worker that reads no other one is there
                name = f"w{index}"
                service.replace(name, lambda name=name: service.add_worker(name))  # type: ignore[misc]
                service.wait_ready()
                streams.go_on()
            wait_for("schema 2", lambda: service.written_in() == 2, 30)
            streams.go_on(12)
        assert not streams.problems, streams.problems[:3]
        letters: Any = service.redis.xrange("instar:dead-letters")
        assert letters == [], letters[:3]
        assert {m.kind for m in service.messages("instar:events", Event)} >= {"schema_changed"}
    sys.stdout.write(f"{streams.num_whole} streams, all whole, in {time.monotonic() - began_s:.0f} s\n")
