"""One profile from beginning to end, one engine step at a time (iServe §5.2, §5.3).

Every point (precision, prompt, batch) is measured on one layer and on two, with outputs of two lengths,
repeatedly. The seconds are those of the fingerprint's own steps; pauses for other models do not count. For
several devices one rank's own work is measured, and its communication apart (`links`); `stored` adds the
weights from their layout.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import TypeVar

from bus.deployments import LatencySample, LinkSample, MemorySample, Profile
from worker.deploy.kv_sharing import fair_pages, gift, next_lender
from worker.deploy.model_host import PAGES_AT_ONCE, ModelHost, holder_of
from worker.engine.core import EngineCore
from worker.memory import KVCache, PagePool
from worker.profiler.fingerprint import CutPlan, Fingerprint, load_cut, warm_up
from worker.profiler.grid import Grid
from worker.profiler.requests import Requests
from worker.shape.host_images import Pieces

T = TypeVar("T")
ProfileSteps = Generator[bool, None, None]  # as `worker.morph.run.Run.steps`: False waits for another thread


class Profiler:
    """Measures one fingerprint. Run `steps` to its end or close it: both free every page."""

    def __init__(
        self,
        plan: CutPlan,
        grid: Grid,
        pool: PagePool,
        *,
        page_source: PageSource | None = None,
        max_pages: int = 0,
        probe: Callable[[], list[LinkSample]] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Prepare.

        page_source: None for the free pages. max_pages: the most to take; 0: what is available. probe:
        measures the links of ranks and stages in a thread (`links.measure_links`).
        """
        self.plan, self.grid = plan, grid.with_shares(plan.shares)
        self.seconds = 0.0  # of the device, so far
        self.progress = ""
        self.latency: list[LatencySample] = []
        self.memory: list[MemorySample] = []
        self.links: list[LinkSample] = []
        self.peak_bytes = 0
        self._pool, self._max_pages, self._clock = pool, max_pages, clock
        self._page_source = page_source or PageSource(pool)
        self._probe = probe
        self._device = pool.backend.device

    @property
    def num_pages(self) -> int:
        """The pages that it takes: weights in all precisions, and KV."""
        return self.plan.num_pages + self.plan.depths[-1] * self._kv_pages

    def steps(self) -> ProfileSteps:
        """Run one step of the fingerprint, or one piece of its loading, at a time.

        Raises NotEnoughPages, ModelError, RequestFailed, OutOfPages and MappingFailed.
        """
        inner = self._steps()
        try:
            while True:
                began = self._clock()
                try:
                    can_go_on = next(inner)
                except StopIteration:
                    return
                finally:
                    self.seconds += self._clock() - began
                yield can_go_on
        finally:
            inner.close()

    def check_integrity(self) -> None:
        """Check the pool. Raises BrokenInvariant."""
        self._pool.check_integrity()

    def profile(self, *, model: str, digest: str, device: str, version: str) -> Profile:
        """Return the profile, once `steps` has ended."""
        return Profile(
            model=model,
            digest=digest,
            device=device,
            version=version,
            num_layers=self.plan.whole.num_layers,
            block_bytes_per_layer=self._block_bytes,
            block_tokens=self.grid.block_tokens,
            latency=self.latency,
            memory=self.memory,
            device_seconds=round(self.seconds, 3),
            peak_bytes=self.peak_bytes,
            ended_ms=time.time_ns() // 1_000_000,
            links=self.links,
            row_bytes=self.plan.config.hidden_size * self.plan.model.dtype.itemsize,
            max_num_batched_tokens=self.grid.max_num_batched_tokens,
        )

    # ----------------------------------------------------------------------------- its parts

    def _steps(self) -> ProfileSteps:
        plan, pool = self.plan, self._pool
        available = self._page_source.available()
        available = min(available, self._max_pages or available)
        if self.num_pages > available:
            raise NotEnoughPages(self._shortage(available))
        self._say("compiling kernels")
        for _ in warm_up(plan, self.grid.block_tokens, self._device):
            yield False
        with ExitStack() as undo:
            undo.callback(self._page_source.return_lent_pages)
            self._say("making room")
            yield from self._page_source.make(self.num_pages)
            self._say("loading")
            fingerprint = yield from _paced(load_cut(plan, pool))
            undo.callback(fingerprint.release)
            for precision in plan.precisions:
                self._say(f"making {precision}")
                yield from _paced(fingerprint.quantise(precision))
            cache = self._make_cache()
            undo.callback(cache.release)
            cache.grow(self._kv_pages)
            instance = self._make_instance(fingerprint, cache)
            requests = Requests(fingerprint, instance, self.grid, say=self._say, clock=self._clock)
            self.memory = yield from requests.memory()
            transient = max(one.activation_bytes or 0 for one in self.memory)
            self.peak_bytes = self.num_pages * pool.page_bytes + transient
            self.latency = yield from requests.latency()
        if self._probe:
            self._say("links between workers")
            yield from self._measure_links(self._probe)

    def _measure_links(self, probe: Callable[[], list[LinkSample]]) -> ProfileSteps:
        """Measure the links in a thread. Its time counts for two devices."""
        began, made = self._clock(), list[LinkSample]()
        thread = threading.Thread(target=lambda: made.extend(probe()), name="links", daemon=True)
        thread.start()
        while thread.is_alive():
            yield False
        self.links = made
        self.seconds += 2 * (self._clock() - began)

    def _say(self, progress: str) -> None:
        self.progress = progress

    def _make_cache(self) -> KVCache:
        config = self.plan.config
        return KVCache(
            self._pool,
            num_layers=self.plan.depths[-1],
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_tokens=self.grid.block_tokens,
            dtype=self.plan.model.dtype,
            max_blocks=self.grid.num_blocks,
            owner=self._name,
        )

    def _make_instance(self, fingerprint: Fingerprint, cache: KVCache) -> EngineCore:
        """Make an instance that is in no engine: only the profiler sends it requests."""
        return EngineCore(
            self._name,
            fingerprint,
            cache,
            self.grid.limits,
            vocab_size=self.plan.config.vocab_size,
            device=self._device,
        )

    @property
    def _name(self) -> str:
        return f"fingerprint of {self.plan.config.folder.name}"

    @property
    def _block_bytes(self) -> int:
        """Of one layer."""
        config = self.plan.config
        return config.kv_block_bytes(self.grid.block_tokens, self.plan.model.dtype) // config.num_layers

    @property
    def _kv_pages(self) -> int:
        """Of one layer."""
        return self._pool.pages_for(self.grid.num_blocks * self._block_bytes)

    def _shortage(self, available: int) -> str:
        mib = self._pool.page_bytes / 2**20
        return (
            f"a fingerprint needs {self.num_pages * mib:.1f} MiB of pages ({self.num_pages}), and"
            f" {available * mib:.1f} ({available}) are available"
        )


