"""Requests of commands to a running gateway: its URL, its key, and errors that say what to do."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Collection, Iterator
from typing import Any, Final, Literal
from urllib.parse import quote

import httpx

from bus.settings import Settings, load_settings
from bus.settings_sources import Layer, SettingsError, variable_of
from instar.errors import InputError, ServerError
from instar.output.progress import progress_line
from instar.running import locate, trust_of

Keys = Literal["api_keys", "admin_keys"]
TIMEOUT_S: Final = 45.0  # longer than a gateway lets ?wait=true wait
POLL_S: Final = 0.3
STUCK: Final = ("waiting", "registered")  # states in which nothing is done


def settings_of(args: argparse.Namespace, flags: Layer | None = None) -> Settings:
    """Load the settings, with `flags` over them. Raises InputError with a line for each problem."""
    try:
        return load_settings(args.config, flags=flags)
    except SettingsError as error:
        raise InputError(str(error)) from error


def admin_client(args: argparse.Namespace) -> httpx.Client:
    """Return a client of the gateway's /admin that `args` name. Raises InputError."""
    return gateway_client(settings_of(args), args.url, args.api_key, "admin_keys")


def gateway_client(settings: Settings, url: str | None, key: str | None, keys: Keys) -> httpx.Client:
    """Return a client of the gateway at `url` (with or without /v1) or where `locate` finds it.

    `key` goes with each request, else the first of the settings' `keys`. Raises InputError for a bad URL.
    """
    found, is_own = locate(settings.gateway, url)
    own_keys: list[str] = getattr(settings.gateway, keys)
    token = key or (own_keys[0] if own_keys and is_own else None)
    if token and not (token.isascii() and token.isprintable()):
        raise InputError("the API key may hold printable ASCII only; check --api-key and the settings")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    base = found.rstrip("/").removesuffix("/v1")
    try:
        trust = trust_of(settings.gateway, is_own=is_own)
        return httpx.Client(base_url=base, headers=headers, timeout=TIMEOUT_S, verify=trust)
    except httpx.InvalidURL as error:
        raise InputError(f"--url {found}: {error}; write it as http://127.0.0.1:8000") from error


def admin_path(kind: str, name: str) -> str:
    """Return the path of one of the gateway's models, deployments or workers."""
    return f"/admin/{kind}/{quote(name, safe='')}"


def get_json(client: httpx.Client, path: str, *fields: str) -> dict[str, Any]:
    """Return the JSON object at `path`, which must have `fields`. Raises ServerError."""
    return ask_json(client, "GET", path, None, *fields)


def ask_json(client: httpx.Client, method: str, path: str, body: Any = None, *fields: str) -> dict[str, Any]:
    """Send a request, with `body` as JSON if it has one. Raises ServerError, also if a field is missing."""
    try:
        answer = client.request(method, path, json=body)
    except httpx.HTTPError as error:
        raise unreachable(client, error) from error
    except UnicodeEncodeError as error:  # bytes of the terminal
        raise InputError(f"{error.object!r} is not valid UTF-8 text") from error
    check_answer(answer)
    try:
        found = answer.json()
    except ValueError:
        found = None
    if not isinstance(found, dict) or not found.keys() >= set(fields):
        raise not_a_gateway(answer)
    return found


def unreachable(client: httpx.Client, error: httpx.HTTPError) -> ServerError:
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return ServerError(
            f"the gateway at {client.base_url} shows a certificate that is not trusted here ({error}); name "
            "its authority's file with SSL_CERT_FILE, or the certificate with INSTAR_GATEWAY__SSL_CERTFILE"
        )
    return ServerError(
        f"no gateway answers at {client.base_url} ({error}); start one with `instar serve`, or name its "
        "address with --url or INSTAR_HOST and INSTAR_PORT"
    )


def not_a_gateway(answer: httpx.Response) -> ServerError:
    """Say what answered in place of a gateway, without its page."""
    kind = answer.headers.get("content-type", "").partition(";")[0] or "an answer without a type"
    server = answer.headers.get("server", "")
    return ServerError(
        f"{answer.url} did not answer as an Instar gateway does: {answer.status_code}, {kind}"
        f"{f' from {server}' if server else ''}; give the URL that `instar serve` prints with --url"
    )


