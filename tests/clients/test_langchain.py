"""langchain-openai: chains, tools, the modes of typed answers, and embeddings."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from openai import LengthFinishReasonError

from tests.clients.forms import MAX_TOKENS, MODEL, QUESTION, AnyObject, Light, Weather, weather

pytestmark = pytest.mark.clients


@pytest.fixture
def chat(base_url: str) -> Any:
    return ChatOpenAI(
        model=MODEL,
        base_url=base_url,
        api_key="none",
        max_tokens=MAX_TOKENS,
        max_retries=0,
        seed=5,
        stream_usage=True,
    )


def test_invoke_stream_and_batch_agree(chat: Any) -> None:
    short = chat.bind(max_tokens=16, temperature=0)
    said = short.invoke(QUESTION)
    assert isinstance(said, AIMessage) and said.content and said.usage_metadata["output_tokens"] <= 16
    chunks = list(short.stream(QUESTION))
    assert "".join(chunk.content for chunk in chunks) == said.content
    assert [one.content for one in short.batch([QUESTION, QUESTION])] == [said.content] * 2
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.usage_metadata["output_tokens"] == said.usage_metadata["output_tokens"]


def test_a_chain_ends_in_a_chat(chat: Any) -> None:
    chain = ChatPromptTemplate.from_messages([("system", "Be brief."), ("human", "{asked}")]) | chat.bind(
        max_tokens=16
    )
    assert chain.invoke({"asked": QUESTION}).content


def test_log_probabilities_come_with_the_message(chat: Any) -> None:
    said = chat.bind(max_tokens=8, logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert "".join(one["token"] for one in said.response_metadata["logprobs"]["content"]) == said.content


@pytest.mark.parametrize("choice", ["any", "required", "weather"])
def test_a_tool_is_called_and_its_result_is_taken(chat: Any, choice: str) -> None:
    said = chat.bind_tools([weather], tool_choice=choice, parallel_tool_calls=False).invoke(QUESTION)
    (call,) = said.tool_calls
    assert call["name"] == "weather" and call["args"]["city"] in ("Rome", "Oslo")
    result = ToolMessage(weather(**call["args"]), tool_call_id=call["id"])
    again = chat.bind_tools([weather], tool_choice="none").invoke([HumanMessage(QUESTION), said, result])
    assert again.content and not again.tool_calls


def test_a_call_comes_in_a_stream(chat: Any) -> None:
    chunks = list(chat.bind_tools([Weather], tool_choice="Weather").stream(QUESTION))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert len(chunks) > 3 and [call["name"] for call in whole.tool_calls] == ["Weather"]
    Weather.model_validate(whole.tool_calls[0]["args"])


@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_typed_answers_are_of_their_type(chat: Any, method: str, strict: bool | None) -> None:
    typed = chat.with_structured_output(Light, method=method, strict=strict)
    assert isinstance(typed.invoke(QUESTION), Light)
    assert isinstance(list(typed.stream(QUESTION))[-1], Light)


def test_a_typed_answer_in_any_json_is_an_object(chat: Any) -> None:
    typed = chat.with_structured_output(AnyObject, method="json_mode")
    for number in range(20):
        with suppress(LengthFinishReasonError):
            assert isinstance(typed.invoke(f"Answer in JSON: {number}"), AnyObject)
            return
    pytest.fail("none of 20 objects ended")


def test_responses_are_asked_if_it_is_told_to(base_url: str) -> None:
    chat = ChatOpenAI(
        model=MODEL, base_url=base_url, api_key="none", max_tokens=MAX_TOKENS, use_responses_api=True
    )
    said = chat.bind(temperature=0).invoke(QUESTION)
    assert said.text and said.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.text for chunk in chat.bind(temperature=0).stream(QUESTION)) == said.text
    called = chat.bind_tools([Weather], tool_choice="Weather").invoke(QUESTION)
    assert [call["name"] for call in called.tool_calls] == ["Weather"]
    assert isinstance(chat.with_structured_output(Light).invoke(QUESTION), Light)


def test_the_older_call_completes_a_text(base_url: str) -> None:
    model = OpenAI(model=MODEL, base_url=base_url, api_key="none", max_tokens=8, temperature=0)
    said = model.invoke("def add(a, b):\n")
    assert said and "".join(model.stream("def add(a, b):\n")) == said


def test_embeddings_are_those_of_each_text(base_url: str) -> None:
    # It would count tokens with a vocabulary of OpenAI's, which it downloads.
    model = OpenAIEmbeddings(model=MODEL, base_url=base_url, api_key="none", check_embedding_ctx_length=False)
    first, second = model.embed_documents(["def f():", "import os"])
    assert first == pytest.approx(model.embed_query("def f():"), abs=1e-5) and first != second
