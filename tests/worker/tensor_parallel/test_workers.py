"""Workers come together and part while requests run on each of them: every token is what they get alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.common.oracles import RoundedCache
from bus.morphs import ConvertCache, MorphReport
from bus.precisions import KVPrecision
from tests.support.greedy import MakeCache, assert_greedy
from tests.support.group_workers import BLOCK_TOKENS, GroupWorker, model_fixtures, transform, workers

LAYERS = 4
SLOW = pytest.mark.slow


model, folder = model_fixtures(num_hidden_layers=LAYERS)


def prompt(seed: int, n: int) -> list[int]:
    made: list[int] = torch.randint(0, 211, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
    return made


class Load:
    """Requests at all workers, each end followed by another beginning, until `stop`."""

    def __init__(
        self, each: list[GroupWorker], model: Any, per_worker: int = 2, beginning: tuple[int, ...] = ()
    ) -> None:
        """beginning: of all prompts."""
        self.each, self.model, self.beginning = each, model, beginning
        self.asked: dict[str, tuple[GroupWorker, list[int], int]] = {}
        self.cancelled: set[str] = set()
        for worker in each:
            for _ in range(per_worker):
                self.begin(worker)

    def begin(self, worker: GroupWorker, tokens: int = 0) -> str:
        i = len(self.asked)
        name = f"{worker.name}-{i}"
        tokens_in = [*self.beginning, *prompt(i, 5 + 7 * i % 40)]
        self.asked[name] = worker, tokens_in, tokens or 30 + 17 * i % 60
        worker.submit(name, *self.asked[name][1:])
        return name

    def cancel_one(self, worker: GroupWorker) -> None:
        for name, (place, _, _) in self.asked.items():
            if place is worker and name not in worker.ends and name not in self.cancelled:
                worker.thread.cancel([name])
                self.cancelled.add(name)
                return

    def renew(self) -> None:
        """Check that as many run as before."""
        for worker in self.each:
            running = [n for n, (w, _, _) in self.asked.items() if w is worker and n not in worker.ends]
            if len([name for name in running if name not in self.cancelled]) < 2:
                self.begin(worker)

    def during(self, leader: GroupWorker, morph: str) -> MorphReport:
        """Until the morph ends: a new request and a cancelled one at every layer."""
        seen = 0
        while not (ended := [r for r in leader.reports if r.id == morph and r.state != "running"]):
            self.renew()
            assert not any(worker.death for worker in self.each), [worker.death for worker in self.each]
            layers = sum(report.id == morph for report in leader.reports)
            if layers > seen:
                seen = layers
                self.begin(self.each[seen % len(self.each)])
                self.cancel_one(self.each[(seen + 1) % len(self.each)])
            time.sleep(0.002)
        return ended[0]

    def check(self, make_cache: MakeCache | None = None) -> None:
        """Every answer is whole and what the oracle says; what was cancelled is a beginning of it."""
        for name, (worker, tokens, n) in self.asked.items():
            if name not in self.cancelled:
                worker.wait_ends(name)
                assert worker.ends[name] == "length", worker.ends[name]
            got = list(worker.tokens[name])
            num = len(got) if name in self.cancelled else n
            assert_greedy(self.model, tokens, num, got, make_cache, name)


@pytest.mark.parametrize(
    ("size", "layers_per_step"),
    [(2, 1), pytest.param(2, 3, marks=SLOW), pytest.param(4, 1, marks=SLOW), pytest.param(4, 3, marks=SLOW)],
)
def test_workers_come_together_and_part_while_requests_come_end_and_are_cancelled(
    folder: Path, model: Any, size: int, layers_per_step: int
) -> None:
    with workers(folder, size) as each:
        load = Load(each, model)
        pages = [worker.pool.counts() for worker in each]
        each[0].wait(lambda: len(each[0].tokens) > 0, "the first tokens")
        for _ in range(2):
            for tp in (size, 1):
                report = load.during(each[0], transform(each, tp, layers_per_step=layers_per_step))
                assert report.state == "applied", report
                assert report.numbers["layers_done"] == LAYERS
                for worker in each:  # the others are a message behind
                    worker.wait_degree(tp)
        load.check()
        for worker in each:
            worker.check()
            assert worker.instance.scheduler.num_recomputed == 0
            assert worker.fingerprints == {"tp1-full", f"tp{size}-full"}
        assert [worker.pool.counts() for worker in each] == pages


@pytest.mark.slow
def test_workers_with_kv_in_8_bits_come_together_and_part_as_others_do(folder: Path, model: Any) -> None:
    with workers(folder, 2, kv_dtype="int8") as each:
        load = Load(each, model)
        for tp in (2, 1):
            assert load.during(each[0], transform(each, tp)).state == "applied"
            for worker in each:
                worker.wait_degree(tp)
        load.check(RoundedCache)
        for worker in each:
            assert worker.instance.scheduler.num_recomputed == 0
            assert worker.fingerprints == {"tp1-full-kv8", "tp2-full-kv8"}


def test_workers_whose_kv_differs_form_no_group_until_it_is_alike(folder: Path) -> None:
    with workers(folder, 2) as each:
        assert converted(each[1]).state == "applied"
        report = transformed(each, 2)
        assert report.state != "applied"
        assert "w1: its KV cache is in int8 and in full at w0; convert one of them" in report.reason
        assert converted(each[0]).state == "applied"
        assert transformed(each, 2).state == "applied"
        assert converted(each[0], "full").state == "applied"
        assert transformed(each, 1).state == "applied"
        each[0].submit("a", prompt(1, 9), 20)
        each[0].wait_ends("a")
        each[0].check()


def converted(worker: GroupWorker, kv_dtype: KVPrecision = "int8") -> MorphReport:
    name = f"kv-{next(_ids)}"
    worker.thread.morph(
        ConvertCache(id=name, epoch=worker.epoch, instance=worker.instance.id, kv_dtype=kv_dtype)
    )
    return worker.end_of(name)


_ids = iter(range(1_000))


@pytest.mark.slow
def test_groups_of_two_come_together_and_part_into_groups_of_two(folder: Path, model: Any) -> None:
    """Change by twos: 1 to 2 to 4 to 2 to 1; the first of each two leads."""
    with workers(folder, 4) as each:
        load = Load(each, model)
        w0, w1, w2, w3 = each

        def applied(leader: GroupWorker, members: list[GroupWorker], tp: int) -> None:
            report = load.during(leader, transform(members, tp))
            assert report.state == "applied", report

        for _ in range(2):
            applied(w0, [w0, w1], 2)
            applied(w2, [w2, w3], 2)
            # In the order of their shards at the higher degree: shard s of each group, then shard s + 1.
            applied(w0, [w0, w2, w1, w3], 4)
            applied(w0, [w0, w2, w1, w3], 2)
            applied(w0, [w0, w1], 1)
            applied(w2, [w2, w3], 1)
        load.check()
        for worker in each:
            assert worker.instance.scheduler.num_recomputed == 0
            assert worker.fingerprints == {"tp1-full", "tp2-full", "tp4-full"}
            assert [len(members) for members, _ in worker.regrouped] == [2, 4, 2, 0] * 2


@pytest.mark.parametrize("leaves", [0, 1])
def test_a_worker_that_is_about_to_leave_lets_its_group_part_first(
    folder: Path, model: Any, leaves: int
) -> None:
    with workers(folder, 2) as each:
        load = Load([each[1 - leaves]], model)
        assert transformed(each, 2).state == "applied"
        each[leaves].thread.request_split()
        for worker in each:
            worker.wait(lambda: not any(one.thread.is_in_group for one in each), "the parting")
        each[0].wait(lambda: each[0].reports[-1].state == "applied", "the report of the split")
        assert each[0].reports[-1].reason == "a member of the group is about to leave"
        load.check()
        assert all(worker.instance.scheduler.num_recomputed == 0 for worker in each)


@pytest.mark.parametrize("taker", [0, pytest.param(1, marks=SLOW)])
def test_a_request_that_only_a_group_can_hold_gets_the_blocks_of_all(
    folder: Path, model: Any, taker: int
) -> None:
    with workers(folder, 2, megabytes=1.2) as each:
        alone = each[0].instance.scheduler.blocks.capacity * BLOCK_TOKENS
        assert transformed(each, 2).state == "applied"
        long = prompt(1, alone + 40)
        each[taker].submit("long", long, 20)
        each[1 - taker].submit("short", prompt(2, 9), 20)
        each[taker].wait_ends("long")
        each[1 - taker].wait_ends("short")
        assert_greedy(model, long, 20, each[taker].tokens["long"])
        assert_greedy(model, prompt(2, 9), 20, each[1 - taker].tokens["short"])
        assert transformed(each, 1).state == "applied"


def test_every_member_of_a_group_embeds_its_own_prompts(folder: Path, model: Any) -> None:
    lengths = (1, 9, 70)  # the last in chunks
    with workers(folder, 2) as each:
        assert transformed(each, 2).state == "applied"
        for k, worker in enumerate(each):
            worker.submit(f"{worker.name}-text", prompt(k, 9), 20)
            for n in lengths:
                worker.submit(f"{worker.name}-{n}", prompt(k + n, n), 1, embeds=True)
        for k, worker in enumerate(each):
            worker.wait_ends(f"{worker.name}-text", *(f"{worker.name}-{n}" for n in lengths))
            assert_greedy(model, prompt(k, 9), 20, worker.tokens[f"{worker.name}-text"])
            for n in lengths:
                with torch.no_grad():
                    last = model.base_model(torch.tensor([prompt(k + n, n)])).last_hidden_state[0, -1]
                found = torch.frombuffer(
                    bytearray(worker.embeddings[f"{worker.name}-{n}"]), dtype=torch.float32
                )
                wanted = torch.nn.functional.normalize(last, dim=0)
                torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
        assert transformed(each, 1).state == "applied"


def test_what_is_so_already_is_applied_and_says_so(folder: Path) -> None:
    with workers(folder, 2) as each:
        for tp in (1, 2):
            transformed(each[:tp], tp)
            report = transformed(each[:tp], tp)
            assert (report.state, report.reason) == ("applied", f"already at tp {tp}; nothing changed")


def transformed(each: list[GroupWorker], tp: int) -> MorphReport:
    return each[0].end_of(transform(each, tp))
