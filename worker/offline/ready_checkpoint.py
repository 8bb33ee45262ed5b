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
    """The format. group 0: one scale for all inputs. zero_offset: what is added to a stored zero."""

    method: Literal["awq", "gptq"]
    bits: int
    group: int
    zero_offset: int


def read_format(folder: Path) -> ReadyFormat:
    """Read the format of a ready checkpoint.

    Raises ModelError: no checkpoint, not quantised, or in a way that is not supported, by name.
    """
    said = _quantization_config(folder)
    method, bits, group = said.get("quant_method", "unnamed"), said.get("bits", 0), said.get("group_size")
    if method not in ("awq", "gptq"):
        raise _unsupported(folder, f"quant_method {method!r}", "awq and gptq")
    if bits not in ((4,) if method == "awq" else (4, 8)):
        raise _unsupported(folder, f"{method} with bits {bits!r}", "4 (and 8 with gptq)")
    if not isinstance(group, int) or not (group == -1 or (group > 0 and group % GROUP_STEP == 0)):
        raise _unsupported(folder, f"group_size {group!r}", f"-1 and multiples of {GROUP_STEP}")
    if method == "awq":
        version, zero_point = said.get("version", "gemm"), said.get("zero_point", True)
        if str(version).lower() != "gemm" or not zero_point:
            what = f"AWQ version {version!r}, zero_point {zero_point!r}"
            raise _unsupported(folder, what, "gemm with zeros")
        return ReadyFormat("awq", int(bits), max(group, 0), 0)
    packing = said.get("checkpoint_format", "gptq")
    if packing not in ("gptq", "gptq_v2"):
        raise _unsupported(folder, f"GPTQ checkpoint_format {packing!r}", "gptq and gptq_v2")
    return ReadyFormat("gptq", int(bits), max(group, 0), 1 if packing == "gptq" else 0)


def read_matrix(
    ready: CheckpointWeights, form: ReadyFormat, name: str, shape: tuple[int, int], group: int
) -> QuantizedMatrix:
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
    codes, scales, zeros = (each.T.contiguous() for each in (codes, scales, zeros.to(torch.uint8)))
    return pack_matrix(codes, scales, zeros, form.bits, group, None)


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
        what = f"{name} with groups in order of activations (desc_act)"
        raise _unsupported(ready.folder, what, "desc_act false")


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
    form, ready = read_format(folder), CheckpointWeights(folder)
    precision = precision_of_bits(form.bits)
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
        """Read all of MATRICES; what is folded into norms becomes their input_scale. Raises ModelError."""
        made = {
            matrix: read_matrix(self.ready, self.form, matrix_name(self.layer, matrix), shape, self.group)
            for matrix, shape in matrix_shapes(self.config).items()
        }
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
