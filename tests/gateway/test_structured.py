"""Structured output at the gateway: what reaches a worker, and what is refused before."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from bus.messages import Grammar
from gateway.errors import ApiError
from tests.support.gateway_core import Core
from tests.support.gateway_harness import BODY, Gate

pytest_plugins = ["tests.support.gateway_fixtures"]

SCHEMA = {"type": "object", "properties": {"a": {"const": None}}, "required": ["a"]}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


ASKED: list[tuple[dict[str, Any], str, Any]] = [
    ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        "json_schema",
        SCHEMA,
    ),
    ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
    ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
    ({"guided_json": nested(30)}, "json_schema", nested(30)),
    ({"guided_regex": "[ab]+"}, "regex", "[ab]+"),
    ({"guided_choice": ["yes", "no"]}, "choice", ["yes", "no"]),
    ({"guided_grammar": 'start: "a"'}, "grammar", 'start: "a"'),
    ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
    ({"structured_outputs": {"json": None, "regex": "a", "choice": None}}, "regex", "a"),
    ({"structured_outputs": {"choice": ["a"]}}, "choice", ["a"]),
    ({"structured_outputs": {"json_object": True}}, "json_schema", {"type": "object"}),
]


async def test_every_way_of_asking_reaches_the_worker_as_one_grammar(gate: Gate) -> None:
    ends = gate.tokenizer.stop_token_ids
    async with gate.http() as http:
        for asked, kind, text in ASKED:
            answer = await http.post("/v1/completions", json=BODY | asked | {"ignore_eos": True})
            assert answer.status_code == 200, answer.text
            sampling = gate.worker.submits[-1].sampling
            assert isinstance(sampling.grammar, Grammar)
            assert sampling.grammar.kind == kind and sampling.grammar.end_token_ids == ends
            found = sampling.grammar.text
            assert (found if isinstance(text, str) else json.loads(found)) == text
            assert set(ends) <= set(sampling.stop_token_ids)  # an answer ends where its form allows it
        for nothing in ({}, {"response_format": {"type": "text"}}, {"guided_json": None}):
            await http.post("/v1/completions", json=BODY | nothing)
            assert gate.worker.submits[-1].sampling.grammar is None


def strict(schema: Any, is_strict: bool = True) -> dict[str, Any]:
    form = {"name": "a", "schema": schema, "strict": is_strict}
    return {"response_format": {"type": "json_schema", "json_schema": form}}


OF_SCHEMA = "response_format.json_schema.schema"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_schema"}}, "response_format", "need each other"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "json_schema.name",
        "missing",
    ),
    (strict({"type": "array", "uniqueItems": True}), OF_SCHEMA, "uniqueItems"),
    (strict({"type": "integer", "minimum": 3, "maximum": 2}), OF_SCHEMA, "greater than maximum"),
    (strict({"allOf": [{"type": "string"}, {"type": "null"}]}), OF_SCHEMA, "Unsatisfiable"),
    (strict({"$ref": "#"}), OF_SCHEMA, "no text has this form"),
    (strict({"$ref": "https://example.org/x"}), OF_SCHEMA, "not present"),
    ({"guided_json": nested(200)}, "guided_json", "recursion limit"),
    (strict(nested(200)), OF_SCHEMA, "recursion limit"),
    (strict({"enum": ["x" * 70_000]}), OF_SCHEMA, "at most 65536"),
    ({"guided_json": "{"}, "guided_json", "EOF"),
    ({"guided_json": {"description": "x" * 70_000}}, "guided_json", "at most 65536"),
    ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
    ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
    ({"guided_regex": "(" * 3000 + "a" + ")" * 3000}, "guided_regex", "250"),
    ({"guided_choice": []}, "guided_choice", "empty"),
    ({"guided_choice": ["x"] * 1025}, "guided_choice", "at most 1024"),
    ({"guided_choice": [""]}, "guided_choice[0]", "empty"),
    ({"guided_grammar": "start: nowhere"}, "guided_grammar", "nowhere"),
    ({"guided_grammar": "\n".join(f"a{i}: a{i + 1}" for i in range(600))}, "guided_grammar", "at most 512"),
    ({"guided_grammar": "start: " + "(" * 300 + ")" * 300}, "guided_grammar", "too deeply nested"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "send one"),
    ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "not supported"),
]


async def test_what_no_answer_can_have_is_refused_by_name_before_a_worker_sees_it(gate: Gate) -> None:
    async with gate.http() as http:
        for asked, param, text in REFUSED:
            answer = await http.post("/v1/completions", json=BODY | asked)
            assert answer.status_code == 400, (asked, answer.text)
            error = answer.json()["error"]
            assert str(error["param"]).endswith(param) and text in error["message"], (param, error)
            assert error["type"] == "invalid_request_error" and len(error["message"]) < 500
            assert error["code"], error
    assert not gate.worker.submits


async def test_keywords_that_are_not_supported_are_ignored_unless_a_schema_is_strict(gate: Gate) -> None:
    async with gate.http() as http:
        body = BODY | strict({"type": "array", "uniqueItems": True}, is_strict=False)
        answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    grammar = gate.worker.submits[0].sampling.grammar
    assert grammar and grammar.is_lenient


@pytest.mark.parametrize("is_stream", [False, True])
async def test_n_choices_carry_the_same_grammar(gate: Gate, is_stream: bool) -> None:
    async with gate.http() as http:
        body = BODY | {"guided_choice": ["a", "b"], "n": 3, "stream": is_stream}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
    grammars = [submit.sampling.grammar for submit in gate.worker.submits]
    assert len(grammars) == 3 and len(set(grammars)) == 1


def test_an_older_worker_which_would_leave_the_form_out_gets_no_request_with_one() -> None:
    core = Core()
    for name in ("old", "new"):
        core.worker(name)
    (card,) = core.cards["new"].instances
    core.cards["new"].instances[:] = [replace(card, takes_grammars=True)]
    core.poll()
    form = Grammar(kind="regex", text="a")
    for turn in range(3):
        core.delivery.submit(state := core.state(f"r{turn}", grammar=form))
        assert state.target is not None and state.target.worker == "new"
    del core.cards["new"]
    core.poll(100)
    with pytest.raises(ApiError, match="can hold an answer to a form") as no:
        core.delivery.submit(core.state("last", grammar=form))
    assert (no.value.status, no.value.code) == (503, "structured_output_unavailable")
    core.delivery.submit(plain := core.state("plain"))
    assert plain.target is not None and plain.target.worker == "old"


def test_an_older_worker_gets_no_request_of_which_it_would_ignore_a_part() -> None:
    core = Core()
    for name in ("old", "new"):
        core.worker(name)
    core.cards["old"] = replace(core.cards["old"], reads=(1,))
    core.poll()
    for turn in range(3):
        core.delivery.submit(state := core.state(f"r{turn}", repetition_penalty=1.1))
        assert state.target is not None and state.target.worker == "new"
    del core.cards["new"]
    core.poll(100)
    with pytest.raises(ApiError, match="is of an older release, which knows no embeddings") as no:
        core.delivery.submit(core.state("last", min_tokens=2))
    assert (no.value.status, no.value.code) == (503, "workers_outdated")
    core.delivery.submit(plain := core.state("plain"))
    assert plain.target is not None and plain.target.worker == "old"
