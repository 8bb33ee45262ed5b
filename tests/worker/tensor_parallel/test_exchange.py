"""The exchange of KV between subgroups, against what each rank must hold before and after it."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from tests.support.memory_backends import SMALL_PAGE
from tests.support.pairs import pairs
from worker.distributed import carriers
from worker.distributed.carriers import Outboxes
from worker.distributed.communicator import Communicator, PeerLost, connect
from worker.distributed.kv_exchange import Moved, exchange
from worker.memory import CpuBackend, KVCache, PagePool
from worker.model.shard import Shard

HEADS, BLOCK_TOKENS, HEAD_DIM, BLOCKS = 8, 4, 8, 12
Live = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Member:
    """One rank of a group of n subgroups of degree `low`."""

    group: Communicator
    low: int

    @property
    def n(self) -> int:
        return self.group.size // self.low

    @property
    def subgroup(self) -> int:
        return self.group.rank % self.n

    @property
    def low_shard(self) -> Shard:
        return Shard(self.group.rank // self.n, self.low)

    @property
    def peers(self) -> list[int]:
        return [self.low_shard.rank * self.n + j for j in range(self.n)]

    def cache(self) -> torch.Tensor:
        """[BLOCKS, heads of the low shard, 2, tokens, D] of its subgroup, other than any rank's."""
        return truth(self.subgroup)[:, self.low_shard.part(HEADS, "heads")].contiguous()

    def high(self, cache: torch.Tensor) -> torch.Tensor:
        return cache.view(-1, HEADS // self.group.size, *cache.shape[2:])

    def exchange(
        self, cache: torch.Tensor, live: Live, stage_bytes: int = 1 << 20, grows: bool | None = None
    ) -> Moved:
        return exchange(self.high(cache), live, self.subgroup, self.group, self.peers, stage_bytes, grows)


def truth(subgroup: int) -> torch.Tensor:
    """[BLOCKS, HEADS, 2, tokens, D]: the whole KV of a subgroup's blocks."""
    random = torch.Generator().manual_seed(subgroup)
    return torch.randn(BLOCKS, HEADS, 2, BLOCK_TOKENS, HEAD_DIM, generator=random)


def together(size: int, low: int, work: Callable[[Member], object]) -> list[object]:
    store, everyone = HashStore(), threading.Barrier(size)

    def run(rank: int) -> object:
        group = connect(PrefixStore("group", store), rank, size, timeout_s=20.0)
        everyone.wait(20)  # who leaves while another still connects makes that one fail
        try:
            return work(Member(group, low))
        finally:
            everyone.wait(60)
            group.close()

    with ThreadPoolExecutor(size) as threads:
        return [future.result(60) for future in [threads.submit(run, rank) for rank in range(size)]]


ALL = tuple(range(BLOCKS))
SHAPES = [pytest.param(2, 1, id="2xTP1"), pytest.param(4, 1, id="4xTP1"), pytest.param(4, 2, id="2xTP2")]
LIVE = [
    pytest.param((ALL, ALL, ALL, ALL), id="all"),
    pytest.param(((0, 1, 5), (2,), (), (0, 5, 11)), id="unequal"),
    pytest.param(((), (3, 4), (), ()), id="one"),
    pytest.param(((), (), (), ()), id="none"),
]


WAYS = [pytest.param(True, id="up"), pytest.param(None, id="both")]


@pytest.mark.parametrize(
    ("carried", "grows", "stage_bytes", "live", "size", "low"),
    pairs(["in shared memory", "as messages"], WAYS, [1, 5000, 1 << 20], LIVE, SHAPES),
)
def test_every_rank_gets_its_own_heads_of_all_live_blocks(
    size: int,
    low: int,
    live: Live,
    stage_bytes: int,
    grows: bool | None,
    carried: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    live = live[: size // low]
    if carried == "as messages":
        monkeypatch.setattr(carriers, "_reach", lambda pid, fd, name, nbytes: None)

    def work(member: Member) -> None:
        cache = member.cache()
        member.exchange(cache, live, stage_bytes, grows)
        heads = Shard(member.group.rank, size).part(HEADS, "heads")
        for j, blocks in enumerate(live):
            for c in blocks:
                assert torch.equal(member.high(cache)[c * member.n + j], truth(j)[c, heads]), (j, c)

    together(size, low, work)


@pytest.mark.parametrize(("size", "low"), SHAPES)
@pytest.mark.parametrize("live", LIVE)
def test_what_is_live_in_no_subgroup_is_not_touched_and_twice_is_as_before(
    size: int, low: int, live: Live
) -> None:
    live = live[: size // low]
    dead = sorted(set(ALL) - {c for part in live for c in part})

    def work(member: Member) -> None:
        cache = member.cache()
        first = member.exchange(cache, live, 3000)
        assert torch.equal(cache[dead], member.cache()[dead])
        assert member.exchange(cache, live, 9000).bytes == first.bytes
        assert torch.equal(cache, member.cache())

    together(size, low, work)


@pytest.mark.parametrize(("size", "low"), SHAPES)
@pytest.mark.parametrize("live", LIVE)
def test_there_and_back_every_live_block_is_as_before_and_no_other_was_sent(
    size: int, low: int, live: Live
) -> None:
    live = live[: size // low]
    sub_block = 2 * (HEADS // size) * BLOCK_TOKENS * HEAD_DIM * 4

    def work(member: Member) -> None:
        cache, mine = member.cache(), live[member.subgroup]
        up = member.exchange(cache, live, 3000, grows=True)
        down = member.exchange(cache, live, 9000, grows=False)
        assert torch.equal(cache[list(mine)], member.cache()[list(mine)])
        assert up.bytes == len(mine) * (member.n - 1) * sub_block
        assert down.bytes == (sum(map(len, live)) - len(mine)) * sub_block

    together(size, low, work)


@pytest.mark.parametrize(
    ("size", "low", "heads"),
    [
        pytest.param(2, 1, 1, id="2xTP1, one head"),
        pytest.param(4, 1, 2, id="4xTP1, two heads"),
        pytest.param(4, 1, 1, id="4xTP1, one head"),
        pytest.param(4, 2, 2, id="2xTP2, two heads"),
    ],
)
@pytest.mark.parametrize("live", [LIVE[0], LIVE[1], LIVE[2]])
@pytest.mark.parametrize("stage_bytes", [1, 3000, 1 << 20])
def test_ranks_with_the_same_head_all_get_it_and_one_of_them_gives_it_back(
    size: int, low: int, heads: int, live: Live, stage_bytes: int
) -> None:
    n, at_low, at_high = size // low, min(low, heads), min(size, heads)
    parts, sharing = at_high // at_low, size // at_high
    room = BLOCKS * parts // n  # blocks of each subgroup that the group has memory for
    live = [[c for c in part if c < room] for part in live[:n]]
    row_bytes = 2 * BLOCK_TOKENS * HEAD_DIM * 4  # a sub-block has one head

    def head_of(rank: int) -> int:
        return rank * at_high // size

    def work(member: Member) -> None:
        rank, mine = member.group.rank, live[member.subgroup]
        kept = member.low_shard.rank * at_low // low * (heads // at_low)
        own = truth(member.subgroup)[:, kept : kept + heads // at_low].contiguous()
        cache = own.clone()
        layer = cache.view(-1, 1, *cache.shape[2:])

        def go(grows: bool) -> Moved:
            return exchange(
                layer, live, member.subgroup, member.group, member.peers, stage_bytes, grows, parts
            )

        up = go(True)
        for j, blocks in enumerate(live):
            for c in blocks:
                assert torch.equal(layer[c * n + j, 0], truth(j)[c, head_of(rank)]), (j, c)
        down = go(False)
        assert torch.equal(cache[mine], own[mine])
        assert up.bytes == len(mine) * (n - 1) * row_bytes
        other_heads = [j for j, peer in enumerate(member.peers) if head_of(peer) != head_of(rank)]
        taken = [j for j in other_heads if j % (n // parts) == member.subgroup % (n // parts)]
        assert down.bytes == sum(len(live[j]) for j in taken) * row_bytes
        assert len(taken) == parts - 1 and sharing >= n // parts

    together(size, low, work)


def test_blocks_of_fewer_parts_go_one_way_at_a_time() -> None:
    layer = torch.zeros(4, 1, 2, 2, 2)
    for grows, parts in ((None, 1), (True, 3)):
        with pytest.raises(ValueError, match=f"blocks of {parts} parts go to 2 subgroups one way at a time"):
            exchange(layer, [[0], [0]], 0, _Alone(), [0, 1], 1000, grows, parts)  # type: ignore[arg-type]


def test_two_steps_up_are_the_same_as_one() -> None:
    """TP1 to TP2 to TP4 against TP1 to TP4: pair j of ranks 0, 1 is the high shards j and 2 + j."""
    pairs = [HashStore(), HashStore()]

    def work(member: Member) -> None:
        once = member.cache()
        member.exchange(once, [ALL] * 4)
        rank, pair = divmod(member.group.rank, 2)
        group = connect(PrefixStore("pair", pairs[pair]), rank, 2, timeout_s=20.0)
        twice = member.cache()
        Member(group, 1).exchange(twice, [ALL] * 2)
        Member(member.group, 2).exchange(twice, [range(2 * BLOCKS)] * 2)
        group.close()
        assert torch.equal(once, twice)

    together(4, 1, work)


def test_a_stages_buffers_bound_the_memory_it_takes() -> None:
    sub_block = 2 * (HEADS // 4) * BLOCK_TOKENS * HEAD_DIM * 4
    bound = 3 * 2 * 3 * sub_block  # three blocks: sent and received, of three peers

    def work(member: Member) -> Moved:
        return member.exchange(member.cache(), [ALL] * 4, bound + 1)

    for moved in together(4, 1, work):
        assert moved == Moved(bytes=BLOCKS * 3 * sub_block, stages=BLOCKS // 3, peak_bytes=bound)


def test_messages_take_no_more_memory_than_a_stage_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carriers, "_reach", lambda pid, fd, name, nbytes: None)
    bound = 3 * 2 * 3 * 2 * (HEADS // 4) * BLOCK_TOKENS * HEAD_DIM * 4

    def work(member: Member) -> Moved:
        return member.exchange(member.cache(), [ALL] * 4, bound + 1)

    for moved in together(4, 1, work):
        assert isinstance(moved, Moved) and moved.peak_bytes == bound


def test_an_outbox_is_read_by_all_while_the_next_one_is_filled() -> None:
    def work(member: Member) -> None:
        boxes, rank = Outboxes(member.group, 8), member.group.rank
        for turn in range(5):
            boxes.own.fill_(10 * turn + rank)
            filled = boxes.turn(member.group)
            boxes.own.fill_(255)
            assert [box.tolist() for box in filled] == [[10 * turn + r] * 8 for r in range(4)]

    together(4, 1, work)


def test_where_one_rank_cannot_reach_the_others_all_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    reach = carriers._reach
    calls = iter(range(100))
    monkeypatch.setattr(carriers, "_reach", lambda *where: reach(*where) if next(calls) else None)

    def work(member: Member) -> None:
        with pytest.raises(OSError, match="1 of 2 ranks cannot reach the others' memory"):
            Outboxes(member.group, 8)

    together(2, 1, work)


def test_what_has_the_same_numbers_in_another_container_is_not_taken_for_the_others_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There each rank finds its own file."""
    own: dict[int, int] = {}
    reach = carriers._reach

    def reach_own(pid: int, fd: int, name: int, nbytes: int) -> torch.Tensor | None:
        return reach(pid, own[threading.get_ident()], name, nbytes)

    create = os.memfd_create

    def remember(name: str) -> int:
        own[threading.get_ident()] = fd = create(name)
        return fd

    monkeypatch.setattr(carriers, "_reach", reach_own)
    monkeypatch.setattr(os, "memfd_create", remember)

    def work(member: Member) -> None:
        with pytest.raises(OSError, match="2 of 2 ranks cannot reach the others' memory"):
            Outboxes(member.group, 8)

    together(2, 1, work)


def test_the_memory_of_a_group_that_is_left_is_given_back() -> None:
    def work(member: Member) -> weakref.ref[Communicator]:
        member.exchange(member.cache(), [ALL] * 2)
        return weakref.ref(member.group)

    left = together(2, 1, work)
    gc.collect()
    assert [group() for group in left if isinstance(group, weakref.ref)] == [None, None]


def test_no_more_is_sent_than_two_subgroups_have_between_them() -> None:
    sub_block = 2 * (HEADS // 4) * BLOCK_TOKENS * HEAD_DIM * 4
    live = ((0, 1, 5), (2,), (), (0, 5, 11))

    def work(member: Member) -> int:
        return member.exchange(member.cache(), live).bytes

    between = [sum(len({*live[r], *live[g]}) for g in range(4) if g != r) for r in range(4)]
    assert together(4, 1, work) == [blocks * sub_block for blocks in between]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_works_on_the_pages_of_a_cache(dtype: torch.dtype) -> None:
    """Blocks of 3 to a page, so that some straddle two."""

    def caches() -> Iterator[KVCache]:
        pool = PagePool(CpuBackend(SMALL_PAGE), 8 * SMALL_PAGE)
        yield KVCache(
            pool,
            num_layers=1,
            num_kv_heads=2,
            head_dim=10,
            block_tokens=1024 * 4 // 3 // 40 // dtype.itemsize,
            dtype=dtype,
            max_blocks=40,
            owner="demo",
        )
        pool.check_integrity()
        pool.close()

    def work(member: Member) -> None:
        for kv in caches():
            kv.grow(5)
            live = list(range(kv.num_blocks - 1))
            kv.layers[0][: kv.num_blocks] = 100 * member.subgroup + torch.arange(kv.num_blocks).view(
                -1, 1, 1, 1, 1
            ).to(dtype)
            exchange(kv.layers_at(2)[0], [live, live], member.subgroup, member.group, member.peers, 999)
            for c in live:
                for j in range(2):
                    assert bool((kv.layers_at(2)[0][2 * c + j] == 100 * j + c).all())
            assert bool((kv.layers[0][kv.num_blocks - 1] == 100 * member.subgroup + kv.num_blocks - 1).all())
            kv.release()

    together(2, 1, work)


def test_a_lost_peer_leaves_whole_stages_behind() -> None:
    def work(member: Member) -> str:
        if member.subgroup == 1:
            member.group.close()
            return "gone"
        cache = member.cache()
        with pytest.raises(PeerLost):
            member.exchange(cache, [ALL, ALL])
        assert torch.equal(cache, member.cache())
        return "told"

    assert together(2, 1, work) == ["told", "gone"]


class _Alone:
    rank, size = 0, 2


@pytest.mark.parametrize(
    ("live", "subgroup", "peers", "layer", "message"),
    [
        ([[0], [0]], 1, [0, 1], torch.zeros(4, 1, 2, 2, 2), "rank 0 is not the one of subgroup 1"),
        ([[0], [0]], 0, [0], torch.zeros(4, 1, 2, 2, 2), "among the peers"),
        ([[0], [0]], 0, [0, 2], torch.zeros(4, 1, 2, 2, 2), "ascending ranks below 2"),
        ([[0], [2]], 0, [0, 1], torch.zeros(4, 1, 2, 2, 2), "up to 2 of 2 subgroups; the layer has 2"),
        ([[0], [-1]], 0, [0, 1], torch.zeros(4, 1, 2, 2, 2), "live blocks"),
        ([[0], [0]], 0, [0, 1], torch.zeros(4, 2, 2, 2, 2).transpose(1, 3), "header-centric"),
        ([[0], [0]], 0, [0, 1], torch.zeros(4, 1, 1, 1, 1), "whole torch.int64"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    live: list[list[int]], subgroup: int, peers: list[int], layer: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        exchange(layer, live, subgroup, _Alone(), peers, 1000)  # type: ignore[arg-type]
