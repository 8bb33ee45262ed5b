"""Commands that are given again, under numbered ids, until they did what they should. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, takewhile

from bus.deployments import Deployment
from bus.morphs import MorphReport
from controller.deployments.observation import UNHEARD_MS, Observation, WorkerView
from controller.deployments.transitions import MAX_ATTEMPTS, Transition, becomes, noted

FIRST_PAUSE_MS, LONGEST_PAUSE_MS = 2_000, 60_000
STUCK_MS = 180_000  # well above the time that a Retire, or a group that parts, waits for requests
GIVING_BACK = ("apart", "retire", "cancel")  # ends of the ids of commands to give a model back


def next_try(base: str, seen: Observation) -> str | None:
    """Return the id of a command that may go out now; None while the last try runs, or a pause after it."""
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
    """Return the ids of the commands that went out."""
    return takewhile(seen.is_known, (f"{base}-{number}" for number in count()))


def reports_of(base: str, seen: Observation) -> list[MorphReport]:
    """Return the last report of each try."""
    return [report for one in known_tries(base, seen) if (report := seen.reports.get(one))]


def overdue(deployment: Deployment, unclear: list[WorkerView], seen: Observation) -> Transition | None:
    """Report a deployment that retires for too long; after MAX_ATTEMPTS it failed and is still asked."""
    over_ms = seen.now_ms - deployment.since_ms
    if deployment.state != "retiring" or over_ms <= STUCK_MS:
        return None
    num_tries, worker = max((_num_tries(deployment, one.card.id, seen), one.card.id) for one in unclear)
    for_so_long = f"in {over_ms // 60_000} minutes, asked {num_tries} times"
    why = f"{worker} has not given {deployment.model} back {for_so_long}{_answered(deployment, worker, seen)}"
    if num_tries < MAX_ATTEMPTS or over_ms <= MAX_ATTEMPTS * STUCK_MS:
        return noted(deployment, why)
    lost = f"{why}; what it holds there is lost until {worker} gives it back or starts anew"
    return becomes(replace(deployment, attempts=num_tries), "failed", seen.now_ms, lost)


def _num_tries(deployment: Deployment, worker: str, seen: Observation) -> int:
    base = deployment.deploy_id(worker)
    return max(len(list(known_tries(f"{base}-{how}", seen))) for how in GIVING_BACK)


def _answered(deployment: Deployment, worker: str, seen: Observation) -> str:
    """Return the worker's last report, in brackets."""
    base = deployment.deploy_id(worker)
    reports = [one for how in GIVING_BACK for one in reports_of(f"{base}-{how}", seen)]
    last = max(reports, key=lambda one: one.ended_ms or one.started_ms, default=None)
    return "" if last is None else f" ({last.state}{': ' * bool(last.reason)}{last.reason})"
