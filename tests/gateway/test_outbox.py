"""The outbox and submissions that cannot be written, each for itself."""

from __future__ import annotations

from dataclasses import replace

from bus.errors import BusFull
from bus.messages import Cancel, Submit
from gateway.openai.call import Completion
from tests.support.gateway_core import Core, Ear


async def test_a_submission_that_is_no_message_fails_alone() -> None:
    core = Core()
    core.worker()
    core.poll()
    bad, good = core.state("bad", top_k=10**30), core.state("good")
    for state in (bad, good):
        core.delivery.submit(state)
    await core.gateway.outbox._write_some()
    assert [message.request_id for message in core.bus.taken] == ["good"]
    assert isinstance(bad.sink, Ear) and bad.sink.error is not None and bad.sink.error.status == 500
    assert list(core.delivery.table.requests) == ["good"] and good.is_sent


async def test_requests_with_one_prompt_share_an_entry_and_others_do_not() -> None:
    core = Core()
    core.worker()
    core.poll()
    first, other = core.state("r-0", prompt=[1, 2]), core.state("other", prompt=[1, 2])
    states = [first, *(core.state(f"r-{i}") for i in range(1, 100)), other]
    prompt = first.request.prompt_token_ids
    for i, state in enumerate(states[1:-1], 1):
        sampling = replace(state.request.sampling, seed=i)
        state.request = replace(state.request, prompt_token_ids=prompt, sampling=sampling)
    for state in states:
        core.delivery.submit(state)
    core.delivery.cancel(states[50])
    await core.gateway.outbox._write_some()
    entries = [message for message in core.bus.taken if isinstance(message, Submit)]
    assert [[one.request_id for one in entry.each()] for entry in entries] == [
        [f"r-{i}" for i in range(100) if i != 50],
        ["other"],
    ]
    third = entries[0].each()[3]
    assert (third.prompt_token_ids, third.sampling.seed, third.attempt) == (prompt, 3, 1)
    assert all(state.is_sent for state in states if state is not states[50])


def call_of(core: Core, *names: str) -> Completion:
    requests = [replace(core.state(name).request, index=i) for i, name in enumerate(names)]
    slot = core.gateway.admission.reserve()
    return Completion(None, requests, None, core.delivery, slot)  # type: ignore[arg-type]


async def test_a_full_redis_refuses_a_call_of_several_choices_once() -> None:
    core = Core()
    core.worker()
    core.poll()
    call = call_of(core, "r-0", "r-1")
    call.submit()
    core.bus.error = BusFull("maxmemory")
    await core.gateway.outbox._write_some()
    assert call.error is not None and call.error.status == 503
    assert not core.delivery.table.requests
    core.bus.error = None
    await core.gateway.outbox._write_some()
    assert all(isinstance(message, Cancel) for message in core.bus.taken)
