"""The OpenAI API through the openai package, over real HTTP, Redis and a scripted worker."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from bus.messages import StepOutput, Submit
from bus.settings import RedisSettings
from tests.support import tiny_model
from tests.support.gateway_harness import ANSWER, Gate, running

MODEL = "demo"
USER = [{"role": "user", "content": "the quick fox"}]

pytest_plugins = ["tests.support.gateway_fixtures"]
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def gate(shared_gate: Gate) -> Gate:
    return shared_gate.as_new()


async def streamed(gate: Gate, **body: Any) -> list[dict[str, Any] | str]:
    """Events of a raw stream: JSON objects, and "[DONE]"."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with gate.http() as http:
        answer = await http.post(path, json={"model": MODEL, "stream": True} | body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["transfer-encoding"] == "chunked"
    assert answer.headers["x-accel-buffering"] == "no" and answer.headers["cache-control"] == "no-cache"
    assert answer.text.endswith("data: [DONE]\n\n")
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data")]
    return [event if event == "[DONE]" else json.loads(event) for event in events]


# --------------------------------------------------------------------------- the two calls


async def test_a_completion_has_text_reason_usage_and_fingerprint(gate: Gate) -> None:
    async with gate.client() as client:
        answer = await client.completions.create(model=MODEL, prompt="fox", max_tokens=100)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason, choice.logprobs) == (ANSWER, "stop", None)
    num_prompt, num_output = len(gate.ids("fox")) + 1, len(gate.ids(ANSWER)) + 1
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt, num_output)
    assert answer.usage.total_tokens == num_prompt + num_output
    assert answer.system_fingerprint == "fp-full-tp1"
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion"


async def test_a_chat_uses_the_models_template_and_fills_the_context(gate: Gate) -> None:
    messages: Any = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "fox"}]},
    ]
    async with gate.client() as client:
        answer = await client.chat.completions.create(model=MODEL, messages=messages)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].message.role == "assistant"
    submit = gate.worker.submits[0]
    text = f"{tiny_model.BOS}[system]be brief\n[user]the fox\n[assistant]"
    assert gate.tokenizer._rust.decode(submit.prompt_token_ids, skip_special_tokens=False) == text
    assert submit.sampling.max_tokens == 512 - len(submit.prompt_token_ids)


async def test_a_streamed_chat_begins_with_the_role_and_ends_with_usage_and_done(gate: Gate) -> None:
    events = await streamed(gate, messages=USER, stream_options={"include_usage": True})
    assert events.pop() == "[DONE]"
    chunks: list[dict[str, Any]] = [event for event in events if isinstance(event, dict)]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    usage = chunks.pop()
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == len(gate.ids(ANSWER)) + 1
    assert all(chunk["usage"] is None for chunk in chunks)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert (text, reasons[-1], set(reasons[:-1])) == (ANSWER, "stop", {None})
    assert (
        len({(c["id"], c["created"], c["model"], c["object"], c["system_fingerprint"]) for c in chunks[1:]})
        == 1
    )


async def test_without_include_usage_no_chunk_has_usage(gate: Gate) -> None:
    events = await streamed(gate, prompt="fox", max_tokens=100)
    chunks = [event for event in events if isinstance(event, dict)]
    assert not any("usage" in chunk for chunk in chunks)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == ANSWER


async def test_with_continuous_usage_stats_every_chunk_has_the_numbers_so_far(gate: Gate) -> None:
    gate.worker.tokens_per_step = 1
    options = {"include_usage": True, "continuous_usage_stats": True}
    for body in ({"prompt": "fox", "max_tokens": 100}, {"messages": USER}):
        events = await streamed(gate, **body, stream_options=options)
        chunks = [event for event in events if isinstance(event, dict)]
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] == len(gate.ids(ANSWER)) + 1
        assert len(set(counts)) > 3 and counts[0] <= 1
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {chunks[-1]["usage"]["prompt_tokens"]}
        alone = await streamed(gate, **body, stream_options={"continuous_usage_stats": True})
        assert not any("usage" in event for event in alone if isinstance(event, dict))


async def test_the_openai_client_reads_streams_to_their_end(gate: Gate) -> None:
    async with gate.client() as client:
        stream = await client.completions.create(model=MODEL, prompt="fox", max_tokens=100, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == ANSWER
        chat = await client.chat.completions.create(model=MODEL, messages=USER, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in chat]) == ANSWER


