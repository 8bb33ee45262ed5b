"""Outputs are held to their forms before, in and behind a group: each sequence keeps its matcher, and what
waits for its grammar waits on."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from tests.support.group_workers import GroupWorker, model_fixtures, transform, workers
from tests.support.toy_grammars import chosen, form
from tests.worker.tensor_parallel.test_workers import prompt

LAYERS = 3
LONG, SHORT = 900, 30

model, folder = model_fixtures(num_hidden_layers=LAYERS)


def applied(leader: GroupWorker, morph: str) -> None:
    report = leader.end_of(morph)
    assert report.state == "applied", report


def begin_long(each: list[GroupWorker]) -> None:
    """A request with a form at each worker, and one without, that run on until they are cancelled."""
    for i, worker in enumerate(each):
        worker.submit("formed", prompt(i, 11 + i), LONG, form(LONG + 1))
        worker.submit("free", prompt(i, 7), LONG)
        wait_more(worker)


def wait_more(worker: GroupWorker) -> None:
    """Until both have made more tokens, unless they have made all."""
    made = {name: len(worker.tokens[name]) for name in ("formed", "free")}

    def have_more() -> bool:
        return all(len(worker.tokens[name]) > n + 3 or name in worker.ends for name, n in made.items())

    worker.wait(have_more, "more tokens")


def check_long(each: list[GroupWorker], model: Any) -> None:
    """End them; what they made is what the model makes."""
    for i, worker in enumerate(each):
        worker.thread.cancel(["formed", "free"])
        worker.check()
        formed, free = worker.tokens["formed"], worker.tokens["free"]
        assert formed == chosen(model, prompt(i, 11 + i), formed)
        assert free == chosen(model, prompt(i, 7), free, has_form=False)
        assert worker.ends.get("formed", "length") == "length", worker.ends


def hold(each: list[GroupWorker], name: str) -> None:
    """Send a request to each worker whose grammar is not compiled before its `release`."""
    for i, worker in enumerate(each):
        worker.call(partial(setattr, worker.grammars, "is_held", True))
        worker.submit(name, prompt(20 + i, 9), SHORT, form(SHORT))
        worker.check()
        assert worker.instance.load.num_waiting == 1


def release(each: list[GroupWorker], name: str, model: Any) -> None:
    """Compile the grammars; the answers are right."""
    for i, worker in enumerate(each):
        worker.check()
        assert name not in worker.ends and not worker.tokens[name]
        worker.call(worker.grammars.release)
        worker.wait_ends(name)
        assert worker.ends[name] == "stop", worker.ends[name]
        assert len(worker.tokens[name]) == SHORT
        assert worker.tokens[name] == chosen(model, prompt(20 + i, 9), worker.tokens[name])


def test_sequences_keep_their_forms_while_workers_come_together_and_part(folder: Path, model: Any) -> None:
    with workers(folder, 2, has_grammars=True) as each:
        begin_long(each)
        for tp in (2, 1):
            hold(each, f"held before {tp}")
            applied(each[0], transform(each, tp))
            for worker in each:
                worker.wait_degree(tp)
                worker.check()
                wait_more(worker)
            release(each, f"held before {tp}", model)
        check_long(each, model)
        for worker in each:
            assert worker.instance.scheduler.num_recomputed == 0
            assert worker.fingerprints == {"tp1-full", "tp2-full"}


def test_an_idle_group_tells_of_what_waits_for_its_grammar_and_takes_it(folder: Path, model: Any) -> None:
    """A worker that says that it has nothing to do is taken for one that never got the request."""
    with workers(folder, 2, has_grammars=True) as each:
        applied(each[0], transform(each, 2))
        each[1].wait_degree(2)
        hold(each, "held")
        for worker in each:
            worker.wait(lambda w=worker: num_waiting(w) == 1, "a report of it")  # type: ignore[misc]
        release(each, "held", model)
        for worker in each:
            worker.wait(lambda w=worker: num_waiting(w) == 0, "a report of its end")  # type: ignore[misc]


def num_waiting(worker: GroupWorker) -> int:
    """Requests that wait, as last reported."""
    return worker.told.instances[0].waiting if worker.told else 0


def test_a_group_that_falls_apart_leaves_the_forms_of_its_sequences(folder: Path, model: Any) -> None:
    with workers(folder, 2, has_grammars=True) as each:
        applied(each[0], transform(each, 2))
        each[1].wait_degree(2)
        begin_long(each)
        hold(each, "held")
        each[0].call(lambda: each[0].grouping.fall_apart("a test's wish"))
        for worker in each:
            worker.wait(lambda w=worker: w.grouping.executor is None, "its group's end")  # type: ignore[misc]
            worker.check()
            wait_more(worker)
        release(each, "held", model)
        check_long(each, model)
        assert all(worker.instance.scheduler.num_recomputed > 0 for worker in each)


def test_what_waits_for_its_grammar_can_be_cancelled_in_a_group(folder: Path) -> None:
    with workers(folder, 2, has_grammars=True) as each:
        applied(each[0], transform(each, 2))
        each[1].wait_degree(2)
        hold(each, "held")
        for worker in each:
            worker.thread.cancel(["held"])
            worker.check()
            assert not worker.instance.has_work
            worker.call(worker.grammars.release)
            worker.check()
        applied(each[0], transform(each, 1))
