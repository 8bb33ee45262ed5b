"""Blocks of a group: lent, counted and moved while planners go on, and each belongs to one of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.messages import Number, SamplingParams
from bus.prefix_keys import first_key, next_key
from tests.support.greedy import assert_greedy
from tests.support.group_workers import BLOCK_TOKENS, model_fixtures, resize, transform, workers
from tests.worker.tensor_parallel.test_workers import prompt
from worker.distributed.messages import Announce, CountBlocks, MemberLoad, MemberStatus, Prepare, Ready, Vote
from worker.engine.engine import instance_telemetry
from worker.engine.sequence import own_request
from worker.memory import BlockAllocator, OutOfBlocks, in_parts, plan_moves_below
from worker.morph import members
from worker.morph.run import NotApplied
from worker.parallel.block_plans import SubgroupTooFull, loans, plan_block_moves
from worker.parallel.coordinator import StepCoordinator
from worker.parallel.formation import Formation
from worker.parallel.proposal import PeerLinks, Proposal
from worker.parallel.transform import TransformRun


def ready(rank: int, step: int, *, num_used: int = 0) -> Ready:
    return Ready(
        group="g",
        rank=rank,
        step=step,
        work=None,
        spare=0,
        wanted=0,
        wanting_s=0.0,
        used=[],
        num_used=num_used,
        filled=0,
        status=MemberStatus(
            first=0,
            end=1,
            free_pages=0,
            spare_pages=0,
            own_pages=0,
            kv_pages=0,
            growable_pages=0,
            most_pages=0,
            useful_pages=0,
            num_used=num_used,
            load=MemberLoad(
                used=num_used,
                needed=num_used,
                running=0,
                waiting=0,
                waited_s=0.0,
                residence_s=0.0,
                preemptions=0,
                prompt_tokens=0,
                prompt_rate=0.0,
                floor_refused="int3",
            ),
            headroom=0,
            floors={},
            copied=[],
        ),
        max_tokens=64,
    )


def say(coordinator: StepCoordinator, *readies: Ready) -> None:
    for each in readies:
        coordinator.take(each)


def test_after_a_count_that_nobody_wants_any_more_all_plan_again() -> None:
    coordinator = StepCoordinator("g", 2)
    coordinator.add(CountBlocks())
    say(coordinator, ready(0, 0), ready(1, 0))
    assert coordinator.call()
    say(coordinator, ready(0, 1), ready(1, 1))
    assert coordinator.call() is None
    coordinator.stop_counting()
    assert coordinator.call()
    say(coordinator, ready(0, 2), ready(1, 2))
    assert coordinator.call() is None


def test_a_block_that_is_given_back_as_blocks_move_is_not_lost() -> None:
    """The request ends in the very step after which they do; it was counted before."""
    shares = [BlockAllocator(12, range(0, 12, 2), [2, 10]), BlockAllocator(12, range(1, 12, 2), [9])]
    moves = plan_moves_below([2, 10, 9], 8)
    shares[0].free([10])
    for share in shares:
        share.relocate(moves)
        share.truncate(8)
    assert sorted(block for share in shares for block in (*share._free, *share.used)) == list(range(8))
    assert shares[0].used == [2]


class TwoShares:
    """Two members' shares and what each block really holds; `held` by one sequence each."""

    KEYS = tuple(next_key(first_key(""), [i]) for i in range(5))

    def __init__(self, capacity: int = 12) -> None:
        self.capacity = capacity
        self.shares = [BlockAllocator(capacity, range(i, capacity, 2)) for i in (0, 1)]
        self.held: list[set[int]] = [set(), set()]
        self.contents: dict[int, bytes] = {}
        for share in self.shares:
            share.index.open()

    def write(self, who: int, key: bytes | None) -> None:
        """Fill a new block; None: in part."""
        if self.shares[who].num_free:
            [block] = self.shares[who].allocate(1)
            self.held[who].add(block)
            self.contents[block] = key or b""
            if key:
                self.shares[who].index.add(block, key, "full")

    def find(self, who: int, key: bytes) -> None:
        for block in self.shares[who].index.find([key], "full"):
            assert self.contents[block] == key, "a block was found by tokens that it does not hold"
            self.shares[who].reuse([block])
            self.held[who].add(block)

    def free(self, who: int, blocks: Sequence[int]) -> None:
        self.shares[who].free(blocks)
        self.held[who] -= set(blocks)

    def lend(self, who: int, n: int) -> None:
        self.shares[1 - who].take(self.shares[who].give(n))

    def shrink(self, capacity: int, freed: Sequence[set[int]]) -> None:
        """Count and move as a group does: some blocks are freed in between."""
        used = self.held[0] | self.held[1]
        if not len(used) <= capacity <= self.capacity:
            return
        moves = plan_moves_below(used, capacity)
        for who in (0, 1):
            self.free(who, sorted(freed[who] & self.held[who]))
        moved = {to: self.contents[block] for block, to in moves.items()}
        self.contents.update(moved)
        self.capacity = capacity
        for who in (0, 1):
            self.shares[who].relocate(moves)
            self.shares[who].truncate(capacity)
            self.held[who] = {moves.get(block, block) for block in self.held[who]}

    def renumber(self) -> None:
        """Grow as the end of a merge does."""

        def number(block: int) -> int:
            return block * 2 + 1

        self.capacity = 2 * self.capacity + 1
        self.contents = {number(block): key for block, key in self.contents.items()}
        for who, share in enumerate(self.shares):
            share.index.close()
            share.renumber(number)
            share.index.open()
            self.held[who] = set(map(number, self.held[who]))
            share.capacity = self.capacity

    def check(self) -> None:
        for who, share in enumerate(self.shares):
            share.check_integrity()
            assert set(share.used) == self.held[who]
            share.index.check_integrity(self.capacity)
        assert not set(self.shares[0]._free) & set(self.shares[1]._free)


