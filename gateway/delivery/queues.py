"""Who waits here for the same thing: by model, in the order in which they came to this gateway."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Waits(Protocol):
    """`arrived`: seconds of the monotonic clock."""

    @property
    def request_id(self) -> str: ...

    @property
    def model(self) -> str: ...

    @property
    def arrived(self) -> float: ...


T = TypeVar("T", bound=Waits)


class Queue(Generic[T]):
    """No model is kept that nobody waits for."""

    def __init__(self) -> None:
        self._by_model: dict[str, dict[str, T]] = {}

    def __contains__(self, one: T) -> bool:
        return one.request_id in self._by_model.get(one.model, {})

    def __iter__(self) -> Iterator[T]:
        for of_model in self._by_model.values():
            yield from of_model.values()

    def __len__(self) -> int:
        return sum(map(len, self._by_model.values()))

    @property
    def models(self) -> list[str]:
        return sorted(self._by_model)

    def of(self, model: str) -> list[T]:
        """The first that came first."""
        return list(self._by_model.get(model, {}).values())

    def first(self, model: str) -> T | None:
        return next(iter(self._by_model.get(model, {}).values()), None)

    def add(self, one: T) -> None:
        """Once. One that a worker sent back came before those that came meanwhile."""
        of_model = self._by_model.get(one.model, {})
        self._by_model[one.model] = in_order(of_model, one)

    def discard(self, one: T) -> None:
        of_model = self._by_model.get(one.model, {})
        of_model.pop(one.request_id, None)
        if not of_model:
            self._by_model.pop(one.model, None)


def in_order(queue: dict[str, T], one: T) -> dict[str, T]:
    """With `one` at its place by arrival: nearly always the last."""
    last = next(reversed(queue.values()), None)
    queue[one.request_id] = one
    if last is None or last.arrived <= one.arrived:
        return queue
    return dict(sorted(queue.items(), key=lambda item: item[1].arrived))
