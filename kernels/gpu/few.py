"""Products of a few tokens with dense weights on a GPU: the launches, and which of them is in force where.

torch's products are in force where `kernels.gpu.few_timing` has not measured another one as faster.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from kernels.gpu.few_kernels import columns_kernel, rows_kernel, sum_kernel

MOST_TOKENS: Final = 4  # each more costs a multiplication of every weight, and tensor cores take 16 for one
COUNTS: Final = (1, 2, 4)  # powers of two, to which a number of tokens is rounded up
ALIGNED: Final = 16  # elements that sizes and strides must be multiples of: else loads are of single elements
SHORT: Final = (torch.bfloat16, torch.float16)
SUM_BLOCK: Final = 256

Form = Literal["linear", "linear_t"]


@dataclass(frozen=True, slots=True, order=True)
class FewConfig:
    """A program's share of a matrix at a time; splits: programs that share the inputs of an output."""

    block_outputs: int
    block_inputs: int
    num_warps: int
    num_stages: int = 1
    splits: int = 1


# Of weights [outputs, inputs], and [inputs, outputs]. `python -m bench.gpu few` measures each.
CANDIDATES: Final[Mapping[Form, tuple[FewConfig, ...]]] = {
    "linear": (FewConfig(8, 2048, 8), FewConfig(4, 4096, 8), FewConfig(2, 2048, 4)),
    "linear_t": (FewConfig(32, 256, 8, 4), FewConfig(64, 128, 8, 2, 8), FewConfig(128, 64, 8, 2, 16)),
}


class Key(NamedTuple):
    """A kind of product that has a choice of its own; tokens: the most, a power of two."""

    form: Form
    dtype: torch.dtype
    outputs: int
    inputs: int
    tokens: int

    @classmethod
    def of(cls, form: Form, tokens: int, weight: Tensor) -> Key:
        outputs, inputs = weight.shape if form == "linear" else weight.shape[::-1]
        return cls(form, weight.dtype, outputs, inputs, triton.next_power_of_2(tokens))


IN_FORCE: Final[dict[Key, FewConfig]] = {}  # torch's product where there is none


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if x.is_meta:
        _launch_all("linear", x, weight, bias)
    if config := _in_force("linear", x, weight):
        return by_rows(x, weight, bias, config)
    return F.linear(x, weight, bias)


def linear_t(x: Tensor, weight: Tensor) -> Tensor:
    if x.is_meta:
        _launch_all("linear_t", x, weight, None)
    if config := _in_force("linear_t", x, weight):
        return by_columns(x, weight, config)
    return torch.matmul(x, weight)


def _in_force(form: Form, x: Tensor, weight: Tensor) -> FewConfig | None:
    if not IN_FORCE or not can_run(x, weight):
        return None
    return IN_FORCE.get(Key.of(form, x.shape[0], weight))


def can_run(x: Tensor, weight: Tensor) -> bool:
    """Return True for products that these kernels are compiled for."""
    if x.dim() != 2 or not 0 < x.shape[0] <= MOST_TOKENS or x.dtype != weight.dtype:
        return False
    if x.dtype not in SHORT or weight.stride(1) != 1 or x.stride(1) != 1:  # the kernels read neighbours
        return False
    return not any(size % ALIGNED for size in (*weight.shape, weight.stride(0), x.stride(0)))


def _launch_all(form: Form, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Launch every candidate on device "meta": all are measured, and any may come into force."""
    if can_run(x, weight):
        for tokens, added in itertools.product(COUNTS, {id(bias): bias, id(None): None}.values()):
            for config in CANDIDATES[form]:
                multiply(form, x.new_empty(tokens, x.shape[1]), weight, added, config)


def multiply(form: Form, x: Tensor, weight: Tensor, bias: Tensor | None, config: FewConfig) -> Tensor:
    return by_rows(x, weight, bias, config) if form == "linear" else by_columns(x, weight, config)


def by_rows(x: Tensor, weight: Tensor, bias: Tensor | None, config: FewConfig) -> Tensor:
    """Return x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N]."""
    (tokens, inputs), outputs = x.shape, weight.shape[0]
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    rows_kernel[(triton.cdiv(outputs, config.block_outputs),)](
        *(x, weight, bias, out, tokens, outputs, inputs, x.stride(0), weight.stride(0)),
        TOKENS=triton.next_power_of_2(tokens),
        BLOCK_OUTPUTS=config.block_outputs,
        BLOCK_INPUTS=config.block_inputs,
        IS_WHOLE=inputs % config.block_inputs == 0,
        HAS_BIAS=bias is not None,
        num_warps=config.num_warps,
    )
    return out


def by_columns(x: Tensor, weight: Tensor, config: FewConfig) -> Tensor:
    """Return x [T, K] times weight [K, N]: [T, N]."""
    (tokens, inputs), outputs = x.shape, weight.shape[1]
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    splits = min(config.splits, triton.cdiv(inputs, config.block_inputs))
    parts = out
    if splits > 1:
        parts = torch.empty(splits, tokens, outputs, dtype=torch.float32, device=x.device)
    columns_kernel[(triton.cdiv(outputs, config.block_outputs), splits)](
        *(x, weight, parts, tokens, splits, outputs, inputs, x.stride(0), weight.stride(0)),
        TOKENS=triton.next_power_of_2(tokens),
        BLOCK_OUTPUTS=config.block_outputs,
        BLOCK_INPUTS=config.block_inputs,
        IS_WHOLE=inputs % config.block_inputs == 0,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
    )
    if splits > 1:
        sum_kernel[(triton.cdiv(outputs, SUM_BLOCK), tokens)](
            *(parts, out, splits, tokens, outputs), BLOCK=SUM_BLOCK, num_warps=2
        )
    return out
