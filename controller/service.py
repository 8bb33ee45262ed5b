"""The controller's process: loops that watch the workers, morph instances and bring about deployments.

Of several controllers one leads (`bus.leader.Leader`); the others wait, and know nothing yet: one that takes
over begins as after a start.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket

from bus.client import Bus
from bus.leader import Leader
from bus.service import run_until
from bus.settings import Settings
from controller.deployments.deployer import Deployer
from controller.failures import Failures
from controller.membership.versions import SchemaChooser
from controller.membership.watcher import MembershipWatcher
from controller.morphing.morpher import Morpher

log = logging.getLogger("controller")


async def main(settings: Settings, bus: Bus, stop: asyncio.Event) -> None:
    """Run until `stop` is set. Raises RedisProblem."""
    name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    leader = Leader(bus, name, settings.controller.lease_s)
    try:
        await run_until(stop, leader.lead(lambda: lead(settings, bus)))
    finally:
        await leader.leave()


async def lead(settings: Settings, bus: Bus) -> None:
    """Run all loops until cancelled, whatever fails in one of them (`Failures`). Raises RedisProblem."""
    with bus.own_callbacks():
        failures = Failures(bus)
        watcher = MembershipWatcher(settings.controller, bus, failures)
        deployer = Deployer(settings, bus, failures)
        morpher = Morpher(settings.monitor, bus, failures, deployer.rests, deployer.copies)
        deployer.what_if = morpher.what_if
        log.info("watching leases, metrics, demand and orders")
        await run_until(
            asyncio.Event(),
            failures.tell(),
            watcher.run(),
            SchemaChooser(bus, failures).run(),
            *(morpher.grant(), morpher.decide(), morpher.answer(), morpher.confirm()),
            *(deployer.take(), deployer.listen(), deployer.watch(), deployer.bring_about()),
        )
