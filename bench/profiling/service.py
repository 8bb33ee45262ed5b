"""The service under `bench.profiling`: one worker that serves, and a profile that is ordered on it."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any, Final

from bench.common.service import STEADY, Service, wait_for
from bus.checkpoints import folder_digest
from bus.codec import decode, encode
from bus.deployments import Measure, Profile
from bus.messages import Event, WorkerCard
from bus.morphs import CancelMorph
from bus.names import Names
from bus.precisions import PRECISIONS
from controller.deployments.profiling import BATCH_SIZES, PROMPT_TOKENS

SETTINGS: Final = STEADY | {
    "WORKER__MEMORY_MB": "320",
    "WORKER__PAGE_KIB": "64",
    "WORKER__MAX_MODEL_LEN": "1024",
    "WORKER__QUANTIZATION": "rtn",  # dummies have nothing to calibrate
}
WORKER: Final = "w0"
OTHER: Final = "other"  # the model that is profiled
ENDS_S: Final = 30.0  # time for a cancelled profile and for the last requests
REST_S: Final = 1.0  # between a window and the next


class ProfileService(Service):
    """A service on which the model in a folder is profiled, one profile at a time. Nothing morphs."""

    start_s = 600.0  # the first start compiles kernels
    _order: Measure | None = None
    _ordered_ms = 0

    def __init__(self, folder_of_other: Path) -> None:
        super().__init__(settings=dict(SETTINGS))
        self.folder_of_other = folder_of_other

    def start(self) -> None:
        super().start()
        self.set_policy(mode="manual")

    def settle(self) -> None:
        """Wait until no request runs any more, and rest."""
        wait_for("the requests before to end", lambda: self.blocks_used() == 0, ENDS_S)
        time.sleep(REST_S)

    def measure(self) -> None:
        """Order a new profile."""
        self.forget()
        card = self._read(Names().card(WORKER))
        assert isinstance(card, WorkerCard)
        self._ordered_ms = time.time_ns() // 1_000_000
        self._order = Measure(
            id=f"measure-{self._ordered_ms}",
            epoch=card.epoch,
            model=OTHER,
            path=str(self.folder_of_other),
            digest=folder_digest(self.folder_of_other),
            precisions=list(PRECISIONS),
            prompt_tokens=PROMPT_TOKENS,
            batch_sizes=BATCH_SIZES,
        )
        self._send(self._order)

    def cancel(self) -> None:
        """Cancel the profile, unless it has ended, and wait until it has returned its memory."""
        if self._order and not self.is_profiled():
            name = self._order.id
            self._send(CancelMorph(id=f"{name}-cancel", epoch=self._order.epoch, morph_id=name))
            wait_for(
                "the profile to end", lambda: self._reasons("profile_failed") or self.is_profiled(), ENDS_S
            )

    def forget(self) -> None:
        """Delete the profile, in Redis and beside the model, so that the next one begins from nothing."""
        self.redis.delete(self._key)
        shutil.rmtree(self.folder_of_other / "instar", ignore_errors=True)

    def wait_measuring(self, within_s: float) -> None:
        wait_for("the profile's rounds", lambda: self.progress().startswith("round"), within_s)

    def wait_profiled(self, within_s: float) -> None:
        wait_for("the profile", self.is_profiled, within_s, every_s=0.5)

    def is_profiled(self) -> bool:
        """Return whether the profile is complete.

        Raises RuntimeError if it failed, unless it was cancelled.
        """
        failures = [reason for reason in self._reasons("profile_failed") if reason != "cancelled"]
        if failures:
            raise RuntimeError(f"the profile failed: {failures[0]}")
        return bool(self.redis.exists(self._key))

    def profiled_s(self) -> float | None:
        """Return the seconds from the order to the end by the worker's clock, or None if it has not ended."""
        profile = self._read(self._key)
        return (profile.ended_ms - self._ordered_ms) / 1e3 if isinstance(profile, Profile) else None

    def progress(self) -> str:
        """Return the last progress that the worker reported."""
        return next(iter(reversed(self._reasons("profile_progress"))), "")

    @property
    def _key(self) -> str:
        return Names().profile(OTHER, "cpu")

    def _reasons(self, kind: str) -> list[str]:
        if self._order is None:
            return []
        events = self.messages(Names().events, Event, self._ordered_ms / 1e3)
        return [one.reason for one in events if one.morph_id == self._order.id and one.kind == kind]

    def _send(self, command: Measure | CancelMorph) -> None:
        self.redis.xadd(Names().control(WORKER), {"m": encode(command)})

    def _read(self, key: str) -> object:
        stored: Any = self.redis.get(key)
        return decode(stored) if stored else None
