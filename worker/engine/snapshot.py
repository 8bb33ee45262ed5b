"""An instance's numbers as the message that the monitor reads."""

from __future__ import annotations

from bus.messages import InstanceTelemetry
from worker.engine.instance import Instance
from worker.parallel.share import BlockShare


def instance_telemetry(instance: Instance) -> InstanceTelemetry:
    """Only in the thread that owns the engine, between steps."""
    scheduler, stats = instance.scheduler, instance.stats
    blocks = scheduler.blocks
    of_others = blocks.num_used_by_others if isinstance(blocks, BlockShare) else 0
    return InstanceTelemetry(
        id=instance.id,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        waiting_tokens=sum(len(seq.token_ids) for seq in scheduler.waiting),
        kv_blocks=blocks.capacity,
        kv_used=blocks.num_used + of_others,
        layers=instance.shape,
        prompt_tokens=stats.prompt_tokens,
        generation_tokens=stats.generation_tokens,
        preemptions=scheduler.num_preemptions,
        recomputed_tokens=scheduler.num_recomputed,
        finished=dict(stats.finished),
        queue_seconds=stats.queue.snapshot(),
        step_seconds=stats.step.snapshot(),
        time_to_first_token=stats.time_to_first_token.snapshot(),
        time_per_output_token=stats.time_per_output_token.snapshot(),
        oldest_wait_seconds=instance.oldest_wait_seconds(),
        longest_tokens=instance.longest_tokens(),
        kv_own=blocks.num_used,
    )
