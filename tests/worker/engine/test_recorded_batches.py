"""Decodes that run as recordings give the tokens of steps call by call, whatever changes between them.

A recorder that keeps the calls stands for CUDA graphs: like a graph, a recording reads what lay at its
addresses when it was made, and knows nothing of a half or a cache that has been replaced since.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from copy import copy
from functools import partial, partialmethod
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.common.engines import fill_cache, make_instance
from bench.common.loading import load_model
from bench.common.oracles import make_oracle
from kernels.registry import use_backend
from tests.support.engine_toys import Client, expect_no_growth, request, run
from worker.engine import recorded_batches
from worker.engine.build import canary_steps, make_cache, make_pool, served_limits
from worker.engine.core import EngineCore
from worker.engine.engine import Engine
from worker.engine.executor import LocalExecutor
from worker.engine.input_batch import ScheduledBatch
from worker.engine.recorded_batches import RecordedBatches, sizes_for
from worker.engine.sampler import ChosenTokens
from worker.engine.sequence import Limits
from worker.memory import PagePool
from worker.model import Model, step_parts
from worker.model.cuda_graphs import CudaGraphs
from worker.model.experts import Experts
from worker.model.layer import Attention, LayerHalf
from worker.model.linear import DenseLinear, TransposedLinear
from worker.model.step_parts import Run, StepSize, value_of

CPU = torch.device("cpu")
NUM_NEW = 12


class Recorder:
    """Records calls by keeping them; counts recordings and their runs, and fails while `why` says so."""

    def __init__(self) -> None:
        self.num_made = self.num_runs = self.num_joined = 0
        self.why = ""

    def __call__(self, call: Run) -> Run:
        if self.why:
            raise RuntimeError(self.why)
        self.num_made += 1

        def replay() -> None:
            self.num_runs += 1
            call()

        return replay

    def join(self, recordings: Sequence[Run]) -> Run:
        """Make a recording that runs as one."""
        self.num_joined += 1

        def replay() -> None:
            before = self.num_runs
            for one in recordings:
                one()
            self.num_runs = before + 1

        return replay


class Case:
    """An engine whose decodes are recorded, or run call by call."""

    def __init__(
        self,
        folder: Path,
        *,
        is_recorded: bool = True,
        is_ahead: bool = False,
        num_blocks: int = 0,
        steady_steps: int = 0,
        **limits: Any,
    ) -> None:
        self.pool: PagePool = make_pool(CPU, 64 * 1024 * 1024)
        self.model: Model = load_model(folder, self.pool, dtype=torch.float32)
        sizes: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 64, "block_tokens": 4}
        self.limits = Limits(**(served_limits(self.model, 128) | sizes | limits))
        self.cache = make_cache(self.pool, self.model, self.limits, "test")
        fill_cache(self.pool, self.cache, self.model, self.limits, reserve_pages=64)
        self.instance: EngineCore = make_instance("m@w0", self.model, self.cache, self.limits)
        self.recorder = Recorder()
        assert self.instance.local_executor.recorded is None, "a CPU records steps as programs of its own"
        if is_recorded:
            join = self.recorder.join if steady_steps else None
            self.recorded = RecordedBatches(self.model, self.cache, self.limits, CPU, self.recorder, join)
            self.recorded.steady_steps = steady_steps
            self.instance.local_executor.recorded = self.recorded
        if num_blocks:
            self.cache.allocator.truncate(num_blocks)
            expect_no_growth(self.instance.scheduler)
        self.num_followed = 0
        if is_ahead:
            self.instance.local_executor.run_ahead(self.instance.launch_choice)
            follow = self.instance._follow

            def counted() -> ScheduledBatch | None:
                batch = follow()
                self.num_followed += batch is not None
                return batch

            self.instance._follow = counted  # type: ignore[method-assign]
        self.engine = Engine(CPU)
        self.engine.add_instance(self.instance)

    def serve(self, lengths: list[int], name: str = "") -> dict[str, list[int]]:
        for i, length in enumerate(lengths):
            prompt = [(7 * length + 3 * j) % 200 for j in range(length)]
            self.engine.submit("m@w0", request(f"{name}{i}", prompt, NUM_NEW + i))
        return run(self.engine, Client()).tokens

    def close(self) -> None:
        self.cache.release()
        self.model.release()
        self.pool.check_integrity()
        self.pool.close()


@pytest.fixture(autouse=True)
def plain_kernels() -> Iterator[None]:
    with use_backend("reference"):
        yield


@pytest.fixture(autouse=True)
def decodes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_batches, "CHUNKS", ())


@pytest.fixture
def chunks_too(monkeypatch: pytest.MonkeyPatch, decodes_alone: None) -> None:
    monkeypatch.setattr(recorded_batches, "CHUNKS", (4, 8, 32))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    make_oracle("llama").save_pretrained(made)
    return made


@pytest.fixture
def case(folder: Path) -> Iterator[Case]:
    made = Case(folder)
    yield made
    made.close()


def compare(folder: Path, **limits: Any) -> Case:
    """Serve the same prompts with recordings and without, and return the case with them, closed."""
    cases = [Case(folder, is_recorded=is_recorded, **limits) for is_recorded in (True, False)]
    recorded, plain = (each.serve([3, 20, 1, 9, 33]) for each in cases)
    assert recorded == plain
    for each in cases:
        each.close()
    return cases[0]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-j", "falcon, new decoder", "mixtral"])
def test_tokens_are_those_of_steps_call_by_call(tmp_path: Path, family: str) -> None:
    make_oracle(family).save_pretrained(tmp_path)
    case = compare(tmp_path)
    layers = case.model.config.num_layers
    parts = (1 if case.model.config.block == "parallel" else 2) * layers + 1
    assert case.recorded.num_steps > NUM_NEW
    sizes_met = {1, 2, 4, 6}  # five sequences that end one after the other
    assert case.recorder.num_made == len(sizes_met) * parts


def test_a_cache_in_8_bits_takes_no_empty_row(folder: Path) -> None:
    compare(folder, kv_dtype="int8")


@pytest.mark.usefixtures("chunks_too")
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-j", "mistral with a sliding window"])
@pytest.mark.parametrize("options", [{}, {"kv_dtype": "int8"}, {"max_num_batched_tokens": 24}])
def test_tokens_of_recorded_steps_with_prompts_are_those_call_by_call(
    tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    make_oracle(family).save_pretrained(tmp_path)
    case = compare(tmp_path, **options)
    recorded = {size.num_tokens for size in case.recorded.sizes if not size.is_decode}
    # The prompts are 66 tokens: steps of 64, which is too long, and 6, or of 24, 24 and 23.
    assert recorded == ({24} if "max_num_batched_tokens" in options else {8})


@pytest.mark.usefixtures("chunks_too")
def test_log_probabilities_of_prompts_come_from_recorded_steps_as_far_as_there_are_rows(folder: Path) -> None:
    found = []
    for is_recorded in (True, False):
        case = Case(folder, is_recorded=is_recorded)
        client = Client()
        for i, length in enumerate((3, 20)):
            prompt = list(range(length))
            case.engine.submit("m@w0", request(str(i), prompt, 2, prompt_logprobs=0, logprobs=1))
            run(case.engine, client)
        found.append([(delta.token_ids, delta.prompt_logprobs, delta.logprobs) for delta in client.deltas])
        if (
            is_recorded
        ):  # a step of 20 tokens that wants 20 rows has too few, decodes and the short prompt fit
            assert case.recorded.num_steps == 1 + 1 + 1
        case.close()
    assert found[0] == found[1]


def test_a_step_that_prefills_runs_call_by_call(case: Case) -> None:
    case.engine.submit("m@w0", request("0", [1, 2, 3], 8))
    case.engine.step()
    assert case.recorded.num_steps == 0
    case.engine.step()
    assert case.recorded.num_steps == 1
    case.engine.submit("m@w0", request("1", [1, 2, 3], 8))
    case.engine.step()
    assert case.recorded.num_steps == 1


def test_all_sizes_are_recorded_before_the_first_request(case: Case) -> None:
    cached = [layer[: case.cache.num_blocks] for layer in case.cache.layers]
    for layer in cached:
        layer.fill_(7.0)
    list(case.recorded.record())
    assert all(layer.eq(7.0).all() for layer in cached), "empty rows write no keys"
    list(canary_steps(case.instance))
    made = case.recorder.num_made
    assert made == case.recorded.num_recorded == 4 * 7
    names = [f"{half} of layer {i}" for i in range(3) for half in ("attention", "FFN")]
    assert list(case.recorded.recordings(6)) == [*names, "head"]
    case.serve([3, 20, 1, 9, 33])
    assert case.recorder.num_made == made


def test_recording_at_the_start_ends_when_its_time_is_up(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.engine.recorded_batches.RECORD_S", 0.0)
    list(case.recorded.record())
    assert case.recorder.num_made == 7
    case.serve([3])
    assert case.recorder.num_made == 14


def test_recording_ends_when_the_device_is_full(
    case: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("worker.engine.recorded_batches.LOOK_AT_MEMORY", 4)
    monkeypatch.setattr(case.recorded, "_free_bytes", lambda: 10 << 20)
    list(case.recorded.record())
    assert [line for line in caplog.messages if "10 MiB free; lower worker.memory_mb" in line]
    assert case.recorder.num_made == 4
    case.serve([3, 5])
    assert case.recorder.num_made == 4


def changed(half: LayerHalf) -> LayerHalf:
    """Return another half, with other weights."""
    other = copy(half)
    if isinstance(other, Attention):
        assert isinstance(other.o, DenseLinear)
        other.o = DenseLinear(other.o.weight * -3)
        other.input_norm = other.input_norm.clone()
    else:
        assert isinstance(other.down, TransposedLinear)
        other.down = TransposedLinear(other.down.weight * -3)
    return other


@pytest.mark.parametrize("is_ahead", [False, True])
def test_steps_without_a_change_are_joined_to_one_recording_until_a_half_is_replaced(
    folder: Path, is_ahead: bool
) -> None:
    found = []
    for is_recorded in (True, False):
        case = Case(folder, is_recorded=is_recorded, is_ahead=is_ahead and is_recorded, steady_steps=4)
        before_step = 11 if is_ahead and is_recorded else 12  # a step ahead is launched already
        half = case.model.layers[0].feed_forward
        client, runs = Client(), list[int]()
        case.engine.submit("m@w0", request("0", [1, 2, 3], 40))
        for i in range(30):
            if i in (before_step, before_step + 8):
                case.model.install(0, changed(half) if i == before_step else half)
            before = case.recorder.num_runs
            client.take(case.engine.step())
            runs.append(case.recorder.num_runs - before)
        if is_recorded and not is_ahead:
            # The prompt; recordings are made; 3 more steps by parts, then joined; again after each change.
            assert runs == [0, 0, *[7] * 3, *[1] * 7, 6, *[7] * 3, *[1] * 4, *[7] * 4, *[1] * 6]
            assert case.recorder.num_joined == case.recorded.num_joined == 3
        found.append(run(case.engine, client).tokens)
        case.close()
    assert found[0] == found[1]


def test_joined_steps_are_few_and_none_is_made_where_a_part_has_no_recording(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_batches, "MOST_JOINED", 2)
    case = Case(folder, steady_steps=1)
    list(case.recorded.record())
    steps = case.recorded._steps.values()
    assert case.recorder.num_joined == 4 + 1  # the shortest once more, to be compared
    assert sum(step.whole is not None for step in steps) == 2
    case.close()
    case = Case(folder, steady_steps=1)
    case.recorder.why = "no memory"
    case.serve([3, 5])
    assert case.recorder.num_joined == 0
    case.close()


@pytest.mark.parametrize("why", ["they give other logits", "no launch"])
def test_joined_steps_are_given_up_if_they_do_not_compute_the_same(
    folder: Path, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    case, plain = Case(folder, steady_steps=2), Case(folder, is_recorded=False)

    def fail() -> None:
        if why == "no launch":
            raise RuntimeError(why)

    case.recorded._parts._join = lambda recordings: fail
    list(case.recorded.record())
    assert [line for line in caplog.messages if line.endswith(f"joined to one, {why}")]
    assert case.serve([3, 9]) == plain.serve([3, 9])
    for each in (case, plain):
        each.close()


def test_recordings_that_cannot_be_joined_run_one_by_one(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case, plain = Case(folder, steady_steps=2), Case(folder, is_recorded=False)
    case.recorded._parts._join = lambda recordings: 1 / 0  # type: ignore[assignment,return-value]
    assert case.serve([3, 9]) == plain.serve([3, 9])
    assert len([line for line in caplog.messages if "these cannot be joined" in line]) == 1
    for each in (case, plain):
        each.close()


@pytest.mark.parametrize(("part", "num_stale"), [("feed_forward", 1), ("attention", 2)])
def test_a_swap_records_what_reads_the_half_anew_and_the_way_back_nothing(
    folder: Path, part: str, num_stale: int
) -> None:
    found = []
    for is_recorded in (True, False):
        case = Case(folder, is_recorded=is_recorded)
        before = getattr(case.model.layers[1], part)
        made, tokens = [], []
        for i, half in enumerate(
            [before, changed(before), copy(before)]
        ):  # a half is built anew on its return
            case.model.install(1, half)
            tokens.append(case.serve([5], str(i))[f"{i}0"])
            made.append(case.recorder.num_made)
        found.append(tokens)
        if is_recorded:
            assert made == [7, 7 + num_stale, 7 + num_stale]
        case.close()
    assert found[0] == found[1]
    assert found[0][0] == found[0][2] != found[0][1]


def test_a_swap_between_two_steps_takes_effect_at_once(folder: Path) -> None:
    found = []
    for is_recorded in (True, False):
        case = Case(folder, is_recorded=is_recorded)
        first, second = case.model.layers[0].feed_forward, changed(case.model.layers[0].feed_forward)
        client = Client()
        for i in range(3):
            case.engine.submit("m@w0", request(str(i), list(range(3 + i)), 30))
        for i in range(24):
            case.model.install(0, (first, second)[i // 3 % 2])
            client.take(case.engine.step())
        found.append(run(case.engine, client).tokens)
        case.close()
    assert found[0] == found[1]


def test_layers_of_another_number_run_as_recorded_for_them(folder: Path) -> None:
    """A fingerprint's layers are one or two, and take turns."""
    found = []
    for is_recorded in (True, False):
        case = Case(folder, is_recorded=is_recorded)
        layers, tokens, made = list(case.model.layers), [], []
        for i, chosen in enumerate([(0,), (0, 1), (2,), (1, 2), (0,), (1, 2)]):
            case.model.layers[:] = [layers[j] for j in chosen]
            case.instance.reshaped()
            tokens.append(case.serve([5], str(i)))
            made.append(case.recorder.num_made)
        found.append(tokens)
        case.model.layers[:] = layers
        if is_recorded:
            # Layer 0 goes on to layer 1 with another FFN, as it has another norm behind it.
            assert made == [3, 6, 8, 12, 12, 12]
        case.close()
    assert found[0] == found[1]


