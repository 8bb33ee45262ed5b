"""A worker dies, hangs, freezes or is asked to leave: faults 1, 2, 3, 5 and 22 of docs/faults.md."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from bench.common.service import LEASE_S, Service, wait_for
from tests.faults.conftest import heal
from tests.faults.load import LONG_STREAM, PROMPT, Load, Stream, complete, disturbed

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]
Report = Callable[[dict[str, Any]], None]
SEEDED = LONG_STREAM | {"temperature": 0.9, "top_p": 0.95, "seed": 7}


def busy_worker(service: Service) -> str:
    """The one worker that runs something."""

    def find() -> str | None:
        for instance in service.state()["instances"]:
            if instance["running"] or instance["waiting"]:
                return str(instance["workers"][0])
        return None

    return str(wait_for("a worker to run the request", find, every_s=0.01))


def late_and_new(text: str) -> str:
    """A piece of the text's second half that does not occur before: a stop string that is met late."""
    for start in range(len(text) // 2, len(text) - 6):
        if text.find(text[start : start + 6]) == start:
            return text[start : start + 6]
    raise AssertionError(f"the text only repeats itself: {text!r}")


@pytest.mark.parametrize("params", [LONG_STREAM, SEEDED], ids=["greedy", "seeded"])
def test_a_stream_survives_the_death_of_its_worker_token_for_token(
    service: Service, params: dict[str, Any]
) -> None:
    undisturbed = Stream(service, params).start().finished()
    assert undisturbed.error is None
    stream = Stream(service, params).start().wait_chunks(10)
    service.processes[busy_worker(service)].kill()
    stream.finished()
    with service.explained():
        assert stream.error is None
        assert stream.text == undisturbed.text
        assert stream.finish == {0: "length"}
        assert stream.usage == undisturbed.usage


@pytest.mark.slow
def test_stop_strings_logprobs_and_n_survive_the_death_of_a_worker(service: Service) -> None:
    longer = LONG_STREAM | {"max_tokens": 600}  # it runs for long enough to be seen before it is stopped
    whole = Stream(service, longer).start().finished().text
    stop = late_and_new(whole)
    for params in (SEEDED | {"n": 2}, longer | {"stop": [stop], "logprobs": 0}):
        undisturbed = Stream(service, params).start().finished()
        stream = Stream(service, params).start().wait_chunks(6)
        service.processes[busy_worker(service)].kill()
        stream.finished()
        with service.explained():
            assert stream.error is None
            assert stream.texts == undisturbed.texts
            assert stream.finish == undisturbed.finish
            assert stream.usage == undisturbed.usage
            if "n" not in params:
                assert [token for token, _ in stream.logprobs] == [t for t, _ in undisturbed.logprobs]
        heal(service)


@pytest.mark.slow
def test_a_request_whose_worker_dies_before_the_first_token_is_served_by_another(
    service: Service, report: Report
) -> None:
    with Load(service) as load:
        load.warm()
        stream = Stream(service, {"max_tokens": 8}, prompt=PROMPT * 100).start()
        load.mark()
        service.processes["w0"].kill()
        load.recover(30)
    stream.finished()
    with service.explained():
        assert stream.error is None
        assert load.failed == []
    report(load.row("1 kill -9 worker before the first token"))


def test_under_load_a_killed_worker_loses_no_request(service: Service, report: Report) -> None:
    expected = complete(service, max_tokens=60).choices[0].text
    with Load(service) as load:
        load.warm()
        streams = [Stream(service, {"max_tokens": 60}).start() for _ in range(4)]
        streams[0].wait_chunks(3)
        load.mark()
        service.processes["w1"].kill()
        load.recover(30)
        for stream in streams:
            stream.finished()
    with service.explained():
        assert [s.error for s in streams] == [None] * 4
        assert {s.text for s in streams} == {expected}
        assert load.failed == []
    report(load.row("2 kill -9 worker in mid-stream"))


@pytest.mark.slow
def test_a_request_that_kills_every_worker_ends_with_an_error_and_the_others_live(service: Service) -> None:
    stream = Stream(service, LONG_STREAM | {"max_tokens": 1500}).start().wait_chunks(5)
    deadline = time.monotonic() + 60
    while stream.thread.is_alive() and time.monotonic() < deadline:
        alive = [n for n in ("w0", "w1") if service.processes[n].is_alive]
        for name in alive:
            runs = [i for i in service.state()["instances"] if i["workers"] == [name] and i["running"]]
            if runs:
                service.processes[name].kill()
                service.processes[name].start()
        time.sleep(0.05)
    stream.finished()
    with service.explained():
        assert stream.error is not None, "a poison request must be given up after max_attempts"
        assert stream.num_chunks >= 5
        service.wait_ready()
        assert complete(service, max_tokens=4).usage.completion_tokens == 4


def test_a_frozen_worker_that_comes_back_after_its_lease_adds_no_token(
    service: Service, report: Report
) -> None:
    def freeze() -> None:
        service.processes["w0"].signal(signal.SIGSTOP)
        time.sleep(LEASE_S * 2.5)
        service.processes["w0"].signal(signal.SIGCONT)

    load = disturbed(service, "22 SIGSTOP worker beyond its lease", freeze, report, recover_s=30)
    with service.explained():
        assert load.failed == []
        wait_for("the resumed worker to serve under a new epoch", lambda: len(service.serving_workers()) == 2)
        wait_for("every block to be free", lambda: service.blocks_used() == 0)


@pytest.mark.slow
def test_a_worker_asked_to_leave_finishes_what_it_runs(service: Service, report: Report) -> None:
    with Load(service) as load:
        load.warm()
        streams = [Stream(service, LONG_STREAM).start().wait_chunks(2) for _ in range(2)]
        load.mark()
        assert service.processes["w0"].terminate() == 0
        load.recover(20)
        for stream in streams:
            stream.finished()
    with service.explained():
        assert [s.error for s in streams] == [None, None]
        assert load.failed == []
    report(load.row("5 SIGTERM worker under load"))


def test_killing_the_monitor_disturbs_nobody(service: Service, report: Report) -> None:
    with Load(service) as load:
        load.warm()
        stream = Stream(service, LONG_STREAM).start().wait_chunks(2)
        load.mark()
        service.processes["monitor"].kill()
        load.recover(30)
        stream.finished()
    assert stream.error is None
    assert load.failed == []
    report(load.row("kill -9 monitor"))


@pytest.mark.slow
def test_killing_the_controller_and_a_worker_still_loses_nothing(service: Service, report: Report) -> None:
    undisturbed = Stream(service, LONG_STREAM).start().finished()
    with Load(service) as load:
        load.warm()
        stream = Stream(service, LONG_STREAM).start().wait_chunks(8)
        load.mark()
        service.processes["controller"].kill()
        service.processes["w0"].kill()
        load.recover(30)
        stream.finished()
    with service.explained():
        assert stream.error is None
        assert stream.text == undisturbed.text
        assert load.failed == []
    report(load.row("kill -9 controller and a worker"))


@pytest.mark.slow
def test_without_replay_a_death_is_one_error_event_and_not_a_clean_end() -> None:
    with Service(num_workers=1, settings={"GATEWAY__REPLAY": "false"}) as service:
        stream = Stream(service, LONG_STREAM | {"max_tokens": 1500}).start().wait_chunks(5)
        service.processes["w0"].kill()
        stream.finished()
        assert stream.error is not None
        assert stream.finish == {}
