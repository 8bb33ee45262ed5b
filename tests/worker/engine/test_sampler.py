"""The sampler against plain formulas: what it may choose, how often, and that nothing else matters."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from bus.messages import SamplingParams
from kernels import least_remaining
from kernels.filters import ranked
from kernels.noise import uniform
from tests.support.toy_grammars import KINDS, ToyMasks, ToyMatcher
from worker.engine import sampling
from worker.engine.sampler import Sampler

VOCAB = 64
CPU = torch.device("cpu")


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "seed": 1, **changes})


def make(*rows: SamplingParams, vocab_size: int = VOCAB) -> Sampler:
    sampler = Sampler(len(rows), vocab_size, CPU)
    for row, each in enumerate(rows):
        sampler.set_row(row, each, [])
    return sampler


def logits_of(rows: int, seed: int = 0, vocab_size: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


def ids(*values: int) -> npt.NDArray[np.int64]:
    return np.array(values, np.int64)


def draws(logits: torch.Tensor, n: int = 20_000, **changes: Any) -> npt.NDArray[np.int64]:
    """The same logits [V] drawn at n output positions."""
    sampler = make(params(**changes), vocab_size=len(logits))
    tokens = [
        sampler.sample(logits.expand(500, -1), np.zeros(500, np.int64), np.arange(at, at + 500)).token_ids
        for at in range(0, n, 500)
    ]
    return np.concatenate(tokens)


def chi_square(tokens: npt.NDArray[np.int64], probs: torch.Tensor) -> tuple[float, int]:
    """Pearson's statistic over the tokens expected at least five times, and its degrees of freedom."""
    expected = probs.double().numpy() * len(tokens)
    seen = np.bincount(tokens, minlength=len(probs))
    often = expected >= 5
    rest_expected, rest_seen = expected[~often].sum(), seen[~often].sum()
    statistic = ((seen[often] - expected[often]) ** 2 / expected[often]).sum()
    statistic += (rest_seen - rest_expected) ** 2 / max(rest_expected, 1.0)
    return float(statistic), int(often.sum())


def assert_drawn_from(tokens: npt.NDArray[np.int64], probs: torch.Tensor) -> None:
    statistic, degrees = chi_square(tokens, probs)
    # Mean k, variance 2k: five standard deviations above, one false alarm in millions.
    assert statistic < degrees + 5 * (2 * degrees) ** 0.5 + 5, (statistic, degrees)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_softmax_at_the_temperature(temperature: float) -> None:
    logits = logits_of(1)[0]
    tokens = draws(logits, temperature=temperature)
    assert_drawn_from(tokens, (logits / temperature).softmax(-1))


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_k": 12, "top_p": 0.8},
        {"top_p": 0.9, "min_p": 0.05},
    ],
)
def test_filtered_draws_follow_the_renormalised_rest(changes: dict[str, Any]) -> None:
    logits = logits_of(1, seed=3)[0]
    probs = reference_probs(logits, **changes)
    tokens = draws(logits, **changes)
    assert set(tokens.tolist()) <= set(probs.nonzero().flatten().tolist())
    assert_drawn_from(tokens, probs)


def reference_probs(
    logits: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """One row, one rule after the other, in float64."""
    probs = logits.double().softmax(-1)
    floor = min_p * probs.max()
    order = probs.argsort(descending=True)
    kept = order[: top_k or len(order)]
    among = probs[kept] / probs[kept].sum()
    kept = kept[(among.cumsum(0) - among) < top_p]
    kept = kept[probs[kept] >= floor]
    result = torch.zeros_like(probs)
    result[kept] = probs[kept] / probs[kept].sum()
    return result


@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0])
def test_candidates_of_a_large_vocabulary_equal_the_reference_within_and_beyond_the_window(
    scale: float,
) -> None:
    vocab_size = 4 * sampling.WINDOW
    cases: list[dict[str, Any]] = [
        {"top_k": 3},
        {"top_k": 600, "top_p": 0.5},
        {"top_p": 0.95},
        {"top_p": 0.3, "min_p": 0.2},
        {"top_k": 1},
        {"top_p": 1e-9},
    ]
    logits = logits_of(len(cases), 5, vocab_size) * scale
    filters = (
        torch.tensor([case.get("top_k", 0) for case in cases]),
        torch.tensor([case.get("top_p", 1.0) for case in cases]),
        torch.tensor([case.get("min_p", 0.0) for case in cases]),
    )
    values, chosen, is_enough = ranked(logits, *filters, sampling.WINDOW)
    floors = least_remaining(logits, *filters, torch.zeros(len(cases), dtype=torch.bool))
    for i, case in enumerate(cases):
        mine = set((logits[i] >= floors[i]).nonzero()[:, 0].tolist())
        if is_enough[i]:
            assert mine == set(chosen[i][values[i] > -torch.inf].tolist())
        reference = set(reference_probs(logits[i], **case).nonzero().flatten().tolist())
        assert len(mine ^ reference) <= (1 if "top_p" in case else 0), case  # one token at a rounded edge


