"""The loop that chooses the version of the schema that all processes write (`bus.schema`)."""

from __future__ import annotations

import asyncio
import logging

from bus.client import Bus, BusFull, BusUnavailable
from bus.messages import READS
from bus.presence import has_monitor, readers
from bus.schema import common_version, in_words
from controller.failures import Failures

log = logging.getLogger("controller")

INTERVAL_S = 2.0


class SchemaChooser:
    """Looks at who is present every INTERVAL_S, and names the newest version that all of them read."""

    def __init__(self, bus: Bus, failures: Failures) -> None:
        self._bus, self._failures = bus, failures
        self._told: str | None = None  # the last complaint, while there is a reason

    async def run(self) -> None:
        """Take steps without end. Raises RedisProblem."""
        while True:
            try:
                with self._failures.survived("schema"):
                    await self.step()
            except BusUnavailable:
                await self._bus.wait_up()
            except BusFull as full:
                log.debug("the version of the schema stays: %s", full)
            await asyncio.sleep(INTERVAL_S)

    async def step(self) -> None:
        """Look once. Raises BusUnavailable and BusFull."""
        present = await readers(self._bus)
        version = common_version(self._bus.schema, present.values(), has_monitor=has_monitor(present))
        if version is None:
            self._complain(present)
            return
        self._told = None
        if version != self._bus.schema:
            await self._name(version, present)

    def _complain(self, present: dict[str, tuple[int, ...]]) -> None:
        """Log once who reads nothing of what this process reads."""
        others = {name: reads for name, reads in present.items() if not set(reads) & set(READS)}
        told = ", ".join(f"{name} (reads {in_words(reads)})" for name, reads in sorted(others.items()))
        if told != self._told:
            log.error(
                "no version of the schema is read by all: this controller reads %s, but not %s; stop these, "
                "or replace them by a release that reads one of its versions",
                in_words(READS),
                told or "what all others have in common",
            )
        self._told = told

    async def _name(self, version: int, present: dict[str, tuple[int, ...]]) -> None:
        """Write the key. Processes see it when their watchers look, within `redis.block_ms`."""
        old = sorted(name for name, reads in present.items() if max(reads, default=0) <= version)
        why = f"the newest that {', '.join(old[:3])} reads" if old and version < READS[-1] else "all read it"
        before = self._bus.schema
        await self._bus.write(("SET", self._bus.names.schema, version))
        self._bus.schema = version
        log.info("messages are written in schema %d instead of %d: %s", version, before, why)
        await self._bus.event("schema_changed", "schema", why, version=version, previous_version=before)
