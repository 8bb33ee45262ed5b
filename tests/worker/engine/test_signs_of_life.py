"""A request that has nothing to say for long is heard of all the same."""

from __future__ import annotations

from tests.support.engine_toys import Client, continuation, expect_no_growth, request, run, toy_engine
from worker.engine.signs_of_life import SIGN_OF_LIFE_S


class Clock:
    """Each look at it takes `tick_s`."""

    def __init__(self, tick_s: float) -> None:
        self.now, self.tick_s = 1000.0, tick_s

    def __call__(self) -> float:
        self.now += self.tick_s
        return self.now


def silent_deltas(client: Client, name: str) -> list[int]:
    return [d.index for d in client.deltas if d.request_id == name and not d.token_ids]


def test_a_prefill_of_many_chunks_gives_signs_of_life_now_and_then() -> None:
    clock = Clock(tick_s=0.2)
    engine, _ = toy_engine(tokens=4, num_seqs=4, clock=clock)
    prompt = list(range(160))
    prompt = [token % 97 for token in prompt]
    engine.submit("toy@w0", request("long", prompt, 3))
    began = clock.now
    client = run(engine, Client())
    took_s = clock.now - began
    assert client.tokens["long"] == continuation(prompt, 3)
    num_signs = len(silent_deltas(client, "long")) - 1  # one said that it was admitted
    assert 1 <= num_signs <= took_s / SIGN_OF_LIFE_S


def test_a_preempted_request_gives_signs_of_life_at_its_index() -> None:
    engine, instance = toy_engine(num_blocks=16, num_seqs=4, tokens=16, clock=Clock(tick_s=1.0))
    expect_no_growth(instance.scheduler)
    for name in ("old", "young"):
        engine.submit("toy@w0", request(name, [1, 2, 3, 4, 5], 40))
    client = run(engine, Client())
    assert instance.scheduler.num_preemptions
    assert any(index > 0 for index in silent_deltas(client, "young"))
    assert client.tokens["young"] == continuation([1, 2, 3, 4, 5], 40)


def test_who_gets_tokens_all_the_time_gives_none() -> None:
    engine, _ = toy_engine(clock=Clock(tick_s=0.2))
    engine.submit("toy@w0", request("a", [1], 100))
    client = run(engine, Client())
    assert silent_deltas(client, "a") == []
