"""How a ready checkpoint lies in its files: what its config says, and words of 32 bits back to codes."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from kernels.quantized import GROUP_STEP
from worker.model.errors import ModelError
from worker.model.sources import Checkpoint

_WORD = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word is output _AWQ_ORDER[i] of its eight
_REMEDY = "`instar quantize` can make the set from the full model"


@dataclass(frozen=True, slots=True)
class ReadyFormat:
    """group 0: one scale for all inputs. zero_offset: what is added to a stored zero."""

    method: Literal["awq", "gptq"]
    bits: int
    group: int
    zero_offset: int


@dataclass(frozen=True, slots=True)
class Groups:
    """codes uint8 [N, K], scales float16 [N, groups], zeros uint8 [N, groups]; not packed."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor

    def scaled(self, factor: torch.Tensor) -> Groups:
        """Row n times factor[n]."""
        return replace(self, scales=(self.scales.float() * factor[:, None]).half())


def read_format(folder: Path) -> ReadyFormat:
    """Raises ModelError: no checkpoint, not quantised, or in a way that is not supported, by name."""
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
    ready: Checkpoint, form: ReadyFormat, name: str, shape: tuple[int, int], group: int
) -> Groups:
    """The matrix `name` of N x K = shape, in groups of `group` inputs. Raises ModelError."""
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
    # In GPTQ's first format a stored 15 means 16, and a stored 255 means 256, which no byte holds.
    zeros = zeros.int() + form.zero_offset
    if int(zeros.max()) > 255:
        raise _unsupported(ready.folder, f"zero {int(zeros.max())} of {name}", "at most 255")
    return Groups(codes.T.contiguous(), scales.T.contiguous(), zeros.T.to(torch.uint8).contiguous())


def _unpack(words: torch.Tensor, bits: int, dim: int, order: tuple[int, ...]) -> torch.Tensor:
    """int32 words to uint8 codes along `dim`; piece i of a word is its code order[i]."""
    pieces = [words >> bits * i & (2**bits - 1) for i in range(len(order))]
    in_order = [pieces[order.index(i)] for i in range(len(order))]
    return torch.stack(in_order, dim + 1).flatten(dim, dim + 1).to(torch.uint8)


def _check_order(ready: Checkpoint, name: str, inputs: int, group: int) -> None:
    """Raises ModelError if groups are not runs of neighbouring inputs (act-order, desc_act)."""
    if not ready.has(f"{name}.g_idx"):
        return
    groups = _read(ready, f"{name}.g_idx", (inputs,), torch.int32)
    if not torch.equal(groups.long(), torch.arange(inputs) // group):
        raise _unsupported(
            ready.folder, f"{name} with groups in order of activations (desc_act)", "desc_act false"
        )


def _read(ready: Checkpoint, name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> torch.Tensor:
    tensor = ready.read(name)
    if tuple(tensor.shape) != shape or (dtype is not None and tensor.dtype != dtype):
        raise ModelError(
            f"{ready.folder}: {name} is {tensor.dtype} {list(tensor.shape)}; {list(shape)} was expected of"
            " a checkpoint of this model"
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
