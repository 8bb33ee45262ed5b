"""A half of a layer goes to another precision: prepared beside the steps, then installed or dropped."""

from __future__ import annotations

from worker.distributed.messages import PrepareHalf
from worker.parallel.half_swap import HalfSwap
from worker.parallel.member import Member


def prepare(member: Member, action: PrepareHalf) -> None:
    """Raises MappingFailed and OutOfPages."""
    member.swap = HalfSwap(member.place, action)


def install(member: Member) -> None:
    """What was prepared, if anything was. Raises what the copy raised."""
    if swap := member.swap:
        member.swap = None
        swap.install()


def drop(member: Member) -> None:
    if swap := member.swap:
        member.swap = None
        swap.drop()
