"""What the outbox does with submissions that cannot be written, each for itself."""

from __future__ import annotations

from bus.errors import BusFull
from bus.messages import Cancel
from gateway.delivery.inflight import Flight
from gateway.errors import ApiError
from gateway.openai.call import Call
from tests.support.gateway_core import Core, Ear


async def test_a_submission_that_is_no_message_fails_alone() -> None:
    core = Core()
    core.worker()
    core.poll()
    bad, good = core.flight("bad", top_k=10**30), core.flight("good")
    for flight in (bad, good):
        core.delivery.submit(flight)
    await core.gateway.outbox._write_some()
    assert [message.request_id for message in core.bus.taken] == ["good"]
    assert isinstance(bad.sink, Ear) and bad.sink.error is not None and bad.sink.error.status == 500
    assert list(core.delivery.table.flights) == ["good"] and good.is_sent


class Sibling(Ear):
    """Fails its call, as a choice does."""

    call: Call

    def on_error(self, error: ApiError) -> None:
        self.call.fail(error)


def call_of(core: Core, *flights: Flight) -> Call:
    call = Call(None, None, core.delivery, core.gateway.admission.reserve())  # type: ignore[arg-type]
    for flight in flights:
        assert isinstance(flight.sink, Sibling)
        flight.sink.call = call
        call.flights.append(flight)
    return call


async def test_a_full_redis_refuses_a_call_of_several_choices_once() -> None:
    core = Core()
    core.worker()
    core.poll()
    call = call_of(core, core.flight("r-0", Sibling()), core.flight("r-1", Sibling()))
    call.submit()
    core.bus.error = BusFull("maxmemory")
    await core.gateway.outbox._write_some()
    assert call.error is not None and call.error.status == 503
    assert not core.delivery.table.flights
    core.bus.error = None
    await core.gateway.outbox._write_some()
    assert all(isinstance(message, Cancel) for message in core.bus.taken)
