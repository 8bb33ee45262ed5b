"""From what is wished for and what is seen to what is done next. Pure; asked again and again, it says nothing
where all is as it should be or under way.

==========  =======================================================  ==================================
state       goes on to                                               when
==========  =======================================================  ==================================
waiting     loading                                                  a configuration fits: Deploy
loading     serving                                                  every worker's card shows it
loading     waiting, or failed after MAX_ATTEMPTS                    a worker died, refused, was silent
serving     waiting                                                  a worker died, drains, gave it up
-           serving                                                  a card shows it, no record (`adopting`)
serving     retiring                                                 its heir serves (`pursuing`)
retiring    retired                                                  no worker has it
any         retiring                                                 an order says so
==========  =======================================================  ==================================

A deployment whose state is not loading or serving and that still has stages is being cleared first.
"""

from __future__ import annotations

from collections.abc import Iterator

from bus.catalogue import Contents
from bus.deployments import Deployment
from controller.deployments.adopting import adopted, kept
from controller.deployments.clearing import forgotten, is_cleared, next_of_clearing, orphans
from controller.deployments.improving import given_up, next_of_pursuit, taken_over
from controller.deployments.loading import next_of_loading, next_of_serving
from controller.deployments.observation import Observation
from controller.deployments.planner import Planner
from controller.deployments.profiling import next_of_model, unowned
from controller.deployments.transitions import Transition
from controller.deployments.waiting import next_of_waiting


def reconcile(contents: Contents, seen: Observation, plan: Planner) -> list[Transition]:
    """Every transition is made knowing those before it."""
    transitions: list[Transition] = []
    for name in contents.models:
        if transition := next_of_model(contents.models[name], contents, seen):
            transitions.append(transition)
            contents = _with(contents, transition)
    for name in contents.deployments:
        if transition := _next_of(contents.deployments[name], contents, seen, plan):
            transitions.append(transition)
            contents = _with(contents, transition)
    return [*transitions, *_tidying(contents, seen)]


def _tidying(contents: Contents, seen: Observation) -> Iterator[Transition]:
    yield from orphans(contents, seen)
    yield from adopted(contents, seen)
    yield from forgotten(contents)
    yield from unowned(contents)


def _next_of(
    deployment: Deployment, contents: Contents, seen: Observation, plan: Planner
) -> Transition | None:
    transition = _by_itself(deployment, contents, seen, plan)
    return given_up(deployment, transition, contents, seen.now_ms)


def _by_itself(
    deployment: Deployment, contents: Contents, seen: Observation, plan: Planner
) -> Transition | None:
    if deployment.state == "loading":
        return next_of_loading(deployment, seen)
    if deployment.state == "serving":
        return (
            kept(deployment, seen)
            or next_of_serving(deployment, seen)
            or taken_over(deployment, contents, seen)
            or next_of_pursuit(deployment, contents, seen, plan)
        )
    if deployment.state == "retiring" or not is_cleared(deployment):
        return next_of_clearing(deployment, seen)
    if deployment.state == "waiting":
        return next_of_waiting(deployment, contents, seen, plan)
    return None


def _with(contents: Contents, transition: Transition) -> Contents:
    return contents if transition.record is None else contents.with_record(transition.record)
