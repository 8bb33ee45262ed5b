"""Messages of `instar serve` about its progress: what loads, and when all is ready."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx

from bus.checkpoints import parse_model
from bus.settings import Settings
from instar.running import trust_of, url_of
from instar.serve.process import Console
from instar.serve.supervisor import Supervisor

POLL_S = 0.2
PROGRESS_AFTER_S = 2.0
PROGRESS_EVERY_S = 2.0


class ServiceWatcher:
    """Polls the gateway while something is starting, and never a service at rest."""

    def __init__(self, settings: Settings, console: Console) -> None:
        self._settings = settings
        self._console = console
        self._shown = ""
        self._next_progress = 0.0

    async def watch(self, supervisor: Supervisor) -> None:
        """Say when the service is ready, and after each death when it is complete again. Never returns."""
        await self.until_ready()
        while True:
            await supervisor.died.wait()
            supervisor.died.clear()
            await self.until_complete(supervisor.expected_workers)

    async def until_ready(self) -> None:
        """Say the URL when a model can be used, or deployed where there is none."""
        await self._until(self._is_ready)
        names = ", ".join(parse_model(model)[0] for model in self._settings.worker.models)
        what = f"model {names}" if names else "no model yet: `instar model add DIR`, `instar deploy`"
        self._console.say(f"Instar is ready: {url_of(self._settings.gateway)}/v1 ({what})")

    def _is_ready(self, is_served: bool, state: dict[str, Any]) -> bool:
        """Return True if a model is served; workers that started without one need none."""
        if self._settings.worker.models:
            return is_served
        return any(worker.get("state") == "serving" for worker in state.get("workers", []))

    async def until_complete(self, expected: Callable[[], dict[str, float]]) -> None:
        """Say when every worker serves again after a death.

        `expected` maps a worker's id to the wall-clock second of its last death, 0.0 for none. An epoch (the
        worker's start in ms) before that belongs to the dead process, whose lease has not expired yet.
        """
        began = time.monotonic()

        def is_complete(ready: bool, state: dict[str, Any]) -> bool:
            alive = {w["id"]: w["epoch"] for w in state.get("workers", []) if w.get("state") == "serving"}
            return self._is_ready(ready, state) and all(
                alive.get(id_, -1) >= died * 1000 for id_, died in expected().items()
            )

        await self._until(is_complete)
        self._console.say(f"All workers serve again, {time.monotonic() - began:.1f} s after that death")

    async def _until(self, done: Callable[[bool, dict[str, Any]], bool]) -> None:
        self._next_progress, self._shown = time.monotonic() + PROGRESS_AFTER_S, ""
        gateway = self._settings.gateway
        headers = {"Authorization": f"Bearer {gateway.admin_keys[0]}"} if gateway.admin_keys else {}
        trust = trust_of(gateway, is_own=True)
        async with httpx.AsyncClient(
            base_url=url_of(gateway), headers=headers, timeout=5, verify=trust
        ) as client:
            while True:
                ready = await _get(client, "/ready")
                state = await _get(client, "/admin/state")
                if done(ready is not None, state or {}):
                    return
                self._say_progress(state or {})
                await asyncio.sleep(POLL_S)

    def _say_progress(self, state: dict[str, Any]) -> None:
        now = time.monotonic()
        if now < self._next_progress:
            return
        loading = [w for w in state.get("workers", []) if w.get("state") == "loading"]
        steps = [(w["id"], w.get("progress") or "loading") for w in loading]
        if self._settings.log.level in ("debug", "info"):  # then workers log percentages themselves
            steps = [(worker, progress) for worker, progress in steps if "%" not in progress]
        text = ", ".join(f"{worker}: {progress}" for worker, progress in steps)
        if text and text != self._shown:
            self._console.say(text)
            self._shown = text
            self._next_progress = now + PROGRESS_EVERY_S


async def _get(client: httpx.AsyncClient, path: str) -> Any:
    """Return the JSON of a 200 ({} for another body), else None."""
    try:
        answer = await client.get(path)
    except httpx.HTTPError:
        return None
    if answer.status_code != 200:
        return None
    try:
        return answer.json()
    except ValueError:
        return {}
