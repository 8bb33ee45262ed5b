"""The service under the morph and paper benchmarks: one worker with a budget that full precision saturates.

What happened in a run is read from the bus afterwards: telemetry and events are kept there long enough, and
no request of the benchmark disturbs the service while it is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from bench.common.service import STEADY, Service, wait_for
from bus.messages import InstanceTelemetry, LayerShape, WorkerTelemetry
from bus.morphs import MorphReport
from bus.names import Names

# models/demo in float32 is 27.6 MB; what is left for the KV cache is little more than a third of that.
BUDGET_MB: Final = 33
PRECISION: Final = "int4"  # precision of the layers that a way swaps


@dataclass(frozen=True, slots=True)
class Way:
    """A way of serving that is compared with others.

    `below`: how many layers, in the model's order, have PRECISION during the whole run; `plan`: the precision
    of each layer instead; `mode`: of the policy during the run; `is_roomy`: runs on the service with more
    memory.
    """

    name: str
    mode: str = "manual"
    below: int = 0
    plan: tuple[str, ...] = ()
    is_roomy: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """One telemetry report. `at_s` is time.time()."""

    at_s: float
    kv_blocks: int
    kv_used: int
    running: int
    waiting: int
    waited_s: float  # wait of the first request in the queue
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


class MorphService(Service):
    """A service with one instance that takes orders."""

    start_s = 600.0  # the first start compiles kernels

    def __init__(self, budget_mb: int = BUDGET_MB) -> None:
        own = {"WORKER__MEMORY_MB": str(budget_mb), "WORKER__PAGE_KIB": "16", "WORKER__MAX_TP": "1"}
        super().__init__(settings=STEADY | own | {"WORKER__MAX_MODEL_LEN": "512"})

    def start(self) -> None:
        super().start()
        self.blocks_at_full: int = wait_for("the first report", lambda: self.instance()["kv"]["blocks"])
        card = self.instance()
        self.id: str = card["id"]
        self.num_layers: int = card["num_layers"]
        self.order: list[int] = card["order"]
        self.order_name: str = card["order_name"]

    # ------------------------------------------------------------------------------------- orders

    def instance(self) -> dict[str, Any]:
        found: dict[str, Any] = self.state()["instances"][0]
        return found

    def use(self, way: Way) -> int:
        """Wait until the service is idle, set it up for `way`, and return its KV blocks.

        Each way begins from full precision with its first KV cache.
        """
        wait_for("an idle service", self._is_idle, within_s=60.0)
        self.set_policy(mode="manual")
        blocks = self._swap({"count": self.num_layers, "precision": "full"})
        if blocks != self.blocks_at_full:
            blocks = self._order("resize", {"blocks": self.blocks_at_full})
        if way.below:
            blocks = self._swap({"count": way.below, "precision": PRECISION})
        for precision in sorted(set(way.plan) - {"full"}):
            layers = [layer for layer, one in enumerate(way.plan) if one == precision]
            blocks = self._swap({"layers": layers, "precision": precision})
        self.set_policy(mode=way.mode)
        return blocks

    def _swap(self, body: dict[str, Any]) -> int:
        return self._order("swap", body)

    def _order(self, what: str, body: dict[str, Any]) -> int:
        """Return the KV blocks after the morph. Raises RuntimeError unless it is applied."""
        numbers = self.apply(f"{self.id}/{what}", body | {"wait_s": 10.0})["numbers"]
        return int(numbers["blocks_after"])

    def _is_idle(self) -> bool:
        instance = self.instance()
        return not (instance["running"] or instance["waiting"] or instance["kv"]["used"])

    def wait_at_rest(self, blocks: int) -> None:
        """Wait until nothing runs and the KV cache has so many blocks: nothing is morphed."""
        wait_for("a service at rest", lambda: self._is_idle() and self.instance()["kv"]["blocks"] == blocks)

    def block_mb(self) -> float:
        """Return the memory that a KV block takes in all layers, in MiB."""
        worker = self.state()["workers"][0]
        return float(worker["pages"]["kv"] * worker["page_bytes"] / self.blocks_at_full / 2**20)

    # ------------------------------------------------------------------------------------- what happened

    def samples(self, since_s: float) -> list[Sample]:
        return [Sample.of(report.at_ms, report.instances[0]) for report in self.reports(since_s)]

    def reports(self, since_s: float) -> list[WorkerTelemetry]:
        return self.messages(Names().telemetry, WorkerTelemetry, since_s)

    def morphs(self, since_s: float) -> list[MorphReport]:
        """Return the reports of morphs that ended."""
        reports = self.messages(Names().events, MorphReport, since_s)
        return [report for report in reports if report.state != "running"]
