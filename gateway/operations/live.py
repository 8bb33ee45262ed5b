"""The feed of the dashboard, /admin/live: the state, the monitor's moments, events and morphs.

With viewers the state is built once for all of them, at most twice a second and only where it changed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final

from bus import histogram
from bus.client import BusUnavailable
from bus.levers import WEIGHED, LeverPlan
from bus.messages import Event, Moment
from bus.version import program_version
from gateway.morphs import KEPT, MorphRecord
from gateway.openai.formats import to_json
from gateway.operations.feeds import EndedRequests, EventFeed, Feed, Listener, sse
from gateway.operations.picture import live_state
from gateway.operations.tables import tables
from gateway.state import Gateway

log = logging.getLogger("gateway")

HISTORY_S: Final = 900.0
MOST_EVENTS: Final = 600  # events of the history
MOST_MOMENTS: Final = 900  # moments, as many as the stream keeps
HISTORY_WAIT_S: Final = 1.0  # wait for Redis; then a viewer gets what is here, and the rest later
STATE_S: Final = 0.5
LOOK_S: Final = 2.0  # without news: reports grow stale
KEEPALIVE_S: Final = 10.0
MAX_PENDING: Final = 512  # events that a viewer has not read; then its stream ends, and it may come again
PAUSE_S: Final = 1.0


class _Viewer(Listener):
    """The events that wait for one viewer; of states only the latest."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open = False  # the history is out
        self._state = b""

    def put(self, data: bytes) -> None:
        if self.is_open:
            super().put(data)
            if len(self.pending) > MAX_PENDING:
                self.drop()

    def put_state(self, data: bytes) -> None:
        if self.is_open:
            self._state = data
            self.has_news.set()

    def take(self) -> bytes:
        data, self._state = super().take() + self._state, b""
        return data


