"""The scenes of the demo, one after the other, each with a line that says what happens and why."""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import httpx

from bus.burst import MEASURED_S, NUM_AT_ONCE, OVERLOAD, SEED, tokens_per_s
from bus.policy import Policy
from bus.settings import Settings
from instar.demo import burst as bursts
from instar.demo.card import card, p95_s, verdict
from instar.demo.picture import draw
from instar.demo.service import (
    MEMORY_MB,
    POLL_S,
    REST_S,
    START_S,
    ask,
    is_at_rest,
    is_complete,
    loading_text,
    until,
)
from instar.errors import InputError, ServerError
from instar.output.progress import progress_line
from instar.output.tables import trimmed
from instar.replay import files
from instar.replay.files import RunFile
from instar.replay.requests import IDS
from instar.replay.run import run_of
from instar.replay.traces import Workload

FULL, MORPHED = "full precision", "with morphs"
PICTURE: Final = "demo.png"
TRIES: Final = 3
GRANT_S: Final = 2.0  # the controller looks twice a second whether instances know the policy
DRAIN_S: Final = 90.0  # for the queue that full precision leaves
LONG_OUTPUT_TOKENS: Final = 256
LONG_S: Final = 90.0
# No loss is allowed to the long request, so that two workers become one; in a second or two.
FOR_LONG: Final[dict[str, Any]] = {"mode": "default", "loss_budget": 0.0, "windows": 2, "cooldown_s": 1.0}
AFTER_LONG: Final = FOR_LONG | {
    "loss_budget": "mode",
    "windows": Policy().windows,
    "cooldown_s": Policy().cooldown_s,
}
NUM_SCENES: Final = 5

Say = Callable[[str], None]


