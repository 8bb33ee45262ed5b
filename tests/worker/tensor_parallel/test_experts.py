"""Workers whose layers are mixtures of experts come together and part: each keeps whole experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bus.precisions import Precision
from tests.support.greedy import assert_greedy
from tests.support.group_workers import GroupWorker, model_fixtures, swap, transform, workers
from tests.worker.tensor_parallel.test_faults import Fault, before, check_alone, come_and_go
from tests.worker.tensor_parallel.test_rows import applied, ffn_bytes, take  # noqa: F401 a fixture
from tests.worker.tensor_parallel.test_workers import Load, prompt
from worker.model.shard import Shard

LAYERS = 3
PAGE = 4096
EXPERTS, EXPERT_BYTES = 16, 3 * 32 * 64 * 4  # six pages each, and no padding

model, folder = model_fixtures("qwen3 moe", num_hidden_layers=LAYERS)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=[pytest.mark.faults, pytest.mark.slow])])
def test_experts_go_and_come_back_while_requests_run(folder: Path, model: Any, size: int) -> None:
    with workers(folder, size) as each:
        load = Load(each, model)
        pages = [worker.pool.counts() for worker in each]
        each[0].wait(lambda: len(each[0].tokens) > 0, "the first tokens")
        for _ in range(2):
            for tp in (size, 1):
                report = load.during(each[0], transform(each, tp, layers_per_step=1))
                assert report.state == "applied", report
                if tp == size:
                    others = EXPERTS - EXPERTS // size
                    assert report.numbers["pages_freed"] == LAYERS * others * EXPERT_BYTES // PAGE
                for worker in each:
                    worker.wait_degree(tp)
        load.check()
        for worker in each:
            worker.check()
            assert worker.instance.scheduler.num_recomputed == 0
        assert [worker.pool.counts() for worker in each] == pages


@pytest.mark.parametrize("way", ["peers", "host"])
def test_the_bytes_that_move_are_those_of_the_experts(
    folder: Path,
    model: Any,
    take: Any,  # noqa: F811
    way: str,
) -> None:
    take(way)
    with workers(folder, 2) as each:
        whole, pages = ffn_bytes(each[0]), [worker.pool.counts() for worker in each]
        each[0].submit("runs through", prompt(7, 30), 60)
        applied(each[0], each, 2)
        half = LAYERS * EXPERTS // 2 * EXPERT_BYTES
        for worker in each:
            assert missing_bytes(worker) == half == sum(map(len, ffn_bytes(worker)))
        applied(each[0], each, 1)
        for worker in each:
            for found, wanted in zip(ffn_bytes(worker), whole, strict=True):
                assert found.equal(wanted)
        each[0].wait_ends("runs through")
        assert_greedy(model, prompt(7, 30), 60, each[0].tokens["runs through"])
        assert [worker.pool.counts() for worker in each] == pages


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantised_experts_come_back_byte_for_byte(
    folder: Path,
    tmp_path: Path,
    take: Any,  # noqa: F811
    precision: Precision,
) -> None:
    take("peers")
    with workers(folder, 2, host_dir=tmp_path, megabytes=8) as each:
        for worker in each:
            assert worker.end_of(swap(worker, precision)).state == "applied"
        whole = ffn_bytes(each[0])
        each[0].submit("alone", prompt(3, 20), 30)
        each[0].wait_ends("alone")
        applied(each[0], each, 2)
        each[0].submit("together", prompt(3, 20), 30)
        each[0].wait_ends("together")
        assert each[0].tokens["together"] == each[0].tokens["alone"]
        applied(each[0], each, 1)
        for worker in each:
            worker.check()
            for found, wanted in zip(ffn_bytes(worker), whole, strict=True):
                assert found.equal(wanted)


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.parametrize(("boundary", "grows"), [(2, True), (1, False)])
def test_a_step_that_raises_on_the_way_costs_the_group_and_no_request(
    folder: Path, model: Any, boundary: int, grows: bool
) -> None:
    with workers(folder, 2) as each:
        load = Load(each, model)
        fault = Fault(each[1], boundary, grows=grows)

        def strike() -> None:
            raise RuntimeError("a kernel is out of order")

        before(each[1].model, "forward_segments", fault, strike)
        assert "failed" in come_and_go(each, load) and fault.has_struck.is_set()
        check_alone(each, load)
        assert come_and_go(each, load) == ["applied", "applied"]
        check_alone(each, load)


def missing_bytes(worker: GroupWorker) -> int:
    """Return the bytes that the worker must get to be whole again."""
    missing: int = worker.call(lambda: worker.grouping.local.row_costs(Shard()).rows_missing_bytes)
    return missing