def test_growing_the_kv_cache_records_nothing_and_converting_a_layer_one_part(case: Case) -> None:
    case.serve([5], "a")
    made = case.recorder.num_made
    case.cache.grow(2)
    case.serve([5], "b")
    assert case.recorder.num_made == made
    case.cache.convert(1, "int8")
    case.instance.kv_converted()
    case.serve([5], "c")
    assert case.recorder.num_made == made + 1
    case.cache.convert(1, "full")
    case.serve([5], "d")
    assert case.recorder.num_made == made + 1


def test_a_part_that_cannot_be_recorded_runs_call_by_call_and_the_log_says_why(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case, plain = Case(folder), Case(folder, is_recorded=False)
    case.recorder.why = "operation not permitted when stream is capturing"
    with caplog.at_level(logging.WARNING):
        assert case.serve([3, 20]) == plain.serve([3, 20])
    assert case.recorder.num_made == 0
    lines = [line for line in caplog.messages if "recording it failed" in line]
    assert len(lines) == step_parts.MOST_FAILURES
    assert lines[0].startswith("the attention of layer 0 of a step runs call by call")
    assert case.recorder.why in lines[0]
    case.recorder.why = ""
    case.serve([3], "later")
    assert case.recorder.num_made == 0  # a device that refuses is not asked for ever
    for each in (case, plain):
        each.close()


def test_experts_that_cannot_be_recorded_leave_the_rest_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_oracle("mixtral", num_hidden_layers=5).save_pretrained(tmp_path)
    case, plain = Case(tmp_path), Case(tmp_path, is_recorded=False)
    record = case.recorder

    def refuse_experts(call: Run) -> Run:
        assert isinstance(call, partial) or call.__name__ == "<lambda>"
        if isinstance(call, partial) and isinstance(call.args[0], Experts):
            raise RuntimeError("a copy to the host")
        return record(call)

    case.recorded._parts._record = refuse_experts
    assert case.serve([3, 9]) == plain.serve([3, 9])
    assert len([line for line in caplog.messages if "a copy to the host" in line]) == step_parts.MOST_FAILURES
    assert record.num_made == 2 * (5 + 1)  # two sizes: attention and head
    for each in (case, plain):
        each.close()


def test_one_failure_costs_one_step_of_one_part(case: Case) -> None:
    case.recorder.why = "another thread waited for the device"
    case.engine.submit("m@w0", request("0", [1, 2, 3], 8))
    case.engine.step()
    made = step_parts.MOST_FAILURES
    step_parts_before, step_parts.MOST_FAILURES = made, 100
    try:
        case.engine.step()
        case.recorder.why = ""
        case.engine.step()
        assert case.recorder.num_made == 7
    finally:
        step_parts.MOST_FAILURES = step_parts_before


class Launches(TorchDispatchMode):  # type: ignore[misc]  # torch leaves it untyped
    """Counts what torch computes outside of recordings, and what waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.num_waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in ("empty", "empty_like", "empty_strided", "detach"):
            self.names.append(name)
        self.num_waits += name in ("_local_scalar_dense", "item", "nonzero", "equal")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_decode_of_32_layers_takes_at_most_70_launches_and_waits_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_ahead: bool
) -> None:
    make_oracle("llama", num_hidden_layers=32).save_pretrained(tmp_path)
    case = Case(tmp_path, is_ahead=is_ahead)

    class Quiet(Recorder):
        """Counts the runs of recordings, which are one launch each, and shows nothing of what they do."""

        def __call__(self, call: Run) -> Run:
            replay = super().__call__(call)

            def hidden() -> None:
                with torch.utils._python_dispatch._disable_current_modes():
                    replay()

            return hidden

    case.recorder = case.recorded._parts._record = Quiet()
    waits = list[str]()

    def waiting(call: Callable[[Any], Any], self: Any) -> Any:
        waits.append("copy to the host, and its end")
        return call(self)

    for owner, name in ((torch.Tensor, "cpu"), (ChosenTokens, "wait")):
        monkeypatch.setattr(owner, name, partialmethod(partial(waiting, getattr(owner, name))))

    def choose(scores: torch.Tensor, draws: None, out: torch.Tensor | None) -> torch.Tensor:
        """Find the largest logits by two kernels, as a GPU does."""
        made = scores.argmax(-1) if out is None else torch.argmax(scores, -1, out=out)
        return made.add_(0)

    monkeypatch.setattr("worker.engine.sampler.choose", choose)
    for i in range(3):
        case.engine.submit("m@w0", request(str(i), [1, 2, 3 + i], 8))
    for _ in range(3):  # prefill, and the first decodes
        case.engine.step()
    runs = case.recorder.num_runs
    waits.clear()
    with Launches() as launches:
        assert len(case.engine.step()[0].outputs) == 3
    num_replays = case.recorder.num_runs - runs
    assert num_replays == 65  # the halves and the head
    # The step's input, the choice, and its copy to the host, which a step in turn waits for at once.
    assert launches.names == ["copy_", "argmax", "add_", *(["copy_"] if is_ahead else [])]
    assert num_replays + len(launches.names) + (0 if is_ahead else 1) <= 70
    assert len(waits) + launches.num_waits == 1
    case.close()


class FakeGraph:
    """A graph whose captures to pool 1 fail."""

    pools: ClassVar[list[int]] = []

    def __init__(self, keep_graph: bool) -> None:
        assert keep_graph
        self.is_ready = False

    def instantiate(self) -> None:
        self.is_ready = True

    def raw_cuda_graph(self) -> int:
        return 100 + self.pools[-1]

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.pools.append(pool)

    def capture_end(self) -> None:
        if self.pools[-1] == 1:
            raise RuntimeError("the capture was invalidated")

    def replay(self) -> str:
        assert self.is_ready
        return f"ran from pool {self.pools[-1]}"


def test_a_failed_capture_is_ended_and_leaves_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    pools, ended = iter([1, 2]), list[tuple[int, int]]()
    monkeypatch.setattr(FakeGraph, "pools", [])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"a stream of {device}")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(stream))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *args: ended.append(args), raising=False)
    record = CudaGraphs(torch.device("cuda", 3))
    with pytest.raises(ZeroDivisionError):
        record(lambda: 1 // 0)
    assert ended == [(3, 1)]
    assert gc.isenabled()
    assert record(lambda: gc.isenabled())() == "ran from pool 2"
    assert len(ended) == 1


class FakeDriver(ModuleType):
    """The driver's calls for graphs, which note what they are called with."""

    class CUresult:
        CUDA_SUCCESS = 0

    def __init__(self) -> None:
        super().__init__("driver")
        self.calls: list[Any] = []
        self.status = 0

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        if not name.startswith("cuGraph"):
            raise AttributeError(name)

        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append((name.removeprefix("cuGraph"), *args))
            value = f"{name.removeprefix('cuGraph')} {len(self.calls)}"
            return (self.status if name == "cuGraphInstantiate" else 0, value)

        return call

    CUgraph = staticmethod(lambda address: f"graph at {address}")


def test_graphs_are_joined_in_a_row_and_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, bindings = FakeDriver(), ModuleType("bindings")
    bindings.driver = driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.delitem(sys.modules, "worker.memory.driver", raising=False)
    monkeypatch.setattr(FakeGraph, "pools", [2])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "a stream")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(stream))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 2)
    graphs = CudaGraphs(torch.device("cuda", 0))
    joined = graphs.join([graphs(lambda: None) for _ in range(2)])
    assert driver.calls == [
        ("Create", 0),
        ("AddChildGraphNode", "Create 1", [], 0, "graph at 102"),
        ("AddChildGraphNode", "Create 1", ["AddChildGraphNode 2"], 1, "graph at 102"),
        ("Instantiate", "Create 1", 0),
        ("Destroy", "Create 1"),
        ("Upload", "Instantiate 4", 7),
    ]
    joined()
    assert driver.calls[-1] == ("Launch", "Instantiate 4", 7)
    del joined
    gc.collect()
    assert driver.calls[-1] == ("ExecDestroy", "Instantiate 4")


