"""Workers of one process, an engine's thread each, without a bus: what they publish is kept in lists.

Everything between them is real: links over sockets, gloo, pages, the layers. `page_bytes` is small, so
that a tiny model's FFN has many.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.common.engines import EngineShape, fill_cache, make_instance
from bench.common.loading import load_model
from bench.common.oracles import make_oracle
from bus.messages import Event, Grammar, SamplingParams
from bus.morphs import MorphReport, Resize, Swap, Transform
from bus.precisions import KVPrecision, Precision
from tests.support.threaded_worker import ThreadedWorker
from tests.support.toy_grammars import ToyGrammars
from worker.distributed.messages import Peer
from worker.distributed.transport import Transport
from worker.engine.build import make_cache, useful_blocks
from worker.engine.engine import Engine, StepResult
from worker.engine.outputs import Output
from worker.engine.sequence import Limits, own_request
from worker.memory import CpuBackend, PagePool
from worker.morph.manager import MorphManager
from worker.morph.reshard import make_resharder
from worker.morph.resizer import KVResizer
from worker.morph.target import Target
from worker.morph.variants import NoVariants, Variants
from worker.parallel.grouping import Grouping
from worker.parallel.local_instance import LocalInstance
from worker.service.engine_thread import EngineThread, Snapshot
from worker.service.groups import use_grouping
from worker.shape.copier import Copier
from worker.shape.host_store import HostMemory
from worker.shape.variants import LayerVariants

BLOCK_TOKENS = 4


def model_fixtures(family: str = "llama", **changes: Any) -> tuple[Any, Any]:
    """`model, folder = model_fixtures(num_hidden_layers=3)` in a test module: a transformers model, which is
    the oracle, and the folder of it that workers serve."""

    @pytest.fixture(scope="module")
    def model() -> Any:
        return make_oracle(family, max_position_embeddings=1024, **changes)

    @pytest.fixture(scope="module")
    def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
        made = tmp_path_factory.mktemp("model")
        model.save_pretrained(made)
        return made

    return model, folder


class GroupWorker(ThreadedWorker):
    """`reports` of morphs; `events` of its reflex; `cached[request]`: tokens of its prompt that were found in
    the prefix cache; `grammars`: in use if it has grammars."""

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        megabytes: float = 4,
        max_tp: int = 4,
        page_bytes: int = 4096,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 60,
        timeout_s: float = 20.0,
        stage_bytes: int = 1 << 14,
        host_dir: Path | None = None,
        prefix_cache: bool = False,
        kv_dtype: KVPrecision = "full",
        context: int = 0,
        has_grammars: bool = False,
    ) -> None:
        super().__init__(name)
        self.pool = PagePool(CpuBackend(page_bytes), int(megabytes * 1024 * 1024))
        self.model = load_model(folder, self.pool, dtype=torch.float32, max_tp=max_tp, context=context)
        limits: Limits = EngineShape(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_tokens=BLOCK_TOKENS,
            prefix_cache=prefix_cache,
            kv_dtype=kv_dtype,
        ).limits(self.model)
        cache = make_cache(self.pool, self.model, limits, "model")
        fill_cache(self.pool, cache, self.model, limits)
        self.grammars = ToyGrammars(self.model.config.vocab_size)
        given = self.grammars if has_grammars else None
        self.instance = make_instance(f"model@{name}", self.model, cache, limits, grammars=given)
        resizer = KVResizer(self.instance, cache, reserve_pages=0, useful_blocks=useful_blocks(limits))
        variants: Variants = NoVariants()
        if host_dir:
            variants = LayerVariants(
                self.model, self.pool, precisions=["int8", "int4"], memory=HostMemory(host_dir)
            )
        target = Target(self.instance, variants, resizer)
        self.transport = Transport("127.0.0.1", timeout_s)
        self.grouping = Grouping(
            name,
            LocalInstance(
                name="model",
                target=target,
                model=self.model,
                weights=make_resharder(self.model, self.pool, variants),
                copier=Copier(lambda: self.executor.wake()),
                stage_bytes=stage_bytes,
            ),
            self.transport,
        )
        self.regrouped: list[tuple[tuple[str, ...], str]] = []
        self.grouping.on_regrouped = lambda members, why: self.regrouped.append((members, why))
        self.executor = MorphManager(name, {self.instance.id: target}, step_share=1.0)
        use_grouping(self.executor, self.grouping)
        engine = Engine()
        engine.add_instance(self.instance)
        self.engine = engine
        self.fingerprints: set[str] = set()
        self.cached: dict[str, int] = {}
        self.told: Snapshot | None = None  # the last one
        self.reports: list[MorphReport] = []
        self.events: list[Event] = []
        self.thread = EngineThread(
            engine,
            self.pool.counts,
            self.executor,
            self.grouping,
            snapshot_s=1.0,
            on_results=self._results,
            on_snapshot=self._told,
            on_reports=self._reports,
            on_events=self.events.extend,
            on_death=self._died,
        )
        self.thread.fence(self.epoch)
        self.thread.start()

    @property
    def peer(self) -> Peer:
        return Peer(self.name, self.epoch, self.transport.address, self.transport.key)

    def submit(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int,
        grammar: Grammar | None = None,
        *,
        embeds: bool = False,
    ) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, grammar=grammar)
        self.tokens[name] = []
        self.thread.submit(
            self.instance.id,
            replace(own_request(name, prompt, sampling), cache_salt="", embeds=embeds),
        )

    def wait_degree(self, tp: int) -> None:
        self.wait(lambda: self.instance.tp == tp, f"degree {tp}")

    def end_of(self, morph: str) -> MorphReport:
        def ended() -> list[MorphReport]:
            return [report for report in self.reports if report.id == morph and report.state != "running"]

        self.wait(lambda: bool(ended()), f"the end of morph {morph}")
        return ended()[0]

    def check(self) -> None:
        """Check that nothing is lost or owned twice."""
        self.call(self._check)

    def stop(self) -> None:
        self.thread.stop()
        self.transport.close()

    def _check(self) -> None:
        self.engine.check_integrity()
        self.pool.check_integrity()
        if self.grouping.executor:
            self.grouping.executor.check_integrity()
        else:
            self.grouping.local.cache.check_integrity()

    def take(self, result: StepResult, output: Output) -> None:
        name = output.request.request_id
        self.cached[name] = self.cached.get(name, 0) + output.delta.cached_tokens
        if output.delta.token_ids:
            self.fingerprints.add(result.shape_id)

    def _told(self, snapshot: Snapshot) -> None:
        with self._changed:
            self.told = snapshot
            self._changed.notify_all()

    def _reports(self, reports: list[MorphReport]) -> None:
        with self._changed:
            self.reports += reports
            self._changed.notify_all()


@contextmanager
def workers(folder: Path, number: int, *, first: int = 0, **options: object) -> Iterator[list[GroupWorker]]:
    """w0, w1, ... (or from w`first` on); at the end they have lost nothing."""
    names = [f"w{i}" for i in range(first, first + number)]
    made = [GroupWorker(name, folder, **options) for name in names]  # type: ignore[arg-type]
    try:
        yield made
        for worker in made:
            assert worker.death is None, worker.death
            worker.check()
    finally:
        for worker in made:
            worker.stop()


def swap(leader: GroupWorker, precision: Precision, *, count: int = 99) -> str:
    command = Swap(
        id=f"morph-{next(_ids)}",
        epoch=leader.epoch,
        instance=leader.instance.id,
        precision=precision,
        count=count,
        wait_s=20.0,
    )
    leader.thread.morph(command)
    return command.id


def resize(leader: GroupWorker, blocks: int) -> str:
    command = Resize(id=f"morph-{next(_ids)}", epoch=leader.epoch, instance=leader.instance.id, blocks=blocks)
    leader.thread.morph(command)
    return command.id


_ids = iter(range(1_000_000))


def transform(members: list[GroupWorker], tp: int, *, layers_per_step: int = 1) -> str:
    """Order it of the first one; returns the morph's id."""
    leader = members[0]
    command = Transform(
        id=f"morph-{next(_ids)}",
        epoch=leader.epoch,
        instance=leader.instance.id,
        workers=[worker.name for worker in members],
        epochs={worker.name: worker.epoch for worker in members},
        tp=tp,
        layers_per_step=layers_per_step,
    )
    leader.thread.morph(command, {worker.name: worker.peer for worker in members})
    return command.id
