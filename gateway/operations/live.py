"""What the dashboard is told, as it happens: the state, the monitor's moments, events and morphs.

Nothing of it costs anything while nobody watches, but for a look at an empty table. While somebody does, the
state is drawn and written once for all viewers, at most twice a second and only where it changed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from bus.client import BusUnavailable
from bus.messages import Event, Moment
from gateway.morphs import KEPT, MorphRecord
from gateway.openai.formats import to_json
from gateway.operations.live_state import live_state
from gateway.operations.tables import tables
from gateway.state import Gateway

log = logging.getLogger("gateway")

HISTORY_S: Final = 900.0
MOST_EVENTS: Final = 600  # of the history
MOST_MOMENTS: Final = 900  # as many as the stream keeps
HISTORY_WAIT_S: Final = 1.0  # for Redis; whoever comes sees without it what is known here
STATE_S: Final = 0.5
LOOK_S: Final = 2.0  # what nobody tells changes, too: reports grow stale
KEEPALIVE_S: Final = 10.0
MAX_PENDING: Final = 512  # for a viewer that does not read: then it is sent away, and may come again
PAUSE_S: Final = 1.0


class _Viewer:
    """What waits for one viewer; of states only the latest."""

    def __init__(self) -> None:
        self.is_open = False  # the history is out
        self.is_sent_away = False
        self.has_news = asyncio.Event()
        self._pending: deque[bytes] = deque()
        self._state = b""

    def put(self, data: bytes) -> None:
        if not self.is_open:
            return
        self._pending.append(data)
        if len(self._pending) > MAX_PENDING:
            self.send_away()
        self.has_news.set()

    def put_state(self, data: bytes) -> None:
        if self.is_open:
            self._state = data
            self.has_news.set()

    def send_away(self) -> None:
        self.is_sent_away = True
        self._pending.clear()
        self.has_news.set()

    def taken(self) -> bytes:
        self.has_news.clear()
        data = b"".join((*self._pending, self._state))
        self._pending.clear()
        self._state = b""
        return data


class Live:
    """`run` beside the gateway's other loops; the loops call `changed`, `tell` and `tell_morph`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._viewers: dict[_Viewer, None] = {}
        self._any, self._none = asyncio.Event(), asyncio.Event()
        self._changed = asyncio.Event()
        self._is_loaded = asyncio.Event()  # the moments of before are here
        self._moments: deque[Moment] = deque(maxlen=MOST_MOMENTS)
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._last_shown = b""  # the state, but for its time
        self._state_event = b""
        self._is_closed = False

    # ------------------------------------------------------------------------------------- what is told

    def changed(self) -> None:
        """Something of the state may be another now."""
        if self._viewers:
            self._changed.set()

    def tell(self, event: Event, *, is_history: bool = False) -> None:
        self._events.append(event)
        if self._viewers and not is_history:
            self._put("event", _event(event))

    def tell_morph(self, entry: MorphRecord) -> None:
        if self._viewers:
            self._put("event", entry.as_json())
            self._changed.set()

    def close(self) -> None:
        """Ends every viewer's stream: the process is leaving."""
        self._is_closed = True
        self._send_away()

    # ------------------------------------------------------------------------------------- a viewer

    async def listen(self) -> AsyncIterator[bytes]:
        """Server-sent events until `close`: hello, history, state, and then what happens."""
        yield _sse("hello", self._hello())
        with self._watched() as viewer:
            with suppress(TimeoutError):
                async with asyncio.timeout(HISTORY_WAIT_S):
                    await self._is_loaded.wait()
            self._look()
            opening = _sse("history", self._history()) + self._state_event
            viewer.is_open = True  # from here on it gets what comes, and what came is in the history
            yield opening
            while not (self._is_closed or viewer.is_sent_away):
                try:
                    async with asyncio.timeout(KEEPALIVE_S):
                        await viewer.has_news.wait()
                except TimeoutError:
                    yield b": keepalive\n\n"
                    continue
                yield viewer.taken()

    @contextmanager
    def _watched(self) -> Iterator[_Viewer]:
        viewer = _Viewer()
        self._viewers[viewer] = None
        self._none.clear()
        self._any.set()
        try:
            yield viewer
        finally:
            self._leave(viewer)

    def _leave(self, viewer: _Viewer) -> None:
        self._viewers.pop(viewer, None)
        if not self._viewers:
            self._any.clear()
            self._none.set()

    def _hello(self) -> dict[str, Any]:
        slo = self._gateway.settings.slo
        return {
            "version": _version(),
            "gateway": self._gateway.id,
            "now": time.time(),
            "slo": {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s},
            "history_s": HISTORY_S,
            "tables": tables(),
        }

    def _history(self) -> dict[str, Any]:
        """Of a morph how it ended, or how far it is."""
        since = time.time() - HISTORY_S
        morphs = [one for one in self._gateway.morphs.recent(KEPT) if (one.ended or since) >= since]
        events = [
            (event.at_ms / 1000, _event(event)) for event in self._events if event.at_ms / 1000 >= since
        ]
        events += [(one.ended or one.started, one.as_json()) for one in morphs]
        events.sort(key=lambda told: told[0])
        moments = [moment for moment in self._moments if moment.at >= since]
        return {"moments": moments, "events": [event for _, event in events]}

    # ------------------------------------------------------------------------------------- while watched

    async def run(self) -> None:
        """For ever; sleeps while nobody watches. A picture that cannot be drawn must not end the serving."""
        while True:
            await self._any.wait()
            try:
                async with asyncio.TaskGroup() as tasks:
                    work = [tasks.create_task(self._follow()), tasks.create_task(self._watch())]
                    while self._viewers:  # one may have come as the last one left
                        await self._none.wait()
                    self._forget()
                    for task in work:
                        task.cancel()
            except Exception:
                log.exception("the dashboard's feed failed; viewers are sent away and may come again")
                self._forget()
                self._send_away()
                await asyncio.sleep(PAUSE_S)

    def _forget(self) -> None:
        """Whoever comes next reads the moments again."""
        self._is_loaded.clear()
        self._moments.clear()

    async def _follow(self) -> None:
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
                    self._put("history", self._history())  # to those who did not wait so long

    async def _watch(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()
            self._changed.clear()
            self._look()
            await asyncio.sleep(STATE_S)

    def _look(self) -> None:
        """Draws the state, and tells it where it is another."""
        state = live_state(self._gateway)
        at_ms = state["metrics"].pop("at_ms", None)  # time alone is no change
        shown = to_json(state)
        if shown == self._last_shown:
            return
        self._last_shown = shown
        if at_ms is not None:
            state["metrics"]["at_ms"] = at_ms
        self._state_event = _sse("state", state)
        for viewer in self._viewers:
            viewer.put_state(self._state_event)

    def _put(self, kind: str, body: object) -> None:
        data = _sse(kind, body)
        for viewer in list(self._viewers):
            viewer.put(data)
            if viewer.is_sent_away:  # its connection may stay for long: nothing is drawn for it
                self._leave(viewer)

    def _send_away(self) -> None:
        for viewer in list(self._viewers):
            viewer.send_away()
            self._leave(viewer)


@cache
def _version() -> str:
    """Empty in a copy that was not installed."""
    try:
        return version("instar")
    except PackageNotFoundError:
        return ""


def _event(event: Event) -> dict[str, Any]:
    return {
        "kind": event.kind,
        "source": event.source,
        "subject": event.subject,
        "reason": event.reason,
        "at": event.at_ms / 1000,
        "numbers": event.numbers,
        "morph_id": event.morph_id,
    }


def _sse(kind: str, body: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), to_json(body))
