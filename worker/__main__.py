"""`python -m worker`: one device serving one or more models."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from bus.client import Bus
from bus.service import CONFIGURATION_ERROR, run
from bus.settings import Settings
from worker.service.loading import CannotServe

# About a millisecond: from one product of a step to the next, and not through an idle service's nights.
SPIN_COUNT = "20000"


async def main(settings: Settings, bus: Bus, stop: asyncio.Event) -> None:
    if settings.worker.spin:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    # These bring torch, which takes seconds: only once the settings and Redis are known to be good.
    import kernels  # noqa: F401 before torch: it settles how torch's threads wait

    # isort: split
    from worker.service.start_up import load
    from worker.service.worker import serve

    await serve(settings, bus, stop, load)


if __name__ == "__main__":
    try:
        sys.exit(run("worker", main))
    except CannotServe as problem:
        logging.getLogger("worker").error("%s", problem)
        sys.exit(CONFIGURATION_ERROR)
