"""What is seen of the workers at one moment. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from bus.checkpoints import Checkpoint
from bus.messages import InstanceCard, MorphReport, PageCounts, WorkerCard

UNHEARD_MS = 60_000  # a command on which nobody reported for so long was not taken
COOLDOWN_MS = 120_000  # as long as the load looks back


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """A live worker. `pages` None: no fresh report."""

    card: WorkerCard
    pages: PageCounts | None = None
    load: float = 0.0  # share of `controller.load_window_s` that it was busy

    @property
    def takes_orders(self) -> bool:
        return self.card.state == "serving"

    @property
    def kind(self) -> str:
        return self.card.kind

    def instance(self, name: str) -> InstanceCard | None:
        return next((card for card in self.card.instances if card.id == name), None)

    def serves(self, model: str) -> bool:
        return any(card.model == model for card in self.card.instances)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """`is_settled`: Redis has been there for long enough that a missing lease means death. `reports`: the
    last of each morph. `complaints`: by the id of a Measure, why it ended without a profile. `progress`: the
    same, how far it is; `heard`: when that was said, in ms. `sent`: when each command went out, in ms.
    `may_change`: what serves may be deployed otherwise, `cooldown_ms` after the last change. `is_load_known`:
    loads are of a whole window. `checkpoints`: by folder, of models that are deployed and not registered."""

    now_ms: int
    workers: Mapping[str, WorkerView] = field(default_factory=dict)
    is_settled: bool = True
    reports: Mapping[str, MorphReport] = field(default_factory=dict)
    complaints: Mapping[str, str] = field(default_factory=dict)
    progress: Mapping[str, str] = field(default_factory=dict)
    heard: Mapping[str, int] = field(default_factory=dict)
    sent: Mapping[str, int] = field(default_factory=dict)
    may_change: bool = False
    is_load_known: bool = True
    cooldown_ms: int = COOLDOWN_MS
    checkpoints: Mapping[str, Checkpoint] = field(default_factory=dict)

    def holder(self, worker: str, epoch: int) -> WorkerView | None:
        """The worker, if it is still that incarnation."""
        device = self.workers.get(worker)
        return device if device is not None and device.card.epoch == epoch else None

    def gone(self, epochs: Mapping[str, int]) -> str:
        """The first of these workers that is not there any more, or leaves, in words; "": all stay."""
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
        """It went out, as far as anybody remembers."""
        return command_id in self.sent or command_id in self.reports

    def is_unheard(self, command_id: str, sent_ms: int) -> bool:
        return command_id not in self.reports and self.now_ms - sent_ms > UNHEARD_MS


def named_by_settings(workers: Iterable[WorkerView]) -> dict[str, str]:
    """Models that workers serve by their settings, and one worker of each: they are nobody's to deploy."""
    return {
        card.model: device.card.id
        for device in workers
        for card in device.card.instances
        if not card.deployed
    }
