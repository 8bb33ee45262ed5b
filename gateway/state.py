"""The serving state of a gateway. Handlers find it as `app.state.gateway`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time

from bus.catalogue import Contents
from bus.client import Bus
from bus.leader import LeaderView
from bus.policy import Policy
from bus.settings import Settings
from gateway.controller_failures import ControllerFailures
from gateway.delivery.attempts import Attempts
from gateway.delivery.cluster import Cluster
from gateway.delivery.delivery import Delivery
from gateway.delivery.endings import Endings, SloCounter
from gateway.delivery.loss import LossDetector
from gateway.delivery.outbox import RequestOutbox
from gateway.delivery.placement import Placement
from gateway.delivery.table import RequestTable
from gateway.errors import unavailable
from gateway.http.auth import ADMIN_HINT, API_HINT, Keys
from gateway.http.key_file import KeyChange, StoredKeys
from gateway.http.limits import Admission, RateLimiter
from gateway.http.sse import Streams
from gateway.morphs import Morphs
from gateway.openai.intake import RequestBuilder
from gateway.openai.models import Models
from gateway.stats import GatewayStats
from gateway.tracing import tracer_of

BUS_PATIENCE_S = 10.0  # requests that have not begun wait this long for a Redis that went away
MAX_EVENTS = 1000  # events that wait to be published; more are dropped


class Gateway:
    """One gateway process. Raises SettingsError if a setting needs a package that is missing.

    Raises KeysFileError if the file of keys cannot be read.
    """

    def __init__(self, settings: Settings, bus: Bus) -> None:
        section = settings.gateway
        self.settings, self.bus = settings, bus
        # Containers that share their host's network have its name, and each a process of the same number.
        self.id = section.id or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self.keys = Keys(section.api_keys, API_HINT, is_closed=bool(section.keys_file))
        self.admin_keys = Keys(section.admin_keys, ADMIN_HINT, ("admin-read", "admin-write"))
        self.stored_keys = StoredKeys(section.keys_file)
        self.use_stored_keys()
        bounds = section.max_queue, section.max_inflight, lambda: len(self.keys) > 1, section.max_inflight_mb
        self.admission = Admission(*bounds)
        self.rate = RateLimiter(section.rate_limit_rpm, section.rate_limit_concurrent)
        self.stats = GatewayStats()
        self.streams = Streams(section.keepalive_s)
        self.morphs = Morphs()
        self.policy = Policy()  # value as last read
        self.catalogue = Contents()  # value as last read
        self.leader = LeaderView()  # of the controllers, as last read
        self.controller_failures = ControllerFailures()
        self.poll_now = asyncio.Event()  # the registry or the catalogue has news
        self.cluster = Cluster(stale_s=settings.monitor.stale_s)
        self.models = Models(self.cluster)
        self.request_builder = RequestBuilder(
            self.cluster,
            section.max_n_tokens,
            section.default_max_tokens,
            section.max_call_mb,
            section.tool_formats,
        )
        self.has_demand = asyncio.Event()
        # Kind, subject, reason and numbers of events to be published.
        self.events: asyncio.Queue[tuple[str, str, str, dict[str, float]]] = asyncio.Queue(MAX_EVENTS)
        self.outbox = RequestOutbox(bus, self.id)
        table = RequestTable()
        self.placement = Placement(self.cluster, table, self.outbox, max_attempts=section.max_attempts)
        endings = Endings(table, self.outbox, self.stats)
        endings.on_ended.append(SloCounter(settings.slo, self.stats).count)
        parts = endings, self.cluster, self.placement, section
        attempts = Attempts(*parts, on_event=self.publish, on_demand=self.has_demand.set)
        self.delivery = Delivery(endings, attempts, section.queue_timeout_s)
        self.losses = LossDetector(
            self.delivery, self.cluster, settings.worker.lease_s, section.queue_timeout_s
        )
        self.tracer = tracer_of(settings.tracing, self.id, self.morphs, self.cluster)
        self.is_draining = False
        self._bus_away_since: float | None = None

    def use_stored_keys(self) -> list[KeyChange]:
        """Read the file of keys if it has changed. Returns what has.

        Raises KeysFileError; then the keys stay as they were.
        """
        changes = self.stored_keys.read()
        if changes:
            for keys in (self.keys, self.admin_keys):
                keys.replace_stored(self.stored_keys.keys)
        return changes

    def refuse_if_closed(self) -> None:
        """Raise ApiError 503 while draining, and if Redis has been away for BUS_PATIENCE_S."""
        if self.is_draining:
            raise unavailable("this gateway is shutting down; ask another one, or this one when it is back")
        if self.bus_away_s() > BUS_PATIENCE_S:
            raise unavailable("the message bus (Redis) is away; try again", 2.0)

    def bus_away_s(self) -> float:
        """Return for how many seconds Redis has not answered, counted from the first call that saw it."""
        if self.bus.up:
            self._bus_away_since = None
            return 0.0
        if self._bus_away_since is None:
            self._bus_away_since = time.monotonic()
        return time.monotonic() - self._bus_away_since

    @property
    def is_ready(self) -> bool:
        """True if a request would be served now."""
        ready = self.cluster.ready_models().values()
        return not self.is_draining and self.bus.up and any(self.models.is_loaded(one.card) for one in ready)

    def publish(self, kind: str, subject: str, reason: str, numbers: dict[str, float]) -> None:
        """Queue an event for the audit stream; drop it if MAX_EVENTS wait."""
        with contextlib.suppress(asyncio.QueueFull):
            self.events.put_nowait((kind, subject, reason, numbers))

    def check_integrity(self) -> None:
        """Raise AssertionError if the table or the admission counts contradict themselves."""
        self.delivery.table.check_integrity()
        self.admission.check_integrity()

    async def drain(self, within_s: float) -> None:
        """Refuse new requests and wait for the last to end; after `within_s`, fail those that are left."""
        self.is_draining = True
        try:
            async with asyncio.timeout(within_s):
                await self.admission.is_empty.wait()
        except TimeoutError:
            self.delivery.fail_all(unavailable("this gateway is shutting down and its drain time is over"))
            await asyncio.sleep(0.3)  # time for endings to reach sockets, and Cancels the bus
