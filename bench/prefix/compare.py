"""The prefix cache in the real service, against the same service without it.

    python -m bench.prefix [--rounds 3] [--conversations 16] [--turns 8] [--unlike-rounds 9]

Two services of one worker with the demo model run at once, with and without the cache, and take turns. Each
conversation begins with 1,000 tokens of its own. Every turn sends all that was said so far, the answers of
the server included, and all conversations make a turn at once. Then prompts that have nothing in common are
sent, where the cache can only cost, in many short rounds, so that 2 % can be told from noise. Bars: time to
first token (P50 over all turns) at least 4 times lower with the cache, the same text in every turn, and at
most 2 % more time for unlike prompts (the median over the rounds).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import msgspec

from bench.common.machine import describe_machine
from bench.common.results import bar, conclude, digits, parser, quantile, say, say_bars
from bench.common.service import STEADY, Service

BEGINNING_TOKENS: Final = 1000
TURN_TOKENS: Final = 24  # tokens of the user, and as many of the answer
UNLIKE_TOKENS: Final = 400
# Of the demo model's vocabulary, mostly a token each.
WORDS: Final = (
    *("the", "of", "and", "to", "in", "was", "he", "that", "it", "his", "had", "with", "as", "at", "for"),
    *("on", "is", "be", "but", "not", "you", "they", "she", "all", "were", "him", "from", "my", "so", "one"),
    *("no", "when", "who", "man", "out", "up", "them", "then", "would", "could", "what", "this", "which"),
)
TTFT_BAR, COST_BAR = 4.0, 1.02
CACHES: Final = {"with": "true", "without": "false"}


@dataclass
class Turn:
    """The answer to one request: seconds to its first event, text, and the tokens of its prompt."""

    ttft_s: float
    text: str
    prompt_tokens: int
    cached_tokens: int


@dataclass
class Side:
    """The measurements of one service."""

    ttft_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    unlike_s: list[float] = field(default_factory=list)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--conversations", type=int, default=16)
    options.add_argument("--turns", type=int, default=8)
    options.add_argument("--unlike-rounds", type=int, default=9, metavar="N", help="with unlike prompts")
    args = options.parse_args()
    machine = describe_machine()
    services = {name: _service(value) for name, value in CACHES.items()}
    with services["with"], services["without"]:
        for service in services.values():  # or the policy takes bits from one of them and changes its text
            service.set_policy(mode="manual")
        urls = {name: service.url() for name, service in services.items()}
        sides, differing = asyncio.run(_measure(urls, args))
    return report(sides, differing, vars(args) | machine)


def _service(prefix_cache: str) -> Service:
    return Service(settings={**STEADY, "WORKER__PREFIX_CACHE": prefix_cache, "WORKER__THREADS": "2"})


async def _measure(urls: dict[str, str], args: argparse.Namespace) -> tuple[dict[str, Side], int]:
    """Return what each service measured, and how many turns had unlike answers."""
    sides = {name: Side() for name in urls}
    differing = 0
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=64)) as http:
        for number in range(args.rounds):
            answers: dict[str, list[str]] = {}
            for name in in_turn(list(urls), number):
                rng = random.Random(f"conversations of round {number}")
                answers[name] = await _converse(
                    http, urls[name], sides[name], rng, args.conversations, args.turns
                )
            differing += sum(a != b for a, b in zip(*answers.values(), strict=True))
            say(f"round {number + 1}: " + ", ".join(_line(name, side) for name, side in sides.items()))
        for number in range(args.unlike_rounds):
            for name in in_turn(list(urls), number):
                rng = random.Random(f"unlike prompts of round {number}")
                sides[name].unlike_s.append(await _unlike(http, urls[name], rng, args.conversations))
    return sides, differing


async def _converse(
    http: httpx.AsyncClient, url: str, side: Side, rng: random.Random, conversations: int, turns: int
) -> list[str]:
    """Let all conversations make one turn after the other; return the answers in a fixed order."""
    said = [_text(rng, BEGINNING_TOKENS) for _ in range(conversations)]
    answers = []
    for _ in range(turns):
        said = [history + _text(rng, TURN_TOKENS) for history in said]
        made = await asyncio.gather(*(_send(http, url, history) for history in said))
        said = [history + turn.text for history, turn in zip(said, made, strict=True)]
        for turn in made:
            side.ttft_s.append(turn.ttft_s)
            side.prompt_tokens += turn.prompt_tokens
            side.cached_tokens += turn.cached_tokens
            answers.append(turn.text)
    return answers


async def _unlike(http: httpx.AsyncClient, url: str, rng: random.Random, count: int) -> float:
    """Return the seconds for so many prompts at once that have nothing in common."""
    prompts = [_text(rng, UNLIKE_TOKENS) for _ in range(count)]
    began = time.perf_counter()
    await asyncio.gather(*(_send(http, url, prompt) for prompt in prompts))
    return time.perf_counter() - began


async def _send(http: httpx.AsyncClient, url: str, prompt: str) -> Turn:
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": TURN_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, ttft_s, text, usage = time.perf_counter(), 0.0, "", dict[str, Any]()
    async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            ttft_s = ttft_s or time.perf_counter() - began
            event = msgspec.json.decode(line[6:])
            text += "".join(choice["text"] for choice in event["choices"])
            usage = event.get("usage") or usage
    return Turn(ttft_s, text, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


def _text(rng: random.Random, num_words: int) -> str:
    """Return random words of about a token each."""
    return "".join(" " + rng.choice(WORDS) for _ in range(num_words))


def in_turn(names: list[str], number: int) -> list[str]:
    """Return the names, the other one first in every second round."""
    return names if number % 2 == 0 else names[::-1]


def _line(name: str, side: Side) -> str:
    return f"{name} TTFT P50 {statistics.median(side.ttft_s) * 1e3:.0f} ms"


def report(sides: dict[str, Side], differing: int, setting: dict[str, Any]) -> int:
    ttft = {name: statistics.median(side.ttft_s) for name, side in sides.items()}
    times = ttft["without"] / ttft["with"]
    ratios = sorted(a / b for a, b in zip(sides["with"].unlike_s, sides["without"].unlike_s, strict=True))
    cost = statistics.median(ratios)
    spread = [digits(quantile(ratios, share)) for share in (0.25, 0.75)]
    bars = {
        "TTFT P50, times lower with the cache": bar(TTFT_BAR, times, times >= TTFT_BAR),
        "turns with another text": bar(0, differing, differing == 0),
        "unlike prompts: time with the cache by that without": bar(COST_BAR, cost, cost <= COST_BAR),
    }
    say_bars(bars)
    say(f"unlike prompts: {spread[0]} to {spread[1]} in the middle half of {len(ratios)} rounds")
    result: dict[str, Any] = {"bench": "prefix", **setting, "bars": bars, "unlike_middle_half": spread}
    for name, side in sides.items():
        result[name] = {
            "ttft_p50_s": digits(ttft[name]),
            "ttft_p95_s": digits(quantile(side.ttft_s, 0.95)),
            "cached_share": digits(side.cached_tokens / side.prompt_tokens),
            "unlike_s": [digits(seconds) for seconds in side.unlike_s],
        }
    return conclude(result, is_kept=True, bars=bars)
