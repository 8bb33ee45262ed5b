"""What waits here for a group of workers, as the controller is told of it. Pure but for the wall clock."""

from __future__ import annotations

import time

from bus.messages import Demand
from gateway.delivery.inflight import InFlight


def demands(table: InFlight, gateway: str) -> list[Demand]:
    """One for each model that has any."""
    lengths: dict[str, list[int]] = {}
    for flight in table.waiting.values():
        if flight.waits_for_room:
            lengths.setdefault(flight.model, []).append(flight.num_tokens)
    at_ms = time.time_ns() // 1_000_000
    return [
        Demand(gateway=gateway, model=model, tokens=max(tokens), count=len(tokens), at_ms=at_ms)
        for model, tokens in sorted(lengths.items())
    ]
