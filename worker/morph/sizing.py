"""The size of a morph that is due: free pages, or the halves that lose least for each page. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bus.messages import Number
from bus.morphs import Cause
from bus.policy import Envelope, Policy
from bus.precisions import LOWEST, PRECISIONS, KVPrecision, Precision, is_below, lowest
from bus.shapes import LOSS_ROUNDING, loss_of_kv
from worker.morph.losses import Choice, Halves, Losses, MayTouch, Pages, choose_relief, choose_return
from worker.morph.plan import Half
from worker.morph.pricing import Waits, is_predictable, predict_waits
from worker.morph.reflex import DOWN, LATE, Lever, Load, Need, ReflexState, Withheld

RETURN_MARGIN: Final = 4  # this part of the dead zone stays free after a return, or noise would undo it
FORECAST_SHARE: Final = 0.25  # of the budget of loss may be taken for what is only expected


@dataclass(frozen=True, slots=True, kw_only=True)
class KVState:
    """The KV cache of an instance: its form, and what it would be in others.

    form: None on the way between two. rest: what it goes back to. blocks: that its pages hold, by form;
    empty: it cannot be converted. loss: the share of the perplexity that 8 bits cost; None: not measured, and
    so not taken.
    """

    form: KVPrecision | None = "full"
    rest: KVPrecision = "full"
    blocks: Mapping[KVPrecision, int] = field(default_factory=dict)
    loss: float | None = None

    @property
    def lost(self) -> float:
        """The loss beyond that at rest."""
        return loss_of_kv(self.form, self.rest, self.loss)

    @property
    def added(self) -> float:
        """The loss that 8 bits would add; a cache on the way between two forms has taken it already."""
        return 0.0 if self.lost else self.loss or 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The pages and layers of an instance; pages are those of one worker."""

    halves: Halves
    losses: Losses
    pages: Pages
    order: Sequence[int]  # order of layers: of equal losses the first goes first
    kv: KVState = field(default_factory=KVState)
    pages_spare: int = 0  # free beyond the reserve for swaps
    pages_per_block: float = 0.0
    min_blocks: int = 0
    floor: Precision = LOWEST  # the most bits that a request insists on, here or refused lately

    @property
    def num_layers(self) -> int:
        return len(self.order)

    def lost(self, envelope: Envelope) -> float:
        """Return the predicted loss of the whole shape beyond that at rest."""
        return self.losses.total(self.halves, envelope.resting) + self.kv.lost

    def blocks_of(self, pages: float) -> int:
        """Return the KV blocks that so many free pages make; the cache grows by a page in every layer."""
        return int(self.blocks_in(pages // self.num_layers * self.num_layers))

    def blocks_in(self, pages: float) -> float:
        """Return the KV blocks in so many pages; 0.0 if unknown."""
        return max(0.0, pages) / self.pages_per_block if self.pages_per_block else 0.0

    def pages_of(self, blocks: float) -> int:
        """Return the pages that so many blocks take, whole ones in every layer."""
        return math.ceil(max(0.0, blocks) * self.pages_per_block / self.num_layers) * self.num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One morph, its reason, and the numbers behind it.

    blocks: of a resize, the new total. kv: what the KV cache is to be held in.
    """

    lever: Lever
    cause: Cause
    reason: str
    numbers: Mapping[str, Number]
    halves: Mapping[Half, Precision] = field(default_factory=dict)
    blocks: int = 0
    kv: KVPrecision | None = None


def relieve(
    state: ReflexState, load: Load, shape: Shape, envelope: Envelope, need: Need, *, may_lose: bool
) -> Decision | Withheld | None:
    """Return the cheapest morph that brings blocks: free pages first, then what loses least for each block.

    That is the KV cache as a whole, or halves by loss for each page. Halves are withheld where requests would
    wait for longer with them than without.

    may_lose: False under a stale envelope.
    """
    policy = envelope.policy
    gained = shape.blocks_of(shape.pages_spare)
    if gained > 0 and not state.is_paused("resize", load.at_s):
        blocks = load.kv_blocks + gained
        reason = f"{shape.pages_spare} pages are free, for {gained} more KV blocks"
        spare: dict[str, Number] = {"blocks_after": blocks, "pages_spare": shape.pages_spare}
        return _decide("resize", need, reason, state, load, envelope, spare, blocks=blocks)
    if not may_lose:
        return None
    coming = load.kv_coming(state.ahead_s)
    needed = max(max(load.kv_needed, load.kv_used) + coming, load.kv_expected)
    missing = max(1, math.ceil(needed / policy.kv_usage_high) - load.kv_blocks)
    lost = shape.lost(envelope)
    budget = policy.most_loss * (FORECAST_SHARE if need.cause == "forecast" else 1.0)
    left = budget - lost + LOSS_ROUNDING
    choice, waits = Choice({}, 0, 0.0), None
    if not state.is_paused("swap_down", load.at_s):
        choice, waits = _choose(state, load, shape, envelope, need, missing, left)
    gained = shape.blocks_of(choice.pages) if choice.halves else 0
    converted = 0 if state.is_paused("kv_down", load.at_s) else _blocks_by_kv(load, shape, envelope, left)
    dear = _too_dear(choice, waits, policy)
    if not converted and (dear or not choice.halves):
        return dear
    lever: Lever = "swap_down"
    if converted and (
        dear or _price(shape.kv.added, converted, missing) < _price(choice.loss, gained, missing)
    ):
        lever = "kv_down"
    is_kv = lever == "kv_down"
    loss = lost + (shape.kv.added if is_kv else choice.loss)
    blocks = load.kv_blocks + (converted if is_kv else gained)
    what = "the KV cache to int8" if is_kv else _count(choice)
    reason = (
        f"{what} for about {blocks - load.kv_blocks} KV blocks, of {missing} that are missing"
        f"{f' ({coming} of them for what comes next)' if coming else ''}; the loss by the profile is "
        f"{loss:.2%} of at most {budget:.2%}"
    )
    numbers: dict[str, Number] = {
        "halves": 0 if is_kv else len(choice.halves),
        "blocks_missing": missing,
        "blocks_coming": coming,
        "blocks_after": blocks,
        "loss": round(loss, 6),
        "loss_budget": budget,
    }
    if is_kv:
        return _decide(lever, need, reason, state, load, envelope, numbers, kv="int8")
    if waits:
        reason += f"; requests wait for {waits.with_s:.2f} s and not for {waits.without_s:.2f} s"
        numbers |= {"wait_with_s": round(waits.with_s, 4), "wait_without_s": round(waits.without_s, 4)}
    return _decide(lever, need, reason, state, load, envelope, numbers, halves=choice.halves)


def _choose(
    state: ReflexState,
    load: Load,
    shape: Shape,
    envelope: Envelope,
    need: Need,
    missing: int,
    budget: float,
) -> tuple[Choice, Waits | None]:
    """Return the halves that lose least for each page, and how long requests wait without and with them.

    Where that is predicted, precisions are left out if requests then wait less: fewer bits may mean longer
    steps. None: it is not, or nothing can be swapped. Of a worker alone it is not, since most of its queue is
    at the gateways, which send no more than its cache holds.
    """
    allowed = _allowed(shape, envelope)

    def down_to(precisions: Sequence[Precision]) -> Choice:
        return choose_relief(
            shape.halves,
            shape.losses,
            shape.pages,
            allowed=precisions,
            order=shape.order,
            wanted_pages=shape.pages_of(missing),
            budget=budget,
            may_touch=_within(envelope.policy.max_layers, envelope.resting),
        )

    if need.cause != "queue_delay" or load.members == 1 or not is_predictable(load):
        return down_to(allowed), None
    found = [one for last in range(len(allowed)) if (one := down_to(allowed[: last + 1])).halves]
    priced = [
        (
            one,
            predict_waits(
                load,
                missing=missing,
                blocks=shape.blocks_of(one.pages),
                before=shape.halves,
                after={**shape.halves, **one.halves},
                slowdowns=envelope.slowdowns,
                work_s=state.half_work_s * len(one.halves),
            ),
        )
        for one in found
    ]
    if not priced:
        return Choice({}, 0, 0.0), None
    return min(priced, key=lambda one: (round(one[1].with_s, 6), one[0].loss))


def _too_dear(choice: Choice, waits: Waits | None, policy: Policy) -> Withheld | None:
    """Return why halves are not swapped: requests would wait for longer. None if they would not.

    Nor where the objective is in danger: in a long overload the predictions say too little of what comes.
    """
    if waits is None or waits.is_shorter or waits.without_s > LATE * policy.ttft_slo_s:
        return None
    return Withheld(
        "price",
        f"with {_count(choice)} the requests that wait would have their first tokens after "
        f"{waits.with_s:.2f} s, and without after {waits.without_s:.2f} s",
    )


def _blocks_by_kv(load: Load, shape: Shape, envelope: Envelope, budget: float) -> int:
    """Return the blocks that a KV cache in 8 bits brings; 0 where it may not lose them, or is in them."""
    kv = shape.kv
    may = "int8" in envelope.kv_precisions and not is_below("int8", shape.floor)
    if not may or kv.form == "int8" or kv.loss is None or kv.added > budget:
        return 0
    return max(0, kv.blocks.get("int8", 0) - load.kv_blocks)


def _price(loss: float, blocks: int, missing: int) -> float:
    """Return the loss for each block of use."""
    return loss / min(blocks, missing) if blocks else math.inf


def why_nothing(
    state: ReflexState, load: Load, shape: Shape, envelope: Envelope, *, may_lose: bool
) -> Withheld | None:
    """Return why `relieve` found no morph; None where it only pauses after a refusal."""
    policy, allowed = envelope.policy, _allowed(shape, envelope)
    if any(state.is_paused(lever, load.at_s) for lever in DOWN):
        return None
    if not may_lose:
        return Withheld("stale", f"the controller has been silent for {envelope.valid_s:g} s: no more loss")
    if not set(envelope.precisions) & set(shape.losses.precisions):
        has, down_to = ", ".join(shape.losses.precisions), policy.precision
        return Withheld("precisions", f"layers may be in {has} here, and by the policy down to {down_to}")
    if not allowed:
        return Withheld("floor", f"a request takes no layer below {shape.floor}")
    if not any(is_below(lowest(allowed), one) for one in shape.halves.values()):
        return Withheld("lowest", f"all layers are in {lowest(allowed)} or below")
    below = {half.layer for half, one in shape.halves.items() if is_below(one, envelope.resting)}
    if policy.max_layers and len(below) >= policy.max_layers:
        return Withheld("max_layers", f"{len(below)} layers are below {envelope.resting}: max_layers")
    lost = shape.lost(envelope)
    return Withheld(
        "loss_budget",
        f"the loss by the profile is {lost:.3%} of at most {policy.most_loss:.3%}, and no half is left that "
        "fits into the rest",
    )


def restore(state: ReflexState, load: Load, shape: Shape, envelope: Envelope, need: Need) -> Decision | None:
    """Return the morph that gives bits back as far as the KV use stays low enough; None if none can go.

    The KV cache or layers, whichever regains more for each block that they take.
    """
    policy, is_for_floor = envelope.policy, need.cause == "precision_floor"
    wanted = load.floor_refused if is_for_floor else envelope.resting
    goal = lowest((wanted, shape.losses.best))  # a quantised checkpoint has no more bits to go back to
    halves = {half: one for half, one in shape.halves.items() if is_below(one, goal)}
    goes_to_full = shape.kv.rest == "full" and (not is_for_floor or is_below("int8", wanted))
    is_kv_due = goes_to_full and shape.kv.form != "full" and bool(shape.kv.blocks)
    if not halves and not is_kv_due:
        return None
    dead_zone = policy.kv_usage_high - policy.kv_usage_low
    usage_after = policy.kv_usage_high - dead_zone / RETURN_MARGIN
    # A request that is refused a floor waits for all halves, whatever then waits for blocks.
    needed = load.kv_used
    if not is_for_floor:
        needed = max(load.kv_used, load.kv_needed) + load.kv_coming(state.ahead_s)
    kept = max(shape.min_blocks, math.ceil(needed / (1.0 if is_for_floor else usage_after)))
    if load.running and not is_for_floor:  # one more request like those that run would be no pressure
        kept = max(kept, math.ceil((needed + load.kv_used / load.running) / policy.kv_usage_high))
    kv_after = shape.kv.blocks.get("full", 0)
    can_convert = is_kv_due and kv_after >= kept and not state.is_paused("kv_up", load.at_s)
    spare = max(0.0, load.kv_blocks - kept) * shape.pages_per_block
    choice = choose_return(
        halves,
        shape.losses,
        shape.pages,
        goal=goal,
        order=shape.order,
        spare_pages=spare // shape.num_layers * shape.num_layers + shape.pages_spare,
    )
    taken = math.ceil(shape.blocks_in(-choice.pages - shape.pages_spare))
    kv_loss = shape.kv.loss or 0.0
    if can_convert and (
        not choice.halves or kv_loss * max(1, taken) >= -choice.loss * max(1, load.kv_blocks - kv_after)
    ):
        lost = max(0.0, shape.lost(envelope) - kv_loss)
        reason = (
            f"the KV cache to full, which leaves {kv_after} KV blocks, of which {needed} are needed; the "
            f"loss by the profile falls to {lost:.2%}"
        )
        about: dict[str, Number] = {"blocks_after": kv_after, "loss": round(lost, 6)}
        return _decide("kv_up", need, reason, state, load, envelope, about, kv="full")
    if not choice.halves:
        return None
    blocks = load.kv_blocks - taken
    lost = shape.lost(envelope) + choice.loss
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


def _allowed(shape: Shape, envelope: Envelope) -> list[Precision]:
    """Return the precisions that halves may go down to."""
    there = [one for one in shape.losses.precisions if one in envelope.precisions]
    return [one for one in there if not is_below(one, shape.floor)]


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
    return Decision(
        lever=lever,
        cause=need.cause,
        reason=f"{need.words}: {reason}",
        numbers=seen(state, load, envelope) | dict(numbers),
        **what,
    )


def seen(state: ReflexState, load: Load, envelope: Envelope) -> dict[str, Number]:
    """Return the numbers behind a decision."""
    return {
        "kv_usage": round(load.kv_usage, 4),
        "kv_blocks": load.kv_blocks,
        "kv_used": load.kv_used,
        "kv_needed": load.kv_needed,
        "running": load.running,
        "waiting": load.waiting,
        "waited_s": round(load.waited_s, 4),
        "predicted_wait_s": round(load.predicted_wait_s, 4),
        "predicted_compute_s": round(load.predicted_compute_s, 4),
        "steps": max(state.pressure, state.ease),
        "policy_revision": envelope.policy.revision,
    }
