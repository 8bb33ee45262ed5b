"""`instar complete`: one completion, written as it comes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import httpx

from bus.settings import Settings
from instar.client import GatewayProblem, gateway_client, get_json, refuse_errors, unreachable


def complete(
    settings: Settings,
    text: str,
    *,
    url: str | None,
    key: str | None,
    model: str | None,
    max_tokens: int,
    temperature: float,
) -> int:
    """Exit status 0, or 1 with the gateway's own words."""
    try:
        with gateway_client(settings, url, key, settings.gateway.api_keys) as client:
            name = model or first_model(client)
            body = {"model": name, "prompt": text, "max_tokens": max_tokens, "temperature": temperature}
            _refuse_unsendable(body)
            for piece in stream_text(client, body):
                sys.stdout.write(piece)
                sys.stdout.flush()
    except GatewayProblem as problem:
        sys.stderr.write(f"instar complete: {problem}\n")
        return 1
    sys.stdout.write("\n")
    return 0


def _refuse_unsendable(body: dict[str, object]) -> None:
    """What JSON cannot carry: bytes of the terminal that are no UTF-8, nan and infinity."""
    try:
        json.dumps(body, allow_nan=False, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise GatewayProblem(f"the text is not valid UTF-8 (character {error.start})") from error
    except ValueError as error:
        raise GatewayProblem(
            f"temperature must be a number from 0 to 2, not {body['temperature']}"
        ) from error


def first_model(client: httpx.Client) -> str:
    models = get_json(client, "/v1/models")["data"]
    if not models:
        raise GatewayProblem("no model is being served yet; `instar status` shows what is loading")
    return str(models[0]["id"])


def stream_text(client: httpx.Client, body: dict[str, object]) -> Iterator[str]:
    """Pieces of text of a streamed completion. Raises GatewayProblem."""
    try:
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            if not answer.is_success:
                answer.read()
            refuse_errors(answer)
            for line in answer.iter_lines():
                if not line.startswith("data:") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data:"))
                if "error" in event:
                    raise GatewayProblem(event["error"]["message"])
                yield from (choice["text"] for choice in event["choices"])
    except httpx.HTTPError as error:
        raise unreachable(client, error) from error
