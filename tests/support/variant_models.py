"""Models with variants for tests, and quantised sets beside their folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bus.messages import PARTS, Part
from bus.precisions import Precision
from tests.support.model_folders import Runner
from worker.model import read_config
from worker.model.quantized_sets import (
    QuantizedMatrix,
    SetInfo,
    matrix_name,
    matrix_shapes,
    round_to_nearest,
    set_path,
    write_set,
)
from worker.model.sources import CheckpointWeights, checkpoint_digest
from worker.model.weights import tensors_of
from worker.shape.host_store import HostMemory
from worker.shape.variants import LayerVariants


class Morphing:
    """A model with its variants and a paged cache to run it over."""

    def __init__(
        self, source: Path | Runner, memory: Path | HostMemory, *, method: str = "", **load: Any
    ) -> None:
        """source: a model's folder, or one that was loaded already. memory: or its `host_dir`."""
        self.runner = Runner(source, **load) if isinstance(source, Path) else source
        self.model = self.runner.model
        memory = HostMemory(memory) if isinstance(memory, Path) else memory
        self.variants = LayerVariants(self.model, self.runner.pool, method=method, memory=memory)

    def swap(self, layer: int, part: Part, precision: Precision) -> None:
        """Install a variant as the executor does."""
        old = self.model.shape()[layer].of(part)
        if old == precision:
            return
        self.variants.map(layer, part, precision)
        self.variants.copy_job(layer, part, precision)(lambda: True)
        self.variants.check(layer, part, precision)
        self.variants.install(layer, part, precision)
        self.variants.unmap(layer, part, old)

    def swap_all(self, precision: Precision) -> None:
        for layer in range(len(self.model.layers)):
            for part in PARTS:
                self.swap(layer, part, precision)

    def tensors(self, layer: int, part: Part, precision: Precision) -> dict[str, torch.Tensor]:
        """Return the bytes of a mapped variant."""
        ranges = self.variants.ranges
        return tensors_of(ranges.memory((layer, part, precision)), ranges.plans[part, precision])

    def bytes(self, layer: int, part: Part, precision: Precision) -> torch.Tensor:
        """Return all pages of a mapped variant."""
        memory = self.variants.ranges.memory((layer, part, precision))
        return memory.tensor(torch.uint8, (memory.nbytes,))

    def close(self) -> None:
        self.variants.release()
        self.runner.close()


def write_sets(
    folder: Path, method: str, group: int, *, is_scaled: bool, damage: str = ""
) -> dict[str, torch.Tensor]:
    """int4 of this method; returns the dense matrices that it stands for."""
    config = read_config(folder)
    checkpoint = CheckpointWeights(folder)
    random = torch.Generator().manual_seed(5)
    made: dict[str, QuantizedMatrix] = {}
    for layer in range(config.num_layers):
        scales = {
            k: torch.rand(k, generator=random) + 0.5 for k in {s[1] for s in matrix_shapes(config).values()}
        }
        for name, (_, inputs) in matrix_shapes(config).items():
            full = matrix_name(layer, name)
            weight = checkpoint.read(f"{full}.weight")
            made[full] = round_to_nearest(weight, 4, group, scales[inputs] if is_scaled else None)
    info = SetInfo(bits=4, group=group, method=method, model=checkpoint_digest(config, checkpoint))
    write_set(set_path(folder, "int4", method), info, iter(made.items()))
    return {name: matrix.dense() for name, matrix in made.items()}
