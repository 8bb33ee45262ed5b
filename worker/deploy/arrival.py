"""A Deploy as it runs: a model comes beside those that serve.

::

    read, plan    loading thread    the folder, but for its weights
    room          engine            other models' idle KV shrinks, a few pages between two steps
    pages         engine            mapped, still nobody's
    contents      loading thread    host images first, if this host has none; at a bounded share of the time
    check         engine            products of a known input, half by half
    KV            engine            what is free and what idle models can give, a fair share at most
    first request engine            a step of it between two steps of the others
    service       engine            from the next step on; the card is shown, its stream is read

Whatever ends it before that, every page goes back to whom it came from.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack

from bus.messages import Deploy, InstanceCard, MorphOutcome, Number
from worker.deploy.newcomer import GivenUp, MayGoOn, Newcomer
from worker.deploy.sharing import Holder, Move, fair_pages, next_lender
from worker.deploy.site import PAGES_AT_ONCE, Claim, Resident, Site, holder_of
from worker.engine.build import MIB, cache_text, canary_steps
from worker.memory import OutOfBlocks
from worker.model import ModelError
from worker.morph.outcome import NotApplied
from worker.morph.run import Clock, Patience
from worker.morph.target import Target
from worker.shape.copier import Copier, Copy

log = logging.getLogger("worker")

Steps = Generator[bool, None, None]
CardOf = Callable[[Newcomer, Target], InstanceCard]


class Work:
    """For the loading thread, of no known size; the pages of the pool are not its business."""

    nbytes = read_bytes = 0

    def __init__(self, work: Callable[[MayGoOn], None]) -> None:
        self._work = work

    def __call__(self, may_go_on: MayGoOn) -> None:
        try:
            self._work(may_go_on)
        except GivenUp:
            return


class ArrivalRun:
    """One Deploy."""

    is_beyond_return = False
    pages_at_once = PAGES_AT_ONCE  # of each layer of its KV, between two steps

    def __init__(
        self,
        command: Deploy,
        site: Site,
        loader: Copier,
        card_of: CardOf,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        """loader: a thread of its own, so that swaps need not wait for a load."""
        self._command, self._site, self._loader, self._card_of = command, site, loader, card_of
        self._patience = Patience(command.wait_s, clock)
        self._newcomer = Newcomer(command, site)
        self._stage = ""
        self._bytes = self._total_bytes = self._pages_mapped = 0
        self._copy_s = 0.0

    @property
    def deadline(self) -> float | None:
        return self._patience.deadline

    @property
    def progress(self) -> str:
        return self._newcomer.told if self._stage == "images" else self._stage

    def numbers(self) -> dict[str, Number]:
        cache = self._newcomer.cache
        return {
            "pages_weights": self._pages_mapped,
            "blocks": cache.num_blocks if cache else 0,
            "bytes_copied": self._bytes,
            "copy_seconds": round(self._copy_s, 6),
            "wait_seconds": round(self._patience.total_s, 6),
        }

    def steps(self) -> Steps:
        site, name = self._site, self._command.model
        while site.taken_by:
            yield from self._wait(NotApplied("deferred", f"morph {site.taken_by} has not ended"))
        with ExitStack() as undo:
            site.taken_by = self._command.id
            undo.callback(self._over)
            if site.hooks:
                site.hooks.coming(name)
            back = undo.enter_context(ExitStack())
            back.callback(self._give_back_all)
            back.callback(site.claim, self._command.instance, None)
            back.callback(self._newcomer.release)
            try:
                yield from self._load()
                yield from self._serve()
            except ModelError as error:
                raise NotApplied("failed", str(error)) from error
            site.claim(self._command.instance, None)
            back.pop_all()
        self._came()

    def _serve(self) -> Steps:
        target = yield from self._open()
        newcomer = self._newcomer
        self._site.add(Resident(self._card_of(newcomer, target), target, newcomer.model))
        log.info("%s: %s", self._command.model, cache_text(target.resizer.cache, newcomer.limits))

    def _came(self) -> None:
        site = self._site
        if site.hooks:
            site.hooks.came(site.residents[self._command.instance].card)

    # ----------------------------------------------------------------------------- its weights

    def _load(self) -> Steps:
        newcomer = self._newcomer
        yield from self._do(newcomer.read, "reading the model's folder")
        newcomer.reserve()
        yield True
        yield from self._do(newcomer.find_matrices, "reading the model's folder")
        newcomer.reserve_rest()
        yield True
        yield from self._make_room()
        for piece in newcomer.pieces:
            while piece.map():
                yield True
            self._pages_mapped += piece.num_pages
            self._claim()
            yield True
        if self._site.settings.variants:
            yield from self._do(newcomer.make_images, "images")
        self._total_bytes = sum(piece.nbytes for piece in newcomer.pieces)
        for piece in newcomer.pieces:
            yield from self._copy(self._loader.start(piece.job()))
            self._stage = self._share_done()
        yield from self._do(newcomer.check_unchanged, "reading the model's folder")
        for piece in newcomer.pieces:
            piece.install()
            yield True
        yield from self._do(newcomer.compile, "compiling kernels")

    def _do(self, work: Callable[[MayGoOn], None], stage: str) -> Steps:
        self._stage = stage
        running = self._loader.start(Work(work))
        try:
            while not running.is_done:
                yield False
        except GeneratorExit:
            running.abandon()
            raise
        running.raise_error()

    def _copy(self, copy: Copy) -> Steps:
        try:
            while not copy.is_done:
                yield False
        except GeneratorExit:
            copy.stop()  # its pages are to go
            raise
        copy.raise_error()
        self._bytes += copy.nbytes
        self._copy_s += copy.seconds

    def _share_done(self) -> str:
        tenths = 10 * self._bytes // max(1, self._total_bytes)
        return f"weights: {tenths * 10} % of {self._total_bytes / MIB:.0f} MiB"

    # ----------------------------------------------------------------------------- its KV, its first request

    def _open(self) -> Generator[bool, None, Target]:
        yield from self._fill_cache()
        self._stage = "its first request"
        target = self._newcomer.make_target()
        yield True
        for _ in canary_steps(target.instance):
            yield True
        return target

    def _fill_cache(self) -> Steps:
        """Take the KV pages that it must have, then up to a fair share, as far as others can give it."""
        yield from self._take_least_kv()
        site, cache = self._site, self._newcomer.cache
        assert cache
        layers = cache.num_layers
        while missing := self._goal() - cache.pages_per_layer * layers:
            if site.num_spare_pages >= layers:
                cache.grow(min(missing, site.num_spare_pages, self.pages_at_once * layers) // layers)
            elif move := next_lender(self._holders(), missing):
                self._lend(move)
            else:
                return
            yield True

    def _take_least_kv(self) -> Steps:
        newcomer, cache = self._newcomer, self._newcomer.cache
        assert cache
        self._stage = "its KV cache"
        while missing := newcomer.least_kv_pages // cache.num_layers - cache.pages_per_layer:
            cache.grow(min(missing, self.pages_at_once))
            self._claim()
            yield True

    def _goal(self) -> int:
        """Pages of all its layers: its fair share, never less than it has."""
        cache, holders = self._newcomer.cache, self._holders()
        assert cache
        share = fair_pages(holders, max(0, self._site.num_spare_pages))[self._command.instance]
        return max(share // cache.num_layers, cache.pages_per_layer) * cache.num_layers

    def _holders(self) -> list[Holder]:
        """Return who shares the KV pages. All count as keen: a model keeps at least its fair share."""
        return [self._own_holder(), *(holder_of(one, is_keen=True) for one in self._site.residents.values())]

    def _own_holder(self) -> Holder:
        cache = self._newcomer.cache
        assert cache
        pages = cache.pages_per_layer * cache.num_layers
        useful = max(pages, self._newcomer.useful_kv_pages)
        return Holder(self._command.instance, cache.num_layers, pages, pages, useful, is_keen=True)

    # ----------------------------------------------------------------------------- room

    def _make_room(self) -> Steps:
        """For its weights, for the KV that it must have, and for a larger reserve."""
        self._stage = "making room"
        self._claim()
        self._refuse_what_never_fits()
        site = self._site
        while (missing := -site.num_spare_pages) > 0:
            move = next_lender([holder_of(one) for one in site.residents.values()], missing)
            if move:
                self._patience.get_on()
                self._lend(move)
                yield True
            else:
                yield from self._wait(self._no_room("deferred", "and nobody can give so much now"))

    def _claim(self) -> None:
        """What it has not mapped yet; the reserve is the largest that any model here wants."""
        newcomer, site = self._newcomer, self._site
        assert newcomer.cache
        kv_pages = newcomer.cache.pages_per_layer * newcomer.cache.num_layers
        left = newcomer.weight_pages - self._pages_mapped + max(0, newcomer.least_kv_pages - kv_pages)
        site.claim(self._command.instance, Claim(left, newcomer.reserve_pages))

    def _refuse_what_never_fits(self) -> None:
        site = self._site
        could_give = sum(one.kv_pages - _least(one) for one in site.residents.values())
        if -site.num_spare_pages > could_give:
            raise self._no_room("failed", "more than idle models could give")

    def _no_room(self, state: MorphOutcome, why: str) -> NotApplied:
        newcomer, site = self._newcomer, self._site
        weights, kv, missing = newcomer.weight_pages, newcomer.least_kv_pages, max(0, -site.num_spare_pages)
        reason = (
            f"{self._command.model} needs {weights} pages of {site.pool.page_bytes} bytes for its weights in"
            f" {self._command.precision} and {kv} for KV at least; {missing} are missing, {why}."
            f" {site.pool.num_free} of {site.pool.num_pages} are free; {site.who_has_what()}"
        )
        return NotApplied(
            state,
            reason,
            pages_needed=weights + kv,
            pages_weights=weights,
            pages_kv=kv,
            pages_missing=missing,
            pages_free=site.pool.num_free,
            pages_reserved=site.reserve_pages,
        )

    def _lend(self, move: Move) -> None:
        resizer = self._site.residents[move.lender].target.resizer
        pages = min(move.pages // resizer.num_layers, PAGES_AT_ONCE)
        try:
            resizer.lend(pages)
        except OutOfBlocks as error:
            raise NotApplied("failed", f"{move.lender} could not give its KV: {error}") from error

    def _wait(self, obstacle: NotApplied) -> Steps:
        if not self._patience.wait():
            raise obstacle
        yield False

    # ----------------------------------------------------------------------------- the end

    def _give_back_all(self) -> None:
        while self._site.give_back():
            pass

    def _over(self) -> None:
        self._site.taken_by = ""
        if self._site.hooks:
            self._site.hooks.coming("")


def _least(resident: Resident) -> int:
    """KV pages that it keeps whatever happens."""
    resizer = resident.target.resizer
    return resizer.pages_for(resizer.min_blocks) * resizer.num_layers
