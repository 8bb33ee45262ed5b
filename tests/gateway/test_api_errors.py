"""Bad input gets OpenAI's error shape, the right status, and a message that names field, value and limit."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from bus.settings import RedisSettings
from gateway.app import ADMIN_ENDPOINTS
from gateway.operations.public import ENDPOINTS
from tests.conftest import settings_of
from tests.support import tiny_model
from tests.support.gateway_harness import Gate, running
from tests.support.redis_process import RedisProcess

KEYS: dict[str, Any] = {
    "api_keys": ["sk-first", "sk-second"],
    "admin_keys": ["sk-admin"],
    "max_body_bytes": 20_000,
    "max_n_tokens": 600,
}
GOOD = {"model": "demo", "prompt": "fox", "max_tokens": 2}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "fox"}], "max_tokens": 2}

pytest_plugins = ["tests.support.gateway_fixtures"]
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(redis_server: RedisProcess, folder: Path) -> AsyncIterator[Gate]:
    async with running(settings_of(redis_server.url), folder, **KEYS) as gate:
        yield gate


@pytest.fixture
def gate(shared: Gate) -> Gate:
    """One gateway for all tests here; its worker behaves as new in each."""
    return shared.as_new()


def http(gate: Gate, key: str = "sk-second") -> httpx.AsyncClient:
    return gate.http(headers={"authorization": f"Bearer {key}"} if key else {})


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """Asserts the shape, and gives what is under `error`."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert "x-request-id" in answer.headers
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] and body["error"]["type"]
    found: dict[str, Any] = body["error"]
    return found


