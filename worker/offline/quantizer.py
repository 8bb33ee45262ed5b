"""Quantise the layers of a model into set files, and read them back as dense layers.

Each finished layer is a file of its own in MODEL/instar/.unfinished/{precision}-{method}/, in the format of a
set. A run that finds such files of its own job (same model, group, calibration) reads them instead of
searching again; the last step joins them and removes the folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bus.precisions import BITS, ENTRIES, precision_of_bits
from worker.model.config import ModelConfig, ModelError
from worker.model.quantized_sets import (
    FOLDER,
    INPUTS,
    MATRICES,
    Method,
    QuantizedMatrix,
    QuantizedSet,
    SetInfo,
    find_set,
    matrix_name,
    round_to_nearest,
    set_path,
    write_set,
)
from worker.model.sources import CheckpointWeights, checkpoint_digest
from worker.offline.awq import Moments, activation_aware
from worker.offline.calibration import Calibration
from worker.offline.decoder import Ends, Span, Tensors, load_ends, load_layer, run_layer
from worker.offline.progress import ProgressLine, say

LayerMatrices = dict[str, QuantizedMatrix]  # by the names of MATRICES
WINDOWS_AT_ONCE = 1  # of the forward pass: 2,048 tokens keep any device busy


@dataclass(frozen=True, slots=True)
class SetTarget:
    """One set to be made."""

    folder: Path  # the model's
    method: Method
    info: SetInfo

    @property
    def name(self) -> str:
        return f"{precision_of_bits(self.info.bits)} {self.method}"

    @property
    def path(self) -> Path:
        return set_path(self.folder, precision_of_bits(self.info.bits), self.method)

    @property
    def is_made(self) -> bool:
        """By this very job."""
        try:
            return QuantizedSet(self.path, model=self.info.model).info == self.info
        except ModelError:
            return False

    def part(self, layer: int) -> Path:
        return self.parts / f"layer-{layer:04d}.safetensors"

    @property
    def parts(self) -> Path:
        return self.folder / FOLDER / ".unfinished" / self.path.stem

    def unfinished(self, config: ModelConfig, layer: int) -> LayerMatrices | None:
        """The layer as an earlier run of the same job left it."""
        if not self.part(layer).is_file():
            return None
        try:
            found = QuantizedSet(self.part(layer), model=self.info.model)
            return found.layer(config, layer) if found.info == self.info else None
        except ModelError:  # another model's, or cut off by a full disk: made anew
            return None


class Maker:
    """Quantises one model. `calibration` may be None if no method needs it."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: CheckpointWeights,
        calibration: Calibration | None,
        device: torch.device,
    ) -> None:
        self.config, self._checkpoint, self._device = config, checkpoint, device
        self._calibration = calibration
        self._fingerprint = checkpoint_digest(config, checkpoint)
        self._dtype = torch.float32 if device.type == "cpu" else config.dtype

    def targets(self, methods: Sequence[Method], bits: Sequence[int], group: int = 0) -> list[SetTarget]:
        """group: inputs that share a scale; 0: each precision's own number. Raises ModelError: awq without
        calibration."""
        if "awq" in methods and self._calibration is None:
            raise ModelError(f"{self.config.folder}: AWQ needs calibration text")
        made = []
        for method in methods:
            calibrated = self._calibration.digest if method == "awq" and self._calibration else ""
            for width in bits:
                info = SetInfo(
                    bits=width,
                    group=group or ENTRIES[precision_of_bits(width)].group,
                    method=method,
                    model=self._fingerprint,
                    calibration=calibrated,
                )
                made.append(SetTarget(self.config.folder, method, info))
        return made

    def make(self, targets: Sequence[SetTarget]) -> None:
        """Layer by layer, all targets of a layer at once, so that the calibration text runs through each
        layer of the full model only once. Raises ModelError, OSError."""
        progress = ProgressLine(", ".join(t.name for t in targets), self.config.num_layers, "layers")
        ends = load_ends(self.config, self._checkpoint, self._dtype, self._device)
        windows = self._windows(ends) if any(t.method == "awq" for t in targets) else []
        for layer in range(self.config.num_layers):
            weights = load_layer(self.config, self._checkpoint, layer, self._dtype, self._device)
            missing = [t for t in targets if t.unfinished(self.config, layer) is None]
            moments = _observe(ends, layer, weights, windows, any(t.method == "awq" for t in missing))
            for target in missing:
                matrices = quantise_layer(weights, moments if target.method == "awq" else {}, target.info)
                _write(target.part(layer), target.info, [(layer, matrices)])
            progress.advance()
        for target in targets:
            self._join(target)

    def _windows(self, ends: Ends) -> list[torch.Tensor]:
        """The calibration text at the entry of layer 0."""
        if self._calibration is None:
            return []
        tokens = self._calibration.tokens.to(self._device)
        return [ends.embed(part) for part in tokens.split(WINDOWS_AT_ONCE)]

    def _join(self, target: SetTarget) -> None:
        def layers() -> Iterator[tuple[int, LayerMatrices]]:
            for layer in range(self.config.num_layers):
                found = target.unfinished(self.config, layer)
                if found is None:
                    raise ModelError(f"{target.part(layer)}: vanished or damaged meanwhile; run it again")
                yield layer, found

        _write(target.path, target.info, layers())
        shutil.rmtree(target.parts)
        if not any(target.parts.parent.iterdir()):
            target.parts.parent.rmdir()
        say(f"{target.path}: {target.path.stat().st_size / 1e6:.1f} MB")