def _paced(pieces: Pieces[T]) -> Generator[bool, None, T]:
    """Yield True after each piece: another may follow at once."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            made: T = end.value
            return made
        yield True


class NotEnoughPages(Exception):
    """A fingerprint takes more pages than it may have."""


class PageSource:
    """The pages that a fingerprint may take: the free ones of the pool."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool

    def available(self) -> int:
        """Return how many pages there are."""
        return self._pool.num_free

    def make(self, num_pages: int) -> Generator[bool, None, None]:
        """Make so many pages free, a few at a time. Raises NotEnoughPages."""
        yield True

    def return_lent_pages(self) -> None:
        """Return what was lent: nothing."""


class LentPages(PageSource):
    """Free pages of a worker that serves, and pages of idle KV, which its models get back.

    The worker's reserve for swaps stays.
    """

    def __init__(self, model_host: ModelHost) -> None:
        super().__init__(model_host.pool)
        self._host = model_host

    def available(self) -> int:
        holders = [holder_of(one) for one in self._host.models.values()]
        fair = fair_pages(holders, 0)
        return max(0, self._host.num_spare_pages + sum(gift(one, fair) for one in holders))

    def make(self, num_pages: int) -> Generator[bool, None, None]:
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

    def return_lent_pages(self) -> None:
        while self._host.return_lent_pages():
            pass
