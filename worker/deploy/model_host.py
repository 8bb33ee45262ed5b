"""The models of one worker: what each has of the device, and who must hear that one comes or goes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from bus.messages import PARTS, InstanceCard
from bus.morphs import Retire
from bus.settings import WorkerSettings
from worker.deploy.kv_sharing import KVHolder, Move, next_move
from worker.distributed.transport import Transport
from worker.engine.build import MIB
from worker.engine.engine import Engine
from worker.memory import PagePool
from worker.model import Model
from worker.morph.manager import MorphManager
from worker.morph.plan import Half
from worker.morph.resizer import KVResizer
from worker.morph.target import MemberTarget, Target
from worker.morph.variants import reserve_pages
from worker.pipeline.stage_host import StageHost
from worker.shape.copier import chunk_bytes_of
from worker.shape.host_ring import HostRing
from worker.shape.host_store import HostMemory

log = logging.getLogger(__name__)

PAGES_AT_ONCE = 8  # per layer, between two steps
# A model that lacked blocks this recently keeps its fair share: pages would otherwise move with every gap
# between requests.
KEEN_S = 1.0
DEFAULT_RING_MB = 1024  # if the images find no room in memory and the settings name no size


@dataclass(frozen=True, slots=True)
class HostedModel:
    """A model that is served here."""

    card: InstanceCard
    target: Target
    model: Model

    @property
    def weight_pages(self) -> int:
        """Pages of the weights in their present precisions."""
        halves = (Half(layer, part) for layer in range(self.model.config.num_layers) for part in PARTS)
        now = ((half, self.target.precision(half)) for half in halves)
        in_full = sum(loaded.memory.num_mapped for loaded in self.model.ranges)
        return in_full + sum(self.target.pages(half, name) for half, name in now if name != "full")

    @property
    def kv_pages(self) -> int:
        cache = self.target.resizer.cache
        return cache.pages_per_layer * cache.num_layers

    @property
    def least_kv_pages(self) -> int:
        """KV pages that the model keeps whatever happens."""
        resizer = self.target.resizer
        return resizer.pages_for(resizer.min_blocks) * resizer.num_layers

    @property
    def idle_pages(self) -> int:
        """KV pages that are neither in use nor headroom for running sequences."""
        resizer = self.target.resizer
        return max(0, self.kv_pages - resizer.pages_for(resizer.needed_blocks()) * resizer.num_layers)


class Claim(NamedTuple):
    """Free pages that a model needs while it is being loaded."""

    pages: int
    reserve_pages: int  # pages that its swaps want free


def host_memory(settings: WorkerSettings, device: torch.device) -> HostMemory:
    """Return where the images of models lie, with one ring for all that come from a disk."""
    ring = HostRing(
        (settings.host_memory_mb or DEFAULT_RING_MB) * MIB,
        slot_bytes=chunk_bytes_of(device),
        gpu=device if device.type == "cuda" else None,
    )
    disk_dir = Path(settings.disk_dir) if settings.disk_dir else None
    return HostMemory(Path(settings.host_dir), disk_dir, ring, is_bounded=settings.host_memory_mb > 0)


class HostListener:
    """Hears of models that come and go. This base class is for a worker that no requests are sent to."""

    def on_loading(self, model: str) -> None:
        """Show that `model` is being loaded; empty: none is any more."""

    def on_loaded(self, card: InstanceCard) -> None:
        """Let requests be sent to the model."""

    def on_unloading(self, instance: str, on_drained: Callable[[], None]) -> None:
        """Take nothing new; in the engine's thread, call `on_drained` when all that was sent was read."""
        on_drained()

    def on_unload_urgent(self, instance: str) -> None:
        """Call `on_drained` at once, since the unload cannot wait any longer."""

    def on_unload_aborted(self, instance: str) -> None:
        """Keep the instance after all."""

    def on_unloaded(self, instance: str) -> None:
        """Forget the instance, which is gone with every page."""


