"""What is sent: prompts of an exact length, and the dialect that a server takes them in.

Made before the first is due, since making a long one takes longer than arrivals may be late.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from instar.errors import BenchProblem, ServerProblem
from instar.replay.traces import Arrival
from instar.replay.wire import Server, fetch

COMPLETIONS: Final = "/v1/completions"
TRIAL: Final = "replay-trial"  # begins the id of a trial request, so that `record` knows it
SAID_CHARS: Final = 300  # of a server's message
MAX_BYTES: Final = 8 << 30  # of all prompts together
# Below what any vocabulary has, above where most keep their special tokens.
IDS: Final = range(16, 1000)
# One token each in most vocabularies, with the space before; the server's usage says what they became.
WORDS: Final = (
    *("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on"),
    *("not", "he", "this", "are", "or", "his", "from", "at", "which", "but", "have", "an", "had", "they"),
    *("you", "were", "their", "one", "all", "we", "can", "her", "has", "there", "been", "if", "more", "when"),
    *("will", "would", "who", "so", "no", "out", "up", "into", "than", "them", "only", "time", "new", "some"),
)


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a server understands. `token_ids`: prompts are exact; else text of so many words. `ignore_eos`:
    outputs are exact. `precision`: it tells in which each token was made."""

    token_ids: bool = True
    ignore_eos: bool = True
    precision: bool = True

    def body(self, model: str, prompt: str, output_tokens: int) -> bytes:
        """`prompt`: JSON."""
        fields: dict[str, Any] = {"model": model, "max_tokens": output_tokens, "temperature": 0}
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.precision:
            fields["return_precision"] = True
        return f'{json.dumps(fields)[:-1]}, "prompt": {prompt}}}'.encode()

    def prompt(self, arrival: Arrival, rng: random.Random, ids: Sequence[str]) -> str:
        """As JSON."""
        if not self.token_ids:
            return json.dumps(" ".join(rng.choices(WORDS, k=arrival.prompt_tokens)))
        if arrival.prompt is not None:
            return json.dumps(arrival.prompt)
        return f"[{','.join(rng.choices(ids, k=arrival.prompt_tokens))}]"

    @property
    def in_words(self) -> str:
        prompts = "token ids" if self.token_ids else "words: lengths are near the trace's"
        outputs = (
            "exact lengths" if self.ignore_eos else "until the model ends: lengths are at most the trace's"
        )
        return f"prompts as {prompts}; outputs of {outputs}"


# The best first. What a server does not know it refuses, by a 400 or a 422.
DIALECTS: Final = (
    Dialect(),
    Dialect(precision=False),
    Dialect(precision=False, ignore_eos=False),
    Dialect(precision=False, token_ids=False),
    Dialect(precision=False, token_ids=False, ignore_eos=False),
)


def bodies(
    arrivals: Sequence[Arrival], model: str, dialect: Dialect, seed: int, ids: range = IDS
) -> list[bytes]:
    """One for each; the same seed, the same prompts. Raises BenchProblem for more than memory should hold."""
    if (size := 5 * sum(one.prompt_tokens for one in arrivals)) > MAX_BYTES:
        raise BenchProblem(f"the prompts would take {size >> 30} GiB: take a --window, or --scale-lengths")
    rng = random.Random(seed)
    texts = [str(one) for one in ids]
    return [dialect.body(model, dialect.prompt(one, rng, texts), one.output_tokens) for one in arrivals]


async def find_dialect(server: Server, model: str, ids: range = IDS) -> tuple[Dialect, str]:
    """The best that the server does not refuse, by requests for one token; and what it said in place of a
    token: a server that is too busy for a trial gets the load all the same. Raises ServerProblem where every
    dialect is refused."""
    arrival, rng = Arrival(0.0, 1, 1), random.Random(0)
    said = ""
    for number, dialect in enumerate(DIALECTS):
        body = dialect.body(model, dialect.prompt(arrival, rng, [str(ids[0])]), 1)
        request_id = f"{TRIAL}-{number}"
        status, answer = await fetch(server, "POST", COMPLETIONS, body, within_s=120, request_id=request_id)
        if status == 200:
            return dialect, ""
        said = f"{status}: {message_of(answer)}"
        if status not in (400, 422):
            break
    if status in (401, 403, 404, 405, 400, 422):
        raise ServerProblem(f"{server.name.decode()}{server.path}{COMPLETIONS} refuses a request: {said}")
    return DIALECTS[0], said


def message_of(answer: bytes) -> str:
    """Of an error in OpenAI's shape, as an answer or in a stream; else the beginning of what came, and of a
    stream nothing. On one line, and not long."""
    events = [line[5:] for line in answer.splitlines() if line.startswith(b"data:")]
    for text in events[::-1] or [answer]:
        try:
            return _shortened(str(json.loads(text)["error"]["message"]))
        except (ValueError, KeyError, TypeError):
            continue
    return "" if events else _shortened(answer[:SAID_CHARS].decode(errors="replace"))


def _shortened(text: str) -> str:
    """It goes to a terminal, whoever wrote it."""
    line = "".join(char if char.isprintable() else " " for char in text[: 2 * SAID_CHARS])
    line = " ".join(line.split())
    return line if len(line) <= SAID_CHARS else f"{line[:SAID_CHARS]}..."


async def models_of(server: Server) -> list[dict[str, Any]]:
    """What /v1/models lists. Raises ServerProblem."""
    try:
        status, answer = await fetch(server, "GET", "/v1/models")
    except BenchProblem as problem:
        raise ServerProblem(
            f"no server answers at {server.name.decode()} ({problem}); start one with `instar serve`, or say "
            "where it is with --url"
        ) from problem
    if status != 200:
        raise ServerProblem(f"{server.path}/v1/models: {status}: {message_of(answer)}{_hint(status)}")
    try:
        return [dict(one) for one in json.loads(answer)["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ServerProblem(
            "/v1/models does not list models: is that an OpenAI-compatible server?"
        ) from error


def _hint(status: int) -> str:
    if status == 404:
        return "; is --url right? It is the address before /v1"
    return "; give a key with --api-key" if status in (401, 403) else ""
