"""All instances of one worker behind a few verbs. One thread owns it; it knows nothing of Redis."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from worker.core import Request
from worker.engine.instance import Instance, Output

log = logging.getLogger(__name__)

# A device that reports an error of its own (not memory) answers every later call with the same error.
DEVICE_ERRORS: tuple[type[Exception], ...] = (
    (torch.AcceleratorError,) if hasattr(torch, "AcceleratorError") else ()
)


@dataclass(slots=True)
class StepResult:
    """What one step of one instance made; `born_ns` is the wall clock when its tokens were known."""

    instance: str
    step: int
    born_ns: int
    outputs: list[Output]
    fingerprint: str  # of the shape that it ran in, as the next
    layers_below_full: int


def result_of(instance: Instance, outputs: list[Output]) -> StepResult:
    """What a step made, now."""
    return StepResult(
        instance=instance.id,
        step=instance.num_steps,
        born_ns=time.time_ns(),
        outputs=outputs,
        fingerprint=instance.fingerprint,
        layers_below_full=instance.layers_below_full,
    )


class Engine:
    """Verbs: `submit`, `cancel`, `step`; the order of instances is the order in which they step."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.instances: dict[str, Instance] = {}
        self._device = device or torch.device("cpu")

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

    def submit(self, instance_id: str, request: Request, arrived: float | None = None) -> None:
        """`arrived`: monotonic seconds when the worker got it, if not now. KeyError for an unknown
        instance, ValueError for an id that already runs there."""
        self.instances[instance_id].submit(request, arrived)

    def cancel(self, request_ids: Iterable[str]) -> int:
        ids = list(request_ids)
        return sum(instance.cancel(ids) for instance in self.instances.values())

    def reset(self) -> None:
        """A new epoch: nothing that was submitted before says anything any more, and counters begin at 0."""
        for instance in self.instances.values():
            instance.reset()

    @property
    def has_work(self) -> bool:
        return any(instance.has_work for instance in self.instances.values())

    def step(self) -> list[StepResult]:
        """One step of every instance that has something to do, in turn: none can starve another."""
        results = []
        for instance in self.instances.values():
            if instance.has_work and (outputs := self._step(instance)):
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

    def check_integrity(self) -> None:
        """AssertionError when a block is lost or owned twice."""
        for instance in self.instances.values():
            instance.check_integrity()
