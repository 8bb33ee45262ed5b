"""Grammars of the library: what the demo model writes has the form that was asked for."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer

from bench.common.engines import INSTANCE, EngineShape, close, load_engine
from bus.grammars import problem
from bus.messages import Grammar
from tests.support.engine_toys import Client, request
from tests.support.paths import DEMO_MODEL
from tests.support.schemas import SCHEMAS, random_schema
from worker.engine.engine import Engine
from worker.grammars.compiler import GuidanceCompiler
from worker.grammars.masks import GuidanceMasks
from worker.grammars.matcher import GuidanceMatcher
from worker.memory import BlockAllocator

pytestmark = pytest.mark.skipif(not (DEMO_MODEL / "config.json").is_file(), reason="models/demo is not built")

ENDS = (1, 5)
WHERE = r"(SELECT|DELETE) [a-z]{1,8}( WHERE [a-z]{1,4}=[0-9]{1,3})?"
LARK = 'start: "let " NAME " = " sum ";"\nsum: NUM | sum " + " NUM\nNAME: /[a-z]{1,6}/\nNUM: /[0-9]{1,3}/\n'
DIGITS = {"type": "integer", "minimum": 10, "maximum": 9999}
PAIR = {
    "type": "object",
    "properties": {"first": DIGITS, "second": DIGITS},
    "required": ["first", "second"],
    "additionalProperties": False,
}
GBNF = 'root ::= "(" [a-c] (", " [a-c])* ")"'


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    shape = EngineShape(max_num_seqs=16, max_model_len=400)
    made = load_engine(DEMO_MODEL, shape, budget_mib=96, grammars=GuidanceCompiler)
    yield made
    close(made)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


def schema(value: Any, **more: Any) -> Grammar:
    return Grammar(kind="json_schema", text=json.dumps(value), end_token_ids=ENDS, **more)


def regex(text: str) -> Grammar:
    return Grammar(kind="regex", text=text, end_token_ids=ENDS)


def submit(engine: Engine, name: str, grammar: Grammar | None, max_tokens: int = 300, **more: Any) -> None:
    engine.submit(INSTANCE, ask(name, grammar, max_tokens, **more))


def ask(name: str, grammar: Grammar | None, max_tokens: int = 300, **more: Any) -> Any:
    given: dict[str, Any] = {"temperature": 1.0, "seed": 7, "stop_token_ids": ENDS} | more
    return request(name, [9, 30, 77], max_tokens, grammar=grammar, **given)


def run(engine: Engine, client: Client) -> Client:
    """Run as the engine's thread does: a step is made when there is something to do."""
    deadline = time.monotonic() + 60
    while engine.has_work:
        assert time.monotonic() < deadline
        if engine.can_step():
            client.take(engine.step())
            engine.check_integrity()
        else:
            time.sleep(0.001)
    return client


def texts(tokenizer: Tokenizer, client: Client) -> dict[str, str]:
    return {
        name: tokenizer.decode([one for one in tokens if one not in ENDS], skip_special_tokens=False)
        for name, tokens in client.tokens.items()
    }


def test_every_answer_that_ends_by_itself_keeps_its_schema(engine: Engine, tokenizer: Tokenizer) -> None:
    asked = SCHEMAS + [random_schema(random.Random(seed)) for seed in range(40)]
    for i, each in enumerate(asked):
        assert problem(schema(each)) is None, each
        submit(engine, str(i), schema(each))
    client = run(engine, Client())
    assert not client.errors
    ended = [i for i in range(len(asked)) if client.ends[str(i)] == "stop"]
    for i in ended:
        value = json.loads(texts(tokenizer, client)[str(i)])
        jsonschema.validate(value, asked[i], format_checker=jsonschema.FormatChecker())
    assert len(ended) >= 0.9 * len(asked)  # strings, and objects of any fields, may go on to max_tokens


def test_regexes_choices_and_grammars_are_kept(engine: Engine, tokenizer: Tokenizer) -> None:
    words = ["yes", "no", "a|b", "né 你好", "yes, but"]
    for seed in range(6):
        submit(engine, f"regex {seed}", regex(WHERE), seed=seed)
        submit(engine, f"choice {seed}", Grammar(kind="choice", text=json.dumps(words)), seed=seed)
        submit(engine, f"lark {seed}", Grammar(kind="grammar", text=LARK, end_token_ids=ENDS), 60, seed=seed)
        submit(engine, f"gbnf {seed}", Grammar(kind="grammar", text=GBNF, end_token_ids=ENDS), 60, seed=seed)
    client = run(engine, Client())
    assert not client.errors
    patterns = {
        "regex": WHERE,
        "choice": "|".join(map(re.escape, words)),
        "lark": r"let [a-z]{1,6} = [0-9]{1,3}( \+ [0-9]{1,3})*;",
        "gbnf": r"\([a-c](, [a-c])*\)",
    }
    for name, text in texts(tokenizer, client).items():
        if client.ends[name] == "stop":
            assert re.fullmatch(patterns[name.split()[0]], text), (name, text)
    assert sum(end == "stop" for end in client.ends.values()) >= 20


