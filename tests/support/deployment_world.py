"""A cluster without processes: workers that take commands when they are told to, live and die, and what the
controller would see of them. The records are what it would have written."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from bus.catalogue import Contents
from bus.checkpoints import Checkpoint
from bus.deployments import (
    Answer,
    CatalogueOrder,
    Configuration,
    Deployment,
    DeployModel,
    Estimate,
    Intent,
    Measure,
    ModelCard,
    Profile,
    Quantity,
    RegisterModel,
    RetireModel,
)
from bus.messages import InstanceCard, PageCounts, Stage, WorkerCard
from bus.morphs import CancelMorph, Deploy, MorphKind, MorphOutcome, MorphReport, Retire, Transform
from controller.deployments.observation import Observation, WorkerView
from controller.deployments.orders import Facts, carry_out
from controller.deployments.planner import Question
from controller.deployments.reconcile import reconcile
from controller.deployments.transitions import Command, Transition
from controller.planning.plan import Plan

NUM_LAYERS = 4
ROOM = 2  # models that a worker holds
ONE = Quantity(value=1.0, low=1.0, high=1.0, basis="assumed")


def estimate(seconds: float = 1.0, **shape: Any) -> Estimate:
    one = Quantity(value=seconds, low=seconds, high=seconds, basis="assumed")
    return Estimate(
        configuration=Configuration(**shape),
        memory_bytes=ONE,
        ttft_s=ONE,
        tpot_s=ONE,
        latency_s=one,
        cost=one,
        gpu_hours=ONE,
    )


def profile(model: str = "m", digest: str = "d", device: str = "cpu") -> Profile:
    return Profile(
        model=model,
        digest=digest,
        device=device,
        version="1",
        num_layers=NUM_LAYERS,
        block_bytes_per_layer=1024,
        block_tokens=16,
        latency=[],
        memory=[],
    )


@dataclass
class Worker:
    """`inbox`: commands that it has not looked at."""

    id: str
    epoch: int
    device: str = "cpu"
    kind: str = ""  # of the device; "": as `device` says
    state: str = "serving"
    instances: list[InstanceCard] = field(default_factory=list)
    inbox: list[Command] = field(default_factory=list)
    tells: bool = True  # its memory
    load: float = 0.0

    def seen(self) -> WorkerView:
        card = WorkerCard(
            id=self.id,
            epoch=self.epoch,
            host="h",
            pid=1,
            device=self.device,
            device_kind=self.kind,
            page_bytes=65536,
            state=self.state,  # type: ignore[arg-type]
            instances=list(self.instances),
        )
        pages = PageCounts(budget=100, weights=0, kv=0, free=100) if self.tells else None
        return WorkerView(card=card, pages=pages, load=self.load)


class World:
    """`tp`, `pp`: of the configuration that the planner takes; `turn` is one look of the controller.
    `seconds`: what any model takes on a worker, 1 where nothing is said; the planner takes the fastest.
    `lonely`: models that want workers without another. `is_fixed`: degrees stay. `may_change`: see
    Observation."""

    def __init__(self, *workers: str, tp: int = 1, pp: int = 1) -> None:
        self.tp, self.pp = tp, pp
        self.now_ms = 1_000_000
        self.epochs = 0
        self.workers: dict[str, Worker] = {}
        self.contents = Contents()
        self.reports: dict[str, MorphReport] = {}
        self.complaints: dict[str, str] = {}
        self.heard: dict[str, int] = {}
        self.sent: dict[str, int] = {}
        self.checkpoints: dict[str, Checkpoint] = {}  # see Observation
        self.ordered: list[tuple[str, Command]] = []
        self.is_settled = True
        self.refusal: Plan | None = None
        self.seconds: dict[str, float] = {}
        self.lonely: set[str] = set()
        self.may_change = self.is_fixed = False
        self.intent = Intent()
        self.num_orders = self.num_restarts = 0
        for name in workers:
            self.join(name)

    # ------------------------------------------------------------------------------------- workers

    def join(self, name: str, **facts: Any) -> Worker:
        self.die(name)
        self.epochs += 1
        self.workers[name] = Worker(name, self.epochs, **facts)
        return self.workers[name]

    def die(self, name: str) -> None:
        """The others of its groups are alone again, itself too if it comes back."""
        gone = self.workers.pop(name, None)
        for worker in [*self.workers.values(), *([gone] if gone else [])]:
            worker.instances[:] = [
                replace(card, tp=1, workers=[worker.id]) if name in card.workers else card
                for card in worker.instances
            ]

    def work(self, name: str, *, refuses: bool = False) -> bool:
        """The worker carries out its oldest command. False: there is none."""
        worker = self.workers.get(name)
        if worker is None or not worker.inbox:
            return False
        command = worker.inbox.pop(0)
        if command.epoch != worker.epoch or refuses:
            self._end(worker, command, "stale" if command.epoch != worker.epoch else "failed")
        else:
            self._end(worker, command, self._obey(worker, command))
        return True

    def _end(self, worker: Worker, command: Command, state: MorphOutcome) -> None:
        kinds: dict[type, MorphKind] = {Deploy: "deploy", Retire: "retire", Transform: "transform"}
        if isinstance(command, Measure) and state != "applied":
            self.complaints[command.id] = "the test says no"
        if type(command) in kinds:
            self.reports[command.id] = self.report(command, state, kinds[type(command)], worker)

    def report(self, command: Any, state: MorphOutcome, kind: MorphKind, worker: Worker) -> MorphReport:
        return MorphReport(
            id=command.id,
            kind=kind,
            target=command.instance,
            worker=worker.id,
            epoch=worker.epoch,
            state=state,
            reason=f"the test says {state}",
            started_ms=self.now_ms,
            ended_ms=None if state == "running" else self.now_ms,
        )

    def _obey(self, worker: Worker, command: Command) -> MorphOutcome:
        if isinstance(command, Measure):
            self.contents = self.contents.with_record(
                profile(command.model, command.digest, worker.seen().kind)
            )
        elif isinstance(command, Deploy):
            return self._load(worker, command)
        elif isinstance(command, Retire):
            worker.instances = [card for card in worker.instances if card.id != command.instance]
        elif isinstance(command, Transform):
            return self._transform(command)
        elif isinstance(command, CancelMorph):
            worker.inbox = [one for one in worker.inbox if one.id != command.morph_id]
        return "applied"

    def _load(self, worker: Worker, command: Deploy) -> MorphOutcome:
        if any(card.model == command.model for card in worker.instances) or len(worker.instances) >= ROOM:
            return "conflict"
        shape: dict[str, Any] = {"tp": len(command.stages[command.stage].workers), "pp": len(command.stages)}
        if command.is_divided and len(command.stages) == 1:
            shape["stages"] = command.stages
        worker.instances.append(instance(command.model, worker.id, deployed=command.id, **shape))
        return "applied"

    def _transform(self, command: Transform) -> MorphOutcome:
        members = [self.workers.get(name) for name in command.workers]
        if any(one is None or one.epoch != command.epochs[one.id] for one in members):
            return "stale"
        model = command.instance.rpartition("@")[0]
        for one in members:
            assert one is not None
            group = command.workers if command.tp > 1 else [one.id]
            one.instances = [
                replace(card, tp=command.tp, workers=group) if card.model == model else card
                for card in one.instances
            ]
        return "applied"

    # ------------------------------------------------------------------------------------- the controller

    @property
    def picture(self) -> Observation:
        return Observation(
            now_ms=self.now_ms,
            workers={name: worker.seen() for name, worker in self.workers.items()},
            is_settled=self.is_settled,
            reports=self.reports,
            complaints=self.complaints,
            heard=self.heard,
            sent=self.sent,
            may_change=self.may_change,
            checkpoints=self.checkpoints,
        )

    def plan(self, question: Question) -> Plan:
        """On the fastest workers, the first by name of those that are alike."""
        names = sorted(
            (device.card.id for device in question.devices if self._has_room(device, question)),
            key=lambda name: (self.seconds.get(name, 1.0), name),
        )
        tp = self.tp if question.may_group else 1
        if self.refusal or len(names) < tp * self.pp:
            return self.refusal or Plan(reason=f"there are {len(names)} workers")
        share = NUM_LAYERS // self.pp
        stages = [
            Stage(workers=names[i * tp : (i + 1) * tp], first=i * share, end=(i + 1) * share)
            for i in range(self.pp)
        ]
        taken = [self.seconds.get(name, 1.0) for stage in stages for name in stage.workers]
        chosen = estimate(max(taken), tp=tp, pp=self.pp)
        return Plan(chosen=replace(chosen, is_fixed=self.is_fixed), stages=stages, blocks=8)

    def _has_room(self, device: WorkerView, question: Question) -> bool:
        stay = [card for card in device.card.instances if card.id not in question.gone]
        return question.card.name not in self.lonely or not stay

    def turn(self, after_ms: int = 500) -> list[Transition]:
        self.now_ms += after_ms
        transitions = reconcile(self.contents, self.picture, self.plan)
        for transition in transitions:
            self._apply(transition)
        return transitions

    def _apply(self, transition: Transition) -> None:
        if transition.record is not None:
            self.contents = self.contents.with_record(transition.record)
        if gone := transition.erased:
            deployments = {key: one for key, one in self.contents.deployments.items() if one is not gone}
            profiles = {key: one for key, one in self.contents.profiles.items() if one is not gone}
            self.contents = Contents(self.contents.models, deployments, profiles)
        for name, command in transition.commands:
            self.sent[command.id] = self.now_ms
            self._send(name, command)

    def _send(self, name: str, command: Command) -> None:
        self.ordered.append((name, command))
        if worker := self.workers.get(name):
            worker.inbox.append(command)

    def settle(self, turns: int = 40, after_ms: int = 5_000) -> None:
        """Everybody does what there is to do, until nothing is left or so many turns are over."""
        for _ in range(turns):
            self.turn(after_ms)
            while sum(self.work(name) for name in list(self.workers)):
                pass

    def restart_controller(self) -> None:
        """Start a controller that knows the records and the reports, and nothing else."""
        self.sent = {}
        self.num_restarts += 1

    # ------------------------------------------------------------------------------------- orders

    def order(self, order: CatalogueOrder, **facts: Any) -> Answer:
        known = Facts(now_ms=self.now_ms, checkpoint=Checkpoint(NUM_LAYERS, "d"))
        outcome = carry_out(order, self.contents, replace(known, **facts))
        for record in outcome.write:
            self.contents = self.contents.with_record(record)
        gone = {id(record) for record in outcome.remove}
        self.contents = Contents(
            {key: one for key, one in self.contents.models.items() if id(one) not in gone},
            {key: one for key, one in self.contents.deployments.items() if id(one) not in gone},
            {key: one for key, one in self.contents.profiles.items() if id(one) not in gone},
        )
        for name, command in outcome.commands:
            self._send(name, command)
        return outcome.answer

    def next_id(self) -> str:
        self.num_orders += 1
        return f"o{self.num_orders}"

    def register(self, name: str = "m", **facts: Any) -> Answer:
        return self.order(RegisterModel(id=self.next_id(), name=name, path=f"/{name}"), **facts)

    def deploy(self, name: str = "m", **facts: Any) -> Answer:
        return self.order(DeployModel(id=self.next_id(), name=name, intent=self.intent), **facts)

    def retire(self, deployment: str) -> Answer:
        return self.order(RetireModel(id=self.next_id(), deployment=deployment))

    def model(self, name: str = "m") -> ModelCard:
        return self.contents.models[name]

    def deployment(self, answer: Answer) -> Deployment:
        assert answer.deployment is not None
        return self.contents.deployments[answer.deployment.id]

    def shown(self) -> list[str]:
        """Instances on the cards."""
        return sorted(card.id for worker in self.workers.values() for card in worker.instances)

    def commands(self, kind: type[Any]) -> list[tuple[str, Any]]:
        return [(name, command) for name, command in self.ordered if isinstance(command, kind)]


def measured(*workers: str, tp: int = 1, pp: int = 1) -> World:
    """A world in which "m" is profiled."""
    world = World(*workers, tp=tp, pp=pp)
    world.register()
    world.settle(3)
    assert world.model().state == "profiled"
    return world


def instance(model: str, worker: str, **facts: Any) -> InstanceCard:
    return InstanceCard(
        id=f"{model}@{worker}",
        model=model,
        model_path=f"/{model}",
        max_model_len=512,
        vocab_size=100,
        num_layers=NUM_LAYERS,
        dtype="float32",
        block_tokens=16,
        workers=[worker],
        **{"degrees": [1, 2, 4]} | facts,
    )
