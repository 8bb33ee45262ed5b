"""Two real workers become one instance and part again, by hand, while their streams run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bench.common.service import LEASE_S, Service, wait_for
from instar.cli import main
from tests.faults.load import LONG_STREAM, Stream
from tests.faults.morphs import Hand
from tests.support.paths import DEMO_MODEL

pytestmark = [
    pytest.mark.skipif(not (DEMO_MODEL / "config.json").is_file(), reason="models/demo is not built"),
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.timeout(600),  # of the first one, which compiles kernels where no worker has done so
]

NUM_LAYERS = 8
PROMPTS = ("def read_lines(path):\n    ", "class Queue:\n    def __init__(self")
LONG = LONG_STREAM | {"max_tokens": 800}


SETTINGS = {
    "MONITOR__INTERVAL_S": "0.1",
    "WORKER__TELEMETRY_S": "0.1",
    "WORKER__LEASE_S": str(4 * LEASE_S),
    "WORKER__VARIANTS": '["int4"]',
    "WORKER__QUANTIZATION": "rtn",
}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Service(num_workers=2, settings=SETTINGS) as service:
        service.set_policy(mode="manual")
        yield service


@pytest.fixture(scope="module")
def oracle(service: Service) -> list[str]:
    """Return what each prompt gives where nothing changes."""
    streams = [Stream(service, LONG, prompt=prompt).start() for prompt in PROMPTS]
    return [stream.finished().text for stream in streams]


def transform(service: Service, tp: int, *workers: str, **more: Any) -> dict[str, Any]:
    """Until it ended."""
    body = {"workers": list(workers), "tp": tp} | more
    url = service.url() + "/admin/instances/transform"
    morph = httpx.post(url, params={"wait": "true"}, json=body, timeout=60).json()
    assert morph["state"] == "applied", (morph, service.logs())
    return dict(morph)


def shape(service: Service) -> list[tuple[int, list[str]]]:
    return [(one["tp"], one["workers"]) for one in service.state()["instances"]]


SLOW = [pytest.mark.faults, pytest.mark.slow]


@pytest.mark.parametrize("layers_per_step", [1, pytest.param(NUM_LAYERS, marks=SLOW)])
def test_streams_of_both_go_on_with_the_same_text_as_two_workers_become_one_and_part(
    service: Service, oracle: list[str], layers_per_step: int
) -> None:
    with service.explained():
        streams = [Stream(service, LONG, prompt=prompt).start() for prompt in PROMPTS]
        for stream in streams:
            stream.wait_chunks(5)
        up = transform(service, 2, "w1", "w0", layers_per_step=layers_per_step)
        assert (up["target"], up["workers"]) == ("demo@w1", ["w1", "w0"])
        assert up["numbers"]["layers_done"] == up["numbers"]["layers"] == NUM_LAYERS
        wait_for("one instance", lambda: shape(service) == [(2, ["w1", "w0"])])
        before = sum(stream.num_chunks for stream in streams)
        wait_for("more of the streams", lambda: sum(stream.num_chunks for stream in streams) > before + 40)
        late = Stream(service, LONG, prompt=PROMPTS[0]).start().wait_chunks(5)  # within the group
        transform(service, 1, "w0", "w1", layers_per_step=layers_per_step)
        wait_for("two instances", lambda: shape(service) == [(1, ["w0"]), (1, ["w1"])])
        assert any(stream.thread.is_alive() for stream in streams), "they ended too early to tell"
        assert [stream.finished().error for stream in [*streams, late]] == [None] * (len(PROMPTS) + 1)
        assert [stream.text for stream in [*streams, late]] == [*oracle, oracle[0]]
        assert service.metric("instar_recomputed_tokens_total") == 0
        assert service.metric("instar_request_replays_total") == 0


def test_the_command_tells_of_all_layers_and_finds_the_workers_itself(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    with service.explained():
        assert main(["morph", "tp", "2", "--layers-per-step", "1", "--url", service.url()]) == 0
        told = capsys.readouterr()
        assert "applied" in told.out and f"{NUM_LAYERS} of {NUM_LAYERS} layers" in told.out
        wait_for("one instance", lambda: shape(service) == [(2, ["w0", "w1"])])
        assert main(["status", "--url", service.url()]) == 0
        assert "tp2" in capsys.readouterr().out
        assert main(["morph", "tp", "1", "--json", "--url", service.url()]) == 0
        assert json.loads(capsys.readouterr().out)["state"] == "applied"
        wait_for("two instances", lambda: len(shape(service)) == 2)


def test_what_is_so_already_is_applied_at_once(service: Service) -> None:
    assert transform(service, 1, "w0", "w1")["numbers"]["layers_done"] == 0


@pytest.mark.faults
@pytest.mark.slow
def test_a_target_that_takes_two_steps_is_reached_while_streams_run(oracle: list[str]) -> None:
    with Service(num_workers=3, settings=SETTINGS) as three, three.explained():
        three.set_policy(mode="manual")
        transform(three, 2, "w0", "w1")
        streams = [Stream(three, LONG, prompt=prompt).start().wait_chunks(5) for prompt in PROMPTS]
        morph = transform(three, 2, "w1", "w2")
        assert morph["numbers"] == {"steps": 2, "steps_done": 2}
        assert sorted(shape(three)) == [(1, ["w0"]), (2, ["w1", "w2"])]
        assert [stream.finished().error for stream in streams] == [None] * len(PROMPTS)
        assert [stream.text for stream in streams] == oracle


@pytest.mark.faults
@pytest.mark.slow
def test_a_transform_that_is_given_up_on_its_way_leaves_a_shape_that_serves(
    service: Service, oracle: list[str]
) -> None:
    with service.explained():
        streams = [Stream(service, LONG, prompt=prompt).start().wait_chunks(5) for prompt in PROMPTS]
        url, ends = service.url() + "/admin", []
        for pause_s in (0.0, 0.05, 0.1, 0.2):
            body = {"workers": ["w0", "w1"], "tp": 2}
            morph = httpx.post(url + "/instances/transform", json=body, timeout=20).json()
            time.sleep(pause_s)
            httpx.delete(f"{url}/morphs/{morph['id']}", timeout=20)
            ended = httpx.get(f"{url}/morphs/{morph['id']}", params={"wait": "true"}, timeout=60).json()
            ends.append((ended["state"], ended["reason"], ended["numbers"].get("layers_done")))
            wait_for("cards that agree", lambda: sum(tp for tp, _ in shape(service)) == 2)
            transform(service, 1, "w0", "w1")
            wait_for("two instances", lambda: len(shape(service)) == 2)
        assert {state for state, _, _ in ends} <= {"applied", "failed"}, ends
        assert [stream.finished().error for stream in streams] == [None] * len(PROMPTS)
        assert [stream.text for stream in streams] == oracle, ends


@pytest.mark.faults
@pytest.mark.slow
def test_a_group_swaps_its_layers_and_resizes_its_cache_and_is_exact_when_all_is_back(
    service: Service, oracle: list[str]
) -> None:
    with service.explained():
        transform(service, 2, "w0", "w1")
        wait_for("one instance", lambda: len(shape(service)) == 1)
        hand = Hand(service, "demo@w0")
        blocks = wait_for("its blocks", lambda: hand.look()["kv"]["blocks"])
        streams = [Stream(service, LONG, prompt=prompt).start().wait_chunks(5) for prompt in PROMPTS]
        assert hand.swap("int4", count=2, wait_s=20)["state"] == "applied"
        wait_for("two layers to be told", lambda: hand.look()["layers_below_full"] == 2)
        assert hand.resize(blocks - 64, wait_s=20)["state"] == "applied"
        assert hand.swap("full", count=2, wait_s=20)["state"] == "applied"
        assert [stream.finished().error for stream in streams] == [None] * len(PROMPTS)
        again = Stream(service, LONG, prompt=PROMPTS[0]).start().wait_chunks(5)
        transform(service, 1, "w0", "w1")
        assert again.finished().text == oracle[0]
        refused = Hand(service, "demo@w7").resize(10)["error"]
        assert refused["code"] == "instance_not_found"


@pytest.mark.faults
@pytest.mark.slow
def test_workers_whose_layers_differ_get_equal_ones_and_become_one(
    service: Service, oracle: list[str]
) -> None:
    with service.explained():
        low = Hand(service, "demo@w1")
        assert low.swap("int4", count=2, wait_s=20)["state"] == "applied"
        wait_for("two layers to be told", lambda: low.look()["layers_below_full"] == 2)
        up = transform(service, 2, "w0", "w1")
        assert up["numbers"] == {"steps": 2, "steps_done": 2}, up
        assert "halves of layers to full on w1" in up["decided"]
        wait_for("one instance", lambda: shape(service) == [(2, ["w0", "w1"])])
        assert Stream(service, LONG, prompt=PROMPTS[0]).start().finished().text == oracle[0]
        transform(service, 1, "w0", "w1")
        wait_for("two instances", lambda: len(shape(service)) == 2)


@pytest.mark.faults
@pytest.mark.slow
def test_a_group_converts_its_kv_cache_while_streams_run_and_parts_in_8_bits(
    service: Service, oracle: list[str]
) -> None:
    recomputed = service.metric("instar_recomputed_tokens_total")
    with service.explained():
        transform(service, 2, "w0", "w1")
        wait_for("one instance", lambda: len(shape(service)) == 1)
        hand = Hand(service, "demo@w0")
        blocks = wait_for("its blocks", lambda: hand.look()["kv"]["blocks"])
        streams = [Stream(service, LONG, prompt=prompt).start().wait_chunks(5) for prompt in PROMPTS]
        there = hand.convert("int8", wait_s=20)
        assert there["state"] == "applied" and there["numbers"]["blocks_after"] > 3.5 * blocks, there
        wait_for("8 bits to be told", lambda: hand.look()["kv"]["precision"] == "int8")
        transform(service, 1, "w0", "w1")
        wait_for("two instances", lambda: len(shape(service)) == 2)
        assert [stream.finished().error for stream in streams] == [None] * len(PROMPTS)
        assert Hand(service, "demo@w0").convert("full", wait_s=20)["state"] == "applied"
        body = {"workers": ["w0", "w1"], "tp": 2}
        url = service.url() + "/admin/instances/transform"
        differing = httpx.post(url, params={"wait": "true"}, json=body, timeout=60).json()
        assert differing["state"] == "conflict" and "convert one of them" in differing["reason"], differing
        assert Hand(service, "demo@w1").convert("full", wait_s=20)["state"] == "applied"
        transform(service, 2, "w0", "w1")
        wait_for("one instance", lambda: len(shape(service)) == 1)
        assert Stream(service, LONG, prompt=PROMPTS[0]).start().finished().text == oracle[0]
        assert service.metric("instar_recomputed_tokens_total") == recomputed
        transform(service, 1, "w0", "w1")
        wait_for("two instances", lambda: len(shape(service)) == 2)
