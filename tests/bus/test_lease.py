"""A lease by its holder's clock: whatever is late or lost, no two processes rely on one at the same time."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.lease import Lease

LENGTH_S = 3.0


@dataclass
class Server:
    """The lease as Redis keeps it, by the plain rule: the oracle of `bus.leader`'s script."""

    now_s: float = 0.0
    term: int = 0
    holder: str = ""
    ends_s: float = 0.0
    granted: list[tuple[int, str]] = field(default_factory=list)

    def ask(self, name: str) -> int:
        """Return the term if `name` leads from now on, else 0."""
        if self.now_s < self.ends_s and self.holder != name:
            return 0
        if self.now_s >= self.ends_s:
            self.term, self.holder = max(self.term + 1, round(1000 * self.now_s)), name
            self.granted.append((self.term, name))
        self.ends_s = self.now_s + LENGTH_S
        return self.term


@dataclass
class Candidate:
    name: str
    lease: Lease = field(default_factory=Lease)
    asked_s: float | None = None
    answer: int | None = None  # on its way


names = st.sampled_from("abc")
steps = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), names),
        st.tuples(st.just("served"), names),
        st.tuples(st.just("answered"), names),
        st.tuples(st.just("lost"), names),
        st.tuples(st.just("wait"), st.floats(0.01, 2 * LENGTH_S)),
    ),
    max_size=60,
)


@given(steps)
def test_at_most_one_relies_on_the_lease_and_terms_grow(steps: list[tuple[str, str | float]]) -> None:
    server = Server()
    all_of = {name: Candidate(name) for name in "abc"}
    for step, what in steps:
        if isinstance(what, float):
            server.now_s += what
        else:
            one = all_of[what]
            if step == "ask" and one.asked_s is None:
                one.asked_s, one.answer = server.now_s, None
                one.lease = one.lease.asked(server.now_s, LENGTH_S)
            elif step == "served" and one.asked_s is not None and one.answer is None:
                one.answer = server.ask(one.name)
            elif step == "answered" and one.asked_s is not None and one.answer is not None:
                kept = one.lease.granted(one.answer, one.asked_s, LENGTH_S) if one.answer else None
                one.lease, one.asked_s = kept or one.lease.lost(), None
            elif step == "lost":
                one.asked_s = None  # carried out or not; the next answer may be another's
        relying = [one for one in all_of.values() if one.lease.is_valid(server.now_s)]
        assert len(relying) <= 1
        assert all(one.name == server.holder and one.lease.epoch == server.term for one in relying)
    terms = [term for term, _ in server.granted]
    assert terms == sorted(set(terms))


def test_an_epoch_of_the_past_is_refused_by_its_number() -> None:
    with pytest.raises(ValueError, match="epoch 4 was granted after epoch 5"):
        Lease(epoch=5).granted(4, 0.0, 3.0)
