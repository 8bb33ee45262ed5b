"""Any history of requests, cancels, swaps, resizes, floors, epochs and failures, on a toy over real pages.

Whatever happens: no page and no block is lost or has two owners, every token is the right one, whoever came
first starts first, every request ends, and every morph ends once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from bus.messages import PARTS, RejectReason
from bus.morphs import MorphReport, Resize, Swap
from bus.precisions import PRECISIONS
from tests.support.engine_toys import VOCAB, Client, continuation, request
from tests.support.morph_toys import Rig
from worker.engine.scheduler import SchedulerOutput
from worker.memory import MappingFailed
from worker.morph import resize as resizing

VERBS = ("map", "copy_job", "copy", "check", "install", "unmap")

Action = tuple[Any, ...]
NUM_ACTIONS = 150


def random_history(seed: int) -> list[Action]:
    """Mostly work, so that what is rare meets something."""
    draw = random.Random(seed)
    weights = {
        "step": 30,
        "submit": 18,
        "swap": 12,
        "resize": 12,
        "cancel": 5,
        "fail": 4,
        "submit with a floor": 2,
        "hold copies": 2,
        "refuse memory": 2,
        "cancel morph": 2,
        "new epoch": 1,
    }
    kinds = draw.choices(list(weights), list(weights.values()), k=NUM_ACTIONS)
    return [(kind.removesuffix(" with a floor"), *_arguments(kind, draw)) for kind in kinds]


def _arguments(kind: str, draw: random.Random) -> Action:
    wait_s = draw.choice((0.0, 0.02))
    return {
        "step": (draw.randint(1, 5),),
        "submit": (draw.randint(1, 40), draw.randint(1, 20), ""),
        "submit with a floor": (draw.randint(1, 40), draw.randint(1, 20), draw.choice(PRECISIONS)),
        "swap": (
            draw.choice(PRECISIONS),
            draw.randint(1, 7),
            draw.choice((PARTS, PARTS[:1], PARTS[1:])),
            wait_s,
        ),
        "resize": (draw.randint(15, 45), wait_s),
        "cancel": (draw.randint(0, 20),),
        "fail": (draw.choice(VERBS),),
        "hold copies": (draw.random() < 0.5,),
        "refuse memory": (draw.choice(("map", "unmap")),),
        "cancel morph": (draw.randint(0, 5),),
        "new epoch": (),
    }[kind]


class History:
    """Plays a history on a rig and keeps what it should have come to."""

    def __init__(self) -> None:
        self.rig = Rig(num_layers=3, num_pages=80, model_len=60)
        self.client = Client()
        self.prompts: dict[str, tuple[list[int], int]] = {}
        self.cancelled: set[str] = set()
        self.morphs: list[str] = []
        self.epoch = 0
        self.started: list[str] = []
        self._watch_admissions()

    def play(self, history: list[tuple[Any, ...]]) -> None:
        for kind, *arguments in history:
            getattr(self, "do_" + kind.replace(" ", "_"))(*arguments)
            self.check()
        self.finish()

    # ----------------------------------------------------------------------------- actions

    def do_submit(self, length: int, max_tokens: int, floor: str) -> None:
        name = str(len(self.prompts))
        prompt = [(length * 7 + i) % VOCAB for i in range(length)]
        self.prompts[name] = prompt, max_tokens
        self.rig.engine.submit("toy@w0", request(name, prompt, max_tokens, min_precision=floor))

    def do_cancel(self, which: int) -> None:
        live = [name for name in self.prompts if name in self.rig.instance._sequences]
        if live:
            name = live[which % len(live)]
            self.cancelled.add(name)
            self.rig.engine.cancel([name])

    def do_swap(self, precision: Any, layers: int, parts: Any, wait_s: float) -> None:
        chosen = [i for i in range(3) if layers >> i & 1]
        self._begin(Swap, precision=precision, layers=chosen, parts=list(parts), wait_s=wait_s)

    def do_resize(self, blocks: int, wait_s: float) -> None:
        self._begin(Resize, blocks=blocks, wait_s=wait_s)

    def do_cancel_morph(self, which: int) -> None:
        if self.morphs:
            self.rig.executor.cancel(self.morphs[-1 - which % len(self.morphs)])

    def do_fail(self, verb: str) -> None:
        self.rig.variants.fail_once.add(verb)

    def do_refuse_memory(self, verb: str) -> None:
        """The system does, once."""
        backend, real = self.rig.pool.backend, getattr(type(self.rig.pool.backend), verb)

        def refuse(*_: Any, **__: Any) -> None:
            setattr(backend, verb, real.__get__(backend))
            raise MappingFailed(f"{verb} is refused")

        setattr(backend, verb, refuse)

    def do_hold_copies(self, hold: bool) -> None:
        (self.rig.variants.hold.clear if hold else self.rig.variants.hold.set)()

    def do_new_epoch(self) -> None:
        self.epoch += 1
        self.cancelled |= self.prompts.keys() - self.client.ends.keys()
        self.rig.engine.reset()
        self.rig.executor.fence(self.epoch)

    def do_step(self, n: int) -> None:
        for _ in range(n):
            self.rig.advance()
            self.client.take(self.rig.engine.step())

    # ----------------------------------------------------------------------------- what must hold

    def check(self) -> None:
        rig = self.rig
        rig.engine.check_integrity()
        rig.cache.check_integrity()
        rig.pool.check_integrity()
        assert rig.cache.num_blocks >= rig.resizer.min_blocks
        for seq in rig.instance._sequences.values():
            floor = seq.request.min_precision
            for layer in rig.instance.shape if floor else ():
                assert PRECISIONS.index(layer.ffn) <= PRECISIONS.index(floor)
                assert PRECISIONS.index(layer.attention) <= PRECISIONS.index(floor)

    def finish(self) -> None:
        rig, deadline = self.rig, time.monotonic() + 20
        rig.variants.hold.set()
        rig.variants.fail_once.clear()
        for verb in ("map", "unmap"):
            rig.pool.backend.__dict__.pop(verb, None)
        while rig.engine.has_work or rig.executor.num_running:
            assert time.monotonic() < deadline, "it does not come to an end"
            self.do_step(1)
            self.check()
        rig.settle()
        self._begin(Swap, precision="full", layers=[0, 1, 2], parts=list(PARTS), wait_s=0.0)
        (last,) = rig.settle()
        assert last.state == "applied", last
        assert rig.instance.shape_id == "tp1-full" and rig.cache.allocator.num_used == 0
        rig.check_integrity()
        self._check_streams()
        self._check_reports(rig.reports)
        rig.close()

    def _check_streams(self) -> None:
        for name, (prompt, max_tokens) in self.prompts.items():
            if self.client.reject_reasons.get(name) is RejectReason.PRECISION_FLOOR:
                assert not self.client.tokens[name]
            elif name not in self.cancelled:
                wanted = continuation(prompt, min(max_tokens, 60 - len(prompt)))
                assert (self.client.tokens[name], self.client.ends[name]) == (wanted, "length")
        ranks = [int(name) for name in dict.fromkeys(self.started)]
        assert ranks == sorted(ranks), "first come, first served"

    def _check_reports(self, reports: list[MorphReport]) -> None:
        ends = [report.id for report in reports if report.state != "running"]
        assert sorted(ends) == sorted(self.morphs), "one end for each"

    # ----------------------------------------------------------------------------- parts

    def _begin(self, kind: Callable[..., Any], **fields: Any) -> None:
        self.morphs.append(f"m{len(self.morphs)}")
        self.rig.executor.begin(kind(id=self.morphs[-1], epoch=self.epoch, instance="toy@w0", **fields))

    def _watch_admissions(self) -> None:
        schedule = self.rig.instance.scheduler.schedule

        def watched(max_tokens: int | None = None, max_decodes: int | None = None) -> SchedulerOutput:
            made = schedule(max_tokens, max_decodes)
            self.started += [seq.request.request_id for seq in made.admitted]
            return made

        self.rig.instance.scheduler.schedule = watched  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 25))]
)
def test_any_history_keeps_pages_blocks_order_and_answers(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(resizing, "PAGES_AT_ONCE", 2)
    History().play(random_history(seed))
