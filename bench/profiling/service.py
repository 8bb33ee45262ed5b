"""The service under `bench.profiling`: one worker that serves, and a profile that is ordered there."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from bench.common.service import CpuSeconds, Service, cpu_seconds, noting_logs, wait_for
from bus.checkpoints import digest_of
from bus.codec import decode, encode
from bus.deployments import Measure, Profile
from bus.messages import CancelMorph, Event, WorkerCard
from bus.names import Names
from bus.precisions import PRECISIONS
from controller.deployments.profiling import BATCH_SIZES, PROMPT_TOKENS

SETTINGS: Final = {
    "WORKER__MEMORY_MB": "320",
    "WORKER__PAGE_KIB": "64",
    "WORKER__MAX_MODEL_LEN": "1024",
    "WORKER__DTYPE": "float32",
    "WORKER__QUANTIZATION": "rtn",  # dummies have nothing to calibrate
    "WORKER__LEASE_S": "10",  # a busy machine is not a dead one
    "GATEWAY__MAX_QUEUE": "2048",
    "GATEWAY__QUEUE_TIMEOUT_S": "300",
    "LOG__LEVEL": "warning",
}
WORKER: Final = "w0"
OTHER: Final = "other"  # the model that is profiled
ENDS_S: Final = 30.0  # for a profile that is cancelled, and for requests at their end
REST_S: Final = 1.0  # between a window and the next


class ProfileService(Service):
    """`folder` has what is profiled; one profile at a time."""

    folder_of_other: Path
    _order: Measure | None = None
    _ordered_ms = 0

    @property
    def port(self) -> int:
        return self.gateway_ports[0]

    def settle(self) -> None:
        """Nothing runs any more."""
        wait_for("the requests before to end", lambda: self.blocks_used() == 0, ENDS_S)
        time.sleep(REST_S)

    def measure(self) -> None:
        """From the very beginning."""
        self.forget()
        card = self._read(Names().card(WORKER))
        assert isinstance(card, WorkerCard)
        self._ordered_ms = time.time_ns() // 1_000_000
        self._order = Measure(
            id=f"measure-{self._ordered_ms}",
            epoch=card.epoch,
            model=OTHER,
            path=str(self.folder_of_other),
            digest=digest_of(self.folder_of_other),
            precisions=list(PRECISIONS),
            prompt_tokens=PROMPT_TOKENS,
            batch_sizes=BATCH_SIZES,
        )
        self._send(self._order)

    def cancel(self) -> None:
        """Until it has given everything back; nothing, where it has come to its end."""
        if self._order and not self.is_profiled():
            name = self._order.id
            self._send(CancelMorph(id=f"{name}-cancel", epoch=self._order.epoch, morph_id=name))
            wait_for("the profile to end", lambda: self._told("profile_failed") or self.is_profiled(), ENDS_S)

    def forget(self) -> None:
        """What was measured, here and beside the model: the next one is measured anew."""
        self.redis.delete(self._key)
        shutil.rmtree(self.folder_of_other / "instar", ignore_errors=True)

    def wait_measuring(self, within_s: float) -> None:
        wait_for("the profile's rounds", lambda: self.progress().startswith("round"), within_s)

    def wait_profiled(self, within_s: float) -> None:
        wait_for("the profile", self.is_profiled, within_s, every_s=0.5)

    def is_profiled(self) -> bool:
        """RuntimeError where it failed, unless it was cancelled."""
        failures = [reason for reason in self._told("profile_failed") if reason != "cancelled"]
        if failures:
            raise RuntimeError(f"the profile failed: {failures[0]}")
        return bool(self.redis.exists(self._key))

    def profiled_s(self) -> float | None:
        """From the order to the end, by the worker's clock; None: it has not come to its end."""
        profile = self._read(self._key)
        return (profile.ended_ms - self._ordered_ms) / 1e3 if isinstance(profile, Profile) else None

    def progress(self) -> str:
        """What it said last."""
        return next(iter(reversed(self._told("profile_progress"))), "")

    def cpu_seconds(self) -> CpuSeconds:
        return cpu_seconds(self)

    @property
    def _key(self) -> str:
        return Names().profile(OTHER, "cpu")

    def _told(self, kind: str) -> list[str]:
        if self._order is None:
            return []
        entries: Any = self.redis.xrange(Names().events, min=self._ordered_ms)
        messages = [decode(fields[b"m"]) for _, fields in entries]
        events = [one for one in messages if isinstance(one, Event) and one.morph_id == self._order.id]
        return [one.reason for one in events if one.kind == kind]

    def _send(self, command: Measure | CancelMorph) -> None:
        self.redis.xadd(Names().control(WORKER), {"m": encode(command)})

    def _read(self, key: str) -> object:
        stored: Any = self.redis.get(key)
        return decode(stored) if stored else None


@contextmanager
def running(folder: Path) -> Iterator[ProfileService]:
    """Ready, with the words of its processes added to what goes wrong. folder: of what is profiled."""
    service = ProfileService(settings=dict(SETTINGS))
    service.folder_of_other = folder
    with service, noting_logs(service):
        httpx.put(f"{service.url()}/admin/policy", json={"mode": "manual"}, timeout=20).raise_for_status()
        yield service
