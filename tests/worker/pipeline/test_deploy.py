"""A model is deployed in stages on workers that serve others, and goes with every page."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from bus.messages import RejectReason, Stage
from bus.morphs import Deploy, MorphReport, Resize, Swap
from tests.support.deploy_models import Place, settings_for, write_model
from worker.distributed.messages import Peer, RunStage
from worker.model.config import read_config
from worker.pipeline.stage_host import StageHost
from worker.pipeline.stage_runner import RemoteStageRunner
from worker.profiler.fingerprint import CutPlan

LAYERS = 5


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("first"), seed=1)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("long"), seed=2, num_hidden_layers=LAYERS)


def _stages(place: Place) -> StageHost:
    assert place.model_host.stages
    return place.model_host.stages


class Hosts:
    """Workers w0, w1, ...: each an engine by hand, with a model of its own."""

    def __init__(self, folder: Path, host_dir: Path, n: int, **changes: Any) -> None:
        fields = {"group_host": "127.0.0.1", "variants": []} | changes
        self.places = [Place(settings_for(folder, host_dir, id=f"w{i}", **fields)) for i in range(n)]
        self.leader = self.places[0]
        self.free = [place.pool.num_free for place in self.places]

    @property
    def peers(self) -> dict[str, Peer]:
        return {
            place.name: Peer(place.name, 0, transport.address, transport.key)
            for place in self.places
            if (transport := place.model_host.transport)
        }

    def deploy(self, folder: Path, bounds: list[int], *, tp: int = 1, **fields: Any) -> list[str]:
        """A Deploy to every worker of every stage; returns their ids."""
        names = [place.name for place in self.places]
        stages = [
            Stage(workers=names[i * tp : (i + 1) * tp], first=first, end=end)
            for i, (first, end) in enumerate(pairwise(bounds))
        ]
        ids = []
        for number, place in enumerate(self.places[: len(stages) * tp]):
            command: dict[str, Any] = {
                "id": f"d{number}-{time.perf_counter_ns()}",
                "epoch": 0,
                "instance": f"long@{place.name}",
                "model": "long",
                "path": str(folder),
                "stages": stages,
                "stage": number // tp,
                "epochs": {each.name: 0 for each in self.places},
                "blocks": 16,
            }
            with self.at(place):
                place.morphs.begin(Deploy(**(command | fields)), self.peers)
            ids.append(str(command["id"]))
        return ids

    def at(self, place: Place) -> AbstractContextManager[Any]:
        """Between two of its steps."""
        return nullcontext()

    def until(self, true: Callable[[], Any], within_s: float = 20.0) -> None:
        deadline = time.monotonic() + within_s
        while not true():
            assert time.monotonic() < deadline, "it does not come about"
            for place in self.places:
                place.step()
            time.sleep(0.0002)

    def ends(self, ids: list[str]) -> list[MorphReport]:
        self.until(lambda: all(place._end(id) for place, id in zip(self.places, ids, strict=False)))
        return [end for place, id in zip(self.places, ids, strict=False) if (end := place._end(id))]

    def is_as_before(self) -> bool:
        return [place.pool.num_free for place in self.places] == self.free

    def close(self) -> None:
        for place in self.places:
            place.engine.close()
            place.morphs.close()


class RunningHosts(Hosts):
    """Each with a thread that steps it: ranks of a stage wait for each other within a step."""

    def __init__(self, *args: Any, **changes: Any) -> None:
        super().__init__(*args, **changes)
        self._locks = {place.name: threading.Lock() for place in self.places}
        self._is_over = False
        self._threads = [
            threading.Thread(target=self._run, args=(place,), daemon=True) for place in self.places
        ]
        for thread in self._threads:
            thread.start()

    def at(self, place: Place) -> AbstractContextManager[Any]:
        return self._locks[place.name]

    def until(self, true: Callable[[], Any], within_s: float = 20.0) -> None:
        deadline = time.monotonic() + within_s
        while not true():
            assert time.monotonic() < deadline, "it does not come about"
            time.sleep(0.002)

    def close(self) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join()
        super().close()

    def _run(self, place: Place) -> None:
        while not self._is_over:
            with self.at(place):
                place.step()
            time.sleep(0.0005)


@pytest.fixture
def hosts(first: Path, tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(first, tmp_path, 3, memory_mb=3)
    yield made
    made.close()


def alone(folder: Path, host_dir: Path, prompt: list[int], **changes: Any) -> list[int]:
    """Return what one worker makes of it."""
    place = Place(settings_for(folder, host_dir, variants=[], **changes))
    place.submit("a", "first", prompt, 12)
    place.run()
    return place.client.tokens["a"]


def test_a_model_comes_in_stages_serves_and_goes_with_every_page(
    hosts: Hosts, long: Path, tmp_path: Path
) -> None:
    ids = hosts.deploy(long, [0, 1, 4, 5])
    assert [end.state for end in hosts.ends(ids)] == ["applied"] * 3, hosts.ends(ids)
    card = hosts.leader.model_host.models["long@w0"].card
    assert (card.pp, card.workers, card.num_layers) == (3, ["w0", "w1", "w2"], LAYERS)
    assert [(stage.workers, stage.first, stage.end) for stage in card.stages] == [
        (["w0"], 0, 1),
        (["w1"], 1, 4),
        (["w2"], 4, 5),
    ]
    prompt = [5, 6, 7, 8, 9, 10, 11]
    hosts.leader.submit("a", "long", prompt, 12)
    for place in hosts.places:
        place.submit("b", "first", [1, 2, 3], 8)
    hosts.until(lambda: not any(place.engine.has_work for place in hosts.places))
    assert hosts.leader.client.tokens["a"] == alone(long, tmp_path, prompt)
    assert all(place.client.ends["b"] == "length" for place in hosts.places)
    end = hosts.leader.end_of(hosts.leader.retire("long"))
    assert end.state == "applied"
    hosts.until(hosts.is_as_before)
    for place in hosts.places:
        place.pool.check_integrity()


@pytest.mark.parametrize("variants", [[], ["int4"]], ids=["full", "int4"])
def test_stages_of_two_ranks_come_each_with_its_share_and_go_with_every_page(
    first: Path, long: Path, tmp_path: Path, variants: list[str]
) -> None:
    # Ranks have whole groups of what is rounded to fewer bits: they compute what one worker does.
    wide = write_model(tmp_path / "wide", seed=2, num_hidden_layers=LAYERS, intermediate_size=256)
    hosts = RunningHosts(first, tmp_path, 4, memory_mb=4, max_tp=2, variants=variants)
    precision = variants[0] if variants else "full"
    prompt = [5, 6, 7, 8, 9, 10, 11]
    ends = hosts.ends(hosts.deploy(wide, [0, 2, 5], tp=2, precision=precision))
    assert [end.state for end in ends] == ["applied"] * 4, ends
    resident = hosts.leader.model_host.models["long@w0"]
    assert (resident.card.tp, resident.card.pp, resident.card.workers) == (2, 2, ["w0", "w1", "w2", "w3"])
    assert [stage.workers for stage in resident.card.stages] == [["w0", "w1"], ["w2", "w3"]]
    weights = [int(end.numbers["pages_weights"]) for end in ends]
    images = len(list(tmp_path.glob("instar-*")))
    assert images == 5 * len(variants), "of the model before, and one of each rank"
    with hosts.at(hosts.leader):
        hosts.leader.submit("a", "long", prompt, 12)
    hosts.until(lambda: "a" in hosts.leader.client.ends)
    with hosts.at(hosts.leader):
        retired = hosts.leader.retire("long")
    hosts.until(lambda: hosts.leader._end(retired))
    hosts.until(hosts.is_as_before)
    hosts.close()
    alone = Place(settings_for(first, tmp_path, variants=variants, max_tp=2))
    end = alone.end_of(alone.deploy("long", wide, precision=precision))
    alone.submit("a", "long", prompt, 12)
    alone.run()
    assert hosts.leader.client.tokens["a"] == alone.client.tokens["a"]
    whole = int(end.numbers["pages_weights"])
    assert 0 <= weights[1] - weights[0] <= 1, "of 97 tokens the second has one more"
    assert weights[2] == weights[3]
    assert whole <= sum(weights) < 1.2 * whole, "nothing large is twice there"


@pytest.mark.parametrize(
    ("tp", "layers"),
    [(2, 16), pytest.param(4, 30, marks=[pytest.mark.faults, pytest.mark.slow])],
)
def test_a_model_larger_than_a_worker_serves_in_one_stage_beside_other_models(
    first: Path, tmp_path: Path, tp: int, layers: int
) -> None:
    """Each of two KV heads is on two of four ranks."""
    large = write_model(tmp_path / "large", seed=2, num_hidden_layers=layers, vocab_size=150)
    hosts = RunningHosts(first, tmp_path, tp, memory_mb=2)
    size = (large / "model.safetensors").stat().st_size
    assert size > hosts.leader.pool.num_pages * 4096 * tp / 2
    prompt = [5, 6, 7, 8, 149, 10, 11]
    ends = hosts.ends(hosts.deploy(large, [0, layers], tp=tp))
    assert [end.state for end in ends] == ["applied"] * tp, ends
    sizes = CutPlan(read_config(large), ["full"], dtype=torch.float32, page_bytes=4096).rank_sizes(4, "full")
    (planned,) = [one for one in sizes if one.tp == tp]
    taken = max(int(end.numbers["pages_weights"]) for end in ends)
    assert taken * 4096 == layers * planned.layer_bytes + planned.lead_bytes
    card = hosts.leader.model_host.models["long@w0"].card
    assert (card.tp, card.pp, card.is_divided, len(card.workers)) == (tp, 1, True, tp)
    with hosts.at(hosts.leader):
        hosts.leader.submit("a", "long", prompt, 12)
        hosts.leader.submit("b", "first", prompt[:4], 12)
    hosts.until(lambda: {"a", "b"} <= hosts.leader.client.ends.keys())
    with hosts.at(hosts.leader):
        hosts.leader.retire("long")
    hosts.until(hosts.is_as_before)
    hosts.close()
    assert hosts.leader.client.tokens["a"] == alone(large, tmp_path, prompt)


def test_of_two_pipelines_that_come_at_once_a_worker_is_a_rank_of_one_alone(
    first: Path, long: Path, tmp_path: Path
) -> None:
    hosts = RunningHosts(first, tmp_path, 4, memory_mb=4, max_tp=2)
    ids = hosts.deploy(long, [0, 2, 5], tp=2)
    late = hosts.deploy(long, [0, 2, 5], tp=2, instance="other@w0", model="other", wait_s=20.0)
    assert [end.state for end in hosts.ends(ids)] == ["applied"] * 4, hosts.ends(ids)
    refused = hosts.ends(late)
    assert [end.state for end in refused] == ["conflict"] * 4, refused
    assert all("crosswise" in end.reason for end in refused)
    with hosts.at(hosts.leader):
        hosts.leader.retire("long")
    hosts.until(hosts.is_as_before)
    hosts.close()


def test_stages_in_few_bits_make_what_one_worker_makes(first: Path, long: Path, tmp_path: Path) -> None:
    hosts = Hosts(first, tmp_path, 3, variants=["int8", "int4"])
    prompt = [5, 6, 7, 8, 9, 10, 11]
    ids = hosts.deploy(long, [0, 2, 5], precision="int4")
    assert [end.state for end in hosts.ends(ids)] == ["applied"] * 2, hosts.ends(ids)
    hosts.leader.submit("a", "long", prompt, 12, min_precision="int4")
    hosts.leader.submit("no", "long", prompt, 12, min_precision="int8")
    (alone,) = hosts.places[2:]
    end = alone.end_of(alone.deploy("long", long, precision="int4"))
    assert end.state == "applied", end
    alone.submit("a", "long", prompt, 12)
    hosts.until(lambda: not any(place.engine.has_work for place in hosts.places))
    assert hosts.leader.client.tokens["a"] == alone.client.tokens["a"]
    assert hosts.leader.client.reject_reasons["no"] is RejectReason.PRECISION_FLOOR
    swap = hosts.leader.begin(Swap, epoch=0, instance="long@w0", count=LAYERS, precision="full")
    hosts.until(lambda: hosts.leader._end(swap))
    hosts.leader.submit("full", "long", prompt, 12, min_precision="full")
    back = alone.begin(Swap, epoch=0, instance="long@w2", count=LAYERS, precision="full")
    assert alone.end_of(back).state == hosts.ends([swap])[0].state == "applied"
    alone.submit("full", "long", prompt, 12, min_precision="full")
    hosts.until(lambda: not any(place.engine.has_work for place in hosts.places))
    assert hosts.leader.client.tokens["full"] == alone.client.tokens["full"]
    hosts.close()


def test_a_pipeline_that_loses_a_stage_goes_with_every_page_and_its_requests_go_on_elsewhere(
    hosts: Hosts, long: Path
) -> None:
    hosts.ends(hosts.deploy(long, [0, 1, 4, 5]))
    hosts.leader.submit("a", "long", [1, 2, 3], 50)
    hosts.until(lambda: hosts.leader.client.tokens.get("a"))
    _stages(hosts.places[1]).close()
    hosts.until(lambda: "long@w0" not in hosts.leader.model_host.models)
    hosts.until(hosts.is_as_before)
    assert hosts.leader.client.reject_reasons["a"] is RejectReason.RETIRED
    (end,) = [one for one in hosts.leader.reports if one.kind == "retire" and one.state != "running"]
    assert (end.state, end.target) == ("applied", "long@w0")


@pytest.mark.parametrize("num_applied", [0, 1, 6])
def test_a_stage_that_goes_during_a_swap_costs_the_pipeline_and_no_page(
    first: Path, long: Path, tmp_path: Path, num_applied: int
) -> None:
    hosts = Hosts(first, tmp_path, 3, memory_mb=3, variants=["int8", "int4"])
    hosts.ends(hosts.deploy(long, [0, 1, 4, 5]))
    instance = hosts.leader.engine.instances["long@w0"]
    for i in range(40):
        hosts.leader.submit(str(i), "long", [i + 1, 2, 3], 110)
    hosts.until(lambda: hosts.leader.client.tokens.get("0"))
    layers = list(range(LAYERS))
    swap = hosts.leader.begin(Swap, epoch=0, instance="long@w0", layers=layers, precision="int4")
    (stage,) = _stages(hosts.places[1]).targets

    def is_time() -> bool:
        halves = [half for layer in instance.shape for half in (layer.attention, layer.ffn)]
        return sum(half == "int4" for half in halves) >= num_applied and bool(stage.prepared)

    hosts.until(is_time)
    _stages(hosts.places[1]).close()
    hosts.until(lambda: "long@w0" not in hosts.leader.model_host.models)
    hosts.until(hosts.is_as_before)
    (end,) = hosts.ends([swap])
    assert end.state == "failed" and "w1" in end.reason, end
    assert hosts.leader.client.reject_reasons["39"] is RejectReason.RETIRED
    for place in hosts.places:
        place.check()
    hosts.close()


def test_a_retirement_that_waits_for_requests_is_applied_when_a_stage_goes(hosts: Hosts, long: Path) -> None:
    hosts.ends(hosts.deploy(long, [0, 1, 4, 5]))
    hosts.leader.submit("a", "long", [1, 2, 3], 50)
    hosts.until(lambda: hosts.leader.client.tokens.get("a"))
    retired = hosts.leader.retire("long", wait_s=60.0)
    _stages(hosts.places[1]).close()
    hosts.until(hosts.is_as_before)
    assert [end.state for end in hosts.ends([retired])] == ["applied"]
    assert hosts.leader.client.reject_reasons["a"] is RejectReason.RETIRED


def test_a_stage_that_is_to_leave_ends_the_swap_and_waits_for_the_requests(
    first: Path, long: Path, tmp_path: Path
) -> None:
    hosts = Hosts(first, tmp_path, 2, memory_mb=3, variants=["int8", "int4"])
    hosts.ends(hosts.deploy(long, [0, 2, 5]))
    hosts.leader.submit("a", "long", [1, 2, 3], 50, min_precision="full")
    hosts.until(lambda: hosts.leader.client.tokens.get("a"))
    fields = {"layers": [1, 3], "precision": "int4", "wait_s": 60.0}  # it waits for the request
    swap = hosts.leader.begin(Swap, epoch=0, instance="long@w0", **fields)
    _stages(hosts.places[1]).ask_to_end("w1 is draining")
    assert "draining" in hosts.ends([swap])[0].reason
    hosts.until(lambda: "long@w0" not in hosts.leader.model_host.models)
    assert hosts.leader.client.ends["a"] == "length" and len(hosts.leader.client.tokens["a"]) == 50
    hosts.until(hosts.is_as_before)
    hosts.close()


@pytest.mark.slow
def test_a_leader_that_has_lent_kv_swaps_and_resizes_and_no_batch_has_blocks_that_a_stage_lacks(
    first: Path, long: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, missing = RemoteStageRunner._run, []

    def checked(runner: RemoteStageRunner, sent: RunStage, payload: torch.Tensor) -> None:
        cache, work = runner.stage.cache, sent.work
        for blocks, num_tokens in zip(work.blocks, work.context_lens, strict=True):
            most = max(blocks[: -(-num_tokens // cache.block_tokens)])
            missing.append(max(0, most + 1 - cache.num_blocks))
        run(runner, sent, payload)

    monkeypatch.setattr(RemoteStageRunner, "_run", checked)
    hosts = Hosts(first, tmp_path, 2, memory_mb=1, variants=["int4"], max_num_seqs=16)
    hosts.ends(hosts.deploy(long, [0, 2, 5]))
    leader = hosts.leader
    resizer = leader.model_host.models["long@w0"].target.resizer
    (stage,) = _stages(hosts.places[1]).targets
    prompt, lent = [5, 6, 7, 8, 9, 10, 11], 0

    def serve(name: str) -> None:
        nonlocal lent
        for i in range(16):
            leader.submit(f"{name} {i}", "first", [i + 1] * 30, 30)
        leader.submit(name, "long", prompt, 40)
        while any(place.engine.has_work for place in hosts.places):
            hosts.until(lambda: True)
            for place in hosts.places:
                place.step()
            lent = max(lent, resizer.num_lent)
        # A growth reaches the stage behind the batches in flight, so the leader is ahead for a moment.
        hosts.until(lambda: resizer.cache.pages_per_layer <= stage.resizer.cache.pages_per_layer)

    serve("before")
    assert lent > 0, "nothing was lent: the test shows nothing"
    orders: list[tuple[Any, dict[str, Any]]] = [
        (Swap, {"layers": list(range(LAYERS)), "precision": "int4"}),
        (Resize, {"blocks": 24}),
        (Resize, {"blocks": 40}),
    ]
    for kind, fields in orders:
        order = leader.begin(kind, epoch=0, instance="long@w0", wait_s=20.0, **fields)
        serve(order)
        assert hosts.ends([order])[0].state == "applied", hosts.ends([order])
    serve("one")
    resizer.vacate(resizer.min_blocks)
    serve("two")
    assert leader.client.tokens["one"] == leader.client.tokens["two"] != leader.client.tokens["before"]
    assert len(missing) > 100 and not any(missing)
    leader.check()
    leader.end_of(leader.retire("long"))
    hosts.until(hosts.is_as_before)
    hosts.close()


def test_a_stage_that_is_to_leave_waits_for_the_requests_that_run(hosts: Hosts, long: Path) -> None:
    hosts.ends(hosts.deploy(long, [0, 1, 4, 5]))
    hosts.leader.submit("a", "long", [1, 2, 3], 50)
    hosts.until(lambda: hosts.leader.client.tokens.get("a"))
    _stages(hosts.places[2]).ask_to_end("w2 is draining")
    hosts.until(lambda: "long@w0" not in hosts.leader.model_host.models)
    assert hosts.leader.client.ends["a"] == "length" and len(hosts.leader.client.tokens["a"]) == 50
    hosts.until(hosts.is_as_before)


def test_a_stage_whose_leader_is_given_up_gives_its_pages_back(hosts: Hosts, long: Path) -> None:
    ids = hosts.deploy(long, [0, 1, 4, 5])
    hosts.until(lambda: _stages(hosts.places[1]).runners)
    for place, id in zip(hosts.places, ids, strict=True):
        place.morphs.cancel(id)
    assert [end.state for end in hosts.ends(ids)] == ["failed"] * 3
    hosts.until(hosts.is_as_before)


def test_the_leader_that_does_not_get_all_stages_serves_nothing(hosts: Hosts, long: Path) -> None:
    ids = hosts.deploy(long, [0, 1, 4, 5], blocks=10**6)
    reasons = [end.reason for end in hosts.ends(ids)]
    assert all("missing" in reason for reason in reasons), reasons
    hosts.until(hosts.is_as_before)


@pytest.mark.parametrize(
    ("stages", "why"),
    [
        ([Stage(workers=["w0", "w1"], first=0, end=2), Stage(workers=["w2"], first=2, end=5)], "same degree"),
        (
            [Stage(workers=["w0", "w1"], first=0, end=2), Stage(workers=["w2", "w2"], first=2, end=5)],
            "places",
        ),
        ([Stage(workers=[], first=0, end=2), Stage(workers=["w0"], first=2, end=5)], "stage 0 is for 0"),
        ([Stage(workers=["w0"], first=0, end=2), Stage(workers=["w1"], first=3, end=5)], "layer 2 is next"),
        ([Stage(workers=["w0"], first=0, end=2), Stage(workers=["w1"], first=2, end=4)], "the model has 5"),
        ([Stage(workers=["w0"], first=0, end=2), Stage(workers=["w0"], first=2, end=5)], "has two places"),
        ([Stage(workers=["w0"], first=0, end=2), Stage(workers=["w9"], first=2, end=5)], "cannot be reached"),
    ],
)
def test_stages_that_cannot_be_are_refused_with_the_reason(
    hosts: Hosts, long: Path, stages: list[Stage], why: str
) -> None:
    (end, *_) = hosts.ends(hosts.deploy(long, [0, 5], stages=stages))
    assert end.state == "failed" and why in end.reason
    hosts.until(hosts.is_as_before)
