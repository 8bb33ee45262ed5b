"""The layers of a simulated instance and the pages of its worker, as swaps and resizes change them.

The books are those of `worker.morph.target` and `worker.morph.resizer`: a new variant takes free pages, an
old one gives its own back, and the KV cache grows by a page in every layer.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cache

from bus.messages import PARTS, LayerShape, layers_below_full, lowest_half
from bus.precisions import KV_PRECISIONS, KVPrecision, Precision, lowest
from instar.simulate.calibration import EngineCalibration
from worker.morph.losses import Losses
from worker.morph.plan import Half, order_towards
from worker.morph.sizing import KVState


@cache
def _halves(num_layers: int) -> list[Half]:
    return [Half(layer, part) for layer in range(num_layers) for part in PARTS]


class SimulatedShape:
    """Layers by precision, and pages. It starts in full precision."""

    def __init__(self, calibration: EngineCalibration, losses: Losses) -> None:
        memory, limits = calibration.memory, calibration.limits
        self._calibration, self._memory = calibration, memory
        self.num_layers = calibration.num_layers
        self.layers = [LayerShape()] * self.num_layers
        self.halves: dict[Half, Precision] = dict.fromkeys(_halves(self.num_layers), "full")
        self.counts = Counter(self.halves.values())
        self.losses = losses
        self.num_below = 0  # layers with a half below full precision
        self.lowest: Precision = "full"
        self.loss = 0.0  # predicted share of perplexity
        self.kv_pages = memory.kv_pages // self.num_layers  # KV pages of each layer
        self.kv_form: KVPrecision = "full"
        self.spare_pages = memory.spare_pages  # free ones beyond the reserve; below 0: so many are missing
        # Only what swaps set free goes to the cache by itself; the rest needs an order, as in `KVResizer`.
        self.own_pages = memory.spare_pages if memory.spare_pages < self.num_layers else 0
        self.longest_blocks = math.ceil(limits.max_model_len / limits.block_tokens)
        self.min_blocks = min(self.longest_blocks, memory.kv_blocks)
        self._useful_blocks = limits.max_num_seqs * self.longest_blocks
        self.useful_pages = self._pages_for(self._useful_blocks)
        self._swapped: list[int] = []  # layers below full precision, the last swapped last

    @property
    def variants(self) -> list[Precision]:
        return self._calibration.variants

    @property
    def order(self) -> list[int]:
        return self._calibration.order

    @property
    def is_at_rest(self) -> bool:
        return not self.num_below and self.kv_form == "full"

    @property
    def kv(self) -> KVState:
        """The KV cache, as the reflex sees it."""
        blocks = {form: self.blocks_in(self.kv_pages, form) for form in KV_PRECISIONS}
        return KVState(form=self.kv_form, blocks=blocks, loss=self._memory.kv_loss)

    def _pages_per_block(self, form: KVPrecision) -> float:
        pages = self._memory.kv_pages / self._memory.kv_blocks
        return pages if form == "full" else pages / self._memory.kv_gain

    @property
    def kv_blocks(self) -> int:
        return self.blocks_in(self.kv_pages)

    def blocks_in(self, pages: int, form: KVPrecision | None = None) -> int:
        """Return the KV blocks in so many pages of each layer; form: None: that of now."""
        return int(max(0, pages) * self.num_layers / self._pages_per_block(form or self.kv_form))

    def _pages_for(self, blocks: int) -> int:
        return math.ceil(blocks * self._pages_per_block(self.kv_form) / self.num_layers)

    def pages_missing(self, blocks: int) -> int:
        """Return the pages by which each layer must grow to hold `blocks`; below 0: shrink."""
        return self._pages_for(blocks) - self.kv_pages

    def order_towards(self, precision: Precision) -> list[int]:
        """Return the order of layers in a swap; towards full the last swapped goes first."""
        return order_towards(precision, self.order, self._swapped)

    # ------------------------------------------------------------------------------------- changes

    def convert(self, form: KVPrecision) -> None:
        """Hold the KV cache in another form, in the same pages."""
        self.kv_form = form
        self.useful_pages = self._pages_for(self._useful_blocks)
        self._sum_up()

    def pages_to_take(self, half: Half, precision: Precision) -> int:
        """Return the pages that each layer's KV must give so that the half can be swapped."""
        new, old = (
            self._pages(half, precision),
            self._pages(half, self.layers[half.layer].of(half.part)),
        )
        missing_now = new - self.spare_pages - self._memory.reserve_pages
        missing_after = new - old - self.spare_pages
        return max(0, math.ceil(max(missing_now, missing_after) / self.num_layers))

    def resize(self, pages: int, *, is_own: bool = True) -> None:
        """Add pages to each layer's KV, or below 0 take them. is_own: for a swap, not by an order."""
        self.kv_pages += pages
        self.spare_pages -= pages * self.num_layers
        if is_own:
            self.own_pages -= pages * self.num_layers

    def growth(self) -> int:
        """Return the pages of each layer by which the KV cache grows after a swap."""
        return max(
            0,
            min(
                self.own_pages // self.num_layers,
                self.spare_pages // self.num_layers,
                self.useful_pages - self.kv_pages,
            ),
        )

    def follow(self, other: SimulatedShape) -> None:
        """Get the precisions of another shape of the model, in the order in which it got them."""
        if self.kv_form != other.kv_form:
            self.convert(other.kv_form)
        for layer in dict.fromkeys((*other._swapped, *self._swapped)):
            for half in (Half(layer, part) for part in PARTS):
                if self.halves[half] != other.halves[half]:
                    self.install(half, other.halves[half])

    def fit(self) -> None:
        """Let the KV cache grow by the pages that are its own, or give those that are missing."""
        self.resize(self.growth() or -math.ceil(max(0, -self.spare_pages) / self.num_layers))

    def install(self, half: Half, precision: Precision) -> None:
        """Swap the half; its pages become free."""
        layer = self.layers[half.layer]
        old = layer.of(half.part)
        freed = self._pages(half, old) - self._pages(half, precision)
        self.spare_pages += freed
        self.own_pages += freed
        self.counts[old] -= 1
        self.counts[precision] += 1
        self.halves[half] = precision
        changed = {half.part: precision}
        self.layers[half.layer] = replace(layer, **changed)
        if half.layer in self._swapped:
            self._swapped.remove(half.layer)
        if self.layers[half.layer] != LayerShape():
            self._swapped.append(half.layer)
        self._sum_up()

    def _sum_up(self) -> None:
        self.num_below = layers_below_full(self.layers)
        self.lowest = lowest([lowest_half(self.layers), self.kv_form])
        self.loss = self.losses.total(self.halves) + self.kv.lost

    def half_pages(self, half: Half, precision: Precision) -> int:
        return self._pages(half, precision)

    def _pages(self, half: Half, precision: Precision) -> int:
        return self._memory.half_pages(half.part, precision)