class Live(Feed[_Viewer]):
    """The feed. `run` goes beside the gateway's other loops, which call the other methods."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__()
        self._gateway = gateway
        self._any, self._none = asyncio.Event(), asyncio.Event()
        self._changed = asyncio.Event()
        self._is_loaded = asyncio.Event()  # the moments of the past are here
        self._moments: deque[Moment] = deque(maxlen=MOST_MOMENTS)
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._last_shown = b""  # the state without its time
        self._state_event = b""

    def changed(self) -> None:
        """Note that the state may have changed."""
        if self._listeners:
            self._changed.set()

    def publish(self, event: Event, *, is_history: bool = False) -> None:
        self._events.append(event)
        if self._listeners and not is_history:
            self._put("event", _event(event))

    def publish_morph(self, record: MorphRecord) -> None:
        if self._listeners:
            self._put("event", record.as_json())
            self._changed.set()

    async def listen(self) -> AsyncIterator[bytes]:
        """Yield server-sent events until `close`: hello, history, state, and then what happens."""
        yield sse("hello", self._hello())
        with self._joined(_Viewer()) as viewer:
            self._none.clear()
            self._any.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(HISTORY_WAIT_S):
                    await self._is_loaded.wait()
            self._look()
            opening = sse("history", self._history()) + self._state_event
            viewer.is_open = True  # later news are put; earlier ones are in the history
            yield opening
            async for data in self._follow(viewer, KEEPALIVE_S):
                yield data

    def _leave(self, listener: _Viewer) -> None:
        super()._leave(listener)
        if not self._listeners:
            self._any.clear()
            self._none.set()

    def _hello(self) -> dict[str, Any]:
        return {
            "version": program_version(),
            "gateway": self._gateway.id,
            "now": time.time(),
            "slo": self._gateway.settings.slo.model_dump(),
            "history_s": HISTORY_S,
            "percentiles": {
                "window_s": self._gateway.settings.monitor.window_s,
                "relative_error": histogram.RELATIVE_ERROR,
            },
            "tables": tables(),
        }

    def _history(self) -> dict[str, Any]:
        """Return moments and events; of a morph its latest report."""
        since = time.time() - HISTORY_S
        morphs = [one for one in self._gateway.morphs.recent(KEPT) if (one.ended or since) >= since]
        events = [
            (event.at_ms / 1000, _event(event)) for event in self._events if event.at_ms / 1000 >= since
        ]
        events += [(one.ended or one.started, one.as_json()) for one in morphs]
        events.sort(key=lambda dated: dated[0])
        moments = [moment for moment in self._moments if moment.at >= since]
        return {"moments": moments, "events": [event for _, event in events]}

    async def run(self) -> None:
        """Sleep while there is no viewer; never return. An error here ends the viewers' streams only."""
        while True:
            await self._any.wait()
            try:
                async with asyncio.TaskGroup() as tasks:
                    work = [tasks.create_task(self._read_moments()), tasks.create_task(self._watch())]
                    while self._listeners:  # one may have come as the last one left
                        await self._none.wait()
                    self._forget()
                    for task in work:
                        task.cancel()
            except Exception:
                log.exception("the dashboard's feed failed; viewers reconnect")
                self._forget()
                for viewer in list(self._listeners):
                    viewer.drop()
                    self._leave(viewer)
                await asyncio.sleep(PAUSE_S)

    def _forget(self) -> None:
        """Drop the moments: for the next viewer they are read again."""
        self._is_loaded.clear()
        self._moments.clear()

    async def _read_moments(self) -> None:
        bus, stream = self._gateway.bus, self._gateway.bus.names.moments
        async with bus.reader(stream, Moment, start="0-0", count=MOST_MOMENTS) as reader:
            with suppress(BusUnavailable):
                if await bus.length(stream) == 0:
                    self._is_loaded.set()
            async for batch in reader:
                for _, moment in batch:
                    self._moments.append(moment)
                    if self._is_loaded.is_set():
                        self._put("moment", moment)
                if not self._is_loaded.is_set():
                    self._is_loaded.set()
                    self._put("history", self._history())  # sent to viewers that did not wait so long

    async def _watch(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()
            self._changed.clear()
            self._look()
            await asyncio.sleep(STATE_S)

    def _look(self) -> None:
        state = live_state(self._gateway)
        at_ms = state["metrics"].pop("at_ms", None)  # another time alone is no change
        shown = to_json(state)
        if shown == self._last_shown:
            return
        self._last_shown = shown
        if at_ms is not None:
            state["metrics"]["at_ms"] = at_ms
        self._state_event = sse("state", state)
        for viewer in self._listeners:
            viewer.put_state(self._state_event)

    def _put(self, kind: str, body: object) -> None:
        data = sse(kind, body)
        for viewer in list(self._listeners):
            viewer.put(data)
            if viewer.is_dropped:  # the connection may last; build nothing for it
                self._leave(viewer)


class Feeds:
    """The streams of /admin/events, /admin/requests and /admin/live."""

    def __init__(self, gateway: Gateway) -> None:
        self.events = EventFeed()
        self.requests = EndedRequests()
        self.live = Live(gateway)
        gateway.delivery.endings.on_ended.append(self.requests.publish)

    def close(self) -> None:
        """End every client's stream."""
        self.events.close()
        self.requests.close()
        self.live.close()


def _event(event: Event) -> dict[str, Any]:
    """Return an event as JSON. What was weighed is in the plan; the reason need not repeat it."""
    names = ("kind", "source", "subject", "reason", "numbers", "morph_id")
    told = {name: getattr(event, name) for name in names} | {"at": event.at_ms / 1000}
    if event.weighed:
        told |= {"reason": event.reason.partition(f"; {WEIGHED}")[0], "weighed": _plan(event.weighed)}
    return told


def _plan(plan: LeverPlan) -> dict[str, Any]:
    return asdict(plan) | {"options": [asdict(one) | {"words": one.words} for one in plan.options]}
