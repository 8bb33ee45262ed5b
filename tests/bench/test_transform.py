"""The benchmark of KV migration: both ways move the right heads, and tell what they took."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore

from bench.transform import kv as transform_kv
from worker.distributed.communicator import connect

SIZES = transform_kv.Sizes(blocks=400, heads=4, block_tokens=4, head_dim=16)
PART = SIZES.block_bytes // 2  # a rank's heads of a block
STAGE_BYTES = 8 * PART


def test_in_place_takes_a_stage_and_migrating_takes_pages_for_all_that_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transform_kv, "STAGES", (STAGE_BYTES,))
    store, everyone = HashStore(), threading.Barrier(2)

    def run(rank: int) -> dict[str, Any]:
        group = connect(PrefixStore("group", store), rank, 2, timeout_s=20)
        everyone.wait(20)
        try:
            return transform_kv.measure(group, SIZES, 1, 1, STAGE_BYTES)
        finally:
            everyone.wait(60)
            group.close()

    with ThreadPoolExecutor(2) as threads:
        ranks = [each.result(60) for each in [threads.submit(run, rank) for rank in range(2)]]
    comes = int(0.9 * SIZES.blocks) * PART
    for took in (rank["took"] for rank in ranks):
        assert {one.bytes for way in took.values() for one in way} == {comes}
        assert took["in place"][0].extra_bytes == STAGE_BYTES
        assert took["migrate and trim"][0].extra_bytes >= 2 * comes  # packed, and in pages
        assert comes <= took["migrate and trim, in stages"][0].extra_bytes < 2 * comes
