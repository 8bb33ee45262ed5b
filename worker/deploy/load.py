"""Load a model beside those that serve: make room, map, copy, check, take KV, run a first request, serve.

Contents are copied in the loading thread, the rest is done between steps. If the load ends before the model
serves, every page goes back to where it came from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import ExitStack

from bus.messages import InstanceCard, Number
from bus.morphs import Deploy, MorphOutcome
from worker.deploy.kv_sharing import KVHolder, Move, fair_pages, next_lender
from worker.deploy.loader import ModelLoader
from worker.deploy.model_host import PAGES_AT_ONCE, Claim, HostedModel, ModelHost, holder_of, max_blocks
from worker.engine.build import MIB, cache_text, canary_steps
from worker.memory import OutOfBlocks
from worker.model import ModelError
from worker.morph.losses import whole_losses
from worker.morph.run import NotApplied, Run, Steps
from worker.morph.target import Target
from worker.morph.variants import layer_pages
from worker.shape.copier import Copier, CopyJob, Pause, until_done

log = logging.getLogger("worker")


class LoadRun(Run):
    """One Deploy."""

    pages_at_once = PAGES_AT_ONCE  # pages of each KV layer between two steps

    def __init__(self, command: Deploy, host: ModelHost, copier: Copier) -> None:
        super().__init__(command.wait_s)
        self._command, self._host, self._copier = command, host, copier
        self._loader = ModelLoader(command, host)
        self._stage = "starting"
        self._bytes = self._total_bytes = self._pages_mapped = 0
        self._copy_s = 0.0

    @property
    def progress(self) -> str:
        return self._loader.images_progress if self._stage == "images" else self._stage

    def numbers(self) -> dict[str, Number]:
        return {
            "pages_weights": self._pages_mapped,
            "blocks": self._loader.num_blocks,
            "bytes_copied": self._bytes,
            "copy_seconds": round(self._copy_s, 6),
            "wait_seconds": round(self._patience.total_s, 6),
        }

    def steps(self) -> Steps:
        host, name = self._host, self._command.model
        while host.busy_with:
            yield from self._pause(NotApplied("deferred", f"morph {host.busy_with} has not ended"))
        host.busy_with = self._command.id
        host.post(host.listener.on_loading, name)
        try:
            with ExitStack() as back:
                back.callback(self._return_lent_pages)
                back.callback(host.claim, self._command.instance, None)
                back.callback(self._loader.release)
                yield from self._load()
                yield from self._serve()
                host.claim(self._command.instance, None)
                back.pop_all()
        except ModelError as error:
            raise NotApplied("failed", str(error)) from error
        finally:
            host.busy_with = ""
            host.post(host.listener.on_loading, "")
        self._came()

    def _serve(self) -> Steps:
        target = yield from self._open()
        loader = self._loader
        self._host.add(HostedModel(self._card(target), target, loader.model))
        log.info("%s: %s", self._command.model, cache_text(target.resizer.cache, loader.limits))

    def _card(self, target: Target) -> InstanceCard:
        """Return the instance's card while the worker joins no group with it."""
        command, loader, host = self._command, self._loader, self._host
        model, num_layers = loader.model, loader.config.num_layers
        return InstanceCard(
            id=target.instance.id,
            model=command.model,
            model_path=str(loader.folder),
            max_model_len=target.instance.limits.max_model_len,
            max_num_seqs=target.instance.limits.max_num_seqs,
            max_num_batched_tokens=target.instance.limits.max_num_batched_tokens,
            max_tp=model.plan.max_tp,
            vocab_size=loader.config.vocab_size,
            num_layers=num_layers,
            dtype=str(model.dtype).removeprefix("torch."),
            block_tokens=host.settings.block_tokens,
            workers=[host.worker],
            variants=list(target.variants.precisions),
            order=target.order,
            order_name=loader.order_name,
            min_blocks=target.resizer.min_blocks,
            max_blocks=max_blocks(target, 1),
            kv_heads=loader.config.cut_sizes.kv_heads,
            layer_pages=layer_pages(target.variants, num_layers),
            attention_pages=layer_pages(target.variants, num_layers, ["attention"]),
            deployed=command.id,
            precision=loader.precision,
            products=loader.products,
            losses=whole_losses(loader.num_layers, loader.losses),
            losses_assumed=loader.losses_assumed,
            kv_dtype=loader.limits.kv_dtype,
            kv_loss=loader.kv_loss,
            kv_gain=target.resizer.cache.gain_in_8_bits,
            takes_grammars=target.instance.grammars is not None,
        )

    def _came(self) -> None:
        host = self._host
        host.post(host.listener.on_loaded, host.models[self._command.instance].card)

    def _load(self) -> Steps:
        loader = self._loader
        yield from self._do(loader.read, "reading the model's folder")
        loader.reserve()
        yield True
        yield from self._do(loader.find_matrices, "reading the model's folder")
        loader.reserve_rest()
        yield True
        yield from self._make_room()
        for piece in loader.pieces:
            while piece.map():
                yield True
            self._pages_mapped += piece.num_pages
            self._claim()
            yield True
        if self._loader.held:
            yield from self._do(loader.make_images, "images")
        self._total_bytes = sum(piece.nbytes for piece in loader.pieces)
        for piece in loader.pieces:
            yield from self._fill(piece.job())
            self._stage = self._share_done()
        yield from self._do(loader.check_unchanged, "reading the model's folder")
        for piece in loader.pieces:
            piece.install()
            yield True
        yield from self._do(loader.compile, "compiling kernels")

    def _do(self, work: Callable[[Pause], None], stage: str) -> Steps:
        """Do work of unknown length in the loading thread, which touches no page of the pool."""
        self._stage = stage
        running = self._copier.start(CopyJob(0, 0, work))
        yield from until_done(running, running.abandon)

    def _fill(self, job: CopyJob) -> Steps:
        copy = self._copier.start(job)
        yield from until_done(copy, copy.stop)  # the copy's pages will be unmapped
        self._bytes += copy.nbytes
        self._copy_s += copy.seconds

    def _share_done(self) -> str:
        tenths = 10 * self._bytes // max(1, self._total_bytes)
        return f"weights: {tenths * 10} % of {self._total_bytes / MIB:.0f} MiB"

    # ----------------------------------------------------------------------------- its KV, a test request

    def _open(self) -> Generator[bool, None, Target]:
        yield from self._fill_cache()
        self._stage = "running a test request"
        target = self._loader.make_target()
        yield True
        for _ in canary_steps(target.instance):
            yield True
        return target

    def _fill_cache(self) -> Steps:
        """Take the KV pages that it must have, then up to a fair share, as far as others can give them."""
        yield from self._take_least_kv()
        host, cache = self._host, self._loader.cache
        layers = cache.num_layers
        while missing := self._goal() - cache.pages_per_layer * layers:
            if host.num_spare_pages >= layers:
                cache.grow(min(missing, host.num_spare_pages, self.pages_at_once * layers) // layers)
            elif move := next_lender(self._holders(), missing):
                self._lend(move)
            else:
                return
            yield True

    def _take_least_kv(self) -> Steps:
        loader, cache = self._loader, self._loader.cache
        self._stage = "allocating the KV cache"
        while missing := loader.least_kv_pages // cache.num_layers - cache.pages_per_layer:
            cache.grow(min(missing, self.pages_at_once))
            self._claim()
            yield True

    def _goal(self) -> int:
        """Pages of all its layers: its fair share, never less than it has."""
        cache = self._loader.cache
        share = fair_pages(self._holders(), max(0, self._host.num_spare_pages))[self._command.instance]
        return max(share // cache.num_layers, cache.pages_per_layer) * cache.num_layers

    def _holders(self) -> list[KVHolder]:
        """Return who shares the KV pages. All count as keen: a model keeps at least its fair share."""
        return [self._own_holder(), *(holder_of(one, is_keen=True) for one in self._host.models.values())]

    def _own_holder(self) -> KVHolder:
        cache = self._loader.cache
        pages = cache.pages_per_layer * cache.num_layers
        useful = max(pages, self._loader.useful_kv_pages)
        return KVHolder(self._command.instance, cache.num_layers, pages, pages, useful, is_keen=True)

    def _make_room(self) -> Steps:
        """Wait for room for the weights, the least KV and a larger reserve."""
        self._stage = "making room"
        self._claim()
        self._refuse_what_never_fits()
        host = self._host
        while (missing := -host.num_spare_pages) > 0:
            move = next_lender([holder_of(one) for one in host.models.values()], missing)
            if move:
                self._patience.get_on()
                self._lend(move)
                yield True
            else:
                yield from self._pause(self._no_room("deferred", "and no model can give so much now"))

    def _claim(self) -> None:
        """Claim the pages that are not mapped yet, and a reserve for swaps."""
        loader, host = self._loader, self._host
        kv_pages = loader.cache.pages_per_layer * loader.cache.num_layers
        left = loader.weight_pages - self._pages_mapped + max(0, loader.least_kv_pages - kv_pages)
        host.claim(self._command.instance, Claim(left, loader.reserve_pages))

    def _refuse_what_never_fits(self) -> None:
        host = self._host
        could_give = sum(one.kv_pages - one.least_kv_pages for one in host.models.values())
        if -host.num_spare_pages > could_give:
            raise self._no_room("failed", "more than idle models could give")

    def _no_room(self, state: MorphOutcome, why: str) -> NotApplied:
        loader, host = self._loader, self._host
        weights, kv, missing = loader.weight_pages, loader.least_kv_pages, max(0, -host.num_spare_pages)
        reason = (
            f"{self._command.model} needs {weights} pages of {host.pool.page_bytes} bytes for its weights in"
            f" {loader.precision} and {kv} for KV at least; {missing} are missing, {why}."
            f" {host.pool.num_free} of {host.pool.num_pages} are free; {host.who_has_what()}"
        )
        return NotApplied(
            state,
            reason,
            pages_needed=weights + kv,
            pages_weights=weights,
            pages_kv=kv,
            pages_missing=missing,
            pages_free=host.pool.num_free,
            pages_reserved=host.reserve_pages,
        )

    def _lend(self, move: Move) -> None:
        try:
            self._host.lend(move)
        except OutOfBlocks as error:
            raise NotApplied("failed", f"{move.lender} could not give its KV: {error}") from error

    def _return_lent_pages(self) -> None:
        while self._host.return_lent_pages():
            pass
