"""A model in stages on real processes, of which one is killed while its requests run."""

from __future__ import annotations

import asyncio
import threading

import httpx
import pytest

from bench.common.service import Service, wait_for
from bus.client import connect
from bus.messages import Stage
from bus.morphs import Deploy
from bus.settings import RedisSettings
from tests.support.paths import DEMO_MODEL

pytestmark = [pytest.mark.faults, pytest.mark.slow]

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


def shape_of(service: Service, instance: str) -> tuple[int, int, list[str]] | None:
    found = [one for one in service.state()["instances"] if one["id"] == instance]
    return (found[0]["tp"], found[0]["pp"], found[0]["workers"]) if found else None


def complete(service: Service, model: str) -> str:
    body = {"model": model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{service.url()}/v1/completions", json=body, timeout=90)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


@pytest.mark.parametrize("tp", [1, 2])
def test_a_request_outlives_a_worker_of_its_pipeline_and_goes_on_with_the_same_text(tp: int) -> None:
    """The worker of a later stage dies, or of a rank beside the leader."""
    *workers, spare = [f"w{i}" for i in range(2 * tp + 1)]
    settings = {"WORKER__VARIANTS": "[]"}
    with Service(num_workers=len(workers) + 1, settings=settings) as service, service.explained():
        halves = [
            Stage(workers=workers[:tp], first=0, end=CUT),
            Stage(workers=workers[tp:], first=CUT, end=LAYERS),
        ]
        deploy(service, *halves)
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
