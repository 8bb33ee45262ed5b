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
  takes the factor. An error of the estimate cancels between the two.
- down reads what up makes; both belong to the FFN and are swapped together: they stay as they are.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from bus.precisions import ENTRIES, precision_of_bits
from kernels.quantized import GROUP_STEP
from worker.model.config import ModelConfig, ModelError
from worker.model.quantized_sets import (
    INPUTS,
    MATRICES,
    QuantizedMatrix,
    SetInfo,
    matrix_name,
    matrix_shapes,
    pack_matrix,
    set_path,
    write_set,
)
from worker.model.sources import CheckpointWeights, checkpoint_digest
from worker.offline.progress import ProgressLine

_WORD = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word is output _AWQ_ORDER[i] of its eight
_REMEDY = "`instar quantize` can make the set from the full model"


@dataclass(frozen=True, slots=True)
class ReadyFormat:
    """The format of a ready checkpoint.

    group 0: one scale for all inputs. zero_offset: what is added to a stored zero.
    """

    method: Literal["awq", "gptq"]
    bits: int
    group: int
    zero_offset: int


@dataclass(frozen=True, slots=True)
class UnpackedMatrix:
    """codes uint8 [N, K], scales float16 [N, groups], zeros uint8 [N, groups]."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor

    def scaled(self, factor: torch.Tensor) -> UnpackedMatrix:
        """Return the matrix with row n multiplied by factor[n]."""
        return replace(self, scales=(self.scales.float() * factor[:, None]).half())


def read_format(folder: Path) -> ReadyFormat:
    """Read the format of a ready checkpoint.

    Raises ModelError: no checkpoint, not quantised, or in a way that is not supported, by name.
    """
    said = _quantization_config(folder)
    method, bits = said.get("quant_method", "unnamed"), said.get("bits", 0)
    group = said.get("group_size")
    if method not in ("awq", "gptq"):
        raise _unsupported(folder, f"quant_method {method!r}", "awq and gptq")
    if bits not in ((4,) if method == "awq" else (4, 8)):
        raise _unsupported(folder, f"{method} with bits {bits!r}", "4 (and 8 with gptq)")
    if not isinstance(group, int) or not (group == -1 or (group > 0 and group % GROUP_STEP == 0)):
        raise _unsupported(folder, f"group_size {group!r}", f"-1 and multiples of {GROUP_STEP}")
    if method == "awq":
        if str(said.get("version", "gemm")).lower() != "gemm" or not said.get("zero_point", True):
            raise _unsupported(
                folder,
                f"AWQ version {said.get('version')!r}, zero_point {said.get('zero_point')!r}",
                "gemm with zeros",
            )
        return ReadyFormat("awq", int(bits), max(group, 0), 0)
    packing = said.get("checkpoint_format", "gptq")
    if packing not in ("gptq", "gptq_v2"):
        raise _unsupported(folder, f"GPTQ checkpoint_format {packing!r}", "gptq and gptq_v2")
    return ReadyFormat("gptq", int(bits), max(group, 0), 1 if packing == "gptq" else 0)


def read_groups(
    ready: CheckpointWeights, form: ReadyFormat, name: str, shape: tuple[int, int], group: int
) -> UnpackedMatrix:
    """Read the matrix `name` of N x K = shape in groups of `group` inputs. Raises ModelError."""
    outputs, inputs = shape
    num_groups = -(-inputs // form.group) if form.group else 1
    per_word = _WORD // form.bits
    packed = (inputs, outputs // per_word) if form.method == "awq" else (inputs // per_word, outputs)
    words = _read(ready, f"{name}.qweight", packed, torch.int32)
    zero_words = _read(ready, f"{name}.qzeros", (num_groups, outputs // per_word), torch.int32)
    scales = _read(ready, f"{name}.scales", (num_groups, outputs), None).half()
    if form.method == "awq":
        codes, zeros = (_unpack(w, form.bits, 1, _AWQ_ORDER) for w in (words, zero_words))
    else:
        order = tuple(range(per_word))
        codes, zeros = _unpack(words, form.bits, 0, order), _unpack(zero_words, form.bits, 1, order)
        _check_order(ready, name, inputs, form.group or inputs)
    if not form.group:
        scales, zeros = (x.expand(-(-inputs // group), -1) for x in (scales, zeros))
    # In GPTQ's first format a stored 15 means 16, and a stored 255 means 256, which does not fit in a byte.
    zeros = zeros.int() + form.zero_offset
    if int(zeros.max()) > 255:
        raise _unsupported(ready.folder, f"zero {int(zeros.max())} of {name}", "at most 255")
    return UnpackedMatrix(codes.T.contiguous(), scales.T.contiguous(), zeros.T.to(torch.uint8).contiguous())


def _unpack(words: torch.Tensor, bits: int, dim: int, order: tuple[int, ...]) -> torch.Tensor:
    """Unpack int32 words to uint8 codes along `dim`; piece i of a word is its code order[i]."""
    pieces = [words >> bits * i & (2**bits - 1) for i in range(len(order))]
    in_order = [pieces[order.index(i)] for i in range(len(order))]
    return torch.stack(in_order, dim + 1).flatten(dim, dim + 1).to(torch.uint8)


def _check_order(ready: CheckpointWeights, name: str, inputs: int, group: int) -> None:
    """Check that groups are runs of neighbouring inputs (no act-order, desc_act). Raises ModelError."""
    if not ready.has(f"{name}.g_idx"):
        return
    groups = _read(ready, f"{name}.g_idx", (inputs,), torch.int32)
    if not torch.equal(groups.long(), torch.arange(inputs) // group):
        raise _unsupported(
            ready.folder, f"{name} with groups in order of activations (desc_act)", "desc_act false"
        )


def _read(
    ready: CheckpointWeights, name: str, shape: tuple[int, ...], dtype: torch.dtype | None
) -> torch.Tensor:
    tensor = ready.read(name)
    if tuple(tensor.shape) != shape or (dtype is not None and tensor.dtype != dtype):
        raise ModelError(
            f"{ready.folder}: {name} is {tensor.dtype} {list(tensor.shape)}; a checkpoint of this model has"
            f" {list(shape)}"
        )
    return tensor


def _quantization_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        said = json.loads(path.read_text(encoding="utf-8")).get("quantization_config")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(said, dict):
        raise ModelError(f"{path}: no quantization_config in it: not a quantised checkpoint")
    return said


def _unsupported(folder: Path, what: str, supported: str) -> ModelError:
    return ModelError(f"{folder}: {what} is not supported; supported: {supported}; {_REMEDY}")


_MAX_ERROR = 0.5  # of weights, relative: 4 bits make 0.1-0.2, another model more than 1
_FOLDED = 0.06  # a row of v whose length differs by more was scaled, not rounded (64 inputs: 4 %)

_NORM_OF = {"qkv": "input_layernorm", "gate_up": "post_attention_layernorm"}


def convert_checkpoint(
    config: ModelConfig, checkpoint: CheckpointWeights, folder: Path, group: int = 0
) -> Path:
    """Convert the ready checkpoint in `folder` to a set of the model; return its path.

    `group` is used if the checkpoint has one scale for all inputs. Raises ModelError: a format, packing or
    order of inputs that is not supported, tensors missing or of other shapes, another model's weights.
    """
    form, ready = read_format(folder), CheckpointWeights(folder)
    precision = precision_of_bits(form.bits)
    info = SetInfo(
        bits=form.bits,
        group=form.group or group or ENTRIES[precision].group,
        method=form.method,
        model=checkpoint_digest(config, checkpoint),
    )
    path = set_path(config.folder, precision, form.method)
    progress = ProgressLine(f"{precision} {form.method}", config.num_layers, "layers")
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
        full: CheckpointWeights,
        ready: CheckpointWeights,
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
        """Return the scale of each matrix that needs one; scale v's rows back on the way."""
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
        """Return how much larger each row is than the full model's: <ready, full> / <full, full>."""
        full = self._full_weight(name)
        rows = self._matrix(name, input_scale).dense()
        return ((rows * full).sum(1) / (full * full).sum(1).clamp(min=1e-30)).where(full.any(1), 1.0)

    def _full_weight(self, name: str) -> torch.Tensor:
        return self._full.read(f"{matrix_name(self._layer, name)}.weight").float()

    def _matrix(self, name: str, input_scale: torch.Tensor | None) -> QuantizedMatrix:
        groups = self._groups[name]
        return pack_matrix(groups.codes, groups.scales, groups.zeros, self._bits, self._group, input_scale)

    def _check(self, made: dict[str, QuantizedMatrix]) -> None:
        """Check that every matrix is near the full model's, but for scales from up to down.

        Raises ModelError.
        """
        up = self._row_factor("mlp.up_proj", made["mlp.up_proj"].input_scale).clamp(min=1e-6)
        for name, matrix in made.items():
            dense, full = matrix.dense(), self._full_weight(name)
            if name == "mlp.up_proj":
                dense /= up[:, None]
            if name == "mlp.down_proj":
                dense *= up
            error = float((dense - full).norm() / full.norm().clamp(min=1e-30))
            if not error < _MAX_ERROR:
                raise ModelError(
                    f"{self._ready.folder}: {matrix_name(self._layer, name)} is {100 * error:.0f} % off the"
                    f" weights of {self._config.folder}: it was made from another model"
                )
