"""All instances of one worker. One thread owns the engine; it knows nothing of Redis."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from bus.messages import Delta, InstanceTelemetry, RejectReason, Submit
from bus.prefix_keys import digest_of
from worker.engine.core import EngineCore
from worker.engine.outputs import Output

log = logging.getLogger(__name__)

# A device that reports an error of its own (not memory) answers every later call with the same error.
DEVICE_ERRORS: tuple[type[Exception], ...] = tuple(filter(None, [getattr(torch, "AcceleratorError", None)]))
# A device whose steps others call is idle when it had none for so long, or for so many times the last one.
LULL_S: Final = 1.0
LULL_STEPS: Final = 4
# Beginnings in a report; the digest of one takes 5 bytes.
MAX_DIGESTS: Final = 512


@dataclass(slots=True)
class StepResult:
    """The outputs of one step of one instance."""

    instance: str
    step: int
    born_ns: int  # wall clock when its tokens were known
    outputs: list[Output]
    shape_id: str  # shape in which the step ran
    layers_below_full: int
    step_s: float = 0.0  # duration of the step


def result_of(instance: EngineCore, outputs: list[Output]) -> StepResult:
    """Wrap the outputs of a step that ended now."""
    return StepResult(
        instance=instance.id,
        step=instance.num_steps,
        born_ns=time.time_ns(),
        outputs=outputs,
        shape_id=instance.shape_id,
        layers_below_full=instance.layers_below_full,
        step_s=instance.step_s,
    )


def instance_telemetry(instance: EngineCore) -> InstanceTelemetry:
    """Return the numbers of `instance` for the monitor. Only in the engine's thread, between steps."""
    scheduler, stats, load = instance.scheduler, instance.stats, instance.load
    blocks = scheduler.blocks
    return InstanceTelemetry(
        id=instance.id,
        running=len(scheduler.running),
        waiting=load.num_waiting,
        waiting_tokens=sum(len(seq.token_ids) for seq in load.waiting()),
        kv_blocks=blocks.capacity,
        kv_used=blocks.num_used + instance.executor.num_blocks_used_elsewhere,
        layers=instance.shape,
        kv_precision=instance.kv.precision,
        prompt_tokens=stats.prompt_tokens,
        generation_tokens=stats.generation_tokens,
        preemptions=scheduler.num_preemptions,
        recomputed_tokens=scheduler.num_recomputed,
        finished=dict(stats.finished),
        queue_seconds=stats.queue.snapshot(),
        step_seconds=stats.step.snapshot(),
        time_to_first_token=stats.time_to_first_token.snapshot(),
        time_per_output_token=stats.time_per_output_token.snapshot(),
        oldest_wait_seconds=load.oldest_wait_s(),
        longest_tokens=load.longest_tokens(),
        kv_own=blocks.num_used,
        prefix_queries=scheduler.num_prefix_queried,
        prefix_hits=scheduler.num_prefix_hits,
        expert_use=instance.model.expert_use(),
        prefix_digests=frozenset(map(digest_of, blocks.index.recent_keys(MAX_DIGESTS))),
    )


def _gone(instance_id: str, request: Submit) -> StepResult:
    """Make the error for a request whose instance is not here any more."""
    delta = Delta(
        request_id=request.request_id,
        attempt=request.attempt,
        index=len(request.sent_token_ids),
        token_ids=[],
        finish_reason="error",
        error=f"{instance_id} is not here any more",
        reject_reason=RejectReason.RETIRED,
    )
    return StepResult(instance_id, 0, time.time_ns(), [Output(request, delta)], "", 0)


class RemoteStages(Protocol):
    """Stages that this device runs for instances led by other workers."""

    wake: Callable[[], None]  # called in any thread when `can_step` may have become true

    @property
    def can_step(self) -> bool: ...

    @property
    def is_empty(self) -> bool: ...

    def step(self) -> None: ...

    def fence(self) -> None:
        """End every stage, since this worker has lost its lease."""

    def close(self) -> None: ...