@dataclass(slots=True)
class Scenes:
    """The demo on a service that has just been started.

    say: writes a line. on_ready: called with the address of the dashboard.
    """

    client: httpx.AsyncClient
    url: str
    folder: Path
    seconds: float
    say: Say
    on_ready: Callable[[str], None]
    number: int = field(default=0, init=False)

    async def play(self) -> None:
        """Play all scenes. Raises CommandError; asyncio.CancelledError if it is interrupted."""
        await self.start()
        rate = await self.measure()
        load = bursts.burst(rate, self.seconds)
        full = await self.full_precision(load)
        morphed = await self.with_morphs(load)
        self.conclude(full, morphed)
        await self.long_request()

    # ------------------------------------------------------------------------------- scenes

    async def start(self) -> None:
        self._scene(
            f"Start: two workers of {MEMORY_MB} MB each, so that a burst fills the room that weights leave "
            "for the KV cache"
        )
        state = await until(self.client, "the workers to serve", is_complete, START_S, loading_text)
        blocks = sum(one["kv"]["blocks"] for one in state["instances"])
        self.say(f"  {blocks} KV blocks in both; the dashboard: {self.url}/")
        self.on_ready(f"{self.url}/")

    async def measure(self) -> float:
        """Return the tokens per second of both workers at full precision."""
        self._scene(
            f"Measure: {NUM_AT_ONCE} requests at once for {MEASURED_S:g} s, so that the burst fits "
            "this machine"
        )
        for _ in range(TRIES):  # the first one may find a machine that is still busy with the start
            await self._switch_off_morphs()
            run = await self._sent(bursts.at_once(), "measured", MEASURED_S)
            if rate := tokens_per_s(run.events_per_s):
                break
        else:
            raise ServerError(
                f"no token was generated within {MEASURED_S:g} s, {TRIES} times; is the machine busy?"
            )
        self.say(f"  {rate:.0f} tokens/s at full precision; the burst asks for {OVERLOAD:g} times that")
        return rate

    async def full_precision(self, load: Workload) -> RunFile:
        self._scene(
            f"Full precision: {len(load.arrivals)} requests in {load.seconds:g} s and no morphs, so that "
            "requests wait for KV blocks"
        )
        await self._switch_off_morphs()
        return await self._told(load, FULL)

    async def with_morphs(self, load: Workload) -> RunFile:
        self._scene(
            "With morphs: the same burst; under pressure layers are held in fewer bits, and their memory "
            "becomes KV blocks"
        )
        await self._rest()
        await self._set_policy({"mode": "default"})
        return await self._told(load, MORPHED)

    def conclude(self, full: RunFile, morphed: RunFile) -> None:
        """Print the card, keep both runs, and draw the picture if matplotlib is installed."""
        with trimmed() as console:
            console.print()
            console.print(card(full, morphed))
        self.say(verdict(full, morphed))
        for run in (full, morphed):
            self._keep(run)
        if find_spec("matplotlib") is None:
            self.say("No picture: matplotlib is not installed (pip install matplotlib)")
            return
        draw(full, morphed, self.folder / PICTURE)
        self.say(f"picture: {self.folder / PICTURE}")

    def _keep(self, run: RunFile) -> None:
        """Write a run in a folder of its name, in place of the one of an earlier demo. Raises InputError."""
        folder = self.folder / run.name.replace(" ", "-")
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise InputError(f"--out {folder}: cannot be made: {error.strerror}") from error
        files.write(folder, run)

    async def long_request(self) -> None:
        """Send a request that one worker cannot hold; wait for the group, the answer, and the parting."""
        state = await self._rest()
        one = state["instances"][0]
        tokens = bursts.long_request(one["tokens_at"], one["max_model_len"])
        if not tokens:
            raise ServerError(
                f"no request needs two workers here: they hold {one['tokens_at']} tokens by degree"
            )
        self._scene(
            f"A long request: {tokens} tokens, more than the {one['tokens_at']['1']} that a worker holds, so "
            "both become one instance (tp 2)"
        )
        await self._set_policy(FOR_LONG)
        began = time.monotonic()
        request = asyncio.create_task(self._complete(tokens - LONG_OUTPUT_TOKENS, LONG_OUTPUT_TOKENS))
        try:
            joined_s = await self._until_group(request, began)
            answer = await request
        finally:
            request.cancel()
        took_s = time.monotonic() - began
        written = answer["usage"]["completion_tokens"]
        self.say(
            f"  one instance of both workers after {joined_s:.1f} s; {written} of "
            f"{LONG_OUTPUT_TOKENS} tokens after {took_s:.1f} s"
        )
        await until(self.client, "both workers to serve alone again", is_at_rest, REST_S)
        self.say(f"  the group has parted after {time.monotonic() - began:.1f} s: no long request is left")
        await self._set_policy(AFTER_LONG)

    # ------------------------------------------------------------------------------- parts

    def _scene(self, text: str) -> None:
        self.number += 1
        self.say(f"[{self.number}/{NUM_SCENES}] {text}")

    async def _set_policy(self, fields: Mapping[str, Any]) -> None:
        await ask(self.client, "PUT", "/admin/policy", dict(fields))

    async def _switch_off_morphs(self) -> None:
        """Wait for an idle service at full precision, which orders no morph from then on."""
        await self._set_policy({"mode": "default"})  # in `manual`, layers that were swapped would stay
        await self._rest()
        await self._set_policy({"mode": "manual"})
        await asyncio.sleep(GRANT_S)

    async def _rest(self) -> dict[str, Any]:
        """Wait until the service is idle at full precision, and return its state."""
        return await until(self.client, "an idle service at full precision", is_at_rest, REST_S)

    async def _told(self, load: Workload, name: str) -> RunFile:
        """Send a burst and say in a line what came of it."""
        run = await self._sent(load, name, DRAIN_S)
        p95, late = p95_s(run), run.summary["violations"]["ttft"]["count"]
        told = "nothing was served" if p95 is None else f"P95 TTFT {p95:.2f} s"
        self.say(
            f"  {told}; {late} of {run.summary['requests']} requests over {run.slo.ttft_s:g} s or failed"
        )
        return run

    async def _sent(self, load: Workload, name: str, drain_s: float) -> RunFile:
        args = argparse.Namespace(
            url=self.url,
            api_key=None,
            admin_key=None,
            model="demo",
            token_ids=None,
            seed=SEED,
            drain=drain_s,
            out=Path(name),  # of which only the name is taken
            window=(0.0, None),
            scale=1.0,
            scale_lengths=1.0,
            slo_ttft=None,
            slo_tpot=None,
        )
        run = await run_of(Settings(), args, load)
        if run.about["was_interrupted"]:  # a replay ends with what it has
            raise asyncio.CancelledError
        return run

    async def _until_group(self, request: asyncio.Task[dict[str, Any]], began: float) -> float:
        """Return the seconds until one instance has both workers. Raises ServerError."""
        with progress_line("") as line:
            while time.monotonic() < began + LONG_S:
                state = await ask(self.client, "GET", "/admin/state")
                if any(one["tp"] == 2 for one in state["instances"]):
                    return time.monotonic() - began
                if request.done():
                    await request  # its error says more
                    raise ServerError("the long request was served without a group of both workers")
                line.show(f"{time.monotonic() - began:.0f} s: the request waits for both workers")
                await asyncio.sleep(POLL_S)
        raise ServerError(f"the workers did not become one instance within {LONG_S:g} s")

    async def _complete(self, prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
        rng = random.Random(SEED)
        body = {
            "model": "demo",
            "prompt": rng.choices(IDS, k=prompt_tokens),
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        return await ask(self.client, "POST", "/v1/completions", body, within_s=2 * LONG_S)
