"""The prefix cache: what is found again, what is not, and that no text changes (see `engine_toys`)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.messages import LayerShape
from bus.precisions import LOWEST
from bus.prefix_keys import digest_of, first_key, next_key, num_blocks_found, prompt_digests
from tests.support.engine_toys import VOCAB, Client, continuation, request, run, toy_engine
from worker.engine.core import EngineCore
from worker.engine.engine import Engine, instance_telemetry
from worker.engine.scheduler import SchedulerOutput
from worker.engine.sequence import own_request
from worker.memory import BlockAllocator, plan_moves_below

SYSTEM = [(i * 13 + 5) % VOCAB for i in range(40)]  # ten blocks of four tokens


def caching_engine(**changes: Any) -> tuple[Engine, EngineCore]:
    return toy_engine(prefix_cache=True, **changes)


def serve(engine: Engine, name: str, prompt: list[int], **changes: Any) -> int:
    """Serve one request, which must have the right text, and return how many tokens were cached."""
    salt = changes.pop("cache_salt", "")
    submit = request(name, prompt, **changes)
    engine.submit("toy@w0", type(submit)(**{**fields(submit), "cache_salt": salt}))
    client = run(engine, Client())
    assert client.tokens[name] == continuation(prompt, 8)
    return sum(delta.cached_tokens for delta in client.deltas)


def fields(submit: Any) -> dict[str, Any]:
    return {name: getattr(submit, name) for name in submit.__slots__}


def use_precision(instance: EngineCore, precision: Any) -> None:
    shape = [LayerShape(attention=precision, ffn="full"), LayerShape()]
    instance.model.shape = lambda: shape  # type: ignore[method-assign]
    instance.reshaped()


def test_a_beginning_that_was_computed_is_not_computed_again() -> None:
    engine, instance = caching_engine()
    assert serve(engine, "first", [*SYSTEM, 1, 2]) == 0
    computed = sum(instance.model.num_tokens)  # type: ignore[attr-defined]
    assert serve(engine, "second", [*SYSTEM, 3, 4]) == len(SYSTEM)
    assert sum(instance.model.num_tokens) - computed == 2 + 7  # type: ignore[attr-defined]
    assert (instance.scheduler.num_prefix_queried, instance.scheduler.num_prefix_hits) == (84, 40)


def test_the_last_token_of_a_known_prompt_is_computed_for_its_logits() -> None:
    engine, _ = caching_engine()
    serve(engine, "first", SYSTEM)
    assert serve(engine, "again", SYSTEM) == len(SYSTEM) - 4


def test_a_turn_finds_the_answer_of_the_turn_before() -> None:
    engine, _ = caching_engine()
    serve(engine, "first", SYSTEM[:8])
    dialogue = [*SYSTEM[:8], *continuation(SYSTEM[:8], 8), 9, 9]
    assert serve(engine, "second", dialogue) == 12, "the last token of an answer was never computed"


def test_sequences_that_run_at_once_share_their_blocks() -> None:
    engine, instance = caching_engine(num_blocks=14)
    client = Client()
    engine.submit("toy@w0", request("a", [*SYSTEM, 1], 8))
    while not client.deltas or not client.tokens["a"]:
        client.take(engine.step())
    engine.submit("toy@w0", request("b", [*SYSTEM, 2], 4))
    client.take(engine.step())
    assert len(instance.scheduler.running) == 2 and instance.kv.allocator.num_used < 14
    run(engine, client)
    assert client.tokens == {"a": continuation([*SYSTEM, 1], 8), "b": continuation([*SYSTEM, 2], 4)}
    assert instance.kv.allocator.num_free == 14


def test_unlike_salts_and_requests_for_prompt_logprobs_share_nothing() -> None:
    engine, instance = caching_engine()
    serve(engine, "first", SYSTEM)
    assert serve(engine, "salted", SYSTEM, cache_salt="tenant") == 0
    assert serve(engine, "salted again", SYSTEM, cache_salt="tenant") == len(SYSTEM) - 4
    assert serve(engine, "echo", SYSTEM, prompt_logprobs=0) == 0
    own = own_request("canary", SYSTEM, request("x", SYSTEM).sampling)
    instance.submit(own)
    run(engine, client := Client())
    assert sum(delta.cached_tokens for delta in client.deltas) == 0


def test_blocks_of_fewer_bits_serve_nobody_who_would_get_more() -> None:
    engine, instance = caching_engine()
    use_precision(instance, "int4")
    serve(engine, "low", SYSTEM)
    assert serve(engine, "as low", SYSTEM) == 36
    use_precision(instance, "full")
    assert serve(engine, "full", SYSTEM) == 0, "computing it now gives more bits"
    assert serve(engine, "again", SYSTEM) == 36, "the more precise block has replaced the other"
    use_precision(instance, "int8")
    assert serve(engine, "lower", SYSTEM) == 36, "more bits than now serve everybody"


def test_a_floor_takes_no_block_below_it() -> None:
    engine, instance = caching_engine()
    use_precision(instance, "int4")
    serve(engine, "low", SYSTEM)
    use_precision(instance, "int8")
    assert serve(engine, "floor", SYSTEM, min_precision="int8") == 0
    assert serve(engine, "again", SYSTEM, min_precision="int8") == 36


def test_a_refusal_for_a_converted_kv_cache_alone_asks_for_its_bits_back() -> None:
    engine, instance = caching_engine()
    instance.kv.precision = "int8"  # type: ignore[misc]
    engine.submit("toy@w0", request("no", SYSTEM, min_precision="full"))
    client = run(engine, Client())
    assert client.errors == {"no": "the KV cache is in int8; the request takes no less than full"}
    assert instance.load.floor_refused() == "full"


def test_a_kv_cache_in_8_bits_counts_as_a_layer_in_int8() -> None:
    engine, instance = caching_engine(kv_dtype="int8")
    assert instance.shape_id == "tp1-full-kv8"
    assert instance_telemetry(instance).kv_precision == "int8"
    engine.submit("toy@w0", request("no", SYSTEM, min_precision="full"))
    client = run(engine, Client())
    assert client.errors == {"no": "the KV cache is in int8; the request takes no less than full"}
    assert instance.load.floor_refused() == LOWEST, "no morph would help"
    serve(engine, "first", SYSTEM)
    assert serve(engine, "again", SYSTEM, min_precision="int8") == 36
    use_precision(instance, "int4")
    assert instance.scheduler.precision == "int4" and instance.shape_id == "tp1-int4x0.5-kv8"


def test_free_blocks_stay_findable_until_they_are_needed_oldest_first() -> None:
    engine, _ = caching_engine(num_blocks=16, num_seqs=1)
    for name, first in (("a", 1), ("b", 2), ("c", 3)):
        serve(engine, name, [first] * 9)  # four full blocks each, with their answers
    assert serve(engine, "a again", [1] * 9) == 8
    serve(engine, "d", [4] * 9)
    serve(engine, "f", [6] * 9)
    serve(engine, "e", [5] * 9)
    assert serve(engine, "a once more", [1] * 9) == 8
    assert serve(engine, "b again", [2] * 9) == 0, "b was used least recently"


def test_a_cache_that_shrinks_takes_cached_blocks_and_no_live_one() -> None:
    engine, instance = caching_engine(num_blocks=32)
    serve(engine, "a", SYSTEM)
    allocator = instance.kv.allocator
    allocator.truncate(6)
    allocator.check_integrity()
    allocator.extend(32)
    assert serve(engine, "b", SYSTEM) == 6 * 4


def test_a_shrink_moves_live_blocks_over_empty_ones_first_and_then_over_the_oldest() -> None:
    blocks = BlockAllocator(12)
    blocks.allocate(12)
    keys = [next_key(first_key(""), [i]) for i in range(4)]
    for block, key in zip((2, 0, 1, 3), keys, strict=True):
        blocks.index.add(block, key, "full")
    blocks.free([2, 0, 1, 3, 5])
    assert plan_moves_below(blocks.used, 10, blocks.index) == {10: 5, 11: 2}
    blocks.free([10])
    blocks.relocate(plan_moves_below(blocks.used, 10, blocks.index))
    blocks.truncate(10)
    blocks.check_integrity()
    assert [blocks.index.find([key], "full") for key in keys] == [[2], [0], [1], [3]]
    assert blocks.used == [4, 5, 6, 7, 8, 9]


def test_moved_blocks_are_found_at_their_new_place() -> None:
    blocks = BlockAllocator(8)
    held = blocks.allocate(6)
    keys = [next_key(first_key(""), [i]) for i in range(6)]
    for block, key in zip(held, keys, strict=True):
        blocks.index.add(block, key, "full")
    blocks.free([0, 1])
    blocks.relocate({5: 1, 4: 6})
    blocks.check_integrity()
    assert blocks.index.find([keys[5]], "full") == [1] and blocks.index.find([keys[4]], "full") == [6]
    assert blocks.index.find([keys[1]], "full") == [], "its place was taken"
    assert blocks.index.find([keys[0]], "full") == [0]


def test_blocks_filled_while_the_index_is_closed_are_found_when_it_opens() -> None:
    engine, instance = caching_engine()
    index, client = instance.kv.allocator.index, Client()
    engine.submit("toy@w0", request("runs through", [*SYSTEM, 1], 40))
    index.close()  # as while layers run at two degrees
    for _ in range(8):
        client.take(engine.step())
    assert len(index) == 0
    index.open()
    client.take(engine.step())
    engine.submit("toy@w0", request("after", [*SYSTEM, 2], 8))
    run(engine, client)
    assert sum(d.cached_tokens for d in client.deltas if d.request_id == "after") == len(SYSTEM)
    assert client.tokens["after"] == continuation([*SYSTEM, 2], 8)


def test_a_block_that_is_indexed_again_keeps_the_precision_that_made_it() -> None:
    engine, instance = caching_engine()
    client = Client()
    engine.submit("toy@w0", request("long", [*SYSTEM, 1], 60))
    for _ in range(6):
        client.take(engine.step())
    use_precision(instance, "int4")
    client.take(engine.step())
    instance.renumber_all_blocks(lambda block: block)  # as a group does that splits
    client.take(engine.step())
    use_precision(instance, "full")
    engine.submit("toy@w0", request("full", [*SYSTEM, 2], 8))
    run(engine, client)
    assert sum(d.cached_tokens for d in client.deltas if d.request_id == "full") == len(SYSTEM)


def test_blocks_of_an_equal_beginning_are_reserved_once() -> None:
    engine, instance = caching_engine(num_blocks=23)
    client = Client()
    serve(engine, "first", [*SYSTEM, 1, 2])
    # As many output tokens as of the first are expected. So alone each needs 13 blocks, ten of them the same.
    for name, last in (("a", 3), ("b", 4)):
        engine.submit("toy@w0", request(name, [*SYSTEM, last], 19))
    client.take(engine.step())
    scheduler = instance.scheduler
    assert len(scheduler.running) == 2
    assert scheduler.num_blocks_needed == 10 + 2 * 3
    assert scheduler.num_blocks_spare == 23 - (10 + 2 * 3)
    engine.submit("toy@w0", request("c", [*SYSTEM, 0], 11))  # beside the others it takes three of its own
    client.take(engine.step())
    assert (len(scheduler.running), scheduler.num_blocks_wanted) == (3, 0)
    run(engine, client)
    assert scheduler.num_preemptions == 0


def test_blocks_that_are_found_again_after_a_preemption_do_not_count_as_recomputed() -> None:
    engine, instance = caching_engine()
    scheduler, client = instance.scheduler, Client()
    engine.submit("toy@w0", request("a", [*SYSTEM, 1], 8))
    for _ in range(5):
        client.take(engine.step())
    computed = scheduler.running[0].num_computed_tokens
    assert computed % 4
    scheduler._preempt_youngest(preempted := SchedulerOutput())
    instance._settle(preempted)
    run(engine, client)
    assert client.tokens["a"] == continuation([*SYSTEM, 1], 8)
    assert (scheduler.num_preemptions, scheduler.num_recomputed) == (1, computed % 4)


def test_the_report_has_the_digests_of_what_is_found_here() -> None:
    engine, instance = caching_engine()
    serve(engine, "a", [*SYSTEM, 1, 2])
    digests = prompt_digests("", SYSTEM, 4)
    published = instance_telemetry(instance).prefix_digests
    assert len(digests) == 2 and set(digests) <= set(published), "every fourth of ten blocks"
    key = first_key("")
    for block in range(4):
        key = next_key(key, SYSTEM[4 * block : 4 * block + 4])
    assert digests[0] == digest_of(key)
    assert num_blocks_found(digests, published) == 8
    assert num_blocks_found(prompt_digests("tenant", SYSTEM, 4), published) == 0
    assert num_blocks_found(prompt_digests("", [*SYSTEM[:16], *SYSTEM], 4), published) == 4
    assert num_blocks_found(digests, digests[1:]) == 8, "a full report leaves out the first blocks first"


def test_without_the_setting_nothing_is_kept() -> None:
    engine, instance = toy_engine()
    serve(engine, "a", SYSTEM)
    assert serve(engine, "b", SYSTEM) == 0 and instance.scheduler.num_prefix_queried == 0


@pytest.mark.parametrize("num_blocks", [12, 20, 60])
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_traffic_gives_every_request_its_own_text(num_blocks: int, data: st.DataObject) -> None:
    """No block is shared by two writers and none is lost, beside cancels, swaps, moves and lost caches."""
    engine, instance = caching_engine(num_blocks=num_blocks, num_seqs=4, tokens=9)
    client, prompts, cancelled = Client(), {}, set()
    for i in range(data.draw(st.integers(3, 14))):
        verb = data.draw(st.sampled_from(["submit"] * 6 + ["cancel", "swap", "lose", "shrink"]))
        if verb == "submit":
            shared = data.draw(st.integers(0, 24))
            prompt = [*SYSTEM[:shared], *data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))]
            prompts[f"r{i}"] = prompt
            engine.submit("toy@w0", request(f"r{i}", prompt, 8))
        elif verb == "cancel" and prompts:
            name = data.draw(st.sampled_from(sorted(prompts)))
            if instance.cancel([name]):
                cancelled.add(name)
        elif verb == "swap":
            use_precision(instance, data.draw(st.sampled_from(["full", "int8", "int4"])))
        elif verb == "lose":
            instance.kv.allocator = BlockAllocator(num_blocks)  # type: ignore[misc]
            instance.kv.slots.fill_(-1)  # type: ignore[attr-defined]
            instance.recompute_all(instance.kv.allocator)
        elif verb == "shrink":
            allocator = instance.kv.allocator
            kept = max([10, *(block + 1 for block in allocator.used)])
            allocator.truncate(min(kept, allocator.capacity))
            allocator.extend(num_blocks)
        for _ in range(data.draw(st.integers(0, 6))):
            client.take(engine.step())
            engine.check_integrity()
            instance.kv.allocator.check_integrity()
    run(engine, client)
    assert instance.kv.allocator.num_used == 0
    for name, prompt in prompts.items():
        if name not in cancelled:
            assert client.tokens[name] == continuation(prompt, 8), name
