"""The KV cache of an instance to another precision, layer by layer, while its sequences live in it.

All blocks are converted, not only new ones: a cache under pressure is full of old ones, whose bytes are what
is missing. To fewer bits a block of any layer becomes what it would have been, had its keys and values been
written in these bits. Converting back restores nothing of what that rounded away.
"""

from __future__ import annotations

from bus.messages import Number
from bus.morphs import ConvertCache
from worker.morph.members import Members
from worker.morph.run import NotApplied, Run, Steps
from worker.morph.target import Target


class ConvertKVRun(Run):
    """One ConvertCache. From its first layer on it goes to its end."""

    def __init__(self, command: ConvertCache, target: Target) -> None:
        """Raise NotApplied for blocks that can never be."""
        super().__init__(command.wait_s)
        self._target, self._goal = target, command.kv_dtype
        self._members = Members(target)
        self._blocks_before = self._members.blocks
        self._num_layers, self._layers_done = len(target.instance.shape), 0
        self._stands = {"stands_seconds": command.stands_s} if command.stands_s else {}
        if not target.resizer.cache.can_convert:
            tokens = target.resizer.cache.block_tokens
            raise NotApplied("failed", f"8 bits need an even worker.block_tokens, not {tokens}")
        blocks, least = self._members.blocks_as(self._goal), self._members.min_blocks
        if blocks < least:
            raise NotApplied(
                "failed",
                f"in {self._goal} its pages hold {blocks} KV blocks, and this instance needs at least"
                f" {least}, since the longest sequence must fit; resize it first",
                blocks_asked=blocks,
                min_blocks=least,
            )

    def numbers(self) -> dict[str, Number]:
        return {
            "blocks_before": self._blocks_before,
            "blocks_after": self._members.blocks,
            "blocks_used": self._target.instance.scheduler.blocks.num_used,
            "layers": self._num_layers,
            "layers_done": self._layers_done,
            "wait_seconds": round(self._patience.total_s, 6),
            **self._stands,
        }

    def steps(self) -> Steps:
        members, goal = self._members, self._goal
        if all(each.kv_form == goal for each in members.statuses()):
            self.already = f"a KV cache in {goal}"
            return
        yield from members.compile_kv()
        while obstacle := self._obstacle():
            yield from self._pause(obstacle)
        self._patience.get_on()
        self.is_beyond_return = True
        if goal == "full":
            yield from members.count_kv(goal)
        # The leader of a pipeline shows what its own layers, the first ones, are in: the fewest bits of all.
        for layer in range(self._num_layers) if goal != "full" else reversed(range(self._num_layers)):
            yield from members.convert_kv(layer, goal)
            self._layers_done += 1
            yield True
        if goal != "full":
            yield from members.count_kv(goal)

    def _obstacle(self) -> NotApplied | None:
        """Return why it cannot begin now, if anything."""
        members, goal = self._members, self._goal
        if held := members.num_held_above(goal):
            reason = f"held by {held} requests that take no KV cache in {goal}"
            return NotApplied("deferred", reason, requests_holding=held)
        blocks, needed = members.blocks_as(goal), members.needed_blocks()
        if blocks < needed:
            return NotApplied(
                "deferred",
                f"in {goal} its pages hold {blocks} KV blocks, and {needed} must stay; wait for requests to"
                " end, or resize it first",
                blocks_asked=blocks,
                blocks_needed=needed,
            )
        return None
