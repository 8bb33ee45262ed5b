"""What the commands that talk to a running gateway share: its address, its key, clear words when it fails."""

from __future__ import annotations

from typing import Any, Final

import httpx

from bus.settings import Settings
from bus.settings_sources import variable_of
from instar.address import is_own, url_of

_OWN: Final = ", which goes to the service of the settings only"


class GatewayProblem(Exception):
    """The gateway could not be asked, or refused; says what to do."""


def gateway_client(settings: Settings, url: str | None, key: str | None, keys: list[str]) -> httpx.Client:
    """A client of the gateway that `url` names (with or without /v1), else of the one in the settings.
    `keys`: of the settings, sent to their own service only. Raises GatewayProblem for what is no URL."""
    token = key or (keys[0] if keys and is_own(settings.gateway, url) else None)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    base = (url or url_of(settings.gateway)).rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise GatewayProblem(f"{url} is no address; write http://{base}")
    try:  # longer than a gateway lets ?wait=true wait
        return httpx.Client(base_url=base, headers=headers, timeout=45)
    except httpx.InvalidURL as error:
        raise GatewayProblem(f"{url} is no address; write http://127.0.0.1:8000 ({error})") from error


def get_json(client: httpx.Client, path: str) -> Any:
    """Raises GatewayProblem."""
    return ask_json(client, "GET", path)


def ask_json(client: httpx.Client, method: str, path: str, body: Any = None) -> Any:
    """The answer's JSON; `body` goes out as JSON, None: none does. Raises GatewayProblem."""
    try:
        answer = client.request(method, path, json=body)
    except httpx.HTTPError as error:
        raise unreachable(client, error) from error
    refuse_errors(answer)
    try:
        return answer.json()
    except ValueError as error:
        raise GatewayProblem(f"{answer.url} did not answer with JSON: is that an Instar gateway?") from error


def unreachable(client: httpx.Client, error: httpx.HTTPError) -> GatewayProblem:
    return GatewayProblem(
        f"no gateway answers at {client.base_url} ({error}); start one with `instar serve`, or say where it "
        "is with --url, INSTAR_HOST and INSTAR_PORT"
    )


def refuse_errors(answer: httpx.Response) -> None:
    """Raises GatewayProblem with the message of an error in OpenAI's shape. The body must have been read."""
    if answer.is_success:
        return
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = answer.text[:200]
    raise GatewayProblem(f"{answer.url.path}: {answer.status_code}: {message}{_hint(answer)}")


def _hint(answer: httpx.Response) -> str:
    """/admin and /v1 have keys of their own; whoever has one for /v1 would try it in vain. All that is asked
    for lies under one of the two, so what comes before is of --url."""
    path = answer.url.path
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        keys = "admin_keys" if path.startswith("/admin") else "api_keys"
        variable = variable_of(f"gateway.{keys}")
        return f"; give one of the service's gateway.{keys} with --api-key KEY or {variable}=KEY{_OWN}"
    if answer.status_code == httpx.codes.NOT_FOUND and not path.startswith(("/admin", "/v1")):
        return f"; is --url right? It is the gateway's address, as {answer.url.copy_with(path='/')}"
    return ""
