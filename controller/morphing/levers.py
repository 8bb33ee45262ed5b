"""The levers of one instance, cheapest first: the morph that each would make now, or None. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from bus.messages import Cause, Morph, Number, Resize, Swap, Transform
from bus.policy import Policy
from bus.precisions import PRECISIONS, Precision, is_below
from controller.morphing.track import Lever
from controller.morphing.view import View

WAIT_S = 1.0  # for pages, before a worker answers `deferred`: a running step may be about to free some
RETURN_MARGIN = 4  # this part of the dead zone stays free after a return, or noise would undo it at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules(Policy):
    """The policy in force. Giving pages back must leave the KV use below `kv_usage_after`."""

    kv_usage_after: float


def rules_of(policy: Policy, num_layers: int) -> Rules | None:
    """Return the rules for a model of `num_layers` layers; None: nothing morphs by itself."""
    in_force = policy.in_force(num_layers)
    if in_force is None:
        return None
    dead_zone = policy.kv_usage_high - policy.kv_usage_low
    return Rules(**asdict(in_force), kv_usage_after=policy.kv_usage_high - dead_zone / RETURN_MARGIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class MorphDecision:
    """One morph, its reason and the numbers behind it. `worker` leads `instance` and takes the command."""

    instance: str
    worker: str
    epoch: int
    lever: Lever
    reason: str
    cause: Cause | Literal[""] = ""  # the reason in a word; "": the decision is not complete yet
    numbers: dict[str, Number] = field(default_factory=dict)
    blocks: int = 0  # of a resize: the new total
    count: int = 0  # of a swap: layers
    precision: Precision = "full"
    tp: int = 0  # of a transform, as the next ones
    epochs: dict[str, int] = field(default_factory=dict)  # by worker, in shard order at the higher degree
    members: tuple[str, ...] = ()

    @property
    def instances(self) -> tuple[str, ...]:
        """All instances that it changes."""
        return self.members or (self.instance,)

    def command(self, morph_id: str) -> Morph:
        """Return the command for the worker."""
        about: dict[str, Any] = {"id": morph_id, "epoch": self.epoch, "instance": self.instance}
        if self.tp:
            workers = list(self.epochs)
            return Transform(**about, workers=workers, epochs=self.epochs, tp=self.tp, wait_s=WAIT_S)
        if self.lever == "resize":
            return Resize(**about, blocks=self.blocks, wait_s=WAIT_S)
        return Swap(**about, precision=self.precision, count=self.count, wait_s=WAIT_S)

    def because(self, cause: Cause, words: str, seen: dict[str, Number]) -> MorphDecision:
        """Return the decision with its cause, and with what was seen."""
        return replace(self, cause=cause, reason=f"{words}: {self.reason}", numbers=seen | self.numbers)


def take_free_pages(view: View, rules: Rules) -> MorphDecision | None:
    """Make blocks of unused pages, which costs nothing."""
    gained = view.blocks_of(view.pages_spare)
    if gained < 1:
        return None
    blocks = view.kv_blocks + gained
    reason = f"{view.pages_spare} pages are free, for {gained} more KV blocks"
    numbers: dict[str, Number] = {"blocks_after": blocks, "pages_spare": view.pages_spare}
    return _decide(view, "resize", reason, numbers, blocks=blocks)


def swap_down(view: View, rules: Rules) -> MorphDecision | None:
    """Hold a step of layers, or as many as it takes, in fewer bits; their pages become blocks."""
    precision = _allowed(view, rules.precision)
    if precision is None:
        return None
    pages = view.layer_pages.get(view.resting, 0) - view.layer_pages.get(precision, 0)
    missing = view.blocks_missing(rules.kv_usage_high)
    wanted = math.ceil(missing * view.pages_per_block / pages) if pages > 0 else 0
    count = min(max(rules.step_layers, wanted), rules.max_layers - view.layers_below)
    if count < 1:
        return None
    blocks = view.kv_blocks + view.blocks_of(count * pages)
    limit = f"{view.layers_below} of at most {rules.max_layers} below {view.resting}"
    if view.layers_below + count == rules.max_layers:
        limit += "; this reaches the limit"
    reason = f"{_layers(count)} more to {precision} ({limit})"
    numbers: dict[str, Number] = {
        "count": count,
        "max_layers": rules.max_layers,
        "blocks_missing": missing,
        "blocks_after": blocks,
    }
    return _decide(view, "swap_down", reason, numbers, count=count, precision=precision)


def swap_up(view: View, rules: Rules) -> MorphDecision | None:
    """Return layers to where they rest, as many of a step as leave the KV use low enough."""
    for count in range(min(rules.step_layers, view.layers_below), 0, -1):
        blocks = view.kv_blocks - view.blocks_for(count * _pages_of_return(view) - view.pages_spare)
        usage = view.kv_used / blocks if blocks > 0 else math.inf
        if blocks >= view.min_blocks and usage < rules.kv_usage_after:
            reason = (
                f"{_layers(count)} of {view.layers_below} back to {view.resting}; KV use will be {usage:.2f} "
                f"of {blocks} blocks, below {rules.kv_usage_after:g}"
            )
            numbers = {"count": count, "blocks_after": blocks, "kv_usage_after": round(usage, 4)}
            return _decide(view, "swap_up", reason, numbers, count=count, precision=view.resting)
    return None


def _decide(
    view: View, lever: Lever, reason: str, numbers: Mapping[str, Number], **what: Any
) -> MorphDecision:
    what |= {"instance": view.instance, "worker": view.worker, "epoch": view.epoch}
    return MorphDecision(lever=lever, reason=reason, numbers=dict(numbers), **what)


def _pages_of_return(view: View) -> int:
    """Return the most pages that one layer's return takes; 0 if unknown: then the worker decides."""
    fewer = [pages for variant, pages in view.layer_pages.items() if is_below(variant, view.resting)]
    return max(0, view.layer_pages.get(view.resting, 0) - min(fewer, default=0))


def _allowed(view: View, wished: Precision) -> Precision | None:
    """Return the wished precision, or the next with more bits, that layers may have below rest."""
    last = min(PRECISIONS.index(wished), PRECISIONS.index(view.coarsest))
    allowed = PRECISIONS[PRECISIONS.index(view.resting) + 1 : last + 1]
    return next((precision for precision in reversed(allowed) if precision in view.variants), None)


def _layers(count: int) -> str:
    return f"{count} layer{'s' * (count > 1)}"
