"""The end of a group that nobody wanted: alone again, whatever the others do."""

from __future__ import annotations

from worker.memory import BlockAllocator
from worker.parallel.actions import halves
from worker.parallel.member import Member
from worker.parallel.place import ALONE, Place


def fall_apart(member: Member) -> None:
    """With all weights and as many KV pages as before, as far as there are; what ran is computed anew. Raises
    what makes the worker useless."""
    member.is_over = True
    member.close()
    if member.filling:
        member.filling.stop()
        member.filling = None
    halves.drop(member)
    place, cache = member.place, member.place.cache
    cache.allocator = BlockAllocator(cache.blocks_in(cache.pages_per_layer))
    place.instance.recompute_all(cache.allocator)
    cache.shrink(max(0, cache.pages_per_layer - member.pages_alone))
    _have_all_weights(place)
    cache.grow(max(0, min(member.pages_alone - cache.pages_per_layer, cache.growable_pages)))
    place.resizer.settle()
    member.reshaped(1)


def _have_all_weights(place: Place) -> None:
    for layer in range(place.num_layers):
        if place.weights.shard(layer) != ALONE:
            place.weights.map(layer, ALONE)
            place.weights.fill(layer, ALONE)(lambda: True)
            place.weights.widen(layer, ALONE)
