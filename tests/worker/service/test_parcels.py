"""Outputs in bounded entries: nothing lost, nothing doubled, and no entry above its size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bus.codec import encode
from bus.messages import Delta, StepOutput, Submit, TokenLogprobs
from bus.names import Names
from tests.worker.service.test_ledger import submit
from worker.engine.engine import StepResult
from worker.engine.outputs import Output
from worker.service.ledger import Ledger
from worker.service.parcels import ENTRY_BYTES, MOST_ENTRY_BYTES, bytes_of, parts_of
from worker.service.publisher import OutputPublisher, Parcel

FLOATS = st.floats(-1e9, 0)
IDS = st.integers(0, 2**31 - 1)
SCORES = st.builds(
    lambda token, logprob, tops: TokenLogprobs(
        token_id=token, logprob=logprob, top_ids=[id for id, _ in tops], top_logprobs=[one for _, one in tops]
    ),
    IDS,
    FLOATS,
    st.lists(st.tuples(IDS, FLOATS), max_size=20),
)
DELTAS = st.builds(
    Delta,
    request_id=st.text(max_size=60),
    attempt=st.integers(1, 1000),
    index=IDS,
    token_ids=st.lists(IDS, max_size=4),
    finish_reason=st.sampled_from([None, "stop", "length", "error"]),
    error=st.none() | st.text(max_size=100),
    logprobs=st.none() | st.lists(SCORES, max_size=4),
    prompt_logprobs=st.none() | st.lists(st.none() | SCORES, max_size=30),
    prompt_index=IDS,
    cached_tokens=IDS,
    embedding=st.none() | st.binary(max_size=64),
)


def step_of(*deltas: Delta) -> StepOutput:
    return StepOutput(
        worker="w" * 60,
        epoch=2**62,
        instance="i" * 60,
        step=2**62,
        born_ns=2**62,
        fingerprint="f" * 60,
        deltas=list(deltas),
    )


@given(DELTAS)
def test_a_delta_takes_no_more_than_it_is_counted_for(delta: Delta) -> None:
    size = len(encode(step_of(replace(delta, request_id=delta.request_id.encode().hex()))))
    counted = bytes_of(replace(delta, request_id=delta.request_id.encode().hex()))
    assert size <= ENTRY_BYTES + counted


@given(DELTAS, st.integers(600, 4000))
def test_the_parts_of_a_delta_are_the_delta(delta: Delta, most_bytes: int) -> None:
    parts = list(parts_of(delta, most_bytes))
    scores = [score for part in parts for score in part.prompt_logprobs or []]
    assert scores == (delta.prompt_logprobs or []) and parts[-1].finish_reason == delta.finish_reason
    at = delta.prompt_index
    for part in parts:
        if part.prompt_logprobs:
            assert part.prompt_index == at and (
                len(part.prompt_logprobs) == 1 or bytes_of(part) <= most_bytes
            )
            at += len(part.prompt_logprobs)
    assert sum(part.cached_tokens for part in parts) == delta.cached_tokens
    assert [part.token_ids for part in parts if part.token_ids] == (
        [delta.token_ids] if delta.token_ids else []
    )
    assert all(part.finish_reason is None and part.error is None for part in parts[:-1])


def publish(*outputs: Output) -> list[Parcel]:
    """Return what a step's outputs become; every request has a ticket."""
    ledger, parcels = Ledger(), list[Parcel]()
    for output in outputs:
        ledger.offer(output.request, "i", f"{output.request.request_id}-0", 7)
    outbox: Any = type("Collector", (), {"put": staticmethod(parcels.append)})
    result = StepResult("i", 1, 1, list(outputs), "tp1-full", 0)
    OutputPublisher(Names(), "w0", ledger, outbox).take(7, [result])
    return parcels


def scores(count: int) -> list[TokenLogprobs]:
    tops = list(range(100_000, 100_020))
    one = TokenLogprobs(token_id=100_000, logprob=-1.25, top_ids=tops, top_logprobs=[-float(i) for i in tops])
    return [one] * count


def output(request: Submit, **changes: Any) -> Output:
    fields: dict[str, Any] = {"request_id": request.request_id, "attempt": 1, "index": 0, "token_ids": [5]}
    return Output(request, Delta(**fields | changes))


def test_the_scores_of_32k_tokens_for_128_choices_go_out_in_entries_of_256_kib() -> None:
    """The attack: echo, 20 alternatives and n = 128 made one message of 1.4 GB for a Redis of 256 MB."""
    num_prompt, requests = 32_768, [submit(f"r-{i}") for i in range(4)]
    parcels = publish(
        *(output(one, prompt_logprobs=scores(num_prompt), finish_reason="length") for one in requests)
    )
    outputs = [parcel.output for parcel in parcels if parcel.output]
    sizes = [len(encode(one)) for one in outputs]
    assert max(sizes) <= MOST_ENTRY_BYTES and sum(sizes) > 4 * num_prompt * 300
    deltas = [delta for one in outputs for delta in one.deltas]
    for request in requests:
        of_one = [delta for delta in deltas if delta.request_id == request.request_id]
        assert sum(len(delta.prompt_logprobs or []) for delta in of_one) == num_prompt
        assert [delta.finish_reason for delta in of_one if delta.finish_reason] == ["length"]
        assert of_one[-1].finish_reason and of_one[-1].token_ids == [5]
    ends = [i for i, parcel in enumerate(parcels) if parcel.acks]
    assert sum(len(parcels[i].acks) for i in ends) == 4
    for i in ends:
        finished = {delta.request_id for delta in outputs[i].deltas if delta.finish_reason}
        assert {entry for _, entry in parcels[i].acks} == {f"{name}-0" for name in finished}


def test_a_long_error_is_cut_and_many_deltas_share_few_entries() -> None:
    (parcel,) = publish(output(submit("a"), token_ids=[], finish_reason="error", error="x" * 10**7))
    assert parcel.output and len(encode(parcel.output)) < 10_000
    parcels = publish(*(output(submit(f"r{i}"), logprobs=scores(1)) for i in range(2000)))
    sizes = [len(encode(parcel.output)) for parcel in parcels if parcel.output]
    assert max(sizes) <= MOST_ENTRY_BYTES and len(sizes) == 5, "half of an entry is in use, at least"
