"""Says how far the service is: what loads, when it is ready, when it is whole again after a death."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx

from bus.settings import Settings
from instar.address import url_of
from instar.serve.console import Console
from instar.serve.preflight import parse_model

POLL_S = 0.2
PROGRESS_AFTER_S = 2.0
PROGRESS_EVERY_S = 2.0


class Watch:
    """Asks the gateway only while something is starting; a service at rest is left alone."""

    def __init__(self, settings: Settings, console: Console) -> None:
        self._settings = settings
        self._console = console
        self._told = ""
        self._next_progress = 0.0

    async def until_ready(self) -> None:
        """Tells the address once a model can be asked, or deployed where there is none."""
        await self._until(self._is_ready)
        names = ", ".join(parse_model(model)[0] for model in self._settings.worker.models)
        what = f"model {names}" if names else "no model yet: `instar model add DIR`, `instar deploy`"
        self._console.say(f"Instar is ready: {url_of(self._settings.gateway)}/v1 ({what})")

    def _is_ready(self, is_served: bool, state: dict[str, Any]) -> bool:
        """Workers that started without a model are ready without one."""
        if self._settings.worker.models:
            return is_served
        return any(worker.get("state") == "serving" for worker in state.get("workers", []))

    async def until_whole(self, expected: Callable[[], dict[str, float]]) -> None:
        """After a death: tells when every worker that should serve does. `expected` maps a worker's id to
        the wall-clock second of its last death, 0.0 for none: an epoch (the worker's start in ms) before
        that is the dead one's, whose lease has not run out yet."""
        began = time.monotonic()

        def is_whole(ready: bool, state: dict[str, Any]) -> bool:
            alive = {w["id"]: w["epoch"] for w in state.get("workers", []) if w.get("state") == "serving"}
            return self._is_ready(ready, state) and all(
                alive.get(id_, -1) >= died * 1000 for id_, died in expected().items()
            )

        await self._until(is_whole)
        self._console.say(f"Instar is whole again, {time.monotonic() - began:.1f} s after that death")

    async def _until(self, done: Callable[[bool, dict[str, Any]], bool]) -> None:
        self._next_progress, self._told = time.monotonic() + PROGRESS_AFTER_S, ""
        async with httpx.AsyncClient(base_url=url_of(self._settings.gateway), timeout=5) as client:
            while True:
                ready = await _get(client, "/ready")
                state = await _get(client, "/admin/state", _bearer(self._settings.gateway.admin_keys))
                if done(ready is not None, state or {}):
                    return
                self._tell_progress(state or {})
                await asyncio.sleep(POLL_S)

    def _tell_progress(self, state: dict[str, Any]) -> None:
        now = time.monotonic()
        if now < self._next_progress:
            return
        loading = [w for w in state.get("workers", []) if w.get("state") == "loading"]
        steps = [(w["id"], w.get("progress") or "loading") for w in loading]
        if self._settings.log.level in ("debug", "info"):  # then workers log percentages themselves
            steps = [(worker, progress) for worker, progress in steps if "%" not in progress]
        told = ", ".join(f"{worker}: {progress}" for worker, progress in steps)
        if told and told != self._told:
            self._console.say(told)
            self._told = told
            self._next_progress = now + PROGRESS_EVERY_S


async def _get(client: httpx.AsyncClient, path: str, headers: dict[str, str] | None = None) -> Any:
    """The JSON of a 200 ({} if it is none), else None."""
    try:
        answer = await client.get(path, headers=headers)
    except httpx.HTTPError:
        return None
    if answer.status_code != 200:
        return None
    try:
        return answer.json()
    except ValueError:
        return {}


def _bearer(keys: list[str]) -> dict[str, str]:
    return {"Authorization": f"Bearer {keys[0]}"} if keys else {}
