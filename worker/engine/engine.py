"""All instances of one worker behind a few verbs. One thread owns it; it knows nothing of Redis."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from bus.messages import Delta, RejectReason
from worker.core import Request
from worker.engine.instance import Instance, Output

log = logging.getLogger(__name__)

# A device that reports an error of its own (not memory) answers every later call with the same error.
DEVICE_ERRORS: tuple[type[Exception], ...] = (
    (torch.AcceleratorError,) if hasattr(torch, "AcceleratorError") else ()
)


@dataclass(slots=True)
class StepResult:
    """What one step of one instance made; `born_ns` is the wall clock when its tokens were known, `step_s`
    how long it took."""

    instance: str
    step: int
    born_ns: int
    outputs: list[Output]
    fingerprint: str  # of the shape that it ran in, as the next
    layers_below_full: int
    step_s: float = 0.0


def result_of(instance: Instance, outputs: list[Output]) -> StepResult:
    """What a step made, now."""
    return StepResult(
        instance=instance.id,
        step=instance.num_steps,
        born_ns=time.time_ns(),
        outputs=outputs,
        fingerprint=instance.fingerprint,
        layers_below_full=instance.layers_below_full,
        step_s=instance.step_s,
    )


def _gone(instance_id: str, request: Request) -> StepResult:
    """Of a request that came for an instance that is not here any more."""
    delta = Delta(
        request_id=request.id,
        attempt=request.attempt,
        index=len(request.sent_token_ids),
        token_ids=[],
        finish_reason="error",
        error=f"{instance_id} is not here any more",
        reject_reason=RejectReason.RETIRED,
    )
    return StepResult(instance_id, 0, time.time_ns(), [Output(request, delta)], "", 0)


class Parts(Protocol):
    """What this device runs of instances elsewhere."""

    wake: Callable[[], None]  # it can step, perhaps; called in any thread

    @property
    def can_step(self) -> bool: ...

    def step(self) -> None: ...

    def fence(self) -> None:
        """This worker has lost its lease: others do not count on it any more."""

    def close(self) -> None: ...


class Engine:
    """Verbs: `submit`, `cancel`, `step`; the order of instances is the order in which they step."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.instances: dict[str, Instance] = {}
        self.parts: Parts | None = None
        self._device = device or torch.device("cpu")
        self._unsent: list[StepResult] = []  # ends of requests whose instance is gone

    def bind_thread(self) -> None:
        """Call once in the thread that will step, if it is not the one that loaded: the current CUDA device
        belongs to a thread."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def add_instance(self, instance: Instance) -> None:
        if instance.id in self.instances:
            raise ValueError(f"instance {instance.id} exists already")
        self.instances[instance.id] = instance

    def remove_instance(self, instance_id: str) -> Instance:
        return self.instances.pop(instance_id)

    def send_away(self, instance_id: str, reason: str) -> int:
        """Everything that waits or runs there ends with this error; the next step tells. Returns how many."""
        instance, outputs = self.instances[instance_id], list[Output]()
        while instance.has_work:
            outputs += instance.fail(reason, RejectReason.RETIRED)
        if outputs:
            self._unsent.append(result_of(instance, outputs))
        return len(outputs)

    def submit(self, instance_id: str, request: Request, arrived: float | None = None) -> None:
        """`arrived`: monotonic seconds when the worker got it, if not now. One for an instance that is gone
        ends at once. ValueError for an id that already runs there."""
        if instance := self.instances.get(instance_id):
            instance.submit(request, arrived)
        else:
            self._unsent.append(_gone(instance_id, request))

    def cancel(self, request_ids: Iterable[str]) -> int:
        ids = list(request_ids)
        return sum(instance.cancel(ids) for instance in self.instances.values())

    def reset(self) -> None:
        """A new epoch: nothing that was submitted before says anything any more, and counters begin at 0."""
        self._unsent.clear()
        if self.parts:
            self.parts.fence()
        for instance in self.instances.values():
            instance.reset()

    @property
    def has_work(self) -> bool:
        return bool(self._unsent) or any(instance.has_work for instance in self.instances.values())

    def can_step(self, *, is_paused: bool = False) -> bool:
        """Whether `step` has something to do now; what has work may wait for others."""
        if self.parts and self.parts.can_step:
            return True
        has_own = bool(self._unsent) or any(instance.can_step for instance in self.instances.values())
        return has_own and not is_paused

    def step(self, *, is_paused: bool = False) -> list[StepResult]:
        """One step of every instance that has something to do, in turn: none can starve another. is_paused:
        only what others wait for, elsewhere."""
        if self.parts and self.parts.can_step:
            self.parts.step()
        if is_paused:
            return []
        results, self._unsent = self._unsent, []
        for instance in list(self.instances.values()):
            if instance.can_step and (outputs := self._step(instance)):
                results.append(result_of(instance, outputs))
        return results

    def _step(self, instance: Instance) -> list[Output]:
        """A step that raises costs its own instance's running requests an error, nobody else anything."""
        try:
            return instance.step()
        except DEVICE_ERRORS:
            raise
        except Exception as error:
            log.exception("a step of %s failed", instance.id)
            return instance.fail(f"the model's step failed: {type(error).__name__}: {error}")

    def close(self) -> None:
        """No step follows: those who take part elsewhere hear it."""
        for instance in self.instances.values():
            instance.close()
        if self.parts:
            self.parts.close()

    def check_integrity(self) -> None:
        """AssertionError when a block is lost or owned twice."""
        for instance in self.instances.values():
            instance.check_integrity()