class ModelHost:
    """The models of one worker. The engine's thread owns it."""

    def __init__(
        self, worker: str, pool: PagePool, engine: Engine, settings: WorkerSettings, morphs: MorphManager
    ) -> None:
        self.worker, self.pool, self.engine, self.morphs = worker, pool, engine, morphs
        self.settings = settings.in_force(pool.backend.device.type)
        self.morphs.reclaim, pool.wake = pool.reclaim, lambda: self.morphs.wake()
        self.memory = host_memory(settings, pool.backend.device)
        self.models: dict[str, HostedModel] = {}
        self.listener = HostListener()
        self.post: Callable[..., object] = lambda call, *args: call(*args)
        self.transport: Transport | None = None  # None: no other worker reaches it
        self.stages: StageHost | None = None  # stages of instances that others lead; None: it has none
        self.on_changed: Callable[[], None] = lambda: None  # a model came or went; cards may be replaced
        self.busy_with = ""  # the morph whose model comes or goes; one at a time
        self._claims: dict[str, Claim] = {}  # claims of loading models, by instance
        self._wanted_at: dict[str, float] = {}  # when an instance last lacked KV blocks
        self.num_kv_moves = 0

    @property
    def cards(self) -> list[InstanceCard]:
        """The cards of the models."""
        return [one.card for one in self.models.values()]

    def add(self, hosted: HostedModel) -> None:
        """Serve the model from the next step on."""
        self.engine.add_instance(hosted.target.instance)
        self.models[hosted.card.id] = hosted
        hosted.target.resizer.kv_beside = partial(self.kv_beside, hosted.card.id)
        hosted.target.on_kv_converted = lambda: self.on_changed()
        self.morphs.add(hosted.target)
        self.update_reserve()
        self.on_changed()

    def remove(self, instance: str) -> HostedModel:
        """Stop serving the instance and return it; its pages are still mapped."""
        self.engine.remove_instance(instance).close()
        del self.morphs.targets[instance]
        self._wanted_at.pop(instance, None)
        return self.models.pop(instance)

    def retire(self, instance: str, reason: str, wait_s: float) -> None:
        """Unload an instance whose stages elsewhere are gone or leave; its morphs end.

        wait_s: for its requests to end.
        """
        log.info("%s is retired: %s", instance, reason)
        self.morphs.give_up(instance, reason)
        name = f"lost-{instance}-{time.time_ns()}"
        self.morphs.begin(Retire(id=name, epoch=self.morphs.epoch, instance=instance, wait_s=wait_s))

    # ----------------------------------------------------------------------------- pages

    @property
    def resizers(self) -> Iterator[KVResizer]:
        return (target.resizer for target in self._targets)

    @property
    def _targets(self) -> list[MemberTarget]:
        """The models, and the stages that others lead."""
        stages = self.stages.targets if self.stages else []
        return [*(one.target for one in self.models.values()), *stages]

    @property
    def reserve_pages(self) -> int:
        """Free pages that allow any layer of any model to be swapped down."""
        of_models = [reserve_pages(one.variants, one.resizer.num_layers) for one in self._targets]
        return max([*of_models, *(claim.reserve_pages for claim in self._claims.values())], default=0)

    def claim(self, instance: str, claim: Claim | None) -> None:
        """Keep free pages for a model that is being loaded: no other model grows into them. None ends it."""
        self._claims.pop(instance, None)
        if claim:
            self._claims[instance] = claim
        self.update_reserve()

    def update_reserve(self) -> None:
        reserve = self.reserve_pages + self._num_claimed
        for resizer in self.resizers:
            resizer.reserve_pages = reserve

    @property
    def _num_claimed(self) -> int:
        return sum(claim.pages for claim in self._claims.values())

    @property
    def num_spare_pages(self) -> int:
        """Free pages beyond every claim and reserve; negative: that many are missing."""
        return self.pool.num_free - self.reserve_pages - self._num_claimed

    def share_kv(self, but: Container[str]) -> bool:
        """Move a few KV pages to a model that misses blocks, from any whose name is not in `but`.

        Returns whether it did. Pages that are too few for each layer of the borrower stay free until later.
        """
        now = time.monotonic()
        for name, one in self.models.items():
            if one.target.instance.scheduler.num_blocks_wanted:
                self._wanted_at[name] = now
        if now not in self._wanted_at.values():
            return False
        keen = {name for name, wanted_at in self._wanted_at.items() if now - wanted_at < KEEN_S}
        sharing = [one for name, one in self.models.items() if name not in but]
        holders = [holder_of(one, is_keen=one.card.id in keen) for one in sharing]
        if (move := next_move(holders, self.num_spare_pages)) is None:
            return False
        if move.lender:
            self.lend(move)
        borrower = self.models[move.borrower].target.resizer
        if pages := min(move.pages // borrower.num_layers, borrower.growable(), PAGES_AT_ONCE):
            borrower.borrow(pages)
            self.num_kv_moves += 1
        return True

    def lend(self, move: Move) -> None:
        """Free a few pages of each layer of the lender's KV. Raises OutOfBlocks."""
        lender = self.models[move.lender].target.resizer
        lender.lend(min(move.pages // lender.num_layers, PAGES_AT_ONCE))

    def return_lent_pages(self) -> bool:
        """Return some KV pages to the models that lent them. Returns False if there is nothing more to do."""
        return any(_take_back(resizer) for resizer in self.resizers) or any(map(_get_back, self.resizers))

    def who_has_what(self) -> str:
        """Describe how the pages are spread, for messages."""
        parts = (
            f"{name} has {one.weight_pages} of weights and {one.kv_pages} of KV"
            f" ({one.kv_pages - one.idle_pages} of them needed)"
            for name, one in self.models.items()
        )
        return "; ".join(parts) or "no other model is here"

    def kv_beside(self, instance: str, missing: int) -> str:
        """Return the KV of other models, for the reason of an order that misses `missing` pages, or ""."""
        others = [one for name, one in self.models.items() if name != instance and one.kv_pages]
        if not others:
            return ""
        parts = ", ".join(
            f"{one.card.id} has {one.kv_pages} pages of KV, {one.idle_pages} idle" for one in others
        )
        most = max(others, key=lambda one: one.idle_pages)
        if not most.idle_pages:
            return f". {parts}"
        shrink = f"`instar morph resize {most.card.id} {most.target.resizer.blocks_without(missing)}`"
        return (
            f". {parts}; an order calls none of it back, only requests that miss blocks do: shrink it first, "
            f"{shrink}"
        )


def holder_of(hosted: HostedModel, *, is_keen: bool = False) -> KVHolder:
    resizer = hosted.target.resizer
    cache, layers = resizer.cache, resizer.num_layers
    has = cache.pages_per_layer
    missing = resizer.pages_for(cache.num_blocks + resizer.wanted_blocks()) - has
    return KVHolder(
        name=hosted.card.id,
        num_layers=layers,
        pages=has * layers,
        needed=resizer.pages_for(resizer.needed_blocks()) * layers,
        useful=resizer.useful_alone * layers,
        missing=max(0, missing) * layers,
        is_keen=is_keen,
    )


def max_blocks(target: Target, degree: int) -> int:
    """Return the KV blocks that no order can exceed, with layers in their fewest bits and at `degree`."""
    cache, variants = target.resizer.cache, target.variants
    pages = cache.pool.num_pages
    for layer in range(cache.num_layers):
        attention, ffn = (
            min(variants.pages(layer, part, precision) for precision in variants.precisions) for part in PARTS
        )
        pages -= attention + ffn // degree
    return cache.blocks_in(max(0, pages) // cache.num_layers)


def _take_back(resizer: KVResizer) -> bool:
    """Take pages from a model that has pages of others. Returns whether there were any."""
    pages = min(-resizer.num_lent, PAGES_AT_ONCE)
    while pages > 0 and not resizer.can_take(pages, resizer.needed_blocks()):
        pages -= 1
    if pages > 0:
        resizer.lend(pages)
    return pages > 0


def _get_back(resizer: KVResizer) -> bool:
    pages = min(resizer.num_lent, resizer.growable(), PAGES_AT_ONCE)
    if pages > 0:
        resizer.borrow(pages)
    return pages > 0
