"""The service under the serving benchmark: all processes, four workers, and one of several ways to schedule.

Workers stay from way to way, which saves their loading; gateway, monitor and controller start anew, so that
no way inherits what another one learnt, and the shape is made before a run begins.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from bench.common.service import CpuSeconds, Process, Service, cpu_seconds, noting_logs, wait_for
from bus.codec import decode
from bus.messages import InstanceCard, MorphReport, WorkerCard, WorkerTelemetry
from bus.names import Names

SETTINGS: Final = {
    "WORKER__PAGE_KIB": "64",
    "WORKER__MAX_TP": "4",
    "WORKER__MAX_MODEL_LEN": "16384",
    "WORKER__DTYPE": "float32",
    "WORKER__VARIANTS": "[]",  # bits stay: this is about degrees
    "WORKER__MAX_NUM_BATCHED_TOKENS": "128",  # four share two cores: a step of 512 would take seconds
    "WORKER__LEASE_S": "10",  # a busy machine is not a dead one
    "GATEWAY__MAX_QUEUE": "2048",
    "GATEWAY__QUEUE_TIMEOUT_S": "900",
    "GATEWAY__DRAIN_TIMEOUT_S": "1",
    "LOG__LEVEL": "warning",
}
ORDER_TRIES: Final = 40  # half a second apart
LAST_REPORTS: Final = 400  # some seconds of them
START_S: Final = 600.0  # the first time kernels are compiled
POLICY_S: Final = 3.0  # until an idle gateway has read a policy


@dataclass(frozen=True, slots=True)
class Way:
    """`pick`: of a gateway that knows nothing of transformations; "": the service's own. `shapes`: degrees at
    the beginning; `is_static`: for ever."""

    name: str
    shapes: tuple[int, ...]
    pick: str = ""
    is_static: bool = False

    @property
    def policy(self) -> dict[str, Any]:
        """A static way refuses what no shape of it holds."""
        if self.is_static:
            return {"mode": "manual", "max_tp": max(self.shapes)}
        return {"mode": "default", "max_tp": 0}


@dataclass(frozen=True, slots=True)
class GivenUp:
    """KV that was given up and computed again, in tokens: by a transform that failed, or by preemptions, of
    which there were so many."""

    tokens: int
    preemptions: int


class ServingService(Service):
    """`use` a way, then load `url()`."""

    pick = ""

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

    def wait_ready(self, within_s: float = START_S) -> None:
        super().wait_ready(within_s)

    def use(self, way: Way) -> None:
        """A gateway, a monitor and a controller that know nothing yet, and the way's first shape. Nothing may
        run that anybody still wants."""
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
        """Degrees of the instances, over the workers in their order."""
        for workers in self._groups():
            if len(workers) > 1:
                self._transform(workers, 1)
        rest = [f"w{index}" for index in range(self.num_workers)]
        for tp in shapes:
            workers, rest = rest[:tp], rest[tp:]
            if tp > 1:
                self._transform(workers, tp)
        wait_for(f"the shape {shapes}", lambda: self.shapes() == sorted(shapes))

    def shapes(self) -> list[int]:
        return sorted(map(len, self._groups()))

    def card(self) -> InstanceCard:
        """Of any worker."""
        stored: Any = self.redis.get(Names("instar:").card("w0"))
        card = decode(stored)
        assert isinstance(card, WorkerCard)
        return card.instances[0]

    def set_policy(self, **values: Any) -> None:
        httpx.put(f"{self.url()}/admin/policy", json=values, timeout=20).raise_for_status()

    def _groups(self) -> list[list[str]]:
        return [one["workers"] for one in self.state()["instances"]]

    def _transform(self, workers: list[str], tp: int) -> None:
        """RuntimeError unless it is applied. One that the controller began is in the way for a moment."""
        url = f"{self.url()}/admin/instances/transform?wait=true"
        for _ in range(ORDER_TRIES):
            answer = httpx.post(url, json={"workers": workers, "tp": tp}, timeout=60)
            if answer.json().get("state") == "applied":
                return
            time.sleep(0.5)
        raise RuntimeError(f"{workers} to tp {tp}: {answer.status_code} {answer.text}")

    # ------------------------------------------------------------------------------------- what happened

    def transforms(self, since_s: float) -> list[MorphReport]:
        """Those that ended, however. `since_s`: of time.time()."""
        entries: Any = self.redis.xrange(Names("instar:").events, min=int(since_s * 1000))
        messages = [decode(fields[b"m"]) for _, fields in entries]
        reports = [one for one in messages if isinstance(one, MorphReport)]
        return [one for one in reports if one.kind == "transform" and one.state != "running"]

    def given_up(self) -> GivenUp:
        """As the workers reported last."""
        last: dict[str, WorkerTelemetry] = {}
        entries: Any = self.redis.xrevrange(Names("instar:").telemetry, count=LAST_REPORTS)
        for _, fields in entries:
            report = decode(fields[b"m"])
            if isinstance(report, WorkerTelemetry):
                last.setdefault(report.worker, report)
        if len(last) != self.num_workers:
            raise RuntimeError(f"of {self.num_workers} workers {sorted(last)} reported lately")
        instances = [one for report in last.values() for one in report.instances]
        return GivenUp(
            tokens=sum(one.recomputed_tokens for one in instances),
            preemptions=sum(one.preemptions for one in instances),
        )

    def cpu_seconds(self) -> CpuSeconds:
        return cpu_seconds(self)


@contextmanager
def running(model: Path, num_workers: int, memory_mb: int) -> Iterator[ServingService]:
    """Ready, all alone, with the words of its processes added to what goes wrong."""
    settings = SETTINGS | {"WORKER__MEMORY_MB": str(memory_mb)}
    service = ServingService(num_workers=num_workers, model=model, settings=settings)
    with service, noting_logs(service):
        yield service
