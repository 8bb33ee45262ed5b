"""The text of an answer in thoughts, content and calls: the same parts however the text is cut."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.settings import ToolFormatName
from gateway.openai.tools.call_reader import AnswerPart
from gateway.openai.tools.formats import (
    FORCED,
    THOUGHTS,
    TOOL_FORMATS,
    ToolFormat,
    thought_of,
    tool_format_of,
)
from gateway.openai.tools.parser import AnswerParser, merged

NAMES = frozenset({"add", "get_weather"})
HERMES, MISTRAL, LLAMA = TOOL_FORMATS["hermes"], TOOL_FORMATS["mistral"], TOOL_FORMATS["llama3"]
THINK = THOUGHTS[0]


@dataclass
class Answer:
    """An answer as a client puts it together from the parts."""

    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    reasoning: str = ""
    num_calls: int = 0  # whole ones


def parts_of(text: str, cuts: Iterable[int], parser: AnswerParser) -> list[AnswerPart]:
    edges = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    parts = [part for start, end in pairwise(edges) for part in parser.feed(text[start:end])]
    return merged([*parts, *parser.finish()])


def answer_of(text: str, form: ToolFormat | None = None, cuts: Iterable[int] = (), **options: Any) -> Answer:
    parser = AnswerParser(form, NAMES, **options)
    answer = Answer()
    for kind, piece in parts_of(text, cuts, parser):
        if kind == "call":
            answer.calls.append((piece, ""))
        elif kind == "arguments":
            name, before = answer.calls.pop()
            answer.calls.append((name, before + piece))
        elif kind == "reasoning":
            answer.reasoning += piece
        else:
            answer.content += piece
    answer.num_calls = parser.num_calls
    return answer


def tagged(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


ADD = '{"name": "add", "arguments": {"a": 1}}'
CALLED = [("add", '{"a": 1}')]
HARD = r'{"say": "</tool_call> \"}]{[ \\", "more": [{"x": null}, [true, -1.5e3]]}'
CASES: dict[str, tuple[str, ToolFormat | None, dict[str, Any], Answer]] = {
    "content alone": (" Just\n text. \n", HERMES, {}, Answer(" Just\n text. \n")),
    "blanks alone": (" \n ", HERMES, {}, Answer(" \n ")),
    "a call": (tagged(ADD), HERMES, {}, Answer("", CALLED, num_calls=1)),
    "content and two calls": (
        "I look.\n\n" + tagged(ADD) + "\n" + tagged('{"name":"get_weather","arguments":{}}') + "\n",
        HERMES,
        {},
        Answer("I look.", [*CALLED, ("get_weather", "{}")], num_calls=2),
    ),
    "content after a call": (tagged(ADD) + "\nDone. ", HERMES, {}, Answer("Done. ", CALLED, num_calls=1)),
    "the name last": (
        tagged('{"arguments": {"a": 1}, "id": "x", "name": "add"}'),
        HERMES,
        {},
        Answer("", CALLED, num_calls=1),
    ),
    "arguments as text": (
        tagged(r'{"name": "add", "arguments": "{\"a\": 1}"}'),
        HERMES,
        {},
        Answer("", CALLED, num_calls=1),
    ),
    "no arguments": (tagged('{"name": "add"}'), HERMES, {}, Answer("", [("add", "{}")], num_calls=1)),
    "null arguments": (
        tagged('{"name": "add", "arguments": null}'),
        HERMES,
        {},
        Answer("", [("add", "{}")], num_calls=1),
    ),
    "markers and brackets in a text": (
        tagged('{"name": "add", "arguments": ' + HARD + "}"),
        HERMES,
        {},
        Answer("", [("add", HARD)], num_calls=1),
    ),
    "a brace that is missing": (
        '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>',
        HERMES,
        {},
        Answer("", CALLED, num_calls=1),
    ),
    "an end that is missing": (
        f"<tool_call>{ADD}<tool_call>{ADD}",
        HERMES,
        {},
        Answer("", CALLED * 2, num_calls=2),
    ),
    "cut off in its arguments": (
        '<tool_call>{"name": "add", "arguments": {"a": "x',
        HERMES,
        {},
        Answer("", [("add", '{"a": "x')]),
    ),
    "cut off before them": (
        ' so <tool_call>{"name": "add", "argu',
        HERMES,
        {},
        Answer(' so <tool_call>{"name": "add", "argu'),
    ),
    "another tool": (tagged('{"name": "rm"}'), HERMES, {}, Answer(tagged('{"name": "rm"}'))),
    "a marker alone": ("x\n<tool_call>", HERMES, {}, Answer("x\n<tool_call>")),
    "a marker and prose": ("<tool_call> is a tag", HERMES, {}, Answer("<tool_call> is a tag")),
    "calls in XML": (
        "<tool_call>\n<function=add>\n</function>\n</tool_call>",
        HERMES,
        {},
        Answer("<tool_call>\n<function=add>\n</function>\n</tool_call>"),
    ),
    "half a marker": ("a <b <tool_c", HERMES, {}, Answer("a <b <tool_c")),
    "one call at most": (
        tagged(ADD) + tagged(ADD) + "more",
        HERMES,
        {"max_calls": 1},
        Answer("", CALLED, num_calls=1),
    ),
    "Mistral's list": (
        f'[TOOL_CALLS] [{ADD}, {{"name": "get_weather", "arguments": {{}}}}]',
        MISTRAL,
        {},
        Answer("", [*CALLED, ("get_weather", "{}")], num_calls=2),
    ),
    "Mistral's names": (
        '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]get_weather[CALL_ID]abc123XYZ[ARGS] {"b": {}}',
        MISTRAL,
        {},
        Answer("", [*CALLED, ("get_weather", '{"b": {}}')], num_calls=2),
    ),
    "Mistral's name alone": ('So. [TOOL_CALLS]add{"a": 1}', MISTRAL, {}, Answer("So.", CALLED, num_calls=1)),
    "Mistral's empty list": ("[TOOL_CALLS] []", MISTRAL, {}, Answer("[TOOL_CALLS] []")),
    "Mistral's prose": ("[TOOL_CALLS]add it {up}", MISTRAL, {}, Answer("[TOOL_CALLS]add it {up}")),
    "Mistral's unknown name": ("[TOOL_CALLS]rm[ARGS]{}", MISTRAL, {}, Answer("[TOOL_CALLS]rm[ARGS]{}")),
    "Llama's object": (
        ' {"name": "add", "parameters": {"a": 1}}',
        LLAMA,
        {},
        Answer("", CALLED, num_calls=1),
    ),
    "Llama's objects": (
        '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1}}; ' + ADD + ADD,
        LLAMA,
        {},
        Answer("", CALLED * 3, num_calls=3),
    ),
    "JSON that is no call": ('{"answer": {"name": "add"}}', LLAMA, {}, Answer('{"answer": {"name": "add"}}')),
    "an object that is no call": (
        '{"name": "Bob", "parameters": {}}',
        LLAMA,
        {},
        Answer('{"name": "Bob", "parameters": {}}'),
    ),
    "an object later": ("So: " + ADD, LLAMA, {}, Answer("So: " + ADD)),
    "content after an object": (ADD + " and more", LLAMA, {}, Answer("and more", CALLED, num_calls=1)),
    "code": ("<|python_tag|>print(1)", LLAMA, {}, Answer("<|python_tag|>print(1)")),
    "a thought": (
        "\n<think>\nhm, \n\n</think>\n\nYes. ",
        None,
        {"thought": THINK},
        Answer("Yes. ", reasoning="hm,"),
    ),
    "a thought without an end": ("<think>hm \n", None, {"thought": THINK}, Answer(reasoning="hm")),
    "a thought that the prompt began": (
        "\nhm</think>\n" + tagged(ADD),
        HERMES,
        {"thought": THINK, "is_thinking": True},
        Answer("", CALLED, "hm", num_calls=1),
    ),
    "an object after a thought": (
        "<think></think>\n\n" + ADD,
        LLAMA,
        {"thought": THINK},
        Answer("", CALLED, num_calls=1),
    ),
    "a thought later": ("a <think>b</think>", None, {"thought": THINK}, Answer("a <think>b</think>")),
    "half a thought": (" <thin", None, {"thought": THINK}, Answer(" <thin")),
    "a forced list": (f"[ {ADD},\n{ADD} ]", FORCED, {}, Answer("", CALLED * 2, num_calls=2)),
    "a forced list, cut": ('[{"name": "add", "argum', FORCED, {}, Answer('[{"name": "add", "argum')),
}


@pytest.mark.parametrize("case", CASES)
def test_an_answer_has_these_parts_whole_and_by_characters(case: str) -> None:
    text, form, options, expected = CASES[case]
    assert answer_of(text, form, **options) == expected
    assert answer_of(text, form, range(len(text)), **options) == expected
    for cut in range(len(text)):
        assert answer_of(text, form, [cut], **options) == expected, text[:cut]


PIECES = [
    *(
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<|python_tag|>",
        "<think>",
        "</think>",
    ),
    *('{"name": "add", "arguments": ', '{"name": "', '"arguments": {', '{"a": 1}', ADD, "add", "rm", "null"),
    *("{", "}", "[", "]", '"', "\\", ",", ":", ";", " ", "\n", "<", "tool", "x", "é", "1"),
]
texts = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)
cuts = st.lists(st.integers(0, 120), max_size=12)


@settings(max_examples=400, deadline=None)
@given(texts, cuts, st.sampled_from([None, HERMES, MISTRAL, LLAMA, FORCED]), st.booleans(), st.booleans())
def test_no_cut_changes_the_parts(
    text: str, cuts: list[int], form: ToolFormat | None, thinks: bool, is_thinking: bool
) -> None:
    options: dict[str, Any] = {"thought": THINK, "is_thinking": is_thinking} if thinks else {}
    whole = answer_of(text, form, **options)
    assert answer_of(text, form, cuts, **options) == whole
    assert answer_of(text, form, range(len(text)), **options) == whole
    if not thinks and not whole.calls:
        assert whole.content == text  # nothing is lost


def test_arguments_go_out_as_they_come() -> None:
    parser = AnswerParser(HERMES, NAMES)
    assert parser.feed('Hm. <tool_call>\n{"name": "add", "argum') == [("content", "Hm.")]
    assert parser.feed('ents": ') == []
    assert parser.feed('{"a": "b') == [("call", "add"), ("arguments", '{"a": "b')]
    assert parser.feed('c"') == [("arguments", 'c"')]
    assert parser.feed("}") == [("arguments", "}")] and parser.num_calls == 0
    assert parser.feed("}") == [] and parser.num_calls == 1


def test_content_waits_only_while_it_may_be_something_else() -> None:
    parser = AnswerParser(HERMES, NAMES)
    assert parser.feed("one <") == [("content", "one")]
    assert parser.feed("two") == [("content", " <two")]
    llama = AnswerParser(LLAMA, NAMES)
    assert llama.feed('{"answer"') == [("content", '{"answer"')]
    assert llama.feed(': {"name"') == [("content", ': {"name"')]


# Of the checkpoints' own templates.
TEMPLATES: dict[str, tuple[str, ToolFormat | None]] = {
    "Qwen 2.5": (
        "return a json object within <tool_call></tool_call> XML tags:\\n<tool_call>\\n"
        '{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>',
        HERMES,
    ),
    "Qwen3-Coder": ("<tool_call>\\n<function=example_function_name>\\n<parameter=a>", None),
    "GLM": ("<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>", None),
    "Mistral": ('{{- "[TOOL_CALLS] [" }}', MISTRAL),
    "Llama 3.1": ('{{- "<|python_tag|>" + tool_call.name + ".call(" }}', LLAMA),
    "Llama 3.2": (
        'the format {"name": function name, "parameters": dictionary of argument name and its value}.',
        LLAMA,
    ),
    "GPT-OSS": ('"<|start|>assistant to=functions." + tool_call.name + "<|channel|>commentary json"', None),
}


@pytest.mark.parametrize("model", TEMPLATES)
def test_a_template_tells_the_format(model: str) -> None:
    template, form = TEMPLATES[model]
    assert tool_format_of(template) is form
    assert thought_of(template) is None
    assert thought_of(template + "{{ content.split('</think>')[-1] }}") == THINK


def test_the_settings_know_every_format() -> None:
    assert set(get_args(ToolFormatName)) == TOOL_FORMATS.keys()
