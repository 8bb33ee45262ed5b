"""Results of short steps go to the event loop together; first and last tokens at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from bus.messages import Delta, FinishReason
from tests.support.engine_toys import request
from worker.engine.core import Output
from worker.engine.engine import StepResult
from worker.service.publisher import ResultQueue

LONG_S = 3600.0  # no timer ends within a test


def result(step: int, index: int, finish_reason: FinishReason | None = None) -> StepResult:
    delta = Delta(request_id="a", attempt=1, index=index, token_ids=[step], finish_reason=finish_reason)
    return StepResult("toy@w0", step, 0, [Output(request("a", [1], 8), delta)], "tp1-full", 0)


class Taken:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.calls = 0

    def __call__(self, epoch: int, results: list[StepResult]) -> None:
        self.calls += 1
        self.steps += [each.step for each in results]


async def turns() -> None:
    """Let the event loop run what was posted."""
    for _ in range(3):
        await asyncio.sleep(0)


def in_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


async def test_a_first_and_a_last_token_do_not_wait_and_bring_the_others_along() -> None:
    taken = Taken()
    queue = ResultQueue(asyncio.get_running_loop(), taken, LONG_S)
    in_thread(lambda: queue.put(0, [result(1, 0)]))
    await turns()
    assert taken.steps == [1]
    for step in (2, 3, 4):
        in_thread(lambda step=step: queue.put(0, [result(step, step - 1)]))  # type: ignore[misc]
    await turns()
    assert taken.steps == [1], "they wait for the timer"
    in_thread(lambda: queue.put(0, [result(5, 4, "length")]))
    await turns()
    assert taken.steps == [1, 2, 3, 4, 5]


async def test_a_token_waits_no_longer_than_the_interval() -> None:
    taken = Taken()
    queue = ResultQueue(asyncio.get_running_loop(), taken, 0.01)
    queue.put(0, [result(1, 0)])
    await turns()
    queue.put(0, [result(2, 1)])
    async with asyncio.timeout(30):
        while taken.steps != [1, 2]:
            await asyncio.sleep(0.001)
    async with asyncio.timeout(30):  # an idle queue keeps no timer
        while queue._timer:
            await asyncio.sleep(0.001)
    queue.put(0, [result(3, 2)])
    await turns()
    assert taken.steps == [1, 2, 3]


async def test_without_an_interval_each_result_goes_at_once() -> None:
    taken = Taken()
    queue = ResultQueue(asyncio.get_running_loop(), taken, 0.0)
    for step in range(1, 5):
        queue.put(0, [result(step, step)])
        await turns()
        assert taken.steps[-1] == step
