"""The workers, and what they reported, at one moment. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from bus.checkpoints import Checkpoint
from bus.messages import InstanceCard, PageCounts, WorkerCard
from bus.morphs import MorphReport

UNHEARD_MS = 60_000  # a command without a report for so long was not taken
COOLDOWN_MS = 120_000  # the window of the load


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """A live worker. `pages` is None without a fresh report."""

    card: WorkerCard
    pages: PageCounts | None = None
    load: float = 0.0  # share of `controller.load_window_s` that it was busy

    @property
    def takes_orders(self) -> bool:
        """True if it serves and does not drain."""
        return self.card.state == "serving"

    @property
    def kind(self) -> str:
        return self.card.kind

    def instance(self, name: str) -> InstanceCard | None:
        """Return the card of its instance `name`."""
        return next((card for card in self.card.instances if card.id == name), None)

    def serves(self, model: str) -> bool:
        """Return True if it has an instance of `model`."""
        return any(card.model == model for card in self.card.instances)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """All that is known beside the records. Times are in ms."""

    now_ms: int
    workers: Mapping[str, WorkerView] = field(default_factory=dict)
    is_settled: bool = True  # Redis has been there for long enough that a missing lease means death
    reports: Mapping[str, MorphReport] = field(default_factory=dict)  # the last of each morph
    complaints: Mapping[str, str] = field(default_factory=dict)  # why there is no profile, by Measure
    progress: Mapping[str, str] = field(default_factory=dict)  # progress by Measure
    heard: Mapping[str, int] = field(default_factory=dict)  # time of the worker's last report, by Measure
    sent: Mapping[str, int] = field(default_factory=dict)  # when each command went out
    may_change: bool = False  # serving deployments may be deployed otherwise,
    cooldown_ms: int = COOLDOWN_MS  # so long after their last change
    is_load_known: bool = True  # loads are of a whole window
    checkpoints: Mapping[str, Checkpoint] = field(default_factory=dict)  # of unregistered models, by folder

    def holder(self, worker: str, epoch: int) -> WorkerView | None:
        """Return the worker if it is still that incarnation."""
        device = self.workers.get(worker)
        return device if device is not None and device.card.epoch == epoch else None

    def gone(self, epochs: Mapping[str, int]) -> str:
        """Return what became of the first of these workers that died or leaves; "": all stay."""
        for worker, epoch in epochs.items():
            device = self.workers.get(worker)
            if device is None:
                return f"{worker} died"
            if device.card.epoch != epoch:
                return f"{worker} started anew"
            if device.card.state == "draining":
                return f"{worker} drains"
        return ""

    def is_known(self, command_id: str) -> bool:
        """Return True if the command went out, as far as is remembered."""
        return command_id in self.sent or command_id in self.reports

    def is_unheard(self, command_id: str, sent_ms: int) -> bool:
        """Return True if no worker reported on the command within UNHEARD_MS."""
        return command_id not in self.reports and self.now_ms - sent_ms > UNHEARD_MS


def named_by_settings(workers: Iterable[WorkerView]) -> dict[str, str]:
    """Return the models that workers serve by their settings, which are not deployed, with a worker."""
    cards = [one.card for one in workers]
    return {one.model: card.id for card in cards for one in card.instances if not one.deployed}


def kept_of(report: MorphReport) -> MorphReport | None:
    """Return what is remembered of a report; None for a morph that no deployment orders.

    A report of a morph's end has the worker's telemetry, some 25 kB: thousands of them would be 100 MB.
    """
    return replace(report, telemetry=None) if report.kind in ("deploy", "retire") else None
