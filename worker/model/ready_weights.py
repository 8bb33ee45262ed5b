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

Both: w[k, n] = scales * (code - zero). With desc_act, GPTQ quantises inputs in the order of their
activations, so that the inputs of a group lie anywhere. They are put in the order of their groups here, once,
and `QuantizedMatrix.input_order` says which input is where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bus.precisions import ENTRIES
from worker.model.config import ModelConfig, ModelError
from worker.model.layout import CheckpointTensor
from worker.model.mxfp4 import Mxfp4Checkpoint
from worker.model.quantized_sets import (
    INPUTS,
    MATRICES,
    QuantizedMatrix,
    common_order,
    matrix_name,
    matrix_shapes,
    pack_matrix,
)
from worker.model.ready_format import ReadyFormat
from worker.model.sources import PIECE_ELEMENTS, CheckpointWeights
from worker.model.sparse_weights import SparseCheckpoint

_WORD = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word is output _AWQ_ORDER[i] of its eight
_WEIGHT = ".weight"
_DTYPES = {"qweight": ("I32",), "qzeros": ("I32",), "g_idx": ("I32",), "scales": ("F16", "BF16", "F32")}


class QuantizedCheckpoint(CheckpointWeights):
    """A checkpoint whose layers' matrices are quantised. Their weights read as what they stand for."""

    def __init__(self, config: ModelConfig, form: ReadyFormat) -> None:
        """Find each tensor's file. Raises ModelError: no checkpoint, or a missing shard."""
        super().__init__(config.folder)
        self.form = form
        self.group = form.group or ENTRIES[form.precision].group
        shapes = matrix_shapes(config)
        first, end = config.first_layer, config.first_layer + config.num_layers
        self._shapes = {
            matrix_name(layer, matrix): shapes[matrix] for layer in range(first, end) for matrix in MATRICES
        }

    def check(self, sources: Iterable[CheckpointTensor]) -> None:
        """Check all tensors, and that the matrices of one product order their inputs alike."""
        plain: list[CheckpointTensor] = []
        layers: dict[str, set[str]] = {}
        for source in sources:
            name = source.tensor.removesuffix(_WEIGHT)
            if name not in self._shapes:
                plain.append(source)
                continue
            shapes = stored_shapes(self.form, self._shapes[name], self.has(f"{name}.g_idx"))
            for ending, shape in shapes.items():
                self.check_stored(f"{name}.{ending}", shape, _DTYPES[ending])
            layer, _, matrix = name.partition(".layers.")[2].partition(".")
            layers.setdefault(layer, set()).add(matrix)
        super().check(plain)
        known = {source.tensor for source in plain}
        for layer, matrices in layers.items():
            for product in INPUTS.values():
                names = [matrix_name(int(layer), matrix) for matrix in product if matrix in matrices]
                orders = {name: input_order(self, self.form, name, self._shapes[name][1]) for name in names}
                if orders:
                    common_order(orders, self.folder)
                self._check_biases({f"{name}.bias" for name in names} - known)

    def _unknown_tensors(self, wanted: set[str]) -> list[str]:
        found = super()._unknown_tensors(wanted)
        return [tensor for tensor in found if tensor.rpartition(".")[0] not in self._shapes]

    def _check_biases(self, unknown: set[str]) -> None:
        """Check biases that the model does not have: some tools write one of zeros to every matrix."""
        for name in sorted(unknown):
            if self.has(name) and bool(self.read(name).any()):
                raise ModelError(f"{self.folder}: {name} is a bias that models of this family do not have")

    def matrix(self, name: str, pause: Callable[[], object] = lambda: None) -> QuantizedMatrix:
        """Read one matrix; `pause` as in `read_matrix`. Raises ModelError."""
        return read_matrix(self, self.form, name, self._shapes[name], self.group, pause)

    @contextmanager
    def opened(self, tensor: str, pause: Callable[[], object] = lambda: None) -> Iterator[Any]:
        """Yield a tensor to take rows of; of a quantised weight float32 [N, K]. Raises ModelError."""
        name = tensor.removesuffix(_WEIGHT)
        if name in self._shapes and tensor.endswith(_WEIGHT):
            yield self.matrix(name, pause).dense()
        else:
            with super().opened(tensor, pause) as stored:
                yield stored

    def stored(self, source: CheckpointTensor) -> Iterator[tuple[str, int]]:
        name = source.tensor.removesuffix(_WEIGHT)
        if name not in self._shapes:
            yield from super().stored(source)
            return
        for ending, shape in stored_shapes(self.form, self._shapes[name], self.form.is_ordered).items():
            yield f"{name}.{ending}", shape[0]


