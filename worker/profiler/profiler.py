"""One profile from beginning to end, one engine step at a time (iServe §5.2, §5.3).

Seconds are those of the fingerprint's own steps. For several devices one rank's own work is measured, and its
communication apart (`links`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

import torch

import kernels
from bus.clock import now_ms
from bus.deployments import LatencySample, LinkSample, MemorySample, Profile
from bus.precisions import BITS
from worker.deploy.kv_sharing import fair_pages, gift, next_lender
from worker.deploy.model_host import PAGES_AT_ONCE, ModelHost, holder_of
from worker.engine.core import EngineCore
from worker.engine.recorded_batches import recorded_batches
from worker.memory import KVCache, PagePool
from worker.model.cut import heads_of
from worker.model.rehearsal import Rehearsal
from worker.model.shard import Shard
from worker.profiler.fingerprint import CutPlan, Fingerprint
from worker.profiler.grid import Grid
from worker.profiler.requests import Requests
from worker.shape.copier import Copier, CopyJob, Pause, until_done

ProfileSteps = Generator[bool, None, None]  # the type of `Run.steps`: False waits for another thread


@dataclass(slots=True)
class Profiler:
    """Measures one fingerprint. Run `steps` to its end or close it: both free every page."""

    plan: CutPlan
    grid: Grid
    pool: PagePool
    _: KW_ONLY
    copier: Copier = field(default_factory=lambda: Copier(lambda: None))  # works beside the steps
    lent: LentPages | None = None  # beside the free pages
    max_pages: int = 0  # the most to take; 0: what is available
    probe: Callable[[], list[LinkSample]] | None = None  # measures links in a thread (`links.measure_links`)
    clock: Callable[[], float] = time.perf_counter
    seconds: float = 0.0  # device time so far
    progress: str = ""
    latency: list[LatencySample] = field(default_factory=list)
    memory: list[MemorySample] = field(default_factory=list)
    links: list[LinkSample] = field(default_factory=list)
    peak_bytes: int = 0

    def __post_init__(self) -> None:
        self.grid = self.grid.with_shares(self.plan.shares)

    @property
    def num_pages(self) -> int:
        """The pages that it takes: weights in all precisions, and KV."""
        return self.plan.num_pages + self.plan.depths[-1] * self._kv_pages

    def steps(self) -> ProfileSteps:
        """Run one step of the fingerprint, or one piece of its loading, at a time.

        Raises NotEnoughPages, ModelError, RequestFailed, OutOfPages and MappingFailed.
        """
        with closing(self._steps()) as inner:
            while True:
                began = self.clock()
                can_go_on = next(inner, None)
                self.seconds += self.clock() - began
                if can_go_on is None:
                    return
                yield can_go_on

    def check_integrity(self) -> None:
        """Check the pool. Raises BrokenInvariant."""
        self.pool.check_integrity()

    def profile(self, *, model: str, digest: str, device: str, version: str) -> Profile:
        """Return the profile, once `steps` has ended."""
        return Profile(
            model=model,
            digest=digest,
            device=device,
            version=version,
            num_layers=self.plan.whole.num_layers,
            block_bytes_per_layer=block_bytes(self.plan, self.grid),
            block_tokens=self.grid.block_tokens,
            latency=self.latency,
            memory=self.memory,
            device_seconds=round(self.seconds, 3),
            peak_bytes=self.peak_bytes,
            ended_ms=now_ms(),
            links=self.links,
            row_bytes=self.plan.config.hidden_size * self.plan.model.dtype.itemsize,
            max_num_batched_tokens=self.grid.max_num_batched_tokens,
            page_bytes=self.plan.page_bytes,
        )

    def _steps(self) -> ProfileSteps:
        plan, pool = self.plan, self.pool
        available = self.lent.available() if self.lent else pool.num_free
        available = min(available, self.max_pages or available)
        if self.num_pages > available:
            mib = pool.page_bytes / 2**20
            raise NotEnoughPages(
                f"a fingerprint needs {self.num_pages * mib:.1f} MiB of pages ({self.num_pages}), and"
                f" {available * mib:.1f} ({available}) are available"
            )
        self._say("compiling kernels")
        yield from self._do(self._warm_up)
        with ExitStack() as undo:
            if self.lent:
                undo.callback(self.lent.give_back)
                self._say("making room")
                yield from self.lent.make(self.num_pages)
            fingerprint = Fingerprint(plan, pool)
            undo.callback(fingerprint.release)
            yield from fingerprint.map()
            filling = self.copier.start(CopyJob(0, 0, partial(fingerprint.fill, self._say)))
            yield from until_done(filling, filling.stop)
            self.seconds += filling.seconds
            fingerprint.build()
            config = plan.config
            cache = KVCache(
                pool,
                num_layers=plan.depths[-1],
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                block_tokens=self.grid.block_tokens,
                dtype=plan.model.dtype,
                max_blocks=self.grid.num_blocks,
                owner=self._name,
                precision=self.grid.kv_dtype,
            )
            undo.callback(cache.release)
            cache.grow(self._kv_pages)
            limits, vocab_size, device = self.grid.limits, config.vocab_size, self.pool.backend.device
            instance = EngineCore(
                self._name, fingerprint, cache, limits, vocab_size=vocab_size, device=device
            )
            instance.local_executor.recorded = recorded_batches(fingerprint.model, cache, limits, device)
            requests = Requests(fingerprint, instance, self.grid, say=self._say, clock=self.clock)
            self.memory = yield from requests.memory()
            transient = max(one.activation_bytes or 0 for one in self.memory)
            self.peak_bytes = self.num_pages * pool.page_bytes + transient
            self.latency = yield from requests.latency()
        if self.probe:
            self._say("links between workers")
            began = self.clock()
            yield from self._do(self._measure_links)
            self.seconds += 2 * (self.clock() - began)  # two devices

    def _do(self, work: Callable[[Pause], None]) -> ProfileSteps:
        """Do work that touches no page in the copying thread."""
        running = self.copier.start(CopyJob(0, 0, work))
        yield from until_done(running, running.abandon)

    def _measure_links(self, pause: Pause) -> None:
        assert self.probe
        self.links = self.probe()

    def _warm_up(self, pause: Pause) -> None:
        """Compile the kernels for the fingerprint's shapes; it can take a minute."""
        config, device = self.plan.config, self.pool.backend.device
        bits = [BITS[precision] for precision in self.plan.precisions]
        if device.type == "cuda":
            torch.cuda.set_device(device)
            bits = []  # rehearsed in their own shapes
        has_kv_codes = self.grid.kv_dtype != "full"
        rehearsal = Rehearsal(
            config=config,
            plan=self.plan.model,
            quantized=self.plan.quantized,
            block_tokens=self.grid.block_tokens,
            has_kv_codes=has_kv_codes,
            max_num_batched_tokens=self.grid.max_num_batched_tokens,
        )
        for tp in (1, *self.plan.shares):  # Triton compiles for a number of heads
            heads, kv_heads = heads_of(config.num_heads, config.num_kv_heads, Shard(0, tp))
            kernels.warm_up(
                self.plan.model.dtype,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_heads=len(heads),
                num_kv_heads=len(kv_heads),
                head_dim=config.head_dim,
                block_tokens=self.grid.block_tokens,
                device=device,
                bits=bits,
                has_kv_codes=has_kv_codes,
                rotary_dim=config.rope.dim,
                softcap=config.attention_softcap,
                has_sinks=config.has_sinks,
                rehearse=rehearsal if tp == 1 else None,  # it has all degrees
            )

    def _say(self, progress: str) -> None:
        self.progress = progress

    @property
    def _name(self) -> str:
        return f"fingerprint of {self.plan.config.folder.name}"

    @property
    def _kv_pages(self) -> int:
        """The KV pages of one layer."""
        return self.pool.pages_for(self.grid.num_blocks * block_bytes(self.plan, self.grid))


