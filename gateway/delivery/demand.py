"""What waits here for a group of workers, as the controller is told of it. Pure but for the wall clock."""

from __future__ import annotations

import time

from bus.messages import Demand
from gateway.delivery.inflight import InFlight


def demands(table: InFlight, gateway: str) -> list[Demand]:
    """One for each model that has any."""
    at_ms = time.time_ns() // 1_000_000
    waiting = {model: table.for_room.of(model) for model in table.for_room.models}
    return [
        Demand(
            gateway=gateway,
            model=model,
            tokens=max(flight.num_tokens for flight in flights),
            count=len(flights),
            at_ms=at_ms,
        )
        for model, flights in waiting.items()
    ]
