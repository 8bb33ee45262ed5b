"""A scheduler that steps without an engine: every token is known as soon as it is scheduled."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from bus.messages import SamplingParams
from worker.engine.scheduler import Scheduler, SchedulerOutput
from worker.engine.sequence import Sequence, own_request


class Step(NamedTuple):
    plan: SchedulerOutput
    done: list[Sequence]


def step(scheduler: Scheduler) -> Step:
    """Plan, run and finish what is due, the way the engine does. Tokens of outputs are 1000, 1001, ..."""
    plan = scheduler.schedule()
    sampling = [chunk.seq for chunk in plan.chunks if chunk.samples]
    scheduler.commit(plan.chunks)
    done = []
    for seq in sampling:
        seq.token_ids.append(1000 + seq.num_output)
        if seq.num_output == seq.request.sampling.max_tokens:
            scheduler.remove(seq)
            scheduler.lengths.add(seq.num_output)
            done.append(seq)
    scheduler.check_integrity()
    return Step(plan, done)


def keyed(
    name: str,
    key: str = "",
    prompt: int = 8,
    output: int = 8,
    weight: float = 1.0,
    arrived: float = 0.0,
    priority: int = 0,
) -> Sequence:
    """Return the sequence of a request of an API key."""
    request = own_request(name, list(range(prompt)), SamplingParams(max_tokens=output, seed=0))
    return Sequence(replace(request, key=key, weight=weight, priority=priority), arrived)