def test_a_draw_depends_on_seed_and_position_alone_not_on_the_batch() -> None:
    logits = logits_of(6)
    each = [params(seed=10 + i, temperature=0.9, top_p=0.9 if i % 2 else 1.0) for i in range(6)]
    positions = ids(0, 5, 9, 2, 7, 1)
    together = make(*each).sample(logits, np.arange(6), positions).token_ids
    shuffled = [3, 1, 5, 0, 4, 2]
    sampler = Sampler(6, VOCAB, CPU)
    for row, i in enumerate(shuffled):
        sampler.set_row(row, each[i], [])
    again = sampler.sample(logits[shuffled], np.arange(6), positions[shuffled]).token_ids
    assert again.tolist() == together[shuffled].tolist()
    alone = [
        make(each[i]).sample(logits[i : i + 1], ids(0), positions[i : i + 1]).token_ids[0] for i in range(6)
    ]
    assert alone == together.tolist()


def test_other_seeds_and_other_positions_draw_other_tokens() -> None:
    flat = torch.zeros(1, 4096)
    by_seed = {
        int(make(params(seed=s), vocab_size=4096).sample(flat, ids(0), ids(0)).token_ids[0])
        for s in range(64)
    }
    assert len(by_seed) > 55
    assert len(set(draws(flat[0], n=500).tolist())) > 450


def test_negative_and_huge_seeds_are_seeds() -> None:
    flat = torch.zeros(1, 4096)
    seeds = [-1, 2**63 + 5, 2**64 - 2]
    tokens = [make(params(seed=s), vocab_size=4096).sample(flat, ids(0), ids(0)).token_ids[0] for s in seeds]
    assert len(set(tokens)) == 3


def test_noise_is_uniform_and_neighbours_are_not_correlated() -> None:
    keys = torch.from_numpy(sampling.keys(np.arange(64, dtype=np.uint64), np.zeros(64, np.int64)))
    u = uniform(keys, torch.arange(4096, dtype=torch.int32)).double()
    assert u.min() > 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.003 and abs(u.var() - 1 / 12) < 0.001
    counts = torch.histc(u, bins=64, min=0, max=1)
    assert float(((counts - 4096) ** 2 / 4096).sum()) < 64 + 5 * 128**0.5
    for a, b in ((u[:, 1:], u[:, :-1]), (u[1:], u[:-1])):
        assert abs(float(((a - 0.5) * (b - 0.5)).mean())) < 0.001


def test_a_batch_of_plain_greedy_rows_takes_the_argmax() -> None:
    logits = logits_of(3)
    sampled = make(*[params(temperature=0)] * 3).sample(logits, np.arange(3), ids(0, 0, 0))
    assert sampled.token_ids.tolist() == logits.argmax(-1).tolist()
    assert not sampled.logprobs


def test_a_vanishing_temperature_is_greedy() -> None:
    logits = logits_of(1)
    token = make(params(temperature=1e-30, top_p=0.9)).sample(logits, ids(0), ids(3)).token_ids[0]
    assert token == logits.argmax()


