"""The engine on a toy model whose every answer is known (see `engine_toys`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus import histogram
from bus.messages import RejectReason
from tests.support.engine_toys import (
    VOCAB,
    Client,
    ToyModel,
    continuation,
    expect_no_growth,
    request,
    run,
    toy_engine,
)


def test_one_request_gives_the_models_own_continuation() -> None:
    engine, _ = toy_engine()
    engine.submit("toy@w0", request("a", [5, 6, 7], 20))
    client = run(engine, Client())
    assert client.tokens["a"] == continuation([5, 6, 7], 20)
    assert client.ends == {"a": "length"}


def test_mixed_arrivals_in_chunks_give_what_each_would_get_alone() -> None:
    engine, _ = toy_engine(tokens=7, num_seqs=3)
    client = Client()
    prompts = {str(i): [(i * 7 + j) % VOCAB for j in range(1 + i * 5 % 37)] for i in range(12)}
    for i, (name, prompt) in enumerate(prompts.items()):
        engine.submit("toy@w0", request(name, prompt, 3 + i))
        client.take(engine.step())
    run(engine, client)
    assert client.tokens == {name: continuation(prompt, 3 + int(name)) for name, prompt in prompts.items()}


def test_preemption_neither_loses_nor_repeats_a_token() -> None:
    engine, instance = toy_engine(num_blocks=9, block_tokens=3)
    expect_no_growth(instance.scheduler)
    prompts = {str(i): [i, i + 1] for i in range(5)}
    for name, prompt in prompts.items():
        engine.submit("toy@w0", request(name, prompt, 18))
    client = run(engine, Client())
    assert instance.scheduler.num_preemptions > 0
    assert client.tokens == {name: continuation(prompt, 18) for name, prompt in prompts.items()}
    assert instance.kv.allocator.num_free == 9
    assert instance.stats.prompt_tokens == 10, "a recomputed prompt counts once"


@pytest.mark.parametrize("cut", range(12))
def test_a_replay_goes_on_where_the_client_is(cut: int) -> None:
    engine, _ = toy_engine(tokens=5)
    whole = continuation([1, 2, 3], 12)
    engine.submit("toy@w0", request("a", [1, 2, 3], 12, sent=whole[:cut]))
    client = run(engine, Client())
    assert client.tokens["a"] == whole
    assert client.ends["a"] == "length"


@pytest.mark.parametrize("cut", range(10))
def test_a_sampled_replay_draws_the_same_text(cut: int) -> None:
    sampling: dict[str, Any] = {"temperature": 5.0, "seed": 9, "frequency_penalty": 0.5}
    engine, _ = toy_engine()
    engine.submit("toy@w0", request("a", [1, 2, 3], 10, **sampling))
    whole = run(engine, Client()).tokens["a"]
    assert whole != continuation([1, 2, 3], 10)
    engine.submit("toy@w0", request("b", [1, 2, 3], 10, sent=whole[:cut], **sampling))
    assert run(engine, Client()).tokens["b"] == whole


def test_a_stop_token_ends_with_stop_and_is_delivered() -> None:
    engine, _ = toy_engine()
    whole = continuation([4], 10)
    engine.submit("toy@w0", request("a", [4], 10, stop_token_ids=(whole[3],)))
    client = run(engine, Client())
    assert client.tokens["a"] == whole[: whole.index(whole[3]) + 1]
    assert client.ends["a"] == "stop"


def test_the_context_limit_ends_with_length() -> None:
    engine, _ = toy_engine(model_len=10)
    engine.submit("toy@w0", request("a", [4] * 6, 100))
    client = run(engine, Client())
    assert len(client.tokens["a"]) == 4
    assert client.ends["a"] == "length"


@pytest.mark.parametrize(
    ("sent", "max_tokens", "end"), [([1, 2], 2, "length"), ([1, 5], 9, "stop"), ([1] * 5, 99, "length")]
)
def test_a_replay_of_a_request_that_had_ended_ends_at_once(
    sent: list[int], max_tokens: int, end: str
) -> None:
    engine, instance = toy_engine(model_len=10)
    engine.submit("toy@w0", request("a", [4] * 5, max_tokens, sent=sent, stop_token_ids=(5,)))
    client = run(engine, Client())
    assert client.ends == {"a": end}
    assert client.tokens["a"] == sent
    assert instance.num_steps == 0


def test_a_request_that_cannot_run_ends_with_an_error_that_says_why() -> None:
    engine, _ = toy_engine(model_len=10)
    cases: list[tuple[str, list[int], dict[str, Any]]] = [
        ("empty", [], {}),
        ("long", [1] * 10, {}),
        ("foreign", [1, VOCAB], {}),
        ("negative", [-1], {}),
        ("bias", [1], {"logit_bias": {VOCAB: 1.0}}),
        ("nan", [1], {"temperature": float("nan")}),
        ("penalty", [1], {"presence_penalty": float("nan")}),
        ("infinite", [1], {"logit_bias": {1: float("inf")}}),
        ("below", [1], {"logprobs": -2}),
    ]
    for name, prompt, sampling in cases:
        engine.submit("toy@w0", request(name, prompt, **sampling))
    client = run(engine, Client())
    assert set(client.ends.values()) == {"error"}
    assert "prompt is empty" in client.errors["empty"]
    assert "has 10 tokens; this model takes at most 9" in client.errors["long"]
    assert f"token id {VOCAB} of the prompt" in client.errors["foreign"]
    assert "token id -1" in client.errors["negative"]
    assert f"token id {VOCAB} of the logit_bias" in client.errors["bias"]
    assert client.errors["nan"] == "temperature is nan; it must lie between 0 and 2"
    assert client.errors["penalty"] == "presence_penalty is nan; it must lie between -2 and 2"
    assert "not a finite number" in client.errors["infinite"]
    assert "logprobs is -2" in client.errors["below"]


def test_a_request_too_long_for_the_cache_even_alone_ends_with_an_error_not_a_hang() -> None:
    engine, _ = toy_engine(num_blocks=3)
    engine.submit("toy@w0", request("prompt", [1] * 13))
    engine.submit("toy@w0", request("grows", [1] * 8, 50))
    engine.submit("toy@w0", request("fits", [2], 3))
    client = run(engine, Client())
    assert client.ends == {"prompt": "error", "grows": "error", "fits": "length"}
    assert client.reject_reasons["grows"] is RejectReason.KV_CAPACITY
    assert client.errors["grows"].startswith("13 tokens need 4 KV blocks")
    assert client.tokens["grows"] == continuation([1] * 8, 5)


def test_a_step_that_raises_costs_its_running_requests_an_error_and_nobody_else() -> None:
    engine, instance = toy_engine(num_seqs=2)
    assert isinstance(instance.model, ToyModel)
    instance.model.fail_on = 77
    for name, prompt in (("bad", [77]), ("beside", [1]), ("behind", [2])):
        engine.submit("toy@w0", request(name, prompt, 4))
    client = run(engine, Client())
    assert client.ends == {"bad": "error", "beside": "error", "behind": "length"}
    assert "RuntimeError: token 77 is poison" in client.errors["bad"]
    assert client.tokens["behind"] == continuation([2], 4)


def test_a_failing_model_ends_every_request_with_an_error() -> None:
    engine, instance = toy_engine(num_seqs=2)
    assert isinstance(instance.model, ToyModel)
    instance.model.fail_on = 1
    for i in range(5):
        engine.submit("toy@w0", request(str(i), [1]))
    client = run(engine, Client())
    assert list(client.ends.values()) == ["error"] * 5


def test_cancelled_requests_free_their_blocks_and_say_nothing_more() -> None:
    engine, instance = toy_engine(num_seqs=1)
    client = Client()
    engine.submit("toy@w0", request("a", [1], 50))
    engine.submit("toy@w0", request("b", [2], 5))
    for _ in range(3):
        client.take(engine.step())
    assert engine.cancel(["a", "nobody"]) == 1
    run(engine, client)
    assert "a" not in client.ends and len(client.tokens["a"]) == 3
    assert client.tokens["b"] == continuation([2], 5)
    assert instance.kv.allocator.num_free == instance.kv.allocator.capacity
    assert instance.stats.finished == {"cancelled": 1, "length": 1}


def test_an_id_that_runs_already_is_refused() -> None:
    engine, _ = toy_engine()
    engine.submit("toy@w0", request("a", [1]))
    with pytest.raises(ValueError, match="request a is already running"):
        engine.submit("toy@w0", request("a", [1]))


def test_a_long_prompt_says_that_it_was_admitted_before_its_first_token() -> None:
    engine, _ = toy_engine(tokens=4)
    engine.submit("toy@w0", request("a", [1] * 10, 2))
    client = run(engine, Client())
    assert [delta.token_ids for delta in client.deltas] == [[], *([token] for token in client.tokens["a"])]
    assert client.deltas[0].finish_reason is None


@pytest.mark.parametrize("tokens", [3, 100])
def test_prompt_logprobs_come_once_and_in_order_by_the_first_token_whatever_the_chunks(tokens: int) -> None:
    engine, instance = toy_engine(tokens=tokens, num_blocks=8, block_tokens=2)
    expect_no_growth(instance.scheduler)
    prompt = [9, 8, 7, 6, 5, 4, 3]
    engine.submit("toy@w0", request("older", [1], 12))
    engine.submit("toy@w0", request("a", prompt, 6, prompt_logprobs=2, logprobs=1))
    client = run(engine, Client())
    with_prompt = [delta for delta in client.deltas if delta.prompt_logprobs]
    assert len(with_prompt) == (1 if tokens == 100 else 3), "with each chunk"
    found = [score for delta in with_prompt for score in delta.prompt_logprobs or []]
    assert found[0] is None and {delta.index for delta in with_prompt} == {0}
    starts = [len(delta.prompt_logprobs or []) for delta in with_prompt]
    assert [delta.prompt_index for delta in with_prompt] == [sum(starts[:i]) for i in range(len(starts))]
    of_a = [delta for delta in client.deltas if delta.request_id == "a"]
    first_token = next(i for i, delta in enumerate(of_a) if delta.token_ids)
    assert all(delta in of_a[: first_token + 1] for delta in with_prompt)
    assert [each.token_id for each in found[1:] if each] == prompt[1:]
    likeliest = [each.top_ids[0] for each in found[1:] if each]
    assert likeliest == [continuation(prompt[:i], 1)[0] for i in range(1, len(prompt))]
    own = [delta.logprobs[0] for delta in client.deltas if delta.request_id == "a" and delta.logprobs]
    assert [each.token_id for each in own] == client.tokens["a"]
    assert all(len(each.top_ids) == 1 for each in own)
    assert instance.scheduler.num_preemptions > 0


def test_max_tokens_0_scores_the_prompt_and_generates_nothing() -> None:
    engine, _ = toy_engine(model_len=5)
    engine.submit("toy@w0", request("a", [1, 2, 3, 4, 5], 0, prompt_logprobs=0))
    client = run(engine, Client())
    assert client.tokens["a"] == [] and client.ends["a"] == "length"
    assert client.deltas[-1].prompt_logprobs and len(client.deltas[-1].prompt_logprobs) == 5


@pytest.mark.parametrize("tokens", [3, 100])
def test_an_embedding_is_that_of_the_prompts_last_token_whatever_the_chunks(tokens: int) -> None:
    """The toy's state before the head is what its logits are: one number, at the next token."""
    engine, instance = toy_engine(tokens=tokens, prefix_cache=True)
    prompts = {"a": [9, 8, 7, 6, 5, 4, 3], "one": [4], "again": [9, 8, 7, 6, 5, 4, 3]}
    client = Client()
    engine.submit("toy@w0", request("older", [1], 12))
    for name, prompt in prompts.items():
        engine.submit("toy@w0", request(name, prompt, 1, embeds=True))
        run(engine, client)
    for name, prompt in prompts.items():
        (found,) = [
            delta.embedding for delta in client.deltas if delta.request_id == name and delta.embedding
        ]
        vector = np.frombuffer(found, "<f4")
        assert vector.tolist() == [float(i == continuation(prompt, 1)[0]) for i in range(VOCAB)]
        assert (client.tokens[name], client.ends[name]) == ([], "stop")
    assert client.tokens["older"] == continuation([1], 12)
    assert instance.stats.generation_tokens == 12
    assert instance.stats.finished == {"stop": 3, "length": 1}
    assert instance.scheduler.num_prefix_hits == 4  # of the second time, in blocks of four


