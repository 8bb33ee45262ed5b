"""Whether a worker can come into a group, or part from one, and what it would have there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bus.messages import LayerShape, Number
from worker.distributed.messages import Prepare, Vote
from worker.model.shard import Shard
from worker.parallel.executor import TensorParallelExecutor
from worker.parallel.formation import Formation
from worker.parallel.place import Place


def answer(
    invite: Prepare,
    formation: Formation,
    worker: str,
    place: Place,
    party: TensorParallelExecutor | None,
    *,
    in_the_way: str,
    meeting: str,
) -> Vote:
    """in_the_way: what else forbids a change now; empty: nothing. meeting: whose communicator it has kept."""
    rank = formation.members.index(worker)
    numbers, not_laid_out = _numbers(
        place,
        formation.high_shard(rank) if invite.grows else formation.low_shard(rank),
        party,
        is_parting=not invite.grows,
    )

    def reasons() -> Iterator[str]:
        now = party.formation.members if party else (worker,)
        wanted = formation.part(rank).members if invite.grows else formation.members
        yield in_the_way
        yield "" if invite.model == place.name else f"it serves {place.name}, not {invite.model}"
        yield "" if now == wanted else f"it is at one with {', '.join(now)}, not with {', '.join(wanted)}"
        yield what_differs(place.instance.shape, invite.shape, invite.leader) if invite.grows else ""
        yield not_laid_out

    return Vote(
        group=invite.group,
        worker=worker,
        reason=next(filter(None, reasons()), ""),
        meeting=meeting,
        numbers=numbers,
    )


def _numbers(
    place: Place, shard: Shard, party: TensorParallelExecutor | None, *, is_parting: bool
) -> tuple[dict[str, Number], str]:
    """Or why there are none: a degree that its weights are not laid out for."""
    try:
        numbers = place.numbers(shard, party.member.pages_alone if party else None)
        return numbers | (place.row_costs(shard).numbers() if is_parting else {}), ""
    except ValueError as error:
        return {}, str(error)


def what_differs(own: Sequence[LayerShape], leaders: Sequence[LayerShape], leader: str) -> str:
    """Why there can be no group: with a part of each layer's heads in other bits it would be no shape that
    anybody has asked for, and below the floor of requests that are here. Empty: nothing."""
    for layer, (here, there) in enumerate(zip(own, leaders, strict=True)):
        if here != there:
            return (
                f"its layer {layer} is {here.attention}/{here.ffn} (attention/FFN) and {there.attention}/"
                f"{there.ffn} at {leader}; swap one of them first"
            )
    return ""