def test_penalties_count_outputs_and_survive_a_continuation() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 7], logits[:, 8], logits[:, 9] = 3.0, 2.0, 1.9
    strong = params(temperature=0, frequency_penalty=0.4, presence_penalty=0.8)
    sampler = make(params(temperature=0), strong)
    seen = [sampler.sample(logits, ids(0, 1), ids(i, i)).token_ids.tolist() for i in range(4)]
    assert seen == [[7, 7], [7, 8], [7, 9], [7, 7]]
    continued = Sampler(2, VOCAB, CPU)
    continued.set_row(1, strong, [7, 8])
    assert continued.sample(logits[:1], ids(1), ids(2)).token_ids.tolist() == [9]
    continued.set_row(1, strong, [])
    assert continued.sample(logits[:1], ids(1), ids(0)).token_ids.tolist() == [7]


def test_the_repetition_penalty_is_that_of_transformers_and_survives_a_continuation() -> None:
    prompt, output, penalty = [3, 5, 5, 60], [7, 9, 3], 1.7
    logits = logits_of(4)
    histories = torch.tensor([prompt + output])
    expected = RepetitionPenaltyLogitsProcessor(penalty)(histories, logits[1:2].clone())[0]
    mine = params(temperature=0, repetition_penalty=penalty)
    sampler = make(*[params(temperature=0)] * 4)
    sampler.set_row(1, mine, output, prompt)
    sampler.set_row(3, params(temperature=0, frequency_penalty=0.3), output, prompt)
    adjusted = sampler._adjusted(logits, np.arange(4), ids(0, 3, 0, 3))
    torch.testing.assert_close(adjusted[1], expected)
    assert not torch.equal(adjusted[1], logits[1])
    counts = torch.bincount(torch.tensor(output), minlength=VOCAB)
    torch.testing.assert_close(adjusted[3], logits[3] - 0.3 * counts)
    assert torch.equal(adjusted[[0, 2]], logits[[0, 2]])

    stepwise = make(params(temperature=0), mine)
    stepwise.set_row(1, mine, [], prompt)
    for position, token in enumerate(output):  # each is likelier than all others, and chosen
        sure = torch.full((1, VOCAB), -1.0)
        sure[0, token] = 1e6
        assert stepwise.sample(sure, ids(1), ids(position)).token_ids.tolist() == [token]
    torch.testing.assert_close(stepwise._adjusted(logits[1:2], ids(1), ids(3))[0], expected)
    stepwise.set_row(1, params(temperature=0), [], [])
    assert torch.equal(stepwise._adjusted(logits[1:2], ids(1), ids(0)), logits[1:2])


def test_no_end_token_comes_before_min_tokens() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 7], logits[:, 8], logits[:, 9] = 3.0, 2.0, 1.0
    rows = (
        params(temperature=0, min_tokens=2, stop_token_ids=(7, 8)),
        params(temperature=0, stop_token_ids=(7, 8)),
        params(temperature=0.01, top_k=5, min_tokens=3, stop_token_ids=(7, VOCAB + 5)),
    )
    sampler = make(*rows)
    chosen = [sampler.sample(logits, np.arange(3), ids(at, at, at)).token_ids.tolist() for at in range(4)]
    assert chosen == [[9, 7, 8], [9, 7, 8], [7, 7, 8], [7, 7, 7]]


def test_tokens_that_are_launched_without_a_wait_are_those_of_a_sample() -> None:
    rows = (
        params(temperature=0),
        params(temperature=0, repetition_penalty=8.0),
        params(temperature=0, min_tokens=3, stop_token_ids=(7, 9)),
        params(temperature=0.8, repetition_penalty=1.5, presence_penalty=0.5),
        params(temperature=0, frequency_penalty=2.5, logit_bias={9: 0.5}),
    )
    logits = torch.zeros(len(rows), VOCAB)
    logits[:, 7], logits[:, 9], logits[:, 11] = 4.0, 3.0, 2.0
    waited, launched = make(*rows), make(*rows)
    for sampler in (waited, launched):
        sampler.set_row(1, rows[1], [], [7])
    found = []
    for position in range(5):
        given = np.arange(len(rows)), np.full(len(rows), position)
        out = torch.zeros(len(rows), dtype=torch.int64)
        chosen = launched.launch(logits, *given, out)
        assert chosen is not None
        assert chosen.wait().tolist() == out.tolist() == waited.sample(logits, *given).token_ids.tolist()
        found.append(out.tolist())
    by_row = list(zip(*found, strict=True))
    assert by_row[0] == (7, 7, 7, 7, 7)
    assert by_row[1] == (9, 11, 7, 7, 7)  # the prompt had 7, the output then 9 and 11: 7 is likeliest again
    assert by_row[2] == (11, 11, 11, 7, 7)
    assert by_row[4] == (7, 9, 11, 7, 9)