def check_answer(answer: httpx.Response) -> None:
    """Raise ServerError with the message of an error in OpenAI's shape. The body must have been read."""
    if answer.is_success:
        return
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        if answer.status_code != httpx.codes.UNAUTHORIZED:
            raise not_a_gateway(answer) from None
        message = "the server asks for a key"
    raise ServerError(f"{answer.url.path}: {answer.status_code}: {message}{_hint(answer)}")


def _hint(answer: httpx.Response) -> str:
    """Say which key or which part of --url is wrong: /admin and /v1 have keys of their own."""
    path = answer.url.path
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        keys = "admin_keys" if path.startswith("/admin") else "api_keys"
        variable = variable_of(f"gateway.{keys}")
        return (
            f"; give one of the service's gateway.{keys} with --api-key KEY or {variable}=KEY, which is sent "
            "to the service of the settings only"
        )
    if answer.status_code == httpx.codes.NOT_FOUND and not path.startswith(("/admin", "/v1")):
        return f"; is --url right? It is the gateway's address, such as {answer.url.copy_with(path='/')}"
    return ""


def stream_events(client: httpx.Client, method: str, path: str, **options: Any) -> Iterator[tuple[str, str]]:
    """Yield (kind, data) of each server-sent event, ("", "") for other lines. Raises ServerError."""
    with client.stream(method, path, **options) as answer:
        if not answer.is_success:
            answer.read()
        check_answer(answer)
        kind = ""
        for line in answer.iter_lines():
            name, _, value = line.partition(":")
            kind = value.strip() if name == "event" else kind
            yield (kind, value.strip()) if name == "data" else ("", "")


def stream_choices(
    client: httpx.Client, path: str, body: dict[str, Any], *, silence_s: float | None = TIMEOUT_S
) -> Iterator[dict[str, Any]]:
    """Yield the choices in each event of a streamed answer of /v1. Raises ServerError.

    silence_s: the longest wait for bytes; None leaves it to the gateway's own limits.
    """
    timeout = httpx.Timeout(TIMEOUT_S, read=silence_s)
    try:
        for _, data in stream_events(client, "POST", path, json={**body, "stream": True}, timeout=timeout):
            if data in ("", "[DONE]"):
                continue
            event = json.loads(data)
            if "error" in event:
                raise ServerError(event["error"]["message"])
            yield from event["choices"]
    except httpx.HTTPError as error:
        raise unreachable(client, error) from error


def model_names(client: httpx.Client) -> list[str]:
    """Return the names of the models that are served. Raises ServerError if there is none."""
    names = [str(model["id"]) for model in get_json(client, "/v1/models", "data")["data"]]
    if not names:
        raise ServerError("no model is being served yet; `instar status` shows what is loading")
    return names


def require_utf8(text: str) -> str:
    """Return `text`. Raises InputError if it holds bytes of the terminal that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"the text is not valid UTF-8 (character {error.start})") from error
    return text


def standard_input_text() -> str:
    """Return all of standard input. Raises InputError if it is no UTF-8."""
    try:
        return require_utf8(sys.stdin.read())
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not valid UTF-8 (byte {error.start})") from error


def follow(
    client: httpx.Client,
    path: str,
    found: dict[str, Any],
    states: Collection[str],
    within_s: float,
    hint: str,
    stuck_s: float = float("inf"),
) -> dict[str, Any]:
    """Poll `path` until it is in one of `states`, with progress on standard error. Raises ServerError.

    Ends after `within_s`, or after `stuck_s` in which nothing was done for it. `hint` says what happens then.
    """
    began = moved_at = time.monotonic()
    shown = ""
    with progress_line(hint) as line:
        while found["state"] not in states:
            now = time.monotonic()
            moved_at = moved_at if found["state"] in STUCK else now
            if now - began >= within_s or now - moved_at >= stuck_s:
                line.end(hint)
                break
            why = found.get("progress") or found["reason"]
            text = f"  {found['state']}: {why}" if why else f"  {found['state']}"
            if found["state"] not in STUCK or not why:
                line.show(text)
            elif (gist := re.sub(r"[\d.]+", "", text)) != shown:  # numbers change by themselves
                shown = gist
                line.end(text)
            time.sleep(min(POLL_S, within_s, stuck_s))
            found = get_json(client, path)
    return found
