"""Small bodies that would be much work are refused before it is done."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.errors import ApiError
from gateway.openai.params import ChatBody, CompletionBody
from gateway.openai.parsing import parse, prompts
from gateway.text.tokenizer import Tokenizer
from tests import tiny_model

MESSAGE = {"role": "user", "content": ""}
HUGE: list[tuple[type[Any], dict[str, Any], str]] = [
    (ChatBody, {"messages": [MESSAGE] * 2049}, "messages: list should have at most 2048 items"),
    (ChatBody, {"messages": [MESSAGE] * 100_000}, "messages holds more than 8192 objects"),
    (ChatBody, {"messages": [1] * 1_000_000}, r"messages\[0\]"),
    (ChatBody, {"messages": [MESSAGE | {"content": [{"type": "text", "text": ""}] * 257}]}, "at most 256"),
    (ChatBody, {"messages": [MESSAGE | {f"x{i}": 1 for i in range(100_000)}]}, "an object of 100002 fields"),
    (CompletionBody, {"metadata": {str(i): "" for i in range(17)}}, "metadata: should have at most 16 items"),
    (CompletionBody, {"metadata": {str(i): 1 for i in range(100_000)}}, "an object of 100000 fields"),
    (CompletionBody, {"logit_bias": {f"x{i}": 1 for i in range(1025)}}, "at most 1024 items"),
    (CompletionBody, {"stop": [1] * 1_000_000}, "stop"),
    (CompletionBody, {f"x{i}": 1 for i in range(100_000)}, "100002 fields"),
    (CompletionBody, {"prompt": [[]] * 10_000}, "more than 8192"),
]


@pytest.mark.parametrize(("kind", "fields", "text"), HUGE, ids=[text for *_, text in HUGE])
def test_lists_and_objects_without_end_are_refused_at_once(
    kind: type[Any], fields: dict[str, Any], text: str
) -> None:
    data = msgspec.json.encode({"model": "m", "prompt": "x"} | fields if kind is CompletionBody else fields)
    start = time.perf_counter()
    with pytest.raises(ApiError, match=text) as refusal:
        parse(kind, data)
    assert time.perf_counter() - start < 0.5
    assert refusal.value.status == 400


@pytest.mark.parametrize("depth", [17, 400, 600, 950, 100_000])
def test_bodies_nested_without_end_are_refused(depth: int) -> None:
    data = b'{"model":"m","prompt":"x","metadata":%b1%b}' % (b'{"a":' * depth, b"}" * depth)
    with pytest.raises(ApiError) as refusal:
        parse(CompletionBody, data)
    assert refusal.value.status == 400


def test_token_ids_beyond_the_context_are_counted_and_not_looked_at() -> None:
    with pytest.raises(ApiError, match="holds 10 tokens; the prompt has 11 tokens"):
        prompts([[1] * 11], 10)
    assert prompts([1] * 10, 10) == [[1] * 10]


async def test_a_long_chat_is_rendered_beside_the_event_loop(tmp_path: Path) -> None:
    tiny_model.byte_level(tmp_path / "m")
    tokenizer = Tokenizer(tmp_path / "m", 1000)
    short = await tokenizer.chat_text([{"role": "user", "content": "hi"}])
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 500
    task = asyncio.create_task(tokenizer.chat_text([*turns, {"role": "user", "content": "hi"}]))
    await asyncio.sleep(0)
    assert not task.done()
    assert (await task).endswith(short[-10:])