class Engine:
    """The instances of one worker, in the order in which they step."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.instances: dict[str, EngineCore] = {}
        self.stages: RemoteStages | None = None
        self.wake: Callable[[], None] = lambda: None  # called in any thread when `can_step` has become true
        self._device = device or torch.device("cpu")
        self.num_steps = 0  # steps of instances and stages
        self._stepped_at = self._step_s = 0.0  # when the last step ended, and how long it took
        self._unsent: list[StepResult] = []  # ends of requests whose instance is gone

    def bind_thread(self) -> None:
        """Make this thread the one that steps: the current CUDA device belongs to a thread."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def add_instance(self, instance: EngineCore) -> None:
        """Serve `instance` from the next step on. Raises ValueError for an id that exists."""
        if instance.id in self.instances:
            raise ValueError(f"instance {instance.id} exists already")
        if instance.grammars:
            instance.grammars.wake = lambda: self.wake()
        self.instances[instance.id] = instance

    def remove_instance(self, instance_id: str) -> EngineCore:
        """Serve this instance no longer and return it."""
        return self.instances.pop(instance_id)

    def send_away(self, instance_id: str, reason: str) -> int:
        """End every request of an instance with this error, published by the next step. Returns how many."""
        instance, outputs = self.instances[instance_id], list[Output]()
        while instance.has_work:
            outputs += instance.fail(reason, RejectReason.RETIRED)
        if outputs:
            self._unsent.append(result_of(instance, outputs))
        return len(outputs)

    def submit(self, instance_id: str, request: Submit, arrived: float | None = None) -> None:
        """Queue a request (`EngineCore.submit`); one for an instance that is gone ends at once."""
        if instance := self.instances.get(instance_id):
            instance.submit(request, arrived)
        else:
            self._unsent.append(_gone(instance_id, request))

    def cancel(self, request_ids: Iterable[str]) -> int:
        """Stop these requests wherever they run. Returns how many were here."""
        ids = list(request_ids)
        return sum(instance.cancel(ids) for instance in self.instances.values())

    def reset(self) -> None:
        """Begin a new epoch: forget all requests and set all counters to 0."""
        self._unsent.clear()
        if self.stages:
            self.stages.fence()
        for instance in self.instances.values():
            instance.reset()

    @property
    def is_alone(self) -> bool:
        """False while an instance runs its steps with the other members of a group."""
        return not any(instance.executor.has_peers for instance in self.instances.values())

    @property
    def has_work(self) -> bool:
        """True while any instance has a request or an unpublished output."""
        return bool(self._unsent) or any(instance.has_work for instance in self.instances.values())

    @property
    def busy_until(self) -> float:
        """Return the monotonic time from which this device is idle; infinity while it has work.

        Between two batches of a pipeline or a group a device has nothing to run, and is not idle.
        """
        if self.has_work:
            return math.inf
        if self.is_alone and (self.stages is None or self.stages.is_empty):
            return 0.0
        return self._stepped_at + max(LULL_S, LULL_STEPS * self._step_s)

    def can_step(self, *, is_paused: bool = False) -> bool:
        """Return whether `step` has something to do now: instances with work may wait for other devices."""
        if self.stages and self.stages.can_step:
            return True
        can_step = [each for each in self.instances.values() if each.can_step]
        if is_paused:
            return any(each.executor.has_peers for each in can_step)
        return bool(self._unsent or can_step)

    def step(self, *, is_paused: bool = False) -> list[StepResult]:
        """Step every instance that can, once; `is_paused`: run only what other workers wait for."""
        began, before = time.monotonic(), self.num_steps
        results = self._step_all(is_paused)
        if self.num_steps != before:
            self._stepped_at = time.monotonic()
            self._step_s = self._stepped_at - began
        return results

    def _step_all(self, is_paused: bool) -> list[StepResult]:
        if self.stages and self.stages.can_step:
            self.stages.step()
            self.num_steps += 1
        results = list[StepResult]()
        if not is_paused:
            results, self._unsent = self._unsent, []
        for instance in list(self.instances.values()):
            has_peers = instance.executor.has_peers
            if not (has_peers or (instance.can_step and not is_paused)):
                continue
            if outputs := self._step(instance, may_schedule=not is_paused):
                results.append(result_of(instance, outputs))
        return results

    def _step(self, instance: EngineCore, *, may_schedule: bool) -> list[Output]:
        """Step one instance; an error ends its own running requests and touches no other instance."""
        executor = instance.executor
        before = executor.num_steps
        try:
            return instance.step(may_schedule=may_schedule)
        except DEVICE_ERRORS:
            raise
        except Exception as error:
            if executor.has_peers:  # a failure that ends the group ends this worker
                raise
            log.exception("a step of %s failed", instance.id)
            return instance.fail(f"the model's step failed: {type(error).__name__}: {error}")
        finally:
            self.num_steps += executor.num_steps != before

    def close(self) -> None:
        """Close every instance and stage; no step follows."""
        for instance in self.instances.values():
            instance.close()
        if self.stages:
            self.stages.close()

    def check_integrity(self) -> None:
        """Raise AssertionError if a block is lost or owned twice."""
        for instance in self.instances.values():
            instance.check_integrity()
