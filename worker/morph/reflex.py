"""The reflex of an instance: when layers lose bits for KV blocks, how many, and when they go back. Pure.

The controller grants an `Envelope`. At every step boundary the worker asks `judge`, and for the morph that is
due `relieve` or `restore`.

Relief is due when steps in a row (MorphServe, section 6) show that blocks are missing. It is sized by what
is missing, and waits for no cool-down. A return waits for ten times what the last relief took, and longer
each time that layers went back too early.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from bus.messages import Number
from bus.morphs import Cause
from bus.policy import Envelope, Policy
from bus.precisions import LOWEST, PRECISIONS, Precision, is_below
from worker.morph.losses import Choice, Halves, Losses, MayTouch, Pages, choose_relief, choose_return
from worker.morph.plan import Half

Lever = Literal["resize", "swap_down", "swap_up"]

REGRET_S: Final = 30.0  # layers that are swapped again within this time went back too early
FIRST_PAUSE_S, FIRST_REGRET_S, LONGEST_PAUSE_S = 0.1, 1.0, 8.0  # after a refusal, a regret; doubled each time
URGENT: Final = 0.25  # share of the objective; after this wait morphs take all of the time
HOLD_TIMES: Final = 10  # a return waits for so many times the duration of the last relief
PREEMPTED_S: Final = 1.0  # a preemption counts as pressure for so long
RETURN_MARGIN: Final = 4  # this part of the dead zone stays free after a return, or noise would undo it
FORECAST_SHARE: Final = 0.25  # share of the loss budget that a forecast may spend
RESERVE: Final[float] = 1e-9  # part of a budget kept for rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load of an instance at a step boundary: blocks of KV, sequences, seconds."""

    at_s: float
    kv_blocks: int
    kv_used: int
    kv_needed: int  # at the peak of what runs and waits, as far as it can run at once
    running: int = 0
    waiting: int = 0
    wanting_s: float = 0.0  # how long the oldest sequence that misses blocks has been here
    residence_s: float = 0.0  # mean time that a sequence runs; 0: none has ended yet
    preemptions: int = 0  # since the start
    floor_refused: Precision = LOWEST  # highest floor of recently refused requests
    kv_expected: int = 0  # blocks needed by the controller's forecast; 0: no forecast

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.waiting

    @property
    def kv_usage(self) -> float:
        return self.kv_used / self.kv_blocks if self.kv_blocks else 1.0

    @property
    def predicted_wait_s(self) -> float:
        """The wait for blocks of a request that comes now.

        Blocks come free at kv_used / residence_s (Little's law). Without a history the wait so far counts.
        """
        missing = self.kv_needed - self.kv_blocks
        if missing <= 0 or not self.waiting:
            return 0.0
        return self.wanting_s + missing * self.residence_s / max(1, self.kv_used)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The pages and layers of an instance; pages are those of one worker."""

    halves: Halves
    losses: Losses
    pages: Pages
    order: Sequence[int]  # order of layers: of equal losses the first goes first
    pages_spare: int = 0  # free beyond the reserve for swaps
    pages_per_block: float = 0.0
    min_blocks: int = 0
    floor: Precision = LOWEST  # the most bits that a request insists on, here or refused lately

    @property
    def num_layers(self) -> int:
        return len(self.order)

    def blocks_of(self, pages: float) -> int:
        """Return the KV blocks that so many free pages make; the cache grows by a page in every layer."""
        return int(self.blocks_in(pages // self.num_layers * self.num_layers))

    def blocks_in(self, pages: float) -> float:
        """Return the KV blocks in so many pages; 0.0 if unknown."""
        return max(0.0, pages) / self.pages_per_block if self.pages_per_block else 0.0

    def pages_of(self, blocks: float) -> int:
        """Return the pages that so many blocks take, whole ones in every layer."""
        return math.ceil(max(0.0, blocks) * self.pages_per_block / self.num_layers) * self.num_layers


@dataclass(frozen=True, slots=True)
class LeverPause:
    """A pause that doubles with every time in a row."""

    times: int = 0
    until_s: float = float("-inf")

    def again(self, at_s: float, first_s: float = FIRST_PAUSE_S) -> LeverPause:
        """Return the pause after one more time; a long quiet time ends the row."""
        times = self.times + 1 if at_s < self.until_s + 2 * REGRET_S else 1
        return LeverPause(times, at_s + min(LONGEST_PAUSE_S, first_s * 2 ** min(times - 1, 16)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReflexState:
    """The memory of the reflex about an instance.

    `pressure`, `ease`: steps in a row. `pauses`: by lever, after refusals and regrets. `is_by_hand`: layers
    were swapped by hand, and nothing has run since.
    """

    pressure: int = 0
    ease: int = 0
    preemptions: int = 0
    preempted_s: float = float("-inf")
    relieved_s: float = float("-inf")  # the last relief was decided, or ended
    returned_s: float = float("-inf")  # the last return was decided
    relief_took_s: float = 0.0
    is_by_hand: bool = False
    pauses: Mapping[Lever, LeverPause] = field(default_factory=dict)

    def is_paused(self, lever: Lever, at_s: float) -> bool:
        """Return True while `lever` pauses."""
        return lever in self.pauses and at_s < self.pauses[lever].until_s

    def return_due_s(self, policy: Policy) -> float:
        """Return the time before which no layer goes back."""
        hold_s = min(policy.cooldown_s, HOLD_TIMES * self.relief_took_s)
        pause = self.pauses.get("swap_up", LeverPause())
        return max(self.relieved_s + hold_s, pause.until_s)

    def paused(self, lever: Lever, at_s: float, first_s: float = FIRST_PAUSE_S) -> ReflexState:
        """Lengthen the pause of `lever`."""
        pause = self.pauses.get(lever, LeverPause()).again(at_s, first_s)
        return replace(self, pauses={**self.pauses, lever: pause})


@dataclass(frozen=True, slots=True)
class Need:
    """Why a morph is due; `words` are for people."""

    goal: Literal["relief", "return"]
    cause: Cause
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One morph, its reason, and the numbers behind it. blocks: of a resize, the new total."""

    lever: Lever
    cause: Cause
    reason: str
    numbers: Mapping[str, Number]
    halves: Mapping[Half, Precision] = field(default_factory=dict)
    blocks: int = 0