BAD_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": 2.5}, "temperature", "temperature is 2.5; allowed is 0 to 2"),
    ({"temperature": "1"}, "temperature", "temperature is '1'; it must be a number"),
    ({"temperature": True}, "temperature", "temperature is true; it must be a number"),
    ({"top_p": 0}, "top_p", "top_p is 0; allowed is more than 0 and at most 1"),
    ({"top_k": -2}, "top_k", "-1"),
    ({"top_k": 10**30}, "top_k", "2147483647"),
    ({"max_tokens": 10**30}, "max_tokens", "2147483647"),
    ({"seed": -(10**30)}, "seed", "-9223372036854775808"),
    ({"logit_bias": {"1" * 50: 1}}, "logit_bias." + "1" * 50, "2147483647"),
    ({"min_p": 1.5}, "min_p", "1"),
    ({"logit_bias": {"5": None}}, "logit_bias[5]", "logit_bias[5] is null"),
    ({"metadata": {"a": None}}, "metadata.a", "metadata.a is null"),
    ({"stream_options": {"include_obfuscation": 0}}, "stream_options.include_obfuscation", "true or false"),
    ({"n": 0}, "n", "n is 0; allowed is 1 to 128"),
    ({"n": 1.5}, "n", "integer"),
    ({"max_tokens": -1}, "max_tokens", "0"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"presence_penalty": 3}, "presence_penalty", "2"),
    ({"seed": 2**63}, "seed", "9223372036854775808"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"stop": [""]}, "stop[0]", "stop[0] is an empty string"),
    ({"logprobs": 21}, "logprobs", "20"),
    ({"logprobs": True}, "logprobs", "integer"),
    ({"logit_bias": {"3": 101}}, "logit_bias[3]", "100"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x", "integer"),
    ({"logit_bias": {"1000": 1}}, "logit_bias", "0 to 999"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": ["a", ""]}, "prompt", "prompt[1] is empty"),
    ({"prompt": [[]]}, "prompt", "prompt[0] is empty"),
    ({"prompt": {"a": 1}}, "prompt", "object"),
    ({"prompt": [1, "a"]}, "prompt", "prompt[1] is 'a'"),
    ({"prompt": [1] * 600}, "prompt", "600 tokens"),
    ({"prompt": [1, -4]}, "prompt", "prompt[1] is -4"),
    (
        {"prompt": [5, 1000]},
        "prompt",
        "prompt[1]: token id 1000 is outside the vocabulary of 'demo': 0 to 999",
    ),
    ({"prompt": [[5], [7, 8, 4000, 5000]]}, "prompt", "prompt[1][2]: token id 4000"),
    ({"prompt": [[1000]]}, "prompt", "prompt[0][0]: token id 1000"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    ({"stop_token_ids": [1000]}, "stop_token_ids", "0 to 999"),
    ({"stop_token_ids": 7}, "stop_token_ids", "array"),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids", "at most 128"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "min_tokens is 9 and max_tokens 8"),
    ({"skip_special_tokens": "no"}, "skip_special_tokens", "true or false"),
    ({"n": 100, "max_tokens": 7}, "max_tokens", "700 tokens; one call may ask for 600"),
    (
        {"prompt": [1] * 100, "n": 7, "max_tokens": 0, "echo": True, "logprobs": 1},
        "logprobs",
        "100 prompt tokens times n=7, and 0 new ones, is 700 log-probabilities; one call may ask for 600",
    ),
    ({"priority": 2**31}, "priority", "priority is 2147483648; allowed is -2147483648 to 2147483647"),
    ({"best_of": 129}, "best_of", "best_of is 129; allowed is 1 to 128"),
    ({"best_of": 1, "n": 2}, "best_of", "best_of is 1 and n is 2; send at least n"),
    ({"best_of": 2, "stream": True}, "best_of", "leave stream or best_of out"),
    ({"best_of": 100, "max_tokens": 7}, "max_tokens", "best_of=100 times max_tokens=7 is 700 tokens"),
    ({"suffix": "end"}, "suffix", 'no common form of a prompt with a gap; leave it out or send ""'),
    ({"messages": []}, "messages", "/v1/chat/completions"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0.01 to 10"),
    ({"temprature": 1}, "temprature", "unknown parameter 'temprature'; did you mean 'temperature'?"),
    ({"maxTokens": 1}, "maxTokens", "did you mean 'max_tokens'?"),
    ({"zzz": 1}, "zzz", "unknown parameter 'zzz'"),
    ({"model": ""}, "model", "model is an empty string"),
]
BAD_CHAT_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "messages is empty"),
    ({"messages": "hi"}, "messages", "messages is 'hi'; it must be an array"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "'user'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
        "'text'",
    ),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "messages", "the user begins"),
    (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
        "messages[0].tool_calls[0].function",
        "missing",
    ),
    ({"max_completion_tokens": 10**30}, "max_completion_tokens", "2147483647"),
    ({"mesages": []}, "mesages", "did you mean 'messages'?"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
    ({"functions": [{}]}, "functions", "not supported"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "'json_schema'"),
    ({"audio": {}}, "audio", "not supported"),
    ({"store": True}, "store", "not supported"),
    ({"best_of": 2}, "best_of", "leave it out or send 1"),
    ({"logprobs": 3}, "logprobs", "true or false"),
    ({"top_logprobs": 3}, "top_logprobs", "logprobs: true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    ({"max_completion_tokens": 9}, "max_completion_tokens", "send one"),
    ({"echo": True}, "echo", "/v1/completions"),
]


async def test_bad_fields_are_refused_by_name_with_their_limit(gate: Gate) -> None:
    async with http(gate) as client:
        for change, param, text in BAD_FIELDS:
            error = error_of(await client.post("/v1/completions", json=GOOD | change), 400)
            assert (error["param"], error["type"]) == (param, "invalid_request_error"), change
            assert text in error["message"], error
        for change, param, text in BAD_CHAT_FIELDS:
            error = error_of(await client.post("/v1/chat/completions", json=CHAT | change), 400)
            assert error["param"] == param, (change, error)
            assert text in error["message"], error
        for missing in ("model", "prompt"):
            body = {name: value for name, value in GOOD.items() if name != missing}
            error = error_of(await client.post("/v1/completions", json=body), 400)
            assert (error["param"], error["code"]) == (missing, "missing_parameter")
    assert gate.worker.submits == []


async def test_what_is_no_json_object_is_refused_with_the_reason(gate: Gate) -> None:
    bodies = {
        b"": "empty",
        b"{": "not valid JSON",
        b"[1]": "array",
        b'"text"': "string",
        b'{"model": "\xff"}': "UTF-8: byte 11 is 0xff",
        b'{"model": NaN}': "not valid JSON",
        b"[" * 8_000: "not valid JSON",
        b"[" * 10_000: "more than 8192 objects and lists",
        b'{"prompt": "\\ud800"}': "\\ud800 (byte 12) is half of a surrogate pair",
        b'{"temperature": 1e999}': "temperature is 1e999, out of range",
    }
    async with http(gate) as client:
        for body, text in bodies.items():
            error = error_of(await client.post("/v1/completions", content=body), 400)
            assert text in error["message"], error
        form = {"content-type": "application/x-www-form-urlencoded"}
        error_of(await client.post("/v1/completions", content=b"a=b", headers=form), 415)


async def test_a_compressed_body_is_refused_for_what_it_is(gate: Gate) -> None:
    body = gzip.compress(json.dumps(GOOD).encode())
    json_kind = {"content-type": "application/json"}
    async with http(gate) as client:
        zipped = json_kind | {"content-encoding": "gzip"}
        error = error_of(await client.post("/v1/completions", content=body, headers=zipped), 415)
        assert error["message"] == "content-encoding is 'gzip'; send the body uncompressed"
        plain = json_kind | {"content-encoding": "identity"}
        answer = await client.post("/v1/completions", content=json.dumps(GOOD), headers=plain)
        assert answer.status_code == 200, answer.text


async def test_what_is_not_there_is_refused_with_what_is(gate: Gate) -> None:
    async with http(gate, "") as client:
        for method, path, status, text in [
            ("POST", "/chat/completions", 404, "POST /chat/completions; did you mean /v1/chat/completions?"),
            ("POST", "/v1/completions/", 404, "did you mean /v1/completions?"),
            ("GET", "/xyz", 404, "nothing at GET /xyz; there are: /v1/completions, /v1/chat/completions, "),
            ("GET", "/v1/model", 404, "did you mean /v1/models?"),
            ("POST", "/v1/response", 404, "POST /v1/response; did you mean /v1/responses?"),
            ("POST", "/v1/embedding", 404, "POST /v1/embedding; did you mean /v1/embeddings?"),
            ("GET", "/admin/everything", 404, "GET /admin/everything; there are: /admin/state, "),
            ("GET", "/v1/completions", 405, "GET /v1/completions: this path takes POST only"),
            ("PUT", "/admin/deployments", 405, "PUT /admin/deployments: this path takes GET and POST only"),
            ("DELETE", "/v1/models", 405, "DELETE /v1/models: this path takes GET and HEAD only"),
            ("PUT", "/admin/models/m/plan", 405, "PUT /admin/models/m/plan: this path takes GET only"),
        ]:
            error = error_of(await client.request(method, path), status)
            assert text in error["message"], error
        long = error_of(await client.get("/" + "x" * 5000), 404)
        assert len(long["message"]) < 800


async def test_every_endpoint_that_a_refusal_names_is_there(gate: Gate) -> None:
    async with gate.http() as client:
        for path in ENDPOINTS + ADMIN_ENDPOINTS:
            answer = await client.request("PATCH", path.replace("{worker}", "w0"))
            assert answer.status_code == 405, path


async def test_unknown_paths_methods_and_models_have_the_same_shape(gate: Gate) -> None:
    async with http(gate) as client:
        error_of(await client.get("/v2/nothing"), 404)
        answer = await client.get("/v1/completions")
        error_of(answer, 405)
        assert answer.headers["allow"] == "POST"
        error_of(await client.post("/v1/models"), 405)
        error = error_of(await client.post("/v1/completions", json=GOOD | {"model": "gpt-4"}), 404)
        assert error["code"] == "model_not_found" and "demo" in error["message"]
        error_of(await client.get("/v1/models/gpt-4"), 404)


async def test_the_openai_client_raises_its_own_classes(gate: Gate) -> None:
    async with gate.client(api_key="sk-first") as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="gpt-4", prompt="x")
        assert missing.value.code == "model_not_found" and missing.value.request_id
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model="demo", prompt="x", temperature=9)
        assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    async with gate.client(api_key="wrong") as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            await client.models.list()
        assert refused.value.code == "invalid_api_key"