# ----------------------------------------------------------------------------- batches in flight


def serve_in_turns(case: Case, sampling: list[dict[str, Any]], cancelled: int = -1) -> dict[str, list[int]]:
    """Serve requests that come one after the other while others decode."""
    client = Client()
    for i, options in enumerate(sampling):
        prompt = [(5 * i + 3 * j) % 200 for j in range(3 + 9 * i)]
        case.engine.submit("m@w0", request(str(i), prompt, **({"max_tokens": 20 + 3 * i} | options)))
        for _ in range(3):
            client.take(case.engine.step())
        if i == cancelled:
            case.engine.cancel([str(i - 1)])
            client.tokens.pop(str(i - 1))
    run(case.engine, client)
    assert not case.instance.has_work
    case.instance.check_integrity()
    return client.tokens


PLAIN: list[dict[str, Any]] = [{}, {}, {}, {}, {}]
RANDOM: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {},
    {"temperature": 1.2, "seed": 7, "presence_penalty": 0.5},
    {"temperature": 1.0, "min_p": 0.05},
    {"logit_bias": {5: 3.0}, "frequency_penalty": 1.0},
]
FILTERED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "top_p": 0.9, "max_tokens": 8},
    {},
    {"logprobs": 2},
    {},
]
SHORT: list[dict[str, Any]] = [{"max_tokens": n} for n in (1, 2, 3, 1, 30)]
PENALISED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {},
    {"repetition_penalty": 1.2, "temperature": 0.9},
    {"min_tokens": 12, "stop_token_ids": list(range(1, 211, 2))},
    {"min_tokens": 6, "stop_token_ids": list(range(1, 211, 2)), "repetition_penalty": 1.1},
]


