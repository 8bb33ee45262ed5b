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
from controller.deployments.decisions import Decision
from controller.deployments.loading import next_of_loading, next_of_serving
from controller.deployments.picture import Picture
from controller.deployments.profiling import next_of_model, unowned
from controller.deployments.pursuing import given_up, next_of_pursuit, taken_over
from controller.deployments.questions import Planner
from controller.deployments.waiting import next_of_waiting


def reconcile(contents: Contents, picture: Picture, plan: Planner) -> list[Decision]:
    """Every decision is made knowing those before it."""
    decisions: list[Decision] = []
    for name in contents.models:
        if decision := next_of_model(contents.models[name], contents, picture):
            decisions.append(decision)
            contents = _with(contents, decision)
    for name in contents.deployments:
        if decision := _next_of(contents.deployments[name], contents, picture, plan):
            decisions.append(decision)
            contents = _with(contents, decision)
    return [*decisions, *_tidying(contents, picture)]


def _tidying(contents: Contents, picture: Picture) -> Iterator[Decision]:
    yield from orphans(contents, picture)
    yield from adopted(contents, picture)
    yield from forgotten(contents)
    yield from unowned(contents)


def _next_of(deployment: Deployment, contents: Contents, picture: Picture, plan: Planner) -> Decision | None:
    decision = _by_itself(deployment, contents, picture, plan)
    return given_up(deployment, decision, contents, picture.now_ms)


def _by_itself(
    deployment: Deployment, contents: Contents, picture: Picture, plan: Planner
) -> Decision | None:
    if deployment.state == "loading":
        return next_of_loading(deployment, picture)
    if deployment.state == "serving":
        return (
            kept(deployment, picture)
            or next_of_serving(deployment, picture)
            or taken_over(deployment, contents, picture)
            or next_of_pursuit(deployment, contents, picture, plan)
        )
    if deployment.state == "retiring" or not is_cleared(deployment):
        return next_of_clearing(deployment, picture)
    if deployment.state == "waiting":
        return next_of_waiting(deployment, contents, picture, plan)
    return None


def _with(contents: Contents, decision: Decision) -> Contents:
    return contents if decision.record is None else contents.with_record(decision.record)