def quantise_layer(weights: Tensors, moments: dict[str, Moments], info: SetInfo) -> LayerMatrices:
    """With moments by activation-aware scales, else to nearest."""
    made: LayerMatrices = {}
    for reads, names in INPUTS.items():
        matrices = {name: weights[f"{name}.weight"] for name in names}
        if moments:
            made |= activation_aware(matrices, moments[reads], info.bits, info.group)
        else:
            made |= {name: round_to_nearest(w, info.bits, info.group) for name, w in matrices.items()}
    return made


def _observe(
    ends: Ends, layer: int, weights: Tensors, windows: list[torch.Tensor], is_wanted: bool
) -> dict[str, Moments]:
    """Run the windows through the layer, in place; what its products read, if that is wanted."""
    moments = {reads: Moments() for reads in INPUTS} if is_wanted else {}
    for i, x in enumerate(windows):
        spans = [Span(0, x.shape[1], weights)]
        windows[i] = run_layer(
            ends, layer, x, spans, (lambda r, seen: moments[r].add(seen)) if moments else None
        )
    return moments


def _write(path: Path, info: SetInfo, layers: Iterable[tuple[int, LayerMatrices]]) -> None:
    named = (
        (matrix_name(layer, name), matrix) for layer, matrices in layers for name, matrix in matrices.items()
    )
    write_set(path, info, named)


class QuantizedLayers:
    """Kept as codes on the device; the dense weights of the same products exist while they are used."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: CheckpointWeights,
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
                f" `instar quantize {config.folder} --method {method} --bits {BITS[precision]}`"
            )
        self.method = "rtn"
        if path is None:
            layers = (_rounded(config, checkpoint, layer, precision) for layer in range(config.num_layers))
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
    config: ModelConfig, checkpoint: CheckpointWeights, layer: int, precision: str
) -> dict[str, QuantizedMatrix]:
    weights = load_layer(config, checkpoint, layer, torch.float32, torch.device("cpu"))
    bits, group = BITS[precision], ENTRIES[precision].group
    return {name: round_to_nearest(weights[f"{name}.weight"], bits, group) for name in MATRICES}


def _to(matrix: QuantizedMatrix, device: torch.device) -> QuantizedMatrix:
    moved = {ending: part.to(device) for ending, part in matrix.tensors().items()}
    return replace(matrix, **moved)
