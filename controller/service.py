"""The controller's process: loops that watch the workers, morph instances and bring about deployments."""

from __future__ import annotations

import asyncio
import logging

from bus.client import Bus
from bus.service import run_until
from bus.settings import Settings
from controller.deployments.deployer import Deployer
from controller.membership.watcher import MembershipWatcher
from controller.morphing.morpher import Morpher

log = logging.getLogger("controller")


async def main(settings: Settings, bus: Bus, stop: asyncio.Event) -> None:
    """Run until `stop` is set. Raises RedisProblem."""
    watcher, deployer = MembershipWatcher(settings.controller, bus), Deployer(settings, bus)
    morpher = Morpher(settings.monitor, bus, deployer.rests, deployer.copies)
    deployer.what_if = morpher.what_if
    log.info("watching leases, metrics, demand and orders")
    await run_until(
        stop,
        watcher.run(),
        *(morpher.grant(), morpher.decide(), morpher.answer(), morpher.confirm()),
        *(deployer.take(), deployer.listen(), deployer.watch(), deployer.bring_about()),
    )
