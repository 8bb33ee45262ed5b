"""The service under the morph benchmark: all processes, one worker, a budget that full precision saturates.

What happened in a run is read from the bus afterwards: telemetry and events are kept there long enough, and
nobody asks the service anything while it is measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import httpx

from bench.common.service import CpuSeconds, Service, cpu_seconds, noting_logs, wait_for
from bus.codec import decode
from bus.messages import Event, InstanceTelemetry, LayerShape, MorphReport, WorkerTelemetry
from bus.names import Names

# models/demo in float32 is 27.6 MB; what is left for the KV cache is little more than a third of that.
BUDGET_MB: Final = 33
SETTINGS: Final = {
    "WORKER__MEMORY_MB": str(BUDGET_MB),
    "WORKER__PAGE_KIB": "16",
    "WORKER__MAX_TP": "1",
    "WORKER__MAX_MODEL_LEN": "512",
    "WORKER__DTYPE": "float32",
    "WORKER__LEASE_S": "10",  # a busy machine is not a dead one
    "GATEWAY__MAX_QUEUE": "2048",
    "GATEWAY__QUEUE_TIMEOUT_S": "300",
    "LOG__LEVEL": "warning",
}
TRIES: Final = 10  # of an order, half a second apart


@dataclass(frozen=True, slots=True)
class Configuration:
    """`below`: layers swapped by hand before the run, which keep it. `mode`: of the policy in the run."""

    name: str
    mode: str = "manual"
    below: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """One telemetry report. `at_s` is time.time()."""

    at_s: float
    kv_blocks: int
    kv_used: int
    running: int
    waiting: int
    waited_s: float  # the head of the queue
    layers_below_full: int
    preemptions: int

    @classmethod
    def of(cls, at_ms: int, one: InstanceTelemetry) -> Sample:
        return cls(
            at_s=at_ms / 1e3,
            kv_blocks=one.kv_blocks,
            kv_used=one.kv_used,
            running=one.running,
            waiting=one.waiting,
            waited_s=one.oldest_wait_seconds,
            layers_below_full=sum(layer != LayerShape() for layer in one.layers),
            preemptions=one.preemptions,
        )


class MorphService:
    """One instance that takes orders."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._names = Names("instar:")
        self.port = service.gateway_ports[0]
        self.blocks_at_full: int = wait_for("the first report", lambda: self.instance()["kv"]["blocks"])
        card = self.instance()
        self.id: str = card["id"]
        self.num_layers: int = card["num_layers"]
        self.order: list[int] = card["order"]
        self.order_name: str = card["order_name"]

    # ------------------------------------------------------------------------------------- orders

    def instance(self) -> dict[str, Any]:
        found: dict[str, Any] = self._service.state()["instances"][0]
        return found

    def use(self, configuration: Configuration, precision: str) -> int:
        """Full precision with its first KV cache, then what the configuration says. Nothing may run. Returns
        the KV blocks there are now."""
        self._set_mode("manual")
        blocks = self.swap(self.num_layers, "full")
        if blocks != self.blocks_at_full:
            numbers = self._order("resize", {"blocks": self.blocks_at_full})["numbers"]
            blocks = int(numbers["blocks_after"])
        if configuration.below:
            blocks = self.swap(configuration.below, precision)
        self._set_mode(configuration.mode)
        return blocks

    def swap(self, count: int, precision: str) -> int:
        """KV blocks afterwards. RuntimeError unless it is applied."""
        numbers = self._order("swap", {"count": count, "precision": precision})["numbers"]
        return int(numbers["blocks_after"])

    def _order(self, what: str, body: dict[str, Any]) -> dict[str, Any]:
        """The morph that was applied. One that the policy began before it was told to rest is in the way for
        a moment."""
        url = f"{self._service.url()}/admin/instances/{self.id}/{what}?wait=true"
        for _ in range(TRIES):
            answer = httpx.post(url, json=body | {"wait_s": 10.0}, timeout=60)
            morph: dict[str, Any] = answer.json()
            if morph.get("state") == "applied":
                return morph
            time.sleep(0.5)
        raise RuntimeError(f"{what} {body}: {answer.status_code} {answer.text}")

    def _set_mode(self, mode: str) -> None:
        """The thresholds are the defaults."""
        httpx.put(f"{self._service.url()}/admin/policy", json={"mode": mode}, timeout=10).raise_for_status()

    # ------------------------------------------------------------------------------------- what happened

    def samples(self, since_s: float) -> list[Sample]:
        reports = self._read(self._names.telemetry, WorkerTelemetry, since_s)
        return [Sample.of(report.at_ms, report.instances[0]) for report in reports]

    def morphs(self, since_s: float) -> list[MorphReport]:
        """Those that ended."""
        reports = self._read(self._names.events, MorphReport, since_s)
        return [report for report in reports if report.state != "running"]

    def decisions(self, since_s: float) -> list[Event]:
        events = self._read(self._names.events, Event, since_s)
        return [event for event in events if event.kind == "morph_decided"]

    def cpu_seconds(self) -> CpuSeconds:
        return cpu_seconds(self._service)

    def _read(self, stream: str, kind: type[Any], since_s: float) -> list[Any]:
        entries: Any = self._service.redis.xrange(stream, min=int(since_s * 1000))
        messages = [decode(fields[b"m"]) for _, fields in entries]
        return [message for message in messages if isinstance(message, kind)]


@contextmanager
def running() -> Iterator[MorphService]:
    with Service(settings=dict(SETTINGS)) as service, noting_logs(service):
        yield MorphService(service)
