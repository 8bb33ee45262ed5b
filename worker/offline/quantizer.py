"""Quantise the layers of a model into set files.

Each finished layer is a file of its own in MODEL/instar/.unfinished/{precision}-{method}/. The next run of
the same job continues from there, and the last step joins them and removes the folder.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bus.precisions import ENTRIES, precision_of_bits
from worker.model.config import ModelConfig, ModelError
from worker.model.layer import Layer, build_layer
from worker.model.quantized_sets import (
    FOLDER,
    INPUTS,
    Method,
    QuantizedMatrix,
    QuantizedSet,
    SetInfo,
    matrices_by_input,
    matrix_name,
    round_to_nearest,
    set_path,
    write_set,
)
from worker.model.sources import CheckpointWeights, checkpoint_digest
from worker.model.weights import Tensors
from worker.offline.awq import Moments, activation_aware
from worker.offline.calibration import Calibration
from worker.offline.layerwise import LayerwiseModel
from worker.offline.progress import ProgressLine, say
from worker.shape.host_images import dense_matrices

LayerMatrices = dict[str, QuantizedMatrix]  # matrices by their names in a layer


@dataclass(frozen=True, slots=True)
class SetTarget:
    """A set to be made."""

    folder: Path  # the model's
    info: SetInfo

    @property
    def name(self) -> str:
        return f"{precision_of_bits(self.info.bits)} {self.info.method}"

    @property
    def path(self) -> Path:
        return set_path(self.folder, precision_of_bits(self.info.bits), self.info.method)

    @property
    def is_made(self) -> bool:
        """True if the set exists, made by this very job."""
        try:
            return QuantizedSet(self.path, model=self.info.model).info == self.info
        except ModelError:
            return False

    @property
    def parts(self) -> Path:
        return self.folder / FOLDER / ".unfinished" / self.path.stem

    def part(self, layer: int) -> Path:
        return self.parts / f"layer-{layer:04d}.safetensors"

    def unfinished(self, config: ModelConfig, layer: int) -> LayerMatrices | None:
        """Return the layer as an earlier run of the same job left it, or None."""
        try:
            found = QuantizedSet(self.part(layer), model=self.info.model)
            return found.layer(config, layer) if found.info == self.info else None
        except ModelError:  # missing, of another model, or cut off by a full disk
            return None


@dataclass(frozen=True, slots=True)
class Quantizer:
    """Quantises one model. `calibration` may be None if no method needs it."""

    config: ModelConfig
    checkpoint: CheckpointWeights
    calibration: Calibration | None
    device: torch.device

    def targets(self, methods: Sequence[Method], bits: Sequence[int], group: int = 0) -> list[SetTarget]:
        """Return the sets to make. Raises ModelError: awq without calibration.

        group: inputs that share a scale; 0: each precision's own number.
        """
        if self.config.mixture:
            raise ModelError(
                f"{self.config.folder}: quantised sets of experts are not supported; a worker rounds them to"
                " nearest when it loads the model"
            )
        if "awq" in methods and self.calibration is None:
            raise ModelError(f"{self.config.folder}: AWQ needs calibration text")
        text = self.calibration.digest if self.calibration else ""
        digest, made = checkpoint_digest(self.config, self.checkpoint), []
        for method, width in itertools.product(methods, bits):
            groups = group or ENTRIES[precision_of_bits(width)].group
            calibration = text if method == "awq" else ""
            info = SetInfo(bits=width, group=groups, method=method, model=digest, calibration=calibration)
            made.append(SetTarget(self.config.folder, info))
        return made

    def make(self, targets: Sequence[SetTarget]) -> None:
        """Make all targets layer by layer: the calibration text runs through each layer once.

        Raises ModelError, OSError.
        """
        progress = ProgressLine(", ".join(t.name for t in targets), self.config.num_layers, "layers")
        tokens = torch.empty(0, 0, dtype=torch.int64)
        if self.calibration and any(t.info.method == "awq" for t in targets):
            tokens = self.calibration.tokens
        dtype, longest = torch.float32 if self.device.type == "cpu" else self.config.dtype, tokens.shape[1]
        model = LayerwiseModel(
            self.config, self.checkpoint, dtype=dtype, device=self.device, window_tokens=longest
        )
        windows = [model.embed(window) for window in tokens]
        for index in range(self.config.num_layers):
            tensors = model.tensors(index)
            missing = [t for t in targets if t.unfinished(self.config, index) is None]
            is_observed = any(t.info.method == "awq" for t in missing)
            moments = _run_windows(model, build_layer(self.config, index, *tensors), windows, is_observed)
            for target in missing:
                inputs = moments if target.info.method == "awq" else {}
                matrices = quantise_layer(self.config, tensors, inputs, target.info)
                _write(target.part(index), target.info, [(index, matrices)])
            progress.advance()
        for target in targets:
            self._join(target)

    def _join(self, target: SetTarget) -> None:
        def layers() -> Iterator[tuple[int, LayerMatrices]]:
            for layer in range(self.config.num_layers):
                found = target.unfinished(self.config, layer)
                if found is None:
                    raise ModelError(f"{target.part(layer)}: missing or damaged; run the command again")
                yield layer, found

        _write(target.path, target.info, layers())
        shutil.rmtree(target.parts)
        if not any(target.parts.parent.iterdir()):
            target.parts.parent.rmdir()
        say(f"{target.path}: {target.path.stat().st_size / 1e6:.1f} MB")


def quantise_layer(
    config: ModelConfig, tensors: Sequence[Tensors], moments: dict[str, Moments], info: SetInfo
) -> LayerMatrices:
    """Quantise a layer, whose tensors are those of its attention and its FFN.

    moments: of what each of `INPUTS` reads, for activation-aware scales; empty for round-to-nearest.
    """
    full = {name: tensor for half in tensors for name, tensor in half.items()}
    made: LayerMatrices = {}
    for product, names in matrices_by_input(config).items():
        matrices = dict(zip(names, dense_matrices(config, product, full), strict=True))
        if moments:
            made |= activation_aware(matrices, moments[product], info.bits, info.group)
        else:
            made |= {name: round_to_nearest(w, info.bits, info.group) for name, w in matrices.items()}
    return made


def _run_windows(
    model: LayerwiseModel, layer: Layer, windows: list[torch.Tensor], is_observed: bool
) -> dict[str, Moments]:
    """Run the windows through a layer, in place. Return the moments of its inputs if `is_observed`."""
    moments = {product: Moments() for product in INPUTS} if is_observed else {}
    if is_observed:
        layer = layer.observed(lambda product, x: moments[product].add(x))
    for i, x in enumerate(windows):
        windows[i] = model.run(layer, x)
    return moments


def _write(path: Path, info: SetInfo, layers: Iterable[tuple[int, LayerMatrices]]) -> None:
    named = ((matrix_name(layer, name), each) for layer, made in layers for name, each in made.items())
    write_set(path, info, named)
