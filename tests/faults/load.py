"""Clients for the fault tests: a background load of short requests, and single streams to look into."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import openai

from bench.common.service import Service, wait_for

PROMPT = "def read_lines(path):\n    "
# The penalty keeps a greedy text from going round in circles, where a wrong token would not show.
LONG_STREAM = {"max_tokens": 160, "frequency_penalty": 0.5, "extra_body": {"ignore_eos": True}}


def client(service: Service, gateway: int = 0, timeout: float = 60.0) -> openai.OpenAI:
    """No retries: a retry of the client's would hide a failure of ours."""
    return openai.OpenAI(
        base_url=service.url(gateway) + "/v1", api_key="none", max_retries=0, timeout=timeout
    )


def complete(service: Service, prompt: Any = PROMPT, gateway: int = 0, **params: Any) -> Any:
    with client(service, gateway) as api:
        return api.completions.create(model="demo", prompt=prompt, **({"temperature": 0.0} | params))


@dataclass
class Stream:
    """One streaming completion, read in a thread of its own."""

    service: Service
    params: dict[str, Any]
    gateway: int = 0
    prompt: Any = PROMPT
    texts: dict[int, str] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    logprobs: list[tuple[str, float]] = field(default_factory=list)
    num_chunks: int = 0
    usage: Any = None
    error: Exception | None = None
    first_chunk_at: float | None = None

    def start(self) -> Self:
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()
        return self

    def _read(self) -> None:
        try:
            with client(self.service, self.gateway) as api:
                self._consume(api)
        except (openai.OpenAIError, OSError) as problem:
            self.error = problem

    def _consume(self, api: openai.OpenAI) -> None:
        body = {"model": "demo", "prompt": self.prompt, "temperature": 0.0} | self.params
        body["stream_options"] = {"include_usage": True}
        for chunk in api.completions.create(stream=True, **body):
            self.first_chunk_at = self.first_chunk_at or time.monotonic()
            self.num_chunks += 1
            self.usage = chunk.usage or self.usage
            for choice in chunk.choices:
                self._take(choice)

    def _take(self, choice: Any) -> None:
        self.texts[choice.index] = self.texts.get(choice.index, "") + choice.text
        if choice.finish_reason:
            self.finish[choice.index] = choice.finish_reason
        if choice.logprobs:
            self.logprobs += zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, strict=True)

    @property
    def text(self) -> str:
        return self.texts.get(0, "")

    def wait_chunks(self, count: int) -> Self:
        wait_for(f"{count} chunks of a stream", lambda: self.num_chunks >= count or self.error)
        assert self.error is None, self.error
        return self

    def finished(self, within_s: float = 60.0) -> Self:
        self.thread.join(within_s)
        if self.thread.is_alive():
            logs = self.service.logs()
            raise AssertionError(f"a stream open after {within_s} s, {self.num_chunks} chunks\n{logs}")
        return self


@dataclass(frozen=True)
class Outcome:
    started: float
    ended: float
    error: str | None

    @property
    def seconds(self) -> float:
        return self.ended - self.started


def p99(seconds: list[float]) -> float | None:
    return sorted(seconds)[min(len(seconds) - 1, int(len(seconds) * 0.99))] if seconds else None


@dataclass
class Load:
    """Closed loop: `clients` threads, each one short greedy request after the other, until it is left."""

    service: Service
    clients: int = 3
    gateway: int = 0
    max_tokens: int = 12
    timeout: float = 60.0
    outcomes: list[Outcome] = field(default_factory=list)
    fault_at: float | None = None

    def __enter__(self) -> Load:
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._loop, daemon=True) for _ in range(self.clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(self.timeout + 5)
            assert not thread.is_alive(), "a client is still waiting for its answer"

    def _loop(self) -> None:
        with client(self.service, self.gateway, self.timeout) as api:
            while not self._ending.is_set():
                self.outcomes.append(self._once(api))
                if self.outcomes[-1].error:
                    self._ending.wait(0.1)

    def _once(self, api: openai.OpenAI) -> Outcome:
        started = time.monotonic()
        error = None
        try:
            reply = api.completions.create(
                model="demo", prompt=PROMPT, max_tokens=self.max_tokens, temperature=0.0,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            if not reply.usage or reply.usage.completion_tokens != self.max_tokens:
                error = f"truncated: {reply.usage}"
        except openai.APIStatusError as problem:
            error = f"{problem.status_code} {problem.code}"
        except openai.OpenAIError as problem:
            error = type(problem).__name__
        return Outcome(started, time.monotonic(), error)

    def warm(self, count: int = 10) -> Load:
        wait_for(f"{count} requests to succeed", lambda: len(self.succeeded) >= count, 60)
        return self

    def mark(self) -> None:
        """Now comes the fault."""
        self.fault_at = time.monotonic()

    def recover(self, count: int = 10, within_s: float = 60.0) -> Load:
        """Wait until `count` requests that started after the fault have succeeded."""
        wait_for(f"{count} requests after the fault", lambda: len(self.after) >= count, within_s)
        return self

    @property
    def succeeded(self) -> list[Outcome]:
        return [x for x in list(self.outcomes) if not x.error]

    @property
    def failed(self) -> list[Outcome]:
        return [x for x in list(self.outcomes) if x.error]

    @property
    def after(self) -> list[Outcome]:
        assert self.fault_at is not None
        return [x for x in self.succeeded if x.started > self.fault_at]

    @property
    def recovery_seconds(self) -> float:
        """Return the time from the fault to the first success of a request that was started after it."""
        assert self.fault_at is not None
        return min(x.ended for x in self.after) - self.fault_at

    def row(self, fault: str) -> dict[str, Any]:
        assert self.fault_at is not None
        before = [x.seconds for x in self.succeeded if x.ended < self.fault_at]
        recovered = min(x.ended for x in self.after)
        later = [x.seconds for x in self.after if x.started >= recovered]
        kinds = sorted({x.error for x in self.failed if x.error})
        return {
            "fault": fault,
            "succeeded": len(self.succeeded),
            "failed": len(self.failed),
            "errors": kinds,
            "p99_before_s": p99(before),
            "p99_after_s": p99(later),
            "recovery_s": round(self.recovery_seconds, 3),
        }


def disturbed(
    service: Service,
    fault: str,
    harm: Callable[[], None],
    report: Callable[[dict[str, Any]], None],
    recover_s: int = 15,
    **load: Any,
) -> Load:
    """Load and one long stream; `harm` in their middle; every accepted request must still be answered."""
    undisturbed = Stream(service, LONG_STREAM).start().finished()
    assert undisturbed.error is None
    with Load(service, **load) as running:
        running.warm()
        stream = Stream(service, LONG_STREAM).start().wait_chunks(10)
        running.mark()
        harm()
        running.recover(recover_s)
        stream.finished()
    with service.explained():
        assert stream.error is None
        assert stream.text == undisturbed.text
        assert stream.usage == undisturbed.usage
        wait_for("every block to be free", lambda: service.blocks_used() == 0, 15)
    report(running.row(fault))
    return running


def only_clean_refusals(load: Load) -> None:
    """A request that could not be accepted may be refused with a 503; an accepted one may not fail."""
    assert {x.error for x in load.failed} <= {"503 service_unavailable", "503 server_overloaded"}, load.failed
