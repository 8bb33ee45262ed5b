"""The changes that an order makes, and its answer. Pure: facts from the disk come with it.

An order is refused whole: nothing is half-registered or half-deployed. Status codes are those of HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bus.batch import Record
from bus.catalogue import Contents
from bus.checkpoints import Checkpoint
from bus.deployments import (
    Answer,
    CatalogueOrder,
    Deployment,
    DeploymentState,
    DeployModel,
    Intent,
    ModelCard,
    PlanModel,
    RegisterModel,
    RemoveModel,
    RetireModel,
)
from bus.errors import meant
from bus.messages import MOST_RANKS
from controller.deployments.profiling import cancel_of, profiles_of
from controller.deployments.transitions import ORDERED, Command
from controller.planning.plan import Plan

ENDED = ("retired", "failed")


class OrderRefused(Exception):
    """An order that is not carried out, with the status of its answer."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts that an order depends on beside the records."""

    now_ms: int
    checkpoint: Checkpoint | str = "it was not looked at"  # in the order's folder, or why there is none
    by_settings: Mapping[str, str] = field(default_factory=dict)  # models that workers serve by settings
    plan: Plan = field(default_factory=Plan)  # plan for the order's intent
    bad_intent: str = ""
    max_model_len: int = 0  # tokens that workers let a sequence have; 0: as many as the model may


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderResult:
    """An answer, and what is written, removed and sent with it."""

    answer: Answer
    write: tuple[Record, ...] = ()
    remove: tuple[Record, ...] = ()
    commands: tuple[tuple[str, Command], ...] = ()  # worker and command, after that


def carry_out(order: CatalogueOrder, contents: Contents, facts: Facts) -> OrderResult:
    """Carry out an order. Repeating one is harmless: it is answered as before."""
    try:
        if isinstance(order, RegisterModel):
            return _register(order, contents, facts)
        if isinstance(order, RemoveModel):
            return _remove(order, contents)
        if isinstance(order, RetireModel):
            return _retire(order, contents, facts.now_ms)
        return _plan_or_deploy(order, contents, facts)
    except OrderRefused as refusal:
        return _answered(order, refusal.status, error=str(refusal))


def _answered(order: CatalogueOrder, status: int, *write: Record, **fields: Any) -> OrderResult:
    return OrderResult(answer=Answer(id=order.id, status=status, **fields), write=write)


def path_of(order: CatalogueOrder, contents: Contents) -> str:
    """Return the folder that the order is about; "": none."""
    if isinstance(order, RegisterModel):
        return order.path
    if isinstance(order, PlanModel | DeployModel) and (card := contents.models.get(order.name)):
        return card.path
    return ""


def _register(order: RegisterModel, contents: Contents, facts: Facts) -> OrderResult:
    if not Path(order.path).is_absolute():
        raise OrderRefused(400, f"path is {order.path!r}; it must begin with /, for all processes read it")
    if isinstance(facts.checkpoint, str):
        raise OrderRefused(400, f"path: {facts.checkpoint}")
    if taken := contents.models.get(order.name):
        why = f"a model {order.name!r} is registered already ({taken.state}, from {taken.path})"
        raise OrderRefused(409, f"{why}; remove it first, or give this one another name")
    if worker := facts.by_settings.get(order.name):
        why = f"{worker} serves a model {order.name!r} by its settings"
        raise OrderRefused(409, f"{why}; give this one another name")
    card = ModelCard(
        name=order.name,
        path=order.path,
        digest=facts.checkpoint.digest,
        num_layers=facts.checkpoint.num_layers,
        state="registered",
        since_ms=facts.now_ms,
        context=_context(facts.checkpoint, facts),
    )
    return _answered(order, 201, card, model=card)


def _remove(order: RemoveModel, contents: Contents) -> OrderResult:
    card = _registered(order.name, contents)
    active = [one.id for one in _active(contents) if one.model == order.name]
    if active:
        why = f"{order.name} is deployed ({', '.join(active)})"
        raise OrderRefused(409, f"{why}; retire {'it' if len(active) == 1 else 'them'} first")
    profiles = [one for (model, _), one in contents.profiles.items() if model == order.name]
    cancels = (cancel_of(card),) if card.state == "profiling" else ()
    return replace(_answered(order, 200, model=card), remove=(card, *profiles), commands=cancels)


