"""Register, deploy, retire, morphs and deaths in any order, on workers that are real but for their process:
engines, pages and tiny models, told what to do by `reconcile`. Every page has one owner all the time, nothing
is left of a model that is gone, and in the end every page is free."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bus.deployments import Measure, RemoveModel
from bus.messages import InstanceCard, PageCounts
from bus.morphs import CancelMorph, Deploy, Resize, Swap
from bus.precisions import Precision
from controller.deployments.observation import WorkerView
from tests.controller.deployments.test_properties import check_at_rest
from tests.support.deploy_models import Place, settings_for, write_model
from tests.support.deployment_world import NUM_LAYERS, Worker, World, profile

FOLDER = Path(tempfile.mkdtemp(prefix="instar-test-models-"))
WORKERS, MODELS = ("w0", "w1"), ("a", "b")
PROMPT = [11, 12, 13]
NAMES = st.sampled_from(WORKERS)


def folder_of(model: str) -> Path:
    path = FOLDER / model
    if not path.exists():
        write_model(path, ord(model), num_hidden_layers=NUM_LAYERS)
    return path


@dataclass
class PagedWorker(Worker):
    """`place` is its engine."""

    place: Place | None = None

    @property
    def cards(self) -> list[InstanceCard]:
        assert self.place
        return [resident.card for resident in self.place.model_host.models.values()]

    def counts(self) -> PageCounts:
        assert self.place
        return self.place.counts()

    def seen(self) -> WorkerView:
        self.instances = self.cards
        return replace(super().seen(), pages=self.counts())


class PagedWorld(World):
    def join(self, name: str, **facts: Any) -> Worker:
        self.die(name)
        self.epochs += 1
        place = Place(
            settings_for(FOLDER, FOLDER, id=name, models=[], may_be_empty=True, memory_mb=6, morph_share=1.0)
        )
        place.morphs.fence(self.epochs)
        worker = self.workers[name] = PagedWorker(name, self.epochs, place=place)
        return worker

    def die(self, name: str) -> None:
        worker = self.workers.pop(name, None)
        if isinstance(worker, PagedWorker) and worker.place:
            worker.place.close()

    def at(self, name: str) -> PagedWorker | None:
        worker = self.workers.get(name)
        return worker if isinstance(worker, PagedWorker) else None

    def work(self, name: str, *, refuses: bool = False) -> bool:
        worker = self.at(name)
        if worker is None or not worker.inbox:
            return False
        command, place = worker.inbox.pop(0), worker.place
        assert place
        if isinstance(command, Measure):
            self.contents = self.contents.with_record(profile(command.model, command.digest))
        elif isinstance(command, CancelMorph):
            place.morphs.cancel(command.morph_id)
        else:
            place.morphs.begin(_real(command))
        return True

    def step(self, name: str, steps: int = 1) -> None:
        if worker := self.at(name):
            assert worker.place
            worker.place.step(steps)
            worker.instances = worker.cards
            self._hear(worker.place)

    def rest(self, name: str) -> None:
        """Until it has nothing to do."""
        if (worker := self.at(name)) and (place := worker.place):
            place.until(lambda: not place.morphs.num_running and not place.engine.has_work)
            self.step(name)

    def _hear(self, place: Place) -> None:
        """Wait in the world's time."""
        for one in place.reports:
            ended_ms = None if one.ended_ms is None else self.now_ms
            self.reports[one.id] = replace(one, started_ms=self.now_ms, ended_ms=ended_ms)
        place.reports.clear()

    def settle(self, turns: int = 40, after_ms: int = 5_000) -> None:
        for _ in range(turns):
            self.turn(after_ms)
            for name in list(self.workers):
                while self.work(name):
                    pass
                self.rest(name)


def _real(command: Any) -> Any:
    """Return a card with the folder of the model, whose digest the world makes up."""
    if isinstance(command, Deploy):
        return replace(command, path=str(folder_of(command.model)), digest="", wait_s=1.0)
    return replace(command, wait_s=1.0)


class Histories(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.world = PagedWorld(*WORKERS)
        self.num_requests = 0
        for name in MODELS:
            self.world.register(name)
        self.world.settle(3)

    @rule(name=st.sampled_from(MODELS))
    def register(self, name: str) -> None:
        self.world.register(name)

    @rule(name=st.sampled_from(MODELS))
    def remove(self, name: str) -> None:
        self.world.order(RemoveModel(id=self.world.next_id(), name=name))

    @rule(name=st.sampled_from(MODELS))
    def deploy(self, name: str) -> None:
        self.world.deploy(name)
        self.world.turn()

    @rule(which=st.integers(0, 3))
    def retire(self, which: int) -> None:
        if ids := list(self.world.contents.deployments):
            self.world.retire(ids[which % len(ids)])
            self.world.turn()

    @rule(
        name=NAMES, precision=st.sampled_from(["full", "int8", "int4"]), layer=st.integers(0, NUM_LAYERS - 1)
    )
    def swap(self, name: str, precision: Precision, layer: int) -> None:
        self._morph(Swap, name, precision=precision, layers=[layer])

    @rule(name=NAMES, blocks=st.integers(16, 200))
    def resize(self, name: str, blocks: int) -> None:
        self._morph(Resize, name, blocks=blocks)

    @rule(name=NAMES, max_tokens=st.integers(1, 40))
    def ask(self, name: str, max_tokens: int) -> None:
        worker = self.world.at(name)
        for card in worker.cards if worker else ():
            assert worker and worker.place
            self.num_requests += 1
            worker.place.submit(f"r{self.num_requests}", card.model, PROMPT, max_tokens)

    @rule(name=NAMES)
    def die(self, name: str) -> None:
        self.world.die(name)

    @rule(name=NAMES)
    def join(self, name: str) -> None:
        self.world.join(name)

    @rule(name=NAMES)
    def lose_the_lease(self, name: str) -> None:
        if worker := self.world.at(name):
            assert worker.place
            self.world.epochs += 1
            worker.epoch = self.world.epochs
            worker.place.engine.reset()
            worker.place.morphs.fence(worker.epoch)

    @rule(name=NAMES, steps=st.integers(1, 30))
    def work(self, name: str, steps: int) -> None:
        self.world.work(name)
        self.world.step(name, steps)

    @rule(after_ms=st.sampled_from((500, 5_000, 70_000)))
    def turn(self, after_ms: int) -> None:
        self.world.turn(after_ms)

    @rule()
    def settle(self) -> None:
        self.world.settle(2)

    @rule()
    def restart(self) -> None:
        self.world.restart_controller()

    @invariant()
    def every_page_has_one_owner(self) -> None:
        for name in self.world.workers if hasattr(self, "world") else ():
            worker = self.world.at(name)
            assert worker and worker.place
            worker.place.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.settle(60, after_ms=20_000)
        check_at_rest(world)
        for one in list(world.contents.deployments):
            world.retire(one)
        world.settle(8, after_ms=20_000)
        assert world.shown() == []
        for name in list(world.workers):
            worker = world.at(name)
            assert worker and worker.counts().free == worker.counts().budget
            world.die(name)

    def _morph(self, kind: Any, name: str, **fields: Any) -> None:
        """Send the order as a gateway does."""
        worker = self.world.at(name)
        for card in worker.cards if worker else ():
            assert worker and worker.place
            worker.place.begin(kind, epoch=worker.epoch, instance=card.id, wait_s=0.05, **fields)


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=2,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
