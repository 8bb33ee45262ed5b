"""Commands that are given again, under numbered ids, until they did what they should. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, takewhile

from bus.messages import MorphReport
from controller.deployments.picture import UNHEARD_MS, Picture

FIRST_PAUSE_MS, LONGEST_PAUSE_MS = 2_000, 60_000
STUCK_MS = 180_000  # well above the time that a Retire, or a group that parts, waits for requests


def next_try(base: str, picture: Picture) -> str | None:
    """The id of a command that may go out now; None: the last one has not ended, or not for long. One that
    runs for `STUCK_MS` has as good as ended."""
    number, pause_ms = 0, FIRST_PAUSE_MS
    while picture.is_known(command_id := f"{base}-{number}"):
        report = picture.reports.get(command_id)
        if report is None:
            over_ms = picture.sent[command_id] + UNHEARD_MS
        elif report.state == "running":
            over_ms = picture.sent.get(command_id, report.started_ms) + STUCK_MS
        else:
            over_ms = (report.ended_ms or report.started_ms) + pause_ms
        if picture.now_ms < over_ms:
            return None
        number, pause_ms = number + 1, min(2 * pause_ms, LONGEST_PAUSE_MS)
    return command_id


def known_tries(base: str, picture: Picture) -> Iterator[str]:
    """Ids of those that went out."""
    return takewhile(picture.is_known, (f"{base}-{number}" for number in count()))


def reports_of(base: str, picture: Picture) -> list[MorphReport]:
    """The last of each try."""
    return [report for one in known_tries(base, picture) if (report := picture.reports.get(one))]
