"""The public calls: shapes, meaning, errors. Each runs the implementation for its tensors' device."""

from __future__ import annotations

import torch

from kernels.plan import AttentionPlan
from kernels.quantized import QuantizedWeight
from kernels.registry import pick


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x [..., H] * rsqrt(mean(x^2) + eps) * weight [H], contiguous (RMSNorm, Zhang & Sennrich 2019).

    Leading dimensions are free: norms of single heads (Qwen3) pass [T, Hq, D].
    """
    result: torch.Tensor = pick("rms_norm", x)(x, weight, eps)
    return result


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add x [T, H] to residual [T, H] in place; return rms_norm(residual, weight, eps)."""
    result: torch.Tensor = pick("add_rms_norm", x)(x, residual, weight, eps)
    return result


def rotary(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Rotate q [T, Hq, D] and k [T, Hkv, D] in place by positions int64 [T] (RoFormer, Su et al. 2021).

    cos_sin float32 [max_position, D]: cosines in the first half, sines in the second. Hugging Face's
    convention: dimension i pairs with i + D / 2 ("rotate half").
    """
    pick("rotary", q)(q, k, positions, cos_sin)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return gate * sigmoid(gate) * up [T, I], a new tensor (SwiGLU, Shazeer 2020).

    gate and up [T, I] may be views of one buffer [T, 2I].
    """
    result: torch.Tensor = pick("silu_mul", gate)(gate, up)
    return result


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N]."""
    result: torch.Tensor = pick("linear", x)(x, weight, bias)
    return result


def stacked_linear(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return x [T, K] times each of the M matrices weights [M, N, K], transposed: [T, M, N].

    The matrices may have other data between them. The first two dimensions of the result have any strides.
    """
    result: torch.Tensor = pick("stacked_linear", x)(x, weights)
    return result


def linear_t(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x [T, K] times weight [K, N], which is stored with its inputs outermost: [T, N]."""
    result: torch.Tensor = pick("linear_t", x)(x, weight)
    return result


def quantized_linear(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x [T, K] times the matrix [N, K] that `weight` stands for, transposed, plus bias [N]: [T, N].

    If the weight has an input_scale, x is multiplied by it first. Split by outputs, output n of unit u is
    column u * Nu + n. Raises ValueError if x or bias does not fit the weight.
    """
    if x.dim() != 2 or x.shape[1] != weight.num_inputs:
        raise ValueError(f"x is {list(x.shape)}; the weight takes [tokens, {weight.num_inputs}]")
    if bias is not None and bias.shape != (weight.num_outputs,):
        raise ValueError(f"bias is {list(bias.shape)}; the weight has {weight.num_outputs} outputs")
    result: torch.Tensor = pick("quantized_linear", x)(x, weight, bias)
    return result


def store_kv(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write k and v [T, Hkv, D] into the cache kv [B, Hkv, 2, bt, D] at slot_mapping int64 [T].

    A slot is block_id * bt + offset; no two tokens may have the same slot.
    """
    pick("store_kv", k)(k, v, kv, slot_mapping)


def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    out: torch.Tensor | None = None,
    sliding_window: int = 0,
) -> torch.Tensor:
    """Attend causally from the step's tokens to their sequences' blocks (PagedAttention, Kwon et al. 2023).

    q [T, Hq, D]; kv [B, Hkv, 2, bt, D] with any strides over the first four dimensions; Hq a multiple of
    Hkv: the heads of a group share one KV head. `store_kv` must have written this step's keys and values.
    sliding_window w > 0: a query sees itself and the w - 1 tokens before it. Returns out [T, Hq, D].
    """
    result: torch.Tensor = pick("paged_attention", q)(q, kv, plan, scale, out, sliding_window)
    return result


def copy_blocks(kv: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy kv[src[i]] to kv[dst[i]] for block ids int64 [n]. No block may be both a source and a target."""
    pick("copy_blocks", kv)(kv, src, dst)
