"""The formats of checkpoints that others quantised, as the `quantization_config` of config.json says."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from bus.precisions import Precision, precision_of_bits
from bus.variants import TWO_OF_FOUR
from kernels.quantized import GROUP_STEP

MXFP4_BLOCK = 32  # inputs that share a scale


@dataclass(frozen=True, slots=True)
class ReadyFormat:
    """One format. group 0: one scale for all inputs. zero_offset: what is added to a stored zero.

    is_ordered: inputs are grouped in the order of their activations (GPTQ's desc_act).
    """

    method: Literal["awq", "gptq"]
    bits: int
    group: int
    zero_offset: int
    is_ordered: bool = False

    @property
    def precision(self) -> Precision:
        return precision_of_bits(self.bits)


def parse_format(said: Any) -> ReadyFormat:
    """Return the format of a `quantization_config`. Raises ValueError for one that is not supported."""
    if not isinstance(said, Mapping):
        raise ValueError(f"quantization_config is a {type(said).__name__}, not an object")
    method, bits, group = said.get("quant_method", "unnamed"), said.get("bits", 0), said.get("group_size")
    if method not in ("awq", "gptq"):
        raise _unsupported(f"quant_method {method!r}", "awq and gptq, and mxfp4 for the experts of GPT-OSS")
    if bits not in ((4,) if method == "awq" else (4, 8)):
        raise _unsupported(f"{method} with bits {bits!r}", "4 (and 8 with gptq)")
    if not isinstance(group, int) or not (group == -1 or (group > 0 and group % GROUP_STEP == 0)):
        raise _unsupported(f"group_size {group!r}", f"-1 and multiples of {GROUP_STEP}")
    for name in ("dynamic", "lm_head"):
        if said.get(name):
            raise _unsupported(
                f"{name} {said[name]!r}", "one format for all matrices of layers, and no other"
            )
    if method == "awq":
        version, zero_point = said.get("version", "gemm"), said.get("zero_point", True)
        if str(version).lower() != "gemm" or not zero_point:
            raise _unsupported(f"AWQ version {version!r}, zero_point {zero_point!r}", "gemm with zeros")
        return ReadyFormat("awq", int(bits), max(group, 0), 0)
    packing = said.get("checkpoint_format", "gptq")
    if packing not in ("gptq", "gptq_v2"):
        raise _unsupported(f"GPTQ checkpoint_format {packing!r}", "gptq and gptq_v2")
    is_ordered = bool(said.get("desc_act")) and group > 0
    return ReadyFormat("gptq", int(bits), max(group, 0), 1 if packing == "gptq" else 0, is_ordered)


def has_mxfp4(said: Any) -> bool:
    """Return True if a `quantization_config` says that the experts are in MXFP4."""
    return isinstance(said, Mapping) and said.get("quant_method") == "mxfp4"


def check_mxfp4(said: Mapping[str, Any], experts: Iterable[str], sizes: Mapping[str, int]) -> None:
    """Check the `quantization_config` of a checkpoint whose `experts`, by their names, are in MXFP4.

    Raises ValueError: some of them are not, or a size of their inputs is not in whole blocks.
    """
    for name, size in sizes.items():
        if size % MXFP4_BLOCK:
            raise _unsupported(f"{name} {size} with MXFP4", f"multiples of {MXFP4_BLOCK}")
    for pattern in said.get("modules_to_not_convert") or []:
        if kept := next((name for name in experts if _names(str(pattern), name)), ""):
            raise _unsupported(
                f"modules_to_not_convert {pattern!r}, which leaves {kept} in full precision,",
                "MXFP4 for the experts of all layers",
            )


def _names(pattern: str, module: str) -> bool:
    """Return True if a pattern names the module, or one that it is in, as transformers reads it."""
    try:
        return bool(re.match(pattern, module)) or module.endswith(pattern)
    except re.error as error:
        raise ValueError(f"modules_to_not_convert {pattern!r} is no regular expression: {error}") from error


def is_packed(sparsity: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Return True if a sparse checkpoint lies without its zeros (`worker.model.sparse_weights`).

    sparsity: what its config.json says of it. Raises ValueError for a format that is not supported.
    """
    form, structure = sparsity.get("format", "dense"), sparsity.get("sparsity_structure")
    for holder in (config.get("quantization_config"), config.get("compression_config")):
        for name in ("config_groups", "kv_cache_scheme"):
            if isinstance(holder, Mapping) and holder.get(name):
                raise _unsupported(f"compressed-tensors with {name}", "sparse weights in full precision")
    if form not in ("dense", "sparse-24-bitmask"):
        raise _unsupported(f"sparsity_config with format {form!r}", "dense and sparse-24-bitmask")
    if form != "dense" and structure != TWO_OF_FOUR:
        raise _unsupported(f"{form} with sparsity_structure {structure!r}", TWO_OF_FOUR)
    return bool(form != "dense")


def _unsupported(what: str, supported: str) -> ValueError:
    return ValueError(f"{what} is not supported; supported: {supported}")
