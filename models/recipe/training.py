"""The training loop: a step is take a batch, forward and backward, update, count."""

import math
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor
from torch._inductor import config as inductor

from recipe import optim
from recipe.batches import Batches, Position
from recipe.network import Llama
from recipe.progress import Progress
from recipe.schedule import Schedule
from recipe.threads import ThreadChoice


@dataclass(frozen=True, slots=True)
class Settings:
    """How to train; `tokens_per_step` suits the device."""

    tokens_per_step: int
    short_row_len: int
    cooldown_s: float
    checkpoint_every_s: float
    is_compiled: bool
    num_threads: int
    seed: int = 1


@dataclass(slots=True)
class Counts:
    """Totals of a run, kept over resumption."""

    steps: int = 0
    tokens: int = 0


@dataclass
class Trainer:
    """Owns everything that changes while training."""

    model: Llama
    documents: list[Tensor]
    schedule: Schedule
    settings: Settings
    checkpoint: Path
    device: torch.device
    counts: Counts = field(default_factory=Counts)
    position: Position = field(default_factory=Position)

    def __post_init__(self) -> None:
        self.model.to(self.device)
        self.optimizers = optim.make_optimizers(self.model)
        self.loss = _compiled(self.model.loss) if self.settings.is_compiled else self.model.loss
        self.threads = ThreadChoice((1, self.settings.num_threads) if self.settings.num_threads > 1 else (1,))
        self.seen_row_lens: set[int] = set()
        self.saved_at_s = 0.0

    def run(self, progress: Progress, early_export: Callable[[], None], early_export_s: float) -> None:
        """Train until the budget is used up; SIGTERM brings the end forward, a second one ends at once.

        `early_export` is called once, after `early_export_s` of training, for those who wait for any model.
        """
        batches = Batches(self.documents, self.model.shape.context_len, self.settings.seed, self.position)
        with _EndingEarly(self.schedule, self.settings.cooldown_s):
            while not self.schedule.is_done:
                loss = self.step(batches)
                progress.show(self.schedule, self.counts, loss)
                self._save_when_due()
                if self.schedule.active_s >= early_export_s:
                    early_export()
                    early_export_s = math.inf

    def step(self, batches: Batches) -> float:
        """One update; returns the loss in nats per token."""
        row_len = self.model.shape.context_len if self.schedule.has_long_rows else self.settings.short_row_len
        self.threads.begin_step()
        started = time.perf_counter()
        tokens = batches.next(max(1, self.settings.tokens_per_step // row_len), row_len).to(self.device)
        with self._precision():
            loss = self.loss(tokens)
        loss.backward()
        optim.step(self.model, self.optimizers, self.schedule.lr_factor)
        value: float = loss.item()
        is_first = self.settings.is_compiled and row_len not in self.seen_row_lens
        step_s = time.perf_counter() - started
        if not is_first:
            self.threads.end_step(step_s)
        self.schedule.count_step(step_s, is_first_of_shape=is_first)
        self.seen_row_lens.add(row_len)
        self.counts.steps += 1
        self.counts.tokens += tokens[:, 1:].numel()
        return value

    def save(self) -> None:
        """Write the checkpoint; it appears whole or not at all."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "schedule": asdict(self.schedule),
            "counts": asdict(self.counts),
            "position": asdict(self.position),
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.checkpoint)
        self.saved_at_s = self.schedule.active_s

    def resume(self) -> None:
        """Go on from the checkpoint, with its schedule."""
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.schedule = Schedule(**state["schedule"])
        self.counts = Counts(**state["counts"])
        self.position = Position(**state["position"])

    def _save_when_due(self) -> None:
        if self.schedule.active_s - self.saved_at_s >= self.settings.checkpoint_every_s:
            self.save()

    def _precision(self) -> AbstractContextManager[object]:
        """bfloat16 on a GPU; float32 on the CPU, which was measured 1.5 times as fast as autocast."""
        if self.device.type == "cuda":
            return torch.autocast("cuda", torch.bfloat16)  # type: ignore[no-any-return]  # mypy skips torch
        return nullcontext()


def _compiled(loss: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Fused kernels whose thread count can change between steps."""
    inductor.cpp.dynamic_threads = True
    return torch.compile(loss, dynamic=False)  # type: ignore[no-any-return]


class _EndingEarly:
    """Let SIGTERM and SIGINT shorten `schedule` while open; the former handlers come back after."""

    def __init__(self, schedule: Schedule, cooldown_s: float) -> None:
        self.schedule = schedule
        self.cooldown_s = cooldown_s
        self.former: dict[int, object] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self.former[number] = signal.signal(number, self._handle)

    def __exit__(self, *exc: object) -> None:
        for number, handler in self.former.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal() itself returned

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.schedule.finish_within(self.cooldown_s)
        self.cooldown_s = 0.0
