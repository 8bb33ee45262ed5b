"""Models that come and go, as clients and their requests see it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bus.catalogue import Contents
from bus.deployments import Deployment, Intent
from bus.messages import RejectReason
from gateway.delivery.request import RequestState
from gateway.errors import ApiError
from gateway.operations.picture import awaited_models
from tests.support.gateway_core import Core, Ear
from tests.support.metrics_samples import metrics_of


def core_of(*workers: str) -> Core:
    core = Core()
    for name in workers:
        core.worker(name)
    core.poll()
    return core


def retire(core: Core, worker: str = "w0") -> None:
    core.cards[worker] = replace(core.cards[worker], instances=[])


def refusal(core: Core, model: str) -> ApiError:
    with pytest.raises(ApiError) as caught:
        core.gateway.models.card(model)
    return caught.value


def error_of(state: RequestState) -> ApiError | None:
    assert isinstance(state.sink, Ear)
    return state.sink.error


def test_a_model_that_was_retired_does_not_exist_any_more() -> None:
    core = core_of("w0", "w1")
    retire(core)
    core.poll()
    assert core.gateway.models.card("m").id == "m@w0" or core.cluster.ready("m")
    retire(core, "w1")
    core.poll()
    error = refusal(core, "m")
    assert (error.status, error.code) == (404, "model_not_found") and "served are: none" in error.message
    core.worker("w0")
    core.poll()
    assert core.gateway.models.card("m").model == "m"


def test_a_model_whose_worker_died_is_still_waited_for() -> None:
    core = core_of("w0")
    del core.cards["w0"]
    core.poll()
    assert core.gateway.models.card("m").model == "m"


def test_a_model_that_a_serving_worker_loads_is_said_to_come() -> None:
    core = core_of("w0")
    core.cards["w0"] = replace(core.cards["w0"], loading=["new"])
    core.poll()
    error = refusal(core, "new")
    assert (error.status, error.message) == (503, "new is being loaded")
    assert refusal(core, "other").status == 404


def test_workers_without_models_make_no_model_wait() -> None:
    core = Core()
    core.worker("w0")
    retire(core)
    core.poll()
    assert refusal(core, "m").status == 404
    assert refusal(Core(), "m").status == 503


def test_what_a_retired_instance_did_not_finish_goes_on_elsewhere_with_its_tokens() -> None:
    core = core_of("w0", "w1")
    (state,) = core.submit("r")
    assert state.target
    first = state.target
    core.deliver(state, [5, 6])
    core.deliver(state, [], finish="error", error="it goes", reject_reason=RejectReason.RETIRED)
    assert state.target and state.target.worker != first.worker
    assert (state.attempt, state.strikes, state.received) == (2, 0, [5, 6])
    core.gateway.check_integrity()


def test_what_finds_no_other_instance_ends_with_404_once_the_model_is_gone() -> None:
    core = core_of("w0")
    (state,) = core.submit("r")
    core.deliver(state, [], finish="error", error="it goes", reject_reason=RejectReason.RETIRED)
    assert error_of(state) is None
    retire(core)
    core.poll()
    error = error_of(state)
    assert error and error.status == 404
    core.gateway.check_integrity()


def test_what_runs_on_a_deployment_that_loses_a_worker_waits_for_its_next_place() -> None:
    """The leader has given the model up, and the controller has not noticed yet."""
    core = core_of("w0")
    (state,) = core.submit("r")
    core.deliver(state, [5])
    core.deliver(state, [], finish="error", error="w1 was lost", reject_reason=RejectReason.RETIRED)
    serving = Deployment(id="d", model="m", intent=Intent(), state="serving")
    core.cluster.awaited = awaited_models(Contents(deployments={"d": serving}))
    retire(core)
    core.poll()
    assert error_of(state) is None
    error = refusal(core, "m")
    assert (error.status, error.code) == (503, "service_unavailable")
    assert error.message == "m is being deployed: no worker has it now"
    core.worker("w0")
    core.poll()
    assert state.target is not None and (state.attempt, state.received) == (2, [5])
    core.gateway.check_integrity()


def test_what_waits_for_a_deployment_that_is_retired_after_its_worker_died_ends_with_404() -> None:
    core = core_of("w0", "w1")
    retire(core, "w1")  # it serves nothing
    (card,) = core.cards["w0"].instances
    core.cards["w0"] = replace(core.cards["w0"], instances=[replace(card, deployed="d-1")])
    core.poll()
    (state,) = core.submit("r")
    del core.cards["w0"]
    for _ in range(40):
        core.poll()
        core.cluster.forget_retired({"m"})
    assert error_of(state) is None, "it is waited for"
    core.cluster.forget_retired(set())
    core.poll()
    error = error_of(state)
    assert error and (error.status, error.code) == (404, "model_not_found")
    core.gateway.check_integrity()


def test_a_redis_that_lost_its_data_lets_no_model_be_forgotten() -> None:
    core = core_of("w0")
    (card,) = core.cards["w0"].instances
    core.cards["w0"] = replace(core.cards["w0"], instances=[replace(card, deployed="d-1")])
    core.poll()
    core.cluster.forget_workers()
    core.cluster.forget_retired(set())
    assert core.gateway.models.card("m").model == "m"


def test_what_is_sent_to_an_instance_that_is_gone_comes_back() -> None:
    core = core_of("w0", "w1")
    (state,) = core.submit("r", begun=False)
    assert state.target
    first = state.target.worker
    retire(core, first)
    core.poll()
    core.poll(after_s=4.0)
    metrics = metrics_of(f"m@{first}")
    core.report(replace(metrics, instances=[]))
    core.losses.tick()
    assert state.target and state.target.worker != first and state.attempt == 2
