"""Checkpoints that others quantised (`worker.model.ready_weights`), made to sets of the full model.

AWQ (Lin et al. 2024) divides the inputs of a product by scales that are folded into what makes them. Here
they become `input_scale`, so that norms, keys and values stay the full model's and a layer can be swapped
alone:

- q, k, v, gate and up read a norm's output: input_scale = norm of the AWQ model / norm of the full one.
- o reads what v makes: each row of v is scaled back to the full model's (least squares), and o's input_scale
  takes the factor. An error of the estimate cancels between the two.
- down reads what up makes; both belong to the FFN and are swapped together: they stay as they are.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bus.families import FAMILIES, LLAMA
from bus.precisions import ENTRIES
from worker.model.config import ModelConfig, ModelError
from worker.model.quantized_sets import (
    INPUTS,
    QuantizedMatrix,
    SetInfo,
    common_order,
    matrix_name,
    matrix_shapes,
    set_path,
    write_set,
)
from worker.model.ready_format import ReadyFormat, parse_format
from worker.model.ready_weights import read_matrix
from worker.model.sources import CheckpointWeights, checkpoint_digest
from worker.offline.progress import ProgressLine

_REMEDY = "`instar quantize` can make the set from the full model"


def read_format(folder: Path) -> ReadyFormat:
    """Read the format of a ready checkpoint.

    Raises ModelError: no checkpoint, not quantised, or in a way that is not supported, by name.
    """
    try:
        return parse_format(_quantization_config(folder))
    except ValueError as error:
        raise ModelError(f"{folder}: {error}; {_REMEDY}") from error


def _quantization_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        said = json.loads(path.read_text(encoding="utf-8")).get("quantization_config")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(said, dict):
        raise ModelError(f"{path}: no quantization_config in it: not a quantised checkpoint")
    return said


_MAX_ERROR = 0.5  # relative error of weights: 4 bits make 0.1-0.2, another model over 1
_FOLDED = 0.06  # a row of v whose length differs by more was scaled, not rounded (64 inputs: 4 %)

_NORM_OF = {"qkv": "input_layernorm", "gate_up": "post_attention_layernorm"}


def convert_checkpoint(
    config: ModelConfig, checkpoint: CheckpointWeights, folder: Path, group: int = 0
) -> Path:
    """Convert the ready checkpoint in `folder` to a set of the model; return its path.

    `group` is used if the checkpoint has one scale for all inputs. Raises ModelError: a format, packing or
    order of inputs that is not supported, tensors missing or of other shapes, another model's weights.
    """
    if config.names != LLAMA:
        there_are = ", ".join(name for name, family in FAMILIES.items() if family.names == LLAMA)
        raise ModelError(
            f"{config.folder}: a ready checkpoint of {config.architecture} cannot be converted; those of"
            f" {there_are} can; make a set with `instar quantize` instead"
        )
    form, ready = read_format(folder), CheckpointWeights(folder)
    precision = form.precision
    group = form.group or group or ENTRIES[precision].group
    digest = checkpoint_digest(config, checkpoint)
    info = SetInfo(bits=form.bits, group=group, method=form.method, model=digest)
    path = set_path(config.folder, precision, form.method)
    progress = ProgressLine(f"{precision} {form.method}", config.num_layers, "layers")
    tensors: dict[str, QuantizedMatrix] = {}
    for layer in range(config.num_layers):
        taken = _Layer(config, checkpoint, ready, form, layer, group).matrices()
        tensors |= {matrix_name(layer, name): matrix for name, matrix in taken.items()}
        progress.advance()
    write_set(path, info, iter(tensors.items()))
    return path


@dataclass
class _Layer:
    """One layer of a ready checkpoint beside the full model's."""

    config: ModelConfig
    full: CheckpointWeights
    ready: CheckpointWeights
    form: ReadyFormat
    layer: int
    group: int

    def matrices(self) -> dict[str, QuantizedMatrix]:
        """Read all matrices; what is folded into norms becomes their input_scale. Raises ModelError."""
        made = {
            matrix: read_matrix(self.ready, self.form, matrix_name(self.layer, matrix), shape, self.group)
            for matrix, shape in matrix_shapes(self.config).items()
        }
        for names in INPUTS.values():
            common_order({name: made[name].input_order for name in names}, self.ready.folder)
        for product, norm in _NORM_OF.items():
            name = f"model.layers.{self.layer}.{norm}.weight"
            full, ready = self.full.read(name).float(), self.ready.read(name).float()
            scale = torch.where(full == 0, 1.0, ready / full)
            if not bool((scale == 1).all()):
                made |= {matrix: replace(made[matrix], input_scale=scale) for matrix in INPUTS[product]}
        if self.form.method == "awq":
            self._unfold_values(made)
        self._check(made)
        return made

    def _unfold_values(self, made: dict[str, QuantizedMatrix]) -> None:
        """Scale v's rows back to the full model's, and let o's input_scale take the factor."""
        v, o = "self_attn.v_proj", "self_attn.o_proj"
        factor = self._row_factor(v, made[v])
        if float((factor - 1).abs().max()) > _FOLDED:
            made[v] = replace(made[v], scales=(made[v].scales.float() * (1 / factor)[:, None]).half())
            heads = factor.unflatten(0, (self.config.num_kv_heads, -1))
            queries = self.config.num_heads // self.config.num_kv_heads
            made[o] = replace(made[o], input_scale=heads.repeat_interleave(queries, 0).flatten())

    def _row_factor(self, name: str, matrix: QuantizedMatrix) -> torch.Tensor:
        """Return how much larger each row is than the full model's: <ready, full> / <full, full>."""
        full, rows = self._full_weight(name), matrix.dense()
        return ((rows * full).sum(1) / (full * full).sum(1).clamp(min=1e-30)).where(full.any(1), 1.0)

    def _full_weight(self, name: str) -> torch.Tensor:
        return self.full.read(f"{matrix_name(self.layer, name)}.weight").float()

    def _check(self, made: dict[str, QuantizedMatrix]) -> None:
        """Raise ModelError unless every matrix is near the full model's, but for scales from up to down."""
        up = self._row_factor("mlp.up_proj", made["mlp.up_proj"]).clamp(min=1e-6)
        for name, matrix in made.items():
            dense, full = matrix.dense(), self._full_weight(name)
            if name == "mlp.up_proj":
                dense /= up[:, None]
            if name == "mlp.down_proj":
                dense *= up
            error = float((dense - full).norm() / full.norm().clamp(min=1e-30))
            if not error < _MAX_ERROR:
                raise ModelError(
                    f"{self.ready.folder}: {matrix_name(self.layer, name)} is {100 * error:.0f} % off the"
                    f" weights of {self.config.folder}: it was made from another model"
                )
