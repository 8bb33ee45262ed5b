"""What is kept from keys above their shares, decided from the uses of all. From one key: nothing."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.scheduler_steps import keyed
from worker.engine.fair_queue import FairQueue
from worker.engine.reserve import NOTHING, KeyLoad, Reserve, reserve_of

HEAVY = KeyLoad(1.0, 0.9, 500, 6, 60)


def test_what_the_light_key_needed_lately_is_kept_from_the_heavy_one() -> None:
    kept = reserve_of({"heavy": HEAVY, "light": KeyLoad(1.0, 0.02, 3, 7, 1)}, 64, 1000)
    assert kept.above == {"heavy"} and kept.below == {"light"}
    assert (kept.num_seqs, kept.num_blocks) == (2, 14), "of three, one runs"


def test_one_key_has_the_whole_as_its_share() -> None:
    assert reserve_of({"only": replace(HEAVY, tokens=1.0)}, 64, 1000) == NOTHING


def test_keys_that_all_use_much_are_left_to_the_queue() -> None:
    both = {"a": replace(HEAVY, tokens=0.55), "b": replace(HEAVY, tokens=0.4)}
    assert reserve_of(both, 64, 1000) == NOTHING


def test_a_key_of_more_weight_may_use_more() -> None:
    light = KeyLoad(1.0, 0.1, 1, 1, 0)
    assert reserve_of({"heavy": replace(HEAVY, weight=9.0, tokens=0.85), "light": light}, 64, 1000) == NOTHING
    assert (
        reserve_of({"heavy": replace(HEAVY, weight=2.0, tokens=0.85), "light": light}, 64, 1000).num_seqs == 1
    )


use = st.builds(
    KeyLoad,
    st.sampled_from([0.25, 1.0, 4.0]),
    st.floats(0, 1),
    st.integers(0, 600),
    st.integers(1, 5000),
    st.integers(0, 64),
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("abcdefgh"), use), st.integers(1, 256), st.integers(1, 10_000))
def test_never_more_than_an_eighth_is_kept_and_never_from_all(
    uses: dict[str, KeyLoad], max_seqs: int, max_blocks: int
) -> None:
    kept = reserve_of(uses, max_seqs, max_blocks)
    assert 8 * kept.num_seqs <= max_seqs and 8 * kept.num_blocks <= max_blocks
    assert not kept.above & kept.below
    assert bool(kept.above) == bool(kept.below)


KEPT = Reserve(above=frozenset({"heavy"}), below=frozenset({"light"}), num_seqs=2, num_blocks=14)


def test_it_is_kept_from_keys_above_their_shares_alone() -> None:
    assert KEPT.kept_from(keyed("a", "heavy")) is KEPT
    assert KEPT.kept_from(keyed("a", "light")) == KEPT.kept_from(keyed("a", "")) == NOTHING


def test_who_is_above_its_share_is_the_next_where_nobody_else_waits() -> None:
    queue = FairQueue()
    queue.add(heavy := keyed("first", "heavy"))
    assert KEPT.head(queue) is heavy
    queue.add(other := keyed("later", "", arrived=1.0))
    assert KEPT.head(queue) is other and NOTHING.head(queue) is heavy


def test_prompts_of_a_busy_key_get_an_eighth_of_a_step_but_none_beside_those_of_a_light_one() -> None:
    heavy, light = keyed("a", "heavy"), keyed("b", "light")
    assert KEPT.most_prompt_tokens([heavy], 64) == 8
    assert KEPT.most_prompt_tokens([], 4) == 1, "it goes on in short steps, too"
    assert KEPT.most_prompt_tokens([heavy, light], 64) == 0
