"""What an order changes, and its answer. Pure: facts from the disk come with it.

An order is refused whole: nothing is half-registered or half-deployed. Status codes are those of HTTP: 201
and 202 for an accepted order, 404 for a missing object, 409 for an obstacle, 400 for an order that can never
be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path

from bus.catalogue import Contents, Record
from bus.checkpoints import Checkpoint
from bus.deployments import (
    Answer,
    Deployment,
    DeploymentState,
    DeployModel,
    Estimate,
    Intent,
    ModelCard,
    Order,
    PlanModel,
    RegisterModel,
    RemoveModel,
    RetireModel,
)
from controller.deployments.profiling import cancel_of, profiles_of
from controller.deployments.transitions import ORDERED, Command

ENDED = ("retired", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What an order depends on beside the records.

    `checkpoint`: of the order's folder, or why it is none. `by_settings`: models that workers serve by their
    settings. `estimates`: for the order's intent, best first. `unmet`: why no cluster could have any of them.
    """

    now_ms: int
    checkpoint: Checkpoint | str = "it was not looked at"
    by_settings: Mapping[str, str] = field(default_factory=dict)
    estimates: tuple[Estimate, ...] = ()
    unmet: str = ""
    bad_intent: str = ""
    max_model_len: int = 0  # tokens that workers let a sequence have; 0: as many as the model may


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderResult:
    """An answer, and what is written, removed and sent with it."""

    answer: Answer
    write: tuple[Record, ...] = ()
    remove: tuple[Record, ...] = ()
    commands: tuple[tuple[str, Command], ...] = ()  # worker and command, after that


def carry_out(order: Order, contents: Contents, facts: Facts) -> OrderResult:
    """Carry out an order. Repeating one is harmless: it is answered as before."""
    if isinstance(order, RegisterModel):
        return _register(order, contents, facts)
    if isinstance(order, RemoveModel):
        return _remove(order, contents)
    if isinstance(order, PlanModel):
        return _plan(order, contents, facts)
    if isinstance(order, DeployModel):
        return _deploy(order, contents, facts)
    return _retire(order, contents, facts.now_ms)


def _refused(order: Order, status: int, error: str) -> OrderResult:
    return OrderResult(answer=Answer(id=order.id, status=status, error=error))


# --------------------------------------------------------------------------- models


def _register(order: RegisterModel, contents: Contents, facts: Facts) -> OrderResult:
    if not Path(order.path).is_absolute():
        return _refused(
            order, 400, f"path is {order.path!r}; it must begin with /, for all processes read it"
        )
    if isinstance(facts.checkpoint, str):
        return _refused(order, 400, f"path: {facts.checkpoint}")
    if taken := contents.models.get(order.name):
        why = f"a model {order.name!r} is registered already ({taken.state}, from {taken.path})"
        return _refused(order, 409, f"{why}; remove it first, or give this one another name")
    if worker := facts.by_settings.get(order.name):
        why = f"{worker} serves a model {order.name!r} by its settings"
        return _refused(order, 409, f"{why}; give this one another name")
    card = ModelCard(
        name=order.name,
        path=order.path,
        digest=facts.checkpoint.digest,
        num_layers=facts.checkpoint.num_layers,
        state="registered",
        since_ms=facts.now_ms,
        context=_context(facts.checkpoint, facts),
    )
    return OrderResult(answer=Answer(id=order.id, status=201, model=card), write=(card,))


def _remove(order: RemoveModel, contents: Contents) -> OrderResult:
    card = contents.models.get(order.name)
    if card is None:
        return _no_model(order, order.name, contents)
    active = [
        one.id for one in contents.deployments.values() if one.model == order.name and not _is_over(one)
    ]
    if active:
        why = f"{order.name} is deployed ({', '.join(active)})"
        return _refused(order, 409, f"{why}; retire {'it' if len(active) == 1 else 'them'} first")
    profiles = [one for (model, _), one in contents.profiles.items() if model == order.name]
    cancels = (cancel_of(card),) if card.state == "profiling" else ()
    answer = Answer(id=order.id, status=200, model=card)
    return OrderResult(answer=answer, remove=(card, *profiles), commands=cancels)


def _is_over(deployment: Deployment) -> bool:
    return deployment.state in ENDED and not deployment.stages


def _no_model(order: Order, name: str, contents: Contents) -> OrderResult:
    there = _meant(name, contents.models) if contents.models else "`instar model add DIR` registers one"
    return _refused(order, 404, f"no model {name[:200]!r} is registered; {there}")


def _meant(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = get_close_matches(name[:200], names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names) or 'none'}"


# --------------------------------------------------------------------------- plans and deployments


