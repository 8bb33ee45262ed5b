"""/v1/embeddings over real HTTP, Redis and a scripted worker, whose embeddings tell prompts apart."""

from __future__ import annotations

import asyncio
import struct
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest

from bus.settings import RedisSettings
from gateway.openai.answer_types import EmbeddingsAnswer, ErrorAnswer
from tests.support.gateway_harness import Gate, running

MODEL = "demo"
PATH = "/v1/embeddings"

pytest_plugins = ["tests.support.gateway_fixtures"]
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def gate(shared_gate: Gate) -> Gate:
    return shared_gate.as_new()


def embedding(ids: list[int]) -> list[float]:
    """Return the vector that the scripted worker makes of a prompt."""
    return [float(len(ids)), float(ids[0]), float(ids[-1]), 0.5]


async def test_the_openai_client_gets_an_embedding_for_each_input(gate: Gate) -> None:
    dog = gate.ids("lazy dog")
    given: list[tuple[Any, int]] = [
        ("fox", 1),
        (["fox", "lazy dog", "quick"], 3),
        (dog, 1),
        ([dog, dog[:1]], 2),
    ]
    async with gate.client() as client:
        for value, count in given:
            first = len(gate.worker.submits)
            answer = await client.embeddings.create(model=MODEL, input=value)
            submits = sorted(
                gate.worker.submits[first:], key=lambda one: int(one.request_id.rsplit("-", 1)[1])
            )
            assert len(submits) == count and all(submit.embeds for submit in submits)
            assert [one.index for one in answer.data] == list(range(count))
            assert [one.embedding for one in answer.data] == [
                embedding(submit.prompt_token_ids) for submit in submits
            ]
            num_tokens = sum(len(submit.prompt_token_ids) for submit in submits)
            assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)
        await client.completions.create(model=MODEL, prompt="fox", max_tokens=1)
    assert gate.worker.submits[0].prompt_token_ids == gate.worker.submits[-1].prompt_token_ids
    assert gate.worker.submits[-3].prompt_token_ids == dog
    assert not gate.worker.submits[-1].embeds


async def test_an_embedding_is_numbers_or_base64_of_the_same_bytes(gate: Gate) -> None:
    async with gate.http() as http:
        body = {"model": MODEL, "input": "fox"}
        plain = (await http.post(PATH, json=body)).json()
        packed = (await http.post(PATH, json=body | {"encoding_format": "base64"})).json()
    for answer in (plain, packed):
        EmbeddingsAnswer.model_validate(answer, strict=True)
        assert answer["system_fingerprint"] == "fp-full-tp1"
    wanted = embedding(gate.worker.submits[0].prompt_token_ids)
    assert plain["data"][0]["embedding"] == wanted
    assert list(struct.unpack("<4f", b64decode(packed["data"][0]["embedding"]))) == wanted


async def test_a_prompt_whose_worker_dies_is_embedded_by_another(
    redis_settings: RedisSettings, folder: Path
) -> None:
    async with running(redis_settings, folder, workers=2) as gate, gate.client() as client:
        for worker in gate.workers:
            worker.gate.clear()
        asking = asyncio.create_task(client.embeddings.create(model=MODEL, input="fox"))
        await gate.until("the request", lambda: any(worker.submits for worker in gate.workers))
        victim = next(worker for worker in gate.workers if worker.submits)
        await victim.die()
        for worker in gate.workers:
            worker.gate.set()
        answer = await asking
        other = next(worker for worker in gate.workers if worker is not victim)
        assert [submit.attempt for submit in other.submits] == [2]
        assert answer.data[0].embedding == embedding(other.submits[0].prompt_token_ids)


async def test_a_worker_that_knows_no_embeddings_is_told(gate: Gate) -> None:
    gate.worker.embed = None
    async with gate.http() as http:
        answer = await http.post(PATH, json={"model": MODEL, "input": "fox"})
    assert answer.status_code == 500
    error = ErrorAnswer.model_validate(answer.json()).error
    assert error.code == "engine_error" and "no embedding" in error.message


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"input": ""}, "input", "input is empty"),
    ({"input": []}, "input", "input is empty"),
    ({"input": ["a", ""]}, "input", "input[1] is empty"),
    ({"input": {"a": 1}}, "input", "input must be a text, a list of texts"),
    ({"input": [1, "a"]}, "input", "input[1] is 'a'"),
    ({"input": ["a"] * 1025}, "input", "input holds 1025 prompts, at most 1024"),
    ({"input": [1000]}, "input", "0 to 999"),
    ({"input": "fox " * 700}, "input", "512"),
    ({"encoding_format": "int8"}, "encoding_format", "'base64'"),
    ({"dimensions": 256}, "dimensions", "the size of the model's hidden states"),
    ({"min_precision_wait": False}, "min_precision_wait", "needs min_precision"),
    ({"temperature": 1.0}, "temperature", "unknown parameter 'temperature'"),
    ({"stream": True}, "stream", "unknown parameter 'stream'"),
    ({"zzz": 1}, "zzz", "unknown parameter 'zzz'"),
]


async def test_bad_fields_are_refused_by_name(gate: Gate) -> None:
    async with gate.http() as http:
        for change, param, text in BAD:
            answer = await http.post(PATH, json={"model": MODEL, "input": "fox"} | change)
            assert answer.status_code == 400, (change, answer.text)
            error = ErrorAnswer.model_validate(answer.json()).error
            assert error.param == param, (change, error)
            assert text in error.message, error
        missing = await http.post(PATH, json={"model": MODEL})
        assert missing.json()["error"]["param"] == "input"
        unknown = await http.post(PATH, json={"model": "none", "input": "a"})
        assert unknown.status_code == 404
    assert gate.worker.submits == []


async def test_a_floor_of_precision_reaches_the_worker(gate: Gate) -> None:
    async with gate.http() as http:
        body = {"model": MODEL, "input": "fox", "min_precision": "int8", "cache_salt": "a"}
        assert (await http.post(PATH, json=body)).status_code == 200
    submit = gate.worker.submits[0]
    assert (submit.min_precision, submit.cache_salt, submit.sampling.max_tokens) == ("int8", "a", 1)
