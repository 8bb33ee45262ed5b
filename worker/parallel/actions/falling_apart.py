"""The end of a group that nobody wanted: alone again, whatever the others do."""

from __future__ import annotations

from collections.abc import Callable

from worker.memory import BlockAllocator
from worker.parallel.member import Member
from worker.parallel.place import ALONE, Place


def fall_apart(member: Member) -> None:
    """With all weights and as many KV pages as before, as far as there are; what ran is computed anew. All
    weights of a large model take long. Raises what makes the worker useless."""
    member.is_over = True
    member.close()
    if member.rows:
        member.rows.stop()
        member.rows = None
    member.place.target.drop_all()
    place, cache = member.place, member.place.cache
    cache.allocator = BlockAllocator(cache.blocks_in(cache.pages_per_layer))
    place.instance.recompute_all(cache.allocator)
    cache.shrink(max(0, cache.pages_per_layer - member.pages_alone))
    _have_all_weights(place, member.on_progress)
    cache.grow(max(0, min(member.pages_alone - cache.pages_per_layer, cache.growable_pages)))
    place.resizer.leave_group(place.target.saved_pages)
    member.reshaped(1)


def _have_all_weights(place: Place, on_progress: Callable[[], None]) -> None:
    def goes_on() -> bool:
        on_progress()
        return True

    for layer in range(place.num_layers):
        if place.weights.shard(layer) != ALONE:
            place.weights.map(layer, ALONE)
            place.weights.fill(layer, ALONE)(goes_on)
            place.weights.widen(layer, ALONE)
            on_progress()
