"""Hundreds of sockets that misuse their connections, beside clients that do not: a small `bench.hostile`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil

from bench.hostile import KINDS, Bystanders, Target, attack
from bus.settings import RedisSettings
from tests.support.gateway_harness import running

pytest_plugins = ["tests.support.gateway_fixtures"]


async def test_hostile_sockets_cost_bystanders_no_request_and_leave_nothing_behind(
    redis_settings: RedisSettings, folder: Path
) -> None:
    """The queue has fewer places than there are calls whose bodies never come.

    Attackers and gateway share an event loop here, so only the benchmark holds the bystanders' latency.
    """
    running_gate = running(redis_settings, folder, max_queue=16, header_timeout_s=1.0, write_timeout_s=1.0)
    async with running_gate as gate:
        process, port = psutil.Process(), gate.settings.gateway.port
        descriptors = process.num_fds()
        target, bystanders = Target("127.0.0.1", port), Bystanders("127.0.0.1", port)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(attack(target, 200, 2.5))
            await asyncio.sleep(0.6)
            assert process.num_fds() > descriptors + 200
            for _ in range(2):
                await asyncio.gather(*(bystanders.one() for _ in range(8)))
        assert not bystanders.problems and len(bystanders.ttft_s) == 16
        assert {kind.__name__ for kind in KINDS} <= target.done.keys()
        await gate.settled()
        await gate.until("descriptors back", lambda: process.num_fds() <= descriptors + 8)
