"""What a worker does not give back: said, counted, and in the end called lost. Pure."""

from __future__ import annotations

from dataclasses import replace

from bus.deployments import Deployment
from controller.deployments.decisions import MAX_ATTEMPTS, Decision, becomes, deploy_id, noted
from controller.deployments.picture import Device, Picture
from controller.deployments.tries import STUCK_MS, known_tries, reports_of

HOW = ("apart", "retire", "cancel")  # the ids of what asks for it end so


def overdue(deployment: Deployment, unclear: list[Device], picture: Picture) -> Decision | None:
    """Of one that retires longer than it should take. It has failed when `MAX_ATTEMPTS` were of no use; it is
    asked on, and what it held is lost until then."""
    over_ms = picture.now_ms - deployment.since_ms
    if deployment.state != "retiring" or over_ms <= STUCK_MS:
        return None
    num_tries, worker = max((_num_tries(deployment, one, picture), one.card.id) for one in unclear)
    for_so_long = f"in {over_ms // 60_000} minutes, asked {num_tries} times"
    why = f"{worker} has not given {deployment.model} back {for_so_long}{_said(deployment, worker, picture)}"
    if num_tries < MAX_ATTEMPTS or over_ms <= MAX_ATTEMPTS * STUCK_MS:
        return noted(deployment, why)
    lost = f"{why}; what it holds there is lost until {worker} gives it back or starts anew"
    return becomes(replace(deployment, attempts=num_tries), "failed", picture.now_ms, lost)


def _num_tries(deployment: Deployment, device: Device, picture: Picture) -> int:
    base = deploy_id(deployment, device.card.id)
    return max(len(list(known_tries(f"{base}-{how}", picture))) for how in HOW)


def _said(deployment: Deployment, worker: str, picture: Picture) -> str:
    """Its last words."""
    base = deploy_id(deployment, worker)
    reports = [one for how in HOW for one in reports_of(f"{base}-{how}", picture)]
    if not reports:
        return ""
    last = max(reports, key=lambda one: one.ended_ms or one.started_ms)
    return f" ({last.state}: {last.reason})" if last.reason else f" ({last.state})"
