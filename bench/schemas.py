"""Answers of random tokens held to the schemas of a public suite, judged by another library.

    python -m bench.schemas DIR [--answers 2] [--only TEXT]

DIR: `tests` of the JSON Schema Test Suite (json-schema.org), which the source package of jsonschema
has as json/tests. Schemas of the drafts 4 to 2020-12 are taken once each, and say which draft they are of. A
schema is refused as the gateway refuses it, or compiled as a worker does for the demo model's tokens. Then
tokens are drawn from those that the mask allows, every one as likely as another; after FREE_TOKENS those that
close what is open come first. Each answer that ends is judged by jsonschema: it must be valid. An answer that
reaches MOST_TOKENS has no end.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any, Final

import jsonschema
import torch
from jsonschema.validators import validator_for

from bench.common.results import DEMO, bar, conclude, parser, say, say_bars
from bus.grammars import compiling_thread, problem
from bus.messages import Grammar
from bus.tokenizer_folder import load_tokenizer
from worker.grammars.compiler import GuidanceCompiler
from worker.grammars.matcher import GuidanceMatcher

DRAFTS: Final = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
FREE_TOKENS, MOST_TOKENS = 40, 400
COMPILE_S = 30.0
ENDS: Final = '"}],:'  # in this order
END_TOKEN: Final = 1  # of the demo model

Case = tuple[str, str, Any]  # draft, what it is about, schema


def cases(folder: Path) -> Iterator[Case]:
    """Yield the schemas of the suite, each once for a draft. Raises SystemExit where it is none."""
    seen = set[str]()
    for draft, name in DRAFTS.items():
        files = sorted((folder / draft).glob("*.json"))
        if not files:
            sys.exit(f"{folder}/{draft} has no files; name the folder `tests` of the JSON Schema Test Suite")
        for file in files:
            for group in json.loads(file.read_text()):
                schema = group["schema"]
                if isinstance(schema, dict):
                    schema = {"$schema": name, **schema}
                text = json.dumps([draft, schema], sort_keys=True)
                if text not in seen:
                    seen.add(text)
                    yield draft, f"{draft}/{file.stem}: {group['description']}", schema


class Answers:
    """Draws answers from the masks of the demo model's tokens."""

    def __init__(self) -> None:
        self._tokenizer = load_tokenizer(DEMO)
        size = self._tokenizer.get_vocab_size()
        self._texts = [self._tokenizer.decode([i], skip_special_tokens=False) for i in range(size)]
        self._closing = [self._tokenizer.token_to_id(text) for text in ENDS]
        self._compiler = GuidanceCompiler(DEMO, size, torch.device("cpu"))
        self._woken: Queue[None] = Queue()
        self._compiler.wake = lambda: self._woken.put(None)

    def matcher(self, grammar: Grammar) -> GuidanceMatcher | str:
        """Return the place before an answer, or why there is none."""
        self._compiler.ask(0, grammar, [])
        self._woken.get(timeout=COMPILE_S)
        ((_, made),) = self._compiler.take()
        assert isinstance(made, GuidanceMatcher | str)
        return made

    def draw(self, matcher: GuidanceMatcher, rng: random.Random) -> str | None:
        """Return an answer; None if it has no end."""
        tokens: list[int] = []
        while len(tokens) < MOST_TOKENS and not matcher.is_complete:
            allowed = (~self._compiler.masks.forbidden([matcher])[0]).nonzero().flatten().tolist()
            if not allowed:
                return None
            token = self._choose(allowed, rng, is_free=len(tokens) < FREE_TOKENS)
            if why := matcher.accept([token]):
                raise RuntimeError(f"the mask allowed token {token}, and the grammar not: {why}")
            if token == END_TOKEN:
                return self._tokenizer.decode(tokens)
            tokens.append(token)
        return self._tokenizer.decode(tokens) if matcher.is_complete else None

    def _choose(self, allowed: list[int], rng: random.Random, *, is_free: bool) -> int:
        if is_free:
            return rng.choice(allowed)
        there = set(allowed)
        closing = (token for token in (END_TOKEN, *self._closing) if token in there)
        return next(closing, None) or rng.choice(allowed)

    def close(self) -> None:
        self._compiler.close()


def fault_of(answer: str, draft: str, schema: Any) -> str | None:
    """Return why jsonschema finds an answer invalid; None if it is valid. Raises what it cannot judge."""
    try:
        value = json.loads(answer)
    except ValueError as error:
        return f"no JSON: {error}"
    judge = validator_for({"$schema": DRAFTS[draft]})(schema)
    return next((error.message[:200] for error in judge.iter_errors(value)), None)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("suite", type=Path, metavar="DIR")
    options.add_argument("--answers", type=int, default=2, help="for each schema [2]")
    options.add_argument("--only", default="", help="schemas whose name has this text")
    asked, began = options.parse_args(), time.perf_counter()
    found, refused, faults = Counter[str](), Counter[str](), list[dict[str, str]]()
    answers, slowest_s = Answers(), 0.0
    thread = compiling_thread("schemas")
    chosen = [one for one in cases(asked.suite) if asked.only in one[1]]
    for number, (draft, what, schema) in enumerate(chosen, 1):
        found["schemas"] += 1
        grammar = Grammar(kind="json_schema", text=json.dumps(schema), end_token_ids=(END_TOKEN,))
        before = time.perf_counter()
        why = thread.submit(problem, grammar).result()
        made = why or answers.matcher(grammar)
        slowest_s = max(slowest_s, time.perf_counter() - before)
        if isinstance(made, str):
            found["refused"] += 1
            refused[made.split(":")[0][:80]] += 1
            continue
        found["compiled"] += 1
        rng = random.Random(number)
        for _ in range(asked.answers):
            start = answers.matcher(grammar)
            assert not isinstance(start, str), start
            answer = answers.draw(start, rng)
            if answer is None:
                found["without an end"] += 1
                continue
            try:
                fault = fault_of(answer, draft, schema)
            except (jsonschema.exceptions._WrappedReferencingError, RecursionError) as error:
                found["not judged"] += 1
                say(f"{what}: jsonschema cannot judge it: {type(error).__name__}")
                continue
            found["valid" if fault is None else "invalid"] += 1
            if fault:
                faults.append({"schema": what, "answer": answer[:200], "fault": fault})
                say(f"{what}: {fault}: {answer[:100]}")
        if number % 100 == 0:
            say(f"{number} of {len(chosen)} schemas: " + ", ".join(f"{n} {k}" for k, n in found.items()))
    answers.close()
    thread.shutdown()
    for text, count in refused.most_common():
        say(f"refused {count}: {text}")
    bars = {
        "schemas": bar("1000", found["schemas"], found["schemas"] >= 1000),
        "answers that are not valid": bar("0", found["invalid"], not found["invalid"]),
    }
    say_bars(bars)
    result = {
        "bench": "schemas",
        "counts": dict(found),
        "slowest_compile_s": round(slowest_s, 3),
        "took_s": round(time.perf_counter() - began, 1),
    }
    return conclude(result, is_kept=not asked.only, bars=bars, refused=dict(refused), faults=faults)


if __name__ == "__main__":
    sys.exit(main())
