"""Leading: one of several processes does, by a lease in Redis, with a term that only grows.

Redis refuses what a process writes that does not lead (`RedisLink.fence`): every script and every batch first
compares the lease with the writer's. So a process that was stopped for longer than its lease and goes on
changes nothing, whatever it was about to write. Entries of streams carry the term, and readers refuse one
that is older than the last they saw (`bus.readers`), where a failover of Redis lost the lease.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bus.errors import BusFull, BusUnavailable, Fenced
from bus.lease import Lease
from bus.link import RedisLink, Restart

log = logging.getLogger("bus")

RETRY_S = 0.2  # between two tries to reach a Redis that is away
SOONEST_S = 0.02  # after a lease of another has run out

# KEYS: lease, record of the last leader. ARGV: name, length in ms, largest term known, "1" if the process
# goes on with what it knows, which another leader makes void. The answer: "term name" of whoever led last,
# whether that is the process that asks, and the ms that are left of the lease.
_LEAD = """
local held, last = redis.call('GET', KEYS[1]), redis.call('GET', KEYS[2]) or '0 '
local mine = function(text) return string.match(text, ' (.*)$') == ARGV[1] end
if held then
    if not mine(held) then
        return {held, 0, redis.call('PTTL', KEYS[1])}
    end
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
    return {held, 1, tonumber(ARGV[2])}
end
if ARGV[4] == '1' and last ~= '0 ' and not mine(last) then
    return {last, 0, 0}
end
local now = redis.call('TIME')
local time_ms = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
local term = math.max(time_ms, tonumber(string.match(last, '^%d+')) + 1, tonumber(ARGV[3]) + 1)
local taken = string.format('%.0f', term) .. ' ' .. ARGV[1]
redis.call('SET', KEYS[2], taken)
redis.call('SET', KEYS[1], taken, 'PX', ARGV[2])
return {taken, 1, tonumber(ARGV[2])}
"""
_LEAVE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
    return redis.call('DEL', KEYS[1])
end
return 0
"""


@dataclass(frozen=True, slots=True)
class LeaderView:
    """The last leader. name: "" before the first. `lease_ms` is 0 if its lease has run out."""

    name: str = ""
    term: int = 0
    lease_ms: int = 0


async def who_leads(link: RedisLink) -> LeaderView:
    """Return the last leader. Raises BusUnavailable."""
    lease, record = link.names.leader_lease, link.names.leader

    async def call(client: Any) -> tuple[bytes | None, int]:
        async with client.pipeline(transaction=True) as pipe:
            pipe.get(record)
            pipe.pttl(lease)
            found, left_ms = await pipe.execute()
        return found, left_ms

    found, left_ms = await link.run(call)
    if not found:
        return LeaderView()
    term, name = _parsed(found)
    return LeaderView(name=name, term=term, lease_ms=max(0, left_ms))


class Leader:
    """A process that leads or waits to. `name` must be its own alone: a new one for every start.

    It takes over `lease_s` after the last renewal of a leader that died, at once after one that left.
    """

    def __init__(self, link: RedisLink, name: str, lease_s: float) -> None:
        self.name, self._link, self._lease_s = name, link, lease_s
        self.lease = Lease()
        self._seen = 0  # the largest term that any answer had
        self._yield_until_s = float("-inf")
        self._has_led = False  # and no other has since
        self._hurry, self._held = asyncio.Event(), asyncio.Event()
        link.fence = self
        link.on_restart(self._restarted)

    def _restarted(self, restart: Restart) -> None:
        if restart.data_lost and not self._has_led:  # the leader has in its memory what Redis lost
            self._yield_until_s = time.monotonic() + self._lease_s
        self._hurry.set()

    @property
    def key(self) -> str:
        """The key of the lease, which holds `token` while this process leads."""
        return self._link.names.leader_lease

    @property
    def term(self) -> int:
        return self.lease.epoch

    @property
    def token(self) -> str:
        """The value that the lease holds. Raises Fenced if it is not known to be held."""
        if not self.lease.is_valid(time.monotonic()):
            raise self.fenced("its lease has run out")
        return self._token

    @property
    def _token(self) -> str:
        return f"{self.term} {self.name}"

    def fenced(self, why: str) -> Fenced:
        """Return the error for a write that was refused, and look soon who leads."""
        self.lease = self.lease.lost()
        self._held.clear()
        self._hurry.set()
        return Fenced(f"term {self.term} of {self.name} does not lead: {why}")

    async def wait_held(self) -> None:
        """Wait until this process leads."""
        await self._held.wait()

    async def lead(self, reign: Callable[[], Awaitable[object]]) -> None:
        """Run `reign` while this process leads, anew after another has led. Returns if `reign` does."""
        while True:
            is_told = False
            while not await self._ask():
                if not is_told:
                    log.info("%s waits for its turn to lead", self.name)
                is_told = True
                await self._pause()
            log.info("%s leads in term %d", self.name, self.term)
            self._has_led = True
            work = asyncio.ensure_future(reign())
            try:
                await self._keep(work)
                if work.done():
                    work.result()
                    return
            finally:
                self._has_led = False
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
            log.warning("%s led until term %d; another has led since, it waits", self.name, self.term)

    async def leave(self) -> None:
        """Give lease and fence up: another may lead at once."""
        self._link.fence = None
        if self.lease.epoch:
            with suppress(BusUnavailable, BusFull):
                await self._link.unfenced_script(_LEAVE, [self.key], [self._token])
            self.lease = self.lease.lost()

    async def _keep(self, work: asyncio.Future[object]) -> None:
        """Renew the lease, or take it again, until `work` is done or another has led."""
        work.add_done_callback(lambda _: self._hurry.set())
        self._left_s = self._lease_s
        while not work.done():
            await self._pause()
            if not work.done() and not await self._ask() and self._is_others:
                return

    async def _pause(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(min(self._lease_s / 3, self._left_s + SOONEST_S)):
                await self._hurry.wait()
        self._hurry.clear()

    async def _ask(self) -> bool:
        """Take or renew the lease. Returns True if this process leads."""
        self._left_s, self._is_others = RETRY_S, False
        began_s = time.monotonic()
        if began_s < self._yield_until_s:
            return False
        self.lease = self.lease.asked(began_s, self._lease_s)
        keys = [self.key, self._link.names.leader]
        args = [self.name, round(1000 * self._lease_s), self._seen, int(self._has_led)]
        try:
            last, is_mine, left_ms = await self._link.unfenced_script(_LEAD, keys, args)
        except (BusUnavailable, BusFull) as error:
            log.debug("who leads is not known: %s", error)
            return False
        term, _ = _parsed(last)
        self._seen, self._left_s = max(self._seen, term), left_ms / 1000
        if not is_mine:
            self.lease, self._is_others = self.lease.lost(), True
            self._held.clear()
            return False
        self.lease = self.lease.granted(term, began_s, self._lease_s)
        self._held.set()
        return True


def _parsed(text: bytes) -> tuple[int, str]:
    term, _, name = text.decode().partition(" ")
    return int(term), name
