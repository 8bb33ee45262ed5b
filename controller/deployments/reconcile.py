"""Decide the next steps from records and an observation. Pure.

docs/deploy.md describes the states. A deployment that is neither loading nor serving and still has stages is
cleared first.
"""

from __future__ import annotations

from bus.catalogue import Contents
from bus.deployments import Deployment
from controller.deployments.adopting import adopted, kept
from controller.deployments.clearing import forgotten, next_of_clearing, orphans
from controller.deployments.improving import given_up, next_of_improving, taken_over
from controller.deployments.loading import next_of_loading, next_of_serving
from controller.deployments.observation import Observation
from controller.deployments.planner import Planner, Situation
from controller.deployments.profiling import next_of_model, unowned
from controller.deployments.transitions import Transition
from controller.deployments.waiting import next_of_waiting


def reconcile(contents: Contents, seen: Observation, plan: Planner) -> list[Transition]:
    """Return the transitions that are due; each is decided in knowledge of those before it."""
    transitions: list[Transition] = []

    def add(transition: Transition | None) -> Contents:
        if transition:
            transitions.append(transition)
        return contents.with_record(transition.record) if transition and transition.record else contents

    for name in contents.models:
        contents = add(next_of_model(contents.models[name], contents, seen))
    for name in contents.deployments:
        contents = add(_next_of(contents.deployments[name], Situation(contents, seen, plan)))
    tidying = (orphans(contents, seen), adopted(contents, seen), forgotten(contents), unowned(contents))
    return transitions + [transition for found in tidying for transition in found]


def _next_of(deployment: Deployment, now: Situation) -> Transition | None:
    contents, seen = now.contents, now.seen
    transition: Transition | None = None
    if deployment.state == "loading":
        transition = next_of_loading(deployment, seen)
    elif deployment.state == "serving":
        transition = (
            kept(deployment, seen)
            or next_of_serving(deployment, seen)
            or taken_over(deployment, contents, seen)
            or next_of_improving(deployment, now)
        )
    elif deployment.state == "retiring" or deployment.stages:
        transition = next_of_clearing(deployment, seen)
    elif deployment.state == "waiting":
        transition = next_of_waiting(deployment, now)
    return given_up(deployment, transition, contents, seen.now_ms)