def block_bytes(plan: CutPlan, grid: Grid) -> int:
    """Return the bytes of a KV block in one layer."""
    config = plan.config
    return config.kv_block_bytes(grid.block_tokens, plan.model.dtype, grid.kv_dtype) // config.num_layers


class NotEnoughPages(Exception):
    """A fingerprint takes more pages than it may have."""


class LentPages:
    """Free pages of a worker that serves, but for its reserve, and pages of idle KV, which are lent."""

    def __init__(self, model_host: ModelHost) -> None:
        self._host = model_host

    def available(self) -> int:
        """Return how many pages there are."""
        holders = [holder_of(one) for one in self._host.models.values()]
        fair = fair_pages(holders, 0)
        return max(0, self._host.num_spare_pages + sum(gift(one, fair) for one in holders))

    def make(self, num_pages: int) -> ProfileSteps:
        """Make so many pages free, a few at a time. Raises NotEnoughPages."""
        model_host = self._host
        while model_host.busy_with:  # a model that is loaded or unloaded counts on the free pages
            yield False
        while (missing := num_pages - model_host.num_spare_pages) > 0:
            move = next_lender([holder_of(one) for one in model_host.models.values()], missing)
            if move is None:
                raise NotEnoughPages(f"{missing} pages are missing: the models need their KV now")
            resizer = model_host.models[move.lender].target.resizer
            resizer.lend(min(move.pages // resizer.num_layers, PAGES_AT_ONCE))
            yield True

    def give_back(self) -> None:
        """Return every lent page to its model."""
        while self._host.return_lent_pages():
            pass
