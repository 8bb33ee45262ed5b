"""Any history of models that come and go, requests, cancels, swaps, resizes and epochs, on real tiny models.

Whatever happens: no page and no block is lost or has two owners, nothing is left of a model that is gone or
did not come, every answer is what its model gives alone, and every morph ends once.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bus.messages import PARTS, RejectReason
from bus.morphs import Resize, Swap
from bus.precisions import Precision
from tests.support.deploy_models import Place, settings_for, write_model

FOLDER = Path(tempfile.mkdtemp(prefix="instar-test-models-"))
PROMPT = [11, 12, 13]
LAYERS = {"first": 2, "second": 3, "third": 1}
NAMES = st.sampled_from(["second", "third"])
PRECISIONS = st.sampled_from(["full", "full", "int8", "int4"])
_answers: dict[str, list[int]] = {}


def folder_of(model: str) -> Path:
    path = FOLDER / model
    if not path.exists():
        write_model(path, len(model), num_hidden_layers=LAYERS[model])
    return path


def answer(model: str) -> list[int]:
    """40 tokens in full precision, alone."""
    if model not in _answers:
        place = Place(settings_for(folder_of(model), FOLDER, variants=[]))
        place.submit("a", "first", PROMPT, 40)
        place.run()
        place.close()
        _answers[model] = place.client.tokens["a"]
    return _answers[model]


class Histories(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.place = Place(settings_for(folder_of("first"), FOLDER, memory_mb=4, morph_share=1.0))
        self.before, self.epoch = self.place.counts(), 0
        self.morphs: list[str] = []
        self.is_swapped: set[str] = set()  # instances that may have answered in fewer bits
        self.requests: dict[str, tuple[str, int]] = {}
        self.cancelled: set[str] = set()
        self.was_changed = False  # the first model's own size, by order

    @rule(name=NAMES, precision=PRECISIONS, wait_s=st.sampled_from([0.0, 5.0]))
    def deploy(self, name: str, precision: Precision, wait_s: float) -> None:
        order = self.place.deploy(name, folder_of(name), precision=precision, wait_s=wait_s, epoch=self.epoch)
        self.morphs.append(order)
        if precision != "full":
            self.is_swapped.add(name)

    @rule(name=NAMES, wait_s=st.sampled_from([0.0, 5.0]))
    def retire(self, name: str, wait_s: float) -> None:
        self.morphs.append(self.place.retire(name, wait_s=wait_s, epoch=self.epoch))

    @rule(model=st.sampled_from(list(LAYERS)), max_tokens=st.integers(1, 40))
    def submit(self, model: str, max_tokens: int) -> None:
        name = f"r{len(self.requests)}"
        self.requests[name] = model, max_tokens
        self.place.submit(name, model, PROMPT, max_tokens)

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 9))
    def cancel(self, which: int) -> None:
        name = list(self.requests)[-1 - which % len(self.requests)]
        self.place.engine.cancel([name])
        self.cancelled.add(name)

    @rule(
        model=st.sampled_from(list(LAYERS)),
        precision=PRECISIONS,
        parts=st.sampled_from([list(PARTS), ["ffn"]]),
        wait_s=st.sampled_from([0.0, 0.05]),
    )
    def swap(self, model: str, precision: Precision, parts: Any, wait_s: float) -> None:
        if precision != "full":
            self.is_swapped.add(model)
        self._begin(Swap, model, precision=precision, layers=[0], parts=parts, wait_s=wait_s)

    @rule(model=st.sampled_from(list(LAYERS)), blocks=st.integers(16, 200))
    def resize(self, model: str, blocks: int) -> None:
        self.was_changed = True
        self._begin(Resize, model, blocks=blocks)

    @precondition(lambda self: self.morphs)
    @rule(which=st.integers(0, 3))
    def call_off(self, which: int) -> None:
        self.place.morphs.cancel(self.morphs[-1 - which % len(self.morphs)])

    @rule()
    def lose_the_lease(self) -> None:
        self.epoch += 1
        self.cancelled |= self.requests.keys() - self.place.client.ends.keys()
        self.place.engine.reset()
        self.place.morphs.fence(self.epoch)

    @rule(steps=st.integers(1, 30))
    def step(self, steps: int) -> None:
        self.place.step(steps)

    @rule()
    def settle(self) -> None:
        self.place.until(lambda: not self.place.morphs.num_running and not self.place.engine.has_work)

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "place"):
            self.place.check()

    def teardown(self) -> None:
        if not hasattr(self, "place"):
            return
        place = self.place
        self.settle()
        for name in ("second", "third"):
            if f"{name}@w0" in place.engine.instances:
                assert place.end_of(place.retire(name, epoch=self.epoch)).state == "applied"
        assert list(place.engine.instances) == ["first@w0"]
        if "first" not in self.is_swapped and not self.was_changed:
            assert place.counts() == self.before
        place.step()
        ends = [one.id for one in place.reports if one.state != "running"]
        assert len(ends) == len(set(ends)) and set(self.morphs) <= set(ends)
        self._check_answers()
        place.check()
        place.close()

    def _begin(self, kind: Any, model: str, **fields: Any) -> None:
        instance = f"{model}@w0"
        self.morphs.append(self.place.begin(kind, epoch=self.epoch, instance=instance, **fields))

    def _check_answers(self) -> None:
        client = self.place.client
        for name, (model, max_tokens) in self.requests.items():
            if client.reject_reasons.get(name) is RejectReason.RETIRED or name in self.cancelled:
                continue
            assert client.ends[name] == "length" and len(client.tokens[name]) == max_tokens
            if model not in self.is_swapped:
                assert client.tokens[name] == answer(model)[:max_tokens]


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=4,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
