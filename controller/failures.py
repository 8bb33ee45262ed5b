"""Failures of decisions and orders: logged, counted and told, while the loops of the controller go on.

A lost lease ends what a controller does (`bus.leader`), and so does a Redis that cannot be used as it is.
Nothing else does: the decision that failed is made again at the next look, from what is there then.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from bus.client import Bus, BusFull, BusUnavailable, RedisProblem
from bus.messages import ControllerWork

log = logging.getLogger("controller")

TELL_S = 10.0  # between two events: what fails at every look fails twice a second
MAX_CHARACTERS = 500  # of an exception's text: it may hold a whole message

# What failed: the work, and where in the code. The exception's text may differ from one time to the next.
_Cause = tuple[ControllerWork, str, int | None]


class Failures:
    """The owner of what failed and is not told yet."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._untold: dict[_Cause, tuple[str, int]] = {}  # the last reason, and how often, by cause
        self._news = asyncio.Event()

    @contextmanager
    def survived(self, work: ControllerWork) -> Iterator[None]:
        """Note an exception of the block and leave the block. Those of the bus, `RedisProblem` too, go on."""
        try:
            yield
        except (BusUnavailable, BusFull, RedisProblem):
            raise
        except Exception as error:  # noqa: BLE001 whatever it is, the other loops and the next look go on
            self._note(work, error)

    def _note(self, work: ControllerWork, error: Exception) -> None:
        """Log an exception, with its traceback if the same has not failed since the last event."""
        place = _place(error)
        cause = work, place.filename, place.lineno
        reason, (_, times) = described(error), self._untold.get(cause, ("", 0))
        log.error("%s failed: %s", work, reason, exc_info=None if times else error)
        self._untold[cause] = reason, times + 1
        self._news.set()

    async def tell(self) -> None:
        """Publish events without end: at once, then at most every TELL_S. Raises RedisProblem."""
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                await self._tell()
            except BusUnavailable:
                await self._bus.wait_up()
                continue
            except BusFull as full:
                log.debug("events of failures wait: %s", full)
            await asyncio.sleep(TELL_S)

    async def _tell(self) -> None:
        """Publish an event for each cause. What Redis did not take stays. Raises BusUnavailable, BusFull."""
        for cause in list(self._untold):
            reason, times = self._untold.pop(cause)
            try:
                await self._bus.event("controller_failed", cause[0], reason, failures=times)
            except (BusUnavailable, BusFull):
                _, since = self._untold.get(cause, ("", 0))
                self._untold[cause] = reason, times + since
                self._news.set()
                raise


def described(error: Exception) -> str:
    """Return `TypeError: ... (forecast.py:86 in observe_all)`."""
    place = _place(error)
    text = str(error)[:MAX_CHARACTERS].encode(errors="backslashreplace").decode()
    where = f"{place.filename.rpartition('/')[2]}:{place.lineno} in {place.name}"
    return f"{type(error).__name__}: {text} ({where})" if text else f"{type(error).__name__} ({where})"


def _place(error: Exception) -> traceback.FrameSummary:
    """Return the innermost frame of an exception that was raised."""
    return traceback.extract_tb(error.__traceback__)[-1]
