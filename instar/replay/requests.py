"""The bodies of a run's requests: prompts of an exact length, in a dialect that the server accepts."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from instar.errors import InputError, ServerError
from instar.replay.schemas import Arrival
from instar.replay.wire import ServerAddress, fetch

COMPLETIONS: Final = "/v1/completions"
TRIAL: Final = "replay-trial"  # prefix of a trial request's id, for `record`
SAID_CHARS: Final = 300  # characters of a server's message
MAX_BYTES: Final = 8 << 30  # bytes of all prompts together
# In every vocabulary, and above where most have their special tokens.
IDS: Final = range(16, 1000)
# One token each in most vocabularies, with the space before. The server's usage has the true count.
WORDS: Final = (
    *("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on"),
    *("not", "he", "this", "are", "or", "his", "from", "at", "which", "but", "have", "an", "had", "they"),
    *("you", "were", "their", "one", "all", "we", "can", "her", "has", "there", "been", "if", "more", "when"),
    *("will", "would", "who", "so", "no", "out", "up", "into", "than", "them", "only", "time", "new", "some"),
)


@dataclass(frozen=True, slots=True)
class Dialect:
    """The fields that a server accepts."""

    token_ids: bool = True  # prompts of exact lengths, else text of as many words
    ignore_eos: bool = True  # outputs of exact lengths
    precision: bool = True  # the server reports that of each token

    def body(self, model: str, prompt: str, output_tokens: int) -> bytes:
        """Return a request for `prompt`, which is JSON."""
        fields: dict[str, Any] = {"model": model, "max_tokens": output_tokens, "temperature": 0}
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
        fields |= {"ignore_eos": True} if self.ignore_eos else {}
        fields |= {"return_precision": True} if self.precision else {}
        return f'{json.dumps(fields)[:-1]}, "prompt": {prompt}}}'.encode()

    def prompt(self, arrival: Arrival, rng: random.Random, ids: Sequence[str]) -> str:
        """Return the prompt as JSON."""
        if not self.token_ids:
            return json.dumps(" ".join(rng.choices(WORDS, k=arrival.prompt_tokens)))
        if arrival.prompt is not None:
            return json.dumps(arrival.prompt)
        return f"[{','.join(rng.choices(ids, k=arrival.prompt_tokens))}]"

    @property
    def in_words(self) -> str:
        prompts = "token ids" if self.token_ids else "words: their lengths are near the trace's"
        ends = "have exact" if self.ignore_eos else "end with the model's EOS: at most the trace's"
        return f"prompts as {prompts}; outputs {ends} lengths"


# The best first. A server refuses unknown fields with 400 or 422.
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
    """Return a body for each arrival, the same for the same seed. Raises InputError for too much memory."""
    if (size := 5 * sum(one.prompt_tokens for one in arrivals)) > MAX_BYTES:
        raise InputError(f"the prompts would take {size >> 30} GiB: use a --window or --scale-lengths")
    rng = random.Random(seed)
    texts = [str(one) for one in ids]
    return [dialect.body(model, dialect.prompt(one, rng, texts), one.output_tokens) for one in arrivals]


async def find_dialect(server: ServerAddress, model: str, ids: range = IDS) -> tuple[Dialect, str]:
    """Return the best dialect that the server accepts, and why a busy one refused the trial of one token.

    Raises ServerError if the server refuses every dialect.
    """
    arrival, rng = Arrival(0.0, 1, 1), random.Random(0)
    refusal = ""
    for number, dialect in enumerate(DIALECTS):
        body = dialect.body(model, dialect.prompt(arrival, rng, [str(ids[0])]), 1)
        trial = f"{TRIAL}-{number}"
        status, answer = await fetch(server, "POST", COMPLETIONS, body, within_s=120, request_id=trial)
        if status == 200:
            return dialect, ""
        refusal = f"{status}: {message_of(answer)}"
        if status not in (400, 422):
            break
    if status in (401, 403, 404, 405, 400, 422):
        raise ServerError(f"{server.name}{server.path}{COMPLETIONS} refuses a request: {refusal}")
    return DIALECTS[0], refusal


def message_of(answer: bytes) -> str:
    """Return an error's message on one line; another answer's beginning, "" for a stream without an error."""
    events = [line[5:] for line in answer.splitlines() if line.startswith(b"data:")]
    for text in events[::-1] or [answer]:
        try:
            return _shortened(str(json.loads(text)["error"]["message"]))
        except (ValueError, KeyError, TypeError):
            continue
    return "" if events else _shortened(answer[:SAID_CHARS].decode(errors="replace"))


def _shortened(text: str) -> str:
    """Return printable text on one line: the server's message goes to a terminal."""
    line = "".join(char if char.isprintable() else " " for char in text[: 2 * SAID_CHARS])
    line = " ".join(line.split())
    return line if len(line) <= SAID_CHARS else f"{line[:SAID_CHARS]}..."


async def models_of(server: ServerAddress) -> list[dict[str, Any]]:
    """Return the entries of /v1/models. Raises ServerError."""
    try:
        status, answer = await fetch(server, "GET", "/v1/models")
    except ServerError as problem:
        raise ServerError(
            f"no server answers at {server.name} ({problem}); start one with `instar serve`, or "
            "name its address with --url"
        ) from problem
    if status != 200:
        raise ServerError(f"{server.path}/v1/models: {status}: {message_of(answer)}{_hint(status)}")
    try:
        return [dict(one) for one in json.loads(answer)["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ServerError("/v1/models does not list models: is that an OpenAI-compatible server?") from error


def _hint(status: int) -> str:
    if status == 404:
        return "; is --url right? It is the address before /v1"
    return "; give a key with --api-key" if status in (401, 403) else ""
