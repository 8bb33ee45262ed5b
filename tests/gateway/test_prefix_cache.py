"""The prefix cache at the gateway: the choice of a worker by what it reports, and the usage of an answer."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from bus.messages import StepOutput
from bus.prefix_keys import prompt_digests
from gateway.delivery.request import RequestState
from tests.support.gateway_core import Core
from tests.support.gateway_harness import ANSWER, BODY, Gate
from tests.support.metrics_samples import metrics_of

pytest_plugins = ["tests.support.gateway_fixtures"]

BLOCK_TOKENS = 16
TURN = [(i * 7) % 10 for i in range(8 * BLOCK_TOKENS)]


# --------------------------------------------------------------------------- the choice


def core_of(*workers: str) -> Core:
    core = Core()
    for worker in workers:
        core.worker(worker, max_model_len=4096)
    core.poll()
    return core


def report(core: Core, digests: dict[str, Sequence[int]], **running: int) -> None:
    """Give the gateway the metrics of all workers, with the digests that each has published."""
    each = [metrics_of(f"m@{one}", running=running.get(one, 0), kv_blocks=256) for one in digests]
    instances = [
        replace(one, last=replace(one.last, prefix_digests=frozenset(digests[one.worker])))
        for metrics in each
        for one in metrics.instances
    ]
    core.report(replace(each[0], workers=[w for one in each for w in one.workers], instances=instances))


def sent(core: Core, name: str, prompt: Sequence[int]) -> str:
    """Submit a request and return the worker that it went to."""
    state: RequestState = core.state(name, prompt=prompt)
    core.delivery.submit(state)
    core.sent(state)
    assert state.target is not None
    return state.target.worker


@pytest.mark.parametrize("home", ["w0", "w1"])
def test_the_second_turn_goes_to_the_worker_that_reports_the_first(home: str) -> None:
    core = core_of("w0", "w1")
    digests = prompt_digests("", TURN, BLOCK_TOKENS)
    report(core, {worker: digests if worker == home else () for worker in ("w0", "w1")}, **{home: 0})
    assert sent(core, "second turn", [*TURN, 1, 2, 3]) == home
    assert sent(core, "another conversation", [9, *TURN]) != home, "there is less to do at the other one"


def test_a_busier_worker_is_left_although_it_has_the_beginning() -> None:
    core = core_of("w0", "w1")
    digests = prompt_digests("", TURN, BLOCK_TOKENS)
    report(core, {"w0": digests, "w1": ()}, w0=4)
    assert sent(core, "second turn", [*TURN, 1]) == "w1"


def test_a_salt_hides_what_another_tenant_has_cached() -> None:
    core = core_of("w0", "w1")
    report(core, {"w0": (), "w1": prompt_digests("tenant", TURN, BLOCK_TOKENS)})
    assert sent(core, "no salt", [*TURN, 1]) == "w0"


def test_a_herd_of_equal_prompts_spreads_over_the_workers() -> None:
    core = core_of("w0", "w1", "w2")
    report(core, {"w0": (), "w1": prompt_digests("", TURN * 8, BLOCK_TOKENS), "w2": ()})
    places = Counter(sent(core, str(i), TURN * 8) for i in range(12))
    assert places.most_common(1)[0][0] == "w1"
    assert set(places) == {"w0", "w1", "w2"} and max(places.values()) <= 6, places


# --------------------------------------------------------------------------- the usage


def caching(tokens: Sequence[int]) -> Any:
    """Return a `mangle` that reports so many cached tokens with the first deltas of requests, in order."""
    left = list(tokens)

    def mangle(step: StepOutput) -> list[StepOutput]:
        deltas = [
            replace(delta, cached_tokens=left.pop(0)) if _is_first(delta) and left else delta
            for delta in step.deltas
        ]
        return [replace(step, deltas=deltas)]

    return mangle


def _is_first(delta: Any) -> bool:
    return not delta.token_ids and delta.finish_reason is None


async def cached(gate: Gate, *, stream: bool, **body: Any) -> int:
    """Send a request and return the cached tokens of its usage."""
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    async with gate.http() as http:
        answer = await http.post("/v1/completions", json=BODY | more | body)
    assert answer.status_code == 200, answer.text
    usage = json.loads(answer.text)["usage"] if not stream else _usage_of(answer.text)
    found: int = usage["prompt_tokens_details"]["cached_tokens"]
    return found


def _usage_of(events: str) -> Any:
    lines = [line.removeprefix("data: ") for line in events.split("\n\n")]
    with_usage = [event for line in lines if line.startswith("{") and (event := json.loads(line))["usage"]]
    assert len(with_usage) == 1 and with_usage[0]["choices"] == []
    return with_usage[0]["usage"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_usage_has_the_cached_tokens_of_the_prompt(gate: Gate, stream: bool) -> None:
    gate.worker.mangle = caching([48])
    assert await cached(gate, stream=stream) == 48
    assert await cached(gate, stream=stream) == 0, "the worker found nothing for the second one"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_choices_of_a_prompt_count_once_and_prompts_add_up(gate: Gate, stream: bool) -> None:
    gate.worker.mangle = caching([16, 32, 48])
    assert await cached(gate, stream=stream, n=3) == 16, "what the first to run had to compute was not cached"
    gate.worker.mangle = caching([16, 32])
    assert await cached(gate, stream=stream, prompt=["fox", "the"]) == 48


@pytest.mark.parametrize("stream", [False, True])
async def test_after_a_replay_the_usage_is_that_of_the_first_attempt(gate: Gate, stream: bool) -> None:
    """The second worker finds the answer so far again, which is not work that the client was spared."""
    first, second = gate.worker, await gate.add_worker("w1")
    for worker, found in ((first, 16), (second, 32)):
        worker.mangle = caching([found])
        worker.stop_at = 5
    task = asyncio.create_task(cached(gate, stream=stream))
    await gate.until("a run", lambda: any(worker.num_running for worker in gate.workers))
    await asyncio.sleep(0.3)
    victim, heir = (first, second) if first.num_running else (second, first)
    heir.stop_at = None
    await victim.die()
    assert await task == {first.id: 16, second.id: 32}[victim.id]
    assert heir.submits[-1].attempt == 2 and heir.submits[-1].sent_token_ids == gate.ids(ANSWER)[:5]
