"""Decide which model gets KV pages of which. Pure.

A model that misses blocks gets pages of models that have more than they need. A model that wants more, or did
a moment ago, keeps at least its fair share; otherwise two models would send the same pages back and forth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from worker.engine.build import fair_shares


@dataclass(frozen=True, slots=True)
class KVHolder:
    """The KV of one model. Pages of all its layers together; it has them in multiples of `num_layers`."""

    name: str
    num_layers: int
    pages: int
    needed: int  # below this nothing may go
    useful: int  # more would lie idle
    missing: int = 0  # so many more it wants now
    is_keen: bool = False  # True: it wants blocks, or did a moment ago


@dataclass(frozen=True, slots=True)
class Move:
    """`pages` from the lender's KV, or from the free pages, to the borrower's."""

    borrower: str
    pages: int
    lender: str = ""  # empty: the free pages


def next_move(holders: Sequence[KVHolder], spare: int) -> Move | None:
    """Return the next move, or None. spare: free pages beyond every reserve."""
    wanting = [one for one in holders if min(one.missing, one.useful - one.pages) >= one.num_layers]
    if not wanting:
        return None
    spare = max(0, spare)
    fair = fair_pages(holders, spare)
    borrower = min(wanting, key=lambda one: one.pages / max(1, fair[one.name]))
    wanted = min(borrower.missing, borrower.useful - borrower.pages)
    if spare >= borrower.num_layers:
        return Move(borrower.name, _whole(min(spare, wanted), borrower))
    others = [one for one in holders if one is not borrower]
    gifts = {one.name: gift(one, fair) for one in others}
    if spare + sum(gifts.values()) < borrower.num_layers:
        return None
    lender = max(others, key=lambda one: gifts[one.name])
    asked = -(-(wanted - spare) // lender.num_layers) * lender.num_layers
    return Move(borrower.name, min(gifts[lender.name], asked), lender.name)


def next_lender(holders: Sequence[KVHolder], missing: int) -> Move | None:
    """Return the model that makes room first for one that misses `missing` pages, and how much, or None."""
    fair = fair_pages(holders, 0)
    lender = max(holders, key=lambda one: gift(one, fair), default=None)
    if lender is None or not gift(lender, fair):
        return None
    asked = -(-missing // lender.num_layers) * lender.num_layers
    return Move("", min(gift(lender, fair), asked), lender.name)


def fair_pages(holders: Sequence[KVHolder], spare: int) -> Mapping[str, int]:
    """Return the pages of each model if all wanted as many as are of use to them."""
    total = sum(one.pages for one in holders) + spare
    shares = fair_shares(total, [one.useful for one in holders])
    return dict(zip((one.name for one in holders), shares, strict=True))


def gift(holder: KVHolder, fair: Mapping[str, int]) -> int:
    """Return the pages beyond a model's need and, while it wants more itself, beyond its fair share."""
    kept = max(holder.needed, fair[holder.name]) if holder.is_keen else holder.needed
    return _whole(max(0, holder.pages - kept), holder)


def _whole(pages: int, holder: KVHolder) -> int:
    return pages // holder.num_layers * holder.num_layers
