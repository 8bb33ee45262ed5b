"""The KV cache of an instance to another precision, layer by layer, while its sequences live in it.

All blocks are converted, not only new ones: a cache under pressure is full of old ones, whose bytes are what
is missing. To fewer bits a block of any layer becomes what it would have been, had its keys and values been
written in these bits. Converting back restores nothing of what that rounded away.
"""

from __future__ import annotations

from bus.messages import Number
from bus.morphs import ConvertCache
from worker.distributed.messages import ConvertKV, CountKV
from worker.memory import plan_moves_below
from worker.morph.members import Members
from worker.morph.run import NotApplied, Run, Steps
from worker.morph.target import Target
from worker.shape.copier import CopyJob, until_done


class ConvertKVRun(Run):
    """One ConvertCache. From its first layer on it goes to its end."""

    def __init__(self, command: ConvertCache, target: Target) -> None:
        """Raise NotApplied for a group, a pipeline, and blocks that can never be."""
        super().__init__(command.wait_s)
        self._target, self._goal = target, command.kv_dtype
        self._members, self._cache = Members(target), target.resizer.cache
        self._blocks_before = self._members.blocks
        self._layers_done = 0
        if (workers := self._members.num_workers) > 1:
            raise NotApplied(
                "failed",
                f"{workers} workers serve this instance; a worker converts its KV cache only while it serves"
                " alone: split the group first, or deploy the pipeline with another worker.kv_dtype",
            )
        blocks, least = self._cache.blocks_as(self._goal), self._members.min_blocks
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
            "layers": self._cache.num_layers,
            "layers_done": self._layers_done,
            "wait_seconds": round(self._patience.total_s, 6),
        }

    def steps(self) -> Steps:
        members, cache, goal = self._members, self._cache, self._goal
        layers = cache.layers_beside(goal)  # some, after one that failed between two layers
        if not layers and cache.counts_as(goal):
            self.already = f"a KV cache in {goal}"
            return
        yield from self._compile()
        while obstacle := self._obstacle():
            yield from self._pause(obstacle)
        self._patience.get_on()
        self.is_beyond_return = True
        if goal == "full" and not cache.counts_as(goal):
            yield from members.do(self._plan_count())
        self._layers_done = cache.num_layers - len(layers)
        for layer in layers:
            yield from members.do(ConvertKV(layer=layer, precision=goal))
            self._layers_done += 1
            yield True
        if not cache.counts_as(goal):
            yield from members.do(self._plan_count())
        self._target.on_kv_converted()

    def _compile(self) -> Steps:
        """Compile the kernels beside the steps."""
        assert self._target.copier
        running = self._target.copier.start(CopyJob(0, 0, lambda pause: self._target.compile_kv()))
        yield from until_done(running, running.abandon)

    def _obstacle(self) -> NotApplied | None:
        """Return why it cannot begin now, if anything."""
        members, goal = self._members, self._goal
        if held := members.num_held_above(goal):
            reason = f"held by {held} requests that take no KV cache in {goal}"
            return NotApplied("deferred", reason, requests_holding=held)
        blocks, needed = self._cache.blocks_as(goal), members.needed_blocks()
        if blocks < needed:
            return NotApplied(
                "deferred",
                f"in {goal} its pages hold {blocks} KV blocks, and {needed} must stay; wait for requests to"
                " end, or resize it first",
                blocks_asked=blocks,
                blocks_needed=needed,
            )
        return None

    def _plan_count(self) -> CountKV:
        """Plan to count blocks as the goal has them, with the moves of those that would be beyond."""
        blocks = self._target.instance.scheduler.blocks
        moves = plan_moves_below(blocks.used, self._cache.blocks_as(self._goal), blocks.index.oldest_first)
        return CountKV(precision=self._goal, moves=moves)
