"""The engine holds outputs to forms, with a toy model and toy grammars (`engine_toys`, `toy_grammars`)."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.messages import Grammar, RejectReason
from tests.support.engine_toys import VOCAB, Client, continuation, expect_no_growth, request, run, toy_engine
from tests.support.toy_grammars import ToyGrammars, form
from worker.engine.core import EngineCore
from worker.engine.engine import Engine, instance_telemetry
from worker.memory import BlockAllocator

ID = "toy@w0"


def formed_engine(**changes: Any) -> tuple[Engine, EngineCore, ToyGrammars]:
    grammars = ToyGrammars(VOCAB)
    engine, instance = toy_engine(grammars=grammars, **changes)
    return engine, instance, grammars


def prompt(i: int) -> list[int]:
    return [(7 * i + j) % VOCAB for j in range(2 + i % 5)]


@cache
def alone(i: int, num_tokens: int) -> list[int]:
    """The output of a request with a form that nothing disturbs."""
    engine, _, _ = formed_engine()
    engine.submit(ID, request("a", prompt(i), num_tokens, grammar=form(num_tokens)))
    return run(engine, Client()).tokens["a"]


def test_an_output_has_its_form_and_ends_with_it() -> None:
    engine, _, _ = formed_engine()
    engine.submit(ID, request("formed", [5, 6], 40, grammar=form(12)))
    engine.submit(ID, request("cut", [5, 6], 7, grammar=form(12)))
    engine.submit(ID, request("free", [5, 6], 12))
    client = run(engine, Client())
    assert client.ends == {"formed": "stop", "cut": "length", "free": "length"}
    assert client.tokens["cut"] == client.tokens["formed"][:7]
    assert client.tokens["free"] == continuation([5, 6], 12) != client.tokens["formed"]


@pytest.mark.parametrize("cut", range(13))
def test_a_replay_goes_on_where_the_client_is_in_its_form(cut: int) -> None:
    whole = alone(3, 12)
    engine, instance, _ = formed_engine(tokens=5)
    engine.submit(ID, request("a", prompt(3), 30, sent=whole[:cut], grammar=form(12)))
    client = run(engine, Client())
    assert client.tokens["a"] == whole
    assert client.ends == {"a": "stop"}
    assert instance.num_steps > 0 or cut == 12, "a form that is complete needs no step"


def test_preempted_and_recomputed_sequences_keep_their_matchers() -> None:
    engine, instance, _ = formed_engine(num_blocks=9, block_tokens=3)
    expect_no_growth(instance.scheduler)
    for i in range(5):
        engine.submit(ID, request(str(i), prompt(i), 14, grammar=form(14)))
    client = Client()
    for _ in range(6):
        client.take(engine.step())
        engine.check_integrity()
    instance.kv.allocator = BlockAllocator(9)  # type: ignore[misc]
    instance.recompute_all(instance.kv.allocator)
    run(engine, client)
    assert instance.scheduler.num_preemptions > 0
    assert client.tokens == {str(i): alone(i, 14) for i in range(5)}
    assert set(client.ends.values()) == {"stop"}


def test_a_request_that_waits_for_its_grammar_counts_as_one_that_waits() -> None:
    """Else the gateway takes the worker for idle, and sends the request again."""
    now = [10.0]
    engine, instance, grammars = formed_engine(clock=lambda: now[0])
    grammars.is_held = True
    engine.submit(ID, request("held", [1, 2, 3], 4, grammar=form(4)), arrived=10.0)
    now[0] = 12.5
    assert instance.has_work and not instance.can_step
    told = instance_telemetry(instance)
    assert (told.running, told.waiting, told.waiting_tokens, told.oldest_wait_seconds) == (0, 1, 3, 2.5)
    assert told.longest_tokens == 7, "any new shape must hold it"
    engine.submit(ID, request("free", [1], 3), arrived=11.0)
    assert instance.can_step
    assert instance_telemetry(instance).waiting == 2
    client = Client()
    while instance.can_step:
        client.take(engine.step())
        engine.check_integrity()
    assert client.ends == {"free": "length"}, "nobody waits for the grammar of another"
    grammars.release()
    assert instance.can_step
    run(engine, client)
    assert client.ends["held"] == "stop"
    assert instance_telemetry(instance).waiting == 0


def test_the_wake_of_an_engine_is_that_of_its_grammars() -> None:
    engine, _, grammars = formed_engine()
    woken = list[bool]()
    engine.wake = lambda: woken.append(engine.can_step())
    grammars.is_held = True
    engine.submit(ID, request("a", [1], 3, grammar=form(3)))
    grammars.release()
    assert woken == [True]


@pytest.mark.parametrize("way", ["cancel", "reset", "send away", "fail"])
def test_what_waits_for_its_grammar_ends_as_what_waits_in_the_queue(way: str) -> None:
    engine, instance, grammars = formed_engine()
    grammars.is_held = True
    engine.submit(ID, request("held", [1, 2], 4, grammar=form(4)))
    client = Client()
    match way:
        case "cancel":
            assert engine.cancel(["held"]) == 1
        case "reset":
            engine.reset()
        case "send away":
            assert engine.send_away(ID, "it is retired") == 1
            run(engine, client)
            assert client.reject_reasons == {"held": RejectReason.RETIRED}
        case "fail":
            assert [output.delta.error for output in instance.fail("no device")] == ["no device"]
    assert not engine.has_work
    engine.check_integrity()
    grammars.release()
    assert not engine.can_step(), "what was compiled for it is of no use"
    engine.submit(ID, request("held", [1, 2], 4, grammar=form(4)))
    assert run(engine, Client()).ends == {"held": "stop"}


def test_a_grammar_that_cannot_be_compiled_ends_its_own_request_only() -> None:
    engine, _, _ = formed_engine()
    engine.submit(ID, request("bad", [1, 2], 4, grammar=Grammar(kind="regex", text="(")))
    engine.submit(ID, request("astray", [1, 2], 4, sent=[0, 1, 2], grammar=form(9)))
    engine.submit(ID, request("good", [1, 2], 4, grammar=form(4)))
    client = run(engine, Client())
    assert client.ends == {"bad": "error", "astray": "error", "good": "stop"}
    assert "cannot be compiled" in client.errors["bad"]
    assert "left its grammar" in client.errors["astray"]


def test_an_instance_without_a_compiler_says_so() -> None:
    engine, _ = toy_engine()
    engine.submit(ID, request("a", [1], 3, grammar=form(3)))
    client = run(engine, Client())
    assert client.errors == {"a": "toy@w0 takes no grammars"}


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_order_of_events_leaves_each_output_what_it_is_alone(data: st.DataObject) -> None:
    """Grammars that are compiled at any time, cancels, preemptions, and KV that is lost."""
    engine, instance, grammars = formed_engine(num_blocks=12, block_tokens=3, num_seqs=4, tokens=9)
    expect_no_growth(instance.scheduler)
    client, asked, cancelled = Client(), dict[str, int](), set[str]()
    for turn in range(data.draw(st.integers(5, 40), "turns")):
        match data.draw(st.sampled_from(["submit", "hold", "release", "cancel", "lose KV", "step", "step"])):
            case "submit":
                asked[str(turn)] = turn
                engine.submit(ID, request(str(turn), prompt(turn), 12, grammar=form(12)))
            case "hold":
                grammars.is_held = True
            case "release":
                grammars.release()
            case "cancel" if left := sorted(asked.keys() - client.ends.keys() - cancelled):
                cancelled.add(gone := data.draw(st.sampled_from(left)))
                assert engine.cancel([gone]) == 1
            case "lose KV":
                instance.kv.allocator = BlockAllocator(12)  # type: ignore[misc]
                instance.recompute_all(instance.kv.allocator)
            case _:
                client.take(engine.step())
        engine.check_integrity()
    grammars.release()
    run(engine, client)
    for name, turn in asked.items():
        wanted, made = alone(turn, 12), client.tokens.get(name, [])
        assert made == (wanted[: len(made)] if name in cancelled else wanted)
