"""pydantic-ai: text, streams, tools, and typed answers in its three ways, over both of OpenAI's APIs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.messages import ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

from tests.clients.forms import MAX_TOKENS, MODEL, QUESTION, AnyObject, Light, weather

pytestmark = pytest.mark.clients


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel])
def model(base_url: str, request: pytest.FixtureRequest) -> Any:
    return request.param(MODEL, provider=OpenAIProvider(base_url=base_url, api_key="none"))


def test_text_whole_and_streamed(model: Any) -> None:
    agent = Agent(model, instructions="Be brief.", model_settings={"temperature": 0, "max_tokens": 16})

    async def streamed() -> str:
        async with agent.run_stream(QUESTION) as run:
            return "".join([piece async for piece in run.stream_text(delta=True, debounce_by=None)])

    said = agent.run_sync(QUESTION)
    assert said.output and said.usage.output_tokens > 0
    assert asyncio.run(streamed()) == said.output


def test_a_conversation_goes_on(model: Any) -> None:
    agent = Agent(model, model_settings={"max_tokens": 8})
    first = agent.run_sync(QUESTION)
    assert agent.run_sync("And in Oslo?", message_history=first.all_messages()).output


@pytest.mark.parametrize("form", [ToolOutput, NativeOutput])
def test_a_typed_answer_is_of_its_type(model: Any, form: Any) -> None:
    agent = Agent(model, output_type=form(Light), model_settings={"max_tokens": MAX_TOKENS})
    assert isinstance(agent.run_sync(QUESTION).output, Light)


def test_a_typed_answer_in_any_json_is_an_object(model: Any) -> None:
    agent = Agent(
        model, output_type=PromptedOutput(AnyObject), retries=20, model_settings={"max_tokens": MAX_TOKENS}
    )
    assert isinstance(agent.run_sync(QUESTION).output, AnyObject)


def test_a_tool_is_called_before_the_typed_answer(model: Any) -> None:
    """A typed answer by tools forces a call: of the tool, or of the one that is the answer."""
    agent = Agent(
        model, tools=[weather], output_type=ToolOutput(Light), model_settings={"max_tokens": MAX_TOKENS}
    )
    for _ in range(20):
        run = agent.run_sync(QUESTION, usage_limits=UsageLimits(request_limit=30))
        assert isinstance(run.output, Light)
        parts = [part for message in run.all_messages() for part in message.parts]
        results = [one for one in parts if isinstance(one, ToolReturnPart) and one.tool_name == "weather"]
        if results:
            assert {one.content for one in results} <= {"31 degrees", "12 degrees"}
            return
    pytest.fail("the tool was called in none of 20 runs")
