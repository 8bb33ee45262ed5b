"""A model in stages on real processes, of which one is killed while its requests run."""

from __future__ import annotations

import asyncio
import signal
import threading
import time

import httpx
import pytest

from bench.common.service import Service, wait_for
from bus.client import connect
from bus.messages import Stage
from bus.morphs import Deploy
from bus.settings import RedisSettings
from tests.faults.morphs import Hand
from tests.support.paths import DEMO_MODEL

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(600)]

LAYERS, CUT = 8, 3
PROMPT, NUM_TOKENS = "Once upon a time", 1200


def deploy(service: Service, *stages: Stage) -> None:
    """Deploy as the controller does."""

    async def order() -> None:
        async with connect(RedisSettings(url=service.own_redis_url), source="test") as bus:
            epochs = {live.card.id: live.epoch for live in await bus.workers()}
            places = [(number, worker) for number, stage in enumerate(stages) for worker in stage.workers]
            for number, worker in places:
                command = Deploy(
                    id=f"d-{worker}",
                    epoch=epochs[worker],
                    instance=f"long@{worker}",
                    model="long",
                    path=str(DEMO_MODEL),
                    stages=list(stages),
                    stage=number,
                    epochs=epochs,
                )
                await bus.publish(bus.names.control(worker), command)

    asyncio.run(order())
    wait_for("it to serve", lambda: shape_of(service, f"long@{stages[0].workers[0]}"), 60.0)


def two_stages(first: list[str], second: list[str]) -> list[Stage]:
    return [Stage(workers=first, first=0, end=CUT), Stage(workers=second, first=CUT, end=LAYERS)]


def shape_of(service: Service, instance: str) -> tuple[int, int, list[str]] | None:
    found = [one for one in service.state()["instances"] if one["id"] == instance]
    return (found[0]["tp"], found[0]["pp"], found[0]["workers"]) if found else None


def complete(service: Service, model: str) -> str:
    answer = ask(service, model)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def ask(service: Service, model: str) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{service.url()}/v1/completions", json=body, timeout=90)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_request_outlives_a_worker_of_its_pipeline_and_goes_on_with_the_same_text(tp: int) -> None:
    """The worker of a later stage dies, or of a rank beside the leader."""
    *workers, spare = [f"w{i}" for i in range(2 * tp + 1)]
    settings = {"WORKER__VARIANTS": "[]"}
    with Service(num_workers=len(workers) + 1, settings=settings) as service, service.explained():
        deploy(service, *two_stages(workers[:tp], workers[tp:]))
        assert shape_of(service, "long@w0") == (tp, 2, workers)
        wanted = complete(service, "demo")
        texts: list[str] = []
        asking = threading.Thread(target=lambda: texts.append(complete(service, "long")))
        asking.start()
        wait_for("its first step", lambda: service.metric("instar_num_requests_running"), every_s=0.01)
        deploy(service, Stage(workers=[spare], first=0, end=LAYERS))
        assert asking.is_alive()
        service.processes["w1"].kill()
        wait_for("the pipeline to go", lambda: shape_of(service, "long@w0") is None)
        asking.join(60)
        assert texts == [wanted]
        assert service.metric("instar_request_replays_total") == 1


def test_a_pipeline_swaps_and_resizes_by_hand_and_keeps_no_page_of_a_stage_killed_in_mid_swap() -> None:
    settings = {"WORKER__VARIANTS": '["int8", "int4"]', "WORKER__QUANTIZATION": "rtn"}
    slow_morphs = {"WORKER__MORPH_SHARE": "0.004", "WORKER__TELEMETRY_S": "0.1"}
    with Service(num_workers=2, settings=settings | slow_morphs) as service, service.explained():
        leader, beside = Hand(service, "demo@w0").manual(), Hand(service, "long@w0")
        before = leader.pages()
        deploy(service, *two_stages(["w0"], ["w1"]))
        wanted, texts = complete(service, "demo"), list[str]()
        asking = threading.Thread(target=lambda: texts.append(complete(service, "long")))
        asking.start()
        wait_for("its first step", lambda: service.metric("instar_num_requests_running"), every_s=0.01)
        small = beside.swap("int4", count=LAYERS)
        assert small["state"] == "applied", small
        blocks = int(small["numbers"]["blocks_after"])
        assert blocks > int(small["numbers"]["blocks_before"]), small
        assert {layer["ffn"] for layer in beside.look()["layers"]} == {"int4"}
        assert beside.resize(blocks // 2)["state"] == "applied"
        assert beside.resize(blocks)["state"] == "applied"
        assert beside.swap("full", count=LAYERS)["state"] == "applied"
        there = beside.convert("int8")
        assert there["state"] == "applied" and there["numbers"]["layers_done"] == LAYERS, there
        assert there["numbers"]["blocks_after"] > 3.5 * there["numbers"]["blocks_before"]
        assert beside.convert("full")["state"] == "applied"
        asking.join(60)
        assert texts and complete(service, "long") == wanted
        asking = threading.Thread(target=lambda: texts.append(ask(service, "long").text))
        asking.start()
        wait_for("its first step", lambda: service.metric("instar_num_requests_running"), every_s=0.01)
        service.processes["w1"].signal(signal.SIGSTOP)  # so that the swap gets no further than stage 0
        morph = beside.swap("int8", count=LAYERS, wait=False)
        time.sleep(0.5)
        service.processes["w1"].kill()
        wait_for("the pipeline to go", lambda: shape_of(service, "long@w0") is None)
        assert beside.ended(morph["id"])["state"] == "failed"
        wait_for("every page", lambda: leader.pages() == before)
        asking.join(60)
        assert len(texts) == 2, "nobody else has the model: it ends with an error"
