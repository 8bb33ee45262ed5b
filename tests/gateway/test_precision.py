"""A request's floor of precision: where it goes, when it waits or is refused; which tokens were below."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from bus.messages import (
    InstanceCard,
    LayerShape,
    RejectReason,
    layers_below_full,
    lowest_half,
    lowest_precision,
)
from bus.precisions import PRECISIONS, KVPrecision, Precision, is_below
from gateway.delivery.dispatch import Candidate, TooLong, Wait, choose
from gateway.delivery.request import RequestState
from gateway.errors import ApiError
from gateway.openai.intake import floor_of
from gateway.openai.params import CompletionBody
from gateway.openai.parsing import parse
from gateway.openai.request_log import RequestLog
from tests.support.gateway_core import Core, Ear
from tests.support.gateway_harness import ANSWER, BODY, Gate, metrics_of
from tests.support.metrics_samples import metrics_of as sample_of

# As pydantic words a choice.
_ANY_PRECISION = ", ".join(map(repr, PRECISIONS[:-1])) + f" or {PRECISIONS[-1]!r}"

pytest_plugins = ["tests.support.gateway_fixtures"]

INT4 = LayerShape(ffn="int4")
BELOW_FLOOR = RejectReason.PRECISION_FLOOR


def candidate(name: str, precision: Precision | None, load: float = 0.0, **changes: Any) -> Candidate:
    base: dict[str, Any] = {"worker": name, "epoch": 1, "max_tokens": 100, "num_own": 0, "num_own_since": 0}
    return Candidate(**(base | {"instance": name, "num_measured": load, "precision": precision} | changes))


# --------------------------------------------------------------------------- pure


def test_the_lowest_half_of_a_layer_is_what_an_instance_keeps() -> None:
    assert lowest_half([LayerShape(), LayerShape(attention="int8", ffn="int3"), INT4]) == "int3"
    assert lowest_half([]) == "full" and layers_below_full([LayerShape(), INT4, INT4]) == 2
    assert is_below("int4", "int8") and not is_below("int8", "int8") and not is_below("full", "int3")


def test_a_kv_cache_in_8_bits_counts_as_a_layer_in_int8() -> None:
    (full,) = sample_of().instances
    assert lowest_precision(full.last) == "full"
    reported = replace(full.last, kv_precision="int8")
    assert lowest_precision(reported) == "int8"
    assert lowest_precision(replace(reported, layers=[INT4])) == "int4"


def test_a_floor_is_kept_however_loaded_its_keeper_is() -> None:
    there = [candidate("a", "int4"), candidate("b", "full", load=9.0)]
    assert choose(there, 10, "int8") == there[1]
    assert choose(there, 10, "int4") == choose(there, 10) == there[0]


def test_an_instance_of_unknown_precision_is_asked_after_those_that_are_known() -> None:
    there = [candidate("a", None), candidate("b", "full", load=9.0)]
    assert choose(there, 10, "full") == there[1]
    assert choose(there[:1], 10, "full") == there[0]


def test_without_an_instance_that_keeps_the_floor_there_is_none_for_now() -> None:
    there = [candidate("a", "int4"), candidate("b", "full", has_refused=True)]
    assert choose(there, 10, "full") == Wait.PRECISION
    assert choose(there, 300, "full") == TooLong(100)  # that will not change


# --------------------------------------------------------------------------- the core


def core_of(*workers: str) -> Core:
    core = Core()
    for name in workers:
        core.worker(name)
    core.poll()
    return core


def floored(core: Core, name: str = "r", *, waits: bool = True) -> RequestState:
    state = core.state(name, min_precision="full", waits_for_precision=waits)
    core.delivery.submit(state)
    return state


def swapped(core: Core, *layers: LayerShape) -> None:
    core.report(sample_of(layers=list(layers)))


def test_a_request_waits_for_its_precision_and_goes_when_it_is_back() -> None:
    core = core_of("w0")
    swapped(core, INT4)
    state = floored(core)
    assert state.target is None and core.written() == []
    swapped(core, LayerShape())
    core.delivery.attempts.place_waiting()
    (submit,) = core.written()
    assert (submit.min_precision, submit.attempt) == ("full", 1)  # type: ignore[union-attr]
    core.gateway.check_integrity()


def test_a_worker_that_swapped_meanwhile_refuses_and_another_takes_the_request() -> None:
    core = core_of("w0", "w1")
    state = floored(core)
    assert state.target is not None
    first = state.target
    core.sent(state, begun=False)
    core.deliver(state, [], finish="error", error="a layer is at int4", reject_reason=BELOW_FLOOR)
    assert state.target is not None and state.target != first
    assert (state.attempt, state.strikes, state.was_admitted) == (2, 0, False)
    core.gateway.check_integrity()


def test_two_instances_that_both_refuse_are_not_asked_again_before_the_next_look() -> None:
    core = core_of("w0", "w1")
    state = floored(core)
    for _ in range(2):
        core.sent(state, begun=False)
        core.deliver(state, [], finish="error", error="a layer is at int4", reject_reason=BELOW_FLOOR)
    assert (state.target, state.attempt) == (None, 2)
    core.poll()
    assert state.attempt == 3


def test_a_refused_request_that_waits_is_not_sent_back_at_once() -> None:
    core = core_of("w0")
    state = floored(core)
    core.sent(state, begun=False)
    core.deliver(state, [], finish="error", error="a layer is at int4", reject_reason=BELOW_FLOOR)
    assert state.target is None
    core.poll()
    assert state.target is not None and state.attempt == 2


def test_a_request_that_will_not_wait_is_refused_before_and_after_it_was_sent() -> None:
    core = core_of("w0")
    state = floored(core, waits=False)
    core.sent(state, begun=False)
    core.deliver(state, [], finish="error", error="a layer is at int4", reject_reason=BELOW_FLOOR)
    assert isinstance(state.sink, Ear) and state.sink.error is not None
    assert (state.sink.error.status, state.sink.error.code) == (503, "precision_unavailable")
    swapped(core, INT4)
    with pytest.raises(ApiError, match="'full' or better"):
        floored(core, "r2", waits=False)
    core.gateway.check_integrity()


def test_a_deadline_in_the_wait_for_a_precision_says_so() -> None:
    core = core_of("w0")
    swapped(core, INT4)
    state = floored(core)
    core.now += 100
    core.losses.tick()
    assert isinstance(state.sink, Ear) and state.sink.error is not None
    message = "no instance had its layers and its KV cache at 'full' or better"
    assert state.sink.error.status == 504 and message in state.sink.error.message


def test_a_stream_that_lost_its_worker_waits_for_its_precision_though_it_would_not_have_at_first() -> None:
    core = core_of("w0")
    state = floored(core, waits=False)
    core.sent(state)
    core.deliver(state, [7])
    core.worker("w0", epoch=2, pid=2)
    core.report(sample_of(epoch=2, layers=[INT4]))
    core.poll()
    assert state.target is None and core.delivery.table.has(state)
    deadline = state.deadline
    core.poll()
    assert state.deadline == deadline  # it does not wait for ever
    core.report(sample_of(epoch=2, layers=[LayerShape()]))
    core.poll()
    assert state.target is not None and state.received == [7]


def rests_in_8_bits(core: Core, worker: str) -> None:
    card = core.cards[worker]
    core.cards[worker] = replace(card, instances=[replace(card.instances[0], kv_dtype="int8")])
    core.poll()


def told_of_kv(core: Core, kv_precision: KVPrecision, *layers: LayerShape) -> None:
    told = sample_of(layers=list(layers) or None)
    instances = [replace(one, last=replace(one.last, kv_precision=kv_precision)) for one in told.instances]
    core.report(replace(told, instances=instances))


def best_kv(core: Core) -> KVPrecision:
    return core.cluster.best_kv("m", core.now)


def test_a_floor_above_the_kv_cache_at_rest_is_refused_at_once() -> None:
    core = core_of("w0")
    rests_in_8_bits(core, "w0")
    told_of_kv(core, "int8")
    (card,) = core.cards["w0"].instances
    with pytest.raises(ApiError, match=r"rests in 'int8' .* lower min_precision to 'int8'") as no:
        floor_of("full", None, card, best_kv(core))
    told = no.value.status, no.value.param, no.value.code
    assert told == (400, "min_precision", "precision_unavailable")
    assert floor_of("int8", None, card, best_kv(core)) == "int8"
    core.delivery.submit(core.state("kept", min_precision="int8"))
    assert core.delivery.table.requests["kept"].target is not None
    core.gateway.check_integrity()


async def test_a_call_is_checked_against_the_kv_caches_of_the_cluster() -> None:
    core = core_of("w0")
    rests_in_8_bits(core, "w0")
    (card,) = core.cards["w0"].instances
    asked = {"model": "m", "prompt": [1], "max_tokens": 1, "ignore_eos": True}
    log = RequestLog("r", "POST", "/v1/completions", core.now)

    async def floor(**limit: Any) -> str:
        body = parse(CompletionBody, json.dumps(asked | limit).encode())
        tokenizer: Any = SimpleNamespace(stop_token_ids=())
        call = await core.gateway.request_builder.build(body, [[1]], 100, card, tokenizer, "c", log)
        return call.requests[0].min_precision

    told_of_kv(core, "int8")
    for limit in ({"min_precision": "full"}, {"max_loss": 0.0}):
        with pytest.raises(ApiError, match="rests in 'int8' at every instance") as no:
            await floor(**limit)
        assert no.value.status == 400
    told_of_kv(core, "full", INT4)
    assert [await floor(min_precision="full"), await floor(max_loss=0.0)] == ["full", "full"]


def test_a_kv_cache_at_rest_in_8_bits_that_was_converted_by_hand_keeps_a_floor_above() -> None:
    core = core_of("w0")
    rests_in_8_bits(core, "w0")
    assert best_kv(core) == "full"  # there is no report: it may have been converted
    state = floored(core)
    assert state.target is not None
    core.sent(state, begun=False)
    core.deliver(state, [], finish="error", error="the KV cache is in int8", reject_reason=BELOW_FLOOR)
    assert state.target is None and state in core.delivery.table.for_precision
    told_of_kv(core, "full", INT4)
    assert best_kv(core) == "full", "its layers can come back"
    told_of_kv(core, "full")
    core.poll()
    assert state.target is not None
    core.gateway.check_integrity()


def test_a_kv_cache_in_8_bits_for_now_counts_by_what_it_rests_in() -> None:
    core = core_of("w0")
    told_of_kv(core, "int8", INT4)
    assert best_kv(core) == "full"


@pytest.mark.parametrize("way", ["drains", "restarts", "is gone"])
def test_a_floor_that_one_instance_keeps_waits_while_that_one_is_away(way: str) -> None:
    core = core_of("w0", "w1")
    rests_in_8_bits(core, "w0")
    told_of_kv(core, "int8")
    waiting = core.state("r", min_precision="full")
    core.cluster.drop("w1", 1)
    core.delivery.submit(waiting)
    away = core.cards.pop("w1")
    if way == "drains":
        core.cards["w1"] = replace(away, state="draining")
    elif way == "restarts":
        core.cards["w1"] = replace(away, epoch=2, state="loading", instances=[])
    core.poll()
    assert best_kv(core) == "full", "for a new request"
    assert waiting.target is None and waiting in core.delivery.table.for_precision
    core.cards.pop("w1", None)
    core.now += 11
    told_of_kv(core, "int8")
    core.poll()
    assert best_kv(core) == "int8", "it did not come back"
    assert core.delivery.table.has(waiting)
    core.cards["w1"] = replace(away, epoch=3)
    core.poll()
    assert waiting.target is not None and waiting.target.worker == "w1"
    core.gateway.check_integrity()


def test_without_a_ready_instance_no_floor_is_refused() -> None:
    core = core_of("w0")
    rests_in_8_bits(core, "w0")
    told_of_kv(core, "int8")
    assert best_kv(core) == "int8"
    core.cluster.drop("w0", 1)
    assert best_kv(core) == "full"


def test_a_floor_above_one_kv_cache_at_rest_waits_for_another_instance() -> None:
    core = core_of("w0", "w1")
    rests_in_8_bits(core, "w0")
    told, other = sample_of(), sample_of("m@w1", layers=[INT4])
    (one,) = told.instances
    one = replace(one, last=replace(one.last, kv_precision="int8"))
    core.report(replace(told, workers=[*told.workers, *other.workers], instances=[one, *other.instances]))
    state = floored(core)
    assert state.target is None and state in core.delivery.table.for_precision


@pytest.mark.parametrize(
    ("min_precision", "max_loss", "floor"),
    [
        (None, None, ""),
        ("int4", None, "int4"),
        (None, 0.0, "full"),
        (None, 0.01, "int8"),  # int4 was not measured
        (None, 0.3, "int3"),
        ("full", 0.3, "full"),
        ("int4", 0.01, "int8"),
    ],
)
def test_a_limit_of_loss_is_the_fewest_bits_within_it(
    min_precision: Precision | None, max_loss: float | None, floor: str
) -> None:
    card = card_with(losses={"int8": 0.0005, "int3": 0.2})
    assert floor_of(min_precision, max_loss, card) == floor
    assert floor_of(None, 0.5, card_with(losses={})) == "full"
    with_kv = replace(card, kv_loss=0.02)  # what it costs, too, when the KV cache is in 8 bits
    assert [floor_of(None, most, with_kv) for most in (0.01, 0.0205, 0.21, 0.22)] == [
        "full",
        "int8",
        "int8",
        "int3",
    ]


def test_more_bits_than_a_quantised_checkpoint_has_are_refused_at_once() -> None:
    card = card_with(losses={"int4": 0.0}, variants=["int4"])
    assert [floor_of(floor, None, card) for floor in (None, "int4", "int3")] == ["", "int4", "int3"]
    assert floor_of(None, 0.0, card) == "int4"
    for floor in ("int8", "full"):
        with pytest.raises(
            ApiError, match=f"are in 'int4' alone, .* lower min_precision from '{floor}'"
        ) as no:
            floor_of(floor, None, card)
        assert no.value.status == 400


def test_a_limit_of_loss_counts_the_kv_cache_at_rest_and_is_refused_where_that_loses_more() -> None:
    card = replace(card_with(losses={"int8": 0.0005, "int4": 0.03}), kv_loss=0.0001)
    assert [floor_of(None, most, card, "int8") for most in (0.0006, 0.0301, 0.9)] == ["int8", "int4", "int4"]
    with pytest.raises(ApiError, match=r"max_loss is 0\.0005, .* kept is 0\.0006; raise max_loss") as no:
        floor_of(None, 0.0005, card, "int8")
    assert (no.value.status, no.value.param) == (400, "max_loss")
    assert "set worker.kv_dtype to full and have the model deployed with" in no.value.message
    assert floor_of(None, 0.0, card) == "full", "where some KV cache rests in full precision"
    no_int8 = replace(card, variants=["full", "int4"])
    assert floor_of(None, 0.0001, no_int8) == "int8" and floor_of(None, 0.0, no_int8) == "full"
    assert floor_of(None, 0.0001, no_int8, "int8") == "int8", "no layer can be in it"
    with pytest.raises(ApiError, match=r"can be kept is 0\.0001"):
        floor_of(None, 0.0, no_int8, "int8")
    for unknown in (replace(card, kv_loss=None), replace(card, losses={})):
        with pytest.raises(ApiError, match="is not measured; run `instar profile`"):
            floor_of(None, 0.01, unknown, "int8")
    resting = replace(card, kv_loss=None, kv_dtype="int8")
    assert floor_of(None, 0.9, resting) == "full", "where it may have been converted by hand"
    quantised = replace(card, variants=["int4"], losses={"int4": 0.0})
    assert floor_of(None, 0.0001, quantised, "int8") == "int4"


def card_with(losses: dict[Precision, float], variants: Sequence[Precision] = PRECISIONS) -> InstanceCard:
    facts: dict[str, Any] = {"max_model_len": 8, "vocab_size": 8, "num_layers": 1, "block_tokens": 1}
    return InstanceCard(
        id="m@w0", model="m", model_path="", dtype="float32", variants=list(variants), losses=losses, **facts
    )


# --------------------------------------------------------------------------- over HTTP


async def report(gate: Gate) -> None:
    await gate.bus.publish(gate.bus.names.metrics, metrics_of(gate.worker))


async def test_a_floor_holds_a_request_back_until_its_precision_returns(gate: Gate) -> None:
    gate.worker.shape.layers[0] = INT4
    await report(gate)
    async with gate.client() as client:
        enough = await client.completions.create(**BODY, extra_body={"min_precision": "int4"})
        assert enough.choices[0].text == ANSWER
        body = {"min_precision": "int8"}
        waiting = asyncio.create_task(client.completions.create(**BODY, extra_body=body))
        await asyncio.sleep(0.6)
        assert not waiting.done() and gate.worker.num_running == 0
        gate.worker.shape.layers[0] = LayerShape(ffn="int8")
        await report(gate)
        assert (await asyncio.wait_for(waiting, 5)).choices[0].text == ANSWER
    assert gate.worker.submits[-1].min_precision == "int8"


async def test_a_floor_without_a_wait_is_a_503_that_says_what_to_do(gate: Gate) -> None:
    gate.worker.shape.layers[0] = INT4  # the worker refuses, before metrics told
    async with gate.http() as http:
        body = BODY | {"max_loss": 0.01, "min_precision_wait": False}  # no loss of this model is known
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 503 and "retry-after" in answer.headers
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("precision_unavailable", "min_precision")
        for wrong, told in (
            ({"min_precision": "int5"}, f"allowed is {_ANY_PRECISION}"),
            ({"min_precision_wait": False}, "needs min_precision"),
            ({"max_loss": -0.1}, "max_loss"),
            ({"max_loss": 10}, "max_loss is 10; allowed is 0 to 1"),
            ({"max_loss": "1000%"}, "max_loss is 10.0; allowed is 0 to 1"),
            ({"return_precision": 1}, "true or false"),
        ):
            answer = await http.post("/v1/completions", json=BODY | wrong)
            assert answer.status_code == 400 and told in answer.json()["error"]["message"]
    await gate.settled()


@pytest.mark.parametrize("options", [{}, {"stop": "you cannot meet this"}, {"logprobs": 0}])
async def test_an_answer_tells_which_tokens_were_made_below_full_precision(
    gate: Gate, options: dict[str, Any]
) -> None:
    num = len(gate.ids(ANSWER)) + 1

    def change(step: Any) -> list[Any]:
        if step.deltas[0].token_ids and step.deltas[0].index == 3:
            gate.worker.shape.layers[1] = INT4
            gate.worker.fingerprint = "tp1-int4x1"
        return [step]

    wanted = [
        {"start": 0, "end": 4, "layers_below_full": 0, "fingerprint": "fp-full-tp1"},
        {"start": 4, "end": num, "layers_below_full": 1, "fingerprint": "tp1-int4x1"},
    ]
    gate.worker.mangle = change
    async with gate.http() as http:
        body = BODY | options | {"return_precision": True}
        whole = (await http.post("/v1/completions", json=body)).json()
        assert whole["choices"][0]["precision"] == wanted
        assert whole["system_fingerprint"] == "tp1-int4x1"
        gate.worker.shape.layers[1] = LayerShape()
        gate.worker.fingerprint = "fp-full-tp1"
        text = (await http.post("/v1/completions", json=body | {"stream": True})).text
    lines = [line for line in text.splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    told = [chunk["choices"][0] for chunk in chunks if "precision" in chunk["choices"][0]]
    assert len(told) == 1 and told[0]["finish_reason"] == "stop" and told[0]["precision"] == wanted
    assert {chunk["system_fingerprint"] for chunk in chunks} == {"fp-full-tp1", "tp1-int4x1"}


async def test_an_answer_is_as_before_for_who_does_not_ask(gate: Gate) -> None:
    async with gate.http() as http:
        whole = (await http.post("/v1/completions", json=BODY)).json()
    assert set(whole["choices"][0]) == {"index", "text", "logprobs", "finish_reason"}
