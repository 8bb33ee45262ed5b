"""The options that the controller's planner weighs, with gain and price, and the plan that it takes.

Also messages: the answer to `instar plan --what-if`, and a part of the events of what was decided. Standard
library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final, Literal

from bus.precisions import Precision

LeverName = Literal["queue", "resize", "kv", "swap", "move", "merge", "part", "more", "fewer"]

CostBasis = Literal["measured", "assumed"]

NEVER_S: Final = 3600.0  # a wait that no lever ends counts as so long; the longest that a policy can state
WEIGHED: Final = "weighed, in request-seconds"  # begins what the reason of a decision says of its options


@dataclass(frozen=True, slots=True, kw_only=True)
class LeverOption:
    """One lever with its gain and its price; `refusal` says why it cannot be used now.

    The price is in request-seconds: what requests stand still or run slower, each counted, and the loss in
    terms of the objective (docs/morphs.md, "What is weighed").
    """

    lever: LeverName
    targets: list[str]  # instances; of a move from, to
    tp: int = 0  # degree afterwards, of a merge or a part
    layers: int = 0  # that a swap takes to `precision`
    precision: Precision = "full"
    blocks: int = 0  # of KV, gained
    tokens_per_s: float = 0.0  # gained; lost below 0
    loss: float = 0.0  # share of the perplexity added
    stalled_s: float = 0.0  # that the engine stands still
    nbytes: int = 0  # copied or exchanged
    duration_s: float = 0.0  # until the gain is there
    price_s: float = 0.0
    cost_s: float = 0.0  # the price and the waits that are left, if this is taken alone
    basis: CostBasis = "assumed"  # of stall and duration
    refusal: str = ""
    is_taken: bool = False

    @property
    def words(self) -> str:
        """The option in a few words, as in `merge m@w0, m@w1`."""
        if self.refusal:
            return f"{self.lever}: not possible, {self.refusal}"
        between = " to " if self.lever == "move" else ", "
        words = f"{self.lever} {between.join(self.targets)}".rstrip()
        if self.lever == "kv":
            return f"{words}: KV cache to {self.precision}"
        if self.layers:
            return f"{words}: {self.layers} layers to {self.precision}"
        return f"{words} at tp {self.tp}" if self.tp else words


@dataclass(frozen=True, slots=True, kw_only=True)
class LeverPlan:
    """The options for one need of a model, with the cheapest set that meets the objective taken."""

    model: str
    subject: str  # the instance under pressure, or the one that takes the long request
    need: str
    options: list[LeverOption] = field(default_factory=list)
    cost_s: float = 0.0  # of the set that is taken
    wait_s: float = 0.0  # predicted, with what is taken
    meets: bool = False  # the objective
    reason: str = ""

    @property
    def taken(self) -> list[LeverOption]:
        return [one for one in self.options if one.is_taken]

    def in_brief(self) -> LeverPlan:
        """Return the plan for an event: what is taken and, of each lever, the cheapest other option.

        Where a lever has no option that is possible, the first refusal stays. The reason is the event's.
        """
        others: dict[LeverName, LeverOption] = {}
        for one in self.options:
            known = others.get(one.lever)
            if not one.is_taken and (known is None or _rank(one) < _rank(known)):
                others[one.lever] = one
        kept = [one for one in self.options if one.is_taken or one is others.get(one.lever)]
        return replace(self, options=kept, reason="")


def _rank(option: LeverOption) -> tuple[bool, float]:
    return bool(option.refusal), option.cost_s