async def test_max_tokens_ends_with_length(gate: Gate) -> None:
    async with gate.client() as client:
        answer = await client.completions.create(model=MODEL, prompt="fox", max_tokens=3)
        assert answer.choices[0].finish_reason == "length"
        assert answer.choices[0].text == gate.tokenizer.vocabulary.text_of(gate.ids(ANSWER)[:3])
        chat = await client.chat.completions.create(model=MODEL, messages=USER, max_completion_tokens=2)
        assert chat.usage is not None and chat.usage.completion_tokens == 2


async def test_completions_default_to_sixteen_tokens(gate: Gate) -> None:
    async with gate.client() as client:
        await client.completions.create(model=MODEL, prompt="fox")
    assert gate.worker.submits[0].sampling.max_tokens == 16


async def test_every_sampling_parameter_reaches_the_worker(gate: Gate) -> None:
    async with gate.client() as client:
        await client.completions.create(
            model=MODEL,
            prompt="fox",
            max_tokens=5,
            temperature=0.5,
            top_p=0.9,
            seed=7,
            presence_penalty=0.25,
            frequency_penalty=-0.5,
            logit_bias={"17": -100},
            user="someone",
            extra_body={
                "top_k": 4,
                "min_p": 0.1,
                "ignore_eos": True,
                "repetition_penalty": 1.2,
                "min_tokens": 3,
            },
        )
    sampling = gate.worker.submits[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 4, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.seed) == (0.25, -0.5, 7)
    assert (sampling.repetition_penalty, sampling.min_tokens) == (1.2, 3)
    assert sampling.logit_bias == {17: -100.0} and sampling.stop_token_ids == ()


async def test_end_tokens_are_sent_and_a_seed_is_drawn(gate: Gate) -> None:
    async with gate.client() as client:
        for _ in range(2):
            await client.completions.create(model=MODEL, prompt="fox", max_tokens=1)
    first, second = (submit.sampling for submit in gate.worker.submits)
    assert first.stop_token_ids == gate.tokenizer.stop_token_ids
    assert first.seed != second.seed


async def test_a_clients_own_end_tokens_end_an_answer_and_have_no_text(gate: Gate) -> None:
    gate.worker.tokens_per_step = 1
    ids = gate.ids(ANSWER)
    last = next(token for token in ids[2:] if token not in ids[:2])
    for ignore_eos in (False, True):
        body = {"stop_token_ids": [last], "ignore_eos": ignore_eos}
        async with gate.client() as client:
            answer = await client.completions.create(
                model=MODEL, prompt="fox", max_tokens=100, extra_body=body
            )
        choice = answer.choices[0]
        assert choice.finish_reason == "stop"
        assert choice.text == gate.tokenizer.vocabulary.text_of(ids[: ids.index(last)])
        own = () if ignore_eos else gate.tokenizer.stop_token_ids
        assert gate.worker.submits[-1].sampling.stop_token_ids == tuple(sorted({last, *own}))


async def test_a_priority_goes_to_the_worker_with_every_choice(gate: Gate) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "fox", "n": 2},
        "/v1/chat/completions": {"messages": USER},
        "/v1/responses": {"input": "fox"},
    }
    async with gate.http() as http:
        for path, body in bodies.items():
            for priority in (-3, 0, 7):
                answer = await http.post(path, json={"model": MODEL, "priority": priority} | body)
                assert answer.status_code == 200, answer.text
                assert gate.worker.submits[-1].priority == priority


async def test_values_that_say_the_default_are_taken(gate: Gate) -> None:
    both = {
        "repetition_penalty": 1.0,
        "min_tokens": 0,
        "stop_token_ids": [],
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "length_penalty": 1.0,
        "use_beam_search": False,
        "include_stop_str_in_output": False,
        "service_tier": "auto",
    }
    chat = both | {
        "add_generation_prompt": True,
        "continue_final_message": False,
        "parallel_tool_calls": True,
    }
    async with gate.http() as http:
        for path, body in (
            ("/v1/completions", {"prompt": "fox", "suffix": ""} | both),
            ("/v1/chat/completions", {"messages": USER} | chat),
        ):
            answer = await http.post(path, json={"model": MODEL} | body)
            assert answer.status_code == 200, answer.text
        options = {"include_obfuscation": False}
        body = {"model": MODEL, "prompt": "fox", "stream": True, "stream_options": options}
        assert (await http.post("/v1/completions", json=body)).status_code == 200


