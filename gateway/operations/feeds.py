"""The admin API's event streams: bus events, finished requests and the dashboard's feed."""

from __future__ import annotations

from gateway.operations.broadcast import Broadcast
from gateway.operations.live import Live
from gateway.operations.requests import EndedRequests
from gateway.state import Gateway


class Feeds:
    """The streams of /admin/events, /admin/requests and /admin/live."""

    def __init__(self, gateway: Gateway) -> None:
        self.events = Broadcast()
        self.requests = EndedRequests()
        self.live = Live(gateway)
        gateway.delivery.endings.on_ended.append(self.requests.tell)

    def close(self) -> None:
        """End every listener's stream."""
        self.events.close()
        self.requests.close()
        self.live.close()