def open_checkpoint(config: ModelConfig) -> CheckpointWeights:
    """Open the checkpoint in a model's folder, quantised or not. Raises ModelError."""
    if config.has_mxfp4_experts:
        return Mxfp4Checkpoint(config)
    if config.has_packed_zeros:
        return SparseCheckpoint(config.folder)
    return QuantizedCheckpoint(config, config.ready) if config.ready else CheckpointWeights(config.folder)


def stored_shapes(form: ReadyFormat, shape: tuple[int, int], has_order: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a matrix of N x K = shape, by the endings of their names."""
    outputs, inputs = shape
    num_groups = -(-inputs // form.group) if form.group else 1
    per_word = _WORD // form.bits
    packed = (inputs, outputs // per_word) if form.method == "awq" else (inputs // per_word, outputs)
    found: dict[str, tuple[int, ...]] = {
        "qweight": packed,
        "qzeros": (num_groups, outputs // per_word),
        "scales": (num_groups, outputs),
    }
    return found | ({"g_idx": (inputs,)} if has_order or form.is_ordered else {})


def read_matrix(
    ready: CheckpointWeights,
    form: ReadyFormat,
    name: str,
    shape: tuple[int, int],
    group: int,
    pause: Callable[[], object] = lambda: None,
) -> QuantizedMatrix:
    """Read the matrix `name` of N x K = shape in groups of `group` inputs. Raises ModelError.

    pause: called after each PIECE_ELEMENTS words, which the disk reads when they are unpacked.
    """
    shapes = stored_shapes(form, shape, has_order=False)
    words = _read(ready, f"{name}.qweight", shapes["qweight"], torch.int32)
    zero_words = _read(ready, f"{name}.qzeros", shapes["qzeros"], torch.int32)
    scales = _read(ready, f"{name}.scales", shapes["scales"], None).half()
    if form.method == "awq":
        codes, zeros = (_unpack(w, form.bits, 1, _AWQ_ORDER, pause) for w in (words, zero_words))
    else:
        in_order = tuple(range(_WORD // form.bits))
        codes = _unpack(words, form.bits, 0, in_order, pause)
        zeros = _unpack(zero_words, form.bits, 1, in_order, pause)
    order = input_order(ready, form, name, shape[1])
    if order is not None:
        codes = codes[order.long()]
    if not form.group:
        scales, zeros = (x.expand(-(-shape[1] // group), -1) for x in (scales, zeros))
    # In GPTQ's first format a stored 15 means 16, and a stored 255 means 256, which does not fit in a byte.
    zeros = zeros.int() + form.zero_offset
    if int(zeros.max()) > 255:
        raise ModelError(
            f"{ready.folder}: zero {int(zeros.max())} of {name} is not supported; at most 255 is"
        )
    codes, scales, zeros = (each.T.contiguous() for each in (codes, scales, zeros.to(torch.uint8)))
    return pack_matrix(codes, scales, zeros, form.bits, group, None, order)


def input_order(ready: CheckpointWeights, form: ReadyFormat, name: str, inputs: int) -> torch.Tensor | None:
    """Return the inputs, int32 [K], in the order of their groups; None if they lie so.

    Raises ModelError: no groups where desc_act needs them, groups of other sizes, an order without desc_act.
    """
    if form.method == "awq" or not form.group or not (form.is_ordered or ready.has(f"{name}.g_idx")):
        return None
    groups = _read(ready, f"{name}.g_idx", (inputs,), torch.int32).long()
    in_order = torch.arange(inputs) // form.group
    sorted_groups, order = groups.sort(stable=True)
    if not torch.equal(sorted_groups, in_order):
        raise ModelError(
            f"{ready.folder}: {name}.g_idx does not put {form.group} inputs into each group (group_size)"
        )
    if not form.is_ordered and not torch.equal(groups, in_order):
        raise ModelError(
            f"{ready.folder}: {name}.g_idx has groups in the order of activations, and config.json says"
            " desc_act false"
        )
    return order.int() if form.is_ordered else None


def _unpack(
    words: torch.Tensor, bits: int, dim: int, order: tuple[int, ...], pause: Callable[[], object]
) -> torch.Tensor:
    """Unpack int32 words to uint8 codes along `dim`; piece i of a word is its code order[i]."""
    made = []
    for some in words.split(max(1, PIECE_ELEMENTS // words.shape[1])):
        pieces = [some >> bits * i & (2**bits - 1) for i in range(len(order))]
        in_order = [pieces[order.index(i)] for i in range(len(order))]
        made.append(torch.stack(in_order, dim + 1).flatten(dim, dim + 1).to(torch.uint8))
        pause()
    return torch.cat(made)


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