# ----------------------------------------------------------------------------- is a morph due?


def judge(state: ReflexState, load: Load, envelope: Envelope) -> tuple[ReflexState, list[Need]]:
    """Count one step boundary. Returns what is due; the first that has a morph is done."""
    policy, at_s = envelope.policy, load.at_s
    state = replace(state, is_by_hand=state.is_by_hand and load.is_idle)
    if policy.mode == "manual":
        return replace(state, pressure=0, ease=0, preemptions=load.preemptions), []
    if load.preemptions > state.preemptions:
        state = replace(state, preempted_s=at_s)
    pressure, ease = _pressure(state, load, policy), _ease(state, load, policy)
    state = replace(
        state,
        preemptions=load.preemptions,
        pressure=state.pressure + 1 if pressure else 0,
        ease=state.ease + 1 if ease else 0,
    )
    needs = []
    if load.floor_refused != LOWEST and not state.is_paused("swap_up", at_s):
        words = f"a request waits that takes no layer below {load.floor_refused}"
        needs.append(Need("return", "precision_floor", words))
    if pressure and state.pressure >= policy.windows:
        needs.append(Need("relief", *pressure))
    is_calm = load.is_idle or state.ease >= policy.windows
    if ease and is_calm and not state.is_by_hand and at_s >= state.return_due_s(policy):
        needs.append(Need("return", *ease))
    return state, needs


def _pressure(state: ReflexState, load: Load, policy: Policy) -> tuple[Cause, str] | None:
    wait_s = load.predicted_wait_s
    if wait_s > policy.queue_delay_high_s:
        return "queue_delay", (
            f"{load.waiting} requests wait, the next for {wait_s:.2f} s by prediction, above "
            f"{policy.queue_delay_high_s:g} s: {load.kv_needed} KV blocks are needed of {load.kv_blocks}"
        )
    if load.kv_usage > policy.kv_usage_high:
        return "kv_usage", f"KV use {load.kv_usage:.2f} is above {policy.kv_usage_high:g}"
    if load.at_s < state.preempted_s + PREEMPTED_S and load.kv_usage >= policy.kv_usage_low:
        return "preemptions", "requests lose their blocks"
    if load.kv_expected > policy.kv_usage_high * load.kv_blocks:
        return "forecast", f"{load.kv_expected} KV blocks are expected to be needed of {load.kv_blocks}"
    return None