@settings(deadline=None)
@given(st.data())
def test_shares_find_what_a_block_holds_however_blocks_are_lent_moved_and_renumbered(
    data: st.DataObject,
) -> None:
    world = TwoShares()
    for _ in range(data.draw(st.integers(5, 40))):
        who, key = data.draw(st.integers(0, 1)), data.draw(st.sampled_from(TwoShares.KEYS))
        match data.draw(
            st.sampled_from(["write"] * 4 + ["find"] * 3 + ["free"] * 4 + ["lend", "shrink", "number"])
        ):
            case "write":
                world.write(who, data.draw(st.sampled_from([key, None])))
            case "find":
                world.find(who, key)
            case "free" if world.held[who]:
                world.free(who, data.draw(st.lists(st.sampled_from(sorted(world.held[who])), unique=True)))
            case "lend":
                world.lend(who, data.draw(st.integers(1, 3)))
            case "shrink":
                everywhere = st.sets(st.integers(0, world.capacity))
                world.shrink(
                    data.draw(st.integers(1, world.capacity)), [data.draw(everywhere), data.draw(everywhere)]
                )
            case "number" if world.capacity < 50:
                world.renumber()
        world.check()


@pytest.mark.parametrize(("subgroups", "blocks"), [(2, 6), (3, 6)])
def test_blocks_find_their_homes_wherever_they_lie_if_there_are_enough(subgroups: int, blocks: int) -> None:
    """Blocks move in every state of a few blocks; with none free they change places."""
    for owners in product([None, *range(subgroups)], repeat=blocks):
        used = [[i for i in range(blocks) if owners[i] == j] for j in range(subgroups)]
        for capacity in range(1, blocks // subgroups + 1):
            if max(map(len, used)) > capacity:
                with pytest.raises(SubgroupTooFull):
                    plan_block_moves(used, capacity)
                continue
            moves = {old: new for each in plan_block_moves(used, capacity) for old, new in each.items()}
            there: list[tuple[int, int] | None] = [None] * blocks
            for j, each in enumerate(used):
                for block in each:
                    there[block] = (j, block)
            for part in in_parts(moves, 2):
                read = [there[block] for block in part]
                for block, value in zip(part.values(), read, strict=True):
                    there[block] = value
            for j, each in enumerate(used):
                for block in each:
                    home = moves.get(block, block)
                    assert there[home] == (j, block) and home % subgroups == j
                    assert home // subgroups < capacity


def test_parts_of_moves_are_short_but_for_cycles() -> None:
    chain = {i: i + 1 for i in range(9)}
    cycle = {20: 21, 21: 22, 22: 20}
    parts = list(in_parts(chain | cycle, 2))
    assert max(len(part) for part in parts if not part.keys() & cycle) == 2
    assert {block: to for part in parts for block, to in part.items()} == chain | cycle
    assert list(in_parts({}, 2)) == []


def test_that_the_last_request_has_ended_is_told_to_all_once() -> None:
    coordinator = StepCoordinator("g", 2)
    coordinator.add(Announce())
    for step, num_used in enumerate((5, 0)):
        say(coordinator, ready(0, step), ready(1, step, num_used=num_used))
        called = coordinator.call()
        assert called and called.num_used == [0, num_used]
    say(coordinator, ready(0, 2), ready(1, 2))
    assert coordinator.call() is None


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=5),
)
def test_who_came_first_gets_what_all_can_spare_in_the_end(planners: list[tuple[int, int, int]]) -> None:
    spare, wanted, wanting_s = map(list, zip(*planners, strict=True))
    wanting_s = [float(seconds) + i / 10 for i, seconds in enumerate(wanting_s)]
    first = max((i for i, want in enumerate(wanted) if want), key=lambda i: wanting_s[i], default=None)
    for _ in range(20):
        for giver, taker, blocks in loans(spare, wanted, wanting_s):
            assert giver != taker and 0 < blocks <= spare[giver] and wanted[taker] >= blocks
            assert not wanted[giver] or wanting_s[giver] < wanting_s[taker]
            spare[giver] -= blocks
            wanted[taker] -= blocks
    if first is not None:
        assert wanted[first] == 0 or sum(spare) - spare[first] == 0