@pytest.mark.parametrize(
    ("sampling", "options"),
    [
        (PLAIN, {}),
        (PLAIN, {"prefix_cache": True}),
        (PLAIN, {"num_blocks": 30}),  # sequences are preempted
        (RANDOM, {}),
        (FILTERED, {}),
        (SHORT, {}),
        (PENALISED, {}),
        (PENALISED, {"num_blocks": 30}),
    ],
)
def test_steps_that_follow_before_the_tokens_are_known_give_the_same_tokens(
    folder: Path, sampling: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    found = []
    for is_ahead in (True, False):
        case = Case(folder, is_recorded=is_ahead, is_ahead=is_ahead, **options)
        found.append(serve_in_turns(case, sampling))
        if is_ahead:
            assert case.num_followed > 5
        if "num_blocks" in options:
            assert case.instance.scheduler.num_preemptions > 0
        case.close()
    assert found[0] == found[1]


@pytest.mark.usefixtures("chunks_too")
@pytest.mark.parametrize("sampling", [PLAIN, RANDOM, FILTERED, SHORT, PENALISED])
def test_decodes_follow_recorded_steps_with_prompts_too(folder: Path, sampling: list[dict[str, Any]]) -> None:
    found = []
    for is_ahead in (True, False):
        case = Case(folder, is_recorded=is_ahead, is_ahead=is_ahead, max_num_batched_tokens=16)
        found.append(serve_in_turns(case, sampling))
        if is_ahead:
            assert {size.is_decode for size in case.recorded.sizes} == {True, False}
        case.close()
    assert found[0] == found[1]


def test_a_sequence_that_ends_leaves_the_step_that_follows_without_a_trace(folder: Path) -> None:
    plain = Case(folder, is_recorded=False)
    tokens = serve_in_turns(plain, PLAIN)
    stops = [{"stop_token_ids": [tokens[str(i)][7 + i]]} for i in range(5)]
    expected = serve_in_turns(plain, stops)
    case = Case(folder, is_ahead=True)
    assert serve_in_turns(case, stops) == expected
    assert max(map(len, expected.values())) < 20
    assert case.instance.stats.generation_tokens == sum(map(len, expected.values()))
    for each in (case, plain):
        each.close()


def test_penalties_and_least_lengths_hold_in_steps_that_follow(folder: Path) -> None:
    case = Case(folder, is_ahead=True)
    plain, tokens = serve_in_turns(case, PLAIN), serve_in_turns(case, PENALISED)
    assert case.num_followed > 5
    assert tokens["0"] != plain["0"] and tokens["1"] == plain["1"]
    for name, options in (("3", PENALISED[3]), ("4", PENALISED[4])):
        ends, least = options["stop_token_ids"], options["min_tokens"]
        assert any(token in ends for token in plain[name][:least]), "it would end early"
        at = [i for i, token in enumerate(tokens[name]) if token in ends]
        assert at == [len(tokens[name]) - 1] and at[0] >= least
    case.close()


def test_a_request_cancelled_in_flight_frees_its_blocks_and_touches_no_other(folder: Path) -> None:
    found = []
    for is_ahead in (True, False):
        case = Case(folder, is_recorded=is_ahead, is_ahead=is_ahead)
        found.append(serve_in_turns(case, PLAIN, cancelled=3))
        while case.engine.can_step():
            case.engine.step()
        assert case.cache.allocator.num_used == 0
        case.close()
    assert found[0] == found[1]


def test_swaps_and_conversions_between_steps_in_flight_change_no_block(folder: Path) -> None:
    """Steps launched already run in the old shape: as many steps later, all runs in the new one."""
    case = Case(folder, is_ahead=True)
    client = Client()
    for i in range(3):
        case.engine.submit("m@w0", request(str(i), list(range(3 + i)), 30))
    half = case.model.layers[0].feed_forward
    for i in range(20):
        client.take(case.engine.step())
        case.model.install(0, copy(half))
        case.cache.convert(i % 3, ("full", "int8")[i % 2])
        case.instance.kv_converted()
    run(case.engine, client)
    assert all(len(tokens) == 30 for tokens in client.tokens.values())
    case.instance.check_integrity()
    case.close()


def test_an_instance_settles_before_another_executor_takes_over(folder: Path) -> None:
    plain, case = Case(folder, is_recorded=False), Case(folder, is_ahead=True)
    prompt, client = [1, 2, 3], Client()
    plain.engine.submit("m@w0", request("0", prompt, 20))
    case.engine.submit("m@w0", request("0", prompt, 20))
    for _ in range(4):
        client.take(case.engine.step())
    assert case.instance.local_executor.num_in_flight == 1
    other = LocalExecutor(case.model, case.cache, case.limits.block_tokens, CPU)
    case.instance.use(other)
    assert case.instance.local_executor.num_in_flight == 0
    assert run(case.engine, client).tokens == run(plain.engine, Client()).tokens
    for each in (case, plain):
        each.close()


def test_a_step_that_fails_with_another_in_flight_ends_its_requests_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, case = Case(folder, is_recorded=False), Case(folder, is_ahead=True)
    client = Client()
    case.engine.submit("m@w0", request("0", [1, 2, 3], 20))
    for _ in range(3):
        client.take(case.engine.step())
    with monkeypatch.context() as patch:
        patch.setattr(case.recorded, "run", lambda *args: 1 / 0)
        client.take(case.engine.step())
    assert "ZeroDivisionError" in client.errors["0"]
    client = Client()
    for each, by in ((case, client), (plain, Client())):
        each.engine.submit("m@w0", request("1", [4, 5, 6], 20))
        run(each.engine, by)
        if each is plain:
            assert by.tokens == client.tokens
        each.close()


def test_sizes_end_with_the_most_sequences_of_a_step() -> None:
    def decodes(max_num_seqs: int) -> list[int]:
        return [size.num_seqs for size in sizes_for(Limits(max_num_seqs, 512, 1000, 16)) if size.is_decode]

    assert decodes(1) == [1]
    assert decodes(6) == [1, 2, 4, 6]
    assert decodes(64) == [1, 2, 4, 8, 16, 24, 32, 48, 64]
    assert decodes(1000)[-2:] == [224, 256]


def test_a_size_with_prompts_has_fewer_sequences_than_tokens_and_fits_into_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorded_batches, "CHUNKS", (16, 64, 512))
    sizes = [size for size in sizes_for(Limits(300, 128, 1000, 16)) if not size.is_decode]
    assert sizes == [StepSize(16, 15, 15), StepSize(64, 63, 63), StepSize(128, 127, 127)]
    assert sizes_for(Limits(300, 4096, 1000, 16))[-1] == StepSize(512, 300, 256)


def test_the_value_of_a_half_is_where_its_tensors_lie(case: Case) -> None:
    half = case.model.layers[0].feed_forward
    assert value_of(copy(half)) == value_of(half)
    assert value_of(changed(half)) != value_of(half)
    assert value_of(case.model.layers[1].feed_forward) != value_of(half)
    attention = case.model.layers[0].attention
    other = copy(attention)
    other.scale *= 2
    assert value_of(other) != value_of(attention)