async def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(gate: Gate) -> None:
    long = "fox " * 700
    num_tokens = len(gate.ids(long)) + 1
    async with http(gate) as client:
        error = error_of(await client.post("/v1/completions", json=GOOD | {"prompt": long}), 400)
        assert error["code"] == "context_length_exceeded"
        assert str(num_tokens) in error["message"] and "512" in error["message"]
        assert "max_tokens" not in error["message"], "lowering it would not help"
        for n in (1, 2):  # beyond the limit of the call, too; but the context is the narrower one
            error = error_of(
                await client.post("/v1/completions", json=GOOD | {"max_tokens": 10**9, "n": n}), 400
            )
            assert "holds 512 tokens" in error["message"] and "1000000000" in error["message"]
        error = error_of(await client.post("/v1/completions", json=GOOD | {"max_tokens": 511}), 400)
        assert error["code"] == "context_length_exceeded" and "511" in error["message"]
        assert "lower max_tokens to at most 509" in error["message"]
        chat = CHAT | {"messages": [{"role": "user", "content": "\n" * 9000}]}
        assert error_of(await client.post("/v1/chat/completions", json=chat), 400)["param"] == "prompt"
    assert gate.worker.submits == []


async def test_bodies_over_the_limit_are_refused_with_and_without_a_length(gate: Gate) -> None:
    big = json.dumps(GOOD | {"prompt": "x" * 30_000}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(big), 1000):
            yield big[start : start + 1000]

    async with http(gate) as client:
        for content in (big, pieces()):
            answer = await client.post("/v1/completions", content=content)
            assert "the limit is 20000 (gateway.max_body_bytes)" in error_of(answer, 413)["message"]


