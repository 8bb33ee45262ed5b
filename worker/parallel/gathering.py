"""What is known of a group that does not exist yet: at its leader, and at a member that stands by for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from worker.distributed.messages import Prepare, Vote
from worker.distributed.transport import Link
from worker.parallel.formation import Formation


@dataclass(slots=True)
class Gathering:
    """The leader's: who was asked, and what they said."""

    invite: Prepare
    formation: Formation
    links: dict[str, Link]  # of the others
    answers: dict[str, Vote] = field(default_factory=dict)
    met: dict[str, str] = field(default_factory=dict)  # why not; "": it has met the others
    is_meeting: bool = False  # that was called
    lost: str = ""  # somebody is gone

    @property
    def group(self) -> str:
        return self.invite.group

    @property
    def silent(self) -> list[str]:
        return [name for name in self.formation.members if name not in self.answers]

    @property
    def refusals(self) -> list[str]:
        said = [f"{name}: {answer.reason}" for name, answer in self.answers.items() if answer.reason]
        return said + [f"{name}: {reason}" for name, reason in self.met.items() if reason]

    @property
    def has_met(self) -> bool:
        """All have an answer to that, good or not."""
        return all(name in self.met for name in self.formation.members)

    @property
    def has_met_in_part(self) -> bool:
        """Or nobody has: a meeting was called that is not known to have ended well for all."""
        return self.is_meeting and (not self.has_met or any(self.met.values()))

    def name_of(self, link: Link) -> str:
        """Empty: nobody who was asked."""
        return next((name for name, each in self.links.items() if each is link), "")


@dataclass(slots=True)
class StandingBy:
    """A member's: invited, and it will come."""

    invite: Prepare
    formation: Formation
    link: Link
