"""Storms of morphs under load: fault 13 of docs/faults.md. STORM_S says how many seconds they last."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bench.common.service import Service, wait_for
from tests.faults.load import Load
from tests.faults.morph_storm import PROMPTS, STREAM_TOKENS, MorphStorm
from tests.faults.morphs import NUM_LAYERS, SMALL_BUDGET, Hand, assert_complete, settings, stream

STORM_S = float(os.environ.get("STORM_S", "8"))
# Morphs may take what they like here: the more of them, the better.
STORMY = {"WORKER__MORPH_SHARE": "0.5"}
# A slope needs time to show; allocators take some minutes to have all that they ever will.
SLOPE_FROM_S, MOST_MIB_PER_MINUTE = 120, 2.0

pytestmark = [pytest.mark.faults, pytest.mark.timeout(STORM_S + 240)]
Report = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def stormy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    host_dir = tmp_path_factory.mktemp("host")
    with Service(settings=settings(host_dir, SMALL_BUDGET, STORMY)) as service:
        Hand(service).manual()
        yield service


def test_a_storm_of_morphs_loses_no_request_and_leaves_no_trace(stormy: Service, report: Report) -> None:
    hand = Hand(stormy)
    pages, blocks = hand.pages(), hand.look()["kv"]["blocks"]
    with stormy.explained():
        with Load(stormy, clients=2) as load:
            load.warm()
            with MorphStorm(stormy) as storm:
                load.mark()
                storm.rage(STORM_S)
            load.recover(5)
        assert load.failed == []
        assert storm.streams > 0 and storm.answers["applied"] > 0 and storm.answers["refused"] > 0
        hand.wait_idle()
        assert hand.swap("full", count=NUM_LAYERS, wait_s=20)["state"] == "applied"
        assert hand.resize(blocks)["state"] == "applied"
        wait_for("the same pages as before", lambda: hand.pages() == pages, 10)
        wait_for("full precision", hand.is_full)
        for prompt in PROMPTS:
            again = stream(stormy, STREAM_TOKENS, prompt=prompt).finished()
            assert_complete(again, STREAM_TOKENS)
            assert again.tokens == storm.oracles[prompt]
            assert again.num_exact == STREAM_TOKENS
        hand.wait_idle()
        if STORM_S >= SLOPE_FROM_S:
            slopes = {name: slope for name, (slope, _) in storm.memory.growth().items()}
            assert max(slopes.values()) < MOST_MIB_PER_MINUTE, slopes
    told = {"told": storm.told()}
    report(load.row(f"13 {sum(storm.answers.values())} morphs in {STORM_S:.0f} s") | told)


@pytest.mark.slow
def test_streams_in_a_storm_of_resizes_are_the_oracles_to_the_token(stormy: Service, report: Report) -> None:
    hand = Hand(stormy)
    blocks = hand.look()["kv"]["blocks"]
    with stormy.explained():
        with Load(stormy, clients=2) as load:
            load.warm()
            with MorphStorm(stormy, kinds=("resize", "cancel"), seed=2) as storm:
                load.mark()
                storm.rage(min(STORM_S, 60))
            load.recover(5)
        # All layers were full, so every token of every stream was compared with the oracle's.
        assert hand.is_full() and storm.answers["applied"] > 0
        assert load.failed == []
        hand.wait_idle()
        assert hand.resize(blocks)["state"] == "applied"
    report(load.row(f"13 {sum(storm.answers.values())} resizes in {min(STORM_S, 60):.0f} s"))