def test_groups_with_caches_of_different_sizes_do_not_become_one() -> None:
    """The blocks of the larger one never move below what the smaller one has."""
    members = ["w0", "w2", "w1", "w3"]
    invite = Prepare(
        group="g", leader="w0", model="m", members=members, low=2, grows=True, peers={}, shape=[]
    )
    proposal = Proposal(invite, Formation(tuple(members), 2, 4), "w0", PeerLinks())
    for name, blocks in zip(members, (50, 60, 50, 60), strict=True):
        numbers: dict[str, Number] = {
            "blocks": blocks,
            "blocks_used": 10,
            "pages_after": 9,
            "blocks_after": 130,
        }
        proposal.votes[name] = Vote(group="g", worker=name, numbers=numbers)
    with pytest.raises(NotApplied, match="the groups have 50 and 60 KV blocks"):
        TransformRun._room(object.__new__(TransformRun), proposal)


model, folder = model_fixtures(num_hidden_layers=3)


def test_nothing_is_lent_while_subgroups_number_their_blocks_apart(folder: Path, model: Any) -> None:
    """One has a queue that does not fit, the other is idle: its blocks have the same numbers."""
    with workers(folder, 2, megabytes=1.2) as each:
        idle, busy = each
        tokens = busy.instance.scheduler.blocks.capacity * BLOCK_TOKENS
        prompts = {name: prompt(i, tokens * 2 // 5) for i, name in enumerate(("a", "b", "c"))}
        for name, asked in prompts.items():
            busy.submit(name, asked, 40)
        busy.wait(lambda: bool(busy.tokens["a"]), "the first token")
        assert idle.end_of(transform(each, 2)).state == "applied"
        busy.check()
        busy.wait_ends(*prompts)
        for name, asked in prompts.items():
            assert_greedy(model, asked, 40, busy.tokens[name])


@pytest.mark.slow
def test_nobody_takes_a_block_between_the_count_and_the_moves(
    folder: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request comes in that very moment; the lowest free blocks are where others' are to lie."""
    with workers(folder, 2) as each:
        leader, other = each
        assert leader.end_of(transform(each, 2)).state == "applied"
        capacity = leader.instance.scheduler.blocks.capacity
        other.submit("below", prompt(1, 800), 200)
        other.submit("above", prompt(2, 30), 200)
        other.wait(lambda: bool(other.tokens["above"]), "the first token")
        other.thread.cancel(["below"])
        leader.tokens["new"] = []
        planned: list[dict[int, int]] = []

        def plan(used: Any, blocks: int, cached: Any) -> dict[int, int]:
            moves = plan_moves_below(used, blocks, cached)
            if moves and not any(planned):
                sampling = SamplingParams(max_tokens=20, seed=0, temperature=0.0)
                leader.engine.submit(
                    leader.instance.id,
                    own_request("new", prompt(3, 30), sampling),
                )
            planned.append(moves)
            return moves

        monkeypatch.setattr(members, "plan_moves_below", plan)
        assert leader.end_of(resize(leader, capacity // 8)).state == "applied"
        assert any(planned)
        leader.wait_ends("new")
        other.wait_ends("above")
        assert_greedy(model, prompt(3, 30), 20, leader.tokens["new"])
        assert_greedy(model, prompt(2, 30), 200, other.tokens["above"])


def test_an_idle_group_has_no_block_in_use_by_what_its_leader_tells(folder: Path) -> None:
    with workers(folder, 2) as each:
        leader, other = each
        assert leader.end_of(transform(each, 2)).state == "applied"
        other.submit("a", prompt(1, 40), 5)
        other.wait_ends("a")
        leader.wait(lambda: instance_telemetry(leader.instance).kv_used == 0, "an empty cache", 5)


@pytest.mark.slow
def test_a_request_that_misses_a_block_waits_for_the_others_to_lend_one(folder: Path, model: Any) -> None:
    """One has lent its blocks away, and the taker wants ever more: nobody is sent back as too long."""
    with workers(folder, 2, megabytes=1.2) as each:
        leader, other = each
        assert leader.end_of(transform(each, 2)).state == "applied"
        tokens = leader.instance.scheduler.blocks.capacity * BLOCK_TOKENS
        asked = {(other, "grows"): (prompt(0, 20), 200)}
        asked |= {(leader, f"q{i}"): (prompt(i, tokens // 4), tokens // 4) for i in range(1, 6)}
        for (worker, name), (text, n) in asked.items():
            worker.submit(name, text, n)
        for (worker, name), (text, n) in asked.items():
            worker.wait_ends(name)
            assert worker.ends[name] == "length", worker.ends[name]
            assert_greedy(model, text, n, worker.tokens[name])


def test_a_worker_that_is_not_laid_out_for_the_degree_refuses_and_lives(folder: Path) -> None:
    with workers(folder, 3, max_tp=4) as each, workers(folder, 1, first=9, max_tp=1) as (other,):
        report = each[0].end_of(transform([each[0], other], 2))
        assert report.state == "conflict" and "not laid out for degree 2" in report.reason, report
        assert each[0].end_of(transform(each[:2], 2)).state == "applied"


def test_a_leader_whose_blocks_do_not_fit_any_more_when_it_enters_keeps_nobody(folder: Path) -> None:
    with workers(folder, 2) as each:

        def full(capacity: int) -> None:
            raise OutOfBlocks(capacity + 1, 0, capacity)

        each[0].grouping.local.resizer.vacate = full  # type: ignore[method-assign]
        report = each[0].end_of(transform(each, 2))
        assert report.state == "failed" and "w0 cannot enter" in report.reason, report
        assert report.numbers["seconds"] < 5
        assert each[1].regrouped == []
        each[1].submit("a", prompt(1, 9), 5)
        each[1].wait_ends("a")


def test_a_leader_that_loses_its_lease_while_the_new_shape_is_tried_lives(folder: Path) -> None:
    """The trial has blocks that no request has."""
    with workers(folder, 2) as each:
        assert each[0].end_of(transform(each, 2)).state == "applied"
        executor = each[0].grouping.executor
        assert executor is not None

        def lose_lease() -> None:
            assert executor.send_canary()
            each[0].thread._fence(each[0].epoch)

        each[0].call(lose_lease)
        each[0].wait(lambda: executor.heard is not None, "the trial's end")
