"""Small bodies that would be much work are refused before it is done."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bus.messages import SAMPLING_RANGES, SamplingParams
from gateway.errors import ApiError
from gateway.openai.params import ChatBody, CompletionBody, SamplingBody
from gateway.openai.parsing import parse, prompts
from gateway.openai.responses import ResponsesBody
from gateway.text.tokenizer import Tokenizer
from tests.support import tiny_model

MESSAGE = {"role": "user", "content": ""}
HUGE: list[tuple[type[Any], dict[str, Any], str]] = [
    (ChatBody, {"messages": [MESSAGE] * 2049}, "messages holds 2049 items; at most 2048 are allowed"),
    (ChatBody, {"messages": [MESSAGE] * 100_000}, "the body holds more than 8192 objects and lists"),
    (ChatBody, {"messages": [1] * 1_000_000}, r"messages\[0\]"),
    (ChatBody, {"messages": [MESSAGE | {"content": [{"type": "text", "text": ""}] * 257}]}, "at most 256"),
    (ChatBody, {"messages": [MESSAGE | {f"x{i}": 1 for i in range(100_000)}]}, "an object of 100002 fields"),
    (
        CompletionBody,
        {"metadata": {str(i): "" for i in range(17)}},
        "metadata holds 17 items; at most 16 are",
    ),
    (CompletionBody, {"metadata": {str(i): 1 for i in range(100_000)}}, "metadata holds 100000 items"),
    (CompletionBody, {"stream_options": {str(i): 1 for i in range(100_000)}}, "an object of 100000 fields"),
    (CompletionBody, {"logit_bias": {f"x{i}": 1 for i in range(1025)}}, "holds 1025 items; at most 1024 are"),
    (CompletionBody, {"stop": [1] * 1_000_000}, "stop"),
    (CompletionBody, {f"x{i}": 1 for i in range(100_000)}, "100002 fields"),
    (CompletionBody, {"prompt": [[]] * 10_000}, "more than 8192"),
    (ResponsesBody, {"model": "m", "input": [MESSAGE] * 2049}, "input holds 2049 items; at most 2048"),
    (ResponsesBody, {"input": [1] * 1_000_000}, r"input\[0\]"),
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


def test_sampling_parameters_have_the_defaults_and_the_ranges_of_the_worker() -> None:
    defaults = {one.name: one.default for one in fields(SamplingParams)}
    shared = SAMPLING_RANGES.keys() & SamplingBody.model_fields.keys()
    assert {"temperature", "top_p", "top_k", "min_p", "presence_penalty"} < shared
    for name in shared:
        assert SamplingBody.model_fields[name].default == defaults[name]
        low, high = SAMPLING_RANGES[name]
        for value in (high + 1, low - 2):
            with pytest.raises(ApiError, match=f"{name} is"):
                parse(CompletionBody, msgspec.json.encode({"model": "m", "prompt": "x", name: value}))
    assert parse(CompletionBody, b'{"model":"m","prompt":"x","top_k":-1}').top_k == defaults["top_k"] == 0


@pytest.mark.parametrize("depth", [17, 400, 600, 950, 100_000])
def test_bodies_nested_without_end_are_refused(depth: int) -> None:
    data = b'{"model":"m","prompt":"x","metadata":%b1%b}' % (b'{"a":' * depth, b"}" * depth)
    with pytest.raises(ApiError) as refusal:
        parse(CompletionBody, data)
    assert refusal.value.status == 400


MILLION = 1_000_000
DEAR: dict[str, bytes] = {
    "lists": b"[]," * MILLION + b"[]",
    "texts, then lists": b'"",' * MILLION + b"[]," * 9000 + b"[]",
    "numbers, then lists": b"1," * MILLION + b"[]," * 9000 + b"[]",
    "nested lists": b"[" * MILLION,
    "objects": b"{}," * MILLION + b"{}",
}


@pytest.mark.parametrize("items", DEAR.values(), ids=DEAR.keys())
def test_what_is_dear_to_decode_is_refused_without_it(items: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*_: Any, **__: Any) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(msgspec.json, "decode", decode)
    with pytest.raises(ApiError, match="more than 8192 objects and lists; send fewer prompts"):
        parse(CompletionBody, b'{"model":"m","prompt":[' + items + b"]}")


@pytest.mark.parametrize("text", ["{[" * 100_000, '{"' * 100_000, '[\\"' * 100_000, "[\\" * 100_000])
def test_brackets_in_a_text_are_text(text: str) -> None:
    data = msgspec.json.encode({"model": "m", "prompt": text})
    assert parse(CompletionBody, data).prompt == text
    start = time.perf_counter()
    with pytest.raises(ApiError, match="not valid JSON"):  # cut: nothing is looked at twice
        parse(CompletionBody, data[:-2])
    assert time.perf_counter() - start < 0.5


TEXTS_CUT_AND_BROKEN: dict[bytes, str] = {
    rb'"\ud800"}': r"\\ud800 \(byte 12\) is half of a surrogate pair",
    rb'"abc \udc00 x"}': r"\\udc00 \(byte 16\)",
    rb'"\ud83d\ude00 \\ud800 \ud800\u0041"}': r"\\ud800 \(byte 33\)",
    rb'"\ud83d': "truncated",
    rb'"\ud83d\ud': "truncated",
    rb'"\ud83d\ude00': "truncated",
    rb'"\\ud800': "truncated",
}


@pytest.mark.parametrize(("text", "message"), TEXTS_CUT_AND_BROKEN.items())
def test_half_a_surrogate_pair_is_named_with_its_place_and_a_cut_body_is_none(
    text: bytes, message: str
) -> None:
    with pytest.raises(ApiError, match=message):
        parse(CompletionBody, b'{"prompt": ' + text)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (b'{"seed": 1, "top_p": -1e999}', "top_p", "top_p is -1e999, out of range"),
        (b'{"prompt": [1, 1e400]}', "prompt", "prompt holds a number out of range"),
        (b'{"n": ' + b"9" * 5000 + b"}", "n", "n is 9{40}..., out of range"),
        (b"1e999", None, "the body holds a number out of range"),
        (b'{"prompt": "1e999", "min_p": 1e999}', "min_p", "min_p is 1e999"),
    ],
)
def test_a_number_that_no_float_holds_is_named_with_its_field(
    body: bytes, param: str | None, message: str
) -> None:
    with pytest.raises(ApiError, match=message) as refusal:
        parse(CompletionBody, body)
    assert refusal.value.param == param


def test_no_refusal_of_a_value_is_in_the_words_of_the_library() -> None:
    values: list[Any] = [
        None,
        True,
        -1,
        10**9,
        1.5,
        "",
        "x",
        "x" * 1000,
        [],
        ["x"] * 3000,
        [[]],
        {},
        {"x": {}},
    ]
    messages = []
    kind: type[SamplingBody]
    said: dict[str, Any]
    for kind, said in (
        (CompletionBody, {"prompt": "x"}),
        (ChatBody, {"messages": [MESSAGE]}),
        (ResponsesBody, {"input": "x"}),
    ):
        good = {"model": "m"} | said
        for name in kind.model_fields:
            for value in values:
                try:
                    parse(kind, msgspec.json.encode(good | {name: value}))
                except ApiError as error:
                    messages.append(error.message)
    assert len(messages) > 200
    of_library = re.compile(r"\b[Ii]nput\b|should")  # not a value such as message.input_image.image_url
    assert [one for one in messages if of_library.search(one.removeprefix("input"))] == []


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


def test_nulls_around_a_schema_count_as_left_out_and_those_within_stay() -> None:
    schema = {"enum": [None, "a"], "default": None}
    function = {"name": "f", "parameters": schema, "strict": None, "other": None}
    fields = {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "s", "schema": schema, "other": None},
            "other": None,
        },
        "tools": [{"type": "function", "function": function, "other": None}],
    }
    body = parse(ChatBody, msgspec.json.encode({"model": "m", "messages": [MESSAGE]} | fields))
    assert msgspec.json.encode(body.model_dump(mode="json")).count(msgspec.json.encode(schema)) == 2
