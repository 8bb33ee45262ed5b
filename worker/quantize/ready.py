"""Checkpoints that others quantised, in Hugging Face's format: AWQ (AutoAWQ's gemm packing) and GPTQ.

===========  ======================  =================================  =====================================
tensor       dtype and shape         AWQ                                GPTQ
===========  ======================  =================================  =====================================
qweight      int32                   [K, N / 8], eight outputs a word,  [K / n, N], n = 32 / bits inputs a
                                     in the order 0 2 4 6 1 3 5 7       word, in order
qzeros       int32 [K / g, N * b/32] packed like qweight                in order, one less than the zero
                                                                        (as it is, in format "gptq_v2")
scales       float16 [K / g, N]
g_idx        int32 [K]               not there                          the group of each input
===========  ======================  =================================  =====================================

Both: w[k, n] = scales * (code - zero). AWQ (Lin et al. 2024) divides the inputs of a product by scales that
are folded into what makes them. Here they become `input_scale`, so that norms, keys and values stay the full
model's and a layer can be swapped alone:

- q, k, v, gate and up read a norm's output: input_scale = norm of the AWQ model / norm of the full one.
- o reads what v makes: each row of v is scaled back to the full model's (least squares), and o's input_scale
  takes the factor. Whatever the estimate is off by cancels between the two.
- down reads what up makes; both belong to the FFN and are swapped together: they stay as they are.
"""

from __future__ import annotations

from pathlib import Path

import torch

from kernels.packing import TILE, pack
from worker.model.config import ModelConfig
from worker.model.errors import ModelError
from worker.model.sources import Checkpoint
from worker.quantize.fingerprint import model_fingerprint
from worker.quantize.progress import Progress
from worker.quantize.ready_format import ReadyFormat, read_format, read_groups
from worker.quantize.sets import (
    INPUTS,
    MATRICES,
    QuantizedMatrix,
    SetInfo,
    matrix_name,
    matrix_shapes,
    set_path,
    write_set,
)

_UNLIKE = 0.5  # relative error of weights: 4 bits make 0.1-0.2, another model more than 1
_FOLDED = 0.06  # a row of v that is longer or shorter by more was scaled, not rounded (64 inputs: 4 %)

_NORM_OF = {"qkv": "input_layernorm", "gate_up": "post_attention_layernorm"}


def take_over(config: ModelConfig, checkpoint: Checkpoint, folder: Path, group: int) -> Path:
    """Write the set that the ready checkpoint in `folder` holds; `group` is used where it has one scale for
    all inputs. Raises ModelError: a format, packing or order of inputs that is not supported, tensors missing
    or of other shapes, another model's weights."""
    form, ready = read_format(folder), Checkpoint(folder)
    info = SetInfo(
        bits=form.bits,
        group=form.group or group,
        method=form.method,
        model=model_fingerprint(config, checkpoint),
    )
    path = set_path(config.folder, f"int{form.bits}", form.method)
    progress = Progress(f"int{form.bits} {form.method}", config.num_layers, "layers")
    tensors: dict[str, QuantizedMatrix] = {}
    for layer in range(config.num_layers):
        taken = _Layer(config, checkpoint, ready, form, layer, info.group).matrices()
        tensors |= {matrix_name(layer, name): matrix for name, matrix in taken.items()}
        progress.advance()
    write_set(path, info, iter(tensors.items()))
    return path


class _Layer:
    """One layer of a ready checkpoint beside the full model's."""

    def __init__(
        self,
        config: ModelConfig,
        full: Checkpoint,
        ready: Checkpoint,
        form: ReadyFormat,
        layer: int,
        group: int,
    ) -> None:
        self._config, self._full, self._ready, self._layer = config, full, ready, layer
        self._bits, self._group, self._is_awq = form.bits, group, form.method == "awq"
        shapes = matrix_shapes(config)
        self._groups = {
            m: read_groups(ready, form, matrix_name(layer, m), shapes[m], group) for m in MATRICES
        }

    def matrices(self) -> dict[str, QuantizedMatrix]:
        scales = self._input_scales()
        made = {name: self._matrix(name, scales.get(name)) for name in MATRICES}
        self._check(made)
        return made

    def _input_scales(self) -> dict[str, torch.Tensor]:
        """Of each matrix that needs one; v's rows are scaled back on the way."""
        found: dict[str, torch.Tensor] = {}
        for reads, norm in _NORM_OF.items():
            scale = self._norm_ratio(norm)
            if not bool((scale == 1).all()):
                found |= dict.fromkeys(INPUTS[reads], scale)
        v, o = "self_attn.v_proj", "self_attn.o_proj"
        if not self._is_awq:
            return found
        factor = self._row_factor(v, found.get(v))
        if float((factor - 1).abs().max()) > _FOLDED:
            self._groups[v] = self._groups[v].scaled(1 / factor)
            heads = factor.unflatten(0, (self._config.num_kv_heads, -1))
            queries = self._config.num_heads // self._config.num_kv_heads
            found[o] = heads.repeat_interleave(queries, 0).flatten()
        return found

    def _norm_ratio(self, norm: str) -> torch.Tensor:
        name = f"model.layers.{self._layer}.{norm}.weight"
        full, ready = self._full.read(name).float(), self._ready.read(name).float()
        return torch.where(full == 0, 1.0, ready / full)

    def _row_factor(self, name: str, input_scale: torch.Tensor | None) -> torch.Tensor:
        """How much larger each row is than the full model's: <ready, full> / <full, full>."""
        full = self._full_weight(name)
        rows = self._matrix(name, input_scale).dense()
        return ((rows * full).sum(1) / (full * full).sum(1).clamp(min=1e-30)).where(full.any(1), 1.0)

    def _full_weight(self, name: str) -> torch.Tensor:
        return self._full.read(f"{matrix_name(self._layer, name)}.weight").float()

    def _matrix(self, name: str, input_scale: torch.Tensor | None) -> QuantizedMatrix:
        groups = self._groups[name]
        padding = -groups.codes.shape[1] % TILE
        codes = torch.cat([groups.codes, groups.zeros[:, -1:].expand(-1, padding)], 1)
        return QuantizedMatrix(
            codes=pack(codes.clamp(max=2**self._bits - 1), self._bits),
            scales=groups.scales,
            zeros=groups.zeros,
            input_scale=input_scale,
            bits=self._bits,
            group=self._group,
            num_inputs=groups.codes.shape[1],
        )

    def _check(self, made: dict[str, QuantizedMatrix]) -> None:
        """Raises ModelError unless every matrix is near the full model's, but for scales from up to down."""
        up = self._row_factor("mlp.up_proj", made["mlp.up_proj"].input_scale).clamp(min=1e-6)
        for name, matrix in made.items():
            dense, full = matrix.dense(), self._full_weight(name)
            if name == "mlp.up_proj":
                dense /= up[:, None]
            if name == "mlp.down_proj":
                dense *= up
            error = float((dense - full).norm() / full.norm().clamp(min=1e-30))
            if not error < _UNLIKE:
                raise ModelError(
                    f"{self._ready.folder}: {matrix_name(self._layer, name)} is {100 * error:.0f} % off the"
                    f" weights of {self._config.folder}: it was made from another model"
                )
