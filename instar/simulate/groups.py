"""A simulated group: workers that step together, each with its own queue, scheduler and share of the blocks.

The tokens of a step and the loans of blocks are decided by the code of a group's leader. A group changes one
layer in each step; until it is done, members that form a group have their own caches, and those that part
have no more blocks than they will have.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from bus.precisions import Precision
from controller.morphing.groups import Group
from instar.simulate.calibration import EngineCalibration
from instar.simulate.engine import IsQuiet, SimulatedInstance, SimulatedSequence
from instar.simulate.gateway import ActiveInstance
from instar.simulate.group_shape import GroupInstance, calibration_at
from instar.simulate.relief import SimulatedMorphs
from worker.engine.sequence import Sequence as EngineSequence
from worker.memory import BlockAllocator
from worker.parallel.block_plans import loans
from worker.parallel.coordinator import TokenNeed, allowances, even_share

LOANS_IN_A_ROW: Final = 8  # while nothing runs: a step without work lends again


@dataclass(slots=True)
class DegreeChange:
    """A change of degree under way. tp: afterwards. moving_s: by which it made steps longer."""

    morph_id: str
    tp_before: int
    tp: int
    began_s: float
    layers_left: int
    moving_s: float = 0.0


@dataclass(slots=True, eq=False)
class SimulatedGroup:
    """An instance of one worker or of several, in the order of their shards; the first leads.

    tp: the degree; while it changes, the old one. is_held: it takes no step, since it is to become part of
    another group.
    """

    members: list[ActiveInstance]
    calibration: EngineCalibration
    tp: int
    transition: DegreeChange | None = None
    is_held: bool = False
    own: GroupInstance | None = None  # the shape and the blocks of a group that stands
    morphs: SimulatedMorphs | None = None  # of the group
    _allowed: list[int] = field(default_factory=list)

    @property
    def leader(self) -> ActiveInstance:
        return self.members[0]

    @property
    def instances(self) -> list[SimulatedInstance]:
        return [one.instance for one in self.members]

    @property
    def numbers(self) -> list[int]:
        return [one.number for one in self.instances]

    @property
    def is_changing(self) -> bool:
        return self.is_held or self.transition is not None

    @property
    def is_stepping(self) -> bool:
        return self.leader.instance.is_stepping

    @property
    def _is_busy(self) -> bool:
        return any(one.num_running for one in self.instances)

    @property
    def kv_tokens(self) -> int:
        """Tokens of the whole KV cache that one sequence can have."""
        leader = self.leader.instance
        return leader.scheduler.blocks.capacity * leader.limits.block_tokens

    @property
    def max_tokens(self) -> int:
        """Tokens of one sequence."""
        return min(self.calibration.limits.max_model_len, self.kv_tokens)

    @property
    def used_blocks(self) -> int:
        return sum(one.scheduler.blocks.num_used for one in self.instances)

    @property
    def sequences(self) -> list[EngineSequence]:
        return [seq for one in self.instances for seq in (*one.scheduler.running, *one.waiting)]

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest request here."""
        return max(map(most_tokens, self.sequences), default=0)

    def as_controller_sees(self, now_s: float) -> Group:
        """Return the group as the controller knows it from metrics."""
        limits = self.calibration.limits
        block_tokens = limits.block_tokens
        shape = self.leader.instance.shape
        swapped = shape.kv_blocks - self.calibration.memory.kv_blocks
        kv_at = {
            degree: tokens + (max(0, swapped) * block_tokens if degree > 1 else 0)
            for degree, tokens in self.calibration.tokens_at.items()
        }
        kv_at |= {self.tp: self.kv_tokens}
        return Group(
            model=self.calibration.model,
            host="simulated",
            workers=tuple(one.morphs.worker for one in self.members),
            instances=tuple(one.instance.name for one in self.members),
            epochs=(1,) * len(self.members),
            tp=self.tp,
            tokens_at={degree: min(limits.max_model_len, tokens) for degree, tokens in kv_at.items()},
            kv_tokens_at=kv_at,
            max_tokens=self.max_tokens,
            kv_tokens=self.kv_tokens,
            used_tokens=self.used_blocks * block_tokens,
            own_tokens=tuple(
                (one.scheduler.blocks.num_used + one.num_running) * block_tokens for one in self.instances
            ),
            layers=tuple(shape.layers),
            longest_tokens=self.longest_tokens,
            load=sum(one.seen.load for one in self.members),
            waiting=sum(one.seen.waiting for one in self.members),
            losses=_whole_losses(self.calibration),
            layer_blocks=self._layer_blocks(),
            block_tokens=block_tokens,
            queued_tokens=sum(one.seen.waiting_tokens for one in self.members),
            running=sum(one.seen.running for one in self.members),
            oldest_wait_s=max(one.oldest_wait_s(now_s) for one in self.instances),
            max_model_len=limits.max_model_len,
            tokens_per_s=self._tokens_per_s(),
        )

    def _tokens_per_s(self) -> float:
        """Return the tokens that it processes in a second now, half of them of prompts; 0.0: nothing runs."""
        if not self._is_busy:
            return 0.0
        costs, running = self.calibration.step, sum(one.num_running for one in self.instances)
        token_s = (costs.prompt_token_s + costs.decode_s + costs.fixed_s / running) / 2
        return (self.calibration.transform.degrees[self.tp].speed if self.tp > 1 else 1.0) / token_s

    def _layer_blocks(self) -> dict[Precision, float]:
        """Return the KV blocks that a layer in each precision frees."""
        memory = calibration_at(self.calibration, self.tp).memory
        per_block = memory.kv_pages / memory.kv_blocks
        full = memory.layer_pages["full"]
        return {
            name: (full - pages) / per_block for name, pages in memory.layer_pages.items() if name != "full"
        }

    # ------------------------------------------------------------------------------------- steps

    def start(self, now_s: float) -> None:
        """Begin the next steps of all members, if one has something to run, or a layer is to change."""
        if not self.transition:
            self._lend(now_s)
        size, most = len(self.members), self.calibration.limits.max_num_batched_tokens
        allowed = self._allowed or [even_share(most, size)] * size
        works = [
            one.plan(now_s, self._is_quiet(one), tokens)
            for one, tokens in zip(self.instances, allowed, strict=True)
        ]
        self._allowed = allowances([*map(self._need, self.instances, allowed)], most)
        prompt, decodes, kv_tokens = (sum(of) for of in list(zip(*works, strict=True))[:3])
        if not (prompt or decodes or self.transition):
            return
        costs, tp, slowdown, least_s = self.calibration.transform, self.tp, 1.0, 0.0
        count = min(work.alike for work in works)
        if self.transition:
            tp, slowdown, least_s = max(tp, self.transition.tp), costs.slowdown, costs.layer_s
            count = 1
        speed, model = costs.degrees[tp].speed, self.leader.instance.model
        ends = model.ends(now_s, prompt, decodes, kv_tokens, count, speed / slowdown, least_s)
        if self.transition:
            plain_s = model.ends(now_s, prompt, decodes, kv_tokens, 1, speed)[0]
            self.transition.moving_s += ends[0] - plain_s
        for one, work in zip(self.instances, works, strict=True):
            one.begin(now_s, work, list(ends))

    def _is_quiet(self, one: SimulatedInstance) -> IsQuiet:
        """Return whether the reflex wants nothing until a member uses so many blocks.

        The others may take as many more meanwhile: the one that takes most decides.
        """
        own, morphs, before = self.own, self.morphs, one.scheduler.blocks.num_used
        if self.transition or not own or not morphs:
            return lambda used: True
        total, size = own.blocks.num_used, len(self.members)
        return lambda used: morphs.is_quiet(total + (used - before) * size)

    def _need(self, one: SimulatedInstance, allowed: int) -> TokenNeed:
        alone = self.calibration.tokens_at[1]
        long = [seq.num_uncomputed_tokens for seq in one.scheduler.running if most_tokens(seq) > alone]
        return TokenNeed(one.num_planned, allowed, one.num_running, max(long, default=0))

    def interrupt(self, now_s: float) -> None:
        """Let the steps in progress end with the one that runs now."""
        for one in self.instances:
            one.interrupt(now_s)

    def finish(self) -> bool:
        """End the steps in progress. Returns True if the degree has changed with them."""
        for one in self.instances:
            one.finish()
        if self.transition:
            self.transition.layers_left -= 1
            return self.transition.layers_left <= 0
        return False

    def _lend(self, now_s: float) -> None:
        """Lend blocks that a member misses and others can spare; idle ones give half at a time."""
        instances = self.instances
        for _ in range(1 if self._is_busy else LOANS_IN_A_ROW):
            wanted = [one.scheduler.num_blocks_wanted for one in instances]
            if not any(wanted):
                return
            spare = [one.scheduler.num_blocks_spare for one in instances]
            made = loans(spare, wanted, [one.scheduler.wanting_s(now_s) for one in instances])
            if not made:
                return
            for giver, taker, count in made:
                from_, to = (instances[i].scheduler.blocks for i in (giver, taker))
                to.take(from_.give(count))

    # ------------------------------------------------------------------------------------- degrees

    def share_blocks(self) -> None:
        """Divide the blocks of the group's degree among its members; each keeps what it uses."""
        blocks = self.calibration.tokens_at[self.tp] // self.calibration.limits.block_tokens
        self.own = GroupInstance(self.instances, calibration_at(self.calibration, self.tp), blocks)
        capacity = self.own.blocks.capacity
        size, first = len(self.members), 0
        used = [len(one.used_blocks) for one in self.instances]
        free = range(sum(used), capacity)
        for i, one in enumerate(self.instances):
            own = range(first, first + used[i])
            one.renumber(BlockAllocator(capacity, [*own, *free[i::size]], own), own)
            first += used[i]
        self._allowed = []

    def obstacle(self, tp: int) -> str:
        """Return why it cannot part into groups of degree `tp` now, or ""."""
        if self.morphs and self.morphs.running:
            return "a swap has not ended"
        room = self.calibration.tokens_at[tp] // self.calibration.limits.block_tokens
        num_parts = self.tp // tp
        for j in range(num_parts):
            used = sum(one.scheduler.blocks.num_used for one in self.instances[j::num_parts])
            if used > room:
                return f"part {j} has {used} KV blocks in use and will have {room}"
        return ""

    def restrict(self, tp: int) -> None:
        """Leave every member no more blocks than its part will have."""
        room = self.calibration.tokens_at[tp] // self.calibration.limits.block_tokens // tp
        for one in self.instances:
            share = one.scheduler.blocks
            share.give(share.num_free - max(0, room - share.num_used))

    def parts(self, tp: int) -> list[SimulatedGroup]:
        """Return the groups of degree `tp` that it parts into. Workers alone have their blocks already."""
        num_parts = self.tp // tp
        found = [SimulatedGroup(self.members[j::num_parts], self.calibration, tp) for j in range(num_parts)]
        if tp == 1:
            for part in found:
                part.leader.instance.serve_alone()
        return found

    def too_long(self) -> list[SimulatedSequence]:
        """Take what waits here and can never run here out of the queues, and return it."""
        found = []
        for one in self.instances:
            for seq in one.waiting:
                if most_tokens(seq) > self.max_tokens:
                    one.withdraw(seq)
                    assert isinstance(seq, SimulatedSequence)
                    found.append(seq)
        return found


def _whole_losses(calibration: EngineCalibration) -> dict[Precision, float]:
    """Return the measured loss of the whole model in each precision."""
    return {
        name: sum(map(sum, parts.values())) for name, parts in calibration.losses.items() if name != "full"
    }


def most_tokens(seq: EngineSequence) -> int:
    """Return the tokens that a request may have at the end."""
    return seq.num_prompt + seq.request.sampling.max_tokens