def test_rows_with_a_matcher_take_what_it_allows_and_the_others_what_they_would_without_it() -> None:
    """The mask comes last: a bias towards a token that is forbidden does not help it."""
    biased = params(temperature=0, logit_bias={int(token): 50.0 for token in range(0, VOCAB, 7)})
    rows = (params(temperature=0), biased, params(temperature=0.8, top_k=9, top_p=0.9), params(min_p=0.3))
    logits, all_rows = logits_of(len(rows)), np.arange(len(rows))
    plain = make(*rows).sample(logits, all_rows, all_rows).token_ids
    for formed in ([0, 1, 2, 3], [1, 2], [3]):
        sampler = Sampler(len(rows), VOCAB, CPU, ToyMasks(VOCAB))
        matchers = {row: ToyMatcher(30) for row in formed}
        for row, each in enumerate(rows):
            sampler.set_row(row, each, [], (), matchers.get(row))
        before, made = logits.clone(), sampler.sample(logits, all_rows, all_rows).token_ids
        assert torch.equal(before, logits)
        for row, token in enumerate(made.tolist()):
            assert token % KINDS == matchers[row].allowed if row in formed else token == plain[row]
        free = np.array([row for row in all_rows if row not in formed], np.int64)
        out = torch.zeros(len(rows), dtype=torch.int64)
        assert sampler.launch(logits, all_rows, all_rows, out) is None, "the host has the masks"
        if len(free):
            launched = sampler.launch(logits[free], free, free, out[: len(free)])
            assert launched and launched.wait().tolist() == plain[free].tolist()
        for row, each in enumerate(rows):  # the next sequences of these rows have none
            sampler.set_row(row, each, [])
        assert sampler.sample(logits, all_rows, all_rows).token_ids.tolist() == plain.tolist()


def test_logit_bias_moves_only_its_own_row_and_is_forgotten_with_it() -> None:
    logits = logits_of(3)
    greedy = logits.argmax(-1).tolist()
    one, two = {5: 100.0}, {greedy[2]: -100.0, 9: 50.0}
    sampler = make(*(params(temperature=0, logit_bias=bias) for bias in ({}, one, two)))
    assert sampler.sample(logits, np.arange(3), ids(0, 0, 0)).token_ids.tolist() == [greedy[0], 5, 9]
    sampler.set_row(1, params(temperature=0, logit_bias={6: 100.0}), [])
    sampler.set_row(2, params(temperature=0), [])
    assert sampler.sample(logits, np.arange(3), ids(0, 0, 0)).token_ids.tolist() == [greedy[0], 6, greedy[2]]


def test_logprobs_are_those_of_the_untouched_logits() -> None:
    logits = logits_of(3)
    untouched = logits.clone()
    sampler = make(
        params(temperature=0),
        params(temperature=0, logprobs=0, logit_bias={4: 100.0}),
        params(temperature=0.5, top_k=3, logprobs=3),
    )
    sampled = sampler.sample(logits, np.arange(3), ids(0, 0, 0))
    expected = untouched.log_softmax(-1)
    assert torch.equal(logits, untouched)
    assert set(sampled.logprobs) == {1, 2}
    assert sampled.logprobs[1].token_id == 4 and sampled.logprobs[1].top_ids == []
    assert sampled.logprobs[1].logprob == pytest.approx(float(expected[1, 4]))
    top = expected[2].topk(3)
    assert sampled.logprobs[2].top_ids == top.indices.tolist()
    assert sampled.logprobs[2].top_logprobs == pytest.approx(top.values.tolist())
