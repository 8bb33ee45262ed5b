"""One instance for the tests of the policy, calm unless asked otherwise, and who leads it through time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bus.messages import MorphOutcome, MorphReport
from bus.policy import Policy
from controller.morphing.levers import MorphDecision
from controller.morphing.policy import Freshness, decide
from controller.morphing.track import State, observe, sent
from controller.morphing.view import View

FRESHNESS = Freshness(stale_s=5.0, gap_s=7.0)
WINDOW_S = 0.5

CALM = View(
    instance="m@w0",
    worker="w0",
    epoch=1,
    kv_blocks=1000,
    kv_used=600.0,
    kv_usage=0.6,
    blocks_free=400,
    num_layers=32,
    variants=("full", "int8", "int4", "int3"),
    min_blocks=100,
    pages_free=100,
    pages_per_block=2.0,
    layer_pages={"full": 200, "int8": 100, "int4": 60, "int3": 50},
)
BURST = replace(CALM, kv_used=950.0, kv_usage=0.95, blocks_free=50)
EASE = replace(CALM, kv_used=100.0, kv_usage=0.1, blocks_free=900, layers_below=8)


class Hand:
    """Shows the policy one window after another, `WINDOW_S` apart, and answers its morphs."""

    def __init__(self, **policy: Any) -> None:
        self.policy = Policy(**policy)
        self.state = State()
        self.at_s = 1000.0
        self.decisions: list[tuple[float, MorphDecision]] = []

    def see(self, *views: View, windows: int = 1) -> MorphDecision | None:
        """The last decision of these windows."""
        decided = None
        for _ in range(windows):
            self.at_s += WINDOW_S
            self.state, decisions = decide(self.state, views, self.policy, self.at_s, FRESHNESS)
            for decided in decisions:
                self.decisions.append((self.at_s, decided))
                self.state = sent(
                    self.state, decided.instance, decided.lever, f"morph-{len(self.decisions)}", self.at_s
                )
        return decided

    def answer(self, outcome: MorphOutcome, morph_id: str = "", **changes: Any) -> None:
        """A report on the last decision, or on another morph."""
        report = MorphReport(
            id=morph_id or f"morph-{len(self.decisions)}",
            kind="swap",
            target="m@w0",
            worker="w0",
            epoch=1,
            state=outcome,
            reason="a test wants it",
            started_ms=0,
        )
        self.state = observe(self.state, replace(report, **changes), self.at_s)

    def pass_s(self, seconds: float) -> None:
        """Time without a window."""
        self.at_s += seconds
