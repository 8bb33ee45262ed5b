"""The models of one worker: what each has of the device, and who must hear that one comes or goes.

The engine's thread owns it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from bus.messages import PARTS, InstanceCard
from bus.settings import WorkerSettings
from worker.deploy.kv_sharing import KVHolder
from worker.distributed.transport import Transport
from worker.engine.engine import Engine
from worker.memory import PagePool
from worker.model import Model
from worker.morph.plan import Half
from worker.morph.resizer import KVResizer
from worker.morph.target import Target
from worker.morph.verbs import reserve_pages
from worker.pipeline.stage_host import StageHost


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
    def idle_pages(self) -> int:
        """KV pages that are neither in use nor headroom for running sequences."""
        resizer = self.target.resizer
        return max(0, self.kv_pages - resizer.pages_for(resizer.needed_blocks()) * resizer.num_layers)


@dataclass(frozen=True, slots=True)
class Claim:
    """Free pages that a model needs while it is being loaded. `reserve_pages`: that its swaps want free."""

    pages: int
    reserve_pages: int


class HostListener:
    """Hears of models that come and go, in the engine's thread. This base class does nothing."""

    def on_loading(self, model: str) -> None:
        """Show that `model` is being loaded; empty: none is any more."""

    def on_loaded(self, card: InstanceCard) -> None:
        """Let requests be sent to the model."""

    def on_unloading(self, instance: str) -> None:
        """Take nothing new for the instance.

        Call `ModelHost.mark_drained` when all that was sent was read.
        """

    def on_unload_urgent(self, instance: str) -> None:
        """Call `ModelHost.mark_drained` at once, since the unload cannot wait any longer."""

    def on_unload_aborted(self, instance: str) -> None:
        """Keep the instance after all."""

    def on_unloaded(self, instance: str) -> None:
        """Forget the instance, which is gone with every page."""


class ModelHost:
    """The models of one worker. The engine's thread owns it."""

    def __init__(self, worker: str, pool: PagePool, engine: Engine, settings: WorkerSettings) -> None:
        self.worker, self.pool, self.engine, self.settings = worker, pool, engine, settings
        self.models: dict[str, HostedModel] = {}
        self.listener: HostListener | None = None
        self.transport: Transport | None = None  # None: no other worker reaches it
        self.stages: StageHost | None = None  # of instances that others lead; None: it takes part in none
        # An instance whose stages elsewhere are gone, and why: it is to leave.
        self.on_lost: Callable[[str, str], None] = lambda instance, reason: None
        # One of which a stage elsewhere is to leave: the same, when its requests have ended.
        self.on_going: Callable[[str, str], None] = lambda instance, reason: None
        self.add_target: Callable[[Target], None] = lambda target: None
        self.drop_target: Callable[[str], None] = lambda instance: None
        self.on_changed: Callable[[], None] = lambda: None  # a model came or has gone; cards may be replaced
        self.busy_with = ""  # the morph whose model comes or goes; one at a time
        self._leaving: dict[str, bool] = {}  # instances that leave, and whether nothing more will come
        self._claims: dict[str, Claim] = {}  # of models on their way in, by instance

    # ----------------------------------------------------------------------------- who is here

    def add(self, resident: HostedModel) -> None:
        """Serve the model from the next step on."""
        self.engine.add_instance(resident.target.instance)
        self.models[resident.card.id] = resident
        resident.target.resizer.kv_beside = partial(self.kv_beside, resident.card.id)
        self.add_target(resident.target)
        self.update_reserve()
        self.on_changed()

    def remove(self, instance: str) -> HostedModel:
        """Stop serving the instance and return it; its pages are still mapped."""
        self.engine.remove_instance(instance).close()
        self.drop_target(instance)
        return self.models.pop(instance)

    def begin_unload(self, instance: str) -> None:
        """Let the instance take nothing new."""
        self._leaving[instance] = self.listener is None
        if self.listener:
            self.listener.on_unloading(instance)

    def mark_drained(self, instance: str) -> None:
        """Note that no request comes to the instance any more."""
        if instance in self._leaving:
            self._leaving[instance] = True

    def is_drained(self, instance: str) -> bool:
        return self._leaving[instance]

    def end_unload(self, instance: str, *, is_gone: bool) -> None:
        """End the unload: the instance is gone, or it stays where the unload was aborted."""
        self._leaving.pop(instance, None)
        if is_gone:
            self.on_changed()
        if self.listener:
            (self.listener.on_unloaded if is_gone else self.listener.on_unload_aborted)(instance)

    # ----------------------------------------------------------------------------- pages

    @property
    def resizers(self) -> Iterator[KVResizer]:
        return (resident.target.resizer for resident in self.models.values())

    @property
    def reserve_pages(self) -> int:
        """Free pages that allow any layer of any model to be swapped down."""
        of_models = [_reserve_of(one.target) for one in self.models.values()]
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

    def return_lent_pages(self) -> bool:
        """Return some KV pages to the models that lent them, or take some back.

        Returns False if there is nothing more to do.
        """
        return any(_take_back(resizer) for resizer in self.resizers) or any(map(_get_back, self.resizers))

    def who_has_what(self) -> str:
        """Describe how the pages are spread, for messages."""
        parts = []
        for resident in self.models.values():
            needed = resident.kv_pages - resident.idle_pages
            parts.append(
                f"{resident.card.id} has {resident.weight_pages} of weights and {resident.kv_pages} of KV"
                f" ({needed} of them needed)"
            )
        return "; ".join(parts) or "no other model is here"

    def kv_beside(self, instance: str, missing: int) -> str:
        """Describe the KV of other models, for the reason of an order that misses `missing` pages.

        It says how much of that KV is idle, and that an order calls none of it back. Returns "" if there is
        none.
        """
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


def holder_of(resident: HostedModel, *, is_keen: bool = False) -> KVHolder:
    resizer = resident.target.resizer
    cache, layers = resizer.cache, resizer.num_layers
    has = cache.pages_per_layer
    missing = resizer.pages_for(cache.num_blocks + resizer.wanted_blocks()) - has
    return KVHolder(
        name=resident.card.id,
        num_layers=layers,
        pages=has * layers,
        needed=resizer.pages_for(resizer.needed_blocks()) * layers,
        useful=max(has, resizer.useful_pages_per_layer) * layers,
        missing=max(0, missing) * layers,
        is_keen=is_keen,
    )


def max_blocks(target: Target, degree: int) -> int:
    """Return the KV blocks that no order can exceed.

    The memory less the least that the layers take, in their fewest bits and with the FFN divided among
    `degree` workers.
    """
    cache, variants = target.resizer.cache, target.variants
    pages = cache.pool.num_pages
    for layer in range(cache.num_layers):
        attention, ffn = (
            min(variants.pages(layer, part, precision) for precision in variants.precisions) for part in PARTS
        )
        pages -= attention + ffn // degree
    return cache.blocks_in(max(0, pages) // cache.num_layers)


def _reserve_of(target: Target) -> int:
    return reserve_pages(target.variants, len(target.instance.shape))


PAGES_AT_ONCE = 8  # per layer, between two steps


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
