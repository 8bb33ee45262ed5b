"""The layers of a model in few bits, wherever they come from: its set if there is one, else made here."""

from __future__ import annotations

from dataclasses import replace

import torch

from worker.model.config import ModelConfig
from worker.model.errors import ModelError
from worker.model.sources import Checkpoint
from worker.quantize.awq import round_to_nearest
from worker.quantize.decoder import Tensors, load_layer
from worker.quantize.sets import BITS, MATRICES, QuantizedMatrix, QuantizedSet, find_set

DEFAULT_GROUP = 64


class QuantizedLayers:
    """Kept as codes on the device; the dense weights of the same products exist while they are used."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        *,
        precision: str,
        method: str,
        model: str,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """method "": the best set there is, else round-to-nearest. model: the fingerprint.

        Raises ModelError: a set that cannot be used, or none of the method asked for.
        """
        self._dtype, self._device = dtype, device
        path = find_set(config.folder, precision, method)
        if path is None and method not in ("", "rtn"):
            raise ModelError(
                f"{config.folder}: no {precision} set by {method}: make it with"
                f" `instar quantize {config.folder} --method {method} --bits {precision.removeprefix('int')}`"
            )
        self.method = "rtn"
        if path is None:
            bits = next(bits for name, bits in BITS.items() if name == precision)
            layers = (_rounded(config, checkpoint, layer, bits) for layer in range(config.num_layers))
        else:
            stored = QuantizedSet(path, model=model)
            self.method = stored.info.method
            layers = (stored.layer(config, layer) for layer in range(config.num_layers))
        self._layers = [{name: _to(matrix, device) for name, matrix in layer.items()} for layer in layers]

    def __call__(self, layer: int) -> Tensors:
        """MATRICES as dense weights, "{name}.weight"."""
        return {
            f"{name}.weight": matrix.dense().to(self._dtype) for name, matrix in self._layers[layer].items()
        }


def _rounded(
    config: ModelConfig, checkpoint: Checkpoint, layer: int, bits: int
) -> dict[str, QuantizedMatrix]:
    weights = load_layer(config, checkpoint, layer, torch.float32, torch.device("cpu"))
    return {name: round_to_nearest(weights[f"{name}.weight"], bits, DEFAULT_GROUP) for name in MATRICES}


def _to(matrix: QuantizedMatrix, device: torch.device) -> QuantizedMatrix:
    moved = {ending: part.to(device) for ending, part in matrix.tensors().items()}
    return replace(matrix, **moved)
