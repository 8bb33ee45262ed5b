"""The configurations of deployments as what the policy that morphs goes back to. Pure."""

from __future__ import annotations

from bus.catalogue import Contents
from bus.deployments import Configuration, Deployment
from bus.precisions import LOWEST, PRECISIONS, Precision, lowest
from controller.deployments.decisions import degree_by_transform, instance_at, shown_by
from controller.deployments.profiling import profiles_of
from controller.rest import Rest, Rests


def rests_of(contents: Contents) -> Rests:
    """Of those that serve; what is being loaded or given up is not the policy's."""
    return {
        instance_at(deployment, worker): Rest(
            precision=deployment.configuration.precision,
            coarsest=_coarsest(deployment, deployment.configuration, contents),
            tp=degree_by_transform(deployment),
        )
        for deployment in contents.deployments.values()
        if deployment.state == "serving" and deployment.configuration
        for worker in shown_by(deployment)
    }


def _coarsest(deployment: Deployment, chosen: Configuration, contents: Contents) -> Precision:
    """With a floor of quality the fewest bits in which all layers keep to it; what is not known does not."""
    most = deployment.intent.max_loss
    if most is None:
        return LOWEST
    card = contents.models.get(deployment.model)
    known = profiles_of(contents, card).values() if card else ()
    kept = [
        one
        for one in PRECISIONS
        if known and all(profile.loss.get(one, float("inf")) <= most for profile in known)
    ]
    return lowest([chosen.precision, *kept])
