"""Greedy output of the engine equals transformers' generate, token for token, however it is batched.

Runs on the GPU where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.common.engines import fill_cache, make_instance
from bench.common.loading import load_model
from bench.common.oracles import RoundedCache, make_oracle
from tests.support.engine_toys import Client, expect_no_growth, request, run
from tests.support.families import EVERY_FAMILY
from tests.support.greedy import generate
from tests.support.paths import DEMO_MODEL
from tests.worker.model.test_oracle import LONGROPE
from worker.engine.build import canary_steps, make_cache, make_pool, served_limits
from worker.engine.core import EngineCore
from worker.engine.engine import Engine
from worker.engine.sequence import Limits
from worker.memory import PagePool
from worker.model import Model, ModelError

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
NUM_NEW = 24
LENGTHS = (1, 3, 17, 40, 65)
VOCAB = 211
# One of each family where all options would only take time.
SOME = pytest.mark.parametrize(
    "saved",
    [
        *("llama", "mistral with a sliding window"),
        *(pytest.param(family, marks=pytest.mark.slow) for family in ("qwen2", "qwen3")),
    ],
    indirect=True,
)


@dataclass
class Saved:
    """A transformers model, its folder, and what it generates for each of the prompts."""

    oracle: Any
    folder: Path
    prompts: list[list[int]]
    expected: list[list[int]]


class Case:
    """An engine with one model, whose parts are given back at the end."""

    def __init__(self, folder: Path, *, num_blocks: int = 0, **limits: Any) -> None:
        self.pool: PagePool = make_pool(DEVICE, 64 * 1024 * 1024)
        self.model: Model = load_model(folder, self.pool, dtype=torch.float32, max_tp=2)
        self.limits = Limits(
            **{
                **served_limits(self.model, 256),
                "max_num_seqs": 8,
                "max_num_batched_tokens": 32,
                "block_tokens": 4,
                **limits,
            }
        )
        self.cache = make_cache(self.pool, self.model, self.limits, "test")
        fill_cache(self.pool, self.cache, self.model, self.limits)
        if num_blocks:
            self.cache.allocator.truncate(num_blocks)
        self.instance: EngineCore = make_instance("m@w0", self.model, self.cache, self.limits)
        self.engine = Engine(DEVICE)
        self.engine.add_instance(self.instance)

    def close(self) -> None:
        assert self.cache.allocator.num_used == 0
        self.cache.release()
        self.model.release()
        self.pool.check_integrity()
        self.pool.close()


@pytest.fixture(scope="module", params=EVERY_FAMILY)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    oracle = make_oracle(request.param, seed=3).to(DEVICE)
    folder = tmp_path_factory.mktemp("model")
    oracle.save_pretrained(folder)
    prompts = [
        torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS
    ]
    return Saved(oracle, folder, prompts, [generate(oracle, prompt, NUM_NEW) for prompt in prompts])


def greedy_by_length(oracle: Any, prompt: list[int], n: int) -> list[int]:
    """Return n tokens, each computed from all tokens before it, without a cache."""
    tokens, oracle = list(prompt), oracle.to(DEVICE)
    with torch.no_grad():
        for _ in range(n):
            logits = oracle(torch.tensor([tokens], device=DEVICE), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_longrope_goes_by_the_length_of_each_sequence(tmp_path: Path, prefix_cache: bool) -> None:
    """One that outgrows the short frequencies is computed again: its keys are those of the long ones."""
    oracle = make_oracle(
        "phi3", rope_parameters=LONGROPE, original_max_position_embeddings=64, sliding_window=None
    )
    oracle.save_pretrained(tmp_path)
    text = torch.randint(0, VOCAB, (90,), generator=torch.Generator().manual_seed(4)).tolist()
    lengths = (55, 90, 30, 64, 65, 80)
    expected = {str(n): greedy_by_length(oracle, text[:n], NUM_NEW) for n in lengths}
    assert expected["64"] == generate(oracle, text[:64], NUM_NEW)  # transformers restarts there, too
    case = Case(tmp_path, prefix_cache=prefix_cache)
    if not prefix_cache:
        for n in lengths:
            case.engine.submit("m@w0", request(str(n), text[:n], NUM_NEW))
        assert run(case.engine, Client()).tokens == expected
        assert case.instance.scheduler.num_recomputed == 2 * 64  # of those that begin with 55 and 64
    else:
        client = Client()
        for n in lengths:
            case.engine.submit("m@w0", request(str(n), text[:n], NUM_NEW))
            run(case.engine, client)
        assert client.tokens == expected
        # In blocks of four. 55 has left its beginning twice: 90 finds the long one, 30 and 64 the short one.
        assert case.instance.scheduler.num_prefix_hits == 52 + 28 + 52 + 64 + 76
    assert case.instance.scheduler.num_preemptions == 0
    case.instance.check_integrity()
    case.close()


@pytest.fixture
def case(saved: Saved) -> Iterator[Case]:
    made = Case(saved.folder)
    yield made
    made.close()


def submit_all(case: Case, saved: Saved) -> None:
    for i, prompt in enumerate(saved.prompts):
        case.engine.submit("m@w0", request(str(i), prompt, NUM_NEW))


def assert_as_expected(client: Client, saved: Saved) -> None:
    assert client.tokens == {str(i): tokens for i, tokens in enumerate(saved.expected)}


def test_prompts_chunked_and_batched_give_what_generate_gives(case: Case, saved: Saved) -> None:
    submit_all(case, saved)
    assert_as_expected(run(case.engine, Client()), saved)


def test_mixed_arrivals_give_what_generate_gives(case: Case, saved: Saved) -> None:
    client = Client()
    for i, prompt in enumerate(saved.prompts):
        case.engine.submit("m@w0", request(str(i), prompt, NUM_NEW))
        for _ in range(i + 1):
            client.take(case.engine.step())
    assert_as_expected(run(case.engine, client), saved)


def test_preemption_by_a_tiny_cache_changes_no_token(saved: Saved) -> None:
    case = Case(saved.folder, num_blocks=30)
    expect_no_growth(case.instance.scheduler)
    submit_all(case, saved)
    client = run(case.engine, Client())
    assert case.instance.scheduler.num_preemptions > 0
    assert_as_expected(client, saved)
    case.close()


@SOME
def test_a_kv_cache_in_8_bits_gives_what_generate_gives_from_rounded_keys_and_values(saved: Saved) -> None:
    rounded = [generate(saved.oracle, prompt, NUM_NEW, RoundedCache) for prompt in saved.prompts]
    case = Case(saved.folder, kv_dtype="int8", prefix_cache=True)
    for _ in range(2):  # the second time from cached blocks
        submit_all(case, saved)
        tokens = run(case.engine, Client()).tokens
        assert [tokens[str(i)] for i in range(len(LENGTHS))] == rounded
    assert case.instance.scheduler.num_prefix_hits > 0
    assert case.instance.shape_id == "tp1-full-kv8"
    case.close()


@SOME
def test_replays_cut_at_every_position_go_on_with_the_same_tokens(case: Case, saved: Saved) -> None:
    prompt, whole = saved.prompts[2], saved.expected[2]
    for cut in range(NUM_NEW):
        case.engine.submit("m@w0", request(str(cut), prompt, NUM_NEW, sent=whole[:cut]))
    client = run(case.engine, Client())
    assert list(client.tokens.values()) == [whole] * NUM_NEW


@SOME
def test_sampled_text_survives_a_replay_at_every_position(case: Case, saved: Saved) -> None:
    sampling: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "seed": 5, "presence_penalty": 0.3}
    case.engine.submit("m@w0", request("whole", saved.prompts[1], NUM_NEW, **sampling))
    whole = run(case.engine, Client()).tokens["whole"]
    assert whole != saved.expected[1]
    for cut in range(NUM_NEW):
        case.engine.submit("m@w0", request(str(cut), saved.prompts[1], NUM_NEW, sent=whole[:cut], **sampling))
    assert list(run(case.engine, Client()).tokens.values()) == [whole] * NUM_NEW


@SOME
def test_greedy_and_seeded_text_is_the_same_from_cached_blocks_as_without_them(saved: Saved) -> None:
    seeded: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "seed": 5}
    texts = []
    for prefix_cache in (False, True):
        case = Case(saved.folder, prefix_cache=prefix_cache)
        for _ in range(2):
            submit_all(case, saved)
            for i, prompt in enumerate(saved.prompts):
                case.engine.submit("m@w0", request(f"seeded {i}", prompt, NUM_NEW, **seeded))
            texts.append(run(case.engine, Client()).tokens)
        assert (case.instance.scheduler.num_prefix_hits > sum(LENGTHS) // 2) == prefix_cache
        case.close()
    assert texts == [texts[0]] * 4
    assert [texts[0][str(i)] for i in range(len(LENGTHS))] == saved.expected


@SOME
def test_logprobs_and_prompt_logprobs_are_those_of_the_model(case: Case, saved: Saved) -> None:
    prompt = saved.prompts[3]
    case.engine.submit("m@w0", request("a", prompt, 4, logprobs=2, prompt_logprobs=1))
    client = run(case.engine, Client())
    with torch.no_grad():
        ids = torch.tensor([prompt + saved.expected[3][:4]], device=DEVICE)
        expected = saved.oracle.to(DEVICE)(ids).logits[0].float().log_softmax(-1).cpu()
    own = [delta.logprobs[0] for delta in client.deltas if delta.logprobs]
    rows = expected[len(prompt) - 1 : len(prompt) + 3]
    assert [each.logprob for each in own] == pytest.approx(
        [float(row[each.token_id]) for row, each in zip(rows, own, strict=True)], abs=1e-3
    )
    assert [each.top_ids for each in own] == rows.topk(2).indices.tolist()
    of_prompt = [score for delta in client.deltas for score in delta.prompt_logprobs or []]
    assert [each.logprob for each in of_prompt[1:] if each] == pytest.approx(
        expected[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])].tolist(), abs=1e-3
    )


def test_an_embedding_is_the_direction_of_the_last_state_before_the_head(case: Case, saved: Saved) -> None:
    case.engine.submit("m@w0", request("beside", saved.prompts[2], NUM_NEW))
    for i, prompt in enumerate(saved.prompts):
        case.engine.submit("m@w0", request(f"e{i}", prompt, 1, embeds=True))
    client = run(case.engine, Client())
    assert client.tokens["beside"] == saved.expected[2]
    found = {delta.request_id: delta.embedding for delta in client.deltas if delta.embedding}
    oracle = saved.oracle.to(DEVICE).base_model
    for i, prompt in enumerate(saved.prompts):
        with torch.no_grad():
            last = oracle(torch.tensor([prompt], device=DEVICE)).last_hidden_state[0, -1]
        got = torch.frombuffer(bytearray(found[f"e{i}"]), dtype=torch.float32)
        expected = torch.nn.functional.normalize(last.float(), dim=0).cpu()
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


@SOME
def test_the_canary_finds_weights_that_are_not_numbers(saved: Saved) -> None:
    case = Case(saved.folder, prefix_cache=True)
    for _ in canary_steps(case.instance):
        pass
    assert case.instance.stats.generation_tokens == case.instance.scheduler.num_prefix_queried == 0
    case.model.weights[1].attention.tensors["o"].fill_(float("nan"))
    with pytest.raises(ModelError, match="weights are damaged"):
        for _ in canary_steps(case.instance):
            pass
    case.close()


@pytest.mark.skipif(not (DEMO_MODEL / "config.json").is_file(), reason="models/demo is not built")
def test_the_demo_model_gives_what_generate_gives() -> None:
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval().to(DEVICE)
    prompts = [[(i * 37 + j * 11) % 4000 for j in range(n)] for i, n in enumerate((5, 90, 33))]
    case = Case(DEMO_MODEL, max_num_batched_tokens=64, block_tokens=16)
    for i, prompt in enumerate(prompts):
        case.engine.submit("m@w0", request(str(i), prompt, 40))
    client = run(case.engine, Client())
    assert client.tokens == {str(i): generate(oracle, prompt, 40) for i, prompt in enumerate(prompts)}
    case.close()
