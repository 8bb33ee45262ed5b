"""Commands that are given again, under numbered ids, until they did what they should. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, takewhile

from bus.deployments import Deployment
from bus.messages import MorphReport
from controller.deployments.observation import UNHEARD_MS, Observation, WorkerView
from controller.deployments.transitions import MAX_ATTEMPTS, Transition, becomes, deploy_id, noted

FIRST_PAUSE_MS, LONGEST_PAUSE_MS = 2_000, 60_000
STUCK_MS = 180_000  # well above the time that a Retire, or a group that parts, waits for requests


def next_try(base: str, seen: Observation) -> str | None:
    """The id of a command that may go out now; None: the last one has not ended, or not for long. One that
    runs for `STUCK_MS` has as good as ended."""
    number, pause_ms = 0, FIRST_PAUSE_MS
    while seen.is_known(command_id := f"{base}-{number}"):
        report = seen.reports.get(command_id)
        if report is None:
            over_ms = seen.sent[command_id] + UNHEARD_MS
        elif report.state == "running":
            over_ms = seen.sent.get(command_id, report.started_ms) + STUCK_MS
        else:
            over_ms = (report.ended_ms or report.started_ms) + pause_ms
        if seen.now_ms < over_ms:
            return None
        number, pause_ms = number + 1, min(2 * pause_ms, LONGEST_PAUSE_MS)
    return command_id


def known_tries(base: str, seen: Observation) -> Iterator[str]:
    """Ids of those that went out."""
    return takewhile(seen.is_known, (f"{base}-{number}" for number in count()))


def reports_of(base: str, seen: Observation) -> list[MorphReport]:
    """The last of each try."""
    return [report for one in known_tries(base, seen) if (report := seen.reports.get(one))]


HOW = ("apart", "retire", "cancel")  # the ids of what asks for it end so


def overdue(deployment: Deployment, unclear: list[WorkerView], seen: Observation) -> Transition | None:
    """Of one that retires longer than it should take. It has failed when `MAX_ATTEMPTS` were of no use; it is
    asked on, and what it held is lost until then."""
    over_ms = seen.now_ms - deployment.since_ms
    if deployment.state != "retiring" or over_ms <= STUCK_MS:
        return None
    num_tries, worker = max((_num_tries(deployment, one, seen), one.card.id) for one in unclear)
    for_so_long = f"in {over_ms // 60_000} minutes, asked {num_tries} times"
    why = f"{worker} has not given {deployment.model} back {for_so_long}{_said(deployment, worker, seen)}"
    if num_tries < MAX_ATTEMPTS or over_ms <= MAX_ATTEMPTS * STUCK_MS:
        return noted(deployment, why)
    lost = f"{why}; what it holds there is lost until {worker} gives it back or starts anew"
    return becomes(replace(deployment, attempts=num_tries), "failed", seen.now_ms, lost)


def _num_tries(deployment: Deployment, device: WorkerView, seen: Observation) -> int:
    base = deploy_id(deployment, device.card.id)
    return max(len(list(known_tries(f"{base}-{how}", seen))) for how in HOW)


def _said(deployment: Deployment, worker: str, seen: Observation) -> str:
    """Its last words."""
    base = deploy_id(deployment, worker)
    reports = [one for how in HOW for one in reports_of(f"{base}-{how}", seen)]
    if not reports:
        return ""
    last = max(reports, key=lambda one: one.ended_ms or one.started_ms)
    return f" ({last.state}: {last.reason})" if last.reason else f" ({last.state})"
