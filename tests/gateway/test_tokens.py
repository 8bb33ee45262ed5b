"""/tokenize, /detokenize, /version, and HEAD."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bus.settings import RedisSettings
from bus.version import program_version
from tests.support import tiny_model
from tests.support.gateway_harness import BODY, running

pytest_plugins = ["tests.support.gateway_fixtures"]

MODEL = BODY["model"]
BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("/tokenize", {}, "prompt", "either prompt or messages"),
    ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt", "either"),
    ("/tokenize", {"prompt": "the lazy dog " * 10_000}, "prompt", "tokens"),
    ("/tokenize", {"messages": []}, "messages", "empty"),
    ("/tokenize", {"prompt": "a", "zzz": 1}, "zzz", "unknown field"),
    ("/detokenize", {}, "tokens", "missing"),
    ("/detokenize", {"tokens": [1000]}, "tokens", "0 to 999"),
    ("/detokenize", {"tokens": ["a"]}, "tokens[0]", "integer"),
]


async def test_tokens_are_those_that_the_worker_gets(redis_settings: RedisSettings, folder: Path) -> None:
    async with running(redis_settings, folder) as gate, gate.http() as http:
        text = "the quick fox 🌍"
        await http.post("/v1/completions", json=BODY | {"prompt": text})
        made = (await http.post("/tokenize", json={"model": MODEL, "prompt": text})).json()
        assert made["tokens"] == gate.worker.submits[-1].prompt_token_ids
        assert made["count"] == len(made["tokens"]) and made["max_model_len"] > 0
        assert made["token_strs"] is None
        body = {"model": MODEL, "prompt": text, "add_special_tokens": False, "return_token_strs": True}
        plain = (await http.post("/tokenize", json=body)).json()
        assert plain["tokens"] == made["tokens"][1:] and plain["token_strs"][0] in text
        for ids in (made["tokens"], plain["tokens"]):
            back = await http.post("/detokenize", json={"model": MODEL, "tokens": ids})
            assert back.json() == {"prompt": text}

        messages = [{"role": "user", "content": "fox"}]
        await http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages})
        chat = (await http.post("/tokenize", json={"model": MODEL, "messages": messages})).json()
        assert chat["tokens"] == gate.worker.submits[-1].prompt_token_ids
        assert gate.ids("fox")[-1] in chat["tokens"]

        for path, wrong, param, words in BAD:
            answer = await http.post(path, json={"model": MODEL} | wrong)
            assert answer.status_code == 400, (path, wrong)
            error = answer.json()["error"]
            assert error["param"] == param and words in error["message"], error
        assert (await http.post("/tokenize", json={"model": "none", "prompt": "a"})).status_code == 404


async def test_tokens_need_a_key_where_completions_do(redis_settings: RedisSettings, folder: Path) -> None:
    key = "first-key"
    async with running(redis_settings, folder, api_keys=[key]) as gate, gate.http() as http:
        body = {"model": MODEL, "prompt": tiny_model.BOS}
        assert (await http.post("/tokenize", json=body)).status_code == 401
        own = {"authorization": f"Bearer {key}"}
        assert (await http.post("/tokenize", json=body, headers=own)).status_code == 200


async def test_pages_of_named_origins_may_call_and_others_not(
    redis_settings: RedisSettings, folder: Path
) -> None:
    page = "https://chat.example"
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with running(redis_settings, folder, cors_origins=[page]) as gate, gate.http() as http:
        for origin, status in ((page, 200), ("https://evil.example", 400)):
            answer = await http.options("/v1/chat/completions", headers=asked | {"origin": origin})
            assert answer.status_code == status
            assert (answer.headers.get("access-control-allow-origin") == origin) == (status == 200)
        for stream in (False, True):
            answer = await http.post(
                "/v1/completions", json=BODY | {"stream": stream}, headers={"origin": page}
            )
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == page
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
        refused = await http.post("/v1/completions", json=BODY, headers={"origin": "https://evil.example"})
        assert refused.status_code == 403


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics", "/v1/models"])
async def test_head_answers_as_get_does_without_a_body(
    redis_settings: RedisSettings, folder: Path, path: str
) -> None:
    async with running(redis_settings, folder) as gate, gate.http() as http:
        whole, head = await http.get(path), await http.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == whole.headers["content-type"]
        if path == "/version":
            assert whole.json() == {"version": program_version()}