def test_two_instances_share_a_worker_and_neither_starves() -> None:
    engine, _ = toy_engine()
    other, _ = toy_engine()
    second = other.remove_instance("toy@w0")
    second.id = "other@w0"
    engine.add_instance(second)
    engine.submit("toy@w0", request("a", [1], 10))
    engine.submit("other@w0", request("b", [2], 10))
    client = Client()
    for _ in range(10):
        client.take(engine.step())
    assert client.tokens == {"a": continuation([1], 10), "b": continuation([2], 10)}
    assert not engine.has_work


def test_statistics_add_up() -> None:
    engine, instance = toy_engine()
    for i in range(6):
        engine.submit("toy@w0", request(str(i), [1] * (i + 1), 4))
    run(engine, Client())
    stats = instance.stats
    assert (stats.prompt_tokens, stats.generation_tokens) == (21, 24)
    assert (
        histogram.count(stats.queue.snapshot()) == histogram.count(stats.time_to_first_token.snapshot()) == 6
    )
    assert histogram.count(stats.time_per_output_token.snapshot()) == 18
    assert histogram.count(stats.step.snapshot()) == instance.num_steps


actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 25), st.integers(1, 15)),
        st.tuples(st.just("cancel"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("replay"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 5), st.just(0)),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(actions, st.integers(4, 14), st.integers(1, 4), st.integers(1, 9))
def test_any_history_of_requests_cancels_and_replays_keeps_every_token(
    history: list[tuple[str, int, int]], num_blocks: int, num_seqs: int, tokens: int
) -> None:
    engine, instance = toy_engine(num_blocks=num_blocks, num_seqs=num_seqs, tokens=tokens, block_tokens=3)
    client = Client()
    prompts: dict[str, tuple[list[int], int]] = {}
    for kind, number, max_tokens in history:
        alive = [name for name in prompts if name not in client.ends]
        if kind == "submit":
            name = str(len(prompts))
            prompts[name] = ([(number + j) % VOCAB for j in range(number)], max_tokens)
            engine.submit("toy@w0", request(name, *prompts[name]))
        elif kind == "step" or not alive:
            for _ in range(number):
                client.take(engine.step())
                engine.check_integrity()
        else:
            name = alive[number % len(alive)]
            engine.cancel([name])
            if kind == "replay":
                engine.submit("toy@w0", request(name, *prompts[name], sent=client.tokens.get(name, [])))
            else:
                client.ends[name] = "cancelled"
    run(engine, client)
    assert instance.kv.allocator.num_free == num_blocks
    for name, (prompt, max_tokens) in prompts.items():
        received = client.tokens.get(name, [])
        assert received == continuation(prompt, max_tokens)[: len(received)]
        if client.ends[name] == "length":
            assert len(received) == max_tokens
