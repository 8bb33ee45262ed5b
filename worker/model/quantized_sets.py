"""Set files of quantised matrices: written whole, read matrix by matrix, every byte checked.

A set is MODEL/instar/{precision}-{method}.safetensors; method awq, gptq or rtn. For every matrix of every
layer, named as in a Llama's checkpoint without ".weight" (for example `model.layers.3.mlp.down_proj`; fused
tensors are in parts, and rows lie as `worker.model.layout` loads them), with N outputs and K inputs:

=================  ===========================  ==========================================================
tensor             dtype and shape              meaning
=================  ===========================  ==========================================================
{name}.codes       uint8 [N, Kp * bits / 8]     packed as `kernels.packing` says; Kp is K rounded up to a
                                                multiple of 64; codes past K are padding
{name}.scales      float16 [N, ceil(K/group)]   w[n, k] = scale * (code - zero)
{name}.zeros       uint8 [N, ceil(K/group)]
{name}.input_scale float32 [K], may be missing  inputs are multiplied by it first
{name}.input_order int32 [K], may be missing    column k of codes is of input input_order[k]
=================  ===========================  ==========================================================

Groups begin at input 0 and the last may be short. q, k and v of a layer have the same input_scale and the
same input_order, and so do gate and up, since each of these products reads one input. Metadata: `format`,
`bits`, `group`, `method`, `model` (`checkpoint_digest` of the checkpoint), `calibration` (SHA-256 of its
tokens, empty without) and `crc32` (JSON, of each matrix's tensors in the order above).
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from bus.precisions import BITS
from kernels.packing import TILE, pack, packed_size, unpack
from kernels.quantized import quantize_rtn
from worker.model.config import ModelConfig, ModelError

Method = Literal["awq", "gptq", "rtn"]
METHODS: tuple[Method, ...] = get_args(Method)  # the better first

FORMAT = "1"
FOLDER = "instar"  # inside the model's
# An open set is mapped: the disk reads what the checksum reads, so many bytes between two pauses.
_PIECE_BYTES = 1 << 22

# The matrices of a layer by the product that reads one input; matrices of one product share an input_scale.
INPUTS: dict[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
MATRICES = tuple(name for names in INPUTS.values() for name in names)


def matrices_by_input(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Return those of `INPUTS` that a model has: a plain FFN has no gate."""
    return INPUTS if config.ffn == "gated" else INPUTS | {"gate_up": ("mlp.up_proj",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedMatrix:
    """A packed matrix [N, K]: w[n, k] = scale * (code - zero) * input_scale[k].

    codes uint8 [N, K rounded up to 64 * bits / 8], scales float16 and zeros uint8 [N, ceil(K / group)],
    input_scale float32 [K] or None, input_order int32 [K] or None: the input that each column of codes is of.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    input_scale: torch.Tensor | None
    bits: int
    group: int
    num_inputs: int
    input_order: torch.Tensor | None = None

    def dense(self) -> torch.Tensor:
        """Return float32 [N, K], the full matrix that makes the same product."""
        codes = unpack(self.codes, self.bits)[:, : self.num_inputs].float()
        groups = torch.arange(self.num_inputs, device=codes.device) // self.group
        values = codes.sub_(self.zeros[:, groups]).mul_(self.scales[:, groups])
        if self.input_order is not None:
            values = torch.empty_like(values).index_copy_(1, self.input_order.long(), values)
        return values if self.input_scale is None else values.mul_(self.input_scale)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by the endings of their names in a file."""
        parts = {"codes": self.codes, "scales": self.scales, "zeros": self.zeros}
        perhaps = {"input_scale": self.input_scale, "input_order": self.input_order}
        return parts | {name: part for name, part in perhaps.items() if part is not None}

    def outputs(self, rows: range) -> QuantizedMatrix:
        """Return the matrix of these outputs."""
        part = slice(rows.start, rows.stop)
        return replace(self, codes=self.codes[part], scales=self.scales[part], zeros=self.zeros[part])

    def inputs(self, columns: range) -> QuantizedMatrix:
        """Return the matrix of these columns of codes, in groups that begin with the first of them.

        A matrix with an order is then one of the inputs that the columns are of, in their order.
        """
        group = math.gcd(self.group, columns.start)
        groups = slice(columns.start // group, -(-columns.stop // group))
        scales, zeros = (
            part.repeat_interleave(self.group // group, 1)[:, groups] for part in (self.scales, self.zeros)
        )
        part = slice(columns.start, columns.stop)
        codes = unpack(self.codes, self.bits)[:, part]
        scale = self.input_scale
        if scale is not None and self.input_order is not None:
            scale = scale[self.input_order.long()]
        return pack_matrix(codes, scales, zeros, self.bits, group, None if scale is None else scale[part])

    def with_outputs(self, order: torch.Tensor) -> QuantizedMatrix:
        """Return the matrix whose output n is the output order[n] of this one."""
        rows = order.long()
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], zeros=self.zeros[rows])


def round_to_nearest(
    weight: torch.Tensor, bits: int, group: int, input_scale: torch.Tensor | None = None
) -> QuantizedMatrix:
    """Quantise weight float [N, K] to nearest. With input_scale [K], round weight / input_scale."""
    scaled = weight.float() if input_scale is None else weight.float() / input_scale
    codes, scales, zeros = quantize_rtn(scaled, bits, group)
    return pack_matrix(codes, scales, zeros, bits, group, input_scale)


def pack_matrix(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bits: int,
    group: int,
    input_scale: torch.Tensor | None,
    input_order: torch.Tensor | None = None,
) -> QuantizedMatrix:
    """Pack codes uint8 [N, K], padded to whole tiles."""
    padding = zeros[:, -1:].expand(-1, -codes.shape[1] % TILE).clamp(max=2**bits - 1)
    return QuantizedMatrix(
        codes=pack(torch.cat([codes, padding], 1), bits),
        scales=scales,
        zeros=zeros,
        input_scale=None if input_scale is None else input_scale.float(),
        bits=bits,
        group=group,
        num_inputs=codes.shape[1],
        input_order=input_order,
    )


def common_order(orders: Mapping[str, torch.Tensor | None], where: Path) -> torch.Tensor | None:
    """Return the order of inputs that the matrices of one product have. Raises ModelError if they differ."""
    (first, order), *others = orders.items()
    for name, other in others:
        if (other is None) != (order is None) or (
            other is not None and order is not None and not torch.equal(other, order)
        ):
            raise ModelError(
                f"{where}: {first} and {name} read one input and group it in different orders (g_idx);"
                " one order is supported"
            )
    return order


@dataclass(frozen=True, slots=True, kw_only=True)
class SetInfo:
    """The metadata of a set. model: `checkpoint_digest` of the checkpoint it was made from."""

    bits: int
    group: int
    method: str
    model: str
    calibration: str = ""


def matrix_name(layer: int, matrix: str) -> str:
    """Return the full name of one of the matrices."""
    return f"model.layers.{layer}.{matrix}"


def matrix_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return (N, K) of each matrix of a layer, of all ranks together."""
    config = config.whole
    hidden, ffn, products = config.hidden_size, config.intermediate_size, matrices_by_input(config)
    sizes = [config.q_size, config.kv_size, config.kv_size]
    shapes = {name: (outputs, hidden) for name, outputs in zip(products["qkv"], sizes, strict=True)}
    shapes |= dict.fromkeys(products["o"], (hidden, config.q_size))
    shapes |= dict.fromkeys(products["gate_up"], (ffn, hidden))
    return shapes | dict.fromkeys(products["down"], (hidden, ffn))


def set_path(folder: Path, precision: str, method: str) -> Path:
    return folder / FOLDER / f"{precision}-{method}.safetensors"


def find_set(folder: Path, precision: str, method: str = "") -> Path | None:
    """Return the path of the set by this method ("": the best set there is), or None."""
    paths = (set_path(folder, precision, m) for m in ([method] if method else METHODS))
    return next((path for path in paths if path.is_file()), None)


class QuantizedSet:
    """A set opened for reading."""

    def __init__(self, path: Path, *, model: str) -> None:
        """Open a set that belongs to `model`, a checkpoint's digest.

        Raises ModelError: not readable, truncated, of another format, or made from another model.
        """
        self.path = path
        try:
            file: Any = safe_open(path, framework="pt", device="cpu")
            self._file, self._names = file, set(file.keys())
            metadata: Mapping[str, str] = file.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: damaged or truncated: {error}; {_REMEDY}") from error
        self.info, self._checksums = _read_metadata(path, metadata)
        if self.info.model != model:
            raise ModelError(
                f"{path}: made from another model ({self.info.model[:12]}, and this one is {model[:12]});"
                f" {_REMEDY}"
            )

    def matrix(
        self, name: str, shape: tuple[int, int], pause: Callable[[], object] = lambda: None
    ) -> QuantizedMatrix:
        """Read the matrix of N x K = shape, and call `pause` after each _PIECE_BYTES.

        Raises ModelError: missing, another shape, or damaged; and what `pause` raises.
        """
        info, (outputs, inputs) = self.info, shape
        groups = (outputs, -(-inputs // info.group))
        packed = (outputs, packed_size(-(-inputs // TILE) * TILE, info.bits))
        made = QuantizedMatrix(
            codes=self._read(f"{name}.codes", torch.uint8, packed),
            scales=self._read(f"{name}.scales", torch.float16, groups),
            zeros=self._read(f"{name}.zeros", torch.uint8, groups),
            input_scale=self._read(f"{name}.input_scale", torch.float32, (inputs,))
            if f"{name}.input_scale" in self._names
            else None,
            bits=info.bits,
            group=info.group,
            num_inputs=inputs,
            input_order=self._read(f"{name}.input_order", torch.int32, (inputs,))
            if f"{name}.input_order" in self._names
            else None,
        )
        if self._checksums.get(name) != checksum(made, pause):
            raise ModelError(f"{self.path}: {name} is damaged: its checksum does not match; {_REMEDY}")
        return made

    def layer(self, config: ModelConfig, layer: int) -> dict[str, QuantizedMatrix]:
        """Read all matrices of a layer. Raises ModelError."""
        shapes = matrix_shapes(config).items()
        return {matrix: self.matrix(matrix_name(layer, matrix), shape) for matrix, shape in shapes}

    def _read(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self._names:
            raise ModelError(f"{self.path}: no tensor {name} in it; {_REMEDY}")
        try:
            tensor: torch.Tensor = self._file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{self.path}: {name}: {error}; {_REMEDY}") from error
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self.path}: {name} is {tensor.dtype} {list(tensor.shape)}; this model needs"
                f" {dtype} {list(shape)}"
            )
        return tensor


_REMEDY = "make it again with `instar quantize`, or remove it"


def write_set(path: Path, info: SetInfo, matrices: Iterator[tuple[str, QuantizedMatrix]]) -> None:
    """Write a set whole or not at all: beside the path first, then renamed. Raises OSError."""
    tensors: dict[str, torch.Tensor] = {}
    checksums: dict[str, int] = {}
    for name, matrix in matrices:
        for ending, part in matrix.tensors().items():
            stored = part.contiguous().cpu()
            # q, k and v share one input_scale, and safetensors refuses shared memory.
            tensors[f"{name}.{ending}"] = stored.clone() if ending.startswith("input_") else stored
        checksums[name] = checksum(matrix)
    metadata = {
        "format": FORMAT,
        "bits": str(info.bits),
        "group": str(info.group),
        "method": info.method,
        "model": info.model,
        "calibration": info.calibration,
        "crc32": json.dumps(checksums),
    }
    with writing_whole(path) as unfinished:
        save_file(tensors, unfinished, metadata)
        unfinished.chmod(0o644)  # the library makes files that only their owner can read


@contextmanager
def writing_whole(path: Path) -> Iterator[Path]:
    """Yield the path of a file that replaces `path` when the block ends, and goes away if it raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def checksum(matrix: QuantizedMatrix, pause: Callable[[], object] = lambda: None) -> int:
    """Return the CRC-32 of all bytes of the matrix's tensors. pause: called after each _PIECE_BYTES."""
    value = 0
    for part in matrix.tensors().values():
        for piece in part.contiguous().cpu().flatten().view(torch.uint8).split(_PIECE_BYTES):
            value = zlib.crc32(piece.numpy().data, value)
            pause()
    return value


def _read_metadata(path: Path, metadata: Mapping[str, str]) -> tuple[SetInfo, dict[str, int]]:
    if metadata.get("format") != FORMAT:
        raise ModelError(
            f"{path}: no quantised set of format {FORMAT} (it says {metadata.get('format')!r}); {_REMEDY}"
        )
    try:
        info = SetInfo(
            bits=int(metadata["bits"]),
            group=int(metadata["group"]),
            method=metadata["method"],
            model=metadata["model"],
            calibration=metadata["calibration"],
        )
        checksums: dict[str, int] = json.loads(metadata["crc32"])
    except (KeyError, ValueError) as error:
        raise ModelError(f"{path}: its metadata is damaged ({error!r}); {_REMEDY}") from error
    if info.bits not in BITS.values() or info.group < 1:
        raise ModelError(f"{path}: {info.bits} bits in groups of {info.group} are not supported; {_REMEDY}")
    return info, checksums