def _ease(state: ReflexState, load: Load, policy: Policy) -> tuple[Cause, str] | None:
    if load.kv_expected >= policy.kv_usage_low * load.kv_blocks:
        return None
    if load.is_idle:
        return "ease", "nothing runs"
    is_calm = load.predicted_wait_s < policy.queue_delay_low_s and not load.wanting_s
    if is_calm and load.kv_usage < policy.kv_usage_low and load.at_s >= state.preempted_s + PREEMPTED_S:
        return (
            "ease",
            f"KV use {load.kv_usage:.2f} is below {policy.kv_usage_low:g} and nothing waits for blocks",
        )
    return None


def is_stale(envelope: Envelope, granted_s: float, at_s: float) -> bool:
    """Return True if an envelope that came at `granted_s` allows no further loss."""
    return at_s >= granted_s + envelope.valid_s


def is_at_rest(precision: Precision, resting: Precision) -> bool:
    """Return True unless `precision` has fewer bits than at rest."""
    return not is_below(precision, resting)


def urgency(load: Load, policy: Policy) -> float:
    """Return the share of the time (0..1) that morphs may take: all of it at URGENT of the TTFT objective."""
    return min(1.0, max(load.predicted_wait_s, load.wanting_s) / (policy.ttft_slo_s * URGENT))


# ----------------------------------------------------------------------------- which morph?


def relieve(
    state: ReflexState, load: Load, shape: Shape, envelope: Envelope, need: Need, *, may_lose: bool
) -> Decision | None:
    """Return the cheapest morph that brings blocks: free pages first, then halves by loss for each page.

    may_lose: False under a stale envelope.
    """
    policy = envelope.policy
    gained = shape.blocks_of(shape.pages_spare)
    if gained > 0 and not state.is_paused("resize", load.at_s):
        blocks = load.kv_blocks + gained
        reason = f"{shape.pages_spare} pages are free, for {gained} more KV blocks"
        spare: dict[str, Number] = {"blocks_after": blocks, "pages_spare": shape.pages_spare}
        return _decide("resize", need, reason, state, load, envelope, spare, blocks=blocks)
    if not may_lose or state.is_paused("swap_down", load.at_s):
        return None
    needed = max(load.kv_needed, load.kv_used, load.kv_expected)
    missing = max(1, math.ceil(needed / policy.kv_usage_high) - load.kv_blocks)
    lost = shape.losses.total(shape.halves, envelope.resting)
    budget = policy.most_loss * (FORECAST_SHARE if need.cause == "forecast" else 1.0)
    choice = choose_relief(
        shape.halves,
        shape.losses,
        shape.pages,
        allowed=[
            one
            for one in shape.losses.precisions
            if one in envelope.precisions and not is_below(one, shape.floor)
        ],
        order=shape.order,
        wanted_pages=shape.pages_of(missing),
        budget=budget - lost + RESERVE,
        may_touch=_within(policy.max_layers, envelope.resting),
    )
    if not choice.halves:
        return None
    blocks = load.kv_blocks + shape.blocks_of(choice.pages)
    reason = (
        f"{_count(choice)} for about {blocks - load.kv_blocks} KV blocks, of {missing} that are missing; the "
        f"loss by the profile is {lost + choice.loss:.2%} of at most {budget:.2%}"
    )
    numbers: dict[str, Number] = {
        "halves": len(choice.halves),
        "blocks_missing": missing,
        "blocks_after": blocks,
        "loss": round(lost + choice.loss, 6),
        "loss_budget": budget,
    }
    return _decide("swap_down", need, reason, state, load, envelope, numbers, halves=choice.halves)


