"""A gateway that died cannot cancel what it asked for; its lease tells."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from bus.client import Bus, BusFull, BusUnavailable
from worker.service.intake import Intake
from worker.service.ledger import Ledger
from worker.service.outbox import Outbox

log = logging.getLogger(__name__)

CHECK_S = 1.0
# A lease that is missing has already run out once. After Redis lost its data, gateways need a moment to write
# theirs again.
GRACE_S = 3.0


async def watch_gateways(bus: Bus, ledger: Ledger, intake: Intake, outbox: Outbox) -> None:
    """Once a second while something runs; for ever."""
    missing_since: dict[str, float] = {}
    while True:
        await asyncio.sleep(CHECK_S)
        if not len(ledger):
            missing_since.clear()
            continue
        with suppress(BusUnavailable, BusFull):
            for gateway in await _gone(bus, ledger.gateways(), missing_since):
                stopped = intake.drop_gateway(gateway)
                log.warning("gateway %s is gone; stopped its %d requests", gateway, stopped)
                outbox.drop_gateway(bus.names.tokens(gateway))


async def _gone(bus: Bus, asked: set[str], missing_since: dict[str, float]) -> list[str]:
    """Those missing at every look for the grace period. Only looks that Redis answered count."""
    live = await bus.live_gateways(asked)
    now = time.monotonic()
    for gateway in list(missing_since):
        if gateway in live or gateway not in asked:
            del missing_since[gateway]
    return [gateway for gateway in asked - live if now - missing_since.setdefault(gateway, now) >= GRACE_S]
