"""Random morphs, good and bad, of one instance, as fast as they are answered, while clients decode."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Self

from bench.common.growth import Growth
from bench.common.service import Service
from bus.messages import PARTS
from bus.precisions import PRECISIONS
from tests.faults.morphs import NUM_LAYERS, Hand, assert_complete, assert_exact_while_full, stream
from tests.faults.storm import Job, Storm

STREAM_TOKENS = 200
PROMPTS = ("def read_lines(path):\n    ", "class Queue:\n", "import os\n\n\ndef main():\n")
# What the service may answer: states of morphs, and codes of refusals.
STATES = frozenset({"applied", "deferred", "failed", "conflict"})
REFUSALS = frozenset(
    {
        "invalid_value",
        "unknown_field",
        "morph_not_found",
        "morph_ended",
        "instance_not_found",
        "shape_changing",
    }
)

NONSENSE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("swap", {"precision": "int5", "count": 1}),
    ("swap", {"precision": "int4", "layers": [NUM_LAYERS]}),
    ("swap", {"precision": "int4", "layers": [-1]}),
    ("swap", {"precision": "int4", "count": 1, "layers": [1]}),
    ("swap", {"precision": "int4", "count": 1, "parts": ["norm"]}),
    ("swap", {"precision": "int4"}),
    ("swap", {"precison": "int4", "count": 1}),
    ("resize", {"blocks": 1}),
    ("resize", {"blocks": 1_000_000}),
    ("resize", {"blocks": "many"}),
)


@dataclass
class MorphStorm(Storm):
    """Hands, readers and an observer."""

    service: Service
    instance: str = "demo@w0"
    hands: int = 3
    readers: int = 4
    kinds: tuple[str, ...] = ("swap", "resize", "cancel", "nonsense")
    states: frozenset[str] = STATES
    refusals: frozenset[str] = REFUSALS
    answers: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    streams: int = 0
    memory: Growth = field(init=False)

    def __enter__(self) -> Self:
        self._hand = Hand(self.service, self.instance)
        seen = self._hand.look()
        # As many as full precision leaves room for; then as many as it never does.
        self._least, self._most = seen["min_blocks"], (seen["kv"]["blocks"] + 2, 3 * seen["kv"]["blocks"])
        self.oracles = {prompt: self._undisturbed(prompt) for prompt in PROMPTS}
        self.memory = Growth(
            [p for name, p in self.service.processes.items() if not name.startswith("redis")]
        )
        self._ids = list[str]()
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        for morph_id in self._ids:
            self._note(self._hand.ended(morph_id))

    def jobs(self) -> list[Job]:
        return [*[self._read] * self.readers, *[self._order] * self.hands, self._observe]

    def told(self) -> str:
        reasons = "".join(f"\n  {n:6} {reason}" for reason, n in self.reasons.most_common())
        return f"{self.streams} streams; {dict(self.answers)}{reasons}\n{self.memory.told()}"

    # ---------------------------------------------------------------- who takes part

    def _undisturbed(self, prompt: str) -> list[str]:
        one = stream(self.service, STREAM_TOKENS, prompt=prompt).finished()
        assert_complete(one, STREAM_TOKENS)
        return one.tokens

    def _read(self, rng: random.Random) -> None:
        prompt = rng.choice(PROMPTS)
        one = stream(self.service, STREAM_TOKENS, prompt=prompt).finished(90)
        assert_complete(one, STREAM_TOKENS)
        assert_exact_while_full(one, self.oracles[prompt])
        self.streams += 1

    def _observe(self, rng: random.Random) -> None:
        self._hand.pages()  # asserts that they are conserved
        self.memory.sample()
        self.pause(0.5)

    def _order(self, rng: random.Random) -> None:
        kind = rng.choice(self.kinds)
        answer: dict[str, Any] = getattr(self, f"_{kind}")(rng)
        if "error" in answer:
            assert answer["error"]["code"] in self.refusals, answer
            self.answers["refused"] += 1
        elif kind != "cancel":
            self._ids.append(answer["id"])
        if len(self._ids) > 6:  # so many at once
            self._note(self._hand.ended(self._ids.pop(0)))
        self.pause(rng.random() * 0.1)

    def _note(self, morph: dict[str, Any]) -> None:
        assert morph["state"] in self.states, morph
        self.answers[morph["state"]] += 1
        if morph["state"] != "applied":
            self.reasons[f"{morph['state']}: {re.sub(r'[0-9a-f]{12}|[0-9]+', '#', morph['reason'])}"] += 1

    # ---------------------------------------------------------------- what they order

    def _swap(self, rng: random.Random) -> dict[str, Any]:
        which: dict[str, Any] = {"count": rng.randint(1, NUM_LAYERS)}
        if rng.random() < 0.6:
            which = {"layers": rng.sample(range(NUM_LAYERS), rng.randint(1, NUM_LAYERS))}
        parts = rng.choice([[part] for part in PARTS] + [list(PARTS)] * 2)
        precision = rng.choice((*PRECISIONS, "full"))
        wait_s = rng.choice((0.0, 0.2, 1.0))
        return self._hand.swap(precision, wait=False, parts=parts, wait_s=wait_s, **which)

    def _resize(self, rng: random.Random) -> dict[str, Any]:
        blocks = rng.randint(self._least, self._most[rng.random() < 0.2])
        return self._hand.resize(blocks, wait=False, wait_s=rng.choice((0.0, 0.5)))

    def _cancel(self, rng: random.Random) -> dict[str, Any]:
        known = [*self._ids[-3:], "no-such-morph"]
        return self._hand.cancel(rng.choice(known))

    def _nonsense(self, rng: random.Random) -> dict[str, Any]:
        return self._hand.order(*rng.choice(NONSENSE))
