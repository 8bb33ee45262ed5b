"""Layers of the serving model made from dense tensors by their names in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from worker.model.config import ModelConfig, read_config
from worker.model.layer import Layer, build_layer
from worker.model.layout import CheckpointTensor, plan_model
from worker.model.sources import CheckpointWeights
from worker.model.weights import tensors_in
from worker.offline.layerwise import LayerwiseModel
from worker.shape.copier import lay_out

CPU = torch.device("cpu")
Named = dict[str, torch.Tensor]  # without "model.layers.{i}."


class NamedWeights:
    """A source of weights over the tensors of one layer."""

    depends_on_device = False

    def __init__(self, named: Named, index: int) -> None:
        self._named = {f"model.layers.{index}.{name}": tensor for name, tensor in named.items()}

    def check(self, sources: Iterable[CheckpointTensor]) -> None:
        pass

    def close(self) -> None:
        pass

    def fill(
        self,
        targets: Sequence[torch.Tensor],
        source: CheckpointTensor,
        pause: Callable[[], object] = lambda: None,
    ) -> None:
        (target,), stored = targets, self._named[source.tensor]
        target.copy_(stored.T if source.is_transposed else stored)


def open_layerwise(folder: Path, window_tokens: int = 64) -> LayerwiseModel:
    config = read_config(folder)
    return LayerwiseModel(
        config, CheckpointWeights(folder), dtype=torch.float32, device=CPU, window_tokens=window_tokens
    )


def read_named(folder: Path, index: int) -> Named:
    """All tensors of a layer in float32."""
    config, checkpoint = read_config(folder), CheckpointWeights(folder)
    parts = plan_model(config, torch.float32, page_bytes=4096, max_tp=1).layers[index]
    names = [source.tensor for part in parts for source in part.sources]
    return {name.removeprefix(f"model.layers.{index}."): checkpoint.read(name).float() for name in names}


def build_dense(config: ModelConfig, index: int, named: Named) -> Layer:
    parts = plan_model(config, torch.float32, page_bytes=4096, max_tp=1).layers[index]
    source = NamedWeights(named, index)
    attention, feed_forward = (tensors_in(lay_out(part, source, CPU), part) for part in parts)
    return build_layer(config, index, attention, feed_forward)