def _active(contents: Contents) -> list[Deployment]:
    return [one for one in contents.deployments.values() if one.state not in ENDED or one.stages]


def _registered(name: str, contents: Contents) -> ModelCard:
    card = contents.models.get(name)
    if card is None:
        there = meant(name, contents.models) if contents.models else "`instar model add DIR` registers one"
        raise OrderRefused(404, f"no model {name[:200]!r} is registered; {there}")
    return card


def _plan_or_deploy(order: PlanModel | DeployModel, contents: Contents, facts: Facts) -> OrderResult:
    if isinstance(order, DeployModel) and (there := contents.deployments.get(order.id)):
        return _answered(order, 202, deployment=there)
    card = _registered(order.name, contents)
    _check_plannable(order.intent, card, contents, facts)
    unmet = facts.plan.reason if facts.plan.is_unmet else ""
    if isinstance(order, PlanModel):
        if not profiles_of(contents, card):
            how = card.progress or "no worker is free for it"
            raise OrderRefused(409, f"{card.name} is not measured yet ({card.state}: {how}); ask again")
        return _answered(order, 200, model=card, estimates=facts.plan.estimates, error=unmet)
    if unmet:
        return _answered(order, 409, estimates=facts.plan.estimates, error=unmet)
    name, intent, now_ms = order.name, order.intent, facts.now_ms
    record = Deployment(
        id=order.id, model=name, intent=intent, state="waiting", since_ms=now_ms, copies=order.copies
    )
    return _answered(order, 202, record, deployment=record)


def _check_plannable(intent: Intent, card: ModelCard, contents: Contents, facts: Facts) -> None:
    """Raise OrderRefused for a bad intent, a changed checkpoint or a model that was not measured."""
    name = card.name
    if facts.bad_intent:
        raise OrderRefused(400, f"intent: {facts.bad_intent}")
    if isinstance(facts.checkpoint, str):
        raise OrderRefused(409, f"the checkpoint of {name} cannot be read any more: {facts.checkpoint}")
    if facts.checkpoint.digest != card.digest:
        why = f"the checkpoint in {card.path} is not the one that was registered as {name}"
        raise OrderRefused(409, f"{why}: what was measured does not hold; remove {name} and add it again")
    context, tokens = _context(facts.checkpoint, facts), intent.prompt_tokens + intent.output_tokens
    if context and tokens > context:
        both = f"prompt_tokens {intent.prompt_tokens} and output_tokens {intent.output_tokens}"
        why = f"intent: {both} are {tokens} tokens, and the context of {name} has {context}"
        raise OrderRefused(400, f"{why}; ask for {context} or fewer of both together")
    degrees = [{*one.degrees, *one.fixed_degrees} for one in profiles_of(contents, card).values()]
    possible = {1}.union(*degrees)
    if intent.tp is not None and degrees and all(degrees) and intent.tp not in possible:
        could = ", ".join(map(str, sorted(set().union(*degrees))))
        why = f"intent: tp is {intent.tp}, and the weights of {name} can be cut for {could}"
        limit = f"its heads, its KV heads and its experts set that, and it is at most {MOST_RANKS}"
        raise OrderRefused(400, f"{why}: {limit}")
    if card.state == "failed":
        raise OrderRefused(409, f"{name} could not be measured: {card.reason}; remove it and add it again")


def _context(checkpoint: Checkpoint, facts: Facts) -> int:
    """Return the tokens that a sequence may have; 0: no limit."""
    return min((limit for limit in (checkpoint.context, facts.max_model_len) if limit), default=0)


def _retire(order: RetireModel, contents: Contents, now_ms: int) -> OrderResult:
    deployment = contents.deployments.get(order.deployment)
    while deployment and deployment.heir and (heir := contents.deployments.get(deployment.heir)):
        deployment = heir  # the replacement
    if deployment is None:
        there = meant(order.deployment, [one.id for one in _active(contents)])
        raise OrderRefused(404, f"no deployment {order.deployment[:200]!r}; {there}")
    if deployment.state == "retired":
        return _answered(order, 200, deployment=deployment)
    state: DeploymentState = "retiring" if deployment.stages else "retired"
    record = replace(deployment, state=state, since_ms=now_ms, reason=ORDERED, instance="")
    return _answered(order, 202 if state == "retiring" else 200, record, deployment=record)
