"""The instances that can be the dispatcher's choice, kept in order, so that not all must be looked at.

`gateway.delivery.dispatch.choose` takes the first by (load, KV use, name) of those with room, else the first
of those that could hold the request at all: here every instance is one worker, and no request has a floor or
a cached prefix. So it would choose the same of all instances as of those up to that one. Of idle instances at
rest, which differ in name only, the first stands for all.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from gateway.delivery.dispatch import Candidate

Key = tuple[float, float, str]


def key_of(candidate: Candidate) -> Key:
    """Return what candidates are ordered by."""
    return candidate.load, candidate.kv_usage, candidate.instance


class Shortlist:
    """Candidates by instance, in the order of `key_of`."""

    def __init__(self, candidates: Iterable[Candidate] = ()) -> None:
        self._candidates = {one.instance: one for one in candidates}
        self._keys: list[Key] = sorted(map(key_of, self._candidates.values()))

    def __len__(self) -> int:
        return len(self._keys)

    def put(self, candidate: Candidate) -> None:
        """Add a candidate, or put it in the place of the one for the same instance."""
        self.remove(candidate.instance)
        self._candidates[candidate.instance] = candidate
        insort(self._keys, key_of(candidate))

    def remove(self, instance: str) -> None:
        """Remove the candidate of an instance, if there is one."""
        if (known := self._candidates.pop(instance, None)) is not None:
            del self._keys[bisect_left(self._keys, key_of(known))]

    def of(self, num_tokens: int, idle: Candidate | None) -> list[Candidate]:
        """Return the candidates from which the choice for so many tokens is the same as from all.

        idle: stands for all idle instances.
        """
        found: list[Candidate] = []
        num_fitting = 0  # candidates found, up to the first that fits
        for key in self._keys:
            if idle is not None and key_of(idle) < key:
                break
            one = self._candidates[key[-1]]
            found.append(one)
            if num_tokens <= one.max_tokens:
                num_fitting = num_fitting or len(found)
                if one.free_tokens is None or one.free_tokens >= num_tokens:
                    return found
        if idle is not None:
            return [*found, idle]  # which has room for whatever a worker could hold
        return found[: num_fitting or len(found)]
