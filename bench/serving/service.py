"""The service under `bench.serving`: all processes, four workers, and one of several ways to schedule.

Workers stay from way to way, which saves their loading. Gateway, monitor and controller are restarted, so
that no way inherits what another one learnt. The first shape is made before a run begins.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.common.service import STEADY, Process, Service, wait_for
from bus.codec import decode
from bus.messages import InstanceCard, WorkerCard, WorkerTelemetry
from bus.morphs import MorphReport
from bus.names import Names

SETTINGS: Final = STEADY | {
    "WORKER__PAGE_KIB": "64",
    "WORKER__MAX_TP": "4",
    "WORKER__MAX_MODEL_LEN": "16384",
    "WORKER__VARIANTS": "[]",  # degrees change here, precisions do not
    "WORKER__MAX_NUM_BATCHED_TOKENS": "128",  # four share two cores: a step of 512 would take seconds
    "GATEWAY__QUEUE_TIMEOUT_S": "900",
    "GATEWAY__DRAIN_TIMEOUT_S": "1",
}
ORDER_TRIES: Final = 40  # half a second apart
LAST_REPORTS: Final = 400  # reports of some seconds
POLICY_S: Final = 3.0  # until an idle gateway has read a policy


@dataclass(frozen=True, slots=True)
class ServingWay:
    """A way to schedule.

    `pick` names the choice of a gateway that knows nothing of transformations ("" is the service's own
    gateway). `shapes` are the degrees at the beginning, and throughout the run if `is_static`.
    """

    name: str
    shapes: tuple[int, ...]
    pick: str = ""
    is_static: bool = False

    @property
    def policy(self) -> dict[str, Any]:
        """The policy of the way; a static way refuses what none of its shapes holds."""
        if self.is_static:
            return {"mode": "manual", "max_tp": max(self.shapes)}
        return {"mode": "default", "max_tp": 0}


@dataclass(frozen=True, slots=True)
class ServiceGivenUp:
    """Tokens of KV that were given up and computed again, by failed transforms or preemptions."""

    tokens: int
    preemptions: int


class ServingService(Service):
    """A service that changes from one way to another: `use` a way, then load `url()`."""

    pick = ""
    start_s = 600.0  # the first start compiles kernels

    def __init__(self, model: Path, num_workers: int, memory_mb: int) -> None:
        settings = SETTINGS | {"WORKER__MEMORY_MB": str(memory_mb)}
        super().__init__(num_workers=num_workers, model=model, settings=settings)

    def add_gateway(self, index: int) -> Process:
        if not self.pick:
            return super().add_gateway(index)
        return self.add(
            f"gateway{index}",
            "bench.serving.gateway",
            INSTAR_GATEWAY__PORT=str(self.gateway_ports[index]),
            INSTAR_GATEWAY__ID=f"g{index}",
            BENCH_PICK=self.pick,
        )

    def use(self, way: ServingWay) -> None:
        """Start a new gateway, monitor and controller, and make the way's first shape. No request may run."""
        for name in ("gateway0", "controller", "monitor"):
            self.processes[name].terminate()
        self.pick = way.pick
        for name in ("monitor", "controller"):
            self.add(name, name)
        self.add_gateway(0)
        self.wait_ready()
        self.set_policy(mode="manual", max_tp=0)
        wait_for("what ran before to end", lambda: self.blocks_used() == 0, within_s=120)
        self.reshape(way.shapes)
        self.set_policy(**way.policy)
        time.sleep(POLICY_S)

    def reshape(self, shapes: tuple[int, ...]) -> None:
        """Give the instances these degrees, over the workers in their order."""
        for workers in self._groups():
            if len(workers) > 1:
                self.apply("transform", {"workers": workers, "tp": 1}, ORDER_TRIES)
        rest = [f"w{index}" for index in range(self.num_workers)]
        for tp in shapes:
            workers, rest = rest[:tp], rest[tp:]
            if tp > 1:
                self.apply("transform", {"workers": workers, "tp": tp}, ORDER_TRIES)
        wait_for(f"the shape {shapes}", lambda: self.shapes() == sorted(shapes))

    def shapes(self) -> list[int]:
        return sorted(map(len, self._groups()))

    def card(self) -> InstanceCard:
        """Return the card of an instance; all are alike."""
        stored: Any = self.redis.get(Names().card("w0"))
        card = decode(stored)
        assert isinstance(card, WorkerCard)
        return card.instances[0]

    def _groups(self) -> list[list[str]]:
        return [one["workers"] for one in self.state()["instances"]]

    # ------------------------------------------------------------------------------------- what happened

    def transforms(self, since_s: float) -> list[MorphReport]:
        """Return the reports of transforms that ended, applied or not, since `since_s` (time.time())."""
        reports = self.messages(Names().events, MorphReport, since_s)
        return [one for one in reports if one.kind == "transform" and one.state != "running"]

    def given_up(self) -> ServiceGivenUp:
        """Return what was given up so far, by the last report of each worker."""
        last: dict[str, WorkerTelemetry] = {}
        entries: Any = self.redis.xrevrange(Names().telemetry, count=LAST_REPORTS)
        for _, fields in entries:
            report = decode(fields[b"m"])
            if isinstance(report, WorkerTelemetry):
                last.setdefault(report.worker, report)
        if len(last) != self.num_workers:
            raise RuntimeError(f"of {self.num_workers} workers {sorted(last)} reported lately")
        instances = [one for report in last.values() for one in report.instances]
        return ServiceGivenUp(
            tokens=sum(one.recomputed_tokens for one in instances),
            preemptions=sum(one.preemptions for one in instances),
        )