async def test_what_other_programs_add_to_messages_is_ignored_and_counted(gate: Gate) -> None:
    async def ignored(http: httpx.AsyncClient) -> float:
        lines = (await http.get("/metrics")).text.splitlines()
        name = "instar_ignored_message_fields_total"
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    turn: dict[str, Any] = {
        "role": "assistant",
        "content": "yes",
        "annotations": [],
        "refusal": None,
        "tool_calls": [],
    }
    messages = [
        USER[0],
        turn | {"provider_specific_fields": {"refusal": None}, "reasoning_content": "so"},
        USER[0],
        {"role": "assistant", "content": None, "id": "msg_1"},
        USER[0],
    ]
    async with gate.http() as http:
        before = await ignored(http)
        answer = await http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages})
        assert answer.status_code == 200, answer.text
        assert (
            await ignored(http) - before == 3
        )  # null is no value, and some templates take reasoning_content
    said = gate.tokenizer._rust.decode(gate.worker.submits[-1].prompt_token_ids, skip_special_tokens=False)
    assert "[assistant]yes" in said and "so" not in said and "msg_1" not in said


# --------------------------------------------------------------------------- several choices and prompts


async def test_n_choices_have_seeds_of_their_own_and_count_the_prompt_once(gate: Gate) -> None:
    async with gate.client() as client:
        answer = await client.chat.completions.create(model=MODEL, messages=USER, n=3, max_tokens=4, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    submits = gate.worker.submits
    assert len({submit.sampling.seed for submit in submits}) == 3 and submits[0].sampling.seed == 5
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(submits[0].prompt_token_ids)
    assert answer.usage.completion_tokens == 12


async def test_the_best_samples_are_the_choices_and_all_of_them_count(gate: Gate) -> None:
    """The fake worker's scores are made those of this list, by the number of the request."""
    scores = [-0.5, -0.1, -0.9, -0.2, -0.3, -0.1]
    prompts = ["fox", "dog"]
    texts = [["the", " quick", " lazy"], ["over", " jumps", " words"]]
    numbers: dict[str, int] = {}

    def reply(submit: Submit) -> list[int]:
        number = numbers[submit.request_id] = int(submit.request_id.rsplit("-", 1)[1])
        return [*gate.ids(texts[number // 3][number % 3]), gate.tokenizer.stop_token_ids[0]]

    def scored(step: StepOutput) -> list[StepOutput]:
        deltas = []
        for delta in step.deltas:
            score = scores[numbers[delta.request_id]]
            values = [replace(one, logprob=score) for one in delta.logprobs or []]
            deltas.append(replace(delta, logprobs=values if delta.logprobs is not None else None))
        return [replace(step, deltas=deltas)]

    gate.worker.reply, gate.worker.mangle = reply, scored
    async with gate.client() as client:
        best: Any = {"model": MODEL, "prompt": prompts, "best_of": 3, "max_tokens": 20}
        one = await client.completions.create(**best)
        assert [(choice.index, choice.text) for choice in one.choices] == [(0, " quick"), (1, " words")]
        two = await client.completions.create(**best, n=2, logprobs=1, seed=5)
        assert [choice.text for choice in two.choices] == [" quick", "the", " words", "over"]
        assert [choice.index for choice in two.choices] == [0, 1, 2, 3]
    first, second = gate.worker.submits[:6], gate.worker.submits[6:]
    assert [choice.logprobs for choice in one.choices] == [None, None]
    assert {submit.sampling.logprobs for submit in first} == {0}
    assert two.choices[0].logprobs is not None and set(two.choices[0].logprobs.token_logprobs) == {-0.1}
    assert {submit.sampling.logprobs for submit in second} == {1}
    assert len({submit.sampling.seed for submit in second}) == 3
    num_made = sum(len(reply(submit)) for submit in first)
    num_prompt = sum(len(submit.prompt_token_ids) for submit in first) // 3
    assert one.usage is not None
    assert (one.usage.completion_tokens, one.usage.prompt_tokens) == (num_made, num_prompt)


async def test_an_echoed_prompt_has_no_part_in_which_sample_is_the_best(gate: Gate) -> None:
    async with gate.client() as client:
        answer = await client.completions.create(
            model=MODEL, prompt="lazy dog", echo=True, best_of=2, max_tokens=2
        )
    (choice,) = answer.choices
    assert choice.text == "lazy dog" + gate.tokenizer.vocabulary.text_of(gate.ids(ANSWER)[:2])
    assert choice.logprobs is None
    assert {submit.sampling.prompt_logprobs for submit in gate.worker.submits} == {None}


async def test_best_of_no_more_than_n_is_n_and_may_be_streamed(gate: Gate) -> None:
    async with gate.client() as client:
        stream = await client.completions.create(
            model=MODEL, prompt="fox", n=2, best_of=2, max_tokens=100, stream=True
        )
        parts = ["", ""]
        async for chunk in stream:
            parts[chunk.choices[0].index] += chunk.choices[0].text
    assert parts == [ANSWER, ANSWER]
    assert {submit.sampling.logprobs for submit in gate.worker.submits} == {None}


async def test_batched_prompts_are_numbered_in_order(gate: Gate) -> None:
    gate.worker.reply = lambda submit: submit.prompt_token_ids[1:]
    prompts = ["fox", "lazy dog", "quick"]
    async with gate.client() as client:
        answer = await client.completions.create(model=MODEL, prompt=prompts, n=2)
        texts = [(choice.index, choice.text) for choice in sorted(answer.choices, key=lambda c: c.index)]
        assert texts == [(i, prompts[i // 2]) for i in range(6)]
        stream = await client.completions.create(model=MODEL, prompt=prompts, stream=True)
        parts = ["", "", ""]
        async for chunk in stream:
            parts[chunk.choices[0].index] += chunk.choices[0].text
    assert parts == prompts


async def test_prompts_may_be_token_ids(gate: Gate) -> None:
    ids = gate.ids("lazy dog")
    async with gate.client() as client:
        await client.completions.create(model=MODEL, prompt=ids, max_tokens=1)
        await client.completions.create(model=MODEL, prompt=[ids, ids[:1]], max_tokens=1)
    assert [submit.prompt_token_ids for submit in gate.worker.submits] == [ids, ids, ids[:1]]


# --------------------------------------------------------------------------- stop strings


@pytest.mark.parametrize("stop", ["jumps", ["over", "mps o"], "ö", " 🌍"])
async def test_stop_strings_cut_across_token_borders(gate: Gate, stop: str | list[str]) -> None:
    wanted = ANSWER[: min(ANSWER.find(s) for s in ([stop] if isinstance(stop, str) else stop))]
    async with gate.client() as client:
        answer = await client.completions.create(model=MODEL, prompt="fox", max_tokens=100, stop=stop)
        stream = await client.completions.create(
            model=MODEL, prompt="fox", max_tokens=100, stop=stop, stream=True
        )
        chunks = [chunk async for chunk in stream]
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (wanted, "stop")
    assert "".join(chunk.choices[0].text for chunk in chunks) == wanted
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_sixteen_stop_strings_are_searched(gate: Gate) -> None:
    stops = [f"none {number}" for number in range(15)] + ["jumps"]
    async with gate.client() as client:
        answer = await client.completions.create(model=MODEL, prompt="fox", max_tokens=100, stop=stops)
    assert answer.choices[0].text == ANSWER[: ANSWER.find("jumps")]


async def test_special_tokens_are_text_if_they_are_not_skipped(gate: Gate) -> None:
    gate.worker.tokens_per_step = 1
    bos = gate.tokenizer._rust.token_to_id(tiny_model.BOS)
    assert bos is not None
    said = [*gate.ids("the"), bos, *gate.ids(" fox"), gate.tokenizer.stop_token_ids[0]]
    gate.worker.reply = lambda submit: said
    async with gate.client() as client:
        for skips, text in ((True, "the fox"), (False, f"the{tiny_model.BOS} fox")):
            asked: Any = {"model": MODEL, "prompt": "fox", "max_tokens": 100}
            asked["extra_body"] = {"skip_special_tokens": skips}
            for logprobs in (None, 0):
                answer = await client.completions.create(**asked, logprobs=logprobs)
                assert answer.choices[0].text == text
            offsets = answer.choices[0].logprobs.text_offset
            assert offsets[len(gate.ids("the")) + 1] == text.find(" fox")
            stream = await client.completions.create(**asked, stream=True)
            assert "".join([chunk.choices[0].text async for chunk in stream]) == text
        ids = [bos, *gate.ids("dog")]
        echo: Any = {"model": MODEL, "prompt": ids, "echo": True, "max_tokens": 0, "logprobs": 0}
        answer = await client.completions.create(**echo, extra_body={"skip_special_tokens": False})
    assert answer.choices[0].text == f"{tiny_model.BOS}dog"
    assert answer.choices[0].logprobs.text_offset[:2] == [0, len(tiny_model.BOS)]


async def test_a_stop_string_ends_the_work_and_the_count(gate: Gate) -> None:
    gate.worker.token_s = 0.02
    async with gate.client() as client:
        answer = await client.completions.create(model=MODEL, prompt="fox", max_tokens=400, stop="quick")
    await gate.until("the cancellation", lambda: gate.worker.cancelled)
    assert answer.usage is not None
    tokens = gate.ids(ANSWER)
    texts = [gate.tokenizer.vocabulary.text_of(tokens[:i]) for i in range(len(tokens))]
    assert answer.usage.completion_tokens == next(i for i, text in enumerate(texts) if "quick" in text)


async def test_no_stop_string_counts_before_min_tokens(gate: Gate) -> None:
    gate.worker.tokens_per_step = 1
    ids = gate.ids(ANSWER)
    texts = [gate.tokenizer.vocabulary.text_of(ids[:count]) for count in range(len(ids) + 1)]
    first = next(count for count, text in enumerate(texts) if "q" in text)
    async with gate.client() as client:
        for least, text in ((first - 1, ANSWER[: ANSWER.find("q")]), (first, ANSWER)):
            answer = await client.completions.create(
                model=MODEL, prompt="fox", max_tokens=100, stop=["q"], extra_body={"min_tokens": least}
            )
            assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, "stop"), least


async def test_text_held_back_for_a_stop_string_comes_out_at_the_end(gate: Gate) -> None:
    async with gate.client() as client:
        answer = await client.completions.create(model=MODEL, prompt="fox", max_tokens=100, stop=["too.!"])
    assert answer.choices[0].text == ANSWER


# --------------------------------------------------------------------------- logprobs and echo


async def test_completion_logprobs_line_up_with_the_text(gate: Gate) -> None:
    async with gate.client() as client:
        answer = await client.completions.create(model=MODEL, prompt="fox", max_tokens=100, logprobs=2)
    logprobs: Any = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(gate.ids(ANSWER))  # without the token that ended it
    rebuilt = b"".join(
        bytes.fromhex(t.removeprefix("bytes:").replace("\\x", "")) if t.startswith("bytes:") else t.encode()
        for t in logprobs.tokens
    )
    assert rebuilt.decode() == ANSWER
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert token.startswith("bytes:") or ANSWER[offset:].startswith(token)
    assert set(logprobs.token_logprobs) == {-0.25}
    assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs)


async def test_chat_logprobs_have_exact_bytes(gate: Gate) -> None:
    async with gate.client() as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=USER, logprobs=True, top_logprobs=1
        )
    content: Any = answer.choices[0].logprobs and answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == ANSWER
    assert {len(entry.top_logprobs) for entry in content} == {1}


async def test_streamed_logprobs_come_with_their_text(gate: Gate) -> None:
    events = await streamed(gate, prompt="fox", max_tokens=100, logprobs=0, stop="over")
    offset, tokens = 0, 0
    for event in events[:-1]:
        assert isinstance(event, dict)
        choice = event["choices"][0]
        for at in choice["logprobs"]["text_offset"] if choice["logprobs"] else []:
            assert offset <= at <= offset + len(choice["text"])
            tokens += 1
        offset += len(choice["text"])
    assert offset == ANSWER.find("over") and tokens > 3


async def test_echo_gives_the_prompt_first(gate: Gate) -> None:
    async with gate.client() as client:
        whole = await client.completions.create(model=MODEL, prompt="lazy 🌍", echo=True, max_tokens=2)
        ids = await client.completions.create(
            model=MODEL, prompt=gate.ids("lazy dog"), echo=True, max_tokens=2
        )
    start = gate.tokenizer.vocabulary.text_of(gate.ids(ANSWER)[:2])
    assert whole.choices[0].text == "lazy 🌍" + start
    assert ids.choices[0].text == "lazy dog" + start


async def test_echo_with_logprobs_scores_the_prompt_and_needs_no_output(gate: Gate) -> None:
    async with gate.client() as client:
        answer = await client.completions.create(
            model=MODEL, prompt="lazy dog", echo=True, max_tokens=0, logprobs=1, stream=False
        )
    choice: Any = answer.choices[0]
    assert (choice.text, choice.finish_reason) == ("lazy dog", "length")
    num_prompt = len(gate.ids("lazy dog")) + 1
    assert len(choice.logprobs.tokens) == num_prompt and choice.logprobs.token_logprobs[0] is None
    assert "".join(choice.logprobs.tokens[1:]) == "lazy dog"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt, 0)


async def test_special_tokens_that_a_prompt_spells_out_have_their_offsets(gate: Gate) -> None:
    prompt = f"lazy{tiny_model.END}{tiny_model.BOS}dog"
    async with gate.client() as client:
        answer = await client.completions.create(
            model=MODEL, prompt=prompt, echo=True, max_tokens=0, logprobs=0
        )
    choice: Any = answer.choices[0]
    assert choice.text == prompt
    tokens, offsets = choice.logprobs.tokens, choice.logprobs.text_offset
    assert tiny_model.END in tokens and tokens[0] == tiny_model.BOS and offsets[:2] == [0, 0]
    for token, offset in list(zip(tokens, offsets, strict=True))[1:]:
        assert prompt[offset:].startswith(token), (token, offset)


# --------------------------------------------------------------------------- around it


async def test_models_are_listed_and_told_one_by_one(gate: Gate) -> None:
    async with gate.client() as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_request_ids_are_echoed_or_made(gate: Gate) -> None:
    async with gate.http() as http:
        own = await http.get("/health", headers={"x-request-id": "mine-1"})
        made = await http.get("/nowhere", headers={"x-request-id": "bad id"})
    assert own.headers["x-request-id"] == "mine-1"
    assert made.headers["x-request-id"].startswith("req-")


async def test_the_request_id_travels_to_the_worker(gate: Gate) -> None:
    async with gate.client() as client:
        await client.completions.create(model=MODEL, prompt="a", extra_headers={"x-request-id": "trace-me"})
    assert gate.worker.submits[0].trace_id == "trace-me"


async def test_harmless_fields_and_nulls_are_accepted(gate: Gate) -> None:
    body = {
        "model": MODEL,
        "messages": USER,
        "max_tokens": 1,
        "tools": [],
        "response_format": {"type": "text"},
    }
    nothing = dict.fromkeys(["stop", "seed", "logit_bias", "function_call", "audio", "stream_options"])
    async with gate.http() as http:
        answer = await http.post(
            "/v1/chat/completions", json=body | nothing | {"store": False, "metadata": {"a": "b"}}
        )
    assert answer.status_code == 200, answer.text


async def test_silent_streams_are_kept_open_with_comments(
    redis_settings: RedisSettings, folder: Path
) -> None:
    async with running(redis_settings, folder, keepalive_s=0.2) as gate, gate.http() as http:
        gate.worker.stop_at = 1
        body = {"model": MODEL, "prompt": "fox", "max_tokens": 3, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith(": keepalive"):
                    gate.worker.stop_at = None
                if line == "data: [DONE]":
                    break
        assert gate.worker.stop_at is None


async def test_long_prompts_are_tokenised_as_short_ones_are(gate: Gate) -> None:
    gate.worker.max_model_len = 100_000
    await gate.bus.update_card(gate.worker.card())
    await gate.bus.event("worker_joined", "w0", "longer")
    prompt = "the lazy dog " * 1000
    async with gate.client() as client:
        await gate.until("the new card", lambda: True)
        while (await gate.state())["instances"][0]["max_model_len"] < 1000:
            pass
        await client.completions.create(model=MODEL, prompt=prompt, max_tokens=1)
    assert gate.worker.submits[0].prompt_token_ids[1:] == gate.ids(prompt)


async def test_a_folder_that_changed_while_nobody_served_it_is_read_again(
    redis_settings: RedisSettings, folder: Path, tmp_path: Path
) -> None:
    own = tmp_path / "model"
    shutil.copytree(folder, own)
    whole = (own / "tokenizer.json").read_text()
    body = {"model": MODEL, "prompt": "fox", "max_tokens": 8}
    async with running(redis_settings, own) as gate, gate.http() as http:
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        for text, status in (("{}", 503), (whole, 200)):
            last = gate.workers[-1]
            epoch = last.epoch
            await last.leave()
            await gate.bus.event("worker_left", last.id, "test", epoch=epoch)
            async with asyncio.timeout(8):
                while (await gate.state())["instances"]:
                    await asyncio.sleep(0.02)
            (own / "tokenizer.json").write_text(text)
            await gate.add_worker(f"w{len(gate.workers)}")
            async with asyncio.timeout(8):
                while not (await gate.state())["instances"]:
                    await asyncio.sleep(0.02)
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == status, answer.text
            if status == 503:
                assert answer.json()["error"]["code"] == "no_tokenizer"
