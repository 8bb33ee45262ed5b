"""Results of short steps go to the event loop together, first and last tokens at once, in few entries."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

from bus.messages import Delta, FinishReason, SamplingParams, Submit
from bus.names import Names
from tests.support.engine_toys import request
from worker.engine.engine import StepResult
from worker.engine.outputs import Output
from worker.service.ledger import Ledger
from worker.service.publisher import OutputPublisher, Parcel, ResultQueue, entries_of

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


async def test_results_that_wait_go_together_but_not_with_those_of_another_epoch() -> None:
    calls: list[tuple[int, list[int]]] = []
    queue = ResultQueue(
        asyncio.get_running_loop(),
        lambda epoch, results: calls.append((epoch, [each.step for each in results])),
        LONG_S,
    )
    for epoch, step in ((1, 1), (1, 2), (2, 3), (2, 4)):
        queue.put(epoch, [result(step, step)])
    queue.flush()
    assert calls == [(1, [1, 2]), (2, [3, 4])]


def steps_of(results: list[StepResult]) -> list[list[int]]:
    return [[each.step for each in entry] for entry in entries_of(results)]


def test_steps_in_a_row_share_an_entry_while_shape_and_instance_are_the_same() -> None:
    assert steps_of([result(step, step) for step in (1, 2, 3)]) == [[1, 2, 3]]
    swapped = [result(1, 1), result(2, 2), replace(result(3, 3), shape_id="tp1-int8x1"), result(4, 4)]
    assert steps_of(swapped) == [[1, 2], [3], [4]]
    below = [result(1, 1), replace(result(2, 2), layers_below_full=1)]
    assert steps_of(below) == [[1], [2]]
    two = [result(1, 1), replace(result(7, 1), instance="other@w0"), result(2, 2)]
    assert steps_of(two) == [[7], [1, 2]], "each instance has its own"


def test_a_step_that_begins_a_request_opens_an_entry_and_a_last_token_ends_none() -> None:
    assert steps_of([result(1, 1), result(2, 0), result(3, 1)]) == [[1], [2, 3]]
    assert steps_of([result(1, 1), result(2, 2, "length"), result(3, 3)]) == [[1, 2, 3]]


def test_one_entry_has_the_tokens_of_all_its_steps_in_order_and_their_acknowledgements() -> None:
    put: list[Parcel] = []
    ledger = Ledger()
    submit = Submit(
        request_id="a",
        attempt=1,
        gateway="g0",
        epoch=1,
        prompt_token_ids=[1],
        sampling=SamplingParams(max_tokens=8, seed=1),
    )
    ledger.offer(submit, "toy@w0", "5-0", epoch=1)
    publisher = OutputPublisher(Names(), "w0", ledger, SimpleNamespace(put=put.append))  # type: ignore[arg-type]
    publisher.take(1, [result(4, 3), replace(result(5, 4), step_s=0.5), result(6, 5, "length")])
    (parcel,) = put
    assert parcel.output and parcel.stream == Names().tokens("g0")
    deltas = parcel.output.deltas
    assert [(delta.index, delta.token_ids) for delta in deltas] == [(3, [4]), (4, [5]), (5, [6])]
    assert (parcel.output.step, parcel.output.step_s) == (4, 0.0), "the first step's"
    assert parcel.acks == [(Names().requests("toy@w0"), "5-0")]
    publisher.take(1, [result(7, 6)])
    assert len(put) == 1, "the request has ended"
