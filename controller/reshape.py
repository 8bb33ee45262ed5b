"""One transform of the controller's: the command, why, and the numbers that were seen. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from bus.messages import Cause, Number, Transform
from bus.policy import Policy
from controller.groups import Group
from controller.levers import WAIT_S
from controller.parallelism import Merge, parted
from controller.track import Lever, Waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshape:
    """One transform, why, and the numbers that were seen. `instance` is the leader's, `instances` are all."""

    instance: str
    worker: str
    epoch: int
    lever: Lever
    reason: str
    cause: Cause
    instances: tuple[str, ...]
    epochs: dict[str, int]  # by worker, in the order of their shards at the higher degree
    tp: int
    numbers: dict[str, Number] = field(default_factory=dict)

    def command(self, morph_id: str) -> Transform:
        return Transform(
            id=morph_id,
            epoch=self.epoch,
            instance=self.instance,
            workers=list(self.epochs),
            epochs=self.epochs,
            tp=self.tp,
            wait_s=WAIT_S,
        )


def merging(merge: Merge, waiting: Waiting, policy: Policy, at_s: float) -> Reshape:
    """A group is made for what waits."""
    epochs = {
        name: epoch for group in merge.groups for name, epoch in zip(group.workers, group.epochs, strict=True)
    }
    first = merge.groups[0]
    of_all = f" (the longest of {waiting.count})" if waiting.count > 1 else ""
    return Reshape(
        instance=first.instance,
        worker=first.leader,
        epoch=first.epochs[0],
        lever="scale_up",
        reason=f"a request of {waiting.tokens} tokens waits{of_all} and no instance has room for it: "
        f"{', '.join(merge.workers)} at degree {first.tp} become one of degree {merge.tp}, "
        f"which holds {merge.tokens_after}",
        cause="long_request",
        instances=tuple(name for group in merge.groups for name in group.instances),
        epochs={name: epochs[name] for name in merge.workers},
        tp=merge.tp,
        numbers={
            "waiting_tokens": waiting.tokens,
            "waiting": waiting.count,
            "waited_s": round(at_s - waiting.since_s, 3),
            "tp_before": first.tp,
            "tp_after": merge.tp,
            "tokens_after": merge.tokens_after,
            "used_tokens": merge.used_tokens,
            "load": round(sum(group.load for group in merge.groups), 2),
            "windows": waiting.told,
            "policy_revision": policy.revision,
        },
    )


def parting(group: Group, tp: int, windows: int, policy: Policy) -> Reshape:
    """A group parts into groups of degree `tp`, as so many windows allow."""
    parts = "; ".join(", ".join(part) for part in parted(group, tp))
    return Reshape(
        instance=group.instance,
        worker=group.leader,
        epoch=group.epochs[0],
        lever="scale_down",
        reason=f"no long request is left and {1 - group.usage:.2f} of the KV is free, "
        f"{policy.scale_down_free:g} suffices: degree {group.tp} parts into degree {tp} ({parts})",
        cause="no_long_request",
        instances=group.instances,
        epochs=dict(zip(group.workers, group.epochs, strict=True)),
        tp=tp,
        numbers={
            "longest_tokens": group.longest_tokens,
            "used_tokens": group.used_tokens,
            "kv_usage": round(group.usage, 4),
            "tp_before": group.tp,
            "tp_after": tp,
            "tokens_after": group.tokens_at[tp],
            "load": round(group.load, 2),
            "windows": windows,
            "policy_revision": policy.revision,
        },
    )