def restore(state: ReflexState, load: Load, shape: Shape, envelope: Envelope, need: Need) -> Decision | None:
    """Return the swap that gives layers back as far as the KV use stays low enough; None if none can go."""
    policy, is_for_floor = envelope.policy, need.cause == "precision_floor"
    goal = load.floor_refused if is_for_floor else envelope.resting
    halves = {half: one for half, one in shape.halves.items() if is_below(one, goal)}
    if not halves:
        return None
    dead_zone = policy.kv_usage_high - policy.kv_usage_low
    usage_after = policy.kv_usage_high - dead_zone / RETURN_MARGIN
    # A request that is refused a floor waits for all halves, whatever then waits for blocks.
    needed = load.kv_used if is_for_floor else max(load.kv_used, load.kv_needed)
    kept = max(shape.min_blocks, math.ceil(needed / (1.0 if is_for_floor else usage_after)))
    spare = max(0.0, load.kv_blocks - kept) * shape.pages_per_block
    choice = choose_return(
        halves,
        shape.losses,
        shape.pages,
        goal=goal,
        order=shape.order,
        spare_pages=spare // shape.num_layers * shape.num_layers + shape.pages_spare,
    )
    if not choice.halves:
        return None
    blocks = load.kv_blocks - math.ceil(shape.blocks_in(-choice.pages - shape.pages_spare))
    lost = shape.losses.total(shape.halves, envelope.resting) + choice.loss
    reason = (
        f"{_count(choice)}, which leaves about {blocks} KV blocks, of which {needed} are needed; the loss by "
        f"the profile falls to {max(0.0, lost):.2%}"
    )
    numbers: dict[str, Number] = {
        "halves": len(choice.halves),
        "blocks_after": blocks,
        "loss": round(max(0.0, lost), 6),
    }
    return _decide("swap_up", need, reason, state, load, envelope, numbers, halves=choice.halves)


# ----------------------------------------------------------------------------- what became of it


def decided(state: ReflexState, lever: Lever, at_s: float) -> ReflexState:
    """Note that a morph was ordered. Layers that are swapped soon after they went back did so too early."""
    state = replace(state, pressure=0, ease=0)
    if lever == "swap_up":
        return replace(state, returned_s=at_s)
    if lever == "swap_down" and at_s < state.returned_s + REGRET_S:
        state = replace(state, returned_s=float("-inf")).paused("swap_up", at_s, FIRST_REGRET_S)
    return replace(state, relieved_s=at_s)


def ended(state: ReflexState, lever: Lever, is_applied: bool, seconds: float, at_s: float) -> ReflexState:
    """Note the end of an ordered morph, `seconds` after it began."""
    state = replace(state, pressure=0, ease=0)
    if lever == "swap_down":
        state = replace(state, relieved_s=at_s, relief_took_s=seconds)
    # An applied resize took what it could: the same pages would be asked for again at once.
    if not is_applied or lever == "resize":
        return state.paused(lever, at_s)
    return state


def ordered(state: ReflexState) -> ReflexState:
    """Note that layers were swapped by hand: that stands until something runs."""
    return replace(state, pressure=0, ease=0, is_by_hand=True)


def _within(max_layers: int, resting: Precision) -> MayTouch:
    """Return a test that keeps the number of layers below `resting` at `max_layers`; 0: any number."""

    def may_touch(halves: Halves, half: Half) -> bool:
        below = {each.layer for each, precision in halves.items() if is_below(precision, resting)}
        return half.layer in below or len(below) < max_layers

    return may_touch if max_layers else lambda halves, half: True


def _count(choice: Choice) -> str:
    """Return the choice in words, as in `5 halves to int8, 1 to int4`."""
    counts = Counter(choice.halves.values())
    parts = [f"{counts[one]} halves to {one}" for one in PRECISIONS if counts[one]]
    return ", ".join(parts)


def _decide(
    lever: Lever,
    need: Need,
    reason: str,
    state: ReflexState,
    load: Load,
    envelope: Envelope,
    numbers: Mapping[str, Number],
    **what: Any,
) -> Decision:
    seen: dict[str, Number] = {
        "kv_usage": round(load.kv_usage, 4),
        "kv_blocks": load.kv_blocks,
        "kv_used": load.kv_used,
        "kv_needed": load.kv_needed,
        "running": load.running,
        "waiting": load.waiting,
        "waited_s": round(load.wanting_s, 4),
        "predicted_wait_s": round(load.predicted_wait_s, 4),
        "steps": max(state.pressure, state.ease),
        "policy_revision": envelope.policy.revision,
    }
    return Decision(
        lever=lever, cause=need.cause, reason=f"{need.words}: {reason}", numbers=seen | dict(numbers), **what
    )