async def test_keys_guard_the_api_and_other_keys_the_administration(gate: Gate) -> None:
    for key, path, status in [
        ("", "/v1/models", 401),
        ("wrong", "/v1/models", 401),
        ("sk-admin", "/v1/models", 401),
        ("sk-first", "/v1/models", 200),
        ("sk-first", "/admin/state", 401),
        ("", "/admin/state", 401),
        ("sk-admin", "/admin/state", 200),
        ("", "/health", 200),
        ("", "/ready", 200),
        ("", "/metrics", 200),
    ]:
        async with http(gate, key) as client:
            answer = await client.get(path)
            assert answer.status_code == status, (key, path, answer.text)
            if status == 401:
                assert error_of(answer, 401)["code"] == "invalid_api_key"
    async with http(gate, "") as client:
        error_of(await client.post("/v1/completions", content=b"{"), 401)


async def test_a_refused_key_learns_which_keys_are_asked_for_and_nothing_of_its_own(gate: Gate) -> None:
    own = {"/v1/models": "gateway.api_keys", "/admin/state": "gateway.admin_keys"}
    for path, others in [("/v1/models", "sk-admin"), ("/admin/state", "sk-first")]:
        async with gate.http() as client:
            none = error_of(await client.get(path), 401)["message"]
            bearer = [{"authorization": f"Bearer {key}"} for key in (others, "sk-wrong")]
            known, unknown = [error_of(await client.get(path, headers=one), 401) for one in bearer]
        assert known == unknown
        for message in (none, unknown["message"]):
            assert "`Authorization: Bearer <key>`" in message and own[path] in message


async def test_a_traced_call_is_known_by_its_trace_and_span(gate: Gate) -> None:
    trace, span = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    good = f"00-{trace}-{span}-01"
    bad = [f"ff-{trace}-{span}-01", f"00-{'0' * 32}-{span}-01", f"00-{trace}-01", good.upper()]
    async with http(gate) as client:
        answer = await client.post("/v1/completions", json=GOOD, headers={"traceparent": good})
        assert answer.status_code == 200
        assert answer.headers["x-request-id"] == gate.worker.submits[-1].trace_id == f"{trace}-{span}"
        both = {"traceparent": good, "x-request-id": "mine"}
        assert (await client.get("/health", headers=both)).headers["x-request-id"] == "mine"
        for value in bad:
            made = await client.get("/health", headers={"traceparent": value})
            assert made.headers["x-request-id"].startswith("req-"), value


async def test_a_model_without_a_chat_template_says_so(redis_settings: RedisSettings, tmp_path: Path) -> None:
    tiny_model.byte_level(tmp_path, chat_template=None)
    async with running(redis_settings, tmp_path) as gate, gate.http() as client:
        error = error_of(await client.post("/v1/chat/completions", json=CHAT), 400)
        assert error["code"] == "no_chat_template" and "/v1/completions" in error["message"]


async def test_what_is_no_http_gets_a_json_error_too(gate: Gate) -> None:
    import asyncio

    reader, writer = await asyncio.open_connection("127.0.0.1", gate.settings.gateway.port)
    writer.write(b"\x16\x03\x01 hello\r\n\r\n")
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and json.loads(body)["error"]["message"]
