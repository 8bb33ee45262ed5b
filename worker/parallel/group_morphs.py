"""The transforms of the group that this worker leads, as its morph manager runs them."""

from __future__ import annotations

import uuid

from bus.messages import Deploy, Morph, Retire, Transform
from worker.morph.manager import MorphManager
from worker.morph.run import Peers
from worker.parallel.grouping import Grouping
from worker.parallel.transform import TransformRun


def use_grouping(morphs: MorphManager, grouping: Grouping | None, *, layers_per_step: int = 1) -> None:
    """Let `morphs` run transforms over `grouping`; None: this worker joins no group from here on."""
    if grouping is None:
        morphs.starters.pop(Transform, None)
        morphs.obstacle = lambda kind: ""
        return

    def obstacle(kind: type[Morph]) -> str:
        executor = grouping.executor
        if grouping.busy_with or not executor:
            return grouping.busy_with
        if not executor.coordinator:
            return f"it is in a group that {executor.formation.members[0]} leads; order it there"
        return "it is in a group; let the group part first" if kind in (Deploy, Retire) else ""

    def transform(command: Transform, peers: Peers) -> TransformRun:
        return TransformRun(command, grouping, peers, layers_per_step=layers_per_step)

    def split() -> None:
        assert grouping.executor
        if not morphs.num_running:
            command = Transform(
                id=f"split-{uuid.uuid4().hex[:8]}",
                epoch=morphs.epoch,
                instance=grouping.local.instance.id,
                workers=list(grouping.executor.formation.members),
                epochs={},
                tp=1,
            )
            morphs.begin(command, grouping.peers, reason="a member of the group is about to leave")

    morphs.starters[Transform] = transform
    morphs.obstacle = obstacle
    grouping.why_not = lambda: "a morph is running there" if morphs.num_running else ""
    grouping.on_split_requested = split
