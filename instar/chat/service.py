"""The service behind a chat: the gateway's API, and the state of /admin for the shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bus.settings import Settings
from instar.client import gateway_client, get_json, model_names, stream_choices


class GatewayChat:
    """A gateway, asked with a key of `gateway.api_keys`, and for the shape with one of `admin_keys`.

    A key that is given goes to both. `close` ends the connections.
    """

    def __init__(self, settings: Settings, url: str | None, key: str | None) -> None:
        self._client = gateway_client(settings, url, key, "api_keys")
        self._admin = gateway_client(settings, url, key, "admin_keys")

    def close(self) -> None:
        self._client.close()
        self._admin.close()

    def models(self) -> list[str]:
        return model_names(self._client)

    def instances(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = get_json(self._admin, "/admin/state", "instances")["instances"]
        return found

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield choices. A request may wait in the gateway's queue for as long as its limit allows."""
        return stream_choices(self._client, "/v1/chat/completions", body, silence_s=None)