def test_an_answer_that_is_cut_says_so(engine: Engine) -> None:
    submit(engine, "cut", regex("a{40}"), 3)
    submit(engine, "whole", regex("(yes|no)"), 40)
    assert run(engine, Client()).ends == {"cut": "length", "whole": "stop"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_replay_at_every_position_goes_on_with_the_same_tokens(engine: Engine, temperature: float) -> None:
    grammar = schema(PAIR)
    submit(engine, "whole", grammar, 60, temperature=temperature)
    client = run(engine, Client())
    whole, end = client.tokens["whole"], client.ends["whole"]
    assert len(whole) > 5
    for cut in range(len(whole) + 1):
        submit(engine, str(cut), grammar, 60, sent=whole[:cut], temperature=temperature)
    again = run(engine, Client())
    assert list(again.tokens.values()) == [whole] * (len(whole) + 1)
    assert set(again.ends.values()) == {end}


def test_preempted_answers_are_the_same(engine: Engine) -> None:
    names = [str(i) for i in range(8)]
    for name in names:
        submit(engine, name, schema(PAIR), seed=int(name))
    right = run(engine, Client()).tokens
    instance = engine.instances[INSTANCE]
    for name in names:
        submit(engine, name, schema(PAIR), seed=int(name))
    client = Client()
    while not any(client.tokens.values()):
        client.take(engine.step())
    instance.kv.allocator = BlockAllocator(instance.kv.allocator.capacity)  # type: ignore[misc]
    instance.recompute_all(instance.kv.allocator)
    assert run(engine, client).tokens == right


def test_rows_without_a_grammar_and_logprobs_are_those_of_the_model(engine: Engine) -> None:
    submit(engine, "free", None, 20)
    alone = run(engine, Client()).tokens["free"]
    submit(engine, "free", None, 20)
    submit(engine, "formed", regex("[ab]{20}"), 40, logprobs=2)
    client = run(engine, Client())
    assert client.tokens["free"] == alone
    scored = [one for delta in client.deltas for one in delta.logprobs or []]
    assert [one.token_id for one in scored] == client.tokens["formed"]
    # Those of the model itself: its likeliest tokens are others than those that the grammar allows.
    assert any(one.token_id not in one.top_ids for one in scored)


def test_bias_penalties_and_min_tokens_cannot_break_the_form(engine: Engine, tokenizer: Tokenizer) -> None:
    bias = {tokenizer.token_to_id("x"): 100.0} | dict.fromkeys(ENDS, 100.0)
    submit(engine, "biased", regex("[ab]{6}"), 40, logit_bias=bias, presence_penalty=2.0, temperature=0.0)
    submit(engine, "long", regex("[ab]{2}"), 40, min_tokens=20)
    submit(engine, "filtered", regex("[ab]{6}"), 40, top_p=0.5, top_k=3, min_p=0.2)
    client = run(engine, Client())
    made = texts(tokenizer, client)
    assert re.fullmatch("[ab]{6}", made["biased"]) and re.fullmatch("[ab]{6}", made["filtered"])
    assert re.fullmatch("[ab]{2}", made["long"])
    assert set(client.ends.values()) == {"stop"}


def test_a_bad_grammar_ends_its_own_request_only(engine: Engine) -> None:
    submit(engine, "good", regex("yes"))
    submit(engine, "bad", regex("(yes"))
    submit(engine, "astray", regex("yes"), sent=[77, 78])
    rules = "\n".join(["start: a0", *(f"a{i}: a{i + 1}" for i in range(4000))])  # the gateway would refuse it
    submit(engine, "hostile", Grammar(kind="grammar", text=rules, end_token_ids=ENDS))
    client = run(engine, Client())
    assert client.ends == {"good": "stop"} | dict.fromkeys(("bad", "astray", "hostile"), "error")
    assert "at most 512 are allowed" in client.errors["hostile"]
    assert "unclosed group" in client.errors["bad"]
    assert "left its grammar" in client.errors["astray"]


def test_requests_that_wait_for_their_grammars_can_be_cancelled_and_hold_nobody_up(engine: Engine) -> None:
    instance, woken = engine.instances[INSTANCE], list[bool]()
    engine.wake = lambda: woken.append(True)
    submit(engine, "gone", schema({"enum": [f"one of many {i}" for i in range(2000)]}))
    assert not engine.can_step()
    submit(engine, "free", None, 3)
    assert engine.can_step()
    assert engine.cancel(["gone"]) == 1
    client = run(engine, Client())
    assert client.ends["free"] in ("length", "stop") and "gone" not in client.ends
    deadline = time.monotonic() + 20
    while not woken and time.monotonic() < deadline:
        time.sleep(0.01)
    assert woken and not engine.can_step() and not engine.has_work
    instance.check_integrity()


def test_masks_are_those_of_the_library(engine: Engine) -> None:
    instance = engine.instances[INSTANCE]
    assert instance.grammars
    instance.grammars.take()  # of requests that were cancelled
    matchers: list[GuidanceMatcher] = []
    for asked in ({"type": "object"}, {"type": "integer"}, {"type": "string"}):
        instance.grammars.ask(0, schema(asked), [])
        while not instance.grammars.has_news:
            time.sleep(0.001)
        ((_, made),) = instance.grammars.take()
        assert isinstance(made, GuidanceMatcher)
        matchers.append(made)
    forbidden = GuidanceMasks(instance.vocab_size, torch.device("cpu")).forbidden(matchers)
    for row, matcher in zip(forbidden.tolist(), matchers, strict=True):
        bits = matcher.inner.compute_bitmask()
        plain = [not bits[token // 8] >> token % 8 & 1 for token in range(instance.vocab_size)]
        assert row == plain and 0 < sum(plain) < instance.vocab_size
