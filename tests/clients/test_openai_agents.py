"""openai-agents: text, streams, a tool and typed answers, over both of OpenAI's APIs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI

from tests.clients.forms import MAX_TOKENS, MODEL, QUESTION, SHORT, Light, weather

pytestmark = pytest.mark.clients


@pytest.fixture(params=[OpenAIResponsesModel, OpenAIChatCompletionsModel])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


def run(base_url: str, kind: Any, *, is_streamed: bool = False, **agent: Any) -> Any:
    """Return the result of a run of an agent with these fields, within one event loop."""

    async def answer() -> Any:
        async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            fields = {"model_settings": ModelSettings(max_tokens=MAX_TOKENS, extra_body=SHORT)} | agent
            one = Agent(name="a", instructions="Be brief.", model=kind(MODEL, client), **fields)
            if not is_streamed:
                return await Runner.run(one, QUESTION)
            result = Runner.run_streamed(one, QUESTION)
            kinds = [event.type async for event in result.stream_events()]
            assert kinds.count("raw_response_event") > 2
            return result

    return asyncio.run(answer())


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_agent_answers_in_text(base_url: str, kind: Any, is_streamed: bool) -> None:
    result = run(base_url, kind, is_streamed=is_streamed)
    assert isinstance(result.final_output, str) and result.final_output


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_agent_calls_its_tool_and_then_answers(base_url: str, kind: Any, is_streamed: bool) -> None:
    """The first answer must be a call; the agent then leaves the choice to the model."""
    settings = ModelSettings(
        tool_choice="required", parallel_tool_calls=False, max_tokens=MAX_TOKENS, extra_body=SHORT
    )
    result = run(
        base_url, kind, is_streamed=is_streamed, tools=[function_tool(weather)], model_settings=settings
    )
    outputs = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
    assert outputs and set(outputs) <= {"31 degrees", "12 degrees"}
    assert isinstance(result.final_output, str)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_typed_answer_is_of_its_type(base_url: str, kind: Any, is_streamed: bool) -> None:
    result = run(base_url, kind, is_streamed=is_streamed, output_type=Light)
    assert isinstance(result.final_output, Light)