def _plan(order: PlanModel, contents: Contents, facts: Facts) -> OrderResult:
    card = contents.models.get(order.name)
    if refusal := _why_not_planned(order, card, contents, facts):
        return refusal
    assert card is not None
    if not profiles_of(contents, card):
        how = card.progress or "no worker is free for it"
        return _refused(order, 409, f"{card.name} is not measured yet ({card.state}: {how}); ask again")
    answer = Answer(id=order.id, status=200, model=card, estimates=list(facts.estimates), error=facts.unmet)
    return OrderResult(answer=answer)


def _why_not_planned(
    order: PlanModel | DeployModel, card: ModelCard | None, contents: Contents, facts: Facts
) -> OrderResult | None:
    """Return the refusal of a plan or deployment; None if nothing is against it."""
    if card is None:
        return _no_model(order, order.name, contents)
    name = card.name
    if facts.bad_intent:
        return _refused(order, 400, f"intent: {facts.bad_intent}")
    if isinstance(facts.checkpoint, str):
        return _refused(order, 409, f"the checkpoint of {name} cannot be read any more: {facts.checkpoint}")
    if facts.checkpoint.digest != card.digest:
        why = f"the checkpoint in {card.path} is not the one that was registered as {name}"
        return _refused(order, 409, f"{why}: what was measured does not hold; remove {name} and add it again")
    intent = order.intent
    if why := _too_long(intent, name, _context(facts.checkpoint, facts)) or _uncut(intent, card, contents):
        return _refused(order, 400, f"intent: {why}")
    if card.state == "failed":
        return _refused(
            order, 409, f"{name} could not be measured: {card.reason}; remove it and add it again"
        )
    return None


def _context(checkpoint: Checkpoint, facts: Facts) -> int:
    """Return the tokens that a sequence may have; 0: no limit."""
    return min((limit for limit in (checkpoint.context, facts.max_model_len) if limit), default=0)


def _too_long(intent: Intent, name: str, context: int) -> str:
    """Return why requests of the intent's length do not fit into the context; "": they do."""
    tokens = intent.prompt_tokens + intent.output_tokens
    if not context or tokens <= context:
        return ""
    return (
        f"prompt_tokens {intent.prompt_tokens} and output_tokens {intent.output_tokens} are {tokens} tokens, "
        f"and the context of {name} has {context}; ask for {context} or fewer of both together"
    )


def _uncut(intent: Intent, card: ModelCard, contents: Contents) -> str:
    """Return why the degree that the intent fixes is impossible; "": it is not, or not known to be."""
    told = [one.degrees for one in profiles_of(contents, card).values()]
    if intent.tp in (None, 1) or not all(told) or not told or any(intent.tp in degrees for degrees in told):
        return ""
    possible = sorted({degree for degrees in told for degree in degrees})
    return (
        f"tp is {intent.tp}, and the weights of {card.name} can be cut for {', '.join(map(str, possible))}: "
        "its KV heads and worker.max_tp set that"
    )


def _deploy(order: DeployModel, contents: Contents, facts: Facts) -> OrderResult:
    if there := contents.deployments.get(order.id):
        return OrderResult(answer=Answer(id=order.id, status=202, deployment=there))
    card = contents.models.get(order.name)
    if refusal := _why_not_planned(order, card, contents, facts):
        return refusal
    if facts.unmet:
        answer = Answer(id=order.id, status=409, error=facts.unmet, estimates=list(facts.estimates))
        return OrderResult(answer=answer)
    deployment = Deployment(
        id=order.id, model=order.name, intent=order.intent, state="waiting", since_ms=facts.now_ms
    )
    return OrderResult(answer=Answer(id=order.id, status=202, deployment=deployment), write=(deployment,))


def _retire(order: RetireModel, contents: Contents, now_ms: int) -> OrderResult:
    deployment = _latest(order.deployment, contents)
    if deployment is None:
        there = [one.id for one in contents.deployments.values() if not _is_over(one)]
        why = f"no deployment {order.deployment[:200]!r}; {_meant(order.deployment, there)}"
        return _refused(order, 404, why)
    if deployment.state == "retired":
        return OrderResult(answer=Answer(id=order.id, status=200, deployment=deployment))
    state: DeploymentState = "retiring" if deployment.stages else "retired"
    record = replace(deployment, state=state, since_ms=now_ms, reason=ORDERED, instance="")
    status = 202 if state == "retiring" else 200
    return OrderResult(answer=Answer(id=order.id, status=status, deployment=record), write=(record,))


def _latest(name: str, contents: Contents) -> Deployment | None:
    """Return the deployment `name`, or what has replaced it."""
    found = contents.deployments.get(name)
    while found is not None and found.heir and (heir := contents.deployments.get(found.heir)):
        found = heir
    return found


def path_of(order: Order, contents: Contents) -> str:
    """Return the folder that the order is about; "": none."""
    if isinstance(order, RegisterModel):
        return order.path
    if isinstance(order, PlanModel | DeployModel) and (card := contents.models.get(order.name)):
        return card.path
    return ""
