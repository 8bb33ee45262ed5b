"""The shape of a fake worker: layers and blocks that are numbers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from bus.messages import LayerShape
from bus.morphs import Morph, Resize, Swap, Transform
from bus.precisions import Precision, is_below

NUM_LAYERS = 2


@dataclass(slots=True)
class FakeShape:
    layers: list[LayerShape] = field(default_factory=lambda: [LayerShape() for _ in range(NUM_LAYERS)])
    blocks: int = 64
    tp: int = 1

    @property
    def num_below_full(self) -> int:
        return sum(layer != LayerShape() for layer in self.layers)

    def is_below(self, floor: Precision) -> bool:
        halves = {half for layer in self.layers for half in (layer.attention, layer.ffn)}
        return any(is_below(half, floor) for half in halves)

    def apply(self, command: Morph) -> None:
        if isinstance(command, Resize):
            self.blocks = command.blocks
            return
        if isinstance(command, Transform):
            self.tp = command.tp
            return
        if not isinstance(command, Swap):  # whole instances come and go
            return
        for layer in command.layers or range(command.count):
            self.layers[layer] = replace(
                self.layers[layer], **dict.fromkeys(command.parts, command.precision)
            )
